// The committed tokens of a slot that a kernel sees.
struct History {
  int slot;     // negative: padding
  int start;    // first entry of the history in the ring
  int history;  // committed tokens

  // Place in the ring of entry j: the history, then the new tokens.
  __device__ int place(int entry) const {
    int at = start + entry;
    return at < RING_LEN ? at : at - RING_LEN;
  }
};

// What a ring keeps of each entry as one float, by one warp; the newest entries come last. A load of its own, because whoever waits for it
// at once waits for memory twice.
constexpr int SEGMENTS = (BUFFER_LEN + 31) / 32;
__device__ __forceinline__ void load_history(float (&value)[SEGMENTS], const float* ring, const History& row, int lane) {
#pragma unroll
  for (int segment = 0; segment < SEGMENTS; ++segment) {
    const int entry = segment * 32 + lane;
    value[segment] = entry < row.history ? ring[row.place(entry)] : 0.f;
  }
}

// One of them, of an entry that each lane chooses; any number for an entry that there is not.
template <int COUNT>
__device__ __forceinline__ float history_value(const float (&value)[COUNT], int entry) {
  float chosen = __shfl_sync(~0u, value[0], entry & 31);
#pragma unroll
  for (int segment = 1; segment < COUNT; ++segment) {
    const float other = __shfl_sync(~0u, value[segment], entry & 31);
    if (entry / 32 == segment) chosen = other;
  }
  return chosen;
}

// Sum of the values, by one warp: keep(segment, after) for each a lane holds, with the sum of the entries later than it. Sums run backwards
// from the newest entry: differences of prefix sums would lose accuracy where gates are strong.
template <typename Keep>
__device__ __forceinline__ float sums_from_newest(const float (&value)[SEGMENTS], const Keep& keep, int lane) {
  float later = 0.f;
#pragma unroll
  for (int segment = SEGMENTS - 1; segment >= 0; --segment) {
    float sum = value[segment];
#pragma unroll
    for (int step = 1; step < (BUFFER_LEN < 32 ? BUFFER_LEN : 32); step *= 2) {
      const float other = __shfl_down_sync(~0u, sum, step);
      if (lane + step < 32) sum += other;
    }
    const float exclusive = __shfl_down_sync(~0u, sum, 1);
    keep(segment, (lane < 31 ? exclusive : 0.f) + later);
    later += __shfl_sync(~0u, sum, 0);
  }
  return later;
}

// Sums over all lanes of COUNT values, a power of two: a lane ends with that of value lane % COUNT. LEFT of them still stand apart.
template <int COUNT, int LEFT = COUNT>
__device__ __forceinline__ float warp_sums(const float (&value)[LEFT], int lane) {
  if constexpr (LEFT == 1) {
    float sum = value[0];
#pragma unroll
    for (int step = COUNT; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
  } else {
    constexpr int HALF = LEFT / 2;
    float half[HALF];
#pragma unroll
    for (int i = 0; i < HALF; ++i)
      half[i] = (lane & HALF ? value[HALF + i] : value[i]) + __shfl_xor_sync(~0u, lane & HALF ? value[i] : value[HALF + i], HALF);
    return warp_sums<COUNT, HALF>(half, lane);
  }
}
