// layernorm/parts.cu: y = (s - mean) * rstd * scale + bias over few long rows of x[rows, length], each by many blocks;
//            s = x (+ residual). layernorm/row.cu does the same of a row that is one block's.
// Idea     : `norm_parts` finds mean and squares about it of each chunk of a row; each block of `norm_apply` merges all
//            chunks of its row in their order, and writes its chunk.
// Inputs   : x, residual [rows, length] T aligned to VEC; scale, bias P [length] (AFFINE 1; bias may be null);
//            parts State [rows, chunks]; e1, e2, e3 [rows, length] T: what SUFFIX takes.
// Outputs  : y [rows, length] TY, and, where not null, sum = s T, mean and rstd [rows] M.
// Macros   : T P M ACC VEC ITEMS (vectors of a chunk that a thread keeps; 0: read again) BLOCK; RMS, RESIDUAL, AFFINE;
//            SUFFIX(v0, v1, v2, v3) of y and the first OPERANDS of e1, e2, e3, in TY (T if not given).
// Launch   : a block a chunk of a row.
// Numerics : ACC throughout (s rounded to T first, as it is stored); population variance, by chunks that the length
//            and the number of rows alone decide.
// Bound    : memory: x read twice, y written once.
#include "layernorm/suffix.cuh"
#include "reduce/team.cuh"

struct State { ACC count, mean, squares; };

DEVICE State merged(State a, State b) {
    const ACC count = a.count + b.count, apart = b.mean - a.mean;
    if (count == 0) return a;
    const ACC share = b.count / count;
    return {count, a.mean + apart * share, a.squares + b.squares + apart * apart * a.count * share};
}

// VEC elements of s.
DEVICE Vec<T, VEC> summed(const T* x, const T* residual, i64 at) {
    Vec<T, VEC> t = load<VEC>(x + at);
#if RESIDUAL
    const Vec<T, VEC> r = load<VEC>(residual + at);
    UNROLLED for (int j = 0; j < VEC; j++) t.at[j] = narrow<T>((ACC)widen(t.at[j]) + (ACC)widen(r.at[j]));
#endif
    return t;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    norm_parts(const T* x, const T* residual, T* sum, State* parts, i64 length, i64 chunk, i64 chunks) {
    after_previous_launch();
    __shared__ ACC scratch[BLOCK / 32];
    const i64 first = blockIdx.x % chunks * chunk, end = min(first + chunk, length);
    const i64 base = blockIdx.x / chunks * length + first;
    const int own = threadIdx.x * VEC, n = (int)(end - first);
    constexpr int STEP = BLOCK * VEC;
#if ITEMS
    Vec<T, VEC> kept[ITEMS];
#define EACH(u, i) UNROLLED for (int u = 0, i = own; u < ITEMS; u++, i += STEP) if (i < n)
#define AGAIN(u, i) kept[u]
#else
#define EACH(u, i) _Pragma("unroll 4") for (int i = own; i < n; i += STEP)
#define AGAIN(u, i) summed(x, residual, base + i)
#endif
    ACC total = 0;
    EACH(u, i) {
        const Vec<T, VEC> t = summed(x, residual, base + i);
#if RESIDUAL
        if (sum) store<VEC>(sum + base + i, t);
#endif
#if ITEMS
        kept[u] = t;
#endif
        UNROLLED for (int j = 0; j < VEC; j++)
            total += RMS ? (ACC)widen(t.at[j]) * (ACC)widen(t.at[j]) : (ACC)widen(t.at[j]);
    }
    total = team_sum<BLOCK>(total, scratch);
    State s = {(ACC)n, 0, total};
#if !RMS
    s.mean = total / (ACC)n, s.squares = 0;
    EACH(u, i) {
        const Vec<T, VEC> t = AGAIN(u, i);
        UNROLLED for (int j = 0; j < VEC; j++)
            s.squares += ((ACC)widen(t.at[j]) - s.mean) * ((ACC)widen(t.at[j]) - s.mean);
    }
    s.squares = team_sum<BLOCK>(s.squares, scratch);
#endif
    if (threadIdx.x == 0) parts[blockIdx.x] = s;
}

extern "C" __global__ void __launch_bounds__(BLOCK) norm_apply(
    const T* x, const T* residual, const P* scale, const P* bias, const T* e1, const T* e2, const T* e3, TY* y,
    M* mean_out, M* rstd_out, const State* parts, i64 length, i64 chunk, i64 chunks, float epsilon) {
    after_previous_launch();
    __shared__ State scratch[BLOCK / 32];
    __shared__ ACC whole[2];
    const i64 row = blockIdx.x / chunks;
    State s = {0, 0, 0};
    for (i64 k = threadIdx.x; k < chunks; k += BLOCK) s = merged(s, parts[row * chunks + k]);
    s = team_merge<BLOCK>(s, merged, scratch);
    if (threadIdx.x == 0)  // its neighbours have merged in another order
        whole[0] = s.mean, whole[1] = 1 / sqrt(s.squares / (ACC)length + (ACC)epsilon);
    __syncthreads();
    const ACC mean = whole[0], rstd = whole[1];
    const i64 first = blockIdx.x % chunks * chunk, end = min(first + chunk, length);
    if (first == 0 && threadIdx.x == 0) {
        if (mean_out) mean_out[row] = narrow<M>(mean);
        if (rstd_out) rstd_out[row] = narrow<M>(rstd);
    }
    const i64 base = row * length;
#pragma unroll 2
    for (i64 i = first + threadIdx.x * VEC; i < end; i += BLOCK * VEC) {
        const Vec<T, VEC> t = summed(x, residual, base + i);
        Beside<VEC> more;
        more.read(e1, e2, e3, base + i);
#if AFFINE
        const Vec<P, VEC> a = load<VEC>(scale + i), b = bias ? load<VEC>(bias + i) : Vec<P, VEC>();
#endif
        Vec<TY, VEC> out;
        UNROLLED for (int j = 0; j < VEC; j++) {
            ACC v = ((ACC)widen(t.at[j]) - mean) * rstd;
#if AFFINE
            v *= (ACC)widen(a.at[j]);
            if (bias) v += (ACC)widen(b.at[j]);
#endif
            out.at[j] = more.after(v, j);
        }
        store<VEC>(y + base + i, out);
    }
}
