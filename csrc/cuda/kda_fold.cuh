// Kimi Delta Attention: columns and factors of a fold, and what a step shares of it.

// Neighbouring key channels of a lane where a warp has all of them, as they lie in memory.
constexpr int CHANNELS = N / 32;
template <typename T>
struct Channels {
  static constexpr int PER_WORD = 4 / int(sizeof(T)), WORDS = CHANNELS / PER_WORD;
  u32 word[WORDS];

  __device__ float operator[](int c) const {
    if constexpr (sizeof(T) == 4)
      return __uint_as_float(word[c]);
    else
      return to_float(T{u16(word[c / 2] >> c % 2 * 16)});
  }
  __device__ void load(const T* at, bool aligned = true) {
    if (aligned)
      load_words(word, at);
    else
#pragma unroll
      for (int i = 0; i < WORDS; ++i) {
        if constexpr (sizeof(T) == 4)
          word[i] = __float_as_uint(at[i]);
        else
          word[i] = at[2 * i].bits | u32(at[2 * i + 1].bits) << 16;
      }
  }
  __device__ void store(T* at) const { store_global(at, word); }
};

// The same of a row of SplitRows<rows, N_TERMS>.
template <int N_TERMS>
__device__ __forceinline__ void put_channels(bf16* at, int rows, const float (&value)[CHANNELS]) {
  u32 word[N_TERMS][CHANNELS / 2];
#pragma unroll
  for (int i = 0; i < CHANNELS / 2; ++i) {
    u32 terms[N_TERMS];
    split(value[2 * i], value[2 * i + 1], terms);
#pragma unroll
    for (int n = 0; n < N_TERMS; ++n) word[n][i] = terms[n];
  }
#pragma unroll
  for (int n = 0; n < N_TERMS; ++n) store_words(at + n * rows * SPLIT_PITCH, word[n]);
}
template <int N_TERMS>
__device__ __forceinline__ void get_channels(float (&value)[CHANNELS], const bf16* at, int rows) {
#pragma unroll
  for (int n = N_TERMS - 1; n >= 0; --n) {
    u32 word[CHANNELS / 2];
    load_words(word, at + n * rows * SPLIT_PITCH);
#pragma unroll
    for (int i = 0; i < CHANNELS / 2; ++i) {
      value[2 * i] = low_bf16(word[i]) + (n < N_TERMS - 1 ? value[2 * i] : 0.f);
      value[2 * i + 1] = high_bf16(word[i]) + (n < N_TERMS - 1 ? value[2 * i + 1] : 0.f);
    }
  }
}

// Two neighbouring elements of a row of SplitRows<rows, N_TERMS>.
template <int N_TERMS>
__device__ __forceinline__ void put_split(bf16* at, int rows, float low, float high) {
  u32 terms[N_TERMS];
  split(low, high, terms);
#pragma unroll
  for (int n = 0; n < N_TERMS; ++n) *reinterpret_cast<u32*>(at + n * rows * SPLIT_PITCH) = terms[n];
}

// Keys of the fold: short histories are split once, for all warps; long ones are kept as floats, which take less room, and split as
// they are read.
struct SplitKeys {
  using Rows = SplitRows<BUFFER_LEN, 3>;
  bf16 at[3 * BUFFER_LEN * SPLIT_PITCH];
  __device__ void put(int entry, int channel, float low, float high) {
    put_split<3>(at + entry * SPLIT_PITCH + channel, BUFFER_LEN, low, high);
  }
};
struct FloatKeys {
  using Rows = FloatRows;
  float at[BUFFER_LEN * FLOAT_PITCH];
  __device__ void put(int entry, int channel, float low, float high) {
    *reinterpret_cast<float2*>(at + entry * FLOAT_PITCH + channel) = {low, high};
  }
};
template <bool SHORT>
struct ShortKeys {
  using type = SplitKeys;
};
template <>
struct ShortKeys<false> {
  using type = FloatKeys;
};
using BackKeys = ShortKeys<(BUFFER_LEN <= 32)>::type;
struct FoldColumns {
  FloatKeys front;  // k_j decayed from the checkpoint on
  BackKeys back;    // k_j decayed to the history's end
};

struct alignas(16) FoldShared {
  FoldColumns columns;
  Act keys[BUFFER_LEN * PITCH];
  FoldFactors factors;
  float decay[N];  // of the checkpoint
  float key_norm[BUFFER_LEN];
};

// A thread serves two neighbouring key channels; where they are few, several groups of threads share the work on each.
constexpr int GROUPS = 2 * WARPS * 32 / N;
static_assert(GROUPS * (N / 2) == WARPS * 32, "every thread has its channels");

__device__ __forceinline__ float2 load_pair(const Act* at) {
  if constexpr (sizeof(Act) == 4) return *reinterpret_cast<const float2*>(at);
  const u32 pair = *reinterpret_cast<const u32*>(at);
  if constexpr (ACT_TERMS == 1) return {low_bf16(pair), high_bf16(pair)};
  return {low_fp16(pair), high_fp16(pair)};
}

