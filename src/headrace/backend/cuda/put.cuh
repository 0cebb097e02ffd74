// The same part of several tables, written in place: of tables [outer, size, inner] from `at` on, `number` of them.
//
// plan int32 [5]: outer, size, inner, at, number. parts [outer, number, inner]. blockIdx.z: table.
// done: one number, so that there is something to wait for.

template <typename T>
__device__ void put(const int* plan, T* const* tables, const T* const* parts, int* done) {
  const long outer = plan[0], inner = plan[2] * static_cast<long>(sizeof(T)), stride = plan[1] * inner;
  const long run = plan[4] * inner;
  char* to = reinterpret_cast<char*>(tables[blockIdx.z]) + plan[3] * inner;
  const char* from = reinterpret_cast<const char*>(parts[blockIdx.z]);
  const long odd = reinterpret_cast<long>(to) | reinterpret_cast<long>(from) | run | stride;
  if (odd % sizeof(uint4) == 0) copy_runs<uint4>(from, run, to, stride, run, outer);
  else copy_runs<T>(from, run, to, stride, run, outer);
  if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) *done = 0;
}
