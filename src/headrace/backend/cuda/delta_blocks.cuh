// The scan of delta_scan.cuh for numbers of 16 bits, a block of tokens at once by the matrix units. Arguments as there; the
// formulas and their names R, L and G are those of the chunked form in backend/delta_rule.py, with its chunk for our block.
//
// A row of fewer than LEAST tokens goes through delta_scan instead, whatever rows are beside it.
//
// A block of threads does WARPS * 16 value channels of a head of a row. Each of WARPS warps holds its channels' state in
// registers and goes through the blocks of tokens; the last warp solves the next block's triangular system meanwhile. What is of
// float32 goes into the matrix units as two numbers of 16 bits, so that states are good to some 16 bits.

constexpr int BLOCK = 32;
constexpr int PAD = 8;  // behind a row in shared memory: eight rows then lie in different banks

// Two neighbouring numbers, each as the sum of two of 16 bits.
template <typename T>
struct Split {
  unsigned high, low;
  __device__ Split(float a, float b) : high(pair_of<T>(a, b)) {
    const float2 found = unpacked(high, T());
    low = pair_of<T>(a - found.x, b - found.y);
  }
};

__device__ float2 two_of(const float* from, int at) { return *reinterpret_cast<const float2*>(from + at); }

// The left side of a product: four 8 x 8 parts of a tile [16, 16], of two tiles [16, 8] that a product has left.
template <typename T>
struct Left {
  unsigned high[4], low[4];

  __device__ Left(const float (&first)[4], const float (&second)[4]) {
    const float* tiles[] = {first, second};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Split<T> split(tiles[i / 2][i % 2 * 2], tiles[i / 2][i % 2 * 2 + 1]);
      high[i] = split.high, low[i] = split.low;
    }
  }

  // c += this times b, whose numbers are exact in T
  __device__ void times(float (&c)[4], unsigned b0, unsigned b1) const {
    multiply(c, high, b0, b1, T());
    multiply(c, low, b0, b1, T());
  }
};

// A matrix [BLOCK, BLOCK] of float32, split likewise.
template <typename T>
struct Halves {
  T high[BLOCK][BLOCK + PAD], low[BLOCK][BLOCK + PAD];

  // two numbers beside each other
  __device__ void put(int row, int column, Split<T> two) {
    *reinterpret_cast<unsigned*>(&high[row][column]) = two.high, *reinterpret_cast<unsigned*>(&low[row][column]) = two.low;
  }

  // two numbers below one another
  __device__ void put_below(int row, int column, Split<T> two) {
    for (int i = 0; i < 2; i++) high[row + i][column].bits = two.high >> i * 16, low[row + i][column].bits = two.low >> i * 16;
  }
};

template <typename T, int DK, int CHANNELS>
struct Stage {
  T k[BLOCK][DK + PAD], q[BLOCK][DK + PAD], v[BLOCK][CHANNELS + PAD];
  float g[2 * BLOCK], beta[BLOCK];  // the second half of g is read but not used
};

// Of BLOCK rows of WIDTH numbers, a stride apart, the first `count`; zeros for the others.
template <int WIDTH, int THREADS, typename T>
__device__ void copy_rows(T (&to)[BLOCK][WIDTH + PAD], const T* from, int stride, int count) {
  constexpr int PACKS = WIDTH / 8, ROWS = THREADS / PACKS;  // of a row, and at once
  const int first = threadIdx.x / PACKS, place = threadIdx.x % PACKS * 8;
  from += first * stride + place;
#pragma unroll
  for (int i = 0; i < BLOCK; i += ROWS)
    if (first < min(ROWS, BLOCK - i)) copy_async_if(first + i < count, &to[first + i][place], from + i * stride);
}

template <typename T>
struct Solved {
  Halves<T> inverse, mixing;               // R, and L * Q K^T
  float from_begin[BLOCK], to_end[BLOCK];  // G, and the last row of L
};

