// CUDA on a CPU, as much as the kernels use: a block's threads are coroutines that run from one barrier to the next, in an
// order drawn anew each time, so that a missing barrier changes results. Blocks run one after the other.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <tuple>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>
#undef INFINITY

#define __device__
#define __global__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

struct dim3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };
dim3 threadIdx, blockIdx, blockDim, gridDim;

constexpr int LANES_OF_WARP = 32, MOST_THREADS = 1024;
alignas(16) static unsigned char dynamic_memory[256 << 10];

struct Copy { void* to; const void* from; int bytes; };
struct Thread {
  ucontext_t context;
  std::vector<char> stack;
  bool done;
  std::deque<std::vector<Copy>> under_way;
};
struct Warp {
  long generation;
  int arrived, live;
  struct { float* c; const unsigned* a; unsigned b[2]; } matrix[LANES_OF_WARP];
};
static std::vector<Thread> threads(MOST_THREADS);
static Warp warps[MOST_THREADS / LANES_OF_WARP];
static ucontext_t scheduler;
static long block_generation;
static int current, block_arrived, block_live;
static std::function<void()> body;

static void yield() { swapcontext(&threads[current].context, &scheduler); }
static void release_block() {
  if (block_live && block_arrived == block_live) block_arrived = 0, block_generation++;
}
static void release_warp(Warp& warp) {
  if (warp.live && warp.arrived == warp.live) warp.arrived = 0, warp.generation++;
}
static void __syncthreads() {
  const long own = block_generation;
  block_arrived++;
  release_block();
  while (block_generation == own) yield();
}
static Warp& own_warp() { return warps[current / LANES_OF_WARP]; }
// the last one to come does the work of all
template <typename F>
static void together(const F& work) {
  Warp& warp = own_warp();
  const long own = warp.generation;
  if (++warp.arrived == warp.live) work(warp), warp.arrived = 0, warp.generation++;
  while (warp.generation == own) yield();
}
static void __syncwarp() { together([](Warp&) {}); }
static void __threadfence() {}

// a value of each lane, as all have given it
template <typename V>
static const V* exchanged(V value) {
  Warp& warp = own_warp();
  static V found[MOST_THREADS / LANES_OF_WARP][2][LANES_OF_WARP];
  auto& own = found[current / LANES_OF_WARP][warp.generation % 2];
  own[current % LANES_OF_WARP] = value;
  __syncwarp();
  return own;
}
template <typename V>
static V __shfl_xor_sync(unsigned, V value, int offset) {
  const V* all = exchanged(value);
  return all[current % LANES_OF_WARP ^ offset];
}
template <typename V>
static V __shfl_up_sync(unsigned, V value, int offset) {
  const V* all = exchanged(value);
  return current % LANES_OF_WARP < offset ? value : all[current % LANES_OF_WARP - offset];
}
template <typename V>
static V __shfl_sync(unsigned, V value, int lane) {
  const V* all = exchanged(value);
  return all[lane];
}
static unsigned __ballot_sync(unsigned, bool value) {
  const bool* all = exchanged(value);
  unsigned found = 0;
  for (int i = 0; i < LANES_OF_WARP; i++) found |= static_cast<unsigned>(all[i]) << i;
  return found;
}
static unsigned __reduce_max_sync(unsigned, unsigned value) {
  const unsigned* all = exchanged(value);
  unsigned found = 0;
  for (int i = 0; i < LANES_OF_WARP; i++) found = all[i] > found ? all[i] : found;
  return found;
}
static unsigned __reduce_min_sync(unsigned, unsigned value) {
  const unsigned* all = exchanged(value);
  unsigned found = ~0u;
  for (int i = 0; i < LANES_OF_WARP; i++) found = all[i] < found ? all[i] : found;
  return found;
}
static int __reduce_add_sync(unsigned, int value) {
  const int* all = exchanged(value);
  int found = 0;
  for (int i = 0; i < LANES_OF_WARP; i++) found += all[i];
  return found;
}
static int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }

