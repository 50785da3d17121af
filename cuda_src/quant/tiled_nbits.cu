// quant/tiled_nbits.cu: y[M, N] = epilogue(norm?(a)[M, K] · w[N, K]ᵀ) of constant 4-bit weights in an mma's order.
//
// Idea     : a block owns 16 TILES rows of w and all of k. Each warp copies its share of k to shared memory, as fast
//            as it comes, before the launch before has ended, and reads a word of it as the operand of an mma: 16 rows of w, 16 k. The other operand's 8 columns are rows of a, so that 8 rows cost what one does.
//            q - zero is exact in 16 bits; a block's sum is scaled in float32. Tile by tile: a warp's sums of a tile
//            take the place of its weights. With NORM each warp normalises its share of a, in registers, by sums
//            of all warps; a single row's share is spread over all lanes, and ordered in shared memory.
// Inputs   : a [M, K] T, aligned to 16 bytes; q [tiles, K / 64, 32, 16] u8 and scale [tiles, K / SCALED, 8, 2 (ZERO: 4)]
//            as program/nbits_tiles.py orders them; bias [N] T (EPI_BIAS); c [M, N] T (EPI_RES); gamma, beta
//            [K] T, beta may be null (NORM).
// Outputs  : y [M, N] T; GATE: [M, N / 2], act(row n) times row n + N / 2.
// Macros   : T, TO f16 or bf16; SCALED weights that share a scale: 32, or 64 and its multiples; SETS of 8 rows of a, ONE:
//            a single row; TILES of 16 rows of w, with GATE pairs of them, N / 2 rows apart; WARPS; CHUNKS of 64 k that a
//            warp has at most, all of them where WHOLE; HELD of them, of a, in registers at once (NORM without ONE: all);
//            ZERO; NORM: 1 RMSNorm, 2 LayerNormalization; EPI_BIAS, EPI_RES, GATE, the activation's.
// Launch   : (ceil(N / (16 TILES)), ceil(M / (8 SETS))), 32 WARPS threads. K % 64 == 0.
// Numerics : f32 sums in k's order within a warp, warps in theirs: they depend on the shape and the macros alone.
//            NORM: rounded to T, as LayerNormalization's own kernel rounds.
// Bound    : bytes of q.
#include "sm80.cuh"
#include "gemm/epilogue.cuh"
#include "quant/nbits.cuh"

