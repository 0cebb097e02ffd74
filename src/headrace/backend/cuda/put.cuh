// A part [outer, n, inner] into a table [outer, size, inner] from `at` on; both as their shapes say, with the axis between.
//
// A run of n * inner numbers lies together in both. It is copied 16 bytes at a time where addresses and lengths allow it.
// blockIdx.y: outer.

template <typename U>
__device__ void copy_runs(const void* from, long from_stride, void* to, long to_stride, long length, long outer) {
  for (long o = blockIdx.y; o < outer; o += gridDim.y) {
    const U* source = reinterpret_cast<const U*>(static_cast<const char*>(from) + o * from_stride);
    U* target = reinterpret_cast<U*>(static_cast<char*>(to) + o * to_stride);
    for (long i = static_cast<long>(blockIdx.x) * blockDim.x + threadIdx.x; i < length / static_cast<long>(sizeof(U));
         i += static_cast<long>(gridDim.x) * blockDim.x)
      target[i] = source[i];
  }
}

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
