// layernorm_gemm/skinny.cu: y = epilogue(LN?(x) . op(w)) for few rows or small sizes, in one launch.
// Idea     : a block owns 16 MT rows x 8 NT columns; its WARPS share k in chunks of 32 and add their sums
//            through smem in warp order. Operands go from memory straight to mma registers by 16-byte
//            loads: a product does not care in which order k is taken, so lane c of a quad takes the
//            8 neighbours k = 8c.. of each chunk from x and w alike. Row statistics come from the
//            same registers: (count, mean, M2) of 8 values, merged by Chan's formula.
// Inputs   : x [M,K] T, w [K,N] (TRANS_B: [N,K]) T, K a multiple of 8, rows 16-byte aligned.
//            LN 1: w is folded (wq), col0, col1 = cs, cv;  LN 2: gamma, beta [K] TP, col1 = bias;
//            LN 0: a plain product, statistics (if the epilogue wants any) in row0...
// Outputs  : y, z [M,N] TO; mean, rstd [M] f32 (LN 1, 2).
// Macros   : T, TO, TV, TP, TRANS_B, MT, NT, WARPS, UNROLL, LN, RMS; the epilogue's (gemm/epilogue.cuh).
// Launch   : grid (ceil(N / (8 NT)), ceil(M / (16 MT))), 32 WARPS threads.
// Numerics : f32 sums; the order depends on K and WARPS alone.
// Bound    : bytes of w for M <= 32, else L2: x and w are read N / (8 NT) and M / (16 MT) times.
#include "gemm/epilogue.cuh"
#include "sm80.cuh"
#ifndef RMS
#define RMS 0
#endif
constexpr int ROWS = 16 * MT, COLS = 8 * NT, HALVES = 2 * MT;  // a lane holds HALVES rows of x

struct Moments {  // count, mean and sum of squared deviations of some values
    float n, mean, m2;
    DEVICE void merge(float n2, float mean2, float m22) {
        float total = n + n2, part = total > 0 ? n2 / total : 0.0f, d = mean2 - mean;
        m2 += m22 + d * d * n * part;
        mean += d * part;
        n = total;
    }
};
DEVICE uint4 load16(const T* p) { return *(const uint4*)p; }

