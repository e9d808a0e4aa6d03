// A CUDA device of one thread of the host: enough of it to run this project's kernels where there is no GPU.
//
// Threads of a block are fibers. One runs until it meets the others: at a barrier of the block, or at an instruction of its warp
// (shuffle, mma, ldmatrix), which waits for all 32 lanes and aborts when they do not meet at the same one. Between two such points
// fibers run in an order drawn from a seed, and so do blocks: a kernel whose bits depend on the seed has a race. Copies that are
// asynchronous on the device take place at the wait, so a missing wait shows. PTX instructions are functions below, by their names.
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define __align__(n) alignas(n)
#define __CUDA_ARCH__ EMULATED_ARCH

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct dim3 {
  unsigned x, y, z;
};

namespace emulator {

constexpr int WARP = 32;
constexpr size_t STACK = 128 << 10;
enum State { READY, AT_WARP, AT_BLOCK, DONE };

struct Slot {  // what a lane brings to an instruction of its warp
  uint64_t words[12];
};
struct Warp {
  Slot slots[2][WARP];
  const char* instruction;
  int arrived;
  unsigned turn;
};
struct Copy {
  void* to;
  const void* from;
};
struct Fiber {
  dim3 index;
  int lane;
  Warp* warp;
  State state;
  bool started;
  jmp_buf context;
  ucontext_t start;
  std::vector<char> stack;
  std::vector<Copy> copies;
};

inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline Fiber* self;
inline dim3 grid, block_index, block_size;
inline std::vector<char> memory;  // dynamic shared memory
inline jmp_buf scheduler;
inline void (*body)();

[[noreturn]] inline void fail(const char* what, const char* detail = "") {
  std::fprintf(stderr, "emulator: block (%u, %u, %u), thread %u: %s %s\n", block_index.x, block_index.y, block_index.z,
               self ? self->index.x : 0, what, detail);
  std::abort();
}

inline void leave(State state) {
  self->state = state;
  if (!_setjmp(self->context)) _longjmp(scheduler, 1);
}
inline void entry() {
  body();
  self->state = DONE;
  _longjmp(scheduler, 1);
}
inline void resume(Fiber& fiber) {
  self = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.context, 1);
  fiber.started = true;
  getcontext(&fiber.start);
  fiber.stack.resize(STACK);
  fiber.start.uc_stack.ss_sp = fiber.stack.data();
  fiber.start.uc_stack.ss_size = STACK;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, entry, 0);
  setcontext(&fiber.start);
}

// Bring a slot to an instruction of the warp; the slots of all lanes come back.
inline const Slot* meet(const char* instruction, const Slot& mine) {
  Warp& warp = *self->warp;
  if (warp.arrived == 0)
    warp.instruction = instruction;
  else if (std::strcmp(warp.instruction, instruction))
    fail("lanes diverge at", instruction);
  const Slot* slots = warp.slots[warp.turn % 2];
  warp.slots[warp.turn % 2][self->lane] = mine;
  if (++warp.arrived == WARP) {
    warp.arrived = 0, warp.turn++;
    for (Fiber& fiber : fibers)
      if (fiber.warp == self->warp && &fiber != self) fiber.state = READY;
  } else {
    leave(AT_WARP);
  }
  return slots;
}

