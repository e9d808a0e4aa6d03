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
template <class State, int P>
INLINE Block block_at(int b) {
  return State::skips ? Block{b * HALF, P - (b + 1) * HALF} : Block{b * VW, b * VW + HALF};
}

// Readers give the tile loop 2 VW columns of a row. `row` moves a reader to row r of its block.
template <class State, int N>
struct ReadPlane {
  static constexpr int ROWS = 1;
  static constexpr bool FALLING = State::skips;  // in the upper run
  const char *first, *second;  // rows
  const char *ahead_first, *ahead_second;  // what to prefetch meanwhile, line by line
  INLINE ReadPlane row(int r) const {
    const long long e = (long long)(r < HALF ? r : r - HALF) * N * State::read_bytes;
    return r < HALF ? ReadPlane{first + e, nullptr, ahead_first + e, nullptr} : ReadPlane{second + e, nullptr, ahead_second + e, nullptr};
  }
  INLINE void prefetch_ahead(int e) const { prefetch(ahead_first + e * State::read_bytes, 2 * VW * State::read_bytes); }
  INLINE void operator()(int e, vf& a, vf& b) const {
    State::read(first, e, a, b);
    prefetch_ahead(e);
  }
};
template <int N>
struct FloatRows {  // rows already converted
  static constexpr int ROWS = TILE_ROWS;
  static constexpr bool FALLING = false;
  const float* rows;
  INLINE FloatRows row(int r) const { return {rows + r * N}; }
  INLINE void operator()(int e, vf& a, vf& b) const {
    a = load(rows + e), b = load(rows + e + VW);
    KEEP(a);
    KEEP(b);
  }
};

// One step of the products below: 2 VW numbers of each of ROWS rows times those of C columns, which are in registers or at `from`.
template <int N, int C, bool RESIDENT, class Reader>
INLINE void multiply_step(const Reader& rows, int n, const vf* resident, const float* from, vf (*acc)[C]) {
  constexpr int ROWS = Reader::ROWS;
  vf a[ROWS], b[ROWS];
  UNROLL for (int r = 0; r < ROWS; r++) rows(r * N + n, a[r], b[r]);
  UNROLL for (int c = 0; c < C; c++) {
    vf ca = RESIDENT ? resident[2 * c] : load(from + c * N + n);
    vf cb = RESIDENT ? resident[2 * c + 1] : load(from + c * N + n + VW);
    if (ROWS > 1 && !RESIDENT) {
      KEEP(ca);
      KEEP(cb);
    }
    UNROLL for (int r = 0; r < ROWS; r++) acc[r][c] += a[r] * ca;
    UNROLL for (int r = 0; r < ROWS; r++) acc[r][c] += b[r] * cb;
  }
}

// The rows of a block times C columns; sums[c][row] gets VW partial sums. The order within a sum does not depend on C.
template <int N, int C, class Reader>
INLINE void multiply_tile(const Reader& block, const float* columns, float* sums) {
  constexpr int ROWS = Reader::ROWS, STEPS = N / (2 * VW);
  constexpr bool RESIDENT = C * (N / VW) <= 16;  // few columns stay in registers
  vf resident[RESIDENT ? STEPS : 1][2 * C];
  if (RESIDENT)
    UNROLL for (int i = 0; i < STEPS; i++)
      UNROLL for (int c = 0; c < 2 * C; c++) {
        resident[i][c] = load(columns + c / 2 * N + (2 * i + c % 2) * VW);
        KEEP(resident[i][c]);
      }
  const auto run = [&](int r, auto falling) INLINE_LAMBDA {
    constexpr bool FALLING = decltype(falling)::value;
    const Reader rows = block.row(r);
    vf acc[ROWS][C] = {};
    if (RESIDENT)
      UNROLL for (int i = 0; i < STEPS; i++) {
        const int at = FALLING ? STEPS - 1 - i : i;
        multiply_step<N, C, true>(rows, 2 * VW * at, resident[RESIDENT ? at : 0], columns, acc);
      }
    else
      for (int i = 0; i < STEPS; i++) multiply_step<N, C, false>(rows, 2 * VW * (FALLING ? STEPS - 1 - i : i), resident[0], columns, acc);
    UNROLL for (int c = 0; c < C; c++)
      UNROLL for (int i = 0; i < ROWS; i++) store(sums + (c * VW + r + i) * VW, acc[i][c]);
  };
  for (int r = 0; r < HALF; r += ROWS) run(r, std::false_type());
  if (Reader::FALLING)
    for (int r = VW - 1; r >= HALF; r--) run(r, std::true_type());
  else
    for (int r = HALF; r < VW; r += ROWS) run(r, std::false_type());
}

