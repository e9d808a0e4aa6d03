// The order in which the planes of heads are read, and what brings them near in time.

// The state is walked in blocks of VW rows, and a block quad by quad. Where all memory is read the rows follow one another. But behind a
// plane that a step reads lies one that it skips, and the hardware's prefetchers, which follow lines to the end of a page and further,
// would fetch from it in vain. There a quad is a row of each quarter of the plane: a core then reads four pages at once and leaves each
// before its prefetchers have gone far.
template <class State, int P>
struct Walk {
  static constexpr bool SPREAD = State::skips;
  static constexpr int APART = SPREAD ? P / QUAD : 1, STEP = SPREAD ? 1 : QUAD;  // from a row to the next of its quad, from quad to quad
  static constexpr int LANES_APART = SPREAD ? RUN : 1;                           // the same as APART in a vector of the block's rows
  static constexpr int first(int block) { return block * (SPREAD ? RUN : VW); }
  static constexpr int row(int k, int r) { return k * APART + r * STEP; }  // row k of quad r, from the block's first row
  static constexpr int lane(int k, int r) { return k * LANES_APART + r * STEP; }
};

// The rows of the read planes that a thread is about to walk, in that order. They are asked for at an even pace through all that the thread
// does: a core has few pending misses, a burst of them holds up the loads behind it, and while none is pending the memory rests.
template <class State, int P, int N>
struct PlaneFeed {
  typedef Walk<State, P> Order;
  static constexpr long long ROW = N * State::read_bytes;
  static constexpr long long STEP = ROW * Order::APART;                 // from a row to the next one of its quad
  static constexpr long long BACK = ROW * (Order::SPREAD ? 1 - P : 0);  // more after a quad
  static constexpr long long SKIP =                                     // more after a plane
      ROW * (Order::SPREAD ? P - P / QUAD : 0) + P * N * (State::skips ? State::whole_bytes - State::read_bytes : 0);
  // Most rows pending, measured: when a walk begins and when it ends, so that what comes between two walks has rows to ask for, and while a
  // flush computes. Rows that follow one another need little: the hardware's prefetchers go on from the first ones.
  static constexpr int BEGINNING = (Order::SPREAD ? 24576 : 8192) / ROW, END = (Order::SPREAD ? 16384 : 8192) / ROW;
  static constexpr int FOLDING = (Order::SPREAD ? 196608 : 8192) / ROW;

  const char* next = nullptr;       // the row to ask for
  int left = 0;                     // rows from there on
  const char* following = nullptr;  // planes after those
  int more = 0;                     // rows of theirs
  int pending = 0;                  // rows asked for and not walked

  // Planes of consecutive heads, to be walked after those that are known: the ones that are walked, and one unit at most.
  INLINE void append(const char* planes, int heads) {
    following = planes, more = heads * P;
    if (left == 0) go_on();
  }
  INLINE void go_on() { next = following, left = more, more = 0; }

  // The row to ask for now; `near` where `most` are pending or none is left.
  INLINE const char* take(int most, const char* near) {
    if (pending >= most || left == 0) return near;
    const char* row = next;
    pending++, left--;
    next += STEP;
    if (left % QUAD == 0) next += BACK;
    if (left % P == 0) next += SKIP;
    if (left == 0) go_on();
    return row;
  }
  INLINE void walked(int rows) {
    while (pending < rows && take(rows, nullptr)) {  // the walk was first
    }
    pending = pending < rows ? 0 : pending - rows;
  }
};

// What a thread will touch: the planes, and before them pieces of rings, inputs and outputs of the heads that come next, at most PIECES.
template <class State, int P, int N, int PIECES>
struct HeadFeed : PlaneFeed<State, P, N> {
  typedef PlaneFeed<State, P, N> Planes;
  static constexpr int LINE = 64, AT_ONCE = 4;
  int asked = 0, pieces = 0;
  const char *piece[PIECES], *piece_end[PIECES];

  INLINE void expect(const void* at, int bytes) {
    if (asked == pieces) asked = pieces = 0;
    if (pieces == PIECES) return;
    piece[pieces] = (const char*)((uintptr_t)at / LINE * LINE), piece_end[pieces++] = (const char*)at + bytes;
  }

  // Asks for a few lines, some `times`, unless `most` rows are pending. Loops that compute call it once in tens of cycles.
  INLINE void ask(int times = 1, int most = Planes::BEGINNING) {
    for (int i = 0; i < times; i++)
      if (asked < pieces) {
        const char*& at = piece[asked];
        for (int line = 0; line < AT_ONCE && at < piece_end[asked]; line++, at += LINE) prefetch(at, LINE);
        if (at >= piece_end[asked]) asked++;
      } else if (const char* row = Planes::take(most, nullptr)) {
        prefetch(row, Planes::ROW);
      }
  }
};

// What loops that ask are given where there is nothing to ask for.
struct Nothing {
  INLINE void operator()() const {}
};

// A block of the read plane, and the feed to go on with meanwhile, a row for each of its rows.
template <class State, int P, int N>
struct ReadPlane {
  static constexpr int LANES_APART = Walk<State, P>::LANES_APART;
  const char* first;
  int row;  // of the head, in the order of the walk
  PlaneFeed<State, P, N>& feed;
  static constexpr int offset(int k, int r) { return Walk<State, P>::row(k, r) * N * State::read_bytes; }
  // Fewer are pending at a walk's end than at its beginning: what comes after it asks for the rest.
  INLINE int most(int r) const {
    typedef PlaneFeed<State, P, N> Planes;
    return Planes::BEGINNING - (Planes::BEGINNING - Planes::END) * (row + r * QUAD) / P;
  }
};
