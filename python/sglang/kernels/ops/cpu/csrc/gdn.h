// The gated delta rule, one token at a time. `advance` is the only place where a state changes:
// one rounded multiply by exp(g), then one fused multiply-add with k and u. Decode, prompts,
// verify with snapshots, verify with tuples and replay all go through it.
// Source: arXiv:2412.06464.
#pragma once

#include <vector>

#include "gemm.h"
#include "pool.h"
#include "vec.h"

namespace sgl {

constexpr float kL2Eps = 1e-6f;

static inline vf decay(vf state, vf factor) { return state * factor; }
static inline vf advance(vf decayed, vf k, vf u) { return fma(k, u, decayed); }

// dst = state after one token from src [V, K] (may be the same memory); u [V] given.
static inline void replay_step(const float* src, float* dst, int V, int K, const float* k,
                               float factor, const float* u) {
  const vf f = splat(factor);
  for (int v = 0; v < V; ++v) {
    const vf uv = splat(u[v]);
    for (int i = 0; i < K; i += kLanes)
      store(dst + v * K + i, advance(decay(load(src + v * K + i), f), load(k + i), uv));
  }
}

// One token with its delta: u = beta (v - S k), S advanced, o = S q. KC > 0 fixes K at compile time.
template <int KC>
static inline void delta_step_k(const float* src, float* dst, int V, int Kdyn, const float* q,
                                const float* k, const float* v, float factor, float beta,
                                float* u, float* o) {
  const int K = KC > 0 ? KC : Kdyn;
  const vf f = splat(factor);
  for (int v0 = 0; v0 < V; v0 += kLanes) {
    const int rows = V - v0 < kLanes ? V - v0 : kLanes;
    const float* s = src + int64_t(v0) * K;
    float* d = dst + int64_t(v0) * K;
    vf acc[kLanes];
    for (int r = 0; r < kLanes; ++r) acc[r] = zero();
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < K; i += kLanes)
        acc[r] = fma(decay(load(s + r * K + i), f), load(k + i), acc[r]);
    const vf uv = (load_part(v + v0, rows) - sum_rows(acc)) * beta;
    store_part(u + v0, uv, rows);
    for (int r = 0; r < kLanes; ++r) acc[r] = zero();
    for (int r = 0; r < rows; ++r) {
      const vf ur = splat(lane(uv, r));
      for (int i = 0; i < K; i += kLanes) {
        const vf state = advance(decay(load(s + r * K + i), f), load(k + i), ur);
        store(d + r * K + i, state);
        acc[r] = fma(state, load(q + i), acc[r]);
      }
    }
    store_part(o + v0, sum_rows(acc), rows);
  }
}

static inline void delta_step(const float* src, float* dst, int V, int K, const float* q,
                              const float* k, const float* v, float factor, float beta, float* u,
                              float* o) {
  if (K == 128) return delta_step_k<128>(src, dst, V, K, q, k, v, factor, beta, u, o);
  if (K == 64) return delta_step_k<64>(src, dst, V, K, q, k, v, factor, beta, u, o);
  delta_step_k<0>(src, dst, V, K, q, k, v, factor, beta, u, o);
}

struct GdnShape {
  int64_t HK, HV, K, V, W;  // W taps of the convolution
};

// One layer's tensors; strides in elements. conv [S, dim, W-1], ssm [S, HV, V, K] dense per slot.
struct GdnState {
  void* conv;
  int64_t conv_slot, conv_dim, conv_col;
  void* ssm;
  int64_t ssm_slot;
  int64_t num_slots;
  int64_t conv_bf16, ssm_bf16;
  // verify scratch, [R, D, ...]; unused pointers are null
  void* window;
  int64_t window_row, window_step, window_dim, window_col;
  void* snapshot;
  int64_t snapshot_row, snapshot_step;
  float* u;
  float* k;
  float* g;
  int64_t u_row, u_step, k_row, k_step, g_row, g_step;
};

struct GdnWeights {
  const float* conv;  // [W, conv_dim]
  const float* A_log;
  const float* dt_bias;
};

enum GdnMode { kAdvance = 0, kVerify = 1 };

// Rows of one call. x [T, ldx] before the convolution, a and b [T, ld_ab], out [T, HV, V].
struct GdnRows {
  const float* x;
  int64_t ldx;
  const float* a;
  const float* b;
  int64_t ld_ab;
  float* out;
  int64_t mode;
  int64_t num_requests;
  const int32_t* starts;  // [R + 1]
  const int32_t* slots;   // [R]
  const int32_t* scratch_rows;
  const int64_t* track_slots;  // or null
  const int64_t* track_rows;
  const int64_t* parents;  // [T] step that each step of a tree verify continues, or null: a chain
};