template <int N, int C, class Reader>
INLINE void multiply_columns(const Reader& block, const float* columns, float* out, int stride, int second) {
  alignas(64) float sums[C * VW * VW];
  multiply_tile<N, C>(block, columns, sums);
  for (int c = 0; c < C; c++) store_halves(out + c * stride, out + c * stride + second, sum_lanes(sums + c * VW * VW));
}

// out[c * stride + row] = row . columns[c] for the rows of a block and `count` of at most MOST columns. `out` is at the block's
// first row, its second run lies `second` further on.
template <int N, int MOST, class Reader>
INLINE void multiply_block(const Reader& block, const float* columns, int count, float* out, int stride, int second = HALF) {
  int c = 0;
  if (MOST >= TILE_COLUMNS)
    for (; c + TILE_COLUMNS <= count; c += TILE_COLUMNS)
      multiply_columns<N, TILE_COLUMNS>(block, columns + c * N, out + c * stride, stride, second);
  if (MOST >= 2)
    for (; c + 2 <= count; c += 2) multiply_columns<N, 2>(block, columns + c * N, out + c * stride, stride, second);
  if (c < count) multiply_columns<N, 1>(block, columns + c * N, out + c * stride, stride, second);
}

// The step's own product: a block of the read plane with columns that are activations, `exact`, whose fp32 form is at `columns`.
// Where both are bfloat16 and the machine multiplies those, with exact products and fp32 sums, the fp32 form is not needed.
#if defined(__AVX512BF16__)
template <class State, class F>
constexpr bool MULTIPLIES_EXACT = std::is_same<F, bf16>::value && State::split;

template <int N, int C, class Reader>
INLINE void multiply_bf16(const Reader& block, const uint16_t* columns, float* out, int stride, int second) {
  constexpr int STEPS = N / (2 * VW);
  alignas(64) float sums[C * VW * VW];
  const auto run = [&](int r, auto falling) INLINE_LAMBDA {
    const Reader row = block.row(r);
    __m512 acc[C] = {};
    UNROLL for (int i = 0; i < STEPS; i++) {
      const int n = 2 * VW * (decltype(falling)::value ? STEPS - 1 - i : i);
      const __m512bh s = (__m512bh)load_as<vi>(row.first + 2 * n);
      row.prefetch_ahead(n);
      UNROLL for (int c = 0; c < C; c++) acc[c] = _mm512_dpbf16_ps(acc[c], s, (__m512bh)load_as<vi>(columns + c * N + n));
    }
    UNROLL for (int c = 0; c < C; c++) store(sums + (c * VW + r) * VW, (vf)acc[c]);
  };
  for (int r = 0; r < HALF; r++) run(r, std::false_type());
  if (Reader::FALLING)
    for (int r = VW - 1; r >= HALF; r--) run(r, std::true_type());
  else
    for (int r = HALF; r < VW; r++) run(r, std::false_type());
  for (int c = 0; c < C; c++) store_halves(out + c * stride, out + c * stride + second, sum_lanes(sums + c * VW * VW));
}
#else
template <class State, class F>
constexpr bool MULTIPLIES_EXACT = false;
template <int N, int C, class Reader>
INLINE void multiply_bf16(const Reader&, const uint16_t*, float*, int, int) {}
#endif

