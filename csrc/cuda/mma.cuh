// Matrix instructions, asynchronous copies and the lane layout they share.
//
// m16n8k16: A is 16 rows x 16 columns (row), B 16 x 8 (column), the accumulator 16 x 8. With g = lane / 4 and t = lane % 4:
//   A register 0: row g,     k = 2t, 2t+1      B register 0: k = 2t, 2t+1, column g
//   A register 1: row g + 8, k = 2t, 2t+1      B register 1: k = 2t+8, 2t+9, column g
//   A register 2: row g,     k = 2t+8, 2t+9    accumulator 0, 1: row g,     columns 2t, 2t+1
//   A register 3: row g + 8, k = 2t+8, 2t+9    accumulator 2, 3: row g + 8, columns 2t, 2t+1

__device__ __forceinline__ void mma(float (&acc)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// m16n8k32 on signed bytes, exact: registers hold four neighbours where those above hold two.
__device__ __forceinline__ void mma_bytes(int (&acc)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
      : "+r"(acc[0]), "+r"(acc[1]), "+r"(acc[2]), "+r"(acc[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The largest of all lanes' values.
__device__ __forceinline__ u32 largest_of_warp(u32 value) {
  u32 out;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(out) : "r"(value));
  return out;
}

// m16n8k8 on floats of which the matrix units read 11 bits of mantissa (tf32). With the order of k chosen so that a lane's two
// elements are neighbours: A registers are (row g, even), (row g + 8, even), (row g, odd), (row g + 8, odd), B the same of column g.
__device__ __forceinline__ void mma_tf32(float (&acc)[4], const float (&a)[4], const float (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 { %0, %1, %2, %3}, { %4, %5, %6, %7}, { %8, %9}, { %0, %1, %2, %3};"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

// Floats as a sum of two of tf32: the upper one rounded to nearest, so that all but the last bit of the rest fits the lower one.
template <int COUNT>
__device__ __forceinline__ void split_tf32(const float (&value)[COUNT], float (&upper)[COUNT], float (&lower)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    upper[i] = __uint_as_float((__float_as_uint(value[i]) + 0x1000u) & 0xffffe000u);
    lower[i] = value[i] - upper[i];
  }
}

// A product of floats, without that of the two lower parts: `sum` takes the upper products, `small` the others, because the matrix
// units truncate when they add. An EXACT b is its own upper part.
template <bool EXACT>
__device__ __forceinline__ void mma_floats(float (&sum)[4], float (&small)[4], const float (&a)[4], const float (&b)[2]) {
  float a_upper[4], a_lower[4];
  split_tf32(a, a_upper, a_lower);
  if constexpr (EXACT) {
    mma_tf32(sum, a_upper, b);
    mma_tf32(small, a_lower, b);
  } else {
    float b_upper[2], b_lower[2];
    split_tf32(b, b_upper, b_lower);
    mma_tf32(sum, a_upper, b_upper);
    mma_tf32(small, a_upper, b_lower);
    mma_tf32(small, a_lower, b_upper);
  }
}

// The product of two sums of bf16 terms: pairs of terms of order 0 .. ORDERS - 1, by default without those that lie below the
// precision of the longer sum.
template <int ORDERS = 0, int A_TERMS, int B_TERMS>
__device__ __forceinline__ void mma_terms(float (&acc)[4], const u32 (&a)[A_TERMS][4], const u32 (&b)[B_TERMS][2]) {
  constexpr int LONGER = A_TERMS > B_TERMS ? A_TERMS : B_TERMS;
#pragma unroll
  for (int order = (ORDERS ? ORDERS : LONGER) - 1; order >= 0; --order)  // small products first
#pragma unroll
    for (int i = 0; i < A_TERMS; ++i)
      if (order - i >= 0 && order - i < B_TERMS) mma(acc, a[i], b[order - i][0], b[order - i][1]);
}

__device__ __forceinline__ u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

// Four 8 x 8 blocks of 16-bit values; lane / 8 is the block, lane % 8 the row of it that a lane gives. A lane gets two neighbours of row
// lane / 4 of each.
__device__ __forceinline__ void ldmatrix(u32 (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 { %0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same, transposed: turns [k][row] in shared memory into an A fragment.
__device__ __forceinline__ void ldmatrix_transposed(u32 (&a)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { %0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(shared_address(row))
               : "memory");
}

// 16 bytes to shared memory without passing through registers.
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The same number, of which the compiler knows nothing: what is computed from it stays in its loop, where it does not hold registers.
__device__ __forceinline__ int opaque(int value) {
  asm volatile("mov.b32 %0, %0;" : "+r"(value));
  return value;
}
template <typename T>
__device__ __forceinline__ T* opaque(T* pointer) {
  asm volatile("mov.b64 %0, %0;" : "+l"(pointer));
  return pointer;
}

// A warp's load covers half a line of each of its rows, the next one the other half. L1 takes it from the same request only if the line is
// allocated there, and L2 should fetch the whole line at once: without both, L2 serves twice the requests.
__device__ __forceinline__ void load_vector(u32 (&out)[4], const void* from) {
  asm volatile("ld.global.L2::128B.v4.u32 { %0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "l"(from)
               : "memory");
}
__device__ __forceinline__ void load_vector(u32 (&out)[2], const void* from) {
  asm volatile("ld.global.L2::128B.v2.u32 { %0, %1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "l"(from) : "memory");
}
__device__ __forceinline__ void load_vector(u32 (&out)[1], const void* from) { out[0] = *static_cast<const u32*>(from); }
__device__ __forceinline__ void load_vector(u32 (&out)[8], const void* from) {
  u32(&low)[4] = *reinterpret_cast<u32(*)[4]>(out);
  u32(&high)[4] = *reinterpret_cast<u32(*)[4]>(out + 4);
  load_vector(low, from), load_vector(high, static_cast<const uint4*>(from) + 1);
}
// What nobody will read again before it has left L2 anyway: it makes room for others first.
__device__ __forceinline__ void load_once(u32 (&out)[4], const void* from) {
  constexpr u64 EVICT_FIRST = 0x12f0000000000000;  // as createpolicy makes it
  asm volatile("ld.global.L2::cache_hint.L2::128B.v4.u32 { %0, %1, %2, %3}, [%4], %5;"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "l"(from), "l"(EVICT_FIRST)
               : "memory");
}
// Past L1, whose copy might outlive a wait for who writes it.
__device__ __forceinline__ int load_early(const void* from) {
  int out;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(out) : "l"(from) : "memory");
  return out;
}
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
__device__ __forceinline__ void store_vector(void* to, const u32 (&value)[4]) {
  *static_cast<uint4*>(to) = make_uint4(value[0], value[1], value[2], value[3]);
}

__device__ __forceinline__ void store_vector(void* to, const u32 (&value)[2]) { *static_cast<uint2*>(to) = make_uint2(value[0], value[1]); }

// A kernel may start while the one before it in the stream still runs, as far as it relies on no memory; what follows sees all that the
// one before has written. The next kernel may then start, too.
__device__ __forceinline__ void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Words of which the compiler would make several stores.
__device__ __forceinline__ void store_global(void* to, const u32 (&word)[4]) {
  asm volatile("st.global.v4.u32 [%0], { %1, %2, %3, %4};" ::"l"(to), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3]) : "memory");
}
__device__ __forceinline__ void store_global(void* to, const u32 (&word)[2]) {
  asm volatile("st.global.v2.u32 [%0], { %1, %2};" ::"l"(to), "r"(word[0]), "r"(word[1]) : "memory");
}
__device__ __forceinline__ void store_global(void* to, const u32 (&word)[1]) { *static_cast<u32*>(to) = word[0]; }
__device__ __forceinline__ void store_global(void* to, const u32 (&word)[8]) {
  const u32 low[4] = {word[0], word[1], word[2], word[3]}, high[4] = {word[4], word[5], word[6], word[7]};
  store_global(to, low), store_global(static_cast<uint4*>(to) + 1, high);
}

// 16 bytes of activations to shared memory from an address of any alignment that the element type allows.
template <typename Act>
__device__ __forceinline__ void copy_activations(Act* to, const Act* from, bool aligned) {
  if (aligned) {
    copy_async(to, from);
    return;
  }
#pragma unroll
  for (int i = 0; i < 16 / int(sizeof(Act)); ++i) to[i] = from[i];
}
