// A whole forward pass of a hybrid model in one call. Every piece computes a row on its own, in an
// order fixed by the model alone: a row's bits are the same in decode, verify and prompts.
#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "gdn.h"
#include "gemm.h"
#include "rows.h"

namespace sgl {

enum LayerKind { kFullAttention = 0, kGdn = 1 };

struct Layer {
  int64_t kind;
  int64_t num_experts;  // 0: dense MLP in gate_up and down
  const float* input_norm;
  const float* post_norm;
  Linear in_proj, out_proj, gate_up, down;
  // full attention
  const float* q_norm;
  const float* k_norm;
  Kv kv;
  // GDN
  GdnWeights gdn;
  const float* gdn_norm;
  GdnState state;
  // mixture of experts: gate_up and down describe expert 0, experts follow at a fixed distance
  Linear router, shared_gate_up, shared_down, shared_gate;
  int64_t expert_gate_up_elements, expert_down_elements, top_k, norm_topk;
};

struct Model {
  int64_t hidden, num_layers, vocab;
  AttentionShape attention;
  int64_t rotary_half, has_gate;
  GdnShape gdn;
  int64_t gate_is_sigmoid;
  float eps;
  int32_t embed_packed;
  Linear embed, lm_head;
  const float* final_norm;
  const float* cos;
  const float* sin;
  const int32_t* req_to_token;
  int64_t req_stride;
  const Layer* layers;
  // draft block: x = fc([norm(embed); norm(spec_hidden)])
  int64_t is_mtp;
  Linear fc;
  const float* norm_embedding;
  const float* norm_hidden;
};

struct Batch {
  int64_t num_rows, num_requests, num_logits;
  int64_t gdn_mode;
  const int64_t* input_ids;
  const int64_t* positions;
  const int64_t* req_rows;
  const int32_t* starts;
  const int64_t* out_slots;
  const int32_t* state_slots;
  const int32_t* scratch_rows;
  const int64_t* track_slots;
  const int64_t* track_rows;
  const int64_t* logits_rows;  // null: all rows
  const float* spec_hidden;
  float* logits;
  float* hidden_all;     // [T, H] or null
  float* hidden_wanted;  // [M, H]
  float* taps;           // [T, num_taps * H] or null
  int64_t num_taps;
  const int64_t* tap_layers;
  // Where rows do not see exactly the positions up to their own: [T] last index that each attends to
  // in its slot list, or null; [T, row_slots_stride] slot lists, or null for the request's own.
  const int64_t* last_seen;
  const int32_t* row_slots;
  int64_t row_slots_stride;
  const int64_t* parents;  // [T] row within the request that each row of a tree continues, or null
};

class Forward {
 public:
  Forward(const Model& model, const Batch& batch) : m_(model), b_(batch), T_(batch.num_rows) {}

  // Returns 0, or the 1-based number of the first row whose token id or KV slot is out of range.
  int64_t run() {
    if (int64_t bad = check()) return bad;
    request_of_row();
    const int64_t H = m_.hidden;
    x_ = buffer(0, T_ * H);
    normed_ = buffer(1, T_ * H);
    embed();
    for (int64_t i = 0; i < m_.num_layers; ++i) {
      const Layer& layer = m_.layers[i];
      norm_rows(x_, layer.input_norm, normed_);
      if (layer.kind == kGdn)
        gdn(layer);
      else
        attention(layer);
      norm_rows(x_, layer.post_norm, normed_);
      if (layer.num_experts > 0)
        experts(layer);
      else
        mlp(layer.gate_up, layer.down);
      tap(i);
    }
    finish();
    return 0;
  }

 private:
  static float* buffer(int which, int64_t size) {
    static thread_local std::vector<float> memory[10];
    std::vector<float>& v = memory[which];
    if (int64_t(v.size()) < size + kLanes) v.resize(size + kLanes);
    float* at = v.data();
    return at + (64 - reinterpret_cast<uintptr_t>(at) % 64) % 64 / sizeof(float);
  }

  int64_t check() const {
    int64_t slots = -1;
    for (int64_t i = 0; i < m_.num_layers; ++i)
      if (m_.layers[i].kind == kFullAttention) slots = m_.layers[i].kv.num_slots;
    for (int64_t t = 0; t < T_; ++t) {
      if (b_.input_ids[t] < 0 || b_.input_ids[t] >= m_.vocab) return t + 1;
      if (slots >= 0 && b_.out_slots[t] >= slots) return t + 1;
    }
    return 0;
  }

  void request_of_row() {
    static thread_local std::vector<int32_t> memory;
    if (int64_t(memory.size()) < T_) memory.resize(T_);
    for (int64_t r = 0; r < b_.num_requests; ++r)
      for (int t = b_.starts[r]; t < b_.starts[r + 1]; ++t) memory[t] = int32_t(r);
    request_ = memory.data();
  }

