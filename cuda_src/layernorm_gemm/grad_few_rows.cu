// layernorm_gemm/grad_few_rows.cu: all gradients of y = act(LN(x) w + c) for few rows, two launches.
//   dz = dy act'(z)     g = dz wᵀ     xh = (x - mean) rstd     h = gamma xh + beta
//   grad_products:  dw = hᵀ dz, dc = sum_m dz; g and its sums over k of (gamma g, gamma g xh), over m
//                   of (g xh, g)
//   grad_finish:    dx = rstd (gamma g - mean_k(gamma g) - xh mean_k(gamma g xh)) + add, dgamma, dbeta
// Idea     : the two products need nothing of each other, so one grid holds the blocks of both, those
//            of g first, and fills the chip with half the launches. Few rows make few tiles of g:
//            its sum over n is split, and since all that follows is linear in g the second launch adds
//            the parts as it reads them. h is made from x on its way to the tensor core.
// Inputs   : dy, z [M,N] T, x [M,K] T, gamma, beta [K] T, w [K,N] T, mean, rstd [M] f32; K, N
//            multiples of 8, 16-byte aligned; add [M,K] T or null, dx itself too. RMSNorm: beta, mean
//            and dbeta are null, and mean_k(gamma g) counts as 0.
// Outputs  : dx [M,K], dgamma, dbeta [K], dw [K,N], dc [N].
// Workspace: dz [M,N] T (with an activation), g [splits,M,K], rows [M,splits k tiles,2], columns
//            [splits m tiles,2,K], all f32.
// Macros   : T, ACT; g's tile AM x AK, dw's BK x BN, BM rows of x and dz a stage, RUN dw tiles a block
//            (more than 1: M <= BM); WARPS, STAGES, BLOCKS (an SM's); WG 1: wgmma (sm_90a; AM = BK =
//            16 WARPS, BM = 64), 0: mma.sync.
// Launch   : grad_dz (with an activation): M N / 8 threads; grad_products: splits ceil(M / AM)
//            ceil(K / AK) + ceil(K / BK) ceil(N / BN / RUN) blocks of 32 WARPS threads; grad_finish: a
//            warp for 256 columns of a row, then 128 columns' sums a block.
// Numerics : f32 sums, one rounding at the end (h and dz are rounded as operands); the order depends on
//            the shape and the macros alone.
// Bound    : bytes of w and dw for M <= 32, then the tensor cores.
#include "sm80.cuh"
#if WG
#include "wgmma.cuh"
#endif
constexpr int THREADS = 32 * WARPS, N_STEP = 64;
// warps over g's tile, and over dw's
constexpr int WAM = WG ? WARPS : AM >= 64 ? 2 : AK < 64 ? AM / 16 : 1, WAK = WARPS / WAM;
constexpr int WBN = WG ? 1 : 2, WBK = WARPS / WBN;
constexpr int AI = AM / WAM / 16, AJ = AK / WAK / 8, BI = BK / WBK / 16, BJ = BN / WBN / 8;
constexpr int A_STAGE = (AM + AK) * 128, B_STAGE = (BK + BN) * BM * 2 + 8 * BM;
constexpr int STAGE = ((A_STAGE > B_STAGE ? A_STAGE : B_STAGE) + 1023) / 1024 * 1024;
static_assert(RUN == 1 || (BK == 64 && !WG), "a run of tiles has one block of x");
static_assert(AM * (AK > 64 ? AK : 64) * 2 <= STAGE, "x's tile does not fit a stage");
static_assert(AJ % 2 == 0 && BJ % 4 == 0 && AI > 0 && BI > 0, "warps do not divide the tile");
static_assert(!WG || (AM == 16 * WARPS && BK == AM && BM == 64), "a warpgroup has 64 rows");

