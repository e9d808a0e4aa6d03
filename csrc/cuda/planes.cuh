// Checkpoint formats: how a lane reads fragments of the read plane, and how a fold reads and writes the whole.
//
// A warp owns 16 rows of one head. Lane (g, t) holds, of rows g and g + 8, runs of VEC consecutive columns: run kb starts at
// column kb * 4 * VEC + t * VEC, so that every load is 16 bytes and the four lanes of a row cover 64. The order of k inside a
// product is free as long as both operands agree: elements 4s .. 4s+3 of a run are k = 2t, 2t+1, 2t+8, 2t+9 of its step s.

// Read as bf16: one bf16 plane, or the upper plane of two.
struct ReadBf16 {
  static constexpr int VEC = 8, TERMS = 1;
  __device__ static void fragment(u32 (&a)[TERMS][4], const u32 (&top)[4], const u32 (&bottom)[4], int step) {
    a[0][0] = top[2 * step], a[0][1] = bottom[2 * step];
    a[0][2] = top[2 * step + 1], a[0][3] = bottom[2 * step + 1];
  }
};

struct ReadFp16 {
  static constexpr int VEC = 8, TERMS = 2;
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

// Two planes: bits(fp32) = (hi << 16) + lo, hi rounded to nearest with ties away from zero, lo signed: its pattern is the low half
// of the fp32's own. A NaN becomes hi = 0x7fc0 | sign, lo = 0, because rounding the GPU's own NaN (0x7fffffff) up would wrap to -0.
__device__ __forceinline__ void encode_planes(float even, float odd, u32& hi, u32& lo) {
  const u32 a = __float_as_uint(even), b = __float_as_uint(odd);
  hi = __byte_perm(a + 0x8000u, b + 0x8000u, 0x7632);
  lo = __byte_perm(a, b, 0x5410);
}
__device__ __forceinline__ void encode_nan(float even, float odd, u32& hi, u32& lo) {
  if (even != even) hi = (hi & 0xffff0000u) | 0x7fc0u | (__float_as_uint(even) >> 16 & 0x8000u), lo &= 0xffff0000u;
  if (odd != odd) hi = (hi & 0xffffu) | 0x7fc00000u | (__float_as_uint(odd) & 0x80000000u), lo &= 0xffffu;
}
__device__ __forceinline__ void decode_planes(u32 hi, u32 lo, float& even, float& odd) {
  even = __uint_as_float((hi << 16) + u32(int(lo << 16) >> 16));
  odd = __uint_as_float((hi & 0xffff0000u) + u32(int(lo) >> 16));
}

// Whole: one run of VEC columns of one row of the checkpoint, to floats and back. `plane` is the distance in bytes from the
// read plane to the other one.
struct WholeTwoPlanes {
  static constexpr int VEC = 8, LOADS = 2, BYTES = 4;
  __device__ static void load(u32 (&raw)[LOADS][4], const char* at, i64 plane) {
    load_vector(raw[0], at);
    load_vector(raw[1], at + plane);
  }
  __device__ static void decode(float (&value)[VEC], const u32 (&raw)[LOADS][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) decode_planes(raw[0][i], raw[1][i], value[2 * i], value[2 * i + 1]);
  }
  __device__ static void store(char* at, i64 plane, const float (&value)[VEC]) {
    u32 hi[4], lo[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) encode_planes(value[2 * i], value[2 * i + 1], hi[i], lo[i]);
    bool nan = false;
#pragma unroll
    for (int i = 0; i < VEC; ++i) nan |= value[i] != value[i];
    if (nan)
#pragma unroll
      for (int i = 0; i < 4; ++i) encode_nan(value[2 * i], value[2 * i + 1], hi[i], lo[i]);
    store_vector(at, hi);
    store_vector(at + plane, lo);
  }
};

struct WholeFp32 {
  static constexpr int VEC = 4, LOADS = 1, BYTES = 4;
  __device__ static void load(u32 (&raw)[LOADS][4], const char* at, i64) { load_vector(raw[0], at); }
  __device__ static void decode(float (&value)[VEC], const u32 (&raw)[LOADS][4]) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) value[i] = __uint_as_float(raw[0][i]);
  }
  __device__ static void store(char* at, i64, const float (&value)[VEC]) {
    u32 raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = __float_as_uint(value[i]);
    store_vector(at, raw);
  }
};

struct WholeBf16 {
  static constexpr int VEC = 8, LOADS = 1, BYTES = 2;
  __device__ static void load(u32 (&raw)[LOADS][4], const char* at, i64) { load_vector(raw[0], at); }
  __device__ static void decode(float (&value)[VEC], const u32 (&raw)[LOADS][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) value[2 * i] = low_bf16(raw[0][i]), value[2 * i + 1] = high_bf16(raw[0][i]);
  }
  __device__ static void store(char* at, i64, const float (&value)[VEC]) {
    u32 raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = pack_bf16(value[2 * i], value[2 * i + 1]);
    store_vector(at, raw);
  }
};

struct WholeFp16 {
  static constexpr int VEC = 8, LOADS = 1, BYTES = 2;
  __device__ static void load(u32 (&raw)[LOADS][4], const char* at, i64) { load_vector(raw[0], at); }
  __device__ static void decode(float (&value)[VEC], const u32 (&raw)[LOADS][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) value[2 * i] = low_fp16(raw[0][i]), value[2 * i + 1] = high_fp16(raw[0][i]);
  }
  __device__ static void store(char* at, i64, const float (&value)[VEC]) {
    u32 raw[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) raw[i] = pack_fp16(value[2 * i], value[2 * i + 1]);
    store_vector(at, raw);
  }
};