template <class State, class F, int N, int MOST>
INLINE void multiply_plane(const ReadPlane<State, N>& block, const typename F::T* exact, const float* columns, int count, float* out, int stride,
                           int second) {
  if constexpr (MULTIPLIES_EXACT<State, F>) {
    int c = 0;
    if (MOST >= 4)
      for (; c + 4 <= count; c += 4) multiply_bf16<N, 4>(block, exact + c * N, out + c * stride, stride, second);
    if (MOST >= 2)
      for (; c + 2 <= count; c += 2) multiply_bf16<N, 2>(block, exact + c * N, out + c * stride, stride, second);
    if (c < count) multiply_bf16<N, 1>(block, exact + c * N, out + c * stride, stride, second);
  } else {
    multiply_block<N, MOST>(block, columns, count, out, stride, second);
  }
}

// Fold `count` tokens into the rows of a block: S[p] <- decay S[p] + sum_j left[j][p] right[j], oldest first, in fp32. S comes from
// `source(row of the block, e, a, b)` and goes to the checkpoint; entries of left lie STRIDE apart, the block's second run
// `second` after its first; `ahead` is the block to prefetch meanwhile. Decay is a scalar, or N numbers in the columns' order.
template <class State, int STRIDE, int N, bool DECAY_VECTOR, class Source>
INLINE void fold_block(const Source& source, char* state, Block block, const char* ahead, Block soon, const float* decay, const float* left,
                       int second, const float* right, int count) {
  constexpr int WIDE = 4;  // vectors a row of a tile
  for (int p = 0; p < VW; p += TILE_ROWS)
    for (int n = 0; n < N; n += WIDE * VW) {
      const int row = p < HALF ? p : p - HALF;
      char* at = state + (((p < HALF ? block.first : block.second) + row) * N + n) * State::read_bytes;
      State::prefetch(ahead, ((p < HALF ? soon.first : soon.second) + row) * N + n * TILE_ROWS, TILE_ROWS * WIDE * VW);
      vf s[TILE_ROWS][WIDE];
      UNROLL for (int r = 0; r < TILE_ROWS; r++)
        UNROLL for (int w = 0; w < WIDE; w += 2) {
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
      vf zero[WIDE] = {};  // stay zero unless some number is infinite or NaN
      UNROLL for (int r = 0; r < TILE_ROWS; r++)
        UNROLL for (int w = 0; w < WIDE; w++) zero[w] += s[r][w] * 0.0f;
      if (all_zero((zero[0] + zero[1]) + (zero[2] + zero[3])))
        UNROLL for (int r = 0; r < TILE_ROWS; r++)
          UNROLL for (int w = 0; w < WIDE; w += 2) State::template write<true>(at, r * N + w * VW, s[r][w], s[r][w + 1]);
      else
        UNROLL for (int r = 0; r < TILE_ROWS; r++)
          UNROLL for (int w = 0; w < WIDE; w += 2) State::template write<false>(at, r * N + w * VW, s[r][w], s[r][w + 1]);
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

// Calls body(block, plane reader, ahead, block ahead) for all blocks of a head; what lies AHEAD is in this head or the next.
template <class State, int P, int N, class Body>
INLINE void for_each_block(char* state, bool flush, Body body) {
  constexpr int BLOCKS = P / VW, AHEAD = BLOCKS < 2 ? 1 : 2;
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
INLINE void mix_rows(float decay, const float* product, const float* weight, const typename F::T* rows, const int* place, int count, vf* y) {
  UNROLL for (int i = 0; i < P / VW; i++) y[i] = decay * load(product + i * VW);
  for (int j = 0; j < count; j++) {
    const vf w = splat(weight[j]);
    const typename F::T* row = rows + place[j] * P;
    UNROLL for (int i = 0; i < P / VW; i++) y[i] += w * F::load(row + i * VW);
  }
}
