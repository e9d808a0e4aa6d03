// What every family does with the state of one head, P rows of N columns: multiply it with columns, and fold tokens into it.
// Both walk the state once, from its first byte to its last.

template <class T>
INLINE T* at(const void* base, long long offset) {
  return (T*)base + offset;
}

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE_ROWS = 4, TILE_COLUMNS = 4;  // accumulators of a tile: 16 of 32 registers
#else
constexpr int TILE_ROWS = 4, TILE_COLUMNS = 2;
#endif

// Readers give the tile loop 2 VW columns of a row; `from` moves them, so that what remains of an offset is a constant. What comes
// from memory is read one row at a time: strictly sequential lines are what the hardware's prefetcher follows.
template <class State>
struct ReadPlane {
  static constexpr int ROWS = 1;
  const char* head;
  const char* ahead;  // what to prefetch meanwhile, line by line
  INLINE ReadPlane from(int e) const { return {head + e * State::read_bytes, ahead + e * State::read_bytes}; }
  INLINE void operator()(int e, vf& a, vf& b) const {
    State::read(head, e, a, b);
    prefetch(ahead + e * State::read_bytes, 2 * VW * State::read_bytes);
  }
};
template <class State>
struct WholeState {
  static constexpr int ROWS = TILE_ROWS;
  const char* head;
  INLINE WholeState from(int e) const { return {head + e * State::read_bytes}; }
  INLINE void operator()(int e, vf& a, vf& b) const { State::whole(head, e, a, b); }
};
struct FloatRows {  // rows already converted
  static constexpr int ROWS = TILE_ROWS;
  const float* rows;
  INLINE FloatRows from(int e) const { return {rows + e}; }
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

// VW rows times C columns; sums[c][row] gets VW partial sums. The order within a sum does not depend on C.
template <int N, int C, class Reader>
INLINE void multiply_tile(const Reader& first, const float* columns, float* sums) {
  constexpr int ROWS = Reader::ROWS, STEPS = N / (2 * VW);
  constexpr bool RESIDENT = C * (N / VW) <= 16;  // few columns stay in registers
  vf resident[RESIDENT ? STEPS : 1][2 * C];
  if (RESIDENT)
    UNROLL for (int i = 0; i < STEPS; i++)
      UNROLL for (int c = 0; c < 2 * C; c++) {
        resident[i][c] = load(columns + c / 2 * N + (2 * i + c % 2) * VW);
        KEEP(resident[i][c]);
      }
  for (int r0 = 0; r0 < VW; r0 += ROWS) {
    const Reader rows = first.from(r0 * N);
    vf acc[ROWS][C] = {};
    if (RESIDENT)
      UNROLL for (int i = 0; i < STEPS; i++) multiply_step<N, C, true>(rows, 2 * VW * i, resident[i], columns, acc);
    else
      for (int i = 0; i < STEPS; i++) multiply_step<N, C, false>(rows, 2 * VW * i, resident[0], columns, acc);
    UNROLL for (int c = 0; c < C; c++)
      UNROLL for (int r = 0; r < ROWS; r++) store(sums + (c * VW + r0 + r) * VW, acc[r][c]);
  }
}

template <int N, int C, class Reader>
INLINE void multiply_columns(const Reader& first, const float* columns, float* out, int stride) {
  alignas(64) float sums[C * VW * VW];
  multiply_tile<N, C>(first, columns, sums);
  for (int c = 0; c < C; c++) store(out + c * stride, sum_lanes(sums + c * VW * VW));
}

// out[c * stride + row] = row . columns[c] for VW rows and `count` of at most MOST columns.
template <int N, int MOST, class Reader>
INLINE void multiply_rows(const Reader& first, const float* columns, int count, float* out, int stride) {
  int c = 0;
  if (MOST >= TILE_COLUMNS)
    for (; c + TILE_COLUMNS <= count; c += TILE_COLUMNS)
      multiply_columns<N, TILE_COLUMNS>(first, columns + c * N, out + c * stride, stride);
  if (MOST >= 2)
    for (; c + 2 <= count; c += 2) multiply_columns<N, 2>(first, columns + c * N, out + c * stride, stride);
  if (c < count) multiply_columns<N, 1>(first, columns + c * N, out + c * stride, stride);
}

// The step's own product: the read plane of VW rows with columns that are activations, `exact`, whose fp32 form is at `columns`.
// Where both are bfloat16 and the machine multiplies those, with exact products and fp32 sums, the fp32 form is not needed.
#if defined(__AVX512BF16__)
template <class State, class F>
constexpr bool MULTIPLIES_EXACT = std::is_same<F, bf16>::value && State::split;

template <int N, int C>
INLINE void multiply_bf16(const char* rows, const char* ahead, const uint16_t* columns, float* out, int stride) {
  constexpr int STEPS = N / (2 * VW);
  alignas(64) float sums[C * VW * VW];
  for (int r = 0; r < VW; r++) {
    __m512 acc[C] = {};
    UNROLL for (int i = 0; i < STEPS; i++) {
      const __m512bh s = (__m512bh)load_as<vi>(rows + 2 * r * N + i * VECTOR_BYTES);
      prefetch(ahead + 2 * r * N + i * VECTOR_BYTES, VECTOR_BYTES);
      UNROLL for (int c = 0; c < C; c++)
        acc[c] = _mm512_dpbf16_ps(acc[c], s, (__m512bh)load_as<vi>(columns + c * N + i * 2 * VW));
    }
    UNROLL for (int c = 0; c < C; c++) store(sums + (c * VW + r) * VW, (vf)acc[c]);
  }
  for (int c = 0; c < C; c++) store(out + c * stride, sum_lanes(sums + c * VW * VW));
}
#else
template <class State, class F>
constexpr bool MULTIPLIES_EXACT = false;
template <int N, int C>
INLINE void multiply_bf16(const char*, const char*, const uint16_t*, float*, int) {}
#endif

template <class State, class F, int N, int MOST>
INLINE void multiply_plane(const char* rows, const char* ahead, const typename F::T* exact, const float* columns, int count, float* out,
                           int stride) {
  if constexpr (MULTIPLIES_EXACT<State, F>) {
    int c = 0;
    if (MOST >= 4)
      for (; c + 4 <= count; c += 4) multiply_bf16<N, 4>(rows, ahead, exact + c * N, out + c * stride, stride);
    if (MOST >= 2)
      for (; c + 2 <= count; c += 2) multiply_bf16<N, 2>(rows, ahead, exact + c * N, out + c * stride, stride);
    if (c < count) multiply_bf16<N, 1>(rows, ahead, exact + c * N, out + c * stride, stride);
  } else {
    multiply_rows<N, MOST>(ReadPlane<State>{rows, ahead}, columns, count, out, stride);
  }
}

// Fold `count` tokens into VW rows: S[p] <- decay S[p] + sum_j left[j][p] right[j], oldest first, in fp32. S comes from `source` and
// goes to the checkpoint at `rows`; entries of left lie STRIDE apart; `ahead` is what to prefetch meanwhile, as much as is folded.
// Decay is a scalar, or N numbers in the columns' order when DecayVector.
template <class State, int STRIDE, int N, bool DecayVector, class Reader>
INLINE void fold_rows(const Reader& source, char* rows, const char* ahead, const float* decay, const float* left, const float* right,
                      int count) {
  constexpr int WIDE = 4;  // vectors a row of a tile
  for (int p = 0; p < VW; p += TILE_ROWS)
    for (int n = 0; n < N; n += WIDE * VW) {
      char* at = rows + (p * N + n) * State::read_bytes;
      const Reader from = source.from(p * N + n);
      State::prefetch(ahead, p * N + n * TILE_ROWS, TILE_ROWS * WIDE * VW);
      vf s[TILE_ROWS][WIDE];
      UNROLL for (int r = 0; r < TILE_ROWS; r++)
        UNROLL for (int w = 0; w < WIDE; w += 2) {
          from(r * N + w * VW, s[r][w], s[r][w + 1]);
          s[r][w] *= DecayVector ? load(decay + n + w * VW) : splat(*decay);
          s[r][w + 1] *= DecayVector ? load(decay + n + (w + 1) * VW) : splat(*decay);
        }
      for (int j = 0; j < count; j++) {
        vf b[WIDE];
        UNROLL for (int w = 0; w < WIDE; w++) {
          b[w] = load(right + j * N + n + w * VW);
          KEEP(b[w]);
        }
        UNROLL for (int r = 0; r < TILE_ROWS; r++) {
          const vf a = splat(left[j * STRIDE + p + r]);
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
