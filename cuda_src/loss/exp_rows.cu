// loss/exp_rows.cu: the cross-entropy of a chunk of rows whose product stores e = exp(score - reference).
// Idea     : an exponential needs no maximum, only a number near it. The label's own score is known before
//            the product of all scores, so that the product's epilogue takes the exponentials and their
//            sums, and no pass over the scores is left. label_score makes the references, a warp a row,
//            BITS above the label's score. exp_rows adds up a row's sums: with S their sum and w the
//            label's weight, d loss / d score = w / S (e - S [the label's]). The factor is a row's, so it is
//            left to the products behind: to dx's epilogue, and to dw's other operand, which is x times it.
//            A row with scores too far above its label's, or without a reference, is made anew from x and W.
// Inputs   : x [count, k] T, W [classes, k] T, rows ldx and ldw elements apart (TURNED: W [k, classes]), bias
//            [classes] T or null; target I [count]; weight [classes] or null: ones; part [parts, count] f32.
//            A target equal to `ignored` counts nothing.
// Outputs  : label_score: to [count] f32, the reference in units of log 2, inf where the row counts nothing.
//            exp_rows: rows, a Pair each, the loss w (log S - log e[label]) and w; scale [count] f32, w / S,
//            and narrow [count] T, the same, or null;
//            e [count, stride] T: e[label] - S in the label's place; SCALED 1: scaled [count, k] T, scale x.
// Macros   : T I W, ACC float; VEC elements an access of x and W; TURNED; SCALED.
// Launch   : label_score: ceil(count / 8) blocks of 256; exp_rows: ceil(count / 16) blocks of 512.
// Numerics : S is of e as they are stored, in an order that `parts` decides, and the label's e is 2^-BITS
//            exactly but for very large scores: the gradient's sum over a row is 0 before it is rounded. A
//            label out of range makes NaN.
// Bound    : HBM: a row of W for each label; the sums and x, x written.
#include "loss/log_sum_exp.cuh"

constexpr int BITS = 64, ROWS = 16, THREADS = 512, SLICES = THREADS / ROWS, AHEAD = 4;
constexpr float LEAST = 8.271806e-25f;  // 2^-80, of a label's e: it has met its reference
constexpr float MOST = 7.922816e28f;    // 2^96, of a sum: times any weight below 2^31 it is no infinity
enum State { DONE, CLEAR, AGAIN };

// x [k] times the rows of W from `n` on, of which there are `most`: STEPS accesses of each at once.
template <int STEPS, int N>
DEVICE void warp_dots(float (&sum)[N], const T* x, const T* w, i64 n, int most, int k, int ldw) {
    for (int first = threadIdx.x % 32 * VEC; first < k; first += STEPS * 32 * VEC) {
        Vec<T, VEC> a[STEPS], b[STEPS][N];
        UNROLLED for (int u = 0; u < STEPS; u++) {
            const int j = first + u * 32 * VEC;
            if (j < k) a[u] = load<VEC>(x + j);
            UNROLLED for (int i = 0; i < N; i++) {
                if (j >= k || i >= most) continue;
                if (!TURNED) b[u][i] = load<VEC>(w + (n + i) * ldw + j);
                UNROLLED for (int v = 0; v < VEC; v++)
                    if (TURNED) b[u][i].at[v] = w[(i64)(j + v) * ldw + n + i];
            }
        }
        UNROLLED for (int u = 0; u < STEPS; u++)
            UNROLLED for (int i = 0; i < N; i++)
                if (first + u * 32 * VEC < k && i < most)
                    UNROLLED for (int v = 0; v < VEC; v++)
                        sum[i] = fmaf(to_float(a[u].at[v]), to_float(b[u][i].at[v]), sum[i]);
    }
    UNROLLED for (int i = 0; i < N; i++) sum[i] = warp_sum(sum[i]);
}

