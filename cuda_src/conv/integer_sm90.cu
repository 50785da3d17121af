// conv/integer_sm90.cu: what conv/integer_sm80.cu computes, by Hopper's wgmma of 8-bit integers.
// Idea     : an implicit product as there: a step has one tap and BK of its channels, 16 bytes a copy (cp.async), with the
//            border where a tap falls outside, in wgmma's swizzle; STAGES - 1 steps are on their way. Several blocks share a
//            multiprocessor, so that one copies or stores while another multiplies. The sums start from `shift`. A tile's
//            filters lie in shared memory in an order by which a lane's columns of a row are 16 neighbours of each 64: it
//            makes codes in registers, and reads and stores 16 at once.
// Inputs   : integer_sm80.cu's; x is smaller than 2^35 bytes, and the weights never change: they are read ahead.
// Outputs  : integer_sm80.cu's.
// Macros   : T BM BN (pixels and filters of a block), WM (pixels of a warpgroup, a multiple of 64, which has all BN
//            filters), BK (bytes: 64 or 128) STAGES, geometry.cuh's, DEEP, FLAT, VEC (16, 8 or 4 where filters are a
//            multiple of it, else 1), suffix.cuh's, E1, E2, E3, ROWS_OF_E, NUMBERS.
// Launch   : pixel tiles * filter tiles * groups blocks of 128 BM / WM threads; fewer than 2^31 pixels.
// Numerics : exact sums; y = fma(sum, scale, bias) is rounded once.
// Bound    : copies into shared memory, and the instructions of the epilogue.
#include "conv/geometry.cuh"
#include "conv/integer_products.cuh"
#include "conv/suffix.cuh"
#include "sm90.cuh"

constexpr int THREADS = 128 * (BM / WM), CHUNKS = BK / 16, ROWS = THREADS / CHUNKS;  // rows copied at once
constexpr int A_ROWS = BM / ROWS, B_ROWS = BN / ROWS, STAGE = (BM + BN) * BK, MT = WM / 64, NT = BN / 8;
// A lane has RUN neighbours of each 64 of a row's filters; it stores PIECE of them at once.
constexpr int RUN = 16, PIECE = VEC;
static_assert(A_ROWS > 0 && B_ROWS > 0 && ROWS % 8 == 0 && BN % 64 == 0, "tile and threads");

