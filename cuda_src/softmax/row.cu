// softmax/row.cu: y = softmax(x) or log_softmax(x) over the last axis of x[rows, length].
// Idea     : TEAM threads a row; the row waits in registers between its one read and its one write
//            (ITEMS vectors a thread), or is read again where it is too long (ITEMS = 0).
// Inputs   : x, y [rows, length] T, aligned to VEC elements.
// Macros   : T ACC VEC ITEMS LOG; TEAM (power of two <= 1024), BLOCK (TEAM, or more where TEAM <= 32).
// Numerics : maximum subtracted; exp and sums in ACC; one rounding. ACC row all -inf gives NaN.
// Bound    : HBM, x read once and y written once.
#include "reduce/team.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) softmax_row(const T* x, T* y, i64 rows, i64 length) {
    after_previous_launch();
    __shared__ ACC scratch[TEAM > 32 ? TEAM / 32 : 1];
    const i64 row = (i64)blockIdx.x * (BLOCK / TEAM) + threadIdx.x / TEAM;
    const int lane = threadIdx.x % TEAM, n = row < rows ? (int)length : 0;
    x += (row < rows ? row : 0) * length;
    y += (row < rows ? row : 0) * length;
    ACC largest = -INFINITE, sum = 0;
    constexpr int STEP = TEAM * VEC;
#if ITEMS
    Vec<T, VEC> kept[ITEMS];
    UNROLLED for (int u = 0; u < ITEMS; u++)
        if (u * STEP + lane * VEC < n) kept[u] = load<VEC>(x + u * STEP + lane * VEC);
    UNROLLED for (int u = 0; u < ITEMS; u++)
        UNROLLED for (int j = 0; j < VEC; j++) {
            const ACC at = widen(kept[u].at[j]);
            if (u * STEP + lane * VEC < n) largest = at > largest || at != at ? at : largest;
        }
    largest = team_max<TEAM>(largest, scratch);
    UNROLLED for (int u = 0; u < ITEMS; u++)
        UNROLLED for (int j = 0; j < VEC; j++) {
            const ACC e = fast_exp((ACC)widen(kept[u].at[j]) - largest);
            sum += u * STEP + lane * VEC < n ? e : (ACC)0;
            if (sizeof(T) == sizeof(ACC) && !LOG) kept[u].at[j] = narrow<T>(e);  // loses nothing
        }
    sum = team_sum<TEAM>(sum, scratch);
    const ACC scale = LOG ? largest + log(sum) : 1 / sum;
    UNROLLED for (int u = 0; u < ITEMS; u++) {
        Vec<T, VEC> t;
        UNROLLED for (int j = 0; j < VEC; j++) {
            const ACC at = widen(kept[u].at[j]);
            t.at[j] = narrow<T>(LOG ? at - scale : (sizeof(T) == sizeof(ACC) ? at : fast_exp(at - largest)) * scale);
        }
        if (u * STEP + lane * VEC < n) store<VEC>(y + u * STEP + lane * VEC, t);
    }
#else
    for (int i = lane * VEC; i < n; i += STEP) {
        const Vec<T, VEC> t = load<VEC>(x + i);
        ACC top = largest;
        UNROLLED for (int j = 0; j < VEC; j++) top = (ACC)widen(t.at[j]) > top ? (ACC)widen(t.at[j]) : top;
        if (top > largest) sum *= fast_exp(largest - top), largest = top;
        UNROLLED for (int j = 0; j < VEC; j++) {  // a NaN is no top, but its exp is NaN
            const ACC at = widen(t.at[j]);
            sum += at == -INFINITE ? (ACC)0 : fast_exp(at - largest);
        }
    }
    const ACC top = team_max<TEAM>(largest, scratch);
    sum = team_sum<TEAM>(sum == 0 ? sum : sum * fast_exp(largest - top), scratch);
    const ACC scale = LOG ? top + log(sum) : 1 / sum;
    for (int i = lane * VEC; i < n; i += STEP) {
        Vec<T, VEC> t = load<VEC>(x + i);
        UNROLLED for (int j = 0; j < VEC; j++) {
            const ACC at = widen(t.at[j]);
            t.at[j] = narrow<T>(LOG ? at - scale : fast_exp(at - top) * scale);
        }
        store<VEC>(y + i, t);
    }
#endif
}
