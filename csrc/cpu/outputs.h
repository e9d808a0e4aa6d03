// Outputs that no token of a row fills are zero.
INLINE void clear_outputs(const Params* p, long long batch, int first, int end, int from, int to) {
  for (int head = first; head < end; head++)
    for (int t = from; t < to; t++)
      std::memset(at<act>(p->out, batch * p->out_row + t * p->out_token + head * p->out_outer), 0, P * sizeof(act));
}
