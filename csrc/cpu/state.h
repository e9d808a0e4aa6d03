// What every family does with the state of one head, P rows of N columns: multiply it with columns, and fold tokens into it.
// Both walk the state once, from its first byte to its last.

template <class T>
INLINE T* at(const void* base, long long offset) {
  return (T*)base + offset;
}

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int TILE_COLUMNS = 4;  // accumulators of a tile: 16 of 32 registers
#else
constexpr int TILE_COLUMNS = 2;
#endif

// The products below come from functors that add up the rows of quad r, times C columns. The order within a sum depends on nothing but
// the row's place in the head.

// Rows of a read plane, one after another; few columns stay in registers.
template <class State, int P, int N, int C>
struct PlaneTimesColumns {
  static constexpr int LANES_APART = ReadPlane<State, P, N>::LANES_APART;
  static constexpr int STEPS = N / (2 * VW);
  static constexpr bool RESIDENT = C * (N / VW) <= 16;
  const ReadPlane<State, P, N>& plane;
  const float* columns;
  vf resident[RESIDENT ? C * (N / VW) : 1];

  INLINE PlaneTimesColumns(const ReadPlane<State, P, N>& plane, const float* columns) : plane(plane), columns(columns) {
    if (RESIDENT) UNROLL for (int i = 0; i < C * (N / VW); i++) {
        resident[i] = load(columns + i * VW);
        KEEP(resident[i]);
      }
  }
  INLINE void step(const char* row, const char* soon, int n, vf* acc) const {
    vf a, b;
    State::read(row, n, a, b);
    prefetch(soon + n * State::read_bytes, 2 * VW * State::read_bytes);
    UNROLL for (int c = 0; c < C; c++) {
      acc[c] += a * (RESIDENT ? resident[(c * N + n) / VW] : load(columns + c * N + n));
      acc[c] += b * (RESIDENT ? resident[(c * N + n) / VW + 1] : load(columns + c * N + n + VW));
    }
  }
  INLINE void quad(int r, vf (*acc)[C]) const {
    const int most = plane.most(r);
    UNROLL for (int k = 0; k < QUAD; k++) {
      const char *row = plane.first + plane.offset(k, r), *soon = plane.feed.take(most, row);
      if (RESIDENT)
        UNROLL for (int s = 0; s < STEPS; s++) step(row, soon, 2 * VW * s, acc[k]);
      else
        for (int s = 0; s < STEPS; s++) step(row, soon, 2 * VW * s, acc[k]);
    }
  }
};

// The same where plane and columns are bfloat16 and the machine multiplies those, with exact products and fp32 sums.
#if defined(__AVX512BF16__)
template <class State>
constexpr bool MULTIPLIES_BF16 = State::split;

template <class State, int P, int N, int C>
struct PlaneTimesBf16 {
  static constexpr int LANES_APART = ReadPlane<State, P, N>::LANES_APART;
  static constexpr int STEPS = N / (2 * VW);
  static constexpr bool RESIDENT = C * STEPS <= 16;
  const ReadPlane<State, P, N>& plane;
  const uint16_t* columns;
  vi resident[RESIDENT ? C * STEPS : 1];