// Rows row.. and 64 columns col.. of a dense [rows, cols] matrix, zeros outside, 128-byte swizzled.
template <int R> DEVICE void load_block(u32 to, const T* from, int row, int rows, int col, int cols) {
    UNROLLED for (int first = 0; first < R * 8; first += THREADS) {
        int at = first + threadIdx.x, r = at / 8, c = at % 8;
        if (R * 8 % THREADS && at >= R * 8) break;
        bool in = row + r < rows && col + c * 8 < cols;
        cp_async_16(to + r * 128 + ((c ^ (r & 7)) << 4), from + (u32)((row + r) * cols + col + c * 8), in ? 16 : 0);
    }
}
DEVICE u32 swizzled(u32 block, int row, int chunk) {
    return block + row * 128 + ((chunk ^ (row & 7)) << 4);
}
// h of two neighbours in m; `mu`, `rs` are theirs.
DEVICE u32 normalised(u32 x, float2 mu, float2 rs, float gamma, float beta) {
    float2 v = unpack2<T>(x);
    return pack2<T>((v.x - mu.x) * rs.x * gamma + beta, (v.y - mu.y) * rs.y * gamma + beta);
}
// Four 8-column blocks of a row over a quad, two columns a lane, to one block of 8 columns a lane.
DEVICE uint4 gather_block(u32 v0, u32 v1, u32 v2, u32 v3) {
    int lane = threadIdx.x;
    u32 s0 = __shfl_xor_sync(~0u, lane & 1 ? v0 : v1, 1);
    u32 s1 = __shfl_xor_sync(~0u, lane & 1 ? v2 : v3, 1);
    if (lane & 1) v0 = s0, v2 = s1;
    else v1 = s0, v3 = s1;
    s0 = __shfl_xor_sync(~0u, lane & 2 ? v0 : v2, 2);
    s1 = __shfl_xor_sync(~0u, lane & 2 ? v1 : v3, 2);
    if (lane & 2) v0 = s0, v1 = s1;
    else v2 = s0, v3 = s1;
    return make_uint4(v0, v1, v2, v3);
}
// `load(slot, step)` runs ahead of `multiply(slot, step)`. A block alone on its SM leaves a step's wgmma
// running while it prepares the next one, which takes one slot more.
constexpr int RUNNING = WG && BLOCKS == 1;
// EXTRA: what `load` brings for the step after the last is for the caller, in slot steps % SLOTS.
template <int SLOTS, int EXTRA, class Load, class Multiply>
DEVICE void pipeline(u32 base, int steps, Load load, Multiply multiply) {
    constexpr int AHEAD = SLOTS - 1 - RUNNING;
    UNROLLED for (int s = 0; s < AHEAD; s++) {
        if (s < steps + EXTRA) load(base + s * STAGE, s);
        cp_async_commit();
    }
    int slot = 0, ahead = AHEAD;
    for (int step = 0; step < steps; step++) {
        cp_async_wait<AHEAD - 1>();
#if WG
        fence_proxy_async();  // each thread's own copies, for the tensor core
#endif
        __syncthreads();  // all see them, and all are through with the slot that is loaded next
        if (step + AHEAD < steps + EXTRA) load(base + ahead * STAGE, step + AHEAD);
        cp_async_commit();
        multiply(slot * STAGE, step);
        slot = slot + 1 == SLOTS ? 0 : slot + 1;
        ahead = ahead + 1 == SLOTS ? 0 : ahead + 1;
    }
    cp_async_wait<0>();
#if WG
    wgmma_wait<0>();
#endif
    __syncthreads();
}

