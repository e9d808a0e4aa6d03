// What every family does with the state of one head, P rows of N columns: multiply it with columns, and fold tokens into it.
// Both walk the state once, from its first byte to its last.

template <class T>
INLINE T* at(const void* base, long long offset) {
  return (T*)base + offset;
}

constexpr int TILE_ROWS = HALF < 4 ? HALF : 4;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE_COLUMNS = 4;  // accumulators of a tile: 16 of 32 registers
#else
constexpr int TILE_COLUMNS = 2;
#endif

// The state is walked in blocks of VW rows, each two runs of HALF rows. Strictly sequential lines are what the hardware's prefetcher
// follows, so the runs are neighbours; but behind a plane that a step reads lies one that it skips, and there the prefetcher would
// fetch kilobytes in vain. So such a plane is walked from both ends to its middle, the upper run with falling addresses.
struct Block {
  int first, second;  // rows
};
template <class State>
constexpr bool FROM_BOTH_ENDS = State::skips && HALF >= QUAD;
template <class State, int P>
INLINE Block block_at(int b) {
  return FROM_BOTH_ENDS<State> ? Block{b * HALF, P - (b + 1) * HALF} : Block{b * VW, b * VW + HALF};
}

// A block of the read plane, and what to prefetch meanwhile, line by line.
template <class State, int N>
struct ReadPlane {
  static constexpr bool FALLING = FROM_BOTH_ENDS<State>;  // in the upper run
  const char *first, *second;
  const char *ahead_first, *ahead_second;
  INLINE const char* row(int r) const { return r < HALF ? first + r * N * State::read_bytes : second + (r - HALF) * N * State::read_bytes; }
  INLINE const char* ahead(int r) const {
    return r < HALF ? ahead_first + r * N * State::read_bytes : ahead_second + (r - HALF) * N * State::read_bytes;
  }
};

// The products below come from functors that add up QUAD rows times C columns: quad(r, falling, acc), rows r to r + 3 of the block,
// in falling order when so told. The order within a sum depends on nothing but the row's place in the head.

// Rows of a read plane, one after another; few columns stay in registers.
template <class State, int N, int C>
struct PlaneTimesColumns {
  static constexpr bool FALLING = ReadPlane<State, N>::FALLING;
  static constexpr int STEPS = N / (2 * VW);
  static constexpr bool RESIDENT = C * (N / VW) <= 16;
  const ReadPlane<State, N>& plane;
  const float* columns;
  vf resident[RESIDENT ? C * (N / VW) : 1];

  INLINE PlaneTimesColumns(const ReadPlane<State, N>& plane, const float* columns) : plane(plane), columns(columns) {
    if (RESIDENT) UNROLL for (int i = 0; i < C * (N / VW); i++) {
        resident[i] = load(columns + i * VW);
        KEEP(resident[i]);
      }
  }
  INLINE void step(const char* row, const char* ahead, int n, vf* acc) const {
    vf a, b;
    State::read(row, n, a, b);
    prefetch(ahead + n * State::read_bytes, 2 * VW * State::read_bytes);
    UNROLL for (int c = 0; c < C; c++) {
      acc[c] += a * (RESIDENT ? resident[(c * N + n) / VW] : load(columns + c * N + n));
      acc[c] += b * (RESIDENT ? resident[(c * N + n) / VW + 1] : load(columns + c * N + n + VW));
    }
  }
  template <bool DOWN>
  INLINE void quad(int r, std::integral_constant<bool, DOWN>, vf (*acc)[C]) const {
    UNROLL for (int k = 0; k < QUAD; k++) {
      const int i = DOWN ? QUAD - 1 - k : k;
      const char *row = plane.row(r + i), *ahead = plane.ahead(r + i);
      if (RESIDENT)
        UNROLL for (int s = 0; s < STEPS; s++) step(row, ahead, 2 * VW * (DOWN ? STEPS - 1 - s : s), acc[i]);
      else
        for (int s = 0; s < STEPS; s++) step(row, ahead, 2 * VW * (DOWN ? STEPS - 1 - s : s), acc[i]);
    }
  }
};

// The same where plane and columns are bfloat16 and the machine multiplies those, with exact products and fp32 sums.
#if defined(__AVX512BF16__)
template <class State>
constexpr bool MULTIPLIES_BF16 = State::split;

template <class State, int N, int C>
struct PlaneTimesBf16 {
  static constexpr bool FALLING = ReadPlane<State, N>::FALLING;
  static constexpr int STEPS = N / (2 * VW);
  static constexpr bool RESIDENT = C * STEPS <= 16;
  const ReadPlane<State, N>& plane;
  const uint16_t* columns;
  vi resident[RESIDENT ? C * STEPS : 1];

