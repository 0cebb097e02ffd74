// Small functions that the kernels share.

template <typename T>
__device__ float rounded(float x) {
  return static_cast<float>(static_cast<T>(x));
}

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ float silu(float x) { return x / (1.0f + expf(-x)); }

// What a vector is to be multiplied by to have length 1.
__device__ float unit_scale(float sum_of_squares) { return rsqrtf(sum_of_squares + 1e-6f); }

template <int WIDTH>
__device__ float sum_over(float x) {
#pragma unroll
  for (int offset = WIDTH / 2; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// exp(-exp(A) softplus(a + dt))
__device__ float decay_of(float a, float a_log, float dt_bias) {
  const float x = a + dt_bias;
  const float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
  return expf(-expf(a_log) * softplus);
}
