// sm90.cuh: Hopper's mbarrier, TMA, stmatrix and cluster instructions, as PTX spells them (wgmma.cuh has wgmma).
#pragma once
#include "cluster.cuh"
#include "sm80.cuh"

// A TMA descriptor, built on the host; kernels take it as `const __grid_constant__ TensorMap`.
struct alignas(64) TensorMap { u64 opaque[16]; };

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
DEVICE void tma_load_im2col(u32 to, const TensorMap& map, u32 bar, int c, int w, int h, int image, u16 dx, u16 dy) {
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
