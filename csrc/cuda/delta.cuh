// The delta rule once its coefficients are known: what Gated DeltaNet and KDA share.
//
//   u_t = beta_t (v_t - S0 columns_t - sum over history and j < t of key(t, j) u_j)
//   y_t = S0 columns'_t + sum over history and j <= t of query(t, j) u_j
//
// A lane holds, of rows g and g + 8 of the state, tokens 2t and 2t + 1 of each tile: the accumulator layout of mma.cuh.

// Coefficients of u_j of the history, in y_t and in u_t.
struct DeltaCoefficients {
  Coefficients query, key;
};

// Factors of one head that lie in shared memory.
struct DeltaFactors {
  float fresh_query[MAX_TOKENS][MAX_TOKENS];  // [j][t]: of the step's own u_j in y_t, j <= t
  float fresh_key[MAX_TOKENS][MAX_TOKENS];    // [j][t]: and in u_t, j < t
  float lead_query[MAX_TOKENS];               // of the state's product with q_t
  float lead_key[MAX_TOKENS];                 // and with k_t
  float beta[MAX_TOKENS];
};

// Factors of one head's fold, for the entries of the history.
constexpr int FOLD_TILES = (BUFFER_LEN + 7) / 8;
constexpr int PAIR_PITCH = FOLD_TILES * 8 + 2;
struct FoldFactors {
  float pair[BUFFER_LEN][PAIR_PITCH];  // [i][j]: of u_i in u_j, i < j
  float lead[BUFFER_LEN];              // of the state's product with k_j
  float beta[BUFFER_LEN];
  float last[BUFFER_LEN];  // of u_j in the folded state
};

// Forward substitution in place: `rest` comes as v - ..., leaves as u. Each u goes from the lane that owns it to the quad, which
// subtracts it from those later tokens that see it: `sees(q, i, source)` of the lane's token i of tile q. `also(source, top, bottom)`
// gets it too.
template <int Q, int STEPS, typename Sees, typename Also>
__device__ __forceinline__ void substitute(float (&rest)[Q][4], const float* beta, const float* pairs, int pitch, int count, int lane,
                                           const Sees& sees, const Also& also) {
#pragma unroll
  for (int source = 0; source < STEPS; ++source) {
    if (source >= count) break;
    constexpr int TILE = 8;
    const int tile = source / TILE, e = source % 2, owner = source % TILE / 2;
    const float b = beta[source];
    float top = rest[tile][e] * b, bottom = rest[tile][2 + e] * b;
    if (lane % 4 == owner) rest[tile][e] = top, rest[tile][2 + e] = bottom;
    top = __shfl_sync(~0u, top, (lane & ~3) | owner);
    bottom = __shfl_sync(~0u, bottom, (lane & ~3) | owner);
#pragma unroll
    for (int q = tile; q < Q; ++q)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int target = q * TILE + lane % 4 * 2 + i;
        if (target > source && target < count && sees(q, i, source)) {
          const float w = pairs[source * pitch + target];
          rest[q][i] = fmaf(-w, top, rest[q][i]), rest[q][2 + i] = fmaf(-w, bottom, rest[q][2 + i]);
        }
      }
    also(source, top, bottom);
  }
}

// One unit's outputs and corrections. `product` holds the state's raw products: queries in the first TILES tiles, keys in the rest;
// `values` are u of the history and then v of the new tokens, 16 columns of them.
__device__ __forceinline__ void delta_unit(const Params& p, const Row& row, int head, int slab, const DeltaFactors& factors,
                                           const DeltaCoefficients& coefficients, const Act* values, float (&product)[2 * TILES][4],
                                           int lane) {
  float y[TILES][4], rest[TILES][4];
#pragma unroll
  for (int q = 0; q < TILES; ++q)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = min(q * 8 + lane % 4 * 2 + i % 2, MAX_TOKENS - 1);
      y[q][i] = product[q][i] * factors.lead_query[token];
      rest[q][i] = product[TILES + q][i] * factors.lead_key[token];
    }
  for (int s = 0; 16 * s < row.history; ++s) {
    u32 u[ACT_TERMS][4];
    value_fragment(u, values, s, row.history, lane);
    coefficients.query.multiply(y, u, s, lane);
    coefficients.key.multiply(rest, u, s, lane);
  }
#pragma unroll
  for (int q = 0; q < TILES; ++q)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = min(q * 8 + lane % 4 * 2 + i % 2, row.tokens - 1);
      rest[q][i] = to_float(values[(row.history + token) * VALUE_PITCH + lane / 4 + i / 2 * 8]) - rest[q][i];
    }
  u32 path[TREE ? TILES : 1][2];
  if constexpr (TREE) {
#pragma unroll
    for (int q = 0; q < TILES; ++q)
#pragma unroll
      for (int i = 0; i < 2; ++i) path[q][i] = row.path[min(q * 8 + lane % 4 * 2 + i, row.tokens - 1)];
  }
  auto sees = [&](int q, int i, int source) {
    if constexpr (TREE) return bool(path[q][i] >> source & 1);
    return true;
  };
  auto add_to_outputs = [&](int source, float top, float bottom) {
#pragma unroll
    for (int q = source / 8; q < TILES; ++q)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int target = q * 8 + lane % 4 * 2 + i;
        if (target >= source && target < row.tokens && sees(q, i, source)) {
          const float w = factors.fresh_query[source][target];
          y[q][i] = fmaf(w, top, y[q][i]), y[q][2 + i] = fmaf(w, bottom, y[q][2 + i]);
        }
      }
  };
  substitute<TILES, MAX_TOKENS>(rest, factors.beta, factors.fresh_key[0], MAX_TOKENS, row.tokens, lane, sees, add_to_outputs);
  Act* out = static_cast<Act*>(p.out) + row.first * p.out_row + head * p.out_outer + slab * 16 + lane / 4;
  Act* ring_u = static_cast<Act*>(p.ring_u) + row.slot * p.ring_u_slot + i64(head) * RING_LEN * P + slab * 16 + lane / 4;
