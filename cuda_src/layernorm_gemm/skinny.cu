// layernorm_gemm/skinny.cu: y = epilogue(LN?(x) . op(w)) for few rows or small sizes, in one launch.
// Idea     : a block owns 16 MT rows x 8 NT WN columns; WARPS / WN warps a column group, and CLUSTER
//            blocks, share k in chunks of 32 and add their sums in order through smem. Operands go
//            from memory straight to mma registers by 16-byte loads: a product does not care in which
//            order k is taken, so lane q of a quad takes the 8 neighbours k = 8q.. of each chunk from
//            x and w alike. Row statistics come from the same registers: a lane shifts by the mean of
//            its first 8 values, lanes merge (count, mean, M2) by Chan's formula.
// Inputs   : x [M,K] T, w [K,N] (TRANS_B: [N,K]) T, K a multiple of 8, rows 16-byte
//            aligned; without TRANS_B also N a multiple of NT.
//            LN 1: w is folded (wq), col0, col1 = cs, cv;  LN 2: gamma, beta [K] TP, col1 = bias;
//            LN 0: a plain product, statistics (if the epilogue wants any) in row0...
// Outputs  : y, z [M,N] TO; mean, rstd [M] f32 (LN 1, 2).
// Macros   : T, TO, TV, TP, TRANS_B, MT, HALF (1: M <= 8, the upper 8 rows of the mma stay empty), NT,
//            WN, WARPS, CLUSTER, UNROLL, LN, RMS; the epilogue's (gemm/epilogue.cuh).
// Launch   : grid (CLUSTER ceil(N / (8 NT WN)), ceil(M / (16 MT))), 32 WARPS threads.
// Numerics : f32 sums; the order depends on K, WARPS / WN and CLUSTER alone.
// Bound    : bytes of w for M <= 32, else L2: x and w are read once a column and once a row of blocks.
#include "gemm/epilogue.cuh"
#include "sm80.cuh"
#ifndef RMS
#define RMS 0
#endif
constexpr int ROWS = 16 * MT, COLS = 8 * NT * WN, WK = WARPS / WN, SHARE = WK * CLUSTER;
constexpr int AT_ONCE = GATE ? 2 : 1;  // neighbours that a thread finishes together
constexpr int HALVES = HALF ? 1 : 2 * MT;  // rows of x a lane holds

struct Moments {  // count, mean and sum of squared deviations of some values
    float n, mean, m2;
    DEVICE void merge(float n2, float mean2, float m22) {
        float total = n + n2, part = total > 0 ? n2 / total : 0.0f, d = mean2 - mean;
        m2 += m22 + d * (n * part) * d;  // d * d may be inf, n 0
        mean += d * part;
        n = total;
    }
};
DEVICE uint4 load16(const T* p) { return *(const uint4*)p; }
#if CLUSTER > 1
#include "cluster.cuh"
// The value at the same shared address in block `rank` of the cluster.
DEVICE float remote(const float* p, u32 rank) {
    float v;
    asm volatile("{\n.reg .b32 a;\nmapa.shared::cluster.u32 a, %1, %2;\n"
                 "ld.shared::cluster.f32 %0, [a];\n}"
                 : "=f"(v)
                 : "r"(smem_address(p)), "r"(rank)
                 : "memory");
    return v;
}
#else
DEVICE u32 cluster_rank() { return 0; }
DEVICE void cluster_sync() { __syncthreads(); }
DEVICE float remote(const float* p, u32) { return *p; }
#endif

