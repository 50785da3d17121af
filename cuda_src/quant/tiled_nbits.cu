// quant/tiled_nbits.cu: y[M, N] = epilogue(norm?(a)[M, K] · w[N, K]ᵀ) of constant 4-bit weights in an mma's order.
//
// Idea     : a block owns 16 TILES rows of w and all of k. Each warp copies its share of k to shared memory at once,
//            before the launch before has ended, and reads a word of it as the operand of an mma: 16 rows of w, 16 k.
//            The other operand's 8 columns are rows of a, so that 8 rows cost what one does. q - zero is exact in 16
//            bits; a block's sum is scaled in float32. With NORM each block normalises the rows of a itself.
// Inputs   : a [M, K] T, aligned to 16 bytes; q [tiles, K / 64, 32, 16] u8 and scale [tiles, K / BLOCK, 8, 2 (ZERO: 4)]
//            as program/nbits_tiles.py orders them; bias [N] T (EPI_BIAS); c [M, N] T (EPI_RES); gamma, beta
//            [K] T, beta may be null (NORM).
// Outputs  : y [M, N] T; GATE: [M, N / 2], act(row n) times row n + N / 2.
// Macros   : T, TO f16 or bf16; BLOCK weights a scale: 32, or 64 and its multiples; SETS of 8 rows of a; TILES of 16 rows
//            of w, with GATE pairs of them, N / 2 rows apart; WARPS; CHUNKS of 64 k that a warp has at most, all of them
//            where WHOLE; ZERO; NORM: 1 RMSNorm,
//            2 LayerNormalization, by TEAM warps a row, each lane STEPS times 8 elements; EPI_BIAS, EPI_RES, GATE, the activation's.
// Launch   : (ceil(N / (16 TILES)), ceil(M / (8 SETS))), 32 WARPS threads. K % 64 == 0.
// Numerics : f32 sums in k's order within a warp, warps in theirs: they depend on the shape and the macros alone.
//            NORM: rounded to T, as LayerNormalization's own kernel rounds.
// Bound    : bytes of q.
#include "sm80.cuh"
#include "gemm/epilogue.cuh"
#include "quant/nbits.cuh"

constexpr bool F16 = IS_F16<T>;
constexpr int ROWS = 8 * SETS, OWN = 16 * TILES;
constexpr int PIECES = CHUNKS < 4 ? CHUNKS : 4, EACH = (CHUNKS + PIECES - 1) / PIECES;  // copies that are awaited in turn
constexpr int MOST = SETS == 1 ? (WARPS < 32 ? 8 : 4) : SETS == 2 ? 3 : 1, AHEAD = CHUNKS < MOST ? CHUNKS : MOST;  // chunks of a in registers
constexpr int UNIT = BLOCK > 64 ? BLOCK / 64 : 1;                                       // chunks that share a scale
constexpr int WIDE = ZERO ? 2 : 1;                                                      // words of a block and row pair
constexpr int SCALES = (CHUNKS * 64 + BLOCK - 1) / BLOCK * 8 * WIDE;                    // words of a tile and warp
constexpr int Q_BYTES = CHUNKS * TILES * 512, WARP_BYTES = Q_BYTES + TILES * SCALES * 4;