inline void run_block(std::mt19937& random) {
  for (Fiber& fiber : fibers) fiber.state = READY, fiber.started = false, fiber.copies.clear();
  for (Warp& warp : warps) warp.arrived = 0, warp.turn = 0;
  std::vector<int> order(warps.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  // A warp runs as far as it can, most of the time, before the next one does: what lacks a barrier then finds the other warps' work
  // undone. Its lanes take turns in any rotation.
  while (true) {
    std::shuffle(order.begin(), order.end(), random);
    bool ran = false, waits = false;
    for (int at : order)
      for (bool again = true; again && random() % 64;) {
        again = false;
        for (unsigned lane = 0, first = random(); lane < WARP; ++lane) {
          Fiber& fiber = fibers[at * WARP + (first + lane) % WARP];
          if (fiber.state == READY) resume(fiber), ran = again = true;
        }
      }
    for (Fiber& fiber : fibers) ran |= fiber.state == READY;
    if (ran) continue;
    for (Fiber& fiber : fibers) {
      self = &fiber;
      if (fiber.state == AT_WARP) fail("waits for lanes that never come, at", fiber.warp->instruction);
      if (fiber.state == AT_BLOCK) waits = true, fiber.state = READY;
    }
    if (!waits) break;
  }
  for (Fiber& fiber : fibers)
    if (!fiber.copies.empty()) self = &fiber, fail("ends with copies in flight");
}

inline void launch(dim3 grid_size, unsigned threads, unsigned shared_bytes, unsigned seed) {
  grid = grid_size, block_size = {threads, 1, 1};
  if (threads % WARP) fail("blocks are whole warps");
  fibers.resize(threads), warps.resize(threads / WARP);
  memory.resize(shared_bytes + 128);
  for (unsigned i = 0; i < threads; ++i) fibers[i].index = {i, 0, 0}, fibers[i].lane = i % WARP, fibers[i].warp = &warps[i / WARP];
  std::mt19937 random(seed);
  std::vector<unsigned> blocks(grid.x * grid.y * grid.z);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = i;
  std::shuffle(blocks.begin(), blocks.end(), random);
  for (unsigned at : blocks) {
    block_index = {at % grid.x, at / grid.x % grid.y, at / grid.x / grid.y};
    std::memset(memory.data(), 0xff, memory.size());  // NaN: a block finds no zeros
    run_block(random);
  }
}

inline char* shared_base() { return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.data()) + 127) & ~uintptr_t(127)); }
template <typename T>
T* shared_pointer(unsigned address, size_t alignment) {
  if (address % alignment || address + alignment > memory.size()) fail("misaligned or foreign shared address");
  return reinterpret_cast<T*>(shared_base() + address);
}

inline uint32_t bits(float v) {
  uint32_t out;
  std::memcpy(&out, &v, 4);
  return out;
}
inline float value(uint32_t v) {
  float out;
  std::memcpy(&out, &v, 4);
  return out;
}
inline uint16_t to_bf16(float v) {
  const uint32_t b = bits(v);
  if (v != v) return 0x7fff;
  return (b + 0x7fff + (b >> 16 & 1)) >> 16;
}
inline float truncated(double sum) {
  const float rounded = float(sum);
  return std::fabs(double(rounded)) > std::fabs(sum) && std::isfinite(sum) ? std::nextafter(rounded, 0.f) : rounded;
}
inline float low(uint32_t pair) { return value(pair << 16); }
inline float high(uint32_t pair) { return value(pair & 0xffff0000u); }

template <typename T>
T shuffle(const char* name, T v, int from) {
  static_assert(sizeof(T) == 4);
  Slot mine{};
  std::memcpy(mine.words, &v, 4);
  const Slot* slots = meet(name, mine);
  std::memcpy(&v, slots[from].words, 4);
  return v;
}
}  // namespace emulator

#define threadIdx (emulator::self->index)
#define blockIdx emulator::block_index
#define blockDim emulator::block_size
#define gridDim emulator::grid

