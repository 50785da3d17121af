// gemm/wgmma_sm90.cu: y = epilogue(op(a) . op(b)) on Hopper: TMA, wgmma, persistent, warp-specialised.
// Idea     : one CTA an SM walks over output tiles. A producer warp keeps STAGES k-steps of 64 in flight
//            by TMA; two consumer warpgroups multiply. Cooperative: each owns half the rows of a tile
//            of 128 MI rows. PINGPONG: each owns whole tiles of 64 MI rows, one multiplies while the
//            other runs its epilogue. CLUSTER 2: two CTAs below each other share b's tile, each loads
//            half of it for both. Tiles go in bands of GROUP clusters of rows, which stay in L2.
// Inputs   : a [M,K] (TRANS_A: [K,M]), b [K,N] (TRANS_B: [N,K]), bf16 or f16, by TMA: row strides and
//            addresses multiples of 16 bytes; M, N, K any (TMA fills with zeros, clips stores).
//            PASSES 3 or 6: a and b are stacks of 2 or 3 bf16 planes whose sum is the fp32 operand; the
//            passes multiply plane by plane, the smallest products first.
// Outputs  : y [M,N] TO; DIRECT 0: 16-bit by TMA, DIRECT 1: any type and N by plain stores.
//            part [ceil(N / BN), 2, M] f32: EPI_DW's row sums of each tile; EPI_DW 2: [ceil(M / 16), 2, N]. MOMENTS: part [N / BN, M] pairs
//            of f32, (mean, sum of squared deviations) of y's rows in each tile.
//            EPI_EXP: y is 0 from column N on, and part [ceil(N / BN), M] f32: sums of y's rows in each tile.
//            splits > 1: split s writes its partial sums to y + s M N (f32, no epilogue).
//            COLUMN_MOMENTS: part [ceil(M / 64), N] pairs of f32, the same of y's columns in 64 rows each
//            (DIRECT 0, BN a multiple of 64).
//            SIDE: rstd, mean to row0, row1 too, made by the producer's idle warps (gemm/side.cuh), or
//            COLUMNS: part [ceil(M / 64), K] f32, column sums of a (SINGLE, PASSES 1, not TRANS_A); PARTS:
//            made from part [PARTS, M], the moments that the product before left of a's rows.
//            IM2COL: a is gathered from images (gemm/im2col.cuh).
//            EIGHT: a and b are float8 (1: e4m3; 2: a is e5m2; 3: b is), k contiguous, and the rest of this text
//            counts pairs of their elements, of which a swizzled row has 64; row2 and row3 are one number each,
//            and y is their product's multiple. The tensor core keeps about 14 bits of a sum of 8-bit products:
//            it sums 128 of k from zero, and floats add up these sums in the order of k.
//            OWN: at most one tile a CTA, MI 1, PINGPONG, CLUSTER 1.
//            STREAM: CTAs share the k-steps of all tiles evenly (gemm/stream.cuh; SINGLE, PINGPONG 0, CLUSTER 1, no SIDE).
// Macros   : T, TO, TV, TRANS_A, TRANS_B, MI, BN, PINGPONG, CLUSTER, STAGES, GROUP, DIRECT, PASSES, SIDE,
//            SIDE_LANES, MOMENTS, COLUMN_MOMENTS, PARTS, STATIC_B (b does not change while the graph runs: it is read ahead),
//            SINGLE (one product, k not split), NEXT_ALONE (the next launch's blocks take an SM each),
//            EVEN (DIRECT y and c are float, N is a multiple of 4: two elements an access),
//            PAIRS (DIRECT y is float, without c and z, N is even: two where y begins at 8 bytes);
//            the epilogue's (gemm/epilogue.cuh).   Launch: min(SMs, tiles) CTAs of 384 threads.
// Code     : kernels that take turns share the instruction cache, and one whose epilogue has left it
//            takes 4 us more: loops that need no unrolling have none.
// Numerics : f32 accumulation, k in order: bits depend on PASSES and splits alone.
// Bound    : tensor cores, 2 M N K / 790 TFLOP/s on an H200; bytes below K of about 500.
#ifndef EIGHT
#define EIGHT 0
#endif
#if EIGHT
#undef ALPHA
#define ALPHA 1
#endif
#include "gemm/epilogue.cuh"
#include "gemm/side.cuh"
#include "tma_ring.cuh"
#include "gemm/im2col.cuh"
#include "gemm/stream.cuh"
#include "gemm/column_moments.cuh"
#ifndef PASSES
#define PASSES 1
#endif
#ifndef SIDE
#define SIDE 0
#endif
#ifndef MOMENTS
#define MOMENTS 0
#endif
#ifndef COLUMN_MOMENTS
#define COLUMN_MOMENTS 0
#endif
#ifndef PARTS
#define PARTS 0
#endif
#ifndef STATIC_B
#define STATIC_B 0
#endif
#ifndef SINGLE
#define SINGLE 0
#endif
#ifndef EVEN
#define EVEN 0
#endif
#ifndef NEXT_ALONE
#define NEXT_ALONE 0
#endif
#ifndef PAIRS
#define PAIRS 0
#endif
static_assert(!STATIC_B || CLUSTER == 1, "b is asked for before the other CTA has set up its barriers");
constexpr int BK = 64, BM = (PINGPONG ? 64 : 128) * MI;
constexpr int BOXES = (BN + 63) / 64, FULL = BN / 64;  // 64-column blocks; the last may be narrower
constexpr int A_BYTES = BM * BK * 2, B_BYTES = (TRANS_B ? BN : BOXES * 64) * BK * 2;
constexpr int STAGE_BYTES = A_BYTES + B_BYTES;
#if EPI_DW == 2  // what after_act adds to for two neighbours: sums of their columns, or of their row
#define DOTS_X down[e / 2][0]
#define DOTS_Y down[e / 2][1]
#else
#define DOTS_X dots[h]
#define DOTS_Y dots[h]
#endif
constexpr int BOX = 16 * 128;                      // a warp's store: 16 rows of 64 16-bit columns
#ifndef BOXES_OUT
#define BOXES_OUT 2
#endif
constexpr int OUT_BOXES = DIRECT ? 0 : BOXES_OUT;  // boxes a warp keeps in flight
constexpr bool BOTH = SAVE_Z && SIDE != TILES;     // a box of y and one of z are stored together,
constexpr bool PAIRED = !BOTH && !GATE && OUT_BOXES == 4 && MI * FULL % 2 == 0;  // or two of y
static_assert(!GATE || BN % 128 == 0, "64 columns of y are 128 of the product");
constexpr int OUT_SLOTS = OUT_BOXES / (BOTH || PAIRED ? 2 : 1);
constexpr int C_BOXES = !EPI_OPERAND || DIRECT ? 0 : MI * FULL > 1 ? 2 : 1;
constexpr bool ALONE = SIDE == OWN || SIDE == OWN_RMS;  // a CTA has one tile, of 64 rows
constexpr int COL_SETS = PINGPONG && !ALONE ? 2 : 1;  // cooperative warpgroups share their columns
constexpr int OUT_AT = STAGES * STAGE_BYTES, C_AT = OUT_AT + 8 * OUT_BOXES * BOX;
constexpr int COL_AT = C_AT + 8 * C_BOXES * BOX, BAR_AT = COL_AT + COL_SETS * EPI_COLS * BN * 4;
constexpr int CONSUMER_WARPS = PINGPONG ? 4 : 8;   // that multiply one stage
constexpr int READERS = CONSUMER_WARPS * CLUSTER + (SIDE == COLUMNS || SIDE == TILES ? 3 : ALONE ? 4 : 0);
#if EIGHT
constexpr int PART = BN > 192 ? 128 : BN;          // columns that are summed from zero at once
constexpr bool BIG = MI * BN + PART > 256;
static_assert(MI * BN + PART <= 384 && !TRANS_A && TRANS_B && PASSES == 1 && SIDE == 0);
#else
constexpr bool BIG = MI * BN > 256;                // 192 accumulators a thread: no room for columns
#endif
constexpr bool EARLY = SIDE == STATS || SIDE == RMS, TWICE = SIDE == TILES;
constexpr int BAND = GROUP * CLUSTER * BM;         // rows of a band of tiles

