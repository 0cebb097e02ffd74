// Attention of rows of a few tokens over keys and values in slabs [slots, HKV, capacity, D], see state/slabs.py. Where
// heads are new, see heads.cuh, their keys and values are written there first.
//
// plan: see rows.cuh.

constexpr int WARPS = 4;
constexpr int TILE = 16;  // query heads and tokens together that share a load of keys: rows of the matrix units' tiles

template <typename T>
struct alignas(16) Eight { T of[8]; };

template <typename T>
struct alignas(8) Four { T of[4]; };

// Sums of values by softmax weights, and of the weights, which are powers of two relative to a maximum.
struct Mean {
  float maximum, total = 0;
  float4 sum = {};

  __device__ explicit Mean(float maximum) : maximum(maximum) {}

  __device__ static float relative(float top, float maximum) { return top == -INFINITY ? 0.0f : exp2f(top - maximum); }

  __device__ void shift(float higher) {
    const float by = relative(maximum, higher);
    maximum = higher, total *= by;
    sum.x *= by, sum.y *= by, sum.z *= by, sum.w *= by;
  }

  __device__ void add(float top, float weight, float4 of) {
    const float by = relative(top, maximum);
    total += weight * by;
    sum.x += of.x * by, sum.y += of.y * by, sum.z += of.z * by, sum.w += of.w * by;
  }
};

__device__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Keys are split over blocks (blockIdx.x) and, in a block, over its warps; what they find is put together by the block
// that comes last. blockIdx.y: key head and tile of query rows; blockIdx.z: row.
//
// As a sum over dimensions doesn't care for their order, a thread takes eight neighbouring ones where the matrix units
// would have it take four pairs, of keys and queries alike; and the eight dimensions of a value that it takes go to
// eight output tiles. A thread copies the keys that it reads itself. Values are copied in whole stretches, as memory
// gives them quickest (four keys of 128 bytes at a time, 512 apart, came at two thirds of the speed), and the chunks of
// 16 bytes of a value change places so that no two of them are wanted from one bank. STAGES tiles of keys and values are
// under way at a time.
//
// out: [T, HQ, D]. partial [R, gridDim.y, splits, TILE, D + 2]: sums, maxima, weights. counters: zero before and after.
template <typename T, int HQ, int HKV, int D, int STAGES, bool SINKS, bool GATED, int GATE_WIDTH, int GATE_STRIDE,
          typename Heads>
__device__ void attend(const int* plan, const Heads heads, T* const* slab_keys, T* const* slab_values, const T* sinks,
                       const T* gates, float scale, int shortest_split, T* out, float* partial, unsigned* counters) {
  constexpr int GROUP = HQ / HKV, STEPS = D / 16, LOADS = D / 32, BLOCKS = D / 64, TILES = D / 8;
  constexpr int CHUNKS = 2 * STEPS;  // that a thread copies for a tile of keys and values
  constexpr bool Q_IN_REGISTERS = D <= 128;
  const Row row(plan, blockIdx.z);
  const int tiles = gridDim.y / HKV, head = blockIdx.y / tiles, first_row = blockIdx.y % tiles * TILE;
  const int num_rows = min(row.num_tokens * GROUP - first_row, TILE);
  const int num_keys = row.start + row.num_tokens;
  const int begin_all = (row.window ? max(row.first, row.start - row.window + 1) : row.first) / TILE * TILE;
  const int per_warps = TILE * WARPS;
  const int even = (num_keys - begin_all + gridDim.x - 1) / gridDim.x;
  const int split = max(shortest_split, (even + per_warps - 1) / per_warps * per_warps);
  const int num_splits = (num_keys - begin_all + split - 1) / split;
  if (num_rows <= 0 || blockIdx.x >= num_splits) return;
  const int begin = begin_all + blockIdx.x * split, end = min(begin + split, num_keys);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, t = lane % 4;
  const long base = (static_cast<long>(row.slot) * HKV + head) * row.capacity;
  T* keys = slab_keys[row.slab] + base * D;
  T* values = slab_values[row.slab] + base * D;

  extern __shared__ uint4 staged[];
  uint4* own_stages = staged + warp * (STAGES * CHUNKS * 32);
  auto fetch = [&](int at, int stage) {
    uint4* to = own_stages + stage * (CHUNKS * 32);
    if (at < end) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const T* from = keys + static_cast<long>(min(at + half * 8 + r, num_keys - 1)) * D + t * 8;
#pragma unroll
        for (int i = 0; i < LOADS; i++) copy_async(to + (half * LOADS + i) * 32 + lane, from + i * 32);
      }
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        const int key = (i * 32 + lane) / TILES, chunk = (i * 32 + lane) % TILES;
        copy_async(to + STEPS * 32 + key * TILES + (chunk ^ (key / 2 % 4 * 2)),
                   values + static_cast<long>(min(at + key, num_keys - 1)) * D + chunk * 8);
      }
    }
    end_stage();
  };
  auto begin_fetching = [&] {
#pragma unroll 1
    for (int i = 0; i + 1 < STAGES; i++) fetch(begin + warp * TILE + i * per_warps, i);
  };
  const bool has_new = Heads::ARE_NEW && end > row.start;
  if (!has_new) begin_fetching();

  // Queries as the matrix units take them: two numbers next to each other, of rows r and r + 8 in turn, dimensions as the
  // keys are loaded.
  __shared__ __align__(16) T shared_q[STEPS * 32 * 8];
  __shared__ float maxima[WARPS][TILE], weights[WARPS][TILE];
  const int first_new = max(begin, row.start), num_new = has_new ? end - first_new : 0;
