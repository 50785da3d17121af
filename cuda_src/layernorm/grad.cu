// layernorm/grad.cu: the gradient of LayerNormalization or RMSNormalization over rows of x[rows, length].
// Idea     : xh = (x - mean) rstd, g = dy scale: dx = rstd (g - avg(g) - xh avg(g xh)) (+ ds). A team of
//            threads takes row after row: x and dy are read once, into registers, and sums of dy xh and
//            dy over its rows stay there too. Those of a block's TEAMS are added in shared memory, by
//            halves, to end in part[block]; layernorm_dparams adds the parts up in order.
// Inputs   : x, dy [rows, length] T aligned to VEC; scale P; mean (not RMS), rstd M [rows].
//            e1, e2, e3 [rows, length] T: what SUFFIX takes. PRODUCT: dy is a of dy = a · b, a [rows,
//            PRODUCT], b [PRODUCT, length] (TURNED: [length, PRODUCT]), which has no launch of its own.
// Outputs  : dx TY (null: not wanted); part ACC [blocks, 2, length]; dscale, dbias P [length] (dbias
//            null: RMS).
// Macros   : T P M ACC VEC ITEMS TEAM (threads a row) TEAMS (a block's), RMS, SKIP (ds is there); PRODUCT, TURNED;
//            SUFFIX(v0, v1, v2, v3) of dx and the first OPERANDS of e1, e2, e3, in TY (T if not given).
// Numerics : ACC; the order depends on rows, length and the grid, which is a function of rows.
// Bound    : HBM, x, dy and dx once.
#include "layernorm/few_columns.cuh"
#include "layernorm/suffix.cuh"
#include "reduce/team.cuh"

struct Pair { ACC a, b; };
DEVICE Pair added(Pair a, Pair b) { return {a.a + b.a, a.b + b.b}; }

DEVICE void team_sync() { asm volatile("bar.sync %0, %1;" ::"r"((int)threadIdx.x / TEAM + 1), "n"(TEAM) : "memory"); }
// As team_merge, of one of the block's teams: they have different numbers of rows.
DEVICE Pair team_total(Pair s, Pair* scratch) {
    if (TEAM <= 32) return team_merge<TEAM>(s, added, scratch);
    s = team_merge<32>(s, added, scratch);
    team_sync();  // scratch may still be read from the last row
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = s;
    team_sync();
    s = scratch[threadIdx.x / TEAM * (TEAM / 32) + threadIdx.x % (TEAM / 32)];
    return team_merge<(TEAM > 32 ? TEAM / 32 : 1)>(s, added, scratch);
}

extern "C" __global__ void __launch_bounds__(TEAM * TEAMS) layernorm_dx(
    const T* x, const T* dy, const P* scale, const M* mean, const M* rstd, const T* ds, const T* e1, const T* e2,
    const T* e3, const T* b, TY* dx, ACC* part, i64 rows, i64 length) {
    after_previous_launch();
    constexpr int STEP = TEAM * VEC, PADDED = ITEMS * STEP;
    __shared__ Pair scratch[TEAM > 32 ? TEAM * TEAMS / 32 : 1];
    __shared__ __align__(16) ACC others[TEAMS > 1 ? TEAMS * PADDED : 4];  // sums of half of the teams
    const int team = threadIdx.x / TEAM, column = threadIdx.x % TEAM * VEC;
    Vec<ACC, VEC> sum_xh[ITEMS] = {}, sum_dy[ITEMS] = {};  // of dy xh and of dy over its rows
    for (i64 row = (i64)blockIdx.x * TEAMS + team; row < rows; row += gridDim.x * TEAMS) {
        const ACC mu = RMS ? (ACC)0 : (ACC)widen(mean[row]), rs = widen(rstd[row]);
        Vec<T, VEC> kept_x[ITEMS], kept_dy[ITEMS];
        Vec<P, VEC> w[ITEMS];
        Vec<T, VEC> kept_s[ITEMS];
        Beside<VEC> more[ITEMS];
#if PRODUCT
        Share<!TURNED, T> share[ITEMS];
#endif
        UNROLLED for (int u = 0; u < ITEMS; u++) {
            const int i = u * STEP + column;
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
            if (u * STEP + column < length)
                UNROLLED for (int j = 0; j < VEC; j++) {
                    const ACC xh = ((ACC)widen(kept_x[u].at[j]) - mu) * rs, d = widen(kept_dy[u].at[j]);
                    const ACC g = d * (ACC)widen(w[u].at[j]);
                    s.a += g, s.b += g * xh;
                    sum_xh[u].at[j] += d * xh;
                    if (!RMS) sum_dy[u].at[j] += d;
                }
        s = team_total(s, scratch);
        if (!dx) continue;
        const ACC c1 = RMS ? (ACC)0 : s.a / (ACC)length, c2 = s.b / (ACC)length;
        UNROLLED for (int u = 0; u < ITEMS; u++) {
            const int i = u * STEP + column;
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
    UNROLLED for (int half = TEAMS / 2; half; half /= 2) {
        ACC* const at = others + team % half * (2 * PADDED) + column;
        if (team >= half && team < 2 * half)
            UNROLLED for (int u = 0; u < ITEMS; u++) {
                store<VEC>(at + u * STEP, sum_xh[u]);
                if (!RMS) store<VEC>(at + PADDED + u * STEP, sum_dy[u]);
            }
        __syncthreads();
        if (team < half)
            UNROLLED for (int u = 0; u < ITEMS; u++) {
                const Vec<ACC, VEC> xh = load<VEC>(at + u * STEP), d = load<VEC>(at + PADDED + u * STEP);
                UNROLLED for (int j = 0; j < VEC; j++) {
                    sum_xh[u].at[j] += xh.at[j];
                    if (!RMS) sum_dy[u].at[j] += d.at[j];
                }
            }
        __syncthreads();
    }
    part += blockIdx.x * 2 * length;
    if (team == 0)
        UNROLLED for (int u = 0; u < ITEMS; u++) {
            const int i = u * STEP + column;
            if (i < length) store<VEC>(part + i, sum_xh[u]);
            if (i < length && !RMS) store<VEC>(part + length + i, sum_dy[u]);
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
