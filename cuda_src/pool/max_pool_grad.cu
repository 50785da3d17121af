// pool/max_pool_grad.cu: the gradient of a MaxPool over windows of x [planes, d, h, w, channels].
// Idea     : no atomics and no positions kept. max_pool_codes looks for the first maximum of each window again and
//            notes its tap, a byte or two; max_pool_grad gathers: an element adds the gradients of the windows
//            that reach it, in the order of the outputs, where its own tap is the noted one.
// Inputs   : x, dy T dense, three spatial axes (leading ones of size 1 where there are fewer); VEC divides
//            channels, WIDE divides w; one of them is 1.
// Outputs  : code CODE as dy; dx T.
// Macros   : T ACC CODE VEC WIDE; INDEX (u32, which divides faster, where it counts all of x); KD KH KW, SD SH SW,
//            DD DH DW, PD PH PW as pool.cu's.
// Launch   : 256 threads, VEC outputs a thread (max_pool_codes); VEC channels or WIDE pixels (max_pool_grad).
// Numerics : sums in ACC. Bound: HBM, x and dy read, dx written.
#define TRANSPOSED 1
#include "conv/geometry.cuh"
#include "reduce/team.cuh"

extern "C" __global__ void __launch_bounds__(256)
    max_pool_codes(const T* x, CODE* code, i64 size, int channels, int d, int h, int w, int od, int oh, int ow) {
    after_previous_launch();
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= size) return;
    const INDEX per = channels / VEC, p = (INDEX)i / per, line = p / ow, sheet = line / oh, image = sheet / od;
    const int c = ((INDEX)i - p * per) * VEC;
    const int z0 = (int)(sheet - image * od) * SD - PD, y0 = (int)(line - sheet * oh) * SH - PH;
    const int x0 = (int)(p - line * ow) * SW - PW;
    const T* plane = x + image * ((i64)d * h * w * channels) + c;
    ACC most[VEC];
    Vec<CODE, VEC> best;
    UNROLLED for (int j = 0; j < VEC; j++) most[j] = -INFINITE, best.at[j] = (CODE)-1;
    for (int a = 0; a < KD; a++)
        for (int b = 0; b < KH; b++)
            for (int e = 0; e < KW; e++) {
                const int iz = z0 + a * DD, iy = y0 + b * DH, ix = x0 + e * DW;
                if ((unsigned)iz >= (unsigned)d || (unsigned)iy >= (unsigned)h || (unsigned)ix >= (unsigned)w)
                    continue;
                const Vec<T, VEC> v = load<VEC>(plane + (((i64)iz * h + iy) * w + ix) * channels);
                UNROLLED for (int j = 0; j < VEC; j++) {
                    const ACC value = widen(v.at[j]);
                    if (best.at[j] == (CODE)-1 || value > most[j])
                        most[j] = value, best.at[j] = (a * KH + b) * KW + e;
                }
            }
    store<VEC>(code + (i64)p * channels + c, best);
}

extern "C" __global__ void __launch_bounds__(256, 1) max_pool_grad(
    const T* dy, const CODE* code, T* dx, i64 size, int channels, int d, int h, int w, int od, int oh, int ow) {
    after_previous_launch();
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= size) return;
    const INDEX per = channels / VEC, q = (INDEX)i / per, across = w / WIDE, line = q / across, sheet = line / h;
    const int c = ((INDEX)i - q * per) * VEC, x0 = (q - line * across) * WIDE, iy = line - sheet * h;
    const i64 plane = sheet / d;
    const int iz = sheet - plane * d;
    ACC sum[WIDE * VEC] = {};
    for (int a = KD - 1; a >= 0; a--) {
        const int oz = tap_input<SD, DD, PD>(iz, a, od);
        if (oz < 0) continue;
        for (int b = KH - 1; b >= 0; b--) {
            const int oy = tap_input<SH, DH, PH>(iy, b, oh);
            if (oy < 0) continue;
            const i64 row = ((plane * od + oz) * oh + oy) * ow;
            ROLLED for (int e = KW - 1; e >= 0; e--)
                UNROLLED for (int j = 0; j < WIDE; j++) {
                    const int ox = tap_input<SW, DW, PW>(x0 + j, e, ow);
                    if (ox < 0) continue;
                    const i64 at = (row + ox) * channels + c;
                    const Vec<T, VEC> g = load<VEC>(dy + at);
                    const Vec<CODE, VEC> noted = load<VEC>(code + at);
                    UNROLLED for (int k = 0; k < VEC; k++)
                        if (noted.at[k] == (a * KH + b) * KW + e) sum[j * VEC + k] += (ACC)widen(g.at[k]);
                }
        }
    }
    Vec<T, WIDE * VEC> out;
    UNROLLED for (int k = 0; k < WIDE * VEC; k++) out.at[k] = narrow<T>(sum[k]);
    store<WIDE * VEC>(dx + (((plane * d + iz) * h + iy) * w + x0) * channels + c, out);
}
