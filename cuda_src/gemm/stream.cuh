// gemm/stream.cuh: the k-steps of all tiles of a product, shared out evenly among its CTAs (STREAM).
// Idea     : where the tiles are no multiple of the CTAs, some CTAs have nothing to do in the last wave. So
//            the steps of all tiles are dealt out in order, as many to each CTA. The CTA that has
//            a tile's last step ends the tile: it adds the sums that the CTAs with the steps before left for
//            it. Those are CTAs of lower numbers, and each left its sums before all else, as a CTA begins with
//            its last tile: nobody waits for a CTA that has no SM yet.
// sync     : a flag for each consumer warp of each CTA, 1 while its sums wait. Who adds them sets it to 0.
// Numerics : the sums of a tile are added in the order of falling k: bits depend on M, N, K and G.
#pragma once
#include "common.cuh"
#ifndef STREAM
#define STREAM 0
#endif
#if STREAM
#define STREAM_PARAMS , float* shared_sums
#else
#define STREAM_PARAMS
#endif

DEVICE int first_step(int steps, int cta) {  // of a CTA, of so many
    return cta * (steps / (int)gridDim.x) + min(cta, steps % (int)gridDim.x);
}

// Sums of the threads of a CTA that multiply: [CTA][COUNT / 4][THREADS][4].
template <int THREADS, int BLOCKS, int COUNT>
DEVICE void leave_sums(float* all, u32* flags, int me, const float (&acc)[BLOCKS][COUNT]) {
    float4* to = (float4*)all + (i64)blockIdx.x * (BLOCKS * COUNT / 4) * THREADS + me;
    UNROLLED for (int b = 0; b < BLOCKS; b++)
        UNROLLED for (int i = 0; i < COUNT; i += 4, to += THREADS)
            *to = make_float4(acc[b][i], acc[b][i + 1], acc[b][i + 2], acc[b][i + 3]);
    __threadfence();
    __syncwarp();
    u32* flag = flags + (blockIdx.x * THREADS + me) / 32;
    if (me % 32 == 0) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(flag) : "memory");
}
template <int THREADS, int BLOCKS, int COUNT>
DEVICE void add_sums(const float* all, u32* flags, int cta, int me, float (&acc)[BLOCKS][COUNT]) {
    u32* flag = flags + (cta * THREADS + me) / 32;
    if (me % 32 == 0) {
        u32 ready = 0;
        while (!ready) asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(ready) : "l"(flag) : "memory");
        *flag = 0;
    }
    __syncwarp();
    const float4* from = (const float4*)all + (i64)cta * (BLOCKS * COUNT / 4) * THREADS + me;
    UNROLLED for (int b = 0; b < BLOCKS; b++)
        UNROLLED for (int i = 0; i < COUNT; i += 4, from += THREADS) {
            if (i % 32 == 0) __syncwarp();  // or ptxas would load far ahead, and spill
            float4 v = __ldcg(from);
            acc[b][i] += v.x, acc[b][i + 1] += v.y, acc[b][i + 2] += v.z, acc[b][i + 3] += v.w;
        }
}
