// Work is handed out in units of consecutive heads of one row, so that a thread walks contiguous memory and what a group of heads
// shares is computed once. Units are taken in order as threads become free; each depends on nothing but itself.

// Heads a unit covers: many, but enough units to keep several threads evenly busy.
INLINE int unit_heads(const Params* p) {
  int heads = 32;
  if (p->threads > 1)
    while (heads > 1 && (long long)p->rows * ((p->num_heads + heads - 1) / heads) < 8LL * p->threads) heads /= 2;
  return heads;
}

// Calls unit(row, first head, end of heads).
template <class Unit>
INLINE void for_each_unit(const Params* p, Unit unit) {
  const int heads = unit_heads(p);
  const int blocks = (p->num_heads + heads - 1) / heads;
  const long long units = (long long)p->rows * blocks;
#pragma omp parallel for num_threads(p->threads) schedule(dynamic, 1)
  for (long long u = 0; u < units; u++) {
    const int first = (int)(u % blocks) * heads;
    unit(u / blocks, first, first + heads < p->num_heads ? first + heads : p->num_heads);
  }
}

INLINE void clear_outputs(const Params* p, long long batch, int first, int end, int from, int to) {
  for (int head = first; head < end; head++)
    for (int t = from; t < to; t++)
      std::memset(at<act>(p->out, batch * p->out_row + t * p->out_token + head * p->out_outer), 0, P * sizeof(act));
}
