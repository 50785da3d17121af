// pool/resample.cu: y[o, i, j, n] = sum over s, t of above_weight[i, s] weight[j, t] x[o, above[i, s], source[j, t], n].
// Idea     : one or two axes of a Resize. The host works out sources and weights (they depend on sizes and
//            attributes alone); nearest, linear, cubic, antialiased: all the same kernel. A thread has VEC
//            neighbours of n, or COLUMNS of j where n is a single one. All sources -1: `outside`. No branch
//            stands between the loads, which would go one by one; few sources and weights stay in registers.
// Inputs   : x X [outer, rows, length, inner VEC], y Y [outer, resized rows, resized, inner VEC]; source i32, weight
//            f32 [resized, TAPS], above i32, above_weight f32 [resized rows, ROWS].
// Macros   : X Y ACC TAPS, ROWS (0: no axis in front), VEC (16 bytes at most), COLUMNS (divides `resized`).
// Launch   : a thread for each VEC COLUMNS elements of y.   Bound: HBM, x (cached) and y once.
#include "common.cuh"

DEVICE i64 quotient(i64 a, i64 b) { return (a | b) >> 32 ? a / b : (u32)a / (u32)b; }

template <class E> struct Table {  // of this thread's columns: a copy where that is short
    static constexpr int SIZE = COLUMNS * TAPS, GROUP = SIZE % 4 == 0 ? 4 : SIZE % 2 == 0 ? 2 : 1;
    static constexpr bool SHORT = SIZE <= 16;
    const E* from;
    E copy[SHORT ? SIZE : 1];
    DEVICE explicit Table(const E* p) : from(p) {
        if (!SHORT) return;
        UNROLLED for (int i = 0; i < (SHORT ? SIZE : 0); i += GROUP) {
            const Vec<E, GROUP> v = load<GROUP>(p + i);
            UNROLLED for (int k = 0; k < GROUP; k++) copy[i + k] = v.at[k];
        }
    }
    DEVICE E at(int i) const { return SHORT ? copy[i] : from[i]; }
};

extern "C" __global__ void __launch_bounds__(256)
    resample(const X* x, const int* source, const float* weight, const int* above, const float* above_weight,
             Y* y, i64 threads, int rows, int resized_rows, int length, int across, i64 inner, float outside) {
    after_previous_launch();
    const i64 at = (i64)blockIdx.x * 256 + threadIdx.x;
    if (at >= threads) return;
    const i64 pixel = quotient(at, inner), n = (at - pixel * inner) * VEC, line = quotient(pixel, across);
    const int j = (int)(pixel - line * across) * COLUMNS;
    const i64 o = quotient(line, resized_rows);
    const int i = (int)(line - o * resized_rows);
    const i64 stride = COLUMNS > 1 ? 1 : inner * VEC;
    const X* image = x + o * rows * length * stride + n;
    const Table<int> sources(source + (i64)j * TAPS);
    const Table<float> weights(weight + (i64)j * TAPS);
    ACC sum[COLUMNS * VEC] = {};
    UNROLLED for (int s = 0; s < (ROWS ? ROWS : 1); s++) {
        const int row = ROWS ? above[i * ROWS + s] : 0;
        const float a = ROWS ? above_weight[i * ROWS + s] : 1.0f;
        const X* across_row = image + (i64)max(row, 0) * length * stride;
        UNROLLED for (int c = 0; c < COLUMNS; c++) {
            ACC part[VEC] = {};
            UNROLLED for (int t = 0; t < TAPS; t++) {
                const int from = sources.at(c * TAPS + t);
                const float w = weights.at(c * TAPS + t);
                const Vec<X, VEC> v = load<VEC>(across_row + max(from, 0) * stride);
                // 0 times an infinity is no 0
                UNROLLED for (int k = 0; k < VEC; k++)
                    part[k] = w != 0 ? part[k] + (ACC)w * (ACC)widen(v.at[k]) : part[k];
            }
            UNROLLED for (int k = 0; k < VEC; k++) {
                ACC& total = sum[c * VEC + k];
                total = a != 0 ? total + (ROWS ? (ACC)a * part[k] : part[k]) : total;
            }
        }
    }
    Vec<Y, COLUMNS * VEC> result;
    const bool beyond = ROWS && above[i * ROWS] < 0;
    UNROLLED for (int k = 0; k < COLUMNS * VEC; k++)
        result.at[k] = narrow<Y>(beyond || sources.at(k / VEC * TAPS) < 0 ? (ACC)outside : sum[k]);
    store<COLUMNS * VEC>(y + at * (COLUMNS * VEC), result);
}
