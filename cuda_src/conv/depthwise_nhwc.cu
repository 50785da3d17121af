// conv/depthwise_nhwc.cu: depthwise Conv of channels-last images: y[p, c] = sum over taps of x[p + tap, c] w[tap, c].
// Idea     : a thread has two neighbouring channels and WIDE outputs of a row: the inputs of a row of the
//            filter are loaded once and serve all of them. A warp reads whole lines of pixels; rows of the
//            filter that neighbouring warps read again come from L1.
// Inputs   : x T [n, h, w, channels], weight T [KH * KW, channels], bias T or null; channels are even.
// Outputs  : y T [n, oh, ow, channels].
// Macros   : T (16 bits) WIDE, geometry.cuh's, ACT, suffix.cuh's.   Launch: 256 threads, a pair of channels,
//            then a run of WIDE outputs, a thread.
// Numerics : f32 sums, taps in order.   Bound: FMA rate (7 x 7), HBM (3 x 3).
#include "conv/geometry.cuh"
#include "conv/suffix.cuh"

constexpr int SPAN = (WIDE - 1) * SW + (KW - 1) * DW + 1;  // inputs of a row

extern "C" __global__ void __launch_bounds__(256, 2)
    conv_depthwise(const T* x, const T* weight, const T* bias, const T* slope, const T* e1, const T* e2,
                   const T* e3, TY* y, i64 size, int channels, int h, int w, int oh, int ow, i64 sn,
                   int sy, int sx, float alpha) {
    after_previous_launch();
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= size) return;
    const int pairs = channels / 2, runs = (ow + WIDE - 1) / WIDE, c = i % pairs * 2;
    const int ox = i / pairs % runs * WIDE, oy = i / pairs / runs % oh;
    const i64 n = i / pairs / runs / oh;
    const T* image = x + n * sn + c;
    const int x0 = ox * SW - PW;
    float acc[WIDE][2] = {};
#pragma unroll 1
    for (int a = 0; a < KH; a++) {
        const int yy = oy * SH - PH + a * DH;
        if ((unsigned)yy >= (unsigned)h) continue;
        const T* line = image + (i64)yy * sy;
        float2 in[SPAN];
#pragma unroll
        for (int b = 0; b < SPAN; b++) {
            const bool inside = (unsigned)(x0 + b) < (unsigned)w;
            const u32 two = inside ? *(const u32*)(line + (i64)(x0 + b) * sx) : 0u;
            in[b] = unpack2<T>(two);
        }
#pragma unroll
        for (int b = 0; b < KW; b++) {
            const float2 f = unpack2<T>(*(const u32*)(weight + (a * KW + b) * channels + c));
#pragma unroll
            for (int j = 0; j < WIDE; j++) {
                acc[j][0] += in[j * SW + b * DW].x * f.x;
                acc[j][1] += in[j * SW + b * DW].y * f.y;
            }
        }
    }
    float2 add = make_float2(0.0f, 0.0f);
    if (bias) add = unpack2<T>(*(const u32*)(bias + c));
#pragma unroll
    for (int j = 0; j < WIDE; j++) {
        if (ox + j >= ow) break;
        const i64 to = ((n * oh + oy) * ow + ox + j) * channels + c;
        float v[2] = {acc[j][0] + add.x, acc[j][1] + add.y};
        if (SLOPE)
            v[0] = act<T>(v[0], slope_of(slope, c, alpha)), v[1] = act<T>(v[1], slope_of(slope, c + 1, alpha));
        else if (ACTIVE) activate<T>(v, alpha);
        Vec<TY, 2> out = {finished(v[0], e1, e2, e3, to), finished(v[1], e1, e2, e3, to + 1)};
        store<2>(y + to, out);
    }
}