static inline void normalise(float* x, int n, float scale) {
  vf sum = zero();
  for (int i = 0; i < n; i += kLanes) sum = fma(load(x + i), load(x + i), sum);
  const float inverse = 1.0f / std::sqrt(hsum(sum) + kL2Eps);
  for (int i = 0; i < n; i += kLanes) store(x + i, load(x + i) * inverse * scale);
}

static inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <class C, class S>
class GdnTask {
 public:
  GdnTask(const GdnShape& shape, const GdnWeights& weights, const GdnState& state,
          const GdnRows& rows, int request, int group)
      : shape_(shape), weights_(weights), state_(state), rows_(rows), request_(request),
        group_(group), per_group_(int(shape.HV / shape.HK)) {
    const int64_t key_dim = shape.HK * shape.K;
    width_[0] = width_[1] = shape.K;
    width_[2] = per_group_ * shape.V;
    from_[0] = group * shape.K;
    from_[1] = key_dim + group * shape.K;
    from_[2] = 2 * key_dim + int64_t(group) * per_group_ * shape.V;
    channels_ = 2 * shape.K + width_[2];
    padded_ = (channels_ + kLanes - 1) / kLanes * kLanes;
  }

  void run() {
    const int begin = rows_.starts[request_], end = rows_.starts[request_ + 1];
    const int slot = rows_.slots[request_];
    if (slot < 0 || slot >= state_.num_slots) return skip(begin, end);
    allocate();
    load_window(slot);
    const bool verify = rows_.mode == kVerify;
    int64_t dest = -1, boundary = -1;
    if (rows_.track_slots && !verify) {
      dest = rows_.track_slots[request_];
      boundary = rows_.track_rows[request_];
      if (dest >= state_.num_slots) dest = -1;
    }
    const int64_t head_size = shape_.V * shape_.K;
    S* home = static_cast<S*>(state_.ssm) + slot * state_.ssm_slot + head0() * head_size;
    begin_state(home, verify);
    for (int t = begin; t < end; ++t) {
      const int step = t - begin;
      if (verify && rows_.parents && step > 0) begin_node(int(rows_.parents[t]), step, slot, home);
      convolve(t);
      for (int j = 0; j < per_group_; ++j) one_head(t, step, j, verify);
      if (verify) store_window(window_at(step), state_.window_dim, state_.window_col);
      if (dest >= 0 && step + 1 == boundary) {
        store_state(static_cast<S*>(state_.ssm) + dest * state_.ssm_slot + head0() * head_size);
        store_window(conv_at(dest), state_.conv_dim, state_.conv_col);
      }
    }
    if (verify || end == begin) return;
    if (current_ != reinterpret_cast<float*>(home)) store_state(home);
    store_window(conv_at(slot), state_.conv_dim, state_.conv_col);
  }

 private:
  int64_t head0() const { return int64_t(group_) * per_group_; }
  C* conv_at(int64_t slot) const {
    return static_cast<C*>(state_.conv) + slot * state_.conv_slot;
  }
  C* window_at(int step) const {
    return static_cast<C*>(state_.window) + rows_.scratch_rows[request_] * state_.window_row +
           step * state_.window_step;
  }

  void skip(int begin, int end) {
    for (int t = begin; t < end; ++t)
      std::memset(rows_.out + (t * shape_.HV + head0()) * shape_.V, 0,
                  sizeof(float) * per_group_ * shape_.V);
  }

  void allocate() {
    static thread_local std::vector<float> memory;
    const size_t taps = size_t(shape_.W) * padded_;
    const size_t states = size_t(per_group_) * shape_.V * shape_.K;
    const size_t need = 2 * taps + padded_ + shape_.V + states + 6 * kLanes;
    if (memory.size() < need) memory.resize(need);
    float* at = memory.data();
    at += (64 - reinterpret_cast<uintptr_t>(at) % 64) % 64 / sizeof(float);
    ring_ = at;
    taps_ = ring_ + taps;
    conv_ = taps_ + taps;
    u_ = conv_ + padded_;
    work_ = u_ + (shape_.V + kLanes - 1) / kLanes * kLanes;
    for (int64_t w = 0; w < shape_.W; ++w)
      for (int s = 0, at_channel = 0; s < 3; at_channel += int(width_[s]), ++s)
        std::memcpy(taps_ + w * padded_ + at_channel,
                    weights_.conv + w * conv_dim() + from_[s], sizeof(float) * width_[s]);
  }

  int64_t conv_dim() const { return 2 * shape_.HK * shape_.K + shape_.HV * shape_.V; }

  // The ring holds W input columns; `next_` is where the coming token goes, so the window is the
  // W - 1 columns before it.
  void load_window(int slot) { fill_ring(conv_at(slot), state_.conv_dim, state_.conv_col); }

