// Kimi Delta Attention: the decays of a history, and its fold. No factor ever exceeds 1. All vectors are in the columns' order.

struct HeadFold : Fold {
  alignas(64) float decayed[WINDOW * N];       // keys, decayed up to the history's end
  alignas(64) float whole[N];                  // e^{G_h}
  alignas(64) float gate[BUFFER_LEN * N];      // e^{g_j}, where the history is folded
  alignas(64) float column[BUFFER_LEN * N];    // e^{G_j} k_j
  alignas(64) float packed[FOLD_COLUMNS * N];  // the same, packed
};

// Keys decayed to the history's end, from the newest entry backwards, and the decay of the checkpoint, an exponential of a sum: its error
// comes again with every fold. The keys' decays are exponentials, too, or where the history is folded and every gate is needed, products of
// gates as in the recurrence itself. `meanwhile()` is called for every 2 VW channels of every entry.
template <class Meanwhile>
static void decay_history(const Layer* p, const History& row, int head, bool folds, const float* k, HeadFold& out, Meanwhile meanwhile) {
  const float* ring_g = at<float>(p->ring_g, row.slot * p->ring_g_slot + (long long)head * RING_LEN * N);
  for (int n = 0; n < N; n += 2 * VW) {
    vf sum[2] = {}, decay[2] = {splat(1.0f), splat(1.0f)};
    for (int j = row.history - 1; j >= 0; j--) {
      vf g[2];
      meanwhile();
      columns2<State, fp32>(ring_g + row.place[j] * N + n, g[0], g[1]);
      UNROLL for (int i = 0; i < 2; i++) {
        store(out.decayed + j * N + n + i * VW, decay[i] * load(k + j * N + n + i * VW));
        sum[i] += g[i];
        if (folds) {
          const vf gate = exp(g[i]);
          store(out.gate + j * N + n + i * VW, gate);
          decay[i] *= gate;
        } else {
          decay[i] = exp(sum[i]);
        }
      }
    }
    UNROLL for (int i = 0; i < 2; i++) store(out.whole + n + i * VW, folds ? exp(sum[i]) : decay[i]);
  }
}

static void read_fold(const Layer* p, const History& row, int head, const float* k, const float* norm, HeadFold& out) {
  const float* ring_beta = at<float>(p->ring_beta, row.slot * p->ring_beta_slot + (long long)head * RING_LEN);
  for (int j = 0; j < row.history; j++) {
    vf key[N / VW];  // e^{G_j - G_i} k_j for falling i, a product of gates: nothing overflows, what vanishes was negligible
    UNROLL for (int n = 0; n < N / VW; n++) key[n] = load(out.gate + j * N + n * VW) * load(k + j * N + n * VW);
    alignas(64) float sums[VW * VW];
    for (int i0 = (j - 1) / VW * VW; j > 0 && i0 >= 0; i0 -= VW) {
      for (int i = i0 + VW < j ? i0 + VW - 1 : j - 1; i >= i0; i--) {
        vf sum = {};
        UNROLL for (int n = 0; n < N / VW; n++) {
          sum += key[n] * load(k + i * N + n * VW);
          key[n] *= load(out.gate + i * N + n * VW);
        }
        store(sums + (i - i0) * VW, sum);
      }
      store(out.pair + j * WINDOW + i0, sum_lanes(sums) * load(norm + i0) * norm[j]);
    }
    UNROLL for (int n = 0; n < N / VW; n++) store(out.column + j * N + n * VW, key[n]);
    out.state[j] = out.weight[j] = norm[j];
    out.beta[j] = ring_beta[row.place[j]];
  }
  pack_columns<N>(out.column, row.history, out.packed);
  out.columns = out.packed;
  out.right = out.decayed;
  out.decay = out.whole;
}
