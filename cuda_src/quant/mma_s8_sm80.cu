// quant/mma_s8_sm80.cu: y[M, N] = (a[M, K] - za) · (b[N, K] - zb)ᵀ in int32, modulo 2^32, of 8-bit integers.
//
// Tiles of a and b, BK of k a step, come by cp.async into STAGES of shared memory, in rows of BK + 16 bytes, so
// that ldmatrix has no bank conflicts; mma.sync multiplies 16x8x32. A zero point costs no pass: the sum is that of
// the plain integers, less za times the column sums of b and zb times the row sums of a, which are summed from the
// fragments that the products read anyway.
//
// Inputs:   a [M, K], rows lda bytes apart, b [N, K], ldb, both 16-byte aligned, lda and ldb multiples of 16;
//           za [1] or [M] (ZA 1, 2), of a's type; zb [1] or [N] (ZB 1, 2), of b's.
// Output:   y [M, N] int.
// Macros:   A_TYPE, B_TYPE s8 or u8; BM, BN, the tile; WM, WN warps along it; BK, STAGES; ZA, ZB.
// Launch:   (columns of tiles * rows of tiles * batches), 32 WM WN threads, STAGES (BM + BN) (BK + 16) bytes
//           of shared memory.
//           Operands of batches stand a_outer, b_outer bytes apart for each of batches / inner, a_inner, b_inner
//           within those, and za_step zero points of a.
// Bound by: mma.sync at large sizes, L2 below. Integers: the order of sums does not matter.
#include "sm80.cuh"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
constexpr int PITCH = BK + 16, THREADS = 32 * WM * WN;
constexpr int MI = BM / WM / 16, NI = BN / WN / 8;
static_assert(NI % 2 == 0, "ldmatrix brings two tiles of b's columns");

DEVICE void mma_s8(int (&d)[4], const u32 (&a)[4], const u32* b) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." TEXT(A_TYPE) "." TEXT(B_TYPE) ".s32 {%0,%1,%2,%3}, "
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <bool SIGNED> DEVICE int sum4(u32 x, int sum) {
    return SIGNED ? __dp4a((int)x, 0x01010101, sum) : (int)__dp4a(x, 0x01010101u, (u32)sum);
}
template <bool SIGNED> DEVICE int integer(const u8* p, int i) { return SIGNED ? (int)(signed char)p[i] : (int)p[i]; }

