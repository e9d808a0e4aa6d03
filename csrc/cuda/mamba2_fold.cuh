// Mamba-2: what a history adds to the state.

// Of x_j B_j^T; `back` is the sum of d over later entries.
__device__ __forceinline__ float fold_factor(float a, float step, float back) { return expf(a * back) * step; }

// Where rows have scales, a unit stays in registers until its largest numbers are known.
constexpr bool FOLD_STAYS = Whole::SCALED && !Whole::COPIED && N <= 128 && BUFFER_LEN <= 16;

// x_j times its fold factor as A fragments, three bf16 terms, then the fold.
template <typename To>
__device__ __forceinline__ void fold_unit(const Place& from, To to, float decay, const float* factor, const Act* values, const Act* keys,
                                          int history, int lane) {
  u32 factors[FOLD_STEPS][3][4];
#pragma unroll
  for (int s = 0; s < FOLD_STEPS; ++s) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int entry = 16 * s + i / 2 * 8 + 2 * (lane % 4) + e;
        x[e] = entry < history ? factor[entry] * to_float(values[entry * VALUE_PITCH + lane / 4 + (i & 1) * 8]) : 0.f;
      }
      u32 terms[3];
      split(x[0], x[1], terms);
#pragma unroll
      for (int n = 0; n < 3; ++n) factors[s][n][i] = terms[n];
    }
  }
  constexpr int RUNS = FOLD_STAYS ? WHOLE_RUNS : FOLD_BATCH;
  auto fold_some = [&](auto& some, int first) {
    WholeRuns<RUNS> whole;
    whole.load(from, first);
    fold_runs<RUNS>(
        some, first, [&](float (&value)[Whole::VEC], int i, int row) { whole.decode(value, i, row); }, [=](int) { return decay; }, factors,
        ActRows{keys}, history, opaque(lane));
  };
  if constexpr (FOLD_STAYS) {
    KeptRuns<RUNS> unit;
    fold_some(unit, 0);
    unit.leave(to);
  } else {
    fold<RUNS>(to, [&](int first) { fold_some(to, first); });
  }
}
