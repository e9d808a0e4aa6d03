// The exact fold of the delta rule: what Gated DeltaNet and KDA share of it. DECAY_VECTOR: every key channel has a decay of its own.

// Where a unit fits in the registers it stays there, and the history is folded a block of entries at a time: each by an exact fold of its
// own, from the state that the block before has left. Elsewhere the history is one block, and the unit is loaded twice.
constexpr bool FOLD_STAYS =
    N <= 128 && sizeof(Act) == 2 &&
    (!DECAY_VECTOR || (Whole::SCALED && BUFFER_LEN <= 32 && (Whole::INTEGERS || MAX_TOKENS == 1) && __CUDA_ARCH__ == 900));
constexpr int FOLD_ENTRIES = (BUFFER_LEN + 7) / 8 * 8, FOLD_BLOCK = FOLD_STAYS && FOLD_ENTRIES > 32 ? 32 : FOLD_ENTRIES;
constexpr int FOLD_BLOCKS = (BUFFER_LEN + FOLD_BLOCK - 1) / FOLD_BLOCK;
constexpr int FOLD_TILES = FOLD_BLOCK / 8;
constexpr int SOLVE_PITCH = FOLD_BLOCK + (FOLD_TILES % 2 ? 0 : 8);  // an odd number of tiles: rows of a fragment use different banks

// Factors of one head's fold; those of entries past the history are zero.
struct alignas(16) FoldFactors {
  float solve[FOLD_BLOCKS][FOLD_BLOCK][SOLVE_PITCH];  // [j][i]: first of u_i in what is subtracted in u_j; then of v_i - S k_i in u_j
  float lead[FOLD_BLOCKS * FOLD_BLOCK];               // of the product of the state before the block with k_j, negative
  float last[FOLD_BLOCKS * FOLD_BLOCK];               // of u_j in the state after the block
  float beta[FOLD_BLOCKS * FOLD_BLOCK];
  float decay[FOLD_BLOCKS];  // of the state over the block, where channels share it
};

// From the decayed products of a block's keys, solve[j][i] of u_i in u_j for i < j, to what solves for u: u_j = sum over i <= j of
// solve[j][i] (v_i - S k_i), in place, a column a lane, some rows at a time. By one warp. What lies outside the triangle becomes zero,
// because all of it is multiplied; rows past the history may hold anything.
__device__ __forceinline__ void invert(FoldFactors& fold, int block, int count, int lane) {
  constexpr int COLUMNS = (FOLD_BLOCK + 31) / 32, ROWS = FOLD_TILES % 2 ? 8 : 16;
  auto& solve = fold.solve[block];
  const float* beta = fold.beta + block * FOLD_BLOCK;
#pragma unroll 1
  for (int first = 0; first < FOLD_BLOCK; first += ROWS) {
    float value[COLUMNS][ROWS];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
      for (int e = 0; e < ROWS; ++e) value[c][e] = c * 32 + lane == first + e ? 1.f : 0.f;
#pragma unroll 1
    for (int before = 0; before < first; before += 4) {
      float u[COLUMNS][4];
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
        for (int m = 0; m < 4; ++m) u[c][m] = solve[before + m][min(c * 32 + lane, FOLD_BLOCK - 1)];
#pragma unroll
      for (int e = 0; e < ROWS; ++e) {
        float factor[4];
        load_floats(factor, solve[first + e] + before);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
          for (int m = 0; m < 4; ++m) value[c][e] = fmaf(-factor[m], u[c][m], value[c][e]);
      }
    }
#pragma unroll
    for (int e = 0; e < ROWS; ++e) {
#pragma unroll
      for (int before = 0; before < e; before += 4) {
        float factor[4];
        load_floats(factor, solve[first + e] + first + before);
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
          for (int m = 0; m < 4 && before + m < e; ++m) value[c][e] = fmaf(-factor[m], value[c][before + m], value[c][e]);
      }
      const float of_row = beta[first + e];
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) value[c][e] *= of_row;
    }
    __syncwarp();
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
#pragma unroll
      for (int e = 0; e < ROWS; ++e)
        if (c * 32 + lane < FOLD_BLOCK) solve[first + e][c * 32 + lane] = first + e < count ? value[c][e] : 0.f;
    __syncwarp();
  }
}

// v of the history in a unit's 16 rows, in shared memory, of one warp. Halves of every other four entries are swapped: matrix loads then use
// all banks.
struct alignas(16) UnitValues {
  Act value[FOLD_BLOCKS * FOLD_BLOCK * 16];