constexpr bool F16 = IS_F16<T>;
constexpr int ROWS = ONE ? 1 : 8 * SETS, OWN = 16 * TILES;
constexpr int EACH = TILES > 1 ? CHUNKS : (CHUNKS + 3) / 4, PARTS = (CHUNKS + EACH - 1) / EACH;  // of a tile, awaited in turn
constexpr int AHEAD = 2;                                  // parts on their way at once: more hold up what others wait for
constexpr int SPAN = ONE ? 32 : 4;                       // lanes that load a row of a, 8 neighbours of k each
constexpr int HOLD = ONE ? (CHUNKS + 3) / 4 : 2 * HELD;  // such pieces of a lane
constexpr int UNROLL = SETS == 4 ? 1 : CHUNKS;           // more would not fit in registers
constexpr int UNIT = SCALED > 64 ? SCALED / 64 : 1;        // chunks that share a scale
constexpr int WIDE = ZERO ? 2 : 1;                       // words of a block and row pair
constexpr int SCALES = (CHUNKS * 64 + SCALED - 1) / SCALED * 8 * WIDE;  // words of a tile and warp
constexpr int TILE = (CHUNKS > SETS ? CHUNKS : SETS) * 512, Q_BYTES = TILES * TILE;  // of weights, then of a warp's sums
constexpr int WARP_BYTES = Q_BYTES + TILES * SCALES * 4;

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) tiled_nbits(
    const T* a, const u8* q, const T* scale, const T* bias, const T* c, const T* gamma, const T* beta, T* y, int M, int N,
    int K, float epsilon, float act_alpha) {
    extern __shared__ __align__(128) u8 smem[];
    launch_dependents();  // no block waits for another
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, t = lane % 4;
    const int m0 = blockIdx.y * ROWS, units = K / (64 * UNIT), tiles = (N + 15) / 16, blocks = K / SCALED;
    const int begin = WHOLE ? warp * CHUNKS : warp * units / WARPS * UNIT;
    const int count = WHOLE ? CHUNKS : (warp + 1) * units / WARPS * UNIT - begin;
    u8* const mine = smem + warp * WARP_BYTES;
    auto tile_of = [&](int u) {
        if (!GATE) return min((int)blockIdx.x * TILES + u, tiles - 1);
        return min((int)blockIdx.x * (TILES / 2) + u / 2, tiles / 2 - 1) + u % 2 * (tiles / 2);
    };

    // of each tile a run of scales and a run of weights: a warp's own, which nobody else waits for
    constexpr int BLOCK_BYTES = 32 * WIDE;
    auto scales_of = [&](int u) { return (const u8*)scale + ((i64)tile_of(u) * blocks + begin * 64 / SCALED) * BLOCK_BYTES; };
    auto weights_of = [&](int u) { return q + ((i64)tile_of(u) * (K / 64) + begin) * 512; };
    const u32 to = smem_address(mine);
    const int scale_bytes = count * 64 / SCALED * BLOCK_BYTES;
    UNROLLED for (int u = 0; u < TILES; u++)
        UNROLLED for (int i = 0; i < (SCALES * 4 + 511) / 512; i++) {
            const int at = (i * 32 + lane) * 16;
            if (at < scale_bytes) cp_async_16(to + Q_BYTES + u * SCALES * 4 + at, scales_of(u) + at, 16);
        }
    UNROLLED for (int u = 0; u < TILES; u++)
        UNROLLED for (int i = 0; i < CHUNKS; i++) {
            const int at = i * 512 + lane * 16;
            if (i < count) cp_async_16(to + u * TILE + at, weights_of(u) + at, 16);
            if ((i + 1) % EACH == 0 || i == CHUNKS - 1) {
                cp_async_commit();
                if (u < TILES - 1 || i < CHUNKS - 1) cp_async_wait<AHEAD - 1>();
            }
        }
    grid_dependency_wait();

    // what a thread's first result needs is on its way as early as a
    constexpr int COLUMNS = GATE ? OWN / 2 : OWN;
    const int columns = GATE ? N / 2 : N;
    auto place_of = [&](int i) { return (i64)(m0 + i / COLUMNS) * columns + blockIdx.x * COLUMNS + i % COLUMNS; };
    auto owned = [&](int i) {
        return i < ROWS * COLUMNS && m0 + i / COLUMNS < M && (int)blockIdx.x * COLUMNS + i % COLUMNS < columns;
    };
    const float residual = EPI_RES && owned(threadIdx.x) ? to_float(c[place_of(threadIdx.x)]) : 0.0f;

    const int first = ONE ? lane : t;
    const T* a_row[SETS];
    bool there[SETS];
    UNROLLED for (int s = 0; s < SETS; s++) {
        there[s] = ONE || m0 + 8 * s + group < M;
        a_row[s] = a + (m0 + (there[s] && !ONE ? 8 * s + group : 0)) * (i64)K + begin * 64;
    }
    Vec<T, 8> x[SETS][HOLD];
    auto within = [&](int i, int from) { return i * SPAN + first < CHUNKS * 8 && from * 8 + i * SPAN + first < count * 8; };
    auto fetch = [&](int from) {  // chunks of a
        UNROLLED for (int s = 0; s < SETS; s++)
            UNROLLED for (int i = 0; i < HOLD; i++) {
                x[s][i] = {};
                if (there[s] && within(i, from)) x[s][i] = load<8>(a_row[s] + (from * 8 + i * SPAN + first) * 8);
            }
    };
    fetch(0);
#if NORM
    static_assert(ONE || HELD == CHUNKS, "a norm needs all of a warp's share");
    __shared__ float partial[NORM][ROWS][WARPS];
    Vec<T, 8> by[HOLD], more[HOLD];
    UNROLLED for (int i = 0; i < HOLD; i++) {
        by[i] = more[i] = {};
        if (!within(i, 0)) continue;
        by[i] = load<8>(gamma + begin * 64 + (i * SPAN + first) * 8);
        if (beta) more[i] = load<8>(beta + begin * 64 + (i * SPAN + first) * 8);
    }
    auto sums_of = [&](int turn, float (&v)[SETS], auto&& of) {  // of a row's numbers, over all warps
        UNROLLED for (int s = 0; s < SETS; s++) {
            v[s] = 0;
            UNROLLED for (int i = 0; i < HOLD; i++)
                if (within(i, 0))
                    UNROLLED for (int j = 0; j < 8; j++) v[s] += of(s, to_float(x[s][i].at[j]));
            UNROLLED for (int step = 1; step < SPAN; step *= 2) v[s] += __shfl_xor_sync(~0u, v[s], step);
            if (lane % SPAN == 0) partial[turn][ONE ? 0 : 8 * s + group][warp] = v[s];
        }
        __syncthreads();
        UNROLLED for (int s = 0; s < SETS; s++) {
            v[s] = 0;
            UNROLLED for (int w = 0; w < WARPS; w++) v[s] += partial[turn][ONE ? 0 : 8 * s + group][w];
        }
    };
    float mean[SETS] = {}, squares[SETS];
    if (NORM == 2) {
        sums_of(NORM - 1, mean, [](int, float v) { return v; });
        UNROLLED for (int s = 0; s < SETS; s++) mean[s] /= K;
    }
    sums_of(0, squares, [&](int s, float v) { return (v - mean[s]) * (v - mean[s]); });
    UNROLLED for (int s = 0; s < SETS; s++) {
        const float rstd = rsqrtf(squares[s] / K + epsilon);
        UNROLLED for (int i = 0; i < HOLD; i++)
            UNROLLED for (int j = 0; j < 8; j++) {
                float v = (to_float(x[s][i].at[j]) - mean[s]) * rstd * to_float(by[i].at[j]);
                if (beta) v += to_float(more[i].at[j]);
                x[s][i].at[j] = from_float<T>(v);
            }
    }
#endif
#if ONE  // all lanes have loaded the row: those that multiply read it in the order of an mma
    T* const row = (T*)(smem + WARPS * WARP_BYTES) + warp * CHUNKS * 64;
    UNROLLED for (int i = 0; i < HOLD; i++)
        if (i * 32 + lane < CHUNKS * 8) store(row + (i * 32 + lane) * 8, x[0][i]);
    __syncwarp();
    uint4 ordered[1][2 * HELD];
    auto order = [&](int from) {
        UNROLLED for (int i = 0; i < 2 * HELD; i++)
            if (from * 2 + i < 2 * CHUNKS) ordered[0][i] = *(const uint4*)(row + (from * 8 + i * 4 + t) * 8);
    };
    if (HELD == CHUNKS) order(0);
#else
    auto& ordered = x;
    auto& order = fetch;
#endif

    ROLLED for (int u = 0; u < TILES; u++) {
        float total[SETS][4] = {}, part[SETS][4] = {};  // part: of a block of weights
#pragma unroll UNROLL
        for (int i = 0; i < CHUNKS; i++) {
            if (HELD < CHUNKS && i % HELD == 0 && (ONE || i || u)) order(i);
            if (i % EACH == 0) {
                cp_async_wait<TILES * PARTS - 1>();
                cp_async_commit();  // an empty part behind the others keeps their number
                __syncwarp();       // other lanes' copies, too
            }
            if (i >= count) continue;
            const uint4 words = *(const uint4*)(mine + u * TILE + i * 512 + lane * 16);
            UNROLLED for (int b = 0; b < 2; b++) {
                const u32* factors = (const u32*)(mine + Q_BYTES) + u * SCALES + ((i * 64 + b * 32) / SCALED * 8 + group) * WIDE;
                u32 even = twice(F16 ? 0xe408 : 0xc308), odd = twice(F16 ? 0xd480 : 0xc308);
                if (ZERO) even = __byte_perm(factors[1], 0, 0x1010), odd = __byte_perm(factors[1], 0, 0x3232);
                u32 w[2][4];
                unpack_4<F16>(b ? words.z : words.x, even, odd, w[0]);
                unpack_4<F16>(b ? words.w : words.y, even, odd, w[1]);
                const bool ends = (i * 64 + b * 32 + 32) % SCALED == 0;
                const float2 step = ends ? unpack2<T>(factors[0]) : float2{};
                UNROLLED for (int s = 0; s < SETS; s++) {
                    const u32* of_a = (const u32*)&ordered[s][i % HELD * 2 + b];
                    mma(part[s], w[0], of_a, T());
                    mma(part[s], w[1], of_a + 2, T());
                    if (!ends) continue;
                    UNROLLED for (int j = 0; j < 4; j++) {
                        total[s][j] = fmaf(part[s][j], j < 2 ? step.x : step.y, total[s][j]);
                        part[s][j] = 0;
                    }
                }
            }
        }
        __syncwarp();  // all lanes have read these weights: sums take their place
        UNROLLED for (int s = 0; s < SETS; s++)
            UNROLLED for (int j = 0; j < 4; j++) {
                const int m = 8 * s + 2 * t + j % 2;
                if (m < ROWS) ((float*)(mine + u * TILE))[m * 16 + j / 2 * 8 + group] = total[s][j];
            }
    }
    cp_async_wait<0>();
    __syncthreads();
    ROLLED for (int i = threadIdx.x; i < ROWS * COLUMNS; i += 32 * WARPS) {
        if (!owned(i)) continue;
        const int m = i / COLUMNS, own = i % COLUMNS, n = blockIdx.x * COLUMNS + own;
        const int tile = GATE ? own / 16 * 2 : own / 16;  // a gate's is before the one that it lets through
        float v[GATE + 1] = {};
        UNROLLED for (int w = 0; w < WARPS; w++)
            UNROLLED for (int u = 0; u <= GATE; u++)
                v[u] += ((const float*)(smem + w * WARP_BYTES + (tile + u) * TILE))[m * 16 + own % 16];
        UNROLLED for (int u = 0; u <= GATE; u++)
            if (EPI_BIAS) v[u] += to_float(bias[n + u * columns]);
        const i64 at = place_of(i);
        if (GATE) v[0] = gated(v[0], v[GATE], act_alpha);
        else if (ACTIVE) v[0] = Activate<float>::value(v[0], act_alpha);
        if (EPI_RES) v[0] += i == threadIdx.x ? residual : to_float(c[at]);
        y[at] = from_float<T>(v[0]);
    }
}
