// gemm/fma_sm80.cu: y = epilogue(op(a) . op(b)) in IEEE fp32 for matrices too small to fill a GPU by tiles.
// Idea     : k is shared out as well: a BM x BN tile belongs to a cluster of SPLIT blocks, each with a
//            span of k, and in a block to GROUPS teams of BM BN / 64 threads, which take U of every
//            U GROUPS k. A thread multiplies 8 x 8, so that few reads of smem feed many FMAs; those of
//            the k to come, and the copies of tiles to come, stand among them. FMAs issue at their peak
//            where each reads one operand from the register bank that its sum is not in: vectors of
//            four lines at one k, kept over eight products or read in turn. So tiles lie as rows of k
//            (one whose lines lie along k is turned on its way, 4 bytes a copy), but b where its lines
//            do too: it is read by pairs of k. Partial tiles meet in smem; each block finishes BM / SPLIT rows.
//            LEAF: all gradients of a weight W behind a LayerNormalization whose x needs none, at once:
//            of dt (a in 1, b in 2) and xh, G = a b, dc = dt's sums over k, which pass by as tiles:
//            y = gamma G + beta dc and the sums of W G and W dc over dt's axis, in a cluster of the JOIN
//            blocks along it, or by parts.
// Inputs   : a [M,K] (TRANS_A: [K,M]), b [K,N] (TRANS_B: [N,K]), row strides lda, ldb; VEC (4 or 1)
//            elements a copy, so strides and addresses are multiples of VEC. LEAF: W [M,N] as c; gamma, beta.
// Outputs  : y, z [M,N]; LEAF: dc; JOIN: dgamma, dbeta, or part: 1 [ceil(M/BM), 2, N], 2 [ceil(N/BN), 2, M].
// Macros   : TV, TRANS_A, TRANS_B, BM, BN, GROUPS, SPLIT, STAGES, VEC, WIDE (4 divides N), EVEN (VEC
//            divides the size along which vectors lie, of a and of b); LEAF, JOIN (with SPLIT 1); epilogue's.
// Launch   : grid (ceil(M/BM) * ceil(N/BN) * SPLIT, 1, batches), clusters of SPLIT or JOIN, GROUPS * BM * BN / 64 threads.
// Numerics : IEEE products and sums; parts of k are added in the order (block, team).
// Bound    : FMA rate; 4 16-byte smem reads feed 64 FMAs a thread. Small: latency.
#define T float
#define TO float
#include "cluster.cuh"
#include "gemm/portable.cuh"
#include "sm80.cuh"
#ifndef LEAF
#define LEAF 0
#define JOIN 0
#endif
#if LEAF
#define LEAF_PARAMS , const float *gamma, const float *beta_, float *dc, float *dgamma, float *dbeta
#else
#define LEAF_PARAMS
#endif

constexpr int BK = 64, U = TRANS_B ? 2 : 4, STEP = U * GROUPS, STEPS = BK / STEP;  // k at once, a tile's
constexpr int TEAM = BM * BN / 64, THREADS = TEAM * GROUPS, TX = BN / 8;           // threads across
constexpr int A_PITCH = TRANS_A ? BM : BM + 4, B_PITCH = TRANS_B ? BK + 4 : BN;
constexpr int A_SIZE = BK * A_PITCH, STAGE = A_SIZE + (TRANS_B ? BN : BK) * B_PITCH;
constexpr int PART = BM * BN, ROWS = BM / SPLIT;  // a team's partial tile; rows that this block finishes
constexpr int ROOM = STAGES * STAGE > GROUPS * PART ? STAGES * STAGE : GROUPS * PART;