inline void __syncthreads() { emulator::leave(emulator::AT_BLOCK); }
inline void __syncwarp(unsigned = ~0u) { emulator::meet("syncwarp", {}); }
template <typename T>
T __shfl_sync(unsigned, T v, int from) {
  return emulator::shuffle("shfl", v, from & 31);
}
template <typename T>
T __shfl_xor_sync(unsigned, T v, int mask) {
  return emulator::shuffle("shfl.xor", v, emulator::self->lane ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T v, int by) {
  const int lane = emulator::self->lane;
  return emulator::shuffle("shfl.up", v, lane < by ? lane : lane - by);
}
template <typename T>
T __shfl_down_sync(unsigned, T v, int by) {
  const int lane = emulator::self->lane;
  return emulator::shuffle("shfl.down", v, lane + by > 31 ? lane : lane + by);
}
inline int __any_sync(unsigned, int v) {
  const emulator::Slot* slots = emulator::meet("vote.any", {{uint64_t(v != 0)}});
  return std::any_of(slots, slots + emulator::WARP, [](const emulator::Slot& slot) { return slot.words[0] != 0; });
}
inline float __uint_as_float(unsigned v) { return emulator::value(v); }
inline unsigned __float_as_uint(float v) { return emulator::bits(v); }
inline int __float_as_int(float v) { return int(emulator::bits(v)); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = select >> 4 * i & 15, byte = both >> 8 * (nibble & 7) & 255;
    out |= (nibble & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return out;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline size_t __cvta_generic_to_shared(const void* pointer) { return static_cast<const char*>(pointer) - emulator::shared_base(); }
inline int atomicAdd(int* at, int v) {
  const int old = *at;
  *at += v;
  return old;
}
inline unsigned atomicMax(unsigned* at, unsigned v) {
  const unsigned old = *at;
  if (v > old) *at = v;
  return old;
}
inline int atomicOr(int* at, int v) {
  const int old = *at;
  *at |= v;
  return old;
}
using std::isfinite;
using std::max;
using std::min;

// ---- PTX ---------------------------------------------------------------------------------------------------------------------------

inline void ptx_cvt_f32_f16(float& out, uint16_t v) {
  _Float16 h;
  std::memcpy(&h, &v, 2);
  out = float(h);
}
inline void ptx_cvt_rn_f16_f32(uint16_t& out, float v) {
  const _Float16 h = _Float16(v);
  std::memcpy(&out, &h, 2);
}
inline void ptx_cvt_rn_bf16_f32(uint16_t& out, float v) { out = emulator::to_bf16(v); }
inline void ptx_cvt_rn_bf16x2_f32(uint32_t& out, float high, float low) {
  out = uint32_t(emulator::to_bf16(high)) << 16 | emulator::to_bf16(low);
}
inline void ptx_cvt_rn_f16x2_f32(uint32_t& out, float high, float low) {
  uint16_t h, l;
  ptx_cvt_rn_f16_f32(h, high), ptx_cvt_rn_f16_f32(l, low);
  out = uint32_t(h) << 16 | l;
}
inline void ptx_fma_rn_bf16x2(uint32_t& out, uint32_t a, uint32_t b, uint32_t c) {
  using emulator::high, emulator::low, emulator::to_bf16;
  const float h = std::fma(high(a), high(b), high(c)), l = std::fma(low(a), low(b), low(c));
  out = uint32_t(to_bf16(h)) << 16 | to_bf16(l);
}
inline void ptx_max_NaN_f32(float& out, float a, float b) { out = a != a || b != b ? emulator::value(0x7fffffff) : std::max(a, b); }
inline void ptx_ex2_approx_ftz_f32(float& out, float v) { out = std::exp2(v); }

// The matrix units sum products exactly, then truncate.
inline void ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& c0, float& c1, float& c2, float& c3, uint32_t a0, uint32_t a1,
                                                                    uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const int lane = emulator::self->lane, row = lane / 4, column = lane % 4 * 2;
  const emulator::Slot* slots = emulator::meet("mma", {{a0, a1, a2, a3, b0, b1}});
  float* c[4] = {&c0, &c1, &c2, &c3};
  for (int i = 0; i < 4; ++i) {
    double sum = *c[i];
    for (int quad = 0; quad < 4; ++quad)
      for (int half = 0; half < 2; ++half) {
        const uint32_t a = slots[row * 4 + quad].words[half * 2 + i / 2], b = slots[(column + i % 2) * 4 + quad].words[4 + half];
        sum += double(emulator::low(a)) * emulator::low(b);
        sum += double(emulator::high(a)) * emulator::high(b);
      }
    *c[i] = emulator::truncated(sum);
  }
}

inline void ptx_mma_sync_aligned_m16n8k32_row_col_s32_s8_s8_s32(int& c0, int& c1, int& c2, int& c3, uint32_t a0, uint32_t a1, uint32_t a2,
                                                                uint32_t a3, uint32_t b0, uint32_t b1) {
  const int lane = emulator::self->lane, row = lane / 4, column = lane % 4 * 2;
  const emulator::Slot* slots = emulator::meet("mma.s8", {{a0, a1, a2, a3, b0, b1}});
  int* c[4] = {&c0, &c1, &c2, &c3};
  for (int i = 0; i < 4; ++i)
    for (int quad = 0; quad < 4; ++quad)
      for (int half = 0; half < 2; ++half)
        for (int shift = 0; shift < 32; shift += 8)
          *c[i] += int8_t(slots[row * 4 + quad].words[half * 2 + i / 2] >> shift) *
                   int8_t(slots[(column + i % 2) * 4 + quad].words[4 + half] >> shift);
}

inline void ptx_redux_sync_max_u32(uint32_t& out, uint32_t value) {
  const emulator::Slot* slots = emulator::meet("redux", {{value}});
  out = 0;
  for (int lane = 0; lane < 32; ++lane) out = std::max(out, uint32_t(slots[lane].words[0]));
}

inline void ptx_mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(float& c0, float& c1, float& c2, float& c3, uint32_t a0, uint32_t a1,
                                                                   uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  const int lane = emulator::self->lane, row = lane / 4, column = lane % 4 * 2;
  const emulator::Slot* slots = emulator::meet("mma.tf32", {{a0, a1, a2, a3, b0, b1}});
  const auto read = [](uint64_t word) { return double(emulator::value(uint32_t(word) & 0xffffe000u)); };
  float* c[4] = {&c0, &c1, &c2, &c3};
  for (int i = 0; i < 4; ++i) {
    double sum = *c[i];
    for (int quad = 0; quad < 4; ++quad)
      for (int half = 0; half < 2; ++half)
        sum += read(slots[row * 4 + quad].words[half * 2 + i / 2]) * read(slots[(column + i % 2) * 4 + quad].words[4 + half]);
    *c[i] = emulator::truncated(sum);
  }
}

namespace emulator {
// Neighbours of a row of each of four matrices, or of a column.
inline void load_matrices(uint32_t* const (&out)[4], uint32_t address, bool transposed) {
  const int lane = self->lane;
  const Slot* slots = meet(transposed ? "ldmatrix.trans" : "ldmatrix", {{address}});
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint32_t pair = 0;
    for (int i = 0; i < 2; ++i) {
      const int low = lane % 4 * 2 + i, high = lane / 4;
      const uint16_t* row = shared_pointer<uint16_t>(slots[matrix * 8 + (transposed ? low : high)].words[0], 16);
      pair |= uint32_t(row[transposed ? high : low]) << 16 * i;
    }
    *out[matrix] = pair;
  }
}
}  // namespace emulator
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address) {
  emulator::load_matrices({&r0, &r1, &r2, &r3}, address, false);
}
inline void ptx_ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address) {
  emulator::load_matrices({&r0, &r1, &r2, &r3}, address, true);
}

