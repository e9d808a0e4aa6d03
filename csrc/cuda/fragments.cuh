// Fragments of activations in shared memory, and the two products of a step with the state.
// Uses the constants of the specialization (step_head.jinja).

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

// Values of the ring (x, u) lie as rows of VALUE_PITCH activations in shared memory, history first, then new tokens. The A
// fragment of k-step `step`: 16 columns of 16 entries, as bf16 terms. Entries past the last stand for entry 0, which every
// token sees; their coefficients are 0.
__device__ __forceinline__ void value_fragment(u32 (&a)[ACT_TERMS][4], const Act* values, int step, int entries, int lane) {
  if constexpr (sizeof(Act) == 4) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int entry = 16 * step + 8 * half + 2 * (lane % 4);
      const Act* low = values + (entry < entries ? entry : 0) * VALUE_PITCH + lane / 4;
      const Act* high = values + (entry + 1 < entries ? entry + 1 : 0) * VALUE_PITCH + lane / 4;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        u32 terms[ACT_TERMS];
        split(to_float(low[row * 8]), to_float(high[row * 8]), terms);
#pragma unroll
        for (int n = 0; n < ACT_TERMS; ++n) a[n][half * 2 + row] = terms[n];
      }
    }
  } else {
    // Matrix m = lane / 8 of the four: rows of the state (m & 1) * 8, entries (m / 2) * 8; lane % 8 is its row's address.
    int entry = 16 * step + lane / 16 * 8 + lane % 8;
    ldmatrix_transposed(a[0], values + (entry < entries ? entry : 0) * VALUE_PITCH + (lane / 8 & 1) * 8);
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

// The read plane on its way through registers: up to 8 runs of a lane's two rows. Loads go out as soon as the previous product
// has used the registers, so they fly while the warp finishes the unit before.
constexpr int RUN_BYTES = 64;  // what the four lanes of a row read at once
constexpr int RUNS = N / (4 * Read::VEC);
constexpr int PIECE = RUNS < 8 ? RUNS : 8;
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

  // acc[q] += (16 rows of the state) x (8 query columns). Queries are rows of PITCH activations; a tile's columns past the last
  // query are computed from another row and never used.
  template <int Q>
  __device__ void multiply(float (&acc)[Q][4], const Act* queries, int piece, int lane) const {
    const Act* row[Q];
#pragma unroll
    for (int q = 0; q < Q; ++q) row[q] = queries + min(q * 8 + lane / 4, MAX_TOKENS - 1) * PITCH + lane % 4 * Read::VEC;
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
      Run<Read::VEC> query[Q];
#pragma unroll
      for (int q = 0; q < Q; ++q) query[q].load(row[q] + (piece * PIECE + i) * 4 * Read::VEC);
#pragma unroll
      for (int s = 0; s < Read::VEC / 4; ++s) {
        u32 a[Read::TERMS][4];
        Read::fragment(a, top[i], bottom[i], s);
#pragma unroll
        for (int q = 0; q < Q; ++q) {
          u32 b[ACT_TERMS][2];
#pragma unroll
          for (int n = 0; n < ACT_TERMS; ++n) b[n][0] = query[q].pair[n][2 * s], b[n][1] = query[q].pair[n][2 * s + 1];
          mma_terms(acc[q], a, b);
        }
      }
    }
  }
};

// Ask L2 for the 16 rows of a unit, in the read plane (plane = 0) or another one. `lane_row` is the lane's own address, as in
// planes.cuh; a lane asks for whole 128-byte lines.
__device__ __forceinline__ void prefetch_planes(const char* lane_row, i64 plane, int lane) {
  if (plane && Whole::LOADS == 1) return;
  const char* unit = lane_row - lane / 4 * STATE_PITCH - lane % 4 * 16 + plane;
#pragma unroll
  for (int line = 0; line < 16 * STATE_PITCH / 128; line += 32) prefetch(unit + (line + lane) * 128);
}

