// Attention of rows of a few tokens over keys and values in slabs [slots, HKV, capacity, D], see state/slabs.py. Where
// heads are new, see heads.cuh, their keys and values are written there first.
//
// plan: see rows.cuh.

constexpr int WARPS = 4;
constexpr int TILE = 16;  // query heads and tokens together that share a load of keys: rows of the matrix units' tiles

template <typename T>
struct alignas(16) Eight { T of[8]; };

// Sums of values by softmax weights, and of the weights, which are powers of two relative to a maximum.
struct Mean {
  float maximum, total;
  float4 sum;

  // What has weights relative to another maximum.
  __device__ void add(float top, float weight, float4 of) {
    const float higher = fmaxf(maximum, top), by = relative(maximum, higher), by_added = relative(top, higher);
    maximum = higher;
    total = put_together(total, by, weight, by_added);
    sum = {put_together(sum.x, by, of.x, by_added), put_together(sum.y, by, of.y, by_added),
           put_together(sum.z, by, of.z, by_added), put_together(sum.w, by, of.w, by_added)};
  }
};

// What a tile finds in some of a row's splits, in memory that other blocks read: sums, then maxima and weights of rows. What has
// grown by a split is written where its readers don't still read the maxima and weights from before it.
template <int D>
struct Part {
  static constexpr int SIZE = TILE * (D + 4);
  float* memory;

  __device__ explicit Part(float* memory) : memory(memory) {}

  // at: of four neighbouring numbers in [TILE, D]
  __device__ Mean read(int at, int split) const {
    const float* of_row = memory + TILE * D + split % 2 * (2 * TILE) + at / D;
    return {of_row[0], of_row[TILE], *reinterpret_cast<const float4*>(memory + at)};
  }

  // What another block has written.
  __device__ Mean read_fresh(int at, int split) const {
    const float* of_row = memory + TILE * D + split % 2 * (2 * TILE) + at / D;
    return {__ldcg(of_row), __ldcg(of_row + TILE), __ldcg(reinterpret_cast<const float4*>(memory + at))};
  }

  __device__ void write(int at, int split, const Mean& mean) const {
    float* of_row = memory + TILE * D + split % 2 * (2 * TILE) + at / D;
    if (at % D == 0) of_row[0] = mean.maximum, of_row[TILE] = mean.total;
    *reinterpret_cast<float4*>(memory + at) = mean.sum;
  }
};

// A row's keys are split as splits.cuh says. What a tile of query rows finds in a split is put together of what the block's
// warps find in it, and what it finds in all of them by adding one split after the other. So a row's sums depend on the row
// alone, whatever blocks make them: the splits of all tiles of all rows are numbered, and each block takes its share of them,
// one behind the other. Where all of a tile's splits are one block's, it has the result; else each block leaves what it has
// found, and the one that comes last adds it up.
//
// As a sum over dimensions doesn't care for their order, a thread takes eight neighbouring ones where the matrix units
// would have it take four pairs, of keys and queries alike; and the eight dimensions of a value that it takes go to
// eight output tiles. A thread copies the keys that it reads itself. Values are copied in whole stretches, as memory
// gives them quickest (four keys of 128 bytes at a time, 512 apart, came at two thirds of the speed), and the chunks of
// 16 bytes of a value change places so that no two of them are wanted from one bank. STAGES tiles of keys and values are
// under way at a time.
//
// partial [gridDim.x, num_parts, TILE, D + 4], see Part. counters [gridDim.x]: zero before and after.
// RUNS_IN_SHARED: there is shared memory for what a block adds up. MANY_TOKENS: 0 for all rows, else for small ones.
template <typename T, int HQ, int HKV, int D, int STAGES, bool RUNS_IN_SHARED, int MANY_TOKENS, int MANY_KEYS, typename Heads,
          typename Output>
