// The exact fold of the delta rule: what Gated DeltaNet and KDA share of it.

// Factors of one head's fold, for the entries of the history.
constexpr int FOLD_TILES = (BUFFER_LEN + 7) / 8;
constexpr int SOLVE_PITCH = FOLD_TILES * 8 + (FOLD_TILES % 2 ? 0 : 8);  // an odd number of tiles: rows of a fragment use different banks
struct FoldFactors {
  float solve[FOLD_TILES * 8][SOLVE_PITCH];  // [j][i]: first of u_i in what is subtracted in u_j; then of v_i - S k_i in u_j
  float lead[BUFFER_LEN];                    // of the state's product with k_j, negative
  float beta[BUFFER_LEN];
  float last[BUFFER_LEN];  // of u_j in the folded state
};

// From the decayed products of keys, solve[j][i] of u_i in u_j for i < j, to what solves for u: u_j = sum over i <= j of solve[j][i]
// (v_i - S k_i), row by row and in place, a column a lane. By one warp. What lies outside the triangle becomes zero, because all of it
// is multiplied.
__device__ __forceinline__ void invert(FoldFactors& fold, int history, int lane) {
  constexpr int COLUMNS = (BUFFER_LEN + 31) / 32, ROWS = FOLD_TILES * 8;
  for (int j = 0; j < round_up(history, 8); ++j) {
    float value[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) {
      const int i = c * 32 + lane;
      float subtracted = 0.f;
      if (i < ROWS && j < history)
#pragma unroll 4
        for (int m = 0; m < j; ++m) subtracted = fmaf(fold.solve[j][m], fold.solve[m][i], subtracted);
      value[c] = i > j || j >= history ? 0.f : fold.beta[j] * (i == j ? 1.f : -subtracted);
    }
    __syncwarp();
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c)
      if (c * 32 + lane < ROWS) fold.solve[j][c * 32 + lane] = value[c];
    __syncwarp();
  }
}

// One unit's exact fold: the corrections of the history again, from raw v and the full-precision state, then the fold with them.
// Where a unit fits in the registers, they keep it from the product to the fold. `product_keys` are the columns that the state is
// multiplied with, `fold_keys` those that are added to it; `ring_v` is the head's. An empty history decodes the state.
template <typename To, typename ProductKeys, typename FoldKeys, typename Decay>
__device__ __forceinline__ void exact_fold(const History& row, const Act* ring_v, int slab, const Place& from, To to,
                                           const FoldFactors& factors, ProductKeys product_keys, FoldKeys fold_keys, const Decay& decay,
                                           int lane) {
  lane = opaque(lane);
  constexpr bool FITS = N <= 128 && BUFFER_LEN <= 16 && ProductKeys::EXACT && !Whole::SCALED;
  constexpr int VEC = Whole::VEC, KEPT = FITS ? WHOLE_RUNS : FOLD_BATCH;
  ring_v += slab * 16 + lane / 4;
  const int newest = max(row.history - 1, 0);
  float value[KEPT][2][VEC];
  auto load = [&](int first) {
    WholeRuns<KEPT> whole;
    whole.load(from, first);
#pragma unroll
    for (int i = 0; i < KEPT; ++i) whole.decode(value[i][0], i, 0), whole.decode(value[i][1], i, 1);
  };
  float product[FOLD_TILES][4] = {}, rest[FOLD_TILES][4] = {};  // sums of the upper and of the small products: they truncate
#pragma unroll 1
  for (int first = 0; first < WHOLE_RUNS; first += KEPT) {
    load(first);
    constexpr int TOGETHER = ProductKeys::EXACT ? FOLD_TILES : FOLD_TILES < 2 ? 1 : 2;  // tiles of keys that share a split of the state
#pragma unroll
    for (int group = 0; group < FOLD_TILES; group += TOGETHER) {
      if (group * 8 >= row.history) break;
#pragma unroll
      for (int i = 0; i < KEPT; ++i) {
        float key[TOGETHER][VEC];
#pragma unroll
        for (int q = 0; q < TOGETHER; ++q)
          product_keys.row(min((group + q) * 8 + lane / 4, row.history - 1)).floats(key[q], ((first + i) * 4 + lane % 4) * VEC);
#pragma unroll
        for (int s = 0; s < VEC / 2; ++s) {
          const float a[4] = {value[i][0][2 * s], value[i][1][2 * s], value[i][0][2 * s + 1], value[i][1][2 * s + 1]};
#pragma unroll
          for (int q = 0; q < TOGETHER && group + q < FOLD_TILES; ++q) {
            const float b[2] = {key[q][2 * s], key[q][2 * s + 1]};
            mma_floats<ProductKeys::EXACT>(product[group + q], rest[group + q], a, b);
          }
        }
      }
    }
  }
#pragma unroll
  for (int q = 0; q < FOLD_TILES; ++q)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int entry = q * 8 + lane % 4 * 2 + e;
      const Act* v = ring_v + row.place(min(entry, newest)) * P;
      const float lead = factors.lead[min(entry, newest)];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float difference = fmaf(lead, product[q][2 * i + e] + rest[q][2 * i + e], to_float(v[8 * i]));
        product[q][2 * i + e] = entry < row.history ? difference : 0.f;
      }
    }

  u32 scaled[FOLD_STEPS][3][4];
#pragma unroll
  for (int q = 0; q < 2 * FOLD_STEPS; ++q) {
    float u[4] = {}, small[4] = {};
    if (q < FOLD_TILES && q * 8 < row.history)
#pragma unroll
      for (int s = 0; s <= q && s < FOLD_TILES; ++s) {
        const float a[4] = {product[s][0], product[s][2], product[s][1], product[s][3]};
        const float2 pair = *reinterpret_cast<const float2*>(&factors.solve[q * 8 + lane / 4][s * 8 + lane % 4 * 2]);
        const float b[2] = {pair.x, pair.y};
        mma_floats<false>(u, small, a, b);
      }
    float last[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) last[e] = factors.last[min(q * 8 + lane % 4 * 2 + e, newest)];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 terms[3];
      split((u[2 * i] + small[2 * i]) * last[0], (u[2 * i + 1] + small[2 * i + 1]) * last[1], terms);
#pragma unroll
      for (int n = 0; n < 3; ++n) scaled[q / 2][n][q % 2 * 2 + i] = terms[n];
    }
  }
  fold<KEPT>(to, [&](int first) {
    if (KEPT < WHOLE_RUNS) load(first);
    fold_runs<KEPT>(
        to, first,
        [&](float (&out)[VEC], int i, int row) {
#pragma unroll
          for (int e = 0; e < VEC; ++e) out[e] = value[i][row][e];
        },
        decay, scaled, fold_keys, row.history, lane);
  });
}
