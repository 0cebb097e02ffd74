// y [M, N] of x [M, K] and weights [N, K]; a block makes 16 · TILES features of 8 · TOKENS tokens, its warps share K. Blocks
// of the same features are neighbours: what one has read of the weights others find in the cache.
//
// residual [M, N]: what is added to y once that is rounded; may be none. GATED: of features that are gates and then as many
// values y [M, N / 2] = silu(gate) · value is made, each rounded before; half of each of a block's tiles are gates.

template <typename T, int BITS, int GROUP, int TILES, int TOKENS, int STAGES, int WARPS, bool GATED>
__device__ void skinny(const T* x, int M, int N, int K, const void* weight, const T* scales, const T* biases,
                       const T* residual, T* y) {
  using Part = Stream<T, BITS, GROUP, TILES, TOKENS, STAGES>;
  constexpr int EACH = GATED ? 8 : 16, FEATURES = EACH * TILES;
  extern __shared__ uint4 staged[];
  const int warp = threadIdx.x / 32, first = blockIdx.y * FEATURES, width = GATED ? N / 2 : N;
  const int before = blockIdx.x * 8 * TOKENS, num_tokens = min(M - before, 8 * TOKENS);
  Matrix<T> matrices[TILES];
  int rows[TILES];
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    matrices[i] = {weight, scales, biases, N, GATED ? width : 8};
    rows[i] = first + i * EACH;
  }
  float sum[TILES][TOKENS][4] = {};
  auto token_at = [=](int i) { return x + static_cast<long>(before + i) * K; };
  Part::run(sum, matrices, rows, token_at, num_tokens, K, warp, WARPS, staged + warp * Part::WARP);
  float* sums = reinterpret_cast<float*>(staged);
  Part::publish(sum, 1.0f, sums);
#pragma unroll 1
  for (int i = threadIdx.x; i < num_tokens * FEATURES; i += 32 * WARPS) {
    const int token = i / FEATURES, f = i % FEATURES;
    if (first + f >= width) continue;
    const int row = f / EACH * 16 + f % EACH;
    const long at = static_cast<long>(before + token) * width + first + f;
    float made = Part::template total<WARPS>(sums, token, row);
    if (GATED) made = gated<T>(made, Part::template total<WARPS>(sums, token, row + 8));
    y[at] = with_residual(made, residual, at);
  }
}
