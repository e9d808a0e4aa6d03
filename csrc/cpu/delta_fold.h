// The exact fold of the delta rule: every u of the history again from raw v and the whole checkpoint, so that neither the read plane
// nor the ring's rounding of u ever enters the state.
//   u_j = beta_j (v_j - state_j S0 column_j - sum_{i<j} pair_ji u_i),   S0 <- decay S0 + sum_j weight_j u_j right_j^T.

constexpr int FOLD_COLUMNS = round_up(BUFFER_LEN, VW);

struct Fold {
  const float* columns;  // packed
  float state[BUFFER_LEN];
  alignas(64) float pair[BUFFER_LEN * WINDOW];  // row j
  float beta[BUFFER_LEN];
  const float* right;
  float weight[BUFFER_LEN];
  const float* decay;  // one number, or N
};

static void read_norms(const Layer* p, const History& row, int g, float* norm) {
  const float* ring_norm = at<float>(p->ring_k_norm, row.slot * p->ring_k_norm_slot + (long long)g * RING_LEN);
  for (int j = 0; j < row.history; j++) norm[j] = ring_norm[row.place[j]];
}

// Keys of a history in the columns' order, and their norms.
template <class Meanwhile>
static void read_history(const Layer* p, const History& row, int g, float* k, float* norm, const Meanwhile& meanwhile) {
  const act* ring = at<act>(p->ring_k, row.slot * p->ring_k_slot + (long long)g * RING_LEN * N);
  read_norms(p, row, g, norm);
  for (int j = 0; j < row.history; j++) {
    columns<State, Act>(ring + row.place[j] * N, k + j * N, N);
    meanwhile();
  }
}

// u of TILE entries from j0 on, from their right-hand sides without the entries before j0: forward substitution, in registers.
template <int TILE>
INLINE void solve_tile(const Fold& w, int j0, vf* u) {
  vf x[TILE];
  UNROLL for (int j = 0; j < TILE; j++) x[j] = u[j0 + j];
  for (int i = 0; i < j0; i++) UNROLL for (int j = 0; j < TILE; j++) x[j] -= w.pair[(j0 + j) * WINDOW + i] * u[i];
  UNROLL for (int j = 0; j < TILE; j++) {
    x[j] *= w.beta[j0 + j];
    UNROLL for (int later = j + 1; later < TILE; later++) x[later] -= w.pair[(j0 + later) * WINDOW + j0 + j] * x[j];
    u[j0 + j] = x[j];
  }
}

// A block's rows: all of the recurrence is row by row, so its u come from these rows alone.
template <class To, class Meanwhile>
static void fold_exactly(const History& row, const Fold& w, const act* v, const Checkpoint& from, const To& to, int first,
                         const char* ahead, int soon, const Meanwhile& meanwhile) {
  alignas(64) float rows[VW * N], product[FOLD_COLUMNS * VW], left[BUFFER_LEN * VW];
  vf u[BUFFER_LEN];
  read_block<State, P, N>(from, first, rows);
  multiply_tokens<N>(rows, w.columns, row.history, product, meanwhile);
  for (int j = 0; j < row.history; j++)
    u[j] = Act::load_runs(v + row.place[j] * P + first, Walk<State, P>::APART) - w.state[j] * load(product + j * VW);
  int j = 0;
  for (; j + 8 <= row.history; j += 8) solve_tile<8>(w, j, u);
  for (; j + 2 <= row.history; j += 2) solve_tile<2>(w, j, u);
  if (j < row.history) solve_tile<1>(w, j, u);
  for (int j = 0; j < row.history; j++) store(left + j * VW, w.weight[j] * u[j]);
  fold_rows<State, VW, P, N, DECAY_VECTOR>(from, rows, to, first, ahead, soon, w.decay, left, Walk<State, P>::LANES_APART, w.right,
                                           row.history, Nothing());  // its own prefetches are as many as it can bear
}
