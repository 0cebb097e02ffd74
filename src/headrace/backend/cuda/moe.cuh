// A mixture of experts for a few tokens: each of a token's experts is a product of its own.
//
// chosen int32 [tokens, PER_TOKEN]; weights of experts: one matrix after the other. With SHARED there is one more expert
// that all tokens have, its weight the sigmoid of logits[token, num_experts]; the rest of logits is the router's.

template <typename T>
struct Experts {
  const void* weight;
  const T* scales;
  const T* biases;

  // of `expert`, [num_rows, K] each
  template <int BITS, int GROUP>
  __device__ Matrix<T> of(int expert, int num_rows, int K) const {
    const long before = static_cast<long>(expert) * num_rows * K;
    return {static_cast<const char*>(weight) + before * BITS / 8, scales + before / GROUP, biases + before / GROUP, num_rows};
  }
};

// hidden [tokens, PER_TOKEN + SHARED, I] = silu(gate) · up of x [tokens, K]; a block makes 16 features of one expert.
template <typename T, int BITS, int GROUP, int PER_TOKEN, int STAGES, bool SHARED>
__device__ void gate_up(const T* x, const int* chosen, const Experts<T> gate, const Experts<T> up,
                        const Experts<T> shared_gate, const Experts<T> shared_up, int I, int K, T* hidden) {
  using Part = Stream<T, BITS, GROUP, 2, 1, STAGES>;
  constexpr int EACH = PER_TOKEN + SHARED;
  extern __shared__ uint4 staged[];
  const int warp = threadIdx.x / 32, first = blockIdx.x * 16, token = blockIdx.y / EACH, j = blockIdx.y % EACH;
  const bool is_shared = SHARED && j == PER_TOKEN;
  const int expert = is_shared ? 0 : chosen[token * PER_TOKEN + j];
  const Matrix<T> matrices[2] = {(is_shared ? shared_gate : gate).template of<BITS, GROUP>(expert, I, K),
                                 (is_shared ? shared_up : up).template of<BITS, GROUP>(expert, I, K)};
  const int rows[2] = {first, first};
  float sum[2][1][4] = {};
  Part::run(sum, matrices, rows, x + static_cast<long>(token) * K, 1, K, warp, blockDim.x / 32, staged + warp * Part::WARP);
  float* sums = reinterpret_cast<float*>(staged);
  Part::publish(sum, 1.0f, sums);
  const int f = threadIdx.x;
  if (f < 16 && first + f < I)
    hidden[static_cast<long>(blockIdx.y) * I + first + f] = static_cast<T>(
        rounded<T>(silu(rounded<T>(Part::total(sums, 0, f)))) * rounded<T>(Part::total(sums, 0, 16 + f)));
}

// y [tokens, N] = Σ weight · down of hidden; a block makes 16 features, each warp one expert.
template <typename T, int BITS, int GROUP, int PER_TOKEN, int STAGES, bool SHARED>
__device__ void down_sum(const T* hidden, const int* chosen, const float* weights, const T* logits, int num_experts,
                         int width, const Experts<T> down, const Experts<T> shared_down, int N, int I, T* y) {
  using Part = Stream<T, BITS, GROUP, 1, 1, STAGES>;
  constexpr int EACH = PER_TOKEN + SHARED;
  extern __shared__ uint4 staged[];
  const int j = threadIdx.x / 32, first = blockIdx.x * 16, token = blockIdx.y;
  const bool is_shared = SHARED && j == PER_TOKEN;
  const int expert = is_shared ? 0 : chosen[token * PER_TOKEN + j];
  const float weight = is_shared ? sigmoid(static_cast<float>(logits[static_cast<long>(token) * width + num_experts]))
                                 : weights[token * PER_TOKEN + j];
  const Matrix<T> matrices[1] = {(is_shared ? shared_down : down).template of<BITS, GROUP>(expert, N, I)};
  const int rows[1] = {first};
  float sum[1][1][4] = {};
  Part::run(sum, matrices, rows, hidden + (static_cast<long>(token) * EACH + j) * I, 1, I, 0, 1, staged + j * Part::WARP);
  float* sums = reinterpret_cast<float*>(staged);
  Part::publish(sum, weight, sums);
  const int f = threadIdx.x;
  if (f < 16 && first + f < N) y[static_cast<long>(token) * N + first + f] = static_cast<T>(Part::total(sums, 0, f));
}
