// The rings of all layers, as the host lists them on the device (ReplayCache.ring_table). Needs Params.
struct Ring {
  char* at;
  long long slot_bytes;  // from slot to slot
  long long outer;       // heads or groups; each has ring_len entries, one after another
  long long entry_bytes;
};
static_assert(sizeof(Ring) == 32, "packing differs from the host's");

// Place of a slot's first new token. A flush moves the history's start, but not this.
__device__ inline int first_place(const Params& p, long long slot) {
  return ((const int*)p.ring_start)[slot] + ((const int*)p.history)[slot];
}
