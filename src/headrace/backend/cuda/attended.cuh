// What attention.cuh and chunk_attention.cuh share. Scores are in powers of two; softmax weights, and sums of them and of values
// times them, are relative to the highest score so far.

// The weight of a score; 0 for -inf, the score of a key that is not seen and the highest one of no keys.
__device__ float relative(float top, float maximum) { return top == -INFINITY ? 0.0f : exp2f(top - maximum); }

// Two sums, brought to one maximum by factors. It is rounded in the same places wherever this is inlined.
__device__ float put_together(float sum, float by, float added, float by_added) {
  return __fmaf_rn(added, by_added, __fmul_rn(sum, by));
}

__device__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Where results go: out [T, HQ, D]. sinks [HQ]. gates [T, GATE_WIDTH], a head's every GATE_STRIDE.
template <typename T, int HQ, int D, bool SINKS, bool GATED, int GATE_WIDTH, int GATE_STRIDE>
struct Output {
  const T* sinks;
  const T* gates;
  T* out;

  // By what complete sums are multiplied.
  __device__ float factor(int head, float maximum, float total) const {
    if (!SINKS) return 1.0f / total;
    const float sink = static_cast<float>(sinks[head]) * 1.44269504f, higher = fmaxf(sink, maximum);
    const float by = exp2f(maximum - higher);
    return by / __fmaf_rn(total, by, exp2f(sink - higher));
  }

  // N neighbouring dimensions from d on.
  template <int N>
  __device__ void put(int token, int head, int d, const float (&sums)[N], float by) const {
    Vec<T, N> value;
#pragma unroll
    for (int j = 0; j < N; j++) {
      float x = sums[j] * by;
      if (GATED) x = rounded<T>(x) * rounded<T>(sigmoid(static_cast<float>(gates[static_cast<long>(token) * GATE_WIDTH + head * GATE_STRIDE + d + j])));
      value.of[j] = static_cast<T>(x);
    }
    *reinterpret_cast<Vec<T, N>*>(out + (static_cast<long>(token) * HQ + head) * D + d) = value;
  }
};
