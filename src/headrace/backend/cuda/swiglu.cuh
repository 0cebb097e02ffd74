// silu(gate) * value, two neighbours a thread; projected [rows, 2 * WIDTH], gates first.

template <typename T, int WIDTH>
__device__ void swiglu(const T* projected, T* out) {
  const long row = blockIdx.y;
  const int at = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= WIDTH) return;
  struct alignas(2 * sizeof(T)) Two { T of[2]; };
  const Two gate = *reinterpret_cast<const Two*>(projected + row * 2 * WIDTH + at);
  const Two value = *reinterpret_cast<const Two*>(projected + row * 2 * WIDTH + WIDTH + at);
  Two found;
  for (int i = 0; i < 2; i++)
    found.of[i] = gated<T>(static_cast<float>(gate.of[i]), static_cast<float>(value.of[i]));
  *reinterpret_cast<Two*>(out + row * WIDTH + at) = found;
}
