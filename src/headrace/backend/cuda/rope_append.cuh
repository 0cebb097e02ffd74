// Makes the heads of each token, see heads.cuh, and writes keys and values into the slabs; those of tokens behind the last
// row's nowhere.
//
// plan: see rows.cuh, of all rows in their order. A warp makes one head of one token; out: queries [T, HQ, D].

template <typename T, int HQ, int HKV, int D, typename Heads>
__device__ void rope_append(const int* plan, const Heads heads, int num_rows, T* const* slab_keys, T* const* slab_values,
                            T* queries) {
  const int token = blockIdx.y, lane = threadIdx.x % 32, head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (head >= HQ + 2 * HKV) return;
  const Sort sort = head < HQ ? Sort::QUERY : (head < HQ + HKV ? Sort::KEY : Sort::VALUE);
  const int own = sort == Sort::QUERY ? head : (head - HQ) % HKV;
  T* to = queries + (static_cast<long>(token) * HQ + own) * D;
  if (sort != Sort::QUERY) {
    // the first row that ends behind the token; a warp looks at 32 at a time
    int at = num_rows;
    for (int first = 0; first < num_rows && at == num_rows; first += 32) {
      const int* of = plan + (first + lane) * ROW;
      const unsigned found = __ballot_sync(~0u, first + lane < num_rows && token < of[0] + of[1]);
      if (found) at = first + __ffs(found) - 1;
    }
    if (at == num_rows) return;
    const Row row(plan, at);
    T* slab = (sort == Sort::KEY ? slab_keys : slab_values)[row.slab];
    to = slab + ((static_cast<long>(row.slot) * HKV + own) * row.capacity + row.start + token - row.lo) * D;
  }
  float x[Heads::PER_LANE];
  heads.make(sort, token, own, x);
  store(to, x);
}