  void fill_ring(const C* conv, int64_t dim_stride, int64_t col_stride) {
    next_ = int(shape_.W) - 1;
    for (int64_t c = 0; c < shape_.W - 1; ++c) {
      float* to = ring_ + c * padded_;
      for (int s = 0; s < 3; ++s)
        for (int64_t i = 0; i < width_[s]; ++i)
          *to++ = widen(conv[(from_[s] + i) * dim_stride + c * col_stride]);
    }
  }

  template <class P>
  void store_window(P* conv, int64_t dim_stride, int64_t col_stride) const {
    const int W = int(shape_.W);
    for (int c = 0; c < W - 1; ++c) {
      const float* from = ring_ + ((next_ + 1 + c) % W) * padded_;
      for (int s = 0; s < 3; ++s)
        for (int64_t i = 0; i < width_[s]; ++i)
          narrow(*from++, &conv[(from_[s] + i) * dim_stride + c * col_stride]);
    }
  }

  // Inputs are rounded to the pool's dtype on entry, so that a token's output does not depend on
  // whether its predecessors come from this call or from the pool.
  void convolve(int t) {
    const int W = int(shape_.W);
    float* column = ring_ + next_ * padded_;
    float* to = column;
    for (int s = 0; s < 3; ++s) {
      const float* x = rows_.x + t * rows_.ldx + from_[s];
      if (sizeof(C) == sizeof(float)) {
        std::memcpy(to, x, sizeof(float) * width_[s]);
      } else {
        for (int64_t i = 0; i < width_[s]; ++i) {
          C rounded;
          narrow(x[i], &rounded);
          to[i] = widen(rounded);
        }
      }
      to += width_[s];
    }
    for (int64_t i = 0; i < padded_; i += kLanes) {
      vf sum = zero();
      for (int w = 0; w < W; ++w)
        sum = fma(load(ring_ + ((next_ + 1 + w) % W) * padded_ + i),
                  load(taps_ + w * padded_ + i), sum);
      store(conv_ + i, vsilu(sum));
    }
    next_ = (next_ + 1) % W;
    normalise(conv_, int(shape_.K), 1.0f / std::sqrt(float(shape_.K)));
    normalise(conv_ + shape_.K, int(shape_.K), 1.0f);
  }

  void begin_state(S* home, bool verify) {
    const int64_t n = per_group_ * shape_.V * shape_.K;
    if (sizeof(S) == sizeof(float)) {
      current_ = reinterpret_cast<float*>(home);
      target_ = verify ? work_ : current_;
      return;
    }
    for (int64_t i = 0; i < n; i += kLanes) store(work_ + i, load(home + i));
    current_ = target_ = work_;
  }

  // A tree's step continues its parent's recorded state and window, or the pool's if it has none.
  void begin_node(int parent, int step, int slot, const S* home) {
    const int64_t n = per_group_ * shape_.V * shape_.K;
    if (parent < 0 || parent >= step) {
      load_window(slot);
      for (int64_t i = 0; i < n; i += kLanes) store(work_ + i, load(home + i));
      return;
    }
    fill_ring(window_at(parent), state_.window_dim, state_.window_col);
    const S* from = static_cast<const S*>(state_.snapshot) +
                    rows_.scratch_rows[request_] * state_.snapshot_row +
                    parent * state_.snapshot_step + head0() * shape_.V * shape_.K;
    for (int64_t i = 0; i < n; i += kLanes) store(work_ + i, load(from + i));
  }

  void store_state(S* to) const {
    const int64_t n = per_group_ * shape_.V * shape_.K;
    for (int64_t i = 0; i < n; ++i) narrow(target_[i], &to[i]);
  }

  void one_head(int t, int step, int j, bool verify) {
    const int64_t hv = head0() + j, size = shape_.V * shape_.K;
    const int V = int(shape_.V), K = int(shape_.K);
    const float a = rows_.a[t * rows_.ld_ab + hv], b = rows_.b[t * rows_.ld_ab + hv];
    const float g = -std::exp(weights_.A_log[hv]) * softplus(a + weights_.dt_bias[hv]);
    const float beta = 1.0f / (1.0f + std::exp(-b));
    const float* src = (step == 0 ? current_ : target_) + j * size;
    const float* k = conv_ + shape_.K;
    delta_step(src, target_ + j * size, V, K, conv_, k, conv_ + 2 * shape_.K + j * shape_.V,
               std::exp(g), beta, u_, rows_.out + (t * shape_.HV + hv) * shape_.V);
    if (!verify) return;
    const int64_t row = rows_.scratch_rows[request_];
    if (state_.u) {
      std::memcpy(state_.u + row * state_.u_row + step * state_.u_step + hv * shape_.V, u_,
                  sizeof(float) * V);
      std::memcpy(state_.k + row * state_.k_row + step * state_.k_step + hv * shape_.K, k,
                  sizeof(float) * K);
      state_.g[row * state_.g_row + step * state_.g_step + hv] = g;
    } else {
      S* to = static_cast<S*>(state_.snapshot) + row * state_.snapshot_row +
              step * state_.snapshot_step + hv * size;
      for (int64_t i = 0; i < size; ++i) narrow(target_[j * size + i], &to[i]);
    }
  }

