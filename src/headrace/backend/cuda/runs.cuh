// Runs of bytes from one array into another, 16 bytes at a time where addresses and lengths allow it. blockIdx.y: outer.

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
