// layernorm/channel_grad.cu: the gradient of BatchNormalization in training, by the batch's mean and variance.
// Idea     : xh = (x - mean) rstd: dbias = sum dy, dscale = sum dy xh over batch and inner axes, then
//            dx = scale rstd (dy - dbias / count - xh dscale / count). channel_sums: a block takes a
//            chunk of one channel; or, where inner is short (COLUMNS, as of images whose channels are last), of
//            TX vectors of the channels * inner columns. channel_params adds the parts up, channel_dx reads
//            x and dy once more; there each of `slots` threads takes every slots-th row of a vector, ROWS
//            at a time, which share what roots and divisions take longer to make.
//            RELU: y = max(xh scale + bias, 0), and dy counts where that is positive; the forward's value is
//            worked out again, which takes less than reading it.
// Inputs   : x, dy [batch, channels, inner] T, VEC divides inner (COLUMNS: channels * inner); scale, bias P,
//            mean, variance ACC [channels].
// Outputs  : part ACC [splits, 2, channels] (COLUMNS: [splits, 2, channels * inner]); dscale, dbias P
//            (or null); sums ACC [2, channels]; dx T.
// Macros   : T P ACC VEC COLUMNS TX RELU.
// Numerics : ACC; the order depends on the shape alone.
// Bound    : HBM, x and dy twice, dx once.
#include "common.cuh"

// What of dy reaches the normalized value of one channel.
struct Gate {
    ACC m, a, b;
    DEVICE ACC of(T x, T dy) const {
        const T y = narrow<T>(((ACC)widen(x) - m) * a + b);
        return RELU && !(widen(y) > 0) ? (ACC)0 : (ACC)widen(dy);
    }
};
DEVICE Gate gate(const P* scale, const P* bias, const ACC* mean, const ACC* variance, i64 c, float epsilon) {
    if (!RELU) return {mean[c], 0, 0};
    return {mean[c], (ACC)widen(scale[c]) / sqrt(variance[c] + (ACC)epsilon), (ACC)widen(bias[c])};
}

extern "C" __global__ void __launch_bounds__(256)
    channel_sums(const T* x, const T* dy, const P* scale, const P* bias, const ACC* mean, const ACC* variance, ACC* part, u32 batch,
                 u32 channels, u32 inner, u32 chunk, float epsilon) {
    after_previous_launch();
#if COLUMNS
    constexpr int TY = 256 / TX;
    __shared__ ACC scratch[2][TY][TX * VEC];
    const u32 columns = channels * inner, tiles = (columns + TX * VEC - 1) / (TX * VEC);
    const u32 tx = threadIdx.x % TX, ty = threadIdx.x / TX;
    const u32 q = (blockIdx.x % tiles * TX + tx) * VEC, split = blockIdx.x / tiles;
    const u32 last = min((split + 1) * chunk, batch);
    ACC a[VEC] = {}, b[VEC] = {};
    if (q < columns) {
        Gate open[VEC];
#pragma unroll
        for (int j = 0; j < VEC; j++)
            open[j] = gate(scale, bias, mean, variance, inner == 1 ? q + j : (q + j) / inner, epsilon);
#pragma unroll 4
        for (u32 n = split * chunk + ty; n < last; n += TY) {
            const i64 at = (i64)n * columns + q;
            const Vec<T, VEC> v = load<VEC>(x + at), d = load<VEC>(dy + at);
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                const ACC each = open[j].of(v.at[j], d.at[j]);
                a[j] += each * ((ACC)widen(v.at[j]) - open[j].m);
                b[j] += each;
            }
        }
    }
#pragma unroll
    for (int j = 0; j < VEC; j++) scratch[0][ty][tx * VEC + j] = a[j], scratch[1][ty][tx * VEC + j] = b[j];
    __syncthreads();
    for (u32 k = threadIdx.x; k < 2 * TX * VEC; k += 256) {
        const u32 which = k / (TX * VEC), own = k % (TX * VEC), column = blockIdx.x % tiles * (TX * VEC) + own;
        if (column >= columns) continue;
        ACC s = 0;
        for (int t = 0; t < TY; t++) s += scratch[which][t][own];
        if (which == 0) s /= sqrt(variance[column / inner] + (ACC)epsilon);
        part[((i64)split * 2 + which) * columns + column] = s;
    }
