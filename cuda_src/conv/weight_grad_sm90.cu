// conv/weight_grad_sm90.cu: dw[m, tap, c] = sum over pixels p of dy[p, m] x[p + tap, c], 16 bits, wgmma.
// Idea     : a product whose k are the output pixels, 64 a step; its columns are blocks of 64 channels of a
//            tap. A producer's thread keeps STAGES steps on their way by TMA: boxes of dy as it lies, and of
//            x gathered from the images under the block's tap (gemm/im2col.cuh), zeros outside. It goes from
//            pixel to pixel by sums: divisions would take longer than a step's products. Both operands have m
//            or n contiguous. Two warpgroups multiply, DOWN below each other and the others beside: each has
//            64 MI rows and OWN columns. A block has `chunk` pixels; weight_sum.cu adds the parts. The only
//            part of filters of one tap is dw itself.
// Inputs   : dy T [pixels, filters], x T [n, h, w, channels] by TMA: filters and channels are multiples of 8.
// Outputs  : part PART (f32, or dw's type) [splits, filters, TAPS * channels].
// Macros   : T PART BM BN (filters and columns of a block) STAGES RESIDENT (blocks of a multiprocessor) IM2COL
//            DEEP, geometry.cuh's.
// Launch   : tiles x splits blocks of 288 threads, whose last warp is the producer.
// Numerics : f32 sums, pixels in order.
// Bound    : tensor cores, or HBM where a filter has one tap; L2 for what the tiles share.
#include "conv/geometry.cuh"
#include "tma_ring.cuh"
#include "gemm/im2col.cuh"

constexpr int BK = 64, BOX = BK * 128;                // bytes of 64 pixels of 64 filters or channels
constexpr int DOWN = BM > 64 ? 2 : 1, MI = BM / (64 * DOWN), OWN = BN * DOWN / 2;
constexpr int A_BOXES = BM / 64, B_BOXES = BN / 64, STAGE = (A_BOXES + B_BOXES) * BOX;
constexpr int CONSUMERS = 8;                          // warps

// Where the window of each step's first pixel begins.
struct Walk {
    int x, y, z, image, dx, dy, dz, images;  // of y; what 64 pixels are in x, y, z and images
    int od, oh, ow;
    DEVICE Walk(int p, int od, int oh, int ow) : od(od), oh(oh), ow(ow) {
        x = p % ow, y = p / ow % oh, z = p / (oh * ow) % od, image = p / (oh * ow) / od;
        dx = BK % ow, dy = BK / ow % oh, dz = BK / (oh * ow) % od, images = BK / (oh * ow) / od;
    }
    DEVICE void next() {
        x += dx;
        const int row = x >= ow;
        x -= row ? ow : 0;
        y += dy + row;
        const int plane = y >= oh;
        y -= plane ? oh : 0;
#ifdef DEEP
        z += dz + plane;
        const int whole = z >= od;
        z -= whole ? od : 0;
        image += images + whole;
#else
        image += dz * od + images + plane;
#endif
    }
    DEVICE Pixel pixel() const {
#ifdef DEEP
        return {x * SW - PW, y * SH - PH, z * SD - PD, image};
#else
        return {x * SW - PW, y * SH - PH, image};
#endif
    }
};

extern "C" __global__ void __launch_bounds__(288, RESIDENT)
    conv_weight_grad_wgmma(const __grid_constant__ TensorMap map_dy, const __grid_constant__ TensorMap map_x,
                           PART* part, u32 pixels, int channels, int filters, PIXEL_SIZES, u32 chunk) {
    extern __shared__ __align__(1024) u8 smem[];
    const u32 base = smem_address(smem), barriers = base + STAGES * STAGE;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int blocks = (channels + 63) / 64, tiles_n = (TAPS * blocks + B_BOXES - 1) / B_BOXES;
    const int m0 = blockIdx.x / tiles_n * BM, first_block = blockIdx.x % tiles_n * B_BOXES;
    const u32 first = blockIdx.y * chunk, last = min(first + chunk, pixels);
    const int steps = (int)((last - first + BK - 1) / BK);
    if (warp == CONSUMERS && elect()) {
        Ring<STAGES>(barriers, true).set_up(CONSUMERS);
        fence_barrier_init();
        tma_prefetch(map_dy);
        tma_prefetch(map_x);
    }
    __syncthreads();
    after_previous_launch();

    if (warp == CONSUMERS) {  // ---- producer ----
        if (elect()) {
            int channel[B_BOXES], tap[B_BOXES];
            UNROLLED for (int i = 0; i < B_BOXES; i++) {  // past the last block there are no channels: zeros
                tap[i] = min((first_block + i) / blocks, TAPS - 1);
                channel[i] = (first_block + i - tap[i] * blocks) * 64;
            }
#ifdef DEEP
            Walk at(first, od, oh, ow);
#else
            Walk at(first, 1, oh, ow);
#endif
            Ring<STAGES> ring(barriers, true);
            ROLLED for (int step = 0; step < steps; step++, ring.next()) {
                const u32 a = base + ring.s * STAGE, bar = ring.claim(STAGE);
                UNROLLED for (int i = 0; i < A_BOXES; i++)
                    tma_load(a + i * BOX, map_dy, bar, m0 + i * 64, first + step * BK, 0);
                UNROLLED for (int i = 0; i < B_BOXES; i++)
                    load_pixels(a + (A_BOXES + i) * BOX, map_x, bar, channel[i], at.pixel(), tap[i]);
                at.next();
            }
        }
    } else {  // ---- consumers ----
        const int group = warp / 4, below = DOWN == 2 ? group * MI : 0, n0 = DOWN == 2 ? 0 : group * OWN;
        float acc[MI][OWN / 2];
        Ring<STAGES> ring(barriers, false);
        // not by ring.multiply, with which tiles of 64 x 128 over volumes took 2 to 4 % longer (H200, 2026-11)
        ROLLED for (int step = 0; step < steps; step++, ring.next()) {
            const u32 a = base + ring.s * STAGE + below * BOX, b = base + ring.s * STAGE + (A_BOXES + n0 / 64) * BOX;
            ring.await();
            wgmma_fence();
            UNROLLED for (int q = 0; q < BK / 16; q++)
                UNROLLED for (int i = 0; i < MI; i++)
                    Wgmma<T, OWN, 1, 1>::run(acc[i], wgmma_descriptor<false>(a + i * BOX + q * 2048),
                                             wgmma_descriptor<false>(b + q * 2048), step > 0 || q > 0);
            wgmma_commit();
            if (step > 0) {  // the step before is done: its stage is free
                wgmma_wait<1>();
                ring.release_before(lane);
            }
        }
        wgmma_wait<0>();
        part += (i64)blockIdx.y * filters * TAPS * channels;
        UNROLLED for (int i = 0; i < MI; i++) {
            wgmma_hold(acc[i]);
            const int row = m0 + (below + i) * 64 + warp % 4 * 16 + lane / 4;
            UNROLLED for (int j = 0; j < OWN / 8; j++) {
                const int block = first_block + n0 / 64 + j / 8, tap = block / blocks;
                const int c = (block - tap * blocks) * 64 + j % 8 * 8 + lane % 4 * 2;
                if (tap >= TAPS || c >= channels) continue;
                UNROLLED for (int h = 0; h < 2; h++)
                    if (row + h * 8 < filters)
                        store<2>(part + ((i64)(row + h * 8) * TAPS + tap) * channels + c,
                                 Vec<PART, 2>{narrow<PART>(acc[i][j * 4 + h * 2]),
                                              narrow<PART>(acc[i][j * 4 + h * 2 + 1])});
            }
        }
    }
}
