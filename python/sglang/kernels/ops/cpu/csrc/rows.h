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
  for (int i = 0; i < n; i += kLanes) {
    const int count = n - i < kLanes ? n - i : kLanes;
    store_part(o + i, load_part(o + i, count) * gate_of(load_part(z + i, count), sigmoid), count);
  }
}

// out = silu(gate) * up
static inline void silu_mul(const float* gate, const float* up, int n, float* out) {
  for (int i = 0; i < n; i += kLanes) {
    const int count = n - i < kLanes ? n - i : kLanes;
    store_part(out + i, vsilu(load_part(gate + i, count)) * load_part(up + i, count), count);
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
