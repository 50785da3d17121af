// conv/direct.cu: Conv and ConvTranspose with few filters a group (depthwise): no tile to share.
// Idea     : a thread an output, the sum over (channel, tap) in order; inputs come from L1.
// Inputs, outputs: as conv/implicit.cu, unsplit.   Macros: T ACC ACT, geometry.cuh's.
// Bound    : L1 loads, two an FMA.
#include "conv/geometry.cuh"
#ifndef ACT
#define ACT NONE
#endif

extern "C" __global__ void __launch_bounds__(256)
    conv_direct(const T* x, const T* weight, const T* bias, T* y, i64 size, int groups, int channels,
                int filters, int d, int h, int w, int od, int oh, int ow, float alpha) {
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= size) return;
    const int pixels = od * oh * ow, plane = d * h * w, p = i % pixels;
    const int ox = p % ow, oy = p / ow % oh, oz = p / (ow * oh);
    const int f = i / pixels % (groups * filters), g = f / filters, m = f % filters;
    const T* image = x + (i / pixels / (groups * filters) * groups + g) * channels * plane;
    ACC z = bias ? (ACC)widen(bias[f]) : (ACC)0;
    for (int c = 0; c < channels; c++)
        for (int tap = 0; tap < TAPS; tap++) {
            const int at = plane_offset(tap, oz, oy, ox, d, h, w);
            if (at >= 0)
                z += (ACC)widen(weight[weight_index(g, m, c * TAPS + tap, filters, channels)]) *
                     (ACC)widen(image[(i64)c * plane + at]);
        }
    y[i] = narrow<T>(ACT == NONE ? z : (ACC)act<ACT>((float)z, alpha));
}
