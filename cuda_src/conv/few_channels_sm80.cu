// conv/few_channels_sm80.cu: Conv of NCHW images of few channels in 16 bits to channels-last ones (a first layer).
// Idea     : a block makes 16 x 16 pixels of y. The part of x under them goes to shared memory as pixels of PIXEL
//            channels, zeros where there are none: the pixels under a row of the filter are then one run
//            of k, and the runs of neighbouring pixels of y overlap, so ldmatrix gathers them from where they
//            stand. A warp has two rows of pixels and all BN filters.
// Inputs   : x T [n, channels, h, w], weight T [filters, KH, RUN] with zeros where channels and taps end, bias T or
//            null; filters are a multiple of 8.
// Outputs  : y T [n, oh, ow, filters]. COLUMN_MOMENTS: part [pixels / 64, filters] pairs of f32, mean and sum of
//            squared deviations of y's filters in four rows of 16 pixels each; oh and ow are multiples of 16.
// Macros   : T (16 bits) CHANNELS PIXEL BN COLUMN_MOMENTS, geometry.cuh's with DW 1, ACT.   SW PIXEL is a
//            multiple of 8.
// Launch   : (tiles of a row * tiles of a column * n, ceil(filters / BN)) blocks of 256 threads.
// Numerics : f32 accumulate, one rounding. What follows a run in memory is no part of it: it counts as 0.
// Bound    : HBM, y written once.
#include "sm80.cuh"
#include "conv/geometry.cuh"
#ifndef COLUMN_MOMENTS
#define COLUMN_MOMENTS 0
#endif

constexpr int RUN = (KW * PIXEL + 15) / 16 * 16, LEFT = KW * PIXEL % 16;  // LEFT of the last 16 count, 0: all
constexpr int HIGH = 15 * SH + (KH - 1) * DH + 1, WIDE = (15 * SW + RUN / PIXEL + 1) / 2 * 2;
constexpr int PITCH = KH * RUN + 8, OUT = BN + 8, NT = BN / 8;
typedef Vec<T, PIXEL> Pixel;

extern "C" __global__ void __launch_bounds__(256, BN > 32 ? 2 : 3)
    conv_few(const T* x, const T* weight, const T* bias, T* y, int filters, int h, int w, int oh, int ow,
             float alpha, float* part) {
    after_previous_launch();
    extern __shared__ __align__(16) u8 memory[];
    T *filter = (T*)memory, *image = filter + BN * PITCH, *out = (T*)memory;
    const int across = (ow + 15) / 16, down = (oh + 15) / 16, f0 = blockIdx.y * BN;
    const int ox = blockIdx.x % across * 16, oy = blockIdx.x / across % down * 16;
    const i64 n = blockIdx.x / across / down;
    for (int i = threadIdx.x; i < BN * KH * RUN / 8; i += 256) {
        const int f = i / (KH * RUN / 8), k = i % (KH * RUN / 8) * 8;
        const bool in = f0 + f < filters;
        cp_async_16(smem_address(filter + f * PITCH + k),
                    in ? weight + (i64)(f0 + f) * KH * RUN + k : weight, in ? 16 : 0);
    }
    cp_async_commit();
    const T* from = x + n * CHANNELS * h * w;
#pragma unroll 6
    for (int i = threadIdx.x; i < HIGH * WIDE; i += 256) {
        const int iy = oy * SH - PH + i / WIDE, ix = ox * SW - PW + i % WIDE;
        const bool in = (unsigned)iy < (unsigned)h && (unsigned)ix < (unsigned)w;
        Pixel p;
        UNROLLED for (int c = 0; c < PIXEL; c++)
            p.at[c] = c < CHANNELS && in ? from[((i64)c * h + iy) * w + ix] : T();
        store<PIXEL>(image + i * PIXEL, p);
    }
    cp_async_wait<0>();
    __syncthreads();

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float acc[2][NT][4] = {};
    ROLLED for (int a = 0; a < KH; a++) {
        const T* row = image + ((warp * 2 * SH + a * DH) * WIDE + lane % 16 * SW) * PIXEL + lane / 16 * 8;
        const T* taps = filter + lane % 16 * PITCH + a * RUN + lane / 16 * 8;
        UNROLLED for (int k = 0; k < RUN; k += 16) {
            u32 u[2][4];
            UNROLLED for (int i = 0; i < 2; i++) {
                ldmatrix_x4<false>(u[i], smem_address(row + i * SH * WIDE * PIXEL + k));
                if (LEFT && k + 16 == RUN) {
                    if (lane % 4 * 2 >= LEFT) u[i][0] = u[i][1] = 0;
                    if (lane % 4 * 2 + 8 >= LEFT) u[i][2] = u[i][3] = 0;
                }
            }
            UNROLLED for (int j = 0; j < NT / 2; j++) {
                u32 v[4];
                ldmatrix_x4<false>(v, smem_address(taps + j * 16 * PITCH + k));
                UNROLLED for (int i = 0; i < 2; i++) {
                    const u32 even[2] = {v[0], v[2]}, odd[2] = {v[1], v[3]};
                    mma(acc[i][2 * j], u[i], even, T());
                    mma(acc[i][2 * j + 1], u[i], odd, T());
                }
            }
        }
    }
    __syncthreads();  // the results take the place of what was multiplied
    UNROLLED for (int j = 0; j < NT; j++) {
        const int f = j * 8 + lane % 4 * 2;
        float add[2] = {};
        if (bias && f0 + f < filters) add[0] = to_float(bias[f0 + f]), add[1] = to_float(bias[f0 + f + 1]);
        UNROLLED for (int i = 0; i < 2; i++) {
            float v[4];
            UNROLLED for (int e = 0; e < 4; e++) v[e] = acc[i][j][e] + add[e % 2];
            if (ACTIVE) activate<T>(v, alpha);
            UNROLLED for (int e = 0; e < 2; e++) {
                const int pixel = (warp * 2 + i) * 16 + e * 8 + lane / 4;
                *(u32*)(out + pixel * OUT + f) = pack2<T>(v[2 * e], v[2 * e + 1]);
            }
        }
    }
    __syncthreads();
#if COLUMN_MOMENTS  // differences from one of the numbers themselves err little, whatever the mean
    for (int i = threadIdx.x; i < 4 * BN; i += 256) {
        const int f = i % BN, of = i / BN;
        const T* from = out + of * 64 * OUT + f;
        const float c = to_float(from[0]);
        float sum = 0, square = 0;
#pragma unroll 16
        for (int r = 0; r < 64; r++) {
            const float d = to_float(from[r * OUT]) - c;
            sum += d;
            square = fmaf(d, d, square);
        }
        const float mean = sum * 0.015625f, m2 = isinf(square) ? square : max_nan(fmaf(-sum, mean, square), 0.0f);
        if (f0 + f < filters) ((float2*)part)[((i64)blockIdx.x * 4 + of) * filters + f0 + f] = {c + mean, m2};
    }
#endif
    for (int i = threadIdx.x; i < 256 * BN / 8; i += 256) {
        const int pixel = i / (BN / 8), f = i % (BN / 8) * 8, yy = oy + pixel / 16, xx = ox + pixel % 16;
        if (yy < oh && xx < ow && f0 + f < filters)
            store<8>(y + ((n * oh + yy) * ow + xx) * filters + f0 + f, load<8>(out + pixel * OUT + f));
    }
}