  __device__ static int place(int entry, int row) { return entry * 16 + (row ^ (entry / 4 & 1) * 8); }
  // On its way from the ring; `ring_v` is the head's from the unit's first row on.
  __device__ void stage(const Act* ring_v, const History& row, int lane) {
    __syncwarp();
    constexpr int PIECES = 16 / PIECE_ELEMENTS;
#pragma unroll 1
    for (int i = lane; i < row.history * PIECES; i += 32) {
      const int entry = i / PIECES, at = i % PIECES * PIECE_ELEMENTS;
      copy_async(value + place(entry, at), ring_v + row.place(entry) * P + at);
    }
  }
  // Of rows lane / 4 and eight below, entries 2 (lane % 4) and the next of each tile from entry `first` on: as accumulators have them. What lies
  // past the history is another entry's.
  template <int TILES>
  __device__ void load(float (&out)[TILES][4], int first, int history, int lane) const {
    auto used = [&](int entry) { return entry < history ? entry : 0; };
    if constexpr (sizeof(Act) == 4) {
#pragma unroll
      for (int q = 0; q < TILES; ++q)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[q][i] = to_float(value[place(used(first + q * 8 + lane % 4 * 2 + i % 2), i / 2 * 8 + lane / 4)]);
    } else {
#pragma unroll
      for (int q = 0; q < TILES; q += 2) {
        u32 pair[4];
        ldmatrix_transposed(pair, value + place(used(first + q * 8 + lane / 16 * 8 + lane % 8), (lane / 8 & 1) * 8));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (q + i / 2 == TILES) break;
          out[q + i / 2][i % 2 * 2] = ACT_TERMS == 1 ? low_bf16(pair[i]) : low_fp16(pair[i]);
          out[q + i / 2][i % 2 * 2 + 1] = ACT_TERMS == 1 ? high_bf16(pair[i]) : high_fp16(pair[i]);
        }
      }
    }
  }
};

// Where a block leaves its unit: in the registers; the last one also stores it, but where scales depend on whole rows.
template <int RUNS, typename To>
struct Changed {
  KeptRuns<RUNS>& kept;
  To& to;
  bool last;

  __device__ void store(int run, int half, const float (&value)[Whole::VEC]) {
    kept.store(run, half, value);
    if (!Whole::SCALED && last) to.store(run, half, value);
  }
};

// The product of a unit with the keys of a block of entries from `begin` on. A unit that does not stay is loaded, from `from`.
template <int KEPT, typename Keys>
__device__ __forceinline__ void state_product(float (&product)[FOLD_TILES][4], KeptRuns<KEPT>& unit, const Place& from, Keys keys,
                                              int begin, int history, int lane) {
  constexpr int VEC = Whole::VEC;
  float rest[FOLD_TILES][4] = {};  // sums of the small products, beside those of the upper ones: they truncate
#pragma unroll 1
  for (int first = 0; first < WHOLE_RUNS; first += KEPT) {
    if (!FOLD_STAYS) unit.load(from, first);
    constexpr int TOGETHER = Keys::EXACT ? FOLD_TILES : FOLD_TILES < 2 ? 1 : 2;  // tiles of keys that share a split of the state
#pragma unroll
    for (int group = 0; group < FOLD_TILES; group += TOGETHER) {
      if (begin + group * 8 >= history) break;
#pragma unroll
      for (int i = 0; i < KEPT; ++i) {
        __syncwarp();  // keys of a run stay behind the products of the one before, and out of the registers
        float key[TOGETHER][VEC];
#pragma unroll
        for (int q = 0; q < TOGETHER; ++q) product_columns(key[q], keys, begin + (group + q) * 8, history - 1, first + i, lane);
#pragma unroll
        for (int s = 0; s < VEC / 2; ++s) {
          const float a[4] = {unit.value[i][0][2 * s], unit.value[i][1][2 * s], unit.value[i][0][2 * s + 1], unit.value[i][1][2 * s + 1]};
#pragma unroll
          for (int q = 0; q < TOGETHER && group + q < FOLD_TILES; ++q) {
            const float b[2] = {key[q][2 * s], key[q][2 * s + 1]};
            mma_floats<Keys::EXACT>(product[group + q], rest[group + q], a, b);
          }
        }
      }
    }
  }
#pragma unroll
  for (int q = 0; q < FOLD_TILES; ++q)
#pragma unroll
    for (int i = 0; i < 4; ++i) product[q][i] += rest[q][i];
}
// The same of integers, all of whose history is one block.
template <int KEPT>
__device__ __forceinline__ void state_product(float (&product)[FOLD_TILES][4], WholeRuns<KEPT>& unit, const Place& from, ByteRows keys, int,
                                              int history, int lane) {
  ByteDigits digits[FOLD_TILES];
  if (history == 0) return;
#pragma unroll 1
  for (int first = 0; first < WHOLE_RUNS; first += KEPT) {
    if (!FOLD_STAYS) unit.load(from, first);
    keys.columns->add_whole(digits, unit, first, history - 1, lane);
  }
  keys.columns->whole_product(product, digits, unit, history - 1, lane);
}
// What is loaded for that.
template <int KEPT, typename Keys>
__device__ __forceinline__ KeptRuns<KEPT>& unit_of(KeptRuns<KEPT>& kept, WholeRuns<KEPT>&, Keys) {
  return kept;
}
template <int KEPT>
__device__ __forceinline__ WholeRuns<KEPT>& unit_of(KeptRuns<KEPT>&, WholeRuns<KEPT>& whole, ByteRows) {
  return whole;
}