extern "C" __global__ void __launch_bounds__(THREADS) mma_s8_sm80(
    const u8* a, const u8* b, const u8* za, const u8* zb, int* y, int M, int N, int K, i64 lda, i64 ldb,
    int columns, int rows, int inner, i64 a_outer, i64 a_inner, i64 b_outer, i64 b_inner, int za_step) {
    after_previous_launch();
    extern __shared__ __align__(16) u8 stages[];
    constexpr bool SA = TEXT(A_TYPE)[0] == 's', SB = TEXT(B_TYPE)[0] == 's';
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, wm = warp / WN, wn = warp % WN;
    const int tiles = columns * rows, batch = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const int m0 = tile / columns * BM, n0 = tile % columns * BN;
    a += (i64)(batch / inner) * a_outer + (i64)(batch % inner) * a_inner;
    b += (i64)(batch / inner) * b_outer + (i64)(batch % inner) * b_inner;
    y += (i64)batch * M * N;
    if (ZA == 2) za += batch % inner * za_step;
    const u32 memory = smem_address(stages);

    // a thread copies the same places of each step's tiles, 16 bytes each
    constexpr int COPIES = (BM + BN) * (BK / 16) / THREADS;
    static_assert((BM + BN) * (BK / 16) % THREADS == 0, "every thread has as many copies");
    const int part = threadIdx.x % (BK / 16) * 16, line = threadIdx.x / (BK / 16);
    const u8* from[COPIES];
    bool inside[COPIES];
    UNROLLED for (int i = 0; i < COPIES; i++) {
        const int row = line + i * (THREADS * 16 / BK);
        const bool left = row < BM;
        const int at = left ? m0 + row : n0 + row - BM, count = left ? M : N;
        inside[i] = at < count;
        from[i] = (left ? a : b) + (i64)min(at, count - 1) * (left ? lda : ldb);
    }
    auto fetch = [&](int step) {
        const u32 to = memory + step % STAGES * (BM + BN) * PITCH + line * PITCH + part;
        const int k = step * BK + part, bytes = max(0, min(16, K - k));
        UNROLLED for (int i = 0; i < COPIES; i++)
            cp_async_16(to + i * (THREADS * 16 / BK) * PITCH, bytes ? from[i] + k : from[i], inside[i] ? bytes : 0);
    };
    const int steps = (K + BK - 1) / BK;
    for (int s = 0; s < STAGES - 1; s++) {
        if (s < steps) fetch(s);
        cp_async_commit();
    }
    int sum[MI][NI][4] = {}, of_row[MI][2] = {}, of_column[NI] = {};
    for (int step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < steps) fetch(step + STAGES - 1);
        cp_async_commit();
        const u32 from = memory + step % STAGES * (BM + BN) * PITCH;
        const u32 left = from + (wm * MI * 16 + lane % 16) * PITCH + lane / 16 * 16;
        const u32 right = from + (BM + wn * NI * 8 + lane % 8 + lane / 16 * 8) * PITCH + lane / 8 % 2 * 16;
        UNROLLED for (int k = 0; k < BK; k += 32) {
            u32 x[MI][4], w[NI / 2][4];
            UNROLLED for (int i = 0; i < MI; i++) ldmatrix_x4<false>(x[i], left + i * 16 * PITCH + k);
            UNROLLED for (int j = 0; j < NI / 2; j++) ldmatrix_x4<false>(w[j], right + j * 16 * PITCH + k);
            UNROLLED for (int i = 0; i < MI; i++)
                UNROLLED for (int j = 0; j < NI; j++) mma_s8(sum[i][j], x[i], &w[j / 2][j % 2 * 2]);
            if (ZB)
                UNROLLED for (int i = 0; i < MI; i++)
                    UNROLLED for (int h = 0; h < 2; h++)
                        of_row[i][h] = sum4<SA>(x[i][h + 2], sum4<SA>(x[i][h], of_row[i][h]));
            if (ZA)
                UNROLLED for (int j = 0; j < NI; j++)
                    of_column[j] = sum4<SB>(w[j / 2][j % 2 * 2 + 1], sum4<SB>(w[j / 2][j % 2 * 2], of_column[j]));
        }
    }
    if (ZB)
        UNROLLED for (int i = 0; i < MI; i++) of_row[i][0] = quad_sum(of_row[i][0]), of_row[i][1] = quad_sum(of_row[i][1]);
    UNROLLED for (int j = 0; j < NI; j++) {
        const int total = ZA ? quad_sum(of_column[j]) : 0;
        UNROLLED for (int e = 0; e < 2; e++) {
            const int column = ZA ? __shfl_sync(~0u, total, (lane % 4 * 2 + e) * 4) : 0;
            const int n = n0 + (wn * NI + j) * 8 + lane % 4 * 2 + e;
            const int right = ZB && n < N ? integer<SB>(zb, ZB == 2 ? n : 0) : 0;
            UNROLLED for (int i = 0; i < MI; i++)
                UNROLLED for (int h = 0; h < 2; h++) {
                    const int m = m0 + (wm * MI + i) * 16 + h * 8 + lane / 4;
                    if (m >= M || n >= N) continue;
                    const int less = ZA ? integer<SA>(za, ZA == 2 ? m : 0) : 0;
                    // unsigned, so that sums wrap around
                    y[(i64)m * N + n] = (u32)sum[i][j][2 * h + e] - (u32)less * (u32)column - (u32)right * (u32)of_row[i][h] +
                                        (u32)less * (u32)right * (u32)K;
                }
        }
    }
}
