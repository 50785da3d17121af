// conv/nhwc_sm80.cu: Conv of channels-last images on mma.sync, one to three axes, any group, stride, dilation, padding.
// Idea     : implicit GEMM y[p, m] = sum_k x[p, k] w[m, k], k = (tap, channel): a step has one tap and BK of
//            its channels, so a row of the tile is one pixel's, 16 bytes a copy (cp.async), with zeros
//            where the tap falls outside; STAGES - 1 steps are on their way. The tile of sums goes
//            through shared memory, so that bias, suffix and stores take 16 bytes a thread. float32 is
//            multiplied as tf32 (SPLIT_BF16 0), or as bf16 hi + lo, of which hi.hi + hi.lo + lo.hi are summed.
// Inputs   : x T [n, d, h, w, groups * channels] by the strides sn, sz, sy, sx of images, sheets, rows and pixels
//            (multiples of 16 bytes), weight T [groups * filters, TAPS, ldw], of whose last axis the first
//            `channels` count and the others are 0, bias T or null.
// Outputs  : y T [n, od, oh, ow, groups * filters], or part f32 [splits, ...] where SPLIT (finish.cu).
// Macros   : T BM BN (pixels and filters of a block), WM WN (of a warp), BK STAGES, SPLIT_BF16, geometry.cuh's, SPLIT,
//            DEEP (three axes), VEC (8 where filters are a multiple of 8, else 1), ACT, suffix.cuh's.
// Launch   : pixel tiles * filter tiles * groups x 1 x splits blocks of 32 BM BN / (WM WN) threads.
// Numerics : f32 accumulate, one rounding.
// Bound    : mma.sync's rate (about half of wgmma's on Hopper).
#include "sm80.cuh"
#include "conv/geometry.cuh"
#include "conv/suffix.cuh"

typedef T Element;
constexpr int WARPS_N = BN / WN, THREADS = 32 * (BM / WM) * WARPS_N;
constexpr int PIECE = 16 / sizeof(T), STEP = SPLIT_BF16 ? 16 : 2 * PIECE;  // elements of a copy, of a product's k
constexpr int PITCH = BK + PIECE, CHUNKS = BK / PIECE, ROWS = THREADS / CHUNKS;  // rows copied at once
constexpr int A_ROWS = BM / ROWS, B_ROWS = BN / ROWS, MT = WM / 16, NT = WN / 8;
constexpr int STAGE = (BM + BN) * PITCH, OUT = BN + 4;
static_assert(A_ROWS > 0 && B_ROWS > 0 && NT % 2 == 0, "tile and threads");

DEVICE void split(u32 x0, u32 x1, u32& hi, u32& lo) { split(__uint_as_float(x0), __uint_as_float(x1), hi, lo); }

