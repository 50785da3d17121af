// softmax/row.cu: y = softmax(x) or log_softmax(x) over the last axis of x[rows, length].
// Idea     : TEAM threads a row; the row waits in registers between its one read and its one write
//            (ITEMS vectors a thread), or is read again where it is too long (ITEMS = 0).
// Inputs   : x, y [rows, length] T, aligned to VEC elements.
// Macros   : T ACC VEC ITEMS LOG; TEAM (power of two <= 1024), BLOCK (TEAM, or more where TEAM <= 32).
// Numerics : maximum subtracted; exp and sums in ACC; one rounding. ACC row all -inf gives NaN.
// Bound    : HBM, x read once and y written once.
#include "reduce/team.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) softmax_row(const T* x, T* y, i64 rows, i64 length) {
    __shared__ ACC scratch[TEAM > 32 ? TEAM / 32 : 1];
    const i64 row = (i64)blockIdx.x * (BLOCK / TEAM) + threadIdx.x / TEAM;
    const int lane = threadIdx.x % TEAM, n = row < rows ? (int)length : 0;
    x += (row < rows ? row : 0) * length;
    y += (row < rows ? row : 0) * length;
    ACC largest = -INFINITE, sum = 0;
    constexpr int STEP = TEAM * VEC;
#if ITEMS
    ACC v[ITEMS * VEC];
#pragma unroll
    for (int u = 0; u < ITEMS; u++) {
        const int i = u * STEP + lane * VEC;
        if (i < n) {
            const Vec<T, VEC> t = load<VEC>(x + i);
#pragma unroll
            for (int j = 0; j < VEC; j++) v[u * VEC + j] = widen(t.at[j]);
        } else {
#pragma unroll
            for (int j = 0; j < VEC; j++) v[u * VEC + j] = -INFINITE;
        }
    }
#pragma unroll
    for (int j = 0; j < ITEMS * VEC; j++) largest = v[j] > largest || v[j] != v[j] ? v[j] : largest;
    largest = team_max<TEAM>(largest, scratch);
#pragma unroll
    for (int j = 0; j < ITEMS * VEC; j++) {
        const ACC e = exp(v[j] - largest);
        sum += (j / VEC * STEP + lane * VEC) < n ? e : 0;
        if (!LOG) v[j] = e;
    }
    sum = team_sum<TEAM>(sum, scratch);
    const ACC scale = LOG ? largest + log(sum) : 1 / sum;
#pragma unroll
    for (int u = 0; u < ITEMS; u++) {
        const int i = u * STEP + lane * VEC;
        Vec<T, VEC> t;
#pragma unroll
        for (int j = 0; j < VEC; j++) t.at[j] = narrow<T>(LOG ? v[u * VEC + j] - scale : v[u * VEC + j] * scale);
        if (i < n) store<VEC>(y + i, t);
    }
#else
    for (int i = lane * VEC; i < n; i += STEP) {
        const Vec<T, VEC> t = load<VEC>(x + i);
        ACC top = largest;
#pragma unroll
        for (int j = 0; j < VEC; j++) top = (ACC)widen(t.at[j]) > top ? (ACC)widen(t.at[j]) : top;
        if (top > largest) sum *= exp(largest - top), largest = top;
#pragma unroll
        for (int j = 0; j < VEC; j++) sum += largest == -INFINITE ? (ACC)0 : exp((ACC)widen(t.at[j]) - largest);
    }
    const ACC top = team_max<TEAM>(largest, scratch);
    sum = team_sum<TEAM>(sum == 0 ? sum : sum * exp(largest - top), scratch);
    const ACC scale = LOG ? top + log(sum) : 1 / sum;
    for (int i = lane * VEC; i < n; i += STEP) {
        Vec<T, VEC> t = load<VEC>(x + i);
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            const ACC at = widen(t.at[j]);
            t.at[j] = narrow<T>(LOG ? at - scale : exp(at - top) * scale);
        }
        store<VEC>(y + i, t);
    }
#endif
}
