// sdpa/simt.cu: y = softmax(scale q k^T + mask) v and its gradients, any float type, IEEE products.
// Idea     : 64 rows a block against tiles of 32, in shared memory as ACC; the S x T matrix exists a tile
//            at a time. Forward: online softmax. Backward: sdpa_dq owns queries, sdpa_dkv owns keys
//            (all query heads of its group, in order): no atomics, probabilities rebuilt from lse.
// Inputs   : operands.cuh; backward: dy (strides d*), lse, and delta = rowsum(dy * y) in ACC (sdpa_delta).
// Outputs  : y T, lse f32 pairs (or null); dq [B, H, S, D]; dk, dv [B, H / group, T, ...] T.
// Macros   : operands.cuh's, ACC.   Launch: 256 threads; grid (rows / 64, heads, batch).
// Numerics : ACC throughout, one rounding; rows all -inf: NaN, or 0 with GUARD.
// Bound    : FMA rate through shared memory.
#include "sdpa/operands.cuh"

constexpr int ROWS = 64, TILE = 32, PD = D + 4, PV = DV + 4, PT = TILE + 1;
constexpr int OUT_D = (D + 15) / 16, OUT_V = (DV + 15) / 16;

// rows x width of a strided matrix into shared memory, zeros outside
template <int COUNT, int WIDTH, int PITCH> DEVICE void fill(ACC* to, const T* from, i64 stride, int first, int last) {
    for (int i = threadIdx.x; i < COUNT * WIDTH; i += 256) {
        const int r = i / WIDTH, c = i % WIDTH;
        to[r * PITCH + c] = first + r < last ? (ACC)widen(from[(first + r) * stride + c]) : (ACC)0;
    }
}
// s[i][j] = a[ty * 4 + i] . b[tx + 16 j]
template <int WIDTH, int PITCH> DEVICE void dots(ACC (&s)[4][2], const ACC* a, const ACC* b, int ty, int tx) {
    UNROLLED for (int i = 0; i < 4; i++) s[i][0] = s[i][1] = 0;
#pragma unroll 4
    for (int d = 0; d < WIDTH; d++) {
        const ACC b0 = b[tx * PITCH + d], b1 = b[(tx + 16) * PITCH + d];
        UNROLLED for (int i = 0; i < 4; i++) {
            const ACC at = a[(ty * 4 + i) * PITCH + d];
            s[i][0] += at * b0, s[i][1] += at * b1;
        }
    }
}
// acc[i][j] += sum_t p[ty * 4 + i, t] b[t, tx + 16 j]
template <int WIDTH, int PITCH, int OUT>
DEVICE void accumulate(ACC (&acc)[4][OUT], const ACC* p, const ACC* b, int ty, int tx) {
#pragma unroll 4
    for (int t = 0; t < TILE; t++) {
        ACC at[4];
        UNROLLED for (int i = 0; i < 4; i++) at[i] = p[(ty * 4 + i) * PT + t];
        UNROLLED for (int j = 0; j < OUT; j++) {
            const ACC x = WIDTH % 16 == 0 || tx + 16 * j < WIDTH ? b[t * PITCH + tx + 16 * j] : (ACC)0;
            UNROLLED for (int i = 0; i < 4; i++) acc[i][j] += at[i] * x;
        }
    }
}
template <int WIDTH, int OUT>
DEVICE void write(T* to, i64 pitch, const ACC (&acc)[4][OUT], int first, int last, int ty, int tx, const ACC* factor) {
    UNROLLED for (int i = 0; i < 4; i++)
        UNROLLED for (int j = 0; j < OUT; j++)
            if (first + ty * 4 + i < last && tx + 16 * j < WIDTH)
                to[(first + ty * 4 + i) * pitch + tx + 16 * j] = narrow<T>(acc[i][j] * factor[i]);
}
// A logit and its slope between a query and a key, through the masks' rows of that query.
DEVICE ACC mask_at(const Mask& mask, const T* row, int key, int keys) { return key < keys ? (ACC)widen(row[key * mask.column]) : (ACC)0; }
DEVICE ACC logit_at(const Operands& o, ACC dot, const T* row, const T* row2, int query, int key, ACC* slope_of) {
    const ACC m = MASK ? mask_at(o.mask, row, key, o.keys) : (ACC)0, m2 = MASK2 ? mask_at(o.mask2, row2, key, o.keys) : (ACC)0;
    if (slope_of) *slope_of = slope(o, dot, m, m2);
    return meet(o, query, key) ? logit(o, dot, m, m2) : (ACC)NEGATIVE_INFINITY;
}
DEVICE ACC across(ACC x, bool largest) {  // over the 16 threads of a row
    UNROLLED for (int step = 8; step; step /= 2) {
        const ACC y = __shfl_xor_sync(~0u, x, step);
        x = largest ? (x > y || x != x ? x : y) : x + y;
    }
    return x;
}

