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

// Keys that the block has asked for, in the order that a fold reads: before a barrier.
__device__ __forceinline__ void finish_keys(Act* keys, int count) {
  copy_wait();
  if constexpr (FOLD_STAYS) TurnedRows::turn(keys, count);
}

constexpr int FOLD_ROOM = FOLD_BLOCKS * FOLD_BLOCK;  // for gates, norms and betas, which are zero past the history

// Gates of a block of entries, an entry a lane, summed within their tiles of 8: up to the entry and from behind it. Sums over more than a
// tile are made of such: differences of prefix sums would lose accuracy where gates are strong.
struct TileSums {
  static constexpr int SPANS = (FOLD_BLOCK + 31) / 32;
  float until[SPANS], after[SPANS];

  __device__ TileSums(const float* gate, int lane) {
#pragma unroll
    for (int s = 0; s < SPANS; ++s) {
      float forth = s * 32 + lane < FOLD_BLOCK ? gate[s * 32 + lane] : 0.f, back = forth;
#pragma unroll
      for (int step = 1; step < 8; step *= 2) {
        const float earlier = __shfl_up_sync(~0u, forth, step), later = __shfl_down_sync(~0u, back, step);
        if (lane % 8 >= step) forth += earlier;
        if (lane % 8 + step < 8) back += later;
      }
      back = __shfl_down_sync(~0u, back, 1);
      until[s] = forth, after[s] = lane % 8 < 7 ? back : 0.f;
    }
  }
  __device__ float tile(int index) const { return history_value(until, index * 8 + 7); }

  // From behind entry lane % 4 * 2 + e of a tile, whose gates are given, to entry lane / 4 of it, if that comes later.
  __device__ static void within(float (&sum)[2], const float* gate, int lane) {
    const int target = lane / 4, source = lane % 4 * 2;
    sum[1] = target > source + 1 ? gate[target] : 0.f;
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      const float earlier = __shfl_up_sync(~0u, sum[1], step);
      if (lane >= step) sum[1] += earlier;
    }
    sum[0] = sum[1] + gate[source + 1];
  }
};

// What a fold multiplies entries and the state with.
__device__ __forceinline__ void make_entry_factors(FoldFactors& fold, int block, const float* gate, const float* norm, int lane) {
  const TileSums sums(gate, lane);
  float decay = 0.f, before[TileSums::SPANS] = {}, behind[TileSums::SPANS] = {};  // of the lane's tile
#pragma unroll
  for (int q = 0; q < FOLD_TILES; ++q) {
    const float tile = sums.tile(q);
    decay += tile;
#pragma unroll
    for (int s = 0; s < TileSums::SPANS; ++s) {
      if (q < s * 4 + lane / 8) before[s] += tile;
      if (q > s * 4 + lane / 8) behind[s] += tile;
    }
  }
#pragma unroll
  for (int s = 0; s < TileSums::SPANS; ++s)
    if (const int j = s * 32 + lane; j < FOLD_BLOCK) {
      fold.lead[block * FOLD_BLOCK + j] = -expf(before[s] + sums.until[s]) * norm[j];
      fold.last[block * FOLD_BLOCK + j] = expf(behind[s] + sums.after[s]) * norm[j];
    }
  if (lane == 0) fold.decay[block] = expf(decay);
}

// Factors of the folds of a block's heads, by the whole block, from keys, their norms and every head's gates and betas in shared memory. A
// warp makes those of one head and some entries at a time; of few heads, what depends on keys and what does not are different warps'.
template <typename Shared>
__device__ __forceinline__ void make_fold_factors(const History& row, int heads, Shared& shared, int lane, int warp) {
  // An empty history has a decay, too.
  const int blocks = FOLD_BLOCKS > 1 ? max((row.history + FOLD_BLOCK - 1) / FOLD_BLOCK, 1) : 1;
#pragma unroll 1
  for (int task = warp ^ WARPS / 2; task < heads * blocks; task += WARPS) {
    const int at = task / blocks, block = task % blocks, begin = block * FOLD_BLOCK;
    make_entry_factors(shared.heads[at].fold, block, shared.heads[at].gate + begin, shared.key_norm + begin, lane);
  }
#pragma unroll 1
  for (int task = warp; task < heads * blocks; task += WARPS) {
    const int at = task / blocks, block = task % blocks, begin = block * FOLD_BLOCK, count = min(row.history - begin, FOLD_BLOCK);
    const float *gate = shared.heads[at].gate + begin, *norm = shared.key_norm + begin;
    FoldFactors& fold = shared.heads[at].fold;
    const TileSums sums(gate, lane);

    // Products of keys, decayed, in the registers that they come in: of two tiles of targets with two of sources.
#pragma unroll 1
    for (int targets = 0; targets < FOLD_BLOCK; targets += 16) {
      const int newest = max(count - 1, 0);
      if (targets > newest) break;
      const auto key = [&](int entry) { return ActRows{shared.keys}.row(begin + min(entry, newest)); };
      float between = 0.f;  // over whole tiles
#pragma unroll 1
      for (int sources = targets; sources >= 0; sources -= 16) {
        float factor[2][2][2], gram[2][4] = {};
        const ActRows source_keys[2] = {key(sources + lane / 4), key(sources + 8 + lane / 4)};
        gram_product<true>(gram, key(targets + lane / 4), key(targets + 8 + lane / 4), source_keys, lane);
#pragma unroll
        for (int q = 0; q < 2; ++q)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            gram[q][i] = __uint_as_float(opaque(__float_as_int(gram[q][i])));  // all of them at once, beside the sums that follow
        // Of tile q of the sources in tile `half` of the targets, unless it comes later.
        const auto each_tile = [&](const auto& each) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int q = 0; q < 2; ++q)
              if (targets + 8 * half < FOLD_BLOCK && (sources < targets || q <= half))
                each(half, q, targets + 8 * half + lane / 4, sources + 8 * q + lane % 4 * 2);
        };
        each_tile([&](int half, int q, int target, int source) {
          float sum[2];
          if (sources < targets || q < half) {
            float gap = between;
            if (sources < targets && half == 1) gap += sums.tile(targets / 8);
            if (sources < targets && q == 0) gap += sums.tile(sources / 8 + 1);
            gap += history_value(sums.until, target);
            sum[0] = history_value(sums.after, source) + gap, sum[1] = history_value(sums.after, source + 1) + gap;
          } else {
            TileSums::within(sum, gate + targets + 8 * half, lane);
          }
#pragma unroll
          for (int e = 0; e < 2; ++e) factor[half][q][e] = expf(sum[e]) * norm[source + e] * norm[target];
        });
        each_tile([&](int half, int q, int target, int source) {
          const float *product = gram[q] + 2 * half, *by = factor[half][q];
          *reinterpret_cast<float2*>(&fold.solve[block][target][source]) = {product[0] * by[0], product[1] * by[1]};
        });
        if (sources < targets) between += sums.tile(sources / 8) + sums.tile(sources / 8 + 1);
      }
    }

    __syncwarp();
    invert(fold, block, count, lane);
  }
  __syncthreads();
}
