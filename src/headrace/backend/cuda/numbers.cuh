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

// The conversion of two numbers runs at four times the rate of that of one, and leaves the upper one where a float has its bits.
template <>
__device__ float rounded<bfloat16>(float b) {
  const float a = 0;
  unsigned two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(b), "f"(a));
  return __uint_as_float(two);
}

template <typename T>
constexpr bool IS_BFLOAT = false;
template <>
constexpr bool IS_BFLOAT<bfloat16> = true;

// N neighbouring numbers, read and written at once.
template <typename T, int N>
struct alignas(N * sizeof(T)) Vec {
  T of[N];

  __device__ float operator[](int i) const {
    if constexpr (IS_BFLOAT<T> && N % 2 == 0) {
      const unsigned two = reinterpret_cast<const unsigned*>(of)[i / 2];
      return __uint_as_float(i % 2 ? two & 0xffff0000u : two << 16);
    } else {
      return static_cast<float>(of[i]);
    }
  }
};

// A sum that is rounded before residual[at], if there is one, is added to it.
template <typename T>
__device__ T with_residual(float sum, const T* residual, long at) {
  return static_cast<T>(residual ? rounded<T>(sum) + static_cast<float>(residual[at]) : sum);
}

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ float silu(float x) { return x / (1.0f + expf(-x)); }

// The same bits for several numbers. A division branches for operands near the ends of the range, and the compiler moves nothing
// across the branch; here one branch is for all. The quotient has the bits of a division: it is x times a reciprocal refined by
// one step of Newton's, corrected by its remainder, which is taken negative so that zeros keep their sign.
template <int N>
__device__ void silu(float (&x)[N]) {
  constexpr float SAFE = 64.0f;
  float found[N], largest = 0;
#pragma unroll
  for (int i = 0; i < N; i++) {
    const float divisor = 1.0f + expf(-x[i]);
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
    inverse = __fmaf_rn(inverse, __fmaf_rn(-divisor, inverse, 1.0f), inverse);
    const float quotient = __fmul_rn(x[i], inverse);
    found[i] = __fmaf_rn(-inverse, __fmaf_rn(divisor, quotient, -x[i]), quotient);
    largest = fmaxf(largest, fabsf(x[i]));
  }
  if (!(largest <= SAFE)) {
#pragma unroll
    for (int i = 0; i < N; i++) found[i] = silu(x[i]);
  }
#pragma unroll
  for (int i = 0; i < N; i++) x[i] = found[i];
}

// silu(gate) · value, each rounded before.
template <typename T>
__device__ T gated(float gate, float value) {
  return static_cast<T>(rounded<T>(silu(rounded<T>(gate))) * rounded<T>(value));
}

// The factor that gives a vector length 1.
__device__ float unit_scale(float sum_of_squares) { return rsqrtf(sum_of_squares + 1e-6f); }

template <int WIDTH>
__device__ float sum_over(float x) {
#pragma unroll
  for (int offset = WIDTH / 2; offset; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// The bits of sum_over<32>, by 32 / N lanes that have N neighbours of its 32 numbers each.
template <int N>
__device__ float sum_of_neighbours(float (&x)[N]) {
  static_assert(N <= 2, "only the last step is within a lane");
#pragma unroll
  for (int offset = 16 / N; offset; offset /= 2)
#pragma unroll
    for (int i = 0; i < N; i++) x[i] += __shfl_xor_sync(~0u, x[i], offset);
  return N == 1 ? x[0] : x[0] + x[N - 1];
}

// exp(-exp(A) softplus(a + dt))
__device__ float decay_of(float a, float a_log, float dt_bias) {
  const float x = a + dt_bias;
  const float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
  return expf(-expf(a_log) * softplus);
}
