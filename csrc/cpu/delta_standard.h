// The delta rule as the standard kernels run it, one token after another. Both products of a token come from the state before it,
//   S k = a S0 x,  y = b S0 z + (k . q) u,
// so that the rows are read once and then updated in place.

struct Token {
  const float* columns;    // x and z
  float state_u, state_y;  // a and b
  float y_u;               // k . q
  float beta;
  const float* right;  // S <- decay S + right_weight u right^T
  float right_weight;
  const float* decay;  // one number, or N
};

// Rows of a place times both columns, for multiply_block.
template <class Place>
struct PlaceTimesColumns {
  static constexpr int LANES_APART = 1;
  const Place& place;
  vf x[N / VW], z[N / VW];
  INLINE PlaceTimesColumns(const Place& place, const float* columns) : place(place) {
    UNROLL for (int i = 0; i < N / VW; i++) {
      x[i] = load(columns + i * VW), z[i] = load(columns + N + i * VW);
      KEEP(x[i]);
      KEEP(z[i]);
    }
  }
  INLINE void quad(int r, vf (*acc)[2]) const {
    UNROLL for (int k = 0; k < QUAD; k++) {
      const Place row = place.row(r * QUAD + k);
      UNROLL for (int i = 0; i < N / VW; i += 2) {
        vf a, b;
        row(i * VW, a, b);
        acc[k][0] += a * x[i];
        acc[k][1] += a * z[i];
        acc[k][0] += b * x[i + 1];
        acc[k][1] += b * z[i + 1];
      }
    }
  }
};

template <class Place>
INLINE void update_rows(const Place& place, const float* decay, const float* left, const float* right) {
  vf rs[N / VW], ds[DECAY_VECTOR ? N / VW : 1];
  UNROLL for (int i = 0; i < N / VW; i++) {
    rs[i] = load(right + i * VW);
    KEEP(rs[i]);
    if (DECAY_VECTOR) {
      ds[i] = load(decay + i * VW);
      KEEP(ds[i]);
    }
  }
  if (!DECAY_VECTOR) ds[0] = splat(*decay);
  for (int r = 0; r < VW; r++) {
    const Place row = place.row(r);
    const vf l = splat(left[r]);
    UNROLL for (int i = 0; i < N / VW; i += 2) {
      vf s0, s1;
      row(i * VW, s0, s1);
      row.store(i * VW, ds[DECAY_VECTOR ? i : 0] * s0 + l * rs[i], ds[DECAY_VECTOR ? i + 1 : 0] * s1 + l * rs[i + 1]);
    }
  }
}

static void run_head(const Params* p, const Row& row, int head, const Token* tokens) {
  for (int p0 = 0; p0 < P; p0 += VW) {
    alignas(64) float kept[VW * N], products[2 * VW], left[VW];
    for (int t = 0; t < row.tokens; t++) {
      const Token& token = tokens[t];
      at_place(p, row, head, p0, t, kept, [&](auto place) {
        multiply_block<2>(PlaceTimesColumns<decltype(place)>(place, token.columns), products, VW, 1);
        const act* v = at<act>(p->v, row.batch * p->v_row + t * p->v_token + head * p->v_outer) + p0;
        const vf u = token.beta * (Act::load(v) - token.state_u * load(products));
        act* out = at<act>(p->out, row.batch * p->out_row + t * p->out_token + head * p->out_outer) + p0;
        Act::store(out, token.state_y * load(products + VW) + token.y_u * u);
        store(left, token.right_weight * u);
        update_rows(place, token.decay, left, token.right);
      });
    }
  }
}
