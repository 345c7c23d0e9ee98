// Gated delta rule over a few tokens a request, one CTA per (request, value head, block of state rows).
//
// Lanes of a warp split 8 along K x 4 along V, so a reduction over K needs three shuffles and no
// synchronisation between warps. A CTA is persistent: while it computes one unit, the state rows and the
// q, k, v rows of its next unit arrive in shared memory through bulk copies.
//
// The state arithmetic is one __fmul_rn feeding one __fmaf_rn a step, as in the Triton kernels.
//
// Deferred commit: the pool's state stays as it was at the last write-back. Accepted tuples wait in a ring of
// `pitch` cells a row, cells start..start+len-1 (mod pitch); the kernel replays them in registers, and writes
// the state back only when the ring could not take another full verify.
//
// Compile-time: NW warps a CTA, RPL state rows a lane (2 or 4), MIN_CTAS, STATE_BF16, PAIRS (run_steps).

typedef unsigned short bf16_bits;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef NW
#define NW 4
#endif
#ifndef RPL
#define RPL 4
#endif
#ifndef MIN_CTAS
#define MIN_CTAS 4
#endif
#ifndef STATE_BF16
#define STATE_BF16 0
#endif
#ifndef PAIRS
#define PAIRS 0
#endif

constexpr int HEAD_DIM = 128;
constexpr int LANES_K = 8;
constexpr int COLS = HEAD_DIM / LANES_K;       // 16 columns a lane, four groups of four
constexpr int WARP_ROWS = 4 * RPL;
constexpr int UNIT_ROWS = NW * WARP_ROWS;
constexpr int TILES = HEAD_DIM / UNIT_ROWS;
constexpr int STATE_BYTES = STATE_BF16 ? 2 : 4;
constexpr int WARP_BYTES = WARP_ROWS * HEAD_DIM * STATE_BYTES;

struct Params {
  const bf16_bits* q;
  const bf16_bits* k;
  const bf16_bits* v;
  const bf16_bits* a;
  const bf16_bits* b;
  const float* a_log;
  const void* dt_bias;
  bf16_bits* out;
  char* states;
  const void* slots;
  const int* rows;
  char* snapshots;
  float* u_ring;
  float* k_ring;
  float* g_ring;
  const int4* ring;                             // [num_rows][2] or null, see struct Ring
  i64 q_stride, k_stride, v_stride, a_stride, b_stride;
  i64 state_stride;                             // elements between slots
  float scale;
  int num_units, num_tokens, num_k_heads, num_v_heads;
  int num_slots, num_rows, pitch, reserve;      // reserve: draft steps a later verify may append
  int slots_are_64, dt_bias_is_bf16;
  int write_state, write_snapshots, write_tuples, force_flush;
};

__device__ __forceinline__ float from_bf16(bf16_bits x) { return __uint_as_float((u32)x << 16); }

__device__ __forceinline__ bf16_bits to_bf16(float x) {
  bf16_bits r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return r;
}

// The same instruction pair as decay_factor() of the Triton kernels.
__device__ __forceinline__ float decay_factor(float g) {
  float r;
  asm("{ .reg .f32 t; mul.rn.f32 t, %1, 0f3FB8AA3B; ex2.approx.f32 %0, t; }" : "=f"(r) : "f"(g));
  return r;
}

__device__ __forceinline__ u32 smem_addr(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void mbar_init(u64* bar) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(smem_addr(bar)) : "memory");
}

// The issuing forms take a predicate instead of standing in a branch: a branch around them would make ptxas
// treat the warp as diverged in everything that follows.
__device__ __forceinline__ void mbar_expect(u64* bar, u32 bytes, bool on) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %2, 0;\n"
      " @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n}" ::"r"(smem_addr(bar)),
      "r"(bytes), "r"((u32)on)
      : "memory");
}

// The vote makes the loop uniform, for the same reason.
__device__ __forceinline__ void mbar_wait(u64* bar, u32 parity) {
  u32 done;
  do {
    asm volatile(
        "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        " selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(smem_addr(bar)), "r"(parity)
        : "memory");
  } while (!__all_sync(0xffffffffu, done));
}

