// silu(gate) * value; projected [rows, 2 * WIDTH], gates first. A thread takes EACH neighbours; EACH divides WIDTH.

template <typename T, int WIDTH, int EACH>
__device__ void swiglu(const T* projected, T* out) {
  using Own = Vec<T, EACH>;
  const long row = blockIdx.y;
  const int at = EACH * (blockIdx.x * blockDim.x + threadIdx.x);
  if (at >= WIDTH) return;
  const Own gate = *reinterpret_cast<const Own*>(projected + row * 2 * WIDTH + at);
  const Own value = *reinterpret_cast<const Own*>(projected + row * 2 * WIDTH + WIDTH + at);
  float acting[EACH];
#pragma unroll
  for (int i = 0; i < EACH; i++) acting[i] = gate[i];
  silu(acting);
  Own found;
#pragma unroll
  for (int i = 0; i < EACH; i++) found.of[i] = static_cast<T>(rounded<T>(acting[i]) * value[i]);
  *reinterpret_cast<Own*>(out + row * WIDTH + at) = found;
}
