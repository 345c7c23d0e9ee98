// Instructions of sm_90a that C++ has no words for: barriers in shared memory, the copy engine, FP8 products of a warp
// group, conversions. WATCH: see hopper_products.cu.

#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(64) TensorMap {
    u8 bytes[128];
};

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool barrier_done(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}

// WATCH: a wait that lasts for many seconds is a mistake in the order of copies, and ends the kernel with an error
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 tries = 0;
    while (!barrier_done(barrier, parity)) {
        if (WATCH && ++tries > (1u << 20)) asm volatile("trap;");
    }
}

__device__ __forceinline__ void fetch(u32 to, const TensorMap *map, int k, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(to), "l"(map), "r"(k), "r"(row), "r"(barrier) : "memory");
}

// A K-major operand of 128 bytes a row, in the copy engine's swizzle of 128 bytes: atoms of 8 rows, 1024 bytes.
__device__ __forceinline__ u64 operand(u32 address) {
    return (u64)((address & 0x3FFFF) >> 4) | ((u64)1 << 16) | ((u64)(1024 >> 4) << 32) | ((u64)1 << 62);
}

#define F8(b, i) "+f"(b[i]), "+f"(b[i + 1]), "+f"(b[i + 2]), "+f"(b[i + 3]), \
                 "+f"(b[i + 4]), "+f"(b[i + 5]), "+f"(b[i + 6]), "+f"(b[i + 7])
#define F64(b) F8(b, 0), F8(b, 8), F8(b, 16), F8(b, 24), F8(b, 32), F8(b, 40), F8(b, 48), F8(b, 56)

__device__ __forceinline__ void multiply_quarter(float (&d)[64], u64 x, u64 w, int add) {
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %66, 0;\n\t"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1;\n\t}"
        : F64(d)
        : "l"(x), "l"(w), "r"(add));
}

__device__ __forceinline__ void pin(float (&d)[64]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wait_products() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// Both rounded to bf16; one at a time the conversion runs at a quarter of the rate.
__device__ __forceinline__ void round_to_bf16(float &one, float &two) {
    const u32 pair = pack_bf16(one, two);
    one = __uint_as_float(pair << 16);
    two = __uint_as_float(pair & 0xFFFF0000u);
}

__device__ __forceinline__ u16 pack_fp8(float low, float high) {
    u16 pair;
    low = fminf(fmaxf(low, -448.0f), 448.0f);
    high = fminf(fmaxf(high, -448.0f), 448.0f);
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// four blocks of 8 x 8 numbers of 16 bits; lane l gives the address of row l % 8 of block l / 8
__device__ __forceinline__ void put_blocks(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void put_u16(u32 at, u16 x) {
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"(x) : "memory");
}

__device__ __forceinline__ uint4 get_16_bytes(u32 at) {
    uint4 x;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at));
    return x;
}
