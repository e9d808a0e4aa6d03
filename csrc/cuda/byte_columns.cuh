// The product of a read plane of signed bytes with new tokens' columns. Bytes enter the matrix units as they lie, where integers are
// multiplied and added exactly; a conversion to bf16 would take more instructions than all the rest of a unit.

// A column is three bytes a number, in units of 2^16, 2^8 and 1 times `unit`, a power of 2: it keeps 22 bits below its largest number.
struct alignas(16) ByteColumns {
  static constexpr int TERMS = 3, COUNT = (N + 127) / 128;
  // One token has a tile to itself: its terms are three of the eight columns.
  static constexpr int TERM_TILES = MAX_TOKENS == 1 ? 1 : TERMS;
  signed char term[TERMS][MAX_TOKENS][N + 16];
  float unit[MAX_TOKENS];  // no number where the column holds one that is not finite

  // A lane's share of a column on its way.
  struct Column {
    Act value[COUNT][4];
    __device__ void load(const Act* from, int lane) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) value[i][e] = from[min(i * 128 + lane * 4, N - 4) + e];
    }
  };

  // By one warp.
  __device__ void put(int token, const Column& column, int lane) {
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) largest = max(largest, __float_as_uint(to_float(column.value[i][e])) & 0x7fffffffu);
    largest = largest_of_warp(largest);
    const u32 exponent = max(largest >> 23, 22u);
    const float inverse = __uint_as_float((127 + 21 + 127 - exponent) << 23);  // makes the largest 2^21 to 2^22
    if (lane == 0) unit[token] = __uint_as_float(largest < 0x7f800000u ? (exponent - 21) << 23 : 0x7fc00000u);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      u32 number[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)  // digits from -128 to 127
        number[e] = (__float_as_uint(to_float(column.value[i][e]) * inverse + 12582912.f) - 0x4b400000u + 0x808080u) ^ 0x808080u;
      const u32 low = __byte_perm(number[0], number[1], 0x5140), high = __byte_perm(number[2], number[3], 0x5140);
      const u32 word[TERMS] = {__byte_perm(__byte_perm(number[0], number[1], 0x0062), __byte_perm(number[2], number[3], 0x0062), 0x5410),
                               __byte_perm(low, high, 0x7632), __byte_perm(low, high, 0x5410)};
      if (i * 128 + lane * 4 < N)
#pragma unroll
        for (int n = 0; n < TERMS; ++n) *reinterpret_cast<u32*>(&term[n][token][i * 128 + lane * 4]) = word[n];
    }
  }

  // acc[q] = (16 rows of the state) x (8 columns), in their units.
  __device__ void multiply(float (&acc)[TILES][4], const Piece& piece, int lane) const {
    static_assert(PIECES == 1);
    const float scale[2] = {piece.scale_top * Read::UNIT, piece.scale_bottom * Read::UNIT};
#pragma unroll
    for (int q = 0; q < TILES; ++q) {
      int sum[TERM_TILES][4] = {};
#pragma unroll
      for (int i = 0; i < PIECE; ++i)
#pragma unroll
        for (int n = 0; n < TERM_TILES; ++n) {
          const auto& row = TERM_TILES == 1 ? term[min(lane / 4, TERMS - 1)][0] : term[n][min(q * 8 + lane / 4, MAX_TOKENS - 1)];
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
        int digit[TERMS];
        if constexpr (TERM_TILES == 1) {
          if (e % 2) continue;
          digit[0] = sum[0][e], digit[1] = sum[0][e + 1], digit[2] = __shfl_down_sync(~0u, sum[0][e], 1);
        } else {
#pragma unroll
          for (int n = 0; n < TERMS; ++n) digit[n] = sum[n][e];
        }
        acc[q][e] = fmaf(float(digit[0] * 256 + digit[1]), 256.f, float(digit[2])) * scale[e / 2];
      }
    }
  }
};