__device__ __forceinline__ void bulk_load(void* dst, const void* src, u32 bytes, u64* bar, bool on) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %4, 0;\n"
      " @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n}" ::"r"(
          smem_addr(dst)),
      "l"(src), "r"(bytes), "r"(smem_addr(bar)), "r"((u32)on)
      : "memory");
}

struct Unit {
  int req, head, tile;
  int slot, row;                                // -1 when out of range
};

// Of a unit, all but its slot and row.
__device__ __forceinline__ Unit unit_at(const Params& p, int index) {
  Unit x;
  x.tile = index % TILES;
  int rest = index / TILES;
  x.head = rest % p.num_v_heads;
  x.req = rest / p.num_v_heads;
  x.slot = x.row = -1;
  return x;
}

__device__ __forceinline__ int slot_in_range(const Params& p, i64 slot) {
  return slot >= 0 && slot < p.num_slots ? (int)slot : -1;
}

// The slot as it is while the kernel in front may still write it. Read past the L1 cache, or the line would stay
// there and load_unit could find the old slot in it.
__device__ __forceinline__ int early_slot(const Params& p, int req) {
  i64 wide;
  int narrow;
  if (p.slots_are_64) {
    asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(wide) : "l"((const i64*)p.slots + req));
    return slot_in_range(p, wide);
  }
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(narrow) : "l"((const int*)p.slots + req));
  return slot_in_range(p, narrow);
}

__device__ __forceinline__ Unit load_unit(const Params& p, int index) {
  Unit x = unit_at(p, index);
  x.slot = slot_in_range(p, p.slots_are_64 ? ((const i64*)p.slots)[x.req] : (i64)((const int*)p.slots)[x.req]);
  x.row = p.rows ? p.rows[x.req] : -1;
  if (x.row >= p.num_rows) x.row = -1;
  return x;
}

// Of one row. head: {start, len, track_at, track_dest}; ends: bit j of the 64 in (x, y) is set if a commit
// ended with pending cell j, where a bf16 state is rounded.
struct Ring {
  int4 head, ends;
};

__device__ __forceinline__ Ring load_ring(const Params& p, const Unit& x) {
  Ring r;
  r.head = make_int4(0, 0, -1, -1);
  r.ends = make_int4(0, 0, 0, 0);
  if (p.ring && x.row >= 0) {
    r.head = p.ring[2 * x.row];
    if (STATE_BF16) r.ends = p.ring[2 * x.row + 1];
  }
  return r;
}

__device__ __forceinline__ u32 load_raw_gates(const Params& p, const Unit& x, int t) {
  if (t >= p.num_tokens) return 0;
  i64 token = (i64)x.req * p.num_tokens + t;
  return (u32)p.a[token * p.a_stride + x.head] | (u32)p.b[token * p.b_stride + x.head] << 16;
}

__device__ __forceinline__ char* entry_of(const Params& p, int slot, const Unit& x, int first_row) {
  i64 element = (i64)slot * p.state_stride + (i64)x.head * HEAD_DIM * HEAD_DIM + (i64)first_row * HEAD_DIM;
  return p.states + element * STATE_BYTES;
}

// h[i][4*j+c] is row vl*RPL+i, column 32*j+4*kl+c of the warp's rows.
__device__ __forceinline__ void store_rows(char* base, const float (&h)[RPL][COLS], int vl, int kl) {
#pragma unroll
  for (int i = 0; i < RPL; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int element = (vl * RPL + i) * HEAD_DIM + j * 32 + kl * 4;
#if STATE_BF16
      ushort4 w = make_ushort4(to_bf16(h[i][4 * j]), to_bf16(h[i][4 * j + 1]), to_bf16(h[i][4 * j + 2]),
                               to_bf16(h[i][4 * j + 3]));
      *(ushort4*)(base + element * 2) = w;
#else
      *(float4*)(base + element * 4) =
          make_float4(h[i][4 * j], h[i][4 * j + 1], h[i][4 * j + 2], h[i][4 * j + 3]);
#endif
    }
  }
}