  const GdnShape& shape_;
  const GdnWeights& weights_;
  const GdnState& state_;
  const GdnRows& rows_;
  const int request_, group_, per_group_;
  int64_t width_[3], from_[3], channels_, padded_;
  float *ring_, *taps_, *conv_, *u_, *work_, *current_, *target_;
  int next_;
};

static void gdn_rows(const GdnShape& shape, const GdnWeights& weights, const GdnState& state,
                     const GdnRows& rows) {
  const int groups = int(shape.HK);
  const double tokens = rows.num_requests > 0 ? rows.starts[rows.num_requests] : 0;
  const double cost_us = tokens * shape.HV * shape.V * shape.K * 8 / 40e3;
  parallel_for(int(rows.num_requests) * groups, cost_us, [&](int index) {
    const int request = index / groups, group = index % groups;
    if (state.conv_bf16) {
      if (state.ssm_bf16)
        GdnTask<bf16, bf16>(shape, weights, state, rows, request, group).run();
      else
        GdnTask<bf16, float>(shape, weights, state, rows, request, group).run();
    } else if (state.ssm_bf16) {
      GdnTask<float, bf16>(shape, weights, state, rows, request, group).run();
    } else {
      GdnTask<float, float>(shape, weights, state, rows, request, group).run();
    }
  });
}

// Accepted tuples applied to pool states; strides in elements, K and V innermost and dense.
struct Replay {
  void* ssm;
  int64_t ssm_bf16, ssm_layer, ssm_slot, ssm_head;
  const float* u;
  const float* k;
  const float* g;
  int64_t u_layer, u_row, u_step, u_head, k_layer, k_row, k_step, k_head;
  int64_t g_layer, g_row, g_step, g_head;
  int64_t L, S, R, D, HV, V, K, n;
  const int64_t* cache_rows;
  const int64_t* slots;
  const int64_t* steps;
  const int64_t* dests;
};

template <class S>
static void replay_head(const Replay& r, int64_t layer, int64_t i, int64_t head, float* work) {
  const int64_t size = r.V * r.K;
  S* base = static_cast<S*>(r.ssm) + layer * r.ssm_layer + head * r.ssm_head;
  const S* from = base + r.slots[i] * r.ssm_slot;
  S* to = base + r.dests[i] * r.ssm_slot;
  for (int64_t e = 0; e < size; ++e) work[e] = widen(from[e]);
  for (int64_t t = 0; t <= r.steps[i]; ++t) {
    const int64_t row = r.cache_rows[i];
    const float* u = r.u + layer * r.u_layer + row * r.u_row + t * r.u_step + head * r.u_head;
    const float* k = r.k + layer * r.k_layer + row * r.k_row + t * r.k_step + head * r.k_head;
    const float g = r.g[layer * r.g_layer + row * r.g_row + t * r.g_step + head * r.g_head];
    replay_step(work, work, int(r.V), int(r.K), k, std::exp(g), u);
  }
  for (int64_t e = 0; e < size; ++e) narrow(work[e], &to[e]);
}

static void replay(const Replay& r) {
  // Requests of one head run in order, so rows that name the same slot behave as if sequential.
  const double cost_us = double(r.n) * r.D * r.L * r.HV * r.V * r.K * 2 / 40e3;
  parallel_for(int(r.L * r.HV), cost_us, [&](int index) {
    static thread_local std::vector<float> memory;
    if (int64_t(memory.size()) < r.V * r.K) memory.resize(r.V * r.K);
    for (int64_t i = 0; i < r.n; ++i) {
      const bool inside = r.cache_rows[i] >= 0 && r.cache_rows[i] < r.R && r.slots[i] >= 0 &&
                          r.slots[i] < r.S && r.dests[i] >= 0 && r.dests[i] < r.S &&
                          r.steps[i] >= 0 && r.steps[i] < r.D;
      if (!inside) continue;
      if (r.ssm_bf16)
        replay_head<bf16>(r, index / r.HV, i, index % r.HV, memory.data());
      else
        replay_head<float>(r, index / r.HV, i, index % r.HV, memory.data());
    }
  });
}

}  // namespace sgl
