// Fragments of activations in shared memory, and the two products of a step with the state.
// Uses the constants of the specialization: Act, ACT_TERMS, Read, Whole, N, STATE_PITCH.

// A run of VEC consecutive activations of one row as bf16 pairs. As B fragment of a product over columns of the state, and as A
// fragment of a Gram matrix, registers 2s and 2s+1 belong to step s (the order of k is that of planes.cuh).
template <int VEC>
struct Run {
  u32 pair[ACT_TERMS][VEC / 2];

  __device__ void load(const Act* from) {
    if constexpr (sizeof(Act) == 4) {
#pragma unroll
      for (int i = 0; i < VEC; i += 4) {
        float4 v = *reinterpret_cast<const float4*>(from + i);
        put(i / 2, v.x, v.y);
        put(i / 2 + 1, v.z, v.w);
      }
    } else {
      u32 raw[VEC / 2];
      if constexpr (VEC == 8) {
        uint4 v = *reinterpret_cast<const uint4*>(from);
        raw[0] = v.x, raw[1] = v.y, raw[2] = v.z, raw[3] = v.w;
      } else {
        uint2 v = *reinterpret_cast<const uint2*>(from);
        raw[0] = v.x, raw[1] = v.y;
      }
#pragma unroll
      for (int i = 0; i < VEC / 2; ++i) {
        if constexpr (ACT_TERMS == 1)
          pair[0][i] = raw[i];
        else
          put(i, low_fp16(raw[i]), high_fp16(raw[i]));
      }
    }
  }
  __device__ void clear() {
#pragma unroll
    for (int n = 0; n < ACT_TERMS; ++n)
#pragma unroll
      for (int i = 0; i < VEC / 2; ++i) pair[n][i] = 0;
  }
  __device__ void put(int i, float low, float high) {
    u32 terms[ACT_TERMS];
    split(low, high, terms);
#pragma unroll
    for (int n = 0; n < ACT_TERMS; ++n) pair[n][i] = terms[n];
  }
};

// Values of the ring (x, u) lie as [entry][16 rows of the state] in a warp's own shared memory. Two entries' values of a lane's
// rows, for the A fragment of k-step `step`, as bf16 terms.
__device__ __forceinline__ void value_fragment(u32 (&a)[ACT_TERMS][4], const Act* values, int step, int lane) {
  if constexpr (sizeof(Act) == 4) {
    int row = lane / 4, entry = 16 * step + 2 * (lane % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Act* at = values + (entry + i / 2 * 8) * 16 + row + (i & 1) * 8;
      u32 terms[ACT_TERMS];
      split(to_float(at[0]), to_float(at[16]), terms);
#pragma unroll
      for (int n = 0; n < ACT_TERMS; ++n) a[n][i] = terms[n];
    }
  } else {
    // Matrix m = lane / 8 of the four: rows of the state (m & 1) * 8, entries (m / 2) * 8; lane % 8 is its row's address.
    int m = lane / 8;
    ldmatrix_transposed(a[0], values + (16 * step + m / 2 * 8 + lane % 8) * 16 + (m & 1) * 8);
    if constexpr (ACT_TERMS == 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32 terms[2], raw = a[0][i];
        split(low_fp16(raw), high_fp16(raw), terms);
        a[0][i] = terms[0], a[1][i] = terms[1];
      }
    }
  }
}

// One piece of the read plane in registers: up to 4 runs of a lane's two rows.
constexpr int RUN_BYTES = 64;  // what the four lanes of a row read at once
constexpr int RUNS = N / (4 * Read::VEC);
constexpr int PIECE = RUNS < 4 ? RUNS : 4;
constexpr int PIECES = RUNS / PIECE;

struct Piece {
  u32 top[PIECE][4], bottom[PIECE][4];

  __device__ void load(const char* lane_row, int piece) {
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
      load_streaming(top[i], lane_row + (piece * PIECE + i) * RUN_BYTES);
      load_streaming(bottom[i], lane_row + (piece * PIECE + i) * RUN_BYTES + 8 * STATE_PITCH);
    }
  }

  // acc[q] += (16 rows of the state) x (8 query columns), for TILES tiles of queries that lie as rows of `pitch` activations.
  template <int TILES>
  __device__ void multiply(float (&acc)[TILES][4], const Act* queries, int pitch, int piece, int lane) const {
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
      Run<Read::VEC> query[TILES];
#pragma unroll
      for (int q = 0; q < TILES; ++q) query[q].load(queries + (q * 8 + lane / 4) * pitch + ((piece * PIECE + i) * 4 + lane % 4) * Read::VEC);
#pragma unroll
      for (int s = 0; s < Read::VEC / 4; ++s) {
        u32 a[Read::TERMS][4];
        Read::fragment(a, top[i], bottom[i], s);
#pragma unroll
        for (int q = 0; q < TILES; ++q) {
          u32 b[ACT_TERMS][2];
#pragma unroll
          for (int n = 0; n < ACT_TERMS; ++n) b[n][0] = query[q].pair[n][2 * s], b[n][1] = query[q].pair[n][2 * s + 1];
          mma_terms(acc[q], a, b);
        }
      }
    }
  }
};

