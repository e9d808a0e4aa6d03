// Sums of log decays by one warp. Over the history they run backwards from its newest entry: differences of prefix sums would
// lose accuracy where gates are strong.

// each[j] = the history's entry j of `ring`, after[j] = the sum of the entries later than j; returns the sum of all.
__device__ __forceinline__ float sums_from_newest(const float* ring, const Row& row, float* each, float* after, int lane) {
  float later = 0.f;
#pragma unroll
  for (int segment = (BUFFER_LEN + 31) / 32 - 1; segment >= 0; --segment) {
    const int entry = segment * 32 + lane;
    const float value = entry < row.history ? ring[row.place(entry)] : 0.f;
    float sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_down_sync(~0u, sum, step);
      if (lane + step < 32) sum += other;
    }
    const float exclusive = __shfl_down_sync(~0u, sum, 1);
    if (entry < row.history) each[entry] = value, after[entry] = (lane < 31 ? exclusive : 0.f) + later;
    later += __shfl_sync(~0u, sum, 0);
  }
  return later;
}

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

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// e^x for what is rounded to the activations' precision afterwards; a fold needs expf.
__device__ __forceinline__ float step_exp(float x) {
  if constexpr (ACT_TERMS == 3) return expf(x);
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x * 1.44269504f));
  return out;
}
