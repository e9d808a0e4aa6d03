// Fragments of activations in shared memory, and the two products of a step with the state.
// Uses the constants of the specialization (step_head.jinja).

// A run of VEC consecutive elements of a row as bf16 terms of pairs. As B fragment of a product over columns of the state, and as
// A fragment of a Gram matrix, registers 2s and 2s+1 belong to step s (the order of k is that of planes.cuh).
template <int VEC, int N_TERMS>
struct Run {
  static constexpr int TERMS = N_TERMS;
  u32 pair[TERMS][VEC / 2];

  __device__ void put(int i, float low, float high) {
    u32 terms[TERMS];
    split(low, high, terms);
#pragma unroll
    for (int n = 0; n < TERMS; ++n) pair[n][i] = terms[n];
  }
  __device__ void b_fragment(u32 (&b)[TERMS][2], int step) const {
#pragma unroll
    for (int n = 0; n < TERMS; ++n) b[n][0] = pair[n][2 * step], b[n][1] = pair[n][2 * step + 1];
  }
};

template <int WORDS>
__device__ __forceinline__ void load_words(u32 (&out)[WORDS], const void* from) {
  if constexpr (WORDS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) {
      const uint4 v = static_cast<const uint4*>(from)[i / 4];
      out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
    }
  } else if constexpr (WORDS == 2) {
    const uint2 v = *static_cast<const uint2*>(from);
    out[0] = v.x, out[1] = v.y;
  } else {
    static_assert(WORDS == 1);
    out[0] = *static_cast<const u32*>(from);
  }
}
template <int WORDS>
__device__ __forceinline__ void store_words(void* to, const u32 (&word)[WORDS]) {
  if constexpr (WORDS % 4 == 0) {
#pragma unroll
    for (int i = 0; i < WORDS; i += 4) static_cast<uint4*>(to)[i / 4] = make_uint4(word[i], word[i + 1], word[i + 2], word[i + 3]);
  } else if constexpr (WORDS == 2) {
    *static_cast<uint2*>(to) = make_uint2(word[0], word[1]);
  } else {
    static_assert(WORDS == 1);
    *static_cast<u32*>(to) = word[0];
  }
}

template <int COUNT>
__device__ __forceinline__ void load_floats(float (&out)[COUNT], const float* from) {
  u32 word[COUNT];
  load_words(word, from);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) out[i] = __uint_as_float(word[i]);
}
template <int COUNT>
__device__ __forceinline__ void store_floats(float* to, const float (&value)[COUNT]) {
  u32 word[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) word[i] = __float_as_uint(value[i]);
  store_words(to, word);
}

// Rows of activations in shared memory, PITCH apart: exact operands, split into bf16 terms as they are read.
struct ActRows {
  static constexpr int TERMS = ACT_TERMS;
  const Act* at;

  __device__ ActRows row(int index) const { return {at + index * PITCH}; }

  template <int VEC>
  __device__ void load(Run<VEC, TERMS>& out, int column) const {
    if constexpr (sizeof(Act) == 4) {
#pragma unroll
      for (int i = 0; i < VEC; i += 4) {
        const float4 v = *reinterpret_cast<const float4*>(at + column + i);
        out.put(i / 2, v.x, v.y);
        out.put(i / 2 + 1, v.z, v.w);
      }
    } else if constexpr (TERMS == 1) {
      load_words(out.pair[0], at + column);
    } else {
      u32 raw[VEC / 2];
      load_words(raw, at + column);
#pragma unroll
      for (int i = 0; i < VEC / 2; ++i) out.put(i, low_fp16(raw[i]), high_fp16(raw[i]));
    }
  }

  static constexpr bool EXACT = sizeof(Act) == 2;  // as tf32
  template <int VEC>
  __device__ void floats(float (&out)[VEC], int column) const {
    if constexpr (sizeof(Act) == 4) {
      load_floats(out, reinterpret_cast<const float*>(at) + column);
    } else {
      u32 raw[VEC / 2];
      load_words(raw, at + column);
#pragma unroll
      for (int i = 0; i < VEC / 2; ++i) {
        out[2 * i] = ACT_TERMS == 1 ? low_bf16(raw[i]) : low_fp16(raw[i]);
        out[2 * i + 1] = ACT_TERMS == 1 ? high_bf16(raw[i]) : high_fp16(raw[i]);
      }
    }
  }
};

