// regions/deform_columns.cu: columns[n, c, tap, p] = mask * x[n, c] at the tap's place moved by its
// offset (ONNX DeformConv; https://arxiv.org/abs/1703.06211, with mask https://arxiv.org/abs/1811.11168).
// Idea     : a thread a (n, offset group, tap, p): the place and four weights once, then a loop over the
//            group's channels. The product with the weights is a Gemm behind it.
// Inputs   : x T [batch, channels, h, w]; offset T [batch, groups * taps * 2, pixels], y before x;
//            mask T [batch, groups * taps, pixels] or null.
// Output   : columns T [batch, channels, taps, pixels].
// Macros   : T ACC, KH KW SH SW DH DW PH PW (filter, strides, dilations, pads in front).
// Numerics : interpolated in ACC; pixels outside the image are 0.
// Bound    : L2, four pixels an element of the columns.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128, 1)
    deform_columns(const T* x, const T* offset, const T* mask, T* columns, i64 size, int channels,
                   int groups, int h, int w, int rows, int width) {
    after_previous_launch();
    const i64 i = (i64)blockIdx.x * 128 + threadIdx.x;
    if (i >= size) return;
    constexpr int TAPS = KH * KW;
    const i64 pixels = (i64)rows * width, p = i % pixels;
    const int tap = (int)(i / pixels % TAPS), group = (int)(i / pixels / TAPS % groups);
    const i64 n = i / pixels / TAPS / groups;
    const i64 place = (n * groups + group) * TAPS + tap;
    const ACC v = (ACC)((int)(p / width) * SH - PH + tap / KW * DH) + (ACC)widen(offset[place * 2 * pixels + p]);
    const ACC u = (ACC)((int)(p % width) * SW - PW + tap % KW * DW) + (ACC)widen(offset[(place * 2 + 1) * pixels + p]);
    const ACC scale = mask ? (ACC)widen(mask[place * pixels + p]) : (ACC)1;
    const bool inside = v > -1 && v < (ACC)h && u > -1 && u < (ACC)w;
    const int top = inside ? (int)floor(v) : 0, left = inside ? (int)floor(u) : 0;
    const ACC dy = v - (ACC)top, dx = u - (ACC)left;
    const ACC weight[4] = {(1 - dy) * (1 - dx), (1 - dy) * dx, dy * (1 - dx), dy * dx};
    const int each = channels / groups;
    for (int k = 0; k < each; k++) {
        const i64 c = n * channels + (i64)group * each + k;
        const T* image = x + c * h * w;
        ACC sum = 0;
        UNROLLED for (int t = 0; t < 4; t++) {
            const int a = top + t / 2, b = left + t % 2;
            if (inside && a >= 0 && a < h && b >= 0 && b < w) sum += weight[t] * (ACC)widen(image[(i64)a * w + b]);
        }
        columns[(c * TAPS + tap) * pixels + p] = narrow<T>(sum * scale);
    }
}