// Planes of pass p: smallest products first, hi . hi last.
DEVICE int plane_a(int p) {
    if (PASSES == 3) return p == 0;
    return p == 2 ? 2 : p == 1 || p == 4;  // (0,2) (1,1) (2,0) (0,1) (1,0) (0,0)
}
DEVICE int plane_b(int p) {
    if (PASSES == 3) return p == 1;
    return p == 0 ? 2 : p == 1 || p == 3;
}

// An element that goes by a plain store; fp32 is added where y is kept, as tma_add does.
DEVICE void leave(TO* into, i64 at, float v, int pass) {
    if (!ACCUMULATE || pass == 0) into[at] = from_float<TO>(v);
#if ACCUMULATE
    else if (sizeof(TO) == 4) atomicAdd((float*)into + at, v);
    else into[at] = stored<float>(v, into + at);
#endif
}

#if PAIRS
DEVICE void leave_two(float* into, float2 v) {
#if ACCUMULATE
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(into), "f"(v.x), "f"(v.y) : "memory");
#else
    *(float2*)into = v;
#endif
}
#endif

struct Tile { int m, n, batch, split; };
struct Work {
    int tiles_m, tiles_n, batches, splits;  // tiles_m counts clusters
    DEVICE int count() const { return tiles_m * tiles_n * (SINGLE ? 1 : batches * splits); }
    DEVICE Tile at(int id, int rank) const {
        if (SIDE == TILES) return {id / tiles_n * BM, id % tiles_n * BN, 0, 0};
        int batch = 0, per = tiles_m * tiles_n;
        if (!SINGLE) batch = id / per, id %= per;
        int band = id / (GROUP * tiles_n), first = band * GROUP;
        int height = tiles_m - first < GROUP ? tiles_m - first : GROUP;
        id -= first * tiles_n;
        Tile t = {((first + id % height) * CLUSTER + rank) * BM, id / height * BN, 0, 0};
        if (!SINGLE) t.batch = batch % batches, t.split = batch / batches;
        return t;
    }
};

