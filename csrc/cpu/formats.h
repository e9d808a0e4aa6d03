// Number formats: activations, and checkpoints in one or two planes.
//
// A codec handles 2 VW consecutive elements as two vectors. In formats of 16-bit units of bfloat16 those are the even and the
// odd elements (`split`): one shift and one mask then unpack a whole register. Whatever is multiplied with the state along its
// columns is brought into the same order once (`columns`), so nothing is shuffled in the loops over the state.

INLINE vu bf16_round(vu bits) {  // nearest even, in the upper half; NaN stays NaN
  const vi nan = (vi)((bits & 0x7fffffffu) > 0x7f800000u);
  const vu rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return select(nan, bits | 0x00400000u, rounded) & 0xffff0000u;
}

INLINE vf half_to_float(vh h) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps((__m128i)h);
#else
  const vu w = widen(h);
  const vf scaled = as_float((w & 0x7fffu) << 13) * 0x1p112f;  // moves the exponent's bias; exact, denormals too
  const vi special = (vi)((w & 0x7c00u) == 0x7c00u);
  return as_float(select(special, as_bits(scaled) | 0x7f800000u, as_bits(scaled)) | ((w & 0x8000u) << 16));
#endif
}

INLINE vh float_to_half(vf x) {  // nearest even
#if defined(__AVX512F__)
  return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
  return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
  const vu sign = as_bits(x) & 0x80000000u;
  const vu bits = as_bits(x) ^ sign;
  const vu normal = (bits + 0xc8000fffu + ((bits >> 13) & 1u)) >> 13;
  const vu denormal = as_bits(as_float(bits) + 0.5f) - 0x3f000000u;
  vu h = select((vi)(bits < 0x38800000u), denormal, normal);
  h = select((vi)(bits >= 0x477ff000u), vu{} + 0x7c00u, h);
  h = select((vi)(bits > 0x7f800000u), vu{} + 0x7e00u, h);
  return narrow(h | (sign >> 16));
#endif
}

// ---- formats of activations and one-plane checkpoints ---------------------------------------------------------------

struct fp32 {
  typedef float T;
  static INLINE float scalar(T x) { return x; }
  static constexpr bool split = false;
  static INLINE vf load(const T* p) { return ::load(p); }
  static INLINE vf load_runs(const T* p, int apart) { return ::load_runs<vf>(p, apart); }
  static INLINE void store(T* p, vf v) { ::store(p, v); }
  static INLINE void load2(const T* p, vf& a, vf& b) { a = load(p), b = load(p + VW); }
  static INLINE void store2(T* p, vf a, vf b) { store(p, a), store(p + VW, b); }
};

struct fp16 {
  typedef uint16_t T;
  static INLINE float scalar(T x) { return half_to_float(vh{} + x)[0]; }
  static constexpr bool split = false;
  static INLINE vf load(const T* p) { return half_to_float(load_as<vh>(p)); }
  static INLINE vf load_runs(const T* p, int apart) { return half_to_float(::load_runs<vh>(p, apart)); }
  static INLINE void store(T* p, vf v) { store_as(p, float_to_half(v)); }
  static INLINE void load2(const T* p, vf& a, vf& b) { a = load(p), b = load(p + VW); }
  static INLINE void store2(T* p, vf a, vf b) { store(p, a), store(p + VW, b); }
  static INLINE void store2(T* p, vf a, vf b, vu ra, vu rb);  // with random bits, below
};

struct bf16 {
  typedef uint16_t T;
  static INLINE float scalar(T x) { return as_float(vu{} + ((uint32_t)x << 16))[0]; }
  static constexpr bool split = true;
  static INLINE vf load(const T* p) { return as_float(widen(load_as<vh>(p)) << 16); }
  static INLINE vf load_runs(const T* p, int apart) { return as_float(widen(::load_runs<vh>(p, apart)) << 16); }
  static INLINE void store(T* p, vf v) { store_as(p, narrow(bf16_round(as_bits(v)) >> 16)); }
  static INLINE void load2(const T* p, vf& even, vf& odd) {
    vu w = load_as<vu>(p);
    KEEP(w);
    even = as_float(w << 16), odd = as_float(w & 0xffff0000u);
  }
  static INLINE void store2(T* p, vf even, vf odd) { store_as(p, (bf16_round(as_bits(even)) >> 16) | bf16_round(as_bits(odd))); }
  static INLINE vu up(vu bits, vu random) {
    const vi number = (vi)((bits & 0x7fffffffu) <= 0x7f800000u);
    return select(number, bits + random, bits | 0x00400000u) & 0xffff0000u;
  }
  static INLINE void store2(T* p, vf even, vf odd, vu re, vu ro) { store_as(p, (up(as_bits(even), re) >> 16) | up(as_bits(odd), ro)); }
};

