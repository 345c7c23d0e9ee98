// Block-scaled FP8 products of many rows: x W^T of 128 rows and 256 columns an item, on sm_90a.
//
// A CTA has one warp group that fetches and two that multiply 64 rows each: while one of them scales, the tensor
// cores work for the other. CTAs stay and take item after item, so that stages fill while the last item is stored.
//
// A block of K (128) is one step: four wgmma from zero, then one fp32 multiply-add a result with the product of both
// scales, in ascending order of K. Compile-time choices:
//   WATCH   1: a kernel that waits for ever ends with an error instead
//   GROUPED rows of experts, sorted and padded to whole tiles; GATED: silu(gate) * up, quantised
//
// GROUPED and GATED is the up projection: rows lie by slot (place in the order of pairs), scales by source row,
// results by slot. GROUPED alone is the down projection: rows and scales lie by slot, results by pair.

#include "hopper_instructions.cuh"

struct Params {
    const float *x_scale;
    const float *w_scale;
    void *out;
    float *out_scale;
    const int *pairs;
    const int *tile_experts;
    int stride_x_scale;
    int stride_ws_expert;
    int stride_ws;
    int stride_out;
    int stride_out_scale;
    int tiles_m;
    int tiles_n;
    int routed_tiles;
    int shared_expert;
    int num_pairs;
    int extra_rows;    // GROUPED: rows of the shared expert, whose tiles follow the routed ones; else all rows
    int shared_start;  // row of map_shared where the shared expert's rows begin
    int top_k;
    int num_columns;
    int num_steps;
    int group_m;
};

constexpr int HALF = 64, GROUP = 128, STAGES = 4;
constexpr int WIDTH = GATED ? GROUP : 2 * GROUP;
constexpr u32 X_HALF_BYTES = HALF * GROUP, W_PART_BYTES = GROUP * GROUP;
constexpr u32 X_STAGE = 2 * X_HALF_BYTES, W_STAGE = 2 * W_PART_BYTES;
constexpr u32 W_AT = STAGES * X_STAGE, STAGING_AT = W_AT + STAGES * W_STAGE;
constexpr u32 STAGING_ROW = 144, STAGING_WARP = 16 * STAGING_ROW;  // 128 bytes a row and 16 against bank conflicts
constexpr u32 FULL_AT = STAGING_AT + 8 * STAGING_WARP, EMPTY_AT = FULL_AT + 8 * STAGES;
constexpr int THREADS = 384;

// d = 64 rows times 128 columns of one block of K
__device__ __forceinline__ void multiply(float (&d)[64], u64 x, u64 w) {
    pin(d);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply_quarter(d, x, w, 0);
    multiply_quarter(d, x + 2, w + 2, 1);
    multiply_quarter(d, x + 4, w + 4, 1);
    multiply_quarter(d, x + 6, w + 6, 1);
    commit();
    wait_products();
    pin(d);
}

__device__ __forceinline__ void add_scaled(float (&sum)[64], const float (&part)[64], float low, float high) {
#pragma unroll
    for (int i = 0; i < 64; ++i) sum[i] = __fmaf_rn(part[i], i & 2 ? high : low, sum[i]);
}

// 128 bytes of each of a warp's 16 staged rows to out + row * stride; rows of -1 are left out
__device__ __forceinline__ void store_staged(u32 staging, u8 *out, i64 stride, int low_row, int high_row) {
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int line = 4 * i + lane / 8;
        const int row = __shfl_sync(~0u, i < 2 ? low_row : high_row, line % 8 * 4);
        const uint4 x = get_16_bytes(staging + line * STAGING_ROW + lane % 8 * 16);
        if (row >= 0) *reinterpret_cast<uint4 *>(out + row * stride + lane % 8 * 16) = x;
    }
    __syncwarp();
}

__device__ __forceinline__ void store_sums(
    const float (&sum)[64], u32 staging, u8 *out, i64 stride, int low_row, int high_row) {
    const int lane = threadIdx.x % 32;
    const u32 at = staging + lane % 16 * STAGING_ROW + lane / 16 * 16;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
            const float *x = sum + 4 * (8 * part + j);
            put_blocks(at + 16 * j, pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                       pack_bf16(x[6], x[7]));
        }
        store_staged(staging, out + 128 * part, stride, low_row, high_row);
    }
}

