// A whole gated delta layer between its projections, for rows of a few tokens: convolution, activation, unit keys
// and queries, gates, replay of what was accepted of the last window, the new tokens, and the norm of what these say.
//
// plan int32 [B, PLAN]: per row its first packed token, its tokens, how many of them are certain, how many tokens of the
// stash are replayed, where its context ends among its old raw inputs, its slot, and its rows of raw inputs and stash
// that are read (old) and written (new). There are at most LONGEST tokens, and fewer that are not certain, or replayed. A row
// with no tokens is padding. old < 0: a row without tokens so far, of zeros.
// projected [T, WIDTH]: as in delta_prepare, with the gates of the norm at Z_AT. state [slots, HV, DV, DK] float32: what a row
// begins with, and after it the state behind its certain tokens. raw [2 * slots, KERNEL - 1 + LONGEST, C]: of the old row
// the KERNEL - 1 inputs before its end are its context; the new one gets this and the row's own. stash: see stash.cuh;
// of the old row the first tokens are replayed, the new one gets the uncertain tokens.
// out: [T, HV * DV].
//
// A block does a value head of a row, for the norm goes over all its channels. They are SLICES of DV / SLICES; a thread
// has one channel of as many slices as 32 numbers of the state in its registers allow, and the block does others after
// them. What is read from memory is asked for before any of it is waited for: weights even before the plan, and small
// inputs before the state, which takes longest, so that all else is made ready meanwhile.

constexpr int PLAN = 8;

template <typename T, int HK, int HV, int DK, int DV, int KERNEL, int WIDTH, int Z_AT, int B_AT, int A_AT, int LONGEST,
          int SLICES, typename W, typename D, typename N>
