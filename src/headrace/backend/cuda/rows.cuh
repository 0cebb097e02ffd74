// Where the rows of a step are.
//
// plan int32 [R, ROW]: per row its first packed token, its tokens, its length before them, its slab, its slot there, the
// slab's capacity, how many keys a token sees, its own included (0: all), and the first key there is.

constexpr int ROW = 8;

struct Row {
  int lo, num_tokens, start, slab, slot, capacity, window, first;

  __device__ Row(const int* plan, int row) {
    plan += row * ROW;
    lo = plan[0], num_tokens = plan[1], start = plan[2], slab = plan[3], slot = plan[4], capacity = plan[5];
    window = plan[6], first = plan[7];
  }

  // Whether attention.cuh takes the row even in steps with chunks, see MANY_TOKENS and MANY_KEYS in shapes.py.
  __device__ bool is_small(int many_tokens, int many_keys) const {
    return num_tokens < many_tokens && start + num_tokens - first <= many_keys;
  }
};

// The row of the plan that has an item, if items are numbered row by row and a row has num_items(row) of them. row_item: its
// first one. All lanes of a warp ask for the same item.
template <typename F>
__device__ int row_of(int item, const F& num_items, int& row_item) {
  const int lane = threadIdx.x % 32;
  row_item = 0;
  for (int row_at = 0;; row_at += 32) {
    const int own = num_items(row_at + lane);
    int sum = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int before = __shfl_up_sync(~0u, sum, offset);
      if (lane >= offset) sum += before;
    }
    const unsigned found = __ballot_sync(~0u, row_item + sum > item);
    if (found) {
      const int of = __ffs(found) - 1;
      row_item += __shfl_sync(~0u, sum - own, of);
      return row_at + of;
    }
    row_item += __shfl_sync(~0u, sum, 31);
  }
}

template <typename F>
__device__ int sum_of_items(int num_rows, const F& num_items) {
  int total = 0;
  for (int at = 0; at < num_rows; at += 32) total += __reduce_add_sync(~0u, num_items(at + static_cast<int>(threadIdx.x % 32)));
  return total;
}
