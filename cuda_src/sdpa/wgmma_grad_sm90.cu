// sdpa/wgmma_grad_sm90.cu: dq, dk, dv of attention in 16-bit floats on Hopper: TMA, wgmma.
// Idea     : A block owns 64 WGS rows of one side and walks over tiles of TILE rows of the other side,
//            which TMA keeps STAGES deep in flight. KEYS: it owns keys and values, walks over the queries
//            and dy of each head of its group, and makes dk and dv of transposed tiles. Else it owns
//            queries and dy, walks over keys and values, and makes dq. A tile's logits are computed once
//            more in both. Probabilities and their gradients stay in registers, where they are the second
//            products' operand; a tile in shared memory is the operand of a product and, read the other
//            way, of the one behind it. A product of the next tile runs before a tile is released.
// Inputs   : q, k, v, dy by 4-D TMA [D, rows, heads, batch] in any order of memory, zeros past their ends;
//            y by its strides; lse; MASK 1: a row a query, by TMA too (0 strides: size 1);
//            MASK 2: one row, by its strides. One mask at most, which is added or (KEEP) selects.
// Outputs  : without KEYS, which comes first, dq, and in `rows` of [B, H, padded S] what KEYS makes
//            probabilities with; then dk, dv. By TMA in any order of memory.
// Macros   : operands.cuh's (PACKED: no mask and no window; boxes count rows from a sequence's first, and results have
//            strides for tiles that end within one); WINDOW (a query sees `left` keys before its own and `right` behind it); KEYS, WGS, TILE (64), STAGES, BLOCKS (an SM's).
// Launch   : grid (blocks of 64 WGS rows, heads of the owned side, batch; PACKED: heads, sequences, blocks), 128 WGS threads.
// Numerics : f32 accumulate; probabilities and their gradients rounded to T as operands; bits depend on
//            TILE alone.
// Bound    : tensor core, with half as many cycles of exp beside it at a head size of 64.
#include "sdpa/wgmma_grad.cuh"
#ifndef WINDOW
#define WINDOW 0
#endif
#if WINDOW
#define REACH_ , int left, int right
#else
#define REACH_
#endif
#if PACKED
#define PACKED_ , const int *offsets, int all, T *out1, i64 head1, i64 row1, T *out2, i64 head2, i64 row2
#define LSE_ROW (i64)own_head * all + start
#else
#define PACKED_
#define LSE_ROW head * queries
#endif

constexpr int KD = (D + 63) / 64, VD = (DV + 63) / 64;  // boxes of 64 columns, 128 bytes a row
constexpr int OWN_BYTES = (KD + VD) * BOX, THREADS = WGS * 128;

// What a query's logits are made probabilities with, and the sum of dy y: for the rows of a tile one after
// the other its level in units of log 2, or its largest logit and (SPREAD) the log of its sum, then DELTA.
constexpr int SPREAD = 1, DELTA = NATURAL ? 2 : 1, NUMBERS = DELTA + 1;

// a tile of q or k, of dy or v, of the mask, and (KEYS) its rows
constexpr int FIRST_BYTES = KD * TILE * 128, SECOND_BYTES = VD * TILE * 128;
constexpr int MASK_BYTES = MASK == 1 ? WGS * TILE * 128 : 0, ROW_BYTES = KEYS ? TILE * NUMBERS * 4 : 0;
constexpr int STAGE_AT = WGS * OWN_BYTES, STAGE_BYTES = FIRST_BYTES + SECOND_BYTES + MASK_BYTES;
constexpr int ROWS_AT = STAGE_AT + STAGES * STAGE_BYTES, BAR_AT = ROWS_AT + STAGES * ROW_BYTES;
static_assert(TILE == 64, "what a mask drops are 32 bits a thread");

