// sum = x + y of [T, WIDTH], and its RMS norm times weight [WIDTH]. A block makes one token, and keeps its sum in registers.
// As MLX does, what is normed is the rounded sum, and is rounded again before it is multiplied by the weight.

template <typename T, int WIDTH, int THREADS, int VECTOR>
__device__ void sum_norm(const T* x, const T* y, const T* weight, float eps, T* sum, T* normed) {
  struct alignas(VECTOR * sizeof(T)) Vector { T of[VECTOR]; };
  constexpr int NUM_VECTORS = WIDTH / VECTOR, PER_THREAD = (NUM_VECTORS + THREADS - 1) / THREADS;
  __shared__ float sums[THREADS / 32];
  const long row = static_cast<long>(blockIdx.x) * NUM_VECTORS;
  const int lane = threadIdx.x % 32;
  Vector kept[PER_THREAD], by[PER_THREAD];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const int at = i * THREADS + threadIdx.x;
    if (at >= NUM_VECTORS) break;
    kept[i] = reinterpret_cast<const Vector*>(x)[row + at];
    const Vector added = reinterpret_cast<const Vector*>(y)[row + at];
    by[i] = reinterpret_cast<const Vector*>(weight)[at];
#pragma unroll
    for (int j = 0; j < VECTOR; j++) {
      kept[i].of[j] = static_cast<T>(static_cast<float>(kept[i].of[j]) + static_cast<float>(added.of[j]));
      const float number = static_cast<float>(kept[i].of[j]);
      squares += number * number;
    }
    reinterpret_cast<Vector*>(sum)[row + at] = kept[i];
  }
  squares = sum_over<32>(squares);
  if (lane == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  const float scale = rsqrtf(sum_over<32>(lane < THREADS / 32 ? sums[lane] : 0.0f) / WIDTH + eps);
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const int at = i * THREADS + threadIdx.x;
    if (at >= NUM_VECTORS) break;
#pragma unroll
    for (int j = 0; j < VECTOR; j++) {
      const float number = rounded<T>(static_cast<float>(kept[i].of[j]) * scale);
      kept[i].of[j] = static_cast<T>(number * static_cast<float>(by[i].of[j]));
    }
    reinterpret_cast<Vector*>(normed)[row + at] = kept[i];
  }
}
