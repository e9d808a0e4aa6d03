// Checkpoint formats: how a lane reads fragments of the read plane, and how a fold reads and writes the whole.
//
// A warp owns 16 rows of one head. Lane (g, t) holds, of rows g and g + 8, runs of VEC consecutive columns: run kb starts at
// column kb * 4 * VEC + t * VEC, so that every load of the read plane is 16 bytes and the four lanes of a row cover 64. The order of k
// inside a product is free as long as both operands agree: elements 4s .. 4s+3 of a run are k = 2t, 2t+1, 2t+8, 2t+9 of its step s.

// Read as bf16: one bf16 plane, or the upper plane of two.
struct ReadBf16 {
  static constexpr int VEC = 8, TERMS = 1;
  static constexpr float UNIT = 1.f;  // what the row's scale is multiplied with, where there is one
  __device__ static void fragment(u32 (&a)[TERMS][4], const u32 (&top)[4], const u32 (&bottom)[4], int step) {
    a[0][0] = top[2 * step], a[0][1] = bottom[2 * step];
    a[0][2] = top[2 * step + 1], a[0][3] = bottom[2 * step + 1];
  }
};

struct ReadFp16 {
  static constexpr int VEC = 8, TERMS = 2;
  static constexpr float UNIT = 1.f;
  __device__ static void fragment(u32 (&a)[TERMS][4], const u32 (&top)[4], const u32 (&bottom)[4], int step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 pair = (i & 1 ? bottom : top)[2 * step + i / 2], terms[TERMS];
      split(low_fp16(pair), high_fp16(pair), terms);
      a[0][i] = terms[0], a[1][i] = terms[1];
    }
  }
};

// Two bf16 terms keep 16 bits of the state, enough below 16-bit outputs; three keep all of it.
template <int N_TERMS>
struct ReadFp32 {
  static constexpr int VEC = 4, TERMS = N_TERMS;
  static constexpr float UNIT = 1.f;
  __device__ static void fragment(u32 (&a)[TERMS][4], const u32 (&top)[4], const u32 (&bottom)[4], int) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32(&row)[4] = i & 1 ? bottom : top;
      u32 terms[TERMS];
      split(__uint_as_float(row[i / 2 * 2]), __uint_as_float(row[i / 2 * 2 + 1]), terms);
#pragma unroll
      for (int n = 0; n < TERMS; ++n) a[n][i] = terms[n];
    }
  }
};

__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// Bytes 0 and 1 (HIGH: 2 and 3) of a word as bf16, exactly. v + 128 for the low 7 bits of v, less 256 where the sign is set and
// 128 where it is not: numbers of 128 to 256 hold their low bits as they are.
template <bool HIGH>
__device__ __forceinline__ u32 int8_to_bf16(u32 word) {
  constexpr u32 SELECT = HIGH ? 0x4342 : 0x4140;
  const u32 value = __byte_perm(word & 0x7f7f7f7fu, 0x43434343u, SELECT), base = __byte_perm(word & 0x80808080u, 0xc3c3c3c3u, SELECT);
  return fma_bf16x2(value, 0x3f803f80u, base);
}
// Exponent and mantissa of e4m3 at their places in a bf16 are the number times 2^-120, denormal ones too.
template <bool HIGH>
__device__ __forceinline__ u32 fp8_to_bf16(u32 word) {
  const u32 spread = __byte_perm(word, 0, HIGH ? 0x3424 : 0x1404);
  return fma_bf16x2((spread & 0x80008000u) | (spread >> 4 & 0x07f007f0u), 0x7b807b80u, 0x80008000u);
}

// Planes of bytes, to be multiplied with the row's scale once the sums are done.
template <bool FLOATS, int READ_UNIT>
struct ReadBytes {
  static constexpr int VEC = 16, TERMS = 1;
  static constexpr float UNIT = READ_UNIT;
  template <bool HIGH>
  __device__ static u32 pair(u32 word) {
    if constexpr (FLOATS) return fp8_to_bf16<HIGH>(word);
    return int8_to_bf16<HIGH>(word);
  }
  __device__ static void fragment(u32 (&a)[TERMS][4], const u32 (&top)[4], const u32 (&bottom)[4], int step) {
    a[0][0] = pair<false>(top[step]), a[0][1] = pair<false>(bottom[step]);
    a[0][2] = pair<true>(top[step]), a[0][3] = pair<true>(bottom[step]);
  }
};