  void embed_row(int64_t id, float* out) const {
    const int64_t H = m_.hidden;
    if (m_.embed_packed) {
      if (m_.embed.is_bf16)
        packed_row(static_cast<const bf16*>(m_.embed.weight), H, id, out);
      else
        packed_row(static_cast<const float*>(m_.embed.weight), H, id, out);
    } else if (m_.embed.is_bf16) {
      const bf16* from = static_cast<const bf16*>(m_.embed.weight) + id * H;
      for (int64_t i = 0; i < H; ++i) out[i] = widen(from[i]);
    } else {
      std::memcpy(out, static_cast<const float*>(m_.embed.weight) + id * H, sizeof(float) * H);
    }
  }

  void embed() {
    const int64_t H = m_.hidden;
    if (!m_.is_mtp) {
      for (int64_t t = 0; t < T_; ++t) embed_row(b_.input_ids[t], x_ + t * H);
      return;
    }
    float* both = buffer(2, T_ * 2 * H);
    for (int64_t t = 0; t < T_; ++t) {
      float* row = both + t * 2 * H;
      embed_row(b_.input_ids[t], row);
      rmsnorm(row, m_.norm_embedding, 1.0f, m_.eps, int(H), row);
      rmsnorm(b_.spec_hidden + t * H, m_.norm_hidden, 1.0f, m_.eps, int(H), row + H);
    }
    linear(m_.fc, both, 2 * H, T_, x_, H, kStore);
  }