// This thread's share of copying an operand's LINES x BK tiles, one after another along k, by slices;
// TURN: from lines along k to rows of k.
template <int LINES, bool CONTIG_K, bool TURN, int PITCH> struct Copy {
    static constexpr int V = TURN ? 1 : VEC, INNER = (CONTIG_K ? BK : LINES) / V, OUTER = (CONTIG_K ? LINES : BK) / STEPS;
    static constexpr int WIDTH = TURN ? THREADS / OUTER : INNER;  // threads along a line
    static constexpr int TALL = THREADS / WIDTH < OUTER ? THREADS / WIDTH : OUTER;
    static_assert(INNER % WIDTH == 0 && THREADS % WIDTH == 0 && OUTER % TALL == 0, "a slice in whole passes");
    const float *p, *at;
    int k, line, lines, end;
    u32 to;

    DEVICE Copy(const float* tile, const float* p, i64 ld, int line0, int lines, int k0, int end) : p(p), lines(lines), end(end) {
        const int i = threadIdx.x / WIDTH, v = threadIdx.x % WIDTH * V;
        k = k0 + (CONTIG_K ? v : i), line = line0 + (CONTIG_K ? i : v);
        to = smem_address(tile + (TURN ? v * PITCH + i : i * PITCH + v));
        at = CONTIG_K ? p + line * ld + k : p + k * ld + line;
    }
    // Slice s into the stage `offset` bytes on. Unless all of it is INSIDE, what is not is zeros: a
    // vector of VEC may hang over unless EVEN.
    template <bool INSIDE> DEVICE void slice(int s, u32 offset, i64 ld) {
        if (TALL < THREADS / WIDTH && threadIdx.x >= TALL * WIDTH) return;
        UNROLLED for (int i = 0; i < OUTER; i += TALL)
            UNROLLED for (int v = 0; v < INNER * V; v += WIDTH * V) {
                const int row = s * OUTER + i;
                const u32 address = to + offset + 4 * (TURN ? v * PITCH + row : row * PITCH + v);
                const float* from = at + (CONTIG_K ? row : i) * ld + v;
                int n = V;
                if (!INSIDE) {
                    n = CONTIG_K ? (line + row < lines ? end - k - v : 0) : (k + i < end ? lines - line - v : 0);
                    n = n >= V ? V : EVEN || n < 0 ? 0 : n;
                    from = n ? from : p;
                }
                if (V == 4)
                    cp_async_16(address, from, 4 * n);
                else
                    cp_async_4(address, from, 4 * n);
            }
        if (!CONTIG_K) k += OUTER, at += OUTER * ld;
    }
    DEVICE void next() {
        if (CONTIG_K) k += BK, at += BK;
    }
};

// Fragment kk of U, eight lines at a k: four by four, GAP lines apart; PAIRS: one by one, of two k.
template <bool PAIRS, int PITCH, int GAP> DEVICE void read(float (&v)[U][8], const float* tile, int kk) {
    if (!PAIRS)
        UNROLLED for (int g = 0; g < 8; g += 4) {
            auto four = load<4>(tile + kk * PITCH + g * GAP);
            UNROLLED for (int i = 0; i < 4; i++) v[kk][g + i] = four.at[i];
        }
    else if (kk % 2 == 0)
        UNROLLED for (int i = 0; i < 8; i++) {
            auto two = load<2>(tile + i * GAP * PITCH + kk);
            v[kk][i] = two.at[0], v[kk + 1][i] = two.at[1];
        }
}
// In an order in which each reads anew of one operand alone, that of the banks in turn.
DEVICE void multiply(float (&acc)[8][8], const float (&a)[8], const float (&b)[8]) {
    UNROLLED for (int x = 0; x < 8; x++)
        UNROLLED for (int y = 0; y < 8; y++) {
            const int turn = x % 2 ? 7 - y : y, i = TRANS_B ? turn : x, j = TRANS_B ? x : turn;
            acc[i][j] += a[i] * b[j];
        }
}

// Where four columns of a row of a team's partial tile lie: what a warp stores at once is in all banks.
DEVICE int place(int group, int row, int column) {
    const int ty = row / 4 % 4, mask = ty % 2 << 2 | (TX == 4 ? ty / 2 | group % 2 << 1 : ty / 2 << 1);
    return group * PART + row * BN + ((column / 4) ^ mask) * 4;
}
// The sum of COUNT vectors, at(0), at(1), ..., in order.
template <int COUNT, class At> DEVICE Vec<float, 4> sum(At at) {
    Vec<float, 4> part[COUNT], v = {};
    UNROLLED for (int s = 0; s < COUNT; s++) part[s] = load<4>(at(s));
    UNROLLED for (int s = 0; s < COUNT; s++)
        UNROLLED for (int j = 0; j < 4; j++) v.at[j] += part[s].at[j];
    return v;
}
DEVICE Vec<float, 4> sum_teams(const float* smem, int row, int column) {
    return sum<GROUPS>([&](int g) { return smem + place(g, row, column); });
}
// Elements n .. n + 3 of a row of N, zeros past it.
DEVICE Vec<float, 4> load_four(const float* row, int n, int N) {
    if (WIDE) return n < N ? load<4>(row + n) : Vec<float, 4>{};
    Vec<float, 4> v;
    UNROLLED for (int j = 0; j < 4; j++) v.at[j] = n + j < N ? row[n + j] : 0.0f;
    return v;
}
DEVICE void store_four(float* row, int n, int N, const Vec<float, 4>& v) {
    if (WIDE && n < N) store<4>(row + n, v);
    UNROLLED for (int j = 0; j < 4; j++)
        if (!WIDE && n + j < N) row[n + j] = v.at[j];
}

