// sm90.cuh: Hopper's mbarrier, TMA, wgmma, stmatrix and cluster instructions, as PTX spells them.
#pragma once
#include "cluster.cuh"

// A TMA descriptor, built on the host; kernels take it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap { u64 opaque[16]; };

DEVICE u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- mbarrier ----
DEVICE void mbarrier_init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
DEVICE void mbarrier_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}
DEVICE void mbarrier_wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "AGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra READY;\nbra AGAIN;\nREADY:\n}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
// A warp whose lanes have read, and met in __syncwarp, arrives once. racecheck counts an arrival for
// the lane that makes it alone: there all lanes arrive (tools/sanitize.py defines RACECHECK).
#ifdef RACECHECK
constexpr int WARP_ARRIVALS = 32;
DEVICE bool arrives(int) { return true; }
#else
constexpr int WARP_ARRIVALS = 1;
DEVICE bool arrives(int lane) { return lane == 0; }
#endif
DEVICE void mbarrier_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
// Arrive on the barrier at the same place in CTA `rank` of the cluster.
DEVICE void mbarrier_arrive_remote(u32 bar, u32 rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(bar),
        "r"(rank)
        : "memory");
}

// ---- named barriers, registers ----
DEVICE void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void bar_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
DEVICE void bar_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
template <int N> DEVICE void registers_grow() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> DEVICE void registers_shrink() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

// One lane of a whole warp: the compiler knows it is one, and issues its copies without a loop over lanes.
DEVICE bool elect() {
    u32 chosen;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, -1;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
    return chosen;
}

// ---- TMA: boxes of a 3-D tensor; x is the innermost coordinate ----
DEVICE void tma_prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map));
}
DEVICE void tma_load(u32 to, const TensorMap& map, u32 bar, int x, int y, int z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(&map), "r"(bar), "r"(x), "r"(y), "r"(z)
        : "memory");
}
// The same box to the same place in every CTA of `mask`; completes on each one's barrier.
DEVICE void tma_load_multicast(u32 to, const TensorMap& map, u32 bar, int x, int y, int z, u16 mask) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
        "l"(&map), "r"(bar), "r"(x), "r"(y), "r"(z), "h"(mask)
        : "memory");
}
DEVICE void tma_store(const TensorMap& map, u32 from, int x, int y, int z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(from), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
// Adds the box to what is there, in the tensor's type, where that is kept: nothing comes back.
DEVICE void tma_add(const TensorMap& map, u32 from, int x, int y, int z) {
    asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group"
                 " [%0, {%2, %3, %4}], [%1];" ::"l"(&map),
                 "r"(from), "r"(x), "r"(y), "r"(z)
                 : "memory");
}
// Consecutive bytes, a multiple of 16 from a multiple of 16.
DEVICE void bulk_load(u32 to, const void* from, u32 bytes, u32 bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}
// Boxes of a 4-D or 5-D tensor.
DEVICE void tma_load(u32 to, const TensorMap& map, u32 bar, int x, int y, int z, int w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(&map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}
DEVICE void tma_load(u32 to, const TensorMap& map, u32 bar, int x, int y, int z, int w, int v) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
        "l"(&map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
        : "memory");
}
DEVICE void tma_store(const TensorMap& map, u32 from, int x, int y, int z, int w) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(from), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}
// `box` pixels of a 4-D tensor of images from (w, h, image) on, at (dx, dy) from each: 64 channels.
DEVICE void tma_load_im2col(u32 to, const TensorMap& map, u32 bar, int c, int w, int h, int image,
                            u16 dx, u16 dy) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(to),
        "l"(&map), "r"(bar), "r"(c), "r"(w), "r"(h), "r"(image), "h"(dx), "h"(dy)
        : "memory");
}
// The same pixels to the same place in every CTA of `mask`; completes on each one's barrier.
DEVICE void tma_load_im2col_multicast(u32 to, const TensorMap& map, u32 bar, int c, int w, int h, int image,
                                      u16 dx, u16 dy, u16 mask) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], {%7, %8}, %9;" ::"r"(to),
        "l"(&map), "r"(bar), "r"(c), "r"(w), "r"(h), "r"(image), "h"(dx), "h"(dy), "h"(mask)
        : "memory");
}
// `box` pixels, one behind another, from (w, h, image) on: 64 channels.
DEVICE void tma_store_im2col(const TensorMap& map, u32 from, int c, int w, int h, int image) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
                     &map),
                 "r"(from), "r"(c), "r"(w), "r"(h), "r"(image)
                 : "memory");
}
DEVICE void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Wait until at most N stores still read their shared memory.
template <int N> DEVICE void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- fragments to and from 128-byte-swizzled shared memory ----
DEVICE void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// ---- wgmma: d[64, BN] += a[64, 16] b[16, BN] from 128-byte-swizzled shared memory, or a from registers ----
DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// No arithmetic on d moves across: what is in flight is touched by the wgmma alone.
template <int N> DEVICE void wgmma_hold(float (&d)[N]) {
    UNROLLED for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i]));
}
// Operand descriptor. k contiguous: 8-row groups lie 1024 bytes apart. m or n contiguous: 8-k groups
// lie 1024 bytes apart and 64-wide blocks of m or n BLOCK (its k of 128 bytes each).
template <bool CONTIG_K, int BLOCK = 8192> DEVICE u64 wgmma_descriptor(u32 address) {
    u64 lead = CONTIG_K ? 1 : BLOCK >> 4;
    return (u64)((address & 0x3ffff) >> 4) | lead << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
// The lower word of a descriptor, by which operands differ: one that lies further on by 16 n bytes has n more.
template <bool CONTIG_K, int BLOCK = 8192> DEVICE u32 wgmma_low(u32 address) {
    return (u32)wgmma_descriptor<CONTIG_K, BLOCK>(address);
}
DEVICE u64 wgmma_at(u32 low) {
    u64 made;
    asm("mov.b64 %0, {%1, %2};" : "=l"(made) : "r"(low), "n"(1024 >> 4 | 1 << 30));
    return made;
}

#define R10_(p)                                                                                    \
    "%" #p "0,%" #p "1,%" #p "2,%" #p "3,%" #p "4,%" #p "5,%" #p "6,%" #p "7,%" #p "8,%" #p "9,"
#define R30_ "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," R10_(1) R10_(2)
#define R60_ R30_ R10_(3) R10_(4) R10_(5)
#define R90_ R60_ R10_(6) R10_(7) R10_(8)
#define R120_ R90_ R10_(9) R10_(10) R10_(11)
#define F8_(i)                                                                                     \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define F32_(i) F8_(i), F8_(i + 8), F8_(i + 16), F8_(i + 24)
#define WGMMA_(n, type, regs, da, db, sc, ta, tb, ...)                                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #sc ", 0;\n"                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" regs "}, "   \
                 "%" #da ", %" #db ", p, 1, 1, %" #ta ", %" #tb ";\n}"                             \
                 : __VA_ARGS__                                                                     \
                 : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB))

