// Chunks of prompts, packed one behind the other.
//
// plan int32 [B, CHUNK]: per row its first packed token, its tokens, where its context ends among the old raw inputs, its
// row in the old arrays, its first stop and the number of its stops. stops int32 [S]: after how many of its tokens a row
// leaves its state and raw inputs, ascending in each row. A row without tokens is padding.

constexpr int CHUNK = 6;

struct Chunk {
  int lo, num_tokens, end, old, first_stop, num_stops;

  __device__ Chunk(const int* plan, int row) {
    plan += row * CHUNK;
    lo = plan[0], num_tokens = plan[1], end = plan[2], old = plan[3], first_stop = plan[4], num_stops = plan[5];
  }
};