extern "C" __global__ void __launch_bounds__(THREADS) conv_nhwc(
    const T* x, const T* weight, const T* bias, const T* slope, const T* e1, const T* e2, const T* e3, TY* y,
    float* part, i64 columns, int groups, int channels, int filters, int d, int h, int w, int od, int oh, int ow,
    i64 sn, int sz, int sy, int sx, int ldw, int chunk, float alpha) {
    after_previous_launch();
    extern __shared__ __align__(16) u8 memory[];
    T* tiles = (T*)memory;
    const int tiles_m = (filters + BN - 1) / BN, per = tiles_m * groups;
    const int g = blockIdx.x % per / tiles_m, m0 = blockIdx.x % tiles_m * BN;
    const i64 q0 = (i64)(blockIdx.x / per) * BM;
    const int per_tap = (channels + BK - 1) / BK, first = blockIdx.z * chunk;
    const int last = min(first + chunk, per_tap * TAPS);

    const int at = threadIdx.x % CHUNKS * PIECE, row0 = threadIdx.x / CHUNKS;
    const T* image[A_ROWS];
    int iz[A_ROWS], iy[A_ROWS], ix[A_ROWS];
    UNROLLED for (int i = 0; i < A_ROWS; i++) {
        const i64 q = q0 + row0 + i * ROWS;
        const i64 sheet = q / (oh * ow);
        const int p = q - sheet * (oh * ow);
        iz[i] = DEEP ? sheet % od * SD - PD : 0;
        iy[i] = q < columns ? p / ow * SH - PH : -(1 << 29);  // outside for every tap
        ix[i] = p % ow * SW - PW;
        image[i] = x + (q < columns ? (DEEP ? sheet / od : sheet) * sn : 0) + g * channels;
    }
    const T* filter = weight + (i64)(g * filters + m0 + row0) * TAPS * ldw;
    int tap = first / per_tap, c0 = first % per_tap * BK + at;  // of the next step to be copied
    auto fill = [&](int step) {
        if (step < last) {
            T *to = tiles + step % STAGES * STAGE + row0 * PITCH + at, *to_b = to + BM * PITCH;
            const int dz = tap / (KH * KW) * DD, dy = tap / KW % KH * DH, dx = tap % KW * DW, left = channels - c0;
            const int bytes = left >= PIECE ? 16 : left > 0 ? left * (int)sizeof(T) : 0;
            UNROLLED for (int i = 0; i < A_ROWS; i++) {
                const int zz = DEEP ? iz[i] + dz : 0, yy = iy[i] + dy, xx = ix[i] + dx;
                const bool in = (unsigned)yy < (unsigned)h && (unsigned)xx < (unsigned)w && bytes &&
                                (!DEEP || (unsigned)zz < (unsigned)d);
                cp_async_16(smem_address(to + i * ROWS * PITCH),
                            in ? image[i] + (i64)zz * sz + (i64)yy * sy + xx * sx + c0 : x, in ? bytes : 0);
            }
            UNROLLED for (int i = 0; i < B_ROWS; i++) {
                const bool in = m0 + row0 + i * ROWS < filters && c0 < ldw;
                cp_async_16(smem_address(to_b + i * ROWS * PITCH),
                            in ? filter + ((i64)i * ROWS * TAPS + tap) * ldw + c0 : weight, in ? 16 : 0);
            }
            if ((c0 += BK) >= per_tap * BK) c0 = at, tap++;
        }
        cp_async_commit();
    };
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int wm = warp / WARPS_N * WM, wn = warp % WARPS_N * WN;
    float acc[MT][NT][4] = {};
    UNROLLED for (int s = 0; s < STAGES - 1; s++) fill(first + s);
    for (int step = first; step < last; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        fill(step + STAGES - 1);
        const T* a = tiles + step % STAGES * STAGE + (wm + lane % 16) * PITCH + lane / 16 * PIECE;
        const T* b = tiles + step % STAGES * STAGE + (BM + wn + lane % 16) * PITCH + lane / 16 * PIECE;
        UNROLLED for (int k = 0; k < BK; k += STEP) {
            u32 fa[MT][4], fb[NT / 2][4];
            UNROLLED for (int i = 0; i < MT; i++) ldmatrix_x4<false>(fa[i], smem_address(a + i * 16 * PITCH + k));
            UNROLLED for (int j = 0; j < NT / 2; j++) ldmatrix_x4<false>(fb[j], smem_address(b + j * 16 * PITCH + k));
#if SPLIT_BF16
            // k is in another order than in memory, the same one for both operands
            u32 la[MT][4], lb[NT / 2][4];
            UNROLLED for (int i = 0; i < MT; i++) {
                u32 more[4];
                ldmatrix_x4<false>(more, smem_address(a + i * 16 * PITCH + k + 8));
                split(fa[i][0], fa[i][2], fa[i][0], la[i][0]), split(fa[i][1], fa[i][3], fa[i][1], la[i][1]);
                split(more[0], more[2], fa[i][2], la[i][2]), split(more[1], more[3], fa[i][3], la[i][3]);
            }
            UNROLLED for (int j = 0; j < NT / 2; j++) {
                u32 more[4];
                ldmatrix_x4<false>(more, smem_address(b + j * 16 * PITCH + k + 8));
                split(fb[j][0], fb[j][2], fb[j][0], lb[j][0]), split(fb[j][1], fb[j][3], fb[j][1], lb[j][1]);
                split(more[0], more[2], fb[j][2], lb[j][2]), split(more[1], more[3], fb[j][3], lb[j][3]);
            }
            UNROLLED for (int i = 0; i < MT; i++)
                UNROLLED for (int j = 0; j < NT; j++) {
                    const u32 two[2] = {fb[j / 2][j % 2], fb[j / 2][j % 2 + 2]};
                    const u32 low[2] = {lb[j / 2][j % 2], lb[j / 2][j % 2 + 2]};
                    mma(acc[i][j], la[i], two, bf16());
                    mma(acc[i][j], fa[i], low, bf16());
                    mma(acc[i][j], fa[i], two, bf16());
                }
#else
            if (sizeof(T) == 4) {
                UNROLLED for (int q = 0; q < 4; q++) {
                    UNROLLED for (int i = 0; i < MT; i++) fa[i][q] = to_tf32(__uint_as_float(fa[i][q]));
                    UNROLLED for (int j = 0; j < NT / 2; j++) fb[j][q] = to_tf32(__uint_as_float(fb[j][q]));
                }
            }
            UNROLLED for (int i = 0; i < MT; i++)
                UNROLLED for (int j = 0; j < NT; j++) {
                    const u32 two[2] = {fb[j / 2][j % 2], fb[j / 2][j % 2 + 2]};
                    mma(acc[i][j], fa[i], two, Element());
                }
#endif
        }
    }
    cp_async_wait<0>();
    __syncthreads();
    float* sums = (float*)memory;
    UNROLLED for (int i = 0; i < MT; i++)
        UNROLLED for (int j = 0; j < NT; j++)
            UNROLLED for (int e = 0; e < 2; e++) {
                const int r = wm + i * 16 + e * 8 + lane / 4, n = wn + j * 8 + lane % 4 * 2;
                *(float2*)(sums + r * OUT + n) = {acc[i][j][e * 2], acc[i][j][e * 2 + 1]};
            }
    __syncthreads();
    for (int i = threadIdx.x; i < BM * BN / VEC; i += THREADS) {
        const int r = i / (BN / VEC), n = i % (BN / VEC) * VEC, f = g * filters + m0 + n;
        if (q0 + r >= columns || m0 + n >= filters) continue;
        const i64 to = (q0 + r) * groups * filters + f;
        float v[VEC];
        UNROLLED for (int j = 0; j < VEC; j++) v[j] = sums[r * OUT + n + j];
#if SPLIT
        float* mine = part + blockIdx.z * (columns * groups * filters) + to;
        UNROLLED for (int j = 0; j < VEC; j++) mine[j] = v[j];
#else
        if (bias) {
            const Vec<T, VEC> b = load<VEC>(bias + f);
            UNROLLED for (int j = 0; j < VEC; j++) v[j] += to_float(b.at[j]);
        }
        if (SLOPE)
            UNROLLED for (int j = 0; j < VEC; j++) v[j] = act<T>(v[j], slope_of(slope, f + j, alpha));
        else if (ACTIVE) activate<T>(v, alpha);
        const Vec<T, VEC> a = load<VEC>(OPERANDS > 0 ? e1 + to : x);
        const Vec<T, VEC> b = load<VEC>(OPERANDS > 1 ? e2 + to : x);
        const Vec<T, VEC> c = load<VEC>(OPERANDS > 2 ? e3 + to : x);
        Vec<TY, VEC> out;
        UNROLLED for (int j = 0; j < VEC; j++) {
            const float v1 = to_float(a.at[j]), v2 = to_float(b.at[j]), v3 = to_float(c.at[j]);
            out.at[j] = narrow<TY>((typename Accumulator<TY>::type)SUFFIX(v[j], v1, v2, v3));
        }
        store<VEC>(y + to, out);
#endif
    }
}
