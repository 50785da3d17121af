// conv/weight_grad_sm90.cu: dw[m, tap, c] = sum over pixels p of dy[p, m] x[p + tap, c], 16 bits, wgmma.
// Idea     : a product whose k are the output pixels, 64 a step; its columns are blocks of 64 channels of a
//            tap. A producer's thread keeps STAGES steps on their way by TMA: boxes of dy as it lies, and of
//            x gathered from the images under the block's tap (gemm/im2col.cuh), zeros outside. Both operands
//            have m or n contiguous. Two warpgroups multiply, each its 64 rows (BM 128) or its half of the
//            columns (BM 64). A block has `chunk` pixels; weight_sum.cu adds the parts. The only part of filters
//            of one tap is dw itself.
// Inputs   : dy T [pixels, filters], x T [n, h, w, channels] by TMA: filters and channels are multiples of 8.
// Outputs  : part PART (f32, or dw's type) [splits, filters, TAPS * channels].
// Macros   : T PART BM BN (filters and columns of a block) STAGES IM2COL DEEP, geometry.cuh's.
// Launch   : tiles x splits blocks of 384 threads.
// Numerics : f32 sums, pixels in order.
// Bound    : tensor cores, or HBM where a filter has one tap; L2 for what the tiles share.
#include "conv/geometry.cuh"
#include "sm90.cuh"
#include "gemm/im2col.cuh"

constexpr int BK = 64, BOX = BK * 128;                // bytes of 64 pixels of 64 filters or channels
constexpr int OWN = BM == 128 ? BN : BN / 2;          // columns of a warpgroup
constexpr int A_BOXES = BM / 64, B_BOXES = BN / 64, STAGE = (A_BOXES + B_BOXES) * BOX;
constexpr int CONSUMERS = 8;                          // warps

extern "C" __global__ void __launch_bounds__(384, 1)
    conv_weight_grad_wgmma(const __grid_constant__ TensorMap map_dy, const __grid_constant__ TensorMap map_x,
                           PART* part, u32 pixels, int channels, int filters, PIXEL_SIZES, u32 chunk) {
    extern __shared__ __align__(1024) u8 smem[];
    const u32 base = smem_address(smem), full = base + STAGES * STAGE, empty = full + STAGES * 8;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int blocks = (channels + 63) / 64, tiles_n = (TAPS * blocks + B_BOXES - 1) / B_BOXES;
    const int m0 = blockIdx.x / tiles_n * BM, first_block = blockIdx.x % tiles_n * B_BOXES;
    const u32 first = blockIdx.y * chunk, last = min(first + chunk, pixels);
    const int steps = (int)((last - first + BK - 1) / BK);
    if (warp == 0 && elect()) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(full + s * 8, 1);
            mbarrier_init(empty + s * 8, CONSUMERS);
        }
        fence_barrier_init();
        tma_prefetch(map_dy);
        tma_prefetch(map_x);
    }
    __syncthreads();
    after_previous_launch();

    if (warp < 4) {  // ---- producer ----
        registers_shrink<40>();
        if (warp == 0 && elect()) {
            int s = 0;
            u32 phase = 1;
#pragma unroll 1
            for (int step = 0; step < steps; step++) {
                const u32 p = first + step * BK, a = base + s * STAGE, bar = full + s * 8;
                mbarrier_wait(empty + s * 8, phase);
                mbarrier_expect(bar, STAGE);
#pragma unroll
                for (int i = 0; i < A_BOXES; i++) tma_load(a + i * BOX, map_dy, bar, m0 + i * 64, p, 0);
                const Pixel pixel = first_pixel(p, PIXELS_OF_Y);
#pragma unroll
                for (int i = 0; i < B_BOXES; i++) {  // past the last block there are no channels: zeros
                    const int block = first_block + i, tap = min(block / blocks, TAPS - 1);
                    load_pixels(a + (A_BOXES + i) * BOX, map_x, bar, (block - tap * blocks) * 64, pixel, tap);
                }
                if (++s == STAGES) s = 0, phase ^= 1;
            }
        }
    } else {  // ---- consumers ----
        registers_grow<232>();
        const int group = warp / 4 - 1, n0 = BM == 128 ? 0 : group * OWN;
        const int row = (BM == 128 ? group * 64 : 0) + warp % 4 * 16 + lane / 4;
        float acc[OWN / 2];
        int s = 0;
        u32 phase = 0;
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            const u32 a = base + s * STAGE + (BM == 128 ? group * BOX : 0);
            const u32 b = base + s * STAGE + A_BOXES * BOX + n0 / 64 * BOX;
            mbarrier_wait(full + s * 8, phase);
            wgmma_fence();
#pragma unroll
            for (int q = 0; q < BK / 16; q++)
                Wgmma<T, OWN, 1, 1>::run(acc, wgmma_descriptor<false>(a + q * 2048),
                                         wgmma_descriptor<false>(b + q * 2048), step > 0 || q > 0);
            wgmma_commit();
            if (step > 0) {  // the step before is done: its stage is free
                wgmma_wait<1>();
                if (lane == 0) mbarrier_arrive(empty + (s == 0 ? STAGES - 1 : s - 1) * 8);
            }
            if (++s == STAGES) s = 0, phase ^= 1;
        }
        wgmma_wait<0>();
        wgmma_hold(acc);
        part += (i64)blockIdx.y * filters * TAPS * channels;
#pragma unroll
        for (int j = 0; j < OWN / 8; j++) {
            const int block = first_block + n0 / 64 + j / 8, tap = block / blocks;
            const int c = (block - tap * blocks) * 64 + j % 8 * 8 + lane % 4 * 2;
            if (tap >= TAPS || c >= channels) continue;
#pragma unroll
            for (int h = 0; h < 2; h++)
                if (m0 + row + h * 8 < filters)
                    store<2>(part + ((i64)(m0 + row + h * 8) * TAPS + tap) * channels + c,
                             Vec<PART, 2>{narrow<PART>(acc[j * 4 + h * 2]), narrow<PART>(acc[j * 4 + h * 2 + 1])});
        }
    }
}
