// y[t, n] = sum over k, ascending, one fma each, of x[t, k] * w[n, k]. The order does not depend on
// the number of rows or on tiling, so a row's bits are the same in every call.
// Weights are packed in panels of 64 outputs, each panel in strips [K, kStrip].
#pragma once

#include <algorithm>
#include <vector>

#include "pool.h"
#include "vec.h"

namespace sgl {

constexpr int kPanel = 64;
constexpr int kVecs = kPanel / kLanes;
constexpr int kStrip = kPartLanes == 16 ? kPanel : kLanes;  // what one tile reads, back to back

// Position of output n, input k within its panel.
static inline int64_t in_panel(int64_t n, int64_t k, int64_t cols) {
  return (n / kStrip) * kStrip * cols + k * kStrip + n % kStrip;
}

struct Linear {
  const void* weight;
  const float* bias;  // [N] or null
  int64_t rows;       // N
  int64_t cols;       // K
  int64_t is_bf16;
};

template <class W>
static void pack(W* storage, int64_t rows, int64_t cols) {
  std::vector<W> panel(size_t(kPanel) * cols);
  for (int64_t n0 = 0; n0 < rows; n0 += kPanel) {
    W* at = storage + n0 * cols;
    std::memcpy(panel.data(), at, sizeof(W) * panel.size());
    for (int64_t n = 0; n < kPanel; ++n)
      for (int64_t k = 0; k < cols; ++k) at[in_panel(n, k, cols)] = panel[n * cols + k];
  }
}

// Rows of a tile, and vectors for that many rows: the accumulators fit the registers.
constexpr int kMaxRows = 6;
constexpr int tile_vecs(int rows) {
  return kPartLanes == 16 ? 4 : kPartLanes == 8 ? (rows == 1 ? 4 : rows <= 3 ? 2 : 1) : 1;
}
constexpr int64_t kAheadBytes = 6144;  // prefetch distance within a panel, measured

template <int R, int NV, class W>
static inline void tile(const float* x, int64_t ldx, const W* panel, int first, int64_t cols,
                        int64_t ahead, float* out) {
  vf acc[R][NV];
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < NV; ++j) acc[r][j] = zero();
  const W* w[NV];
  for (int j = 0; j < NV; ++j) w[j] = panel + in_panel((first + j) * kLanes, 0, cols);
  for (int64_t k = 0; k < cols; ++k) {
    vf wv[NV];
    for (int j = 0; j < NV; ++j) {
      const W* at = w[j] + k * kStrip;
      // one prefetch per cache line: a vector of bf16 is half a line
      if (sizeof(W) == 4 || (kStrip > kLanes ? j : int(k)) % 2 == 0) __builtin_prefetch(at + ahead, 0, 2);
      wv[j] = load(at);
    }
    for (int r = 0; r < R; ++r) {
      vf xv = splat(x[r * ldx + k]);
      for (int j = 0; j < NV; ++j) acc[r][j] = fma(wv[j], xv, acc[r][j]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < NV; ++j) store(out + r * kPanel + (first + j) * kLanes, acc[r][j]);
}

template <int R, class W>
static inline void panel_tiles(const float* x, int64_t ldx, const W* panel, int64_t cols,
                               int64_t ahead, float* out) {
  constexpr int NV = tile_vecs(R);
  for (int first = 0; first < kVecs; first += NV)
    tile<R, NV>(x, ldx, panel, first, cols, ahead, out);
}

// out [rows, 64], rows <= kMaxRows
template <class W>
static inline void panel_rows(const float* x, int64_t ldx, int rows, const W* panel, int64_t cols,
                              int64_t ahead, float* out) {
  switch (rows) {
    case 1: return panel_tiles<1>(x, ldx, panel, cols, ahead, out);
    case 2: return panel_tiles<2>(x, ldx, panel, cols, ahead, out);
    case 3: return panel_tiles<3>(x, ldx, panel, cols, ahead, out);
    case 4: return panel_tiles<4>(x, ldx, panel, cols, ahead, out);
    case 5: return panel_tiles<5>(x, ldx, panel, cols, ahead, out);
    case 6: return panel_tiles<6>(x, ldx, panel, cols, ahead, out);
  }
}

enum Epilogue { kStore, kAdd };

// Rows [row0, row1) of one panel: y = or y += x w^T + bias.
template <class W>
static void panel_block(const Linear& linear, const W* w, int64_t panel, const float* x,
                        int64_t ldx, float* y, int64_t ldy, int64_t row0, int64_t row1,
                        Epilogue epilogue) {
  const int64_t n0 = panel * kPanel;
  const int width = int(linear.rows - n0 < kPanel ? linear.rows - n0 : kPanel);
  alignas(64) float out[kMaxRows * kPanel];
  int64_t blocks = (row1 - row0 + kMaxRows - 1) / kMaxRows;
  const bool several = blocks > 1;
  for (int64_t t = row0; t < row1; --blocks) {
    const int rows = int((row1 - t + blocks - 1) / blocks);
    // With several blocks a panel is in cache after the first; the last one fetches the next panel.
    const int64_t distance = several && blocks == 1 ? kPanel * linear.cols : kAheadBytes / int64_t(sizeof(W));
    panel_rows(x + t * ldx, ldx, rows, w, linear.cols, distance, out);
    for (int r = 0; r < rows; ++r) {
      float* to = y + (t + r) * ldy + n0;
      const float* from = out + r * kPanel;
      const float* bias = linear.bias ? linear.bias + n0 : nullptr;
      for (int i = 0; i < width; ++i) {
        float value = bias ? from[i] + bias[i] : from[i];
        to[i] = epilogue == kAdd ? to[i] + value : value;
      }
    }
    t += rows;
  }
}

constexpr int64_t kRowTile = 192;  // rows whose inputs stay in the second-level cache, a guess

constexpr int64_t kWidenRows = 24;  // from here on a bf16 panel is widened once, not per row block

static const float* widened(const bf16* panel, int64_t cols) {
  static thread_local std::vector<float> memory;
  if (int64_t(memory.size()) < kPanel * cols) memory.resize(kPanel * cols);
  for (int64_t i = 0; i < kPanel * cols; i += kLanes) store(memory.data() + i, load(panel + i));
  return memory.data();
}

static void linear(const Linear& weights, const float* x, int64_t ldx, int64_t rows, float* y,
                   int64_t ldy, Epilogue epilogue) {
  const int64_t panels = (weights.rows + kPanel - 1) / kPanel;
  const int64_t tiles = (rows + kRowTile - 1) / kRowTile;
  const double bytes = double(weights.rows) * weights.cols * (weights.is_bf16 ? 2 : 4);
  const double flops = 2.0 * weights.rows * weights.cols * rows;
  parallel_for(int(panels * tiles), std::max(bytes / 25e3, flops / 80e3), [&](int index) {
    int64_t row0 = (index / panels) * kRowTile, panel = index % panels;
    int64_t row1 = row0 + kRowTile < rows ? row0 + kRowTile : rows;
    const int64_t at = panel * kPanel * weights.cols;
    if (!weights.is_bf16) {
      const float* w = static_cast<const float*>(weights.weight) + at;
      panel_block(weights, w, panel, x, ldx, y, ldy, row0, row1, epilogue);
      return;
    }
    const bf16* w = static_cast<const bf16*>(weights.weight) + at;
    if (row1 - row0 > kWidenRows)
      panel_block(weights, widened(w, weights.cols), panel, x, ldx, y, ldy, row0, row1, epilogue);
    else
      panel_block(weights, w, panel, x, ldx, y, ldy, row0, row1, epilogue);
  });
}

template <class W>
static inline void packed_row(const W* storage, int64_t cols, int64_t row, float* out) {
  const W* at = storage + (row / kPanel) * kPanel * cols + in_panel(row % kPanel, 0, cols);
  for (int64_t k = 0; k < cols; ++k) out[k] = widen(at[k * kStrip]);
}

}  // namespace sgl