#pragma unroll
  for (int q = 0; q < TILES; ++q)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int token = q * 8 + lane % 4 * 2 + e;
      if (token >= row.tokens) continue;
      out[token * p.out_token] = from_float<Act>(y[q][e]);
      out[token * p.out_token + 8] = from_float<Act>(y[q][2 + e]);
      Act* u = ring_u + row.place(row.history + token) * P;
      u[0] = from_float<Act>(rest[q][e]), u[8] = from_float<Act>(rest[q][2 + e]);
    }
}

// One unit's exact fold: the corrections of the history again, from raw v and the full-precision state, then the fold with them.
// `product_keys` are the columns that the state is multiplied with, `fold_keys` those that are added to it.
template <typename ProductKeys, typename FoldKeys, typename Decay>
__device__ __forceinline__ void exact_fold(const Params& p, const Row& row, int head, int slab, char* lane_row, const FoldFactors& factors,
                                           ProductKeys product_keys, FoldKeys fold_keys, const Decay& decay, int lane) {
  constexpr int VEC = Whole::VEC;
  float u[FOLD_TILES][4] = {};
#pragma unroll 1
  for (int first = 0; first < WHOLE_RUNS; first += FOLD_BATCH) {
    WholeBatch whole;
    whole.load(lane_row, first);
#pragma unroll
    for (int i = 0; i < FOLD_BATCH; ++i) {
      float top[VEC], bottom[VEC];
      Whole::decode(top, whole.raw[i][0]);
      Whole::decode(bottom, whole.raw[i][1]);
      u32 a[VEC / 4][3][4];
#pragma unroll
      for (int s = 0; s < VEC / 4; ++s)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float (&from)[VEC] = r & 1 ? bottom : top;
          u32 terms[3];
          split(from[4 * s + r / 2 * 2], from[4 * s + r / 2 * 2 + 1], terms);
#pragma unroll
          for (int n = 0; n < 3; ++n) a[s][n][r] = terms[n];
        }
#pragma unroll
      for (int q = 0; q < FOLD_TILES; ++q) {
        if (q * 8 >= row.history) break;
        Run<VEC, ProductKeys::TERMS> key;
        product_keys.row(min(q * 8 + lane / 4, BUFFER_LEN - 1)).load(key, ((first + i) * 4 + lane % 4) * VEC);
#pragma unroll
        for (int s = 0; s < VEC / 4; ++s) {
          u32 b[ProductKeys::TERMS][2];
          key.b_fragment(b, s);
          mma_terms(u[q], a[s], b);
        }
      }
    }
  }
  const Act* ring_v = static_cast<const Act*>(p.ring_v) + row.slot * p.ring_v_slot + i64(head) * RING_LEN * P + slab * 16 + lane / 4;
#pragma unroll
  for (int q = 0; q < FOLD_TILES; ++q)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int entry = q * 8 + lane % 4 * 2 + e;
      if (entry >= row.history) {
        u[q][e] = u[q][2 + e] = 0.f;
        continue;
      }
      const Act* v = ring_v + row.place(entry) * P;
      u[q][e] = fmaf(-factors.lead[entry], u[q][e], to_float(v[0]));
      u[q][2 + e] = fmaf(-factors.lead[entry], u[q][2 + e], to_float(v[8]));
    }
  substitute<FOLD_TILES, BUFFER_LEN>(
      u, factors.beta, factors.pair[0], PAIR_PITCH, row.history, lane, [](int, int, int) { return true; }, [](int, float, float) {});

  u32 a[FOLD_STEPS][3][4];
#pragma unroll
  for (int s = 0; s < FOLD_STEPS; ++s)
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int q = 2 * s + r / 2, entry = q * 8 + lane % 4 * 2;
      float low = 0.f, high = 0.f;
      if (q < FOLD_TILES) {
        if (entry < row.history) low = u[q < FOLD_TILES ? q : 0][(r & 1) * 2] * factors.last[entry];
        if (entry + 1 < row.history) high = u[q < FOLD_TILES ? q : 0][(r & 1) * 2 + 1] * factors.last[entry + 1];
      }
      u32 terms[3];
      split(low, high, terms);
#pragma unroll
      for (int n = 0; n < 3; ++n) a[s][n][r] = terms[n];
    }
  fold(lane_row, decay, a, fold_keys, row.history, lane);
}
