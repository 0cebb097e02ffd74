// The gated delta rule, token after token; see backend/gated_delta.py for the formulas and the names.
//
// LANES threads share a value channel, i.e. a row of the state S [Dv, Dk], which stays in their registers. A thread
// holds the quads of columns lane, lane + LANES, …: a warp then reads keys and queries from shared memory without bank
// conflicts, and the state from global memory in whole lines.

constexpr int LANES = 8;

// A thread's N channels: the more, the fewer reads of keys and queries. Sums say where they are rounded, so that a token gets the
// same bits wherever this is inlined.
template <int DK, int N = 1>
struct Channels {
  static constexpr int QUADS = DK / (4 * LANES);
  float4 s[N][QUADS];

  __device__ void load(const float* rows, long stride, int lane) {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < QUADS; i++) s[n][i] = reinterpret_cast<const float4*>(rows + n * stride)[i * LANES + lane];
  }

  __device__ void store(float* rows, long stride, int lane) const {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < QUADS; i++) reinterpret_cast<float4*>(rows + n * stride)[i * LANES + lane] = s[n][i];
  }

  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
      for (int i = 0; i < QUADS; i++) s[n][i] = {};
  }

  // One token: y = g S q + (k·q) delta reads the state once for k and q together. k, q: [DK] in shared memory; v: of
  // the thread's channels, in place of which comes y.
  __device__ void step(const float* k, const float* q, float (&v)[N], float g, float beta, int lane) {
    float4 kk[QUADS];
    float2 sk[N] = {}, sq[N] = {}, kq = {};
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
      kk[i] = reinterpret_cast<const float4*>(k)[i * LANES + lane];
      const float4 qq = reinterpret_cast<const float4*>(q)[i * LANES + lane];
      // here rather than once a token, so that its order is the same wherever this is inlined
      kq.x = __fmaf_rn(kk[i].y, qq.y, __fmaf_rn(kk[i].x, qq.x, kq.x));
      kq.y = __fmaf_rn(kk[i].w, qq.w, __fmaf_rn(kk[i].z, qq.z, kq.y));
#pragma unroll
      for (int n = 0; n < N; n++) {
        sk[n].x = __fmaf_rn(s[n][i].y, kk[i].y, __fmaf_rn(s[n][i].x, kk[i].x, sk[n].x));
        sk[n].y = __fmaf_rn(s[n][i].w, kk[i].w, __fmaf_rn(s[n][i].z, kk[i].z, sk[n].y));
        sq[n].x = __fmaf_rn(s[n][i].y, qq.y, __fmaf_rn(s[n][i].x, qq.x, sq[n].x));
        sq[n].y = __fmaf_rn(s[n][i].w, qq.w, __fmaf_rn(s[n][i].z, qq.z, sq[n].y));
      }
    }
#pragma unroll
    for (int n = 0; n < N; n++) sk[n].x += sk[n].y, sq[n].x += sq[n].y;
    kq.x += kq.y;
#pragma unroll
    for (int offset = LANES / 2; offset; offset /= 2) {
      kq.x += __shfl_xor_sync(~0u, kq.x, offset);
#pragma unroll
      for (int n = 0; n < N; n++) {
        sk[n].x += __shfl_xor_sync(~0u, sk[n].x, offset);
        sq[n].x += __shfl_xor_sync(~0u, sq[n].x, offset);
      }
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
      const float delta = beta * __fmaf_rn(-g, sk[n].x, v[n]);
#pragma unroll
      for (int i = 0; i < QUADS; i++) {
        s[n][i].x = __fmaf_rn(delta, kk[i].x, __fmul_rn(g, s[n][i].x));
        s[n][i].y = __fmaf_rn(delta, kk[i].y, __fmul_rn(g, s[n][i].y));
        s[n][i].z = __fmaf_rn(delta, kk[i].z, __fmul_rn(g, s[n][i].z));
        s[n][i].w = __fmaf_rn(delta, kk[i].w, __fmul_rn(g, s[n][i].w));
      }
      v[n] = __fmaf_rn(kq.x, delta, __fmul_rn(g, sq[n].x));
    }
  }
};