// Rows of floats in shared memory, FLOAT_PITCH apart, split into three terms as they are read.
constexpr int FLOAT_PITCH = N + 4;
struct FloatRows {
  static constexpr int TERMS = 3;
  const float* at;

  __device__ FloatRows row(int index) const { return {at + index * FLOAT_PITCH}; }

  template <int VEC>
  __device__ void load(Run<VEC, TERMS>& out, int column) const {
#pragma unroll
    for (int i = 0; i < VEC; i += 4) {
      const float4 v = *reinterpret_cast<const float4*>(at + column + i);
      out.put(i / 2, v.x, v.y);
      out.put(i / 2 + 1, v.z, v.w);
    }
  }

  static constexpr bool EXACT = false;
  template <int VEC>
  __device__ void floats(float (&out)[VEC], int column) const {
    load_floats(out, at + column);
  }
};

// Rows that were split when they were written: term n of row r at (n * ROWS + r) * SPLIT_PITCH.
constexpr int SPLIT_PITCH = N + 8;
template <int ROWS, int N_TERMS>
struct SplitRows {
  static constexpr int TERMS = N_TERMS;
  const bf16* at;

  __device__ SplitRows row(int index) const { return {at + index * SPLIT_PITCH}; }

  template <int VEC>
  __device__ void load(Run<VEC, TERMS>& out, int column) const {
#pragma unroll
    for (int n = 0; n < TERMS; ++n) load_words(out.pair[n], at + n * ROWS * SPLIT_PITCH + column);
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

// Neighbouring columns of a lane where a warp has all of a row.
constexpr int CHANNELS = N / 32;

// The read plane on its way through registers: up to 8 runs of a lane's two rows. Loads go out as soon as the previous product
// has used the registers, so they fly while the warp finishes the unit before.
constexpr int RUNS = N / (4 * Read::VEC);
constexpr int PIECE = RUNS < 8 ? RUNS : 8;
constexpr int PIECES = RUNS / PIECE;

__device__ __forceinline__ void load_plane(u32 (&out)[4], const void* from) {
  if constexpr (READ_ONCE)
    load_once(out, from);
  else
    load_vector(out, from);
}

struct Piece {
  u32 top[PIECE][4], bottom[PIECE][4];
  float scale_top, scale_bottom;  // of the unit whose last piece this becomes, where rows have scales

  __device__ void load(const Place& place, int piece) {
    const char* from = place.read() + piece * PIECE * READ_RUN;
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
      load_plane(top[i], from + i * READ_RUN);
      load_plane(bottom[i], from + i * READ_RUN + 8 * READ_ROW);
    }
    if (Whole::SCALED && piece == 0) scale_top = place.row_scale(0), scale_bottom = place.row_scale(8);
  }

  // All pieces of a unit on their way to L2.
  __device__ static void ask(const Place& place) {
#pragma unroll
    for (int i = 0; i < RUNS; i += PANELS ? 1 : 2)  // whole lines
      prefetch(place.read() + i * READ_RUN), prefetch(place.read() + i * READ_RUN + 8 * READ_ROW);
  }

  // acc[q] += (16 rows of the state) x (8 columns): a lane brings the row of column lane / 4 of each tile.
  template <int Q, typename Rows>
  __device__ void multiply(float (&acc)[Q][4], const Rows (&column)[Q], int piece, int lane) const {
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
      Run<Read::VEC, Rows::TERMS> run[Q];
#pragma unroll
      for (int q = 0; q < Q; ++q) column[q].load(run[q], ((piece * PIECE + i) * 4 + lane % 4) * Read::VEC);
#pragma unroll
      for (int s = 0; s < Read::VEC / 4; ++s) {
        u32 a[Read::TERMS][4];
        Read::fragment(a, top[i], bottom[i], s);
#pragma unroll
        for (int q = 0; q < Q; ++q) {
          u32 b[Rows::TERMS][2];
          run[q].b_fragment(b, s);
          mma_terms(acc[q], a, b);
        }
      }
    }
    if (Whole::SCALED && piece == PIECES - 1) {
      const float top_unit = scale_top * Read::UNIT, bottom_unit = scale_bottom * Read::UNIT;  // not before: whoever multiplies waits
#pragma unroll
      for (int q = 0; q < Q; ++q) acc[q][0] *= top_unit, acc[q][1] *= top_unit, acc[q][2] *= bottom_unit, acc[q][3] *= bottom_unit;
    }
  }
};