// Gram tile: 8 keys against all queries, over N columns: gram[query * GRAM_PITCH + key], queries below `tokens` only.
__device__ __forceinline__ void gram_tile(float* gram, const Act* queries, const Act* keys, int tokens, int lane) {
  constexpr int VEC = 8;
  float acc[4] = {};
  const Act* key_row = keys + lane / 4 * PITCH + lane % 4 * VEC;
  const Act* query_row = queries + min(lane / 4, MAX_TOKENS - 1) * PITCH + lane % 4 * VEC;
  const Act* query_row_8 = queries + min(8 + lane / 4, MAX_TOKENS - 1) * PITCH + lane % 4 * VEC;
#pragma unroll 4
  for (int run = 0; run < N / (4 * VEC); ++run) {
    Run<VEC> key, query, query_8;
    key.load(key_row + run * 4 * VEC);
    query.load(query_row + run * 4 * VEC);
    if constexpr (TILES > 1) query_8.load(query_row_8 + run * 4 * VEC);
#pragma unroll
    for (int s = 0; s < VEC / 4; ++s) {
      u32 a[ACT_TERMS][4], b[ACT_TERMS][2];
#pragma unroll
      for (int n = 0; n < ACT_TERMS; ++n) {
        a[n][0] = query.pair[n][2 * s], a[n][2] = query.pair[n][2 * s + 1];
        a[n][1] = TILES > 1 ? query_8.pair[n][2 * s] : 0, a[n][3] = TILES > 1 ? query_8.pair[n][2 * s + 1] : 0;
        b[n][0] = key.pair[n][2 * s], b[n][1] = key.pair[n][2 * s + 1];
      }
      mma_terms(acc, a, b);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int token = lane / 4 + i / 2 * 8;
    if (token < tokens) gram[token * GRAM_PITCH + 2 * (lane % 4) + i % 2] = acc[i];
  }
}

// Coefficients of the ring's values for every new token, as bf16 terms of pairs of entries: the B fragments of the ring's product.
struct Coefficients {
  static constexpr int TERMS = ACT_TERMS == 3 ? 3 : 2;    // outputs are rounded to the activations' precision anyway
  static constexpr int ROW = ENTRIES / 2 + 4;             // rows 20 banks apart (or 12, 28): conflict-free
  u32 pair[TERMS][MAX_TOKENS][ROW];

  __device__ void put(int token, int first_entry, float low, float high) {
    u32 terms[TERMS];
    split(low, high, terms);
#pragma unroll
    for (int n = 0; n < TERMS; ++n) pair[n][token][first_entry / 2] = terms[n];
  }

  // acc[q] += sum over entries of coefficient(token, entry) value(entry), for a warp's 16 columns of the values.
  template <int Q>
  __device__ void multiply(float (&acc)[Q][4], const Act* values, int entries, int lane) const {
#pragma unroll 1
    for (int s = 0; 16 * s < entries; ++s) {
      u32 a[ACT_TERMS][4];
      value_fragment(a, values, s, entries, lane);
#pragma unroll
      for (int q = 0; q < Q; ++q) {
        const int token = min(q * 8 + lane / 4, MAX_TOKENS - 1);
        u32 b[TERMS][2];
#pragma unroll
        for (int n = 0; n < TERMS; ++n) b[n][0] = pair[n][token][8 * s + lane % 4], b[n][1] = pair[n][token][8 * s + 4 + lane % 4];
        mma_terms(acc[q], a, b);
      }
    }
  }
};

// Rows of `width` activations from global memory (any alignment that the type allows) to rows of `pitch` in shared memory, by
// the whole block.
template <typename From>
__device__ __forceinline__ void stage_rows(Act* to, int pitch, int rows, int width, bool aligned, From from) {
  constexpr int STEP = 16 / int(sizeof(Act));
  const int per_row = width / STEP;
  for (int i = threadIdx.x; i < rows * per_row; i += WARPS * 32) {
    const int row = i / per_row, offset = i % per_row * STEP;
    copy_activations(to + row * pitch + offset, from(row) + offset, aligned);
  }
}

// The way back: rows in shared memory to 16-byte aligned rows in global memory.
template <typename To>
__device__ __forceinline__ void store_rows(const Act* from, int pitch, int rows, int width, To to) {
  constexpr int STEP = 16 / int(sizeof(Act));
  const int per_row = width / STEP;
  for (int i = threadIdx.x; i < rows * per_row; i += WARPS * 32) {
    const int row = i / per_row, offset = i % per_row * STEP;
    *reinterpret_cast<uint4*>(to(row) + offset) = *reinterpret_cast<const uint4*>(from + row * pitch + offset);
  }
}

// The fold of one warp's 16 rows: S <- decay S + sum_j a_j k_j^T, with a_j k_j^T through the matrix units in three bf16 terms
// (two lose accuracy in the state) and the sum with S in fp32, because the matrix units truncate when they add.
// `factors` holds a_j as A fragments of FOLD_STEPS steps of 16 entries; keys are rows of PITCH activations in shared memory,
// of which those from `history` on may hold anything.
constexpr int FOLD_STEPS = (BUFFER_LEN + 15) / 16;
constexpr int FOLD_BATCH = 2;  // runs of a row in flight at once: a whole 128-byte line

__device__ __forceinline__ void fold(char* lane_row, float decay, const u32 (&factors)[FOLD_STEPS][3][4], const Act* keys, int history,
                                     int lane) {
  constexpr int VEC = Whole::VEC;
  constexpr int WHOLE_RUNS = N / (4 * VEC);
  constexpr int BATCH = FOLD_BATCH;
  const u32 select = lane / 4 & 1 ? 0x7632 : 0x5410;
  for (int first = 0; first < WHOLE_RUNS; first += BATCH) {
    u32 raw[BATCH][2][Whole::LOADS][4];
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
#pragma unroll
      for (int row = 0; row < 2; ++row) Whole::load(raw[i][row], lane_row + (first + i) * RUN_BYTES + row * 8 * STATE_PITCH, PLANE_BYTES);
    __syncwarp();  // all loads first: a load that sinks below the store of its line's other half waits for that store
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
            key[e].load(keys + entry * PITCH + ((first + i) * 4 + lane / 8) * VEC);
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
        Whole::store(lane_row + (first + i) * RUN_BYTES + row * 8 * STATE_PITCH, PLANE_BYTES, value);
      }
    }
  }
}
