// One row of a batch: its slot, its tokens, its cursors, and whether it folds. The flush rule of the kernels is decided here.

struct Row : History {
  i64 first;        // what the row strides of token inputs are multiplied by
  int tokens;       // new tokens
  int width;        // tokens the output has room for; those past `tokens` are zero
  const u32* path;  // in shared memory, of a tree: bit j of path[t] for new token j on the way from a root to token t, t included

  // The row once its history is folded: new tokens keep their places.
  __device__ Row folded() const {
    Row row = *this;
    row.start = place(history), row.history = 0;
    return row;
  }
  // Not kept in a register from the prologue on.
  __device__ bool folds() const { return tokens > 0 && history + opaque(tokens) > BUFFER_LEN; }

  // Whether new token t sees entry j: the history, and up to itself what lies on its path.
  __device__ bool sees(int token, int entry) const {
    if constexpr (TREE) return entry < history || path[token] >> (entry - history) & 1;
    return entry <= history + token;
  }
};

// New tokens of a row, before padding is known.
__device__ __forceinline__ int count_tokens(const Params& p, int row) {
  const int* cu_seqlens = static_cast<const int*>(p.cu_seqlens);
  const int tokens = cu_seqlens     ? cu_seqlens[row + 1] - cu_seqlens[row]
                     : p.num_tokens ? static_cast<const int*>(p.num_tokens)[row]
                                    : p.tokens;
  return min(max(tokens, 0), cu_seqlens ? MAX_TOKENS : min(MAX_TOKENS, p.tokens));
}

// Which row a block serves, and which part of its heads' states. A row that flushes is one long chain of latencies, so in small batches
// its slabs are dealt to several blocks; those beyond what other rows are divided among lead the launch, so that none comes late, and
// return where they are not needed.
struct Turn {
  static constexpr bool DIVIDES = SLABS > WARPS;
  int at = blockIdx.y;  // place of the row in the launch
  int split = 0;

  __device__ explicit Turn(const Params& p) {
    if constexpr (DIVIDES)
      for (at -= (p.splits - 1) * p.divided; at < 0; at += opaque(p.divided)) ++split;  // few turns: no division
  }
  // Blocks among which the row is divided.
  __device__ int splits(const Params& p, bool folds) const { return !DIVIDES ? 1 : folds && at < p.divided ? p.splits : p.plain_splits; }
  // Whether the block serves rows that flush alone.
  __device__ bool extra(const Params& p) const { return DIVIDES && split >= p.plain_splits; }
  __device__ bool idle(const Params& p, const Row& row) const { return extra(p) && split >= splits(p, row.folds()); }
};

// The row of the batch at a place of the launch: by the order that the last commit left, or the batch's own.
__device__ __forceinline__ int pick_row(const Params& p, const Turn& turn) {
  return p.order ? static_cast<const int*>(p.order)[turn.at] : turn.at;
}

// Parent of a lane's node in the row's tree, -1 for a root. Lanes without a node count as roots, and so does what names no
// earlier node.
__device__ __forceinline__ int load_parent(const Params& p, const Row& row, int lane) {
  if (lane >= row.tokens) return -1;
  const int parent = static_cast<const int*>(p.parents)[(p.cu_seqlens ? row.first : row.first * p.tokens) + lane];
  return parent < lane ? max(parent, -1) : -1;
}

// Combines the lane's value with those of all nodes on its path, by jumps of 1, 2, 4, ... nodes towards the root.
template <typename T, typename Combine>
__device__ __forceinline__ T over_path(T value, int parent, const Combine& combine) {
#pragma unroll
  for (int step = 1; step < MAX_TOKENS; step *= 2) {
    const T other = __shfl_sync(~0u, value, max(parent, 0));
    const int next = __shfl_sync(~0u, parent, max(parent, 0));
    if (parent >= 0) value = combine(value, other), parent = next;
  }
  return value;
}

