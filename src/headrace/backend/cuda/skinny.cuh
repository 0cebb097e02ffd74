// y [M, N] of x [M, K] and weights [N, K], for few tokens M; a block makes 16 · TILES features, its warps share K.

template <typename T, int BITS, int GROUP, int TILES, int TOKENS, int STAGES>
__device__ void skinny(const T* x, int M, int N, int K, const void* weight, const T* scales, const T* biases,
                       T* y) {
  using Part = Stream<T, BITS, GROUP, TILES, TOKENS, STAGES>;
  constexpr int FEATURES = 16 * TILES;
  extern __shared__ uint4 staged[];
  const int warp = threadIdx.x / 32, first = blockIdx.x * FEATURES;
  Matrix<T> matrices[TILES];
  int rows[TILES];
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    matrices[i] = {weight, scales, biases, N};
    rows[i] = first + i * 16;
  }
  float sum[TILES][TOKENS][4] = {};
  Part::run(sum, matrices, rows, x, M, K, warp, blockDim.x / 32, staged + warp * Part::WARP);
  float* sums = reinterpret_cast<float*>(staged);
  Part::publish(sum, 1.0f, sums);
  for (int i = threadIdx.x; i < M * FEATURES; i += blockDim.x) {
    const int token = i / FEATURES, f = i % FEATURES;
    if (first + f < N) y[static_cast<long>(token) * N + first + f] = static_cast<T>(Part::total(sums, token, f));
  }
}
