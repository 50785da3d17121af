// layernorm/grad.cu: the gradient of LayerNormalization or RMSNormalization over rows of x[rows, length].
// Idea     : xh = (x - mean) rstd, g = dy scale: dx = rstd (g - avg(g) - xh avg(g xh)) (+ ds). A block
//            takes rows blockIdx, + gridDim, ...: x and dy are read once, into registers, and sums of
//            dy xh and dy over its rows stay there too, to end in part[block]; layernorm_dparams adds
//            the parts up in order.
// Inputs   : x, dy [rows, length] T aligned to VEC; scale P; mean (not RMS), rstd M [rows].
//            e1, e2, e3 [rows, length] T: what SUFFIX takes. PRODUCT: dy is a of dy = a · b, a [rows,
//            PRODUCT], b [PRODUCT, length] (TURNED: [length, PRODUCT]), which has no launch of its own.
// Outputs  : dx TY (null: not wanted); part ACC [blocks, 2, length]; dscale, dbias P [length] (dbias
//            null: RMS).
// Macros   : T P M ACC VEC ITEMS TEAM (threads a row: the block), RMS, SKIP (ds is there); PRODUCT, TURNED;
//            SUFFIX(v0, v1, v2, v3) of dx and the first OPERANDS of e1, e2, e3, in TY (T if not given).
// Numerics : ACC; the order depends on rows, length and the grid, which is a function of rows.
// Bound    : HBM, x, dy and dx once.
#include "layernorm/few_columns.cuh"
#include "layernorm/suffix.cuh"
#include "reduce/team.cuh"

struct Pair { ACC a, b; };

extern "C" __global__ void __launch_bounds__(TEAM) layernorm_dx(
    const T* x, const T* dy, const P* scale, const M* mean, const M* rstd, const T* ds, const T* e1, const T* e2,
    const T* e3, const T* b, TY* dx, ACC* part, i64 rows, i64 length) {
    after_previous_launch();
    __shared__ Pair scratch[TEAM > 32 ? TEAM / 32 : 1];
    constexpr int STEP = TEAM * VEC;
    Vec<ACC, VEC> sum_xh[ITEMS] = {}, sum_dy[ITEMS] = {};  // of dy xh and of dy over its rows
    part += blockIdx.x * 2 * length;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const ACC mu = RMS ? (ACC)0 : (ACC)widen(mean[row]), rs = widen(rstd[row]);
        Vec<T, VEC> kept_x[ITEMS], kept_dy[ITEMS];
        Vec<P, VEC> w[ITEMS];
        Vec<T, VEC> kept_s[ITEMS];
        Beside<VEC> more[ITEMS];
#if PRODUCT
        Share<!TURNED, T> share[ITEMS];
#endif
        UNROLLED for (int u = 0; u < ITEMS; u++) {
            const int i = u * STEP + threadIdx.x * VEC;
            if (i < length) {
                kept_x[u] = load<VEC>(x + row * length + i);
#if PRODUCT
                share[u].read(b, i, length);
#else
                kept_dy[u] = load<VEC>(dy + row * length + i);
#endif
                w[u] = load<VEC>(scale + i);
                if (SKIP) kept_s[u] = load<VEC>(ds + row * length + i);
                more[u].read(e1, e2, e3, row * length + i);
            }
        }
#if PRODUCT
        T a[PRODUCT];
        UNROLLED for (int k = 0; k < PRODUCT; k++) a[k] = dy[row * PRODUCT + k];
        UNROLLED for (int u = 0; u < ITEMS; u++)
            UNROLLED for (int j = 0; j < VEC; j++) {
                ACC d = 0;
                UNROLLED for (int k = 0; k < PRODUCT; k++) d += (ACC)widen(a[k]) * share[u].at(k, j);
                kept_dy[u].at[j] = narrow<T>(d);
            }
#endif
        Pair s = {0, 0};
        UNROLLED for (int u = 0; u < ITEMS; u++)
            if (u * STEP + threadIdx.x * VEC < length)
                UNROLLED for (int j = 0; j < VEC; j++) {
                    const ACC xh = ((ACC)widen(kept_x[u].at[j]) - mu) * rs, d = widen(kept_dy[u].at[j]);
                    const ACC g = d * (ACC)widen(w[u].at[j]);
                    s.a += g, s.b += g * xh;
                    sum_xh[u].at[j] += d * xh;
                    if (!RMS) sum_dy[u].at[j] += d;
                }
        if (row + gridDim.x >= rows)  // its last row: the stores are under way beside the sums
            UNROLLED for (int u = 0; u < ITEMS; u++) {
                const int i = u * STEP + threadIdx.x * VEC;
                if (i < length) store<VEC>(part + i, sum_xh[u]);
                if (i < length && !RMS) store<VEC>(part + length + i, sum_dy[u]);
            }
        s = team_merge<TEAM>(s, [](Pair a, Pair b) { return Pair{a.a + b.a, a.b + b.b}; }, scratch);
        if (!dx) continue;
        const ACC c1 = RMS ? (ACC)0 : s.a / (ACC)length, c2 = s.b / (ACC)length;
        UNROLLED for (int u = 0; u < ITEMS; u++) {
            const int i = u * STEP + threadIdx.x * VEC;
            Vec<TY, VEC> t;
            UNROLLED for (int j = 0; j < VEC; j++) {
                const ACC xh = ((ACC)widen(kept_x[u].at[j]) - mu) * rs;
                const ACC g = (ACC)widen(kept_dy[u].at[j]) * (ACC)widen(w[u].at[j]);
                const ACC d = rs * (g - c1 - xh * c2);
                t.at[j] = more[u].after(SKIP ? d + (ACC)widen(kept_s[u].at[j]) : d, j);
            }
            if (i < length) store<VEC>(dx + row * length + i, t);
        }
    }
}

extern "C" __global__ void __launch_bounds__(1024)
    layernorm_dparams(const ACC* part, P* dscale, P* dbias, int parts, i64 length) {
    after_previous_launch();
    __shared__ ACC sums[32][33];
    const int tx = threadIdx.x % 32, ty = threadIdx.x / 32;
    const i64 i = (i64)blockIdx.x * 32 + tx;
    part += blockIdx.y * length;
    ACC s = 0;
    if (i < length)
        for (int p = ty; p < parts; p += 32) s += part[p * 2 * length + i];
    sums[ty][tx] = s;
    __syncthreads();
    if (ty || i >= length) return;
    s = 0;
    for (int k = 0; k < 32; k++) s += sums[k][tx];
    P* out = blockIdx.y ? dbias : dscale;
    out[i] = narrow<P>(s);
}
