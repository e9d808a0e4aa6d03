// Gates and norms of the delta rule. Needs the constants QK_NORM, SCALE, GATE, BETA_LOGIT, LOWER_BOUND.

enum Gate { SOFTPLUS, LOWER_BOUND_SIGMOID, PRECOMPUTED };

// Log decays from COUNT vectors of the gate's input with its bias; `rate` is e^{A_log}. Each step runs over all vectors before the next
// one, since within a vector everything waits for what came before.
template <int COUNT>
INLINE void log_decays(vf* x, vf rate) {
  vf e[COUNT];
  if (GATE == SOFTPLUS) {
    UNROLL for (int i = 0; i < COUNT; i++) e[i] = softplus_exp(x[i]);
    UNROLL for (int i = 0; i < COUNT; i++) x[i] = -rate * softplus_rest(x[i], e[i]);
  } else if (GATE == LOWER_BOUND_SIGMOID) {
    UNROLL for (int i = 0; i < COUNT; i++) e[i] = exp(-rate * x[i]);
    UNROLL for (int i = 0; i < COUNT; i++) x[i] = LOWER_BOUND / (1.0f + e[i]);
  }
}
// Log decays of COUNT vectors of a gate's input.
constexpr int MANY = N / VW < 8 ? N / VW : 8;
template <int COUNT>
INLINE void load_gates(const GateFormat::T* raw, const float* bias, vf rate, vf* g) {
  UNROLL for (int i = 0; i < COUNT; i++) {
    g[i] = GateFormat::load(raw + i * VW);
    if (GATE != PRECOMPUTED && bias) g[i] += load(bias + i * VW);
  }
  log_decays<COUNT>(g, rate);
}
INLINE vf log_decay(vf x, vf bias, vf rate) {
  if (GATE != PRECOMPUTED) x += bias;
  log_decays<1>(&x, rate);
  return x;
}

INLINE vf beta_value(vf x) { return BETA_LOGIT ? sigmoid(x) : x; }

INLINE float dot(const float* a, const float* b) {
  vf products = {};
  UNROLL for (int n = 0; n < N; n += VW) products += load(a + n) * load(b + n);
  return sum(products);
}

// 1 / sqrt(sum x^2 + 1e-6), or 1 without normalisation.
INLINE float inverse_norm(const float* x) { return QK_NORM ? 1.0f / std::sqrt(dot(x, x) + 1e-6f) : 1.0f; }
