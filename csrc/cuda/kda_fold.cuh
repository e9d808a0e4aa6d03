// Kimi Delta Attention: columns and factors of a fold, and what a step shares of it.

// A lane's neighbouring key channels, as they lie in memory.
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

// Keys of the fold: those of short histories are split once, for all warps, or become bytes where the checkpoint has integers to be
// multiplied with them; those of long ones are kept as floats, which take less room, and split as they are read.
struct SplitKeys {
  using Rows = TurnedSplitRows<BUFFER_LEN>;
  bf16 at[Rows::TERMS * BUFFER_LEN * SPLIT_PITCH];
  __device__ Rows rows() const { return {at}; }
  __device__ void put(int entry, int channel, const float (&value)[CHANNELS]) {
#pragma unroll
    for (int i = 0; i < CHANNELS; i += 2) {
      u32 terms[Rows::TERMS];
      split(value[i], value[i + 1], terms);
#pragma unroll
      for (int n = 0; n < Rows::TERMS; ++n)
        *reinterpret_cast<u32*>(at + (n * BUFFER_LEN + entry) * SPLIT_PITCH + turned(channel + i)) = terms[n];
    }
  }
};
struct ByteKeys : ByteColumns<BUFFER_LEN, false> {
  uint4 largest[BUFFER_LEN];  // of every warp's channels
  __device__ ByteRows rows() const { return {this}; }
  // A key, eight lanes of every warp have it: a barrier after the first half, because its bytes depend on all of it.
  __device__ void begin_put(int entry, int channel, const float (&value)[CHANNELS], bool used) {
    u32 most = largest_of(value);
#pragma unroll
    for (int step = 1; step < 8; step *= 2) most = max(most, __shfl_xor_sync(~0u, most, step));
    if (used && channel / CHANNELS % 8 == 0) reinterpret_cast<u32*>(&largest[entry])[channel / (CHANNELS * 8)] = most;
  }
  __device__ void end_put(int entry, int channel, const float (&value)[CHANNELS]) {
    const uint4 most = largest[entry];
    put(entry, channel, value, max(max(most.x, most.y), max(most.z, most.w)));
  }
};
struct FloatKeys {
  float at[BUFFER_LEN * FLOAT_PITCH];
  __device__ FloatRows rows() const { return {at}; }
  __device__ void put(int entry, int channel, const float (&value)[CHANNELS]) { store_floats(at + entry * FLOAT_PITCH + channel, value); }
  __device__ void begin_put(int entry, int channel, const float (&value)[CHANNELS], bool used) {
    if (used) put(entry, channel, value);
  }
  __device__ void end_put(int, int, const float (&)[CHANNELS]) {}
};
template <bool, typename Keys>
struct Either {
  using type = Keys;
};
template <typename Keys>
struct Either<false, Keys> {
  using type = FloatKeys;
};
constexpr bool SHORT = BUFFER_LEN <= 32;
using FrontKeys = Either<SHORT && Whole::INTEGERS, ByteKeys>::type;
using BackKeys = Either<SHORT, SplitKeys>::type;

// Decays over several entries are products of those between: nothing is exponentiated twice, and the accuracy is that of the recurrence,
// which multiplies by the same. A warp has some channels of all entries: in a round of sixteen, eight lanes have a link of the chain, four
// entries that follow each other.
constexpr int LINK = 4, ROUND = 16, ROUNDS = (BUFFER_LEN + ROUND - 1) / ROUND;  // entries
constexpr bool BACK_STAYS = BUFFER_LEN <= 32;                                   // in registers, until it is split
struct alignas(16) FoldShared {
  FrontKeys front;  // k_j decayed from the checkpoint on
  union {
    float sources[ROUNDS * ROUND * FLOAT_PITCH];  // k_j decayed to the end of the last round; of a round, what links take from each other
    BackKeys back;                                // to the history's end, later
  };
  union {
    float4 partial[ROUNDS > 1 ? 2 : 1][WARPS][32];  // products of keys, over a warp's channels
    UnitValues values[WARPS];                       // later
  };
  float decay[N];  // of the checkpoint
  FoldFactors factors;
};

// Sums over eight neighbouring lanes: lane r of them ends with those of values 4 r .. 4 r + 3. COUNT of them still stand apart.
template <int COUNT>
__device__ __forceinline__ float4 link_sums(const float (&value)[COUNT], int lane) {
  if constexpr (COUNT == 4) {
    return {value[0], value[1], value[2], value[3]};
  } else {
    constexpr int HALF = COUNT / 2, BIT = COUNT / 8;
    float half[HALF];
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
      const float low = value[i], high = value[HALF + i];
      half[i] = (lane & BIT ? high : low) + __shfl_xor_sync(~0u, lane & BIT ? low : high, BIT);
    }
    return link_sums(half, lane);
  }
}