// One unit's exact fold: the corrections of the history again, from raw v and the full-precision state, then the fold with them.
// `product_keys` are the columns that the state is multiplied with, `fold_keys` those that are added to it; `ring_v` is the head's, `values` the
// warp's, `decay(block, channel)` the state's, and `target()` where it goes, which is of no use in registers before. An empty history decodes the state.
template <typename Target, typename ProductKeys, typename FoldKeys, typename Decay>
__device__ __forceinline__ void exact_fold(const History& row, const Act* ring_v, UnitValues& values, int slab, const Place& from,
                                           const Target& target, const FoldFactors& factors, ProductKeys product_keys, FoldKeys fold_keys,
                                           const Decay& decay, int lane) {
  lane = opaque(lane);
  constexpr int VEC = Whole::VEC, KEPT = FOLD_STAYS ? WHOLE_RUNS : FOLD_BATCH, STEPS = (FOLD_BLOCK + 15) / 16;
  values.stage(ring_v + slab * 16, row, lane);
  KeptRuns<KEPT> kept;
  WholeRuns<KEPT> whole;
  auto& unit = unit_of(kept, whole, product_keys);
  u32 scaled[STEPS][3][4];  // u of a block, times what it has in the state after it

  auto correct = [&](int block) {
    const int begin = block * FOLD_BLOCK, count = row.history - begin;
    float product[FOLD_TILES][4] = {};
    state_product(product, unit, from, product_keys, begin, row.history, lane);
    copy_wait();
    __syncwarp();
    float v[FOLD_TILES][4];
    values.load(v, begin, row.history, opaque(lane));
#pragma unroll
    for (int q = 0; q < FOLD_TILES; ++q) {
      const float2 lead = *reinterpret_cast<const float2*>(factors.lead + begin + q * 8 + lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 4; ++i) product[q][i] = fmaf(i % 2 ? lead.y : lead.x, product[q][i], v[q][i]);
    }

#pragma unroll
    for (int q = 0; q < 2 * STEPS; ++q) {
      float u[4] = {}, small[4] = {};
      float2 last = {0.f, 0.f};
      if (q < FOLD_TILES && q * 8 < count) {
#pragma unroll
        for (int s = 0; s <= q && s < FOLD_TILES; ++s) {
          const float a[4] = {product[s][0], product[s][2], product[s][1], product[s][3]};
          const float2 pair = *reinterpret_cast<const float2*>(&factors.solve[block][q * 8 + lane / 4][s * 8 + lane % 4 * 2]);
          const float b[2] = {pair.x, pair.y};
          mma_floats<false>(u, small, a, b);
        }
        last = *reinterpret_cast<const float2*>(factors.last + begin + q * 8 + lane % 4 * 2);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32 terms[3];
        split((u[2 * i] + small[2 * i]) * last.x, (u[2 * i + 1] + small[2 * i + 1]) * last.y, terms);
#pragma unroll
        for (int n = 0; n < 3; ++n) scaled[q / 2][n][q % 2 * 2 + i] = terms[n];
      }
    }
  };
  auto add = [&](auto& changed, int block, int first) {
    fold_runs<KEPT>(
        changed, first, [&](float (&out)[VEC], int i, int half) { unit.decode(out, i, half); },
        [&](int channel) { return decay(block, channel); }, scaled, fold_keys.row(block * FOLD_BLOCK), row.history - block * FOLD_BLOCK,
        lane);
  };

  if constexpr (FOLD_STAYS) {
    unit.load(from, 0);
    const int blocks = FOLD_BLOCKS > 1 ? max((row.history + FOLD_BLOCK - 1) / FOLD_BLOCK, 1) : 1;
#pragma unroll 1
    for (int block = 0; block < blocks; ++block) {
      correct(block);
      auto to = target();
      Changed<KEPT, decltype(to)> changed{kept, to, block == blocks - 1};
      add(changed, block, 0);
    }
    if constexpr (Whole::SCALED) {
      auto to = target();
      kept.leave(to);
    }
  } else {
    correct(0);
    auto to = target();
    fold<KEPT>(to, [&](int first) {
      unit.load(from, first);
      add(to, 0, first);
    });
  }
}