extern "C" __global__ __launch_bounds__(32 * WARPS, 1) void gemm_skinny(
    const T* __restrict__ x, const T* __restrict__ w, TO* __restrict__ y, TO* __restrict__ z,
    const TO* __restrict__ c, int M, int N, int K, i64 ldx, i64 ldw, float epsilon,
    float* __restrict__ mean, float* __restrict__ rstd, const TP* __restrict__ gamma,
    const TP* __restrict__ beta_k, const TR* __restrict__ row0, const TR* __restrict__ row1,
    const TR* __restrict__ row2, const TR* __restrict__ row3, const TV* __restrict__ col0,
    const TV* __restrict__ col1, float alpha, float beta, float act_alpha) {
    extern __shared__ __align__(16) float sums[];  // [WARPS][ROWS][COLS]
    __shared__ float moments[LN ? WARPS : 1][ROWS][3];
    __shared__ float stats[2][ROWS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    int n0 = blockIdx.x * COLS, m0 = blockIdx.y * ROWS;
    int chunks = (K + 31) / 32;
    float acc[MT][NT][4] = {};
    Moments mo[HALVES] = {};

    auto x_at = [&](int h, int chunk) -> uint4 {  // row g + 8 h, 8 values
        int m = m0 + g + h * 8, k = chunk * 32 + q * 8;
        return m < M && k < K ? load16(x + m * ldx + k) : uint4{};
    };
    auto observe = [&](int h, const uint4& v) {
        float2 p[4] = {unpack2<T>(v.x), unpack2<T>(v.y), unpack2<T>(v.z), unpack2<T>(v.w)};
        float mu = 0, m2 = 0;
        if (!RMS) {
#pragma unroll
            for (int i = 0; i < 4; i++) mu += p[i].x + p[i].y;
            mu *= 0.125f;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            m2 += (p[i].x - mu) * (p[i].x - mu) + (p[i].y - mu) * (p[i].y - mu);
        mo[h].merge(8, mu, m2);
    };
    auto share_moments = [&] {  // over the quad, the warps; then stats[0] mean, stats[1] rstd
#pragma unroll
        for (int h = 0; h < HALVES; h++) {
#pragma unroll
            for (int step = 1; step < 4; step *= 2) {
                float n = __shfl_xor_sync(~0u, mo[h].n, step);
                float mu = __shfl_xor_sync(~0u, mo[h].mean, step);
                float m2 = __shfl_xor_sync(~0u, mo[h].m2, step);
                // both partners must get the same bits: the lower lane's values come first
                Moments low = lane & step ? Moments{n, mu, m2} : mo[h];
                Moments high = lane & step ? mo[h] : Moments{n, mu, m2};
                low.merge(high.n, high.mean, high.m2);
                mo[h] = low;
            }
            if (q == 0) {
                float* to = moments[warp][g + h * 8];
                to[0] = mo[h].n, to[1] = mo[h].mean, to[2] = mo[h].m2;
            }
        }
        __syncthreads();
        for (int r = threadIdx.x; r < ROWS; r += 32 * WARPS) {
            Moments all = {};
            for (int i = 0; i < WARPS; i++)
                all.merge(moments[i][r][0], moments[i][r][1], moments[i][r][2]);
            stats[0][r] = all.mean;
            stats[1][r] = rsqrtf(fmaxf(all.m2, 0.0f) / K + epsilon);
            if (blockIdx.x == 0 && m0 + r < M) {
                mean[m0 + r] = stats[0][r];
                rstd[m0 + r] = stats[1][r];
            }
        }
        __syncthreads();
    };

#if LN == 2
    for (int chunk = warp; chunk < chunks; chunk += WARPS)
#pragma unroll
        for (int h = 0; h < HALVES; h++)
            if (chunk * 32 + q * 8 < K) observe(h, x_at(h, chunk));
    share_moments();
    float mu[HALVES], rs[HALVES];
#pragma unroll
    for (int h = 0; h < HALVES; h++) mu[h] = stats[0][g + h * 8], rs[h] = stats[1][g + h * 8];
#endif

    for (int first = warp; first < chunks; first += WARPS * UNROLL) {
        uint4 xv[UNROLL][HALVES];
#if TRANS_B
        uint4 wv[UNROLL][NT];
#else
        Vec<T, NT> wv[UNROLL][8];
#endif
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            int chunk = first + u * WARPS, k = chunk * 32 + q * 8;
            bool in = k < K;
#if TRANS_B
#pragma unroll
            for (int j = 0; j < NT; j++) {
                int n = n0 + j * 8 + g;
                wv[u][j] = in && n < N ? load16(w + n * ldw + k) : uint4{};
            }
#else
#pragma unroll
            for (int i = 0; i < 8; i++) {
                int n = n0 + g * NT;
                if (in && n + NT <= N) {
                    wv[u][i] = load<NT>(w + (k + i) * ldw + n);
                } else {
#pragma unroll
                    for (int j = 0; j < NT; j++)
                        wv[u][i].at[j] = in && n + j < N ? w[(k + i) * ldw + n + j] : T{};
                }
            }
#endif
#pragma unroll
            for (int h = 0; h < HALVES; h++) xv[u][h] = x_at(h, chunk);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            int k = (first + u * WARPS) * 32 + q * 8;
#if LN == 1
            if (k < K)
#pragma unroll
                for (int h = 0; h < HALVES; h++) observe(h, xv[u][h]);
#elif LN == 2
            if (k < K) {
                float ga[8], be[8];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    ga[i] = to_float(gamma[k + i]);
                    be[i] = RMS ? 0.0f : to_float(beta_k[k + i]);
                }
#pragma unroll
                for (int h = 0; h < HALVES; h++) {
                    u32* words = (u32*)&xv[u][h];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float2 p = unpack2<T>(words[i]);
                        words[i] = pack2<T>((p.x - mu[h]) * rs[h] * ga[2 * i] + be[2 * i],
                                            (p.y - mu[h]) * rs[h] * ga[2 * i + 1] + be[2 * i + 1]);
                    }
                }
            }
#endif
#pragma unroll
            for (int half = 0; half < 2; half++)  // values 0..3, then 4..7 of the lane's eight
#pragma unroll
                for (int j = 0; j < NT; j++) {
                    u32 b[2];
#if TRANS_B
                    const u32* words = (const u32*)&wv[u][j];
                    b[0] = words[half * 2], b[1] = words[half * 2 + 1];
#else
                    b[0] = wv[u][half * 4].at[j].bits | wv[u][half * 4 + 1].at[j].bits << 16;
                    b[1] = wv[u][half * 4 + 2].at[j].bits | wv[u][half * 4 + 3].at[j].bits << 16;
#endif
#pragma unroll
                    for (int i = 0; i < MT; i++) {
                        const u32* lo = (const u32*)&xv[u][2 * i];
                        const u32* hi = (const u32*)&xv[u][2 * i + 1];
                        u32 a[4] = {lo[half * 2], hi[half * 2], lo[half * 2 + 1], hi[half * 2 + 1]};
                        mma(acc[i][j], a, b, T{});
                    }
                }
        }
    }
#if LN == 1
    share_moments();
#endif
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float* to = sums + (warp * ROWS + i * 16 + h * 8 + g) * COLS + j * 8 + q * 2;
                *(float2*)to = make_float2(acc[i][j][h * 2], acc[i][j][h * 2 + 1]);
            }
    __syncthreads();
    for (int at = threadIdx.x; at < ROWS * COLS; at += 32 * WARPS) {
        int r = at / COLS, col = at % COLS, m = m0 + r;
        int from = TRANS_B ? col : col % NT * 8 + col / NT;  // where the mma put this column
        int n = n0 + col;
        float v = 0;
#pragma unroll
        for (int i = 0; i < WARPS; i++) v += sums[(i * ROWS + r) * COLS + from];
        if (m >= M || n >= N) continue;
        Row row = {};
        if (LN == 1) row.r0 = stats[1][r], row.r1 = stats[0][r];
        else if (EPI_ROWS > 0) {
            row.r0 = to_float(row0[m]), row.r1 = to_float(row1[m]);
            if (EPI_ROWS > 2) row.r2 = to_float(row2[m]), row.r3 = to_float(row3[m]);
        }
        float zz = 0;
        Dots dots = {};
        i64 out = (i64)m * N + n;
        v = epilogue<float>(v, row, EPI_COLS > 1 ? to_float(col0[n]) : 0.0f,
                            EPI_COLS > 0 ? to_float(col1[n]) : 0.0f,
                            EPI_OPERAND ? to_float(c[out]) : 0.0f, alpha, beta, act_alpha, zz, dots);
        y[out] = from_float<TO>(v);
        if (SAVE_Z) z[out] = from_float<TO>(zz);
    }
}