// ---- rounding to 8 and 16 bits ----------------------------------------------------------------------------------------

INLINE vf to_nearest(vf x) {  // to an integer, ties to even; |x| below 2^22
  KEEP(x);                    // the product that it comes from is rounded by itself on every machine
  const vf magic = splat(12582912.0f);
  return (x + magic) - magic;
}

// What a flush rounds with: 16 random bits for each of 2 VW consecutive elements, or none.
struct Nearest {
  template <bool SPLIT>
  INLINE void draw(int, vu&, vu&) const {}
  static INLINE vf integer(vf x, vu) { return to_nearest(x); }
};

// Random bits come from a counter: the row's key and the pair of columns that shares a word.
struct Stochastic {
  uint32_t key;
  template <int... I>
  static INLINE vu lanes(Lanes<I...>) {
    return vu{(uint32_t)I...};
  }
  template <bool SPLIT>
  INLINE void draw(int column, vu& a, vu& b) const {
    vu h = key + ((uint32_t)column / 2 + lanes(AllLanes())) * 0x9e3779b9u;
    h = (h ^ (h >> 16)) * 0x7feb352du;
    h = (h ^ (h >> 15)) * 0x846ca68bu;
    h ^= h >> 16;
    vf even = as_float(h & 0xffffu), odd = as_float(h >> 16);
    if (!SPLIT) interleave(even, odd);
    a = as_bits(even), b = as_bits(odd);
  }
  // Up with the probability of the fraction: exact to 16 bits.
  static INLINE vf integer(vf x, vu random) {
    KEEP(x);
    const vi whole = __builtin_convertvector(x, vi);
    vf floor = __builtin_convertvector(whole, vf);
    floor -= select(floor > x, splat(1.0f), vf{});
    const vf uniform = (__builtin_convertvector((vi)random, vf) + 0.5f) * 0x1p-16f;
    return floor + select(uniform < x - floor, splat(1.0f), vf{});
  }
};

INLINE uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
// Key of a row of a head in one fold of one slot.
INLINE uint32_t row_key(long long seed, long long position, int layer, int row) {
  const uint64_t fold = mix(mix((uint64_t)seed) + (uint64_t)position);
  return (uint32_t)(mix(fold + ((uint64_t)layer << 32) + (uint64_t)row) >> 32);
}

// Bits of |x| as a floating-point number with MANTISSA bits below the leading one and exponents from LEAST on, not above MOST.
template <int MANTISSA, int LEAST, int MOST, class Rounding>
INLINE vu small_float(vf x, const Rounding&, vu random) {
  const vu magnitude = as_bits(x) & 0x7fffffffu;
  vu exponent = magnitude >> 23;
  exponent = select((vi)(exponent < (uint32_t)(127 + LEAST)), vu{} + (127 + LEAST), exponent);
  const vf steps = as_float(magnitude) * as_float((254 + MANTISSA - exponent) << 23);  // in units of the last place; exact
  const vu code = (exponent - (127 + LEAST)) * (1u << MANTISSA) + (vu) __builtin_convertvector(Rounding::integer(steps, random), vi);
  return select((vi)(code > (uint32_t)MOST), vu{} + MOST, code);
}

INLINE void fp16::store2(T* p, vf a, vf b, vu ra, vu rb) {
  const auto store = [](T* to, vf x, vu random) INLINE_LAMBDA {
    const vu code = small_float<10, -14, 0x7c00>(x, Stochastic(), random) | ((as_bits(x) >> 16) & 0x8000u);
    const vi finite = (vi)((as_bits(x) & 0x7fffffffu) < 0x7f800000u);
    store_as(to, narrow(select(finite, code, widen(float_to_half(x)))));
  };
  store(p, a, ra), store(p + VW, b, rb);
}

// ---- planes with a scale a row ------------------------------------------------------------------------------------------
// Numbers of a row are multiples of its scale. LARGEST is what the row's largest magnitude becomes.

