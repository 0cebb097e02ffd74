// y [M, N] of x [M, K] and weights [N, K]; a block makes 16 · TILES features of 8 · TOKENS tokens, its warps share K. Blocks
// of the same features are neighbours: what one has read of the weights others find in the cache.

template <typename T, int BITS, int GROUP, int TILES, int TOKENS, int STAGES>
__device__ void skinny(const T* x, int M, int N, int K, const void* weight, const T* scales, const T* biases,
                       T* y) {
  using Part = Stream<T, BITS, GROUP, TILES, TOKENS, STAGES>;
  constexpr int FEATURES = 16 * TILES;
  extern __shared__ uint4 staged[];
  const int warp = threadIdx.x / 32, first = blockIdx.y * FEATURES;
  const int before = blockIdx.x * 8 * TOKENS, num_tokens = min(M - before, 8 * TOKENS);
  Matrix<T> matrices[TILES];
  int rows[TILES];
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    matrices[i] = {weight, scales, biases, N};
    rows[i] = first + i * 16;
  }
  float sum[TILES][TOKENS][4] = {};
  auto token_at = [=](int i) { return x + static_cast<long>(before + i) * K; };
  Part::run(sum, matrices, rows, token_at, num_tokens, K, warp, blockDim.x / 32, staged + warp * Part::WARP);
  float* sums = reinterpret_cast<float*>(staged);
  Part::publish(sum, 1.0f, sums);
  for (int i = threadIdx.x; i < num_tokens * FEATURES; i += blockDim.x) {
    const int token = i / FEATURES, f = i % FEATURES;
    if (first + f < N)
      y[static_cast<long>(before + token) * N + first + f] = static_cast<T>(Part::total(sums, token, f));
  }
}
