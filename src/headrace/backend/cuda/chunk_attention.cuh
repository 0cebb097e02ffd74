// Attention of prompts' chunks over keys and values in slabs, see state/slabs.py, where the chunks' own are written already.
//
// plan: see rows.cuh. queries [T, HQ, D]. small [T, HQ, D]: results of small rows from attention.cuh, which are copied.
//
// A block takes a tile of TILE query rows: the heads that share a key head, of neighbouring tokens. A warp takes 16 of them, and
// all warps read the same keys from shared memory, KEYS at a time while the next ones are copied. Tiles of keys begin at
// multiples of KEYS from the slot's beginning, so a token's sums hardly depend on where chunks are cut.

constexpr int WARPS = 4;
constexpr int TILE = 16 * WARPS;
constexpr int PAD = 8;  // behind a row in shared memory: eight rows then lie in different banks

// A row's keys in parts of `size`, for separate blocks where the row has fewer tiles than blocks run at once.
struct KeyParts {
  int begin, size, number;

  // keys: how many are read at a time. fewest: keys of a part. fixed: every part has so few, counted from the row's first key, so
  // that the parts don't depend on the row's other tokens
  __device__ KeyParts(const Row& row, int num_tiles, int keys, int blocks_at_once, int fewest, bool fixed) {
    const int first = row.window ? max(row.first, row.start - row.window + 1) : row.first, origin = row.first / PLACES * PLACES;
    if (fixed) keys = fewest;
    begin = origin + (first - origin) / keys * keys;
    const int total = row.start + row.num_tokens - begin;
    const int wanted = max(1, min(blocks_at_once / max(num_tiles, 1), total / fewest));
    size = fixed ? fewest : (total + wanted * keys - 1) / (wanted * keys) * keys;
    number = row.num_tokens ? (total + size - 1) / size : 0;
  }
};

// What a thread has found for rows r and r + 8 of its warp: the highest scores, the sums of weights, and the sums of values times
// weights in columns 8 i + 2 t and 8 i + 2 t + 1.
template <int D>
struct Found {
  static constexpr int TILES = D / 8, THREADS = WARPS * 32;
  static constexpr int SIZE = (TILES + 1) * THREADS * 4;  // floats of all threads in memory
  float top[2] = {-INFINITY, -INFINITY}, weight[2] = {}, o[TILES][4] = {};

  __device__ static float4* place(float* memory, int i) { return reinterpret_cast<float4*>(memory) + i * THREADS + threadIdx.x; }

  __device__ void write(float* memory) const {
    *place(memory, TILES) = {top[0], top[1], weight[0], weight[1]};
#pragma unroll
    for (int i = 0; i < TILES; i++) *place(memory, i) = {o[i][0], o[i][1], o[i][2], o[i][3]};
  }

  __device__ void read(float* memory) {
    const float4 of_rows = __ldcg(place(memory, TILES));
    top[0] = of_rows.x, top[1] = of_rows.y, weight[0] = of_rows.z, weight[1] = of_rows.w;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const float4 sums = __ldcg(place(memory, i));
      o[i][0] = sums.x, o[i][1] = sums.y, o[i][2] = sums.z, o[i][3] = sums.w;
    }
  }

  // Adds what is in memory: of the keys before these, or of those behind them.
  template <bool IS_BEFORE>
  __device__ void add(float* memory) {
    const float4 of_rows = __ldcg(place(memory, TILES));
    const float tops[2] = {of_rows.x, of_rows.y}, weights[2] = {of_rows.z, of_rows.w};
    float by[2], by_added[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float higher = fmaxf(top[i], tops[i]);
      by[i] = relative(top[i], higher), by_added[i] = relative(tops[i], higher), top[i] = higher;
    }
    auto put = [&](float& own, float added, int i) {
      own = IS_BEFORE ? put_together(added, by_added[i], own, by[i]) : put_together(own, by[i], added, by_added[i]);
    };
    put(weight[0], weights[0], 0), put(weight[1], weights[1], 1);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const float4 sums = __ldcg(place(memory, i));
      put(o[i][0], sums.x, 0), put(o[i][1], sums.y, 0), put(o[i][2], sums.z, 1), put(o[i][3], sums.w, 1);
    }
  }
};