// silu(gate) * up with gate and up rounded already. Where flushing denormal numbers changes the power, 1 + it is 1.
__device__ __forceinline__ float gated(float gate, float up) {
    float grown, made;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(grown) : "f"(__fmul_rn(-gate, 1.44269502162933349609375f)));
    asm("div.full.f32 %0, %1, %2;" : "=f"(made) : "f"(gate), "f"(__fadd_rn(1.0f, grown)));
    return __fmul_rn(made, up);
}

__device__ __forceinline__ float largest_of_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// x / scale to the last bit that FP8 sees, from the rounded reciprocal: one correction of the quotient suffices
// where neither can leave the normal numbers. What is too much is taken away, not what is missing added: so a
// quotient of -0 stays one.
__device__ __forceinline__ float divide(float x, float scale, float inverse) {
    const float quotient = __fmul_rn(x, inverse);
    return __fmaf_rn(-__fmaf_rn(quotient, scale, -x), inverse, quotient);
}

__device__ __forceinline__ void gate_and_store(
    float (&x)[64], float (&up)[64], u32 staging, u8 *out, i64 stride, float *out_scale, i64 scale_stride,
    int low_row, int high_row) {
    const int lane = threadIdx.x % 32;
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
        round_to_bf16(x[i], x[i + 1]);
        round_to_bf16(up[i], up[i + 1]);
        x[i] = gated(x[i], up[i]);
        x[i + 1] = gated(x[i + 1], up[i + 1]);
        round_to_bf16(x[i], x[i + 1]);
        const float larger = fmaxf(fabsf(x[i]), fabsf(x[i + 1]));
        if (i & 2) {
            high = fmaxf(high, larger);
        } else {
            low = fmaxf(low, larger);
        }
    }
    low = largest_of_row(low);
    high = largest_of_row(high);
    low = low > 0.0f ? __fdiv_rn(low, 448.0f) : 1.0f;
    high = high > 0.0f ? __fdiv_rn(high, 448.0f) : 1.0f;
    const float least = 0x1p-60f, most = 0x1p60f;
    const bool usual = low >= least && low <= most && high >= least && high <= most;
    const u32 at = staging + lane / 4 * STAGING_ROW + lane % 4 * 2;
    if (__all_sync(~0u, usual)) {
        const float low_inverse = __frcp_rn(low), high_inverse = __frcp_rn(high);
#pragma unroll
        for (int i = 0; i < 64; i += 4) {
            const float a = divide(x[i], low, low_inverse), b = divide(x[i + 1], low, low_inverse);
            const float c = divide(x[i + 2], high, high_inverse), d = divide(x[i + 3], high, high_inverse);
            put_u16(at + 2 * i, pack_fp8(a, b));
            put_u16(at + 8 * STAGING_ROW + 2 * i, pack_fp8(c, d));
        }
    } else {
#pragma unroll
        for (int i = 0; i < 64; i += 4) {
            put_u16(at + 2 * i, pack_fp8(__fdiv_rn(x[i], low), __fdiv_rn(x[i + 1], low)));
            put_u16(at + 8 * STAGING_ROW + 2 * i, pack_fp8(__fdiv_rn(x[i + 2], high), __fdiv_rn(x[i + 3], high)));
        }
    }
    store_staged(staging, out, stride, low_row, high_row);
    if (lane % 4 == 0) {
        if (low_row >= 0) out_scale[low_row * scale_stride] = low;
        if (high_row >= 0) out_scale[high_row * scale_stride] = high;
    }
}

struct Ring {
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void advance() {
        if (++stage == STAGES) {
            stage = 0;
            phase ^= 1;
        }
    }
};

struct Item {
    int m, n;
};

// Row and column tile of item i. GROUPED: columns fastest, so that an expert's items meet in time; otherwise bands of
// rows, rows fastest.
__device__ __forceinline__ Item place_of(const Params &p, int i) {
    if (GROUPED) return {i / p.tiles_n, i % p.tiles_n};
    const int band = p.group_m * p.tiles_n;
    const int first = i / band * p.group_m;
    const int height = min(p.tiles_m - first, p.group_m);
    return {first + i % band % height, i % band / height};
}

__device__ __forceinline__ int expert_of(const Params &p, int m) {
    if (!GROUPED) return 0;
    return m < p.routed_tiles ? __ldg(p.tile_experts + m) : p.shared_expert;
}

