// C interface of the CPU kernels; structs are mirrored by ctypes in the Python modules beside.
#include "moe.h"

using namespace sgl;

extern "C" {

int sgl_abi_version() { return 1; }

void sgl_set_threads(int count) { Pool::instance().set_threads(count); }

void sgl_pack(void* storage, int64_t rows, int64_t cols, int64_t item_bytes) {
  if (item_bytes == 2)
    pack(static_cast<bf16*>(storage), rows, cols);
  else
    pack(static_cast<float*>(storage), rows, cols);
}

void sgl_linear(const void* weight, int64_t out_features, int64_t cols, const float* x,
                int64_t ldx, int64_t rows, int64_t is_bf16, float* out) {
  Linear weights = {weight, nullptr, out_features, cols, is_bf16};
  linear(weights, x, ldx, rows, out, out_features, kStore);
}

void sgl_packed_rows(const void* storage, int64_t cols, int64_t is_bf16, const int64_t* ids,
                     int64_t count, float* out) {
  for (int64_t t = 0; t < count; ++t) {
    if (is_bf16)
      packed_row(static_cast<const bf16*>(storage), cols, ids[t], out + t * cols);
    else
      packed_row(static_cast<const float*>(storage), cols, ids[t], out + t * cols);
  }
}

void sgl_gdn(const GdnShape* shape, const GdnWeights* weights, const GdnState* state,
             const GdnRows* rows) {
  gdn_rows(*shape, *weights, *state, *rows);
}

void sgl_replay(const Replay* replay_args) { replay(*replay_args); }

int64_t sgl_forward(const Model* model, const Batch* batch) {
  return Forward(*model, *batch).run();
}

void sgl_struct_sizes(int64_t* out) {
  const int64_t sizes[] = {sizeof(Linear), sizeof(GdnShape), sizeof(GdnState), sizeof(GdnWeights),
                           sizeof(GdnRows), sizeof(Replay), sizeof(Kv), sizeof(Layer),
                           sizeof(Model), sizeof(Batch)};
  for (int i = 0; i < 10; ++i) out[i] = sizes[i];
}
}
