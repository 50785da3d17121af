// conv/integer_tma_sm90.cu: what conv/integer_sm90.cu computes, with copies by TMA, where the border is zeros.
// Idea     : blocks that stay walk over the tiles. One warp has copies of STAGES steps on their way, of BK channels of a
//            tap each: pixels gathered from the images (im2col), filters, and the tile of e1 where AHEAD. Warpgroups of
//            64 pixels each multiply them by all BN filters, and make codes in registers while the next tile's copies
//            arrive. The sums start from `shift`. A tile's filters lie in shared memory in an order by which a lane's
//            columns of a row are 16 neighbours of each 64: it reads and stores 16 codes at once.
// Inputs   : integer_sm80.cu's, of one group, of whole 64 filters, with zeros where taps fall outside; the weights
//            never change: they are read ahead.
// Outputs  : integer_sm80.cu's.
// Macros   : T BM BN (pixels and filters of a tile) BK (bytes: 64 or 128) STAGES, BLOCKS (on a multiprocessor), AHEAD
//            (e1 is laid out as y and has 8 bits), WHOLE (filters are a multiple of BN), FLAT (y's pixels are x's, one behind another), else IM2COL and
//            gemm/im2col.cuh's, geometry.cuh's, suffix.cuh's, E1, E2, E3, ROWS_OF_E, NUMBERS.
// Launch   : at most BLOCKS blocks a multiprocessor, of 2 BM + 32 threads; fewer than 2^31 pixels.
// Numerics : exact sums; y = fma(sum, scale, bias) is rounded once.
// Bound    : bytes; the instructions of the epilogue; wgmma where there are many channels.
#include "conv/geometry.cuh"
#include "conv/integer_products.cuh"
#include "conv/suffix.cuh"
#include "gemm/im2col.cuh"
#include "sm90.cuh"

constexpr int WARPS = BM / 16, THREADS = 32 * WARPS + 32, STAGE = (BM + BN) * BK;
constexpr int RUN = 16, PIECE = 16 / sizeof(TY);  // of each 64 filters a lane's neighbours; those of one store
constexpr int SLOT = BM * BN, E_AT = STAGES * STAGE, BAR_AT = E_AT + (AHEAD ? 2 * SLOT : 0);

// Elements of an operand from `at` on, if there is one.
template <bool USED, class E> DEVICE Vec<E, PIECE> piece_of(const E* e, i64 at) {
    const Vec<E, PIECE> none = {};
    return USED ? load<PIECE>(e + at) : none;
}
#if AHEAD
#define MAP_OF_E const __grid_constant__ TensorMap map_e,
#else
#define MAP_OF_E
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    conv_integer_tma(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_w, MAP_OF_E
                       const float* bias, const E1* e1, const E2* e2, const E3* e3, TY* y, u32 pixels, int channels,
                       int filters, int od, int oh, int ow, int ldw, const int* shift,
                       const float* scale, NUMBERS) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 base = smem_address(memory), full = base + BAR_AT, empty = full + STAGES * 8;
    const u32 e_full = empty + STAGES * 8, e_empty = e_full + 16;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const u32 across = (filters + BN - 1) / BN, tiles = (pixels + BM - 1) / BM * across;
    const int steps = (channels + BK - 1) / BK * TAPS;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(full + s * 8, 1);
            mbarrier_init(empty + s * 8, WARPS * WARP_ARRIVALS);
        }
        for (int i = 0; i < 2; i++) {
            mbarrier_init(e_full + i * 8, 1);
            mbarrier_init(e_empty + i * 8, WARPS * WARP_ARRIVALS);
        }
        fence_barrier_init();
    }
    __syncthreads();

    if (warp == WARPS) {  // ---- copies ----
        if (!elect()) return;
        struct Step { int tap, c; };
        auto after = [&](Step& at) {
            if ((at.c += BK) >= channels) at.c = 0, at.tap++;
        };
        auto copy_filters = [&](int s, u32 tile, const Step& at) {
            mbarrier_expect(full + s * 8, STAGE);
            tma_load(base + s * STAGE + BM * BK, map_w, full + s * 8, at.tap * ldw + at.c, 0, 0, 0, tile % across * (BN / 64));
        };
        const int early = min(steps, STAGES);
        Step ahead = {};
        for (int s = 0; s < early; s++, after(ahead)) copy_filters(s, blockIdx.x, ahead);
        after_previous_launch();
        launch_dependents();  // the next one's blocks come as this one's leave
        int s = 0, turn = 0;
        u32 phase = 1;
        for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn++) {
            const int q0 = tile / across * BM;
#if AHEAD
            const u32 slot = turn % 2, e_bar = e_full + slot * 8;
            mbarrier_wait(e_empty + slot * 8, turn / 2 % 2 ^ 1);
            mbarrier_expect(e_bar, SLOT);
            for (int u = 0; u < BN / 64; u++)
                tma_load(base + E_AT + slot * SLOT + u * BM * 64, map_e, e_bar, tile % across * BN + u * 64, q0, 0);
#endif
#if !FLAT
            const Pixel first = first_pixel(q0, PIXELS_OF_Y);
#endif
            Step at = {};
#pragma unroll 1
            for (int step = 0; step < steps; step++, after(at)) {
                if (turn || step >= early) {
                    mbarrier_wait(empty + s * 8, phase);
                    copy_filters(s, tile, at);
                }
#if FLAT
                tma_load(base + s * STAGE, map_x, full + s * 8, at.c, q0, 0);
#else
                load_pixels(base + s * STAGE, map_x, full + s * 8, at.c, first, at.tap);
#endif
                if (++s == STAGES) s = 0, phase ^= 1;
            }
        }
        return;
    }

    // ---- sums and codes ----
    after_previous_launch();
    int s = 0, turn = 0;
    u32 phase = 0;
    for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x, turn++) {
        // made again for each tile: they would take registers while it is multiplied
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, own_n = threadIdx.x % 4 * RUN;
        const u32 q0 = tile / across * BM + row;  // the lane's first row; its second is 8 behind
        const int m0 = tile % across * BN, wide = min(BN, filters - m0);
        int acc[BN / 2];
#pragma unroll
        for (int i = 0; i < BN / 2; i++) acc[i] = 0;
#pragma unroll
        for (int u = 0; u < BN / 64; u++)
#pragma unroll
            for (int c = 0; c < RUN; c += 4)
                if (WHOLE || u * 64 < wide) {
                    const auto start = load<4>(shift + m0 + u * 64 + own_n + c);
#pragma unroll
                    for (int k = 0; k < 4; k++) {
                        const int at = (u * 8 + (c + k) / 2) * 4 + k % 2;
                        acc[at] = acc[at + 2] = start.at[k];
                    }
                }
#pragma unroll 1
        for (int step = 0; step < steps; step++) {
            mbarrier_wait(full + s * 8, phase);
            const u32 a = base + s * STAGE + warp / 4 * 64 * BK, b = base + s * STAGE + BM * BK;
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < BK / 32; k++)
                Integers<T, BN>::run(acc, rows_of<BK>(a + k * 32), rows_of<BK>(b + k * 32));
            wgmma_commit();
            if (step > 0) {  // the step before is done: its stage is free
                wgmma_wait<1>();
                if (arrives(threadIdx.x % 32)) mbarrier_arrive(empty + (s == 0 ? STAGES - 1 : s - 1) * 8);
            }
            if (++s == STAGES) s = 0, phase ^= 1;
        }
        wgmma_wait<0>();
        if (arrives(threadIdx.x % 32)) mbarrier_arrive(empty + (s == 0 ? STAGES - 1 : s - 1) * 8);
        TY* to = y + (i64)q0 * filters + m0 + own_n;
