// sdpa/mma_sm80.cu: y = softmax(scale q k^T + mask) v and its gradients in 16-bit floats, mma.sync.
// Idea     : WARPS x 16 MT rows a block against tiles of TILE rows of the other side, cp.async STAGES
//            deep. The probabilities of a tile never leave registers: the accumulator layout of the
//            first product is the operand layout of the second. Forward: online softmax; SPLIT: 16 MT
//            rows a block, each warp walks over every WARPS-th tile of keys by itself and the warps'
//            results meet at the end (few rows: more blocks). Backward as in simt.cu: sdpa_dq owns
//            queries, sdpa_dkv owns keys and works on transposed tiles.
// Inputs   : operands.cuh with rows of 16-byte aligned, D and DV multiples of 8.
// Outputs  : y, dq, dk, dv T; lse f32 (or null).
// Macros   : operands.cuh's, where MASK or MASK2 of 2 is one without rows; MASK_PIECES (the 16-byte
//            pieces of both are aligned); WARPS, MT (16-row tiles a warp: K and V are read from shared memory once
//            for all of them), TILE (multiple of 16), FORWARD; forward: SPLIT, STAGES, BLOCKS (an SM's).
// Launch   : grid (rows, heads, batch).
// Numerics : f32 accumulate; probabilities and their gradients rounded to T as operands.
// Bound    : tensor core (mma.sync) and exp; bytes only for short rows.
#include "sm80.cuh"
#include "sdpa/operands.cuh"

#ifndef SPLIT
#define SPLIT 0
#define STAGES 2
#define BLOCKS 1
#endif
constexpr int ROWS = (SPLIT ? 1 : WARPS) * 16 * MT, THREADS = WARPS * 32;
constexpr int TEAM = SPLIT ? 32 : THREADS;  // threads that fetch and walk together
constexpr int DP = (D + 15) / 16 * 16, VP = (DV + 15) / 16 * 16;  // padded widths; zeros behind D, DV
constexpr int PD = DP + 8, PV = VP + 8;  // pitches: an odd number of 16-byte chunks, no bank conflicts

// The warp's first row among the block's.
DEVICE int warp_row() { return SPLIT ? 0 : threadIdx.x / 32 * 16 * MT; }