// g's tile: sums of `part` of the steps over n.
DEVICE void product_g(u8* smem, int id, const T* dz, const T* x, const T* gamma, const T* w,
                      const float* mean, const float* rstd, int M, int N, int K, int splits, float* g,
                      float2* rows, float* columns) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4;
    int k_tiles = (K + AK - 1) / AK, m_tiles = (M + AM - 1) / AM;
    int part = id % splits, kt = id / splits % k_tiles, mt = id / splits / k_tiles;
    int m0 = mt * AM, k0 = kt * AK, all = (N + N_STEP - 1) / N_STEP;
    int first = part * all / splits, steps = (part + 1) * all / splits - first;
    int wm = warp % WAM * (AM / WAM), wk = warp / WAM * (AK / WAK);  // the warp's place in the tile
    u32 base = smem_address(smem);
    float acc[AI][AJ * 4] = {};
    pipeline<STAGES, 1>(
        base, steps,
        [&](u32 to, int step) {
            if (step == steps) {  // x's tile, for the epilogue
                UNROLLED for (int b = 0; b < (AK + 63) / 64; b++)
                    load_block<AM>(to + b * AM * 128, x, m0, M, k0 + b * 64, K);
                return;
            }
            int n = (first + step) * N_STEP;
            load_block<AM>(to, dz, m0, M, n, N);
            load_block<AK>(to + AM * 128, w, k0, K, n, N);
        },
        [&](u32 slot, int step) {
            u32 a = base + slot, b = a + AM * 128;
#if WG
            wgmma_fence();
            UNROLLED for (int q = 0; q < N_STEP / 16; q++)
                Wgmma<T, AK, 0, 0>::run(acc[0], wgmma_descriptor<true>(a + warp / 4 * 8192 + q * 32),
                                        wgmma_descriptor<true>(b + q * 32), step | q);
            wgmma_commit();
            wgmma_wait<RUNNING>();
#else
            UNROLLED for (int q = 0; q < N_STEP / 16; q++) {
                u32 fa[AI][4];
                UNROLLED for (int i = 0; i < AI; i++)
                    ldmatrix_x4<false>(fa[i], swizzled(a, wm + i * 16 + lane % 16, q * 2 + lane / 16));
                UNROLLED for (int j = 0; j < AJ; j += 2) {
                    u32 fb[4];
                    ldmatrix_x4<false>(fb, swizzled(b, wk + j * 8 + lane / 16 * 8 + lane % 8, q * 2 + lane / 8 % 2));
                    UNROLLED for (int i = 0; i < AI; i++) {
                        mma(*(float(*)[4]) & acc[i][j * 4], fa[i], fb, T{});
                        mma(*(float(*)[4]) & acc[i][j * 4 + 4], fa[i], fb + 2, T{});
                    }
                }
            }
#endif
        });

    const u8* xs = smem + steps % STAGES * STAGE;
    float* row_sums = (float*)(smem + (steps + 1) % STAGES * STAGE);  // [WAK][AM][2]
    float* column_sums = row_sums + WAK * AM * 2;                     // [WAM][2][AK]
    float mu[AI][2], rs[AI][2], r1[AI][2] = {}, r2[AI][2] = {};
    UNROLLED for (int i = 0; i < AI; i++)
        UNROLLED for (int h = 0; h < 2; h++) {
            int m = m0 + wm + i * 16 + h * 8 + lane / 4;
            mu[i][h] = m < M && mean ? mean[m] : 0.0f;
            rs[i][h] = m < M ? rstd[m] : 0.0f;
        }
    UNROLLED for (int j = 0; j < AJ; j++) {
        int kk = wk + j * 8 + quad * 2, k = k0 + kk;
        float2 ga = k < K ? unpack2<T>(*(const u32*)(gamma + k)) : float2{};
        float2 with_xh = {}, plain = {};
        UNROLLED for (int i = 0; i < AI; i++)
            UNROLLED for (int h = 0; h < 2; h++) {
                int r = wm + i * 16 + h * 8 + lane / 4, m = m0 + r;
                float2 v = {acc[i][j * 4 + h * 2], acc[i][j * 4 + h * 2 + 1]};
                float2 xh = unpack2<T>(*(const u32*)(xs + swizzled(kk / 64 * AM * 128, r, kk % 64 / 8) + quad * 4));
                xh = {(xh.x - mu[i][h]) * rs[i][h], (xh.y - mu[i][h]) * rs[i][h]};
                if (m < M && k < K) *(float2*)(g + ((i64)part * M + m) * K + k) = v;
                plain.x += v.x, plain.y += v.y;
                with_xh.x += v.x * xh.x, with_xh.y += v.y * xh.y;
                v.x *= ga.x, v.y *= ga.y;
                r1[i][h] += v.x + v.y;
                r2[i][h] += v.x * xh.x + v.y * xh.y;
            }
        // over the 8 rows of the lanes: half of what is left changes hands at each step
        bool up = lane & 4, right = lane & 8;
        float a0 = up ? plain.x : with_xh.x, a1 = up ? plain.y : with_xh.y;
        a0 += __shfl_xor_sync(~0u, up ? with_xh.x : plain.x, 4);
        a1 += __shfl_xor_sync(~0u, up ? with_xh.y : plain.y, 4);
        float sum = right ? a1 : a0;
        sum += __shfl_xor_sync(~0u, right ? a0 : a1, 8);
        sum += __shfl_xor_sync(~0u, sum, 16);
        if (lane < 16) column_sums[(warp % WAM * 2 + up) * AK + kk + right] = sum;
    }
    UNROLLED for (int i = 0; i < AI; i++)
        UNROLLED for (int h = 0; h < 2; h++) {
            float a = r1[i][h], b = r2[i][h];
            UNROLLED for (int step = 1; step < 4; step *= 2)
                a += __shfl_xor_sync(~0u, a, step), b += __shfl_xor_sync(~0u, b, step);
            float* to = row_sums + (warp / WAM * AM + wm + i * 16 + h * 8 + lane / 4) * 2;
            if (quad == 0) to[0] = a, to[1] = b;
        }
    __syncthreads();
    for (int r = threadIdx.x; r < AM; r += THREADS) {
        float2 total = {};
        UNROLLED for (int i = 0; i < WAK; i++)
            total.x += row_sums[(i * AM + r) * 2], total.y += row_sums[(i * AM + r) * 2 + 1];
        if (m0 + r < M) rows[(i64)(m0 + r) * splits * k_tiles + part * k_tiles + kt] = total;
    }
    for (int c = threadIdx.x; c < 2 * AK; c += THREADS) {
        float total = 0;
        UNROLLED for (int i = 0; i < WAM; i++) total += column_sums[i * 2 * AK + c];
        int which = c / AK, k = k0 + c % AK;
        if (k < K) columns[((i64)(part * m_tiles + mt) * 2 + which) * K + k] = total;
    }
}

