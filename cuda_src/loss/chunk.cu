// loss/chunk.cu: the cross-entropy of a chunk of rows of scores, and its gradient in their place.
// Idea     : a block a row. The row is read once from memory: SHARED 1 keeps it in shared memory, each
//            thread what it read itself; else the second read is L2's. Once the block agrees on its
//            log-sum-exp, the gradient takes the row's place.
// Inputs   : x [rows, stride] T, scores in the first `classes` columns, rows and stride of whole 16 bytes;
//            target I [rows]; weight W [classes] or null: ones. A target equal to `ignored` counts nothing.
// Outputs  : rows: a Pair of ACC each, the loss and the weight of its label. With s the smoothing and w the
//            weights, loss = (1 - s) w[t] (-log p[t]) + s / classes sum_c w[c] (-log p[c]).
//            GRAD 1: x becomes d loss / d x, and 0 from column `classes` on.
// Macros   : T I W ACC; BLOCK threads; VEC elements an access; SHARED; GRAD; SMOOTH.
// Launch   : grid rows, BLOCK threads; SHARED: stride elements of shared memory.
// Numerics : sums in ACC, in an order that BLOCK alone decides. A label out of range makes NaN.
// Bound    : HBM: x once, and once more with GRAD.
#include "loss/log_sum_exp.cuh"

struct Sums { ACC weights, scores; };  // of w[c], and of w[c] x[c]

extern "C" __global__ void __launch_bounds__(BLOCK)
    cross_entropy_chunk(T* x, const I* target, const W* weight, Pair* rows, i64 classes, i64 stride,
                        i64 ignored, float smoothing) {
    after_previous_launch();
    extern __shared__ __align__(16) u8 memory[];
    T* held = (T*)memory;
    __shared__ Sofar scratch[BLOCK / 32];
    const i64 row = blockIdx.x;
    T* line = x + row * stride;
    const i64 label = target[row];
    const bool counts = label != ignored, known = label >= 0 && label < classes;
    Pair p = {0, 0};
    if (counts) p.weight = !known ? 0 / (ACC)0 : weight ? (ACC)widen(weight[label]) : (ACC)1;
    const ACC own = counts && known ? (ACC)widen(line[label]) : (ACC)0;

    Sofar s = {-INFINITE, 0};
    constexpr int STEP = BLOCK * VEC, UNROLL = 4;
    for (i64 c = threadIdx.x * VEC; c < classes; c += UNROLL * STEP) {
        Vec<T, VEC> t[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            if (c + u * STEP < classes) t[u] = load<VEC>(line + c + u * STEP);
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            const i64 at = c + u * STEP;
            if (at >= classes) continue;
            if (SHARED) store<VEC>(held + at, t[u]);
            if (at + VEC > classes)
#pragma unroll
                for (int j = 0; j < VEC; j++)
                    if (at + j >= classes) t[u].at[j] = narrow<T>(-INFINITE);
            s = take<VEC>(s, t[u]);
        }
    }
    // its barriers are also between the read of `own` and the stores below
    s = team_merge<BLOCK>(s, [](Sofar a, Sofar b) { return merge(a, b); }, scratch);
    const ACC lse = s.top + log(s.sum);

    ACC smooth = 0, total = 0;
#if SMOOTH
    __shared__ Sums smoothed[BLOCK / 32];
    Sums of = {0, 0};
    for (i64 c = threadIdx.x * VEC; c < classes; c += STEP) {
        const Vec<T, VEC> t = load<VEC>((SHARED ? held : line) + c);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            if (c + j >= classes) continue;
            const ACC w = weight ? (ACC)widen(weight[c + j]) : (ACC)1;
            of.weights += w, of.scores += w * (ACC)widen(t.at[j]);
        }
    }
    of = team_merge<BLOCK>(of, [](Sums a, Sums b) { return Sums{a.weights + b.weights, a.scores + b.scores}; }, smoothed);
    smooth = smoothing / (ACC)classes, total = of.weights;
    if (counts) p.loss = smooth * (lse * of.weights - of.scores);
#endif
    const ACC hard = (1 - (ACC)smoothing) * p.weight;
    if (counts) p.loss += hard * (lse - own);
    if (threadIdx.x == 0) rows[row] = p;
#if GRAD
    const ACC slope = hard + smooth * total;  // of exp(x - lse)
    for (i64 c = threadIdx.x * VEC; c < stride; c += STEP) {
        Vec<T, VEC> t;
        if (c < classes) t = load<VEC>((SHARED ? held : line) + c);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            ACC d = slope * fast_exp((ACC)widen(t.at[j]) - lse);
            if (c + j == label) d -= hard;
            if (SMOOTH && c + j < classes) d -= weight ? smooth * (ACC)widen(weight[c + j]) : smooth;
            t.at[j] = narrow<T>(counts && c + j < classes ? d : (ACC)0);
        }
        store<VEC>(line + c, t);
    }
#endif
}
