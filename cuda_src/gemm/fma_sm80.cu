// gemm/fma_sm80.cu: y = epilogue(op(a) . op(b)) in IEEE fp32 for matrices too small to fill a GPU by tiles.
// Idea     : k is shared out as well: a BM x BN tile belongs to a cluster of SPLIT blocks, each with a
//            span of k, and in a block GROUPS teams of warps take 16 of every 16 GROUPS k. A warp
//            owns 32 x 32, a thread 8 x 4. Both operands come by cp.async as they stand in memory: the
//            one whose k is contiguous is read 4 k at a time, the other 4 neighbours at a time.
//            Partial tiles meet in shared memory; each block finishes BM / SPLIT rows of them.
//            LEAF: all gradients of a weight W behind a LayerNormalization whose x needs none, at once:
//            of dt (a in 1, b in 2) and xh, G = a b, dc = dt's sums over k, which pass by as tiles:
//            y = gamma G + beta dc and the sums of W G and W dc over dt's axis, by parts.
// Inputs   : a [M,K] (TRANS_A: [K,M]), b [K,N] (TRANS_B: [N,K]), row strides lda, ldb; VEC (4 or 1)
//            elements a copy, so strides and addresses are multiples of VEC. LEAF: W as c; gamma, beta.
// Outputs  : y, z [M,N]; LEAF: dc, and part: 1 [ceil(M/BM), 2, N], 2 [ceil(N/BN), 2, M].
// Macros   : TV, TRANS_A, TRANS_B, BM, BN, GROUPS, SPLIT, VEC, WIDE (4 divides N), EVEN (VEC
//            divides the size along which vectors lie, of a and of b); LEAF (with SPLIT 1); epilogue's.
// Launch   : grid (ceil(M/BM) * ceil(N/BN) * SPLIT, 1, batches), clusters of SPLIT, GROUPS * BM * BN / 32 threads.
// Numerics : IEEE products and sums; parts of k are added in the order (block, team).
// Bound    : FMA rate; 12 16-byte smem reads feed 128 FMAs a thread. Small: latency.
#define T float
#define TO float
#include "cluster.cuh"
#include "gemm/portable.cuh"
#include "sm80.cuh"
#ifndef LEAF
#define LEAF 0
#endif
#if LEAF
#define LEAF_PARAMS , const float *gamma, const float *beta_, float *dc
#else
#define LEAF_PARAMS
#endif

constexpr int BK = 16 * GROUPS, STAGES = 192 / BK, PITCH = BK + 4;  // 192 k on their way
constexpr int WARPS = BM / 32 * (BN / 32), THREADS = 32 * WARPS * GROUPS;
constexpr int A_SIZE = TRANS_A ? BK * BM : BM * PITCH, B_SIZE = TRANS_B ? BN * PITCH : BK * BN;
constexpr int PART = BM * (BN + 8);  // a team's partial tile
constexpr int ROWS = BM / SPLIT;     // that this block finishes
constexpr int ROOM = STAGES * (A_SIZE + B_SIZE) > GROUPS * PART ? STAGES * (A_SIZE + B_SIZE) : GROUPS * PART;

// This thread's share of copying an operand's LINES x BK tiles, one after another along k.
template <int LINES, bool CONTIG_K> struct Copy {
    static constexpr int PER = (CONTIG_K ? BK : LINES) / VEC, STEP = THREADS / PER;
    static constexpr int LOADS = LINES * BK / VEC / THREADS;
    static_assert(THREADS % PER == 0 && LOADS >= 1, "tile too small for its threads");
    const float *p, *at;
    i64 step;
    int k, left, to;

    DEVICE Copy(const float* p, i64 ld, int line0, int lines, int k0) : p(p) {
        int i = threadIdx.x / PER, v = threadIdx.x % PER * VEC;
        k = k0 + (CONTIG_K ? v : i);
        left = lines - line0 - (CONTIG_K ? i : v);
        to = CONTIG_K ? i * PITCH + v : i * LINES + v;
        at = CONTIG_K ? p + (i64)(line0 + i) * ld + k : p + (i64)k * ld + line0 + v;
        step = STEP * ld;
    }
    // What lies outside is zeros: a vector of VEC may hang over unless EVEN.
    DEVICE void next(u32 tile, i64 ld, int K) {
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int n = CONTIG_K ? (i * STEP < left ? K - k : 0) : (k + i * STEP < K ? left : 0);
            n = n >= VEC ? VEC : EVEN || n < 0 ? 0 : n;
            u32 address = tile + 4 * (to + i * STEP * (CONTIG_K ? PITCH : LINES));
            const float* from = n ? at + i * step : p;
            if (VEC == 4)
                cp_async_16(address, from, 4 * n);
            else
                cp_async_4(address, from, 4 * n);
        }
        k += BK;
        at += CONTIG_K ? BK : BK * ld;
    }
};