struct int8 {
  typedef int8_t T;
  static constexpr float LARGEST = 127.0f;
  static INLINE void load2(const T* p, vf& a, vf& b) { a = load(p), b = load(p + VW); }
  template <class Rounding>
  static INLINE void store2(T* p, vf a, vf b, const Rounding&, vu ra, vu rb) {
    store(p, Rounding::integer(a, ra)), store(p + VW, Rounding::integer(b, rb));
  }
  static INLINE vf load(const T* p) { return __builtin_convertvector(from_bytes(load_as<vb>(p)), vf); }
  static INLINE void store(T* p, vf x) {
    x = min(max(x, splat(-LARGEST)), splat(LARGEST));
    store_as(p, to_bytes(__builtin_convertvector(x, vi)));
  }
};

struct fp8 {  // e4m3fn: no infinity; what a row holds is finite, so its NaN is never stored
  typedef uint8_t T;
  static constexpr float LARGEST = 448.0f;
  static INLINE void load2(const T* p, vf& a, vf& b) { a = load(p), b = load(p + VW); }
  template <class Rounding>
  static INLINE void store2(T* p, vf a, vf b, const Rounding& rounding, vu ra, vu rb) {
    store(p, a, small_float<3, -6, 0x7e>(a, rounding, ra)), store(p + VW, b, small_float<3, -6, 0x7e>(b, rounding, rb));
  }
  static INLINE vf load(const T* p) {
    const vu w = (vu)from_bytes(load_as<vb>(p));
    return as_float((w & 0x7fu) << 20 | (w & 0x80u) << 24) * 0x1p120f;  // moves the exponent's bias; exact, denormals too
  }
  static INLINE void store(T* p, vf x, vu code) { store_as(p, to_bytes((vi)(code | ((as_bits(x) >> 24) & 0x80u)))); }
};

// Scale of a row, and what its numbers are multiplied with to be stored. A row that holds a number that is not finite reads as NaN; one
// whose largest magnitude is below 2^-100 as zero.
struct RowScale {
  float scale, inverse;
};
INLINE RowScale row_scale(vu largest, float levels) {  // `largest`: bits of magnitudes, whose greatest lane counts
  uint32_t bits = 0;
  for (int i = 0; i < VW; i++) bits = largest[i] > bits ? largest[i] : bits;
  if (bits >= 0x7f800000u) return {as_float(vu{} + 0x7fc00000u)[0], 0.0f};
  if (bits < (27u << 23)) return {0.0f, 0.0f};
  const float most = as_float(vu{} + bits)[0];
  return {most / levels, levels / most};
}

INLINE vf multiple(vf x, float inverse) { return inverse == 0.0f ? vf{} : x * inverse; }

// ---- checkpoints -------------------------------------------------------------------------------------------------------
// A format reads and writes 2 VW elements of one (slot, head) at a time; `e` is their offset in it. `at` is where the first plane of
// the rows in question begins, so that `e` may as well count from a row.

// Where the state of one (slot, head) lies.
struct Checkpoint {
  char* state;       // the checkpoint, its upper plane first
  const char* read;  // the plane that steps read: the checkpoint's first one, or a copy
  float* scale;      // of the rows of an 8-bit plane
};

template <class F, int elements>
struct OnePlane {
  static constexpr bool split = F::split;
  static constexpr bool skips = false;
  static constexpr bool scaled = false;
  static constexpr float read_unit = 1.0f;
  static constexpr int read_bytes = sizeof(typename F::T);   // an element of the read plane
  static constexpr int plane_bytes = sizeof(typename F::T);  // of the checkpoint's first plane
  static constexpr int whole_bytes = sizeof(typename F::T);  // of the checkpoint
  static INLINE void read(const char* at, int e, vf& a, vf& b) { F::load2((const typename F::T*)at + e, a, b); }
  static INLINE void whole(const char* at, int e, float, vf& a, vf& b) { read(at, e, a, b); }
  static INLINE void prefetch(const char* at, int e, int count) { ::prefetch(at + e * whole_bytes, count * whole_bytes); }
  template <bool FINITE>
  static INLINE void write(char* at, int e, vf a, vf b) {
    F::store2((typename F::T*)at + e, a, b);
  }
  // The same with random bits.
  static INLINE void write(const Checkpoint& to, int e, vf a, vf b, const Nearest&, vu, vu) { write<false>(to.state, e, a, b); }
  static INLINE void write(const Checkpoint& to, int e, vf a, vf b, const Stochastic&, vu ra, vu rb) {
    F::store2((typename F::T*)to.state + e, a, b, ra, rb);
  }
};

