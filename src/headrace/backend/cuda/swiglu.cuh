// silu(gate) * value; projected [rows, 2 * WIDTH], gates first. A thread takes two neighbours, or one where an odd width
// puts pairs at places that are no multiple of their size.

template <typename T, int WIDTH>
__device__ void swiglu(const T* projected, T* out) {
  constexpr int EACH = WIDTH % 2 ? 1 : 2;
  struct alignas(EACH * sizeof(T)) Some { T of[EACH]; };
  const long row = blockIdx.y;
  const int at = EACH * (blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= WIDTH) return;
  const Some gate = *reinterpret_cast<const Some*>(projected + row * 2 * WIDTH + at);
  const Some value = *reinterpret_cast<const Some*>(projected + row * 2 * WIDTH + WIDTH + at);
  Some found;
  for (int i = 0; i < EACH; i++)
    found.of[i] = gated<T>(static_cast<float>(gate.of[i]), static_cast<float>(value.of[i]));
  *reinterpret_cast<Some*>(out + row * WIDTH + at) = found;
}
