// The delta rule once its coefficients are known: what Gated DeltaNet and KDA share.
//
//   u_t = beta_t (v_t - S0 columns_t - sum over history and j < t of key(t, j) u_j)
//   y_t = S0 columns'_t + sum over history and j <= t of query(t, j) u_j
//
// Columns of the product are queries and keys of the new tokens; a column's accumulator becomes its token's output, or its u. A lane
// holds, of rows g and g + 8 of the state, columns 2t and 2t + 1 of each tile: the accumulator layout of mma.cuh. Signs are part of
// the factors, so that queries and keys are treated alike: what is subtracted in u_t has negative ones.

// Up to four tokens share a tile, queries first; more have tiles of their own.
constexpr bool SHARED_TILE = MAX_TOKENS <= 4;
constexpr int FIRST_KEY = SHARED_TILE ? 4 : 8 * TILES;  // column of the first token's key
constexpr int COLUMN_TILES = SHARED_TILE ? 1 : 2 * TILES;
constexpr int ELEMENTS = MAX_TOKENS > 1 ? 2 : 1;  // of a lane's two columns, those that can belong to a token

struct Column {
  int token;
  bool is_key;

  __device__ explicit Column(int column) : token(column < FIRST_KEY ? column : column - FIRST_KEY), is_key(column >= FIRST_KEY) {}
  // Row of the column in what is kept for queries of all tokens and then for keys of all tokens. Columns of no token share the last row.
  __device__ int row() const { return (is_key ? MAX_TOKENS : 0) + min(token, MAX_TOKENS - 1); }
};

using DeltaCoefficients = Coefficients<2 * MAX_TOKENS>;  // of u_j of the history

// Factors of one head that lie in shared memory; columns are rows as Column::row counts them.
struct DeltaFactors {
  float fresh[MAX_TOKENS][2 * MAX_TOKENS];  // [j][column]: of the step's own u_j, j <= t in y_t and j < t in u_t
  float lead[2 * MAX_TOKENS];               // of the state's product
  float beta[MAX_TOKENS];
};

// Factors of one head's fold, for the entries of the history.
constexpr int FOLD_TILES = (BUFFER_LEN + 7) / 8;
constexpr int SOLVE_PITCH = FOLD_TILES * 8 + (FOLD_TILES % 2 ? 0 : 8);  // an odd number of tiles: rows of a fragment use different banks
struct FoldFactors {
  float solve[FOLD_TILES * 8][SOLVE_PITCH];  // [j][i]: first of u_i in what is subtracted in u_j; then of v_i - S k_i in u_j
  float lead[BUFFER_LEN];                    // of the state's product with k_j, negative
  float beta[BUFFER_LEN];
  float last[BUFFER_LEN];  // of u_j in the folded state
};

// One unit's outputs and corrections. `acc` holds the state's raw products; `values` are u of the history and then v of the new
// tokens, 16 columns of them.
__device__ __forceinline__ void delta_unit(const Params& p, const Row& row, int head, int slab, const DeltaFactors& factors,
                                           const DeltaCoefficients& coefficients, const Act* values, float (&acc)[COLUMN_TILES][4],
                                           int lane) {
#pragma unroll
  for (int q = 0; q < COLUMN_TILES; ++q)
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) {
      const float lead = factors.lead[Column(q * 8 + lane % 4 * 2 + e).row()];
      acc[q][e] *= lead, acc[q][2 + e] *= lead;
    }
  for (int s = 0; 16 * s < row.history; ++s) {
    u32 u[ACT_TERMS][4];
    value_fragment(u, values, s, row.history, lane);
    coefficients.multiply(acc, u, s, lane, [](int column) { return Column(column).row(); });
  }
#pragma unroll
  for (int q = FIRST_KEY / 8; q < COLUMN_TILES; ++q)
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) {
      const Column column(q * 8 + lane % 4 * 2 + e);
      if (!column.is_key) continue;
      const Act* v = values + (row.history + min(column.token, row.tokens - 1)) * VALUE_PITCH + lane / 4;
      acc[q][e] += to_float(v[0]), acc[q][2 + e] += to_float(v[8]);
    }
  u32 path[TREE ? COLUMN_TILES : 1][ELEMENTS];
  if constexpr (TREE)
#pragma unroll
    for (int q = 0; q < COLUMN_TILES; ++q)