extern "C" __global__ void __launch_bounds__(256, 1) sdpa_forward(OPERANDS, T* y, float* lse, i64 yb, i64 yh, i64 yr) {
    after_previous_launch();
    GATHER
    extern __shared__ ACC shared[];
    ACC *qs = shared, *ks = qs + ROWS * PD, *vs = ks + TILE * PD, *ps = vs + TILE * PV;
    const int first = blockIdx.x * ROWS, h = blockIdx.y, b = blockIdx.z, kv = h / o.group;
    if (PACKED && first >= o.queries) return;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const T* k = o.k + b * o.ks.batch + kv * o.ks.head;
    const T* v = o.v + b * o.vs.batch + kv * o.vs.head;
    fill<ROWS, D, PD>(qs, o.q + b * o.qs.batch + h * o.qs.head, o.qs.row, first, o.queries);
    ACC acc[4][OUT_V] = {}, top[4], sum[4] = {};
    UNROLLED for (int i = 0; i < 4; i++) top[i] = NEGATIVE_INFINITY;
    const int end = CAUSAL ? min(o.keys, first + ROWS) : o.keys;
    for (int t = 0; t < end; t += TILE) {
        __syncthreads();
        fill<TILE, D, PD>(ks, k, o.ks.row, t, o.keys);
        fill<TILE, DV, PV>(vs, v, o.vs.row, t, o.keys);
        __syncthreads();
        ACC s[4][2];
        dots<D, PD>(s, qs, ks, ty, tx);
        UNROLLED for (int i = 0; i < 4; i++) {
            const int query = first + ty * 4 + i;
            const T *row = mask_row(o, o.mask, b, h, query), *row2 = mask_row(o, o.mask2, b, h, query);
            UNROLLED for (int j = 0; j < 2; j++)
                s[i][j] = logit_at(o, s[i][j], row, row2, query, t + tx + 16 * j, nullptr);
            const ACC best = across(s[i][0] > s[i][1] || s[i][0] != s[i][0] ? s[i][0] : s[i][1], true);
            const ACC now = best > top[i] || best != best ? best : top[i];
            const ACC fade = exp(top[i] - safe(now));
            top[i] = now;
            UNROLLED for (int j = 0; j < 2; j++)
                ps[(ty * 4 + i) * PT + tx + 16 * j] = s[i][j] = exp(s[i][j] - safe(now));
            sum[i] = sum[i] * fade + across(s[i][0] + s[i][1], false);
            UNROLLED for (int j = 0; j < OUT_V; j++) acc[i][j] *= fade;
        }
        __syncwarp();  // a warp reads the rows it wrote
        accumulate<DV, PV>(acc, ps, vs, ty, tx);
    }
    const i64 row = first_row(o, b, h, o.heads, o.queries);
    ACC factor[4];
    UNROLLED for (int i = 0; i < 4; i++) {
        factor[i] = GUARD && sum[i] == 0 ? (ACC)0 : 1 / sum[i];
        if (lse && tx == 0 && first + ty * 4 + i < o.queries)
            ((float2*)lse)[row + first + ty * 4 + i] = row_lse(top[i], sum[i]);
    }
    y += b * yb + h * yh + BEGIN * yr;
    write<DV>(y, yr, acc, first, o.queries, ty, tx, factor);
    UNROLLED for (int i = 0; i < 4; i++)
        if (is_dead(sum[i]) && first + ty * 4 + i < o.queries)
            for (int c = tx; c < DV; c += 16) y[(first + ty * 4 + i) * yr + c] = narrow<T>(nothing(v + c, o.vs.row, o.keys));
}

