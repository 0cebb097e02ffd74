// What chunks feed into the scan: convolution, activation, unit keys and queries, gates.
//
// plan, stops: see chunks.cuh. projected [T, WIDTH]: raw queries, keys, values (C in all), …, at B_AT and A_AT the gates'
// inputs. old_raw [rows, room, C]: raw inputs, of which the KERNEL - 1 before a row's end are its context. weight
// [C, KERNEL]. Out, besides the scan's inputs: raw [S, KERNEL - 1, C], the last raw inputs before each stop.
// A block makes one head of TOKENS tokens of a row, each of its four warps a quarter of them.

template <typename T, int HK, int HV, int DK, int DV, int KERNEL, int WIDTH, int B_AT, int A_AT, int TOKENS, typename W,
          typename D>
__device__ void delta_prepare(const int* plan, const int* stops, int room, const T* projected, const T* old_raw,
                              const W* weight, const float* a_log, const D* dt_bias, T* q, T* k, T* v, float* g,
                              float* beta, T* raw_at_stops) {
  constexpr int C = 2 * HK * DK + HV * DV, WIDEST = DK > DV ? DK : DV, PER_LANE = (WIDEST + 31) / 32;
  const Chunk row(plan, blockIdx.z);
  const int num_tokens = row.num_tokens;
  if (static_cast<int>(blockIdx.x) * TOKENS >= num_tokens) return;
  projected += static_cast<long>(row.lo) * WIDTH;
  const T* context = old_raw + (static_cast<long>(row.old) * room + row.end - (KERNEL - 1)) * C;
  q += static_cast<long>(row.lo) * HK * DK, k += static_cast<long>(row.lo) * HK * DK;
  v += static_cast<long>(row.lo) * HV * DV, g += static_cast<long>(row.lo) * HV, beta += static_cast<long>(row.lo) * HV;
  const int head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool is_value = head >= 2 * HK;
  const int dim = is_value ? DV : DK, base = is_value ? 2 * HK * DK + (head - 2 * HK) * DV : head * DK;
  const int begin = blockIdx.x * TOKENS + warp * (TOKENS / 4), end = min(begin + TOKENS / 4, num_tokens);
  auto raw = [&](int t, int i) {  // of channel i of this lane, token t; before the chunk for t < 0
    if (i * 32 + lane >= dim) return 0.0f;
    const int c = base + i * 32 + lane;
    return static_cast<float>(t < 0 ? context[(t + KERNEL - 1) * C + c] : projected[static_cast<long>(t) * WIDTH + c]);
  };
  if (blockIdx.x == 0)
    for (int i = warp; i < row.num_stops * (KERNEL - 1); i += 4) {
      const int stop = row.first_stop + i / (KERNEL - 1), j = i % (KERNEL - 1);
      T* to = raw_at_stops + (static_cast<long>(stop) * (KERNEL - 1) + j) * C + base;
#pragma unroll
      for (int p = 0; p < PER_LANE; p++)
        if (p * 32 + lane < dim) to[p * 32 + lane] = static_cast<T>(raw(stops[stop] - (KERNEL - 1) + j, p));
    }
  float taps[PER_LANE][KERNEL], past[PER_LANE][KERNEL];
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
#pragma unroll
    for (int j = 0; j < KERNEL; j++) {
      taps[i][j] = i * 32 + lane < dim ? static_cast<float>(weight[(base + i * 32 + lane) * KERNEL + j]) : 0.0f;
      past[i][j] = j && begin < end ? raw(begin + j - KERNEL, i) : 0.0f;
    }
  for (long t = begin; t < end; t++) {
    float x[PER_LANE], squares = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < KERNEL; j++) {
        past[i][j] = j + 1 < KERNEL ? past[i][j + 1] : raw(t, i);
        sum += past[i][j] * taps[i][j];
      }
      x[i] = rounded<T>(silu(rounded<T>(sum)));
      squares += x[i] * x[i];
    }
    float scale = 1.0f;
    T* out = v + (t * HV + head - 2 * HK) * DV;
    if (!is_value) {
      scale = unit_scale(sum_over<32>(squares));
      out = head < HK ? q + (t * HK + head) * DK : k + (t * HK + head - HK) * DK;
      if (head < HK) scale *= rsqrtf(static_cast<float>(DK));
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (i * 32 + lane < dim) out[i * 32 + lane] = static_cast<T>(x[i] * scale);
    if (is_value && lane == 0) {
      const int h = head - 2 * HK;
      const T* gates = projected + t * WIDTH;
      g[t * HV + h] = decay_of(static_cast<float>(gates[A_AT + h]), a_log[h], static_cast<float>(dt_bias[h]));
      beta[t * HV + h] = rounded<T>(sigmoid(static_cast<float>(gates[B_AT + h])));
    }
  }
}
