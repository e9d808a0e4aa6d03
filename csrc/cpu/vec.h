// Vectors of the CPU backend: GCC/Clang vector extensions, as wide as the target's registers, intrinsics only where a
// conversion is one instruction that compilers do not find.
//
// Everything that reduces does so in one fixed order for a given width, so a row's bits never depend on the batch or on the
// number of threads.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, vi{__VA_ARGS__})
#endif

// Keeps a value that was loaded once in its register; compilers like to load it again at every use, and loads are what is short.
#if defined(__AVX512F__)
#define KEEP(v) asm("" : "+v"(v))
#elif defined(__AVX__)
#define KEEP(v) asm("" : "+x"(v))
#else
#define KEEP(v)
#endif

#define INLINE inline __attribute__((always_inline))
#define KERNEL static __attribute__((noinline))  // loops that want all registers for themselves
#define INLINE_LAMBDA __attribute__((always_inline))

constexpr int VW = VECTOR_BYTES / 4;  // fp32 lanes of a vector
constexpr int QUAD = 4;               // vectors that are summed together
constexpr int RUN = VW / QUAD;        // quads of VW vectors

constexpr int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

typedef float vf __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t vi __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t vu __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t vh __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef int8_t vb __attribute__((vector_size(VECTOR_BYTES / 4)));

// Loads and stores go through memcpy: any alignment, no aliasing assumption, one instruction.
template <class V>
INLINE V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
INLINE void store_as(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
INLINE vf load(const float* p) { return load_as<vf>(p); }
INLINE void store(float* p, vf v) { store_as(p, v); }
INLINE vf splat(float x) { return x - vf{}; }
INLINE vu as_bits(vf v) { return (vu)v; }
INLINE vf as_float(vu v) { return (vf)v; }
INLINE vf select(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vu select(vi mask, vu yes, vu no) { return ((vu)mask & yes) | (~(vu)mask & no); }
// The second one if either is NaN.
INLINE vf max(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return a > b ? a : b;
#endif
}
INLINE vf min(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#else
  return a < b ? a : b;
#endif
}

INLINE bool all_zero(vf v) {
  const vi nonzero = v != vf{};  // NaN counts
  uint64_t words[sizeof(vi) / 8], any = 0;
  std::memcpy(words, &nonzero, sizeof nonzero);
  for (uint64_t word : words) any |= word;
  return any == 0;
}

// Asks for `bytes` from p on to be brought near, into the second cache: the first one's few pending misses are for what is read now.
// It stays in its place between loads; compilers would gather prefetches, and a burst of them holds up the loads behind it.
INLINE void prefetch(const char* p, int bytes) {
  UNROLL for (int i = 0; i < bytes; i += 64) {
#if defined(__x86_64__)
    asm volatile("prefetcht1 %0" : : "m"(p[i]) : "memory");
#else
    __builtin_prefetch(p + i, 0, 2);
#endif
  }
}

// 16-bit numbers to 32-bit ones, and the low halves back.
INLINE vu widen(vh h) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, vu);
#endif
}
INLINE vh narrow(vu v) {
#if defined(__AVX512F__)
  return (vh)_mm512_cvtepi32_epi16((__m512i)v);
#else
  return __builtin_convertvector(v, vh);
#endif
}

// Signed bytes to 32-bit numbers, and the low bytes back.
INLINE vi from_bytes(vb b) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32((__m128i)b);
#else
  return __builtin_convertvector(b, vi);
#endif
}
INLINE vb to_bytes(vi v) {
#if defined(__AVX512F__)
  return (vb)_mm512_cvtepi32_epi8((__m512i)v);
#else
  return __builtin_convertvector(v, vb);
#endif
}

template <int... I>
struct Lanes {};
template <int K, int... I>
struct LanesTo : LanesTo<K - 1, K - 1, I...> {};
template <int... I>
struct LanesTo<0, I...> {
  typedef Lanes<I...> type;
};
typedef typename LanesTo<VW>::type AllLanes;