extern "C" __global__ __launch_bounds__(THREADS, (LEAF ? 256 : 384) / THREADS) void gemm_fma(GEMM_PARAMS LEAF_PARAMS) {
    extern __shared__ __align__(16) float smem[];
    grid_dependency_wait();  // and no launch early: its blocks would crowd on the first SMs to have room
    if (SPLIT > 1 || JOIN) cluster_arrive();
    if (gridDim.z > 1) GEMM_BATCH
    int rank = blockIdx.x % SPLIT, tile = blockIdx.x / SPLIT, tiles_n = (N + BN - 1) / BN;
    if (LEAF == 1 && JOIN) tile = tile % JOIN * tiles_n + tile / JOIN;  // a cluster goes along M
    const int m0 = tile / tiles_n * BM, n0 = tile % tiles_n * BN;
    const int group = threadIdx.x / TEAM, lane = threadIdx.x % 32, wm = threadIdx.x % TEAM / 32 * 32;
    // neighbours by bit 0 share rows, by bit 1 columns: one smem read serves both
    const int tx = (lane & 1) | (lane >> 1 & 2) | (TX == 8 ? lane >> 2 & 4 : 0), ty = (lane >> 1 & 1) | (lane >> 2 & 2);
    const int steps = (K + STEP - 1) / STEP, first = steps * rank / SPLIT;  // this block's share of k
    int left = steps * (rank + 1) / SPLIT - first;
    const int end = min(K, (first + left) * STEP), count = (left + STEPS - 1) / STEPS;
    Copy<BM, !TRANS_A, !TRANS_A, A_PITCH> copy_a(smem, a, lda, m0, M, first * STEP, end);
    Copy<BN, TRANS_B, false, B_PITCH> copy_b(smem + A_SIZE, b, ldb, n0, N, first * STEP, end);
    const float* own_a = smem + U * group * A_PITCH + wm + 4 * ty;
    const float* own_b = smem + A_SIZE + U * group * (TRANS_B ? 1 : B_PITCH) + tx * (TRANS_B ? B_PITCH : 4);
    constexpr int APART = 4 * THREADS / BN, EACH = (ROWS + APART - 1) / APART;  // rows that this thread finishes
    const int r0 = threadIdx.x / (BN / 4), c4 = threadIdx.x % (BN / 4) * 4, n = n0 + c4;
#if LEAF  // what the end needs from memory comes beside the products
    const Vec<float, 4> gain = LEAF == 1 ? load_four(gamma, n, N) : Vec<float, 4>{};
    const Vec<float, 4> shift = LEAF == 1 ? load_four(beta_, n, N) : Vec<float, 4>{};
    Vec<float, 4> w[EACH];
    float row_gain[EACH], row_shift[EACH];
    UNROLLED for (int u = 0; u < EACH; u++) {
        const int m = m0 + r0 + u * APART;
        w[u] = m < M ? load_four(c + (i64)m * N, n, N) : Vec<float, 4>{};
        row_gain[u] = LEAF == 2 && m < M ? gamma[m] : 0.0f;
        row_shift[u] = LEAF == 2 && m < M ? beta_[m] : 0.0f;
    }
#endif
    constexpr int LINES = LEAF == 1 ? BM : BN, FOURS = LINES / 4;  // dt's in a tile
    Vec<float, 4> along_k = {};                                    // this thread's share of four of their sums
    u32 into = 0;                                                  // the stage copied to, in bytes
    auto inside = [&](int c) { return m0 + BM <= M && n0 + BN <= N && (first + (c + 1) * STEPS) * STEP <= end; };
    auto whole_slice = [&](int s) { copy_a.template slice<true>(s, into, lda), copy_b.template slice<true>(s, into, ldb); };
    auto slices = [&] {
        ROLLED for (int s = 0; s < STEPS; s++)
            copy_a.template slice<false>(s, into, lda), copy_b.template slice<false>(s, into, ldb);
    };
    auto commit = [&] {
        copy_a.next(), copy_b.next();
        cp_async_commit();
        into = into == 4 * (STAGES - 1) * STAGE ? 0 : into + 4 * STAGE;
    };
    ROLLED for (int c = 0; c < STAGES - 1; c++) {
        if (c < count && inside(c))
            UNROLLED for (int s = 0; s < STEPS; s++) whole_slice(s);
        else if (c < count)
            slices();
        commit();
    }
    float acc[8][8] = {}, av[U][8] = {}, bv[U][8] = {};
    const float *as, *bs;
    auto step = [&] {  // reads U k, multiplies those read U / 2 before
        UNROLLED for (int kk = 0; kk < U; kk++) {
            float a1[8], b1[8];
            UNROLLED for (int i = 0; i < 8; i++) a1[i] = av[(kk + U / 2) % U][i], b1[i] = bv[(kk + U / 2) % U][i];
            read<false, A_PITCH, 4>(av, as, kk);
            read<TRANS_B, B_PITCH, TX>(bv, bs, kk);
            multiply(acc, a1, b1);
        }
        as += STEP * A_PITCH, bs += STEP * (TRANS_B ? 1 : B_PITCH);
    };
    ROLLED for (int c = 0, now = 0; c < count; c++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (LEAF)
            UNROLLED for (int k = 0; k < BK; k += THREADS / FOURS) {
                auto v = load<4>(smem + now + (LEAF == 2) * A_SIZE + (k + threadIdx.x / FOURS) * LINES + threadIdx.x % FOURS * 4);
                UNROLLED for (int j = 0; j < 4; j++) along_k.at[j] += v.at[j];
            }
        as = own_a + now, bs = own_b + now;
        now = now == (STAGES - 1) * STAGE ? 0 : now + STAGE;
        const int coming = c + STAGES - 1;  // in whose stage all have read
        if (coming < count && inside(coming)) {
            ROLLED for (int s = 0; s < STEPS; s++) whole_slice(s), step();
        } else {
            if (coming < count) slices();
            ROLLED for (int s = min(left, STEPS); s > 0; s--) step();
        }
        commit();
        left -= STEPS;
    }
    UNROLLED for (int kk = U / 2; kk < U; kk++) multiply(acc, av[kk], bv[kk]);
    float cols0[4] = {}, cols1[4] = {};
    UNROLLED for (int j = 0; j < 4; j++) {
        if (EPI_COLS > 1 && n + j < N) cols0[j] = widen(col0[n + j]);
        if (EPI_COLS > 0 && n + j < N) cols1[j] = widen(col1[n + j]);
    }
    __syncthreads();
    UNROLLED for (int i = 0; i < 8; i++) {
        const int row = wm + i / 4 * 16 + ty * 4 + i % 4;
        if (TRANS_B) {
            UNROLLED for (int j = 0; j < 8; j++) smem[place(group, row, j * TX + tx) + tx % 4] = acc[i][j];
        } else {
            UNROLLED for (int j = 0; j < 8; j += 4)
                store<4>(smem + place(group, row, j * TX + tx * 4), Vec<float, 4>{acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]});
        }
    }
    if (LEAF) store<4>(smem + ROOM + threadIdx.x * 4, along_k);
    __syncthreads();
