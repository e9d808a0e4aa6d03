// The product of a read plane of signed bytes with columns. Bytes enter the matrix units as they lie, where integers are multiplied and
// added exactly; a conversion to bf16 would take more instructions than all the rest of a unit.

// Sums of a tile by digits, the highest first.
struct ByteDigits {
  int sum[3][4] = {};
};

// A lane's share of a column of activations on its way to bytes, from element `first` on.
struct FreshColumn {
  Act value[CHANNELS];
  __device__ void load(const Act* from, i64 first) {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) value[c] = from[first + c];
  }
};

// A column is three bytes a number, in units of 2^16, 2^8 and 1 times `unit`, a power of 2: it keeps 22 bits below its largest number.
// TOGETHER: a tile takes one or two columns with all of their terms, and the product of column c is that tile's column 4 c. Elsewhere every
// term has its tiles.
template <int COLUMNS, bool TOGETHER>
struct alignas(16) ByteColumns {
  static constexpr int TERMS = 3, TERM_TILES = TOGETHER ? 1 : TERMS;
  static_assert(!TOGETHER || COLUMNS <= 2);
  signed char term[TERMS][COLUMNS][N + 32];  // 32 bytes of padding spread rows over the banks
  float unit[COLUMNS];                       // no number where the column holds one that is not finite

  // Bits of the largest magnitude of a lane's neighbours.
  __device__ static u32 largest_of(const float (&value)[CHANNELS]) {
    u32 largest = 0;
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) largest = max(largest, __float_as_uint(value[c]) & 0x7fffffffu);
    return largest;
  }
  // A whole column, by one warp.
  __device__ void put(int column, const float (&value)[CHANNELS], int lane) {
    put(column, lane * CHANNELS, value, largest_of_warp(largest_of(value)));
  }
  __device__ void put(int column, const FreshColumn& fresh, int lane) {
    float value[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) value[c] = to_float(fresh.value[c]);
    put(column, value, lane);
  }
  // A lane's neighbours from `first` on, and the largest of the whole column.
  __device__ void put(int column, int first, const float (&value)[CHANNELS], u32 largest) {
    const u32 exponent = max(largest >> 23, 22u);
    const float inverse = __uint_as_float((127 + 21 + 127 - exponent) << 23);  // makes the largest 2^21 to 2^22
    if (first == 0) unit[column] = __uint_as_float(largest < 0x7f800000u ? (exponent - 21) << 23 : 0x7fc00000u);
    u32 number[CHANNELS];
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c)  // digits from -128 to 127
      number[c] = (__float_as_uint(fmaf(value[c], inverse, 12582912.f)) - 0x4b400000u + 0x808080u) ^ 0x808080u;
#pragma unroll
    for (int n = 0; n < TERMS; ++n)
#pragma unroll
      for (int c = 0; c < CHANNELS; c += 2) {
        const u32 pair = __byte_perm(number[c], number[c + 1], 0x40 + 0x11 * (TERMS - 1 - n));
        *reinterpret_cast<u16*>(term[n][column] + first + c) = u16(pair);
      }
  }

  // acc[q] = (16 rows of the state) x (8 columns).
  template <int Q>
  __device__ void multiply(float (&acc)[Q][4], const Piece& piece, int lane) const {
    static_assert(Q > 0 && PIECES == 1);
    const float scale[2] = {piece.scale_top * Read::UNIT, piece.scale_bottom * Read::UNIT};
#pragma unroll
    for (int q = 0; q < Q; ++q) {
      int sum[TERM_TILES][4] = {};
#pragma unroll
      for (int i = 0; i < PIECE; ++i)
#pragma unroll
        for (int n = 0; n < TERM_TILES; ++n) {
          const auto& row =
              TOGETHER ? term[min(lane / 4 % 4, TERMS - 1)][min(lane / 16, COLUMNS - 1)] : term[n][min(q * 8 + lane / 4, COLUMNS - 1)];
          u32 b[4];
          load_words(b, &row[(i * 4 + lane % 4) * 16]);
#pragma unroll
          for (int s = 0; s < 4; s += 2) {
            const u32 a[4] = {piece.top[i][s], piece.bottom[i][s], piece.top[i][s + 1], piece.bottom[i][s + 1]};
            mma_bytes(sum[n], a, b[s], b[s + 1]);
          }
        }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (TOGETHER && e % 2) continue;
        const float by = unit[min(TOGETHER ? lane % 4 / 2 : q * 8 + lane % 4 * 2 + e % 2, COLUMNS - 1)];
        int digit[TERMS];
        if constexpr (TOGETHER) {
          digit[0] = sum[0][e], digit[1] = sum[0][e + 1], digit[2] = __shfl_down_sync(~0u, sum[0][e], 1);
        } else {
#pragma unroll
          for (int n = 0; n < TERMS; ++n) digit[n] = sum[n][e];
        }
        acc[q][e] = total(digit) * (scale[e / 2] * by);
      }
    }
  }

  // The same of a whole checkpoint of integers, of which `whole` are the runs from `first` on; `newest` is the last column that there is. A
  // digit of the sum is that of a column times the higher plane, and of the one before it times the lower.
  template <int TILES, int RUNS>
  __device__ void add_whole(ByteDigits (&digits)[TILES], const WholeRuns<RUNS>& whole, int first, int newest, int lane) const {
#pragma unroll
    for (int i = 0; i < RUNS; ++i) {
      u32 b[TILES][TERMS][2];
#pragma unroll
      for (int q = 0; q < TILES; ++q)
#pragma unroll
        for (int n = 0; n < TERMS; ++n) load_words(b[q][n], &term[n][min(q * 8 + lane / 4, newest)][((first + i) * 4 + lane % 4) * 8]);
#pragma unroll
      for (int plane = 0; plane < Whole::LOADS; ++plane) {
        const u32(&top)[Whole::WORDS] = whole.raw[i][0][plane], (&bottom)[Whole::WORDS] = whole.raw[i][1][plane];
        const u32 a[4] = {top[0], bottom[0], top[1], bottom[1]};
#pragma unroll
        for (int q = 0; q < TILES; ++q)
#pragma unroll
          for (int n = 0; n + plane < TERMS; ++n) mma_bytes(digits[q].sum[n + plane], a, b[q][n][0], b[q][n][1]);
      }
    }
  }
  template <int TILES, int RUNS>
  __device__ void whole_product(float (&product)[TILES][4], const ByteDigits (&digits)[TILES], const WholeRuns<RUNS>& whole, int newest,
                                int lane) const {
    constexpr float UNIT = Whole::LOADS == 2 ? 256.f : 1.f;  // of the higher plane
#pragma unroll
    for (int q = 0; q < TILES; ++q)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int digit[TERMS] = {digits[q].sum[0][e], digits[q].sum[1][e], digits[q].sum[2][e]};
        product[q][e] = total(digit) * (whole.scale[e / 2] * UNIT * unit[min(q * 8 + lane % 4 * 2 + e % 2, newest)]);
      }
  }

 private:
  __device__ static float total(const int (&digit)[TERMS]) { return fmaf(float(digit[0] * 256 + digit[1]), 256.f, float(digit[2])); }
};

// Columns of a history's entries, to be multiplied with a whole checkpoint of integers.
struct ByteRows {
  const ByteColumns<BUFFER_LEN, false>* columns;
};
