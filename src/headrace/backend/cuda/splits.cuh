// How the keys of a row are split: by what the row has before its own tokens, whatever rows are beside it.

// Where splits are counted from is a multiple of it, as are rows' places in an array that many share.
constexpr int PLACES = 256;

struct Splits {
  int origin, size, first, number;  // splits have `size` keys, the first of them is number `first` from `origin` on
  int begin;                        // the first key that is seen

  __device__ Splits(const Row& row, int shortest) {
    origin = row.first / PLACES * PLACES;
    begin = row.window ? max(row.first, row.start - row.window + 1) : row.first;
    size = shortest;
    // at most 16 of the shortest, 32 of others: one row's then are about as many as run at a time
    while (row.start - begin > size * (size > shortest ? 32 : 16)) size *= 2;
    first = (begin - origin) / size;
    number = row.num_tokens ? (row.start + row.num_tokens - origin + size - 1) / size - first : 0;
  }
};
