// What a fold outside a step is asked for: a slot's history up to a position, and where the state goes. A block serves one head of
// one row and layer.

constexpr int POSITION_ERROR = 2;  // bit of `error`: a position outside its slot's range

// Where one unit's state goes, see InPlace: a slot of the cache, or a tensor.
struct Target {
  InPlace slot;
  void* tensor;
  int dtype;  // 0: the slot
  i64 at, row_stride, column_stride;

  __device__ bool measures() const { return Whole::SCALED && dtype == 0; }
  __device__ void measured() { slot.measured(); }
  __device__ void finish() const {
    if (dtype == 0) slot.finish();
  }
  __device__ void store(int run, int half, const float (&value)[Whole::VEC]) {
    if (dtype == 0) return slot.store(run, half, value);
    const i64 step = column_stride + opaque(0);  // its multiples are not worth the registers they would take from the fold
    i64 to = at + half * 8 * row_stride + i64(run * 4 * Whole::VEC) * step;
#pragma unroll
    for (int e = 0; e < Whole::VEC; ++e, to += step) write(tensor, dtype, to, value[e]);
  }
};

struct Task : History {
  const Layer* layer;
  int head;
  i64 element;  // of the layer's `out`, or a slot

  // False where there is nothing to do.
  __device__ bool find(const Params& p) {
    const int row = blockIdx.y;
    head = blockIdx.x;
    slot = static_cast<const int*>(p.slots)[row];
    element = p.targets ? static_cast<const int*>(p.targets)[row] : row;
    if (slot < 0 || element < 0) return false;
    const i64 folded = static_cast<const i64*>(p.position)[slot], committed = static_cast<const int*>(p.history)[slot];
    const i64 wanted = p.positions ? static_cast<const i64*>(p.positions)[row] : folded + committed;
    if (wanted == -1) return false;
    if (wanted < folded || wanted > folded + committed) {
      if (head == 0 && blockIdx.z == 0 && threadIdx.x == 0) atomicOr(static_cast<int*>(p.error), POSITION_ERROR);
      return false;
    }
    start = static_cast<const int*>(p.ring_start)[slot];
    history = int(wanted - folded);
    layer = static_cast<const Layer*>(p.layers) + blockIdx.z;
    return history > 0 || p.out_dtype || element != slot;
  }

  // Of 16 rows of the head, in a slot.
  __device__ Place place_in(i64 of, int slab, int lane) const { return place_of(*layer, of, head, slab * 16 + lane / 4); }
  __device__ Target target(const Params& p, int slab, int lane) const {
    const Draws draws(p, slot, p.first_layer + blockIdx.z, head, slab * 16 + lane / 4);
    if (p.out_dtype == 0) return {InPlace(place_in(element, slab, lane), draws), nullptr, 0, 0, 0, 0};
    const i64 at = element * p.out_row + head * p.out_head + (slab * 16 + lane / 4) * p.out_p + lane % 4 * Whole::VEC * p.out_n;
    return {InPlace(Place{}, draws), p.out[blockIdx.z], p.out_dtype, at, p.out_p, p.out_n};
  }
  __device__ void prefetch(int slab, int lane) const { prefetch_whole(place_in(slot, slab, lane), lane); }
};