  INLINE PlaneTimesBf16(const ReadPlane<State, N>& plane, const uint16_t* columns) : plane(plane), columns(columns) {
    if (RESIDENT) UNROLL for (int i = 0; i < C * STEPS; i++) {
        resident[i] = load_as<vi>(columns + i * 2 * VW);
        KEEP(resident[i]);
      }
  }
  template <bool DOWN>
  INLINE void quad(int r, std::integral_constant<bool, DOWN>, vf (*acc)[C]) const {
    UNROLL for (int k = 0; k < QUAD; k++) {
      const int i = DOWN ? QUAD - 1 - k : k;
      const char *row = plane.row(r + i), *ahead = plane.ahead(r + i);
      UNROLL for (int s = 0; s < STEPS; s++) {
        const int n = 2 * VW * (DOWN ? STEPS - 1 - s : s);
        const vi numbers = load_as<vi>(row + 2 * n);
        prefetch(ahead + 2 * n, VECTOR_BYTES);
        UNROLL for (int c = 0; c < C; c++) {
          const vi column = RESIDENT ? resident[(c * N + n) / (2 * VW)] : load_as<vi>(columns + c * N + n);
          acc[i][c] = (vf)_mm512_dpbf16_ps((__m512)acc[i][c], (__m512bh)numbers, (__m512bh)column);
        }
      }
    }
  }
};
#else
template <class State>
constexpr bool MULTIPLIES_BF16 = false;
#endif

// Rows that are already fp32 and near, VW of them one after another: a tile, all its numbers from registers.
template <int N, int C>
struct FloatsTimesColumns {
  static constexpr bool FALLING = false;
  const float *rows, *columns;
  INLINE void quad(int r, std::false_type, vf (*acc)[C]) const {
    for (int n = 0; n < N; n += 2 * VW) {
      vf a[QUAD], b[QUAD];
      UNROLL for (int i = 0; i < QUAD; i++) {
        a[i] = load(rows + (r + i) * N + n), b[i] = load(rows + (r + i) * N + n + VW);
        KEEP(a[i]);
        KEEP(b[i]);
      }
      UNROLL for (int c = 0; c < C; c++) {
        vf ca = load(columns + c * N + n), cb = load(columns + c * N + n + VW);
        KEEP(ca);
        KEEP(cb);
        UNROLL for (int i = 0; i < QUAD; i++) acc[i][c] += a[i] * ca;
        UNROLL for (int i = 0; i < QUAD; i++) acc[i][c] += b[i] * cb;
      }
    }
  }
};

// out[c * stride + row] for the rows of a block; `out` is at the block's first row, its second run lies `second` further on.
template <int C, class Quads>
INLINE void multiply_block(const Quads& quads, float* out, int stride, int second) {
  alignas(64) float sums[C * VW * (VW / QUAD)];
  const auto run = [&](int r, auto falling) INLINE_LAMBDA {
    vf acc[QUAD][C] = {};
    quads.quad(r, falling, acc);
    UNROLL for (int c = 0; c < C; c++)
        store(sums + (c * (VW / QUAD) + r / QUAD) * VW, sum_quad(acc[0][c], acc[1][c], acc[2][c], acc[3][c]));
  };
  for (int r = 0; r < (Quads::FALLING ? HALF : VW); r += QUAD) run(r, std::false_type());
  if constexpr (Quads::FALLING)
    for (int r = VW - QUAD; r >= HALF; r -= QUAD) run(r, std::true_type());
  for (int c = 0; c < C; c++) store_halves(out + c * stride, out + c * stride + second, sum_quads(sums + c * VW * (VW / QUAD)));
}

// Calls multiply(c, C) for tiles of C of `count` columns, at most MOST.
template <int MOST, class Multiply>
INLINE void for_columns(int count, Multiply multiply) {
  int c = 0;
  if constexpr (MOST >= 4 && TILE_COLUMNS >= 4)
    for (; c + 4 <= count; c += 4) multiply(c, std::integral_constant<int, 4>());
  if constexpr (MOST >= 2)
    for (; c + 2 <= count; c += 2) multiply(c, std::integral_constant<int, 2>());
  if (c < count) multiply(c, std::integral_constant<int, 1>());
}

