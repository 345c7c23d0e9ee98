// Mixture of experts: softmax over all experts, the top k, one gated shared expert. A row adds its
// experts in descending order of weight, whatever other rows chose.
#pragma once

#include "model.h"

namespace sgl {

struct Choice {
  int32_t row, rank;
};

static inline void softmax(float* x, int64_t n) {
  float top = x[0];
  for (int64_t i = 1; i < n; ++i) top = std::max(top, x[i]);
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    x[i] = std::exp(x[i] - top);
    sum += x[i];
  }
  for (int64_t i = 0; i < n; ++i) x[i] /= sum;
}

inline void Forward::experts(const Layer& layer) {
  const int64_t E = layer.num_experts, k = layer.top_k, H = m_.hidden;
  float* probs = buffer(5, T_ * E);
  linear(layer.router, normed_, H, T_, probs, E, kStore);
  std::vector<std::vector<Choice>> rows_of(E);
  std::vector<float> weights(T_ * k);
  std::vector<int32_t> order(E);
  for (int64_t t = 0; t < T_; ++t) {
    float* p = probs + t * E;
    softmax(p, E);
    for (int64_t e = 0; e < E; ++e) order[e] = int32_t(e);
    std::partial_sort(order.begin(), order.begin() + k, order.end(), [p](int32_t a, int32_t b) {
      return p[a] > p[b] || (p[a] == p[b] && a < b);
    });
    float sum = 0.0f;
    for (int64_t j = 0; j < k; ++j) sum += p[order[j]];
    for (int64_t j = 0; j < k; ++j) {
      weights[t * k + j] = layer.norm_topk ? p[order[j]] / sum : p[order[j]];
      rows_of[order[j]].push_back({int32_t(t), int32_t(j)});
    }
  }
  float* parts = buffer(6, T_ * k * H);
  float* in = buffer(7, T_ * H);
  float* out = buffer(8, T_ * H);
  for (int64_t e = 0; e < E; ++e) {
    const std::vector<Choice>& chosen = rows_of[e];
    if (chosen.empty()) continue;
    const int64_t bytes = layer.gate_up.is_bf16 ? 2 : 4;
    Linear gate_up = layer.gate_up, down = layer.down;
    gate_up.weight =
        static_cast<const char*>(gate_up.weight) + e * layer.expert_gate_up_elements * bytes;
    down.weight = static_cast<const char*>(down.weight) + e * layer.expert_down_elements * bytes;
    const int64_t n = int64_t(chosen.size());
    for (int64_t i = 0; i < n; ++i)
      std::memcpy(in + i * H, normed_ + chosen[i].row * H, sizeof(float) * H);
    gated(gate_up, down, in, n, out, kStore);
    for (int64_t i = 0; i < n; ++i)
      std::memcpy(parts + (chosen[i].row * k + chosen[i].rank) * H, out + i * H,
                  sizeof(float) * H);
  }
  float* gate = buffer(9, T_);
  linear(layer.shared_gate, normed_, H, T_, gate, 1, kStore);
  gated(layer.shared_gate_up, layer.shared_down, normed_, T_, out, kStore);
  for (int64_t t = 0; t < T_; ++t) {
    const float share = 1.0f / (1.0f + std::exp(-gate[t]));
    for (int64_t i = 0; i < H; ++i) {
      float y = parts[t * k * H + i] * weights[t * k];
      for (int64_t j = 1; j < k; ++j)
        y = fma(parts[(t * k + j) * H + i], weights[t * k + j], y);
      x_[t * H + i] += fma(share, out[t * H + i], y);
    }
  }
}

}  // namespace sgl