// Result row of a slot of row tile m, -1 for padding: a pair, a shared expert's row behind them, or the row itself
__device__ __forceinline__ int result_of(const Params &p, int m, int slot) {
    if (GROUPED && m < p.routed_tiles) return __ldg(p.pairs + 2 * HALF * m + slot);
    const int row = 2 * HALF * (GROUPED ? m - p.routed_tiles : m) + slot;
    if (row >= p.extra_rows) return -1;
    return GROUPED ? p.num_pairs + row : row;
}

__device__ __forceinline__ int scale_row_of(const Params &p, int m, int slot, int result) {
    if (!GROUPED) return max(result, 0);
    if (!GATED) return 2 * HALF * m + slot;
    return result < p.num_pairs ? max(result, 0) / p.top_k : result - p.num_pairs;
}

__device__ void fetch_items(
    const TensorMap *map_x, const TensorMap *map_shared, const TensorMap *map_w, const Params &p, u32 smem) {
    const int stride = gridDim.x, total = p.tiles_m * p.tiles_n;
    const int apart = GATED ? p.num_columns : GROUP;
    const int weight_rows = GATED ? 2 * p.num_columns : p.num_columns;
    Ring ring;
    int i = blockIdx.x;
    Item next = place_of(p, min(i, total - 1));
    int next_expert = expert_of(p, next.m), next_high = result_of(p, next.m, HALF);
    for (; i < total; i += stride) {
        const Item at = next;
        const int expert = next_expert;
        const bool has_high = !GROUPED || next_high >= 0;
        next = place_of(p, min(i + stride, total - 1));
        next_expert = expert_of(p, next.m);
        next_high = result_of(p, next.m, HALF);
        if (expert < 0) continue;
        const bool is_shared = GROUPED && at.m >= p.routed_tiles;
        const TensorMap *map = is_shared ? map_shared : map_x;
        const int row = is_shared ? p.shared_start + 2 * HALF * (at.m - p.routed_tiles) : 2 * HALF * at.m;
        const int w_row = expert * weight_rows + at.n * WIDTH;
        const u32 bytes = W_STAGE + (has_high ? X_STAGE : X_HALF_BYTES);
#pragma unroll 1
        for (int step = 0; step < p.num_steps; ++step) {
            const u32 full = smem + FULL_AT + 8 * ring.stage;
            const u32 x = smem + ring.stage * X_STAGE, w = smem + W_AT + ring.stage * W_STAGE;
            const int k = step * GROUP;
            barrier_wait(smem + EMPTY_AT + 8 * ring.stage, ring.phase ^ 1);
            barrier_expect(full, bytes);
            fetch(x, map, k, row, full);
            if (has_high) fetch(x + X_HALF_BYTES, map, k, row + HALF, full);
            fetch(w, map_w, k, w_row, full);
            fetch(w + W_PART_BYTES, map_w, k, w_row + apart, full);
            ring.advance();
        }
    }
}

__device__ __forceinline__ void release(u32 smem, int stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(smem + EMPTY_AT + 8 * stage);
}

// Where the scales of this thread's two rows and of both column parts begin, and the first of each
struct Scales {
    const float *at_low, *at_high, *at_one, *at_two;
    float low, high, one, two;

    __device__ __forceinline__ void locate(
        const Params &p, Item at, int expert, int low_slot, int high_slot, int low_result, int high_result) {
        const int first = (at.n * WIDTH) / GROUP, second = (at.n * WIDTH + (GATED ? p.num_columns : GROUP)) / GROUP;
        if (expert < 0) low_result = high_result = 0;  // nobody's tile: its pairs are undefined
        const float *weights = p.w_scale + (i64)max(expert, 0) * p.stride_ws_expert;
        at_low = p.x_scale + (i64)scale_row_of(p, at.m, low_slot, low_result) * p.stride_x_scale;
        at_high = p.x_scale + (i64)scale_row_of(p, at.m, high_slot, high_result) * p.stride_x_scale;
        at_one = weights + first * p.stride_ws;
        at_two = weights + second * p.stride_ws;
        load(0);
    }

    __device__ __forceinline__ void load(int step) {
        low = __ldg(at_low + step);
        high = __ldg(at_high + step);
        one = __ldg(at_one + step);
        two = __ldg(at_two + step);
    }
};

// 64 rows of padding, or nothing to do: only let the stages go
__device__ __forceinline__ void skip_steps(const Params &p, u32 smem, Ring &ring) {
#pragma unroll 1
    for (int step = 0; step < p.num_steps; ++step) {
        barrier_wait(smem + FULL_AT + 8 * ring.stage, ring.phase);
        __syncwarp();
        release(smem, ring.stage);
        ring.advance();
    }
}

