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

// The rows of a lane's columns, one of each tile, of `rows` in that order.
template <typename Rows>
__device__ __forceinline__ void load_columns(Rows (&columns)[COLUMN_TILES], Rows rows, const Row& row, int lane) {
#pragma unroll
  for (int q = 0; q < COLUMN_TILES; ++q) columns[q] = rows.row(Column(q * 8 + lane / 4).used(row).row());
}

using DeltaCoefficients = Coefficients<2 * MAX_TOKENS, (BUFFER_LEN + 15) / 16 * 16>;  // of u_j of the history

// In a Gram product columns are the queries of a tile, 8 a half: all of them where they share a tile, else those of a kind.
constexpr int KINDS = SHARED_TILE ? 1 : 2;
__device__ __forceinline__ Column gram_column(int kind, int half, int lane) { return Column(kind * FIRST_KEY + half * 8 + lane / 4); }

// Coefficients of one kind of columns, by one warp: their products with the keys of the history times factors of columns and entries.
// `column_row(half)` is the row of a lane's column that is used; `entry_factor(entry)` is 0 past the history.
template <typename ColumnRow, typename Keys, typename EntryFactor>
__device__ __forceinline__ void make_coefficients(DeltaCoefficients& to, const Row& row, int kind, const ColumnRow& column_row, Keys keys,
                                                  const float (&factor)[TILES], const EntryFactor& entry_factor, int lane) {
#pragma unroll 1
  for (int first = 0; first < row.history; first += 16) {
    const Keys key[2] = {keys.row(min(first + lane / 4, row.history - 1)), keys.row(min(first + 8 + lane / 4, row.history - 1))};
    float gram[2][4] = {};
    gram_product<(TILES > 1)>(gram, column_row(0), column_row(TILES - 1), key, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int entry = first + 8 * i + lane % 4 * 2;
      const float low = entry_factor(entry), high = entry_factor(entry + 1);
#pragma unroll
      for (int half = 0; half < TILES; ++half) {
        const Column column = gram_column(kind, half, lane);
        const float* product = gram[i] + 2 * half;
        if (column.token < row.tokens) to.put(column.row(), entry, product[0] * factor[half] * low, product[1] * factor[half] * high);
      }
    }
  }
}

// Factors of one head that lie in shared memory; columns are rows as Column::row counts them.
constexpr int FRESH_PITCH = SHARED_TILE ? 4 : TILES % 2 ? 8 * TILES : 8 * TILES + 8;  // whole tiles of new tokens, free of bank conflicts
struct alignas(16) DeltaFactors {
  // [column][j], j < t in u_t and j <= t in y_t: of the step's own u_j; from `invert` on, where there are several tokens, of what u_j
  // is solved from.
  float fresh[2 * MAX_TOKENS][FRESH_PITCH];
  float lead[2 * MAX_TOKENS];  // of the state's product
  float beta[MAX_TOKENS];
};

// The corrections of new tokens depend on each other, but linearly and for all rows of the state alike: from factors of u to factors of
// r_t = v_t - S0 columns_t - sum over history, in u as in y. By one warp, column j a lane.
__device__ __forceinline__ void invert(DeltaFactors& factors, const Row& row, int lane) {
  if constexpr (MAX_TOKENS == 1) return;
  float u[MAX_TOKENS], y[MAX_TOKENS];
#pragma unroll
  for (int t = 0; t < MAX_TOKENS; ++t) {
    float r = lane == t ? 1.f : 0.f, sum = 0.f;
#pragma unroll
    for (int j = 0; j < t; ++j)
      if (!TREE || row.sees(t, row.history + j)) r = fmaf(factors.fresh[MAX_TOKENS + t][j], u[j], r);
    u[t] = t < row.tokens ? factors.beta[t] * r : 0.f;
#pragma unroll
    for (int j = 0; j <= t; ++j)
      if (!TREE || row.sees(t, row.history + j)) sum = fmaf(factors.fresh[t][j], u[j], sum);
    y[t] = t < row.tokens ? sum : 0.f;
  }
  __syncwarp();
  if (lane < (SHARED_TILE ? 4 : 8 * TILES))
#pragma unroll
    for (int t = 0; t < MAX_TOKENS; ++t) factors.fresh[t][lane] = y[t], factors.fresh[MAX_TOKENS + t][lane] = u[t];
}