extern "C" __global__ __launch_bounds__(32 * WARPS, 1) void gemm_skinny(
    const T* x, const T* w, TO* y, TO* z, const TO* c, int M, int N, int K, i64 ldx, i64 ldw, float epsilon,
    float* mean, float* rstd, const TP* gamma, const TP* beta_k, const TR* row0, const TR* row1, const TR* row2,
    const TR* row3, const TV* col0, const TV* col1, float alpha, float beta, float act_alpha) {
    after_previous_launch();
    extern __shared__ __align__(16) float sums[];  // [WK][ROWS][COLS], then the block's [ROWS][COLS]
    __shared__ float moments[LN ? WK : 1][ROWS][3], shared_moments[3][ROWS];
    __shared__ float stats[2][ROWS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    int wn = warp % WN, wk = warp / WN, rank = cluster_rank();
    int n0 = blockIdx.x / CLUSTER * COLS, m0 = blockIdx.y * ROWS, nw = n0 + wn * 8 * NT;
    int chunks = (K + 31) / 32, mine = wk + rank * WK;
    float acc[MT][NT][4] = {};
    float shift[HALVES] = {}, s1[HALVES] = {}, s2[HALVES] = {}, seen = 0;

    auto x_at = [&](int h, int chunk) -> uint4 {  // row g + 8 h, 8 values
        int m = m0 + g + h * 8, k = chunk * 32 + q * 8;
        return m < M && k < K ? load16(x + m * ldx + k) : uint4{};
    };
    auto observe = [&](int h, const uint4& v) {
        float2 p[4] = {unpack2<T>(v.x), unpack2<T>(v.y), unpack2<T>(v.z), unpack2<T>(v.w)};
        if (!RMS && seen == 0)
            shift[h] = 0.125f * (((p[0].x + p[0].y) + (p[1].x + p[1].y)) + ((p[2].x + p[2].y) + (p[3].x + p[3].y)));
        UNROLLED for (int i = 0; i < 4; i++) {
            float a = p[i].x - shift[h], b = p[i].y - shift[h];
            s1[h] += a + b;
            s2[h] += a * a + b * b;
        }
    };
    auto share_moments = [&] {  // over the quad, the warps, the cluster: stats[0] mean, stats[1] rstd
        if (wn == 0)
            UNROLLED for (int h = 0; h < HALVES; h++) {
                float over = seen > 0 ? s1[h] / seen : 0.0f;
                Moments mo = {seen, RMS ? 0.0f : shift[h] + over, RMS ? s2[h] : fmaf(-s1[h], over, s2[h])};
                UNROLLED for (int step = 1; step < 4; step *= 2) {
                    float n = __shfl_xor_sync(~0u, mo.n, step);
                    float mu = __shfl_xor_sync(~0u, mo.mean, step);
                    float m2 = __shfl_xor_sync(~0u, mo.m2, step);
                    // both partners must get the same bits: the lower lane's values come first
                    Moments low = lane & step ? Moments{n, mu, m2} : mo;
                    Moments high = lane & step ? mo : Moments{n, mu, m2};
                    low.merge(high.n, high.mean, high.m2);
                    mo = low;
                }
                if (q == 0) {
                    float* to = moments[wk][g + h * 8];
                    to[0] = mo.n, to[1] = mo.mean, to[2] = mo.m2;
                }
            }
        __syncthreads();
        int r = threadIdx.x;
        Moments all = {};
        if (r < ROWS && r < 8 * HALVES)
            for (int i = 0; i < WK; i++)
                all.merge(moments[i][r][0], moments[i][r][1], moments[i][r][2]);
        if (CLUSTER > 1) {
            if (r < ROWS) {
                shared_moments[0][r] = all.n, shared_moments[1][r] = all.mean;
                shared_moments[2][r] = all.m2;
            }
            cluster_sync();
            all = {};
            if (r < ROWS)
                for (int i = 0; i < CLUSTER; i++)
                    all.merge(remote(&shared_moments[0][r], i), remote(&shared_moments[1][r], i),
                              remote(&shared_moments[2][r], i));
        }
        if (r < ROWS) {
            stats[0][r] = all.mean;
            stats[1][r] = rsqrtf(max_nan(all.m2, 0.0f) / K + epsilon);
            if (blockIdx.x == 0 && m0 + r < M) {
                mean[m0 + r] = stats[0][r];
                rstd[m0 + r] = stats[1][r];
            }
        }
        __syncthreads();
    };

#if LN == 2
    for (int chunk = mine; chunk < chunks; chunk += SHARE)
        if (chunk * 32 + q * 8 < K) {
            UNROLLED for (int h = 0; h < HALVES; h++) observe(h, x_at(h, chunk));
            seen += 8;
        }
    share_moments();
    float mu[HALVES], rs[HALVES];
    UNROLLED for (int h = 0; h < HALVES; h++) mu[h] = stats[0][g + h * 8], rs[h] = stats[1][g + h * 8];
#endif

    struct Batch {  // UNROLL chunks of this lane's operands
        uint4 x[UNROLL][HALVES];
#if TRANS_B
        uint4 w[UNROLL][NT];
#else
        Vec<u32, NT / 2> w[UNROLL][8];  // packed: an array of 16-bit values takes a register each
#endif
    };
    auto fetch = [&](Batch& to, int first) {
        UNROLLED for (int u = 0; u < UNROLL; u++) {
            int chunk = first + u * SHARE, k = chunk * 32 + q * 8;
            bool in = k < K;
#if TRANS_B
            UNROLLED for (int j = 0; j < NT; j++) {
                int n = nw + j * 8 + g;
                to.w[u][j] = in && n < N ? load16(w + n * ldw + k) : uint4{};
            }
#else
            UNROLLED for (int i = 0; i < 8; i++) {
                int n = nw + g * NT;  // NT divides N
                to.w[u][i] = in && n < N ? load<NT / 2>((const u32*)(w + (k + i) * ldw + n))
                                          : Vec<u32, NT / 2>{};
            }
#endif
            UNROLLED for (int h = 0; h < HALVES; h++) to.x[u][h] = x_at(h, chunk);
        }
    };
    auto multiply = [&](Batch& from, int first) {
        UNROLLED for (int u = 0; u < UNROLL; u++) {
            int k = (first + u * SHARE) * 32 + q * 8;
#if LN == 1
            if (k < K) {
                UNROLLED for (int h = 0; h < HALVES; h++) observe(h, from.x[u][h]);
                seen += 8;
            }
#elif LN == 2
            if (k < K) {
                float ga[8], be[8];
                UNROLLED for (int i = 0; i < 8; i++) {
                    ga[i] = to_float(gamma[k + i]);
                    be[i] = RMS ? 0.0f : to_float(beta_k[k + i]);
                }
                UNROLLED for (int h = 0; h < HALVES; h++) {
                    u32* words = (u32*)&from.x[u][h];
                    UNROLLED for (int i = 0; i < 4; i++) {
                        float2 p = unpack2<T>(words[i]);
                        words[i] = pack2<T>((p.x - mu[h]) * rs[h] * ga[2 * i] + be[2 * i],
                                            (p.y - mu[h]) * rs[h] * ga[2 * i + 1] + be[2 * i + 1]);
                    }
                }
            }
#endif
            UNROLLED for (int half = 0; half < 2; half++)  // values 0..3, then 4..7 of the lane's eight
                UNROLLED for (int j = 0; j < NT; j++) {
                    u32 b[2];
#if TRANS_B
                    const u32* words = (const u32*)&from.w[u][j];
                    b[0] = words[half * 2], b[1] = words[half * 2 + 1];
#else
                    UNROLLED for (int i = 0; i < 2; i++) {  // column j of two neighbouring k
                        const auto& k0 = from.w[u][half * 4 + 2 * i];
                        const auto& k1 = from.w[u][half * 4 + 2 * i + 1];
                        b[i] = __byte_perm(k0.at[j / 2], k1.at[j / 2], j % 2 ? 0x7632 : 0x5410);
                    }
#endif
                    UNROLLED for (int i = 0; i < MT; i++) {
                        const u32* lo = (const u32*)&from.x[u][HALF ? 0 : 2 * i];
                        const u32* hi = (const u32*)&from.x[u][HALF ? 0 : 2 * i + 1];
                        u32 a[4] = {lo[half * 2], HALF ? 0 : hi[half * 2], lo[half * 2 + 1],
                                    HALF ? 0 : hi[half * 2 + 1]};
                        mma(acc[i][j], a, b, T{});
                    }
                }
        }
    };
    // one batch is on its way while the other is multiplied
    Batch even, odd;
    constexpr int STEP = SHARE * UNROLL;
    fetch(even, mine);
    for (int first = mine; first < chunks; first += 2 * STEP) {
        bool more = first + STEP < chunks;
        if (more) fetch(odd, first + STEP);
        multiply(even, first);
        if (!more) break;
        if (first + 2 * STEP < chunks) fetch(even, first + 2 * STEP);
        multiply(odd, first + STEP);
    }
    UNROLLED for (int i = 0; i < MT; i++)
        UNROLLED for (int j = 0; j < NT; j++)
            UNROLLED for (int h = 0; h < 2; h++) {
                float* to = sums + (wk * ROWS + i * 16 + h * 8 + g) * COLS + (wn * NT + j) * 8 + q * 2;
                *(float2*)to = make_float2(acc[i][j][h * 2], acc[i][j][h * 2 + 1]);
            }
#if LN == 1
    share_moments();
#else
    __syncthreads();
#endif
    if (CLUSTER > 1) {  // the block's sum; then each block finishes its share of the elements
        for (int at = threadIdx.x; at < ROWS * COLS; at += 32 * WARPS) {
            float v = 0;
            UNROLLED for (int i = 0; i < WK; i++) v += sums[i * ROWS * COLS + at];
            sums[at] = v;  // nobody else reads this element of slice 0
        }
        cluster_sync();
    }
    constexpr int EACH = ROWS * COLS / CLUSTER;
    // where the mma put a column of the block
    auto place = [](int col) {
        return TRANS_B ? col : col / (8 * NT) * (8 * NT) + col % NT * 8 + col % (8 * NT) / NT;
    };
    auto total = [&](int r, int from) {
        float v = 0;
        if (CLUSTER > 1)
            for (int i = 0; i < CLUSTER; i++) v += remote(&sums[r * COLS + from], i);
        else
            UNROLLED for (int i = 0; i < WK; i++) v += sums[(i * ROWS + r) * COLS + from];
        return v;
    };
    for (int at = rank * EACH + threadIdx.x * AT_ONCE; at < (rank + 1) * EACH; at += 32 * WARPS * AT_ONCE) {
        int r = at / COLS, col = at % COLS, m = m0 + r, n = n0 + col;
        float v = total(r, place(col)), through = GATE ? total(r, place(col + 1)) : 0.0f;
        if (m >= M || n >= N) continue;
        Row row = {};
        if (LN == 1) row.r0 = stats[1][r], row.r1 = stats[0][r];
        else row = GEMM_ROW(m);
        float zz = 0;
#if GATE
        v = before_act(v, row, GEMM_COL0(n), GEMM_COL1(n), 0.0f, alpha, beta, zz);
        through = before_act(through, row, GEMM_COL0(n + 1), GEMM_COL1(n + 1), 0.0f, alpha, beta, zz);
        y[(i64)m * (N / 2) + gate_column(n)] = from_float<TO>(gated<float>(v, through, act_alpha));
        continue;
#endif
        Dots dots = {};
        i64 out = (i64)m * N + n;
        v = epilogue<float>(v, row, GEMM_COL0(n), GEMM_COL1(n), EPI_OPERAND ? to_float(c[out]) : 0.0f, alpha, beta,
                            act_alpha, zz, dots);
        y[out] = stored<float>(v, y + out);
        if (SAVE_Z) z[out] = from_float<TO>(zz);
    }
    if (CLUSTER > 1) cluster_sync();  // a block's smem must outlive the others' reads
}
