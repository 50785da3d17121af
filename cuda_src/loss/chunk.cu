// loss/chunk.cu: the cross-entropy of a chunk of rows of scores, and its gradient in their place.
// Idea     : a block a row. The row is read once from memory: SHARED 1 keeps it in shared memory, each
//            thread what it read itself; else the second read is L2's. Once the block agrees on its
//            log-sum-exp, the gradient takes the row's place. AHEAD 1: a block takes several rows in
//            turn, and the next one is copied to the other half of shared memory meanwhile.
// Inputs   : x [rows, stride] T, scores in the first `classes` columns, rows and stride of whole 16 bytes;
//            target I [rows]; weight W [classes] or null: ones. A target equal to `ignored` counts nothing.
// Outputs  : rows: a Pair each, the loss and the weight of its label. With s the smoothing and w the
//            weights, loss = (1 - s) w[t] (-log p[t]) + s / classes sum_c w[c] (-log p[c]).
//            GRAD 1: x becomes d loss / d x, and 0 from column `classes` on.
// Macros   : T I W, ACC float; TEAM threads; VEC elements an access; SHARED; AHEAD (sm_90); GRAD; SMOOTH.
// Launch   : TEAM threads; grid rows, and stride elements of shared memory for SHARED; AHEAD: any grid,
//            two times stride elements.
// Numerics : sums in float, in an order that TEAM alone decides. A label out of range makes NaN.
// Bound    : HBM: x once, and once more with GRAD.
#include "loss/log_sum_exp.cuh"
#ifndef AHEAD
#define AHEAD 0
#endif
#if AHEAD
#include "sm90.cuh"
#endif

struct Sums { float weights, scores; };  // of w[c], and of w[c] x[c]
constexpr int STEP = TEAM * VEC, UNROLL = 4;

// VEC columns from `c` on as float; those beyond the last class are `beyond`.
struct Columns { float at[VEC]; };
DEVICE Columns columns(const Vec<T, VEC>& t, int c, int classes, float beyond) {
    Columns x;
    UNROLLED for (int j = 0; j < VEC; j++) x.at[j] = to_float(t.at[j]);
    if (c + VEC > classes)
        UNROLLED for (int j = 0; j < VEC; j++)
            if (c + j >= classes) x.at[j] = beyond;
    return x;
}

