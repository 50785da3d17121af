// layernorm/grad_parts.cu: the gradient of LayerNormalization or RMSNormalization over few long rows of x[rows, length].
// Idea     : xh = (x - mean) rstd, g = dy scale: dx = rstd (g - avg(g) - xh avg(g xh)) (+ ds), as layernorm/grad.cu,
//            where a row is one block's. `dx_parts` sums g and g xh of each chunk of a row, `dx_merge` the chunks of a
//            row, and a block of `dx_apply` takes a strip of the columns of all rows, whose dy xh and dy it sums too.
// Inputs   : x, dy, ds [rows, length] T aligned to VEC; scale P; mean (not RMS), rstd M [rows]; parts Pair [rows, chunks];
//            merged Pair [rows]. e1, e2, e3 [rows, length] T: what SUFFIX takes.
// Outputs  : dx TY (null: not wanted); part ACC [2, length], which `round_params` rounds to dscale and dbias P (null: RMS).
// Macros   : T P M ACC VEC BLOCK, RMS, SKIP (ds is there);
//            SUFFIX(v0, v1, v2, v3) of dx and the first OPERANDS of e1, e2, e3, in TY (T if not given).
// Launch   : dx_parts a block a chunk of a row, dx_merge a block a row, dx_apply a thread VEC columns, round_params a thread a column.
// Numerics : ACC; the order depends on rows and length.
// Bound    : memory: x and dy read twice, dx written once.
#include "layernorm/suffix.cuh"
#include "reduce/team.cuh"

struct Pair { ACC a, b; };
DEVICE Pair added(Pair a, Pair b) { return {a.a + b.a, a.b + b.b}; }

extern "C" __global__ void __launch_bounds__(BLOCK)
    dx_parts(const T* x, const T* dy, const P* scale, const M* mean, const M* rstd, Pair* parts, i64 length, i64 chunk,
             i64 chunks) {
    after_previous_launch();
    __shared__ Pair scratch[BLOCK / 32];
    const i64 row = blockIdx.x / chunks, first = blockIdx.x % chunks * chunk, end = min(first + chunk, length);
    const ACC mu = RMS ? (ACC)0 : (ACC)widen(mean[row]), rs = widen(rstd[row]);
    Pair s = {0, 0};
#pragma unroll 2
    for (i64 i = first + threadIdx.x * VEC; i < end; i += BLOCK * VEC) {
        const Vec<T, VEC> t = load<VEC>(x + row * length + i), d = load<VEC>(dy + row * length + i);
        const Vec<P, VEC> w = load<VEC>(scale + i);
        UNROLLED for (int j = 0; j < VEC; j++) {
            const ACC g = (ACC)widen(d.at[j]) * (ACC)widen(w.at[j]);
            s.a += g, s.b += g * (((ACC)widen(t.at[j]) - mu) * rs);
        }
    }
    s = team_merge<BLOCK>(s, added, scratch);
    if (threadIdx.x == 0) parts[blockIdx.x] = s;
}

extern "C" __global__ void __launch_bounds__(BLOCK) dx_merge(const Pair* parts, Pair* whole, i64 length, i64 chunks) {
    after_previous_launch();
    __shared__ Pair scratch[BLOCK / 32];
    Pair s = {0, 0};
    for (i64 k = threadIdx.x; k < chunks; k += BLOCK) s = added(s, parts[blockIdx.x * chunks + k]);
    s = team_merge<BLOCK>(s, added, scratch);
    if (threadIdx.x == 0) whole[blockIdx.x] = {RMS ? (ACC)0 : s.a / (ACC)length, s.b / (ACC)length};
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    dx_apply(const T* x, const T* dy, const P* scale, const M* mean, const M* rstd, const T* ds, const T* e1,
             const T* e2, const T* e3, const Pair* whole, TY* dx, ACC* part, i64 rows, i64 length) {
    after_previous_launch();
    const i64 i = ((i64)blockIdx.x * BLOCK + threadIdx.x) * VEC;
    if (i >= length) return;
    const Vec<P, VEC> w = load<VEC>(scale + i);
    Vec<ACC, VEC> sum_xh = {}, sum_dy = {};
#pragma unroll 2
    for (i64 row = 0; row < rows; row++) {
        const i64 at = row * length + i;
        const ACC mu = RMS ? (ACC)0 : (ACC)widen(mean[row]), rs = widen(rstd[row]);
        const Vec<T, VEC> t = load<VEC>(x + at), d = load<VEC>(dy + at);
        Vec<T, VEC> skip;
        Beside<VEC> more;
        Pair c = {0, 0};
        if (dx) {
            c = whole[row];
            if (SKIP) skip = load<VEC>(ds + at);
            more.read(e1, e2, e3, at);
        }
        Vec<TY, VEC> out;
        UNROLLED for (int j = 0; j < VEC; j++) {
            const ACC xh = ((ACC)widen(t.at[j]) - mu) * rs, own = widen(d.at[j]);
            sum_xh.at[j] += own * xh;
            if (!RMS) sum_dy.at[j] += own;
            const ACC v = rs * (own * (ACC)widen(w.at[j]) - c.a - xh * c.b);
            out.at[j] = more.after(SKIP ? v + (ACC)widen(skip.at[j]) : v, j);
        }
        if (dx) store<VEC>(dx + at, out);
    }
    store<VEC>(part + i, sum_xh);
    if (!RMS) store<VEC>(part + length + i, sum_dy);
}

// dscale, and dbias of a second row of blocks, of the one part.
extern "C" __global__ void __launch_bounds__(BLOCK) round_params(const ACC* part, P* dscale, P* dbias, i64 length) {
    after_previous_launch();
    const i64 i = (i64)blockIdx.x * BLOCK + threadIdx.x;
    if (i < length) (blockIdx.y ? dbias : dscale)[i] = narrow<P>(part[blockIdx.y * length + i]);
}
