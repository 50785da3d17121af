// conv/grouped_sm80.cu: Conv of channels-last 16-bit images in groups of as many filters as channels, 4 to 64.
// Idea     : a block has GROUPS groups and goes from tile to tile of TH x TW pixels of y. The part of x under a tile
//            goes to shared memory (cp.async; the next tile's is on its way meanwhile), and ldmatrix gathers
//            the pixels under a tap from where they stand. A warp has 16 pixels and NT times 8 filters, whose
//            weights stay in its registers. Groups of 4: a product has two of them, and for each of the two the
//            other's channels are zeros, so that no group's infinities and NaNs reach another.
// Inputs   : x T [n, h, w, channels] by the strides sn, sy, sx of images, rows and pixels (multiples of 8
//            elements), weight T [channels, KH * KW, CHANNELS], bias T or null.
// Outputs  : y T [n, oh, ow, channels].
// Macros   : T (16 bits) CHANNELS (of a group: 4 or a multiple of 8) GROUPS (a block's) NT (8 channels and less:
//            2, else a divisor of CHANNELS / 8) TH TW WM (warps side by side along the pixels) STAGES (1 or 2),
//            geometry.cuh's, ACT, suffix.cuh's.
// Launch   : (some blocks, groups / GROUPS) of 32 WM WN threads.
// Numerics : f32 accumulate, one rounding; the order depends on the filter alone.
// Bound    : HBM, then ldmatrix (one of 16 x 16 elements for NT products of 16 x 8 x 16).
#include "sm80.cuh"
#include "conv/geometry.cuh"
#include "conv/suffix.cuh"

constexpr bool PAIRED = CHANNELS == 4;  // two groups share a product's 8 columns
constexpr int DEPTH = PAIRED ? 8 : CHANNELS, SLAB = GROUPS * CHANNELS;
constexpr int WN = SLAB / 8 / NT, THREADS = 32 * WM * WN, KS = DEPTH / 8, HALVES = PAIRED ? 2 : 1;
constexpr int HIGH = (TH - 1) * SH + (KH - 1) * DH + 1, WIDE = (TW - 1) * SW + (KW - 1) * DW + 1;
constexpr int PITCH = SLAB + (SLAB / 8 % 2 ? 16 : 8);  // an odd number of 16 bytes: no two rows in the same banks
constexpr int STAGE = HIGH * WIDE * PITCH + 8, MT = (TH * TW + 15) / 16, PIECES = SLAB / 8;
static_assert(SLAB % (8 * NT) == 0 && (DEPTH == 8 ? NT == 2 : KS % NT == 0), "warps and groups");