#pragma unroll 1
  for (int m = warp; m < TILE + 2 * num_new; m += WARPS) {
    // queries first, then a key and a value of each new token
    const int at = first_row + m, new_key = first_new + (m - TILE) / 2;
    const bool is_query = m < TILE;
    const Sort sort = is_query ? Sort::QUERY : (m % 2 ? Sort::VALUE : Sort::KEY);
    float x[LOADS] = {};
    if (!is_query || m < num_rows)
      heads.make(sort, row.lo + (is_query ? at / GROUP : new_key - row.start), is_query ? head * GROUP + at % GROUP : head, x);
    if (!is_query) {
      store((sort == Sort::KEY ? keys : values) + static_cast<long>(new_key) * D, x);
      continue;
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      const int step = 2 * i + lane % 8 / 4, thread = m % 8 * 4 + lane / 8, number = m / 8 + lane % 4 / 2 * 2;
      shared_q[((step * 32 + thread) * 4 + number) * 2 + lane % 2] = static_cast<T>(x[i]);
    }
  }
  __syncthreads();
  if (has_new) begin_fetching();
  const uint4* fragments = reinterpret_cast<const uint4*>(shared_q) + lane;
  uint4 q[Q_IN_REGISTERS ? STEPS : 1];
  if (Q_IN_REGISTERS) {
#pragma unroll
    for (int i = 0; i < STEPS; i++) q[Q_IN_REGISTERS ? i : 0] = fragments[i * 32];
  }

  float o[TILES][4] = {};
  float top[2] = {-INFINITY, -INFINITY}, weight[2] = {0, 0};
  // the last key that rows r and r + 8 see
  const int last[2] = {row.start + (first_row + r) / GROUP, row.start + (first_row + r + 8) / GROUP};
  for (int at = begin + warp * TILE, stage = 0; at < end; at += per_warps, stage = stage + 1 < STAGES ? stage + 1 : 0) {
    fetch(at + (STAGES - 1) * per_warps, stage ? stage - 1 : STAGES - 1);
    await_stage<STAGES - 1>();
    __syncwarp();
    const uint4* mine = own_stages + stage * (CHUNKS * 32);
    float s[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        const uint4 k = mine[(half * LOADS + i) * 32 + lane];
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const uint4 found = Q_IN_REGISTERS ? q[Q_IN_REGISTERS ? 2 * i + j : 0] : fragments[(2 * i + j) * 32];
          const unsigned a[4] = {found.x, found.y, found.z, found.w};
          multiply(s[half], a, j ? k.z : k.x, j ? k.w : k.y, T());
        }
      }
    float highest[2] = {top[0], top[1]};
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int key = at + half * 8 + t * 2 + j % 2;
        const bool seen = key >= row.first && key <= last[j / 2] && (!row.window || key > last[j / 2] - row.window) && key < end;
        s[half][j] = seen ? s[half][j] * scale : -INFINITY;
        highest[j / 2] = fmaxf(highest[j / 2], s[half][j]);
      }
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      highest[i] = quad_max(highest[i]);
      shrink[i] = highest[i] == -INFINITY ? 1.0f : exp2f(top[i] - highest[i]);
      top[i] = highest[i];
      weight[i] *= shrink[i];
    }
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        s[half][j] = s[half][j] == -INFINITY ? 0.0f : exp2f(s[half][j] - top[j / 2]);
        weight[j / 2] += s[half][j];
      }
    const unsigned p[4] = {pair_of<T>(s[0][0], s[0][1]), pair_of<T>(s[0][2], s[0][3]), pair_of<T>(s[1][0], s[1][1]),
                           pair_of<T>(s[1][2], s[1][3])};
#pragma unroll
    for (int i = 0; i < TILES; i++) o[i][0] *= shrink[0], o[i][1] *= shrink[0], o[i][2] *= shrink[1], o[i][3] *= shrink[1];
#pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
      Eight<T> v[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int key = t * 2 + j % 2 + j / 2 * 8;
        *reinterpret_cast<uint4*>(&v[j]) = mine[STEPS * 32 + key * TILES + block * 8 + (r ^ t * 2)];
      }