// ---- rounding -------------------------------------------------------------------------------------------------------

// What a flush rounds with: 16 random bits for each of two neighbouring columns, or none. To integers, as floats or as the low 16 bits of
// x + OFFSET, for a row whose largest magnitude was scaled to `most`, to within rounding.
struct Nearest {
  // Ties to even, for |x| below 2^22: the last bits of such a float. Not a fused sum: products are rounded by themselves, as everywhere.
  static constexpr float SHIFT = 12582912.f;
  __device__ void draw(int, u32& even, u32& odd) const { even = odd = 0; }
  __device__ static float integer(float x, u32) { return __fadd_rn(__fadd_rn(x, SHIFT), -SHIFT); }
  template <int OFFSET>
  __device__ static u32 low_bits(float x, u32, float) {
    return __float_as_uint(__fadd_rn(x, SHIFT + OFFSET));
  }
};
// Random bits come from a counter: the row's key and the pair of columns that shares a word.
struct Stochastic {
  u32 key;
  __device__ void draw(int column, u32& even, u32& odd) const {
    u32 h = key + u32(column / 2) * 0x9e3779b9u;
    h = (h ^ h >> 16) * 0x7feb352du;
    h = (h ^ h >> 15) * 0x846ca68bu;
    h ^= h >> 16;
    even = h & 0xffffu, odd = h >> 16;
  }
  // Up with the probability of the fraction: exact to 16 bits.
  __device__ static float integer(float x, u32 random) {
    const float low = floorf(x);
    return low + ((float(random) + 0.5f) * 0x1p-16f < x - low ? 1.f : 0.f);
  }
  template <int OFFSET>
  __device__ static u32 low_bits(float x, u32 random, float most) {
    return u32(int(fminf(fmaxf(integer(x, random), -most), most)) + OFFSET);
  }
};

__device__ __forceinline__ u64 mix(u64 z) {
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}
// Key of a row of a head in one fold of one slot.
__device__ __forceinline__ u32 row_key(i64 seed, i64 position, int layer, int row) {
  return u32(mix(mix(mix(u64(seed)) + u64(position)) + (u64(u32(layer)) << 32) + u64(row)) >> 32);
}

// Bits of x as a floating-point number with MANTISSA bits below the leading one and exponents from LEAST on, magnitude at most MOST, sign
// in bit SIGN.
template <int MANTISSA, int LEAST, u32 MOST, int SIGN, typename Rounding>
__device__ __forceinline__ u32 small_float(float x, const Rounding&, u32 random) {
  const u32 bits = __float_as_uint(x), magnitude = bits & 0x7fffffffu, exponent = max(magnitude >> 23, u32(127 + LEAST));
  const float steps = __uint_as_float(magnitude) * __uint_as_float((254 + MANTISSA - exponent) << 23);  // in units of the last place
  const u32 code = (exponent - (127 + LEAST)) * (1u << MANTISSA) + u32(Rounding::integer(steps, random));
  return min(code, MOST) | (bits >> 31 << SIGN);
}

__device__ __forceinline__ u32 pack_bf16(float low, float high, const Nearest&, u32, u32) { return pack_bf16(low, high); }
__device__ __forceinline__ u32 pack_bf16(float low, float high, const Stochastic&, u32 random_low, u32 random_high) {
  auto up = [](float x, u32 random) {
    const u32 bits = __float_as_uint(x);
    return x != x ? bits | 0x00400000u : bits + random;
  };
  return __byte_perm(up(low, random_low), up(high, random_high), 0x7632);
}
__device__ __forceinline__ u32 pack_fp16(float low, float high, const Nearest&, u32, u32) { return pack_fp16(low, high); }
__device__ __forceinline__ u32 pack_fp16(float low, float high, const Stochastic& rounding, u32 random_low, u32 random_high) {
  const u32 nearest = pack_fp16(low, high);  // for what is not finite
  const u32 a = low - low == 0.f ? small_float<10, -14, 0x7c00, 15>(low, rounding, random_low) : nearest;
  const u32 b = high - high == 0.f ? small_float<10, -14, 0x7c00, 15>(high, rounding, random_high) : nearest >> 16;
  return (a & 0xffffu) | b << 16;
}