extern "C" __global__ void __launch_bounds__(TEAM)
    cross_entropy_chunk(T* x, const I* target, const W* weight, Pair* rows, int count, int classes,
                        int stride, i64 ignored, float smoothing) {
    after_previous_launch();
    extern __shared__ __align__(16) u8 memory[];
    __shared__ Sofar scratch[TEAM / 32];
#if AHEAD
    __shared__ __align__(8) u64 arrived[2];
    auto fetch = [&](int row, int half) {
        const u32 bytes = (classes + VEC - 1) / VEC * VEC * sizeof(T), bar = smem_address(arrived + half);
        if (threadIdx.x || row >= count) return;
        mbarrier_expect(bar, bytes);
        bulk_load(smem_address((T*)memory + half * stride), x + (i64)row * stride, bytes, bar);
    };
    if (threadIdx.x == 0) {
        for (int half = 0; half < 2; half++) mbarrier_init(smem_address(arrived + half), 1);
        fence_barrier_init();
    }
    __syncthreads();
    fetch(blockIdx.x, 0);
#endif
    i64 next = target[blockIdx.x];
    for (int row = blockIdx.x, turn = 0; row < count; row += gridDim.x, turn++) {
        T* line = x + (i64)row * stride;
        T* again = SHARED ? (T*)memory : line;  // where the row is read from afterwards
        const i64 label = next;
#if AHEAD
        if (row + gridDim.x < count) next = target[row + gridDim.x];
        fetch(row + gridDim.x, (turn + 1) % 2);
        again = (T*)memory + turn % 2 * stride;
        mbarrier_wait(smem_address(arrived + turn % 2), turn / 2 % 2);
#endif
        const T* first = AHEAD ? again : line;  // and from at first
        const bool counts = label != ignored, known = label >= 0 && label < classes;
        const int own_at = known ? (int)label : -1, mine = threadIdx.x * VEC;
        Pair p = {0, 0};
        if (counts) p.weight = !known ? 0 / 0.0f : weight ? to_float(weight[label]) : 1.0f;
        const float own = known ? to_float(first[own_at]) : 0.0f;

        Sofar s = {-INFINITE, 0};
        for (int c = mine; c < classes; c += UNROLL * STEP) {
            Vec<T, VEC> t[UNROLL];
            UNROLLED for (int u = 0; u < UNROLL; u++)
                if (c + u * STEP < classes) t[u] = load<VEC>(first + c + u * STEP);
            UNROLLED for (int u = 0; u < UNROLL; u++) {
                const int at = c + u * STEP;
                if (at >= classes) continue;
                if (SHARED) store<VEC>(again + at, t[u]);
                const Columns v = columns(t[u], at, classes, -INFINITE);
                float top = v.at[0];
                UNROLLED for (int j = 1; j < VEC; j++) top = fmaxf(top, v.at[j]);
                if (top > s.top) s.sum *= fast_exp(s.top - top), s.top = top;
                const float base = s.top == -INFINITE ? 0.0f : s.top;  // exp(-inf - 0) is 0
                UNROLLED for (int j = 0; j < VEC; j++) s.sum += fast_exp(v.at[j] - base);
            }
        }
        // its barriers are also between the read of `own` and the stores below
        s = team_merge<TEAM>(s, [](Sofar a, Sofar b) { return merge(a, b); }, scratch);
        const float lse = s.top + log(s.sum);

        float smooth = 0, total = 0;
#if SMOOTH
        __shared__ Sums smoothed[TEAM / 32];
        Sums of = {0, 0};
        for (int c = mine; c < classes; c += STEP) {
            const Columns v = columns(load<VEC>(again + c), c, classes, 0.0f);
            UNROLLED for (int j = 0; j < VEC; j++) {
                const float w = c + j >= classes ? 0.0f : weight ? to_float(weight[c + j]) : 1.0f;
                of.weights += w, of.scores += w * v.at[j];
            }
        }
        auto add = [](Sums a, Sums b) { return Sums{a.weights + b.weights, a.scores + b.scores}; };
        of = team_merge<TEAM>(of, add, smoothed);
        smooth = smoothing / classes, total = of.weights;
        p.loss = smooth * (lse * of.weights - of.scores);
#endif
        const float hard = (1 - smoothing) * p.weight;
        p.loss = counts ? p.loss + hard * (lse - own) : 0.0f;
        if (threadIdx.x == 0) rows[row] = p;
#if GRAD
        const float slope = hard + smooth * total;  // of exp(x - lse)
        for (int c = mine; c < stride; c += STEP) {
            Vec<T, VEC> t;
            if (counts && c < classes) {
                Columns v = columns(load<VEC>(again + c), c, classes, -INFINITE);
                UNROLLED for (int j = 0; j < VEC; j++) v.at[j] = slope * fast_exp(v.at[j] - lse);
                if (own_at >= c && own_at < c + VEC)
                    UNROLLED for (int j = 0; j < VEC; j++)
                        if (c + j == own_at) v.at[j] -= hard;
                if (SMOOTH)
                    UNROLLED for (int j = 0; j < VEC; j++)
                        if (c + j < classes) v.at[j] -= weight ? smooth * to_float(weight[c + j]) : smooth;
                UNROLLED for (int j = 0; j < VEC; j++) t.at[j] = from_float<T>(v.at[j]);
            } else {
                UNROLLED for (int j = 0; j < VEC; j++) t.at[j] = from_float<T>(0.0f);
            }
            store<VEC>(line + c, t);
        }
#endif
        if (AHEAD) __syncthreads();  // before this half is filled anew
    }
}
