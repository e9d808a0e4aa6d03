// A warp's share of its block: one head, and of it some slabs of 16 rows. Where a block has fewer heads than warps, several share a head,
// and each computes for itself what the head's outputs take: nobody waits for anybody.
struct Share {
  int at;             // head of the block
  int part, parts;    // those of the block who serve it
  int first, stride;  // slabs
  bool leads;         // writes the head's new entries to the ring

  __device__ Share(int heads, int warp) {
    static_assert(WARPS <= 4, "at most four heads");
    at = heads == 3 ? warp % 3 : warp & (heads - 1);
    part = heads == 1 ? warp : heads == 2 ? warp / 2 : warp != at;
    parts = heads == 1 ? WARPS : heads == 2 ? WARPS / 2 : heads == 3 && at == 0 ? 2 : 1;
    first = blockIdx.z * parts + part, stride = gridDim.z * parts;
    leads = first == 0;
  }
};
