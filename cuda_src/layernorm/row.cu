// layernorm/row.cu: y = (s - mean) * rstd * scale + bias over rows of x[rows, length], s = x (+ residual).
// Idea     : one kernel for LayerNormalization, RMSNormalization, Group- and InstanceNormalization
//            and their residual forms: TEAM threads a row, the row in registers (ITEMS vectors a
//            thread; 0: read again), two passes over it: mean, then the squares about the mean.
// Inputs   : x, residual [rows, length] T aligned to VEC; scale, bias P: by element [length] (AFFINE 1)
//            or by channel (AFFINE 2): index row % groups * channels + i / inner; VEC divides inner.
//            e1, e2, e3 [rows, length] T: what SUFFIX takes. PRODUCT: w [length, PRODUCT] (TURNED:
//            [PRODUCT, length]) aligned to 16 bytes, c [PRODUCT] or null, TY.
// Outputs  : y [rows, length] TY, and, where not null, sum = s T, mean and rstd [rows] M. PRODUCT:
//            z = y · w + c [rows, PRODUCT] TY; y may be null.
// Macros   : T P M ACC VEC ITEMS TEAM BLOCK; RMS, RESIDUAL, AFFINE (0: neither scale nor bias);
//            PRODUCT (0: none; at most 16), TURNED;
//            SUFFIX(v0, v1, v2, v3) of y, the first OPERANDS of e1, e2, e3 and NUMBERS, in TY (T if not given).
// Numerics : ACC throughout (s rounded to T first, as it is stored); population variance.
// Bound    : HBM, each operand once.
#include "layernorm/few_columns.cuh"
#include "layernorm/suffix.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK)
    layernorm_row(const T* x, const T* residual, const P* scale, const P* bias, const T* e1, const T* e2,
                  const T* e3, const TY* w, const TY* c, TY* y, T* sum, M* mean_out, M* rstd_out, TY* z,
                  i64 rows, i64 length, i64 groups, i64 channels, i64 inner, float epsilon, NUMBERS) {
    if (gridDim.x <= 128) launch_dependents();  // of a few rows: the weights behind it are on their way meanwhile
    grid_dependency_wait();
    __shared__ ACC scratch[TEAM > 32 ? TEAM / 32 : 1];
    const i64 row = (i64)blockIdx.x * (BLOCK / TEAM) + threadIdx.x / TEAM;
    const bool live = row < rows;
    const int lane = threadIdx.x % TEAM, n = live ? (int)length : 0;
    const i64 base = (live ? row : 0) * length;
    constexpr int STEP = TEAM * VEC;
#define AHEAD (AFFINE == 1 && ITEMS && ITEMS * VEC <= 8)
#if ITEMS
    Vec<T, VEC> kept[ITEMS];
#define EACH(u, i) UNROLLED for (int u = 0, i = lane * VEC; u < ITEMS; u++, i += STEP) if (i < n)
#define ROW(u, i) kept[u]
#else
#define EACH(u, i) for (int i = lane * VEC; i < n; i += STEP)
#define ROW(u, i) load<VEC>((RESIDUAL ? sum : x) + base + i)
#endif
    ACC total = 0;
#if PRODUCT  // its share of w is under way while the rows are summed
    Share<TURNED, TY> share[ITEMS];
    ACC products[PRODUCT] = {};
    if (c && lane == 0)
        UNROLLED for (int k = 0; k < PRODUCT; k++) products[k] = widen(c[k]);
#endif
#if AHEAD
    Vec<P, VEC> scales[ITEMS], biases[ITEMS] = {};
#endif
    EACH(u, i) {
        Vec<T, VEC> t = load<VEC>(x + base + i);
#if AHEAD
        scales[u] = load<VEC>(scale + i);
        if (bias) biases[u] = load<VEC>(bias + i);
#endif
#if PRODUCT
        share[u].read(w, i, length);
#endif
#if RESIDUAL
        const Vec<T, VEC> r = load<VEC>(residual + base + i);
        UNROLLED for (int j = 0; j < VEC; j++) t.at[j] = narrow<T>((ACC)widen(t.at[j]) + (ACC)widen(r.at[j]));
        if (sum) store<VEC>(sum + base + i, t);
#endif
#if ITEMS
        kept[u] = t;
#endif
        UNROLLED for (int j = 0; j < VEC; j++)
            total += RMS ? (ACC)widen(t.at[j]) * (ACC)widen(t.at[j]) : (ACC)widen(t.at[j]);
    }
    ACC mean = team_sum<TEAM>(total, scratch) / (ACC)length, variance = mean;
    if (RMS) mean = 0;
#if !RMS
    ACC squares = 0;
    EACH(u, i) {
        const Vec<T, VEC> t = ROW(u, i);
        UNROLLED for (int j = 0; j < VEC; j++) squares += ((ACC)widen(t.at[j]) - mean) * ((ACC)widen(t.at[j]) - mean);
    }
    variance = team_sum<TEAM>(squares, scratch) / (ACC)length;
#endif
    const ACC rstd = 1 / sqrt(variance + (ACC)epsilon);
    if (live && lane == 0) {
        if (mean_out) mean_out[row] = narrow<M>(mean);
        if (rstd_out) rstd_out[row] = narrow<M>(rstd);
    }
    const i64 channel = row % groups * channels;
    EACH(u, i) {
        const Vec<T, VEC> t = ROW(u, i);
        Beside<VEC> more;
        more.read(e1, e2, e3, base + i);
        Vec<TY, VEC> out;
#if AFFINE == 1
#if AHEAD
        const Vec<P, VEC> a = scales[u], b = biases[u];
#else
        const Vec<P, VEC> a = load<VEC>(scale + i), b = bias ? load<VEC>(bias + i) : Vec<P, VEC>();
#endif
#elif AFFINE == 2
        const i64 at = channel + i / (int)inner;
        const ACC a = widen(scale[at]), b = widen(bias[at]);
#endif
        UNROLLED for (int j = 0; j < VEC; j++) {
            ACC v = ((ACC)widen(t.at[j]) - mean) * rstd;
#if AFFINE == 1
            v *= (ACC)widen(a.at[j]);
            if (bias) v += (ACC)widen(b.at[j]);
#elif AFFINE == 2
            v = v * a + b;
#endif
            out.at[j] = stored<TY>(SUFFIX(v, widen(more.e[0].at[j]), widen(more.e[1].at[j]), widen(more.e[2].at[j])));
        }
        if (!PRODUCT || y) store<VEC>(y + base + i, out);
#if PRODUCT
        UNROLLED for (int k = 0; k < PRODUCT; k++)
            UNROLLED for (int j = 0; j < VEC; j++) products[k] += (ACC)widen(out.at[j]) * share[u].at(k, j);
#endif
    }
#if PRODUCT
    const Part mine = spread_sum<TEAM>(products);
#if TEAM > 32
    __shared__ ACC warps[TEAM / 32][PRODUCT];
    if (mine.first < mine.end) warps[lane / 32][mine.first] = products[0];
    __syncthreads();
    products[0] = 0;
    if (lane < 32 && mine.first < mine.end)
        UNROLLED for (int v = 0; v < TEAM / 32; v++) products[0] += warps[v][mine.first];
#endif
    if (live && lane < 32)
        UNROLLED for (int k = 0; k < (PRODUCT + TEAM - 1) / TEAM; k++)
            if (mine.first + k < mine.end) z[row * PRODUCT + mine.first + k] = narrow<TY>(products[k]);
#endif
}