// Mean (or zeros), then rstd of BM rows from m on; zeros past the last. (A copy of less than 16 bytes
// would do, but memory checkers take it for one of 16.)
DEVICE void load_stats(u32 to, const float* mean, const float* rstd, int m, int M) {
    if (threadIdx.x >= BM / 2) return;
    int row = m + threadIdx.x % (BM / 4) * 4;
    if (threadIdx.x < BM / 4 && !mean) row = M;
    const float* from = (threadIdx.x < BM / 4 ? mean : rstd) + row;
    to += threadIdx.x * 16;
    if (row + 4 <= M || row >= M) return cp_async_16(to, from, row < M ? 16 : 0);
    ROLLED for (int i = 0; i < 4; i++) cp_async_4(to + i * 4, from + i, row + i < M ? 4 : 0);
}
typedef u32 Fragment[4];
// gamma, beta of a lane's rows: lane / 4 and + 8 of each 16.
struct Scales {
    float gamma[BI][2], beta[BI][2];
    DEVICE Scales(const T* g, const T* b, int first, int K) {
        UNROLLED for (int i = 0; i < BI; i++)
            UNROLLED for (int h = 0; h < 2; h++) {
                int k = first + i * 16 + h * 8 + threadIdx.x % 32 / 4;
                gamma[i][h] = k < K ? to_float(g[k]) : 0.0f;
                beta[i][h] = k < K && b ? to_float(b[k]) : 0.0f;
            }
    }
};
// hᵀ of 16 rows of x from `q * 16` on.
DEVICE void normalised_fragments(Fragment (&h)[BI], u32 xs, const float* mu, const float* rs, int q,
                                 int wk, const Scales& by) {
    int lane = threadIdx.x % 32, m = q * 16 + lane % 4 * 2;
    float2 mu0 = *(const float2*)(mu + m), mu1 = *(const float2*)(mu + m + 8);
    float2 rs0 = *(const float2*)(rs + m), rs1 = *(const float2*)(rs + m + 8);
    UNROLLED for (int i = 0; i < BI; i++) {
        int k = wk + i * 16;
        ldmatrix_x4<true>(h[i], swizzled(xs + k / 64 * BM * 128, q * 16 + lane / 16 * 8 + lane % 8,
                                         k % 64 / 8 + lane / 8 % 2));
        h[i][0] = normalised(h[i][0], mu0, rs0, by.gamma[i][0], by.beta[i][0]);
        h[i][1] = normalised(h[i][1], mu0, rs0, by.gamma[i][1], by.beta[i][1]);
        h[i][2] = normalised(h[i][2], mu1, rs1, by.gamma[i][0], by.beta[i][0]);
        h[i][3] = normalised(h[i][3], mu1, rs1, by.gamma[i][1], by.beta[i][1]);
    }
}
#if !WG
DEVICE void multiply_dz(float (&acc)[BI][BJ * 4], const Fragment (&h)[BI], u32 dzs, int q, int wn) {
    int lane = threadIdx.x % 32;
    UNROLLED for (int j = 0; j < BJ; j += 2) {
        int n = wn + j * 8;
        u32 fb[4];
        ldmatrix_x4<true>(fb, swizzled(dzs + n / 64 * BM * 128, q * 16 + lane % 16, n % 64 / 8 + lane / 16));
        UNROLLED for (int i = 0; i < BI; i++) {
            mma(*(float(*)[4]) & acc[i][j * 4], h[i], fb, T{});
            mma(*(float(*)[4]) & acc[i][j * 4 + 4], h[i], fb + 2, T{});
        }
    }
}
#endif
// The warp's part of dw's tile, at (k0, n0).
DEVICE void store_dw(const float (&acc)[BI][BJ * 4], T* dw, int k0, int n0, int N, int K) {
    int lane = threadIdx.x % 32;
    UNROLLED for (int i = 0; i < BI; i++)
        UNROLLED for (int j = 0; j < BJ; j += 4)
            UNROLLED for (int h = 0; h < 2; h++) {
                u32 v[4];
                UNROLLED for (int e = 0; e < 4; e++)
                    v[e] = pack2<T>(acc[i][(j + e) * 4 + h * 2], acc[i][(j + e) * 4 + h * 2 + 1]);
                uint4 out = gather_block(v[0], v[1], v[2], v[3]);
                int k = k0 + i * 16 + h * 8 + lane / 4, n = n0 + (j + lane % 4) * 8;
                if (k < K && n < N) *(uint4*)(dw + (i64)k * N + n) = out;
            }
}