// At most MOST columns in the form that the machine multiplies the read plane with. EXACT: they are bfloat16 numbers.
template <class State, int N, int MOST, bool EXACT>
struct Columns {
  static constexpr bool BF16 = EXACT && MULTIPLIES_BF16<State>;
  int count;
  const float* floats;  // in the plane's order
  alignas(64) uint16_t packed[BF16 ? MOST * N : 1];

  INLINE void set(const float* columns, int n) {
    floats = columns, count = n;
    if (BF16)
      for (int i = 0; i < count * N; i += 2 * VW) bf16::store2(packed + i, load(columns + i), load(columns + i + VW));
  }
};

// out[c * stride + row] for a block of the read plane.
template <class State, int N, int MOST, bool EXACT>
KERNEL void multiply_plane(const ReadPlane<State, N>& plane, const Columns<State, N, MOST, EXACT>& columns, float* out, int stride,
                           int second) {
  for_columns<MOST>(columns.count, [&](int c, auto tile) INLINE_LAMBDA {
    constexpr int C = decltype(tile)::value;
#if defined(__AVX512BF16__)
    if constexpr (Columns<State, N, MOST, EXACT>::BF16)
      return multiply_block<C>(PlaneTimesBf16<State, N, C>(plane, columns.packed + c * N), out + c * stride, stride, second);
#endif
    multiply_block<C>(PlaneTimesColumns<State, N, C>(plane, columns.floats + c * N), out + c * stride, stride, second);
  });
}

// out[c * stride + row] = rows[row] . columns[c] for VW rows.
template <int N, int MOST>
KERNEL void multiply_floats(const float* rows, const float* columns, int count, float* out, int stride) {
  for_columns<MOST>(count, [&](int c, auto tile) INLINE_LAMBDA {
    constexpr int C = decltype(tile)::value;
    multiply_block<C>(FloatsTimesColumns<N, C>{rows, columns + c * N}, out + c * stride, stride, HALF);
  });
}

// `count` columns of N numbers as N rows of VW columns each, and so on for every VW columns: what multiply_tokens takes. Unused
// columns are zero.
template <int N>
KERNEL void pack_columns(const float* columns, int count, float* packed) {
  for (int j = 0; j < count; j += VW)
    for (int n = 0; n < N; n += VW) {
      vf v[VW];
      UNROLL for (int i = 0; i < VW; i++) v[i] = j + i < count ? load(columns + (j + i) * N + n) : vf{};
      transpose(v);
      UNROLL for (int i = 0; i < VW; i++) store(packed + (j * N + (n + i) * VW), v[i]);
    }
}

// out[j * VW + row] = rows[row] . columns[j] for VW rows that are fp32 and near, and many columns: a column a lane, so that no sum runs
// across lanes. Sums are taken over parts of the row first, for accuracy.
template <int N>
KERNEL void multiply_tokens(const float* rows, const float* packed, int count, float* out) {
  constexpr int PART = 32;
  for (int j = 0; j < count; j += VW) {
    vf total[VW] = {};
    for (int n0 = 0; n0 < N; n0 += PART) {
      vf part[VW] = {};
      for (int n = n0; n < n0 + PART; n++) {
        vf column = load(packed + j * N + n * VW);
        KEEP(column);
        UNROLL for (int r = 0; r < VW; r++) part[r] += rows[r * N + n] * column;
      }
      UNROLL for (int r = 0; r < VW; r++) total[r] += part[r];
    }
    transpose(total);
    UNROLL for (int i = 0; i < VW; i++) store(out + (j + i) * VW, total[i]);
  }
}