// What new tokens add to each other: key columns of `acc` turn from r to u, query columns take theirs.
__device__ __forceinline__ void add_fresh(const Row& row, const DeltaFactors& factors, float (&acc)[COLUMN_TILES][4], int lane) {
  if constexpr (MAX_TOKENS == 1) {
    const int owner = lane & ~3 | FIRST_KEY / 2;
    const float beta = factors.beta[0], fresh = factors.fresh[0][0];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const float u = beta * __shfl_sync(~0u, acc[0][i], owner);
      acc[0][i] = lane == owner ? u : fmaf(fresh, u, acc[0][i]);
    }
    return;
  }
  constexpr int QUERY_TILES = FIRST_KEY / 8;
  const auto key = [&](int q, int e) { return Column((QUERY_TILES + q) * 8 + lane % 4 * 2 + e); };
  float keys[TILES][4];  // as A fragments, whose neighbouring columns are the accumulator's
#pragma unroll
  for (int q = 0; q < TILES; ++q)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& from = acc[QUERY_TILES + q][i % 2 * 2 + i / 2];
      keys[q][i] = key(q, i / 2).is_key && key(q, i / 2).token < row.tokens ? from : 0.f;
      if (key(q, i / 2).is_key) from = 0.f;
    }
  float sum[COLUMN_TILES][4];
  const auto multiply = [&] {
#pragma unroll
    for (int q = 0; q < COLUMN_TILES; ++q) {
      float small[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[q][i] = 0.f;
      const float* fresh = factors.fresh[Column(q * 8 + lane / 4).row()];
#pragma unroll
      for (int s = 0; s <= q % TILES; ++s) {
        const float2 pair = *reinterpret_cast<const float2*>(fresh + (SHARED_TILE ? lane % 2 * 2 : s * 8 + lane % 4 * 2));
        const float b[2] = {pair.x, pair.y};
        mma_floats<false>(sum[q], small, keys[s], b);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[q][i] += small[i];
    }
  };
  multiply();
  // What is not finite reaches all columns here. It is kept to those of tokens that see it.
  if (__any_sync(~0u, !isfinite(sum[COLUMN_TILES - 1][0]) || !isfinite(sum[COLUMN_TILES - 1][2]))) {
    u32 broken[2] = {};  // tokens, a row each
#pragma unroll
    for (int q = 0; q < TILES; ++q)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (!isfinite(keys[q][i])) broken[i % 2] |= 1u << key(q, i / 2).token, keys[q][i] = 0.f;
#pragma unroll
    for (int i = 0; i < 2; ++i) broken[i] |= __shfl_xor_sync(~0u, broken[i], 1), broken[i] |= __shfl_xor_sync(~0u, broken[i], 2);
    multiply();
#pragma unroll
    for (int q = 0; q < COLUMN_TILES; ++q)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = min(Column(q * 8 + lane % 4 * 2 + i % 2).token, row.tokens - 1);
        if (broken[i / 2] & (TREE ? row.path[token] : (2u << token) - 1)) sum[q][i] = __uint_as_float(0x7fc00000u);
      }
  }
#pragma unroll
  for (int q = 0; q < COLUMN_TILES; ++q)
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[q][i] += sum[q][i];
}

// Where a lane's columns go: outputs, and u of new tokens in the ring. Null for a column of no token.
struct DeltaOutputs {
  Act* to[COLUMN_TILES][ELEMENTS];

  __device__ DeltaOutputs(const Params& p, const Row& row, int head, int lane) {
    Act* out = static_cast<Act*>(p.out) + row.first * p.out_row + head * p.out_outer + lane / 4;
    Act* ring_u = static_cast<Act*>(p.ring_u) + row.slot * p.ring_u_slot + i64(head) * RING_LEN * P + lane / 4;
#pragma unroll
    for (int q = 0; q < COLUMN_TILES; ++q)
#pragma unroll
      for (int e = 0; e < ELEMENTS; ++e) {
        const Column column(q * 8 + lane % 4 * 2 + e);
        Act* at = column.is_key ? ring_u + row.place(row.history + column.token) * P : out + column.token * p.out_token;
        to[q][e] = column.token < row.tokens ? at : nullptr;
      }
  }
};

// What a row that flushes reads and others do not, on its way to L2: by blocks that others have no use for, so that nobody else waits for
// the cursors that tell.
__device__ __forceinline__ void ask_flush(const Params& p, i64 slot, int head, const Share& share, int lane) {
  if (!flushes_early(p, slot)) return;
  for (int slab = share.part; slab < SLABS; slab += share.parts) prefetch_rest(place_of(p, slot, head, slab * 16 + lane / 4), lane);
  prefetch_ring<P>(static_cast<const Act*>(p.ring_v) + slot * p.ring_v_slot + i64(head) * RING_LEN * P, share.part * 32 + lane,
                   share.parts * 32);
  if (lane > 0) return;
  prefetch(static_cast<const float*>(p.ring_beta) + slot * p.ring_beta_slot + i64(head) * RING_LEN);
  if (DECAY_VECTOR) prefetch(static_cast<const float*>(p.ring_k_norm) + slot * p.ring_k_norm_slot + i64(head / HEADS_PER_GROUP) * RING_LEN);
}

