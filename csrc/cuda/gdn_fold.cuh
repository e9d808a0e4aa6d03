// Gated DeltaNet: the factors of a fold.

// Factors of the folds of a block's heads, by the whole block, from keys, their norms and every head's gates and sums in shared memory;
// `ring_beta` is the first head's. Decays between two entries are summed entry by entry.
template <typename Shared>
__device__ __forceinline__ void make_fold_factors(const History& row, const float* ring_beta, int heads, Shared& shared, int lane,
                                                  int warp) {
  const int h = row.history, tiles = (h + 7) / 8, wide_tiles = (h + 15) / 16;
  for (int task = warp; task < heads * tiles * wide_tiles; task += WARPS) {
    FoldFactors& fold = shared.heads[task / (tiles * wide_tiles)].fold;
    const int sources = task % tiles * 8, targets = task / tiles % wide_tiles * 16;
    if (sources > targets + 15) continue;
    gram_tile<true>([&](int i) { return ActRows{shared.keys}.row(min(targets + i, h - 1)); }, ActRows{shared.keys}.row(sources),
                    [&](int i) { return targets + i < h ? fold.solve[targets + i] + sources : nullptr; }, lane);
  }
  for (int i = threadIdx.x; i < heads * h; i += WARPS * 32) {
    const int at = i / h, j = i % h;
    auto& head = shared.heads[at];
    float sum = 0.f;
    for (int m = 0; m <= j; ++m) sum += head.gate[m];
    head.fold.lead[j] = -expf(sum) * shared.key_norm[j];
    head.fold.last[j] = expf(head.back[j]) * shared.key_norm[j];
    head.fold.beta[j] = ring_beta[at * RING_LEN + row.place(j)];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * h; i += WARPS * 32) {
    auto& head = shared.heads[i / h];
    const int source = i % h;
    float sum = 0.f;
    for (int target = source + 1; target < h; ++target) {
      sum += head.gate[target];
      head.fold.solve[target][source] *= expf(sum) * shared.key_norm[source] * shared.key_norm[target];
    }
  }
  __syncthreads();
  for (int at = warp; at < heads; at += WARPS) invert(shared.heads[at].fold, h, lane);
  __syncthreads();
}