__device__ void delta_step(const int* plan, const T* projected, const W* weight, const float* a_log, const D* dt_bias,
                           const N* norm, float eps, float* state, T* all_raw, const Stash<T> stash, T* out) {
  constexpr int C = 2 * HK * DK + HV * DV, CONTEXT = KERNEL - 1, STASH = LONGEST - 1, MOST = STASH + LONGEST;
  constexpr int WIDE = DV / SLICES, THREADS = LANES * WIDE;
  constexpr int HELD = SLICES < 256 / DK ? SLICES : 256 / DK;
  // channels of the head's queries, keys, values and gates, in this order, and how many of them a thread sees to
  constexpr int VALUES = 2 * DK, GATES = VALUES + DV, ALL = GATES + DV, SHARE = (ALL + THREADS - 1) / THREADS;
  __shared__ __align__(16) float sk[MOST * DK], sq[LONGEST * DK];
  __shared__ float sz[LONGEST * DV], sg[MOST], sb[MOST];
  __shared__ T sv[MOST * DV];
  __shared__ N scales[DV];
  const int tid = threadIdx.x, back = THREADS - 1 - tid, hv = blockIdx.x, row = blockIdx.y, hk = hv / (HV / HK);
  const bool writes_key_head = hv % (HV / HK) == 0;  // for the heads that share it
  plan += row * PLAN;
  const int lo = plan[0], n = plan[1], num_certain = plan[2], num_replay = plan[3], context_end = plan[4];
  const int slot = plan[5], old = plan[6], new_row = plan[7];

  auto place = [&](int i) {  // in a projection, of one of the head's channels
    if (i < VALUES) return (i / DK * HK + hk) * DK + i % DK;
    return i < GATES ? 2 * HK * DK + hv * DV + i - VALUES : Z_AT + hv * DV + i - GATES;
  };
  struct alignas(KERNEL & (KERNEL - 1) ? sizeof(W) : KERNEL * sizeof(W)) Taps { W of[KERNEL]; };
  Taps taps[SHARE];
  N scale[SHARE];
#pragma unroll
  for (int s = 0; s < SHARE; s++) {
    const int i = s * THREADS + tid;
    if (i < GATES) {
      taps[s] = reinterpret_cast<const Taps*>(weight)[place(i)];
    } else if (i < ALL) {
      scale[s] = norm[i - GATES];
    }
  }
  const float rate = a_log[hv];
  const D bias = dt_bias[hv];
  if (!n) return;  // a row that is there to make up the number

  const T* context = all_raw + (static_cast<long>(old) * (CONTEXT + LONGEST) + context_end - CONTEXT) * C;
  const T* own = projected + static_cast<long>(lo) * WIDTH;
  T raw[SHARE][CONTEXT + LONGEST], a, b;
#pragma unroll
  for (int s = 0; s < SHARE; s++) {
    const int i = s * THREADS + tid;
    if (i < GATES) {
#pragma unroll
      for (int t = 0; t < CONTEXT; t++) raw[s][t] = old < 0 ? static_cast<T>(0.0f) : context[t * C + place(i)];
    }
    if (i < ALL) {
#pragma unroll
      for (int t = 0; t < LONGEST; t++)
        if (t < n) raw[s][CONTEXT + t] = own[static_cast<long>(t) * WIDTH + place(i)];
    }
  }
  if (back < n) {
    a = own[static_cast<long>(back) * WIDTH + A_AT + hv];
    b = own[static_cast<long>(back) * WIDTH + B_AT + hv];
  }
  const int lane = tid % LANES, channel = tid / LANES;
  const long first = static_cast<long>(hv) * DV + channel, stride = static_cast<long>(HV) * DV * DK;
  Channels<DK, HELD> held;
  float* own_state = state + slot * stride + first * DK;
  if (old < 0) held.clear();
  else held.load(own_state, WIDE * DK, lane);

  const long stashed = static_cast<long>(new_row) * STASH - num_certain;  // where the row's first token would be
#pragma unroll
  for (int s = 0; s < SHARE; s++) {
    const int i = s * THREADS + tid;
    if (i < VALUES ? writes_key_head : i < GATES) {
      T* kept = all_raw + static_cast<long>(new_row) * (CONTEXT + LONGEST) * C + place(i);
#pragma unroll
      for (int t = 0; t < CONTEXT + LONGEST; t++)
        if (t < CONTEXT + n) kept[t * C] = raw[s][t];
    }
    if (GATES <= i && i < ALL) scales[i - GATES] = scale[s];
#pragma unroll 1  // in turns the code is an eighth as long
    for (int t = 0; t < n && i < ALL; t++) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < KERNEL; j++) sum += static_cast<float>(raw[s][j]) * static_cast<float>(taps[s].of[j]);
      const float x = silu(i < GATES ? rounded<T>(sum) : static_cast<float>(raw[s][CONTEXT]));
#pragma unroll
      for (int j = 1; j < CONTEXT + LONGEST; j++) raw[s][j - 1] = raw[s][j];
      if (i < DK) {
        sq[t * DK + i] = rounded<T>(x);
      } else if (i < VALUES) {
        sk[(num_replay + t) * DK + i - DK] = rounded<T>(x);
      } else if (i < GATES) {
        sv[(num_replay + t) * DV + i - VALUES] = static_cast<T>(x);
        if (t >= num_certain) stash.v[((stashed + t) * HV + hv) * DV + i - VALUES] = static_cast<T>(x);
      } else {
        sz[t * DV + i - GATES] = x;
      }
    }
  }
  if (back < n) {
    const float decay = decay_of(static_cast<float>(a), rate, static_cast<float>(bias));
    const float step_size = rounded<T>(sigmoid(static_cast<float>(b)));
    sg[num_replay + back] = decay;
    sb[num_replay + back] = step_size;
    if (back >= num_certain) {
      stash.g[(stashed + back) * HV + hv] = decay;
      stash.beta[(stashed + back) * HV + hv] = step_size;
    }
  }
  __syncthreads();
  for (int t = tid / 32; t < n; t += THREADS / 32) {
    float keys[DK / 32], queries[DK / 32], of_k = 0, of_q = 0;
#pragma unroll
    for (int i = 0; i < DK / 32; i++) {
      keys[i] = sk[(num_replay + t) * DK + i * 32 + tid % 32], queries[i] = sq[t * DK + i * 32 + tid % 32];
      of_k += keys[i] * keys[i], of_q += queries[i] * queries[i];
    }
    const float by_k = unit_scale(sum_over<32>(of_k));
    const float by_q = unit_scale(sum_over<32>(of_q)) * rsqrtf(static_cast<float>(DK));
#pragma unroll
    for (int i = 0; i < DK / 32; i++) {
      const T key = static_cast<T>(keys[i] * by_k), query = static_cast<T>(queries[i] * by_q);
      sk[(num_replay + t) * DK + i * 32 + tid % 32] = static_cast<float>(key);
      sq[t * DK + i * 32 + tid % 32] = static_cast<float>(query);
      if (writes_key_head && t >= num_certain)
        stash.k[((stashed + t) * HK + hk) * DK + i * 32 + tid % 32] = key;
    }
  }
  // by the last warps first, as the first have had keys to see to
  const long replayed = static_cast<long>(old) * STASH;
  for (int i = back; i < num_replay * DK; i += THREADS)
    sk[i] = static_cast<float>(stash.k[((replayed + i / DK) * HK + hk) * DK + i % DK]);
  for (int i = back; i < num_replay * DV; i += THREADS) sv[i] = stash.v[((replayed + i / DV) * HV + hv) * DV + i % DV];
  if (back < num_replay) {
    sg[back] = stash.g[(replayed + back) * HV + hv];
    sb[back] = stash.beta[(replayed + back) * HV + hv];
  }
  __syncthreads();

#pragma unroll
  for (int slice = 0; slice < SLICES; slice += HELD) {
    float* kept = own_state + slice * WIDE * DK;
    if (slice && old < 0) held.clear();
    else if (slice) held.load(kept, WIDE * DK, lane);
    T* values = sv + slice * WIDE + channel;
    for (int i = 0; i < num_replay + n; i++, values += DV) {
      if (i == num_replay + num_certain) held.store(kept, WIDE * DK, lane);
      const int t = i - num_replay;
      // what a replayed token would say is not asked for: its key stands in for its query
      const float* query = t < 0 ? sk + i * DK : sq + t * DK;
      float said[HELD];
#pragma unroll
      for (int m = 0; m < HELD; m++) said[m] = static_cast<float>(values[m * WIDE]);
      held.step(sk + i * DK, query, said, sg[i], sb[i], lane);
#pragma unroll
      for (int m = 0; m < HELD; m++)
        if (lane == m) values[m * WIDE] = static_cast<T>(said[m]);
    }
    if (n == num_certain) held.store(kept, WIDE * DK, lane);
  }
  __syncthreads();
  for (int t = tid / 32; t < n; t += THREADS / 32)
    norm_head<DV>(
        sv + (num_replay + t) * DV, scales, eps, [&](int d) { return sz[t * DV + d]; },
        out + (static_cast<long>(lo + t) * HV + hv) * DV);
}
