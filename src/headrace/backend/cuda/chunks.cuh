// Chunks of prompts, packed one behind the other, and where a layer's table holds their rows' states.
//
// plan int32 [B, CHUNK]: per row its first packed token, its tokens, how many of them are certain, where its context ends among
// its old raw inputs, its slot, its rows of raw inputs and stash that are read (old) and written (new), its first stop
// and the number of its stops. Fewer than LONGEST_WINDOW tokens are not certain.
// stops int32 [S]: after how many of its tokens a row leaves its state and raw inputs, ascending in each row, none behind
// the certain tokens.
// A row with no tokens leaves the table alone; with no stops either it is padding. old < 0: a row without tokens so far, of
// zeros. slot < 0, new < 0: that part of the table is left alone, and its state begins with zeros.

constexpr int CHUNK = 9;

struct Chunk {
  int lo, num_tokens, num_certain, end, slot, old, new_row, first_stop, num_stops;

  __device__ Chunk(const int* plan, int row) {
    plan += row * CHUNK;
    lo = plan[0], num_tokens = plan[1], num_certain = plan[2], end = plan[3], slot = plan[4], old = plan[5];
    new_row = plan[6], first_stop = plan[7], num_stops = plan[8];
  }

  __device__ bool is_padding() const { return !num_tokens && !num_stops; }
};