// frag[i][kk] = element (row i of this thread, k + kk): N rows, W threads of a warp apart.
template <int N, int W, int LINES, bool CONTIG_K>
DEVICE void read(float (&frag)[N][4], const float* tile, int base, int lane, int k) {
    if (CONTIG_K) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            auto v = load<4>(tile + (base + i * W + lane) * PITCH + k);
#pragma unroll
            for (int kk = 0; kk < 4; kk++) frag[i][kk] = v.at[kk];
        }
    } else {
#pragma unroll
        for (int kk = 0; kk < 4; kk++)
#pragma unroll
            for (int g = 0; g < N / 4; g++) {
                auto v = load<4>(tile + (k + kk) * LINES + base + g * 4 * W + lane * 4);
#pragma unroll
                for (int i = 0; i < 4; i++) frag[g * 4 + i][kk] = v.at[i];
            }
    }
}

// The sum of COUNT vectors, STRIDE elements apart, in order.
template <int COUNT, int STRIDE> DEVICE Vec<float, 4> sum(const float* at) {
    Vec<float, 4> part[COUNT], v = {};
#pragma unroll
    for (int s = 0; s < COUNT; s++) part[s] = load<4>(at + s * STRIDE);
#pragma unroll
    for (int s = 0; s < COUNT; s++)
#pragma unroll
        for (int j = 0; j < 4; j++) v.at[j] += part[s].at[j];
    return v;
}

extern "C" __global__ __launch_bounds__(THREADS, 512 / THREADS) void gemm_fma(GEMM_PARAMS LEAF_PARAMS) {
    extern __shared__ __align__(16) float smem[];
    grid_dependency_wait();  // and no launch early: its blocks would crowd on the first SMs to have room
    if (SPLIT > 1) cluster_arrive();
    if (gridDim.z > 1) GEMM_BATCH
    int rank = blockIdx.x % SPLIT, tile = blockIdx.x / SPLIT, tiles_n = (N + BN - 1) / BN;
    int m0 = tile / tiles_n * BM, n0 = tile % tiles_n * BN;
    int group = threadIdx.x / (32 * WARPS), warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x % 32;
    // neighbours by bit 0 share rows, by bit 1 columns: one smem read serves both
    int tx = (lane & 1) | (lane >> 1 & 2) | (lane >> 2 & 4), ty = (lane >> 1 & 1) | (lane >> 2 & 2);
    int wm = warp / (BN / 32) * 32, wn = warp % (BN / 32) * 32;
    int chunks = (K + BK - 1) / BK;
    int first = chunks * rank / SPLIT, count = chunks * (rank + 1) / SPLIT - first;
    Copy<BM, !TRANS_A> copy_a(a, lda, m0, M, first * BK);
    Copy<BN, TRANS_B> copy_b(b, ldb, n0, N, first * BK);
    u32 base = smem_address(smem);
    constexpr int LINES = LEAF == 1 ? BM : BN, FOURS = LINES / 4;  // dt's in a tile
    Vec<float, 4> along_k = {};  // this thread's share of four of their sums
    float acc[8][4] = {};
    for (int c = 1 - STAGES, now = 0, into = 0; c < count; c++) {
        if (c >= 0) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
        }
        if (c + STAGES - 1 < count) {
            copy_a.next(base + 4 * into, lda, K);
            copy_b.next(base + 4 * (into + A_SIZE), ldb, K);
            into = into == (STAGES - 1) * (A_SIZE + B_SIZE) ? 0 : into + A_SIZE + B_SIZE;
        }
        cp_async_commit();
        if (c < 0) continue;
        const float* as = smem + now;
        now = now == (STAGES - 1) * (A_SIZE + B_SIZE) ? 0 : now + A_SIZE + B_SIZE;
        if (LEAF)
#pragma unroll
            for (int k = 0; k < BK; k += THREADS / FOURS) {
                auto v = load<4>(as + (LEAF == 2) * A_SIZE + (k + threadIdx.x / FOURS) * LINES + threadIdx.x % FOURS * 4);
#pragma unroll
                for (int j = 0; j < 4; j++) along_k.at[j] += v.at[j];
            }
#pragma unroll
        for (int k = 0; k < BK / GROUPS; k += 4) {
            float av[8][4], bv[4][4];
            read<8, 4, BM, !TRANS_A>(av, as, wm, ty, group * (BK / GROUPS) + k);
            read<4, 8, BN, TRANS_B>(bv, as + A_SIZE, wn, tx, group * (BK / GROUPS) + k);
#pragma unroll
            for (int kk = 0; kk < 4; kk++)
#pragma unroll
                for (int i = 0; i < 8; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) acc[i][j] += av[i][kk] * bv[j][kk];
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 8; i++) {
        int row = wm + (TRANS_A ? i / 4 * 16 + ty * 4 + i % 4 : i * 4 + ty);
        float* to = smem + group * PART + row * (BN + 8) + wn;
        if (TRANS_B)
#pragma unroll
            for (int j = 0; j < 4; j++) to[j * 8 + tx] = acc[i][j];
        else
            store<4>(to + tx * 4, Vec<float, 4>{acc[i][0], acc[i][1], acc[i][2], acc[i][3]});
    }
    if (LEAF) store<4>(smem + ROOM + threadIdx.x * 4, along_k);
    __syncthreads();
#if LEAF
    if (threadIdx.x < FOURS) {
        auto v = sum<THREADS / FOURS, LINES>(smem + ROOM + threadIdx.x * 4);
        store<4>(smem + ROOM + threadIdx.x * 4, v);
        int l = (LEAF == 1 ? m0 : n0) + threadIdx.x * 4;
#pragma unroll
        for (int j = 0; j < 4; j++)
            if ((LEAF == 1 ? n0 : m0) == 0 && l + j < (LEAF == 1 ? M : N)) dc[l + j] = v.at[j];
    }
    __syncthreads();
    const float* sums = smem + ROOM;
    Vec<float, 4> of_g = {}, of_dc = {};  // 1: of this thread's columns
    for (int p = threadIdx.x; p < BM * BN / 4; p += THREADS) {
        int r = p / (BN / 4), c4 = p % (BN / 4) * 4, m = m0 + r, n = n0 + c4;
        auto v = sum<GROUPS, PART>(smem + r * (BN + 8) + c4);
        float row_g = 0, row_dc = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const bool inside = m < M && n + j < N;
            const float w = inside ? c[m * crow + (n + j) * ccol] : 0.0f, at = sums[LEAF == 1 ? r : c4 + j];
            const int feature = LEAF == 1 ? n + j : m;
            if (LEAF == 1) of_g.at[j] += w * v.at[j], of_dc.at[j] += w * at;
            row_g += w * v.at[j], row_dc += w * at;
            if (inside) y[(i64)m * N + n + j] = gamma[feature] * v.at[j] + beta_[feature] * at;
        }
        if (LEAF == 2) {  // neighbours hold a row
#pragma unroll
            for (int step = BN / 8; step; step >>= 1) {
                row_g += __shfl_xor_sync(~0u, row_g, step);
                row_dc += __shfl_xor_sync(~0u, row_dc, step);
            }
            float* to = part + (i64)(n0 / BN) * 2 * M + m;
            if (c4 == 0 && m < M) to[0] = row_g, to[M] = row_dc;
        }
    }
    if (LEAF == 1) {
        __syncthreads();  // all have read their sums
        store<4>(smem + threadIdx.x * 4, of_g);
        store<4>(smem + (THREADS + threadIdx.x) * 4, of_dc);
        __syncthreads();
        if (threadIdx.x < BN / 2) {
            const int which = threadIdx.x / (BN / 4), n = n0 + threadIdx.x % (BN / 4) * 4;
            auto v = sum<4 * THREADS / BN, BN>(smem + which * THREADS * 4 + threadIdx.x % (BN / 4) * 4);
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (n + j < N) part[((i64)(m0 / BM) * 2 + which) * N + n + j] = v.at[j];
        }
    }
    return;