__device__ __forceinline__ void multiply_steps(
    const Params &p, u32 smem, int side, Ring &ring, Scales &scales, float (&sum)[64],
    float (&sum2)[64]) {
    float part[64];
#pragma unroll
    for (int j = 0; j < 64; ++j) sum[j] = sum2[j] = 0.0f;
#pragma unroll 1
    for (int step = 0; step < p.num_steps; ++step) {
        const u64 x = operand(smem + ring.stage * X_STAGE + side * X_HALF_BYTES);
        const u64 w = operand(smem + W_AT + ring.stage * W_STAGE);
        const u64 w2 = operand(smem + W_AT + ring.stage * W_STAGE + W_PART_BYTES);
        const float low_one = scales.low * scales.one, high_one = scales.high * scales.one;
        const float low_two = scales.low * scales.two, high_two = scales.high * scales.two;
        barrier_wait(smem + FULL_AT + 8 * ring.stage, ring.phase);
        scales.load(min(step + 1, p.num_steps - 1));
        multiply(part, x, w);
        add_scaled(sum, part, low_one, high_one);
        multiply(part, x, w2);
        release(smem, ring.stage);
        add_scaled(sum2, part, low_two, high_two);
        ring.advance();
    }
}

// Half ``side`` of every item's rows. Where an item's rows lie is read while the one before it is multiplied, its
// first scales before the one before it is stored.
__device__ void multiply_items(const Params &p, u32 smem, int side) {
    const int stride = gridDim.x, total = p.tiles_m * p.tiles_n;
    const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
    const int low_slot = side * HALF + warp * 16 + lane / 4, high_slot = low_slot + 8;
    const u32 staging = smem + STAGING_AT + (4 * side + warp) * STAGING_WARP;
    Ring ring;
    Scales scales;
    int i = blockIdx.x;
    Item next = place_of(p, min(i, total - 1));
    int next_expert = expert_of(p, next.m), next_first = result_of(p, next.m, side * HALF);
    int next_low = result_of(p, next.m, low_slot), next_high = result_of(p, next.m, high_slot);
    scales.locate(p, next, next_expert, low_slot, high_slot, next_low, next_high);
    for (; i < total; i += stride) {
        const Item at = next;
        const int expert = next_expert, low = next_low, high = next_high;
        const bool live = next_first >= 0;
        next = place_of(p, min(i + stride, total - 1));
        next_expert = expert_of(p, next.m);
        next_first = result_of(p, next.m, side * HALF);
        next_low = result_of(p, next.m, low_slot);
        next_high = result_of(p, next.m, high_slot);
        if (expert < 0 || !live) {
            if (expert >= 0) skip_steps(p, smem, ring);
            scales.locate(p, next, next_expert, low_slot, high_slot, next_low, next_high);
            continue;
        }
        float sum[64], sum2[64];
        multiply_steps(p, smem, side, ring, scales, sum, sum2);
        scales.locate(p, next, next_expert, low_slot, high_slot, next_low, next_high);
        const int column = at.n * WIDTH;
        if (GATED) {
            const int low_row = low < 0 || !GROUPED ? low : 2 * HALF * at.m + low_slot;
            const int high_row = high < 0 || !GROUPED ? high : 2 * HALF * at.m + high_slot;
            gate_and_store(
                sum, sum2, staging, static_cast<u8 *>(p.out) + column, p.stride_out, p.out_scale + at.n,
                p.stride_out_scale, low_row, high_row);
        } else {
            u8 *out = static_cast<u8 *>(p.out) + 2 * (i64)column;
            store_sums(sum, staging, out, 2 * (i64)p.stride_out, low, high);
            store_sums(sum2, staging, out + 2 * GROUP, 2 * (i64)p.stride_out, low, high);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) hopper_product(
    const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_shared,
    const __grid_constant__ TensorMap map_w, const __grid_constant__ Params p) {
    extern __shared__ u8 raw[];
    const u32 smem = ((u32)__cvta_generic_to_shared(raw) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(smem + FULL_AT + 8 * stage, 1);
            barrier_init(smem + EMPTY_AT + 8 * stage, 8);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // known to be the same for a warp
    if (group == 2) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 256) fetch_items(&map_x, &map_shared, &map_w, p, smem);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        multiply_items(p, smem, group);
    }
    // without a place where all paths meet, the assembler takes a step's scales through registers of the whole warp
    __syncwarp();
}
