// pool/grid_sample.cu: y[n, c, p] = x[n, c] sampled at grid[n, p] in [-1, 1]^RANK (last axis first).
// Idea     : a thread a (n, p): its taps and weights once, then a loop over channels.
// Inputs   : x T [n, channels, d, h, w]; grid G [n, points, RANK].   Output: y T [n, channels, points].
// Macros   : T G ACC RANK (2, 3), MODE (0 nearest, 1 linear, 2 cubic), PADDING (0 zeros, 1 border,
//            2 reflection), ALIGN (corners).
// Bound    : L2, taps an output.
#include "common.cuh"

// position of a coordinate among `size` samples
DEVICE ACC place(ACC u, int size) {
    return ALIGN ? (u + 1) / 2 * (ACC)(size - 1) : ((u + 1) * (ACC)size - 1) / 2;
}
DEVICE ACC reflect(ACC x, ACC low, ACC high) {
    const ACC range = high - low;
    if (range <= 0) return low;
    x = fabs(x - low);
    x -= 2 * range * floor(x / (2 * range));
    return low + (x > range ? 2 * range - x : x);
}
DEVICE ACC settle(ACC x, int size) {  // into the image, as PADDING has it
    if (PADDING == 1) x = fmin(fmax(x, (ACC)0), (ACC)(size - 1));
    if (PADDING == 2) {
        x = ALIGN ? reflect(x, 0, (ACC)(size - 1)) : reflect(x, (ACC)-0.5, (ACC)size - (ACC)0.5);
        x = fmin(fmax(x, (ACC)0), (ACC)(size - 1));
    }
    return x;
}
constexpr int TAPS_ = MODE == 0 ? 1 : MODE == 1 ? 2 : 4;
// indices (-1: a zero) and weights of one axis
DEVICE void axis_taps(ACC u, int size, int (&index)[TAPS_], ACC (&weight)[TAPS_]) {
    ACC at = place(u, size);
    if (MODE < 2) at = settle(at, size);  // cubic taps settle one by one
    const ACC base = MODE == 0 ? rint(at) : floor(at), f = at - base;
    const ACC a = (ACC)-0.75;
    UNROLLED for (int t = 0; t < TAPS_; t++) {
        ACC source = base + t - (MODE == 2);
        if (MODE == 2) source = settle(source, size);
        index[t] = source >= 0 && source < size ? (int)source : -1;
        const ACC d = fabs(f - (t - (MODE == 2)));
        weight[t] = MODE == 0 ? (ACC)1 : MODE == 1 ? 1 - d
                    : d <= 1  ? ((a + 2) * d - (a + 3)) * d * d + 1
                              : ((a * d - 5 * a) * d + 8 * a) * d - 4 * a;
    }
}

extern "C" __global__ void __launch_bounds__(128, 1)
    grid_sample(const T* x, const G* grid, T* y, i64 points, i64 batch, int channels, int d, int h, int w) {
    after_previous_launch();
    const i64 i = (i64)blockIdx.x * 128 + threadIdx.x;
    if (i >= points * batch) return;
    const G* u = grid + i * RANK;
    int iz[TAPS_] = {}, iy[TAPS_], ix[TAPS_];
    ACC wz[TAPS_] = {}, wy[TAPS_], wx[TAPS_];
    axis_taps((ACC)widen(u[0]), w, ix, wx);
    axis_taps((ACC)widen(u[1]), h, iy, wy);
    if (RANK == 3) axis_taps((ACC)widen(u[RANK - 1]), d, iz, wz);
    const i64 plane = (i64)d * h * w;
    const T* image = x + i / points * channels * plane;
    T* out = y + i / points * channels * points + i % points;
    for (int c = 0; c < channels; c++, image += plane, out += points) {
        ACC s = 0;
        UNROLLED for (int a = 0; a < (RANK == 3 ? TAPS_ : 1); a++)
            UNROLLED for (int b = 0; b < TAPS_; b++)
                UNROLLED for (int e = 0; e < TAPS_; e++)
                    if ((iz[a] | iy[b] | ix[e]) >= 0)
                        s += (RANK == 3 ? wz[a] : (ACC)1) * wy[b] * wx[e] *
                             (ACC)widen(image[((i64)iz[a] * h + iy[b]) * w + ix[e]]);
        *out = narrow<T>(s);
    }
}
