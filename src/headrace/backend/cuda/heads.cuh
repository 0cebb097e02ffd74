// Heads of a projection [T, WIDTH]: queries, a head every Q_STRIDE, keys at K_AT, values at V_AT. Queries and keys are
// normed and turned by their positions.
//
// positions int32 [AXES, T]; frequencies float32 [ROTARY / 2] with the axis of each in axes; norms of D weights. A warp
// makes one head of one token: a lane has its channels lane, lane + 32, …

enum class Sort { QUERY, KEY, VALUE };

// A channel behind the rope's rotation with its partner. It is rounded in the same places wherever this is inlined.
__device__ float rotated(float x, float cosine, float partner, float sine) {
  return __fmaf_rn(x, cosine, __fmul_rn(partner, sine));
}

template <typename T, int D, int ROTARY, int WIDTH, int Q_STRIDE, int K_AT, int V_AT, bool NORMED>
struct ProjectedHeads {
  static constexpr bool ARE_NEW = true;
  static constexpr int PER_LANE = D / 32, HALF = ROTARY / 2;
  const T* projected;
  const int* positions;
  int num_tokens;
  const float* frequencies;
  const int* axes;
  const float* q_norm;
  const float* k_norm;
  float eps;

  __device__ void make(Sort sort, int token, int head, float (&x)[PER_LANE]) const {
    const int lane = threadIdx.x % 32;
    const int at = sort == Sort::QUERY ? head * Q_STRIDE : (sort == Sort::KEY ? K_AT : V_AT) + head * D;
    const T* from = projected + static_cast<long>(token) * WIDTH + at + lane;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      x[i] = static_cast<float>(from[i * 32]);
      squares += x[i] * x[i];
    }
    if (sort == Sort::VALUE) return;
    if (NORMED) {
      const float scale = rsqrtf(sum_over<32>(squares) / D + eps);
      const float* weight = sort == Sort::QUERY ? q_norm : k_norm;
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) x[i] = rounded<T>(x[i] * scale * weight[i * 32 + lane]);
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
        x[i] = rotated(first, cosine, -second, sine);
        x[i + APART] = rotated(second, cosine, first, sine);
      }
    } else {
      float found[PER_LANE];
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
        found[i] = x[i];
        if (c < ROTARY) {
          float sine, cosine;
          turn(c % HALF, sine, cosine);
          found[i] = rotated(x[i], cosine, is_first ? -partner : partner, sine);
        }
      }
#pragma unroll
      for (int i = 0; i < PER_LANE; i++) x[i] = found[i];
    }
  }
};

// Queries [T, HQ, D] that are made already, as their keys and values are.
template <typename T, int HQ, int D>
struct MadeQueries {
  static constexpr bool ARE_NEW = false;
  static constexpr int PER_LANE = D / 32;
  const T* queries;

  __device__ void make(Sort, int token, int head, float (&x)[PER_LANE]) const {
    const T* from = queries + (static_cast<long>(token) * HQ + head) * D + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) x[i] = static_cast<float>(from[i * 32]);
  }
};

// What a lane has of a head to where its channels are in a row.
template <typename T, int PER_LANE>
__device__ void store(T* to, const float (&x)[PER_LANE]) {
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) to[i * 32 + threadIdx.x % 32] = static_cast<T>(x[i]);
}