// All pieces of a unit whose first one is on its way; `place()` is the unit's, `next()` requests what comes after it, once the registers are free.
template <int Q, typename Rows, typename PlaceOf, typename Next>
__device__ __forceinline__ void multiply_unit(float (&acc)[Q][4], Piece& piece, const Rows (&columns)[Q], const PlaceOf& place,
                                              const Next& next, int lane) {
#pragma unroll
  for (int i = 0; i < PIECES; ++i) {
    piece.multiply(acc, columns, i, lane);
    if (i + 1 < PIECES)
      piece.load(place(), i + 1);
    else
      next();
  }
}

// A warp's units in turn, those of the first AHEAD of which are on their way. `each` gets a unit's piece and, to be called once its registers
// are free, what requests the unit that comes AHEAD units later.
constexpr int units_ahead(int runs) { return PIECE < runs ? runs / PIECE : 1; }  // as many as it takes to have so many runs in flight
template <int AHEAD, typename PlaceOf>
__device__ __forceinline__ void start_units(Piece (&pieces)[AHEAD], int first, int stride, int count, const PlaceOf& place) {
#pragma unroll
  for (int i = 0; i < AHEAD; ++i)
    if (first + i * stride < count) pieces[i].load(place(first + i * stride), 0);
}
template <int AHEAD, typename PlaceOf, typename Each>
__device__ __forceinline__ void each_unit(Piece (&pieces)[AHEAD], int first, int stride, int count, const PlaceOf& place,
                                          const Each& each) {
#pragma unroll 1
  for (int start = first; start < count; start += AHEAD * stride) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int unit = start + i * stride, later = unit + AHEAD * stride;
      if (i > 0 && unit >= count) break;
      each(pieces[i], unit, [&] {
        if (later < count) pieces[i].load(place(later), 0);
      });
    }
  }
}

// Ask L2 for one plane of a unit's 16 rows of the checkpoint; a lane asks for whole 128-byte lines.
__device__ __forceinline__ void prefetch_plane(const Place& place, int plane, int lane) {
  const char* unit = place.at - (lane / 4 * ROW_BYTES + lane % 4 * WHOLE_LANE) + plane * PLANE_BYTES;
#pragma unroll
  for (int line = 0; line < 16 * STATE_PITCH / 128; line += 32)
    if (line + lane < 16 * STATE_PITCH / 128) prefetch(unit + (line + lane) * 128);
}
// All that a fold reads.
__device__ __forceinline__ void prefetch_whole(const Place& place, int lane) {
#pragma unroll
  for (int plane = 0; plane < Whole::LOADS; ++plane) prefetch_plane(place, plane, lane);
}
// What a fold reads and a step does not.
__device__ __forceinline__ void prefetch_rest(const Place& place, int lane) {
  if (Whole::LOADS == 2 || Whole::COPIED) prefetch_plane(place, Whole::LOADS - 1, lane);
}

// Gram products: acc[i] += up to 16 queries (8 unless WIDE) against the 8 keys of tile i, over N columns; a lane brings the rows of queries
// lane / 4 and 8 + lane / 4 and of key lane / 4. Queries are the rows of A, so a lane ends with two neighbouring keys of one query. Three
// orders of terms, because norms and the exact fold rest on it.
template <bool WIDE, int COUNT, typename Queries, typename Keys>
__device__ __forceinline__ void gram_product(float (&acc)[COUNT][4], Queries query_row, Queries query_row_8, const Keys (&key_row)[COUNT],
                                             int lane) {
  constexpr int VEC = 8, TERMS = Queries::TERMS;
#pragma unroll(TERMS == 1 ? 4 : 2)
  for (int run = 0; run < N / (4 * VEC); ++run) {
    const int column = (run * 4 + lane % 4) * VEC;
    Run<VEC, Keys::TERMS> key[COUNT];
    Run<VEC, TERMS> query, query_8;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) key_row[i].load(key[i], column);
    query_row.load(query, column);
    if constexpr (WIDE) query_row_8.load(query_8, column);
#pragma unroll
    for (int s = 0; s < VEC / 4; ++s) {
      u32 a[TERMS][4];
#pragma unroll
      for (int n = 0; n < TERMS; ++n) {
        a[n][0] = query.pair[n][2 * s], a[n][2] = query.pair[n][2 * s + 1];
        a[n][1] = WIDE ? query_8.pair[n][2 * s] : 0, a[n][3] = WIDE ? query_8.pair[n][2 * s + 1] : 0;
      }
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        u32 b[Keys::TERMS][2];
        key[i].b_fragment(b, s);
        mma_terms<3>(acc[i], a, b);
      }
    }
  }
}