__device__ __forceinline__ void read_rows(const char* base, float (&h)[RPL][COLS], int vl, int kl) {
#pragma unroll
  for (int i = 0; i < RPL; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      int element = (vl * RPL + i) * HEAD_DIM + j * 32 + kl * 4;
#if STATE_BF16
      ushort4 w = *(const ushort4*)(base + element * 2);
      h[i][4 * j] = from_bf16(w.x);
      h[i][4 * j + 1] = from_bf16(w.y);
      h[i][4 * j + 2] = from_bf16(w.z);
      h[i][4 * j + 3] = from_bf16(w.w);
#else
      float4 w = *(const float4*)(base + element * 4);
      h[i][4 * j] = w.x;
      h[i][4 * j + 1] = w.y;
      h[i][4 * j + 2] = w.z;
      h[i][4 * j + 3] = w.w;
#endif
    }
  }
}

__device__ __forceinline__ void read_cols(const float* base, float (&x)[COLS], int kl) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float4 w = *(const float4*)(base + j * 32 + kl * 4);
    x[4 * j] = w.x;
    x[4 * j + 1] = w.y;
    x[4 * j + 2] = w.z;
    x[4 * j + 3] = w.w;
  }
}

// Row `own_row(kl)` summed over the eight K lanes; every lane of a pair (kl, kl^1) holds it.
__device__ __forceinline__ float reduce_rows(const float (&s)[RPL], int kl) {
  const u32 all = 0xffffffffu;
#if RPL == 4
  bool hi = kl & 4, odd = kl & 2;
  float x0 = (hi ? s[2] : s[0]) + __shfl_xor_sync(all, hi ? s[0] : s[2], 4);
  float x1 = (hi ? s[3] : s[1]) + __shfl_xor_sync(all, hi ? s[1] : s[3], 4);
  float y = (odd ? x1 : x0) + __shfl_xor_sync(all, odd ? x0 : x1, 2);
#else
  bool hi = kl & 4;
  float y = (hi ? s[1] : s[0]) + __shfl_xor_sync(all, hi ? s[0] : s[1], 4);
  y += __shfl_xor_sync(all, y, 2);
#endif
  y += __shfl_xor_sync(all, y, 1);
  return y;
}

// As reduce_rows for two rows; row kl >> 2, held by four lanes. The order of additions is the same.
__device__ __forceinline__ float reduce_pair(float s0, float s1, int kl) {
  const u32 all = 0xffffffffu;
  bool hi = kl & 4;
  float y = (hi ? s1 : s0) + __shfl_xor_sync(all, hi ? s0 : s1, 4);
  y += __shfl_xor_sync(all, y, 2);
  y += __shfl_xor_sync(all, y, 1);
  return y;
}

__device__ __forceinline__ int own_row(int kl) { return RPL == 4 ? kl >> 1 : kl >> 2; }

struct Pending {
  float k[COLS];
  float u[RPL];
  float g;
};

// Where one lane reads the pending cells of its row and head; `offset` counts cells of all heads.
struct PendingCursor {
  const float* k;
  const float* u;
  const float* g;
  int step, pitch, num_heads;

  __device__ __forceinline__ PendingCursor(const Params& p, const Unit& x, int start, int first_row, int vl,
                                           int kl) {
    i64 cell = (i64)x.row * p.pitch * p.num_v_heads + x.head;
    k = p.k_ring + cell * HEAD_DIM + kl * 4;
    u = p.u_ring + cell * HEAD_DIM + first_row + vl * RPL;
    g = p.g_ring + cell;
    step = start;
    pitch = p.pitch;
    num_heads = p.num_v_heads;
  }

  __device__ __forceinline__ void load(Pending& d) {
    int offset = step * num_heads;
    const float* pk = k + (i64)offset * HEAD_DIM;
    const float* pu = u + (i64)offset * HEAD_DIM;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float4 w = *(const float4*)(pk + j * 32);
      d.k[4 * j] = w.x;
      d.k[4 * j + 1] = w.y;
      d.k[4 * j + 2] = w.z;
      d.k[4 * j + 3] = w.w;
    }
#if RPL == 4
    float4 w = *(const float4*)pu;
    d.u[0] = w.x;
    d.u[1] = w.y;
    d.u[2] = w.z;
    d.u[3] = w.w;
#else
    float2 w = *(const float2*)pu;
    d.u[0] = w.x;
    d.u[1] = w.y;
#endif
    d.g = g[offset];
    step = step + 1 == pitch ? 0 : step + 1;
  }
};

