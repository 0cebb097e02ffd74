// sum = x + y of [T, WIDTH], and its RMS norm times weight [WIDTH]. A block makes one token, and keeps its sum in registers.
// As MLX does, what is normed is the rounded sum, and is rounded again before it is multiplied by the weight.

template <typename T, int WIDTH, int THREADS, int VECTOR>
__device__ void sum_norm(const T* x, const T* y, const T* weight, float eps, T* sum, T* normed) {
  using Vector = Vec<T, VECTOR>;
  constexpr int NUM_VECTORS = WIDTH / VECTOR, PER_THREAD = (NUM_VECTORS + THREADS - 1) / THREADS;
  __shared__ float sums[THREADS / 32];
  const long row = static_cast<long>(blockIdx.x) * NUM_VECTORS;
  const int lane = threadIdx.x % 32;
  Vector by[PER_THREAD];
  float kept[PER_THREAD][VECTOR];
  float squares = 0;
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const int at = i * THREADS + threadIdx.x;
    if (at >= NUM_VECTORS) break;
    const Vector own = reinterpret_cast<const Vector*>(x)[row + at], added = reinterpret_cast<const Vector*>(y)[row + at];
    by[i] = reinterpret_cast<const Vector*>(weight)[at];
    Vector found;
#pragma unroll
    for (int j = 0; j < VECTOR; j++) {
      kept[i][j] = rounded<T>(own[j] + added[j]);
      found.of[j] = static_cast<T>(kept[i][j]);
      squares += kept[i][j] * kept[i][j];
    }
    reinterpret_cast<Vector*>(sum)[row + at] = found;
  }
  squares = sum_over<32>(squares);
  if (lane == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  const float scale = rsqrtf(sum_over<32>(lane < THREADS / 32 ? sums[lane] : 0.0f) / WIDTH + eps);
#pragma unroll
  for (int i = 0; i < PER_THREAD; i++) {
    const int at = i * THREADS + threadIdx.x;
    if (at >= NUM_VECTORS) break;
    Vector found;
#pragma unroll
    for (int j = 0; j < VECTOR; j++) found.of[j] = static_cast<T>(rounded<T>(kept[i][j] * scale) * by[i][j]);
    reinterpret_cast<Vector*>(normed)[row + at] = found;
  }
}
