// A scan over packed tokens: q, k [T, HK, DK], v [T, HV, DV], g, beta [T, HV] float32. plan, stops: see chunks.cuh. state
// [slots, HV, DV, DK] float32: what a row begins with, and after it the state behind its certain tokens.
// Out: y [T, HV, DV], state_at_stops [S, HV, DV, DK].
// Tokens are staged through shared memory, a stage ahead of the one that is computed.

// SCAN_THREADS threads do N * SCAN_CHANNELS channels of one value head of one row; a thread's are SCAN_CHANNELS apart.

constexpr int SCAN_THREADS = 128;
constexpr int SCAN_CHANNELS = SCAN_THREADS / LANES;

template <int DK, int N>
struct ScanMemory {
  static constexpr int STAGE = 1024 / DK, VALUES = STAGE * N * SCAN_CHANNELS;  // tokens of a stage, and their values
  alignas(16) float sk[2][STAGE * DK], sq[2][STAGE * DK];
  float sv[2][VALUES], sy[2][VALUES], sg[2][STAGE], sb[2][STAGE];
};

template <typename T, int HK, int HV, int DK, int DV, int N>
__device__ void delta_scan(const int* plan, const int* stops, const T* q, const T* k, const T* v, const float* g,
                           const float* beta, float* state, T* y, float* state_at_stops,
                           ScanMemory<DK, N>& memory) {
  using Memory = ScanMemory<DK, N>;
  constexpr int THREADS = SCAN_THREADS, CHANNELS = SCAN_CHANNELS, STAGE = Memory::STAGE, VALUES = Memory::VALUES;
  constexpr int SHARE = STAGE * DK / THREADS;  // elements of k that a thread brings in: all of one token
  constexpr int SHARERS = DK / SHARE;        // threads of a token
  constexpr int WIDE = N * CHANNELS;
  auto &sk = memory.sk, &sq = memory.sq;
  auto &sv = memory.sv, &sy = memory.sy;
  auto &sg = memory.sg, &sb = memory.sb;
  const int tid = threadIdx.x, lane = tid % LANES, channel = tid / LANES;
  const int first = blockIdx.x * WIDE, hv = blockIdx.y, hk = hv / (HV / HK);
  const Chunk chunk(plan, blockIdx.z);
  const int num_tokens = chunk.num_tokens;
  if (chunk.is_padding()) return;
  const long row = chunk.lo;
  struct alignas(16) Pack { T of[16 / sizeof(T)]; };
  constexpr int PER_PACK = 16 / sizeof(T), PACKS = SHARE / PER_PACK;
  Pack ks[PACKS], qs[PACKS];
  T vs[(VALUES + THREADS - 1) / THREADS];
  float gate = 0, step_size = 0;

  auto fetch = [&](int t0) {
    const int t = t0 + tid / SHARERS;
    const long at = ((row + t) * HK + hk) * DK + (tid % SHARERS) * SHARE;
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
      if (t < num_tokens) {
        ks[i] = reinterpret_cast<const Pack*>(k + at)[i];
        qs[i] = reinterpret_cast<const Pack*>(q + at)[i];
      }
    }
#pragma unroll
    for (int i = 0; i * THREADS < VALUES; i++) {
      const int t = t0 + (tid + i * THREADS) / WIDE, c = first + (tid + i * THREADS) % WIDE;
      if (tid + i * THREADS < VALUES && t < num_tokens) vs[i] = v[((row + t) * HV + hv) * DV + c];
    }
    if (tid < STAGE && t0 + tid < num_tokens) {
      gate = g[(row + t0 + tid) * HV + hv];
      step_size = beta[(row + t0 + tid) * HV + hv];
    }
  };
  auto put = [&](int stage) {
#pragma unroll
    for (int i = 0; i < PACKS; i++) {
#pragma unroll
      for (int j = 0; j < PER_PACK; j++) {
        sk[stage][tid * SHARE + i * PER_PACK + j] = static_cast<float>(ks[i].of[j]);
        sq[stage][tid * SHARE + i * PER_PACK + j] = static_cast<float>(qs[i].of[j]);
      }
    }
#pragma unroll
    for (int i = 0; i * THREADS < VALUES; i++)
      if (tid + i * THREADS < VALUES) sv[stage][tid + i * THREADS] = static_cast<float>(vs[i]);
    if (tid < STAGE) sg[stage][tid] = gate, sb[stage][tid] = step_size;
  };

  Channels<DK, N> s;
  auto place = [&](int of) { return ((static_cast<long>(of) * HV + hv) * DV + first + channel) * DK; };
  if (chunk.slot >= 0 && chunk.old >= 0) s.load(state + place(chunk.slot), CHANNELS * DK, lane);
  else s.clear();
  // behind the stops comes the end of the certain tokens
  int stop = chunk.first_stop;
  const int last_stop = chunk.first_stop + chunk.num_stops;
  auto upcoming = [&] { return stop < last_stop ? stops[stop] : (stop == last_stop ? chunk.num_certain : num_tokens + 1); };
  int next = upcoming();
  auto leave = [&] {
    if (stop < last_stop) s.store(state_at_stops + place(stop), CHANNELS * DK, lane);
    else if (num_tokens && chunk.slot >= 0) s.store(state + place(chunk.slot), CHANNELS * DK, lane);
    stop++, next = upcoming();
  };
  fetch(0);
  put(0);
  __syncthreads();
  for (int t0 = 0, stage = 0; t0 < num_tokens; t0 += STAGE, stage ^= 1) {
    if (t0 + STAGE < num_tokens) fetch(t0 + STAGE);
    const int count = min(STAGE, num_tokens - t0);
    auto run = [&](int from, int to) {
#pragma unroll 4
      for (int i = from; i < to; i++) {
        float out[N];
#pragma unroll
        for (int n = 0; n < N; n++) out[n] = sv[stage][i * WIDE + n * CHANNELS + channel];
        s.step(&sk[stage][i * DK], &sq[stage][i * DK], out, sg[stage][i], sb[stage][i], lane);
#pragma unroll
        for (int n = 0; n < N; n++)
          if (lane == n) sy[stage][i * WIDE + n * CHANNELS + channel] = out[n];
      }
    };
    int done = 0;
    for (; next < t0 + count; leave()) run(done, next - t0), done = next - t0;
    if (!done && count == STAGE) run(0, STAGE);
    else run(done, count);
    if (t0 + STAGE < num_tokens) put(stage ^ 1);
    __syncthreads();
    for (int i = tid; i < count * WIDE; i += THREADS)
      y[((row + t0 + i / WIDE) * HV + hv) * DV + first + i % WIDE] = static_cast<T>(sy[stage][i]);
  }
  while (next <= num_tokens) leave();
}
