// gemm/mma_sm80.cu: y = epilogue(op(a) . op(b)) on mma.sync, sm_80 and up: any M, N, K, transpose.
// Idea     : BM x BN tile a block, WM x WN a warp; cp.async keeps STAGES - 1 k-steps in flight; padded
//            smem rows make ldmatrix (16-bit) and plain reads (fp32) free of bank conflicts.
//            fp32 operands: tf32 products (SPLIT 1), or each operand split into bf16 hi + lo and
//            hi.hi + hi.lo + lo.hi summed (SPLIT 3): 4e-6 relative error at a third of bf16's rate.
// Inputs   : as gemm/simt.cu; VEC > 1: strides and addresses are multiples of 16 bytes (cp.async),
//            VEC 1: any (plain loads).
// EPI_DW   : part [ceil(N/BN) BN/WN, 2, M] f32, the sums of each row of a warp's tile.
// Macros   : T in {bf16, f16, float}, TO, TV, TRANS_A, TRANS_B, BM, BN, BK, WM, WN, STAGES, VEC, SPLIT.
// Launch   : grid (ceil(M/BM) * ceil(N/BN), 1, batches), 32 * (BM/WM) * (BN/WN) threads.
// Numerics : f32 accumulation, k in order: bits depend on the tile's k-step alone.
// Bound    : tensor cores for large M, N, K (about half of wgmma's rate on Hopper).
#include "gemm/portable.cuh"
#include "sm80.cuh"
#ifndef SPLIT
#define SPLIT 1
#endif
constexpr int WARPS_N = BN / WN, THREADS = 32 * (BM / WM) * WARPS_N;
constexpr int CHUNK = 16 / sizeof(T);  // elements of one 16-byte access
constexpr bool WIDE = sizeof(T) == 2;  // 16-bit operands: ldmatrix
constexpr int KSTEP = WIDE || SPLIT == 3 ? 16 : 8;
constexpr int MI = WM / 16, NI = WN / 8;

// Smem tile of ROWS (m or n) x BK: CONTIG_K [ROWS][BK + pad], else [BK][ROWS + pad].
template <int ROWS, bool CONTIG_K> struct Tile {
    static constexpr int PAD = WIDE ? 8 : CONTIG_K ? 4 : 8;
    static constexpr int LD = (CONTIG_K ? BK : ROWS) + PAD;
    static constexpr int BYTES = (CONTIG_K ? ROWS : BK) * LD * sizeof(T);

    DEVICE static void fill(T* tile, const T* p, i64 ld, int row0, int rows, int k0, int K) {
        constexpr int LINE = (CONTIG_K ? BK : ROWS) / CHUNK, ALL = ROWS * BK / CHUNK;
        static_assert(ALL % THREADS == 0 || ALL < THREADS, "tile and threads");
        UNROLLED for (int i = 0; i < (ALL + THREADS - 1) / THREADS; i++) {
            int id = threadIdx.x + i * THREADS;
            if (ALL % THREADS && id >= ALL) break;
            int line = id / LINE, at = id % LINE * CHUNK;
            int r = row0 + (CONTIG_K ? line : at), k = k0 + (CONTIG_K ? at : line);
            // how many of the chunk's elements exist
            int left = CONTIG_K ? (r < rows ? K - k : 0) : (k < K ? rows - r : 0);
            left = left < 0 ? 0 : left > CHUNK ? CHUNK : left;
            const T* from = p + (CONTIG_K ? (i64)r * ld + k : (i64)k * ld + r);
            T* to = tile + line * LD + at;
            if (VEC > 1)
                cp_async_16(smem_address(to), left ? from : p, left * sizeof(T));
            else
                UNROLLED for (int j = 0; j < CHUNK; j++) to[j] = j < left ? from[j] : T{};
        }
    }
    DEVICE static const T* at(const T* tile, int r, int k) {
        return tile + (CONTIG_K ? r * LD + k : k * LD + r);
    }
    // 16-bit: fragments of two 8-row groups r.. and r+8.. over k..k+15, as {r k, r+8 k, r k+8, r+8 k+8}.
    DEVICE static void read16(u32 (&f)[4], const T* tile, int r, int k) {
        int l = threadIdx.x % 32;
        const T* p = CONTIG_K ? at(tile, r + l % 16, k + l / 16 * 8)
                              : at(tile, r + l / 8 % 2 * 8, k + l % 8 + l / 16 * 8);
        ldmatrix_x4<!CONTIG_K>(f, smem_address(p));
    }
};
typedef Tile<BM, !TRANS_A> TileA;
typedef Tile<BN, TRANS_B> TileB;

