// conv/weight_grad_sm80.cu: dw[m, tap, c] = sum over pixels p of dy[p, m] x[p + tap, c], 16 bits or tf32, mma.sync.
// Idea     : a product whose k are the output pixels and whose columns are (tap, channel): rows of both tiles
//            are pixels, 16 bytes of channels a copy (cp.async), zeros where a tap falls outside; both
//            operands are read transposed. A column's tap is fixed, so a thread works out one place a row.
//            STAGES - 1 steps of BK pixels are on their way. `chunk` pixels a block; weight_sum.cu adds
//            the parts.
// Inputs   : x T [n, h, w, groups * channels], `sn`, `sy`, `sx` between images, rows and pixels; dy T [n, oh, ow, groups * filters]; channels and filters are
//            multiples of 8. `plane` and `row` divide by oh * ow and by ow (Divide).
// Outputs  : part f32 [splits, groups * filters, TAPS * channels].
// Macros   : T (16 bits, or float) BM BN (filters and columns of a block) WM WN (of a warp) BK STAGES DENSE (x), geometry.cuh's.
// Launch   : tiles x splits blocks of 32 BM BN / (WM WN) threads.
// Numerics : f32 sums, pixels in order; float32 is rounded to tf32.
// Bound    : mma.sync's rate (about half of wgmma's on Hopper).
#include "sm80.cuh"
#include "conv/geometry.cuh"

// n / d as a high product and a shift, for n < 2^31.
struct Divide { u32 by, shift; };
DEVICE u32 quotient(u32 n, Divide d) { return (__umulhi(n, d.by) + n) >> d.shift; }

constexpr int WARPS_N = BN / WN, THREADS = 32 * (BM / WM) * WARPS_N;
constexpr bool WIDE = sizeof(T) == 2;                 // 16 bits: ldmatrix transposes; float32 is read one by one
constexpr int CHUNK = 16 / sizeof(T);
constexpr int PA = BM + 8, PB = BN + 8, STAGE = BK * (PA + PB);  // pitches without bank conflicts
constexpr int A_STEP = THREADS / (BM / CHUNK), B_STEP = THREADS / (BN / CHUNK);  // rows copied at once
constexpr int MT = WM / 16, NT = WN / 8;
constexpr bool POINTS = DENSE && TAPS == 1 && SH == 1 && SW == 1 && PH == 0 && PW == 0;
static_assert(BK % A_STEP == 0 && BK % B_STEP == 0 && NT % 2 == 0, "tile and threads");

