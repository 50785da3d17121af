// conv/mma_sm80.cu: Conv and ConvTranspose in 16-bit floats on mma.sync, any group, stride, padding.
// Idea     : implicit GEMM as implicit.cu, k = (tap, channel): within a step of 32 channels the tap is
//            one, so a gathered element costs one address and one predicate. Filters come packed by tap
//            (pack.cu) through cp.async; x through registers into a [k, pixel] tile, read transposed.
// Inputs   : x T [n, groups * channels, d, h, w], packed T [groups, TAPS, filters, padded], bias T or null.
// Outputs  : y T [n, groups * filters, od, oh, ow], or part f32 [splits, ...] where SPLIT (finish.cu).
// Macros   : T BM BN WM (warps along m; 8 in all), geometry.cuh's, SPLIT, ACT, suffix.cuh's.   Launch: 256 threads.
// Numerics : f32 accumulate, one rounding.
// Bound    : tensor core; the gather is 2-byte loads, one a thread for each 32 x BN / 256.
#include "sm80.cuh"
#include "conv/geometry.cuh"
#include "conv/suffix.cuh"

constexpr int BK = 32, PA = BK + 8, PB = BN + 8;          // pitches without bank conflicts
constexpr int WN = 8 / WM, MT = BM / WM / 16, NT = BN / WN / 8;  // 16 x 8 tiles of a warp
constexpr int ROWS = 256 / BN, LOADS = BK / ROWS;          // k rows gathered at once; loads a thread

extern "C" __global__ void __launch_bounds__(256)
    conv(const T* x, const T* packed, const T* bias, const T* slope, const T* e1, const T* e2,
         const T* e3, TY* y, float* part, i64 columns, int groups, int channels,
         int filters, int d, int h, int w, int od, int oh, int ow, int chunk, int padded, float alpha) {
    after_previous_launch();
    extern __shared__ __align__(16) T shared[];
    T *as = shared, *bs = as + 2 * BM * PA;
    const int tiles_m = (filters + BM - 1) / BM, g = blockIdx.y / tiles_m, m0 = blockIdx.y % tiles_m * BM;
    const i64 q0 = (i64)blockIdx.x * BN;
    const int per_tap = (channels + BK - 1) / BK, first = blockIdx.z * chunk;
    const int last = min(first + chunk, per_tap * TAPS);
    const int pixels = od * oh * ow, plane = d * h * w;

    const int column = threadIdx.x % BN, b_row = threadIdx.x / BN;
    const i64 q = q0 + column;
    const bool inside = q < columns;
    const int p = inside ? q % pixels : 0, ox = p % ow, oy = p / ow % oh, oz = p / (ow * oh);
    const T* image = x + ((inside ? q / pixels : 0) * groups + g) * channels * plane;

    u16 b[LOADS];
    auto fetch = [&](int step, int s) {
        const int tap = step / per_tap, c0 = step % per_tap * BK;
        for (int i = threadIdx.x; i < BM * BK / 8; i += 256) {
            const int m = i / (BK / 8), c = i % (BK / 8) * 8;
            const bool there = m0 + m < filters && c0 + c < padded;
            const T* from = packed + (((i64)g * TAPS + tap) * filters + m0 + m) * padded + c0 + c;
            cp_async_16(smem_address(as + (s * BM + m) * PA + c), there ? from : packed, there ? 16 : 0);
        }
        cp_async_commit();
        const int at = inside ? plane_offset(tap, oz, oy, ox, d, h, w) : -1;
        const T* from = image + (i64)(c0 + b_row) * plane + at;
        UNROLLED for (int i = 0; i < LOADS; i++)
            b[i] = at >= 0 && c0 + b_row + i * ROWS < channels ? from[(i64)i * ROWS * plane].bits : (u16)0;
    };
    auto stage = [&](int s) {
        UNROLLED for (int i = 0; i < LOADS; i++) bs[(s * BK + b_row + i * ROWS) * PB + column].bits = b[i];
    };
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, matrix = lane / 8, r = lane % 8;
    const int wm = warp / WN * MT * 16, wn = warp % WN * NT * 8;
    float acc[MT][NT][4] = {};
    fetch(first, 0);
    stage(0);
    for (int step = first, s = 0; step < last; step++, s ^= 1) {
        cp_async_wait<0>();
        __syncthreads();
        if (step + 1 < last) fetch(step + 1, s ^ 1);
        const T* a = as + (s * BM + wm + matrix % 2 * 8 + r) * PA + matrix / 2 * 8;
        const T* k = bs + (s * BK + matrix % 2 * 8 + r) * PB + wn + matrix / 2 * 8;
        UNROLLED for (int kk = 0; kk < BK; kk += 16) {
            u32 u[MT][4];
            UNROLLED for (int i = 0; i < MT; i++) ldmatrix_x4<false>(u[i], smem_address(a + i * 16 * PA + kk));
            UNROLLED for (int n = 0; n < NT; n += 2) {
                u32 v[4];
                ldmatrix_x4<true>(v, smem_address(k + kk * PB + n * 8));
                UNROLLED for (int i = 0; i < MT; i++) {
                    mma(acc[i][n], u[i], v, T());
                    mma(acc[i][n + 1], u[i], v + 2, T());
                }
            }
        }
        if (step + 1 < last) stage(s ^ 1);
    }
    UNROLLED for (int n = 0; n < NT; n++)
        UNROLLED for (int j = 0; j < 2; j++) {
            const i64 out = q0 + wn + n * 8 + lane % 4 * 2 + j;
            if (out >= columns) continue;
            const i64 base = out / pixels * groups * filters * pixels + out % pixels;
            UNROLLED for (int i = 0; i < 2 * MT; i++) {
                const int m = m0 + wm + i * 8 + lane / 4;
                if (m >= filters) continue;
                const float z = acc[i / 2][n][i % 2 * 2 + j];
                const i64 at = base + (i64)(g * filters + m) * pixels;
#if SPLIT
                part[blockIdx.z * (columns * groups * filters) + at] = z;
#else
                const float v = z + (bias ? to_float(bias[g * filters + m]) : 0.0f);
                y[at] = finished(act<T>(v, slope_of(slope, g * filters + m, alpha)), e1, e2, e3, at);
#endif
            }
        }
}