template <typename V, typename W>
static V from_bits(W bits) {
  static_assert(sizeof(V) == sizeof(W));
  V found;
  std::memcpy(&found, &bits, sizeof(V));
  return found;
}
static float __int_as_float(int x) { return from_bits<float>(x); }
static float __uint_as_float(unsigned x) { return from_bits<float>(x); }
static unsigned __float_as_uint(float x) { return from_bits<unsigned>(x); }
static unsigned __byte_perm(unsigned low, unsigned high, unsigned places) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned found = 0;
  for (int i = 0; i < 4; i++) found |= static_cast<unsigned>(bytes >> (places >> 4 * i & 7) * 8 & 255) << 8 * i;
  return found;
}
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float __fmul_rn(float a, float b) { return a * b; }
static float rsqrtf(float x) { return 1.0f / sqrtf(x); }
template <typename V> static V __ldcg(const V* at) { return *at; }
template <typename V> static V min(V a, V b) { return b < a ? b : a; }
template <typename V> static V max(V a, V b) { return a < b ? b : a; }

static unsigned atomicInc(unsigned* at, unsigned most) {
  const unsigned old = *at;
  *at = old >= most ? 0 : old + 1;
  return old;
}
template <typename V> static V atomicAdd(V* at, V x) { const V old = *at; *at = old + x; return old; }
template <typename V> static V atomicExch(V* at, int x) { const V old = *at; *at = x; return old; }
template <typename V> static V atomicMax(V* at, V x) { const V old = *at; *at = max(old, x); return old; }

static unsigned short to_bfloat16(float x) {
  const unsigned bits = __float_as_uint(x);
  return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static float of_bfloat16(unsigned bits) { return __uint_as_float(bits << 16); }
static unsigned short to_float16(float x) { return from_bits<unsigned short>(static_cast<_Float16>(x)); }
static float of_float16(unsigned bits) { return from_bits<_Float16>(static_cast<unsigned short>(bits)); }
template <bool BFLOAT>
static float number(unsigned two, int i) {
  const unsigned bits = i ? two >> 16 : two & 0xffff;
  return BFLOAT ? of_bfloat16(bits) : of_float16(bits);
}
template <bool BFLOAT>
static unsigned fused(unsigned x, unsigned by, unsigned plus) {
  unsigned found = 0;
  for (int i = 0; i < 2; i++) {
    const float made = number<BFLOAT>(x, i) * number<BFLOAT>(by, i) + number<BFLOAT>(plus, i);
    found |= static_cast<unsigned>(BFLOAT ? to_bfloat16(made) : to_float16(made)) << 16 * i;
  }
  return found;
}

// PTX ISA, "Matrix Fragments for mma.m16n8k16"
template <bool BFLOAT>
static void multiplied(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  Warp& own = own_warp();
  own.matrix[current % LANES_OF_WARP] = {c, a, {b0, b1}};
  together([](Warp& warp) {
    float left[16][16], right[16][8];
    for (int lane = 0; lane < LANES_OF_WARP; lane++) {
      const int group = lane / 4, t = lane % 4;
      for (int i = 0; i < 8; i++)
        left[group + (i / 2 % 2) * 8][t * 2 + i % 2 + (i / 4) * 8] = number<BFLOAT>(warp.matrix[lane].a[i / 2], i % 2);
      for (int i = 0; i < 4; i++) right[t * 2 + i % 2 + (i / 2) * 8][group] = number<BFLOAT>(warp.matrix[lane].b[i / 2], i % 2);
    }
    for (int lane = 0; lane < LANES_OF_WARP; lane++)
      for (int i = 0; i < 4; i++) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; k++) sum += left[row][k] * right[k][column];
        warp.matrix[lane].c[i] += sum;
      }
  });
}

// PTX ISA, "ldmatrix"
template <bool TRANSPOSED>
static void tiles_loaded(unsigned (&to)[4], const void* row) {
  if (reinterpret_cast<uintptr_t>(row) % 16) abort();
  auto* rows = reinterpret_cast<const unsigned short* const*>(exchanged(row));
  const int group = current % LANES_OF_WARP / 4, t = current % 4;
  for (int i = 0; i < 4; i++) {
    auto* tile = rows + i * 8;
    const unsigned low = TRANSPOSED ? tile[t * 2][group] : tile[group][t * 2];
    to[i] = low | static_cast<unsigned>(TRANSPOSED ? tile[t * 2 + 1][group] : tile[group][t * 2 + 1]) << 16;
  }
}