__device__ __forceinline__ void apply_pending(float (&h)[RPL][COLS], const Pending& d) {
  float decay = decay_factor(d.g);
#pragma unroll
  for (int i = 0; i < RPL; ++i)
#pragma unroll
    for (int c = 0; c < COLS; ++c) h[i][c] = __fmaf_rn(d.k[c], d.u[i], __fmul_rn(h[i][c], decay));
}

// Cells 0..len-1, the first already in `d`; the boundary state leaves after cell ring.z.
__device__ __forceinline__ void replay_pending(const Params& p, const Unit& x, const int4& ring, u64 ends,
                                               PendingCursor& cursor, Pending& d, int first_row, int vl, int kl,
                                               float (&h)[RPL][COLS]) {
  const bool tracks = ring.z >= 0 && ring.z < ring.y && ring.w >= 0 && ring.w < p.num_slots;
  int done = 0;
  int stop = tracks ? ring.z + 1 : ring.y;
  while (true) {
    for (; done < stop; ++done) {
      Pending next;
      // One cell past the last is read too: it lies in the ring and is not used.
      cursor.load(next);
      apply_pending(h, d);
      if (STATE_BF16 && (ends >> done & 1)) {
#pragma unroll
        for (int i = 0; i < RPL; ++i)
#pragma unroll
          for (int c = 0; c < COLS; ++c) h[i][c] = from_bf16(to_bf16(h[i][c]));
      }
      d = next;
    }
    if (done == ring.z + 1 && tracks) store_rows(entry_of(p, ring.w, x, first_row), h, vl, kl);
    if (stop == ring.y) break;
    stop = ring.y;
  }
}

// One prepared token: read with constant offsets from one pointer.
struct Token {
  float k[HEAD_DIM];                            // normalised
  float q[HEAD_DIM];                            // normalised and scaled
  float decay, beta, unused[2];
};

struct Shared {
  char* state;        // [NW][WARP_BYTES]
  Token* tokens;      // [T]
  bf16_bits* raw;     // [2][T * RAW_ROW]: q rows, then k rows, then v rows of the unit
};

constexpr int RAW_ROW = 2 * HEAD_DIM + UNIT_ROWS;

__device__ __forceinline__ Shared carve(char* base, int T) {
  Shared s;
  s.state = base;
  s.tokens = (Token*)(base + NW * WARP_BYTES);
  s.raw = (bf16_bits*)(s.tokens + T);
  return s;
}

__device__ __forceinline__ void fetch_tokens(const Params& p, const Unit& x, bf16_bits* raw, u64* bar,
                                             int lane, bool on) {
  int T = p.num_tokens;
  mbar_expect(bar, T * RAW_ROW * 2, on && lane == 0);
  __syncwarp();
  on = on && lane < T;
  i64 token = (i64)x.req * T + lane;
  int key_head = x.head / (p.num_v_heads / p.num_k_heads);
  bulk_load(raw + lane * HEAD_DIM, p.q + token * p.q_stride + key_head * HEAD_DIM, HEAD_DIM * 2, bar, on);
  bulk_load(raw + (T + lane) * HEAD_DIM, p.k + token * p.k_stride + key_head * HEAD_DIM, HEAD_DIM * 2, bar, on);
  bulk_load(raw + 2 * T * HEAD_DIM + lane * UNIT_ROWS,
            p.v + token * p.v_stride + x.head * HEAD_DIM + x.tile * UNIT_ROWS, UNIT_ROWS * 2, bar, on);
}

__device__ __forceinline__ void fetch_state(const Params& p, const Unit& x, const Shared& s, u64* bar,
                                            int warp, bool on) {
  on = on && x.slot >= 0;
  mbar_expect(bar, WARP_BYTES, on);
  bulk_load(s.state + warp * WARP_BYTES, entry_of(p, x.slot, x, x.tile * UNIT_ROWS + warp * WARP_ROWS),
            WARP_BYTES, bar, on);
}

