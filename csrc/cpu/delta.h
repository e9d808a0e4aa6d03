// The delta rule in replayed form: what Gated DeltaNet and Kimi Delta Attention share.
//
// Both families solve, for new token t of a value head,
//   u_t = beta_t (v_t - a_t S0 x_t - sum_{j<t} U_tj u_j),   y_t = b_t S0 z_t + sum_{j<=t} Y_tj u_j,
// and differ in the numbers only: the scalar gate of Gated DeltaNet goes into a, b, U and Y, the vector gate of KDA into the columns x
// and z as well.

// Raw keys and queries, or decayed ones.
typedef Columns<State, N, 2 * MAX_TOKENS, !DECAY_VECTOR && std::is_same<Act, bf16>::value> PlaneColumns;

struct Window {
  // The step's own tokens.
  const PlaneColumns* columns;                      // x_0 ... x_{T-1}, z_0 ... z_{T-1}
  float state_u[MAX_TOKENS], state_y[MAX_TOKENS];   // a and b
  alignas(64) float u_weight[MAX_TOKENS * WINDOW];  // U
  alignas(64) float y_weight[MAX_TOKENS * WINDOW];  // Y
  float beta[MAX_TOKENS];
};

// u and y of the new tokens, from S0's product with the 2 T columns; u goes to the ring.
static void solve_tokens(const Params* p, const Row& row, int head, const Window& w, const float* product, Feed& feed) {
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
        feed.ask(2);
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

static void run_head(const Params* p, const Row& row, int head, const Window& w, const Fold& fold, Feed& feed) {
  const Checkpoint state = checkpoint_at(p, row.slot, head);
  const ToCheckpoint<State, P, N, Draws> folded{state, Draws(p, row.slot, p->layer, head)};
  act* ring_v = at<act>(p->ring_v, row.slot * p->ring_v_slot + (long long)head * RING_LEN * P);
  for (int t = 0; t < row.tokens; t++)
    std::memcpy(ring_v + row.place[row.history + t] * P, at<act>(p->v, row.batch * p->v_row + t * p->v_token + head * p->v_outer),
                P * sizeof(act));
  alignas(64) float product[2 * MAX_TOKENS * P];
  for_each_block<State, P, N>(state, feed, [&](int first, const auto& plane, const char* ahead, int soon) INLINE_LAMBDA {
    multiply_plane(plane, state.scale + first, *w.columns, product + first, P);
    if (row.flush)
      fold_exactly(row, fold, ring_v, state, folded, first, ahead, soon, [&]() INLINE_LAMBDA { feed.ask(1, Feed::FOLDING); });
    else
      feed.walked(VW);
  });
  solve_tokens(p, row, head, w, product, feed);
}

// What a head will touch besides its state and its keys.
static void expect_delta(const Params* p, const Row& row, int head, Feed& feed) {
  const long long entries = (long long)head * RING_LEN;
  const act *ring_u = at<act>(p->ring_u, row.slot * p->ring_u_slot + entries * P),
            *ring_v = at<act>(p->ring_v, row.slot * p->ring_v_slot + entries * P);
  if (row.flush)
    expect_ring(feed, row, ring_v, P * sizeof(act));
  else
    expect_new(feed, row, ring_v, P * sizeof(act));
  expect_ring(feed, row, ring_u, P * sizeof(act));
  feed.expect(at<float>(p->ring_beta, row.slot * p->ring_beta_slot + entries), RING_LEN * sizeof(float));
  for (int t = 0; t < row.tokens; t++) {
    feed.expect(at<act>(p->v, row.batch * p->v_row + t * p->v_token + head * p->v_outer), P * sizeof(act));
    feed.expect(at<act>(p->out, row.batch * p->out_row + t * p->out_token + head * p->out_outer), P * sizeof(act));
  }
}