#pragma unroll
      for (int e = 0; e < ELEMENTS; ++e) path[q][e] = row.path[min(Column(q * 8 + lane % 4 * 2 + e).token, row.tokens - 1)];
  // Forward substitution: each u goes from the lane that owns it to the quad, which takes its part in the columns of later tokens, of
  // those tokens that see it.
#pragma unroll
  for (int source = 0; source < MAX_TOKENS; ++source) {
    if (source >= row.tokens) break;
    const int from = FIRST_KEY + source, tile = from / 8, element = from % 2, owner = from % 8 / 2;
    float top = acc[tile][element] * factors.beta[source], bottom = acc[tile][2 + element] * factors.beta[source];
    if (lane % 4 == owner) acc[tile][element] = top, acc[tile][2 + element] = bottom;
    top = __shfl_sync(~0u, top, (lane & ~3) | owner), bottom = __shfl_sync(~0u, bottom, (lane & ~3) | owner);
#pragma unroll
    for (int q = 0; q < COLUMN_TILES; ++q) {
      if (!SHARED_TILE && q % TILES * 8 + 7 < source) continue;
#pragma unroll
      for (int e = 0; e < ELEMENTS; ++e) {
        const Column column(q * 8 + lane % 4 * 2 + e);
        if (column.token < source + column.is_key || column.token >= row.tokens) continue;
        if (TREE && !(path[TREE ? q : 0][e] >> source & 1)) continue;
        const float w = factors.fresh[source][column.row()];
        acc[q][e] = fmaf(w, top, acc[q][e]), acc[q][2 + e] = fmaf(w, bottom, acc[q][2 + e]);
      }
    }
  }
  Act* out = static_cast<Act*>(p.out) + row.first * p.out_row + head * p.out_outer + slab * 16 + lane / 4;
  Act* ring_u = static_cast<Act*>(p.ring_u) + row.slot * p.ring_u_slot + i64(head) * RING_LEN * P + slab * 16 + lane / 4;
#pragma unroll
  for (int q = 0; q < COLUMN_TILES; ++q)
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) {
      const Column column(q * 8 + lane % 4 * 2 + e);
      if (column.token >= row.tokens) continue;
      Act* to = column.is_key ? ring_u + row.place(row.history + column.token) * P : out + column.token * p.out_token;
      to[0] = from_float<Act>(acc[q][e]), to[8] = from_float<Act>(acc[q][2 + e]);
    }
}

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
// multiplied with, `fold_keys` those that are added to it.
template <typename ProductKeys, typename FoldKeys, typename Decay>
__device__ __forceinline__ void exact_fold(const Params& p, const Row& row, int head, int slab, char* lane_row, const FoldFactors& factors,
                                           ProductKeys product_keys, FoldKeys fold_keys, const Decay& decay, int lane) {
  lane = opaque(lane);
  constexpr int VEC = Whole::VEC, KEPT = N <= 128 && BUFFER_LEN <= 16 && ProductKeys::EXACT ? WHOLE_RUNS : FOLD_BATCH;
  const Act* ring_v = static_cast<const Act*>(p.ring_v) + row.slot * p.ring_v_slot + i64(head) * RING_LEN * P + slab * 16 + lane / 4;
  float value[KEPT][2][VEC];
  auto load = [&](int first) {
    WholeRuns<KEPT> whole;
    whole.load(lane_row, first);
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
      const Act* v = ring_v + row.place(min(entry, row.history - 1)) * P;
      const float lead = factors.lead[min(entry, row.history - 1)];
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
    for (int e = 0; e < 2; ++e) last[e] = factors.last[min(q * 8 + lane % 4 * 2 + e, row.history - 1)];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      u32 terms[3];
      split((u[2 * i] + small[2 * i]) * last[0], (u[2 * i + 1] + small[2 * i + 1]) * last[1], terms);
#pragma unroll
      for (int n = 0; n < 3; ++n) scaled[q / 2][n][q % 2 * 2 + i] = terms[n];
    }
  }
#pragma unroll 1
  for (int first = 0; first < WHOLE_RUNS; first += KEPT) {
    if (KEPT < WHOLE_RUNS) load(first);
    fold_runs<KEPT>(
        lane_row, first,
        [&](float (&out)[VEC], int i, int row) {
#pragma unroll
          for (int e = 0; e < VEC; ++e) out[e] = value[i][row][e];
        },
        decay, scaled, fold_keys, row.history, lane);
  }
}
