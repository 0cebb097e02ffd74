// What chunks feed into the scan: convolution, activation, unit keys and queries, gates.
//
// plan, stops: see chunks.cuh. projected [T, WIDTH]: raw queries, keys, values (C in all), …, at B_AT and A_AT the gates'
// inputs. weight [C, KERNEL]. raw [2 * slots, KERNEL - 1 + LONGEST, C]: of the old row the KERNEL - 1 inputs before its end
// are its context; the new one gets those before the certain tokens' end, then those of the uncertain tokens. stash: see
// stash.cuh; its new row gets the uncertain tokens.
// Out, besides the scan's inputs: raw_at_stops [S, KERNEL - 1, C], the last raw inputs before each stop.
// A block makes one head of TOKENS tokens of a row, each of its four warps a quarter of them.

template <typename T, int HK, int HV, int DK, int DV, int KERNEL, int WIDTH, int B_AT, int A_AT, int TOKENS, int LONGEST,
          typename W, typename D>
__device__ void delta_prepare(const int* plan, const int* stops, const T* projected, const W* weight, const float* a_log,
                              const D* dt_bias, T* raw, const Stash<T> stash, T* q, T* k, T* v, float* g, float* beta,
                              T* raw_at_stops) {
  constexpr int C = 2 * HK * DK + HV * DV, CONTEXT = KERNEL - 1, STASH = LONGEST - 1;
  constexpr int WIDEST = DK > DV ? DK : DV, PER_LANE = (WIDEST + 31) / 32;
  const Chunk row(plan, blockIdx.z);
  const int num_tokens = row.num_tokens;
  if (blockIdx.x ? static_cast<int>(blockIdx.x) * TOKENS >= num_tokens : row.is_padding()) return;
  projected += static_cast<long>(row.lo) * WIDTH;
  const T* context = raw + (static_cast<long>(row.old) * (CONTEXT + LONGEST) + row.end - CONTEXT) * C;
  q += static_cast<long>(row.lo) * HK * DK, k += static_cast<long>(row.lo) * HK * DK;
  v += static_cast<long>(row.lo) * HV * DV, g += static_cast<long>(row.lo) * HV, beta += static_cast<long>(row.lo) * HV;
  const int head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool is_value = head >= 2 * HK;
  const int dim = is_value ? DV : DK, base = is_value ? 2 * HK * DK + (head - 2 * HK) * DV : head * DK;
  const int begin = blockIdx.x * TOKENS + warp * (TOKENS / 4), end = min(begin + TOKENS / 4, num_tokens);
  auto input = [&](int t, int i) {  // of channel i of this lane, token t; before the chunk for t < 0
    if (i * 32 + lane >= dim || (t < 0 && row.old < 0)) return 0.0f;
    const int c = base + i * 32 + lane;
    return static_cast<float>(t < 0 ? context[(t + CONTEXT) * C + c] : projected[static_cast<long>(t) * WIDTH + c]);
  };
  auto copy_input = [&](int t, T* to) {
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (i * 32 + lane < dim) to[i * 32 + lane] = static_cast<T>(input(t, i));
  };
  const bool writes = num_tokens && row.new_row >= 0;
  if (blockIdx.x == 0) {
    for (int i = warp; i < row.num_stops * CONTEXT; i += 4) {
      const int stop = row.first_stop + i / CONTEXT, j = i % CONTEXT;
      copy_input(stops[stop] - CONTEXT + j, raw_at_stops + (static_cast<long>(stop) * CONTEXT + j) * C + base);
    }
    T* kept = raw + static_cast<long>(row.new_row) * (CONTEXT + LONGEST) * C + base;
    for (int i = warp; writes && i < CONTEXT + num_tokens - row.num_certain; i += 4)
      copy_input(row.num_certain - CONTEXT + i, kept + i * C);
  }
  float taps[PER_LANE][KERNEL], past[PER_LANE][KERNEL];
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
#pragma unroll
    for (int j = 0; j < KERNEL; j++) {
      taps[i][j] = i * 32 + lane < dim ? static_cast<float>(weight[(base + i * 32 + lane) * KERNEL + j]) : 0.0f;
      past[i][j] = j && begin < end ? input(begin + j - KERNEL, i) : 0.0f;
    }
  for (long t = begin; t < end; t++) {
    float x[PER_LANE], squares = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < KERNEL; j++) {
        past[i][j] = j + 1 < KERNEL ? past[i][j + 1] : input(t, i);
        sum += past[i][j] * taps[i][j];
      }
      x[i] = rounded<T>(silu(rounded<T>(sum)));
      squares += x[i] * x[i];
    }
    // among the uncertain tokens of the table; below 0: not there
    const long uncertain = writes && t >= row.num_certain ? static_cast<long>(row.new_row) * STASH + t - row.num_certain : -1;
    float scale = 1.0f;
    T *out = v + (t * HV + head - 2 * HK) * DV, *stashed = stash.v + (uncertain * HV + head - 2 * HK) * DV;
    bool is_stashed = uncertain >= 0;
    if (!is_value) {
      scale = unit_scale(sum_over<32>(squares));
      out = head < HK ? q + (t * HK + head) * DK : k + (t * HK + head - HK) * DK;
      stashed = stash.k + (uncertain * HK + head - HK) * DK;
      if (head < HK) scale *= rsqrtf(static_cast<float>(DK)), is_stashed = false;
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (i * 32 + lane < dim) {
        const T found = static_cast<T>(x[i] * scale);
        out[i * 32 + lane] = found;
        if (is_stashed) stashed[i * 32 + lane] = found;
      }
    if (is_value && lane == 0) {
      const int h = head - 2 * HK;
      const T* gates = projected + t * WIDTH;
      const float decay = decay_of(static_cast<float>(gates[A_AT + h]), a_log[h], static_cast<float>(dt_bias[h]));
      const float step_size = rounded<T>(sigmoid(static_cast<float>(gates[B_AT + h])));
      g[t * HV + h] = decay, beta[t * HV + h] = step_size;
      if (is_stashed) stash.g[uncertain * HV + h] = decay, stash.beta[uncertain * HV + h] = step_size;
    }
  }
}