// Where a flushing step folds a unit to: in place, and from registers, before it is rounded to be stored, into the product with the step's
// columns, as precise as one with the checkpoint would be.
template <typename Rows>
struct FoldedProduct : InPlace {
  static constexpr int TERMS = ACT_TERMS == 3 ? 3 : Read::TERMS;
  using Terms = Run<Whole::VEC, TERMS>;
  const Rows (&column)[COLUMN_TILES];
  float (&product)[COLUMN_TILES][4];
  Terms top;  // of the run on its way

  __device__ FoldedProduct(const InPlace& to, const Rows (&column)[COLUMN_TILES], float (&product)[COLUMN_TILES][4])
      : InPlace(to), column(column), product(product) {}
  __device__ void store(int run, int half, const float (&value)[Whole::VEC]) {
    InPlace::store(run, half, value);
    __syncwarp();  // and not later, from registers of its own
    if (!stores) return;
    Terms bottom;
#pragma unroll
    for (int i = 0; i < Whole::VEC / 2; ++i) bottom.put(i, value[2 * i], value[2 * i + 1]);
    if (half == 0) {
      top = bottom;
      return;
    }
#pragma unroll
    for (int q = 0; q < COLUMN_TILES; ++q) {
      Run<Whole::VEC, Rows::TERMS> columns;
      column[q].load(columns, (run * 4 + threadIdx.x % 4) * Whole::VEC);
#pragma unroll
      for (int s = 0; s < Whole::VEC / 4; ++s) {
        u32 a[TERMS][4], b[Rows::TERMS][2];
#pragma unroll
        for (int n = 0; n < TERMS; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) a[n][i] = (i % 2 ? bottom : top).pair[n][2 * s + i / 2];
        columns.b_fragment(b, s);
        mma_terms(product[q], a, b);
      }
    }
  }
};

// One unit's share of the history: `values` are 16 columns of its u.
__device__ __forceinline__ void add_history(const Row& row, const DeltaCoefficients& coefficients, const Act* values,
                                            float (&acc)[COLUMN_TILES][4], int lane) {
#pragma unroll
  for (int s = 0; s < (BUFFER_LEN + 15) / 16; ++s) {
    if (16 * s >= row.history) break;
    u32 u[ACT_TERMS][4];
    value_fragment(u, values, s, row.history, lane);
    coefficients.multiply(acc, u, s, lane, [](int column) { return Column(column).row(); });
  }
}

// One unit's outputs and corrections. `acc` holds the state's raw products, to which `history()` adds that of the ring; `fresh` are 16
// columns of v of the new tokens; `outputs()` are DeltaOutputs.
template <typename AddHistory, typename Outputs>
__device__ __forceinline__ void delta_unit(const Row& row, int slab, const DeltaFactors& factors, const AddHistory& history,
                                           const Act* fresh, const Outputs& outputs, float (&acc)[COLUMN_TILES][4], int lane) {
#pragma unroll
  for (int q = 0; q < COLUMN_TILES; ++q)
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) {
      const float lead = factors.lead[Column(q * 8 + lane % 4 * 2 + e).row()];
      acc[q][e] *= lead, acc[q][2 + e] *= lead;
    }
  history();
#pragma unroll
  for (int q = FIRST_KEY / 8; q < COLUMN_TILES; ++q)
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e) {
      const Column column(q * 8 + lane % 4 * 2 + e);
      if (!column.is_key) continue;
      const Act* v = fresh + min(column.token, row.tokens - 1) * VALUE_PITCH + lane / 4;
      acc[q][e] += to_float(v[0]), acc[q][2 + e] += to_float(v[8]);
    }
  add_fresh(row, factors, acc, lane);
  const DeltaOutputs out = outputs();
#pragma unroll
  for (int q = 0; q < COLUMN_TILES; ++q)
#pragma unroll
    for (int e = 0; e < ELEMENTS; ++e)
      if (Act* to = out.to[q][e]) to[slab * 16] = from_float<Act>(acc[q][e]), to[slab * 16 + 8] = from_float<Act>(acc[q][2 + e]);
}