extern "C" __global__ void __launch_bounds__(256)
    label_score(const T* x, const T* w, const T* bias, const I* target, float* to, int count, int k,
                int classes, int ldx, int ldw, i64 ignored) {
    after_previous_launch();
    const int row = blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= count) return;
    const i64 label = target[row];
    const bool counts = label != ignored && label >= 0 && label < classes;
    float score[1] = {};
    if (counts) {
        warp_dots<AHEAD>(score, x + (i64)row * ldx, w, label, 1, k, ldw);
        if (bias) score[0] += to_float(bias[label]);
    }
    const float near = fabsf(score[0]) < 1e30f ? score[0] * 1.4426950408889634f + BITS : 0.0f;
    if (threadIdx.x % 32 == 0) to[row] = counts ? near : INFINITE;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    exp_rows(T* e, const float* part, const T* x, const T* w, const T* bias, const I* target,
             const W* weight, Pair* rows, float* scale, T* narrow, T* scaled, int count, int k,
             int classes, int stride, int parts, int ldx, int ldw, i64 ignored) {
    after_previous_launch();
    __shared__ float sums[SLICES][ROWS], factor[ROWS], scratch[THREADS / 32];
    __shared__ State state[ROWS];
    const int start = blockIdx.x * ROWS, r = threadIdx.x % ROWS, slice = threadIdx.x / ROWS;
    const int row = start + r;

    // the label, its weight and its e are asked for ahead of the sums, by those that will need them
    i64 label = ignored;
    if (slice == 0 && row < count) label = target[row];
    const bool counts = label != ignored, known = counts && label >= 0 && label < classes;
    Pair p = {0, 0};
    if (counts) p.weight = !known ? 0 / 0.0f : weight ? to_float(weight[label]) : 1.0f;
    T* const place = e + (i64)row * stride + label;
    const float own = known ? to_float(*place) : 0.0f;

    float sum = 0;
    for (int first = slice; first < parts && row < count; first += AHEAD * SLICES) {
        float some[AHEAD];
        UNROLLED for (int u = 0; u < AHEAD; u++) {
            const int at = first + u * SLICES;
            some[u] = at < parts ? part[(i64)at * count + row] : 0.0f;
        }
        UNROLLED for (int u = 0; u < AHEAD; u++) sum += some[u];
    }
    sums[slice][r] = sum;
    __syncthreads();
    if (slice == 0) {
        float total = 0;
        UNROLLED for (int s = 0; s < SLICES; s++) total += sums[s][r];
        State next = DONE;
        float f = 0;
        if (!counts) {
            if (total != 0) next = CLEAR;  // a score was NaN or inf
        } else if (!known) {
            p.loss = f = p.weight;
        } else if ((own >= LEAST && total <= MOST) || total != total) {
            const float ratio = total / own;
            p.loss = p.weight * (ratio < INFINITE ? log(ratio) : log(total) - log(own));
            f = p.weight / total;
            *place = from_float<T>(own - total);
        } else {
            next = AGAIN;
        }
        state[r] = next, factor[r] = f;
        if (row < count) {
            rows[row] = p, scale[row] = f;
            if (narrow) narrow[row] = from_float<T>(f);
        }
    }
    __syncthreads();

    for (int i = 0; i < ROWS; i++) {
        if (state[i] == DONE) continue;
        T* const line = e + (i64)(start + i) * stride;
        if (state[i] == CLEAR) {
            for (int c = threadIdx.x; c < classes; c += THREADS) line[c] = from_float<T>(0.0f);
            continue;
        }
        const T* const from = x + (i64)(start + i) * ldx;
        float top = -INFINITE, total = 0;
        auto keep = [&](int c, float score) {
            if (bias) score += to_float(bias[c]);
            line[c] = from_float<T>(score);
            top = fmaxf(top, to_float(line[c]));
        };
#if TURNED
        for (int c = threadIdx.x; c < classes; c += THREADS) {
            float score = 0;
            for (int j = 0; j < k; j++) score = fmaf(to_float(from[j]), to_float(w[(i64)j * ldw + c]), score);
            keep(c, score);
        }
#else
        for (int c = threadIdx.x / 32 * 2; c < classes; c += THREADS / 32 * 2) {
            float some[2] = {};
            warp_dots<1>(some, from, w, c, classes - c, k, ldw);
            UNROLLED for (int i = 0; i < 2; i++)
                if (threadIdx.x % 32 == i && c + i < classes) keep(c + i, some[i]);
        }
#endif
        top = team_max<THREADS>(top, scratch);
        const i64 here = target[start + i];
        const float score = to_float(line[here]);
        __syncthreads();  // all have read it
        for (int c = threadIdx.x; c < classes; c += THREADS) {
            line[c] = from_float<T>(fast_exp(to_float(line[c]) - top));
            total += to_float(line[c]);
        }
        total = team_sum<THREADS>(total, scratch);
        if (threadIdx.x == 0) {
            Pair& found = rows[start + i];
            found.loss = found.weight * (log(total) - (score - top));
            line[here] = from_float<T>(to_float(line[here]) - total);
            scale[start + i] = factor[i] = found.weight / total;
            if (narrow) narrow[start + i] = from_float<T>(factor[i]);
        }
        __syncthreads();
    }
#if SCALED
    const int wide = k / VEC;
    for (int first = threadIdx.x; first < ROWS * wide; first += AHEAD * THREADS) {
        Vec<T, VEC> t[AHEAD];
        UNROLLED for (int u = 0; u < AHEAD; u++) {
            const int at = first + u * THREADS, i = at / wide;
            if (i < ROWS && start + i < count) t[u] = load<VEC>(x + (i64)(start + i) * ldx + at % wide * VEC);
        }
        UNROLLED for (int u = 0; u < AHEAD; u++) {
            const int at = first + u * THREADS, i = at / wide;
            if (i >= ROWS || start + i >= count) continue;
            UNROLLED for (int v = 0; v < VEC; v++) t[u].at[v] = from_float<T>(factor[i] * to_float(t[u].at[v]));
            store<VEC>(scaled + (i64)(start + i) * k + at % wide * VEC, t[u]);
        }
    }
#endif
}