  // Rows in pieces large enough to be worth another thread.
  template <class F>
  void each_row(int64_t work_per_row, F&& body) const {
    const int64_t piece = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, work_per_row));
    const double cost_us = double(T_) * work_per_row / 4e3;
    parallel_for(int((T_ + piece - 1) / piece), cost_us, [&](int index) {
      const int64_t end = std::min(T_, (index + 1) * piece);
      for (int64_t t = index * piece; t < end; ++t) body(t);
    });
  }

  void norm_rows(const float* x, const float* w, float* out) const {
    const int64_t H = m_.hidden;
    each_row(H, [&](int64_t t) { rmsnorm(x + t * H, w, 1.0f, m_.eps, int(H), out + t * H); });
  }

  void gdn(const Layer& layer) {
    const GdnShape& s = m_.gdn;
    const int64_t conv_dim = 2 * s.HK * s.K + s.HV * s.V, value_dim = s.HV * s.V;
    const int64_t width = layer.in_proj.rows;
    float* p = buffer(3, T_ * width);
    float* o = buffer(4, T_ * value_dim);
    linear(layer.in_proj, normed_, m_.hidden, T_, p, width, kStore);
    const float* b = p + conv_dim + value_dim;
    GdnRows rows = {p,           width,           b + s.HV,        b,
                    width,       o,               b_.gdn_mode,     b_.num_requests,
                    b_.starts,   b_.state_slots,  b_.scratch_rows, b_.track_slots,
                    b_.track_rows, b_.parents};
    gdn_rows(s, layer.gdn, layer.state, rows);
    each_row(4 * value_dim, [&](int64_t t) {
      for (int64_t h = 0; h < s.HV; ++h)
        gated_norm(o + (t * s.HV + h) * s.V, p + t * width + conv_dim + h * s.V, layer.gdn_norm,
                   m_.eps, int(s.V), m_.gate_is_sigmoid != 0);
    });
    linear(layer.out_proj, o, value_dim, T_, x_, m_.hidden, kAdd);
  }

  void attention(const Layer& layer) {
    const AttentionShape& s = m_.attention;
    const int64_t width = layer.in_proj.rows, q_width = s.heads * s.head_dim;
    float* p = buffer(3, T_ * width);
    float* o = buffer(4, T_ * q_width);
    linear(layer.in_proj, normed_, m_.hidden, T_, p, width, kStore);
    each_row(4 * width, [&](int64_t t) { prepare_row(layer, t, p + t * width); });
    const int64_t q_step = s.head_dim * (m_.has_gate ? 2 : 1);
    const int64_t group = s.heads / s.kv_heads;
    double context = 0;
    for (int64_t t = 0; t < T_; ++t) context += double(b_.positions[t] + 1);
    const double cost_us = context * s.heads * s.head_dim * 4 / 20e3;
    parallel_for(int(T_ * s.kv_heads), cost_us, [&](int index) {
      const int64_t t = index / s.kv_heads, h = index % s.kv_heads;
      const int32_t* slots = b_.row_slots
                                 ? b_.row_slots + t * b_.row_slots_stride
                                 : m_.req_to_token + b_.req_rows[request_[t]] * m_.req_stride;
      const int64_t last = b_.last_seen ? b_.last_seen[t] : b_.positions[t];
      const float* q = p + t * width + h * group * q_step;
      float* out = o + t * q_width + h * group * s.head_dim;
      if (layer.kv.is_bf16)
        attend_row<bf16>(s, layer.kv, h, slots, last, q, q_step, out, s.head_dim);
      else
        attend_row<float>(s, layer.kv, h, slots, last, q, q_step, out, s.head_dim);
      if (m_.has_gate) gate_heads(q + s.head_dim, q_step, out, int(group));
    });
    linear(layer.out_proj, o, q_width, T_, x_, m_.hidden, kAdd);
  }

  void gate_heads(const float* gate, int64_t step, float* out, int group) const {
    const int d = int(m_.attention.head_dim);
    for (int h = 0; h < group; ++h)
      for (int i = 0; i < d; i += kLanes)
        store(out + h * d + i, load(out + h * d + i) * vsigmoid(load(gate + h * step + i)));
  }

  void prepare_row(const Layer& layer, int64_t t, float* row) const {
    const AttentionShape& s = m_.attention;
    const int d = int(s.head_dim), half = int(m_.rotary_half);
    const int64_t q_step = d * (m_.has_gate ? 2 : 1);
    const float* cos = m_.cos + b_.positions[t] * half;
    const float* sin = m_.sin + b_.positions[t] * half;
    for (int64_t h = 0; h < s.heads; ++h) {
      float* q = row + h * q_step;
      rmsnorm(q, layer.q_norm, 1.0f, m_.eps, d, q);
      rotate(q, cos, sin, half);
    }
    float* k = row + s.heads * q_step;
    const float* v = k + s.kv_heads * d;
    for (int64_t h = 0; h < s.kv_heads; ++h) {
      rmsnorm(k + h * d, layer.k_norm, 1.0f, m_.eps, d, k + h * d);
      rotate(k + h * d, cos, sin, half);
    }
    if (b_.out_slots[t] < 0) return;
    const int64_t at = b_.out_slots[t] * layer.kv.slot_stride, n = s.kv_heads * d;
    if (layer.kv.is_bf16) {
      for (int64_t i = 0; i < n; ++i) narrow(k[i], static_cast<bf16*>(layer.kv.k) + at + i);
      for (int64_t i = 0; i < n; ++i) narrow(v[i], static_cast<bf16*>(layer.kv.v) + at + i);
    } else {
      std::memcpy(static_cast<float*>(layer.kv.k) + at, k, sizeof(float) * n);
      std::memcpy(static_cast<float*>(layer.kv.v) + at, v, sizeof(float) * n);
    }
  }

  void mlp(const Linear& gate_up, const Linear& down) {
    gated(gate_up, down, normed_, T_, x_, kAdd);
  }

  void gated(const Linear& gate_up, const Linear& down, const float* x, int64_t rows, float* y,
             Epilogue epilogue) const {
    const int64_t I = down.cols, H = m_.hidden;
    float* both = buffer(3, rows * 2 * I);
    float* mid = buffer(4, rows * I);
    linear(gate_up, x, H, rows, both, 2 * I, kStore);
    const int64_t piece = std::max<int64_t>(1, 32768 / I);
    parallel_for(int((rows + piece - 1) / piece), double(rows) * I / 1e3, [&](int index) {
      const int64_t end = std::min(rows, (index + 1) * piece);
      for (int64_t t = index * piece; t < end; ++t)
        silu_mul(both + t * 2 * I, both + t * 2 * I + I, int(I), mid + t * I);
    });
    linear(down, mid, I, rows, y, H, epilogue);
  }

  void experts(const Layer& layer);

  void tap(int64_t layer) const {
    if (!b_.taps) return;
    const int64_t H = m_.hidden;
    for (int64_t f = 0; f < b_.num_taps; ++f)
      if (b_.tap_layers[f] == layer)
        for (int64_t t = 0; t < T_; ++t)
          std::memcpy(b_.taps + (t * b_.num_taps + f) * H, x_ + t * H, sizeof(float) * H);
  }

  void finish() {
    const int64_t H = m_.hidden;
    if (b_.hidden_all) norm_rows(x_, m_.final_norm, b_.hidden_all);
    for (int64_t i = 0; i < b_.num_logits; ++i) {
      const int64_t t = b_.logits_rows ? b_.logits_rows[i] : i;
      rmsnorm(x_ + t * H, m_.final_norm, 1.0f, m_.eps, int(H), b_.hidden_wanted + i * H);
    }
    linear(m_.lm_head, b_.hidden_wanted, H, b_.num_logits, b_.logits, m_.vocab, kStore);
  }

  const Model& m_;
  const Batch& b_;
  const int64_t T_;
  float *x_ = nullptr, *normed_ = nullptr;
  const int32_t* request_ = nullptr;
};

}  // namespace sgl