// delta[b, h, i] = sum_d dy[b, h, i, d] y[b, h, i, d]: a warp a row.
extern "C" __global__ void __launch_bounds__(256, 1)
    sdpa_delta(const T* dy, const T* y, ACC* delta, i64 rows, int heads, int queries, i64 db, i64 dh, i64 dr,
               i64 yb, i64 yh, i64 yr) {
    after_previous_launch();
    const i64 row = (i64)blockIdx.x * 8 + threadIdx.x / 32;
    if (row >= rows) return;
    const i64 b = row / queries / heads, h = row / queries % heads, i = row % queries;
    dy += b * db + h * dh + i * dr;
    y += b * yb + h * yh + i * yr;
    ACC s = 0;
    for (int d = threadIdx.x % 32; d < DV; d += 32) s += (ACC)widen(dy[d]) * (ACC)widen(y[d]);
    s = warp_sum(s);
    if (threadIdx.x % 32 == 0) delta[row] = s;
}

extern "C" __global__ void __launch_bounds__(256, 1)
    sdpa_dq(OPERANDS, const T* dy, const float* lse, const ACC* delta, T* dq, i64 db, i64 dh, i64 dr PARTS(dq)) {
    after_previous_launch();
    GATHER
    extern __shared__ ACC shared[];
    ACC *qs = shared, *dys = qs + ROWS * PD, *ks = dys + ROWS * PV, *vs = ks + TILE * PD, *ps = vs + TILE * PV;
    const int first = blockIdx.x * ROWS, h = blockIdx.y, b = blockIdx.z, kv = h / o.group;
    if (PACKED && first >= o.queries) return;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const i64 row = first_row(o, b, h, o.heads, o.queries);
    const T* k = o.k + b * o.ks.batch + kv * o.ks.head;
    const T* v = o.v + b * o.vs.batch + kv * o.vs.head;
    fill<ROWS, D, PD>(qs, o.q + b * o.qs.batch + h * o.qs.head, o.qs.row, first, o.queries);
    fill<ROWS, DV, PV>(dys, dy + b * db + h * dh + BEGIN * dr, dr, first, o.queries);
    ACC acc[4][OUT_D] = {}, top[4], spread[4], c[4], factor[4];
    UNROLLED for (int i = 0; i < 4; i++) {
        const int r = first + ty * 4 + i;
        const float2 l = r < o.queries ? ((const float2*)lse)[row + r] : make_float2(-NEGATIVE_INFINITY, 0);
        top[i] = l.x, spread[i] = l.y;
        c[i] = r < o.queries ? delta[row + r] : (ACC)0;
        factor[i] = o.scale;
    }
    const int end = CAUSAL ? min(o.keys, first + ROWS) : o.keys;
    for (int t = 0; t < end; t += TILE) {
        __syncthreads();
        fill<TILE, D, PD>(ks, k, o.ks.row, t, o.keys);
        fill<TILE, DV, PV>(vs, v, o.vs.row, t, o.keys);
        __syncthreads();
        ACC s[4][2], dp[4][2];
        dots<D, PD>(s, qs, ks, ty, tx);
        dots<DV, PV>(dp, dys, vs, ty, tx);
        UNROLLED for (int i = 0; i < 4; i++)
            UNROLLED for (int j = 0; j < 2; j++) {
                const int query = first + ty * 4 + i;
                const T *row = mask_row(o, o.mask, b, h, query), *row2 = mask_row(o, o.mask2, b, h, query);
                ACC by;
                const ACC z = logit_at(o, s[i][j], row, row2, query, t + tx + 16 * j, &by);
                ps[(ty * 4 + i) * PT + tx + 16 * j] = by == 0 ? (ACC)0 : probability(z, top[i], spread[i]) * (dp[i][j] - c[i]) * by;
            }
        __syncwarp();
        accumulate<D, PD>(acc, ps, ks, ty, tx);
    }
    write<D>(PART(dq, h, row, D), acc, first, o.queries, ty, tx, factor);
}

