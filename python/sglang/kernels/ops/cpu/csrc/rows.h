// Work on single rows: norms, gates, rotation. Each result depends on its own row alone.
#pragma once

#include "vec.h"

namespace sgl {

// out = x * rsqrt(mean(x^2) + eps) * (offset + w), n a multiple of 16 or not
static inline void rmsnorm(const float* x, const float* w, float offset, float eps, int n,
                           float* out) {
  vf sum = zero();
  const int whole = n / kLanes * kLanes;
  for (int i = 0; i < whole; i += kLanes) sum = fma(load(x + i), load(x + i), sum);
  if (whole < n) {
    vf part = load_part(x + whole, n - whole);
    sum = fma(part, part, sum);
  }
  const float scale = 1.0f / std::sqrt(hsum(sum) / float(n) + eps);
  for (int i = 0; i < whole; i += kLanes)
    store(out + i, load(x + i) * scale * (offset + load(w + i)));
  for (int i = whole; i < n; ++i) out[i] = x[i] * scale * (offset + w[i]);
}

static inline vf gate_of(vf z, bool sigmoid) { return sigmoid ? vsigmoid(z) : vsilu(z); }

// o = rmsnorm(o) * w * act(z), in place
static inline void gated_norm(float* o, const float* z, const float* w, float eps, int n,
                              bool sigmoid) {
  rmsnorm(o, w, 0.0f, eps, n, o);
  const int whole = n / kLanes * kLanes, rest = n - whole;
  for (int i = 0; i < whole; i += kLanes)
    store(o + i, load(o + i) * gate_of(load(z + i), sigmoid));
  if (rest > 0) {
    const vf gated = load_part(o + whole, rest) * gate_of(load_part(z + whole, rest), sigmoid);
    store_part(o + whole, gated, rest);
  }
}

// out = silu(gate) * up
static inline void silu_mul(const float* gate, const float* up, int n, float* out) {
  const int whole = n / kLanes * kLanes, rest = n - whole;
  for (int i = 0; i < whole; i += kLanes) store(out + i, vsilu(load(gate + i)) * load(up + i));
  if (rest > 0) {
    const vf value = vsilu(load_part(gate + whole, rest)) * load_part(up + whole, rest);
    store_part(out + whole, value, rest);
  }
}

// Rotate pairs (j, j + half) of the first 2 * half dims.
static inline void rotate(float* x, const float* cos, const float* sin, int half) {
  for (int j = 0; j < half; ++j) {
    const float first = x[j], second = x[j + half];
    x[j] = first * cos[j] - second * sin[j];
    x[j + half] = second * cos[j] + first * sin[j];
  }
}

}  // namespace sgl
