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
  // The column itself, or instead of one of no token, which is never used, another one's.
  __device__ Column used(const Row& row) const {
    Column column = *this;
    column.token = min(token, row.tokens - 1);
    return column;
  }
  // Row of the column in what is kept for queries of all tokens and then for keys of all tokens. Columns of no token share the last row.
  __device__ int row() const { return (is_key ? MAX_TOKENS : 0) + min(token, MAX_TOKENS - 1); }
};

using DeltaCoefficients = Coefficients<2 * MAX_TOKENS>;  // of u_j of the history

// Gram matrix of all columns with some keys, 8 of them a warp: its rows are as Column::row counts. Rows of a tile are columns of the
// product: all of them at once where they share a tile, else queries and keys in turn. `row_of` is the row of a column that is used.
template <typename RowOf, typename Keys>
__device__ __forceinline__ void gram_columns(float* gram, const Row& row, const RowOf& row_of, Keys keys, int count, int lane, int warp) {
  constexpr int KINDS = SHARED_TILE ? 1 : 2;
  for (int task = warp; task < KINDS * ((count + 7) / 8); task += WARPS) {
    const int first = task % KINDS * FIRST_KEY, entries = task / KINDS * 8;
    gram_tile<(TILES > 1)>([&](int i) { return row_of(Column(first + i).used(row)); }, keys.row(entries),
                           [&](int i) {
                             const Column column(first + i);
                             return column.token < row.tokens ? gram + column.row() * GRAM_PITCH + entries : nullptr;
                           },
                           lane);
  }
}

// Factors of one head that lie in shared memory; columns are rows as Column::row counts them.
struct DeltaFactors {
  float fresh[MAX_TOKENS][2 * MAX_TOKENS];  // [j][column]: of the step's own u_j, j <= t in y_t and j < t in u_t
  float lead[2 * MAX_TOKENS];               // of the state's product
  float beta[MAX_TOKENS];
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
  u32 path[TREE ? TILES : 1][ELEMENTS];  // a token's query and key have one
  if constexpr (TREE)
#pragma unroll
    for (int q = 0; q < TILES; ++q)
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
        if (TREE && !(path[TREE ? q % TILES : 0][e] >> source & 1)) continue;
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
