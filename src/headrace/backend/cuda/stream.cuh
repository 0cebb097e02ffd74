// A warp's share of the product of a few tokens with a large matrix, which is read once, straight into the matrix units.
//
// As a sum over K doesn't care for its order, a thread takes eight neighbouring elements of each 32 where the matrix
// units would have it take four pairs, of weights and tokens alike; so it copies 16 bytes at a time.

// Rows of K weights; quantised as MLX does: BITS each, lowest first, and scale and bias of every GROUP. The second eight
// rows of a tile are so far from its first eight.
template <typename T>
struct Matrix {
  const void* weight;
  const T* scales;
  const T* biases;
  int num_rows, second = 8;
};

// Two weights q of BITS == 4 at bits 0 and 16 of each word as exact numbers: q is put into the mantissa of a large one.
__device__ unsigned four_bits(unsigned q, bfloat16) {
  const unsigned large = (q & 0x000f000f) | 0x43004300;  // 128 + q; times 1, minus 128
  unsigned found;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(large), "r"(0x3f803f80), "r"(0xc300c300));
  return found;
}

__device__ unsigned four_bits(unsigned q, float16) {
  const unsigned large = (q & 0x000f000f) | 0x64006400;  // 1024 + q; times 1, minus 1024
  unsigned found;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(large), "r"(0x3c003c00), "r"(0xe400e400));
  return found;
}

__device__ float byte_of(unsigned q, int i) { return __uint_as_float(__byte_perm(q, 0x4b000000, 0x7540 + i)) - 8388608.0f; }

__device__ unsigned two_ones(bfloat16) { return 0x3f803f80; }
__device__ unsigned two_ones(float16) { return 0x3c003c00; }

// TILES of 16 rows times TOKENS of 8 tokens, in a float32 sum; STAGES steps of K are under way. BITS 16: not quantised.
template <typename T, int BITS, int GROUP, int TILES, int TOKENS, int STAGES>
struct Stream {
  static constexpr bool QUANTISED = BITS < 16;
  static constexpr int STEP = QUANTISED ? (GROUP > 64 ? 2 * GROUP : 128) : 64;
  static constexpr int UNITS = STEP / 32, ROW_BYTES = STEP * BITS / 8, LOADS = ROW_BYTES / 64;
  static constexpr int GROUPS = QUANTISED ? STEP / GROUP : 0;
  static constexpr int WEIGHTS = TILES * 2 * LOADS * 32, INPUTS = TOKENS * UNITS * 32;  // 16 bytes each, as all below
  static constexpr int STAGE = WEIGHTS + INPUTS + TILES * 16 * 2 * GROUPS * 2 / 16;
  static constexpr int WARP = STAGES * STAGE;

  // sum += the steps first, first + stride, … of the tiles at rows rows[i] of matrices[i]. x(i): where token i of num_tokens has
  // its K inputs. memory: this warp's, of WARP; nothing is under way there after it.
  template <typename Tokens>
  static __device__ void run(float (&sum)[TILES][TOKENS][4], const Matrix<T> (&matrices)[TILES], const int (&rows)[TILES],
                             const Tokens& x, int num_tokens, int K, int first, int stride, uint4* memory) {
    const int lane = threadIdx.x % 32, r = lane / 4, t = lane % 4, num_steps = K / STEP;
    const int swizzle = QUANTISED ? r / 2 % 4 : 0;  // threads of other rows then read from other banks
    const char* from[TILES][2];
    const T* scales_from[TILES];
    const T* tokens_from[TOKENS];
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const int last = matrices[i].num_rows - 1;
#pragma unroll
      for (int half = 0; half < 2; half++)
        from[i][half] = static_cast<const char*>(matrices[i].weight) +
                        static_cast<long>(min(rows[i] + half * matrices[i].second + r, last)) * (static_cast<long>(K) * BITS / 8) + t * 16;
      if (QUANTISED)
        scales_from[i] = (lane < 16 ? matrices[i].scales : matrices[i].biases) +
                         static_cast<long>(min(rows[i] + lane / 8 % 2 * matrices[i].second + lane % 8, last)) * (K / (QUANTISED ? GROUP : 1));
    }
#pragma unroll
    for (int j = 0; j < TOKENS; j++) tokens_from[j] = x(min(j * 8 + r, num_tokens - 1)) + t * 8;