// An fp32 checkpoint in two 16-bit planes: bits = (hi << 16) + lo, hi rounded to nearest, ties away from zero. The low 16 bits
// of a number *are* its lo; a NaN becomes hi = 0x7fc0 | sign, lo = 0, since rounding could carry it into the sign.
template <int elements>
struct TwoPlanes {
  static constexpr bool split = true;
  static constexpr bool skips = true;  // a step reads one plane of every head and skips the other
  static constexpr bool scaled = false;
  static constexpr float read_unit = 1.0f;
  static constexpr int read_bytes = 2;
  static constexpr int plane_bytes = 2;
  static constexpr int whole_bytes = 4;
  static INLINE void read(const char* at, int e, vf& even, vf& odd) { bf16::load2((const uint16_t*)at + e, even, odd); }
  static INLINE void whole(const char* at, int e, float, vf& even, vf& odd) {
    vu hi = load_as<vu>(at + 2 * e);
    vi lo = load_as<vi>(at + 2 * elements + 2 * e);
    KEEP(hi);
    KEEP(lo);
    even = as_float((hi << 16) + (vu)((lo << 16) >> 16));
    odd = as_float((hi & 0xffff0000u) + (vu)(lo >> 16));
  }
  static INLINE void prefetch(const char* at, int e, int count) {
    ::prefetch(at + 2 * e, 2 * count);
    ::prefetch(at + 2 * elements + 2 * e, 2 * count);
  }
  static INLINE vu canonical(vf v) {
    const vu bits = as_bits(v);
    return select((vi)((bits & 0x7fffffffu) > 0x7f800000u), (bits & 0x80000000u) | 0x7fc00000u, bits);
  }
  template <bool FINITE>
  static INLINE void write(char* at, int e, vf even, vf odd) {
    const vu a = FINITE ? as_bits(even) : canonical(even), b = FINITE ? as_bits(odd) : canonical(odd);
    store_as(at + 2 * e, ((a + 0x8000u) >> 16) | ((b + 0x8000u) & 0xffff0000u));
    store_as(at + 2 * elements + 2 * e, (a & 0xffffu) | (b << 16));
  }
  static INLINE void write(const Checkpoint& to, int e, vf a, vf b, const Nearest&, vu, vu) { write<false>(to.state, e, a, b); }
};

// One 8-bit plane with a scale a row. Numbers come from `read` as multiples of read_unit scales.
template <class F, int elements>
struct ScaledPlane {
  static constexpr bool split = false;
  static constexpr bool skips = false;
  static constexpr bool scaled = true;
  static constexpr int read_bytes = 1;
  static constexpr int plane_bytes = 1;
  static constexpr int whole_bytes = 1;
  static constexpr float LARGEST = F::LARGEST;
  static constexpr float read_unit = 1.0f;
  static INLINE void read(const char* at, int e, vf& a, vf& b) { F::load2((const typename F::T*)at + e, a, b); }
  static INLINE void whole(const char* at, int e, float scale, vf& a, vf& b) { read(at, e, a, b), a *= scale, b *= scale; }
  static INLINE void prefetch(const char* at, int e, int count) { ::prefetch(at + e, count); }
  template <class Rounding>
  static INLINE void write(const Checkpoint& to, int e, float inverse, vf a, vf b, const Rounding& rounding, vu ra, vu rb) {
    F::store2((typename F::T*)to.state + e, multiple(a, inverse), multiple(b, inverse), rounding, ra, rb);
  }
};