// The place of a chunk of 16 bytes in its row.
DEVICE int turned(int row, int chunk) { return (chunk ^ row * CHUNKS / 8 % CHUNKS) * 16; }
// The filter of a row of shared memory: a permutation of bits.
DEVICE constexpr int filter_of(int row) { return row / 64 * 64 + row % 8 / 2 * RUN + row % 64 / 8 * 2 + row % 2; }
DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
// Elements of an operand from `at` on, if there is one.
template <bool USED, class E> DEVICE Vec<E, PIECE> piece_of(const E* e, i64 at) {
    const Vec<E, PIECE> none = {};
    return USED ? load<PIECE>(e + at) : none;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    conv_integer_wgmma(const T* x, const signed char* weight, const float* bias, const E1* e1, const E2* e2,
                       const E3* e3, TY* y, int columns, int groups, int channels, int filters, int d, int h,
                       int w, int od, int oh, int ow, i64 sn, int sz, int sy, int sx, int ldw, const int* shift,
                       const float* scale, u32 border, NUMBERS) {
    extern __shared__ __align__(1024) u8 memory[];
    const u32 base = smem_address(memory);
    const int tiles_m = (filters + BN - 1) / BN, tile = blockIdx.x / tiles_m;
    const int g = groups == 1 ? 0 : tile % groups, m0 = (blockIdx.x - tile * tiles_m) * BN;
    const u32 q0 = (groups == 1 ? tile : tile / groups) * BM;
    const int left_n = filters - m0, all = groups * filters, f0 = g * filters + m0;
    const int per_tap = (channels + BK - 1) / BK, steps = per_tap * TAPS;

    const int at = threadIdx.x % CHUNKS * 16, row0 = threadIdx.x / CHUNKS;
#if !FLAT  // where each pixel's first tap is, in 16 bytes; it may lie outside
    int4* pixels = (int4*)(memory + STAGES * STAGE);
    for (int r = threadIdx.x; r < BM; r += THREADS) {
        const u32 q = q0 + r, line = q / ow, sheet = line / oh;
        const int image = DEEP ? sheet / od : sheet, iz = DEEP ? (int)(sheet - image * od) * SD - PD : 0;
        const int iy = (int)(line - sheet * oh) * SH - PH, ix = (int)(q - line * ow) * SW - PW;
        const i64 place = image * sn + (i64)iz * sz + (i64)iy * sy + (i64)ix * sx;
        pixels[r] = {(int)(place / 16), iz, q < columns ? iy : -(1 << 29), ix};  // outside for every tap
    }
    __syncthreads();
#endif
    int from[A_ROWS], iz[A_ROWS], iy[A_ROWS], ix[A_ROWS];
    UNROLLED for (int i = 0; i < A_ROWS; i++) {
        const int r = row0 + i * ROWS;
#if FLAT
        from[i] = (int)(q0 + r) * (sx / 16), iz[i] = ix[i] = 0, iy[i] = q0 + r < columns ? 0 : -1;
#else
        const int4 pixel = pixels[r];
        from[i] = pixel.x, iz[i] = pixel.y, iy[i] = pixel.z, ix[i] = pixel.w;
#endif
    }
    const T* image = x + g * channels + at;
    const int b0 = filter_of(row0);
    const signed char* filter = weight + (i64)(f0 + b0) * TAPS * ldw + at;
    const i64 line_b = (i64)TAPS * ldw;
    const u32 to0 = base + row0 * BK + turned(row0, at / 16);
    struct Step { int tap, c0; };  // to be copied
    auto after = [&](Step& s) {
        if ((s.c0 += BK) >= channels) s.c0 = 0, s.tap++;
    };
    auto copy_b = [&](int step, const Step& s) {
        const signed char* b = filter + (TAPS > 1 ? (i64)s.tap * ldw : 0) + s.c0;
        const int bytes = s.c0 + at < ldw ? 16 : 0;
        UNROLLED for (int i = 0; i < B_ROWS; i++)
            cp_async_or_fill(to0 + step % STAGES * STAGE + BM * BK + i * ROWS * BK, b + filter_of(i * ROWS) * line_b,
                         b0 + filter_of(i * ROWS) < left_n ? bytes : 0, true, 0);
    };
    auto copy_a = [&](int step, const Step& s) {
        const int dz = KD > 1 ? s.tap / (KH * KW) * DD : 0, dy = KH > 1 ? s.tap / KW % KH * DH : 0;
        const int dx = KW > 1 ? s.tap % KW * DW : 0, left = channels - s.c0 - at;
        const i64 on = (i64)dz * sz + (i64)dy * sy + (i64)dx * sx + s.c0;
        UNROLLED for (int i = 0; i < A_ROWS; i++) {
            const bool in = (unsigned)(iy[i] + dy) < (unsigned)h && (FLAT || (unsigned)(ix[i] + dx) < (unsigned)w) &&
                            (!DEEP || (unsigned)(iz[i] + dz) < (unsigned)d);
            cp_async_or_fill(to0 + step % STAGES * STAGE + i * ROWS * BK, image + (i64)from[i] * 16 + on,
                         left >= 16 ? 16 : left > 0 ? left : 0, in, border);
        }
    };
    Step ahead = {}, now = {};
    UNROLLED for (int s = 0; s < STAGES - 1; s++, after(ahead))  // weights never change: before the wait
        if (s < steps) copy_b(s, ahead);
    after_previous_launch();
    launch_dependents();  // the next one's blocks come as this one's last ones leave
    UNROLLED for (int s = 0; s < STAGES - 1; s++, after(now)) {
        if (s < steps) copy_a(s, now);
        copies_commit();
    }
    auto fill = [&](int step) {
        if (step < steps) copy_a(step, now), copy_b(step, now), after(now);
        copies_commit();
    };

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int wm = warp / 4 * WM, own_m = wm + warp % 4 * 16 + lane / 4, own_n = lane % 4 * RUN;  // of a lane's sums
    int acc[MT][NT * 4];
    UNROLLED for (int j = 0; j < NT; j++)
        UNROLLED for (int e = 0; e < 2; e++) {
            const int n = own_n + j / 8 * 64 + j % 8 * 2 + e, start = n < left_n ? shift[f0 + n] : 0;
            UNROLLED for (int i = 0; i < MT; i++) acc[i][j * 4 + e] = acc[i][j * 4 + 2 + e] = start;
        }
    for (int step = 0; step < steps; step++) {
        copies_wait<STAGES - 2>();
        fence_proxy_async();
        __syncthreads();
        const u32 a = base + step % STAGES * STAGE + wm * BK, b = base + step % STAGES * STAGE + BM * BK;
        wgmma_fence();
        UNROLLED for (int k = 0; k < BK / 32; k++)
            UNROLLED for (int i = 0; i < MT; i++)
                Integers<T, BN>::run(acc[i], rows_of<BK>(a + i * 64 * BK + k * 32), rows_of<BK>(b + k * 32));
        wgmma_commit();
        fill(step + STAGES - 1);
        wgmma_wait<0>();
    }
    UNROLLED for (int u = 0; u < BN / 64; u++)
        UNROLLED for (int c = 0; c < RUN; c += PIECE) {
            const int n = own_n + u * 64 + c, f = f0 + n;
            if (n >= left_n) continue;
            const auto by = load<PIECE>(scale + f), plus = load<PIECE>(bias + f);
            UNROLLED for (int i = 0; i < MT * 2; i++) {
                const u32 q = q0 + own_m + i / 2 * 64 + i % 2 * 8;
                if (q >= columns) continue;
                const i64 to = (i64)q * all + f;
                const auto a = piece_of<(OPERANDS > 0)>(e1, ROWS_OF_E & 1 ? f : to);
                const auto b = piece_of<(OPERANDS > 1)>(e2, ROWS_OF_E & 2 ? f : to);
                const auto z = piece_of<(OPERANDS > 2)>(e3, ROWS_OF_E & 4 ? f : to);
                Vec<TY, PIECE> out;
                UNROLLED for (int k = 0; k < PIECE; k++) {
                    const int sum = acc[i / 2][(u * 8 + (c + k) / 2) * 4 + i % 2 * 2 + (c + k) % 2];
                    const float v = fmaf((float)sum, by.at[k], plus.at[k]);
                    out.at[k] = narrow<TY>((typename Accumulator<TY>::type)SUFFIX(
                        v, widen(a.at[k]), widen(b.at[k]), widen(z.at[k])));
                }
                store<PIECE>(y + to, out);
            }
        }
}