__device__ __forceinline__ i64 ring_cell(const Params& p, const Unit& x, int step) {
  return ((i64)x.row * p.pitch + step) * p.num_v_heads + x.head;
}

// Ring position of draft step t, or -1 when nothing may be recorded there.
__device__ __forceinline__ int record_step(const Params& p, const Unit& x, int base, int t) {
  int step = base + t;
  if (p.ring && step >= p.pitch) step -= p.pitch;
  return x.row >= 0 && step < p.pitch ? step : -1;
}

// Gates of token `t` and, once per head, their record.
__device__ __forceinline__ void prepare_gates(const Params& p, const Unit& x, const Shared& s, int base, int t,
                                              u32 raw) {
  float bias = p.dt_bias_is_bf16 ? from_bf16(((const bf16_bits*)p.dt_bias)[x.head])
                                 : ((const float*)p.dt_bias)[x.head];
  float z = from_bf16((bf16_bits)raw) + bias;
  float soft = z <= 20.0f ? log1pf(expf(z)) : z;
  float g = -expf(p.a_log[x.head]) * soft;
  s.tokens[t].decay = decay_factor(g);
  s.tokens[t].beta = 1.0f / (1.0f + expf(-from_bf16((bf16_bits)(raw >> 16))));
  int step = record_step(p, x, base, t);
  if (p.write_tuples && x.tile == 0 && step >= 0) p.g_ring[ring_cell(p, x, step)] = g;
}

// Norms of the q and k rows, four rows of a warp at a time; tile 0 also records k.
__device__ __forceinline__ void prepare_tokens(const Params& p, const Unit& x, const Shared& s,
                                               const bf16_bits* raw, int base, int warp, int lane) {
  const int T = p.num_tokens;
  const bool record = p.write_tuples && x.tile == 0;
  for (int r0 = warp; r0 < 2 * T; r0 += 4 * NW) {
    float4 f[4];
    float sum[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      int r = min(r0 + n * NW, 2 * T - 1);
      ushort4 w = *(const ushort4*)(raw + r * HEAD_DIM + lane * 4);
      f[n] = make_float4(from_bf16(w.x), from_bf16(w.y), from_bf16(w.z), from_bf16(w.w));
      sum[n] = __fmaf_rn(f[n].w, f[n].w,
                         __fmaf_rn(f[n].z, f[n].z, __fmaf_rn(f[n].y, f[n].y, __fmul_rn(f[n].x, f[n].x))));
    }
#pragma unroll
    for (int d = 16; d > 0; d >>= 1)
#pragma unroll
      for (int n = 0; n < 4; ++n) sum[n] += __shfl_xor_sync(0xffffffffu, sum[n], d);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      int r = r0 + n * NW;
      if (r < 2 * T) {
        float norm = 1.0f / sqrtf(sum[n] + 1e-6f);
        if (r < T) norm *= p.scale;
        float4 y = make_float4(f[n].x * norm, f[n].y * norm, f[n].z * norm, f[n].w * norm);
        Token& token = s.tokens[r < T ? r : r - T];
        *(float4*)((r < T ? token.q : token.k) + lane * 4) = y;
        int step = record && r >= T ? record_step(p, x, base, r - T) : -1;
        if (step >= 0) *(float4*)(p.k_ring + ring_cell(p, x, step) * HEAD_DIM + lane * 4) = y;
      }
    }
  }
}

// Rows [FIRST, FIRST+COUNT) of the lane: decay them and sum them against k.
template <int FIRST, int COUNT>
__device__ __forceinline__ void decay_and_project(float (&h)[RPL][COLS], const float (&kc)[COLS], float decay,
                                                  float (&seen)[RPL]) {
#pragma unroll
  for (int i = FIRST; i < FIRST + COUNT; ++i) seen[i] = 0.0f;
#pragma unroll
  for (int c = 0; c < COLS; ++c)
#pragma unroll
    for (int i = FIRST; i < FIRST + COUNT; ++i) {
      h[i][c] = __fmul_rn(h[i][c], decay);
      seen[i] = __fmaf_rn(h[i][c], kc[c], seen[i]);
    }
}