#pragma unroll
      for (int i = 0; i < 8; i++)
        multiply(o[block * 8 + i], p, pair(v[0].of[i], v[1].of[i]), pair(v[2].of[i], v[3].of[i]), T());
    }
    __syncwarp();  // all have read what is copied over next
  }

  // put the warps together: each leaves what it has found where its keys and values were
  weight[0] = quad_sum(weight[0]), weight[1] = quad_sum(weight[1]);
  if (t == 0) {
    maxima[warp][r] = top[0], maxima[warp][r + 8] = top[1];
    weights[warp][r] = weight[0], weights[warp][r + 8] = weight[1];
  }
  __syncwarp();
  constexpr int WARP_SUMS = STAGES * CHUNKS * 32 * 4;  // floats from one warp's to the next's
  float* sums = reinterpret_cast<float*>(staged);
#pragma unroll
  for (int half = 0; half < 2; half++) {
    if (r + half * 8 >= num_rows) continue;
    float4* to = reinterpret_cast<float4*>(sums + warp * WARP_SUMS + (r + half * 8) * D + t * 16);
#pragma unroll
    for (int block = 0; block < BLOCKS; block++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int i = block * 8 + j % 2 * 4, c = half * 2 + j / 2;
        to[block * 16 + j] = {o[i][c], o[i + 1][c], o[i + 2][c], o[i + 3][c]};
      }
  }
  __syncthreads();

  // four neighbouring dimensions i of row m: their sums by softmax weights of this maximum and total
  auto finish = [&](int i, float4 sum, float maximum, float total) {
    const int m = i / D, d = i % D, at = first_row + m, token = row.lo + at / GROUP, h = head * GROUP + at % GROUP;
    float scale_by = 1.0f;
    if (SINKS) {
      const float sink = static_cast<float>(sinks[h]) * 1.44269504f, higher = fmaxf(sink, maximum);
      scale_by = exp2f(maximum - higher);
      total = total * scale_by + exp2f(sink - higher);
    }
    const float by = scale_by / total, found[4] = {sum.x * by, sum.y * by, sum.z * by, sum.w * by};
    Four<T> value;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float x = found[j];
      if (GATED) x = rounded<T>(x) * rounded<T>(sigmoid(static_cast<float>(gates[static_cast<long>(token) * GATE_WIDTH + h * GATE_STRIDE + d + j])));
      value.of[j] = static_cast<T>(x);
    }
    *reinterpret_cast<Four<T>*>(out + (static_cast<long>(token) * HQ + h) * D + d) = value;
  };
  constexpr int PART = TILE * (D + 2);
  const long tile = static_cast<long>(blockIdx.z) * gridDim.y + blockIdx.y;
  float* own = partial + (tile * gridDim.x + blockIdx.x) * PART;
  for (int i = threadIdx.x * 4; i < num_rows * D; i += blockDim.x * 4) {
    float maximum = -INFINITY;
#pragma unroll
    for (int w = 0; w < WARPS; w++) maximum = fmaxf(maximum, maxima[w][i / D]);
    Mean mean(maximum);
#pragma unroll
    for (int w = 0; w < WARPS; w++)
      mean.add(maxima[w][i / D], weights[w][i / D], *reinterpret_cast<const float4*>(sums + w * WARP_SUMS + i));
    if (num_splits == 1) {
      finish(i, mean.sum, maximum, mean.total);
    } else {
      *reinterpret_cast<float4*>(own + i) = mean.sum;
      if (i % D == 0) own[TILE * D + i / D] = maximum, own[TILE * (D + 1) + i / D] = mean.total;
    }
  }
  if (num_splits == 1) return;

  // put the splits together
  __threadfence();
  __syncthreads();
  __shared__ bool comes_last;
  if (threadIdx.x == 0) comes_last = atomicInc(&counters[tile], num_splits - 1) == num_splits - 1;
  __syncthreads();
  if (!comes_last) return;
  __threadfence();
  const float* parts = partial + tile * gridDim.x * PART;
  constexpr int TOGETHER = 8;  // parts under way at a time
  for (int i = threadIdx.x * 4; i < num_rows * D; i += blockDim.x * 4) {
    Mean mean(-INFINITY);
    for (int first = 0; first < num_splits; first += TOGETHER) {
      float tops[TOGETHER], totals[TOGETHER], maximum = mean.maximum;
      float4 of[TOGETHER];
#pragma unroll
      for (int j = 0; j < TOGETHER; j++) {
        const float* part = parts + min(first + j, num_splits - 1) * PART;
        tops[j] = first + j < num_splits ? __ldcg(part + TILE * D + i / D) : -INFINITY;
        totals[j] = __ldcg(part + TILE * (D + 1) + i / D);
        of[j] = __ldcg(reinterpret_cast<const float4*>(part + i));
        maximum = fmaxf(maximum, tops[j]);
      }
      mean.shift(maximum);
#pragma unroll
      for (int j = 0; j < TOGETHER; j++) mean.add(tops[j], totals[j], of[j]);
    }
    finish(i, mean.sum, mean.maximum, mean.total);
  }
}