    auto fetch = [&](int step, int stage) {
      if (step < num_steps) {
        uint4* to = memory + stage * STAGE;
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
          for (int half = 0; half < 2; half++)
#pragma unroll
            for (int l = 0; l < LOADS; l++)
              copy_async(to + ((i * 2 + half) * LOADS + l) * 32 + r * 4 + (t ^ swizzle),
                         from[i][half] + static_cast<long>(step) * ROW_BYTES + l * 64);
        // tokens that there are not leave garbage, in columns that nobody reads
#pragma unroll
        for (int j = 0; j < TOKENS; j++)
          if (j * 8 + r < num_tokens)
#pragma unroll
            for (int u = 0; u < UNITS; u++)
              copy_cached<16>(to + WEIGHTS + (j * UNITS + u) * 32 + lane, tokens_from[j] + step * STEP + u * 32);
        if (QUANTISED)
#pragma unroll
          for (int i = 0; i < TILES; i++)
            copy_cached<QUANTISED ? 2 * GROUPS : 4>(reinterpret_cast<T*>(to + WEIGHTS + INPUTS) + (i * 32 + lane) * GROUPS,
                                                    scales_from[i] + step * GROUPS);
      }
      end_stage();
    };
#pragma unroll
    for (int i = 0; i + 1 < STAGES; i++) fetch(first + i * stride, i);
    for (int step = first, stage = 0; step < num_steps; step += stride, stage = stage + 1 < STAGES ? stage + 1 : 0) {
      if (QUANTISED) __syncwarp();
      fetch(step + (STAGES - 1) * stride, stage ? stage - 1 : STAGES - 1);
      await_stage<STAGES - 1>();
      if (QUANTISED) __syncwarp();
      const uint4* staged = memory + stage * STAGE;
      if constexpr (QUANTISED) add_quantised(sum, staged, lane, r, t, swizzle);
      else add_dense(sum, staged, lane);
    }
    await_stage<0>();
  }

  static __device__ void add_dense(float (&sum)[TILES][TOKENS][4], const uint4* staged, int lane) {
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
      uint4 x[TOKENS];
#pragma unroll
      for (int j = 0; j < TOKENS; j++) x[j] = staged[WEIGHTS + (j * UNITS + u) * 32 + lane];
#pragma unroll
      for (int i = 0; i < TILES; i++) {
        const uint4 low = staged[(i * 2 * LOADS + u) * 32 + lane], high = staged[((i * 2 + 1) * LOADS + u) * 32 + lane];
        const unsigned a[4] = {low.x, high.x, low.y, high.y}, b[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
        for (int j = 0; j < TOKENS; j++) {
          multiply(sum[i][j], a, x[j].x, x[j].y, T());
          multiply(sum[i][j], b, x[j].z, x[j].w, T());
        }
      }
    }
  }

  // Σ (scale q + bias) x of a group is scale Σ q x + bias Σ x: exact products, the sums in float32.
  static __device__ void add_quantised(float (&sum)[TILES][TOKENS][4], const uint4* staged, int lane, int r, int t, int swizzle) {
    const T* scales = reinterpret_cast<const T*>(staged + WEIGHTS + INPUTS);
    const unsigned ones[4] = {two_ones(T()), two_ones(T()), two_ones(T()), two_ones(T())};
#pragma unroll
    for (int g = 0; g < GROUPS; g++) {
      float part[TILES][TOKENS][4] = {}, inputs[TOKENS][4] = {};
#pragma unroll
      for (int u = g * (UNITS / GROUPS); u < (g + 1) * (UNITS / GROUPS); u++) {
        unsigned x[TOKENS][4];
#pragma unroll
        for (int j = 0; j < TOKENS; j++) {
          const uint4 found = staged[WEIGHTS + (j * UNITS + u) * 32 + lane];
          if (BITS == 4) {  // as the weights are unpacked: each with the fourth after it
            x[j][0] = __byte_perm(found.x, found.z, 0x5410), x[j][1] = __byte_perm(found.x, found.z, 0x7632);
            x[j][2] = __byte_perm(found.y, found.w, 0x5410), x[j][3] = __byte_perm(found.y, found.w, 0x7632);
          } else {
            x[j][0] = found.x, x[j][1] = found.y, x[j][2] = found.z, x[j][3] = found.w;
          }
          multiply(inputs[j], ones, x[j][0], x[j][1], T());
          multiply(inputs[j], ones, x[j][2], x[j][3], T());
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) {
          unsigned w[2][4];
#pragma unroll
          for (int half = 0; half < 2; half++) unpack(w[half], staged + (i * 2 + half) * LOADS * 32, u, r, t, swizzle);
          const unsigned a[4] = {w[0][0], w[1][0], w[0][1], w[1][1]}, b[4] = {w[0][2], w[1][2], w[0][3], w[1][3]};
#pragma unroll
          for (int j = 0; j < TOKENS; j++) {
            multiply(part[i][j], a, x[j][0], x[j][1], T());
            multiply(part[i][j], b, x[j][2], x[j][3], T());
          }
        }
      }
#pragma unroll
      for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const T* own = scales + (i * 32 + half * 8 + r) * GROUPS + g;
          const float scale = static_cast<float>(own[0]), bias = static_cast<float>(own[16 * GROUPS]);
#pragma unroll
          for (int j = 0; j < TOKENS; j++)
#pragma unroll
            for (int c = 0; c < 2; c++)  // rounded in the same places for any number of tokens
              sum[i][j][half * 2 + c] += __fmaf_rn(scale, part[i][j][half * 2 + c], __fmul_rn(bias, inputs[j][c]));
        }
    }
  }

  // The eight weights of unit u that are this thread's, of 8 rows from `row` on.
  static __device__ void unpack(unsigned (&w)[4], const uint4* row, int u, int r, int t, int swizzle) {
    if constexpr (BITS == 4) {
      const unsigned q = reinterpret_cast<const unsigned*>(row + u / 4 * 32 + r * 4 + (u % 4 ^ swizzle))[t];
#pragma unroll
      for (int i = 0; i < 4; i++) w[i] = four_bits(q >> 4 * i, T());
    } else {
      const uint2 q = reinterpret_cast<const uint2*>(row + u / 2 * 32 + r * 4 + ((u % 2 * 2 + t / 2) ^ swizzle))[t % 2];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const unsigned four = i < 2 ? q.x : q.y;
        w[i] = pair_of<T>(byte_of(four, i % 2 * 2), byte_of(four, i % 2 * 2 + 1));
      }
    }
  }

  static constexpr int WIDE = 16 * TILES + 4;  // of a token in the memory where warps meet: banks differ

  // Writes weight · sum where all of the block's warps can read it: the memory that the steps have been in.
  static __device__ void publish(const float (&sum)[TILES][TOKENS][4], float weight, float* memory) {
    const int lane = threadIdx.x % 32, r = lane / 4, t = lane % 4;
    float* own = memory + threadIdx.x / 32 * (8 * TOKENS * WIDE);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
      for (int j = 0; j < TOKENS; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) own[(j * 8 + t * 2 + c % 2) * WIDE + i * 16 + c / 2 * 8 + r] = sum[i][j][c] * weight;
    __syncthreads();
  }

  // What the block's warps have published, added up, of a token and a row of its tiles.
  template <int WARPS>
  static __device__ float total(const float* memory, int token, int row) {
    float found = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) found += memory[(w * 8 * TOKENS + token) * WIDE + row];
    return found;
  }
};
