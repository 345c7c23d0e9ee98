// Sixteen fp32 lanes as one value, on whatever vector unit the compiler targets.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace sgl {

constexpr int kLanes = 16;
typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));

static inline vf load(const float* p) {
  vf r;
  std::memcpy(&r, p, sizeof(r));
  return r;
}
static inline void store(float* p, vf v) { std::memcpy(p, &v, sizeof(v)); }

struct bf16 {
  uint16_t bits;
};

static inline float widen(float x) { return x; }
static inline float widen(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, sizeof(f));
  return f;
}

static inline void narrow(float x, float* out) { *out = x; }
static inline void narrow(float x, bf16* out) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof(u));
  if ((u & 0x7fffffffu) > 0x7f800000u) {
    out->bits = uint16_t((u >> 16) | 0x40u);  // a NaN stays a NaN
    return;
  }
  out->bits = uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);  // round to nearest even
}

static inline vf load(const bf16* p) {
  vh h;
  std::memcpy(&h, p, sizeof(h));
  vi w = __builtin_convertvector(h, vi) << 16;
  return (vf)w;
}

static inline vf splat(float x) { return vf{} + x; }

// One rounding: a * b + c. Contraction is off, so this is the only fused operation.
static inline vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  vf r;
  for (int i = 0; i < kLanes; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}

static inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

static inline vf vmax(vf a, vf b) { return a > b ? a : b; }
static inline vf vmin(vf a, vf b) { return a < b ? a : b; }

// Sum of the lanes by halving, always in this order.
static inline float hsum(vf v) {
  typedef float v8 __attribute__((vector_size(32)));
  typedef float v4 __attribute__((vector_size(16)));
  v8 a, b;
  std::memcpy(&a, &v, 32);
  std::memcpy(&b, reinterpret_cast<const char*>(&v) + 32, 32);
  a += b;
  v4 c, d;
  std::memcpy(&c, &a, 16);
  std::memcpy(&d, reinterpret_cast<const char*>(&a) + 16, 16);
  c += d;
  return (c[0] + c[2]) + (c[1] + c[3]);
}

static inline float hmax(vf v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

#define SGL_MIX1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define SGL_MIX1B 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define SGL_MIX2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define SGL_MIX2B 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define SGL_MIX4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define SGL_MIX4B 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define SGL_MIX8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define SGL_MIX8B 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31

// Lane i of the result is the sum over the lanes of a[i]; butterflies, a fixed order per lane.
static inline vf sum_rows(const vf* a) {
  vf b[8], c[4], d[2];
  for (int i = 0; i < 8; ++i)
    b[i] = __builtin_shufflevector(a[2 * i], a[2 * i + 1], SGL_MIX1) +
           __builtin_shufflevector(a[2 * i], a[2 * i + 1], SGL_MIX1B);
  for (int i = 0; i < 4; ++i)
    c[i] = __builtin_shufflevector(b[2 * i], b[2 * i + 1], SGL_MIX2) +
           __builtin_shufflevector(b[2 * i], b[2 * i + 1], SGL_MIX2B);
  for (int i = 0; i < 2; ++i)
    d[i] = __builtin_shufflevector(c[2 * i], c[2 * i + 1], SGL_MIX4) +
           __builtin_shufflevector(c[2 * i], c[2 * i + 1], SGL_MIX4B);
  return __builtin_shufflevector(d[0], d[1], SGL_MIX8) +
         __builtin_shufflevector(d[0], d[1], SGL_MIX8B);
}

// exp to about 1 ULP: x = n ln2 + r, minimax polynomial of degree 5 in r after Cephes' expf.
static inline vf vexp(vf x) {
  x = vmin(vmax(x, splat(-87.0f)), splat(88.0f));
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  vf n = fma(x, splat(1.44269504088896341f), magic) - magic;
  vf r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  vf p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  vf y = fma(p, r * r, r) + 1.0f;
  vi bits = (__builtin_convertvector(n, vi) + 127) << 23;
  return y * (vf)bits;
}

static inline vf vsigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }
static inline vf vsilu(vf x) { return x / (1.0f + vexp(-x)); }

// Partial vectors at the end of a row.
static inline vf load_part(const float* p, int count) {
  vf r = vf{};
  std::memcpy(&r, p, sizeof(float) * count);
  return r;
}
static inline void store_part(float* p, vf v, int count) {
  std::memcpy(p, &v, sizeof(float) * count);
}

}  // namespace sgl