// COUNT rows into shared memory; rows past `last` and columns past WIDTH as zeros.
template <int COUNT, int WIDTH, int PADDED> DEVICE void fetch(T* to, const T* from, i64 stride, int first, int last) {
    constexpr int CHUNKS = PADDED / 8;
    UNROLLED for (int k = 0; k < (COUNT * CHUNKS + TEAM - 1) / TEAM; k++) {
        const int i = threadIdx.x % TEAM + k * TEAM, r = i / CHUNKS, c = i % CHUNKS * 8;
        if (COUNT * CHUNKS % TEAM && i >= COUNT * CHUNKS) break;
        const bool there = first + r < last && c < WIDTH;
        cp_async_16(smem_address(to + r * (PADDED + 8) + c), there ? from + (first + r) * stride + c : from,
                    there ? 16 : 0);
    }
}
// A mask's elements of COUNT queries by COLUMNS keys from (query, key), zeros outside; KIND 0: none, 2: one
// row serves every query. Whole 16-byte pieces where MASK_PIECES says that they are aligned.
template <int KIND, int COUNT, int COLUMNS>
DEVICE void fetch_mask(T* to, const Operands& o, const Mask& mask, int b, int h, int query, int key) {
    if (KIND == 0) return;
    constexpr int PITCH = COLUMNS + 8, ROWS_ = KIND == 2 ? 1 : COUNT;
    const T* from = mask.at + b * mask.batch + h * mask.head;
    if (KIND == 2) query = 0;
#if MASK_PIECES
    for (int i = threadIdx.x % TEAM; i < ROWS_ * (COLUMNS / 8); i += TEAM) {
        const int r = i / (COLUMNS / 8), c = i % (COLUMNS / 8) * 8;
        const bool there = query + r < o.queries && key + c < o.keys;
        cp_async_16(smem_address(to + r * PITCH + c), there ? from + (query + r) * mask.row + key + c : from,
                    there ? 16 : 0);
    }
#else
#pragma unroll 8
    for (int i = threadIdx.x % TEAM; i < ROWS_ * COLUMNS; i += TEAM) {
        const int r = i / COLUMNS, c = i % COLUMNS;
        const bool there = query + r < o.queries && key + c < o.keys;
        to[r * PITCH + c] = there ? from[(query + r) * mask.row + (key + c) * mask.column] : T();
    }
#endif
}
// Elements of a mask's tile of HIGH queries; two masks' tiles stand behind each other.
template <int KIND> DEVICE constexpr int mask_tile(int high, int wide) { return KIND ? (KIND == 2 ? 1 : high) * (wide + 8) : 0; }
template <int COUNT, int COLUMNS> DEVICE void fetch_masks(T* to, const Operands& o, int b, int h, int query, int key) {
    fetch_mask<MASK, COUNT, COLUMNS>(to, o, o.mask, b, h, query, key);
    fetch_mask<MASK2, COUNT, COLUMNS>(to + mask_tile<MASK>(COUNT, COLUMNS), o, o.mask2, b, h, query, key);
}
// A tile's two elements at (row, column) and the next column.
template <int KIND, int COLUMNS> DEVICE float2 mask_pair(const T* tile, int row, int column) {
    if (!KIND) return make_float2(0, 0);
    return unpack2<T>(*(const u32*)(tile + (KIND == 2 ? 0 : row) * (COLUMNS + 8) + column));
}
// s[16 MT rows of the warp, TILE] = a . b^T over WIDTH; a and b in shared memory by rows.
template <int WIDTH> DEVICE void dots(float (&s)[MT][TILE / 8][4], const T* a, const T* b) {
    constexpr int PITCH = WIDTH + 8;
    const int lane = threadIdx.x % 32, m = lane / 8, r = lane % 8;
    a += (warp_row() + m % 2 * 8 + r) * PITCH + m / 2 * 8;
    b += (m / 2 * 8 + r) * PITCH + m % 2 * 8;
    UNROLLED for (int i = 0; i < MT * TILE / 2; i++) s[i / (TILE / 2)][i / 4 % (TILE / 8)][i % 4] = 0;
    UNROLLED for (int k = 0; k < WIDTH; k += 16) {
        u32 x[MT][4];
        UNROLLED for (int i = 0; i < MT; i++) ldmatrix_x4<false>(x[i], smem_address(a + i * 16 * PITCH + k));
        UNROLLED for (int n = 0; n < TILE / 16; n++) {
            u32 y[4];
            ldmatrix_x4<false>(y, smem_address(b + n * 16 * PITCH + k));
            UNROLLED for (int i = 0; i < MT; i++) {
                mma(s[i][2 * n], x[i], y, T());
                mma(s[i][2 * n + 1], x[i], y + 2, T());
            }
        }
    }
}
// acc[16 MT, WIDTH] += p[16 MT, TILE] b[TILE, WIDTH]; p in accumulator layout.
template <int WIDTH>
DEVICE void accumulate(float (&acc)[MT][WIDTH / 8][4], const float (&p)[MT][TILE / 8][4], const T* b) {
    constexpr int PITCH = WIDTH + 8;
    const int lane = threadIdx.x % 32, m = lane / 8, r = lane % 8;
    b += (m % 2 * 8 + r) * PITCH + m / 2 * 8;
    UNROLLED for (int k = 0; k < TILE / 16; k++) {
        u32 x[MT][4];
        UNROLLED for (int i = 0; i < MT; i++)
            UNROLLED for (int e = 0; e < 4; e++)
                x[i][e] = pack2<T>(p[i][2 * k + e / 2][e % 2 * 2], p[i][2 * k + e / 2][e % 2 * 2 + 1]);
        UNROLLED for (int n = 0; n < WIDTH / 16; n++) {
            u32 y[4];
            ldmatrix_x4<true>(y, smem_address(b + k * 16 * PITCH + n * 16));
            UNROLLED for (int i = 0; i < MT; i++) {
                mma(acc[i][2 * n], x[i], y, T());
                mma(acc[i][2 * n + 1], x[i], y + 2, T());
            }
        }
    }
}
// Rows lane / 4 and + 8 of each 16 of the warp's, two columns at a time; factor by row.
template <int WIDTH, int PADDED>
DEVICE void write(T* to, i64 pitch, const float (&acc)[MT][PADDED / 8][4], int row, int last, const float (&factor)[MT][2]) {
    const int lane = threadIdx.x % 32;
    UNROLLED for (int m = 0; m < 2 * MT; m++) {
        const int r = row + m * 8;
        if (r >= last) continue;
        UNROLLED for (int n = 0; n < WIDTH / 8; n++)
            *(u32*)(to + r * pitch + n * 8 + lane % 4 * 2) =
                pack2<T>(acc[m / 2][n][m % 2 * 2] * factor[m / 2][m % 2], acc[m / 2][n][m % 2 * 2 + 1] * factor[m / 2][m % 2]);
    }
}
#if FORWARD
DEVICE void team_sync() {
    if (SPLIT) __syncwarp();
    else __syncthreads();
}
constexpr int MASK_TILE = mask_tile<MASK>(ROWS, TILE) + mask_tile<MASK2>(ROWS, TILE);
constexpr int TEAM_SMEM = ROWS * PD + STAGES * (TILE * (PD + PV) + MASK_TILE);

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) sdpa_forward(OPERANDS, T* y, float* lse, i64 yb, i64 yh, i64 yr) {
    after_previous_launch();
    GATHER
    extern __shared__ __align__(16) T shared[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    T *qs = shared + (SPLIT ? warp * TEAM_SMEM : 0), *ks = qs + ROWS * PD, *vs = ks + STAGES * TILE * PD;
    T* ms = vs + STAGES * TILE * PV;
    // the last rows of a causal problem have the most keys: they start first
    const int block = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int first = block * ROWS, h = blockIdx.y, b = blockIdx.z, kv = h / o.group;
    if (PACKED && first >= o.queries) return;
    const T* k = o.k + b * o.ks.batch + kv * o.ks.head;
    const T* v = o.v + b * o.vs.batch + kv * o.vs.head;
    const int end = CAUSAL ? min(o.keys, first + ROWS) : o.keys;
    constexpr int STEP = (SPLIT ? WARPS : 1) * TILE;
    const int begin = SPLIT ? warp * TILE : 0;
    auto fetch_tile = [&](int t, int s) {
        if (t < end) {
            fetch<TILE, D, DP>(ks + s * TILE * PD, k, o.ks.row, t, o.keys);
            fetch<TILE, DV, VP>(vs + s * TILE * PV, v, o.vs.row, t, o.keys);
            fetch_masks<ROWS, TILE>(ms + s * MASK_TILE, o, b, h, first, t);
        }
        cp_async_commit();
    };
    fetch<ROWS, D, DP>(qs, o.q + b * o.qs.batch + h * o.qs.head, o.qs.row, first, o.queries);
    UNROLLED for (int s = 0; s < STAGES - 1; s++) fetch_tile(begin + s * STEP, s);
    const int row = first + warp_row() + lane / 4;
    float acc[MT][VP / 8][4] = {}, top[MT][2], sum[MT][2] = {};
    UNROLLED for (int i = 0; i < 2 * MT; i++) top[i / 2][i % 2] = NEGATIVE_INFINITY;
    const float scale = o.scale * LOG2E;  // logits in units of log 2, if not NATURAL: exp needs no product
    constexpr float UNIT = NATURAL ? LOG2E : 1.0f;
    for (int t = begin, s = 0; t < end; t += STEP) {
        cp_async_wait<STAGES - 2>();
        team_sync();
        fetch_tile(t + (STAGES - 1) * STEP, s == 0 ? STAGES - 1 : s - 1);
        float p[MT][TILE / 8][4];
        dots<DP>(p, qs, ks + s * TILE * PD);
        const bool whole = t + TILE <= o.keys && !(CAUSAL && t + TILE > first);
        UNROLLED for (int m = 0; m < MT; m++) {
            UNROLLED for (int n = 0; n < TILE / 8; n++)
                UNROLLED for (int i = 0; i < 2; i++) {
                    const int r = row + m * 16 + i * 8, c = n * 8 + lane % 4 * 2;
                    const T* tile = ms + s * MASK_TILE;
                    const float2 by = mask_pair<MASK, TILE>(tile, r - first, c);
                    const float2 by2 = mask_pair<MASK2, TILE>(tile + mask_tile<MASK>(ROWS, TILE), r - first, c);
                    float &a = p[m][n][2 * i], &z = p[m][n][2 * i + 1];
                    a = NATURAL ? logit(o, a, by.x, by2.x) : a * scale;
                    z = NATURAL ? logit(o, z, by.y, by2.y) : z * scale;
                    if (!whole) {
                        if (t + c >= o.keys || (CAUSAL && t + c > r)) a = NEGATIVE_INFINITY;
                        if (t + c + 1 >= o.keys || (CAUSAL && t + c + 1 > r)) z = NEGATIVE_INFINITY;
                    }
                }
            UNROLLED for (int i = 0; i < 2; i++) {
                float now = top[m][i], part = 0;
                UNROLLED for (int n = 0; n < TILE / 8; n++) now = fmaxf(now, fmaxf(p[m][n][2 * i], p[m][n][2 * i + 1]));
                now = quad_max(now);
                const float zero = safe(now), fade = power2((top[m][i] - zero) * UNIT);
                top[m][i] = now;
                UNROLLED for (int n = 0; n < TILE / 8; n++)
                    UNROLLED for (int e = 2 * i; e < 2 * i + 2; e++)
                        part += p[m][n][e] = power2((p[m][n][e] - zero) * UNIT);
                sum[m][i] = sum[m][i] * fade + part;
                UNROLLED for (int n = 0; n < VP / 8; n++) acc[m][n][2 * i] *= fade, acc[m][n][2 * i + 1] *= fade;
            }
        }
        accumulate<VP>(acc, p, vs + s * TILE * PV);
        s = s + 1 == STAGES ? 0 : s + 1;
    }
    UNROLLED for (int i = 0; i < 2 * MT; i++) sum[i / 2][i % 2] = quad_sum(sum[i / 2][i % 2]);
    y += b * yb + h * yh + BEGIN * yr;
    const i64 at = first_row(o, b, h, o.heads, o.queries);
    auto finish = [&](float total) { return GUARD && total == 0 ? 0.0f : 1 / total; };
    auto save = [&](int r, float top, float total) {
        if (lse && r < o.queries) ((float2*)lse)[at + r] = row_lse(NATURAL ? top : top * (1 / LOG2E), total);
    };
    cp_async_wait<0>();
    __syncthreads();  // the tiles' memory is free
#if SPLIT
    // [WARPS][ROWS] of (columns, top, sum): each warp's share of the keys
    constexpr int PITCH = VP + 4;
    float* parts = (float*)shared;
    UNROLLED for (int i = 0; i < 2 * MT; i++) {
        float* to = parts + (warp * ROWS + i * 8 + lane / 4) * PITCH;
        UNROLLED for (int n = 0; n < VP / 8; n++)
            *(float2*)(to + n * 8 + lane % 4 * 2) = make_float2(acc[i / 2][n][i % 2 * 2], acc[i / 2][n][i % 2 * 2 + 1]);
        if (lane % 4 == 0) to[VP] = top[i / 2][i % 2], to[VP + 1] = sum[i / 2][i % 2];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < ROWS * (DV / 8); i += THREADS) {
        const int r = i / (DV / 8), c = i % (DV / 8) * 8;
        const float* from = parts + r * PITCH;
        float best = NEGATIVE_INFINITY, total = 0, value[8] = {};
        UNROLLED for (int w = 0; w < WARPS; w++) best = fmaxf(best, from[w * ROWS * PITCH + VP]);
        UNROLLED for (int w = 0; w < WARPS; w++) {
            const float* one = from + w * ROWS * PITCH;
            const float share = power2((one[VP] - safe(best)) * UNIT);
            total += share * one[VP + 1];
            UNROLLED for (int j = 0; j < 8; j++) value[j] += share * one[c + j];
        }
        if (c == 0) save(first + r, best, total);
        const float factor = finish(total);
        uint4 packed = {pack2<T>(value[0] * factor, value[1] * factor), pack2<T>(value[2] * factor, value[3] * factor),
                        pack2<T>(value[4] * factor, value[5] * factor), pack2<T>(value[6] * factor, value[7] * factor)};
        if (first + r < o.queries) *(uint4*)(y + (first + r) * yr + c) = packed;
        for (int j = 0; is_dead(total) && first + r < o.queries && j < 8; j++)
            y[(first + r) * yr + c + j] = from_float<T>(nothing(v + c + j, o.vs.row, o.keys));
    }
#else
    // through the warp's own rows of shared memory: whole 16-byte pieces to y
    T* mine = shared + warp * 16 * MT * PV;
    UNROLLED for (int i = 0; i < 2 * MT; i++) {
        const float total = sum[i / 2][i % 2], factor = finish(total);
        if (lane % 4 == 0) save(row + 8 * i, top[i / 2][i % 2], total);
        UNROLLED for (int n = 0; n < VP / 8; n++)
            *(u32*)(mine + (i * 8 + lane / 4) * PV + n * 8 + lane % 4 * 2) =
                pack2<T>(acc[i / 2][n][i % 2 * 2] * factor, acc[i / 2][n][i % 2 * 2 + 1] * factor);
    }
    __syncwarp();
    constexpr int CHUNKS = DV / 8;
    UNROLLED for (int k = 0; k < (16 * MT * CHUNKS + 31) / 32; k++) {
        const int i = lane + k * 32, r = i / CHUNKS, c = i % CHUNKS * 8, out = first + warp_row() + r;
        if (i < 16 * MT * CHUNKS && out < o.queries) *(uint4*)(y + out * yr + c) = *(const uint4*)(mine + r * PV + c);
    }
    if (GUARD == 2) {
        __syncwarp();  // over what the rows' other lanes wrote
        UNROLLED for (int i = 0; i < 2 * MT; i++)
            for (int c = lane % 4; is_dead(sum[i / 2][i % 2]) && row + 8 * i < o.queries && c < DV; c += 4)
                y[(row + 8 * i) * yr + c] = from_float<T>(nothing(v + c, o.vs.row, o.keys));
    }
#endif
}
#else
// A row's lse as the gradients want it; of no row: no probability.
DEVICE float2 load_lse(const float* lse, i64 at, bool there) {
    return there ? ((const float2*)lse)[at] : make_float2(-NEGATIVE_INFINITY, 0);
}
// A product to its probability, and dp - delta to the logit's gradient before its scale.
DEVICE void differentiate(const Operands& o, float& p, float& dp, float2 l, float delta, float m, float m2, bool there) {
    const float z = there ? logit(o, p, m, m2) : NEGATIVE_INFINITY, by = slope(o, p, m, m2);
    p = GUARD && l.y != l.y ? 0.0f : power2((z - l.x - l.y) * LOG2E);
    dp = by == 0 ? 0.0f : p * (dp - delta) * by;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sdpa_dq(OPERANDS, const T* dy, const float* lse, const float* delta, T* dq, i64 db, i64 dh, i64 dr PARTS(dq)) {
    after_previous_launch();
    GATHER
    extern __shared__ __align__(16) T shared[];
    T *qs = shared, *dys = qs + ROWS * PD, *ks = dys + ROWS * PV, *vs = ks + 2 * TILE * PD;
    T* ms = vs + 2 * TILE * PV;
    constexpr int MASK_TILE = mask_tile<MASK>(ROWS, TILE) + mask_tile<MASK2>(ROWS, TILE);
    const int block = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int first = block * ROWS, h = blockIdx.y, b = blockIdx.z, kv = h / o.group;
    if (PACKED && first >= o.queries) return;
    const i64 out = first_row(o, b, h, o.heads, o.queries);
    const T* k = o.k + b * o.ks.batch + kv * o.ks.head;
    const T* v = o.v + b * o.vs.batch + kv * o.vs.head;
    const int end = CAUSAL ? min(o.keys, first + ROWS) : o.keys;
    fetch<ROWS, D, DP>(qs, o.q + b * o.qs.batch + h * o.qs.head, o.qs.row, first, o.queries);
    fetch<ROWS, DV, VP>(dys, dy + b * db + h * dh + BEGIN * dr, dr, first, o.queries);
    fetch<TILE, D, DP>(ks, k, o.ks.row, 0, o.keys);
    fetch<TILE, DV, VP>(vs, v, o.vs.row, 0, o.keys);
    fetch_masks<ROWS, TILE>(ms, o, b, h, first, 0);
    cp_async_commit();
    const int lane = threadIdx.x % 32, row = first + threadIdx.x / 32 * 16 * MT + lane / 4;
    float acc[MT][DP / 8][4] = {}, c_[MT][2], factor[MT][2];
    float2 l[MT][2];
    const float scale = o.scale * LOG2E;
    UNROLLED for (int i = 0; i < 2 * MT; i++) {
        const bool there = row + 8 * i < o.queries;
        l[i / 2][i % 2] = load_lse(lse, out + row + 8 * i, there);
        c_[i / 2][i % 2] = there ? delta[out + row + 8 * i] : 0.0f;
        factor[i / 2][i % 2] = o.scale;
    }
    for (int t = 0, s = 0; t < end; t += TILE, s ^= 1) {
        cp_async_wait<0>();
        __syncthreads();
        if (t + TILE < end) {
            fetch<TILE, D, DP>(ks + (s ^ 1) * TILE * PD, k, o.ks.row, t + TILE, o.keys);
            fetch<TILE, DV, VP>(vs + (s ^ 1) * TILE * PV, v, o.vs.row, t + TILE, o.keys);
            fetch_masks<ROWS, TILE>(ms + (s ^ 1) * MASK_TILE, o, b, h, first, t + TILE);
        }
        cp_async_commit();
        float p[MT][TILE / 8][4], dp[MT][TILE / 8][4];
        dots<DP>(p, qs, ks + s * TILE * PD);
        dots<VP>(dp, dys, vs + s * TILE * PV);
        const bool plain = !NATURAL && !GUARD && t + TILE <= o.keys && !(CAUSAL && t + TILE > first);
        UNROLLED for (int m = 0; m < MT; m++)
            if (plain) {
                UNROLLED for (int n = 0; n < TILE / 8; n++)
                    UNROLLED for (int e = 0; e < 4; e++)
                        p[m][n][e] = power2(p[m][n][e] * scale - (l[m][e / 2].x + l[m][e / 2].y) * LOG2E) * (dp[m][n][e] - c_[m][e / 2]);
            } else {
                UNROLLED for (int n = 0; n < TILE / 8; n++)
                    UNROLLED for (int i = 0; i < 2; i++) {
                        const int r = row + m * 16 + i * 8, c = n * 8 + lane % 4 * 2;
                        const T* tile = ms + s * MASK_TILE;
                        const float2 by = mask_pair<MASK, TILE>(tile, r - first, c);
                        const float2 by2 = mask_pair<MASK2, TILE>(tile + mask_tile<MASK>(ROWS, TILE), r - first, c);
                        UNROLLED for (int j = 0; j < 2; j++) {
                            float x = dp[m][n][2 * i + j];
                            differentiate(o, p[m][n][2 * i + j], x, l[m][i], c_[m][i], j ? by.y : by.x, j ? by2.y : by2.x,
                                          meet(o, r, t + c + j));
                            p[m][n][2 * i + j] = x;
                        }
                    }
            }
        accumulate<DP>(acc, p, ks + s * TILE * PD);
    }
    write<D, DP>(PART(dq, h, out, D), acc, row, o.queries, factor);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    sdpa_dkv(OPERANDS, const T* dy, const float* lse, const float* delta, T* dk, T* dv, i64 db, i64 dh, i64 dr PARTS(dk) PARTS(dv)) {
    after_previous_launch();
    KEYS_FIRST
    extern __shared__ __align__(16) T shared[];
    T *ks = shared, *vs = ks + ROWS * PD, *qs = vs + ROWS * PV, *dys = qs + 2 * TILE * PD;
    T* ms = dys + 2 * TILE * PV;
    constexpr int MASK_TILE = mask_tile<MASK>(TILE, ROWS) + mask_tile<MASK2>(TILE, ROWS);
    const int first = blockIdx.x * ROWS, kv = blockIdx.y, b = blockIdx.z;
    if (PACKED && first >= o.keys) return;
    const int lane = threadIdx.x % 32, row = first + threadIdx.x / 32 * 16 * MT + lane / 4;
    fetch<ROWS, D, DP>(ks, o.k + b * o.ks.batch + kv * o.ks.head, o.ks.row, first, o.keys);
    fetch<ROWS, DV, VP>(vs, o.v + b * o.vs.batch + kv * o.vs.head, o.vs.row, first, o.keys);
    float acc_k[MT][DP / 8][4] = {}, acc_v[MT][VP / 8][4] = {};
    const float scale = o.scale * LOG2E;
    const int begin = CAUSAL ? first / TILE * TILE : 0;
    const int tiles = (o.queries - begin + TILE - 1) / TILE, steps = max(tiles, 0) * o.group;
    auto fetch_step = [&](int step, int s) {  // one tile of queries of one of the group's heads
        const int h = kv * o.group + step / tiles, t = begin + step % tiles * TILE;
        fetch<TILE, D, DP>(qs + s * TILE * PD, o.q + b * o.qs.batch + h * o.qs.head, o.qs.row, t, o.queries);
        fetch<TILE, DV, VP>(dys + s * TILE * PV, dy + b * db + h * dh + BEGIN * dr, dr, t, o.queries);
        fetch_masks<TILE, ROWS>(ms + s * MASK_TILE, o, b, h, t, first);
    };
    if (steps) fetch_step(0, 0);
    cp_async_commit();
    for (int step = 0, s = 0; step < steps; step++, s ^= 1) {
        cp_async_wait<0>();
        __syncthreads();
        if (step + 1 < steps) fetch_step(step + 1, s ^ 1);
        cp_async_commit();
        const int h = kv * o.group + step / tiles, t = begin + step % tiles * TILE;
        const i64 at = first_row(o, b, h, o.heads, o.queries);
        float p[MT][TILE / 8][4], dp[MT][TILE / 8][4];
        dots<DP>(p, ks, qs + s * TILE * PD);
        dots<VP>(dp, vs, dys + s * TILE * PV);
        const bool plain = !NATURAL && !GUARD && first + ROWS <= o.keys && !(CAUSAL && t < first + ROWS);
        UNROLLED for (int n = 0; n < TILE / 8; n++)
            UNROLLED for (int j = 0; j < 2; j++) {
                const int query = t + n * 8 + lane % 4 * 2 + j;
                const bool there = query < o.queries;
                const float2 l = load_lse(lse, at + query, there);
                const float c = there ? delta[at + query] : 0.0f;
                const T* mask = ms + s * MASK_TILE + (MASK == 2 ? 0 : query - t) * (ROWS + 8) - first;
                const T* mask2 = ms + s * MASK_TILE + mask_tile<MASK>(TILE, ROWS) + (MASK2 == 2 ? 0 : query - t) * (ROWS + 8) - first;
                UNROLLED for (int i = 0; i < 2 * MT; i++) {
                    float &x = p[i / 2][n][i % 2 * 2 + j], &d = dp[i / 2][n][i % 2 * 2 + j];
                    if (plain) {
                        x = power2(x * scale - (l.x + l.y) * LOG2E);
                        d = x * (d - c);
                    } else {
                        differentiate(o, x, d, l, c, MASK ? to_float(mask[row + 8 * i]) : 0.0f,
                                      MASK2 ? to_float(mask2[row + 8 * i]) : 0.0f, meet(o, query, row + 8 * i));
                    }
                }
            }
        accumulate<VP>(acc_v, p, dys + s * TILE * PV);
        accumulate<DP>(acc_k, dp, qs + s * TILE * PD);
    }
    const i64 out = first_row(o, b, kv, o.heads / o.group, o.keys);
    float one[MT][2], factor[MT][2];
    UNROLLED for (int i = 0; i < 2 * MT; i++) one[i / 2][i % 2] = 1, factor[i / 2][i % 2] = o.scale;
    write<D, DP>(PART(dk, kv, out, D), acc_k, row, o.keys, factor);
    write<DV, VP>(PART(dv, kv, out, DV), acc_v, row, o.keys, one);
}
#endif