template <typename T, int DK, int CHANNELS>
struct BlockMemory {
  Stage<T, DK, CHANNELS> stages[3];
  Solved<T> solved[2];
  float decay[BLOCK][BLOCK + 3];    // L[token + i, token] at [i][token]; columns of different rows lie in different banks
  float diagonal[16][2][16 + 4];    // rows of the system's two blocks [16, 16] on the diagonal
};

// Where the blocks of a row end: after BLOCK tokens, and wherever its state is wanted.
struct Ends {
  const Chunk& chunk;
  const int* stops;
  int stop;

  __device__ Ends(const Chunk& chunk, const int* stops) : chunk(chunk), stops(stops), stop(chunk.first_stop) {}

  __device__ bool is_last() const { return stop == chunk.first_stop + chunk.num_stops; }

  // Where the state is wanted next: at the stops, and then at the certain tokens' end.
  __device__ int upcoming() const {
    const int last = chunk.first_stop + chunk.num_stops;
    return stop < last ? stops[stop] : (stop == last ? chunk.num_certain : chunk.num_tokens + 1);
  }

  __device__ int after(int begin) {
    while (upcoming() <= begin) stop++;
    return min(min(begin + BLOCK, upcoming()), chunk.num_tokens);
  }
};

template <typename T, int HK, int HV, int DK, int DV, int WARPS, int LEAST>
__device__ void delta_blocks(const int* plan, const int* stops, const T* q, const T* k, const T* v, const float* g,
                             const float* beta, float* state, T* y, float* state_at_stops) {
  constexpr int CHANNELS = WARPS * 16, THREADS = (WARPS + 1) * 32, TILES = BLOCK / 8, STEPS = BLOCK / 16;
  using Memory = BlockMemory<T, DK, CHANNELS>;
  extern __shared__ uint4 staged[];
  Memory& memory = *reinterpret_cast<Memory*>(staged);
  const Chunk chunk(plan, blockIdx.z);
  if (chunk.is_padding()) return;
  if (chunk.num_tokens < LEAST) {
    using Scan = ScanMemory<DK, WARPS>;
    static_assert(sizeof(Scan) <= sizeof(Memory) && WARPS * SCAN_CHANNELS == CHANNELS, "other channels or more memory");
    if (threadIdx.x < SCAN_THREADS)
      delta_scan<T, HK, HV, DK, DV, WARPS>(plan, stops, q, k, v, g, beta, state, y, state_at_stops,
                                           *reinterpret_cast<Scan*>(staged));
    return;
  }
  if (threadIdx.x >= THREADS) return;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, r = lane / 4, t = lane % 4;
  const int hv = blockIdx.y, hk = hv / (HV / HK), first = blockIdx.x * CHANNELS;
  const long row = chunk.lo;

  auto load = [&](int begin, int end, Stage<T, DK, CHANNELS>& to) {
    const long at = row + begin;
    copy_rows<DK, THREADS>(to.k, k + (at * HK + hk) * DK, HK * DK, end - begin);
    copy_rows<DK, THREADS>(to.q, q + (at * HK + hk) * DK, HK * DK, end - begin);
    copy_rows<CHANNELS, THREADS>(to.v, v + (at * HV + hv) * DV + first, HV * DV, end - begin);
    if (tid < BLOCK) {
      const long gate = (at + tid) * HV + hv;
      if (tid < end - begin) copy_cached<4>(&to.g[tid], g + gate), copy_cached<4>(&to.beta[tid], beta + gate);
      else to.g[tid] = 1, to.beta[tid] = 0;
    }
    end_stage();
  };

  auto solve = [&](const Stage<T, DK, CHANNELS>& from, Solved<T>& to) {
    // No comparisons, which would take longer than the products: entries behind the last token hold anything, and are not used.
    float since = 1;
#pragma unroll
    for (int i = 0; i < BLOCK; i++) {
      if (i) since *= from.g[lane + i];
      memory.decay[i][lane] = since;
    }
    __syncwarp();
    to.from_begin[lane] = from.g[0] * memory.decay[lane][0], to.to_end[lane] = memory.decay[BLOCK - 1 - lane][lane];

    float kk[STEPS][TILES][4] = {}, kq[STEPS][TILES][4] = {};
#pragma unroll
    for (int at = 0; at < DK; at += 16) {
      unsigned right[STEPS][4];
#pragma unroll
      for (int m = 0; m < STEPS; m++)
        load_tiles(right[m], &from.k[m * 16 + lane / 16 * 8 + lane % 8][at + lane / 8 % 2 * 8]);
#pragma unroll
      for (int m = 0; m < STEPS; m++) {
        unsigned keys[4], queries[4];
        load_tiles(keys, &from.k[m * 16 + lane % 16][at + lane / 16 * 8]);
        load_tiles(queries, &from.q[m * 16 + lane % 16][at + lane / 16 * 8]);
#pragma unroll
        for (int n = 0; n < 2 * (m + 1); n++) {
          multiply(kk[m][n], keys, right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1], T());
          multiply(kq[m][n], queries, right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1], T());
        }
      }
    }
    // all reads come before the writes, behind which a read would wait
