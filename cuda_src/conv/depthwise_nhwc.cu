// conv/depthwise_nhwc.cu: depthwise Conv of channels-last images: y[p, c] = sum over taps of x[p + tap, c] w[tap, c].
// Idea     : a thread has PAIRS times two neighbouring channels and WIDE outputs of a row: the inputs of a row
//            of the filter are loaded once and serve all of them, the next row's are on their way meanwhile.
//            A warp reads whole lines of pixels; rows that other warps read again come from L1.
// Inputs   : x T [n, h, w, channels], weight T [KH * KW, channels], bias T or null; channels are a multiple
//            of 2 PAIRS.
// Outputs  : y T [n, oh, ow, channels].
// Macros   : T (16 bits) WIDE PAIRS, geometry.cuh's, ACT, suffix.cuh's.
// Launch   : 256 threads; the channels, then a run of WIDE outputs, a thread.
// Numerics : f32 sums, taps in order.   Bound: FMA rate (7 x 7), HBM (3 x 3).
#include "conv/geometry.cuh"
#include "conv/suffix.cuh"

constexpr int SPAN = (WIDE - 1) * SW + (KW - 1) * DW + 1;  // inputs of a row
constexpr int UNROLLED = KH <= 3 ? KH : 1;  // all rows of a small filter are asked for at once
typedef Vec<u32, PAIRS> Pairs;

extern "C" __global__ void __launch_bounds__(256, 2)
    conv_depthwise(const T* x, const T* weight, const T* bias, const T* slope, const T* e1, const T* e2,
                   const T* e3, TY* y, i64 size, int channels, int h, int w, int oh, int ow, i64 sn,
                   int sy, int sx, float alpha) {
    after_previous_launch();
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= size) return;
    const int groups = channels / (2 * PAIRS), runs = (ow + WIDE - 1) / WIDE;
    const int run = i / groups, c = (i - (i64)run * groups) * 2 * PAIRS;
    const int ox = run % runs * WIDE, oy = run / runs % oh, n = run / runs / oh;
    const int x0 = ox * SW - PW, y0 = oy * SH - PH;
    const T* image = x + n * sn + c;
    Pairs in[SPAN], filter[KW], next[SPAN], next_filter[KW];
    auto fetch = [&](int a) {
        const int yy = y0 + a * DH;
        const bool row = (unsigned)yy < (unsigned)h;
        const T* line = image + (row ? yy * sy : 0);
#pragma unroll
        for (int b = 0; b < SPAN; b++) {
            const int xx = x0 + b;
            next[b] = row && (unsigned)xx < (unsigned)w ? *(const Pairs*)(line + xx * sx) : Pairs();
        }
#pragma unroll
        for (int b = 0; b < KW; b++) next_filter[b] = *(const Pairs*)(weight + (a * KW + b) * channels + c);
    };
    float acc[WIDE][2 * PAIRS] = {};
    fetch(0);
#pragma unroll UNROLLED
    for (int a = 0; a < KH; a++) {
#pragma unroll
        for (int b = 0; b < SPAN; b++) in[b] = next[b];
#pragma unroll
        for (int b = 0; b < KW; b++) filter[b] = next_filter[b];
        if (a + 1 < KH) fetch(a + 1);
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            float2 f[KW];
#pragma unroll
            for (int b = 0; b < KW; b++) f[b] = unpack2<T>(filter[b].at[p]);
#pragma unroll
            for (int s = 0; s < SPAN; s++) {
                const float2 v = unpack2<T>(in[s].at[p]);
#pragma unroll
                for (int b = 0; b < KW; b++)
#pragma unroll
                    for (int j = 0; j < WIDE; j++)
                        if (j * SW + b * DW == s) {
                            acc[j][2 * p] += v.x * f[b].x;
                            acc[j][2 * p + 1] += v.y * f[b].y;
                        }
            }
        }
    }
    const Pairs add = bias ? *(const Pairs*)(bias + c) : Pairs();
#pragma unroll
    for (int j = 0; j < WIDE; j++) {
        if (ox + j >= ow) break;
        const i64 to = ((i64)(n * oh + oy) * ow + ox + j) * channels + c;
        Vec<TY, 2 * PAIRS> out;
#pragma unroll
        for (int p = 0; p < PAIRS; p++) {
            const float2 b = unpack2<T>(add.at[p]);
            acc[j][2 * p] += b.x, acc[j][2 * p + 1] += b.y;
        }
        if (!SLOPE && ACTIVE) activate<T>(acc[j], alpha);
#pragma unroll
        for (int k = 0; k < 2 * PAIRS; k++) {
            const float v = SLOPE ? act<T>(acc[j][k], slope_of(slope, c + k, alpha)) : acc[j][k];
            out.at[k] = finished(v, e1, e2, e3, to + k);
        }
        store<2 * PAIRS>(y + to, out);
    }
}
