// The committed tokens of a slot that a kernel sees.
struct History {
  long long slot;      // negative: padding
  int start, history;  // first entry in the ring, and how many
  int place[WINDOW];   // where entry j lies in the ring, history first

  INLINE void locate(int entries) {
    for (int j = 0; j < entries; j++) place[j] = start + j < RING_LEN ? start + j : start + j - RING_LEN;
  }
};