#if AHEAD
        const u32 slot = turn % 2;
        const u8* of_e = memory + E_AT + slot * SLOT + row * 64 + own_n;
        mbarrier_wait(e_full + slot * 8, turn / 2 % 2);
#endif
#pragma unroll
        for (int u = 0; u < BN / 64; u++)
#pragma unroll
            for (int c = 0; c < RUN; c += PIECE) {
                if (!WHOLE && u * 64 >= wide) continue;
                const int f = m0 + own_n + u * 64 + c;
                Vec<TY, PIECE> out[2];
                [[maybe_unused]] Vec<E1, PIECE> a[2];
                [[maybe_unused]] Vec<E2, PIECE> b[2];
                [[maybe_unused]] Vec<E3, PIECE> z[2];
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const i64 at = (i64)min(q0 + i * 8, pixels - 1) * filters + f;
#if AHEAD
                    a[i] = load<PIECE>((const E1*)(of_e + u * BM * 64 + i * 8 * 64 + c));
#else
                    a[i] = piece_of<(OPERANDS > 0)>(e1, ROWS_OF_E & 1 ? f : at);
#endif
                    b[i] = piece_of<(OPERANDS > 1)>(e2, ROWS_OF_E & 2 ? f : at);
                    z[i] = piece_of<(OPERANDS > 2)>(e3, ROWS_OF_E & 4 ? f : at);
                }
#pragma unroll
                for (int four = 0; four < PIECE; four += 4) {
                    const auto by = load<4>(scale + f + four), plus = load<4>(bias + f + four);
#pragma unroll
                    for (int i = 0; i < 2; i++)
#pragma unroll
                        for (int k = four; k < four + 4; k++) {
                            const int sum = acc[(u * 8 + (c + k) / 2) * 4 + i * 2 + (c + k) % 2];
                            const float v = fmaf((float)sum, by.at[k - four], plus.at[k - four]);
                            out[i].at[k] = narrow<TY>((typename Accumulator<TY>::type)SUFFIX(
                                v, widen(a[i].at[k]), widen(b[i].at[k]), widen(z[i].at[k])));
                        }
                }
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (q0 + i * 8 < pixels) store<PIECE>(to + i * 8 * filters + u * 64 + c, out[i]);
            }
#if AHEAD
        __syncwarp();
        if (arrives(threadIdx.x % 32)) mbarrier_arrive(e_empty + slot * 8);
#endif
    }
}