// One tile of it: `query_row(i)` is the row of query i, `to(i)` where its eight products go, null where they are of no use.
template <bool WIDE, typename QueryRow, typename Keys, typename To>
__device__ __forceinline__ void gram_tile(QueryRow query_row, Keys key_rows, To to, int lane) {
  float acc[1][4] = {};
  const Keys key_row[1] = {key_rows.row(lane / 4)};
  gram_product<WIDE>(acc, query_row(lane / 4), query_row(8 + lane / 4), key_row, lane);
#pragma unroll
  for (int half = 0; half <= int(WIDE); ++half)
    if (float* gram = to(lane / 4 + half * 8)) gram[2 * (lane % 4)] = acc[0][2 * half], gram[2 * (lane % 4) + 1] = acc[0][2 * half + 1];
}

// Coefficients of the ring's values in ROWS columns, as bf16 terms of pairs of entries: the B fragments of the ring's product.
template <int ROWS, int COUNT = ENTRIES>
struct Coefficients {
  static constexpr int TERMS = ACT_TERMS == 3 ? 3 : 2;  // outputs are rounded to the activations' precision anyway
  static constexpr int ROW = COUNT / 2 + 4;             // rows 20 banks apart (or 12, 28, 36): conflict-free
  u32 pair[TERMS][ROWS][ROW];

  __device__ void put(int row, int first_entry, float low, float high) {
    u32 terms[TERMS];
    split(low, high, terms);
#pragma unroll
    for (int n = 0; n < TERMS; ++n) pair[n][row][first_entry / 2] = terms[n];
  }
  // Of one entry.
  __device__ void put(int row, int entry, float value) {
    u32 terms[TERMS];
    split(value, 0.f, terms);
#pragma unroll
    for (int n = 0; n < TERMS; ++n) reinterpret_cast<u16*>(pair[n][row])[entry] = u16(terms[n]);
  }

  // acc[q] += coefficients of entries 16 step .. 16 step + 15 times their values, whose A fragment is given; `row(column)` is the row
  // of a column of the accumulators.
  template <int Q, typename RowOf>
  __device__ void multiply(float (&acc)[Q][4], const u32 (&values)[ACT_TERMS][4], int step, int lane, RowOf row) const {
#pragma unroll
    for (int q = 0; q < Q; ++q) {
      const int at = row(q * 8 + lane / 4);
      u32 b[TERMS][2];
#pragma unroll
      for (int n = 0; n < TERMS; ++n) b[n][0] = pair[n][at][8 * step + lane % 4], b[n][1] = pair[n][at][8 * step + 4 + lane % 4];
      mma_terms(acc[q], values, b);
    }
  }
};

// Rows of WIDTH activations in pieces of 16 bytes, by `groups` times THREADS threads of which this is number `thread`.
constexpr int PIECE_ELEMENTS = 16 / int(sizeof(Act)), BLOCK_THREADS = WARPS * 32;
template <int WIDTH, int THREADS, typename Copy>
__device__ __forceinline__ void each_piece(int rows, int thread, const Copy& copy, int groups = 1) {
  constexpr int PER_ROW = WIDTH / PIECE_ELEMENTS;
  if constexpr (THREADS % PER_ROW == 0) {
    const int offset = thread % PER_ROW * PIECE_ELEMENTS;
#pragma unroll 1
    for (int row = thread / PER_ROW; row < rows; row += groups * (THREADS / PER_ROW)) copy(row, offset);
  } else {
#pragma unroll 1
    for (int i = thread; i < rows * PER_ROW; i += groups * THREADS) copy(i / PER_ROW, i % PER_ROW * PIECE_ELEMENTS);
  }
}