// The greater magnitude; NaN if one of them is.
__device__ __forceinline__ float largest_of(float largest, float x) {
  float out;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(largest), "f"(fabsf(x)));
  return out;
}
// Scale of a row, or what its numbers are multiplied with to be stored. A row that holds a number that is not finite reads as NaN; one
// whose largest magnitude is below 2^-100 as zero.
__device__ __forceinline__ float row_scale(float largest, float levels, bool inverse) {
  const bool number = largest <= 0x1.fffffep127f;
  if (number && largest >= 0x1p-100f) return __fdiv_rn(inverse ? levels : largest, inverse ? largest : levels);
  return number || inverse ? 0.f : __uint_as_float(0x7fc00000u);
}

// Bytes of a scaled row: the lowest of what `encode` returns, or one of a word.
struct CodeInt8 {
  static constexpr bool INTEGERS = true;
  static constexpr float LARGEST = 127.f;
  template <typename Rounding>
  __device__ static u32 encode(float x, const Rounding&, u32 random) {
    return Rounding::template low_bits<0>(x, random, LARGEST);
  }
  __device__ static float decode(u32 word, int byte = 0) {  // 2^23 + 128 + what it stands for
    return __uint_as_float(__byte_perm(word ^ 0x80808080u, 0x4b000000u, 0x7440 + byte)) - 8388736.f;
  }
};
struct CodeFp8 {  // e4m3fn; what a row holds is finite, so its NaN is never stored
  static constexpr bool INTEGERS = false;
  static constexpr float LARGEST = 448.f;
  template <typename Rounding>
  __device__ static u32 encode(float x, const Rounding& rounding, u32 random) {
    return small_float<3, -6, 0x7e, 7>(x, rounding, random);
  }
  __device__ static float decode(u32 word, int byte = 0) {
    const u32 code = word >> byte * 8;
    return __uint_as_float((code & 0x7fu) << 20 | (code & 0x80u) << 24) * 0x1p120f;
  }
};
// Rows that are stored as zeros may hold what is not finite.
template <typename Code, int VEC, typename Rounding>
__device__ __forceinline__ void encode_bytes(u32 (&raw)[VEC / 4], const float (&value)[VEC], float inverse, const Rounding& rounding,
                                             int column) {
#pragma unroll
  for (int i = 0; i < VEC; i += 4) {
    u32 pair[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int at = i + 2 * n;
      u32 random[2];
      rounding.draw(column + at, random[0], random[1]);
      pair[n] = __byte_perm(Code::encode(__fmul_rn(value[at], inverse), rounding, random[0]),
                            Code::encode(__fmul_rn(value[at + 1], inverse), rounding, random[1]), 0x0040);
    }
    raw[i / 4] = inverse == 0.f ? 0 : __byte_perm(pair[0], pair[1], 0x5410);
  }
}

// ---- the whole ------------------------------------------------------------------------------------------------------

// Two planes: bits(fp32) = (hi << 16) + lo, hi rounded to nearest with ties away from zero, lo signed: its pattern is the low half
// of the fp32's own.
__device__ __forceinline__ void encode_planes(float even, float odd, u32& hi, u32& lo) {
  const u32 a = __float_as_uint(even), b = __float_as_uint(odd);
  hi = __byte_perm(a + 0x8000u, b + 0x8000u, 0x7632);
  lo = __byte_perm(a, b, 0x5410);
}
// A NaN is stored as hi = 0x7fc0 | sign, lo = 0.
__device__ __forceinline__ float quiet(float value) {
  return value == value ? value : __uint_as_float((__float_as_uint(value) & 0x80000000u) | 0x7fc00000u);
}
// The same of a result of arithmetic, whose NaN is 0x7fffffff: rounded up it would wrap to -0.
__device__ __forceinline__ float quiet_result(float value) { return __uint_as_float(min(__float_as_int(value), 0x7fc00000)); }
__device__ __forceinline__ void decode_planes(u32 hi, u32 lo, float& even, float& odd) {
  even = __uint_as_float((hi << 16) + u32(int(lo << 16) >> 16));
  odd = __uint_as_float((hi & 0xffff0000u) + u32(int(lo) >> 16));
}

