// The order of a step's work. Flushes are bound by arithmetic and plain steps by memory, so a thread takes heads of both in turn, and while it
// folds, its feed brings the planes that it walks next.

#include <vector>

// Of a unit that flushes, at most: heads take long, but what a group shares is computed once a unit.
constexpr int FLUSH_HEADS = HEADS_PER_GROUP < 8 ? 8 : HEADS_PER_GROUP;

struct Claim {
  Row row;
  int first, end;
};

// Units of the rows of a kind, and how far they are claimed.
struct Pool {
  const std::vector<int>& rows;
  const Units units;
  long long next = 0;

  Pool(const Params* p, const std::vector<int>& rows, int most) : rows(rows), units(p, rows.size(), most) {}

  bool claim(const Params* p, Claim& claim) {
    const long long u = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    if (u >= units.count) return false;
    units.call(u, [&](long long r, int first, int end) { claim = {read_row(p, rows[r]), first, end}; });
    return true;
  }
};

// The heads of a claim that are left.
struct Heads {
  Row row;
  int first = 0, head = 0, end = 0;

  void start(const Params* p, const Claim& claim) {
    row = claim.row, first = head = claim.first, end = claim.end;
    clear_outputs(p, row.batch, first, end, row.tokens, row.padded);
    if (row.tokens == 0) head = end;
  }
};

// Runs all rows. A Unit is Heads with step(p, feed), which runs the next one, and expect(p, row, head, first, feed), which tells the feed what
// a head takes besides its state.
template <class Unit>
static void run_step(const Params* p) {
  std::vector<int> plain_rows, flush_rows;
  size_t walking = 0;  // plain rows that have tokens
  for (int r = 0; r < p->rows; r++) {
    const Row row = read_row(p, r);
    (row.flush ? flush_rows : plain_rows).push_back(r);
    walking += row.tokens && !row.flush;
  }
  Pool plain(p, plain_rows, p->num_heads), flushing(p, flush_rows, FLUSH_HEADS);
#pragma omp parallel num_threads(p->threads)
  {
    Unit unit, folding;
    Feed feed;
    Claim next, flush;
    bool flushes = true;  // as far as this thread knows
    const auto fold_head = [&] {
      if (folding.head == folding.end) {
        if (!flushes || !flushing.claim(p, flush)) return flushes = false;
        folding.start(p, flush);
      }
      if (folding.head + 1 < folding.end) Unit::expect(p, folding.row, folding.head + 1, false, feed);
      folding.step(p, feed);
      return true;
    };
    const auto claim_next = [&] {
      if (!plain.claim(p, next)) return false;
      if (next.row.tokens) feed.append(checkpoint_at(p, next.row.slot, next.first).read, next.end - next.first);
      return true;
    };
    size_t due = 0;  // of a flush, in heads to be folded times rows that do not
    for (bool more = claim_next(); more;) {
      unit.start(p, next);
      more = claim_next();
      for (; unit.head < unit.end; unit.step(p, feed)) {
        for (due += flush_rows.size(); due >= walking; due -= walking) fold_head();
        if (unit.head + 1 < unit.end)
          Unit::expect(p, unit.row, unit.head + 1, false, feed);
        else if (more)
          Unit::expect(p, next.row, next.first, true, feed);
      }
    }
    while (fold_head()) {
    }
  }
}
