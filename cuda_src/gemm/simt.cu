// gemm/simt.cu: y = epilogue(op(a) . op(b)) on the ordinary cores: any M, N, K, type and transpose.
// Idea     : BM x BN tile a block, TM x TN a thread in registers, k in steps of BK through two smem
//            buffers; the next step's global loads fly while this one multiplies.
// Inputs   : a [M,K] (TRANS_A: [K,M]), b [K,N] (TRANS_B: [N,K]), row strides lda, ldb; VEC elements a
//            load, so strides and addresses are multiples of VEC.
// EPI_DW   : part [ceil(N/BN), 2, M] f32, the sums of each row of a tile.
// Macros   : T, TO, TV, TRANS_A, TRANS_B, BM, BN, BK, TM, TN, VEC; epilogue's (gemm/epilogue.cuh).
// Launch   : grid (ceil(M/BM) * ceil(N/BN), 1, batches), (BM/TM) * (BN/TN) threads.
// Numerics : IEEE products and sums in T's accumulator, k in order: bits depend on nothing else.
// Bound    : FMA rate, else bytes; every smem read of TM + TN values feeds TM * TN FMAs.
#include "gemm/portable.cuh"
typedef Accumulator<T>::type S;

constexpr int THREADS = (BM / TM) * (BN / TN);
constexpr int GM = TM < 4 ? TM : 4, GN = TN < 4 ? TN : 4;  // neighbours a thread owns at a time
constexpr int A_LOADS = BM * BK / VEC / THREADS, B_LOADS = BN * BK / VEC / THREADS;
static_assert(A_LOADS >= 1 && B_LOADS >= 1, "tile too small for its threads");

// Load number i of this thread: VEC elements of a ROWS x BK tile, CONTIG_K: along k, else along rows.
template <int ROWS, bool CONTIG_K>
DEVICE Vec<T, VEC> fetch(const T* p, i64 ld, int row0, int rows, int k0, int K, int i) {
    int id = (threadIdx.x + i * THREADS) * VEC;
    int r = row0 + (CONTIG_K ? id / BK : id % ROWS), k = k0 + (CONTIG_K ? id % BK : id / ROWS);
    const T* at = CONTIG_K ? p + (i64)r * ld + k : p + (i64)k * ld + r;
    // VEC divides the strides, not the sizes: the last vector of a line may hang over
    if (VEC == 1 || (CONTIG_K ? k + VEC <= K : r + VEC <= rows))
        if (r < rows && k < K) return load<VEC>(at);
    Vec<T, VEC> v;
    UNROLLED for (int j = 0; j < VEC; j++) {
        bool inside = CONTIG_K ? r < rows && k + j < K : r + j < rows && k < K;
        v.at[j] = inside ? at[j] : T{};
    }
    return v;
}
template <int ROWS, bool CONTIG_K> DEVICE void stash(S (*tile)[ROWS + 4], const Vec<T, VEC>& v, int i) {
    int id = (threadIdx.x + i * THREADS) * VEC;
    int r = CONTIG_K ? id / BK : id % ROWS, k = CONTIG_K ? id % BK : id / ROWS;
    UNROLLED for (int j = 0; j < VEC; j++)
        (CONTIG_K ? tile[k + j][r] : tile[k][r + j]) = widen(v.at[j]);
}

constexpr bool WIDE = sizeof(S) == 8 || EPI_DACT || EPI_DW || (SAVE_Z && EPI_OPERAND);
extern "C" __global__ __launch_bounds__(THREADS, TM < 8 ? (WIDE ? 2 : 3) : VEC > 1 ? 2 : 1) void gemm_simt(GEMM_PARAMS) {
    after_previous_launch();
    __shared__ __align__(16) S as[2][BK][BM + 4], bs[2][BK][BN + 4];
    GEMM_BATCH
    int tiles_n = (N + BN - 1) / BN;
    int m0 = blockIdx.x / tiles_n * BM, n0 = blockIdx.x % tiles_n * BN;
    int tx = threadIdx.x % (BN / TN), ty = threadIdx.x / (BN / TN);
    Vec<T, VEC> ra[A_LOADS], rb[B_LOADS];
    S acc[TM][TN] = {};

#define FETCH(k0)                                                                                  \
    UNROLLED for (int i = 0; i < A_LOADS; i++) ra[i] =                                    \
        fetch<BM, !TRANS_A>(a, lda, m0, M, k0, K, i);                                              \
    UNROLLED for (int i = 0; i < B_LOADS; i++) rb[i] =                                    \
        fetch<BN, TRANS_B>(b, ldb, n0, N, k0, K, i);
#define STASH(to)                                                                                  \
    UNROLLED for (int i = 0; i < A_LOADS; i++) stash<BM, !TRANS_A>(as[to], ra[i], i);     \
    UNROLLED for (int i = 0; i < B_LOADS; i++) stash<BN, TRANS_B>(bs[to], rb[i], i);

    FETCH(0)
    STASH(0)
    __syncthreads();
    for (int k0 = 0, now = 0; k0 < K; k0 += BK, now ^= 1) {
        bool more = k0 + BK < K;
        if (more) { FETCH(k0 + BK) }
        UNROLLED for (int k = 0; k < BK; k++) {
            S av[TM], bv[TN];
            UNROLLED for (int g = 0; g < TM / GM; g++) {
                auto v = load<GM>(&as[now][k][g * (BM * GM / TM) + ty * GM]);
                UNROLLED for (int i = 0; i < GM; i++) av[g * GM + i] = v.at[i];
            }
            UNROLLED for (int g = 0; g < TN / GN; g++) {
                auto v = load<GN>(&bs[now][k][g * (BN * GN / TN) + tx * GN]);
                UNROLLED for (int i = 0; i < GN; i++) bv[g * GN + i] = v.at[i];
            }
            UNROLLED for (int i = 0; i < TM; i++)
                UNROLLED for (int j = 0; j < TN; j++) acc[i][j] += av[i] * bv[j];
        }
        if (more) { STASH(now ^ 1) }
        __syncthreads();
    }
    UNROLLED for (int i = 0; i < TM; i++) {
        int m = m0 + i / GM * (BM * GM / TM) + ty * GM + i % GM;
        if (m >= M) continue;
        Row row = GEMM_ROW(m);
        Dots dots = {};
        UNROLLED for (int j = 0; j < TN; j++) {
            int n = n0 + j / GN * (BN * GN / TN) + tx * GN + j % GN;
            if (GATE) {
                if (j % 2 == 0 && n < N) GEMM_STORE_GATED(S, acc[i][j], acc[i][j | 1], m, n, row)
            } else if (n < N) GEMM_STORE(S, acc[i][j], m, n, row, dots)
        }
#if EPI_DW
        store_dots<BN / TN>(dots, part, blockIdx.x % tiles_n, m, M);
#endif
    }
}
