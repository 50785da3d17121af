// conv/integer_tma_sm90.cu: what conv/integer_sm80.cu computes, of one group, by Hopper's wgmma with copies by TMA.
// Idea     : blocks that stay walk over the tiles. One warp has copies of STAGES steps on their way, of BK channels of a
//            tap each: pixels gathered from the images (im2col), filters, and the tile's rows of scale, bias and shift, and
//            of e1 where AHEAD. Warpgroups of 64 pixels each multiply them by all BN filters, and make codes in
//            registers while the next tile's copies arrive. The sums start from `shift`. A tile's filters lie in shared
//            memory in an order by which a lane's columns of a row are RUN neighbours of each 4 RUN, which it reads and
//            stores at once: 16 bytes beside the next lane's. KEPT: a block has one
//            column of tiles, whose filters it copies once. PATCH: a step has all taps, of a patch of an image which is
//            copied once; a tile's rows are the patch's, and those beyond an image's line are not stored. TEAMS: two of them take
//            turns of tiles, so that one makes codes while another one multiplies.
// Inputs   : integer_sm80.cu's, of one group, of filters whose results are whole 16 bytes, zeros filling the weights up
//            to 64; the weights never change: they are read ahead.
// Outputs  : integer_sm80.cu's.
// Macros   : T BM BN (pixels and filters of a tile) BK (bytes: 64 or 128) STAGES, BLOCKS (on a multiprocessor), TEAMS, SHIFTED,
//            BORDER (taps fall outside, where x has no zeros), AHEAD (e1 is laid out as y and has 8 bits), WHOLE (filters
//            are a multiple of BN), KEPT (the grid is a multiple of the columns of tiles), FLAT (y's pixels are x's, one
//            behind another), else PATCH (the pixels of a line of a patch, or 0) and LINES (of y of a patch), or IM2COL
//            and gemm/im2col.cuh's; geometry.cuh's, suffix.cuh's, E1, E2, E3, ROWS_OF_E, NUMBERS;
//            FLOAT8: x and the weights are e4m3fn, without PATCH, SHIFTED and BORDER, TEAMS 1.
// Launch   : at most BLOCKS blocks a multiprocessor, of 2 BM TEAMS + 32 threads; fewer than 2^31 pixels.
// Numerics : exact sums (FLOAT8: those of BK products, of 14 bits, are added up in floats); y = fma(sum, scale, bias) is rounded once.
// Bound    : bytes; the instructions of the epilogue; wgmma where there are many channels.
#include "conv/codes.cuh"
#include "conv/geometry.cuh"
#include "conv/suffix.cuh"
#include "gemm/im2col.cuh"
#include "tma_ring.cuh"

#ifndef FLOAT8
#define FLOAT8 0
#endif
#if FLOAT8
#define SUM float
constexpr int PART = BN > 128 ? BN / 2 : BN;       // columns whose products are summed from zero at once
#else
#define SUM int
#endif
constexpr int WARPS = BM / 16, COPIER = TEAMS * WARPS, THREADS = 32 * COPIER + 32;  // warps of a team, which copies
constexpr int CHUNKS = BK / 16, RUN = 16 / sizeof(TY), GROUP = 4 * RUN;
constexpr int INNER = PATCH ? TAPS : 1;           // taps of a step
constexpr int PIXELS = PATCH ? BM + (KH - 1) * PATCH + KW - 1 : BM;  // those beyond a patch are of no result
constexpr int COPIED = PATCH ? (LINES + KH - 1) * PATCH * BK : BM * BK, FILTERS = BN * BK;
constexpr int PLACE = (PIXELS * BK + 1023) / 1024 * 1024, STAGE = PLACE + (KEPT ? 0 : INNER * FILTERS);
constexpr int ROWS = 2 + SHIFTED, SLOT = ROWS * BN * 4, SIDE_AT = STAGES * STAGE;
constexpr int SIDES = 2 * TEAMS, SIDE = SLOT + (AHEAD ? BM * BN : 0), BAR_AT = SIDE_AT + SIDES * SIDE;
constexpr int KEPT_AT = (BAR_AT + STAGES * 16 + SIDES * 16 + 8 + 1023) / 1024 * 1024;