// A vector from QUAD runs of RUN numbers, `apart` numbers from one to the next, and back; 1 apart means VW neighbours.
#if defined(__clang__) || __GNUC__ >= 12
template <class V, int... I>
INLINE auto join(V a, V b, Lanes<I...>) {
  return SHUFFLE(a, b, I...);
}
template <class V, class T>
INLINE V load_runs(const T* p, int apart) {
  if (apart == 1) return load_as<V>(p);
  typedef T run __attribute__((vector_size(RUN * sizeof(T))));
  typedef typename LanesTo<2 * RUN>::type Half;
  const auto low = join(load_as<run>(p), load_as<run>(p + apart), Half());
  const auto high = join(load_as<run>(p + 2 * apart), load_as<run>(p + 3 * apart), Half());
  return join(low, high, AllLanes());
}
#else
template <class V, class T>
INLINE V load_runs(const T* p, int apart) {
  V v = {};
  UNROLL for (int i = 0; i < VW; i++) v[i] = p[apart == 1 ? i : i / RUN * apart + i % RUN];
  return v;
}
#endif
INLINE void store_runs(float* p, int apart, vf v) {
  if (apart == 1) return store(p, v);
  UNROLL for (int k = 0; k < QUAD; k++) {
    float run[RUN];
    UNROLL for (int r = 0; r < RUN; r++) run[r] = v[k * RUN + r];
    std::memcpy(p + k * apart, run, sizeof run);
  }
}

// Even and odd elements of 2 VW consecutive ones, and back.
template <int... I>
INLINE void deinterleave(vf a, vf b, vf& even, vf& odd, Lanes<I...>) {
  even = SHUFFLE(a, b, (2 * I)...);
  odd = SHUFFLE(a, b, (2 * I + 1)...);
}
INLINE void deinterleave(vf& a, vf& b) {
  vf even, odd;
  deinterleave(a, b, even, odd, AllLanes());
  a = even, b = odd;
}
template <int... I>
INLINE void interleave(vf even, vf odd, vf& a, vf& b, Lanes<I...>) {
  a = SHUFFLE(even, odd, ((I & 1) ? VW + I / 2 : I / 2)...);
  b = SHUFFLE(even, odd, (VW / 2 + ((I & 1) ? VW + I / 2 : I / 2))...);
}
INLINE void interleave(vf& even, vf& odd) {
  vf a, b;
  interleave(even, odd, a, b, AllLanes());
  even = a, odd = b;
}

// Rows to columns, VW by VW: one level swaps bit S of a row's number with bit S of the lane's.
template <int S, int... I>
INLINE void transpose_level(vf* v, Lanes<I...>) {
  UNROLL for (int i = 0; i < VW; i++) if (!(i & S)) {
    const vf a = v[i], b = v[i + S];
    v[i] = SHUFFLE(a, b, ((I & S) ? VW + (I ^ S) : I)...);
    v[i + S] = SHUFFLE(a, b, ((I & S) ? VW + I : (I ^ S))...);
  }
}
INLINE void transpose(vf* v) {
  if constexpr (VW >= 16) transpose_level<8>(v, AllLanes());
  if constexpr (VW >= 8) transpose_level<4>(v, AllLanes());
  transpose_level<2>(v, AllLanes());
  transpose_level<1>(v, AllLanes());
}

// One level of the sum below: lanes whose bit S is clear get a[i] + a[i ^ S], the others b[i] + b[i ^ S].
template <int S, int... I>
INLINE vf fold_lanes(vf a, vf b, Lanes<I...>) {
  return SHUFFLE(a, b, ((I & S) ? VW + I : I)...) + SHUFFLE(a, b, ((I & S) ? VW + (I ^ S) : (I ^ S))...);
}

// Sum of a vector's lanes.
INLINE float sum(vf v) {
  v = fold_lanes<1>(v, v, AllLanes());
  v = fold_lanes<2>(v, v, AllLanes());
  if constexpr (VW >= 8) v = fold_lanes<4>(v, v, AllLanes());
  if constexpr (VW >= 16) v = fold_lanes<8>(v, v, AllLanes());
  return v[0];
}