// A checkpoint of 16-bit multiples of a row's scale in two planes: q = 256 hi + lo, hi the nearest, of two the greater. The low 8
// bits of a number are its lo. LARGEST keeps hi within 8 bits.
template <int elements>
struct ScaledPlanes {
  static constexpr bool split = false;
  static constexpr bool skips = true;
  static constexpr bool scaled = true;
  static constexpr int read_bytes = 1;
  static constexpr int plane_bytes = 1;
  static constexpr int whole_bytes = 2;
  static constexpr float LARGEST = 32639.0f;
  static constexpr float read_unit = 256.0f;
  static INLINE void read(const char* at, int e, vf& a, vf& b) { int8::load2((const int8_t*)at + e, a, b); }
  static INLINE vf join(const char* at, int e) {
    const vi hi = from_bytes(load_as<vb>(at + e)), lo = from_bytes(load_as<vb>(at + elements + e));
    return __builtin_convertvector(hi * 256 + lo, vf);
  }
  static INLINE void whole(const char* at, int e, float scale, vf& a, vf& b) { a = join(at, e) * scale, b = join(at, e + VW) * scale; }
  static INLINE void prefetch(const char* at, int e, int count) { ::prefetch(at + e, count), ::prefetch(at + elements + e, count); }
  static INLINE void store(char* at, int e, vf x) {
    x = min(max(x, splat(-LARGEST)), splat(LARGEST));
    const vi q = __builtin_convertvector(x, vi);
    store_as(at + e, to_bytes((q + 128) >> 8));
    store_as(at + elements + e, to_bytes(q));
  }
  template <class Rounding>
  static INLINE void write(const Checkpoint& to, int e, float inverse, vf a, vf b, const Rounding&, vu ra, vu rb) {
    store(to.state, e, Rounding::integer(multiple(a, inverse), ra)), store(to.state, e + VW, Rounding::integer(multiple(b, inverse), rb));
  }
};

// An fp32 checkpoint, and an 8-bit copy for reading with a scale a row.
template <class F, int elements>
struct ReadCopy {
  static constexpr bool split = false;
  static constexpr bool skips = false;
  static constexpr bool scaled = true;
  static constexpr int read_bytes = 1;
  static constexpr int plane_bytes = 4;
  static constexpr int whole_bytes = 4;
  static constexpr float LARGEST = F::LARGEST;
  static constexpr float read_unit = 1.0f;
  static INLINE void read(const char* at, int e, vf& a, vf& b) { F::load2((const typename F::T*)at + e, a, b); }
  static INLINE void whole(const char* at, int e, float, vf& a, vf& b) { fp32::load2((const float*)at + e, a, b); }
  static INLINE void prefetch(const char* at, int e, int count) { ::prefetch(at + 4 * e, 4 * count); }
  template <class Rounding>
  static INLINE void write(const Checkpoint& to, int e, float inverse, vf a, vf b, const Rounding& rounding, vu ra, vu rb) {
    fp32::store2((float*)to.state + e, a, b);
    F::store2((typename F::T*)to.read + e, multiple(a, inverse), multiple(b, inverse), rounding, ra, rb);
  }
};

// One row of N numbers to the checkpoint.
template <class State, int N, class Rounding>
INLINE void write_row(const Checkpoint& to, int row, const float* from, const Rounding& rounding) {
  float inverse = 1.0f;
  if constexpr (State::scaled) {
    vu largest = {};
    for (int n = 0; n < N; n += VW) {
      const vu magnitude = as_bits(load(from + n)) & 0x7fffffffu;
      largest = select((vi)(magnitude > largest), magnitude, largest);
    }
    const RowScale scale = row_scale(largest, State::LARGEST);
    to.scale[row] = scale.scale;
    inverse = scale.inverse;
  }
  for (int n = 0; n < N; n += 2 * VW) {
    const vf a = load(from + n), b = load(from + n + VW);
    vu ra = {}, rb = {};
    rounding.template draw<State::split>(n, ra, rb);
    if constexpr (State::scaled)
      State::write(to, row * N + n, inverse, a, b, rounding, ra, rb);
    else
      State::write(to, row * N + n, a, b, rounding, ra, rb);
  }
}

// 2 VW numbers of format F, or `count` of them, as fp32 in the order in which `State` yields its columns.
template <class State, class F>
INLINE void columns2(const typename F::T* src, vf& a, vf& b) {
  F::load2(src, a, b);
  if (State::split && !F::split) deinterleave(a, b);
  if (!State::split && F::split) interleave(a, b);
}
template <class State, class F>
INLINE void columns(const typename F::T* src, float* dst, int count) {
  for (int n = 0; n < count; n += 2 * VW) {
    vf a, b;
    columns2<State, F>(src + n, a, b);
    store(dst + n, a), store(dst + n + VW, b);
  }
}