extern "C" __global__ void __launch_bounds__(THREADS) conv_weight_grad(
    const T* x, const T* dy, float* part, u32 pixels, int groups, int channels, int filters, int h, int w, u32 plane_by,
    u32 plane_shift, u32 row_by, u32 row_shift, u32 plane, u32 row, u32 chunk, i64 sn, int sy, int sx) {
    after_previous_launch();
    extern __shared__ __align__(16) T tiles[];
    const int depth = TAPS * channels, tiles_n = (depth + BN - 1) / BN, tiles_m = (filters + BM - 1) / BM;
    const int g = blockIdx.x / (tiles_n * tiles_m);
    const int m0 = blockIdx.x / tiles_n % tiles_m * BM, n0 = blockIdx.x % tiles_n * BN;
    const u32 first = blockIdx.y * chunk, last = min(first + chunk, pixels);
    const Divide by_plane = {plane_by, plane_shift}, by_row = {row_by, row_shift};

    const int am = threadIdx.x % (BM / CHUNK) * CHUNK, a_row = threadIdx.x / (BM / CHUNK);
    const int bn = threadIdx.x % (BN / CHUNK) * CHUNK, b_row = threadIdx.x / (BN / CHUNK);
    const T* a_from = dy + g * filters + m0 + am;
    const int a_bytes = m0 + am < filters ? 16 : 0, a_pitch = groups * filters;
    const int tap = (n0 + bn) / channels, ky = tap / KW * DH - PH, kx = tap % KW * DW - PW;
    const T* b_from = x + g * channels + (n0 + bn) % channels;
    const bool b_in = n0 + bn < depth;
    auto fill = [&](u32 p0, int s) {
        if (p0 < last) {
            T *a = tiles + s * STAGE + a_row * PA + am, *b = tiles + s * STAGE + BK * PA + b_row * PB + bn;
            UNROLLED for (int i = 0; i < BK / A_STEP; i++) {
                const u32 p = p0 + a_row + i * A_STEP;
                const int bytes = p < last ? a_bytes : 0;
                cp_async_16(smem_address(a + i * A_STEP * PA), bytes ? a_from + (i64)p * a_pitch : dy, bytes);
            }
            UNROLLED for (int i = 0; i < BK / B_STEP; i++) {
                const u32 p = p0 + b_row + i * B_STEP;
                bool in = b_in && p < last;
                i64 at = (i64)p * sx;
                if (!POINTS) {
                    const u32 n = quotient(p, by_plane), q = p - n * plane, oy = quotient(q, by_row);
                    const int iy = (int)oy * SH + ky, ix = (int)(q - oy * row) * SW + kx;
                    in = in && (unsigned)iy < (unsigned)h && (unsigned)ix < (unsigned)w;
                    at = n * sn + (i64)iy * sy + (i64)ix * sx;
                }
                cp_async_16(smem_address(b + i * B_STEP * PB), in ? b_from + at : x, in ? 16 : 0);
            }
        }
        cp_async_commit();
    };
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = lane / 8, r = lane % 8;
    const int wm = warp / WARPS_N * WM, wn = warp % WARPS_N * WN;
    float acc[MT][NT][4] = {};
    UNROLLED for (int s = 0; s < STAGES - 1; s++) fill(first + s * BK, s);
    int s = 0;
    for (u32 p0 = first; p0 < last; p0 += BK) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        fill(p0 + (STAGES - 1) * BK, s ? s - 1 : STAGES - 1);
        if constexpr (WIDE) {
            const T* a = tiles + s * STAGE + (matrix / 2 * 8 + r) * PA + wm + matrix % 2 * 8;
            const T* b = tiles + s * STAGE + BK * PA + (matrix % 2 * 8 + r) * PB + wn + matrix / 2 * 8;
            UNROLLED for (int k = 0; k < BK; k += 16) {
                u32 u[MT][4], v[NT / 2][4];
                UNROLLED for (int i = 0; i < MT; i++) ldmatrix_x4<true>(u[i], smem_address(a + k * PA + i * 16));
                UNROLLED for (int j = 0; j < NT / 2; j++) ldmatrix_x4<true>(v[j], smem_address(b + k * PB + j * 16));
                UNROLLED for (int i = 0; i < MT; i++)
                    UNROLLED for (int j = 0; j < NT; j++) mma(acc[i][j], u[i], v[j / 2] + j % 2 * 2, T());
            }
        } else {
            const T* a = tiles + s * STAGE + lane % 4 * PA + wm + lane / 4;
            const T* b = tiles + s * STAGE + BK * PA + lane % 4 * PB + wn + lane / 4;
            UNROLLED for (int k = 0; k < BK; k += 8) {
                u32 u[MT][4];
                UNROLLED for (int i = 0; i < MT; i++)
                    UNROLLED for (int q = 0; q < 4; q++)
                        u[i][q] = to_tf32(to_float(a[(k + q / 2 * 4) * PA + i * 16 + q % 2 * 8]));
                UNROLLED for (int j = 0; j < NT; j++) {
                    const u32 v[2] = {to_tf32(to_float(b[k * PB + j * 8])), to_tf32(to_float(b[(k + 4) * PB + j * 8]))};
                    UNROLLED for (int i = 0; i < MT; i++) mma(acc[i][j], u[i], v, T());
                }
            }
        }
        s = s + 1 == STAGES ? 0 : s + 1;
    }
    cp_async_wait<0>();
    part += ((i64)blockIdx.y * groups + g) * filters * depth;
    UNROLLED for (int i = 0; i < 2 * MT; i++) {
        const int m = m0 + wm + i * 8 + lane / 4;
        if (m >= filters) continue;
        UNROLLED for (int j = 0; j < NT; j++) {
            const int n = n0 + wn + j * 8 + lane % 4 * 2;
            if (n < depth)
                *(float2*)(part + (i64)m * depth + n) =
                    make_float2(acc[i / 2][j][i % 2 * 2], acc[i / 2][j][i % 2 * 2 + 1]);
        }
    }
}
