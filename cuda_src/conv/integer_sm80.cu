// conv/integer_sm80.cu: Conv of channels-last images of 8-bit integers on mma.sync, one to three axes, any group,
// stride, dilation, padding, and products of rows; what stands behind it makes codes again.
// Idea     : implicit GEMM as in nhwc_sm80.cu: a step has one tap and BK of its channels, 16 bytes a copy (cp.async),
//            the chunks of 16 bytes of a row in an order by which ldmatrix meets no bank twice; STAGES - 1 steps are
//            on their way. The sums start from `shift`, and become codes in registers: the tile of codes goes
//            through shared memory, so that stores take 16 bytes, and e1 comes in the same way (AHEAD), before
//            the first step.
// Inputs   : x T [n, d, h, w, groups * channels] by the strides sn, sz, sy, sx of images, sheets, rows and pixels
//            (multiples of 16 bytes), with a byte of `border` where a tap falls outside; weight int8
//            [groups * filters, TAPS, ldw], of whose last axis the first `channels` count and the others are 0;
//            shift i32, scale and bias f32 [groups * filters]; n0 ...: the numbers of SUFFIX.
// Outputs  : y TY [n, od, oh, ow, groups * filters] = SUFFIX(scale (sum + shift) + bias, ...).
// Macros   : T BM BN (pixels and filters of a block), SHIFTED (else there is no shift), WM WN (of a warp), BK (bytes) STAGES, geometry.cuh's,
//            DEEP (three axes), FLAT (y's pixels are x's, one behind another), VEC (16 or 8 where filters are a
//            multiple of it, else 1), suffix.cuh's, and E1, E2, E3, the types of its operands, of which those of bits
//            of ROWS_OF_E are rows; NUMBERS, the parameters n0 and so on.
// Launch   : pixel tiles * filter tiles * groups blocks of 32 BM BN / (WM WN) threads; fewer than 2^31 pixels.
// Numerics : exact sums; y = fma(sum, scale, bias) is rounded once.
// Bound    : the instructions of the epilogue; mma.sync's rate (about half of wgmma's on Hopper).
#include "sm80.cuh"
#include "conv/codes.cuh"
#include "conv/geometry.cuh"
#include "conv/suffix.cuh"

typedef T Element;
#define MMA_S8_(type)                                                                              \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." type ".s8.s32 {%0,%1,%2,%3}, "           \
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                          \
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
DEVICE void mma(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, signed char) { MMA_S8_("s8"); }
DEVICE void mma(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, u8) { MMA_S8_("u8"); }

constexpr int WARPS_N = BN / WN, THREADS = 32 * (BM / WM) * WARPS_N;
constexpr int CHUNKS = BK / 16, ROWS = THREADS / CHUNKS, LINES = 8 / CHUNKS;  // rows copied at once; of 128 bytes
constexpr int A_ROWS = BM / ROWS, B_ROWS = BN / ROWS, MT = WM / 16, NT = WN / 8, STAGE = (BM + BN) * BK;
constexpr bool AHEAD = OPERANDS > 0 && sizeof(E1) * sizeof(TY) == 1 && VEC == 16 && !(ROWS_OF_E & 1);
constexpr int PER = VEC == 1 ? 1 : sizeof(TY) == 1 ? VEC : 16 / sizeof(TY);  // elements of a store
constexpr int OUT = BN + 16 / sizeof(TY);                                   // elements between rows of the tile
constexpr int OUT_AT = AHEAD ? STAGES * STAGE : 0, CODES = BN + 16;
static_assert(A_ROWS > 0 && B_ROWS > 0 && NT % 2 == 0 && ROWS % 8 == 0, "tile and threads");

