// Attention of single rows over a paged KV pool. Keys are taken in blocks of 16 positions counted
// from position 0, so a row's bits depend on its position and context alone.
#pragma once

#include "pool.h"
#include "vec.h"

namespace sgl {

struct Kv {
  void* k;  // [slots, Nkv, d], slot stride in elements
  void* v;
  int64_t slot_stride;
  int64_t num_slots;
  int64_t is_bf16;
};

struct AttentionShape {
  int64_t heads, kv_heads, head_dim;
  float scale;
};

constexpr int kMaxGroup = 16;    // query heads per KV head
constexpr int kMaxHeadDim = 256;

// Weights s [16] of a block relative to the running maximum m, and the factor for what came before.
static inline void score_block(const vf* acc, int count, float scale, float* m, float* s,
                               float* fix) {
  store(s, sum_rows(acc) * scale);
  for (int j = count; j < kLanes; ++j) s[j] = -INFINITY;
  const vf scores = load(s);
  const float top = hmax(scores);
  const float next = top > *m ? top : *m;
  *fix = *m == next ? 1.0f : (*m == -INFINITY ? 0.0f : lane(vexp(splat(*m - next)), 0));
  store(s, vexp(scores - next));
  for (int j = count; j < kLanes; ++j) s[j] = 0.0f;
  *m = next;
}

// One row, one KV head: q [G, d] -> out [G, d]; the row sees positions 0 .. last.
template <class T>
static void attend_row(const AttentionShape& shape, const Kv& kv, int64_t kv_head,
                       const int32_t* slots, int64_t last, const float* q, int64_t ldq, float* out,
                       int64_t ldo) {
  const int d = int(shape.head_dim), vecs = d / kLanes;
  const int group = int(shape.heads / shape.kv_heads);
  const T* keys = static_cast<const T*>(kv.k) + kv_head * d;
  const T* values = static_cast<const T*>(kv.v) + kv_head * d;
  alignas(64) float o[kMaxGroup * kMaxHeadDim];
  alignas(64) float p[kLanes];
  float m[kMaxGroup];
  vf total[kMaxGroup];  // lane by lane
  for (int h = 0; h < group; ++h) {
    m[h] = -INFINITY;
    total[h] = zero();
    std::memset(o + h * d, 0, sizeof(float) * d);
  }
  for (int64_t p0 = 0; p0 <= last; p0 += kLanes) {
    const int count = int(last - p0 + 1 < kLanes ? last - p0 + 1 : kLanes);
    int64_t at[kLanes];
    for (int j = 0; j < count; ++j) at[j] = int64_t(slots[p0 + j]) * kv.slot_stride;
    for (int h = 0; h < group; ++h) {
      vf acc[kLanes];
      for (int j = 0; j < kLanes; ++j) acc[j] = zero();
      const float* qh = q + h * ldq;
      for (int j = 0; j < count; ++j)
        for (int i = 0; i < vecs; ++i)
          acc[j] = fma(load(keys + at[j] + i * kLanes), load(qh + i * kLanes), acc[j]);
      float fix;
      score_block(acc, count, shape.scale, &m[h], p, &fix);
      total[h] = fma(total[h], splat(fix), load(p));
      float* oh = o + h * d;
      for (int i = 0; i < vecs; ++i) {
        vf sum = load(oh + i * kLanes) * fix;
        for (int j = 0; j < count; ++j)
          sum = fma(load(values + at[j] + i * kLanes), splat(p[j]), sum);
        store(oh + i * kLanes, sum);
      }
    }
  }
  for (int h = 0; h < group; ++h) {
    const float inverse = 1.0f / hsum(total[h]);
    for (int i = 0; i < d; i += kLanes) store(out + h * ldo + i, load(o + h * d + i) * inverse);
  }
}

}  // namespace sgl