#pragma unroll
    for (int m = 0; m < STEPS; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int token = m * 16 + i * 8 + r;
        const float beta = from.beta[token];
#pragma unroll
        for (int n = 0; n < 2 * (m + 1); n++) {
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const int earlier = n * 8 + t * 2 + j;
            const float decay = token < earlier ? 0.0f : memory.decay[max(token - earlier, 0)][earlier];
            kk[m][n][i * 2 + j] *= beta * decay, kq[m][n][i * 2 + j] *= decay;
          }
        }
      }
#pragma unroll
    for (int m = 0; m < STEPS; m++)
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int n = 0; n < 2 * (m + 1); n++) {
          const int token = m * 16 + i * 8 + r, earlier = n * 8 + t * 2;
          const float a = kk[m][n][i * 2], b = kk[m][n][i * 2 + 1];
          to.mixing.put(token, earlier, {kq[m][n][i * 2], kq[m][n][i * 2 + 1]});
          if (n / 2 == m) *reinterpret_cast<float2*>(&memory.diagonal[token % 16][m][earlier % 16]) = {a, b};
          else to.inverse.put(token, earlier, {a, b});
        }
    __syncwarp();
    // The blocks on the diagonal, each by half of the lanes with a column each. The one below them, A, is there already, in
    // place of which comes -R' A R of the two inverses R and R'.
    const int half = lane / 16, column = lane % 16;
    float inverse[16];
#pragma unroll
    for (int token = 0; token < 16; token++) {
      inverse[token] = token == column;
#pragma unroll
      for (int i = 0; i < token; i++) inverse[token] -= memory.diagonal[token][half][i] * inverse[i];
    }
#pragma unroll
    for (int i = 0; i < 16; i += 2) to.inverse.put_below(half * 16 + i, lane, {inverse[i], inverse[i + 1]});
    __syncwarp();
    unsigned upper[2][4], below[2][4], lower[2][4];  // R, A and R', high and low
#pragma unroll
    for (int i = 0; i < 2; i++) {
      auto& from = i ? to.inverse.low : to.inverse.high;
      load_tiles(lower[i], &from[16 + lane % 16][16 + lane / 16 * 8]);
      load_columns(below[i], &from[16 + lane % 16][lane / 16 * 8]);
      load_columns(upper[i], &from[lane % 16][lane / 16 * 8]);
    }
    float product[2][4] = {}, found[2][4] = {};
#pragma unroll
    for (int i = 0; i < 3; i++)
