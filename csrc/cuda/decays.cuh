// Decays of new tokens, and exponentials that outputs can do with.

// Sum of the values of new tokens 0 .. lane, a lane each; of a tree, of those on the lane's path.
__device__ __forceinline__ float sum_to_token(const Params& p, const Row& row, float value, int lane) {
  if constexpr (TREE) return over_path(value, load_parent(p, row, lane), [](float a, float b) { return a + b; });
#pragma unroll
  for (int step = 1; step < MAX_TOKENS; step *= 2) {
    const float other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// 2^x for what is rounded to the activations' precision afterwards; a fold needs expf.
constexpr float LOG2_E = 1.44269504f;
__device__ __forceinline__ float step_exp2(float x) {
  if constexpr (ACT_TERMS == 3) return exp2f(x);
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}
