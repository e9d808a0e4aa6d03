// A warp's share of its block: one head, and of it some slabs of 16 rows. Where a block has fewer heads than warps, several share a head,
// and each computes for itself what the head's outputs take: nobody waits for anybody.
struct Share {
  int at;             // head of the block
  int part, parts;    // warps that share the head
  int first, stride;  // slabs
  bool leads;         // writes the head's new entries to the ring

  __device__ Share(int heads, int warp, int split, int splits) {
    static_assert(WARPS <= 4, "at most four heads");
    at = heads == 3 ? warp % 3 : warp & (heads - 1);
    part = heads == 1 ? warp : heads == 2 ? warp / 2 : warp != at;
    parts = heads == 1 ? WARPS : heads == 2 ? WARPS / 2 : heads == 3 && at == 0 ? 2 : 1;
    first = split * parts + part, stride = splits * parts;  // the first one is known before the number of blocks
    leads = first == 0;
  }
};

// The read plane of a warp's share of a slot on its way to L2.
__device__ __forceinline__ void ask_units(const Params& p, i64 slot, int head, const Share& share, int lane) {
  for (int slab = share.first; slab < SLABS; slab += share.stride) Piece::ask(place_of(p, slot, head, slab * 16 + lane / 4));
}

// The heads of a block: so many of one group, or what is left of it. Without divisions by what the compiler does not know.
struct BlockHeads {
  int group, chunk, first, count;

  __device__ explicit BlockHeads(int most) {
    constexpr u32 CHUNKS[] = {HEADS_PER_GROUP, (HEADS_PER_GROUP + 1) / 2, (HEADS_PER_GROUP + 2) / 3, (HEADS_PER_GROUP + 3) / 4};
    group = most == 1   ? blockIdx.x / CHUNKS[0]
            : most == 2 ? blockIdx.x / CHUNKS[1]
            : most == 3 ? blockIdx.x / CHUNKS[2]
                        : blockIdx.x / CHUNKS[3];
    chunk = blockIdx.x - group * (most == 1 ? CHUNKS[0] : most == 2 ? CHUNKS[1] : most == 3 ? CHUNKS[2] : CHUNKS[3]);
    first = group * HEADS_PER_GROUP + chunk * most;
    count = min(most, HEADS_PER_GROUP - chunk * most);
  }
};
