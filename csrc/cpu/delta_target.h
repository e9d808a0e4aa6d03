// The exact fold of one head to a target.

static void fold_head(const Layer* layer, const History& row, const Target& target, int head, const Fold& fold) {
  const act* v = at<act>(layer->ring_v, row.slot * layer->ring_v_slot + (long long)head * RING_LEN * P);
  fold_to(layer, row, target, head, [&](const Checkpoint& from, const auto& to) {
    PlaneFeed<State, P, N> feed;
    for_each_block<State, P, N>(from, feed, [&](int first, const auto&, const char* ahead, int soon) INLINE_LAMBDA {
      fold_exactly(row, fold, v, from, to, first, ahead, soon, Nothing());
    });
  });
}
