// y [M, N] of x [M, K] and weights [N, K], for few tokens M; a block makes 16 · TILES features, its warps share K.
//
// ADDS: residual [M, N] is added. SWIGLU: the weights are gates, then values, [2 N, K], and y is silu(gate) · value.

template <typename T, int BITS, int GROUP, int TILES, int TOKENS, int STAGES, bool SWIGLU, bool ADDS>
__device__ void skinny(const T* x, int M, int N, int K, const void* weight, const T* scales, const T* biases,
                       const T* residual, T* y) {
  using Part = Stream<T, BITS, GROUP, TILES, TOKENS, STAGES>;
  constexpr int FEATURES = SWIGLU ? 8 * TILES : 16 * TILES;
  extern __shared__ uint4 staged[];
  const int warp = threadIdx.x / 32, first = blockIdx.x * FEATURES;
  Matrix<T> matrices[TILES];
  int rows[TILES];
#pragma unroll
  for (int i = 0; i < TILES; i++) {
    const bool is_value = SWIGLU && i >= TILES / 2;
    const long before = is_value ? static_cast<long>(N) * K : 0;
    matrices[i] = {static_cast<const char*>(weight) + before * BITS / 8, scales + before / GROUP, biases + before / GROUP, N};
    rows[i] = first + (is_value ? i - TILES / 2 : i) * 16;
  }
  float sum[TILES][TOKENS][4] = {};
  Part::run(sum, matrices, rows, x, M, K, warp, blockDim.x / 32, staged + warp * Part::WARP);
  float* sums = reinterpret_cast<float*>(staged);
  Part::publish(sum, 1.0f, sums);
  for (int i = threadIdx.x; i < M * FEATURES; i += blockDim.x) {
    const int token = i / FEATURES, f = i % FEATURES;
    if (first + f >= N) continue;
    const long at = static_cast<long>(token) * N + first + f;
    float found = rounded<T>(Part::total(sums, token, f));
    if (SWIGLU) found = rounded<T>(silu(found)) * rounded<T>(Part::total(sums, token, FEATURES + f));
    if (ADDS) found = rounded<T>(found) + static_cast<float>(residual[at]);
    y[at] = static_cast<T>(found);
  }
}
