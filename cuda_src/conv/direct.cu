// conv/direct.cu: Conv and ConvTranspose with few filters a group (depthwise): no tile to share.
// Idea     : a thread an output, the sum over (channel, tap) in order, unrolled; inputs come from L1.
// Inputs, outputs: as conv/implicit.cu, unsplit.   Macros: T ACC ACT, suffix.cuh's, geometry.cuh's.
// Bound    : L1 loads, two an FMA.
#include "conv/geometry.cuh"
#include "conv/suffix.cuh"

extern "C" __global__ void __launch_bounds__(256) conv_direct(
    const T* x, const T* weight, const T* bias, const T* slope, const T* e1, const T* e2, const T* e3, TY* y, i64 size,
    int groups, int channels, int filters, int d, int h, int w, int od, int oh, int ow, float alpha) {
    after_previous_launch();
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= size) return;
    const int pixels = od * oh * ow, plane = d * h * w, p = i % pixels;
    const int ox = p % ow, oy = p / ow % oh, oz = p / (ow * oh);
    const int f = i / pixels % (groups * filters), g = f / filters, m = f % filters;
    const T* image = x + (i / pixels / (groups * filters) * groups + g) * channels * plane;
    ACC z = bias ? (ACC)widen(bias[f]) : (ACC)0;
    int xs[KW];  // the columns are the same at every row of the filter
    UNROLLED for (int c = 0; c < KW; c++) xs[c] = tap_input<SW, DW, PW>(ox, c, w);
    for (int c = 0; c < channels; c++)
        UNROLLED for (int a = 0; a < KD; a++) {
            const int iz = tap_input<SD, DD, PD>(oz, a, d);
            UNROLLED for (int b = 0; b < KH; b++) {
                const int iy = tap_input<SH, DH, PH>(oy, b, h);
                if ((iz | iy) < 0) continue;
                const T* line = image + (i64)c * plane + (iz * h + iy) * w;
                const i64 tap = weight_index(g, m, (c * KD + a) * KH * KW + b * KW, filters, channels);
                UNROLLED for (int e = 0; e < KW; e++)
                    if (xs[e] >= 0) z += (ACC)widen(weight[tap + e]) * (ACC)widen(line[xs[e]]);
            }
        }
    y[i] = finished(ACTIVE ? (ACC)act<T>((float)z, slope_of(slope, f, alpha)) : z, e1, e2, e3, i);
}
