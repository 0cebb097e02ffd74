// The most likely token of each row: the id of the largest logit, of equals the lowest; `otherwise` where there is a NaN
// or +inf, or nothing but -inf.
//
// logits [R, V]; out int32 [R]. A row's blocks put together what they find in found[row], zero between launches; the one
// that comes last writes the id.

struct Found {
  unsigned long long best;  // a logit's rank, then the complement of its id: of equals the lowest id is the largest
  unsigned num_done, unused;
};

// Rises with the number from above zero; NaN has the highest, and -0 that of 0.
__device__ unsigned rank_of(float x) {
  const unsigned bits = __float_as_uint(x + 0.0f);
  return x != x ? ~0u : bits ^ (bits >> 31 ? ~0u : 1u << 31);
}

__device__ unsigned long long best_of_warp(unsigned long long best) {
#pragma unroll
  for (int offset = 16; offset; offset /= 2) best = max(best, __shfl_xor_sync(~0u, best, offset));
  return best;
}

template <typename T>
__device__ void most_likely(const T* logits, int num_tokens, int otherwise, Found* found, int* out) {
  constexpr int EACH = 16 / sizeof(T);
  struct alignas(16) Some { T of[EACH]; };
  const int row = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const T* own = logits + static_cast<long>(row) * num_tokens;
  const bool is_aligned = reinterpret_cast<unsigned long>(own) % sizeof(Some) == 0;
  unsigned highest = 0, id = 0;
  auto look = [&](int at, T logit) {
    const unsigned rank = rank_of(static_cast<float>(logit));
    if (rank > highest) highest = rank, id = at;
  };
  for (int at = (blockIdx.x * blockDim.x + threadIdx.x) * EACH; at < num_tokens; at += gridDim.x * blockDim.x * EACH) {
    if (is_aligned && at + EACH <= num_tokens) {
      const Some some = *reinterpret_cast<const Some*>(own + at);
#pragma unroll
      for (int i = 0; i < EACH; i++) look(at + i, some.of[i]);
    } else {
      for (int i = at; i < min(at + EACH, num_tokens); i++) look(i, own[i]);
    }
  }

  __shared__ unsigned long long of_warps[32];
  unsigned long long best = best_of_warp(static_cast<unsigned long long>(highest) << 32 | ~id);
  if (lane == 0) of_warps[warp] = best;
  __syncthreads();
  if (warp) return;
  best = best_of_warp(lane < blockDim.x / 32 ? of_warps[lane] : 0);
  if (lane) return;
  atomicMax(&found[row].best, best);
  __threadfence();
  if (atomicInc(&found[row].num_done, gridDim.x - 1) != gridDim.x - 1) return;
  __threadfence();
  best = atomicExch(&found[row].best, 0);
  const unsigned rank = best >> 32;
  out[row] = rank > rank_of(-INFINITY) && rank < rank_of(INFINITY) ? ~static_cast<unsigned>(best) : otherwise;
}