extern "C" __global__ __launch_bounds__(THREADS) void gemm_mma(GEMM_PARAMS) {
    after_previous_launch();
    extern __shared__ __align__(16) u8 smem[];
    GEMM_BATCH
    int tiles_n = (N + BN - 1) / BN;
    int m0 = blockIdx.x / tiles_n * BM, n0 = blockIdx.x % tiles_n * BN;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int wm = warp / WARPS_N * WM, wn = warp % WARPS_N * WN;
    float acc[MI][NI][4] = {};
    int steps = (K + BK - 1) / BK;
    auto tile_a = [&](int s) { return (T*)(smem + s * (TileA::BYTES + TileB::BYTES)); };
    auto tile_b = [&](int s) { return (T*)(smem + s * (TileA::BYTES + TileB::BYTES) + TileA::BYTES); };
    auto fill = [&](int step) {
        if (step < steps) {
            TileA::fill(tile_a(step % STAGES), a, lda, m0, M, step * BK, K);
            TileB::fill(tile_b(step % STAGES), b, ldb, n0, N, step * BK, K);
        }
        cp_async_commit();
    };
    UNROLLED for (int s = 0; s < STAGES - 1; s++) fill(s);
    for (int step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        fill(step + STAGES - 1);
        const T *ta = tile_a(step % STAGES), *tb = tile_b(step % STAGES);
        UNROLLED for (int k = 0; k < BK; k += KSTEP) {
            if constexpr (WIDE) {
                u32 fa[MI][4], fb[NI / 2][4];
                UNROLLED for (int i = 0; i < MI; i++) TileA::read16(fa[i], ta, wm + i * 16, k);
                UNROLLED for (int j = 0; j < NI / 2; j++) TileB::read16(fb[j], tb, wn + j * 16, k);
                UNROLLED for (int i = 0; i < MI; i++)
                    UNROLLED for (int j = 0; j < NI; j++) {
                        u32 b2[2] = {fb[j / 2][j % 2], fb[j / 2][j % 2 + 2]};
                        mma(acc[i][j], fa[i], b2, T{});
                    }
            } else if constexpr (SPLIT == 1) {
                u32 fa[MI][4];
                int r = lane / 4, c = lane % 4;
                UNROLLED for (int i = 0; i < MI; i++)
                    UNROLLED for (int q = 0; q < 4; q++)
                        fa[i][q] = to_tf32(to_float(*TileA::at(ta, wm + i * 16 + r + q % 2 * 8, k + c + q / 2 * 4)));
                UNROLLED for (int j = 0; j < NI; j++) {
                    u32 b2[2];
                    UNROLLED for (int q = 0; q < 2; q++)
                        b2[q] = to_tf32(to_float(*TileB::at(tb, wn + j * 8 + r, k + c + q * 4)));
                    UNROLLED for (int i = 0; i < MI; i++) mma(acc[i][j], fa[i], b2, float{});
                }
            } else {
                u32 ah[MI][4], al[MI][4];
                int r = lane / 4, c = lane % 4 * 2;
                UNROLLED for (int i = 0; i < MI; i++)
                    UNROLLED for (int q = 0; q < 4; q++) {
                        int m = wm + i * 16 + r + q % 2 * 8, kk = k + c + q / 2 * 8;
                        split(to_float(*TileA::at(ta, m, kk)), to_float(*TileA::at(ta, m, kk + 1)), ah[i][q], al[i][q]);
                    }
                UNROLLED for (int j = 0; j < NI; j++) {
                    u32 bh[2], bl[2];
                    UNROLLED for (int q = 0; q < 2; q++) {
                        int n = wn + j * 8 + r, kk = k + c + q * 8;
                        split(to_float(*TileB::at(tb, n, kk)), to_float(*TileB::at(tb, n, kk + 1)), bh[q], bl[q]);
                    }
                    UNROLLED for (int i = 0; i < MI; i++) {
                        mma(acc[i][j], al[i], bh, bf16{});
                        mma(acc[i][j], ah[i], bl, bf16{});
                        mma(acc[i][j], ah[i], bh, bf16{});
                    }
                }
            }
        }
    }
    cp_async_wait<0>();
    UNROLLED for (int i = 0; i < MI; i++)
        UNROLLED for (int h = 0; h < 2; h++) {
            int m = m0 + wm + i * 16 + lane / 4 + h * 8;
            if (m >= M) continue;
            Row row = GEMM_ROW(m);
            Dots dots = {};
            UNROLLED for (int j = 0; j < NI; j++)
                UNROLLED for (int q = 0; q < 2; q++) {
                    int n = n0 + wn + j * 8 + lane % 4 * 2 + q;
                    if (GATE) {
                        if (q == 0 && n < N)
                            GEMM_STORE_GATED(float, acc[i][j][h * 2], acc[i][j][h * 2 + 1], m, n, row)
                    } else if (n < N) GEMM_STORE(float, acc[i][j][h * 2 + q], m, n, row, dots)
                }
#if EPI_DW
            store_dots<4>(dots, part, blockIdx.x % tiles_n * WARPS_N + warp % WARPS_N, m, M);
#endif
        }
}