// a in registers, in the layout of an accumulator's 16 columns
#define WGMMA_A_(n, type, regs, a0, a1, a2, a3, db, sc, tb, ...)                                   \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #sc ", 0;\n"                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" regs "}, "   \
                 "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #db ", p, 1, 1, %" #tb ";\n}"       \
                 : __VA_ARGS__                                                                     \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TB))

// `add` 0 starts the sum; TA, TB: 1 where m or n is the contiguous dimension.
template <class E, int WIDTH, int TA, int TB> struct Wgmma;
// i0 to i6 are the numbers behind those of the sums' registers.
#define WGMMA_WIDTH_(E_, type, n, half, regs, i0, i1, i2, i3, i4, i5, i6, ...)                     \
    template <int TA, int TB> struct Wgmma<E_, n, TA, TB> {                                        \
        DEVICE static void run(float (&d)[half], u64 a, u64 b, int add) {                          \
            WGMMA_(n, type, regs, i0, i1, i2, i3, i4, __VA_ARGS__);                                \
        }                                                                                          \
        DEVICE static void run(float (&d)[half], const u32* a, u64 b, int add) {                   \
            WGMMA_A_(n, type, regs, i0, i1, i2, i3, i4, i5, i6, __VA_ARGS__);                      \
        }                                                                                          \
    };
#define WGMMA_TYPE_(E_, type)                                                                      \
    WGMMA_WIDTH_(E_, type, 64, 32, R30_ "%30,%31", 32, 33, 34, 35, 36, 37, 38, F32_(0))            \
    WGMMA_WIDTH_(E_, type, 128, 64, R60_ "%60,%61,%62,%63", 64, 65, 66, 67, 68, 69, 70, F32_(0),   \
                 F32_(32))                                                                         \
    WGMMA_WIDTH_(E_, type, 192, 96, R90_ "%90,%91,%92,%93,%94,%95", 96, 97, 98, 99, 100, 101, 102, \
                 F32_(0), F32_(32), F32_(64))                                                      \
    WGMMA_WIDTH_(E_, type, 256, 128, R120_ "%120,%121,%122,%123,%124,%125,%126,%127", 128, 129,    \
                 130, 131, 132, 133, 134, F32_(0), F32_(32), F32_(64), F32_(96))
WGMMA_TYPE_(bf16, "bf16")
WGMMA_TYPE_(f16, "f16")
