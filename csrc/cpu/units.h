// Work is handed out in units of consecutive heads of one row, so that a thread walks contiguous memory and what a group of heads
// shares is computed once. Units are taken in order as threads become free; each depends on nothing but itself.

// Heads a unit covers: many, but enough units to keep several threads evenly busy.
INLINE int unit_heads(const Params* p, long long rows) {
  int heads = 32;
  if (p->threads > 1)
    while (heads > 1 && rows * ((p->num_heads + heads - 1) / heads) < 8LL * p->threads) heads /= 2;
  return heads;
}

// The units of a number of rows, of at most so many heads.
struct Units {
  int num_heads, heads, blocks;
  long long count;

  Units(const Params* p, long long rows, int most) : num_heads(p->num_heads), heads(unit_heads(p, rows)) {
    if (heads > most) heads = most;
    blocks = (num_heads + heads - 1) / heads;
    count = rows * blocks;
  }
  // Calls unit(row, first head, end of heads).
  template <class Unit>
  INLINE void call(long long u, Unit unit) const {
    const int first = (int)(u % blocks) * heads;
    unit(u / blocks, first, first + heads < num_heads ? first + heads : num_heads);
  }
};

template <class Unit>
INLINE void for_each_unit(const Params* p, long long rows, Unit unit) {
  const Units units(p, rows, p->num_heads);
#pragma omp parallel for num_threads(p->threads) schedule(dynamic, 1)
  for (long long u = 0; u < units.count; u++) units.call(u, unit);
}

template <class Unit>
INLINE void for_each_unit(const Params* p, Unit unit) {
  for_each_unit(p, p->rows, unit);
}
