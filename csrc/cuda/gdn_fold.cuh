// Gated DeltaNet: keys and factors of a fold.

template <bool TURNED>
struct KeyRows {
  using type = TurnedRows;
};
template <>
struct KeyRows<false> {
  using type = ActRows;
};
using FoldKeys = KeyRows<FOLD_STAYS>::type;

// Factors of the folds of a block's heads, by the whole block, from keys, their norms and every head's gates in shared memory; `ring_beta`
// is the first head's. A warp makes those of one head and some entries at a time. Decays between two entries are summed entry by entry.
template <typename Shared>
__device__ __forceinline__ void make_fold_factors(const History& row, const float* ring_beta, int heads, Shared& shared, int lane,
                                                  int warp) {
  if constexpr (FOLD_STAYS) {
    TurnedRows::turn(shared.keys, row.history);
    __syncthreads();
  }
  const int blocks = max((row.history + FOLD_BLOCK - 1) / FOLD_BLOCK, 1);  // an empty history has a decay, too
#pragma unroll 1
  for (int task = warp; task < heads * blocks; task += WARPS) {
    const int at = task / blocks, block = task % blocks, begin = block * FOLD_BLOCK, count = min(row.history - begin, FOLD_BLOCK);
    const ActRows keys = ActRows{shared.keys}.row(begin);
    const float *gate = shared.heads[at].gate + begin, *norm = shared.key_norm + begin;
    FoldFactors& fold = shared.heads[at].fold;
    auto& solve = fold.solve[block];
#pragma unroll 1
    for (int targets = 0; targets < count; targets += 16)
#pragma unroll 1
      for (int sources = 0; sources < min(targets + 16, count); sources += 8)
        gram_tile<true>([&](int i) { return keys.row(min(targets + i, count - 1)); }, keys.row(sources),
                        [&](int i) { return targets + i < count ? solve[targets + i] + sources : nullptr; }, lane);
    for (int j = lane; j < FOLD_BLOCK; j += 32) {
      float until = 0.f, after = 0.f;
      for (int m = 0; m < count; ++m) (m <= j ? until : after) += gate[m];
      const bool used = j < count;
      fold.lead[begin + j] = used ? -expf(until) * norm[j] : 0.f;
      fold.last[begin + j] = used ? expf(after) * norm[j] : 0.f;
      fold.beta[begin + j] = used ? ring_beta[at * RING_LEN + row.place(begin + j)] : 0.f;
      if (j == 0) fold.decay[block] = expf(until + after);
    }
    __syncwarp();
    for (int source = lane; source < count; source += 32) {
      float sum = 0.f;
      for (int target = source + 1; target < count; ++target) {
        sum += gate[target];
        solve[target][source] *= expf(sum) * norm[source] * norm[target];
      }
    }
    __syncwarp();
    invert(fold, block, count, lane);
  }
  __syncthreads();
}