// 8 bits, both operands along k, of 32 bytes.
template <class E, int WIDTH> struct Integers;
#define INTEGERS_(E_, type, n, r0, r1, r2, r3, r4, r5, r6)                                                        \
    template <> struct Integers<E_, n> {                                                                           \
        DEVICE static void run(int (&d)[r0], u64 a, u64 b, int add) {                                              \
            asm volatile(WGMMA_(n, "k32.s32." type ".s8", R##r0##_, r2, "%" #r0 ", %" #r1 ", p") : D##r0##_("+r")  \
                         : "l"(a), "l"(b), "r"(add));                                                              \
        }                                                                                                          \
    };
WGMMA_WIDTHS_(INTEGERS_, signed char, "s8")
WGMMA_WIDTHS_(INTEGERS_, u8, "u8")
// The descriptor of rows of BK bytes, swizzled as wide.
DEVICE u64 rows_at(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | (u64)(8 * BK >> 4) << 32 | (BK == 128 ? 1ull : 2ull) << 62;
}

#if AHEAD
#define MAP_OF_E const __grid_constant__ TensorMap map_e,
#else
#define MAP_OF_E
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    conv_integer_tma(const __grid_constant__ TensorMap map_x, const __grid_constant__ TensorMap map_w, MAP_OF_E
                       const float* bias, const E1* e1, const E2* e2, const E3* e3, TY* y, u32 pixels, int channels,
                       int filters, int d, int h, int w, int od, int oh, int ow, int ldw, const int* shift,
                       const float* scale, u32 border, NUMBERS) {
    extern __shared__ __align__(1024) u8 memory[];
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const u32 base = smem_address(memory), bars = base + BAR_AT, kept = bars + STAGES * 16 + SIDES * 16;
    Ring<STAGES> ring(bars, warp == COPIER);
    Ring<SIDES> sides(bars + STAGES * 16, warp == COPIER);
    // the block's tiles: so many down and to the right, one after another
    const u32 across = (filters + BN - 1) / BN, down = gridDim.x / across, right = gridDim.x % across;
    const u32 patches = PATCH ? (oh + LINES - 1) / LINES : 1;  // of an image
    const u32 rows = PATCH ? pixels / (oh * ow) * patches : (pixels + BM - 1) / BM;
    struct Tile { u32 row, column; };
    const Tile first = {blockIdx.x / across, blockIdx.x % across};
    auto next = [&](Tile& tile) {
        tile.row += down;
        if ((tile.column += right) >= across) tile.column -= across, tile.row++;
    };
    const int steps = (channels + BK - 1) / BK * (PATCH ? 1 : TAPS);
    if (threadIdx.x == 0) {
        ring.set_up(WARPS);
        sides.set_up(WARPS);
        mbarrier_init(kept, 1);
        fence_barrier_init();
    }
    __syncthreads();

    if (warp == COPIER) {  // ---- copies ----
        if (!elect()) return;
        struct Step { int tap, c; };
        auto after = [&](Step& at) {
            if ((at.c += BK) >= channels) at.c = 0, at.tap++;
        };
        auto copy_filters = [&](u32 to, u32 bar, const Tile& tile, const Step& at) {
            for (int t = 0; t < INNER; t++)
                tma_load(to + t * FILTERS, map_w, bar, (at.tap + t) * ldw + at.c, 0, 0, 0, tile.column * (BN / GROUP));
        };
        constexpr int BYTES = COPIED + (KEPT ? 0 : INNER * FILTERS);  // of a stage
        int early = KEPT ? steps : min(steps, STAGES);                // steps whose filters are on their way
        Step ahead = {};
        if (KEPT) mbarrier_expect(kept, steps * INNER * FILTERS);
        for (int s = 0; s < early; s++, after(ahead)) {
            if (!KEPT) mbarrier_expect(ring.full + s * 8, BYTES);
            copy_filters(KEPT ? base + KEPT_AT + s * INNER * FILTERS : base + s * STAGE + PLACE,
                         KEPT ? kept : ring.full + s * 8, first, ahead);
        }
        after_previous_launch();
        launch_dependents();  // the next one's blocks come as this one's leave
        for (Tile tile = first; tile.row < rows; next(tile), early = 0) {
            const u32 q0 = tile.row * BM;
            const u32 row = min(BN, filters - (int)tile.column * BN) * 4;
            const u32 side = base + SIDE_AT + sides.s * SIDE, side_bar = sides.claim(ROWS * row + SIDE - SLOT);
            const void* const rows_of[] = {scale, bias, shift};
            UNROLLED for (int i = 0; i < ROWS; i++)
                bulk_load(side + i * BN * 4, (const int*)rows_of[i] + tile.column * BN, row, side_bar);
#if AHEAD
            for (int u = 0; u < BN / 64; u++)
                tma_load(side + SLOT + u * BM * 64, map_e, side_bar, tile.column * BN + u * 64, q0, 0);
#endif
            sides.next();
#if IM2COL
            const Pixel pixel = first_pixel(q0, PIXELS_OF_Y);
#endif
            Step at = {};
            ROLLED for (int step = 0; step < steps; step++, after(at)) {
                const u32 to = base + ring.s * STAGE, bar = ring.full + ring.s * 8;
                if (KEPT || step >= early) {
                    ring.claim(BYTES);
                    if (!KEPT) copy_filters(to + PLACE, bar, tile, at);
                }
#if FLAT
                tma_load(to, map_x, bar, at.c, q0, 0);
#elif PATCH
                tma_load(to, map_x, bar, at.c, -PW, (int)(tile.row % patches) * LINES - PH, tile.row / patches);
#else
                load_pixels(to, map_x, bar, at.c, pixel, at.tap);
#endif
                ring.next();
            }
        }
        return;
    }

    // ---- sums and codes ----
    after_previous_launch();
    const int lane = threadIdx.x % 32, of_team = warp % WARPS;
    Tile tile = first;
    auto leave_to_others = [&](int tiles) {
        for (int i = 0; i < tiles; i++) next(tile);
        ring.skip(tiles * steps);
        sides.skip(tiles);
    };
    // A team takes its turn when the one before has awaited all of its tile: what it waits for is then the next that
    // comes to a stage.
    const int team = warp / WARPS, turn = 4 + team;
    if (TEAMS > 1 && team == 1) {
        bar_arrive(4, 64 * WARPS);
        leave_to_others(1);
    }
    if (KEPT) mbarrier_wait(kept, 0);
    for (; tile.row < rows; next(tile)) {
        // made again for each tile: they would take registers while it is multiplied
        const int row = threadIdx.x / 32 % WARPS * 16 + threadIdx.x % 32 / 4, own_n = threadIdx.x % 4 * RUN;
        auto pixel_of = [&](int r) -> u32 {  // of a row of the tile; none where it is as many as there are
            if (!PATCH) return tile.row * BM + r;
            const u32 image = tile.row / patches, top = tile.row % patches * LINES + r / max(PATCH, 1), x = r % max(PATCH, 1);
            return r < LINES * PATCH && top < oh && x < ow ? (image * oh + top) * ow + x : pixels;
        };
        const int m0 = tile.column * BN, wide = filters - m0 - own_n;  // of the lane's
#if BORDER  // where the first tap of a pixel is, which two threads fill where a tap falls outside
        const int edge = threadIdx.x % (32 * WARPS) / 2;
        const u32 pixel = tile.row * BM + edge, line = pixel / ow, sheet = line / oh;
        const int ix = (int)(pixel - line * ow) * SW - PW, iy = (int)(line - sheet * oh) * SH - PH;
        const int iz = (int)(sheet % od) * SD - PD;
        int tap = 0, c0 = 0;
#endif
        SUM acc[BN / 2];
        sides.await();
        const u8* side = memory + SIDE_AT + sides.s * SIDE;
        const float* of_scale = (const float*)side + own_n;
#if SHIFTED
        UNROLLED for (int u = 0; u < BN / GROUP; u++)
            UNROLLED for (int c = 0; c < RUN; c += 4) {
                const auto start = load<4>((const int*)of_scale + 2 * BN + u * GROUP + c);
                UNROLLED for (int k = 0; k < 4; k++) {
                    const int at = ((u * RUN + c + k) / 2) * 4 + k % 2;
                    acc[at] = acc[at + 2] = start.at[k];
                }
            }
#endif
#if FLOAT8
        UNROLLED for (int e = 0; e < BN / 2; e++) acc[e] = 0;
        ROLLED for (int step = 0; step < steps; step++, ring.next()) {
            const u32 a = base + ring.s * STAGE + warp / 4 * 64 * BK;
            const u32 b = base + (KEPT ? KEPT_AT + step * FILTERS : ring.s * STAGE + PLACE);
            ring.await();
            UNROLLED for (int n = 0; n < BN; n += PART) {
                float sum[PART / 2];
                wgmma_fence();
                UNROLLED for (int k = 0; k < BK / 32; k++)
                    WgmmaAlongK<1, PART>::run(sum, rows_at(a + k * 32), rows_at(b + n * BK + k * 32), k);
                wgmma_commit();
                wgmma_wait<0>();
                wgmma_hold(sum);
                UNROLLED for (int e = 0; e < PART / 2; e++) acc[n / 2 + e] += sum[e];
            }
            ring.release(lane);
        }
#else
        int step = 0;
        if (TEAMS > 1) bar_sync(turn, 64 * WARPS);
        ring.multiply(steps, lane, [&](int s, bool more) {
            const u32 a = base + s * STAGE + of_team / 4 * 64 * BK;
            const u32 b = base + (KEPT ? KEPT_AT + step++ * INNER * FILTERS : s * STAGE + PLACE);
            ring.await();
#if BORDER  // not beyond the channels, where the weights are the next tap's
            const int x = ix + tap % KW * DW, top = iy + tap / KW % KH * DH, z = iz + tap / (KW * KH) * DD;
            if ((unsigned)x >= (unsigned)w || (unsigned)top >= (unsigned)h || (unsigned)z >= (unsigned)d)
                UNROLLED for (int i = 0; i < CHUNKS / 2; i++) {
                    const int r = edge, chunk = threadIdx.x % 2 * (CHUNKS / 2) + i;
                    const int at = r * BK + (chunk ^ r * CHUNKS / 8 % CHUNKS) * 16;
                    if (c0 + chunk * 16 < channels)
                        *(uint4*)(memory + s * STAGE + at) = make_uint4(border, border, border, border);
                }
            if ((c0 += BK) >= channels) c0 = 0, tap++;
            fence_proxy_async();
            bar_sync(1 + warp / 4, 128);
#endif
            wgmma_fence();
            UNROLLED for (int t = 0; t < INNER; t++)
                UNROLLED for (int k = 0; k < BK / 32; k++)
                    Integers<T, BN>::run(acc, rows_at(a + (t / KW * PATCH + t % KW) * BK + k * 32),
                                         rows_at(b + t * FILTERS + k * 32), SHIFTED || t || k || more);
        });
        Tile after = tile;
        next(after);
        if (TEAMS > 1 && after.row < rows) bar_arrive(9 - turn, 64 * WARPS);
        wgmma_wait<0>();
        ring.release_before(lane);
#endif
        const u32 places[2] = {pixel_of(row), pixel_of(row + 8)};
        const u8* of_e = side + SLOT + row * 64;
        UNROLLED for (int u = 0; u < BN / GROUP; u++) {
            if (!WHOLE && u * GROUP >= wide) continue;
            const int n = u * GROUP + own_n, f = m0 + n;
            Piece<TY, RUN> out[2];
            [[maybe_unused]] Piece<E1, RUN> a[2];
            [[maybe_unused]] Piece<E2, RUN> b[2];
            [[maybe_unused]] Piece<E3, RUN> z[2];
            UNROLLED for (int i = 0; i < 2; i++) {
                const i64 at = (i64)min(places[i], pixels - 1) * filters + f;
#if AHEAD
                a[i] = piece_of<RUN>((const E1*)of_e + n / 64 * BM * 64 + i * 8 * 64 + n % 64);
#else
                a[i] = piece_of<RUN, (OPERANDS > 0)>(e1, ROWS_OF_E & 1 ? f : at);
#endif
                b[i] = piece_of<RUN, (OPERANDS > 1)>(e2, ROWS_OF_E & 2 ? f : at);
                z[i] = piece_of<RUN, (OPERANDS > 2)>(e3, ROWS_OF_E & 4 ? f : at);
            }
            UNROLLED for (int q = 0; q < RUN; q += 4) {
                const auto by = load<4>(of_scale + u * GROUP + q), plus = load<4>(of_scale + BN + u * GROUP + q);
                UNROLLED for (int i = 0; i < 2; i++) {
                    auto result = [&](int k) {
                        const SUM sum = acc[(u * RUN + q + k) / 2 * 4 + i * 2 + k % 2];
                        const float v = fmaf((float)sum, by.at[k], plus.at[k]);
                        return SUFFIX(v, widen(a[i].at[q / 4][k]), widen(b[i].at[q / 4][k]), widen(z[i].at[q / 4][k]));
                    };
                    out[i].at[q / 4] = Four<TY>::made(result(0), result(1), result(2), result(3));
                }
            }
            UNROLLED for (int i = 0; i < 2; i++)
                if (places[i] < pixels) *(Piece<TY, RUN>*)(y + (i64)places[i] * filters + f) = out[i];
        }
        __syncwarp();
        sides.release(lane);
        sides.next();
        if (TEAMS > 1) leave_to_others(TEAMS - 1);
    }
}
