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
};

// ---- checkpoints -------------------------------------------------------------------------------------------------------
// `head` is the block of one (slot, head), `e` the element's offset in it, a multiple of 2 VW.

template <class F, int elements>
struct OnePlane {
  static constexpr bool split = F::split;
  static constexpr bool skips = false;
  static constexpr int read_bytes = sizeof(typename F::T);   // an element of the read plane
  static constexpr int whole_bytes = sizeof(typename F::T);  // an element of the checkpoint
  static INLINE void read(const char* head, int e, vf& a, vf& b) { F::load2((const typename F::T*)head + e, a, b); }
  static INLINE void whole(const char* head, int e, vf& a, vf& b) { read(head, e, a, b); }
  static INLINE void prefetch(const char* head, int e, int count) { ::prefetch(head + e * whole_bytes, count * whole_bytes); }
  template <bool FINITE>
  static INLINE void write(char* head, int e, vf a, vf b) {
    F::store2((typename F::T*)head + e, a, b);
  }
};

// An fp32 checkpoint in two 16-bit planes: bits = (hi << 16) + lo, hi rounded to nearest, ties away from zero. The low 16 bits
// of a number *are* its lo; a NaN becomes hi = 0x7fc0 | sign, lo = 0, since rounding could carry it into the sign.
template <int elements>
struct TwoPlanes {
  static constexpr bool split = true;
  static constexpr bool skips = true;  // a step reads one plane of every head and skips the other
  static constexpr int read_bytes = 2;
  static constexpr int whole_bytes = 4;
  static INLINE void read(const char* head, int e, vf& even, vf& odd) { bf16::load2((const uint16_t*)head + e, even, odd); }
  static INLINE void whole(const char* head, int e, vf& even, vf& odd) {
    vu hi = load_as<vu>(head + 2 * e);
    vi lo = load_as<vi>(head + 2 * elements + 2 * e);
    KEEP(hi);
    KEEP(lo);
    even = as_float((hi << 16) + (vu)((lo << 16) >> 16));
    odd = as_float((hi & 0xffff0000u) + (vu)(lo >> 16));
  }
  static INLINE void prefetch(const char* head, int e, int count) {
    ::prefetch(head + 2 * e, 2 * count);
    ::prefetch(head + 2 * elements + 2 * e, 2 * count);
  }
  static INLINE vu canonical(vf v) {
    const vu bits = as_bits(v);
    return select((vi)((bits & 0x7fffffffu) > 0x7f800000u), (bits & 0x80000000u) | 0x7fc00000u, bits);
  }
  template <bool FINITE>
  static INLINE void write(char* head, int e, vf even, vf odd) {
    const vu a = FINITE ? as_bits(even) : canonical(even), b = FINITE ? as_bits(odd) : canonical(odd);
    store_as(head + 2 * e, ((a + 0x8000u) >> 16) | ((b + 0x8000u) & 0xffff0000u));
    store_as(head + 2 * elements + 2 * e, (a & 0xffffu) | (b << 16));
  }
};

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