// Rows from global memory, any alignment that the type allows, to rows of `pitch` in shared memory. A loop for either case: copies of both
// kinds in one would take the issue slots of both.
template <int WIDTH, int THREADS = BLOCK_THREADS, typename From>
__device__ __forceinline__ void stage_rows(Act* to, int pitch, int rows, bool aligned, int thread, const From& from, int groups = 1) {
  if (aligned)
    each_piece<WIDTH, THREADS>(rows, thread, [&](int row, int at) { copy_async(to + row * pitch + at, from(row) + at); }, groups);
  else
    each_piece<WIDTH, THREADS>(
        rows, thread,
        [&](int row, int at) {
#pragma unroll
          for (int i = 0; i < PIECE_ELEMENTS; ++i) to[row * pitch + at + i] = from(row)[at + i];
        },
        groups);
}

// The way back: rows in shared memory to 16-byte aligned rows in global memory.
template <int WIDTH, int THREADS = BLOCK_THREADS, typename To>
__device__ __forceinline__ void store_rows(const Act* from, int pitch, int rows, int thread, const To& to) {
  each_piece<WIDTH, THREADS>(rows, thread, [&](int row, int at) {
    *reinterpret_cast<uint4*>(to(row) + at) = *reinterpret_cast<const uint4*>(from + row * pitch + at);
  });
}

// The fold of one warp's 16 rows: S <- decay S + sum_j a_j k_j^T, with a_j k_j^T through the matrix units in three bf16 terms
// (two lose accuracy in the state) and the sum with S in fp32, because the matrix units truncate when they add.
constexpr int FOLD_STEPS = (BUFFER_LEN + 15) / 16;
constexpr int FOLD_BATCH = 2;  // runs of a row in flight at once where they do not stay: a whole 128-byte line
constexpr int WHOLE_RUNS = N / (4 * Whole::VEC);

// Some runs of a lane's two rows, as they lie in memory.
template <int RUNS>
struct WholeRuns {
  u32 raw[RUNS][2][Whole::LOADS][Whole::WORDS];
  float scale[2];

  __device__ void load(const Place& place, int first) {
#pragma unroll
    for (int i = 0; i < RUNS; ++i)
#pragma unroll
      for (int row = 0; row < 2; ++row) Whole::load(raw[i][row], place.at + run_offset(first + i) + row * 8 * ROW_BYTES, PLANE_BYTES);
    if (Whole::SCALED && !Whole::COPIED) scale[0] = place.row_scale(0), scale[1] = place.row_scale(8);
    __syncwarp();  // all loads first: one that sinks below the store of its line's other half waits for that store
  }
  __device__ void decode(float (&value)[Whole::VEC], int i, int row) const { Whole::decode(value, raw[i][row], scale[row]); }
};

// Where a fold leaves a unit, run by run: of a lane's row lane / 4 (half 0), or of the row eight below. Here a checkpoint, which may be the
// one it came from. The scale of a row depends on all of it, so rows with scales are folded twice: for their largest magnitudes, then to be
// stored.
struct InPlace {
  Place place;
  decltype(static_cast<const Draws*>(nullptr)->row(0)) rounding[2];
  float largest[2] = {};
  float scale, inverse[2];  // the scale of row lane % 2, in a row's first two lanes
  bool stores = !Whole::SCALED;

  __device__ InPlace(const Place& place, const Draws& draws) : place(place), rounding{draws.row(0), draws.row(8)} {}
  __device__ bool measures() const { return Whole::SCALED; }
  __device__ void measured() {
    // Each of a row's four lanes makes one number: the scale of one of its two rows, or the inverse.
    const int lane = threadIdx.x % 32;
    const bool odd = lane & 1;
    float most = largest_of(odd ? largest[1] : largest[0], __shfl_xor_sync(~0u, odd ? largest[0] : largest[1], 1));
    most = largest_of(most, __shfl_xor_sync(~0u, most, 2));
    scale = row_scale(most, Whole::LARGEST, lane & 2);
#pragma unroll
    for (int row = 0; row < 2; ++row) inverse[row] = __shfl_sync(~0u, scale, (lane & ~3) + 2 + row);
    stores = true;
  }
  __device__ void store(int run, int half, const float (&value)[Whole::VEC]) {
    if constexpr (!Whole::SCALED) {
      place.store(run, half * 8, value, 1.f, rounding[half]);
      return;
    }
    if (stores)
      place.store(run, half * 8, value, inverse[half], rounding[half]);
    else
#pragma unroll
      for (int e = 0; e < Whole::VEC; ++e) largest[half] = largest_of(largest[half], value[e]);
  }
  __device__ void finish() const {
    if (Whole::SCALED && threadIdx.x % 4 < 2) place.scale[threadIdx.x % 2 * 8] = scale;
  }
};

