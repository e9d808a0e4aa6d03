// What the standard kernels share: rows and the places of their states. The state of a head is walked once for all tokens of a
// row, VW rows at a time, so that between two tokens it stays in the first cache.

#include <vector>

struct Row {
  long long slot;  // negative: padding
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

// Rows of the state at one token: read from the checkpoint before the first token, from `kept` later; written to the checkpoint of
// the token when it has one, and to `kept` unless it is the last token.
template <bool FIRST, bool LAST>
struct Place {
  const char* source;
  char* to;
  float* kept;

  INLINE Place row(int r) const {
    const int e = r * N;
    return {source + e * State::read_bytes, to ? to + e * State::read_bytes : nullptr, kept + e};
  }
  INLINE void operator()(int e, vf& a, vf& b) const {
    if (FIRST)
      State::read(source, e, a, b);
    else
      a = ::load(kept + e), b = ::load(kept + e + VW);
  }
  template <class S>
  INLINE void write(int e, vf a, vf b) const {
    if constexpr (!S::scaled) S::template write<false>(to, e, a, b);
  }
  INLINE void store(int e, vf a, vf b) const {
    if (to) write<State>(e, a, b);
    if (!LAST) ::store(kept + e, a), ::store(kept + e + VW, b);
  }
};

// Calls token(place) for VW rows from p0 on, which every token but the first finds in `kept`.
template <class Token>
INLINE void at_place(const Params* p, const Row& row, int head, int p0, int t, float* kept, Token token) {
  const long long slot = row.write_slot(p, t);
  const Checkpoint from = checkpoint_at(p, row.slot, head);
  if constexpr (State::scaled) {  // a row is written at once, since its scale depends on all of it
    for (int e = 0; t == 0 && e < VW * N; e += 2 * VW) {
      vf a, b;
      State::whole(from.state, p0 * N + e, from.scale[p0 + e / N], a, b);
      ::store(kept + e, a), ::store(kept + e + VW, b);
    }
    token(Place<false, false>{nullptr, nullptr, kept});
    for (int r = 0; slot >= 0 && r < VW; r++) write_row<State, N>(checkpoint_at(p, slot, head), p0 + r, kept + r * N, Nearest());
    return;
  }
  const char* source = from.state + p0 * N * State::read_bytes;
  char* to = slot < 0 ? nullptr : checkpoint_at(p, slot, head).state + p0 * N * State::read_bytes;
  if (row.tokens == 1)
    token(Place<true, true>{source, to, kept});
  else if (t == 0)
    token(Place<true, false>{source, to, kept});
  else
    token(Place<false, false>{source, to, kept});
}