// Whole: one run of VEC columns of one row of the checkpoint, to floats and back. BYTES an element in LOADS planes, `plane` bytes apart; a
// lane has WORDS of each. SCALED formats take the row's scale, or what its numbers are multiplied with to be stored; INTEGERS are bytes
// of a two's complement, the highest plane first; COPIED ones also write the copy that steps read. `column` is where the run begins, for the random bits.
struct Unscaled {
  static constexpr bool SCALED = false, COPIED = false, INTEGERS = false;
  static constexpr float LARGEST = 0.f;
};

struct WholeTwoPlanes : Unscaled {
  static constexpr int VEC = 8, LOADS = 2, BYTES = 4, WORDS = 4;
  __device__ static void load(u32 (&raw)[LOADS][WORDS], const char* at, i64 plane) {
    load_vector(raw[0], at);
    load_vector(raw[1], at + plane);
  }
  __device__ static void decode(float (&value)[VEC], const u32 (&raw)[LOADS][WORDS], float) {
#pragma unroll
    for (int i = 0; i < 4; ++i) decode_planes(raw[0][i], raw[1][i], value[2 * i], value[2 * i + 1]);
  }
  __device__ static void store(char* at, char*, i64 plane, const float (&value)[VEC], float, const Nearest&, int) {
    float number[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) number[i] = quiet_result(value[i]);
    u32 hi[4], lo[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) encode_planes(number[2 * i], number[2 * i + 1], hi[i], lo[i]);
    store_vector(at, hi);
    store_vector(at + plane, lo);
  }
};

struct WholeFp32 : Unscaled {
  static constexpr int VEC = 4, LOADS = 1, BYTES = 4, WORDS = 4;
  __device__ static void load(u32 (&raw)[LOADS][WORDS], const char* at, i64) { load_vector(raw[0], at); }
  __device__ static void decode(float (&value)[VEC], const u32 (&raw)[LOADS][WORDS], float) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) value[i] = __uint_as_float(raw[0][i]);
  }
  __device__ static void store(char* at, char*, i64, const float (&value)[VEC], float, const Nearest&, int) {
    u32 raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = __float_as_uint(value[i]);
    store_vector(at, raw);
  }
};

// A pair of 16-bit numbers in a word.
struct PairBf16 {
  __device__ static float low(u32 pair) { return low_bf16(pair); }
  __device__ static float high(u32 pair) { return high_bf16(pair); }
  template <typename... Rounded>
  __device__ static u32 pack(const Rounded&... value) {
    return pack_bf16(value...);
  }
};
struct PairFp16 {
  __device__ static float low(u32 pair) { return low_fp16(pair); }
  __device__ static float high(u32 pair) { return high_fp16(pair); }
  template <typename... Rounded>
  __device__ static u32 pack(const Rounded&... value) {
    return pack_fp16(value...);
  }
};

template <typename Pair>
struct Whole16 : Unscaled {
  static constexpr int VEC = 8, LOADS = 1, BYTES = 2, WORDS = 4;
  __device__ static void load(u32 (&raw)[LOADS][WORDS], const char* at, i64) { load_vector(raw[0], at); }
  __device__ static void decode(float (&value)[VEC], const u32 (&raw)[LOADS][WORDS], float) {
#pragma unroll
    for (int i = 0; i < 4; ++i) value[2 * i] = Pair::low(raw[0][i]), value[2 * i + 1] = Pair::high(raw[0][i]);
  }
  template <typename Rounding>
  __device__ static void store(char* at, char*, i64, const float (&value)[VEC], float, const Rounding& rounding, int column) {
    u32 raw[4], random[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rounding.draw(column + 2 * i, random[0], random[1]);
      raw[i] = Pair::pack(value[2 * i], value[2 * i + 1], rounding, random[0], random[1]);
    }
    store_vector(at, raw);
  }
};
using WholeBf16 = Whole16<PairBf16>;
using WholeFp16 = Whole16<PairFp16>;