  INLINE PlaneTimesBf16(const ReadPlane<State, P, N>& plane, const uint16_t* columns) : plane(plane), columns(columns) {
    if (RESIDENT) UNROLL for (int i = 0; i < C * STEPS; i++) {
        resident[i] = load_as<vi>(columns + i * 2 * VW);
        KEEP(resident[i]);
      }
  }
  INLINE void quad(int r, vf (*acc)[C]) const {
    const int most = plane.most(r);
    UNROLL for (int k = 0; k < QUAD; k++) {
      const char *row = plane.first + plane.offset(k, r), *soon = plane.feed.take(most, row);
      UNROLL for (int s = 0; s < STEPS; s++) {
        const int n = 2 * VW * s;
        const vi numbers = load_as<vi>(row + 2 * n);
        prefetch(soon + 2 * n, VECTOR_BYTES);
        UNROLL for (int c = 0; c < C; c++) {
          const vi column = RESIDENT ? resident[(c * N + n) / (2 * VW)] : load_as<vi>(columns + c * N + n);
          acc[k][c] = (vf)_mm512_dpbf16_ps((__m512)acc[k][c], (__m512bh)numbers, (__m512bh)column);
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
template <int N, int C, class Meanwhile>
struct FloatsTimesColumns {
  static constexpr int LANES_APART = 1;
  const float *rows, *columns;
  const Meanwhile& meanwhile;
  INLINE void quad(int r, vf (*acc)[C]) const {
    for (int n = 0; n < N; n += 2 * VW) {
      meanwhile();
      vf a[QUAD], b[QUAD];
      UNROLL for (int i = 0; i < QUAD; i++) {
        a[i] = load(rows + (r * QUAD + i) * N + n), b[i] = load(rows + (r * QUAD + i) * N + n + VW);
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

// out[c * stride + row] for the rows of a block; `out` is at its first row, rows of a quad lie `apart`.
template <int C, class Quads>
INLINE void multiply_block(const Quads& quads, float* out, int stride, int apart) {
  alignas(64) float sums[C * RUN * VW];
  for (int r = 0; r < RUN; r++) {
    vf acc[QUAD][C] = {};
    quads.quad(r, acc);
    UNROLL for (int c = 0; c < C; c++)
        store(sums + (c * RUN + r) * VW, sum_quad<Quads::LANES_APART>(acc[0][c], acc[1][c], acc[2][c], acc[3][c]));
  }
  for (int c = 0; c < C; c++) store_runs(out + c * stride, apart, sum_quads<Quads::LANES_APART>(sums + c * RUN * VW));
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

// out[c * stride + row] for a block of the read plane; `scale` is that of the block's first row.
template <class State, int P, int N, int MOST, bool EXACT>
KERNEL void multiply_plane(const ReadPlane<State, P, N>& block, const float* scale, const Columns<State, N, MOST, EXACT>& columns,
                           float* out, int stride) {
  PlaneFeed<State, P, N> feed = block.feed;  // in registers
  const ReadPlane<State, P, N> plane{block.first, block.row, feed};
  for_columns<MOST>(columns.count, [&](int c, auto tile) INLINE_LAMBDA {
    constexpr int C = decltype(tile)::value;
#if defined(__AVX512BF16__)
    if constexpr (Columns<State, N, MOST, EXACT>::BF16)
      return multiply_block<C>(PlaneTimesBf16<State, P, N, C>(plane, columns.packed + c * N), out + c * stride, stride,
                               Walk<State, P>::APART);
#endif
    multiply_block<C>(PlaneTimesColumns<State, P, N, C>(plane, columns.floats + c * N), out + c * stride, stride, Walk<State, P>::APART);
  });
  block.feed = feed;
  if constexpr (State::scaled) {
    constexpr int APART = Walk<State, P>::APART;
    const vf factor = load_runs<vf>(scale, APART) * State::read_unit;
    for (int c = 0; c < columns.count; c++) store_runs(out + c * stride, APART, load_runs<vf>(out + c * stride, APART) * factor);
  }
}

// out[c * stride + row] = rows[row] . columns[c] for VW rows.
template <int N, int MOST, class Meanwhile>
KERNEL void multiply_floats(const float* rows, const float* columns, int count, float* out, int stride, const Meanwhile& meanwhile) {
  for_columns<MOST>(count, [&](int c, auto tile) INLINE_LAMBDA {
    constexpr int C = decltype(tile)::value;
    multiply_block<C>(FloatsTimesColumns<N, C, Meanwhile>{rows, columns + c * N, meanwhile}, out + c * stride, stride, 1);
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
template <int N, class Meanwhile>
KERNEL void multiply_tokens(const float* rows, const float* packed, int count, float* out, const Meanwhile& meanwhile) {
  constexpr int PART = 32;
  for (int j = 0; j < count; j += VW) {
    vf total[VW] = {};
    for (int n0 = 0; n0 < N; n0 += PART) {
      vf part[VW] = {};
      for (int n = n0; n < n0 + PART; n++) {
        vf column = load(packed + j * N + n * VW);
        KEEP(column);
        if (n % 2 == 0) meanwhile();
        UNROLL for (int r = 0; r < VW; r++) part[r] += rows[r * N + n] * column;
      }
      UNROLL for (int r = 0; r < VW; r++) total[r] += part[r];
    }
    transpose(total);
    UNROLL for (int i = 0; i < VW; i++) store(out + (j + i) * VW, total[i]);
  }
}

// Fold `count` tokens into the rows of a block: S[p] <- decay S[p] + sum_j left[j][p] right[j], oldest first, in fp32. S comes from
// `source(address, row of the block, e, a, b)` and goes to a sink, which is told the row of the block, the column and the element of the
// head. Entries of left lie STRIDE apart, rows of a quad `apart`. Decay is a scalar, or N numbers in the columns' order. Meanwhile the block
// that begins with row `soon` of the head at `ahead` is prefetched.
template <class State, int STRIDE, int P, int N, bool DECAY_VECTOR, class Source, class Sink, class Meanwhile>
KERNEL void fold_block(const Source& source, const Sink& sink, const char* state, int first, const char* ahead, int soon,
                       const float* decay, const float* left, int apart, const float* right, int count, const Meanwhile& meanwhile) {
  typedef Walk<State, P> Walk;
  constexpr int WIDE = 4;  // vectors a row of a tile
  for (int r = 0; r < RUN; r++)
    for (int n = 0; n < N; n += WIDE * VW) {
      int element[QUAD];
      vf s[QUAD][WIDE];
      UNROLL for (int k = 0; k < QUAD; k++) {
        const int row = Walk::row(k, r);
        element[k] = (first + row) * N + n;
        State::prefetch(ahead, (soon + row) * N + n, WIDE * VW);
        UNROLL for (int w = 0; w < WIDE; w += 2) {
          source(state + element[k] * State::plane_bytes, Walk::lane(k, r), n, w * VW, s[k][w], s[k][w + 1]);
          s[k][w] *= DECAY_VECTOR ? load(decay + n + w * VW) : splat(*decay);
          s[k][w + 1] *= DECAY_VECTOR ? load(decay + n + (w + 1) * VW) : splat(*decay);
        }
      }
      for (int j = 0; j < count; j++) {
        if (j % 4 == 0) meanwhile();
        vf b[WIDE];
        UNROLL for (int w = 0; w < WIDE; w++) {
          b[w] = load(right + j * N + n + w * VW);
          KEEP(b[w]);
        }
        UNROLL for (int k = 0; k < QUAD; k++) {
          const vf a = splat(left[j * STRIDE + k * apart + r * Walk::STEP]);
          UNROLL for (int w = 0; w < WIDE; w++) s[k][w] += a * b[w];
        }
      }
      vf sum[WIDE] = {};  // finite if all numbers are
      UNROLL for (int k = 0; k < QUAD; k++) UNROLL for (int w = 0; w < WIDE; w++) sum[w] += s[k][w];
      if (all_zero(((sum[0] + sum[1]) + (sum[2] + sum[3])) * 0.0f))
        UNROLL for (int k = 0; k < QUAD; k++) UNROLL for (int w = 0; w < WIDE; w += 2)
            sink.template put<true>(Walk::lane(k, r), n + w * VW, element[k] + w * VW, s[k][w], s[k][w + 1]);
      else
        UNROLL for (int k = 0; k < QUAD; k++) UNROLL for (int w = 0; w < WIDE; w += 2)
            sink.template put<false>(Walk::lane(k, r), n + w * VW, element[k] + w * VW, s[k][w], s[k][w + 1]);
    }
}

// Sources and sinks of fold_block: the checkpoint itself, or its rows as fp32.
template <class State>
struct FromCheckpoint {
  INLINE void operator()(const char* at, int, int, int w, vf& a, vf& b) const { State::whole(at, w, 1.0f, a, b); }
};
template <int N>
struct ToFloats {
  float* rows;
  template <bool FINITE>
  INLINE void put(int row, int n, int, vf a, vf b) const {
    store(rows + row * N + n, a), store(rows + row * N + n + VW, b);
  }
};
template <int N>
struct FromFloats {
  const float* rows;
  INLINE void operator()(const char*, int row, int n, int w, vf& a, vf& b) const {
    const float* at = rows + row * N + n + w;
    a = load(at), b = load(at + VW);
  }
};

// The rows of a block as fp32.
template <class State, int P, int N>
INLINE void read_block(const Checkpoint& at, int first, float* rows) {
  for (int r = 0; r < RUN; r++)
    for (int k = 0; k < QUAD; k++) {
      const int row = first + Walk<State, P>::row(k, r);
      float* to = rows + Walk<State, P>::lane(k, r) * N;
      const float scale = State::scaled ? at.scale[row] : 1.0f;
      for (int n = 0; n < N; n += 2 * VW) {
        vf a, b;
        State::whole(at.state + row * N * State::plane_bytes, n, scale, a, b);
        store(to + n, a), store(to + n + VW, b);
      }
    }
}

// Where a fold leaves a head: a checkpoint, which may be the one it came from. BY_ROWS: a row is written at once, since its scale depends
// on all of it, or random bits are drawn for it.
template <class State, int P, int N, class Draws>
struct ToCheckpoint {
  static constexpr bool BY_ROWS = State::scaled || Draws::STOCHASTIC;
  Checkpoint to;
  Draws draws;
  template <bool FINITE>
  INLINE void put(int, int, int element, vf a, vf b) const {
    State::template write<FINITE>(to.state, element, a, b);
  }
  INLINE void write_block(int first, const float* rows) const {
    for (int r = 0; r < RUN; r++)
      for (int k = 0; k < QUAD; k++) {
        const int row = first + Walk<State, P>::row(k, r);
        write_row<State, N>(to, row, rows + Walk<State, P>::lane(k, r) * N, draws.row(row));
      }
  }
};

// The fold of a block whose rows are in the checkpoint (rows = nullptr) or, once read, at `rows`, which then may change.
template <class State, int STRIDE, int P, int N, bool DECAY_VECTOR, class To, class Meanwhile>
INLINE void fold_rows(const Checkpoint& from, float* rows, const To& to, int first, const char* ahead, int soon, const float* decay,
                      const float* left, int apart, const float* right, int count, const Meanwhile& meanwhile) {
  const auto fold = [&](const auto& source, const auto& sink) INLINE_LAMBDA {
    fold_block<State, STRIDE, P, N, DECAY_VECTOR>(source, sink, from.state, first, ahead, soon, decay, left, apart, right, count,
                                                  meanwhile);
  };
  if constexpr (To::BY_ROWS || State::scaled) {
    alignas(64) float own[VW * N];
    if (!rows) read_block<State, P, N>(from, first, rows = own);
    if constexpr (To::BY_ROWS) {
      fold(FromFloats<N>{rows}, ToFloats<N>{rows});
      to.write_block(first, rows);
    } else {
      fold(FromFloats<N>{rows}, to);
    }
  } else if (rows) {
    fold(FromFloats<N>{rows}, to);
  } else {
    fold(FromCheckpoint<State>(), to);
  }
}

constexpr int AHEAD_BYTES = 8192;  // of the read plane, that a fold asks for the checkpoint ahead

// Calls body(first row, plane reader, ahead, first row ahead) for all blocks of a head; what lies AHEAD is in this head or the next.
template <class State, int P, int N, class Body>
INLINE void for_each_block(const Checkpoint& at, PlaneFeed<State, P, N>& feed, Body body) {
  constexpr int ROW = N * State::read_bytes, BLOCKS = P / VW, FEW = AHEAD_BYTES / (VW * ROW);
  constexpr int AHEAD = FEW < 1 ? 1 : FEW < BLOCKS ? FEW : BLOCKS;
  for (int b = 0; b < BLOCKS; b++) {
    const bool next = b + AHEAD >= BLOCKS;
    const int first = Walk<State, P>::first(b), soon = Walk<State, P>::first(next ? b + AHEAD - BLOCKS : b + AHEAD);
    body(first, ReadPlane<State, P, N>{at.read + first * ROW, b * VW, feed}, at.state + (next ? P * N * State::whole_bytes : 0), soon);
  }
}

// y[p] = decay product[p] + sum_j weight[j] rows[place[j]][p] for the P rows of a head, oldest first.
template <class F, int P, class Meanwhile>
INLINE void mix_rows(float decay, const float* product, const float* weight, const typename F::T* rows, const int* place, int count, vf* y,
                     const Meanwhile& meanwhile) {
  UNROLL for (int i = 0; i < P / VW; i++) y[i] = decay * load(product + i * VW);
  for (int j = 0; j < count; j++) {
    const vf w = splat(weight[j]);
    meanwhile();
    const typename F::T* row = rows + place[j] * P;
    UNROLL for (int i = 0; i < P / VW; i++) y[i] += w * F::load(row + i * VW);
  }
}