__device__ void attend(const int* plan, int plan_rows, const Heads heads, T* const* slab_keys, T* const* slab_values,
                       const Output output, float scale, int shortest_split, int num_parts, float* partial, unsigned* counters) {
  constexpr int GROUP = HQ / HKV, STEPS = D / 16, LOADS = D / 32, BLOCKS = D / 64, TILES = D / 8;
  constexpr int CHUNKS = 2 * STEPS;  // that a thread copies for a tile of keys and values
  constexpr bool Q_IN_REGISTERS = D <= 128;
  constexpr int PER_WARPS = TILE * WARPS;
  constexpr int TOGETHER = 4;  // query rows whose sums the warps put together at a time
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, t = lane % 4;
  extern __shared__ uint4 staged[];
  uint4* own_stages = staged + warp * (STAGES * CHUNKS * 32);
  // Queries as the matrix units take them: two numbers next to each other, of rows r and r + 8 in turn, dimensions as the
  // keys are loaded.
  __shared__ __align__(16) T shared_q[STEPS * 32 * 8];
  __shared__ __align__(16) float sums[WARPS * TOGETHER * D];
  __shared__ float maxima[WARPS][TILE], weights[WARPS][TILE];
  __shared__ __align__(16) float running[RUNS_IN_SHARED ? Part<D>::SIZE : 4];
  __shared__ bool comes_last;

  auto num_tiles = [](const Row& row) { return (row.num_tokens * GROUP + TILE - 1) / TILE; };  // of a key head
  auto num_items = [&](int at) {  // splits of all tiles of a row of the plan
    if (at >= plan_rows) return 0;
    const Row row(plan, at);
    if (MANY_TOKENS && !row.is_small(MANY_TOKENS, MANY_KEYS)) return 0;
    return HKV * num_tiles(row) * Splits(row, shortest_split).number;
  };
  const int total = sum_of_items(plan_rows, num_items);
  const int share = (total + gridDim.x - 1) / gridDim.x;
  const int first_item = blockIdx.x * share, end_item = min(first_item + share, total);
  if (first_item >= end_item) return;
  int row_item, row_at = row_of(first_item, num_items, row_item);

  auto part_of = [&](int block, int number) { return Part<D>(partial + (static_cast<long>(block) * num_parts + number) * Part<D>::SIZE); };
  for (int item = first_item; item < end_item;) {
    const Row row(plan, row_at);
    const Splits splits(row, shortest_split);
    const int tiles = num_tiles(row), items = num_items(row_at);
    if (item >= row_item + items) {
      row_item += items, row_at++;
      continue;
    }
    const int tile = (item - row_item) / splits.number, head = tile / tiles, first_row = tile % tiles * TILE;
    const int first_split = (item - row_item) % splits.number;
    const int end_split = min(splits.number, first_split + end_item - item);
    const int num_rows = min(row.num_tokens * GROUP - first_row, TILE);
    const int num_keys = row.start + (first_row + num_rows - 1) / GROUP + 1;  // that the tile's last token sees
    const int begin = splits.origin + (splits.first + first_split) * splits.size;
    const int segment_end = min(begin + (end_split - first_split) * splits.size, num_keys);
    const long base = (static_cast<long>(row.slot) * HKV + head) * row.capacity;
    T* keys = slab_keys[row.slab] + base * D;
    T* values = slab_values[row.slab] + base * D;

    auto fetch = [&](int at, int stage) {
      uint4* to = own_stages + stage * (CHUNKS * 32);
      if (at < segment_end) {
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
    // the warp's first keys: which warp takes which doesn't depend on where those begin that are seen
    int at = begin + warp * TILE;
    if (splits.begin > begin) at += (splits.begin - begin) / PER_WARPS * PER_WARPS;
    if (at + TILE <= splits.begin) at += PER_WARPS;
    auto begin_fetching = [&] {
#pragma unroll 1
      for (int i = 0; i + 1 < STAGES; i++) fetch(at + i * PER_WARPS, i);
    };
    const bool has_new = Heads::ARE_NEW && segment_end > row.start;
    if (!has_new) begin_fetching();

    const int first_new = max(begin, row.start), num_new = has_new ? max(0, segment_end - first_new) : 0;
#pragma unroll 1
    for (int m = warp; m < TILE + 2 * num_new; m += WARPS) {
      // queries first, then a key and a value of each new token
      const int of_row = first_row + m, new_key = first_new + (m - TILE) / 2;
      const bool is_query = m < TILE;
      const Sort sort = is_query ? Sort::QUERY : (m % 2 ? Sort::VALUE : Sort::KEY);
      float x[LOADS] = {};
      if (!is_query || m < num_rows)
        heads.make(sort, row.lo + (is_query ? of_row / GROUP : new_key - row.start), is_query ? head * GROUP + of_row % GROUP : head, x);
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

    // four neighbouring dimensions i of row m: their sums by softmax weights
    auto finish = [&](int i, const Mean& mean) {
      const int m = i / D, of_row = first_row + m, h = head * GROUP + of_row % GROUP;
      const float sum[4] = {mean.sum.x, mean.sum.y, mean.sum.z, mean.sum.w};
      output.put(row.lo + of_row / GROUP, h, i % D, sum, output.factor(h, mean.maximum, mean.total));
    };

    // the last key that rows r and r + 8 see
    const int last[2] = {row.start + (first_row + r) / GROUP, row.start + (first_row + r + 8) / GROUP};
    int stage = 0;
#pragma unroll 1
    for (int split = first_split; split < end_split; split++) {
      const int split_end = min(begin + (split + 1 - first_split) * splits.size, segment_end);
      float o[TILES][4] = {};
      float top[2] = {-INFINITY, -INFINITY}, weight[2] = {0, 0};
      for (; at < split_end; at += PER_WARPS, stage = stage + 1 < STAGES ? stage + 1 : 0) {
        fetch(at + (STAGES - 1) * PER_WARPS, stage ? stage - 1 : STAGES - 1);
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
            const bool seen = key >= row.first && key <= last[j / 2] && (!row.window || key > last[j / 2] - row.window) && key < segment_end;
            s[half][j] = seen ? __fmul_rn(s[half][j], scale) : -INFINITY;
            highest[j / 2] = fmaxf(highest[j / 2], s[half][j]);
          }
        float shrink[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          highest[i] = quad_max(highest[i]);
          shrink[i] = highest[i] == -INFINITY ? 1.0f : exp2f(top[i] - highest[i]);
          top[i] = highest[i];
          weight[i] = __fmul_rn(weight[i], shrink[i]);
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

      weight[0] = quad_sum(weight[0]), weight[1] = quad_sum(weight[1]);
      if (t == 0) {
        maxima[warp][r] = top[0], maxima[warp][r + 8] = top[1];
        weights[warp][r] = weight[0], weights[warp][r + 8] = weight[1];
      }
      // From the tile's first split on the block adds up what it finds, in a part of its own; what it finds in splits of a
      // tile that another block has begun it leaves one by one.
      const bool adds_up = first_split == 0;
      const Part<D> growing = RUNS_IN_SHARED ? Part<D>(running) : part_of(blockIdx.x, 0);
      const Part<D> left = part_of(blockIdx.x, adds_up ? 0 : 1 + item - first_item + split - first_split);
      const Part<D> to = adds_up && split + 1 < end_split ? growing : left;
#pragma unroll 1
      for (int m0 = 0; m0 < num_rows; m0 += TOGETHER) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int m = r + half * 8 - m0;
          if (m < 0 || m >= TOGETHER) continue;
          float4* own = reinterpret_cast<float4*>(sums + (warp * TOGETHER + m) * D + t * 16);
#pragma unroll
          for (int block = 0; block < BLOCKS; block++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
              const int i = block * 8 + j % 2 * 4, c = half * 2 + j / 2;
              own[block * 16 + j] = {o[i][c], o[i + 1][c], o[i + 2][c], o[i + 3][c]};
            }
        }
        __syncthreads();
        for (int i = threadIdx.x * 4; i < min(TOGETHER, num_rows - m0) * D; i += blockDim.x * 4) {
          const int m = m0 + i / D, at_row = m * D + i % D;
          Mean found = {maxima[0][m], weights[0][m], *reinterpret_cast<const float4*>(sums + i)};
#pragma unroll
          for (int w = 1; w < WARPS; w++)
            found.add(maxima[w][m], weights[w][m], *reinterpret_cast<const float4*>(sums + w * TOGETHER * D + i));
          if (adds_up && split) {
            Mean mean = growing.read(at_row, split - 1);
            mean.add(found.maximum, found.total, found.sum);
            found = mean;
          }
          if (adds_up && split + 1 == splits.number) finish(at_row, found);
          else to.write(at_row, split, found);
        }
        __syncthreads();
      }
    }

    const int tile_item = item - first_split, owner = tile_item / share;  // the block that has begun the tile
    item += end_split - first_split;
    if (end_split - first_split == splits.number) continue;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      const int num_added = end_split - first_split;
      comes_last = static_cast<int>(atomicAdd(&counters[owner], static_cast<unsigned>(num_added))) + num_added == splits.number;
      if (comes_last) counters[owner] = 0;
    }
    __syncthreads();
    if (!comes_last) continue;
    __threadfence();
    const int end = tile_item + splits.number, added_up = min((owner + 1) * share, end);
    constexpr int AT_ONCE = 8;  // parts under way at a time
    for (int i = threadIdx.x * 4; i < num_rows * D; i += blockDim.x * 4) {
      Mean mean = part_of(owner, 0).read_fresh(i, added_up - 1 - tile_item);
      for (int first = added_up; first < end; first += AT_ONCE) {
        Mean found[AT_ONCE];
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
          const int of = min(first + j, end - 1);
          found[j] = part_of(of / share, 1 + of % share).read_fresh(i, of - tile_item);
        }
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++)
          if (first + j < end) mean.add(found[j].maximum, found[j].total, found[j].sum);
      }
      finish(i, mean);
    }
  }
}
