// The PER_TOKEN largest logits of a token (the first of equal ones), and their softmax: over all, or over them if NORMED.
// A warp makes one token, its lanes PER_LANE logits each.
template <typename T, int PER_TOKEN, int PER_LANE, bool NORMED>
__device__ void route(const T* logits, int num_tokens, int num_experts, int width, int* chosen, float* weights) {
  const int lane = threadIdx.x % 32, token = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  if (token >= num_tokens) return;
  const T* own = logits + static_cast<long>(token) * width;
  // as numbers whose order is that of the logits; 0 is none
  unsigned keys[PER_LANE];
  float total = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    keys[i] = 0;
    if (i * 32 + lane >= num_experts) continue;
    const unsigned bits = __float_as_uint(static_cast<float>(own[i * 32 + lane]));
    keys[i] = bits >> 31 ? ~bits : bits | 0x80000000;
  }
  auto value_of = [](unsigned key) { return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key); };
  float highest = 0, chosen_total = 0, mine = 0;
  int expert = 0;
  for (int k = 0; k < PER_TOKEN; k++) {
    unsigned best = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) best = max(best, keys[i]);
    const unsigned key = __reduce_max_sync(~0u, best);
    if (k == 0) {
      highest = value_of(key);
#pragma unroll
      for (int i = 0; i < PER_LANE; i++)
        if (keys[i]) total += expf(value_of(keys[i]) - highest);
    }
    int at = PER_LANE * 32;
#pragma unroll
    for (int i = PER_LANE - 1; i >= 0; i--)
      if (keys[i] == key) at = i * 32 + lane;
    at = __reduce_min_sync(~0u, at);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (i * 32 + lane == at) keys[i] = 0;
    const float weight = expf(value_of(key) - highest);
    chosen_total += weight;
    if (lane == k) expert = at, mine = weight;
  }
  total = sum_over<32>(total);
  if (lane < PER_TOKEN) {
    chosen[token * PER_TOKEN + lane] = expert;
    weights[token * PER_TOKEN + lane] = mine / (NORMED ? chosen_total : total);
  }
}