// If there is memory for the parts of all tiles, each part is a separate item, and the block that is done last with one of a
// tile's parts adds them up; else an item is a tile, whose parts a block computes one after the other. Both add the parts in
// order, so a row's sums don't depend on the rows beside it.
//
// FIXED_PARTS: see KeyParts; no row is small then.
//
// partial [most_parts, Found<D>::SIZE]: at least one for each block. counters [most_parts]: zero before and after.
template <typename T, int HQ, int HKV, int D, int KEYS, int BLOCKS_AT_ONCE, int FEWEST_KEYS, bool FIXED_PARTS, int MANY_TOKENS,
          int MANY_KEYS, typename Output>
__device__ void attend_chunks(const int* plan, int plan_rows, const T* queries, const T* small, T* const* slab_keys,
                              T* const* slab_values, const Output output, float scale, int most_parts, float* partial, unsigned* counters) {
  constexpr int GROUP = HQ / HKV, STEPS = D / 16, TILES = D / 8, KEY_TILES = KEYS / 8, THREADS = WARPS * 32, WIDTH = D + PAD;
  constexpr bool Q_IN_REGISTERS = D <= 128;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane / 4, t = lane % 4;
  extern __shared__ uint4 staged[];
  T* own_queries = reinterpret_cast<T*>(staged);  // [TILE, WIDTH]
  T* stages = own_queries + TILE * WIDTH;         // [2, keys and values, KEYS, WIDTH]
  // Where it pads the first query: heads of 256 take all shared memory that a block has on cards for desktops.
  bool& comes_last = *reinterpret_cast<bool*>(own_queries + D);

  auto num_tiles = [&](const Row& row) { return HKV * ((row.num_tokens * GROUP + TILE - 1) / TILE); };
  auto is_small = [](const Row& row) { return row.is_small(MANY_TOKENS, MANY_KEYS); };
  auto parts_of = [&](const Row& row) {
    return KeyParts(row, num_tiles(row), KEYS, BLOCKS_AT_ONCE, is_small(row) ? 1 << 30 : FEWEST_KEYS, FIXED_PARTS);
  };
  auto num_parts = [&](int at) {
    if (at >= plan_rows) return 0;
    const Row row(plan, at);
    return num_tiles(row) * parts_of(row).number;
  };
  auto num_whole = [&](int at) { return at < plan_rows ? num_tiles(Row(plan, at)) : 0; };
  const int all_parts = sum_of_items(plan_rows, num_parts), blocks = gridDim.x;
  const bool parts_fit = all_parts <= most_parts;
  const int total = parts_fit ? all_parts : sum_of_items(plan_rows, num_whole);

  for (int turn = 0; turn * blocks < total; turn++) {
    // in turn upwards and downwards, so that blocks get equal shares: a row's last tiles, which take longest, come first
    const int item = turn * blocks + (turn % 2 ? blocks - 1 - blockIdx.x : blockIdx.x);
    if (item >= total) continue;
    int row_item;
    const Row row(plan, parts_fit ? row_of(item, num_parts, row_item) : row_of(item, num_whole, row_item));
    const KeyParts parts = parts_of(row);
    const int own_part = parts_fit ? (item - row_item) % parts.number : 0;
    const int reversed = num_tiles(row) - 1 - (item - row_item) / (parts_fit ? parts.number : 1);
    const int head = reversed % HKV, first_row = reversed / HKV * TILE, num_rows = min(row.num_tokens * GROUP - first_row, TILE);
    auto place = [&](int m, int i) {  // in queries and results
      const int of_row = first_row + m;
      return (static_cast<long>(row.lo + of_row / GROUP) * HQ + head * GROUP + of_row % GROUP) * D + i * 8;
    };
    if (is_small(row)) {
      for (int i = threadIdx.x; i < num_rows * TILES; i += THREADS) {
        const long at = place(i / TILES, i % TILES);
        *reinterpret_cast<uint4*>(output.out + at) = *reinterpret_cast<const uint4*>(small + at);
      }
      continue;
    }
    const int num_keys = row.start + (first_row + num_rows - 1) / GROUP + 1;  // that the tile's last token sees
    const int first_key = row.window ? max(row.first, row.start + first_row / GROUP - row.window + 1) : row.first;
    const long base = (static_cast<long>(row.slot) * HKV + head) * row.capacity * D;
    const T *keys = slab_keys[row.slab] + base, *values = slab_values[row.slab] + base;
    // tokens of a warp's rows r and r + 8, and of its first and last
    auto token_of = [&](int m) { return min(first_row + warp * 16 + m, row.num_tokens * GROUP - 1) / GROUP; };
    const int last[2] = {row.start + token_of(r), row.start + token_of(r + 8)};
    const int lowest = row.start + token_of(0), highest = row.start + token_of(15);

    auto fetch = [&](int at, int stage) {
      T* to = stages + stage * (2 * KEYS * WIDTH);
#pragma unroll
      for (int i = threadIdx.x; i < KEYS * TILES; i += THREADS) {
        const int key = i / TILES, d = i % TILES * 8;
        const long from = static_cast<long>(max(first_key, min(at + key, num_keys - 1))) * D + d;
        copy_async(to + key * WIDTH + d, keys + from);
        copy_async(to + (KEYS + key) * WIDTH + d, values + from);
      }
      end_stage();
    };
    await_stage<0>();  // queries of a tile before that saw none of its part's keys: copies under way have no order
    __syncthreads();   // the tile before is done with what is copied over
    for (int i = threadIdx.x; i < TILE * TILES; i += THREADS)
      copy_async(own_queries + i / TILES * WIDTH + i % TILES * 8, queries + place(min(i / TILES, num_rows - 1), i % TILES));
    end_stage();
    auto query_at = [&](unsigned (&to)[4], int i) { load_tiles(to, own_queries + (warp * 16 + lane % 16) * WIDTH + i * 16 + lane / 16 * 8); };
    unsigned q[Q_IN_REGISTERS ? STEPS : 1][4];
    if (Q_IN_REGISTERS) {
      await_stage<0>();
      __syncthreads();
#pragma unroll
      for (int i = 0; i < STEPS; i++) query_at(q[Q_IN_REGISTERS ? i : 0], i);
    }

    auto memory_of = [&](int number) { return partial + static_cast<long>(number) * Found<D>::SIZE; };
    float* own_memory = memory_of(parts_fit ? item : blockIdx.x);
    const int end_part = parts_fit ? own_part + 1 : parts.number;
    for (int part = own_part; part < end_part; part++) {
      Found<D> found;
      auto &o = found.o;
      auto &top = found.top, &weight = found.weight;
      const int part_begin = parts.begin + part * parts.size, end = min(part_begin + parts.size, num_keys);
      int at = max(part_begin, parts.begin + (first_key - parts.begin) / KEYS * KEYS), stage = 0;
      if (part > own_part) __syncthreads();  // all warps are done with the stage that is copied over
      if (at < end) fetch(at, 0);
      for (; at < end; at += KEYS, stage ^= 1) {
        await_stage<0>();
        __syncthreads();
        if (at + KEYS < end) fetch(at + KEYS, stage ^ 1);
        if (at > highest || (row.window && at + KEYS <= lowest - row.window + 1)) continue;  // the warp sees none of them
        const T *own_keys = stages + stage * (2 * KEYS * WIDTH), *own_values = own_keys + KEYS * WIDTH;
        float s[KEY_TILES][4] = {};
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
          unsigned a[4];
          if (Q_IN_REGISTERS) {
#pragma unroll
            for (int j = 0; j < 4; j++) a[j] = q[Q_IN_REGISTERS ? i : 0][j];
          } else {
            query_at(a, i);
          }
#pragma unroll
          for (int n = 0; n < KEY_TILES; n += 2) {
            unsigned b[4];
            load_tiles(b, own_keys + (n * 8 + lane / 16 * 8 + lane % 8) * WIDTH + i * 16 + lane / 8 % 2 * 8);
            multiply(s[n], a, b[0], b[1], T());
            multiply(s[n + 1], a, b[2], b[3], T());
          }
        }
        const bool all_seen = at + KEYS - 1 <= lowest && at >= row.first && (!row.window || at > highest - row.window);
        float higher[2] = {top[0], top[1]};
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const int key = at + n * 8 + t * 2 + j % 2;
            const bool seen = all_seen || (key >= row.first && key <= last[j / 2] && (!row.window || key > last[j / 2] - row.window));
            s[n][j] = seen ? __fmul_rn(s[n][j], scale) : -INFINITY;  // else fused into the next sum where all are seen
            higher[j / 2] = fmaxf(higher[j / 2], s[n][j]);
          }
        float shrink[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          higher[i] = quad_max(higher[i]);
          shrink[i] = relative(top[i], higher[i]);
          top[i] = higher[i];
          weight[i] = __fmul_rn(weight[i], shrink[i]);
        }
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
          for (int j = 0; j < 4; j++) {
            s[n][j] = relative(s[n][j], top[j / 2]);
            weight[j / 2] += s[n][j];
          }
#pragma unroll
        for (int i = 0; i < TILES; i++) o[i][0] *= shrink[0], o[i][1] *= shrink[0], o[i][2] *= shrink[1], o[i][3] *= shrink[1];
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++) {
          const float(&low)[4] = s[2 * j], (&high)[4] = s[2 * j + 1];
          const unsigned p[4] = {pair_of<T>(low[0], low[1]), pair_of<T>(low[2], low[3]), pair_of<T>(high[0], high[1]),
                                 pair_of<T>(high[2], high[3])};
#pragma unroll
          for (int i = 0; i < TILES; i += 2) {
            unsigned b[4];
            load_columns(b, own_values + (j * 16 + lane % 16) * WIDTH + i * 8 + lane / 16 * 8);
            multiply(o[i], p, b[0], b[1], T());
            multiply(o[i + 1], p, b[2], b[3], T());
          }
        }
      }
      weight[0] = quad_sum(weight[0]), weight[1] = quad_sum(weight[1]);

      if (parts_fit && parts.number > 1) {
        found.write(own_memory);
        __threadfence();
        __syncthreads();
        const int first = item - part;  // of the tile's parts
        if (threadIdx.x == 0) comes_last = atomicAdd(&counters[first], 1u) + 1 == parts.number;
        __syncthreads();
        if (!comes_last) break;
        __threadfence();
        if (threadIdx.x == 0) counters[first] = 0;
        found.read(memory_of(first));
        for (int i = 1; i < parts.number; i++) found.template add<false>(memory_of(first + i));
      } else {
        if (part) found.template add<true>(own_memory);
        if (part + 1 < parts.number) {
          found.write(own_memory);
          continue;
        }
      }
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int m = warp * 16 + half * 8 + r;
        if (m >= num_rows) continue;
        const int token = row.lo + (first_row + m) / GROUP, h = head * GROUP + (first_row + m) % GROUP;
        const float by = output.factor(h, top[half], weight[half]);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
          const float sums[2] = {o[i][half * 2], o[i][half * 2 + 1]};
          output.put(token, h, i * 8 + t * 2, sums, by);
        }
      }
    }
  }
}
