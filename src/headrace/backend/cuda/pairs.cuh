// Pairs of a token and one of its experts, PER_TOKEN + SHARED of each token; the expert that all have is number num_experts.

template <int PER_TOKEN, bool SHARED>
__device__ int expert_of(const int* chosen, int num_experts, int pair) {
  const int token = pair / (PER_TOKEN + SHARED), j = pair % (PER_TOKEN + SHARED);
  return j < PER_TOKEN ? chosen[token * PER_TOKEN + j] : num_experts;
}

// What a block makes: pairs of one expert, by their numbers.
struct Pairs {
  int expert, first, count;
  const int* order;  // none: `first` is the only one

  __device__ int operator[](int i) const { return order ? order[first + i] : first; }
};

// Sorts pairs by expert and cuts them into pieces of at most PIECE pairs of one: order int32 [room], of which the first
// num_pairs are written, pieces int32 [num_pieces, 3] as the numbers in `Pairs`, of which the last may have no pairs. Which
// pair of an expert comes first is left to chance; they don't meet in any sum. room: with tokens that are left out. One block.
template <int PER_TOKEN, bool SHARED, int NUM_EXPERTS, int PIECE>
__device__ void sort_pairs(const int* chosen, int num_pairs, int room, int* order, int* pieces) {
  __shared__ int counts[NUM_EXPERTS + SHARED], places[NUM_EXPERTS + SHARED];
  const int thread = threadIdx.x, threads = blockDim.x;
  const int num_pieces = min(room, room / PIECE + NUM_EXPERTS + SHARED);
  for (int e = thread; e < NUM_EXPERTS + SHARED; e += threads) counts[e] = 0;
  for (int i = thread; i < num_pieces; i += threads) pieces[i * 3 + 2] = 0;
  __syncthreads();
  for (int i = thread; i < num_pairs; i += threads) atomicAdd(counts + expert_of<PER_TOKEN, SHARED>(chosen, NUM_EXPERTS, i), 1);
  __syncthreads();
  for (int e = thread; e < NUM_EXPERTS + SHARED; e += threads) {
    int place = 0, piece = 0;
    for (int i = 0; i < e; i++) place += counts[i], piece += (counts[i] + PIECE - 1) / PIECE;
    places[e] = place;
    for (int done = 0; done < counts[e]; done += PIECE, piece++)
      pieces[piece * 3] = e, pieces[piece * 3 + 1] = place + done, pieces[piece * 3 + 2] = min(PIECE, counts[e] - done);
  }
  __syncthreads();
  for (int i = thread; i < num_pairs; i += threads)
    order[atomicAdd(places + expert_of<PER_TOKEN, SHARED>(chosen, NUM_EXPERTS, i), 1)] = i;
}

// y [tokens, N]: each token's EACH pairs added up as in down_sum.
template <typename T, int EACH>
__device__ void add_pairs(const float* made, long size, int N, const T* residual, T* y) {
  const long at = static_cast<long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= size) return;
  float found = 0;
#pragma unroll
  for (int j = 0; j < EACH; j++) found += made[(at / N * EACH + j) * N + at % N];
  y[at] = with_residual(found, residual, at);
}