// own1, own2, first, second: k, v, q, dy, or q, dy, k, v; out1, out2: dk, dv, or dq and nothing.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) sdpa_gradients(
    const __grid_constant__ TensorMap map_own1, const __grid_constant__ TensorMap map_own2,
    const __grid_constant__ TensorMap map_first, const __grid_constant__ TensorMap map_second,
    const __grid_constant__ TensorMap map_out1, const __grid_constant__ TensorMap map_out2,
    const __grid_constant__ TensorMap map_mask, const T* mask, i64 mask_batch, i64 mask_head, i64 mask_column,
    const T* y, i64 y_batch, i64 y_head, i64 y_row, const float* lse, float* rows, int group, int queries, int keys,
    int padded, float scale, float floor, double fill REACH_ PACKED_) {
    extern __shared__ __align__(1024) u8 smem[];
    const u32 base = smem_address(smem), own_full = base + BAR_AT, full = own_full + 8, empty = full + STAGES * 8;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, wg = warp / 4;
    if (threadIdx.x == 0) {
        mbarrier_init(own_full, 1);
        Ring<STAGES>(full, true).set_up(WGS * 4 * WARP_ARRIVALS);
        fence_barrier_init();
    }
    if (warp == 0 && elect()) {
        tma_prefetch(map_own1);
        tma_prefetch(map_own2);
        tma_prefetch(map_first);
        tma_prefetch(map_second);
        tma_prefetch(map_out1);
        if (KEYS) tma_prefetch(map_out2);
        if (MASK == 1) tma_prefetch(map_mask);
    }
    __syncthreads();
    after_previous_launch();

    // the last queries of a causal problem have the most keys: they start first
#if PACKED  // all sequences' blocks of one place together, since most have few
    const int at = blockIdx.z, last = gridDim.z - 1, own_head = blockIdx.x, b = blockIdx.y, count = gridDim.x;
#else
    const int at = blockIdx.x, last = gridDim.x - 1, own_head = blockIdx.y, b = blockIdx.z, count = gridDim.y;
#endif
    const int first = (CAUSAL && !KEYS ? last - at : at) * (WGS * 64), mine = first + wg * 64;
    const int heads = KEYS ? count * group : count;
#if PACKED
    const int batch = 0, start = offsets[b];  // the sequence's first row
    const bool none = b + 1 == gridDim.y;     // rows behind the last sequence
    queries = keys = (none ? all : offsets[b + 1]) - start;
    if (first >= queries) return;
    if (none) (KEYS ? queries : keys) = 0;
#else
    const int batch = b, start = 0;
#endif
#if WINDOW  // rows of the other side from `before` ahead of an own row to `behind` it
    const int before = KEYS ? right : left, beyond = KEYS ? left : right;
    const int begin = max(0, first - before) / TILE * TILE, end = min(KEYS ? queries : keys, first + WGS * 64 + beyond);
#else
    const int begin = KEYS && CAUSAL ? first : 0;
    const int end = KEYS ? queries : CAUSAL ? min(keys, first + WGS * 64) : keys;
#endif
    const int tiles = max(0, (end - begin + TILE - 1) / TILE), steps = KEYS ? tiles * group : tiles;

    // KEYS: all tiles of the first head of queries, then of the second
    auto head_of = [&](int j) { return !KEYS ? own_head / group : own_head * group + (group > 1 ? j / tiles : 0); };
    // by all lanes of the first warp: tile j to its stage
    auto fetch = [&](int j) {
        if (!elect()) return;
        const int s = j % STAGES, h = head_of(j), t = begin + (KEYS ? j - (h - own_head * group) * tiles : j) * TILE;
        const u32 bar = full + s * 8, to = base + STAGE_AT + s * STAGE_BYTES;
        mbarrier_expect(bar, STAGE_BYTES + ROW_BYTES);
        for (int c = 0; c < KD; c++) tma_load(to + c * (TILE * 128), map_first, bar, c * 64, start + t, h, batch);
        for (int c = 0; c < VD; c++) tma_load(to + FIRST_BYTES + c * (TILE * 128), map_second, bar, c * 64, start + t, h, batch);
        if (MASK == 1)
            for (int i = 0; i < WGS; i++)
                tma_load(to + FIRST_BYTES + SECOND_BYTES + i * (TILE * 128), map_mask, bar, KEYS ? first + i * 64 : t,
                         KEYS ? t : first + i * 64, mask_head ? (KEYS ? h : own_head) : 0, mask_batch ? b : 0);
        if (KEYS) bulk_load(base + ROWS_AT + s * ROW_BYTES, rows + (((i64)b * heads + h) * padded + t) * NUMBERS, ROW_BYTES, bar);
    };
    if (warp == 0) {
        if (elect()) {
            mbarrier_expect(own_full, WGS * OWN_BYTES);
            for (int i = 0; i < WGS; i++) {
                const u32 to = base + i * OWN_BYTES;
                for (int c = 0; c < KD; c++) tma_load(to + c * BOX, map_own1, own_full, c * 64, start + first + i * 64, own_head, batch);
                for (int c = 0; c < VD; c++) tma_load(to + (KD + c) * BOX, map_own2, own_full, c * 64, start + first + i * 64, own_head, batch);
            }
        }
        for (int j = 0; j < STAGES && j < steps; j++) fetch(j);
        __syncwarp();
    }

    const u32 own1 = base + wg * OWN_BYTES, own2 = own1 + KD * BOX;
    float s[TILE / 2], dp[TILE / 2], acc1[KD * 32] = {}, acc2[VD * 32] = {};
    u32 p[TILE / 4], ds[TILE / 4], dropped = 0;
    const int row = mine + warp % 4 * 16 + lane / 4;  // the thread's, and 8 below
    const float power = scale * LOG2E;
    Operands o = {};  // for logit and slope
    o.scale = scale, o.floor = floor, o.fill = fill;
    float own_rows[2][NUMBERS];  // of queries

    // Whether no own row of the warpgroup meets one of the tile.
#if WINDOW
    auto hidden = [&](int t) {
        return mine >= (KEYS ? keys : queries) || t + TILE <= mine - before || t > mine + 63 + beyond;
    };
#else
    auto hidden = [&](int t) {
        return mine >= (KEYS ? keys : queries) || (CAUSAL && (KEYS ? t + TILE <= mine : t > mine + 63));
    };
#endif
    auto wait_full = [&](int j) { mbarrier_wait(full + j % STAGES * 8, j / STAGES & 1); };
    // Tile j is read. The one before it is, by all warps or soon: its stage takes the next tile.
    auto release = [&](int j) {
        __syncwarp();
        if (arrives(lane)) mbarrier_arrive(empty + j % STAGES * 8);
        if (warp == 0 && j > 0 && j - 1 + STAGES < steps) {
            mbarrier_wait(empty + (j - 1) % STAGES * 8, (j - 1) / STAGES & 1);
            fetch(j - 1 + STAGES);
        }
    };
    // rows of y and of lse are on their way beside the block's own
    Vec<T, 8> ys[2][VD * 2];
    float2 levels[2];
    const i64 head = (i64)b * heads + own_head;
    UNROLLED for (int i = 0; !KEYS && i < 2; i++) {
        const int r = row + 8 * i;
        levels[i] = make_float2(-NEGATIVE_INFINITY, 0);  // past the last row: no probabilities
        if (r >= queries) continue;
        UNROLLED for (int n = 0; n < VD * 2; n++)  // 16 bytes each
            if (const int k = n * 4 + lane % 4; k * 8 < DV)
                ys[i][n] = load<8>(y + b * y_batch + own_head * y_head + (start + r) * y_row + k * 8);
        levels[i] = ((const float2*)lse)[LSE_ROW + r];
    }
    mbarrier_wait(own_full, 0);
    UNROLLED for (int i = 0; !KEYS && i < 2; i++) {
        const int r = row + 8 * i;
        float sum = 0;
        UNROLLED for (int n = 0; n < VD * 2; n++) {
            const int k = n * 4 + lane % 4;
            if (r >= queries || k * 8 >= DV) continue;
            const auto two = load<8>((const T*)(smem + (own2 - base) + k / 8 * BOX + r % 64 * 128 + ((k % 8 ^ r % 8) << 4)));
            UNROLLED for (int e = 0; e < 8; e++) sum += to_float(ys[i][n].at[e]) * to_float(two.at[e]);
        }
        float2 l = levels[i];
        if (GUARD && l.y != l.y) l = make_float2(-NEGATIVE_INFINITY, 0);
        own_rows[i][0] = NATURAL ? l.x : (l.x + l.y) * LOG2E;
        if (NATURAL) own_rows[i][SPREAD] = l.y;
        own_rows[i][DELTA] = quad_sum(sum);
        float* to = rows + (head * padded + r / TILE * TILE) * NUMBERS + r % TILE;
        UNROLLED for (int n = 0; n < NUMBERS; n++)
            if (lane % 4 == 0 && r < padded) to[n * TILE] = own_rows[i][n];
    }
    wgmma_hold(acc1);
    wgmma_hold(acc2);
    bool behind = false;  // the products of the tile before may still run
    for (int j = 0, t = begin; j < steps; j++, t = KEYS && t + TILE >= end ? begin : t + TILE) {
        const int stage = j % STAGES;
#if PACKED
        if (const int past = t + TILE - end; past > 0) {
            wait_full(j);
            clear_rows<KD + VD, THREADS>(smem + STAGE_AT + stage * STAGE_BYTES, TILE, past);
        }
#endif
        if (hidden(t)) {
            wgmma_wait<0>();
            if (behind) release(j - 1);
            behind = false;
            wait_full(j);
            release(j);
            continue;
        }
        const u32 tile1 = base + STAGE_AT + stage * STAGE_BYTES, tile2 = tile1 + FIRST_BYTES;
        const float* tile_rows = (const float*)(smem + ROWS_AT + stage * ROW_BYTES) + lane % 4 * 2;
        wait_full(j);
        dots<D>(s, wgmma_low<true>(own1), wgmma_low<true>(tile1));
        wgmma_wait<1>();
        if (behind) release(j - 1);
        behind = true;
        dots<DV>(dp, wgmma_low<true>(own2), wgmma_low<true>(tile2));
        wgmma_wait<1>();
        wgmma_hold(s);
        if (KEEP) dropped = 0;
        UNROLLED for (int q = 0; q < TILE / 16; q++) {
            u32 m[4] = {};
            if (MASK == 1) {
                const u32 from = tile2 + SECOND_BYTES + wg * (TILE * 128);
                if (KEYS)
                    ldmatrix_x4_trans(m, from + q * 2048 + (lane / 16 * 8 + lane % 8) * 128 +
                                             ((warp % 4 * 2 + lane / 8 % 2 ^ lane % 8) << 4));
                else
                    ldmatrix_x4(m, from + warp % 4 * 2048 + lane % 16 * 128 + ((q * 2 + lane / 16 ^ lane % 8) << 4));
            }
            if (MASK == 2) {
                const T* from = mask + b * mask_batch + (KEYS ? head_of(j) : own_head) * mask_head;
                UNROLLED for (int e = 0; e < 4; e++)
                    if (KEYS) {
                        const u32 one = from[min(row + e % 2 * 8, keys - 1) * mask_column].bits;
                        m[e] = one | one << 16;
                    } else {
                        const int key = t + q * 16 + e / 2 * 8 + lane % 4 * 2;
                        m[e] = from[min(key, keys - 1) * mask_column].bits | (u32)from[min(key + 1, keys - 1) * mask_column].bits << 16;
                    }
            }
            UNROLLED for (int n = 0; n < 2; n++) {
                float2 top, spread;
                if (KEYS) top = *(const float2*)(tile_rows + q * 16 + n * 8);
                if (KEYS && NATURAL) spread = *(const float2*)(tile_rows + SPREAD * TILE + q * 16 + n * 8);
                UNROLLED for (int e = 0; e < 4; e++) {
                    const float level = !KEYS ? own_rows[e / 2][0] : e % 2 ? top.y : top.x;
                    float& x = s[q * 8 + n * 4 + e];
#if NATURAL
                    const float2 pair = unpack2<T>(m[n * 2 + e / 2]);
                    const float by = e % 2 ? pair.y : pair.x;
                    if (KEEP && by == 0) dropped |= 1u << (q * 8 + n * 4 + e);
                    const float more = !KEYS ? own_rows[e / 2][SPREAD] : e % 2 ? spread.y : spread.x;
                    x = power2((logit(o, x, by, 0.0f) - level - more) * LOG2E);
#else
                    x = power2(x * power - level);
#endif
                    if (GUARD && level == -NEGATIVE_INFINITY) x = 0;
                }
            }
        }
#if WINDOW
        if ((!KEYS && t + TILE > keys) || t < mine + 63 - before || t + TILE > mine + 1 + beyond) {
            UNROLLED for (int i = 0; i < TILE / 2; i++) {
                const int mine_ = row + i / 2 % 2 * 8, other = t + i / 4 * 8 + lane % 4 * 2 + i % 2;
                if ((!KEYS && other >= keys) || other < mine_ - before || other > mine_ + beyond) s[i] = 0;
            }
        }
#else
        if ((!KEYS && t + TILE > keys) || (CAUSAL && (KEYS ? t < mine + 63 : t + TILE > mine + 1))) {
            UNROLLED for (int i = 0; i < TILE / 2; i++) {
                const int mine_ = row + i / 2 % 2 * 8, other = t + i / 4 * 8 + lane % 4 * 2 + i % 2;
                if ((!KEYS && other >= keys) || (CAUSAL && (KEYS ? mine_ > other : other > mine_))) s[i] = 0;
            }
        }
#endif
        if (KEYS) {
            UNROLLED for (int i = 0; i < TILE / 4; i++) p[i] = pack2<T>(s[2 * i], s[2 * i + 1]);
            gather<VD>(acc2, p, wgmma_low<false, TILE * 128>(tile2));
            wgmma_wait<1>();
        } else {
            wgmma_wait<0>();
        }
        wgmma_hold(dp);
        UNROLLED for (int n = 0; n < TILE / 8; n++) {
            float2 pair;
            if (KEYS) pair = *(const float2*)(tile_rows + DELTA * TILE + n * 8);
            UNROLLED for (int e = 0; e < 4; e++) {
                const float delta = !KEYS ? own_rows[e / 2][DELTA] : e % 2 ? pair.y : pair.x;
                float& x = dp[n * 4 + e];
                x = KEEP && dropped >> (n * 4 + e) & 1 ? 0.0f : s[n * 4 + e] * (x - delta);
            }
        }
        UNROLLED for (int i = 0; i < TILE / 4; i++) ds[i] = pack2<T>(dp[2 * i], dp[2 * i + 1]);
        gather<KD>(acc1, ds, wgmma_low<false, TILE * 128>(tile1));
    }
    wgmma_wait<0>();
    wgmma_hold(acc1);
    wgmma_hold(acc2);
    bar_sync(1 + wg, 128);  // all have read the warpgroup's own rows
    const int out_row = mine + warp % 4 * 16;
    if (out_row < (KEYS ? keys : queries)) {
        const u32 to1 = own1 + warp % 4 * 2048, to2 = own2 + warp % 4 * 2048;
#if PACKED
        const int left = (KEYS ? keys : queries) - out_row;
        put_rows<KD, D>(map_out1, out1 + own_head * head1, row1, to1, acc1, scale, start + out_row, own_head, left);
        if (KEYS) put_rows<VD, DV>(map_out2, out2 + own_head * head2, row2, to2, acc2, 1, start + out_row, own_head, left);
#else
        tma_store_rows<KD>(map_out1, to1, acc1, scale, start + out_row, own_head, batch);
        if (KEYS) tma_store_rows<VD>(map_out2, to2, acc2, 1, start + out_row, own_head, batch);
#endif
        if (lane == 0) tma_store_wait_read<0>();  // a block's memory is there while it is read
    }
}