#if LEAF
    float* sums = smem + ROOM;  // dc's of this tile
    if (threadIdx.x < FOURS) {
        auto v = sum<THREADS / FOURS>([&](int s) { return sums + s * LINES + threadIdx.x * 4; });
        store<4>(sums + threadIdx.x * 4, v);
        const int l = (LEAF == 1 ? m0 : n0) + threadIdx.x * 4;
        UNROLLED for (int j = 0; j < 4; j++)
            if ((LEAF == 1 ? n0 : m0) == 0 && l + j < (LEAF == 1 ? M : N)) dc[l + j] = v.at[j];
    }
    __syncthreads();
    Vec<float, 4> of_g = {}, of_dc = {};  // 1: of this thread's columns
    float row_g[EACH] = {}, row_dc[EACH] = {};
    UNROLLED for (int u = 0; u < EACH; u++) {
        const int r = r0 + u * APART, m = m0 + r;
        auto v = sum_teams(smem, r, c4);
        UNROLLED for (int j = 0; j < 4; j++) {
            const float at = sums[LEAF == 1 ? r : c4 + j], g = v.at[j];
            of_g.at[j] += w[u].at[j] * g, of_dc.at[j] += w[u].at[j] * at;
            row_g[u] += w[u].at[j] * g, row_dc[u] += w[u].at[j] * at;
            v.at[j] = (LEAF == 1 ? gain.at[j] : row_gain[u]) * g + (LEAF == 1 ? shift.at[j] : row_shift[u]) * at;
        }
        if (m < M) store_four(y + (i64)m * N, n, N, v);
    }
    __syncthreads();  // all have read what is in smem
    if (LEAF == 1) {
        store<4>(smem + threadIdx.x * 4, of_g);
        store<4>(smem + (THREADS + threadIdx.x) * 4, of_dc);
    } else
        UNROLLED for (int u = 0; u < EACH; u++) {
            UNROLLED for (int step = BN / 8; step; step >>= 1) {  // neighbours hold a row
                row_g[u] += __shfl_xor_sync(~0u, row_g[u], step);
                row_dc[u] += __shfl_xor_sync(~0u, row_dc[u], step);
            }
            if (c4 == 0) smem[r0 + u * APART] = row_g[u], smem[BM + r0 + u * APART] = row_dc[u];
        }
    __syncthreads();
    // four features' sums of W G or of W dc a thread
    constexpr int FEATURES = LEAF == 1 ? BN : BM;
    const int which = threadIdx.x / (FEATURES / 4), f4 = threadIdx.x % (FEATURES / 4) * 4;
    const int index = LEAF == 1 ? m0 / BM : n0 / BN, feature = (LEAF == 1 ? n0 : m0) + f4, features = LEAF == 1 ? N : M;
    Vec<float, 4> v = {};
    if (which < 2)
        v = sum<LEAF == 1 ? APART : 1>([&](int s) { return smem + which * (LEAF == 1 ? THREADS * 4 : BM) + s * BN + f4; });
    float* to = part + (index * 2 + which) * features;