#else
    __shared__ ACC scratch[8];
    const u32 c = blockIdx.x % channels, split = blockIdx.x / channels, per = inner / VEC;
    const u32 last = min((split + 1) * chunk, batch * per);
    const Gate open = gate(scale, bias, mean, variance, c, epsilon);
    ACC a = 0, b = 0;
#pragma unroll 4
    for (u32 k = split * chunk + threadIdx.x; k < last; k += 256) {
        const i64 at = ((i64)(k / per) * channels + c) * inner + k % per * VEC;
        const Vec<T, VEC> v = load<VEC>(x + at), d = load<VEC>(dy + at);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
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
    channel_params(const ACC* part, P* dscale, P* dbias, ACC* sums, u32 parts, u32 channels, u32 per) {
    after_previous_launch();
    __shared__ ACC strips[32][33];
    const u32 tx = threadIdx.x % 32, ty = threadIdx.x / 32, c = blockIdx.x * 32 + tx;
    ACC s = 0;
    if (c < channels)
#pragma unroll 8
        for (u32 k = ty; k < parts * per; k += 32)
            s += part[((i64)(k / per) * 2 + blockIdx.y) * channels * per + c * per + k % per];
    strips[ty][tx] = s;
    __syncthreads();
    if (ty || c >= channels) return;
    s = 0;
    for (int k = 0; k < 32; k++) s += strips[k][tx];
    sums[blockIdx.y * channels + c] = s;
    P* out = blockIdx.y ? dbias : dscale;
    if (out) out[c] = narrow<P>(s);
}

constexpr int ROWS = 4;
// dx of one channel.
struct Gradient {
    Gate open;
    ACC a, c1, c2;
    DEVICE T of(T x, T dy) const {
        return narrow<T>(a * (open.of(x, dy) - c1 - ((ACC)widen(x) - open.m) * c2));
    }
};
DEVICE Gradient gradient(const P* scale, const P* bias, const ACC* mean, const ACC* variance, const ACC* sums, i64 c,
                         i64 channels, i64 count, float epsilon) {
    const ACC rs = (ACC)1 / sqrt(variance[c] + (ACC)epsilon);
    return {gate(scale, bias, mean, variance, c, epsilon), (ACC)widen(scale[c]) * rs, sums[channels + c] / (ACC)count,
            rs * (sums[c] / (ACC)count)};
}

extern "C" __global__ void __launch_bounds__(256)
    channel_dx(const T* x, const T* dy, const P* scale, const P* bias, const ACC* mean, const ACC* variance,
               const ACC* sums, T* dx, i64 size, i64 channels, i64 inner, i64 count, i64 slots, float epsilon) {
    after_previous_launch();
#if COLUMNS
    const i64 columns = channels * inner, across = columns / VEC, rows = size / columns;
    const i64 t = (i64)blockIdx.x * 256 + threadIdx.x, q = t % across * VEC;
    if (t / across >= slots) return;
    Gradient how[VEC];
#pragma unroll
    for (int j = 0; j < VEC; j++)
        how[j] = gradient(scale, bias, mean, variance, sums, inner == 1 ? q + j : (q + j) / inner, channels, count,
                          epsilon);
    for (i64 first = t / across; first < rows; first += ROWS * slots) {
        Vec<T, VEC> v[ROWS], d[ROWS];
#pragma unroll
        for (int k = 0; k < ROWS; k++)
            if (first + k * slots < rows) {
                v[k] = load<VEC>(x + (first + k * slots) * columns + q);
                d[k] = load<VEC>(dy + (first + k * slots) * columns + q);
            }
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            if (first + k * slots >= rows) break;
#pragma unroll
            for (int j = 0; j < VEC; j++) v[k].at[j] = how[j].of(v[k].at[j], d[k].at[j]);
            store<VEC>(dx + (first + k * slots) * columns + q, v[k]);
        }
    }
#else
    const i64 i = ((i64)blockIdx.x * 256 + threadIdx.x) * VEC;
    if (i >= size) return;
    const Gradient how = gradient(scale, bias, mean, variance, sums, i / inner % channels, channels, count, epsilon);
    Vec<T, VEC> v = load<VEC>(x + i);
    const Vec<T, VEC> d = load<VEC>(dy + i);
#pragma unroll
    for (int j = 0; j < VEC; j++) v.at[j] = how.of(v.at[j], d.at[j]);
    store<VEC>(dx + i, v);
#endif
}
