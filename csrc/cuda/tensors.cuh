// Elements of plain tensors, whose dtype the host names: 1 fp32, 2 bf16, 3 fp16; 0 is none, which reads as zero.

__device__ __forceinline__ float read(const void* tensor, int dtype, i64 at) {
  if (dtype == 0) return 0.f;
  if (dtype == 1) return static_cast<const float*>(tensor)[at];
  if (dtype == 2) return to_float(static_cast<const bf16*>(tensor)[at]);
  return to_float(static_cast<const fp16*>(tensor)[at]);
}
__device__ __forceinline__ void write(void* tensor, int dtype, i64 at, float value) {
  if (dtype == 1) static_cast<float*>(tensor)[at] = value;
  if (dtype == 2) static_cast<bf16*>(tensor)[at] = from_float<bf16>(value);
  if (dtype == 3) static_cast<fp16*>(tensor)[at] = from_float<fp16>(value);
}