// Some runs of a lane's two rows in registers, which a fold may leave there.
template <int RUNS>
struct KeptRuns {
  float value[RUNS][2][Whole::VEC];

  __device__ void load(const Place& from, int first) {
    WholeRuns<RUNS> whole;
    whole.load(from, first);
#pragma unroll
    for (int i = 0; i < RUNS; ++i) whole.decode(value[i][0], i, 0), whole.decode(value[i][1], i, 1);
  }
  __device__ void store(int i, int half, const float (&changed)[Whole::VEC]) {
#pragma unroll
    for (int e = 0; e < Whole::VEC; ++e) value[i][half][e] = changed[e];
  }
  __device__ void decode(float (&out)[Whole::VEC], int i, int half) const {
#pragma unroll
    for (int e = 0; e < Whole::VEC; ++e) out[e] = value[i][half][e];
  }
  template <typename To>
  __device__ void leave(To& to) const {
    const auto all = [&] {
#pragma unroll
      for (int i = 0; i < RUNS; ++i) to.store(i, 0, value[i][0]), to.store(i, 1, value[i][1]);
    };
    if (to.measures()) all(), to.measured();
    all();
    to.finish();
  }
};

// Columns of a run of each lane in a row of keys, rows lane / 4 from `first` to at most `newest`: the B operand of a product with the state.
template <int VEC, typename Keys>
__device__ __forceinline__ void product_columns(float (&key)[VEC], Keys keys, int first, int newest, int run, int lane) {
  keys.row(min(first + lane / 4, newest)).floats(key, (run * 4 + lane % 4) * VEC);
}
// Keys of 16 entries from `first` to at most `newest` as B fragments of what is added to a run of each lane: two columns of it each.
template <int PAIRS, int TERMS, typename Keys>
__device__ __forceinline__ void fold_columns(u32 (&b)[PAIRS][TERMS][2], Keys keys, int first, int newest, int run, int lane) {
  const u32 select = lane / 4 & 1 ? 0x7632 : 0x5410;
  Run<2 * PAIRS, TERMS> key[4];
#pragma unroll
  for (int e = 0; e < 4; ++e)
    keys.row(min(first + 2 * (lane % 4) + e / 2 * 8 + e % 2, newest)).load(key[e], (run * 4 + lane / 8) * 2 * PAIRS);
#pragma unroll
  for (int q = 0; q < PAIRS; ++q)
#pragma unroll
    for (int n = 0; n < TERMS; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) b[q][n][half] = __byte_perm(key[2 * half].pair[n][q], key[2 * half + 1].pair[n][q], select);
}

// Columns in another order, such that matrix loads find both operands of a product with the state: of every 4 * VEC columns each lane's first
// two, each lane's next two, and so on. Where column `column`, an even one, and the next are.
__device__ constexpr int turned(int column) {
  constexpr int VEC = Whole::VEC;
  return column / (4 * VEC) * (4 * VEC) + column % VEC / 2 * 8 + column / VEC % 4 * 2;
}

// Rows of 16-bit activations that were turned.
struct TurnedRows {
  static constexpr int TERMS = ACT_TERMS;
  static constexpr bool EXACT = true;
  static constexpr int WORDS = Whole::VEC / 2;  // of a lane's run
  const Act* at;

  __device__ TurnedRows row(int index) const { return {at + index * PITCH}; }

