// What rows of several steps have left, put into arrays that they share from now on.
//
// plan int32 [B, GATHERED]: per row its source, its row there, where its context ends among the raw inputs, and how many
// tokens of the stash are replayed; no context stands for a row that is there to make up the number.
// Out: state [B, HV, DV, DK]; window [B, WINDOW, C]; k, v, g, beta [B, OLD, …], undefined where no row has anything.

constexpr int GATHERED = 4;

// Of a step: states, raw inputs [B', window_room, C], and the stash [B', old_room, …].
template <typename T>
struct Source {
  const float* state;
  const T* window;
  const T* k;
  const T* v;
  const float* g;
  const float* beta;
  int window_room, old_room;
};

// `count` numbers; the blocks of a row take turns.
template <typename N>
__device__ void copy_numbers(const N* from, long count, N* to) {
  for (long i = static_cast<long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += static_cast<long>(gridDim.x) * blockDim.x)
    to[i] = from[i];
}

template <typename T, int HK, int HV, int DK, int DV>
__device__ void delta_gather(const int* plan, const Source<T>* sources, int WINDOW, int OLD, float* state, T* window,
                             T* k, T* v, float* g, float* beta) {
  constexpr int C = 2 * HK * DK + HV * DV, STATE = HV * DV * DK;
  const long to = blockIdx.z;
  plan += to * GATHERED;
  const int end = plan[2], num_replay = plan[3];
  if (!end) return;
  const Source<T> source = sources[plan[0]];
  const long from = plan[1];
  copy_numbers(reinterpret_cast<const float4*>(source.state + from * STATE), STATE / 4, reinterpret_cast<float4*>(state + to * STATE));
  copy_numbers(source.window + from * source.window_room * C, static_cast<long>(end) * C, window + to * WINDOW * C);
  copy_numbers(source.k + from * source.old_room * HK * DK, static_cast<long>(num_replay) * HK * DK, k + to * OLD * HK * DK);
  copy_numbers(source.v + from * source.old_room * HV * DV, static_cast<long>(num_replay) * HV * DV, v + to * OLD * HV * DV);
  copy_numbers(source.g + from * source.old_room * HV, static_cast<long>(num_replay) * HV, g + to * OLD * HV);
  copy_numbers(source.beta + from * source.old_room * HV, static_cast<long>(num_replay) * HV, beta + to * OLD * HV);
}
