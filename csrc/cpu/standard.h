// What the standard kernels share: rows and the places of their states. The state of a head is walked once for all tokens of a
// row, VW rows at a time, so that between two tokens it stays in the first cache.

#include <vector>

struct Row {
  long long slot;   // negative: padding
  int tokens;
  long long batch;
  const int* write_slots;

  // Where the state after token t goes; negative: nowhere, or overwritten by a later token of this row.
  INLINE long long write_slot(const Params* p, int t) const {
    const int to = write_slots[t];
    if (to == p->pad_slot) return -1;
    for (int later = t + 1; later < tokens; later++)
      if (write_slots[later] == to) return -1;
    return to;
  }
};

static Row read_row(const Params* p, long long r) {
  const int slot = at<const int>(p->slots, 0)[r];
  return {slot == p->pad_slot ? -1 : slot, p->tokens, r, at<const int>(p->write_slots, 0) + r * p->tokens};
}

INLINE char* state_block(const Params* p, long long slot, int head) {
  return at<char>(p->state, 0) + (slot * p->state_slot + (long long)head * P * N) * State::whole_bytes;
}

// The state of VW rows at one token: from the checkpoint before the first token, from `kept` later; to the checkpoint of the
// token when `to` is set, and to `kept` unless it is the last token.
struct Place {
  const char* from;
  char* to;
  float* kept;
  bool last;
  int row0;  // first of the VW rows

  INLINE void load(int r, int n, vf& a, vf& b) const {
    if (from) return State::read(from, (row0 + r) * N + n, a, b);
    a = ::load(kept + r * N + n), b = ::load(kept + r * N + n + VW);
  }
  INLINE void store(int r, int n, vf a, vf b) const {
    if (to) State::write(to, (row0 + r) * N + n, a, b);
    if (!last) ::store(kept + r * N + n, a), ::store(kept + r * N + n + VW, b);
  }
};
