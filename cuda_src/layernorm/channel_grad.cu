// layernorm/channel_grad.cu: the gradient of BatchNormalization in training, by the batch's mean and variance.
// Idea     : xh = (x - mean) rstd: dbias = sum dy, dscale = sum dy xh over batch and inner axes, then
//            dx = scale rstd (dy - dbias / count - xh dscale / count). channel_sums: a block takes a
//            chunk of one channel; or, where inner is short (COLUMNS, as of images whose channels are last), of
//            TX vectors of the channels * inner columns. channel_params adds the parts up, channel_dx reads
//            x and dy once more; there each of `slots` threads takes every slots-th row of a vector, ROWS
//            at a time.
//            RELU: y = max(xh scale + bias, 0), and dy counts where that is positive; the forward's value is
//            worked out again, which takes less than reading it.
// Inputs   : x, dy [batch, channels, inner] T, VEC divides inner (COLUMNS: channels * inner); scale, bias P,
//            mean, variance ACC [channels].
// Outputs  : part ACC [splits, 2, channels] (COLUMNS: [splits, 2, channels * inner]); dscale, dbias P
//            (or null); sums ACC [4, channels], of which dx is made: dscale / (count sqrt(variance + epsilon)),
//            dbias / count, scale / sqrt(variance + epsilon), and with RELU the bias; dx T.
// Macros   : T P ACC VEC COLUMNS TX RELU.
// Numerics : ACC; the order depends on the shape alone.
// Bound    : HBM, x and dy twice, dx once.
#include "layernorm/channels.cuh"

// What of dy reaches the normalized value of one channel.
struct Gate {
    ACC m, a, b;
    DEVICE ACC of(T x, T dy) const {
        const T y = narrow<T>(((ACC)widen(x) - m) * a + b);
        return RELU && !(widen(y) > 0) ? (ACC)0 : (ACC)widen(dy);
    }
};
DEVICE Gate gate(P scale, P bias, ACC mean, ACC variance, float epsilon) {
    if (!RELU) return {mean, 0, 0};
    return {mean, (ACC)widen(scale) / sqrt(variance + (ACC)epsilon), (ACC)widen(bias)};
}

extern "C" __global__ void __launch_bounds__(256)
    channel_sums(const T* x, const T* dy, const P* scale, const P* bias, const ACC* mean, const ACC* variance, ACC* part, u32 batch,
                 u32 channels, u32 inner, u32 chunk, float epsilon) {
    after_previous_launch();
#if COLUMNS
    constexpr int TY = 256 / TX, PITCH = TX < 32 ? TX : TX + 4;  // of neighbours' columns: few share a bank
    __shared__ ACC scratch[2][TY][VEC * PITCH];
    const u32 columns = channels * inner, tiles = (columns + TX * VEC - 1) / (TX * VEC);
    const u32 tx = threadIdx.x % TX, ty = threadIdx.x / TX;
    const u32 q = (blockIdx.x % tiles * TX + tx) * VEC, split = blockIdx.x / tiles;
    const u32 last = min((split + 1) * chunk, batch);
    ACC a[VEC] = {}, b[VEC] = {};
    if (q < columns) {
        Gate open[VEC];
        const Vec<ACC, VEC> means = of_channels(mean, q, inner), variances = of_channels(variance, q, inner);
        Vec<P, VEC> scales, biases;
        if (RELU) scales = of_channels(scale, q, inner), biases = of_channels(bias, q, inner);
        UNROLLED for (int j = 0; j < VEC; j++)
            open[j] = gate(scales.at[j], biases.at[j], means.at[j], variances.at[j], epsilon);
#pragma unroll 4
        for (u32 n = split * chunk + ty; n < last; n += TY) {
            const i64 at = (i64)n * columns + q;
            const Vec<T, VEC> v = load<VEC>(x + at), d = load<VEC>(dy + at);
            UNROLLED for (int j = 0; j < VEC; j++) {
                const ACC each = open[j].of(v.at[j], d.at[j]);
                a[j] += each * ((ACC)widen(v.at[j]) - open[j].m);
                b[j] += each;
            }
        }
    }
    UNROLLED for (int j = 0; j < VEC; j++) scratch[0][ty][j * PITCH + tx] = a[j], scratch[1][ty][j * PITCH + tx] = b[j];
    __syncthreads();
    for (u32 k = threadIdx.x; k < 2 * TX * VEC; k += 256) {
        const u32 which = k / (TX * VEC), own = k % (TX * VEC), column = blockIdx.x % tiles * (TX * VEC) + own;
        if (column >= columns) continue;
        ACC s = 0;
        for (int t = 0; t < TY; t++) s += scratch[which][t][own % VEC * PITCH + own / VEC];
        if (which == 0) s /= sqrt(variance[column / inner] + (ACC)epsilon);
        part[((i64)split * 2 + which) * columns + column] = s;
    }
#else
    __shared__ ACC scratch[8];
    const u32 c = blockIdx.x % channels, split = blockIdx.x / channels, per = inner / VEC;
    const u32 last = min((split + 1) * chunk, batch * per);
    const Gate open = gate(RELU ? scale[c] : P(), RELU ? bias[c] : P(), mean[c], variance[c], epsilon);
    ACC a = 0, b = 0;
#pragma unroll 4
    for (u32 k = split * chunk + threadIdx.x; k < last; k += 256) {
        const i64 at = ((i64)(k / per) * channels + c) * inner + k % per * VEC;
        const Vec<T, VEC> v = load<VEC>(x + at), d = load<VEC>(dy + at);
        UNROLLED for (int j = 0; j < VEC; j++) {
            const ACC each = open.of(v.at[j], d.at[j]);
            a += each * ((ACC)widen(v.at[j]) - open.m);
            b += each;
        }
    }
    a = block_sum<256>(a, scratch), b = block_sum<256>(b, scratch);
    if (threadIdx.x) return;
    part += (i64)split * 2 * channels + c;
    part[0] = a / sqrt(variance[c] + (ACC)epsilon);
    part[channels] = b;
#endif
}

