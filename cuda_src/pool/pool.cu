// pool/pool.cu: y = max, mean or p-norm over windows of x[planes, d, h, w].
// Idea     : a thread an output, its window clipped to the input once; neighbours share cache lines.
// Inputs   : x, y T dense, three spatial axes (leading ones of size 1 where there are fewer).
// Outputs  : y; indices i64 (or null): position of the maximum in the whole of x, row-major, or
//            column-major within the plane where COLUMN_MAJOR.
// Macros   : T ACC MODE (0 max, 1 mean, 2 p-norm); KD KH KW, SD SH SW, DD DH DW (dilation), PD PH PW
//            (padding before), ED EH EW (padding after); INCLUDE_PAD, COLUMN_MAJOR.
// Numerics : max propagates NaN; sums in ACC, row-major order.
// Bound    : HBM; L1 for overlapping windows.
#include "reduce/team.cuh"

extern "C" __global__ void __launch_bounds__(256)
    pool(const T* x, T* y, i64* indices, i64 size, int d, int h, int w, int od, int oh, int ow, float p) {
    after_previous_launch();
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= size) return;
    const int ox = i % ow, oy = i / ow % oh, oz = i / ((i64)ow * oh) % od;
    const i64 plane = i / ((i64)ow * oh * od), base = plane * d * h * w;
    const int z0 = oz * SD - PD, y0 = oy * SH - PH, x0 = ox * SW - PW;
    ACC s = MODE ? (ACC)0 : -INFINITE;
    int count = 0;
    i64 best = -1;
    for (int a = 0; a < KD; a++) {
        const int iz = z0 + a * DD;
        for (int b = 0; b < KH; b++) {
            const int iy = y0 + b * DH;
            for (int c = 0; c < KW; c++) {
                const int ix = x0 + c * DW;
                // a window may pass the padding where ceil_mode rounds up: that part never counts
                if (INCLUDE_PAD) count += iz < d + ED && iy < h + EH && ix < w + EW;
                if ((unsigned)iz >= (unsigned)d || (unsigned)iy >= (unsigned)h || (unsigned)ix >= (unsigned)w)
                    continue;
                const ACC v = widen(x[base + ((i64)iz * h + iy) * w + ix]);
                if (!INCLUDE_PAD) count++;
                if (MODE == 1) s += v;
                if (MODE == 2) s += p == 2 ? v * v : p == 1 ? fabs(v) : pow(fabs(v), (ACC)p);
                if (MODE == 0 && (best < 0 || !(s >= v || s != s))) {
                    s = v;
                    best = base + (COLUMN_MAJOR ? ((i64)ix * h + iy) * d + iz : ((i64)iz * h + iy) * w + ix);
                }
            }
        }
    }
    if (MODE == 1) s /= count;
    if (MODE == 2) s = p == 2 ? sqrt(s) : p == 1 ? s : pow(s, 1 / (ACC)p);
    y[i] = narrow<T>(s);
    if (indices) indices[i] = best;
}