inline void ptx_cp_async_cg_shared_global(uint32_t to, const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("misaligned address in cp.async");
  emulator::self->copies.push_back({emulator::shared_pointer<char>(to, 16), from});
}
inline void ptx_cp_async_wait_all() {
  for (const emulator::Copy& copy : emulator::self->copies) std::memcpy(copy.to, copy.from, 16);
  emulator::self->copies.clear();
}
inline void ptx_ld_global_L2_128B_v4_u32(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 16) emulator::fail("misaligned address in ld.global.v4");
  const uint32_t* words = static_cast<const uint32_t*>(from);
  r0 = words[0], r1 = words[1], r2 = words[2], r3 = words[3];
}
inline void ptx_st_global_v4_u32(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  if (reinterpret_cast<uintptr_t>(to) % 16) emulator::fail("misaligned address in st.global.v4");
  const uint32_t words[] = {a, b, c, d};
  std::memcpy(to, words, 16);
}
inline void ptx_st_global_v2_u32(void* to, uint32_t a, uint32_t b) {
  if (reinterpret_cast<uintptr_t>(to) % 8) emulator::fail("misaligned address in st.global.v2");
  const uint32_t words[] = {a, b};
  std::memcpy(to, words, 8);
}
inline void ptx_mov_b32(int&) {}
template <typename T>
void ptx_mov_b64(T*&) {}
inline void ptx_ld_global_L2_cache_hint_L2_128B_v4_u32(uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, const void* from, uint64_t) {
  ptx_ld_global_L2_128B_v4_u32(r0, r1, r2, r3, from);
}
inline void ptx_ld_global_L2_128B_v2_u32(uint32_t& r0, uint32_t& r1, const void* from) {
  if (reinterpret_cast<uintptr_t>(from) % 8) emulator::fail("misaligned vector load");
  uint32_t words[2];
  std::memcpy(words, from, 8);
  r0 = words[0], r1 = words[1];
}
inline void ptx_prefetch_global_L2(const void*) {}
inline void ptx_ld_global_cg_s32(int& value, const void* from) { std::memcpy(&value, from, 4); }
inline void ptx_griddepcontrol_wait() {}
inline void ptx_griddepcontrol_launch_dependents() {}
