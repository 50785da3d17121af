// conv/depthwise_nhwc.cu: depthwise Conv of channels-last images: y[p, c] = sum over taps of x[p + tap, c] w[tap, c].
// Idea     : a thread has PAIRS times two neighbouring channels and TALL x WIDE outputs: an input is loaded
//            and converted once and serves all of them. The next row of inputs is on its way meanwhile.
//            A warp reads whole lines of pixels; rows that other warps read again come from L1. The
//            block's weights stand in shared memory as f32, for all tiles that it takes, one after another.
// Inputs   : x T [n, h, w, channels], weight T [KH * KW, channels], bias T or null; channels are a multiple
//            of 2 PAIRS.
// Outputs  : y T [n, oh, ow, channels].
// Macros   : T (16 bits) WIDE TALL PAIRS LANES (threads side by side along the channels), geometry.cuh's, ACT,
//            suffix.cuh's.
// Launch   : x: as many blocks as stay busy, 256 / LANES tiles of outputs at a time; y: LANES * 2 * PAIRS channels
//            a block; 256 threads.
// Numerics : f32 sums, taps in order.   Bound: instructions (7 x 7), HBM (3 x 3).
#include "conv/geometry.cuh"
#include "conv/suffix.cuh"

constexpr int SPAN = (WIDE - 1) * SW + (KW - 1) * DW + 1;  // inputs of a row
constexpr int DEEP = (TALL - 1) * SH + (KH - 1) * DH + 1;  // rows of inputs
constexpr int OWN = 2 * PAIRS, CHANNELS = LANES * OWN;     // of a thread, of a block
constexpr int ROWS_AT_ONCE = DEEP <= 4 ? DEEP : 1;  // all rows of a small filter are asked for at once
typedef Vec<u32, PAIRS> Pairs;

extern "C" __global__ void __launch_bounds__(256, 2) conv_depthwise(
    const T* x, const T* weight, const T* bias, const T* slope, const T* e1, const T* e2, const T* e3, TY* y, i64 tiles,
    int channels, int h, int w, int oh, int ow, i64 sn, int sy, int sx, float alpha) {
    after_previous_launch();
    __shared__ __align__(16) float filter[TAPS][CHANNELS];
    const int c0 = blockIdx.y * CHANNELS, lane = threadIdx.x % LANES, c = c0 + lane * OWN;
    for (int i = threadIdx.x; i < TAPS * CHANNELS; i += 256) {
        const int k = c0 + i % CHANNELS;
        filter[i / CHANNELS][i % CHANNELS] = k < channels ? to_float(weight[i / CHANNELS * channels + k]) : 0.0f;
    }
    __syncthreads();
    if (c >= channels) return;
    const int across = (ow + WIDE - 1) / WIDE, down = (oh + TALL - 1) / TALL;
    const Pairs add = bias ? *(const Pairs*)(bias + c) : Pairs();
    ROLLED for (i64 tile = (i64)blockIdx.x * (256 / LANES) + threadIdx.x / LANES; tile < tiles;
         tile += (i64)gridDim.x * (256 / LANES)) {
        const int ox = tile % across * WIDE, oy = tile / across % down * TALL;
        const i64 n = tile / across / down;
        const int x0 = ox * SW - PW, y0 = oy * SH - PH;
        const T* image = x + n * sn + c;
        Pairs in[SPAN], next[SPAN];
        auto fetch = [&](int a) {
            const int yy = y0 + a;
            const bool row = (unsigned)yy < (unsigned)h;
            const T* line = image + (row ? yy * sy : 0);
            UNROLLED for (int b = 0; b < SPAN; b++) {
                const int xx = x0 + b;
                next[b] = row && (unsigned)xx < (unsigned)w ? *(const Pairs*)(line + xx * sx) : Pairs();
            }
        };
        float acc[TALL][WIDE][OWN] = {};
        fetch(0);
#pragma unroll ROWS_AT_ONCE
        for (int a = 0; a < DEEP; a++) {
            UNROLLED for (int b = 0; b < SPAN; b++) in[b] = next[b];
            if (a + 1 < DEEP) fetch(a + 1);
            UNROLLED for (int r = 0; r < TALL; r++) {
                const int tap = a - r * SH;  // the row of the filter that meets this one for output r
                if (tap < 0 || tap > (KH - 1) * DH || tap % DH) continue;
                const float* row = filter[tap / DH * KW] + lane * OWN;
                UNROLLED for (int b = 0; b < KW; b++) {
                    const Vec<float, OWN> f = load<OWN>(row + b * CHANNELS);
                    UNROLLED for (int j = 0; j < WIDE; j++)
                        UNROLLED for (int p = 0; p < PAIRS; p++) {
                            const float2 v = unpack2<T>(in[j * SW + b * DW].at[p]);
                            acc[r][j][2 * p] += v.x * f.at[2 * p];
                            acc[r][j][2 * p + 1] += v.y * f.at[2 * p + 1];
                        }
                }
            }
        }
        UNROLLED for (int r = 0; r < TALL; r++)
            UNROLLED for (int j = 0; j < WIDE; j++) {
                if (oy + r >= oh || ox + j >= ow) continue;
                const i64 to = ((n * oh + oy + r) * ow + ox + j) * channels + c;
                float(&v)[OWN] = acc[r][j];
                Vec<TY, OWN> out;
                UNROLLED for (int p = 0; p < PAIRS; p++) {
                    const float2 b = unpack2<T>(add.at[p]);
                    v[2 * p] += b.x, v[2 * p + 1] += b.y;
                }
                if (!SLOPE && ACTIVE) activate<T>(v, alpha);
                UNROLLED for (int k = 0; k < OWN; k++) {
                    const float z = SLOPE ? act<T>(v[k], slope_of(slope, c + k, alpha)) : v[k];
                    out.at[k] = finished(z, e1, e2, e3, to + k);
                }
                store<OWN>(y + to, out);
            }
    }
}