extern "C" __global__ void __launch_bounds__(256, 1)
    sdpa_dkv(OPERANDS, const T* dy, const float* lse, const ACC* delta, T* dk, T* dv, i64 db, i64 dh, i64 dr PARTS(dk) PARTS(dv)) {
    after_previous_launch();
    KEYS_FIRST
    extern __shared__ ACC shared[];
    ACC *ks = shared, *vs = ks + ROWS * PD, *qs = vs + ROWS * PV, *dys = qs + TILE * PD, *ps = dys + TILE * PV;
    const int first = blockIdx.x * ROWS, kv = blockIdx.y, b = blockIdx.z;
    if (PACKED && first >= o.keys) return;
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    fill<ROWS, D, PD>(ks, o.k + b * o.ks.batch + kv * o.ks.head, o.ks.row, first, o.keys);
    fill<ROWS, DV, PV>(vs, o.v + b * o.vs.batch + kv * o.vs.head, o.vs.row, first, o.keys);
    ACC acc_k[4][OUT_D] = {}, acc_v[4][OUT_V] = {};
    for (int h = kv * o.group; h < (kv + 1) * o.group; h++) {
        const i64 row = first_row(o, b, h, o.heads, o.queries);
        const T* q = o.q + b * o.qs.batch + h * o.qs.head;
        for (int t = CAUSAL ? first / TILE * TILE : 0; t < o.queries; t += TILE) {
            __syncthreads();
            fill<TILE, D, PD>(qs, q, o.qs.row, t, o.queries);
            fill<TILE, DV, PV>(dys, dy + b * db + h * dh + BEGIN * dr, dr, t, o.queries);
            __syncthreads();
            ACC s[4][2], dp[4][2];
            dots<D, PD>(s, ks, qs, ty, tx);
            dots<DV, PV>(dp, vs, dys, ty, tx);
            UNROLLED for (int j = 0; j < 2; j++) {
                const int query = t + tx + 16 * j;
                const bool there = query < o.queries;
                const T *mask = mask_row(o, o.mask, b, h, query), *mask2 = mask_row(o, o.mask2, b, h, query);
                const float2 l = there ? ((const float2*)lse)[row + query] : make_float2(-NEGATIVE_INFINITY, 0);
                const ACC c = there ? delta[row + query] : (ACC)0;
                UNROLLED for (int i = 0; i < 4; i++) {
                    ACC by;
                    const ACC z = logit_at(o, s[i][j], mask, mask2, query, first + ty * 4 + i, &by);
                    const ACC p = probability(z, (ACC)l.x, (ACC)l.y);
                    ps[(ty * 4 + i) * PT + query - t] = p;
                    s[i][j] = by == 0 ? (ACC)0 : p * (dp[i][j] - c) * by;
                }
            }
            __syncwarp();
            accumulate<DV, PV>(acc_v, ps, dys, ty, tx);
            __syncwarp();
            UNROLLED for (int i = 0; i < 4; i++)
                UNROLLED for (int j = 0; j < 2; j++) ps[(ty * 4 + i) * PT + tx + 16 * j] = s[i][j];
            __syncwarp();
            accumulate<D, PD>(acc_k, ps, qs, ty, tx);
        }
    }
    const i64 out = first_row(o, b, kv, o.heads / o.group, o.keys);
    const ACC one[4] = {1, 1, 1, 1}, scale[4] = {(ACC)o.scale, (ACC)o.scale, (ACC)o.scale, (ACC)o.scale};
    write<D>(PART(dk, kv, out, D), acc_k, first, o.keys, ty, tx, scale);
    write<DV>(PART(dv, kv, out, DV), acc_v, first, o.keys, ty, tx, one);
}