extern "C" __global__ __launch_bounds__(384, 1) void gemm_wgmma(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
    const __grid_constant__ TensorMap map_y, const __grid_constant__ TensorMap map_z,
    const __grid_constant__ TensorMap map_c, TO* y, TO* z, const TO* c, int M, int N, int K, int batches, int batch_a,
    int batch_b, int splits, TR* row0, TR* row1, const TR* row2, const TR* row3, const TV* col0, const TV* col1,
    float alpha, float beta, float act_alpha, float* part, u32* sync, const T* side_a, i64 side_ld,
    float epsilon IM2COL_PARAMS STREAM_PARAMS) {
    extern __shared__ __align__(1024) u8 smem[];
    u32 base = smem_address(smem);
    u32 barriers = base + BAR_AT, c_bar = barriers + STAGES * 16;
    typedef Ring<STAGES, CLUSTER> Stages;
    int* limit = (int*)(smem + BAR_AT + STAGES * 16 + 8 * C_BOXES * 8);
    float2* own = (float2*)(smem + BAR_AT + STAGES * 16 + 8 * C_BOXES * 8 + 16);  // ALONE: rstd, mean
#if COLUMN_MOMENTS
    auto* boxes = (Differences<TO, BN>*)own;  // of each warp's 16 rows
#endif
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    int rank = CLUSTER > 1 ? (int)cluster_rank() : 0;

    Work work = {((M + BM - 1) / BM + CLUSTER - 1) / CLUSTER, (N + BN - 1) / BN, batches, splits};
    int count = work.count(), stride = gridDim.x / CLUSTER, start = blockIdx.x / CLUSTER;
    int k_steps = (K + BK - 1) / BK, all_steps = k_steps * PASSES;
#if STREAM  // this CTA's tiles from the last one on; t.split is the first of its steps
    constexpr int per_split = 1;
    int low = first_step(count * all_steps, blockIdx.x), high = first_step(count * all_steps, blockIdx.x + 1);
    int tile = (high - 1) / all_steps;
    auto part_of = [&](int tile) {
        Tile t = work.at(tile, 0);
        t.split = max(low - tile * all_steps, 0);
        return t;
    };
    Tile t = part_of(tile);
    auto next = [&](int& id) {
        if (++id < count) t = part_of(--tile);
    };
    auto steps_of = [&](int first) { return min(high - tile * all_steps, all_steps) - first; };
    start = 0, count = low < high ? tile - low / all_steps + 1 : 0;
#else
    int per_split = SINGLE ? all_steps : (all_steps + splits - 1) / splits;
    Tile t = work.at(start, rank);
    auto next = [&](int& id) {
        if ((id += stride) < count) t = work.at(id, rank);
    };
    auto steps_of = [&](int split) {
        int left = all_steps - split * per_split;
        return left < per_split ? left : per_split;
    };
#endif
    auto load_b = [&](u32 b, u32 bar, int k, int n, int zb) {
        mbarrier_expect(bar, STAGE_BYTES);
        if (CLUSTER == 1 && TRANS_B)
            tma_load(b, map_b, bar, k, n, zb);
        else if (CLUSTER == 1)
            UNROLLED for (int i = 0; i < BOXES; i++) tma_load(b + i * 8192, map_b, bar, n + i * 64, k, zb);
        else if (TRANS_B)  // this CTA's half, to both
            tma_load_multicast(b + rank * (B_BYTES / 2), map_b, bar, k, n + rank * (BN / 2), zb, 3);
        else
            UNROLLED for (int i = 0; i < BOXES; i++)
                tma_load_multicast(b + i * 8192 + rank * 4096, map_b, bar, n + i * 64, k + rank * 32, zb, 3);
    };
    if (warp == 0 && elect()) {
        Stages(barriers, true).set_up(READERS);
        for (int i = 0; i < 8 * C_BOXES; i++) mbarrier_init(c_bar + i * 8, 1);
        *limit = 0;
        fence_barrier_init();
        tma_prefetch(map_b);
        // no more than the first step's: a's would wait behind it
        int early = t.split * per_split, tap = IM2COL ? early / blocks : 0;
        if (STATIC_B)
            load_b(base + A_BYTES, barriers, (early - tap * blocks) * BK, t.n, IM2COL ? tap : t.batch * batch_b);
        tma_prefetch(map_a);
        if (!DIRECT) tma_prefetch(map_y);
        if (C_BOXES) tma_prefetch(map_c);
    }
    if (CLUSTER > 1) cluster_sync();
    else __syncthreads();
    if (!STATIC_B) after_previous_launch();

    if (warp < 4) {  // ---- producer ----
        registers_shrink<(BIG ? 40 : 56)>();  // (40 + 2 * 232) * 128 registers are all there are
        if (warp > 0) {
            if (STATIC_B) after_previous_launch();
#if SIDE == TILES || SIDE == COLUMNS
            int turn = warp - 1;
            Stages ring(barriers, false);
            for (int id = start; id < count; next(id)) {
                int mine = t.n / BN;  // of each work.tiles_n k-steps
                for (int step = 0; step < all_steps; step++, ring.next()) {
                    ring.await();
                    if (step == mine) {
                        mine += work.tiles_n;
                        const u8* tile = smem + ring.s * STAGE_BYTES;
                        if (turn == 0 && SIDE == TILES)
                            side_columns<BM, T>(tile, part + (i64)(t.m / BM) * K + step * BK, K - step * BK);
                        for (int row = 0; SIDE == COLUMNS && turn == 0 && row < BM && t.m + row < M; row += 64)
                            side_columns<64, T>(tile + row * 128, part + (i64)((t.m + row) / 64) * K + step * BK, K - step * BK);
                        turn = turn == 0 ? 2 : turn - 1;
                    }
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(ring.empty + ring.s * 8);
                }
            }
#if SIDE == TILES
            side_done(sync, gridDim.x * 11);
#endif
#elif SIDE == STATS || SIDE == RMS
            side_rows<SIDE, SIDE_LANES>(sync, side_a, side_ld, M, K, epsilon, row0, row1, limit);
            side_done(sync, gridDim.x * 11);
#endif
        } else if (elect()) {
            Stages ring(barriers, true);
            if (STATIC_B) after_previous_launch();
            if (NEXT_ALONE) launch_dependents();
            for (int id = start; id < count; next(id)) {
                int steps = steps_of(t.split);
                Pixel pixel = first_pixel(t.m, PIXELS_OF_Y);
                if (EARLY) atomicExch(limit, (t.m / BAND + 2) * BAND);
                ROLLED for (int step = 0; step < steps; step++) {
                    int at = t.split * per_split + step, pass = PASSES > 1 ? at / k_steps : 0;
                    int k = (at - pass * k_steps) * BK;
                    int za = PASSES > 1 ? plane_a(pass) : t.batch * batch_a;
                    int zb = PASSES > 1 ? plane_b(pass) : t.batch * batch_b;
                    if (IM2COL) zb = at / blocks, k = (at - zb * blocks) * BK;
                    u32 a = base + ring.s * STAGE_BYTES, b = a + A_BYTES, bar = ring.full + ring.s * 8;
                    ring.await_free();
                    if (!STATIC_B || id > start || step > 0) load_b(b, bar, k, t.n, zb);
                    if (IM2COL)
                        load_pixels(a, map_a, bar, k, pixel, zb);
                    else if (TRANS_A)
                        UNROLLED for (int i = 0; i < BM / 64; i++)
                            tma_load(a + i * 8192, map_a, bar, t.m + i * 64, k, za);
                    else
                        tma_load(a, map_a, bar, k, t.m, za);
                    ring.next();
                    if (EVEN) {  // rows of c: they are in L2 when the epilogue asks for them
                        int to = BM - (steps - 1 - step) * 4, wide = (N - t.n < BN ? N - t.n : BN) * 4;
                        ROLLED for (int row = step ? to - 4 : 0; row < to; row++)
                            if (row >= 0 && t.m + row < M)
                                asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                                                 c + (i64)(t.m + row) * N + t.n),
                                             "r"(wide));
                    }
                }
            }
            if (EARLY) atomicExch(limit, M);
        }
    } else {  // ---- consumers ----
        registers_grow<(BIG ? 232 : 224)>();
        if (STATIC_B) after_previous_launch();
        int group = warp / 4 - 1, me = threadIdx.x - 128;
        int wrow = (PINGPONG ? 0 : group * MI * 64) + warp % 4 * 16;  // this warp's rows, + 64 a block
        float* columns = (float*)(smem + COL_AT) + (PINGPONG && !ALONE ? group * EPI_COLS * BN : 0);
        constexpr int SHARERS = PINGPONG ? 128 : 256;  // threads that share `columns`
        int column = PINGPONG ? me % 128 : me;
        u32 out = base + OUT_AT + (warp - 4) * OUT_BOXES * BOX;
        u32 cin = base + C_AT + (warp - 4) * C_BOXES * BOX, cbar = c_bar + (warp - 4) * C_BOXES * 8;
        // where this lane's ldmatrix / stmatrix row lies in a box, but for the 16-byte chunk
        int brow = lane % 16, bchunk = lane / 16;
        Stages ring(barriers, false);
        int turn = 0, out_slot = 0, c_slot = 0, c_load = 0;
        u32 c_phase = 0;
        if (PINGPONG && group == 1) bar_arrive(2, 256);  // group 0 multiplies first
#if SIDE == OWN || SIDE == OWN_RMS
        if (group == 1) {  // it has no tile
            int row = me % 128 / 2, m = t.m + row;
            for (int at = column; at < BN; at += 128) {
                bool in = t.n + at < N;
                columns[at] = EPI_COLS > 0 && in ? to_float(col1[t.n + at]) : 0.0f;
                columns[BN + at] = EPI_COLS > 1 && in ? to_float(col0[t.n + at]) : 0.0f;
            }
            float2 found = side_own<SIDE == OWN_RMS, T>(
                K, epsilon,
                [&](int step) {
                    mbarrier_wait(ring.full + step % STAGES * 8, step / STAGES & 1);
                    return (const u8*)smem + step % STAGES * STAGE_BYTES;
                },
                [&](int step) {
                    __syncwarp();
                    if (lane == 0) mbarrier_arrive(ring.empty + step % STAGES * 8);
                });
            if (lane % 2 == 0) own[row] = found;
            bar_arrive(6, 256);
            if (t.n == 0 && lane % 2 == 0 && m < M) {
                row0[m] = found.x;
                if (row1) row1[m] = found.y;
            }
            count = 0;
        }
#endif
#if EIGHT
        alpha = *row2 * *row3;
#endif
        Pairs pairs = {};
        if (EARLY || TWICE) pairs = Pairs(sync, SIDE == TILES ? M * work.tiles_n : M);

        for (int id = start; id < count; next(id), turn++) {
            int steps = steps_of(t.split);
            if (PINGPONG && turn % 2 != group) {
                ring.skip(steps);
                continue;
            }
            // what the epilogue will need starts its way before the multiplication
            float cv[2][(BN + SHARERS - 1) / SHARERS];
            auto load_columns = [&] {
                UNROLLED for (int i = 0; i < (BN + SHARERS - 1) / SHARERS; i++) {
                    int at = column + i * SHARERS, n = t.n + at;
                    bool in = at < BN && n < N;
                    cv[0][i] = EPI_COLS > 1 && in ? to_float(col0[n]) : 0.0f;
                    cv[1][i] = EPI_COLS > 0 && in ? to_float(col1[n]) : 0.0f;
                }
            };
            if (!BIG && !ALONE) load_columns();
            // until the epilogue each lane keeps one of the warp's rows, `mine`
            Row rows[MI][2], mine = {};
            int rm = t.m + wrow + lane % (16 * MI) / 16 * 64 + lane % 16;
            if (rm < M) {
#if PARTS  // of equal counts, so the means are averaged
                float2 of[PARTS];
                float mu = 0, m2 = 0;
                UNROLLED for (int u = 0; u < PARTS; u++) of[u] = ((const float2*)part)[(i64)u * M + rm];
                UNROLLED for (int u = 0; u < PARTS; u++) mu += of[u].x * (1.0f / PARTS);
                UNROLLED for (int u = 0; u < PARTS; u++) m2 += of[u].y + (of[u].x - mu) * (of[u].x - mu) * (K / PARTS);
                mine = {rsqrtf(m2 / K + epsilon), mu};
                if (t.n == 0) row0[rm] = mine.r0, row1[rm] = mu;
#else
                if (EPI_ROWS > 0 && !EARLY && !ALONE) mine.r0 = to_float(row0[rm]);
                if (EPI_R1 && !EARLY && !ALONE) mine.r1 = to_float(row1[rm]);
                if (EPI_R2 && !TWICE) mine.r2 = to_float(row2[rm]);
                if (EPI_ROWS > 3 && !TWICE) mine.r3 = to_float(row3[rm]);
                if (EARLY) pairs.get(rm, mine.r0, mine.r1);
#endif
            }
            auto need_rows = [&](int i) {
                if (EARLY)  // what a side warp had not written then
                    while (rm < M && !(__float_as_uint(mine.r0) | __float_as_uint(mine.r1)))
                        pairs.get(rm, mine.r0, mine.r1);
                if (EARLY) __syncwarp();
                if (ALONE) {
                    bar_sync(6, 256);
                    mine.r0 = own[wrow + lane % 16].x, mine.r1 = own[wrow + lane % 16].y;
                }
                UNROLLED for (int h = 0; h < 2; h++) {
                    int from = i * 16 + h * 8 + lane / 4;
                    rows[i][h] = {EPI_ROWS > 0 ? __shfl_sync(~0u, mine.r0, from) : 0.0f,
                                  EPI_R1 ? __shfl_sync(~0u, mine.r1, from) : 0.0f,
                                  EPI_R2 && !TWICE ? __shfl_sync(~0u, mine.r2, from) : 0.0f,
                                  EPI_ROWS > 3 && !TWICE ? __shfl_sync(~0u, mine.r3, from) : 0.0f};
                }
            };
            // exchange row sums between the CTAs of the row, and add them: r2, r3
            auto exchange = [&](float2 (&sums)[MI][2]) {
                UNROLLED for (int i = 0; i < MI; i++)
                    UNROLLED for (int h = 0; h < 2; h++) {
                        float2& sum = sums[i][h];
                        UNROLLED for (int step = 1; step < 4; step *= 2) {
                            sum.x += __shfl_xor_sync(~0u, sum.x, step);
                            sum.y += __shfl_xor_sync(~0u, sum.y, step);
                        }
                        int m = t.m + wrow + i * 64 + h * 8 + lane / 4;
                        if (lane % 4 == 0 && m < M) pairs.put(t.n / BN * M + m, sum.x, sum.y);
                    }
                // a lane adds up one row, then each fetches the rows it needs
                int row = lane % (16 * MI), m = t.m + wrow + row / 16 * 64 + row % 16;
                float2 total = {};
                if (m < M)
                    for (int first = 0; first < work.tiles_n; first += 4) {
                        float2 term[4];
                        bool have[4];
                        UNROLLED for (int u = 0; u < 4; u++) {
                            term[u] = {};
                            have[u] = first + u >= work.tiles_n || pairs.get((first + u) * M + m, term[u].x, term[u].y);
                        }
                        UNROLLED for (int u = 0; u < 4; u++) {
                            while (!have[u])
                                have[u] = pairs.get((first + u) * M + m, term[u].x, term[u].y);
                            total.x += term[u].x;
                            total.y += term[u].y;
                        }
                    }
                __syncwarp();
                UNROLLED for (int i = 0; i < MI; i++)
                    UNROLLED for (int h = 0; h < 2; h++) {
                        int from = i * 16 + h * 8 + lane / 4;
                        if (EPI_R2) rows[i][h].r2 = __shfl_sync(~0u, total.x, from) / N;
                        rows[i][h].r3 = __shfl_sync(~0u, total.y, from) / N;
                    }
            };
            auto load_c = [&](int box) {  // box = block * FULL + 64-column block, by lane 0
                mbarrier_expect(cbar + c_load * 8, BOX);
                tma_load(cin + c_load * BOX, map_c, cbar + c_load * 8, t.n + box % FULL * 64,
                         t.m + wrow + box / FULL % MI * 64, t.batch);
            };
#if STREAM
            bool ends = t.split + steps == all_steps;
            if (C_BOXES && ends) {
#else
            if (C_BOXES) {
#endif
                __syncwarp();
                UNROLLED for (int box = 0; box < C_BOXES; box++) {
                    if (lane == 0) load_c(box);
                    c_load = (c_load + 1) % (C_BOXES ? C_BOXES : 1);
                }
            }

            float acc[MI][BN / 2];
#if EIGHT
            if (PINGPONG) bar_sync(2 + group, 256);
            UNROLLED for (int i = 0; i < MI; i++)
                UNROLLED for (int e = 0; e < BN / 2; e++) acc[i][e] = 0;
            ROLLED for (int step = 0; step < steps; step++, ring.next()) {
                u32 a = base + ring.s * STAGE_BYTES + (PINGPONG ? 0 : group * MI * 8192);
                u32 b = base + ring.s * STAGE_BYTES + A_BYTES;
                ring.await();
                UNROLLED for (int i = 0; i < MI; i++)
                    UNROLLED for (int at = 0; at < BN; at += PART) {
                        float sum[PART / 2];
                        wgmma_fence();
                        UNROLLED for (int q = 0; q < 4; q++)
                            WgmmaAlongK<EIGHT, PART>::run(
                                sum, wgmma_descriptor<true>(a + i * 8192 + q * 32),
                                wgmma_descriptor<true>(b + at * 128 + q * 32), q);
                        wgmma_commit();
                        wgmma_wait<0>();
                        wgmma_hold(sum);
                        UNROLLED for (int e = 0; e < PART / 2; e++) acc[i][at / 2 + e] += sum[e];
                    }
                ring.release(lane);
            }
            if (PINGPONG) bar_arrive(3 - group, 256);
#else
            if (PINGPONG) bar_sync(2 + group, 256);
            ring.template multiply<BIG>(steps, lane, [&](int s, bool more) {
                u32 a = base + s * STAGE_BYTES + (PINGPONG ? 0 : group * MI * 8192);
                u32 b = base + s * STAGE_BYTES + A_BYTES;
                ring.await();
                wgmma_fence();
                UNROLLED for (int q = 0; q < BK / 16; q++) {
                    u64 db = wgmma_descriptor<TRANS_B>(b + q * (TRANS_B ? 32 : 2048));
                    UNROLLED for (int i = 0; i < MI; i++)
                        Wgmma<T, BN, TRANS_A, !TRANS_B>::run(
                            acc[i],
                            wgmma_descriptor<!TRANS_A>(a + i * 8192 + q * (TRANS_A ? 2048 : 32)), db, more || q);
                }
            });
            if (PINGPONG) bar_arrive(3 - group, 256);
            wgmma_wait<0>();
            ring.release_before(lane);
#endif
#if STREAM
            if (!ends) {
                leave_sums<256>(shared_sums, sync, me, acc);
                continue;
            }
            if (t.split)
                for (int cta = blockIdx.x; cta > 0; cta--) {
                    add_sums<256>(shared_sums, sync, cta - 1, me, acc);
                    if (first_step(work.count() * all_steps, cta - 1) <= tile * all_steps) break;
                }
            t.split = 0;  // its place in y
#endif

            if (EPI_COLS && !ALONE) {
                if (BIG) load_columns();
                bar_sync(4 + (PINGPONG ? group : 0), SHARERS);  // the last tile's readers are done
                UNROLLED for (int i = 0; i < (BN + SHARERS - 1) / SHARERS; i++) {
                    int at = column + i * SHARERS;
                    if (at < BN) {
                        columns[at] = cv[1][i];
                        if (EPI_COLS > 1) columns[BN + at] = cv[0][i];
                    }
                }
                bar_sync(4 + (PINGPONG ? group : 0), SHARERS);
            }
            float2 sums[MI][2] = {};  // over this tile's columns: acc, acc (c - mean) rstd
            UNROLLED for (int pass = TWICE ? 0 : 1; pass < 2; pass++) {
            UNROLLED for (int i = 0; i < MI; i++) {
                if (EPI_ROWS && (pass == 0 || !TWICE)) need_rows(i);
                Dots dots[2] = {};
                struct { float shift, sum, square; } of[2] = {};  // MOMENTS, of two rows
                int m = t.m + wrow + i * 64;
                UNROLLED for (int j = 0; j < BOXES; j++) {
                    bool plain = DIRECT || j >= FULL;  // a narrow block goes by plain stores
                    if (C_BOXES && !plain) mbarrier_wait(cbar + c_slot * 8, c_phase);
                    int half = PAIRED ? (i * FULL + j) % 2 : GATE ? j % 2 : 0;  // of what is stored at once
                    u32 to = out + (out_slot * (BOTH || PAIRED ? 2 : 1) + (PAIRED ? half : 0)) * BOX, toz = to + BOX;
                    u32 kept[2];  // GATE: y of the 16 columns before
                    if (!plain && !half) {  // the store that last used this slot has read it
                        if (lane == 0) tma_store_wait_read<OUT_SLOTS - 1>();
                        __syncwarp();
                    }
                    float2 k0[4][2] = {}, k1[4][2] = {};
                    auto read_columns = [&](int q) {
                        UNROLLED for (int e = 0; e < 2; e++) {
                            int nn = j * 64 + q * 16 + lane % 4 * 2 + e * 8;
                            if (EPI_COLS > 0) k1[q][e] = *(float2*)&columns[nn];
                            if (EPI_COLS > 1) k0[q][e] = *(float2*)&columns[BN + nn];
                        }
                    };
                    read_columns(0);
                    UNROLLED for (int q = 0; q < 4 && j * 64 + q * 16 < BN; q++) {
                        if (EVEN) __syncwarp();  // or ptxas would load far ahead, and spill
                        int n = j * 64 + q * 16 + lane % 4 * 2;  // and n + 8, in the tile
                        u32 swizzled = brow * 128 + (((q * 2 + bchunk) ^ (brow & 7)) << 4);
                        u32 cr[4];
                        if (C_BOXES && !plain) ldmatrix_x4(cr, cin + c_slot * BOX + swizzled);
                        u32 packed[4], packed_z[4];
                        float2 cs[4] = {}, zs[4] = {};
                        float vs[8], slope[8];
                        // e: row lane/4 + 8 (e%2), columns + 8 (e/2)
                        UNROLLED for (int e = 0; e < 4; e++) {
                            int h = e % 2, nn = n + e / 2 * 8;
                            float2 v = {acc[i][j * 32 + q * 8 + e / 2 * 4 + h * 2],
                                        acc[i][j * 32 + q * 8 + e / 2 * 4 + h * 2 + 1]};
                            float2 &cc = cs[e], &zz = zs[e];
                            int gm = m + h * 8 + lane / 4, gn = t.n + nn;
                            i64 at = ((i64)t.batch * M + gm) * N + gn;
                            bool in = gm < M && gn < N, both = in && gn + 1 < N;
                            if (EPI_OPERAND && plain) {
                                if (EVEN && in) cc = *(const float2*)(c + at);
                                if (!EVEN && in) cc.x = to_float(c[at]);
                                if (!EVEN && both) cc.y = to_float(c[at + 1]);
                            }
#if EPI_OPERAND && !DIRECT
                            if (!plain) cc = unpack2<TO>(cr[e]);
#endif
                            if (pass == 0) {
                                zz.x = (cc.x - rows[i][h].r1) * rows[i][h].r0;
                                zz.y = (cc.y - rows[i][h].r1) * rows[i][h].r0;
                                sums[i][h].x += v.x + v.y;
                                sums[i][h].y += v.x * zz.x + v.y * zz.y;
                                v = zz;
                            } else {
                                v.x = before_act(v.x, rows[i][h], k0[q][e / 2].x, k1[q][e / 2].x, cc.x, alpha,
                                                 beta, zz.x);
                                v.y = before_act(v.y, rows[i][h], k0[q][e / 2].y, k1[q][e / 2].y, cc.y, alpha,
                                                 beta, zz.y);
                            }
#if EPI_EXP
                            if (t.n + BN > N) v.x = gn < N ? v.x : 0.0f, v.y = gn + 1 < N ? v.y : 0.0f;
#endif
                            vs[e * 2] = v.x, vs[e * 2 + 1] = v.y;
                            slope[e * 2] = cc.x, slope[e * 2 + 1] = cc.y;
                        }
                        // before stmatrix, which no read of shared memory passes
                        if (q < 3 && j * 64 + q * 16 + 16 < BN) read_columns(q + 1);
#if GATE
                        float gate[4] = {vs[0], vs[2], vs[4], vs[6]};
                        activate_all(gate, gate, act_alpha);
                        UNROLLED for (int h = 0; h < 2; h++) {
                            float2 v = {gate[h] * vs[h * 2 + 1], gate[h + 2] * vs[h * 2 + 5]};
                            int gm = m + h * 8 + lane / 4, gn = (t.n + j * 64) / 2 + q * 8 + lane % 4 * 2;
                            if (DIRECT && gm < M && gn < N / 2) {
                                Vec<TO, 2> both = {from_float<TO>(v.x), from_float<TO>(v.y)};
                                store<2>(y + (i64)gm * (N / 2) + gn, both);
                            }
#if !DIRECT
                            packed[h] = pack2<TO>(v.x, v.y);
#endif
                        }
                        if (!DIRECT && q % 2) {
                            u32 where = brow * 128 + (((half * 4 + q - 1 + bchunk) ^ (brow & 7)) << 4);
                            stmatrix_x4(to + where, kept[0], kept[1], packed[0], packed[1]);
                        }
                        kept[0] = packed[0], kept[1] = packed[1];
                        continue;
#endif
                        if (plain || !PACKED_ACT) activate_all(vs, slope, act_alpha);
#ifdef SAVE_ACT
                        activate<TO>(slope, act_alpha);
                        UNROLLED for (int e = 0; e < 4; e++) zs[e] = {slope[e * 2], slope[e * 2 + 1]};
#endif
#if EPI_DW == 2
                        Dots down[2][2] = {};  // of two columns and the two 8 behind
#endif
                        UNROLLED for (int e = 0; e < 4; e++) {
                            int h = e % 2, nn = n + e / 2 * 8;
                            int gm = m + h * 8 + lane / 4, gn = t.n + nn;
                            i64 at = ((i64)t.batch * M + gm) * N + gn;
                            bool in = gm < M && gn < N, both = in && gn + 1 < N;
                            float2 v = {vs[e * 2], vs[e * 2 + 1]}, &zz = zs[e];
                            if (pass > 0) {
                                v.x = after_act(v.x, rows[i][h], k0[q][e / 2].x, k1[q][e / 2].x, cs[e].x, zz.x, DOTS_X);
                                v.y = after_act(v.y, rows[i][h], k0[q][e / 2].y, k1[q][e / 2].y, cs[e].y, zz.y, DOTS_Y);
                            }
                            if (plain) {
                                at += (i64)t.split * M * N;
                                TO* into = pass == 0 ? z : y;
#if PAIRS
                                if (in && ((u64)y & 7) == 0) leave_two(into + at, v), in = false, both = false;
#endif
                                if (EVEN && !ACCUMULATE) {
                                    if (in) *(float2*)(into + at) = v;
                                } else if (in) {
                                    leave(into, at, v.x, pass);
                                    if (SAVE_Z && !TWICE) z[at] = from_float<TO>(zz.x);
                                }
                                if (both && (!EVEN || ACCUMULATE)) {
                                    leave(into, at + 1, v.y, pass);
                                    if (SAVE_Z && !TWICE) z[at + 1] = from_float<TO>(zz.y);
                                }
                            }
#if !DIRECT
                            packed[e] = pack2<TO>(v.x, v.y);
                            if (PACKED_ACT) packed[e] = gelu_f16x2(packed[e]);
                            if (SAVE_Z && !TWICE) packed_z[e] = pack2<TO>(zz.x, zz.y);
#endif
#if EPI_EXP  // of the values as they are stored
                            v = unpack2<TO>(packed[e]);
                            of[h].sum += v.x + v.y;
#endif
#if MOMENTS  // of the values as they are stored, about the row's first
                            v = unpack2<TO>(packed[e]);
                            if (j == 0 && q == 0 && e < 2)
                                of[h].shift = __shfl_sync(~0u, v.x, lane & ~3);
                            v.x -= of[h].shift, v.y -= of[h].shift;
                            of[h].sum += v.x + v.y;
                            of[h].square += v.x * v.x + v.y * v.y;
#endif
                        }
#if EPI_DW == 2  // sums of the warp's 16 rows
                        UNROLLED for (int e = 0; e < 2; e++) {
                            float sum[4] = {down[e][0].gamma, down[e][1].gamma, down[e][0].beta, down[e][1].beta};
                            UNROLLED for (int at = 0; at < 4; at++)
                                UNROLLED for (int step = 4; step < 32; step *= 2)
                                    sum[at] += __shfl_xor_sync(~0u, sum[at], step);
                            int gn = t.n + n + e * 8;
                            float* to_part = part + (i64)(m / 16) * 2 * N + gn;
                            if (lane < 4 && m < M && gn < N) {
                                *(float2*)to_part = {sum[0], sum[1]};
                                *(float2*)(to_part + N) = {sum[2], sum[3]};
                            }
                        }
#endif
                        if (!plain) {
                            stmatrix_x4(to + swizzled, packed[0], packed[1], packed[2], packed[3]);
                            if (SAVE_Z && !TWICE)
                                stmatrix_x4(toz + swizzled, packed_z[0], packed_z[1], packed_z[2], packed_z[3]);
                        }
                    }
#if COLUMN_MOMENTS
                    __syncwarp();  // the warp's 16 rows are whole
                    box_moments(smem + (to - base), lane, M - m, boxes[warp - 4].sums + j * 64,
                                boxes[warp - 4].from + j * 64);
#endif
                    if (!plain && (half || !(PAIRED || GATE))) {
                        fence_proxy_async();
                        __syncwarp();
                        if (lane == 0) {
                            auto give = [&](u32 from, int n, int m) {
                                if (ACCUMULATE && pass > 0) tma_add(map_y, from, n, m, t.batch);
                                else if (GAPS) store_pixels(map_y, from, n, m, PIXELS_OF_Y);
                                else tma_store(pass == 0 ? map_z : map_y, from, n, m, t.batch);
                            };
                            if (GATE) give(to, (t.n + (j - 1) * 64) / 2, m);
                            else {
                            if (PAIRED) give(to - BOX, t.n + (j ? j - 1 : FULL - 1) * 64, j ? m : m - 64);
                            give(to, t.n + j * 64, m);
                            if (SAVE_Z && !TWICE) tma_store(map_z, toz, t.n + j * 64, m, t.batch);
                            }
                            tma_store_commit();
                        }
                        out_slot = (out_slot + 1) % OUT_SLOTS;
                    }
                    if (C_BOXES && !plain) {
                        __syncwarp();
                        if (++c_slot == C_BOXES) c_slot = 0, c_phase ^= 1;
                        int next = ((TWICE ? pass * MI : 0) + i) * FULL + j + C_BOXES;
                        if (next < (TWICE ? 2 : 1) * MI * FULL) {
                            if (lane == 0) load_c(next);
                            c_load = (c_load + 1) % (C_BOXES ? C_BOXES : 1);
                        }
                    }
                }
#if COLUMN_MOMENTS
                bar_sync(7 + group, 128);
                const int first = m - warp % 4 * 16;  // of the warpgroup's 64 rows
                merge_boxes(boxes + group * 4, me % 128, M - first, N - t.n,
                            (float2*)part + (i64)(first / 64) * N + t.n);
                bar_sync(7 + group, 128);
#endif
#if EPI_EXP
                UNROLLED for (int h = 0; h < 2; h++) {
                    float sum = quad_sum(of[h].sum);
                    int gm = m + h * 8 + lane / 4;
                    if (lane % 4 == 0 && gm < M) part[(i64)(t.n / BN) * M + gm] = sum;
                }
#endif
                if (MOMENTS) {
                    UNROLLED for (int h = 0; h < 2; h++) {
                        float sum = quad_sum(of[h].sum), over = sum * (1.0f / BN);
                        float m2 = max_nan(fmaf(-sum, over, quad_sum(of[h].square)), 0.0f);
                        int gm = m + h * 8 + lane / 4;
                        if (lane % 4 == 0 && gm < M)
                            ((float2*)part)[(i64)(t.n / BN) * M + gm] = {of[h].shift + over, m2};
                    }
                }
#if EPI_DW != 2
                if (EPI_DW) {
                    UNROLLED for (int h = 0; h < 2; h++) {
                        int gm = m + h * 8 + lane / 4;
                        float sum[2] = {dots[h].gamma, dots[h].beta};
                        UNROLLED for (int which = 0; which < 2; which++) {
                            sum[which] += __shfl_xor_sync(~0u, sum[which], 1);
                            sum[which] += __shfl_xor_sync(~0u, sum[which], 2);
                            if (lane % 4 == 0 && gm < M)
                                part[(i64)(t.n / BN * 2 + which) * M + gm] = sum[which];
                        }
                    }
                }
#endif
            }
            if (pass == 0) exchange(sums);
            }
        }
        if (!DIRECT && lane == 0) tma_store_wait_read<0>();  // a block's memory is there while it is read
        if (EARLY || TWICE) side_done(sync, gridDim.x * 11);
    }
    // a CTA's barriers and tiles are the other's too, until both are through
    if (CLUSTER > 1) cluster_sync();
}