// Factors and columns of a fold of one head, by the whole block; `layer` has the rings. All warps do `ask()` while they wait for those, and the
// last one `meanwhile()` while the first one solves alone.
template <typename Layer, typename Ask, typename Meanwhile>
__device__ __forceinline__ void make_fold_factors(const History& row, const Layer& layer, int head, FoldShared& shared, int lane, int warp,
                                                  const Ask& ask, const Meanwhile& meanwhile) {
  const int link = u32(lane) / 8, channel = (warp * 8 + u32(lane) % 8) * CHANNELS, h = row.history;
  const i64 first_key = head / HEADS_PER_GROUP * i64(RING_LEN), first = head * i64(RING_LEN);  // entries
  const Act* ring_k = opaque(static_cast<const Act*>(layer.ring_k) + row.slot * layer.ring_k_slot + first_key * N + channel);
  const float* ring_k_norm = static_cast<const float*>(layer.ring_k_norm) + row.slot * layer.ring_k_norm_slot + first_key;
  const float* ring_g = opaque(static_cast<const float*>(layer.ring_g) + row.slot * layer.ring_g_slot + first * N + channel);
  const float* ring_beta = static_cast<const float*>(layer.ring_beta) + row.slot * layer.ring_beta_slot + first;

  FoldFactors& fold = shared.factors;
  float* sources = shared.sources + channel;
  float before[CHANNELS], back[ROUNDS][LINK][CHANNELS] = {};  // of the newest rounds last
#pragma unroll
  for (int c = 0; c < CHANNELS; ++c) before[c] = 1.f;
  int turn = 0, begin = 0;
  // Sums over all warps, by the first one: each lane's four are of key `to` and those from `from` on. What lies outside the triangle is
  // never read.
  auto finish = [&](float4 sum, int to, int from, bool diagonal) {
    shared.partial[turn][warp][lane] = sum;
    __syncthreads();
    if (warp == 0) {
#pragma unroll
      for (int w = 1; w < WARPS; ++w) {
        const float4 other = shared.partial[turn][w][lane];
        sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
      }
      const float4 norm = *reinterpret_cast<const float4*>(fold.last + from);
      if (diagonal && lane % 8 == 0 && from + 1 < h) fold.solve[0][from + 1][from] = sum.w * norm.x * norm.y;
      if (to < h) {
        const float own = fold.last[to];
        *reinterpret_cast<float4*>(&fold.solve[0][to][from]) = {sum.x * norm.x * own, sum.y * norm.y * own, sum.z * norm.z * own,
                                                                sum.w * norm.w * own};
      }
    }
    turn ^= ROUNDS > 1;
  };
  auto dot = [](float& sum, const float (&a)[CHANNELS], const float (&b)[CHANNELS]) {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) sum = fmaf(a[c], b[c], sum);
  };
  auto multiply = [](float (&by)[CHANNELS], const float (&factor)[CHANNELS]) {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) by[c] *= factor[c];
  };
  auto load = [&](float (&to)[CHANNELS], int entry) { load_floats(to, sources + entry * FLOAT_PITCH); };

#pragma unroll 1
  do {
    // Keys as targets, decayed from the link's start on, and as sources, to its end; products within the link.
    float target[LINK][CHANNELS], source[LINK][CHANNELS], total[CHANNELS], dots[32] = {};
    {
      Channels<Act> k[LINK] = {};
      Channels<float> g[LINK] = {};
      float key[LINK][CHANNELS], decay[LINK][CHANNELS];
#pragma unroll
      for (int i = 0; i < LINK; ++i)
        if (const int entry = begin + link * LINK + i; entry < h) {
          const int place = row.place(entry);
          k[i].load(ring_k + place * N), g[i].load(ring_g + place * N);
        }
      if (begin == 0) {
        ask();
        if (warp == 0) {
          float norms[SEGMENTS], betas[SEGMENTS];
          load_history(norms, ring_k_norm, row, lane), load_history(betas, ring_beta, row, lane);
#pragma unroll
          for (int segment = 0; segment < SEGMENTS; ++segment)
            if (const int j = segment * 32 + lane; j < FOLD_BLOCK)
              fold.lead[j] = -norms[segment], fold.last[j] = norms[segment], fold.beta[j] = betas[segment];
        }
      }
#pragma unroll
      for (int i = 0; i < LINK; ++i)
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) source[i][c] = key[i][c] = k[i][c], decay[i][c] = expf(g[i][c]);
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) total[c] = 1.f;
#pragma unroll
      for (int t = 0; t < LINK; ++t) {
        multiply(total, decay[t]);
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) target[t][c] = key[t][c] * total[c];
#pragma unroll
        for (int s = 0; s < t; ++s) multiply(source[s], decay[t]), dot(dots[t == 3 ? s : t == 2 ? 4 + s : 3], source[s], key[t]);
      }
    }
    // Neighbouring links become one: products of the later one's keys with the earlier one's, then both are decayed by the other.