#if JOIN
    float* met = sums + THREADS * 4;  // [JOIN][2][FEATURES]
    cluster_wait();
    if (which < 2) store_peer(met + (index * 2 + which) * FEATURES + f4, v, 0);
    cluster_sync();
    if (index || which > 1) return;
    v = sum<JOIN>([&](int s) { return met + (s * 2 + which) * FEATURES + f4; });
    to = which ? dbeta : dgamma;
#endif
    UNROLLED for (int j = 0; j < 4; j++)
        if (which < 2 && feature + j < features) to[feature + j] = v.at[j];
    return;
#endif
    // parts of the tile by block: [SPLIT][ROWS][BN] behind what may still be in use
    if (SPLIT > 1) {
        cluster_wait();
        UNROLLED for (int p = threadIdx.x; p < BM * BN / 4; p += THREADS) {
            const int r = p / (BN / 4);
            store_peer(smem + ROOM + (rank * ROWS + r % ROWS) * BN + c4, sum_teams(smem, r, c4), r / ROWS);
        }
        cluster_sync();
    }
    UNROLLED for (int u = 0; u < EACH; u++) {
        const int r = r0 + u * APART, m = m0 + rank * ROWS + r;
#if EPI_DW
        if (r >= ROWS || m >= M) continue;  // what lies beyond the columns adds nothing to a row's sums
#else
        if (r >= ROWS || m >= M || n >= N) continue;
#endif
        auto v = SPLIT > 1 ? sum<SPLIT>([&](int s) { return smem + ROOM + (s * ROWS + r) * BN + c4; }) : sum_teams(smem, r, c4);
        const Row row = GEMM_ROW(m);
        const i64 at = (i64)m * N + n;
        Dots dots = {};
        Vec<float, 4> pre = {};
        float operand[4] = {};
        UNROLLED for (int j = 0; j < 4; j++) {
            if (EPI_OPERAND && n + j < N) operand[j] = c[m * crow + (n + j) * ccol];
            v.at[j] = before_act(v.at[j], row, cols0[j], cols1[j], operand[j], alpha, beta, pre.at[j]);
        }
#if GATE
        UNROLLED for (int j = 0; j < 4; j += 2)  // N is a multiple of 16
            y[(i64)m * (N / 2) + gate_column(n + j)] = gated<float>(v.at[j], v.at[j + 1], act_alpha);
        continue;
#endif
        activate_all(v.at, operand, act_alpha);
        UNROLLED for (int j = 0; j < 4; j++) {
#if EPI_DW
            if (n + j >= N) v.at[j] = 0.0f;  // an infinity in a row of a, times the zeros there
#endif
            v.at[j] = after_act(v.at[j], row, cols0[j], cols1[j], operand[j], pre.at[j], dots);
            if (!ACCUMULATE || n + j < N) v.at[j] = stored<float>(v.at[j], y + at + j);
        }
        store_four(y + at - n, n, N, v);
        if (SAVE_Z) store_four(z + at - n, n, N, pre);
#if EPI_DW
        store_dots<BN / 4>(dots, part, n0 / BN, m, M);
#endif
    }
}
