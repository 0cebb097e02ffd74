// RMS norm of each head of y [T, HV, DV], times its weight and silu of the gate at Z_AT of projected [T, WIDTH].

// A warp makes one head of one token. gate(d): silu of it.
template <int DV, typename T, typename W, typename G>
__device__ void norm_head(const T* y, const W* weight, float eps, const G& gate, T* out) {
  const int lane = threadIdx.x % 32;
  constexpr int PER_LANE = (DV + 31) / 32;
  float x[PER_LANE], squares = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    x[i] = i * 32 + lane < DV ? static_cast<float>(y[i * 32 + lane]) : 0.0f;
    squares += x[i] * x[i];
  }
  const float scale = rsqrtf(sum_over<32>(squares) / DV + eps);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int d = i * 32 + lane;
    if (d < DV) out[d] = static_cast<T>(gate(d) * rounded<T>(x[i] * scale * static_cast<float>(weight[d])));
  }
}

template <typename T, int HV, int DV, int WIDTH, int Z_AT, typename W>
__device__ void gated_norm(const T* y, const T* projected, const W* weight, float eps, int num_tokens, T* out) {
  const int at = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (at >= num_tokens * HV) return;
  const T* z = projected + static_cast<long>(at / HV) * WIDTH + Z_AT + at % HV * DV;
  const long head = static_cast<long>(at) * DV;
  norm_head<DV>(y + head, weight, eps, [&](int d) { return silu(static_cast<float>(z[d])); }, out + head);
}
