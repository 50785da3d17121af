// pool/col2im.cu: y[n, c, pixel] = sum of the columns' values that came from that pixel (Conv's im2col back).
// Idea     : a thread a pixel gathers, in the order of the taps, what a scatter would have added.
// Inputs   : x T [n, channels * TAPS, blocks od * oh * ow].   Output: y T [n, channels, d, h, w].
// Macros   : T ACC, geometry.cuh's (TRANSPOSED 1: a tap's block is (pixel + pad - tap * dilation) / stride).
// Bound    : HBM, x once.
#include "conv/geometry.cuh"

extern "C" __global__ void __launch_bounds__(256)
    col2im(const T* x, T* y, i64 size, int d, int h, int w, int od, int oh, int ow) {
    after_previous_launch();
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= size) return;
    const int px = i % w, py = i / w % h, pz = i / ((i64)w * h) % d, blocks = od * oh * ow;
    const T* from = x + i / ((i64)w * h * d) * TAPS * blocks;
    ACC s = 0;
    for (int tap = 0; tap < TAPS; tap++) {
        const int at = plane_offset(tap, pz, py, px, od, oh, ow);
        if (at >= 0) s += (ACC)widen(from[(i64)tap * blocks + at]);
    }
    y[i] = narrow<T>(s);
}
