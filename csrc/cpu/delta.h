// The delta rule in replayed form: what Gated DeltaNet and Kimi Delta Attention share.
//
// Both families solve, for new token t of a value head,
//   u_t = beta_t (v_t - a_t S0 x_t - sum_{j<t} U_tj u_j),   y_t = b_t S0 z_t + sum_{j<=t} Y_tj u_j,
// and differ in the numbers only: the scalar gate of Gated DeltaNet goes into a, b, U and Y, the vector gate of KDA into the columns x
// and z as well. A flush recomputes every u of the history from raw v and the whole checkpoint, so that neither the read plane nor
// the ring's rounding of u ever enters the state.

constexpr int FOLD_COLUMNS = round_up(BUFFER_LEN, VW);

// Raw keys and queries, or decayed ones.
typedef Columns<State, N, 2 * MAX_TOKENS, !DECAY_VECTOR && std::is_same<Act, bf16>::value> PlaneColumns;

struct Window {
  // The step's own tokens.
  const PlaneColumns* columns;                      // x_0 ... x_{T-1}, z_0 ... z_{T-1}
  float state_u[MAX_TOKENS], state_y[MAX_TOKENS];   // a and b
  alignas(64) float u_weight[MAX_TOKENS * WINDOW];  // U
  alignas(64) float y_weight[MAX_TOKENS * WINDOW];  // Y
  float beta[MAX_TOKENS];

  // The fold of the history: u_j as above with columns fold_columns, then S0 <- decay S0 + sum_j fold_weight_j u_j right_j^T.
  const float* fold_columns;  // packed
  float fold_state[BUFFER_LEN];
  alignas(64) float pair[BUFFER_LEN * WINDOW];  // U among the history, row j
  float fold_beta[BUFFER_LEN];
  const float* right;
  float fold_weight[BUFFER_LEN];
  const float* decay;  // one number, or N
};

// u and y of the new tokens, from S0's product with the 2 T columns; u goes to the ring.
static void solve_tokens(const Params* p, const Row& row, int head, const Window& w, const float* product) {
  constexpr int WIDE = 4;
  alignas(64) float fresh[MAX_TOKENS * WIDE * VW];
  const act* ring_v = at<act>(p->ring_v, row.slot * p->ring_v_slot + (long long)head * RING_LEN * P);
  act* ring_u = at<act>(p->ring_u, row.slot * p->ring_u_slot + (long long)head * RING_LEN * P);
  for (int i0 = 0; i0 < P; i0 += WIDE * VW)
    for (int t = 0; t < row.tokens; t++) {
      const float *u_weight = w.u_weight + t * WINDOW, *y_weight = w.y_weight + t * WINDOW;
      const int place = row.place[row.history + t] * P + i0;
      vf u[WIDE], y[WIDE];
      UNROLL for (int i = 0; i < WIDE; i++) {
        u[i] = Act::load(ring_v + place + i * VW) - w.state_u[t] * load(product + t * P + i0 + i * VW);
        y[i] = w.state_y[t] * load(product + (row.tokens + t) * P + i0 + i * VW);
      }
      for (int j = 0; j < row.history; j++) {
        const vf wu = splat(u_weight[j]), wy = splat(y_weight[j]);
        UNROLL for (int i = 0; i < WIDE; i++) {
          const vf uj = Act::load(ring_u + row.place[j] * P + i0 + i * VW);
          u[i] -= wu * uj;
          y[i] += wy * uj;
        }
      }
      for (int j = 0; j < t; j++) {
        if (!row.sees(t, row.history + j)) continue;
        const vf wu = splat(u_weight[row.history + j]), wy = splat(y_weight[row.history + j]);
        UNROLL for (int i = 0; i < WIDE; i++) {
          const vf uj = load(fresh + (j * WIDE + i) * VW);
          u[i] -= wu * uj;
          y[i] += wy * uj;
        }
      }
      act* out = at<act>(p->out, row.batch * p->out_row + t * p->out_token + head * p->out_outer) + i0;
      UNROLL for (int i = 0; i < WIDE; i++) {
        u[i] *= w.beta[t];
        y[i] += y_weight[row.history + t] * u[i];
        store(fresh + (t * WIDE + i) * VW, u[i]);
        Act::store(ring_u + place + i * VW, u[i]);
        Act::store(out + i * VW, y[i]);
      }
    }
}

// The exact fold of a block: all of the recurrence is row by row, so its u come from these rows alone.
static void fold_exactly(const Row& row, const Window& w, const act* v, char* state, Block block, const char* ahead, Block soon) {
  alignas(64) float rows[VW * N], u[BUFFER_LEN * VW], product[FOLD_COLUMNS * VW];
  for (int r = 0; r < VW; r++) {
    const char* at = state + (r < HALF ? block.first + r : block.second + r - HALF) * N * State::read_bytes;
    for (int n = 0; n < N; n += 2 * VW) {
      vf a, b;
      State::whole(at, n, a, b);
      store(rows + r * N + n, a), store(rows + r * N + n + VW, b);
    }
  }
  multiply_tokens<N>(rows, w.fold_columns, row.history, product);
  for (int j = 0; j < row.history; j++) {
    const act* vj = v + row.place[j] * P;
    store(u + j * VW, Act::load_halves(vj + block.first, vj + block.second) - w.fold_state[j] * load(product + j * VW));
  }
  for (int j = 0; j < row.history; j++) {
    const vf done = w.fold_beta[j] * load(u + j * VW);
    for (int later = j + 1; later < row.history; later++) store(u + later * VW, load(u + later * VW) - w.pair[later * WINDOW + j] * done);
    store(u + j * VW, w.fold_weight[j] * done);
  }
  fold_block<State, VW, N, DECAY_VECTOR>(FromFloats<N>{rows}, state, block, ahead, soon, w.decay, u, HALF, w.right, row.history);
}

static void run_head(const Params* p, const Row& row, int head, const Window& w) {
  char* state = at<char>(p->state, 0) + (row.slot * p->state_slot + (long long)head * P * N) * State::whole_bytes;
  act* ring_v = at<act>(p->ring_v, row.slot * p->ring_v_slot + (long long)head * RING_LEN * P);
  for (int t = 0; t < row.tokens; t++)
    std::memcpy(ring_v + row.place[row.history + t] * P, at<act>(p->v, row.batch * p->v_row + t * p->v_token + head * p->v_outer),
                P * sizeof(act));
  alignas(64) float product[2 * MAX_TOKENS * P];
  for_each_block<State, P, N>(state, row.flush, [&](Block block, const auto& plane, const char* ahead, Block soon) INLINE_LAMBDA {
    const int second = block.second - block.first;
    if (row.tokens) multiply_plane(plane, *w.columns, product + block.first, P, second);
    if (row.flush) fold_exactly(row, w, ring_v, state, block, ahead, soon);
  });
  solve_tokens(p, row, head, w, product);
}