// The paths of all nodes, by the first warp; to be read after a barrier.
__device__ __forceinline__ const u32* load_paths(const Params& p, const Row& row) {
  __shared__ u32 path[MAX_TOKENS];
  const int lane = threadIdx.x;
  if (lane < 32) {
    const u32 bits = over_path(1u << lane, load_parent(p, row, lane), [](u32 a, u32 b) { return a | b; });
    if (lane < row.tokens) path[lane] = bits;
  }
  return path;
}

__device__ __forceinline__ Row load_row(const Params& p, int row) {
  const int* cu_seqlens = static_cast<const int*>(p.cu_seqlens);
  Row r;
  r.slot = static_cast<const int*>(p.slots)[row];
  if (r.slot == p.pad_slot) r.slot = -1;
  r.first = cu_seqlens ? cu_seqlens[row] : row;
  const int tokens = count_tokens(p, row);
  r.tokens = r.slot < 0 ? 0 : tokens;
  r.width = r.slot < 0 && p.keep_padding ? 0 : cu_seqlens ? tokens : p.tokens;
  r.start = r.slot < 0 ? 0 : static_cast<const int*>(p.ring_start)[r.slot];
  r.history = r.slot < 0 ? 0 : static_cast<const int*>(p.history)[r.slot];
  if constexpr (TREE) r.path = load_paths(p, r);
  return r;
}

// Zero the outputs of a block's heads that no token of the row fills.
__device__ __forceinline__ void clear_outputs(const Params& p, const Row& row, int first_head, int heads) {
  Act* out = static_cast<Act*>(p.out) + row.first * p.out_row;
  for (int i = threadIdx.x; i < (row.width - row.tokens) * heads * P; i += blockDim.x) {
    int token = row.tokens + i / (heads * P), head = first_head + i / P % heads;
    out[token * p.out_token + head * p.out_outer + i % P] = Act{};
  }
}

// Entries of one head or group to shared memory: the history from the ring, then the new tokens.
template <int WIDTH, int THREADS = BLOCK_THREADS>
__device__ __forceinline__ void stage_entries(Act* to, int pitch, const Row& row, const Act* ring, const Act* fresh, i64 token_stride,
                                              bool aligned, int thread, int groups = 1) {
  stage_rows<WIDTH, THREADS>(to, pitch, row.history, true, thread, [&](int entry) { return ring + row.place(entry) * WIDTH; }, groups);
  stage_rows<WIDTH, THREADS>(
      to + row.history * pitch, pitch, row.tokens, aligned, thread, [&](int token) { return fresh + token * token_stride; }, groups);
}

// Where a batch is small, one memory latency after the other is all that a step takes. Its blocks then ask for what their rows will need
// while the kernel before still runs: state, and rings before the cursors say which entries they hold. In large batches both would only
// be in the way of others.

// The row's slot as it is now, which the kernel before may be about to change: good enough to ask for memory with. -1: there is none.
__device__ __forceinline__ int early_slot(const Params& p, const Turn& turn) {
  if (p.rows * p.num_heads >= FEW_HEADS) return -1;
  const int slot = load_early(static_cast<const int*>(p.slots) + turn.at);
  return u32(slot) < u32(p.num_slots) ? slot : -1;
}
// Whether the slot will flush, by its cursors as they are now.
__device__ __forceinline__ bool flushes_early(const Params& p, i64 slot) {
  const int tokens = p.num_tokens || p.cu_seqlens ? MAX_TOKENS : p.tokens;
  return load_early(static_cast<const int*>(p.history) + slot) + tokens > BUFFER_LEN;
}
template <int WIDTH, typename T>
__device__ __forceinline__ void prefetch_ring(const T* ring, int thread, int threads) {
  constexpr int LINES = (RING_LEN * WIDTH * int(sizeof(T)) + 127) / 128;
  for (int line = thread; line < LINES; line += threads) prefetch(reinterpret_cast<const char*>(ring) + line * 128);
}
