// Types and small functions that the kernels share. No header of CUDA's is included: reading them takes a second.

#define INFINITY __int_as_float(0x7f800000)

struct bfloat16 {
  unsigned short bits;
  bfloat16() = default;
  __device__ explicit bfloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ operator float() const { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
};

struct float16 {
  unsigned short bits;
  float16() = default;
  __device__ explicit float16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};

template <typename T>
__device__ float rounded(float x) {
  return static_cast<float>(static_cast<T>(x));
}

// A sum that is rounded before residual[at], if there is one, is added to it.
template <typename T>
__device__ T with_residual(float sum, const T* residual, long at) {
  return static_cast<T>(residual ? rounded<T>(sum) + static_cast<float>(residual[at]) : sum);
}

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ float silu(float x) { return x / (1.0f + expf(-x)); }

// silu(gate) · value, each rounded before.
template <typename T>
__device__ T gated(float gate, float value) {
  return static_cast<T>(rounded<T>(silu(rounded<T>(gate))) * rounded<T>(value));
}

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
