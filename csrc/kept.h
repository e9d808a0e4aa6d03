// What a commit keeps of a row's step. Both backends and both kernels of a commit count by this. Needs Params.
#if !defined(__CUDACC__) && !defined(__device__)
#define __device__
#endif

struct Kept {
  int tokens;    // that the row brought: as many as the step had room for, and took
  int accepted;  // of them; 0 if what the engine says is impossible
  bool possible;
  const int* path;  // nodes of a tree in order; null: the first ones

  __device__ int node(int i) const { return path ? path[i] : i; }
};

__device__ inline Kept count_kept(const Params& p, int row) {
  const int counted = p.num_tokens ? ((const int*)p.num_tokens)[row] : p.tokens, most = p.ring_len - p.buffer_len;
  Kept kept = {counted < 0 ? 0 : counted > most ? most : counted, ((const int*)p.num_accepted)[row], true, nullptr};
  if (p.accepted) kept.path = (const int*)p.accepted + (long long)row * p.width;
  kept.possible = counted == kept.tokens && kept.accepted >= 0 && kept.accepted <= (kept.path ? p.width : kept.tokens);
  int last = -1;
  for (int i = 0; kept.path && kept.possible && i < kept.accepted; i++) {
    kept.possible = kept.path[i] > last && kept.path[i] < kept.tokens;
    last = kept.path[i];
  }
  if (!kept.possible) kept.accepted = 0;
  return kept;
}
