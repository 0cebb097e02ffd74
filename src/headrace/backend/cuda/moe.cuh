// A mixture of experts: each pair of a token and an expert is a product of its own.
//
// chosen int32 [tokens, PER_TOKEN]; weights of experts: one matrix after the other. With SHARED there is one more expert
// that all tokens have, its weight the sigmoid of logits[token, num_experts]; the rest of logits is the router's.

template <typename T>
struct Experts {
  const void* weight;
  const T* scales;
  const T* biases;
  const void* shared_weight;
  const T* shared_scales;
  const T* shared_biases;

  // of `expert`, [num_rows, K] each; the shared one is number num_experts
  template <int BITS, int GROUP>
  __device__ Matrix<T> of(int expert, int num_experts, int num_rows, int K) const {
    if (expert == num_experts) return {shared_weight, shared_scales, shared_biases, num_rows};
    const long before = static_cast<long>(expert) * num_rows * K;
    return {static_cast<const char*>(weight) + before * BITS / 8, scales + before / GROUP, biases + before / GROUP, num_rows};
  }
};

template <int PER_TOKEN, bool SHARED, typename T>
__device__ float weight_of(int pair, const float* weights, const T* logits, int num_experts, int width) {
  const int token = pair / (PER_TOKEN + SHARED), j = pair % (PER_TOKEN + SHARED);
  return j < PER_TOKEN ? weights[token * PER_TOKEN + j]
                       : sigmoid(static_cast<float>(logits[static_cast<long>(token) * width + num_experts]));
}

// hidden [pairs, I] = silu(gate) · up of x [tokens, K]; a block makes 16 features of up to 8 · TOKENS pairs.
template <typename T, int BITS, int GROUP, int EACH, int TOKENS, int STAGES, int WARPS>
__device__ void gate_up(const T* x, const Pairs pairs, const Experts<T> gate, const Experts<T> up, int num_experts, int I,
                        int K, T* hidden) {
  using Part = Stream<T, BITS, GROUP, 2, TOKENS, STAGES>;
  extern __shared__ uint4 staged[];
  if (!pairs.count) return;
  const int warp = threadIdx.x / 32, first = blockIdx.x * 16;
  const Matrix<T> matrices[2] = {gate.template of<BITS, GROUP>(pairs.expert, num_experts, I, K),
                                 up.template of<BITS, GROUP>(pairs.expert, num_experts, I, K)};
  const int rows[2] = {first, first};
  float sum[2][TOKENS][4] = {};
  auto token_at = [=](int i) { return x + static_cast<long>(pairs[i] / EACH) * K; };
  Part::run(sum, matrices, rows, token_at, pairs.count, K, warp, WARPS, staged + warp * Part::WARP);
  float* sums = reinterpret_cast<float*>(staged);
  Part::publish(sum, 1.0f, sums);
#pragma unroll 1
  for (int i = threadIdx.x; i < pairs.count * 16; i += 32 * WARPS) {
    const int f = i % 16;
    if (first + f >= I) continue;
    const float made = Part::template total<WARPS>(sums, i / 16, f), value = Part::template total<WARPS>(sums, i / 16, 16 + f);
    hidden[static_cast<long>(pairs[i / 16]) * I + first + f] = gated<T>(made, value);
  }
}

// y [tokens, N] = Σ weight · down of hidden, rounded, and residual [tokens, N] if there is one; a block makes 16 features of
// a token, each warp one expert.
template <typename T, int BITS, int GROUP, int PER_TOKEN, bool SHARED, int STAGES>
__device__ void down_sum(const T* hidden, const int* chosen, const float* weights, const T* logits, int num_experts,
                         int width, const Experts<T> down, int N, int I, const T* residual, T* y) {
  using Part = Stream<T, BITS, GROUP, 1, 1, STAGES>;
  extern __shared__ uint4 staged[];
  const int j = threadIdx.x / 32, first = blockIdx.x * 16, token = blockIdx.y, pair = token * (PER_TOKEN + SHARED) + j;
  const int expert = expert_of<PER_TOKEN, SHARED>(chosen, num_experts, pair);
  const Matrix<T> matrices[1] = {down.template of<BITS, GROUP>(expert, num_experts, N, I)};
  const int rows[1] = {first};
  float sum[1][1][4] = {};
  auto token_at = [=](int) { return hidden + static_cast<long>(pair) * I; };
  Part::run(sum, matrices, rows, token_at, 1, I, 0, 1, staged + j * Part::WARP);
  float* sums = reinterpret_cast<float*>(staged);
  Part::publish(sum, weight_of<PER_TOKEN, SHARED>(pair, weights, logits, num_experts, width), sums);
  const int f = threadIdx.x;
  if (f < 16 && first + f < N) {
    const long at = static_cast<long>(token) * N + first + f;
    y[at] = with_residual(Part::template total<PER_TOKEN + SHARED>(sums, 0, f), residual, at);
  }
}

// made float32 [pairs, N] = weight · down of hidden; a warp makes 32 features of up to 8 · TOKENS pairs, with the sums of
// down_sum.
template <typename T, int BITS, int GROUP, int PER_TOKEN, bool SHARED, int TOKENS, int STAGES>
__device__ void down_pairs(const T* hidden, const Pairs pairs, const float* weights, const T* logits, int num_experts,
                           int width, const Experts<T> down, int N, int I, float* made) {
  using Part = Stream<T, BITS, GROUP, 2, TOKENS, STAGES>;
  extern __shared__ uint4 staged[];
  const int warp = threadIdx.x / 32, r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int first = (blockIdx.x * (blockDim.x / 32) + warp) * 32;
  if (!pairs.count || first >= N) return;
  const Matrix<T> matrix = down.template of<BITS, GROUP>(pairs.expert, num_experts, N, I), matrices[2] = {matrix, matrix};
  const int rows[2] = {first, first + 16};
  float sum[2][TOKENS][4] = {};
  auto token_at = [=](int i) { return hidden + static_cast<long>(pairs[i]) * I; };
  Part::run(sum, matrices, rows, token_at, pairs.count, I, 0, 1, staged + warp * Part::WARP);
#pragma unroll
  for (int j = 0; j < TOKENS; j++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int token = j * 8 + t * 2 + c;
      if (token >= pairs.count) continue;
      const int pair = pairs[token];
      const float weight = weight_of<PER_TOKEN, SHARED>(pair, weights, logits, num_experts, width);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int f = first + i * 8 + r;
        if (f < N) made[static_cast<long>(pair) * N + f] = sum[i / 2][j][i % 2 * 2 + c] * weight;
      }
    }
}
