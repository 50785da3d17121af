// conv/depthwise_weight_grad.cu: dw[c, tap] = sum over pixels p of dy[p, c] x[p + tap, c], a filter a channel.
// Idea     : a thread has two neighbouring channels and the taps of KROWS rows of their filter in registers, and
//            goes along rows of dy, WIDE pixels at once: a row of x serves all taps of a row of the filter. A
//            warp has 64 channels, the block's eight warps have rows of their own, whose sums are added one
//            warp after another. finish (weight_grad_sm80.cu) adds the parts of the blocks.
// Inputs   : x T [n, h, w, channels], dy T [n, oh, ow, channels]; channels are even.
// Outputs  : part ACC [splits, channels, KH, KW].
// Macros   : T ACC WIDE KROWS (divides KH), geometry.cuh's.
// Launch   : (64 channels, splits, KH / KROWS) blocks of 256 threads; `chunk` rows of dy a block.
// Numerics : ACC; the order depends on the shape alone.   Bound: FMA rate (7 x 7), HBM (3 x 3).
#include "conv/geometry.cuh"

constexpr int SPAN = (WIDE - 1) * SW + (KW - 1) * DW + 1, OWN = KROWS * KW;

extern "C" __global__ void __launch_bounds__(256) conv_depthwise_weight_grad(
    const T* x, const T* dy, ACC* part, int rows, int channels, int h, int w, int oh, int ow, int chunk) {
    after_previous_launch();
    __shared__ ACC total[OWN][64];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, c = blockIdx.x * 64 + lane * 2;
    const int first = blockIdx.y * chunk, last = min(first + chunk, rows), k0 = blockIdx.z * KROWS;
    ACC acc[OWN][2] = {};
    if (c < channels)
        for (int row = first + warp; row < last; row += 8) {
            const int n = row / oh, oy = row % oh;
            const T* slopes = dy + (i64)row * ow * channels + c;
            for (int ox = 0; ox < ow; ox += WIDE) {
                ACC d[WIDE][2];
                UNROLLED for (int j = 0; j < WIDE; j++) {
                    Vec<T, 2> v = {};
                    if (ox + j < ow) v = load<2>(slopes + (i64)(ox + j) * channels);
                    d[j][0] = widen(v.at[0]), d[j][1] = widen(v.at[1]);
                }
                UNROLLED for (int a = 0; a < KROWS; a++) {
                    const int iy = oy * SH - PH + (k0 + a) * DH, x0 = ox * SW - PW;
                    if ((unsigned)iy >= (unsigned)h) continue;
                    const T* line = x + ((i64)n * h + iy) * w * channels + c;
                    ACC in[SPAN][2];
                    UNROLLED for (int b = 0; b < SPAN; b++) {
                        Vec<T, 2> v = {};
                        if ((unsigned)(x0 + b) < (unsigned)w) v = load<2>(line + (i64)(x0 + b) * channels);
                        in[b][0] = widen(v.at[0]), in[b][1] = widen(v.at[1]);
                    }
                    UNROLLED for (int b = 0; b < KW; b++)
                        UNROLLED for (int j = 0; j < WIDE; j++) {
                            acc[a * KW + b][0] += d[j][0] * in[j * SW + b * DW][0];
                            acc[a * KW + b][1] += d[j][1] * in[j * SW + b * DW][1];
                        }
                }
            }
        }
    for (int turn = 0; turn < 8; turn++) {
        if (warp == turn)
            UNROLLED for (int k = 0; k < OWN; k++)
                UNROLLED for (int j = 0; j < 2; j++)
                    total[k][lane * 2 + j] = acc[k][j] + (turn ? total[k][lane * 2 + j] : (ACC)0);
        __syncthreads();
    }
    for (int i = threadIdx.x; i < 64 * OWN; i += 256) {
        const int own = i / OWN, k = i % OWN;
        if (blockIdx.x * 64 + own < channels)
            part[((i64)blockIdx.y * channels + blockIdx.x * 64 + own) * TAPS + k0 * KW + k] = total[k][own];
    }
}