#pragma unroll
    for (int bit = 0; bit < 2; ++bit) {
      const int step = 1 << bit;
      const bool later = link & step;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < LINK; ++i)
        if (later)
          store_floats(sources + (begin + link * LINK + i) * FLOAT_PITCH, target[i]);
        else
          store_floats(sources + (begin + link * LINK + i) * FLOAT_PITCH, source[i]);
      __syncwarp();
      const int from = step == 1 ? link & 2 : link & 1, to = step == 1 ? link | 1 : 2 + link / 2;
      float one[LINK][CHANNELS];
#pragma unroll
      for (int s = 0; s < LINK; ++s) load(one[s], begin + from * LINK + s);
#pragma unroll
      for (int t = 0; t < 4; ++t) {
        if (t == 2 * step) break;
        float other[CHANNELS];
        load(other, begin + to * LINK + (step == 1 ? (link & 1) * 2 : 0) + t);
#pragma unroll
        for (int s = 0; s < LINK; ++s) dot(dots[8 * step + t * LINK + s], one[s], other);
      }
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) {
        const float other = __shfl_xor_sync(~0u, total[c], 8 * step);
#pragma unroll
        for (int i = 0; i < LINK; ++i) source[i][c] *= later ? 1.f : other, target[i][c] *= later ? other : 1.f;
        total[c] *= other;
      }
    }
    const float4 sum = link_sums(dots, lane);
    const int r = lane % 8;

    if constexpr (ROUNDS > 1) {  // products with the rounds before, two links at a time
#pragma unroll 1
      for (int first = 0; first < begin; first += 2 * LINK) {
#pragma unroll
        for (int s = 0; s < 2 * LINK; ++s) {
          float one[CHANNELS];
          load(one, first + s);
#pragma unroll
          for (int t = 0; t < LINK; ++t)
            dots[s / LINK * 16 + t * LINK + s % LINK] = 0.f, dot(dots[s / LINK * 16 + t * LINK + s % LINK], one, target[t]);
        }
        finish(link_sums(dots, lane), begin + link * LINK + r % 4, first + r / 4 * LINK, false);
      }
      __syncwarp();
      if (!BACK_STAYS)
#pragma unroll 4
        for (int entry = link; entry < begin; entry += 4) {
          float value[CHANNELS];
          load(value, entry), multiply(value, total);
          store_floats(sources + entry * FLOAT_PITCH, value);
        }
#pragma unroll
      for (int i = 0; i < LINK; ++i) store_floats(sources + (begin + link * LINK + i) * FLOAT_PITCH, source[i]);
    }
#pragma unroll
    for (int i = 0; i < LINK; ++i) {
      const int entry = begin + link * LINK + i;
      multiply(target[i], before);
      shared.front.begin_put(entry, channel, target[i], entry < opaque(h));
      if (BACK_STAYS)
#pragma unroll
        for (int round = 0; round < ROUNDS; ++round) {
          const bool newest = round == ROUNDS - 1;
#pragma unroll
          for (int c = 0; c < CHANNELS; ++c) back[round][i][c] = newest ? source[i][c] : back[newest ? round : round + 1][i][c] * total[c];
        }
    }
    multiply(before, total);
    int to = link * LINK + 3 - r, from = link;  // of the lane's sums: of a link itself, of two links or of four
    if (r >= 2) to = (link | 1) * LINK + link % 2 * 2 + r % 2, from = link & 2;
    if (r >= 4) to = (2 + link / 2) * LINK + r % 4, from = link & 1;
    finish(sum, begin + to, begin + from * LINK, true);
#pragma unroll
    for (int i = 0; i < LINK; ++i)
      if (const int entry = begin + link * LINK + i; entry < h) shared.front.end_put(entry, channel, target[i]);
    begin += ROUND;
  } while (ROUNDS > 1 && begin < h);

  __syncwarp();
  if (link == 0) store_floats(shared.decay + channel, before);
  if constexpr (BACK_STAYS)
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round)
#pragma unroll
      for (int i = 0; i < LINK; ++i)
        if (const int entry = begin + (round - ROUNDS) * ROUND + link * LINK + i; entry >= 0 && entry < opaque(h))
          shared.back.put(entry, channel, back[round][i]);
  if (warp == 0) invert(fold, 0, h, lane);
  if (warp == WARPS - 1) meanwhile();
  __syncthreads();
}
