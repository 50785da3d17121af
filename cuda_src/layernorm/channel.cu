// layernorm/channel.cu: y = (x - mean) / sqrt(variance + epsilon) * scale + bias with given statistics.
// Idea     : a vector of VEC elements a thread; channel_apply serves BatchNormalization (statistics
//            by channel) and the Group- and InstanceNormalization of long rows (by group of
//            `per` channels: GROUPED). Where inner is short, as of images whose channels are last, a vector
//            has several channels (COLUMNS): each of `slots` threads takes every slots-th row of it, ROWS
//            at a time, which share what one root and one division a channel take longer to make.
//            channel_running: the new running mean and variance.
// Inputs   : x, y [n, channels, inner] T, VEC divides inner (COLUMNS: channels * inner); scale, bias P [channels]; mean, variance M
//            [channels], or [n * channels / per] where GROUPED: with COLUMNS an image is `pixels` rows.
//            e1, e2, e3 T, laid out as y: what SUFFIX (suffix.cuh) takes of channel_apply's result, in TY.
// Macros   : T P M ACC VEC GROUPED COLUMNS, suffix.cuh's.
// Bound    : HBM, x read and y written once.
#include "layernorm/channels.cuh"
#include "layernorm/suffix.cuh"
constexpr int ROWS = 4;

// y[i..] = SUFFIX((x - m) a + b), VEC elements; `own` and `more` are x's and e1's to e3's there.
DEVICE void apply(TY* y, i64 i, const Vec<T, VEC>& own, const Beside<VEC>& more, const ACC* m, const ACC* a,
                  const ACC* b, int step) {
    Vec<TY, VEC> out;
    UNROLLED for (int j = 0; j < VEC; j++) {
        const ACC v = ((ACC)widen(own.at[j]) - m[j * step]) * a[j * step] + b[j * step];
        out.at[j] = more.after(v, j);
    }
    store<VEC>(y + i, out);
}

extern "C" __global__ void __launch_bounds__(256, 3) channel_apply(
    const T* x, const P* scale, const P* bias, const M* mean, const M* variance, const T* e1, const T* e2, const T* e3,
    TY* y, i64 size, i64 channels, i64 inner, i64 per, i64 pixels, i64 slots, float epsilon) {
    after_previous_launch();
    auto fetch = [&](i64 i, Vec<T, VEC>& own, Beside<VEC>& more) {
        own = load<VEC>(x + i);
        more.read(e1, e2, e3, i);
    };
#if COLUMNS
    const i64 columns = channels * inner, across = columns / VEC, rows = GROUPED ? pixels : size / columns;
    const i64 t = (i64)blockIdx.x * 256 + threadIdx.x, image = t / across / slots, base = image * rows * columns;
    if (base >= size) return;
    const i64 q = t % across * VEC;
    ACC a[VEC], b[VEC], m[VEC];
    const Vec<P, VEC> scales = of_channels(scale, q, inner), biases = of_channels(bias, q, inner);
    Vec<M, VEC> means, variances;
    if (!GROUPED) means = of_channels(mean, q, inner), variances = of_channels(variance, q, inner);
    UNROLLED for (int j = 0; j < VEC; j++) {
        const i64 stat = image * (channels / per) + (inner == 1 ? q + j : (q + j) / inner) / per;
        if (GROUPED) means.at[j] = mean[stat], variances.at[j] = variance[stat];
        a[j] = (ACC)widen(scales.at[j]) / sqrt((ACC)widen(variances.at[j]) + (ACC)epsilon);
        m[j] = widen(means.at[j]), b[j] = widen(biases.at[j]);
    }
    for (i64 first = t / across % slots; first < rows; first += ROWS * slots) {
        Vec<T, VEC> own[ROWS];
        Beside<VEC> more[ROWS];
        UNROLLED for (int k = 0; k < ROWS; k++)
            if (first + k * slots < rows) fetch(base + (first + k * slots) * columns + q, own[k], more[k]);
        UNROLLED for (int k = 0; k < ROWS; k++)
            if (first + k * slots < rows) apply(y, base + (first + k * slots) * columns + q, own[k], more[k], m, a, b, 1);
    }
#else
    const i64 i = ((i64)blockIdx.x * 256 + threadIdx.x) * VEC;
    if (i >= size) return;
    const i64 q = i / inner, c = q % channels, stat = GROUPED ? q / per : c;
    const ACC a = (ACC)widen(scale[c]) / sqrt((ACC)widen(variance[stat]) + (ACC)epsilon);
    const ACC m = widen(mean[stat]), b = widen(bias[c]);
    Vec<T, VEC> own;
    Beside<VEC> more;
    fetch(i, own, more);
    apply(y, i, own, more, &m, &a, &b, 0);
#endif
}

#ifdef R
extern "C" __global__ void __launch_bounds__(256)
    channel_running(const R* old_mean, const R* old_variance, const M* mean, const M* variance,
                    R* new_mean, R* new_variance, i64 channels, float momentum) {
    after_previous_launch();
    const i64 c = (i64)blockIdx.x * 256 + threadIdx.x;
    if (c >= channels) return;
    const ACC keep = momentum, rest = 1 - keep;
    new_mean[c] = narrow<R>(keep * (ACC)widen(old_mean[c]) + rest * (ACC)widen(mean[c]));
    new_variance[c] = narrow<R>(keep * (ACC)widen(old_variance[c]) + rest * (ACC)widen(variance[c]));
}
#endif