// Fold `count` tokens into the rows of a block: S[p] <- decay S[p] + sum_j left[j][p] right[j], oldest first, in fp32. S comes from
// `source(row of the block, e, a, b)` and goes to the head at `to` in the format To, which may be the checkpoint itself; entries of
// left lie STRIDE apart, the block's second run `second` after its first; `ahead` is the block to prefetch meanwhile. Decay is a
// scalar, or N numbers in the columns' order.
template <class State, class To, int STRIDE, int N, bool DECAY_VECTOR, class Source>
KERNEL void fold_block(const Source& source, const char* state, char* to, Block block, const char* ahead, Block soon, const float* decay,
                       const float* left, int second, const float* right, int count) {
  constexpr int WIDE = 4;  // vectors a row of a tile
  for (int n = 0; n < N; n += WIDE * VW)
    for (int p = 0; p < VW; p += TILE_ROWS) {
      const int row = p < HALF ? p : p - HALF, element = ((p < HALF ? block.first : block.second) + row) * N + n;
      const char* at = state + element * State::read_bytes;
      char* put = to + element * To::read_bytes;
      State::prefetch(ahead, ((p < HALF ? soon.first : soon.second) + row) * N + n * TILE_ROWS, TILE_ROWS * WIDE * VW);
      vf s[TILE_ROWS][WIDE];
      UNROLL for (int r = 0; r < TILE_ROWS; r++) UNROLL for (int w = 0; w < WIDE; w += 2) {
        source(at, p + r, r * N, n, w * VW, s[r][w], s[r][w + 1]);
        s[r][w] *= DECAY_VECTOR ? load(decay + n + w * VW) : splat(*decay);
        s[r][w + 1] *= DECAY_VECTOR ? load(decay + n + (w + 1) * VW) : splat(*decay);
      }
      const float* l = left + (p < HALF ? row : row + second);
      for (int j = 0; j < count; j++) {
        vf b[WIDE];
        UNROLL for (int w = 0; w < WIDE; w++) {
          b[w] = load(right + j * N + n + w * VW);
          KEEP(b[w]);
        }
        UNROLL for (int r = 0; r < TILE_ROWS; r++) {
          const vf a = splat(l[j * STRIDE + r]);
          UNROLL for (int w = 0; w < WIDE; w++) s[r][w] += a * b[w];
        }
      }
      vf sum[WIDE] = {};  // finite if all numbers are
      UNROLL for (int r = 0; r < TILE_ROWS; r++) UNROLL for (int w = 0; w < WIDE; w++) sum[w] += s[r][w];
      if (all_zero(((sum[0] + sum[1]) + (sum[2] + sum[3])) * 0.0f))
        UNROLL for (int r = 0; r < TILE_ROWS; r++) UNROLL for (int w = 0; w < WIDE; w += 2)
            To::template write<true>(put, r * N + w * VW, s[r][w], s[r][w + 1]);
      else
        UNROLL for (int r = 0; r < TILE_ROWS; r++) UNROLL for (int w = 0; w < WIDE; w += 2)
            To::template write<false>(put, r * N + w * VW, s[r][w], s[r][w + 1]);
    }
}

// Sources of fold_block: the checkpoint itself, or its rows as fp32.
template <class State>
struct FromCheckpoint {
  INLINE void operator()(const char* at, int, int e, int, int w, vf& a, vf& b) const { State::whole(at, e + w, a, b); }
};
template <int N>
struct FromFloats {
  const float* rows;
  INLINE void operator()(const char*, int r, int, int n, int w, vf& a, vf& b) const {
    const float* at = rows + r * N + n + w;
    a = load(at), b = load(at + VW);
  }
};

constexpr int AHEAD_BYTES = 8192;  // measured: less leaves the memory waiting, more does not help

// Calls body(block, plane reader, ahead, block ahead) for all blocks of a head; what lies AHEAD is in this head or the next.
template <class State, int P, int N, class Body>
INLINE void for_each_block(const char* state, bool flush, Body body) {
  constexpr int BLOCKS = P / VW, FEW = AHEAD_BYTES / (VW * N * State::read_bytes), AHEAD = FEW < 1 ? 1 : FEW < BLOCKS ? FEW : BLOCKS;
  for (int b = 0; b < BLOCKS; b++) {
    const Block block = block_at<State, P>(b), soon = block_at<State, P>(b + AHEAD < BLOCKS ? b + AHEAD : b + AHEAD - BLOCKS);
    const char* ahead = b + AHEAD < BLOCKS ? state : state + P * N * State::whole_bytes;
    constexpr int ROW = N * State::read_bytes;
    const char *first = state + block.first * ROW, *second = state + block.second * ROW;
    // A flush takes long, its fold does all the prefetching.
    const ReadPlane<State, N> plane = flush ? ReadPlane<State, N>{first, second, first, second}
                                            : ReadPlane<State, N>{first, second, ahead + soon.first * ROW, ahead + soon.second * ROW};
    body(block, plane, ahead, soon);
  }
}

// y[p] = decay product[p] + sum_j weight[j] rows[place[j]][p] for the P rows of a head, oldest first.
template <class F, int P>
INLINE void mix_rows(float decay, const float* product, const float* weight, const typename F::T* rows, const int* place, int count,
                     vf* y) {
  UNROLL for (int i = 0; i < P / VW; i++) y[i] = decay * load(product + i * VW);
  for (int j = 0; j < count; j++) {
    const vf w = splat(weight[j]);
    const typename F::T* row = rows + place[j] * P;
    UNROLL for (int i = 0; i < P / VW; i++) y[i] += w * F::load(row + i * VW);
  }
}
