// Mamba-2: decays of a history, and what it adds to the state.

// Decays of VW heads up to a token t, one a lane.
struct DecayWeights {
  alignas(64) float weight[WINDOW * VW];  // of x_j B_j^T: e^{A (c_t - c_j)} d_j
  alignas(64) float whole[VW];            // of the checkpoint: e^{A c_t}

  // Sums run from the newest entry, `last`, backwards, over the entries that the token sees.
  template <class Sees>
  void set(vf A, const float* d, int last, Sees sees) {
    vf sum = {};
    for (int j = last; j >= 0; j--) {
      if (!sees(j)) continue;
      const vf dj = load(d + j * VW);
      store(weight + j * VW, exp(A * sum) * dj);
      sum += dj;
    }
    store(whole, exp(A * sum));
  }
};

// d of the history and A of `heads` heads, one a lane.
static vf read_history(const Layer* p, const History& row, int head, int heads, float* d) {
  alignas(64) float A[VW] = {};
  const float* ring = at<float>(p->ring_d, row.slot * p->ring_d_slot + (long long)head * RING_LEN);
  for (int i = 0; i < heads; i++) {
    A[i] = at<const float>(p->A, head)[i];
    for (int j = 0; j < row.history; j++) d[j * VW + i] = ring[i * RING_LEN + row.place[j]];
  }
  return load(A);
}

// x_j of the history times their weights; `weight` points at the head's lane.
static void weigh_values(const History& row, const act* ring_x, const float* weight, float* left) {
  for (int j = 0; j < row.history; j++)
    for (int i = 0; i < P; i += VW) store(left + j * P + i, weight[j * VW] * Act::load(ring_x + row.place[j] * P + i));
}