// The same rows: add the update, sum against q.
template <int FIRST, int COUNT>
__device__ __forceinline__ void update_and_read(float (&h)[RPL][COLS], const float (&kc)[COLS],
                                                const float (&qc)[COLS], const float (&u)[RPL],
                                                float (&o)[RPL]) {
#pragma unroll
  for (int i = FIRST; i < FIRST + COUNT; ++i) o[i] = 0.0f;
#pragma unroll
  for (int c = 0; c < COLS; ++c)
#pragma unroll
    for (int i = FIRST; i < FIRST + COUNT; ++i) {
      h[i][c] = __fmaf_rn(kc[c], u[i], h[i][c]);
      o[i] = __fmaf_rn(h[i][c], qc[c], o[i]);
    }
}

__device__ __forceinline__ float update_of(float v, float seen, float beta) {
  return __fmul_rn(__fsub_rn(v, seen), beta);
}

// The output of a step is reduced while the next step runs: its shuffles leave the critical path. With PAIRS
// the rows go in two halves, so that one half's arithmetic covers the other half's shuffles.
__device__ __forceinline__ void run_steps(const Params& p, const Unit& x, const Shared& s,
                                          const bf16_bits* raw_v, int base, int warp, int vl, int kl,
                                          float (&h)[RPL][COLS]) {
  constexpr bool IN_PAIRS = PAIRS && RPL == 4;
  const u32 all = 0xffffffffu;
  const int T = p.num_tokens;
  const int lane_row = warp * WARP_ROWS + vl * RPL;
  const int row_stride = p.num_v_heads * HEAD_DIM;
  // In pairs, lanes with kl & 1 keep the second pair's update: row 2 * (kl & 1) + (kl >> 2).
  const int u_own = IN_PAIRS ? 2 * (kl & 1) + (kl >> 2) : own_row(kl);
  const bool writes_u = IN_PAIRS ? (kl & 2) == 0 : RPL == 4 ? (kl & 1) == 0 : (kl & 3) == 0;
  const bool writes_o = RPL == 4 ? (kl & 1) == 0 : (kl & 3) == 0;
  const Token* token = s.tokens;
  const bf16_bits* v = raw_v + lane_row;
  bf16_bits* out = p.out + ((i64)x.req * T * p.num_v_heads + x.head) * HEAD_DIM + x.tile * UNIT_ROWS +
                   lane_row + own_row(kl);
  int step = base;
  const bool record = x.row >= 0;
  const bool record_u = p.write_tuples && record && writes_u;
  const i64 cell0 = ring_cell(p, x, 0);
  float* u_row = p.u_ring + cell0 * HEAD_DIM + x.tile * UNIT_ROWS + lane_row + u_own;
  float o[RPL];
#pragma unroll
  for (int i = 0; i < RPL; ++i) o[i] = 0.0f;
#pragma unroll 1
  for (int t = 0; t < T; ++t) {
    float kc[COLS], qc[COLS], seen[RPL], u[RPL], own_u;
    read_cols(token->k, kc, kl);
    const float decay = token->decay, beta = token->beta;
    const float own_o = reduce_rows(o, kl);
    if (IN_PAIRS) {
      const float v0 = from_bf16(v[kl >> 2]), v1 = from_bf16(v[2 + (kl >> 2)]);
      decay_and_project<0, RPL / 2>(h, kc, decay, seen);
      const float u0 = update_of(v0, reduce_pair(seen[0], seen[1], kl), beta);
      u[0] = __shfl_sync(all, u0, vl * LANES_K);
      u[1] = __shfl_sync(all, u0, vl * LANES_K + 4);
      decay_and_project<RPL / 2, RPL / 2>(h, kc, decay, seen);
      const float u1 = update_of(v1, reduce_pair(seen[RPL - 2], seen[RPL - 1], kl), beta);
      u[RPL - 2] = __shfl_sync(all, u1, vl * LANES_K);
      u[RPL - 1] = __shfl_sync(all, u1, vl * LANES_K + 4);
      own_u = kl & 1 ? u1 : u0;
      read_cols(token->q, qc, kl);
      update_and_read<0, RPL / 2>(h, kc, qc, u, o);
      update_and_read<RPL / 2, RPL / 2>(h, kc, qc, u, o);
    } else {
      const float vt = from_bf16(v[own_row(kl)]);
      decay_and_project<0, RPL>(h, kc, decay, seen);
      own_u = update_of(vt, reduce_rows(seen, kl), beta);
#pragma unroll
      for (int i = 0; i < RPL; ++i) u[i] = __shfl_sync(all, own_u, vl * LANES_K + i * (LANES_K / RPL));
      read_cols(token->q, qc, kl);
      update_and_read<0, RPL>(h, kc, qc, u, o);
    }
    if (t > 0 && writes_o) {
      *out = to_bf16(own_o);
      out += row_stride;
    }
    if (step < p.pitch) {
      if (record_u) u_row[step * row_stride] = own_u;
      if (p.write_snapshots && record) {
        i64 cell = cell0 + (i64)step * p.num_v_heads;
        i64 element = (cell * HEAD_DIM + x.tile * UNIT_ROWS + warp * WARP_ROWS) * HEAD_DIM;
        store_rows(p.snapshots + element * STATE_BYTES, h, vl, kl);
      }
    }
    ++step;
    if (p.ring && step == p.pitch) step = 0;
    ++token;
    v += UNIT_ROWS;
  }
  const float own_o = reduce_rows(o, kl);
  if (T > 0 && writes_o) *out = to_bf16(own_o);
}

