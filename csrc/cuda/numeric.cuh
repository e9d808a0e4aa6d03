// Number formats and their conversions. No CUDA header is included anywhere: NVRTC alone compiles a module, in half the time.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef float fp32;

struct bf16 {
  u16 bits;
};
struct fp16 {
  u16 bits;
};

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(bf16 v) { return __uint_as_float(u32(v.bits) << 16); }
__device__ __forceinline__ float to_float(fp16 v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v.bits));
  return f;
}

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float v) {
  bf16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(v));
  return out;
}
template <>
__device__ __forceinline__ fp16 from_float<fp16>(float v) {
  fp16 out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(v));
  return out;
}

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 pack_fp16(float low, float high) {
  u32 out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}
__device__ __forceinline__ float low_fp16(u32 pair) { return to_float(fp16{u16(pair & 0xffff)}); }
__device__ __forceinline__ float high_fp16(u32 pair) { return to_float(fp16{u16(pair >> 16)}); }

// A pair of floats as a sum of TERMS bf16 pairs: one term keeps 8 bits of mantissa, two 16, three all 24.
template <int TERMS>
__device__ __forceinline__ void split(float low, float high, u32 (&out)[TERMS]) {
#pragma unroll
  for (int i = 0; i < TERMS; ++i) {
    out[i] = pack_bf16(low, high);
    low -= low_bf16(out[i]);
    high -= high_bf16(out[i]);
  }
}

// A pair of activations, as it lies in memory, as bf16 terms whose sum is exact: one for bf16, two for fp16, three for fp32.
template <typename Act>
struct Terms;
template <>
struct Terms<bf16> {
  static constexpr int COUNT = 1;
};
template <>
struct Terms<fp16> {
  static constexpr int COUNT = 2;
};
template <>
struct Terms<float> {
  static constexpr int COUNT = 3;
};

__device__ __forceinline__ float softplus(float v) { return v > 20.f ? v : log1pf(expf(v)); }
__device__ __forceinline__ float sigmoid(float v) { return 1.f / (1.f + expf(-v)); }
__device__ __forceinline__ float silu(float v) { return v * sigmoid(v); }

__device__ __forceinline__ int round_up(int value, int step) { return (value + step - 1) / step * step; }
