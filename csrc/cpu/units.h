// Work is handed out in units of consecutive heads of one row, so that a thread walks contiguous memory and what a group of heads
// shares is computed once. Units are taken in order as threads become free; each depends on nothing but itself.

// Heads a unit covers: many, but enough units to keep several threads evenly busy.
INLINE int unit_heads(const Params* p, long long rows) {
  int heads = 32;
  if (p->threads > 1)
    while (heads > 1 && rows * ((p->num_heads + heads - 1) / heads) < 8LL * p->threads) heads /= 2;
  return heads;
}

// Calls unit(row, first head, end of heads).
template <class Unit>
INLINE void for_each_unit(const Params* p, long long rows, Unit unit) {
  const int heads = unit_heads(p, rows);
  const int blocks = (p->num_heads + heads - 1) / heads;
  const long long units = rows * blocks;
#pragma omp parallel for num_threads(p->threads) schedule(dynamic, 1)
  for (long long u = 0; u < units; u++) {
    const int first = (int)(u % blocks) * heads;
    unit(u / blocks, first, first + heads < p->num_heads ? first + heads : p->num_heads);
  }
}

template <class Unit>
INLINE void for_each_unit(const Params* p, Unit unit) {
  for_each_unit(p, p->rows, unit);
}
