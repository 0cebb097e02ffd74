// What chunks feed into the scan: convolution, activation, unit keys and queries, gates.
//
// plan, stops: see chunks.cuh. projected [T, WIDTH]: raw queries, keys, values (C in all), …, at B_AT and A_AT the gates'
// inputs. weight [C, KERNEL]. raw [2 * slots, KERNEL - 1 + LONGEST, C]: of the old row the KERNEL - 1 inputs before its end
// are its context; the new one gets those before the certain tokens' end, then those of the uncertain tokens. stash: see
// stash.cuh; its new row gets the uncertain tokens.
// Out, besides the scan's inputs: raw_at_stops [S, KERNEL - 1, C], the last raw inputs before each stop.
//
// A block makes one head of TOKENS tokens of a row, GROUP tokens at once by a team of lanes, of which each has EACH
// neighbours of every 32 channels: an even WIDTH lets a warp be two teams. A team reads all that its tokens need, also of
// those before them, before it waits for any. What is not about a head is shared out among the row's blocks: gates, and
// raw inputs to be kept.

template <typename T, int HK, int HV, int DK, int DV, int KERNEL, int WIDTH, int B_AT, int A_AT, int TOKENS, int LONGEST,
          typename W, typename D>
__device__ void delta_prepare(const int* plan, const int* stops, const T* projected, const W* weight, const float* a_log,
                              const D* dt_bias, T* raw, const Stash<T> stash, T* q, T* k, T* v, float* g, float* beta,
                              T* raw_at_stops) {
  constexpr int C = 2 * HK * DK + HV * DV, CONTEXT = KERNEL - 1, STASH = LONGEST - 1;
  constexpr int WIDEST = DK > DV ? DK : DV, PER_LANE = (WIDEST + 31) / 32;
  constexpr int EACH = WIDTH % 2 ? 1 : 2, LANES = 32 / EACH, TEAMS = 4 * EACH;
  constexpr int GROUP = 4;  // 8 would take more registers than half of a multiprocessor's threads have
  static_assert(TOKENS % (TEAMS * GROUP) == 0, "a token would have two teams");
  using Own = Vec<T, EACH>;
  const Chunk row(plan, blockIdx.z);
  const int num_tokens = row.num_tokens, first = blockIdx.x * TOKENS;
  if (blockIdx.x ? first >= num_tokens : row.is_padding()) return;
  projected += static_cast<long>(row.lo) * WIDTH;
  const T* context = raw + (static_cast<long>(row.old) * (CONTEXT + LONGEST) + row.end - CONTEXT) * C;
  q += static_cast<long>(row.lo) * HK * DK, k += static_cast<long>(row.lo) * HK * DK;
  v += static_cast<long>(row.lo) * HV * DV, g += static_cast<long>(row.lo) * HV, beta += static_cast<long>(row.lo) * HV;
  const int head = blockIdx.y, team = threadIdx.x / LANES, lane = threadIdx.x % LANES * EACH;
  const bool is_value = head >= 2 * HK;
  const int dim = is_value ? DV : DK, base = (is_value ? 2 * HK * DK + (head - 2 * HK) * DV : head * DK) + lane;
  auto has = [&](int i) { return (DK == DV && DK % 32 == 0) || i * 32 + lane < dim; };
  auto inputs_of = [&](int t) {  // this lane's of token t; before the chunk for t < 0
    return (t < 0 ? context + (t + CONTEXT) * C : projected + static_cast<long>(t) * WIDTH) + base;
  };
  auto is_there = [&](int t) { return t < num_tokens && (t >= 0 || row.old >= 0); };
  const bool writes = num_tokens && row.new_row >= 0;
  // where the row's first token would be in the stash
  const long at_stash = static_cast<long>(row.new_row) * STASH - row.num_certain;
  const int own_head = is_value ? head - 2 * HK : head < HK ? head : head - HK, stride = is_value ? HV * DV : HK * DK;
  const float factor = head < HK ? rsqrtf(static_cast<float>(DK)) : 1.0f;

  struct alignas(KERNEL & (KERNEL - 1) ? sizeof(W) : KERNEL * sizeof(W)) Taps { W of[KERNEL]; };
#pragma unroll 1
  for (int from = first; from < min(first + TOKENS, num_tokens); from += TEAMS * GROUP) {
    const int begin = from + team * GROUP;
    Own x[PER_LANE][CONTEXT + GROUP];
    auto read = [&](int t, const T* inputs) {
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) x[i][t] = *reinterpret_cast<const Own*>(inputs + (has(i) ? i * 32 : -lane));
    };
    if (CONTEXT <= begin && begin + GROUP <= num_tokens) {
      const T* inputs = projected + static_cast<long>(begin - CONTEXT) * WIDTH + base;
#pragma unroll
      for (int t = 0; t < CONTEXT + GROUP; t++) read(t, inputs + t * WIDTH);
    } else {
      // for tokens and channels that are not there others are read, and what comes of them is not written
#pragma unroll
      for (int t = 0; t < CONTEXT + GROUP; t++) {
        const int token = min(begin + t - CONTEXT, num_tokens - 1);
        read(t, inputs_of(row.old < 0 ? max(token, 0) : token));
      }
    }
    if (row.old < 0 && begin < CONTEXT) {
#pragma unroll
      for (int t = 0; t < CONTEXT; t++)
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
          if (begin + t < CONTEXT) x[i][t] = Own();
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      float taps[EACH][KERNEL];
#pragma unroll
      for (int e = 0; e < EACH; e++) {
        const Taps own = reinterpret_cast<const Taps*>(weight)[base + (has(i) ? i * 32 : -lane) + e];
#pragma unroll
        for (int j = 0; j < KERNEL; j++) taps[e][j] = static_cast<float>(own.of[j]);
      }
      float made[GROUP * EACH];
#pragma unroll
      for (int n = 0; n < GROUP * EACH; n++) {
        float sum = 0;
#pragma unroll
        for (int j = 0; j < KERNEL; j++) sum += x[i][n / EACH + j][n % EACH] * taps[n % EACH][j];
        made[n] = rounded<T>(sum);
      }
      silu(made);
#pragma unroll
      for (int t = 0; t < GROUP; t++) {
        Own found;
#pragma unroll
        for (int e = 0; e < EACH; e++) found.of[e] = static_cast<T>(made[t * EACH + e]);
        x[i][t] = found;  // in place of an input that is not needed any more
      }
    }
    if (!is_value) {
#pragma unroll
      for (int t = 0; t < GROUP; t++) {
        float squares[EACH] = {};
#pragma unroll
        for (int i = 0; i < DK / 32; i++)
#pragma unroll
          for (int e = 0; e < EACH; e++) squares[e] += x[i][t][e] * x[i][t][e];
        const float scale = unit_scale(sum_of_neighbours(squares)) * factor;
#pragma unroll
        for (int i = 0; i < DK / 32; i++) {
          Own found;
#pragma unroll
          for (int e = 0; e < EACH; e++) found.of[e] = static_cast<T>(x[i][t][e] * scale);
          x[i][t] = found;
        }
      }
    }
    auto leave = [&](int since, T* to) {
#pragma unroll
      for (int t = 0; t < GROUP; t++)
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
          if (since <= begin + t && begin + t < num_tokens && has(i))
            *reinterpret_cast<Own*>(to + (begin + t) * static_cast<long>(stride) + own_head * dim + lane + i * 32) = x[i][t];
    };
    leave(0, is_value ? v : head < HK ? q : k);
    if (writes && head >= HK && begin + GROUP > row.num_certain)
      leave(row.num_certain, (is_value ? stash.v : stash.k) + at_stash * stride);
  }

  // gates of the block's tokens and all heads: a warp takes 32 that lie side by side
  for (int n = blockIdx.y * 32 + threadIdx.x % 32 + threadIdx.x / 32 * 32 * gridDim.y; n < min(TOKENS, num_tokens - first) * HV;
       n += 128 * gridDim.y) {
    const long t = first + n / HV;
    const int h = n % HV;
    const T* gates = projected + t * WIDTH;
    const float decay = decay_of(static_cast<float>(gates[A_AT + h]), a_log[h], static_cast<float>(dt_bias[h]));
    const float step_size = rounded<T>(sigmoid(static_cast<float>(gates[B_AT + h])));
    g[t * HV + h] = decay, beta[t * HV + h] = step_size;
    if (writes && t >= row.num_certain)
      stash.g[(at_stash + t) * HV + h] = decay, stash.beta[(at_stash + t) * HV + h] = step_size;
  }

  const int num_stopped = row.num_stops * CONTEXT, num_kept = writes ? CONTEXT + num_tokens - row.num_certain : 0;
  const int num_blocks = max(1, (num_tokens + TOKENS - 1) / TOKENS);
  for (int n = blockIdx.x * TEAMS + team; n < num_stopped + num_kept; n += num_blocks * TEAMS) {
    const int stop = row.first_stop + n / CONTEXT, kept = n - num_stopped;
    const int t = kept < 0 ? stops[stop] - CONTEXT + n % CONTEXT : row.num_certain - CONTEXT + kept;
    T* to = kept < 0 ? raw_at_stops + (static_cast<long>(stop) * CONTEXT + n % CONTEXT) * C
                     : raw + (static_cast<long>(row.new_row) * (CONTEXT + LONGEST) + kept) * C;
    Own copied[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      copied[i] = is_there(t) && has(i) ? *reinterpret_cast<const Own*>(inputs_of(t) + i * 32) : Own();
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (has(i)) *reinterpret_cast<Own*>(to + base + i * 32) = copied[i];
  }
}