// PTX ISA, "movmatrix"
static unsigned tile_transposed(unsigned two) {
  const unsigned* all = exchanged(two);
  const int group = current % LANES_OF_WARP / 4, t = current % 4;
  auto number = [&](int row) { return all[row * 4 + group / 2] >> group % 2 * 16 & 0xffff; };
  return number(t * 2) | number(t * 2 + 1) << 16;
}

// What is copied to shared memory is there once it is waited for, and no earlier. Copies that are under way at the same time have
// no order, so they must not have one place.
static void copied_later(void* to, const void* from, int bytes) {
  if (reinterpret_cast<uintptr_t>(to) % bytes || reinterpret_cast<uintptr_t>(from) % bytes) abort();
  auto& under_way = threads[current].under_way;
  for (const auto& stage : under_way)
    for (const Copy& copy : stage)
      if (copy.to == to) abort();
  if (under_way.empty()) under_way.emplace_back();
  under_way.back().push_back({to, from, bytes});
}
static void stage_ended() {
  auto& under_way = threads[current].under_way;
  if (under_way.empty()) under_way.emplace_back();
  under_way.emplace_back();
}
static void stages_awaited(unsigned pending) {
  auto& under_way = threads[current].under_way;
  for (; under_way.size() > pending + 1; under_way.pop_front())
    for (const Copy& copy : under_way.front()) {
      if (copy.from) std::memcpy(copy.to, copy.from, copy.bytes);
      else std::memset(copy.to, 0, copy.bytes);
    }
}

static void run_thread() {
  body();
  Thread& own = threads[current];
  own.done = true;
  own.under_way.clear();
  block_live--, own_warp().live--;
  release_block(), release_warp(own_warp());
  yield();
}

static unsigned random_state;
static unsigned drawn(unsigned below) {
  random_state = random_state * 1664525u + 1013904223u;
  return (random_state >> 8) % below;
}

static void run_block(int count) {
  block_arrived = 0, block_live = count;
  std::memset(dynamic_memory, 0xff, sizeof(dynamic_memory));  // no numbers
  for (auto& warp : warps) warp.arrived = 0, warp.live = 0;
  std::vector<int> order(count);
  for (int i = 0; i < count; i++) {
    order[i] = i;
    warps[i / LANES_OF_WARP].live++;
    Thread& thread = threads[i];
    thread.done = false;
    thread.stack.resize(64 << 10);
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, run_thread, 0);
  }
  while (block_live) {
    for (int i = count - 1; i > 0; i--) std::swap(order[i], order[drawn(i + 1)]);
    for (const int i : order) {
      if (threads[i].done) continue;
      current = i;
      threadIdx = {static_cast<unsigned>(i), 0, 0};
      swapcontext(&scheduler, &threads[i].context);
    }
  }
}

template <typename... A>
static void emulate(void (*kernel)(A...), void** pointers, const int* numbers, const int* blocks, int count, unsigned seed) {
  random_state = seed;
  blockDim = {static_cast<unsigned>(count), 1, 1};
  gridDim = {static_cast<unsigned>(blocks[0]), static_cast<unsigned>(blocks[1]), static_cast<unsigned>(blocks[2])};
  body = [=] {
    int pointer = 0, number = 0;
    auto take = [&](auto tag) {
      using Argument = typename decltype(tag)::type;
      if constexpr (std::is_pointer_v<Argument>) return static_cast<Argument>(pointers[pointer++]);
      else return static_cast<Argument>(numbers[number++]);
    };
    std::tuple<A...> all{take(std::common_type<A>{})...};
    std::apply(kernel, all);
  };
  // in an order drawn anew, too: blocks wait for each other by counters alone
  const long total = static_cast<long>(blocks[0]) * blocks[1] * blocks[2];
  std::vector<long> order(total);
  for (long i = 0; i < total; i++) order[i] = i;
  for (long i = total - 1; i > 0; i--) std::swap(order[i], order[drawn(static_cast<unsigned>(i + 1))]);
  for (const long i : order) {
    blockIdx = {static_cast<unsigned>(i % blocks[0]), static_cast<unsigned>(i / blocks[0] % blocks[1]),
                static_cast<unsigned>(i / blocks[0] / blocks[1])};
    run_block(count);
  }
}
