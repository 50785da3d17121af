// layernorm/channel_grad.cu: the gradient of BatchNormalization in training, by the batch's mean and variance.
// Idea     : xh = (x - mean) rstd: dbias = sum dy, dscale = sum dy xh over batch and inner axes, then
//            dx = scale rstd (dy - dbias / count - xh dscale / count). channel_sums: a block takes a
//            chunk of one channel; or, where inner is short (COLUMNS), of 32 of the channels * inner
//            columns. channel_params adds the parts up, channel_dx reads x and dy once more.
// Inputs   : x, dy [batch, channels, inner] T, VEC divides inner; scale P, mean, variance ACC [channels].
// Outputs  : part ACC [splits, 2, channels] (COLUMNS: [splits, 2, channels * inner]); dscale, dbias P
//            (or null); sums ACC [2, channels]; dx T.
// Macros   : T P ACC VEC COLUMNS.
// Numerics : ACC; the order depends on the shape alone.
// Bound    : HBM, x and dy twice, dx once.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    channel_sums(const T* x, const T* dy, const ACC* mean, const ACC* variance, ACC* part, u32 batch,
                 u32 channels, u32 inner, u32 chunk, float epsilon) {
    after_previous_launch();
    ACC a = 0, b = 0;
#if COLUMNS
    __shared__ ACC scratch[2][8][32];
    const u32 columns = channels * inner, tiles = (columns + 31) / 32;
    const u32 tx = threadIdx.x % 32, ty = threadIdx.x / 32;
    const u32 q = blockIdx.x % tiles * 32 + tx, split = blockIdx.x / tiles, c = q / inner;
    const u32 last = min((split + 1) * chunk, batch);
    if (q < columns) {
        const ACC m = mean[c];
#pragma unroll 4
        for (u32 n = split * chunk + ty; n < last; n += 8) {
            const i64 at = (i64)n * columns + q;
            const ACC d = widen(dy[at]);
            a += d * ((ACC)widen(x[at]) - m), b += d;
        }
    }
    scratch[0][ty][tx] = a, scratch[1][ty][tx] = b;
    __syncthreads();
    if (ty || q >= columns) return;
    a = b = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) a += scratch[0][k][tx], b += scratch[1][k][tx];
    part += (i64)split * 2 * columns + q;
    part[0] = a / sqrt(variance[c] + (ACC)epsilon);
    part[columns] = b;
#else
    __shared__ ACC scratch[8];
    const u32 c = blockIdx.x % channels, split = blockIdx.x / channels, per = inner / VEC;
    const u32 last = min((split + 1) * chunk, batch * per);
    const ACC m = mean[c];
#pragma unroll 4
    for (u32 k = split * chunk + threadIdx.x; k < last; k += 256) {
        const i64 at = ((i64)(k / per) * channels + c) * inner + k % per * VEC;
        const Vec<T, VEC> v = load<VEC>(x + at), d = load<VEC>(dy + at);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            a += (ACC)widen(d.at[j]) * ((ACC)widen(v.at[j]) - m);
            b += (ACC)widen(d.at[j]);
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

extern "C" __global__ void __launch_bounds__(256)
    channel_dx(const T* x, const T* dy, const P* scale, const ACC* mean, const ACC* variance,
               const ACC* sums, T* dx, i64 size, i64 channels, i64 inner, i64 count, float epsilon) {
    after_previous_launch();
    const i64 i = ((i64)blockIdx.x * 256 + threadIdx.x) * VEC;
    if (i >= size) return;
    const i64 c = i / inner % channels;
    const ACC rs = (ACC)1 / sqrt(variance[c] + (ACC)epsilon), a = (ACC)widen(scale[c]) * rs;
    const ACC m = mean[c], c1 = sums[channels + c] / (ACC)count, c2 = rs * (sums[c] / (ACC)count);
    Vec<T, VEC> v = load<VEC>(x + i);
    const Vec<T, VEC> d = load<VEC>(dy + i);
#pragma unroll
    for (int j = 0; j < VEC; j++)
        v.at[j] = narrow<T>(a * ((ACC)widen(d.at[j]) - c1 - ((ACC)widen(v.at[j]) - m) * c2));
    store<VEC>(dx + i, v);
}