extern "C" __global__ void __launch_bounds__(NW * 32, MIN_CTAS)
    gdn_verify(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char smem[];
  __shared__ u64 token_bar;
  __shared__ u64 state_bar[NW];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int kl = lane & 7, vl = lane >> 3;
  const bool has_tokens = p.num_tokens > 0;
  Shared s = carve(smem, p.num_tokens);
  if (threadIdx.x == 0) {
    mbar_init(&token_bar);
    for (int w = 0; w < NW; ++w) mbar_init(&state_bar[w]);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  // While the kernel in front still runs, the first state is asked for, into the L2 cache, where it stays current.
  if (lane == 0 && (int)blockIdx.x < p.num_units) {
    const Unit first = unit_at(p, blockIdx.x);
    const int slot = early_slot(p, first.req);
    if (slot >= 0)
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                       entry_of(p, slot, first, first.tile * UNIT_ROWS + warp * WARP_ROWS)),
                   "r"(WARP_BYTES));
  }
  // A launch that may overlap the kernel before it (VerifyTile.pdl) waits here; any other passes at once.
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  int index = blockIdx.x;
  if (index >= p.num_units) return;
  Unit x = load_unit(p, index);
  fetch_state(p, x, s, &state_bar[warp], warp, lane == 0);
  fetch_tokens(p, x, s.raw, &token_bar, lane, warp == 0 && has_tokens);
  u32 raw_gates = warp == NW - 1 ? load_raw_gates(p, x, lane) : 0;
  u32 token_phase = 0, state_phase = 0;
  float h[RPL][COLS];

  while (true) {
    const int first_row = x.tile * UNIT_ROWS + warp * WARP_ROWS;
    const Ring row_ring = load_ring(p, x);
    const int4 ring = row_ring.head;
    const u64 ends = (u64)(u32)row_ring.ends.y << 32 | (u32)row_ring.ends.x;
    int base = ring.x + ring.y;
    if (p.ring && base >= p.pitch) base -= p.pitch;
    const bf16_bits* raw = s.raw + token_phase * p.num_tokens * RAW_ROW;
    if (has_tokens) {
      if (warp == NW - 1 && lane < p.num_tokens) prepare_gates(p, x, s, base, lane, raw_gates);
      mbar_wait(&token_bar, token_phase);
      token_phase ^= 1;
      prepare_tokens(p, x, s, raw, base, warp, lane);
      __syncthreads();
    }
    const bool has_pending = ring.y > 0 && x.slot >= 0;
    PendingCursor cursor(p, x, ring.x, first_row, vl, kl);
    Pending pending;
    if (has_pending) cursor.load(pending);
    if (x.slot >= 0) {
      mbar_wait(&state_bar[warp], state_phase);
      state_phase ^= 1;
      read_rows(s.state + warp * WARP_BYTES, h, vl, kl);
    } else {
#pragma unroll
      for (int i = 0; i < RPL; ++i)
#pragma unroll
        for (int c = 0; c < COLS; ++c) h[i][c] = 0.0f;
    }
    __syncwarp();
    index += gridDim.x;
    const bool more = index < p.num_units;
    Unit next = x;
    if (more) {
      next = load_unit(p, index);
      fetch_state(p, next, s, &state_bar[warp], warp, lane == 0);
      // The other raw half is free: every warp has passed the barrier after the unit that read it.
      fetch_tokens(p, next, s.raw + token_phase * p.num_tokens * RAW_ROW, &token_bar, lane,
                   warp == 0 && has_tokens);
      if (warp == NW - 1) raw_gates = load_raw_gates(p, next, lane);
    }
    if (has_pending) {
      replay_pending(p, x, ring, ends, cursor, pending, first_row, vl, kl, h);
      if (p.force_flush || ring.y + 2 * p.reserve > p.pitch)
        store_rows(entry_of(p, x.slot, x, first_row), h, vl, kl);
    }
    run_steps(p, x, s, raw + 2 * p.num_tokens * HEAD_DIM, base, warp, vl, kl, h);
    if (p.write_state && x.slot >= 0) store_rows(entry_of(p, x.slot, x, first_row), h, vl, kl);
    if (!more) break;
    __syncthreads();
    x = next;
  }
}