#if RUN > 1
// RUN tiles of dw along n, M <= BM: h is made once, tiles of dz pass by.
DEVICE void product_dw(u8* smem, int id, const T* dz, const T* x, const T* gamma, const T* beta,
                       const float* mean, const float* rstd, int M, int N, int K, T* dw, T* dc) {
    int warp = threadIdx.x / 32, n_tiles = (N + BN - 1) / BN, runs = (n_tiles + RUN - 1) / RUN;
    int kt = id / runs, first = id % runs * RUN, tiles = n_tiles - first < RUN ? n_tiles - first : RUN;
    int k0 = kt * BK, wk = warp / WBN * (BK / WBK), wn = warp % WBN * (BN / WBN);
    constexpr int X = (STAGES - 1) * STAGE, STATS = X + BK * BM * 2;  // where the last slot would be
    u32 base = smem_address(smem);
    Scales scales(gamma, beta, k0 + wk, K);
    Fragment h[BM / 16][BI];
    pipeline<STAGES - 1, 0>(
        base, tiles,
        [&](u32 to, int step) {
            if (step == 0) {
                load_block<BM>(base + X, x, 0, M, k0, K);
                load_stats(base + STATS, mean, rstd, 0, M);
            }
            UNROLLED for (int b = 0; b < BN / 64; b++)
                load_block<BM>(to + b * BM * 128, dz, 0, M, (first + step) * BN + b * 64, N);
        },
        [&](u32 slot, int step) {
            if (step == 0)
                UNROLLED for (int q = 0; q < BM / 16; q++)
                    normalised_fragments(h[q], base + X, (const float*)(smem + STATS),
                                         (const float*)(smem + STATS) + BM, q, wk, scales);
            float acc[BI][BJ * 4] = {};
            UNROLLED for (int q = 0; q < BM / 16; q++) multiply_dz(acc, h[q], base + slot, q, wn);
            int n0 = (first + step) * BN;
            store_dw(acc, dw, k0 + wk, n0 + wn, N, K);
            if (kt == 0)
                for (int c = threadIdx.x; c < BN; c += THREADS) {
                    float total = 0;
                    UNROLLED for (int r = 0; r < BM; r++)
                        total += to_float(*(const T*)(smem + slot + c / 64 * BM * 128 + r * 128 +
                                                      ((c % 64 / 8 ^ (r & 7)) << 4) + c % 8 * 2));
                    if (n0 + c < N) dc[n0 + c] = from_float<T>(total);
                }
        });
}
#else
// dw's tile, and dc's in the first row of tiles.
DEVICE void product_dw(u8* smem, int id, const T* dz, const T* x, const T* gamma, const T* beta,
                       const float* mean, const float* rstd, int M, int N, int K, T* dw, T* dc) {
    int warp = threadIdx.x / 32;
    int n_tiles = (N + BN - 1) / BN, kt = id / n_tiles;
    int k0 = kt * BK, n0 = id % n_tiles * BN;
    int wk = warp / WBN * (BK / WBK), wn = warp % WBN * (BN / WBN);
    u32 base = smem_address(smem);
    constexpr int X_BLOCK = BM * 128, STATS = (BK + BN) * BM * 2;
    // dc: a thread adds one 8-column chunk of every GROUPS-th row
    constexpr int GROUPS = THREADS / (BN / 8) < BM ? THREADS / (BN / 8) : BM;
    float column[8] = {};
    int chunk = threadIdx.x % (BN / 8), group = threadIdx.x / (BN / 8);
    Scales scales(gamma, beta, k0 + wk, K);
    float acc[BI][BJ * 4] = {};
    pipeline<STAGES, 0>(
        base, (M + BM - 1) / BM,
        [&](u32 to, int step) {
            int m = step * BM;
            UNROLLED for (int b = 0; b < BK / 64; b++)
                load_block<BM>(to + b * X_BLOCK, x, m, M, k0 + b * 64, K);
            UNROLLED for (int b = 0; b < BN / 64; b++)
                load_block<BM>(to + (BK / 64 + b) * X_BLOCK, dz, m, M, n0 + b * 64, N);
            load_stats(to + STATS, mean, rstd, m, M);
        },
        [&](u32 slot, int step) {
            u32 xs = base + slot, dzs = xs + BK / 64 * X_BLOCK;
            const float* mu = (const float*)(smem + slot + STATS);
            const float* rs = mu + BM;
#if WG
            Fragment h[BM / 16][BI];
            UNROLLED for (int q = 0; q < BM / 16; q++) {  // one is normalised while the ones before multiply
                normalised_fragments(h[q], xs, mu, rs, q, wk, scales);
                wgmma_fence();
                Wgmma<T, BN, 0, 1>::run(acc[0], h[q][0], wgmma_descriptor<false>(dzs + q * 2048), step | q);
            }
            wgmma_commit();
#else
            UNROLLED for (int q = 0; q < BM / 16; q++) {
                Fragment h[BI];
                normalised_fragments(h, xs, mu, rs, q, wk, scales);
                multiply_dz(acc, h, dzs, q, wn);
            }
#endif
            if (kt == 0 && group < GROUPS)
                UNROLLED for (int r = group; r < BM; r += GROUPS) {
                    Vec<T, 8> v = *(const Vec<T, 8>*)(smem + slot + (BK / 64 + chunk / 8) * X_BLOCK +
                                                      r * 128 + ((chunk % 8 ^ (r & 7)) << 4));
                    UNROLLED for (int e = 0; e < 8; e++) column[e] += to_float(v.at[e]);
                }
#if WG
            wgmma_wait<0>();
#endif
        });

    store_dw(acc, dw, k0 + wk, n0 + wn, N, K);
    if (kt == 0) {
        float* sums = (float*)smem;  // [GROUPS][BN]
        if (group < GROUPS)
            UNROLLED for (int e = 0; e < 8; e++) sums[group * BN + chunk * 8 + e] = column[e];
        __syncthreads();
        for (int c = threadIdx.x; c < BN; c += THREADS) {
            float total = 0;
            UNROLLED for (int i = 0; i < GROUPS; i++) total += sums[i * BN + c];
            if (n0 + c < N) dc[n0 + c] = from_float<T>(total);
        }
    }
}
#endif

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void grad_products(
    const T* dz, const T* x, const T* gamma, const T* beta, const T* w, const float* mean, const float* rstd, int M,
    int N, int K, int splits, float* g, float2* rows, float* columns, T* dw, T* dc) {
    extern __shared__ u8 memory[];
    u8* smem = memory + (1024 - smem_address(memory) % 1024) % 1024;
    grid_dependency_wait();
#if __CUDA_ARCH__ >= 900
    // small blocks leave room beside them: the second launch waits there (measured; not with 8 warps)
    if (WARPS <= 4) launch_dependents();
#endif
    int tiles = splits * ((K + AK - 1) / AK) * ((M + AM - 1) / AM), id = blockIdx.x;
    if (id < tiles) product_g(smem, id, dz, x, gamma, w, mean, rstd, M, N, K, splits, g, rows, columns);
    else product_dw(smem, id - tiles, dz, x, gamma, beta, mean, rstd, M, N, K, dw, dc);
}

