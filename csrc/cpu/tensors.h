// Rows of a head's state in plain tensors of any strides.

enum TensorType { NONE, FP32, BF16, FP16 };

// N numbers, `stride` apart, between a tensor and `row`.
template <class F>
static void move_row(void* tensor, long long offset, long long stride, float* row, bool store) {
  typename F::T* at = (typename F::T*)tensor + offset;
  typename F::T dense[N];
  if (store) {
    for (int n = 0; n < N; n += VW) F::store(dense + n, load(row + n));
    for (int n = 0; n < N; n++) at[n * stride] = dense[n];
  } else {
    for (int n = 0; n < N; n++) dense[n] = at[n * stride];
    for (int n = 0; n < N; n += VW) ::store(row + n, F::load(dense + n));
  }
}

static void move_row(int type, void* tensor, long long offset, long long stride, float* row, bool store) {
  switch (type) {
    case FP32:
      return move_row<fp32>(tensor, offset, stride, row, store);
    case BF16:
      return move_row<bf16>(tensor, offset, stride, row, store);
    case FP16:
      return move_row<fp16>(tensor, offset, stride, row, store);
  }
}
