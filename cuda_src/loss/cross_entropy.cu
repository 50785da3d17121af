// loss/cross_entropy.cu: -w[t] log p[t] per row of scores x[n, classes, inner] for targets t[n, inner].
// Idea     : one read of the scores: a running (maximum, sum of exp) a thread, merged over TEAM threads
//            (inner = 1), or a thread a row (inner > 1, neighbours contiguous). Row losses and weights
//            go to `rows`; cross_entropy_total, one block, adds them up in a fixed order.
// Inputs   : x [n, classes, inner] T scores (LOG_SOFTMAX 1) or log probabilities (0); target I; weight T
//            [classes] or null; targets equal to `ignored` count nothing.
// Outputs  : loss T [n, inner] (null where reduced); rows ACC2 pairs (loss, weight); log_prob T or null.
// Macros   : T I ACC LOG_SOFTMAX VEC TEAM BLOCK; MEAN (total divides by the sum of weights).
// Bound    : HBM, x once (twice with log_prob).
#include "loss/log_sum_exp.cuh"

DEVICE Sofar take(Sofar s, const Vec<T, VEC>& t) {
    ACC top = s.top;
    UNROLLED for (int j = 0; j < VEC; j++) top = (ACC)widen(t.at[j]) > top ? (ACC)widen(t.at[j]) : top;
    if (top > s.top) s.sum *= fast_exp(s.top - top), s.top = top;
    if (s.top == -INFINITE) top = 0;  // exp(-inf - 0) is 0
    UNROLLED for (int j = 0; j < VEC; j++) s.sum += fast_exp((ACC)widen(t.at[j]) - top);
    return s;
}
// log of the sum of exp over a row of `classes` scores, `inner` apart
DEVICE ACC log_sum_exp(const T* x, i64 classes, i64 inner, int lane, Sofar* scratch) {
    Sofar s = {-INFINITE, 0};
    constexpr int STEP = TEAM * VEC, UNROLL = 4;
    for (i64 c = lane * VEC; c < classes; c += UNROLL * STEP) {
        Vec<T, VEC> t[UNROLL];
        UNROLLED for (int u = 0; u < UNROLL; u++)
            if (c + u * STEP < classes) t[u] = load<VEC>(x + (c + u * STEP) * inner);
        UNROLLED for (int u = 0; u < UNROLL; u++)
            if (c + u * STEP < classes) s = take(s, t[u]);
    }
    s = team_merge<TEAM>(s, [](Sofar a, Sofar b) { return merge(a, b); }, scratch);
    return s.top + log(s.sum);
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    cross_entropy_row(const T* x, const I* target, const T* weight, T* loss, Pair* rows, T* log_prob,
                      i64 count, i64 classes, i64 inner, i64 ignored) {
    after_previous_launch();
    __shared__ Sofar scratch[TEAM > 32 ? TEAM / 32 : 1];
    const i64 row = (i64)blockIdx.x * (BLOCK / TEAM) + threadIdx.x / TEAM;
    const bool live = row < count;
    const int lane = threadIdx.x % TEAM;
    const i64 base = live ? row / inner * classes * inner + row % inner : 0;
    ACC lse = 0;
#if LOG_SOFTMAX
    lse = log_sum_exp(x + base, live ? classes : 0, inner, lane, scratch);
    if (log_prob)
        for (i64 c = lane * VEC; c < (live ? classes : 0); c += TEAM * VEC) {
            Vec<T, VEC> t = load<VEC>(x + base + c * inner);
            UNROLLED for (int j = 0; j < VEC; j++) t.at[j] = narrow<T>((ACC)widen(t.at[j]) - lse);
            store<VEC>(log_prob + base + c * inner, t);
        }
#endif
    if (!live || lane) return;
    const i64 t = target[row];
    Pair p = {0, 0};
    if (t != ignored) {
        p.weight = t < 0 || t >= classes ? 0 / (ACC)0 : weight ? (ACC)widen(weight[t]) : (ACC)1;
        p.loss = t < 0 || t >= classes ? p.weight : (lse - (ACC)widen(x[base + t * inner])) * p.weight;
    }
    if (loss) loss[row] = narrow<T>(p.loss);
    if (rows) rows[row] = p;
}

// dx = slope (softmax(x) - [class is the label]); slope and label [n, inner]; the second read is L2's.
extern "C" __global__ void __launch_bounds__(BLOCK)
    cross_entropy_grad(const T* x, const I* target, const T* slope, T* dx, i64 count, i64 classes, i64 inner) {
    after_previous_launch();
    __shared__ Sofar scratch[TEAM > 32 ? TEAM / 32 : 1];
    const i64 row = (i64)blockIdx.x * (BLOCK / TEAM) + threadIdx.x / TEAM;
    const bool live = row < count;
    const int lane = threadIdx.x % TEAM;
    const i64 base = live ? row / inner * classes * inner + row % inner : 0;
    const ACC lse = log_sum_exp(x + base, live ? classes : 0, inner, lane, scratch);
    if (!live) return;
    const ACC g = widen(slope[row]);
    const i64 label = target[row];
    for (i64 c = lane * VEC; c < classes; c += TEAM * VEC) {
        Vec<T, VEC> t = load<VEC>(x + base + c * inner);
        UNROLLED for (int j = 0; j < VEC; j++) {
            const ACC p = fast_exp((ACC)widen(t.at[j]) - lse);
            t.at[j] = narrow<T>(g * (c + j == label ? p - 1 : p));
        }
        store<VEC>(dx + base + c * inner, t);
    }
}

extern "C" __global__ void __launch_bounds__(1024) cross_entropy_total(const Pair* rows, T* loss, i64 count) {
    after_previous_launch();
    __shared__ Pair scratch[32];
    Pair p = {0, 0};
    for (i64 i = threadIdx.x; i < count; i += 1024) p.loss += rows[i].loss, p.weight += rows[i].weight;
    p = team_merge<1024>(p, [](Pair a, Pair b) { return Pair{a.loss + b.loss, a.weight + b.weight}; }, scratch);
    if (threadIdx.x == 0) *loss = narrow<T>(MEAN ? p.loss / p.weight : p.loss);
}