extern "C" __global__ __launch_bounds__(128) void grad_finish(
    const T* x, const T* gamma, const float* mean, const float* rstd, int M, int K, int splits, int row_parts,
    int column_parts, const float* g, const float2* rows, const float* columns, const T* add, T* dx, T* dgamma,
    T* dbeta) {
    int lane = threadIdx.x % 32, chunks = (K + 255) / 256, row_blocks = (M * chunks + 3) / 4;
    int item = blockIdx.x * 4 + threadIdx.x / 32, m = item / chunks;
    if ((int)blockIdx.x >= row_blocks) {
        int at = (blockIdx.x - row_blocks) * 128 + threadIdx.x;  // dgamma's columns, then dbeta's
        after_previous_launch();
        if (at >= (dbeta ? 2 * K : K)) return;
        float total = 0;
        for (int first = 0; first < column_parts; first += 8)  // 8 loads on their way at a time
            UNROLLED for (int p = first; p < first + 8; p++)
                total += p < column_parts ? columns[(i64)p * 2 * K + at] : 0.0f;
        (at < K ? dgamma[at] : dbeta[at - K]) = from_float<T>(total);
        return;
    }
    if (m >= M) return;
    float mu = mean ? mean[m] : 0.0f, rs = rstd[m];
    Vec<T, 4> xv[2], ga[2], more[2] = {};
    int k[2];
    UNROLLED for (int i = 0; i < 2; i++) {
        k[i] = item % chunks * 256 + i * 128 + lane * 4;
        if (k[i] < K) xv[i] = load<4>(x + (i64)m * K + k[i]), ga[i] = load<4>(gamma + k[i]);
        if (k[i] < K && add) more[i] = load<4>(add + (i64)m * K + k[i]);
    }
    after_previous_launch();
    float4 v[2] = {};
    for (int first = 0; first < splits; first += 4)
        UNROLLED for (int s = first; s < first + 4; s++)
            UNROLLED for (int i = 0; i < 2; i++) {
                if (s >= splits || k[i] >= K) continue;
                float4 p = *(const float4*)(g + ((i64)s * M + m) * K + k[i]);
                v[i].x += p.x, v[i].y += p.y, v[i].z += p.z, v[i].w += p.w;
            }
    float2 sums = {};
    for (int first = lane; first < row_parts; first += 128)
        UNROLLED for (int p = first; p < first + 128; p += 32) {
            float2 add = p < row_parts ? rows[(i64)m * row_parts + p] : float2{};
            sums.x += add.x, sums.y += add.y;
        }
    float c1 = mean ? warp_sum(sums.x) / K : 0.0f, c2 = warp_sum(sums.y) / K;
    UNROLLED for (int i = 0; i < 2; i++) {
        if (k[i] >= K) continue;
        const float* gg = (const float*)&v[i];
        Vec<T, 4> out;
        UNROLLED for (int e = 0; e < 4; e++) {
            float xh = (to_float(xv[i].at[e]) - mu) * rs;
            float d = rs * (to_float(ga[i].at[e]) * gg[e] - c1 - xh * c2);
            out.at[e] = from_float<T>(add ? d + to_float(more[i].at[e]) : d);
        }
        store<4>(dx + (i64)m * K + k[i], out);
    }
}

extern "C" __global__ __launch_bounds__(256) void grad_dz(const T* dy, const T* z, i64 count, float act_alpha, T* dz) {
    i64 at = ((i64)blockIdx.x * 256 + threadIdx.x) * 8;
    after_previous_launch();
    if (at >= count) return;
    Vec<T, 8> g = load<8>(dy + at), v = load<8>(z + at);
    UNROLLED for (int e = 0; e < 8; e++)
        g.at[e] = from_float<T>(times_slope<T>(to_float(g.at[e]), to_float(v.at[e]), act_alpha));
    store<8>(dz + at, g);
}
