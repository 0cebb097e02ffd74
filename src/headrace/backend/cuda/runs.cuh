// A run of bytes from one array into another by the blocks along x, 16 bytes at a time where addresses and length allow it.

template <typename U>
__device__ void copy_units(const char* from, char* to, long length) {
  const U* __restrict__ source = reinterpret_cast<const U*>(from);
  U* __restrict__ target = reinterpret_cast<U*>(to);
  const long stride = static_cast<long>(gridDim.x) * blockDim.x, number = length / static_cast<long>(sizeof(U));
#pragma unroll 4
  for (long i = static_cast<long>(blockIdx.x) * blockDim.x + threadIdx.x; i < number; i += stride) target[i] = source[i];
}

template <typename T>
__device__ void copy_run(const char* from, char* to, long length) {
  const long odd = reinterpret_cast<long>(from) | reinterpret_cast<long>(to) | length;
  if (odd % sizeof(uint4) == 0) copy_units<uint4>(from, to, length);
  else copy_units<T>(from, to, length);
}