extern "C" __global__ void __launch_bounds__(32 * WARPS) tiled_nbits(
    const T* a, const u8* q, const T* scale, const T* bias, const T* c, const T* gamma, const T* beta, T* y, int M, int N,
    int K, float epsilon, float act_alpha) {
    extern __shared__ __align__(128) u8 smem[];
    launch_dependents();  // no block waits for another
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, t = lane % 4;
    const int m0 = blockIdx.y * ROWS, units = K / (64 * UNIT), tiles = (N + 15) / 16, blocks = K / BLOCK;
    const int begin = WHOLE ? warp * CHUNKS : warp * units / WARPS * UNIT;
    const int count = WHOLE ? CHUNKS : (warp + 1) * units / WARPS * UNIT - begin;
    u8* const mine = smem + warp * WARP_BYTES;
    auto tile_of = [&](int u) {
        if (!GATE) return min((int)blockIdx.x * TILES + u, tiles - 1);
        return min((int)blockIdx.x * (TILES / 2) + u / 2, tiles / 2 - 1) + u % 2 * (tiles / 2);
    };

    const int words = count * 64 / BLOCK * 8 * WIDE;
    const u8* from[TILES];
#pragma unroll
    for (int u = 0; u < TILES; u++) {
        const i64 tile = tile_of(u);
        from[u] = q + (tile * (K / 64) + begin) * 512 + lane * 16;
        const u32* factors = (const u32*)scale + (tile * blocks + begin * 64 / BLOCK) * 8 * WIDE + 4 * lane;
        const u32 to = smem_address(mine + Q_BYTES) + u * SCALES * 4 + 16 * lane;
#pragma unroll
        for (int i = 0; i < (SCALES + 127) / 128; i++)
            if (4 * lane + 128 * i < words) cp_async_16(to + 512 * i, factors + 128 * i, 16);
    }
    const u32 to = smem_address(mine) + lane * 16;
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
#pragma unroll
        for (int i = p * EACH; i < (p + 1) * EACH; i++)
            if (i < count)
#pragma unroll
                for (int u = 0; u < TILES; u++) cp_async_16(to + (i * TILES + u) * 512, from[u] + i * 512, 16);
        cp_async_commit();
    }
    grid_dependency_wait();

    const T* rows = a + (i64)m0 * K;
    int stride = K;
#if NORM
    // TEAM warps a row: what is read is on its way at once, and stays in registers until it is written
    __shared__ float2 partial[WARPS];
    T* const normed = (T*)(smem + WARPS * WARP_BYTES);
    stride = K + 8;
    const int m = warp / TEAM, first = (warp % TEAM * 32 + lane) * 8;
    const bool row = m < min(ROWS, M - m0);
    Vec<T, 8> x[STEPS], by[STEPS], more[STEPS];
    float sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const int k = first + i * 256 * TEAM;
        x[i] = by[i] = more[i] = {};
        if (!row || k >= K) continue;
        x[i] = load<8>(rows + (i64)m * K + k);
        by[i] = load<8>(gamma + k);
        if (beta) more[i] = load<8>(beta + k);
    }
    auto both = [&] {
#pragma unroll
        for (int step = 16; step; step /= 2) {
            if (NORM == 2) sum += __shfl_xor_sync(~0u, sum, step);
            squares += __shfl_xor_sync(~0u, squares, step);
        }
        if (TEAM == 1) return;
        __syncthreads();
        if (lane == 0) partial[warp] = make_float2(sum, squares);
        __syncthreads();
        sum = squares = 0;
#pragma unroll
        for (int i = 0; i < TEAM; i++) {
            const float2 its = partial[warp / TEAM * TEAM + i];
            sum += its.x, squares += its.y;
        }
    };
    auto each = [&](auto&& use) {
#pragma unroll
        for (int i = 0; i < STEPS; i++)
            if (first + i * 256 * TEAM < K)
#pragma unroll
                for (int j = 0; j < 8; j++) use(i, j, to_float(x[i].at[j]));
    };
    each([&](int, int, float v) { sum += v, squares += v * v; });
    both();
    const float mean = NORM == 2 ? sum / K : 0.0f;
    if (NORM == 2) {
        squares = 0;
        each([&](int, int, float v) { squares += (v - mean) * (v - mean); });
        both();
    }
    const float rstd = rsqrtf(squares / K + epsilon);
    each([&](int i, int j, float v) {
        v = (v - mean) * rstd * to_float(by[i].at[j]);
        if (beta) v += to_float(more[i].at[j]);
        x[i].at[j] = from_float<T>(v);
    });
#pragma unroll
    for (int i = 0; i < STEPS; i++)
        if (row && first + i * 256 * TEAM < K) store(normed + m * stride + first + i * 256 * TEAM, x[i]);
    __syncthreads();
    rows = normed;
#endif

    const T* a_row[SETS];
    bool there[SETS];
