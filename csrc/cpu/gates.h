// Gates and norms of the delta rule. Needs the constants QK_NORM, SCALE, GATE, BETA_LOGIT, LOWER_BOUND.

enum Gate { SOFTPLUS, LOWER_BOUND_SIGMOID, PRECOMPUTED };

// Log decays from the gate's input; `rate` is e^{A_log}.
INLINE vf log_decay(vf x, vf bias, vf rate) {
  if (GATE == SOFTPLUS) return -rate * softplus(x + bias);
  if (GATE == LOWER_BOUND_SIGMOID) return LOWER_BOUND * sigmoid(rate * (x + bias));
  return x;
}

INLINE vf beta_value(vf x) { return BETA_LOGIT ? sigmoid(x) : x; }

INLINE float dot(const float* a, const float* b) {
  vf sum = {};
  UNROLL for (int n = 0; n < N; n += VW) sum += load(a + n) * load(b + n);
  float total = 0.0f;
  for (int i = 0; i < VW; i++) total += sum[i];
  return total;
}

// 1 / sqrt(sum x^2 + 1e-6), or 1 without normalisation.
INLINE float inverse_norm(const float* x) { return QK_NORM ? 1.0f / std::sqrt(dot(x, x) + 1e-6f) : 1.0f; }