// Calls use(entry, log decays) for a history from the newest entry to the oldest, or the other way round.
template <bool BACKWARDS, typename Use>
__device__ __forceinline__ void each_gate(const float* ring, const History& row, int channel, const Use& use) {
  constexpr int BATCH = 8;  // loads in flight
#pragma unroll 1
  for (int first = 0; first < row.history; first += BATCH) {
    float2 g[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (first + i < row.history)
        g[i] = *reinterpret_cast<const float2*>(ring + row.place(BACKWARDS ? row.history - 1 - first - i : first + i) * N + channel);
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (first + i < row.history) use(BACKWARDS ? row.history - 1 - first - i : first + i, g[i]);
  }
}

// Factors and columns of a fold of one head, by the whole block; `layer` has the rings.
template <typename Layer>
__device__ __forceinline__ void make_fold_factors(const History& row, const Layer& layer, int head, FoldShared& shared, int lane,
                                                  int warp) {
  const int thread = warp * 32 + lane;
  const i64 first_key = head / HEADS_PER_GROUP * i64(RING_LEN), first = head * i64(RING_LEN);  // entries
  const Act* ring_k = static_cast<const Act*>(layer.ring_k) + row.slot * layer.ring_k_slot + first_key * N;
  const float* ring_k_norm = static_cast<const float*>(layer.ring_k_norm) + row.slot * layer.ring_k_norm_slot + first_key;
  const float* ring_g = static_cast<const float*>(layer.ring_g) + row.slot * layer.ring_g_slot + first * N;
  const float* ring_beta = static_cast<const float*>(layer.ring_beta) + row.slot * layer.ring_beta_slot + first;
  stage_rows<N>(shared.keys, PITCH, row.history, true, thread, [&](int entry) { return ring_k + row.place(entry) * N; });
  for (int j = thread; j < row.history; j += WARPS * 32) shared.key_norm[j] = ring_k_norm[row.place(j)];
  copy_wait();
  __syncthreads();
  const int channel = thread % (N / 2) * 2;
  for (int part = thread / (N / 2); part < 2; part += GROUPS) {
    float2 sum = {0.f, 0.f};
    auto scaled = [&](auto& to, int entry) {
      const float2 key = load_pair(shared.keys + entry * PITCH + channel);
      to.put(entry, channel, key.x * expf(sum.x), key.y * expf(sum.y));
    };
    if (part == 0) {
      each_gate<false>(ring_g, row, channel, [&](int entry, float2 g) {
        sum.x += g.x, sum.y += g.y;
        scaled(shared.columns.front, entry);
      });
    } else {
      each_gate<true>(ring_g, row, channel, [&](int entry, float2 g) {
        scaled(shared.columns.back, entry);
        sum.x += g.x, sum.y += g.y;
      });
      shared.decay[channel] = expf(sum.x), shared.decay[channel + 1] = expf(sum.y);
    }
  }
  FoldFactors& fold = shared.factors;
  for (int j = thread; j < FOLD_BLOCK; j += WARPS * 32) {
    const bool used = j < row.history;
    fold.lead[j] = used ? -shared.key_norm[j] : 0.f, fold.last[j] = used ? shared.key_norm[j] : 0.f;
    fold.beta[j] = used ? ring_beta[row.place(j)] : 0.f;
  }
  // Pairs: a warp takes some sources through the targets after them, so that they share the targets' decays. Their products keep the
  // accuracy of the recurrence, which multiplies by the same.
  constexpr int SOURCES = 4;
  for (int first = warp; first < row.history; first += SOURCES * WARPS) {
    float weight[SOURCES][CHANNELS];
#pragma unroll
    for (int s = 0; s < SOURCES; ++s) {
      const int source = min(first + s * WARPS, row.history - 1);
#pragma unroll
      for (int n = 0; n < CHANNELS; ++n) weight[s][n] = to_float(shared.keys[source * PITCH + n * 32 + lane]) * shared.key_norm[source];
    }
    for (int target = first + 1; target < row.history; ++target) {
      float decay[CHANNELS], key[CHANNELS];
#pragma unroll
      for (int n = 0; n < CHANNELS; ++n) {
        decay[n] = expf(ring_g[row.place(target) * N + n * 32 + lane]);
        key[n] = to_float(shared.keys[target * PITCH + n * 32 + lane]) * shared.key_norm[target];
      }
#pragma unroll
      for (int s = 0; s < SOURCES; ++s) {
        const int source = first + s * WARPS;
        if (source >= target) break;
        float dot = 0.f;
#pragma unroll
        for (int n = 0; n < CHANNELS; ++n) weight[s][n] *= decay[n], dot = fmaf(weight[s][n], key[n], dot);
        dot = warp_sum(dot);
        if (lane == 0) fold.solve[0][target][source] = dot;
      }
    }
  }
  __syncthreads();
  if (warp == 0) invert(fold, 0, row.history, lane);
  __syncthreads();
}