// 8-byte accesses: a lane has 8 columns of each plane, or the fold's registers would not do.
template <typename Code>
struct WholeScaled {
  static constexpr int VEC = 8, LOADS = 1, BYTES = 1, WORDS = 2;
  static constexpr bool SCALED = true, COPIED = false, INTEGERS = Code::INTEGERS;
  static constexpr float LARGEST = Code::LARGEST;
  __device__ static void load(u32 (&raw)[LOADS][WORDS], const char* at, i64) { load_vector(raw[0], at); }
  __device__ static void decode(float (&value)[VEC], const u32 (&raw)[LOADS][WORDS], float scale) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) value[i] = __fmul_rn(Code::decode(raw[0][i / 4], i % 4), scale);
  }
  template <typename Rounding>
  __device__ static void store(char* at, char*, i64, const float (&value)[VEC], float inverse, const Rounding& rounding, int column) {
    u32 raw[WORDS];
    encode_bytes<Code>(raw, value, inverse, rounding, column);
    store_vector(at, raw);
  }
};

// 16-bit multiples of the row's scale in two planes: q = 256 hi + lo, hi the nearest, of two the greater; lo is the low byte of q. LARGEST
// keeps hi within 8 bits.
struct WholeScaledPlanes {
  static constexpr int VEC = 8, LOADS = 2, BYTES = 2, WORDS = 2;
  static constexpr bool SCALED = true, COPIED = false, INTEGERS = true;
  static constexpr float LARGEST = 32639.f;
  __device__ static void load(u32 (&raw)[LOADS][WORDS], const char* at, i64 plane) {
    load_vector(raw[0], at);
    load_vector(raw[1], at + plane);
  }
  __device__ static void decode(float (&value)[VEC], const u32 (&raw)[LOADS][WORDS], float scale) {
#pragma unroll
    for (int i = 0; i < VEC; i += 2) {  // q + 32896 is a number without sign, and the last bits of a float of 2^23
      const u32 hi = raw[0][i / 4] ^ 0x80808080u, lo = raw[1][i / 4] ^ 0x80808080u, pair = __byte_perm(lo, hi, i % 4 ? 0x7362 : 0x5140);
      value[i] = __fmul_rn(__uint_as_float(__byte_perm(pair, 0x4b000000u, 0x7410)) - 8421504.f, scale);
      value[i + 1] = __fmul_rn(__uint_as_float(__byte_perm(pair, 0x4b000000u, 0x7432)) - 8421504.f, scale);
    }
  }
  template <typename Rounding>
  __device__ static void store(char* at, char*, i64 plane, const float (&value)[VEC], float inverse, const Rounding& rounding, int column) {
    u32 hi[WORDS], lo[WORDS];
#pragma unroll
    for (int i = 0; i < VEC; i += 4) {
      u32 pair[2];  // of q + 32768, to which 128 may be added without a carry
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int at = i + 2 * n;
        u32 random[2];
        rounding.draw(column + at, random[0], random[1]);
        pair[n] = __byte_perm(Rounding::template low_bits<32768>(__fmul_rn(value[at], inverse), random[0], LARGEST),
                              Rounding::template low_bits<32768>(__fmul_rn(value[at + 1], inverse), random[1], LARGEST), 0x5410);
      }
      hi[i / 4] = inverse == 0.f ? 0 : __byte_perm(pair[0] + 0x00800080u, pair[1] + 0x00800080u, 0x7531) ^ 0x80808080u;
      lo[i / 4] = inverse == 0.f ? 0 : __byte_perm(pair[0], pair[1], 0x6420);
    }
    store_vector(at, hi);
    store_vector(at + plane, lo);
  }
};

// fp32, and a copy of bytes for reading.
template <typename Code>
struct WholeCopied : WholeFp32 {
  static constexpr bool SCALED = true, COPIED = true;
  static constexpr float LARGEST = Code::LARGEST;
  __device__ static void store(char* at, char* copy, i64, const float (&value)[VEC], float inverse, const Nearest& rounding, int column) {
    WholeFp32::store(at, nullptr, 0, value, 0.f, rounding, column);
    u32 raw[VEC / 4];
    encode_bytes<Code>(raw, value, inverse, rounding, column);
    *reinterpret_cast<u32*>(copy) = raw[0];
  }
};
