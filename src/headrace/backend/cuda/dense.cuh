// All of quantised weights as numbers, rounded once; a thread makes eight.
template <typename T, int BITS, int GROUP>
__device__ void dense(const unsigned* weight, const T* scales, const T* biases, long size, T* out) {
  const long at = static_cast<long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at * 8 >= size) return;
  const float scale = static_cast<float>(scales[at * 8 / GROUP]), bias = static_cast<float>(biases[at * 8 / GROUP]);
  alignas(16) T made[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const unsigned q = weight[(at * 8 + i) * BITS / 32] >> i * BITS % 32 & ((1 << BITS) - 1);
    made[i] = static_cast<T>(fmaf(scale, static_cast<float>(q), bias));
  }
  reinterpret_cast<uint4*>(out)[at] = reinterpret_cast<const uint4&>(made);
}
