// Parts of several tables, written in place: of tables [outer, size, inner] from `at` on, `number` of them.
//
// plan int32 [3 + 4 * parts]: outer, size, inner; of each part its first table, how many, at, number.
// A part is [tables, outer, number, inner]. blockIdx.z: part. done: one number, so that there is something to wait for.

template <typename T>
__device__ void put(const int* plan, T* const* tables, const T* const* parts, int* done) {
  const int outer = plan[0], *own = plan + 3 + 4 * blockIdx.z;
  const long inner = plan[2] * static_cast<long>(sizeof(T)), run = own[3] * inner;
  const char* from = reinterpret_cast<const char*>(parts[blockIdx.z]);
  for (int o = blockIdx.y; run > 0 && o < own[1] * outer; o += gridDim.y) {
    char* table = reinterpret_cast<char*>(tables[own[0] + o / outer]);
    char* to = table + (o % outer * static_cast<long>(plan[1]) + own[2]) * inner;
    copy_run<T>(from + o * run, to, run);
  }
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) *done = 0;
}