  // By the whole block, each thread what it has just copied by each_piece: pieces that exchange words are neighbours'. Rows up to the next
  // multiple of 8 are turned, too, so that warps stay together.
  __device__ static void turn(Act* rows, int count) {
    __syncwarp();
    each_piece<N, BLOCK_THREADS>(round_up(count, 8), threadIdx.x, [&](int row, int at) {
      const int piece = at / PIECE_ELEMENTS, part = piece % WORDS;
      u32* group = reinterpret_cast<u32*>(rows + row * PITCH) + (piece - part) * 4;
      const uint4 turned = {group[part], group[WORDS + part], group[2 * WORDS + part], group[3 * WORDS + part]};
      __syncwarp();
      *reinterpret_cast<uint4*>(group + 4 * part) = turned;
    });
  }
};
template <int VEC>
__device__ __forceinline__ void product_columns(float (&key)[VEC], TurnedRows keys, int first, int newest, int run, int lane) {
  u32 pair[4];
  ldmatrix(pair, keys.row(min(first + lane % 8, newest)).at + run * 4 * VEC + lane / 8 % TurnedRows::WORDS * 8);
#pragma unroll
  for (int s = 0; s < VEC / 2; ++s) {
    key[2 * s] = ACT_TERMS == 1 ? low_bf16(pair[s]) : low_fp16(pair[s]);
    key[2 * s + 1] = ACT_TERMS == 1 ? high_bf16(pair[s]) : high_fp16(pair[s]);
  }
}
template <int PAIRS, int TERMS>
__device__ __forceinline__ void fold_columns(u32 (&b)[PAIRS][TERMS][2], TurnedRows keys, int first, int newest, int run, int lane) {
#pragma unroll
  for (int q = 0; q < PAIRS; q += 2) {
    u32 pair[4];
    ldmatrix_transposed(pair, keys.row(min(first + lane % 16, newest)).at + run * 8 * PAIRS + (q + lane / 16) * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 terms[TERMS] = {pair[i]};
      if constexpr (TERMS == 2) split(low_fp16(pair[i]), high_fp16(pair[i]), terms);
#pragma unroll
      for (int n = 0; n < TERMS; ++n) b[q + i / 2][n][i % 2] = terms[n];
    }
  }
}

// Rows of floats that were split and turned when they were written: term n of row r at (n * ROWS + r) * SPLIT_PITCH.
template <int ROWS>
struct TurnedSplitRows {
  static constexpr int TERMS = 3;
  const bf16* at;

  __device__ TurnedSplitRows row(int index) const { return {at + index * SPLIT_PITCH}; }
};
template <int PAIRS, int TERMS, int ROWS>
__device__ __forceinline__ void fold_columns(u32 (&b)[PAIRS][TERMS][2], TurnedSplitRows<ROWS> keys, int first, int newest, int run,
                                             int lane) {
#pragma unroll
  for (int q = 0; q < PAIRS; q += 2)
#pragma unroll
    for (int n = 0; n < TERMS; ++n) {
      u32 pair[4];
      ldmatrix_transposed(pair, keys.row(n * ROWS + min(first + lane % 16, newest)).at + run * 8 * PAIRS + (q + lane / 16) * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) b[q + i / 2][n][i % 2] = pair[i];
    }
}

// Folds a unit, RUNS runs of its rows at a time: `fold_some(first)`.
template <int RUNS, typename To, typename FoldSome>
__device__ __forceinline__ void fold(To& to, const FoldSome& fold_some) {
  const bool measures = to.measures();
#pragma unroll 1
  for (int at = Whole::SCALED && measures ? -WHOLE_RUNS : 0; at < WHOLE_RUNS; at += RUNS) {
    if (Whole::SCALED && measures && at == 0) to.measured();
    fold_some(Whole::SCALED && at < 0 ? at + WHOLE_RUNS : at);
  }
  to.finish();
}

// Fold some runs, whose present values `decode(out, i, row)` gives. `factors` holds a_j as A fragments of some steps of 16
// entries, zero from `history` on. `decay(column)` is a factor of a column of the state.
template <int RUNS, int STEPS, typename To, typename Decode, typename Decay, typename Keys>
__device__ __forceinline__ void fold_runs(To& to, int first, const Decode& decode, const Decay& decay, const u32 (&factors)[STEPS][3][4],
                                          Keys keys, int history, int lane) {
  constexpr int VEC = Whole::VEC;
#pragma unroll
  for (int i = 0; i < RUNS; ++i) {
    float delta[VEC / 2][4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      if (16 * s >= history) break;
      u32 key[VEC / 2][Keys::TERMS][2];
      fold_columns(key, keys, 16 * s, history - 1, first + i, lane);
#pragma unroll
      for (int q = 0; q < VEC / 2; ++q) mma_terms(delta[q], factors[s], key[q]);
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float value[VEC];
      decode(value, i, row);
#pragma unroll
      for (int e = 0; e < VEC; ++e) value[e] = fmaf(value[e], decay(((first + i) * 4 + lane % 4) * VEC + e), delta[e / 2][row * 2 + e % 2]);
      to.store(first + i, row, value);
    }
  }
}
