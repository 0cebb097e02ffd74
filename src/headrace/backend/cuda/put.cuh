// A part [outer, n, inner] into a table [outer, size, inner] from `at` on; both as their shapes say, with the axis between.
//
// A run of n * inner numbers lies together in both.

// done: one number, so that there is something to wait for.
template <int AXIS, typename T>
__device__ void put(T* table, const int* table_shape, int ndim, int at, const T* part, const int* part_shape, int* done) {
  long outer = 1, inner = sizeof(T);  // numbers, bytes
  for (int i = 0; i < AXIS; i++) outer *= table_shape[i];
  for (int i = AXIS + 1; i < ndim; i++) inner *= table_shape[i];
  const long run = part_shape[AXIS] * inner, stride = table_shape[AXIS] * inner;
  char* to = reinterpret_cast<char*>(table) + at * inner;
  const long odd = reinterpret_cast<long>(to) | reinterpret_cast<long>(part) | run | stride;
  if (odd % sizeof(uint4) == 0) copy_runs<uint4>(part, run, to, stride, run, outer);
  else copy_runs<T>(part, run, to, stride, run, outer);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *done = 0;
}
