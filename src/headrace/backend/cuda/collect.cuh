// The same part of several arrays, one behind the other: of arrays [outer, size, inner] those from `at` on, `number` of them.
//
// plan int32 [5]: outer, size, inner, at, number. out [arrays, outer, number, inner]. blockIdx.z: array.

template <typename T>
__device__ void collect(const int* plan, const T* const* arrays, T* out) {
  const long outer = plan[0], inner = plan[2] * static_cast<long>(sizeof(T)), stride = plan[1] * inner;
  const long run = plan[4] * inner;
  const char* from = reinterpret_cast<const char*>(arrays[blockIdx.z]) + plan[3] * inner;
  char* to = reinterpret_cast<char*>(out) + blockIdx.z * outer * run;
  for (long o = blockIdx.y; o < outer; o += gridDim.y) copy_run<T>(from + o * stride, to + o * run, run);
}
