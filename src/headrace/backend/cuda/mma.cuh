// Products on the matrix units, and asynchronous copies to shared memory.

template <typename T>
__device__ unsigned pair(T a, T b) {
  struct alignas(4) Two { T a, b; } two = {a, b};
  return *reinterpret_cast<unsigned*>(&two);
}

// Two numbers in one instruction (F2FP): conversions of one number can become F2F, for which there are fewer units.
__device__ unsigned packed(float a, float b, bfloat16) {
  unsigned two;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(b), "f"(a));
  return two;
}

__device__ unsigned packed(float a, float b, float16) {
  unsigned two;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(b), "f"(a));
  return two;
}

template <typename T>
__device__ unsigned pair_of(float a, float b) { return packed(a, b, T()); }

__device__ float2 unpacked(unsigned two, bfloat16) { return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000u)}; }

__device__ float2 unpacked(unsigned two, float16) {
  float16 a, b;
  a.bits = two & 0xffff, b.bits = two >> 16;
  return {a, b};
}

// c [16, 8] += a [16, 16] b [16, 8], in float32
__device__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bfloat16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, float16) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four tiles [8, 8] of 16 bits from shared memory, as sides of a product: a lane names a row of 16 bytes, of the first tile the
// first eight, and so on. It gets two neighbouring numbers of row lane / 4 of each.
__device__ void load_tiles(unsigned (&to)[4], const void* row) {
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// The same of the tiles' transposes: two numbers below one another of column lane / 4.
__device__ void load_columns(unsigned (&to)[4], const void* row) {
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// The transpose of a tile [8, 8] of 16 bits of which a lane has two neighbouring numbers of row lane / 4.
__device__ unsigned transposed(unsigned two) {
  unsigned found;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(found) : "r"(two));
  return found;
}

// 16 bytes from device memory to shared memory, without a register between. The rest of the line is soon asked for, so it comes
// whole, which made products of dense weights 2 to 11 % quicker on an H200.
__device__ void copy_async(void* to, const void* from) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}

// The same, or 16 bytes of zeros: `from` is then not read.
__device__ void copy_async_if(bool is_there, void* to, const void* from) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}

// As copy_async, for what other blocks of the multiprocessor read, too: it stays in the first cache.
template <int BYTES>
__device__ void copy_cached(void* to, const void* from) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(BYTES) : "memory");
}

__device__ void end_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ void await_stage() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
