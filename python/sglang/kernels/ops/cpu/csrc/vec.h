// Sixteen fp32 lanes as one value, on whatever vector unit the compiler targets.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace sgl {

constexpr int kLanes = 16;
#if defined(__AVX512F__)
constexpr int kPartLanes = 16;
#elif defined(__AVX__)
constexpr int kPartLanes = 8;
#else
constexpr int kPartLanes = 4;
#endif
constexpr int kParts = kLanes / kPartLanes;

typedef float part __attribute__((vector_size(4 * kPartLanes)));
typedef int32_t ipart __attribute__((vector_size(4 * kPartLanes)));
typedef uint16_t hpart __attribute__((vector_size(2 * kPartLanes)));

// As many registers as sixteen lanes need; compilers split wider vector types through memory.
struct vf {
  part p[kParts];
};

#define SGL_EACH(expression)                          \
  vf r;                                               \
  for (int i = 0; i < kParts; ++i) r.p[i] = expression; \
  return r

static inline vf operator+(vf a, vf b) { SGL_EACH(a.p[i] + b.p[i]); }
static inline vf operator-(vf a, vf b) { SGL_EACH(a.p[i] - b.p[i]); }
static inline vf operator*(vf a, vf b) { SGL_EACH(a.p[i] * b.p[i]); }
static inline vf operator/(vf a, vf b) { SGL_EACH(a.p[i] / b.p[i]); }
static inline vf operator-(vf a) { SGL_EACH(-a.p[i]); }
static inline vf splat(float x) { SGL_EACH(part{} + x); }
static inline vf operator+(vf a, float b) { return a + splat(b); }
static inline vf operator-(vf a, float b) { return a - splat(b); }
static inline vf operator*(vf a, float b) { return a * splat(b); }
static inline vf operator+(float a, vf b) { return splat(a) + b; }
static inline vf operator/(float a, vf b) { return splat(a) / b; }
static inline vf vmax(vf a, vf b) { SGL_EACH(a.p[i] > b.p[i] ? a.p[i] : b.p[i]); }
static inline vf vmin(vf a, vf b) { SGL_EACH(a.p[i] < b.p[i] ? a.p[i] : b.p[i]); }
static inline vf zero() { SGL_EACH(part{}); }
static inline float lane(const vf& v, int i) { return v.p[i / kPartLanes][i % kPartLanes]; }

static inline part load_part_at(const float* x) {
  part r;
  std::memcpy(&r, x, sizeof(r));
  return r;
}
static inline vf load(const float* x) { SGL_EACH(load_part_at(x + i * kPartLanes)); }
static inline void store(float* x, vf v) {
  for (int i = 0; i < kParts; ++i) std::memcpy(x + i * kPartLanes, &v.p[i], sizeof(part));
}

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

static inline vf load(const bf16* x) {
  vf r;
  for (int i = 0; i < kParts; ++i) {
    hpart h;
    std::memcpy(&h, x + i * kPartLanes, sizeof(h));
    r.p[i] = (part)(__builtin_convertvector(h, ipart) << 16);
  }
  return r;
}

// One rounding: a * b + c. Contraction is off, so this is the only fused operation.
static inline part fma_part(part a, part b, part c) {
#if defined(__AVX512F__)
  return (part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  return (part)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  part r;
  for (int i = 0; i < kPartLanes; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}
static inline vf fma(vf a, vf b, vf c) { SGL_EACH(fma_part(a.p[i], b.p[i], c.p[i])); }

static inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// Sum of the lanes by halving, always in this order.
static inline float hsum(vf v) {
  float x[kLanes];
  store(x, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
}

static inline float hmax(vf v) {
  float x[kLanes];
  store(x, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
  return x[0];
}

// Lane i of the result is the sum over the lanes of a[i]: butterflies, a fixed order per lane.
#if defined(__AVX512F__)
#define SGL_MIX(a, b, low, high) \
  (__builtin_shufflevector(a, b, low) + __builtin_shufflevector(a, b, high))
#define SGL_A1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define SGL_B1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define SGL_A2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define SGL_B2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define SGL_A4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define SGL_B4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define SGL_A8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define SGL_B8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
static inline vf sum_rows(const vf* a) {
  part b[8], c[4], d[2];
  for (int i = 0; i < 8; ++i) b[i] = SGL_MIX(a[2 * i].p[0], a[2 * i + 1].p[0], SGL_A1, SGL_B1);
  for (int i = 0; i < 4; ++i) c[i] = SGL_MIX(b[2 * i], b[2 * i + 1], SGL_A2, SGL_B2);
  for (int i = 0; i < 2; ++i) d[i] = SGL_MIX(c[2 * i], c[2 * i + 1], SGL_A4, SGL_B4);
  vf r;
  r.p[0] = SGL_MIX(d[0], d[1], SGL_A8, SGL_B8);
  return r;
}
#elif defined(__AVX__)
#define SGL_MIX(a, b, low, high) \
  (__builtin_shufflevector(a, b, low) + __builtin_shufflevector(a, b, high))
#define SGL_A1 0, 8, 2, 10, 4, 12, 6, 14
#define SGL_B1 1, 9, 3, 11, 5, 13, 7, 15
#define SGL_A2 0, 1, 8, 9, 4, 5, 12, 13
#define SGL_B2 2, 3, 10, 11, 6, 7, 14, 15
#define SGL_A4 0, 1, 2, 3, 8, 9, 10, 11
#define SGL_B4 4, 5, 6, 7, 12, 13, 14, 15
static inline vf sum_rows(const vf* a) {
  vf r;
  for (int half = 0; half < 2; ++half) {
    const vf* h = a + 8 * half;
    part q[8], b[4], c[2];
    for (int i = 0; i < 8; ++i) q[i] = h[i].p[0] + h[i].p[1];
    for (int i = 0; i < 4; ++i) b[i] = SGL_MIX(q[2 * i], q[2 * i + 1], SGL_A1, SGL_B1);
    for (int i = 0; i < 2; ++i) c[i] = SGL_MIX(b[2 * i], b[2 * i + 1], SGL_A2, SGL_B2);
    r.p[half] = SGL_MIX(c[0], c[1], SGL_A4, SGL_B4);
  }
  return r;
}
#else
static inline vf sum_rows(const vf* a) {
  float sums[kLanes];
  for (int i = 0; i < kLanes; ++i) sums[i] = hsum(a[i]);
  return load(sums);
}
#endif

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
  vf scaled;
  for (int i = 0; i < kParts; ++i)
    scaled.p[i] = y.p[i] * (part)((__builtin_convertvector(n.p[i], ipart) + 127) << 23);
  return scaled;
}

static inline vf vsigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }
static inline vf vsilu(vf x) { return x / (1.0f + vexp(-x)); }

// Partial vectors at the end of a row.
static inline vf load_part(const float* p, int count) {
  vf r = zero();
  std::memcpy(&r, p, sizeof(float) * count);
  return r;
}
static inline void store_part(float* p, vf v, int count) {
  std::memcpy(p, &v, sizeof(float) * count);
}

}  // namespace sgl
