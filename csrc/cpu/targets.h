// What a fold outside a step is asked for: a slot's history up to a position, and where the state goes. The layers' table is
// walked like rows.

#include <vector>

constexpr int POSITION_ERROR = 2;  // bit of `error`: a position outside its slot's range

struct Target {
  const Params* p;
  int layer;
  long long element;  // of the layer's `out`, or a slot
  bool in_place;
};

// A head as fp32 in natural order, as a fold leaves it.
struct ToTensor {
  static constexpr bool BY_ROWS = false;
  float* rows;
  template <bool FINITE>
  INLINE void put(int, int, int element, vf a, vf b) const {
    if (State::split) interleave(a, b);
    fp32::store2(rows + element, a, b);
  }
};

// False where there is nothing to do. `reports`: a row is seen by many threads, one of them sets the error bit.
static bool find_target(const Params* p, long long row, bool reports, History& history, Target& target) {
  const long long slot = at<const int>(p->slots, 0)[row];
  target.element = p->targets ? at<const int>(p->targets, 0)[row] : row;
  if (slot < 0 || target.element < 0) return false;
  const long long folded = at<const long long>(p->position, 0)[slot];
  const int committed = at<const int>(p->history, 0)[slot];
  const long long wanted = p->positions ? at<const long long>(p->positions, 0)[row] : folded + committed;
  if (wanted == -1) return false;
  if (wanted < folded || wanted > folded + committed) {
    if (reports) __atomic_fetch_or((int*)p->error, POSITION_ERROR, __ATOMIC_RELAXED);
    return false;
  }
  target.in_place = p->out_dtype == NONE && target.element == slot;
  history.slot = slot;
  history.start = at<const int>(p->ring_start, 0)[slot];
  history.history = (int)(wanted - folded);
  history.locate(history.history);
  return !(target.in_place && history.history == 0);
}

// Calls fold(checkpoint of the head, where the folded one goes).
template <class Fold>
static void fold_to(const Layer* layer, const History& history, const Target& target, int head, Fold fold) {
  const Params* p = target.p;
  const Checkpoint from = checkpoint_at(layer, history.slot, head);
  if (p->out_dtype == NONE) {
    const Draws draws(p, history.slot, p->first_layer + target.layer, head);
    return fold(from, ToCheckpoint<State, P, N, Draws>{checkpoint_at(layer, target.element, head), draws});
  }
  const long long offset = target.element * p->out_row + head * p->out_head;
  if (p->out_dtype == FP32 && p->out_n == 1 && p->out_p == N) return fold(from, ToTensor{at<float>(p->out[target.layer], offset)});
  static thread_local std::vector<float> rows(P * N);
  fold(from, ToTensor{rows.data()});
  for (int i = 0; i < P; i++) move_row(p->out_dtype, p->out[target.layer], offset + i * p->out_p, p->out_n, &rows[i * N], true);
}

// Calls fold_heads(layer, history, target, first head, end of heads).
template <class FoldHeads>
INLINE void for_each_target(const Params* p, FoldHeads fold_heads) {
  for_each_unit(p, (long long)p->rows * p->num_layers, [&](long long r, int first, int end) {
    History history;
    Target target{p, (int)(r / p->rows)};
    if (find_target(p, r % p->rows, first == 0 && target.layer == 0, history, target))
      fold_heads(at<const Layer>(p->layers, target.layer), history, target, first, end);
  });
}
