// What a row brings to a step.

struct Row : History {
  int tokens;       // T_r
  int padded;       // end of the output rows to zero after the row's tokens
  long long batch;  // index along the row axis of the inputs
  int seen;         // history and the step's own tokens
  bool flush;
  unsigned path[TREE ? MAX_TOKENS : 1];  // of a tree: bit j for new token j on the way from a root to token t, t included

  // Whether new token t sees entry j, at most its own: the history, and what lies on its path.
  INLINE bool sees(int t, int j) const { return !TREE || j < history || path[t] >> (j - history) & 1; }

  // Whether one token meets a history that stays: the plain step of decode.
  INLINE bool alone() const { return tokens == 1 && !flush; }

  // Whether new token t comes right after t - 1, so that sums over the path of t - 1 go on.
  INLINE bool follows(int t) const { return !TREE || t == 0 || path[t] >> (t - 1) & 1; }
};

static Row read_row(const Params* p, long long r) {
  Row row;
  row.slot = at<const int>(p->slots, 0)[r];
  if (row.slot == p->pad_slot) row.slot = -1;
  const int* cu = at<const int>(p->cu_seqlens, 0);
  const int* num = at<const int>(p->num_tokens, 0);
  row.tokens = cu ? cu[r + 1] - cu[r] : num ? num[r] : p->tokens;
  const int most = cu || p->tokens > MAX_TOKENS ? MAX_TOKENS : p->tokens;
  row.tokens = row.tokens < 0 ? 0 : row.tokens > most ? most : row.tokens;
  row.padded = cu ? row.tokens : p->tokens;
  row.batch = cu ? cu[r] : r;
  row.start = row.history = row.seen = 0;
  row.flush = false;
  if (row.slot < 0) {
    row.tokens = 0;
    if (p->keep_padding) row.padded = 0;
    return row;
  }
  row.start = at<const int>(p->ring_start, 0)[row.slot];
  row.history = at<const int>(p->history, 0)[row.slot];
  row.flush = row.tokens > 0 && row.history + row.tokens > BUFFER_LEN;
  row.seen = row.history + row.tokens;
  row.locate(row.seen);
  if (TREE) {
    const int* parents = at<const int>(p->parents, cu ? cu[r] : r * p->tokens);
    for (int t = 0; t < row.tokens; t++) row.path[t] = 1u << t | (parents[t] >= 0 && parents[t] < t ? row.path[parents[t]] : 0u);
  }
  return row;
}

// Rings are in two pieces where they wrap; of a new token there are at most six.
typedef HeadFeed<State, P, N, 16 + 6 * MAX_TOKENS> Feed;

// The ring's entries that a step will touch, `stride` bytes each.
static void expect_ring(Feed& feed, const Row& row, const void* ring, int stride) {
  const int before_end = row.start + row.seen < RING_LEN ? row.seen : RING_LEN - row.start;
  feed.expect((const char*)ring + row.start * stride, before_end * stride);
  if (before_end < row.seen) feed.expect(ring, (row.seen - before_end) * stride);
}
static void expect_new(Feed& feed, const Row& row, const void* ring, int stride) {
  for (int t = 0; t < row.tokens; t++) feed.expect((const char*)ring + row.place[row.history + t] * stride, stride);
}