// Sums of VW vectors: first those of a quad each, then of the RUN vectors (at v, VW floats each) that this gave. Lane i of the end is the
// sum of vector i; the quads are (0, 1, 2, 3), (4, ...) and so on where APART is 1, and (0, RUN, 2 RUN, 3 RUN), (1, ...) where it is RUN.
template <int APART>
INLINE vf sum_quad(vf a, vf b, vf c, vf d) {
  return fold_lanes<2 * APART>(fold_lanes<APART>(a, b, AllLanes()), fold_lanes<APART>(c, d, AllLanes()), AllLanes());
}
template <int APART>
INLINE vf sum_quads(const float* v) {
  constexpr int STEP = APART == 1 ? QUAD : 1;
  if constexpr (RUN == 4)
    return fold_lanes<2 * STEP>(fold_lanes<STEP>(load(v), load(v + VW), AllLanes()),
                                fold_lanes<STEP>(load(v + 2 * VW), load(v + 3 * VW), AllLanes()), AllLanes());
  else if constexpr (RUN == 2)
    return fold_lanes<STEP>(load(v), load(v + VW), AllLanes());
  else
    return load(v);
}

INLINE vf sum_lanes(const float* v) {  // of VW vectors, VW floats each
  alignas(64) float quads[RUN * VW];
  UNROLL for (int i = 0; i < VW; i += QUAD)
      store(quads + i / QUAD * VW, sum_quad<1>(load(v + i * VW), load(v + (i + 1) * VW), load(v + (i + 2) * VW), load(v + (i + 3) * VW)));
  return sum_quads<1>(quads);
}

// q 2^n for whole n; denormal and then zero below the normal range.
INLINE vf scale_by_power(vf q, vf n) {
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)q, (__m512)n);
#else
  const vi whole = __builtin_convertvector(n, vi);
  const vi half = whole >> 1;  // in two factors, so that both are normal numbers
  return q * (vf)((half + 127) << 23) * (vf)((whole - half + 127) << 23);
#endif
}

// e^x to about one ulp for every x.
INLINE vf exp(vf x) {
  x = max(splat(-104.0f), min(splat(89.0f), x));  // in this order a NaN stays
  const vf round = splat(12582912.0f);            // 1.5 * 2^23: adding it rounds to the nearest integer
  const vf n = (x * 1.44269504088896341f + round) - round;
  vf r = x - n * 0.693145751953125f;  // ln 2 in two parts, the first exact times any n
  r = r - n * 1.42860682030941723212e-6f;
  vf q = r * 1.9875691500e-4f + 1.3981999507e-3f;
  q = q * r + 8.3334519073e-3f;
  q = q * r + 4.1665795894e-2f;
  q = q * r + 1.6666665459e-1f;
  q = q * r + 5.0000001201e-1f;
  q = q * (r * r) + r + 1.0f;
  return scale_by_power(q, n);
}

// log(1 + e^x), as torch computes it: x itself beyond 20. In two halves, so that a caller with many vectors can run each over all.
INLINE vf softplus_exp(vf x) { return exp(x > splat(0.0f) ? -x : x); }
INLINE vf softplus_rest(vf x, vf e) {
  const vf s = e / (e + 2.0f);  // log(1 + e) = 2 atanh(e / (2 + e)), s <= 1/3
  const vf s2 = s * s;
  vf q = s2 * (1.0f / 17) + (1.0f / 15);
  q = q * s2 + (1.0f / 13);
  q = q * s2 + (1.0f / 11);
  q = q * s2 + (1.0f / 9);
  q = q * s2 + (1.0f / 7);
  q = q * s2 + (1.0f / 5);
  q = q * s2 + (1.0f / 3);
  const vf s_twice = s + s;
  const vf log1p = q * s2 * s_twice + s_twice;
  return x > splat(20.0f) ? x : (x > vf{} ? x : vf{}) + log1p;
}
INLINE vf softplus(vf x) { return softplus_rest(x, softplus_exp(x)); }

INLINE vf sigmoid(vf x) { return 1.0f / (1.0f + exp(-x)); }
