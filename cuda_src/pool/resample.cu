// pool/resample.cu: y[o, i, n] = sum_t weight[i, t] x[o, source[i, t], n]: one axis of a Resize.
// Idea     : the host works out sources and weights (they depend on sizes and attributes alone);
//            nearest, linear, cubic, antialiased: all the same kernel. Source -1: `outside`.
// Inputs   : x X, y Y [outer, length, inner]; source i32, weight f32 [resized, taps].
// Macros   : X Y ACC TAPS.   Bound: HBM, x (cached) and y once.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    resample(const X* x, const int* source, const float* weight, Y* y, i64 size, i64 length, i64 resized,
             i64 inner, float outside) {
    after_previous_launch();
    const i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= size) return;
    const i64 n = at % inner, i = at / inner % resized, o = at / inner / resized;
    ACC s = 0;
    bool out = false;
    for (int t = 0; t < TAPS; t++) {
        const int from = source[i * TAPS + t];
        out |= from < 0;
        const float w = weight[i * TAPS + t];
        if (from >= 0 && w != 0) s += (ACC)w * (ACC)widen(x[(o * length + from) * inner + n]);
    }
    y[at] = out ? narrow<Y>((ACC)outside) : narrow<Y>(s);
}