extern "C" __global__ void __launch_bounds__(THREADS) conv_grouped(
    const T* x, const T* weight, const T* bias, const T* slope, const T* e1, const T* e2, const T* e3, TY* y, i64 tiles,
    int channels, int h, int w, int oh, int ow, i64 sn, int sy, int sx, float alpha) {
    after_previous_launch();
    extern __shared__ __align__(16) u8 memory[];
    T* images = (T*)memory;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp / WN, wn = warp % WN;
    const int c0 = blockIdx.y * SLAB, f0 = wn * NT * 8;  // the block's first channel, the warp's first filter in it
    const int across = (ow + TW - 1) / TW, down = (oh + TH - 1) / TH;
    auto fetch = [&](i64 tile, int stage) {
        if (tile < tiles) {
            const int y0 = tile / across % down * TH * SH - PH, x0 = tile % across * TW * SW - PW;
            const T* from = x + tile / across / down * sn + c0;
            for (int i = threadIdx.x; i < HIGH * WIDE * PIECES; i += THREADS) {
                const int pixel = i / PIECES, at = i % PIECES * 8;
                const int yy = y0 + pixel / WIDE, xx = x0 + pixel % WIDE;
                const bool in = (unsigned)yy < (unsigned)h && (unsigned)xx < (unsigned)w;
                cp_async_16(smem_address(images + stage * STAGE + pixel * PITCH + at),
                            in ? from + (i64)yy * sy + xx * sx + at : x, in ? 16 : 0);
            }
        }
        cp_async_commit();
    };
    fetch(blockIdx.x, 0);
    u32 taps[TAPS][KS][NT];
    {
        const int n = lane / 4, k = lane % 4 * 2;
        UNROLLED for (int j = 0; j < NT; j++) {
            const T* from = weight + (i64)(c0 + f0 + j * 8 + n) * TAPS * CHANNELS + k % CHANNELS;
            UNROLLED for (int t = 0; t < TAPS; t++)
                UNROLLED for (int s = 0; s < KS; s++)
                    taps[t][s][j] = PAIRED && n / 4 != k / 4 ? 0 : *(const u32*)(from + t * CHANNELS + s * 8);
        }
    }
    int stage = 0;
    for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        if (STAGES > 1) fetch(tile + gridDim.x, stage ^ 1);
        cp_async_wait<STAGES - 1>();
        __syncthreads();
        // NT filters share a group's channels, or have 8 each
        const T* image = images + stage * STAGE + (DEPTH == 8 ? f0 : f0 / CHANNELS * CHANNELS) + lane / 16 * 8;
        const int oy = tile / across % down * TH, ox = tile % across * TW;
        const i64 row0 = tile / across / down * oh;
        for (int m = wm; m < MT; m += WM) {
            const int p = min(m * 16 + lane % 16, TH * TW - 1);
            const T* from = image + (p / TW * SH * WIDE + p % TW * SW) * PITCH;
            float acc[HALVES][NT][4] = {};
            UNROLLED for (int t = 0; t < TAPS; t++)
                UNROLLED for (int s = 0; s < KS; s += 2) {
                    u32 a[4];
                    ldmatrix_x4<false>(a, smem_address(from + (t / KW * DH * WIDE + t % KW * DW) * PITCH + s * 8));
                    UNROLLED for (int j = 0; j < NT; j++) {
                        const u32 *b = taps[t][s] + j, *own = a + (DEPTH == 8 ? j * 2 : 0);
                        if (PAIRED) {
                            const bool low = lane % 4 < 2;
                            mma_8(acc[0][j], low ? own[0] : 0, low ? own[1] : 0, *b, T());
                            mma_8(acc[HALVES - 1][j], low ? 0 : own[0], low ? 0 : own[1], *b, T());
                        } else if (s + 1 < KS) {
                            const u32 both[2] = {*b, taps[t][s + 1 < KS ? s + 1 : s][j]};
                            mma(acc[0][j], a, both, T());
                        } else {
                            mma_8(acc[0][j], own[0], own[1], *b, T());
                        }
                    }
                }
            UNROLLED for (int j = 0; j < NT; j++) {
                const int f = c0 + f0 + j * 8 + lane % 4 * 2;
                float add[2] = {};
                if (bias) add[0] = to_float(bias[f]), add[1] = to_float(bias[f + 1]);
                float v[4];
                UNROLLED for (int e = 0; e < 4; e++)
                    v[e] = (PAIRED && lane % 4 > 1 ? acc[HALVES - 1][j][e] : acc[0][j][e]) + add[e % 2];
                if (!SLOPE && ACTIVE) activate<T>(v, alpha);
                UNROLLED for (int r = 0; r < 2; r++) {
                    const int q = m * 16 + r * 8 + lane / 4, yy = oy + q / TW, xx = ox + q % TW;
                    if (q >= TH * TW || yy >= oh || xx >= ow) continue;
                    const i64 to = ((row0 + yy) * ow + xx) * channels + f;
                    Vec<TY, 2> out;
                    UNROLLED for (int e = 0; e < 2; e++) {
                        const float z = v[r * 2 + e];
                        const float last = SLOPE ? act<T>(z, slope_of(slope, f + e, alpha)) : z;
                        out.at[e] = finished(last, e1, e2, e3, to + e);
                    }
                    store<2>(y + to, out);
                }
            }
        }
        __syncthreads();
        if (STAGES > 1)
            stage ^= 1;
        else
            fetch(tile + gridDim.x, 0);
    }
}