// Bookkeeping of a deferred commit, one thread a request; the flush rule is the verify's own. The verify that
// came before has stored the boundary state recorded earlier, so that note is replaced. A boundary state may
// not go to a working slot of the batch.
extern "C" __global__ void gdn_deferred_commit(int4* ring, const int* rows, const void* slots,
                                               const void* steps, const void* track_steps,
                                               const void* track_dests, int n, int num_rows, int num_tokens,
                                               int pitch, int reserve, int wide_mask) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int row = rows[i];
  if (row < 0 || row >= num_rows) return;
  auto at = [&](const void* base, int bit, int n) -> i64 {
    return wide_mask >> bit & 1 ? ((const i64*)base)[n] : (i64)((const int*)base)[n];
  };
  i64 step = at(steps, 1, i);
  int4 x = ring[2 * row];
  int4 y = ring[2 * row + 1];
  u64 ends = (u64)(u32)y.y << 32 | (u32)y.x;
  int accepted = step >= 0 && step < num_tokens ? (int)step + 1 : 0;
  if (x.y > 0 && x.y + 2 * reserve > pitch) {
    x.x = (x.x + x.y) % pitch;
    x.y = 0;
    ends = 0;
  }
  x.z = -1;
  x.w = -1;
  if (track_steps) {
    i64 track_step = at(track_steps, 2, i), dest = at(track_dests, 3, i);
    bool wanted = track_step >= 0 && track_step < accepted && dest >= 0;
    for (int j = 0; wanted && j < n; ++j) wanted = at(slots, 0, j) != dest;
    if (wanted) {
      x.z = x.y + (int)track_step;
      x.w = (int)dest;
    }
  }
  x.y += accepted;
  if (accepted > 0) ends |= 1ull << (x.y - 1);
  ring[2 * row] = x;
  ring[2 * row + 1] = make_int4((int)(u32)ends, (int)(u32)(ends >> 32), 0, 0);
}

// Forget what is pending in the named rows, after it was written back.
extern "C" __global__ void gdn_deferred_clear(int4* ring, const int* rows, int n, int num_rows, int pitch) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  int row = rows[i];
  if (row < 0 || row >= num_rows) return;
  int4 x = ring[2 * row];
  ring[2 * row] = make_int4((x.x + x.y) % pitch, 0, -1, -1);
  ring[2 * row + 1] = make_int4(0, 0, 0, 0);
}
