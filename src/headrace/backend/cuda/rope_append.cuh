// Norms each head of queries and keys, turns them by their positions, and writes keys and values into the slabs; those of
// tokens behind the last row's nowhere.
//
// projected [T, WIDTH]: queries, a head every Q_STRIDE, keys at K_AT, values at V_AT. plan: see rows.cuh, of all rows in
// their order. positions int32 [AXES, T]; frequencies float32 [ROTARY / 2] with the axis of each in axes.
// A warp makes one head of one token; out: queries [T, HQ, D].

template <typename T, int HQ, int HKV, int D, int ROTARY, int WIDTH, int Q_STRIDE, int K_AT, int V_AT, bool NORMED,
          typename W>
__device__ void rope_append(const int* plan, const int* positions, const T* projected, const W* q_norm,
                            const W* k_norm, const float* frequencies, const int* axes, float eps, int num_tokens,
                            int num_rows, T* const* slab_keys, T* const* slab_values, T* queries) {
  constexpr int PER_LANE = D / 32, HALF = ROTARY / 2;
  const int token = blockIdx.y, lane = threadIdx.x % 32, head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (head >= HQ + 2 * HKV) return;
  const bool is_query = head < HQ, is_value = head >= HQ + HKV;
  const int own = is_query ? head : (head - HQ) % HKV;
  const T* from = projected + static_cast<long>(token) * WIDTH + (is_query ? own * Q_STRIDE : (is_value ? V_AT : K_AT) + own * D);
  float x[PER_LANE], squares = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    x[i] = static_cast<float>(from[i * 32 + lane]);
    squares += x[i] * x[i];
  }
  T* to = queries + (static_cast<long>(token) * HQ + own) * D;
  if (!is_query) {
    // the first row that ends behind the token; a warp looks at 32 at a time
    int at = num_rows;
    for (int first = 0; first < num_rows && at == num_rows; first += 32) {
      const int* of = plan + (first + lane) * ROW;
      const unsigned found = __ballot_sync(~0u, first + lane < num_rows && token < of[0] + of[1]);
      if (found) at = first + __ffs(found) - 1;
    }
    if (at == num_rows) return;
    const Row row(plan, at);
    T* slab = is_value ? slab_values[row.slab] : slab_keys[row.slab];
    to = slab + ((static_cast<long>(row.slot) * HKV + own) * row.capacity + row.start + token - row.lo) * D;
  }
  if (!is_value) {
    if (NORMED) {
      const float scale = rsqrtf(sum_over<32>(squares) / D + eps);
      const W* weight = is_query ? q_norm : k_norm;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) x[i] = rounded<T>(x[i] * scale * static_cast<float>(weight[i * 32 + lane]));
    }
    // channel c < HALF turns with channel c + HALF
    auto turn = [&](int f, float& sine, float& cosine) {
      sincosf(static_cast<float>(positions[axes[f] * num_tokens + token]) * frequencies[f], &sine, &cosine);
    };
    if constexpr (HALF % 32 == 0) {
      constexpr int APART = HALF / 32;  // in the same lane
#pragma unroll
      for (int i = 0; i < APART; i++) {
        float sine, cosine;
        turn(i * 32 + lane, sine, cosine);
        const float first = x[i], second = x[i + APART];
        x[i] = first * cosine - second * sine;
        x[i + APART] = second * cosine + first * sine;
      }
    } else {
      float turned[PER_LANE];
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) {
        const int c = i * 32 + lane;
        const bool is_first = c < HALF;
        const int other = is_first ? c + HALF : c - HALF;
        // the partner's element: each lane reads it where it stands
        float partner = 0;
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
          const float candidate = __shfl_sync(~0u, x[j], other & 31);
          if (j == other / 32) partner = candidate;
        }
        turned[i] = x[i];
        if (c < ROTARY) {
          float sine, cosine;
          turn(c % HALF, sine, cosine);
          turned[i] = is_first ? x[i] * cosine - partner * sine : x[i] * cosine + partner * sine;
        }
      }
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) x[i] = turned[i];
    }
  }
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) to[i * 32 + lane] = static_cast<T>(x[i]);
}
