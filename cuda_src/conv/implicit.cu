// conv/implicit.cu: Conv and ConvTranspose of 1 to 3 axes, any group, stride, dilation, padding.
// Idea     : implicit GEMM y[m, q] = sum_k w[m, k] x[k, q]: m filters of a group, q = (image, pixel),
//            the x operand gathered on its way to shared memory. BM x BN tiles,
//            8 x 8 (FRAGMENTS 2) or 4 x 4 outputs a thread, the next BK in registers meanwhile.
//            TAP_MAJOR: k = (tap, channel) over weights packed so (pack.cu), cheaper to gather; else
//            k = (channel, tap), which wastes nothing where there are few channels.
//            Few tiles: `chunk` of k a block, partial sums to `part`, finish.cu adds them in order.
// Inputs   : x T [n, groups * channels, d, h, w], weight T (geometry.cuh), bias T [groups * filters] or null.
// Outputs  : y T [n, groups * filters, od, oh, ow], or part ACC [splits, n, groups * filters, pixels].
// Macros   : T ACC BM BN BK FRAGMENTS, geometry.cuh's, TAP_MAJOR, SPLIT, ACT, suffix.cuh's.
// Launch   : BM * BN / 16 / FRAGMENTS^2 threads.
// Numerics : products and sums in ACC (IEEE), k in order.
// Bound    : FMA rate; the gather (30 instructions an element unless TAP_MAJOR).
#include "conv/geometry.cuh"
#include "conv/suffix.cuh"
#define THREADS (BM * BN / (16 * FRAGMENTS * FRAGMENTS))

extern "C" __global__ void __launch_bounds__(THREADS, 3 - FRAGMENTS)
    conv(const T* x, const T* weight, const T* bias, const T* slope, const T* e1, const T* e2,
         const T* e3, TY* y, ACC* part, i64 columns, int groups, int channels,
         int filters, int d, int h, int w, int od, int oh, int ow, int chunk, int padded, float alpha) {
    after_previous_launch();
    __shared__ __align__(16) ACC as[2][BK][BM + 4], bs[2][BK][BN + 4];
    constexpr int A_LOADS = BM * BK / THREADS, B_LOADS = BN * BK / THREADS;
    const int tiles_m = (filters + BM - 1) / BM, g = blockIdx.y / tiles_m;
    const int m0 = blockIdx.y % tiles_m * BM;
    const i64 q0 = (i64)blockIdx.x * BN;
    const int depth = (TAP_MAJOR ? padded : channels) * TAPS, first = blockIdx.z * chunk, last = min(first + chunk, depth);
    const int pixels = od * oh * ow, plane = d * h * w;

    // The column this thread gathers is the same at every k.
    const int column = threadIdx.x % BN, b_row = threadIdx.x / BN;
    const i64 q = q0 + column;
    const bool inside = q < columns;
    const int p = inside ? q % pixels : 0, ox = p % ow, oy = p / ow % oh, oz = p / (ow * oh);
    const T* image = x + ((inside ? q / pixels : 0) * groups + g) * channels * plane;
    const int a_k = threadIdx.x % BK, a_row = threadIdx.x / BK;

    ACC a[A_LOADS], b[B_LOADS], acc[4 * FRAGMENTS][4 * FRAGMENTS] = {};
    auto fetch = [&](int k0) {
#if TAP_MAJOR
        // BK divides `padded`: one tap a step, and an element costs one address and one predicate
        const int tap = k0 / padded, c0 = k0 % padded, at = inside ? plane_offset(tap, oz, oy, ox, d, h, w) : -1;
        const T* filter = weight + (((i64)g * TAPS + tap) * filters + m0 + a_row) * padded + c0 + a_k;
        UNROLLED for (int i = 0; i < A_LOADS; i++) {
            const int m = a_row + i * (THREADS / BK);
            a[i] = m0 + m < filters ? (ACC)widen(filter[(i64)i * (THREADS / BK) * padded]) : (ACC)0;
        }
        UNROLLED for (int i = 0; i < B_LOADS; i++) {
            const int c = c0 + b_row + i * (THREADS / BN);
            b[i] = at >= 0 && c < channels ? (ACC)widen(image[(i64)c * plane + at]) : (ACC)0;
        }
#else
        UNROLLED for (int i = 0; i < A_LOADS; i++) {
            const int k = k0 + a_k, m = m0 + a_row + i * (THREADS / BK);
            a[i] = k < last && m < filters ? (ACC)widen(weight[weight_index(g, m, k, filters, channels)]) : (ACC)0;
        }
        UNROLLED for (int i = 0; i < B_LOADS; i++) {
            const int k = k0 + b_row + i * (THREADS / BN);
            const int at = plane_offset(k % TAPS, oz, oy, ox, d, h, w);
            b[i] = inside && k < last && at >= 0 ? (ACC)widen(image[(i64)(k / TAPS) * plane + at]) : (ACC)0;
        }
#endif
    };
    auto stage = [&](int s) {
        UNROLLED for (int i = 0; i < A_LOADS; i++) as[s][a_k][a_row + i * (THREADS / BK)] = a[i];
        UNROLLED for (int i = 0; i < B_LOADS; i++) bs[s][b_row + i * (THREADS / BN)][column] = b[i];
    };
    const int tx = threadIdx.x % (BN / 4 / FRAGMENTS), ty = threadIdx.x / (BN / 4 / FRAGMENTS);
    fetch(first);
    stage(0);
    __syncthreads();
    for (int k0 = first, s = 0; k0 < last; k0 += BK, s ^= 1) {
        if (k0 + BK < last) fetch(k0 + BK);
        UNROLLED for (int k = 0; k < BK; k++) {
            ACC u[4 * FRAGMENTS], v[4 * FRAGMENTS];
            UNROLLED for (int f = 0; f < FRAGMENTS; f++)
                UNROLLED for (int j = 0; j < 4; j++) {
                    u[f * 4 + j] = as[s][k][f * (BM / 2) + ty * 4 + j];
                    v[f * 4 + j] = bs[s][k][f * (BN / 2) + tx * 4 + j];
                }
            UNROLLED for (int i = 0; i < 4 * FRAGMENTS; i++)
                UNROLLED for (int j = 0; j < 4 * FRAGMENTS; j++) acc[i][j] += u[i] * v[j];
        }
        if (k0 + BK < last) stage(s ^ 1);
        __syncthreads();
    }
    UNROLLED for (int j = 0; j < 4 * FRAGMENTS; j++) {
        const i64 out_q = q0 + j / 4 * (BN / 2) + tx * 4 + j % 4;
        if (out_q >= columns) continue;
        const i64 base = out_q / pixels * groups * filters * pixels + out_q % pixels;
        UNROLLED for (int i = 0; i < 4 * FRAGMENTS; i++) {
            const int m = m0 + i / 4 * (BM / 2) + ty * 4 + i % 4;
            if (m >= filters) continue;
            const i64 at = base + (i64)(g * filters + m) * pixels;
#if SPLIT
            part[blockIdx.z * (columns * groups * filters) + at] = acc[i][j];
#else
            const ACC z = acc[i][j] + (bias ? (ACC)widen(bias[g * filters + m]) : (ACC)0);
            const float a = slope_of(slope, g * filters + m, alpha);
            y[at] = finished(ACTIVE ? (ACC)act<T>((float)z, a) : z, e1, e2, e3, at);
#endif
        }
    }
}
