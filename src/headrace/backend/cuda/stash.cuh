// A layer's uncertain tokens: k [rows, STASH, HK, DK], v [rows, STASH, HV, DV], g, beta [rows, STASH, HV].

template <typename T>
struct Stash {
  T* k;
  T* v;
  float* g;
  float* beta;
};