#pragma unroll
      for (int n = 0; n < 2; n++)
        multiply(product[n], lower[i == 1], below[i == 2][n * 2], below[i == 2][n * 2 + 1], T());
    const Left<T> left(product[0], product[1]);
    for (int n = 0; n < 2; n++) {
      left.times(found[n], upper[0][n * 2], upper[0][n * 2 + 1]);
      multiply(found[n], left.high, upper[1][n * 2], upper[1][n * 2 + 1], T());
    }
    __syncwarp();  // A is read
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) to.inverse.put(16 + i * 8 + r, n * 8 + t * 2, {-found[n][i * 2], -found[n][i * 2 + 1]});
  };

  // c [16 channels, tokens] += x times the transpose of a triangular matrix
  auto times = [&](float (&c)[TILES][4], const Left<T> (&x)[STEPS], const Halves<T>& by) {
#pragma unroll
    for (int n = 0; n < TILES; n += 2)
#pragma unroll
      for (int m = 0; m <= n / 2; m++) {
        unsigned high[4], low[4];
        load_tiles(high, &by.high[n * 8 + lane / 16 * 8 + lane % 8][m * 16 + lane / 8 % 2 * 8]);
        load_tiles(low, &by.low[n * 8 + lane / 16 * 8 + lane % 8][m * 16 + lane / 8 % 2 * 8]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          x[m].times(c[n + i], high[2 * i], high[2 * i + 1]);
          multiply(c[n + i], x[m].high, low[2 * i], low[2 * i + 1], T());
        }
      }
  };

  // of a warp's channels r and r + 8: columns 8 j + 2 t and the next
  float s[DK / 8][4];
  auto place = [&](int of, int i) {
    return ((static_cast<long>(of) * HV + hv) * DV + first + warp * 16 + r + i * 8) * DK + t * 2;
  };
  auto keep = [&](float* to, int of) {
#pragma unroll
    for (int j = 0; j < DK / 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        *reinterpret_cast<float2*>(to + place(of, i) + j * 8) = {s[j][i * 2], s[j][i * 2 + 1]};
  };
  Ends ends_of_states(chunk, stops);
  auto leave = [&](int until) {  // the states that are wanted after so many tokens
    for (; ends_of_states.upcoming() <= until; ends_of_states.stop++) {
      const bool is_last = ends_of_states.is_last();
      if (!is_last || (chunk.num_tokens && chunk.slot >= 0))
        keep(is_last ? state : state_at_stops, is_last ? chunk.slot : ends_of_states.stop);
    }
  };

  auto scan = [&](int begin, int end, Stage<T, DK, CHANNELS>& from, const Solved<T>& solved) {
    float by_key[TILES][4] = {}, by_query[TILES][4] = {};  // [16 channels, tokens]
#pragma unroll
    for (int at = 0; at < DK; at += 16) {
      const Left<T> left(s[at / 8], s[at / 8 + 1]);
#pragma unroll
      for (int n = 0; n < TILES; n += 2) {
        unsigned keys[4], queries[4];
        load_tiles(keys, &from.k[n * 8 + lane / 16 * 8 + lane % 8][at + lane / 8 % 2 * 8]);
        load_tiles(queries, &from.q[n * 8 + lane / 16 * 8 + lane % 8][at + lane / 8 % 2 * 8]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          left.times(by_key[n + i], keys[2 * i], keys[2 * i + 1]);
          left.times(by_query[n + i], queries[2 * i], queries[2 * i + 1]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < TILES; n += 2) {
      unsigned values[4];
      load_columns(values, &from.v[n * 8 + lane / 16 * 8 + lane % 8][warp * 16 + lane / 8 % 2 * 8]);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = (n + i / 2) * 8 + t * 2;
        const float2 value = unpacked(values[i], T());
        const float2 decay = two_of(solved.from_begin, token), beta = two_of(from.beta, token);
        float* written = &by_key[n + i / 2][i % 2 * 2];
        float* said = &by_query[n + i / 2][i % 2 * 2];
        written[0] = beta.x * (value.x - decay.x * written[0]), said[0] *= decay.x;
        written[1] = beta.y * (value.y - decay.y * written[1]), said[1] *= decay.y;
      }
    }
    float delta[TILES][4] = {};
    const Left<T> written[] = {{by_key[0], by_key[1]}, {by_key[2], by_key[3]}};
    times(delta, written, solved.inverse);
    const Left<T> read[] = {{delta[0], delta[1]}, {delta[2], delta[3]}};
    times(by_query, read, solved.mixing);
    __syncwarp();  // values are read
    auto& values = from.v;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const float2 decay = two_of(solved.to_end, n * 8 + t * 2);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const unsigned said = transposed(pair_of<T>(by_query[n][i * 2], by_query[n][i * 2 + 1]));
        *reinterpret_cast<unsigned*>(&values[n * 8 + r][warp * 16 + i * 8 + t * 2]) = said;
        delta[n][i * 2] *= decay.x, delta[n][i * 2 + 1] *= decay.y;
      }
    }
    __syncwarp();
#pragma unroll
    for (int i = lane; i < BLOCK * 2; i += 32) {
      const int token = i / 2, at = warp * 16 + i % 2 * 8;
      if (token < end - begin)
        *reinterpret_cast<uint4*>(y + ((row + begin + token) * HV + hv) * DV + first + at) =
            *reinterpret_cast<const uint4*>(&values[token][at]);
    }
    const Left<T> added[] = {{delta[0], delta[1]}, {delta[2], delta[3]}};
#pragma unroll
    for (int j = 0; j < DK / 8; j += 2) {
#pragma unroll
      for (int i = 0; i < 8; i++) s[j + i / 4][i % 4] *= solved.from_begin[BLOCK - 1];
#pragma unroll
      for (int m = 0; m < STEPS; m++) {
        unsigned keys[4];
        load_columns(keys, &from.k[m * 16 + lane % 16][j * 8 + lane / 16 * 8]);
        added[m].times(s[j], keys[0], keys[1]);
        added[m].times(s[j + 1], keys[2], keys[3]);
      }
    }
  };

  // Through all blocks of tokens, with three at a time in shared memory: one is computed, the next one is solved, and the one
  // behind it is on its way. work: of this warp, for the block from `begin` to `end`, behind which is one that ends at `next`.
  auto go_through = [&](auto&& first_work, auto&& work) {
    Ends ends(chunk, stops);
    int begin = 0, end = ends.after(0), next = ends.after(end);
    load(0, end, memory.stages[0]);
    load(end, next, memory.stages[1]);
    await_stage<0>();
    __syncthreads();
    first_work();
    __syncthreads();
    for (int number = 0; begin < chunk.num_tokens; number++) {
      const int behind = ends.after(next);
      load(next, behind, memory.stages[(number + 2) % 3]);
      work(number, begin, end, next);
      begin = end, end = next, next = behind;
      await_stage<0>();
      __syncthreads();
    }
  };
  // A loop for each task: the registers of the warps with states are free in the one that solves.
  if (warp == WARPS) {
    auto solve_block = [&](int number) { solve(memory.stages[number % 3], memory.solved[number % 2]); };
    go_through([&] { solve_block(0); }, [&](int number, int, int end, int next) {
      if (next > end) solve_block(number + 1);
    });
    return;
  }
  const bool goes_on = chunk.slot >= 0 && chunk.old >= 0;
#pragma unroll
  for (int j = 0; j < DK / 8; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float2 two = goes_on ? *reinterpret_cast<const float2*>(state + place(chunk.slot, i) + j * 8) : float2{};
      s[j][i * 2] = two.x, s[j][i * 2 + 1] = two.y;
    }
  leave(0);
  go_through([] {}, [&](int number, int begin, int end, int) {
    scan(begin, end, memory.stages[number % 3], memory.solved[number % 2]);
    leave(end);
  });
}
