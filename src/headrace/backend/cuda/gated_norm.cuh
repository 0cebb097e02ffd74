// RMS norm of each head of y [T, HV, DV], times its weight and silu of the gate at Z_AT of projected [T, WIDTH].

template <int DV>
__device__ float norm_scale(float squares, float eps) {
  return rsqrtf(squares / DV + eps);
}

template <typename T>
__device__ T gated_number(float x, float scale, float weight, float gate) {
  return static_cast<T>(gate * rounded<T>(x * scale * weight));
}

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
  const float scale = norm_scale<DV>(sum_over<32>(squares), eps);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int d = i * 32 + lane;
    if (d < DV) out[d] = gated_number<T>(x[i], scale, static_cast<float>(weight[d]), gate(d));
  }
}

// The bits of norm_head. A lane has EACH neighbours of every 32 channels, so a warp makes EACH heads; all is read before any of
// it is waited for.
template <typename T, int HV, int DV, int WIDTH, int Z_AT, typename W>
__device__ void gated_norm(const T* y, const T* projected, const W* weight, float eps, int num_tokens, T* out) {
  constexpr int EACH = WIDTH % 2 ? 1 : 2, LANES = 32 / EACH, PER_LANE = (DV + 31) / 32;
  using Own = Vec<T, EACH>;
  const int number = (blockIdx.x * blockDim.x + threadIdx.x) / LANES, lane = threadIdx.x % LANES * EACH;
  const bool is_there = number < num_tokens * HV;
  const int at = is_there ? number : 0;
  const T* z = projected + static_cast<long>(at / HV) * WIDTH + Z_AT + at % HV * DV + lane;
  const long head = static_cast<long>(at) * DV + lane;
  auto has = [&](int i) { return DV % 32 == 0 || i * 32 + lane < DV; };
  Own x[PER_LANE] = {}, gates[PER_LANE] = {};
  Vec<W, EACH> weights[PER_LANE] = {};
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
    if (has(i)) {
      x[i] = *reinterpret_cast<const Own*>(y + head + i * 32);
      gates[i] = *reinterpret_cast<const Own*>(z + i * 32);
      weights[i] = *reinterpret_cast<const Vec<W, EACH>*>(weight + lane + i * 32);
    }
  float squares[EACH] = {}, acting[PER_LANE * EACH];
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
#pragma unroll
    for (int j = 0; j < EACH; j++) squares[j] += x[i][j] * x[i][j], acting[i * EACH + j] = gates[i][j];
  silu(acting);
  const float scale = norm_scale<DV>(sum_of_neighbours(squares), eps);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
    if (is_there && has(i)) {
      Own found;
#pragma unroll
      for (int j = 0; j < EACH; j++) found.of[j] = gated_number<T>(x[i][j], scale, weights[i][j], acting[i * EACH + j]);
      *reinterpret_cast<Own*>(out + head + i * 32) = found;
    }
}