#pragma unroll
    for (int s = 0; s < SETS; s++) {
        there[s] = m0 + 8 * s + group < M;
        a_row[s] = rows + (there[s] ? 8 * s + group : 0) * (i64)stride + begin * 64 + 8 * t;
    }
    float total[TILES][SETS][4] = {}, part[TILES][SETS][4] = {};  // part: of a block of weights
    uint4 x_ahead[AHEAD][2][SETS];
    auto fetch = [&](int first, int end) {  // of a, so many chunks: all on their way at once
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
#pragma unroll
            for (int b = 0; b < 2; b++)
#pragma unroll
                for (int s = 0; s < SETS; s++) {
                    x_ahead[i][b][s] = make_uint4(0, 0, 0, 0);
                    if (there[s] && first + i < end) x_ahead[i][b][s] = *(const uint4*)(a_row[s] + (first + i) * 64 + b * 32);
                }
    };
    auto multiply = [&](int i, const uint4 (&xs)[2][SETS]) {
#pragma unroll
        for (int u = 0; u < TILES; u++) {
            const uint4 words = *(const uint4*)(mine + (i * TILES + u) * 512 + lane * 16);
#pragma unroll
            for (int b = 0; b < 2; b++) {
                const uint4(&x)[SETS] = xs[b];
                const u32* factors = (const u32*)(mine + Q_BYTES) + u * SCALES + ((i * 64 + b * 32) / BLOCK * 8 + group) * WIDE;
                u32 even = twice(F16 ? 0xe408 : 0xc308), odd = twice(F16 ? 0xd480 : 0xc308);
                if (ZERO) even = __byte_perm(factors[1], 0, 0x1010), odd = __byte_perm(factors[1], 0, 0x3232);
                u32 w[2][4];
                unpack_4<F16>(b ? words.z : words.x, even, odd, w[0]);
                unpack_4<F16>(b ? words.w : words.y, even, odd, w[1]);
#pragma unroll
                for (int s = 0; s < SETS; s++) {
                    const u32 first[2] = {x[s].x, x[s].y}, second[2] = {x[s].z, x[s].w};
                    mma(part[u][s], w[0], first, T());
                    mma(part[u][s], w[1], second, T());
                }
                if ((i * 64 + b * 32 + 32) % BLOCK) continue;
                const float2 step = unpack2<T>(factors[0]);
#pragma unroll
                for (int s = 0; s < SETS; s++)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        total[u][s][j] = fmaf(part[u][s][j], j < 2 ? step.x : step.y, total[u][s][j]);
                        part[u][s][j] = 0;
                    }
            }
        }
    };
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        if (i % AHEAD == 0) fetch(i, count);
        if (i == 0) cp_async_wait<PIECES - 1>(), __syncwarp();  // scales that other lanes copied
        else if (i == EACH) cp_async_wait<PIECES - 2 < 0 ? 0 : PIECES - 2>();
        else if (i == 2 * EACH) cp_async_wait<PIECES - 3 < 0 ? 0 : PIECES - 3>();
        else if (i == 3 * EACH) cp_async_wait<0>();
        if (i < count) multiply(i, x_ahead[i % AHEAD]);
    }

    __syncthreads();  // all have read their weights: sums take their place
    float* const sums = (float*)smem;
#pragma unroll
    for (int u = 0; u < TILES; u++)
#pragma unroll
        for (int s = 0; s < SETS; s++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                sums[(warp * ROWS + 8 * s + 2 * t + j % 2) * OWN + 16 * u + j / 2 * 8 + group] = total[u][s][j];
    __syncthreads();
    constexpr int COLUMNS = GATE ? OWN / 2 : OWN;
    const int columns = GATE ? N / 2 : N;
#pragma unroll 1
    for (int i = threadIdx.x; i < ROWS * COLUMNS; i += 32 * WARPS) {
        const int m = i / COLUMNS, own = i % COLUMNS, n = blockIdx.x * COLUMNS + own;
        if (m0 + m >= M || n >= columns) continue;
        const int place = GATE ? own / 16 * 32 + own % 16 : own;  // a gate's tile is before the one that it lets through
        float v[GATE + 1] = {};
#pragma unroll
        for (int w = 0; w < WARPS; w++)
#pragma unroll
            for (int u = 0; u <= GATE; u++) v[u] += sums[(w * ROWS + m) * OWN + 16 * u + place];
#pragma unroll
        for (int u = 0; u <= GATE; u++)
            if (EPI_BIAS) v[u] += to_float(bias[n + u * columns]);
        const i64 at = (i64)(m0 + m) * columns + n;
        if (GATE) v[0] = gated(v[0], v[GATE], act_alpha);
        else if (ACTIVE) v[0] = Activate<float>::value(v[0], act_alpha);
        if (EPI_RES) v[0] += to_float(c[at]);
        y[at] = from_float<T>(v[0]);
    }
}
