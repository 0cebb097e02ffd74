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
};