// The place of a chunk of 16 bytes in its row.
DEVICE int turned(int row, int chunk) { return (chunk ^ row / LINES % CHUNKS) * 16; }
// Two neighbours of an operand, the second where it is there.
template <class E> DEVICE void pair_of(const E* p, bool both, E (&to)[2]) {
    if (VEC > 1) {
        const Vec<E, 2> two = load<2>(p);
        to[0] = two.at[0], to[1] = two.at[1];
    } else to[0] = p[0], to[1] = both ? p[1] : p[0];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    conv_integer(const T* x, const signed char* weight, const float* bias, const E1* e1, const E2* e2,
                 const E3* e3, TY* y, int columns, int groups, int channels, int filters, int d, int h,
                 int w, int od, int oh, int ow, i64 sn, int sz, int sy, int sx, int ldw, const int* shift,
                 const float* scale, u32 border, NUMBERS) {
    after_previous_launch();
    extern __shared__ __align__(128) u8 memory[];
    const u32 base = smem_address(memory);
    const int tiles_m = (filters + BN - 1) / BN, tile = blockIdx.x / tiles_m;
    const int g = groups == 1 ? 0 : tile % groups, m0 = (blockIdx.x - tile * tiles_m) * BN;
    const u32 q0 = (groups == 1 ? tile : tile / groups) * BM;
    const int left_n = filters - m0, all = groups * filters, f0 = g * filters + m0;
    const int per_tap = (channels + BK - 1) / BK, steps = per_tap * TAPS;

    const int at = threadIdx.x % CHUNKS * 16, row0 = threadIdx.x / CHUNKS;
    const T* from[A_ROWS];  // the first tap's; it may lie outside
    int iz[A_ROWS], iy[A_ROWS], ix[A_ROWS];
    UNROLLED for (int i = 0; i < A_ROWS; i++) {
#if FLAT
        iz[i] = ix[i] = 0, iy[i] = q0 + row0 + i * ROWS < columns ? 0 : -1;
        from[i] = x + (i64)(q0 + row0 + i * ROWS) * sx + g * channels + at;
#else
        const u32 q = q0 + row0 + i * ROWS, line = q / ow, sheet = line / oh;
        const int image = DEEP ? sheet / od : sheet;
        iz[i] = DEEP ? (int)(sheet - image * od) * SD - PD : 0;
        iy[i] = (int)(line - sheet * oh) * SH - PH;
        ix[i] = (int)(q - line * ow) * SW - PW;
        from[i] = x + image * sn + (i64)iz[i] * sz + (i64)iy[i] * sy + (i64)ix[i] * sx + g * channels + at;
        if (q >= columns) iy[i] = -(1 << 29);  // outside for every tap
#endif
    }
    const signed char* filter = weight + (i64)(f0 + row0) * TAPS * ldw + at;
    const i64 rows_b = (i64)ROWS * TAPS * ldw;
    const u32 to0 = base + row0 * BK + turned(row0, at / 16);
    int tap = 0, c0 = 0;  // of the next step to be copied
    auto fill = [&](int step) {
        if (step < steps) {
            const u32 to = to0 + step % STAGES * STAGE;
            const int dz = KD > 1 ? tap / (KH * KW) * DD : 0, dy = KH > 1 ? tap / KW % KH * DH : 0;
            const int dx = KW > 1 ? tap % KW * DW : 0, left = channels - c0 - at;
            const i64 on = (i64)dz * sz + (i64)dy * sy + (i64)dx * sx + c0;
            const int bytes = left >= 16 ? 16 : left > 0 ? left : 0, bytes_b = c0 + at < ldw ? 16 : 0;
            UNROLLED for (int i = 0; i < A_ROWS; i++) {
                const bool in = (unsigned)(iy[i] + dy) < (unsigned)h &&
                                (FLAT || (unsigned)(ix[i] + dx) < (unsigned)w) &&
                                (!DEEP || (unsigned)(iz[i] + dz) < (unsigned)d);
                cp_async_or_fill(to + i * ROWS * BK, from[i] + on, bytes, in, border);
            }
            const signed char* b = filter + (TAPS > 1 ? (i64)tap * ldw : 0) + c0;
            UNROLLED for (int i = 0; i < B_ROWS; i++, b += rows_b)
                cp_async_16(to + BM * BK + i * ROWS * BK, b, row0 + i * ROWS < left_n ? bytes_b : 0);
            if ((c0 += BK) >= channels) c0 = 0, tap++;
        }
        cp_async_commit();
    };
#if OPERANDS > 0
    if (AHEAD)
        for (int i = threadIdx.x; i < BM * BN / 16; i += THREADS) {
            const int r = i / (BN / 16), n = i % (BN / 16) * 16;
            const bool in = q0 + r < columns && n < left_n;
            cp_async_16(base + OUT_AT + r * CODES + n, e1 + (i64)(q0 + r) * all + f0 + n, in ? 16 : 0);
        }
#endif
    UNROLLED for (int s = 0; s < STAGES - 1; s++) fill(s);

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int wm = warp / WARPS_N * WM, wn = warp % WARPS_N * WN, pair = lane % 4 * 2;
    int acc[MT][NT][4];
    UNROLLED for (int j = 0; j < NT; j++) {
        const int n = wn + j * 8 + pair;
        const int s0 = SHIFTED && n < left_n ? shift[f0 + n] : 0, s1 = SHIFTED && n + 1 < left_n ? shift[f0 + n + 1] : 0;
        UNROLLED for (int i = 0; i < MT; i++)
            UNROLLED for (int e = 0; e < 4; e++) acc[i][j][e] = e % 2 ? s1 : s0;
    }
    // where a lane's row has its chunk of each 32 of k; a product's two words of b are neighbours
    const int row_b = lane / 16 * 8 + lane % 8;
    u32 chunk_a[BK / 32], chunk_b[BK / 32];
    UNROLLED for (int k = 0; k < BK / 32; k++) {
        chunk_a[k] = lane % 16 * BK + turned(lane % 16, k * 2 + lane / 16);
        chunk_b[k] = row_b * BK + turned(row_b, k * 2 + lane / 8 % 2);
    }
    for (int step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        fill(step + STAGES - 1);
        const u32 a = base + step % STAGES * STAGE + wm * BK, b = base + step % STAGES * STAGE + (BM + wn) * BK;
        UNROLLED for (int k = 0; k < BK / 32; k++) {
            u32 fa[MT][4], fb[NT / 2][4];
            UNROLLED for (int i = 0; i < MT; i++) ldmatrix_x4<false>(fa[i], a + i * 16 * BK + chunk_a[k]);
            UNROLLED for (int j = 0; j < NT / 2; j++) ldmatrix_x4<false>(fb[j], b + j * 16 * BK + chunk_b[k]);
            UNROLLED for (int i = 0; i < MT; i++)
                UNROLLED for (int j = 0; j < NT; j++)
                    mma(acc[i][j], fa[i], fb[j / 2][j % 2 * 2], fb[j / 2][j % 2 * 2 + 1], Element());
        }
    }
    cp_async_wait<0>();
    __syncthreads();
    TY* tile_y = (TY*)(memory + OUT_AT);
    UNROLLED for (int j = 0; j < NT; j++) {
        const int n = wn + j * 8 + pair, f = f0 + n;
        if (n >= left_n) continue;
        const bool both = n + 1 < left_n;
        float by[2], plus[2];
        pair_of(scale + f, both, by), pair_of(bias + f, both, plus);
        UNROLLED for (int i = 0; i < MT; i++)
            UNROLLED for (int e = 0; e < 2; e++) {
                const int r = wm + i * 16 + e * 8 + lane / 4;
                const i64 to = (i64)(q0 + r) * all + f;
                E1 a[2] = {};
                E2 b[2] = {};
                E3 c[2] = {};
                if (AHEAD) pair_of((const E1*)(memory + OUT_AT + r * CODES + n), both, a);
                const bool in = q0 + r < columns;
                if (OPERANDS > 0 && !AHEAD && in) pair_of(e1 + (ROWS_OF_E & 1 ? f : to), both, a);
                if (OPERANDS > 1 && in) pair_of(e2 + (ROWS_OF_E & 2 ? f : to), both, b);
                if (OPERANDS > 2 && in) pair_of(e3 + (ROWS_OF_E & 4 ? f : to), both, c);
                Vec<TY, 2> out;
                UNROLLED for (int k = 0; k < 2; k++) {
                    const float v = fmaf((float)acc[i][j][e * 2 + k], by[k], plus[k]);
                    out.at[k] = stored<TY>(SUFFIX(v, widen(a[k]), widen(b[k]), widen(c[k])));
                }
                store<2>(tile_y + r * OUT + n, out);
            }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BM * BN / PER; i += THREADS) {
        const int r = i / (BN / PER), n = i % (BN / PER) * PER;
        if (q0 + r < columns && n < left_n)
            store<PER>(y + (i64)(q0 + r) * all + f0 + n, load<PER>(tile_y + r * OUT + n));
    }
}
