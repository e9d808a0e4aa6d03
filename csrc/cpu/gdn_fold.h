// Gated DeltaNet: the fold of a history. Decays are exponentials of sums over the tokens between, never of differences of running
// sums; keys stay raw, their norms go with the decays.

// What the folds of the value heads of a key head share.
struct FoldKeys {
  alignas(64) float gram[BUFFER_LEN * WINDOW];
  alignas(64) float packed[FOLD_COLUMNS * N];

  void set(const float* k, int history) {
    for (int j = 0; j < history; j += VW) multiply_floats<N, BUFFER_LEN>(k + j * N, k, history, gram + j, WINDOW, Nothing());
    pack_columns<N>(k, history, packed);
  }
};

struct HeadFold : Fold {
  float whole;
};

static void read_fold(const Layer* p, const History& row, int head, const float* k, const float* norm, const FoldKeys& keys,
                      HeadFold& out) {
  const float* ring_g = at<float>(p->ring_g, row.slot * p->ring_g_slot + (long long)head * RING_LEN);
  const float* ring_beta = at<float>(p->ring_beta, row.slot * p->ring_beta_slot + (long long)head * RING_LEN);
  alignas(64) float after[WINDOW] = {}, since[WINDOW] = {}, start[WINDOW] = {}, decay[WINDOW];  // sums after, from and up to an entry
  float whole = 0.0f, total = 0.0f;
  for (int j = row.history - 1; j >= 0; j--) {
    after[j] = whole;
    whole += ring_g[row.place[j]];
  }
  for (int j = 0; j < row.history; j++) {
    const float g = ring_g[row.place[j]];
    start[j] = total += g;
    for (int i = 0; i < j; i++) since[i] += g;
    for (int i = 0; i < j; i += VW)
      store(out.pair + j * WINDOW + i, exp(load(since + i)) * load(keys.gram + j * WINDOW + i) * load(norm + i) * norm[j]);
    out.beta[j] = ring_beta[row.place[j]];
  }
  for (int j = 0; j < row.history; j += VW) store(decay + j, exp(load(start + j)));
  for (int j = 0; j < row.history; j++) out.state[j] = decay[j] * norm[j];
  for (int j = 0; j < row.history; j += VW) store(decay + j, exp(load(after + j)));
  for (int j = 0; j < row.history; j++) out.weight[j] = decay[j] * norm[j];
  out.whole = exp(splat(whole))[0];
  out.decay = &out.whole;
  out.columns = keys.packed;
  out.right = k;
}
