// layernorm/channel.cu: y = (x - mean) / sqrt(variance + epsilon) * scale + bias with given statistics.
// Idea     : a vector of VEC elements a thread; channel_apply serves BatchNormalization (statistics
//            by channel) and the Group- and InstanceNormalization of long rows (by group of
//            `per` channels: GROUPED). channel_running: the new running mean and variance.
// Inputs   : x, y [n, channels, inner] T, VEC divides inner; scale, bias P [channels]; mean, variance M
//            [channels], or [n * channels / per] where GROUPED.
//            e1, e2, e3 T, laid out as y: what SUFFIX (suffix.cuh) takes of channel_apply's result, in TY.
// Macros   : T P M ACC VEC GROUPED, suffix.cuh's.
// Bound    : HBM, x read and y written once.
#include "layernorm/suffix.cuh"

extern "C" __global__ void __launch_bounds__(256)
    channel_apply(const T* x, const P* scale, const P* bias, const M* mean, const M* variance,
                  const T* e1, const T* e2, const T* e3, TY* y, i64 size, i64 channels, i64 inner,
                  i64 per, float epsilon) {
    after_previous_launch();
    const i64 i = ((i64)blockIdx.x * 256 + threadIdx.x) * VEC;
    if (i >= size) return;
    const i64 q = i / inner, c = q % channels, stat = GROUPED ? q / per : c;
    const ACC a = (ACC)widen(scale[c]) / sqrt((ACC)widen(variance[stat]) + (ACC)epsilon);
    const ACC m = widen(mean[stat]), b = widen(bias[c]);
    const Vec<T, VEC> t = load<VEC>(x + i);
    Vec<T, VEC> e[3];
    if (OPERANDS > 0) e[0] = load<VEC>(e1 + i);
    if (OPERANDS > 1) e[1] = load<VEC>(e2 + i);
    if (OPERANDS > 2) e[2] = load<VEC>(e3 + i);
    Vec<TY, VEC> out;
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        const ACC v = ((ACC)widen(t.at[j]) - m) * a + b;
        out.at[j] = narrow<TY>((Accumulator<TY>::type)SUFFIX(v, widen(e[0].at[j]), widen(e[1].at[j]), widen(e[2].at[j])));
    }
    store<VEC>(y + i, out);
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