#endif
    // parts of the tile by (block, team): [SPLIT][ROWS][BN] behind what may still be in use
    if (SPLIT > 1) {
        cluster_wait();
#pragma unroll
        for (int p = threadIdx.x; p < BM * BN / 4; p += THREADS) {
            int r = p / (BN / 4), n = p % (BN / 4) * 4;
            auto v = sum<GROUPS, PART>(smem + r * (BN + 8) + n);
            store_peer(smem + ROOM + (rank * ROWS + r % ROWS) * BN + n, v, r / ROWS);
        }
        cluster_sync();
    }
    for (int p = threadIdx.x; p < ROWS * BN / 4; p += THREADS) {
        int r = p / (BN / 4), c4 = p % (BN / 4) * 4, m = m0 + rank * ROWS + r, n = n0 + c4;
        auto v = SPLIT > 1 ? sum<SPLIT, ROWS * BN>(smem + ROOM + r * BN + c4)
                           : sum<GROUPS, PART>(smem + r * (BN + 8) + c4);
        if (m >= M || n >= N) continue;
        Row row = GEMM_ROW(m);
        Dots dots = {};
        Vec<float, 4> pre = {};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (!WIDE && n + j >= N) break;
            float c_ = EPI_OPERAND ? c[m * crow + (n + j) * ccol] : 0.0f;
            v.at[j] = epilogue<float>(v.at[j], row, EPI_COLS > 1 ? widen(col0[n + j]) : 0.0f,
                                      EPI_COLS > 0 ? widen(col1[n + j]) : 0.0f, c_, alpha, beta,
                                      act_alpha, pre.at[j], dots);
            v.at[j] = stored<float>(v.at[j], y + (i64)m * N + n + j);
            if (!WIDE) y[(i64)m * N + n + j] = v.at[j];
            if (!WIDE && SAVE_Z) z[(i64)m * N + n + j] = pre.at[j];
        }
        if (WIDE) store<4>(y + (i64)m * N + n, v);
        if (WIDE && SAVE_Z) store<4>(z + (i64)m * N + n, pre);
    }
}
