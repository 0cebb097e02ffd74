// A whole gated delta layer between its projections, for rows of a few tokens: convolution, activation, unit keys
// and queries, gates, replay of what was accepted of the last window, and the new tokens.
//
// plan int32 [B, PLAN]: per row its first packed token, its tokens, how many of them are certain, how many tokens of
// `old_*` are replayed, where its context ends in `old_window`, the row of the old state, and LONGEST: no row has more
// tokens, nor as many that are not certain. Neither LONGEST nor OLD may be over MOST_OF_WINDOW.
// projected [T, WIDTH]: as in delta_prepare. old_window [B', OLD_WINDOW, C]: raw inputs of the last window, its context
// first. old_k [B', OLD, HK, DK], old_v [B', OLD, HV, DV], old_g, old_beta [B', OLD, HV]: its uncertain tokens.
// state [B', HV, DV, DK] float32.
// Out: y [T, HV, DV]; new_state [B, HV, DV, DK] after the certain tokens; window [B, KERNEL - 1 + LONGEST, C];
// and k, v, g, beta [B, LONGEST - 1, …] of the uncertain tokens, the first at 0.

constexpr int PLAN = 7;
constexpr int MOST_OF_WINDOW = 8;

template <typename T, int HK, int HV, int DK, int DV, int KERNEL, int WIDTH, int B_AT, int A_AT, typename W, typename D>
__device__ void delta_window(const int* plan, int OLD_WINDOW, int OLD, const T* projected, const W* weight, const float* a_log, const D* dt_bias,
                             const T* old_window, const T* old_k, const T* old_v, const float* old_g,
                             const float* old_beta, const float* state, T* y, float* new_state, T* window, T* k, T* v,
                             float* g, float* beta) {
  constexpr int C = 2 * HK * DK + HV * DV, MOST = 2 * MOST_OF_WINDOW;
  __shared__ __align__(16) float sk[MOST * DK], sq[MOST * DK];
  __shared__ float sv[MOST * CHANNELS], sg[MOST], sb[MOST], skq[MOST];
  const int tid = threadIdx.x, lane = tid % LANES, channel = tid / LANES;
  const int first = blockIdx.x * CHANNELS, hv = blockIdx.y, row = blockIdx.z, hk = hv / (HV / HK);
  plan += row * PLAN;
  const int lo = plan[0], n = plan[1], num_certain = plan[2], num_replay = plan[3], context_end = plan[4];
  const int old = plan[5], LONGEST = plan[6], STASH = max(LONGEST - 1, 1);
  if (!n) return;  // a row that is there to make up the number
  // the blocks of a head share what it writes beside its channels: the first one does it
  const bool writes_key_head = blockIdx.x == 0 && hv % (HV / HK) == 0, writes_head = blockIdx.x == 0;

  for (int i = tid; i < num_replay * DK; i += THREADS) {
    sk[i] = static_cast<float>(old_k[((static_cast<long>(old) * OLD + i / DK) * HK + hk) * DK + i % DK]);
    sq[i] = 0.0f;  // nobody reads what a replayed token would say
  }
  for (int i = tid; i < num_replay * CHANNELS; i += THREADS)
    sv[i] = static_cast<float>(old_v[((static_cast<long>(old) * OLD + i / CHANNELS) * HV + hv) * DV + first + i % CHANNELS]);
  if (tid < num_replay) {
    sg[tid] = old_g[(static_cast<long>(old) * OLD + tid) * HV + hv];
    sb[tid] = old_beta[(static_cast<long>(old) * OLD + tid) * HV + hv];
    skq[tid] = 0.0f;
  }
  const T* context = old_window + (static_cast<long>(old) * OLD_WINDOW + context_end - (KERNEL - 1)) * C;
  T* kept = window + static_cast<long>(row) * (KERNEL - 1 + LONGEST) * C;
  auto raw = [&](int t, int c) {
    return t < 0 ? context[(t + KERNEL - 1) * C + c] : projected[static_cast<long>(lo + t) * WIDTH + c];
  };
  auto activated = [&](int t, int c) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < KERNEL; j++)
      sum += static_cast<float>(raw(t + j - (KERNEL - 1), c)) * static_cast<float>(weight[c * KERNEL + j]);
    return rounded<T>(silu(rounded<T>(sum)));
  };
  for (int i = tid; i < n * DK; i += THREADS) {
    sq[num_replay * DK + i] = activated(i / DK, hk * DK + i % DK);
    sk[num_replay * DK + i] = activated(i / DK, (HK + hk) * DK + i % DK);
  }
  for (int i = tid; i < n * CHANNELS; i += THREADS)
    sv[num_replay * CHANNELS + i] = activated(i / CHANNELS, 2 * HK * DK + hv * DV + first + i % CHANNELS);
  if (tid < n) {
    const T* gates = projected + static_cast<long>(lo + tid) * WIDTH;
    const float decay = decay_of(static_cast<float>(gates[A_AT + hv]), a_log[hv], static_cast<float>(dt_bias[hv]));
    const float step_size = rounded<T>(sigmoid(static_cast<float>(gates[B_AT + hv])));
    sg[num_replay + tid] = decay;
    sb[num_replay + tid] = step_size;
    if (writes_head && tid >= num_certain) {
      g[(static_cast<long>(row) * STASH + tid - num_certain) * HV + hv] = decay;
      beta[(static_cast<long>(row) * STASH + tid - num_certain) * HV + hv] = step_size;
    }
  }
  for (int i = tid; i < (KERNEL - 1 + n) * CHANNELS; i += THREADS) {
    const int c = 2 * HK * DK + hv * DV + first + i % CHANNELS;
    kept[i / CHANNELS * C + c] = raw(i / CHANNELS - (KERNEL - 1), c);
  }
  if (writes_key_head)
    for (int i = tid; i < (KERNEL - 1 + n) * DK; i += THREADS)
      for (int c = hk * DK + i % DK; c < 2 * HK * DK; c += HK * DK)
        kept[i / DK * C + c] = raw(i / DK - (KERNEL - 1), c);
  Channels<DK> s;
  s.load(state + ((static_cast<long>(old) * HV + hv) * DV + first + channel) * DK, 0, lane);
  __syncthreads();
  for (int t = tid / 32; t < n; t += THREADS / 32) {
    float* keys = sk + (num_replay + t) * DK;
    float* queries = sq + (num_replay + t) * DK;
    float of_k = 0, of_q = 0, dot = 0;
    for (int i = tid % 32; i < DK; i += 32) of_k += keys[i] * keys[i], of_q += queries[i] * queries[i];
    const float by_k = unit_scale(sum_over<32>(of_k));
    const float by_q = unit_scale(sum_over<32>(of_q)) * rsqrtf(static_cast<float>(DK));
    for (int i = tid % 32; i < DK; i += 32) {
      keys[i] = rounded<T>(keys[i] * by_k);
      queries[i] = rounded<T>(queries[i] * by_q);
      dot += keys[i] * queries[i];
      if (writes_key_head && t >= num_certain)
        k[((static_cast<long>(row) * STASH + t - num_certain) * HK + hk) * DK + i] = static_cast<T>(keys[i]);
    }
    dot = sum_over<32>(dot);
    if (tid % 32 == 0) skq[num_replay + t] = dot;
  }
  for (int i = tid; i < (n - num_certain) * CHANNELS; i += THREADS)
    v[((static_cast<long>(row) * STASH + i / CHANNELS) * HV + hv) * DV + first + i % CHANNELS] =
        static_cast<T>(sv[(num_replay + num_certain) * CHANNELS + i]);
  __syncthreads();
  float* own = new_state + ((static_cast<long>(row) * HV + hv) * DV + first + channel) * DK;
  for (int i = 0; i < num_replay + n; i++) {
    if (i == num_replay + num_certain) s.store(own, 0, lane);
    float out[1] = {sv[i * CHANNELS + channel]};
    s.step(sk + i * DK, sq + i * DK, skq[i], out, sg[i], sb[i], lane);
    if (i >= num_replay && lane == 0)
      y[(static_cast<long>(lo + i - num_replay) * HV + hv) * DV + first + channel] = static_cast<T>(out[0]);
  }
  if (n == num_certain) s.store(own, 0, lane);
}
