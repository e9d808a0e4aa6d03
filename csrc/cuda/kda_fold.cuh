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
  __device__ ByteRows rows() const { return {this}; }
  __device__ void put(int entry, int channel, const float (&value)[CHANNELS]) { ByteColumns::put(entry, value, channel / CHANNELS); }
};
struct FloatKeys {
  float at[BUFFER_LEN * FLOAT_PITCH];
  __device__ FloatRows rows() const { return {at}; }
  __device__ void put(int entry, int channel, const float (&value)[CHANNELS]) { store_floats(at + entry * FLOAT_PITCH + channel, value); }
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

// Decays over several entries are products, of links of the chain that are a warp's in its registers: nothing is exponentiated twice, and
// the accuracy is that of the recurrence, which multiplies by the same.
constexpr int LINK = 4, LINKS = (BUFFER_LEN + LINK - 1) / LINK;  // entries
struct alignas(16) FoldShared {
  FrontKeys front;  // k_j decayed from the checkpoint on
  union {
    FloatKeys sources;  // k_j decayed to the end of its link
    BackKeys back;      // to the history's end, later
  };
  union {
    float totals[LINKS][N];    // decays over links
    UnitValues values[WARPS];  // later
  };
  float decay[N];  // of the checkpoint
  FoldFactors factors;
};

// Factors and columns of a fold of one head, by the whole block; `layer` has the rings.
template <typename Layer>
__device__ __forceinline__ void make_fold_factors(const History& row, const Layer& layer, int head, FoldShared& shared, int lane,
                                                  int warp) {
  const int channel = lane * CHANNELS, h = row.history, links = max((h + LINK - 1) / LINK, 1);
  const i64 first_key = head / HEADS_PER_GROUP * i64(RING_LEN), first = head * i64(RING_LEN);  // entries
  const Act* ring_k = opaque(static_cast<const Act*>(layer.ring_k) + row.slot * layer.ring_k_slot + first_key * N + channel);
  const float* ring_k_norm = static_cast<const float*>(layer.ring_k_norm) + row.slot * layer.ring_k_norm_slot + first_key;
  const float* ring_g = opaque(static_cast<const float*>(layer.ring_g) + row.slot * layer.ring_g_slot + first * N + channel);
  const float* ring_beta = static_cast<const float*>(layer.ring_beta) + row.slot * layer.ring_beta_slot + first;

  struct Link {
    float key[LINK][CHANNELS], decay[LINK][CHANNELS];
  };
  Link kept = {};  // where a warp has no more than one
  auto load = [&](int link) {
    Link to;
    Channels<Act> k[LINK] = {};
    Channels<float> g[LINK] = {};
#pragma unroll
    for (int i = 0; i < LINK; ++i)
      if (link * LINK + i < h) {
        const int place = row.place(link * LINK + i);
        k[i].load(ring_k + place * N), g[i].load(ring_g + place * N);
      }
#pragma unroll
    for (int i = 0; i < LINK; ++i)
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) to.key[i][c] = k[i][c], to.decay[i][c] = expf(g[i][c]);
    return to;
  };
  auto multiply = [&](float (&by)[CHANNELS], int link) {
    float total[CHANNELS];
    load_floats(total, shared.totals[link] + channel);
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) by[c] *= total[c];
  };
  auto ones = [](float (&value)[CHANNELS]) {
#pragma unroll
    for (int c = 0; c < CHANNELS; ++c) value[c] = 1.f;
  };

  // A link's keys, each decayed by the rest of the link and by `after`, which becomes the decay of both.
  auto put_back = [&](auto& columns, const Link& own, float (&after)[CHANNELS], int link) {
#pragma unroll
    for (int i = LINK - 1; i >= 0; --i) {
      float back[CHANNELS];
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) back[c] = own.key[i][c] * after[c], after[c] *= own.decay[i][c];
      if (link * LINK + i < h) columns.put(link * LINK + i, channel, back);
    }
  };

  FoldFactors& fold = shared.factors;
  for (int j = warp * 32 + lane; j < FOLD_BLOCK; j += WARPS * 32) {
    const float norm = j < h ? ring_k_norm[row.place(j)] : 0.f;
    fold.lead[j] = -norm, fold.last[j] = norm, fold.beta[j] = j < h ? ring_beta[row.place(j)] : 0.f;
  }
#pragma unroll 1
  for (int link = warp; link < links; link += WARPS) {
    const Link own = load(link);
    if (LINKS <= WARPS) kept = own;
    float after[CHANNELS];
    ones(after);
    put_back(shared.sources, own, after, link);
    store_floats(shared.totals[link] + channel, after);
  }
  __syncthreads();

#pragma unroll 1
  for (int link = warp; link < links; link += WARPS) {
    const Link own = LINKS > WARPS ? load(link) : kept;
    float before[CHANNELS], within[CHANNELS], target[LINK][CHANNELS];
    ones(before), ones(within);
    for (int earlier = 0; earlier < link; ++earlier) multiply(before, earlier);
#pragma unroll
    for (int i = 0; i < LINK; ++i) {
      float front[CHANNELS];
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) {
        before[c] *= own.decay[i][c], within[c] *= own.decay[i][c];
        front[c] = own.key[i][c] * before[c], target[i][c] = own.key[i][c] * within[c];
      }
      if (link * LINK + i < h) shared.front.put(link * LINK + i, channel, front);
    }
    // Products of the link's keys with those before them, link by link.
    float dots[LINK * LINK] = {};
    auto put = [&](int from) {
      const float dot = warp_sums<LINK * LINK>(dots, lane);
      const int to = link * LINK + lane / LINK, source = from * LINK + lane % LINK;
      if (to < h && source < to && lane < LINK * LINK) fold.solve[0][to][source] = dot * fold.last[to] * fold.last[source];
    };
#pragma unroll
    for (int s = 0; s < LINK - 1; ++s) {
      float source[CHANNELS];
#pragma unroll
      for (int c = 0; c < CHANNELS; ++c) source[c] = own.key[s][c];
#pragma unroll
      for (int t = s + 1; t < LINK; ++t)
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c)
          source[c] *= own.decay[t][c], dots[t * LINK + s] = fmaf(source[c], own.key[t][c], dots[t * LINK + s]);
    }
    put(link);
#pragma unroll 1
    for (int from = link - 1; from >= 0; --from) {
#pragma unroll
      for (int s = 0; s < LINK; ++s) {
        float source[CHANNELS];
        load_floats(source, shared.sources.at + (from * LINK + s) * FLOAT_PITCH + channel);
#pragma unroll
        for (int t = 0; t < LINK; ++t) {
          dots[t * LINK + s] = 0.f;
#pragma unroll
          for (int c = 0; c < CHANNELS; ++c) dots[t * LINK + s] = fmaf(source[c], target[t][c], dots[t * LINK + s]);
        }
      }
      put(from);
#pragma unroll
      for (int t = 0; t < LINK; ++t) multiply(target[t], from);
    }
  }
  __syncthreads();

  if (warp == 0) invert(fold, 0, h, lane);
#pragma unroll 1
  for (int link = warp; link < links; link += WARPS) {
    const Link own = LINKS > WARPS ? load(link) : kept;
    float after[CHANNELS];
    ones(after);
    for (int later = links - 1; later > link; --later) multiply(after, later);
    put_back(shared.back, own, after, link);
    if (link == 0) store_floats(shared.decay + channel, after);
  }
  __syncthreads();
}