// `per`: the columns of a channel.
extern "C" __global__ void __launch_bounds__(1024)
    channel_params(const ACC* part, const P* scale, const P* bias, const ACC* variance, P* dscale, P* dbias, ACC* sums, u32 parts,
                   u32 channels, u32 per, i64 count, float epsilon) {
    after_previous_launch();
    __shared__ ACC strips[32][33];
    const u32 tx = threadIdx.x % 32, ty = threadIdx.x / 32, c = blockIdx.x * 32 + tx;
    const i64 columns = (i64)channels * per;
    part += blockIdx.y * columns + c * per;
    ACC s = 0;
    if (c < channels)
        for (u32 j = 0; j < per; j++)
#pragma unroll 8
            for (u32 k = ty; k < parts; k += 32) s += part[2 * k * columns + j];
    strips[ty][tx] = s;
    __syncthreads();
    if (ty || c >= channels) return;
    s = 0;
    UNROLLED for (int k = 0; k < 32; k++) s += strips[k][tx];
    P* out = blockIdx.y ? dbias : dscale;
    if (out) out[c] = narrow<P>(s);
    const ACC root = sqrt(variance[c] + (ACC)epsilon);
    sums[blockIdx.y * channels + c] = blockIdx.y ? s / (ACC)count : s / (ACC)count / root;
    if (blockIdx.y) sums[2 * channels + c] = (ACC)widen(scale[c]) / root;
    if (blockIdx.y && RELU) sums[3 * channels + c] = (ACC)widen(bias[c]);
}

constexpr int ROWS = 4;
// dx of one channel.
struct Gradient {
    Gate open;
    ACC c2, c1;
    DEVICE T of(T x, T dy) const {
        return narrow<T>(open.a * (open.of(x, dy) - c1 - ((ACC)widen(x) - open.m) * c2));
    }
};

extern "C" __global__ void __launch_bounds__(256, 2) channel_dx(
    const T* x, const T* dy, const ACC* mean, const ACC* sums, T* dx, i64 size, i64 channels, i64 inner, i64 slots) {
    after_previous_launch();
#if COLUMNS
    const i64 columns = channels * inner, across = columns / VEC, rows = size / columns;
    const i64 t = (i64)blockIdx.x * 256 + threadIdx.x, q = t % across * VEC;
    if (t / across >= slots) return;
    Gradient how[VEC];
    const Vec<ACC, VEC> means = of_channels(mean, q, inner), c2 = of_channels(sums, q, inner);
    const Vec<ACC, VEC> c1 = of_channels(sums + channels, q, inner), a = of_channels(sums + 2 * channels, q, inner);
    Vec<ACC, VEC> b = {};
    if (RELU) b = of_channels(sums + 3 * channels, q, inner);
    UNROLLED for (int j = 0; j < VEC; j++) how[j] = {{means.at[j], a.at[j], b.at[j]}, c2.at[j], c1.at[j]};
    for (i64 first = t / across; first < rows; first += ROWS * slots) {
        Vec<T, VEC> v[ROWS], d[ROWS];
        UNROLLED for (int k = 0; k < ROWS; k++)
            if (first + k * slots < rows) {
                v[k] = load<VEC>(x + (first + k * slots) * columns + q);
                d[k] = load<VEC>(dy + (first + k * slots) * columns + q);
            }
        UNROLLED for (int k = 0; k < ROWS; k++) {
            if (first + k * slots >= rows) break;
            UNROLLED for (int j = 0; j < VEC; j++) v[k].at[j] = how[j].of(v[k].at[j], d[k].at[j]);
            store<VEC>(dx + (first + k * slots) * columns + q, v[k]);
        }
    }
#else
    const i64 i = ((i64)blockIdx.x * 256 + threadIdx.x) * VEC;
    if (i >= size) return;
    const i64 c = i / inner % channels;
    const ACC* own = sums + c;
    const Gradient how = {{mean[c], own[2 * channels], RELU ? own[3 * channels] : 0}, own[0], own[channels]};
    Vec<T, VEC> v = load<VEC>(x + i);
    const Vec<T, VEC> d = load<VEC>(dy + i);
    UNROLLED for (int j = 0; j < VEC; j++) v.at[j] = how.of(v.at[j], d.at[j]);
    store<VEC>(dx + i, v);
#endif
}