// Gram tile: 8 keys against TILES tiles of 8 queries, over all N columns. gram[query * gram_pitch + key].
// Queries are the rows of A, keys the columns of B, so a lane ends with (query g; keys 2t, 2t+1): the layout in which the
// coefficients enter the product with the ring's values.
template <int TILES>
__device__ __forceinline__ void gram_tile(float* gram, int gram_pitch, const Act* queries, const Act* keys, int pitch, int lane) {
  constexpr int VEC = 8;
  float acc[TILES > 1 ? TILES / 2 : 1][4] = {};
#pragma unroll 4
  for (int run = 0; run < N / (4 * VEC); ++run) {
    int column = (run * 4 + lane % 4) * VEC;
    Run<VEC> key, query[TILES];
    key.load(keys + lane / 4 * pitch + column);
#pragma unroll
    for (int q = 0; q < TILES; ++q) query[q].load(queries + (q * 8 + lane / 4) * pitch + column);
#pragma unroll
    for (int s = 0; s < VEC / 4; ++s) {
      u32 b[ACT_TERMS][2];
#pragma unroll
      for (int n = 0; n < ACT_TERMS; ++n) b[n][0] = key.pair[n][2 * s], b[n][1] = key.pair[n][2 * s + 1];
#pragma unroll
      for (int q = 0; q < TILES; q += 2) {
        u32 a[ACT_TERMS][4];
#pragma unroll
        for (int n = 0; n < ACT_TERMS; ++n) {
          a[n][0] = query[q].pair[n][2 * s], a[n][2] = query[q].pair[n][2 * s + 1];
          a[n][1] = q + 1 < TILES ? query[q + 1 < TILES ? q + 1 : q].pair[n][2 * s] : 0;
          a[n][3] = q + 1 < TILES ? query[q + 1 < TILES ? q + 1 : q].pair[n][2 * s + 1] : 0;
        }
        mma_terms(acc[q / 2], a, b);
      }
    }
  }
#pragma unroll
  for (int q = 0; q < TILES; ++q) {
    float* to = gram + (q * 8 + lane / 4) * gram_pitch + 2 * (lane % 4);
    to[0] = acc[q / 2][q % 2 * 2], to[1] = acc[q / 2][q % 2 * 2 + 1];
  }
}

// The fold of one warp's 16 rows: S <- decay S + sum_j a_j k_j^T, with a_j k_j^T through the matrix units in three bf16 terms
// (two lose accuracy in the state) and the sum with S in fp32, because the matrix units truncate when they add.
// `factors` holds a_j as A fragments of FOLD_STEPS steps of 16 entries; keys are rows of `pitch` activations in shared memory,
// of which those from `history` on may hold anything.
constexpr int FOLD_STEPS = (BUFFER_LEN + 15) / 16;

__device__ __forceinline__ void fold(char* lane_row, i64 plane, float decay, const u32 (&factors)[FOLD_STEPS][3][4], const Act* keys,
                                     int pitch, int history, int lane) {
  constexpr int VEC = Whole::VEC;
  constexpr int WHOLE_RUNS = N / (4 * VEC);
  constexpr int BATCH = 2;  // runs loaded at once: stores in between keep the compiler from looking ahead by itself
  const u32 select = lane / 4 & 1 ? 0x7632 : 0x5410;
  for (int first = 0; first < WHOLE_RUNS; first += BATCH) {
    u32 raw[BATCH][2][Whole::LOADS][4];
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
#pragma unroll
      for (int row = 0; row < 2; ++row) Whole::load(raw[i][row], lane_row + (first + i) * RUN_BYTES + row * 8 * STATE_PITCH, plane);
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      float delta[VEC / 2][4] = {};
#pragma unroll
      for (int s = 0; s < FOLD_STEPS; ++s) {
        if (16 * s >= history) break;
        Run<VEC> key[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          int entry = 16 * s + 2 * (lane % 4) + e / 2 * 8 + e % 2;
          if (entry < history)
            key[e].load(keys + entry * pitch + ((first + i) * 4 + lane / 8) * VEC);
          else
            key[e].clear();
        }
#pragma unroll
        for (int q = 0; q < VEC / 2; ++q) {
          u32 b[ACT_TERMS][2];
#pragma unroll
          for (int n = 0; n < ACT_TERMS; ++n) {
            b[n][0] = __byte_perm(key[0].pair[n][q], key[1].pair[n][q], select);
            b[n][1] = __byte_perm(key[2].pair[n][q], key[3].pair[n][q], select);
          }
          mma_terms(delta[q], factors[s], b);
        }
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float value[VEC];
        Whole::decode(value, raw[i][row]);
#pragma unroll
        for (int e = 0; e < VEC; ++e) value[e] = fmaf(value[e], decay, delta[e / 2][row * 2 + e % 2]);
        Whole::store(lane_row + (first + i) * RUN_BYTES + row * 8 * STATE_PITCH, plane, value);
      }
    }
  }
}
