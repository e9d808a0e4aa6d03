// One row of a batch: its slot, its tokens, its cursors, and whether it folds. The flush rule of the kernels is decided here.

struct Row {
  int slot;        // negative: padding
  i64 first;       // what the row strides of token inputs are multiplied by
  int tokens;      // new tokens
  int width;       // tokens the output has room for; those past `tokens` are zero
  int start;       // first entry of the history in the ring
  int history;     // committed tokens in the ring
  bool folds;

  // Place in the ring of entry j: the history, then the new tokens.
  __device__ int place(int entry) const {
    int at = start + entry;
    return at < RING_LEN ? at : at - RING_LEN;
  }
};

// New tokens of a row, before padding is known.
__device__ __forceinline__ int count_tokens(const Params& p, int row) {
  const int* cu_seqlens = static_cast<const int*>(p.cu_seqlens);
  const int tokens = cu_seqlens ? cu_seqlens[row + 1] - cu_seqlens[row] : p.num_tokens ? static_cast<const int*>(p.num_tokens)[row] : p.tokens;
  return min(max(tokens, 0), MAX_TOKENS);
}

__device__ __forceinline__ bool is_folding(const Params& p, int tokens, int history) {
  return p.fold_only ? history > 0 : tokens > 0 && history + tokens > BUFFER_LEN;
}

// Which row a block serves. Rows that flush take several times as long as the others, so they go first, or the last ones to
// start would finish long after the rest. Every warp finds the order by itself, from the cursors.
__device__ __forceinline__ int pick_row(const Params& p, int index, int lane) {
  constexpr int ENOUGH = 16, MOST = 1024;  // fewer rows run all at once anyway; more would cost too many loads
  if (p.rows < ENOUGH || p.rows > MOST) return index;
  const int* slots = static_cast<const int*>(p.slots);
  auto folds = [&](int row) {
    if (row >= p.rows) return false;
    const int slot = slots[row];
    return slot >= 0 && slot != p.pad_slot && is_folding(p, count_tokens(p, row), static_cast<const int*>(p.history)[slot]);
  };
  int folding = 0;
#pragma unroll 1
  for (int first = 0; first < p.rows; first += 32) folding += __popc(__ballot_sync(~0u, folds(first + lane)));
  const bool wanted = index < folding;  // the index-th row that folds, or the (index - folding)-th that does not
  int rank = wanted ? index : index - folding;
#pragma unroll 1
  for (int first = 0; first < p.rows; first += 32) {
    const u32 rows = __ballot_sync(~0u, first + lane < p.rows && folds(first + lane) == wanted);
    const int here = __popc(rows);
    if (rank < here) {
      const bool match = (rows >> lane & 1) && __popc(rows & ((1u << lane) - 1)) == rank;
      return first + __ffs(__ballot_sync(~0u, match)) - 1;
    }
    rank -= here;
  }
  return index;
}

__device__ __forceinline__ Row load_row(const Params& p, int row) {
  const int* cu_seqlens = static_cast<const int*>(p.cu_seqlens);
  Row r;
  r.slot = static_cast<const int*>(p.slots)[row];
  if (r.slot == p.pad_slot) r.slot = -1;
  r.first = cu_seqlens ? cu_seqlens[row] : row;
  const int tokens = count_tokens(p, row);
  r.tokens = r.slot < 0 || p.fold_only ? 0 : tokens;
  r.width = p.fold_only ? 0 : cu_seqlens ? tokens : p.tokens;
  r.start = r.slot < 0 ? 0 : static_cast<const int*>(p.ring_start)[r.slot];
  r.history = r.slot < 0 ? 0 : static_cast<const int*>(p.history)[r.slot];
  r.folds = r.slot >= 0 && is_folding(p, r.tokens, r.history);
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
