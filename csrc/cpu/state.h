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

// Readers give the tile loop 2 VW columns of a row.
template <class State>
struct ReadPlane {
  const char* head;
  const char* ahead;
  INLINE void operator()(int e, vf& a, vf& b) const { State::read(head, e, a, b); }
};
template <class State>
struct WholeState {
  const char* head;
  INLINE void operator()(int e, vf& a, vf& b) const { State::whole(head, e, a, b); }
};
struct FloatRows {  // rows already converted
  const float* rows;
  INLINE void operator()(int e, vf& a, vf& b) const { a = load(rows + e), b = load(rows + e + VW); }
};

// VW rows times C columns; sums[c][row] gets VW partial sums. The order within a sum does not depend on C.
template <int N, int C, class Reader>
INLINE void multiply_tile(const Reader& reader, int first, const float* columns, float* sums) {
  UNROLL for (int r0 = 0; r0 < VW; r0 += TILE_ROWS) {
    vf acc[TILE_ROWS][C] = {};
    for (int n = 0; n < N; n += 2 * VW) {
      vf a[TILE_ROWS], b[TILE_ROWS];
      UNROLL for (int r = 0; r < TILE_ROWS; r++) reader(first + (r0 + r) * N + n, a[r], b[r]);
      UNROLL for (int c = 0; c < C; c++) {
        const vf ca = load(columns + c * N + n), cb = load(columns + c * N + n + VW);
        UNROLL for (int r = 0; r < TILE_ROWS; r++) acc[r][c] += a[r] * ca;
        UNROLL for (int r = 0; r < TILE_ROWS; r++) acc[r][c] += b[r] * cb;
      }
    }
    UNROLL for (int c = 0; c < C; c++)
      UNROLL for (int r = 0; r < TILE_ROWS; r++) store(sums + (c * VW + r0 + r) * VW, acc[r][c]);
  }
}

// out[c * stride + row] = row . columns[c] for VW rows and `count` of at most MOST columns.
template <int N, int MOST, class Reader>
INLINE void multiply_rows(const Reader& reader, int first, const float* columns, int count, float* out, int stride) {
  alignas(64) float sums[TILE_COLUMNS * VW * VW];
  int c = 0;
  if (MOST >= TILE_COLUMNS)
    for (; c + TILE_COLUMNS <= count; c += TILE_COLUMNS) {
      multiply_tile<N, TILE_COLUMNS>(reader, first, columns + c * N, sums);
      for (int i = 0; i < TILE_COLUMNS; i++) store(out + (c + i) * stride, sum_lanes(sums + i * VW * VW));
    }
  for (; c < count; c++) {
    multiply_tile<N, 1>(reader, first, columns + c * N, sums);
    store(out + c * stride, sum_lanes(sums));
  }
}

// Fold `count` tokens into rows p0 ... p0 + VW: S[p] <- decay S[p] + sum_j left[j][p] right[j], oldest first, in fp32.
// Decay is a scalar, or N numbers in the columns' order when DecayVector.
template <class State, int P, int N, bool DecayVector>
INLINE void fold_rows(char* head, int p0, const float* decay, const float* left, const float* right, int count) {
  constexpr int WIDE = 4;  // vectors a row of a tile
  for (int p = p0; p < p0 + VW; p += TILE_ROWS)
    for (int n = 0; n < N; n += WIDE * VW) {
      vf s[TILE_ROWS][WIDE];
      UNROLL for (int r = 0; r < TILE_ROWS; r++)
        UNROLL for (int w = 0; w < WIDE; w += 2) {
          State::whole(head, (p + r) * N + n + w * VW, s[r][w], s[r][w + 1]);
          s[r][w] *= DecayVector ? load(decay + n + w * VW) : splat(*decay);
          s[r][w + 1] *= DecayVector ? load(decay + n + (w + 1) * VW) : splat(*decay);
        }
      for (int j = 0; j < count; j++) {
        vf b[WIDE];
        UNROLL for (int w = 0; w < WIDE; w++) b[w] = load(right + j * N + n + w * VW);
        UNROLL for (int r = 0; r < TILE_ROWS; r++) {
          const vf a = splat(left[j * P + p + r]);
          UNROLL for (int w = 0; w < WIDE; w++) s[r][w] += a * b[w];
        }
      }
      UNROLL for (int r = 0; r < TILE_ROWS; r++)
        UNROLL for (int w = 0; w < WIDE; w += 2) State::write(head, (p + r) * N + n + w * VW, s[r][w], s[r][w + 1]);
    }
}

// out[p] += sum_j weight[j] rows[j][p], rows in the activation dtype, oldest first.
template <class F, int P>
INLINE void mix_rows(const typename F::T* const* rows, const float* weight, int count, float* out) {
  for (int p = 0; p < P; p += VW) {
    vf acc = load(out + p);
    for (int j = 0; j < count; j++) acc += weight[j] * F::load(rows[j] + p);
    store(out + p, acc);
  }
}
