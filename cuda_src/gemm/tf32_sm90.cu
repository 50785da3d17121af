// gemm/tf32_sm90.cu: y = epilogue(a . op(b)) of float32 on Hopper: TMA and wgmma, products of tf32.
// Idea     : a block makes 128 x BN elements of y. Its last warp keeps STAGES steps of 32 k on their way by TMA,
//            which rounds what it copies to tf32; two warpgroups multiply, 64 rows each. RESIDENT blocks share a
//            multiprocessor: one multiplies while the other stores. IM2COL: a is gathered from channels-last
//            images under a filter's taps (gemm/im2col.cuh).
// Inputs   : a [M, K], b [N, K] (wgmma takes tf32 with k contiguous alone) by TMA: row strides and addresses are
//            multiples of 16 bytes, M and K any, N even. IM2COL: x [n, h, w, channels], b [N, taps, channels],
//            K 32 times all taps' blocks of 32 channels.
// EPI_DW   : part [ceil(N / BN), 2, M] f32, the sums of each row of a tile.
// Outputs  : y [M, N] f32 by plain stores; where the blocks of a tile share its steps, `chunk` each, part s of the
//            sums, without an epilogue, to y + s M N.
// Macros   : BN STAGES RESIDENT TV TR, gemm/epilogue.cuh's, IM2COL DEEP.
// Launch   : ceil(M / 128) * ceil(N / BN) x parts blocks of 288 threads.
// Numerics : operands rounded to 11 bits, f32 sums, k in order.
// Bound    : HBM, for convolutions of few taps; tensor cores where k is long.
#define T float
#define TO float
#include "gemm/portable.cuh"
#include "tma_ring.cuh"
#include "gemm/im2col.cuh"

constexpr int BM = 128, BK = 32;                      // of 128 bytes, a line of the swizzle
constexpr int A_BYTES = BM * 128, STAGE = A_BYTES + BN * 128;
constexpr int CONSUMERS = 8;                          // warps

extern "C" __global__ void __launch_bounds__(288, RESIDENT)
    gemm_tf32(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
              GEMM_PARAMS, int chunk IM2COL_PARAMS) {
    extern __shared__ __align__(1024) u8 smem[];
    const u32 base = smem_address(smem), barriers = base + STAGES * STAGE;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int tiles_n = (N + BN - 1) / BN, m0 = blockIdx.x / tiles_n * BM, n0 = blockIdx.x % tiles_n * BN;
    const int begin = blockIdx.y * chunk, steps = min(chunk, (K + BK - 1) / BK - begin);
    if (warp == CONSUMERS && elect()) {
        Ring<STAGES>(barriers, true).set_up(CONSUMERS);
        fence_barrier_init();
        tma_prefetch(map_a);
        tma_prefetch(map_b);
    }
    __syncthreads();
    after_previous_launch();

    if (warp == CONSUMERS) {  // ---- producer ----
        if (elect()) {
            const Pixel pixel = first_pixel(m0, PIXELS_OF_Y);
            int tap = IM2COL ? begin / blocks : 0, at = (IM2COL ? begin % blocks : begin) * BK;
            Ring<STAGES> ring(barriers, true);
            ROLLED for (int step = 0; step < steps; step++, ring.next()) {
                const u32 to = base + ring.s * STAGE, bar = ring.claim(STAGE);
                if (IM2COL) load_pixels(to, map_a, bar, at, pixel, tap);
                else tma_load(to, map_a, bar, at, m0, 0);
                tma_load(to + A_BYTES, map_b, bar, at, n0, tap);
                if ((at += BK) == blocks * BK && IM2COL) at = 0, tap++;
            }
        }
        return;
    }
    // ---- consumers ----
    const int group = warp / 4;
    float acc[BN / 2];
    Ring<STAGES> ring(barriers, false);
    ring.multiply(steps, lane, [&](int s, bool more) {
        const u32 u = base + s * STAGE + group * 64 * 128, v = base + s * STAGE + A_BYTES;
        ring.await();
        wgmma_fence();
        UNROLLED for (int q = 0; q < 4; q++)
            WgmmaAlongK<0, BN>::run(acc, wgmma_descriptor<true>(u + q * 32), wgmma_descriptor<true>(v + q * 32), more || q > 0);
    });
    wgmma_wait<0>();
    wgmma_hold(acc);
    const int m = m0 + group * 64 + warp % 4 * 16 + lane / 4, n = n0 + lane % 4 * 2, columns = N - n;
    const i64 at = (i64)m * N + n;
    y += (i64)blockIdx.y * M * N + at;
    if (EPI_OPERAND) c += at;
    if (SAVE_Z) z += at;
    if (EPI_COLS > 0) col1 += n;
    if (EPI_COLS > 1) col0 += n;
    Row rows[2] = {};
    Dots dots[2] = {};
    UNROLLED for (int h = 0; h < 2; h++)
        if (EPI_ROWS && m + h * 8 < M) rows[h] = GEMM_ROW(m + h * 8);
    // eights of columns read before any is stored
    constexpr int AHEAD = EPI_DX && BN == 128 ? 1 : EPI_OPERAND || BN == 128 ? 2 : 4;
    UNROLLED for (int first = 0; first < BN; first += 8 * AHEAD) {
        float2 k0[AHEAD] = {}, k1[AHEAD] = {}, more[AHEAD][2] = {};
        UNROLLED for (int i = 0; i < AHEAD; i++) {
            const int j = first + i * 8;
            if (j >= columns) continue;
            if (EPI_COLS > 0) k1[i] = {to_float(col1[j]), to_float(col1[j + 1])};
            if (EPI_COLS > 1) k0[i] = {to_float(col0[j]), to_float(col0[j + 1])};
            UNROLLED for (int h = 0; h < 2; h++)
                if (EPI_OPERAND && m + h * 8 < M) more[i][h] = *(const float2*)(c + h * 8 * N + j);
        }
        UNROLLED for (int i = 0; i < AHEAD; i++) {
            const int j = first + i * 8;
            if (j >= columns) continue;
            UNROLLED for (int h = 0; h < 2; h++) {
                if (m + h * 8 >= M) continue;
                float2 v = {acc[j / 2 + h * 2], acc[j / 2 + h * 2 + 1]}, before = {};
                v.x = epilogue<float>(v.x, rows[h], k0[i].x, k1[i].x, more[i][h].x, alpha, beta, act_alpha, before.x,
                                      dots[h]);
                v.y = epilogue<float>(v.y, rows[h], k0[i].y, k1[i].y, more[i][h].y, alpha, beta, act_alpha, before.y,
                                      dots[h]);
                const int to = h * 8 * N + j;
                if (SAVE_Z) *(float2*)(z + to) = before;
                *(float2*)(y + to) = {stored(v.x, y + to), stored(v.y, y + to + 1)};
            }
        }
    }
#if EPI_DW
    UNROLLED for (int h = 0; h < 2; h++)
        if (m + h * 8 < M) store_dots<4>(dots[h], part, blockIdx.x % tiles_n, m + h * 8, M);
#endif
}
