// sdpa/wgmma_sm90.cu: y = softmax(scale q k^T + mask) v in 16-bit floats on Hopper: TMA, wgmma.
// Idea     : WGS warpgroups of 64 queries each against tiles of TILE keys; one warp keeps STAGES
//            tiles of k and of v in flight by TMA. Logits and probabilities stay in registers, where
//            they are the second product's operand: while it runs with the next tile's first product,
//            the softmax between them waits for neither. PINGPONG: one warpgroup's products run
//            during another's softmax. ROUNDS: a warpgroup goes through so many tiles of queries one
//            after the other against keys that stay (keys <= TILE STAGES): more blocks on an SM have
//            their loads in flight at once. ONE: all keys are one tile: nothing is
//            rescaled. A single warpgroup (or ONE) loads for itself: INLINE.
// Inputs   : q, k, v by 4-D TMA [D, rows, heads, batch] in any order of memory, zeros past their ends;
//            MASK 1: a row a query, by TMA too (0 strides: size 1); MASK 2: one row, by its strides.
//            One mask at most, which is added or (KEEP) selects.
// Outputs  : y by TMA, in any order of memory, or SUFFIX's 8-bit codes of it; lse f32 [B, H, S, 2] (or null).
// Macros   : operands.cuh's; WINDOW (a query sees `left` keys before its own and `right` after it); LENGTHS (with WINDOW: the
//            last query of sequence b stands at place lengths[b], i32 [B], and no key after it is one); PACKED (no window,
//            and no MASK 2: boxes count rows from a sequence's first, those of keys have LOADED rows, and y has strides for tiles that end within one); WGS, ROUNDS, TILE (64, 80, 96, 128; masked: 64, 128), STAGES, PINGPONG, ONE, BLOCKS (an SM's), NEXT_ALONE (the next launch's take one each).
// Launch   : grid (rows of 64 WGS ROUNDS queries, heads, batch; PACKED: heads, sequences, rows), 128 WGS threads (not INLINE: 128 more).
// Numerics : f32 accumulate; probabilities rounded to T as operands; bits depend on TILE alone.
// Bound    : exp and the tensor core, as much of each at a head size of 64; bytes for short rows.
#include "sdpa/operands.cuh"
#include "wgmma.cuh"
#ifdef SUFFIX
#include "conv/codes.cuh"
#define NUMBERS_ , NUMBERS
#else
#define NUMBERS_
#endif
#ifndef NEXT_ALONE
#define NEXT_ALONE 0
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef LENGTHS
#define LENGTHS 0
#endif
#if LENGTHS
#define LENGTHS_ , const int* lengths
#else
#define LENGTHS_
#endif
#if PACKED
#define PACKED_ , const int *offsets, int all, T *y, i64 y_head, i64 y_row
#define LSE_ROW (i64)h * all + start
#else
#define PACKED_
#define LSE_ROW ((i64)b * gridDim.y + h) * queries
#define LOADED TILE
#endif
#if WINDOW
#define REACH_ , int left, int right
#define GIVEN_ , left, right
#define FROM_TILE begin
#define FROM_ begin * TILE +
#else
#define REACH_
#define GIVEN_
#define FROM_TILE 0
#define FROM_
#endif

constexpr int KD = (D + 63) / 64, VD = (DV + 63) / 64;  // boxes of 64 columns, 128 bytes a row
constexpr int VN = wgmma_width(DV);                     // columns of the second product: few more than DV
constexpr int BOX = 64 * 128, TILES = WGS * ROUNDS;     // a box of 64 rows; tiles of 64 queries
// a tile's results leave from where its queries were
constexpr int Q_BYTES = KD * BOX, Q_PITCH = (KD > VD ? KD : VD) * BOX;
constexpr int K_BYTES = KD * TILE * 128, V_BYTES = VD * TILE * 128;
constexpr int MASK_BYTES = MASK == 1 ? TILES * TILE * 128 : MASK == 2 ? TILE * 4 : 0;
constexpr int K_AT = TILES * Q_PITCH, V_AT = K_AT + STAGES * K_BYTES, MASK_AT = V_AT + STAGES * V_BYTES;
constexpr int BAR_AT = MASK_AT + STAGES * MASK_BYTES;
// A single warpgroup loads for itself. Others have four warps for it, which give their registers away
// (an SM's lie in four parts: beside a fifth warp alone the others would have a quarter less).
constexpr bool INLINE = ONE || WGS == 1, GROW = !INLINE && BLOCKS == 1;
constexpr int THREADS = WGS * 128 + (INLINE ? 0 : 128), LOADER = INLINE ? 0 : WGS * 4;  // a warp
static_assert(TILE % 64 == 0 || !MASK, "a mask's tiles are boxes of 64 keys");
static_assert(ONE || STAGES > 1, "the next tile of keys is awaited before this one's values are free");

// s[64, TILE] = q . k^T
DEVICE void dots(float (&s)[TILE / 2], u32 q, u32 k) {
    wgmma_fence();
    UNROLLED for (int i = 0; i < (D + 15) / 16; i++)
        Wgmma<T, TILE, 0, 0>::run(s, wgmma_at(wgmma_low<true>(q) + i / 4 * (BOX / 16) + i % 4 * 2),
                                  wgmma_at(wgmma_low<true>(k) + i / 4 * (TILE * 8) + i % 4 * 2), i);
    wgmma_commit();
}
// acc[64, DV] (+)= p . v
DEVICE void gather(float (&acc)[VN / 2], const u32 (&p)[TILE / 4], u32 v, int add) {
    wgmma_fence();
    UNROLLED for (int i = 0; i < TILE / 16; i++)
        Wgmma<T, VN, 0, 1>::run(acc, p + 4 * i, wgmma_at(wgmma_low<false, TILE * 128>(v) + i * 128), add | i);
    wgmma_commit();
}
// What a row mask's tile holds for a key: what is added, or +inf where a logit is kept, else what it is.
DEVICE float row_entry(float m, float fill, float floor) {
    if (!KEEP) return meant(m, floor);
    return m != 0 ? -NEGATIVE_INFINITY : fill == -NEGATIVE_INFINITY ? NOT_A_NUMBER : fill;
}
// One logit from its product and mask; MASK 2: from a row's entry.
DEVICE float one_logit(float s, float m, float scale, float softcap, float fill) {
    if (!KEEP && !SOFTCAP) return s * scale + m;
    s *= scale;
    if (SOFTCAP) s = softcap * squash(s);
    if (!KEEP) return MASK ? s + m : s;
    if (MASK == 2) return m == -NEGATIVE_INFINITY ? s : m;
    return m != 0 ? s : fill;
}
// Logits from products and the mask's tile; not NATURAL: products as they are.
DEVICE void to_logits(float (&s)[TILE / 2], const u8* mask, float scale, float softcap, float fill, float floor) {
    const int lane = threadIdx.x % 32;
#if MASK == 1
    const u32 from = smem_address(mask) + threadIdx.x / 32 % 4 * 2048 + lane % 16 * 128;
    UNROLLED for (int q = 0; q < TILE / 16; q++) {
        u32 r[4];
        ldmatrix_x4(r, from + q / 4 * BOX + ((q % 4 * 2 + lane / 16 ^ lane % 8) << 4));
        UNROLLED for (int e = 0; e < 4; e++) {
            float2 by = unpack2<T>(r[e]);
            by = make_float2(meant(by.x, floor), meant(by.y, floor));
            s[8 * q + 2 * e] = one_logit(s[8 * q + 2 * e], by.x, scale, softcap, fill);
            s[8 * q + 2 * e + 1] = one_logit(s[8 * q + 2 * e + 1], by.y, scale, softcap, fill);
        }
    }
#elif MASK == 2
    UNROLLED for (int n = 0; n < TILE / 8; n++) {
        const float2 by = *(const float2*)(mask + n * 32 + lane % 4 * 8);
        UNROLLED for (int i = 0; i < 2; i++) {
            s[4 * n + 2 * i] = one_logit(s[4 * n + 2 * i], by.x, scale, softcap, fill);
            s[4 * n + 2 * i + 1] = one_logit(s[4 * n + 2 * i + 1], by.y, scale, softcap, fill);
        }
    }
#elif SOFTCAP
    UNROLLED for (int i = 0; i < TILE / 2; i++) s[i] = one_logit(s[i], 0, scale, softcap, fill);
#endif
}
// -inf where the tile's column is none of the keys that the row (or that 8 below) sees.
#if WINDOW
DEVICE void hide(float (&s)[TILE / 2], int key, int row, int keys, int left, int right) {
    key += threadIdx.x % 4 * 2;
    UNROLLED for (int i = 0; i < TILE / 2; i++) {
        const int at = key + i / 4 * 8 + i % 2, own = row + i / 2 % 2 * 8;
        if (at >= keys || at < own - left || at > own + right) s[i] = NEGATIVE_INFINITY;
    }
}
#else
DEVICE void hide(float (&s)[TILE / 2], int key, int row, int keys) {
    UNROLLED for (int i = 0; i < 2; i++) {
        const int end = (CAUSAL ? min(keys, row + 8 * i + 1) : keys) - key - threadIdx.x % 4 * 2;
        UNROLLED for (int n = 0; n < TILE / 8; n++)
            UNROLLED for (int e = 0; e < 2; e++)
                if (n * 8 + e >= end) s[4 * n + 2 * i + e] = NEGATIVE_INFINITY;
    }
}
#endif
// Logits to probabilities under the rows' new tops; fade: what the sums so far shrink by.
DEVICE void softmax(float (&s)[TILE / 2], float (&top)[2], float (&sum)[2], float (&fade)[2], float scale) {
    float now[2][2];
    UNROLLED for (int i = 0; i < 4; i++) now[i / 2][i % 2] = s[i];
    UNROLLED for (int i = 4; i < TILE / 2; i++) now[i / 2 % 2][i % 2] = fmaxf(now[i / 2 % 2][i % 2], s[i]);
    float zero[2], part[2][2] = {};
    UNROLLED for (int i = 0; i < 2; i++) {
        const float best = fmaxf(top[i], quad_max(fmaxf(now[i][0], now[i][1])));
        // NATURAL logits are as large as a mask: their difference comes before the factor
#if WINDOW || PACKED  // the first tile may be hidden from a row, or there is no key
        zero[i] = NATURAL ? safe(best) : safe(best) * scale;
#else
        zero[i] = NATURAL ? safe(best) : best * scale;
#endif
        fade[i] = NATURAL ? power2((top[i] - zero[i]) * LOG2E) : power2(top[i] * scale - zero[i]);
        top[i] = best;
    }
    UNROLLED for (int i = 0; i < TILE / 2; i++)
        part[i / 2 % 2][i % 2] += s[i] =
            NATURAL ? power2((s[i] - zero[i / 2 % 2]) * LOG2E) : power2(s[i] * scale - zero[i / 2 % 2]);
    UNROLLED for (int i = 0; i < 2; i++) sum[i] = sum[i] * fade[i] + (part[i][0] + part[i][1]);
}
DEVICE void pack(u32 (&p)[TILE / 4], const float (&s)[TILE / 2]) {
    UNROLLED for (int i = 0; i < TILE / 4; i++) p[i] = pack2<T>(s[2 * i], s[2 * i + 1]);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) sdpa_wgmma(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_k,
    const __grid_constant__ TensorMap map_v, const __grid_constant__ TensorMap map_y,
    const __grid_constant__ TensorMap map_mask, const T* mask, i64 mask_batch, i64 mask_head,
    i64 mask_column, const T* v, i64 v_batch, i64 v_head, i64 v_row, float* lse, int group, int queries, int keys,
    float scale, float softcap, float floor, double fill REACH_ LENGTHS_ PACKED_ NUMBERS_) {
    extern __shared__ __align__(1024) u8 smem[];
    const u32 base = smem_address(smem), q_full = base + BAR_AT, k_full = q_full + TILES * 8;
    const u32 v_full = k_full + STAGES * 8, k_empty = v_full + STAGES * 8, v_empty = k_empty + STAGES * 8;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < TILES; i++) mbarrier_init(q_full + i * 8, 1);
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(k_full + i * 8, MASK == 2 ? 33 : 1);
            mbarrier_init(v_full + i * 8, 1);
            mbarrier_init(k_empty + i * 8, WGS * 4 * WARP_ARRIVALS);
            mbarrier_init(v_empty + i * 8, WGS * 4);
        }
        fence_barrier_init();
    }
    if (warp == LOADER && elect()) {
        tma_prefetch(map_q);
        tma_prefetch(map_k);
        tma_prefetch(map_v);
        tma_prefetch(map_y);
        if (MASK == 1) tma_prefetch(map_mask);
    }
    __syncthreads();
    after_previous_launch();
    if (NEXT_ALONE) launch_dependents();

    // the last rows of a causal problem have the most keys: they start first
#if PACKED  // all sequences' tiles of one place together, since most have few: else some multiprocessors had none
    const int block = CAUSAL ? gridDim.z - 1 - blockIdx.z : blockIdx.z, h = blockIdx.x, b = blockIdx.y, batch = 0;
    const bool none = b + 1 == gridDim.y;  // rows behind the last sequence
#else
    const int block = CAUSAL || LENGTHS ? gridDim.x - 1 - blockIdx.x : blockIdx.x, h = blockIdx.y, b = blockIdx.z, batch = b;
#endif
    const int first = block * (TILES * 64), kv = h / group;
#if PACKED
    const int start = offsets[b];  // the sequence's first row
    queries = (none ? all : offsets[b + 1]) - start;
    keys = none ? 0 : queries;
    if (first >= queries) return;
#else
    constexpr int start = 0;
#endif
#if LENGTHS
    keys = min(keys, lengths[b] + 1);
    right = max(lengths[b] + 1 - queries, 0);  // the place of the first query
    left -= right;
#endif
#if WINDOW
    const int end = min(keys, first + TILES * 64 + right), begin = ONE ? 0 : max(0, first - left) / TILE;
    const int seen = (end + TILE - 1) / TILE - begin, tiles = ONE ? 1 : LENGTHS ? max(1, seen) : seen;
#else
    const int end = CAUSAL ? min(keys, first + TILES * 64) : keys;
    const int tiles = ONE ? 1 : PACKED ? max(1, (end + TILE - 1) / TILE) : (end + TILE - 1) / TILE;
#endif

    const bool loader = warp == LOADER;
    // by all lanes of the loading warp: tile j of the keys or values to its stage; of a packed sequence no more boxes than it
    // has: what stands behind them is no key, and its value becomes 0
    auto rows_of = [&](int j) { return PACKED ? min(TILE, (keys - j * TILE + LOADED - 1) / LOADED * LOADED) : TILE; };
    auto load_keys = [&](int j, int s) {
        const u32 bar = k_full + s * 8, to = base + K_AT + s * K_BYTES;
        if (!elect()) return;
        mbarrier_expect(bar, KD * rows_of(j) * 128 + (MASK == 1 ? MASK_BYTES : 0));
        for (int r = 0; r < rows_of(j); r += LOADED)
            for (int c = 0; c < KD; c++)
                tma_load(to + c * (TILE * 128) + r * 128, map_k, bar, c * 64, start + FROM_ j * TILE + r, kv, batch);
        if (MASK == 1)
            for (int i = 0; i < TILES * (TILE / 64); i++)
                tma_load(base + MASK_AT + s * MASK_BYTES + i * BOX, map_mask, bar, FROM_ j * TILE + i % (TILE / 64) * 64,
                         first + i / (TILE / 64) * 64, mask_head ? h : 0, mask_batch ? b : 0);
    };
    auto load_values = [&](int j, int s) {
        const u32 bar = v_full + s * 8, to = base + V_AT + s * V_BYTES;
        if (!elect()) return;
        mbarrier_expect(bar, VD * rows_of(j) * 128);
        for (int r = 0; r < rows_of(j); r += LOADED)
            for (int c = 0; c < VD; c++)
                tma_load(to + c * (TILE * 128) + r * 128, map_v, bar, c * 64, start + FROM_ j * TILE + r, kv, batch);
    };
    // the mask's row of tile j, through registers in which it may still be on its way; -inf where no key is
    T row_mask[TILE / 32];
    auto read_mask = [&](int j) {
        UNROLLED for (int i = 0; MASK == 2 && i < TILE / 32; i++)
            row_mask[i] = mask[b * mask_batch + h * mask_head + min(FROM_ j * TILE + i * 32 + lane, keys - 1) * mask_column];
    };
    auto write_mask = [&](int j, int s) {
        if (MASK != 2) return;
        UNROLLED for (int i = 0; i < TILE / 32; i++)
            *(float*)(smem + MASK_AT + s * MASK_BYTES + (i * 32 + lane) * 4) =
                FROM_ j * TILE + i * 32 + lane < keys ? row_entry(to_float(row_mask[i]), (float)fill, floor) : NEGATIVE_INFINITY;
        mbarrier_arrive(k_full + s * 8);
    };
    if (loader) {
        if (elect())
            for (int i = 0; i < TILES; i++) {
                mbarrier_expect(q_full + i * 8, Q_BYTES);
                for (int c = 0; c < KD; c++)
                    tma_load(base + i * Q_PITCH + c * BOX, map_q, q_full + i * 8, c * 64, start + first + i * 64, h, batch);
            }
        for (int j = 0; j < STAGES && j < tiles; j++) {
            load_keys(j, j);
            load_values(j, j);
        }
        for (int j = 0; j < STAGES && j < tiles; j++) {
            read_mask(j);
            write_mask(j, j);
        }
        __syncwarp();
    }
    auto fetch = [&] {  // a warp of its own: what has no stage yet
        u32 phase = 0;
        for (int j = STAGES, s = 0; j < tiles; j++) {
            read_mask(j);
            mbarrier_wait(k_empty + s * 8, phase);
            load_keys(j, s);
            write_mask(j, s);  // the keys are awaited before the values' stage is free
            mbarrier_wait(v_empty + s * 8, phase);
            load_values(j, s);
            if (++s == STAGES) s = 0, phase ^= 1;
        }
    };
    auto multiply = [&] {
        const int wg = warp / 4;
        const float power = scale * LOG2E;  // logits in units of log 2: exp needs no product
        if (PINGPONG && wg == WGS - 1) bar_arrive(1, 256);  // group 0 multiplies first
        for (int round = 0; round < ROUNDS; round++) {
            const int tile = round * WGS + wg, row = first + tile * 64 + warp % 4 * 16 + lane / 4;
            if (ROUNDS > 1 && first + tile * 64 >= queries) break;
            const u32 q = base + tile * Q_PITCH;
            float s[TILE / 2], acc[VN / 2], sum[2] = {}, fade[2];
            float top[2] = {NEGATIVE_INFINITY, NEGATIVE_INFINITY};
            u32 p[TILE / 4];
            // logits of tile j, which lies in a stage: then the stage is free
            auto probabilities = [&](int j, int stage) {
                wgmma_hold(s);
                const u8* from = smem + MASK_AT + stage * MASK_BYTES + (MASK == 1 ? tile * TILE * 128 : 0);
                to_logits(s, from, scale, softcap, (float)fill, floor);
                __syncwarp();
                if (!ONE && arrives(lane)) mbarrier_arrive(k_empty + stage * 8);
                const int key = FROM_ j * TILE;
#if WINDOW
                if ((MASK != 2 && key + TILE > keys) || key + TILE > first + tile * 64 + right + 1 ||
                    key < first + tile * 64 + 63 - left)
#else
                if ((MASK != 2 && key + TILE > keys) || (CAUSAL && key + TILE > first + tile * 64 + 1))
#endif
                    hide(s, key, row, keys GIVEN_);
                softmax(s, top, sum, fade, power);
                wgmma_hold(s);  // done before what is waited for next
            };
            int stage = 0;  // of the keys of tile j
            u32 phase = 0;
            mbarrier_wait(q_full + tile * 8, 0);
            mbarrier_wait(k_full, 0);
            dots(s, q, base + K_AT);
            wgmma_wait<0>();
            probabilities(0, 0);
            pack(p, s);
            if (!ONE && INLINE && loader && STAGES < tiles) {
                read_mask(STAGES);
                mbarrier_wait(k_empty, 0);
                load_keys(STAGES, 0);
                write_mask(STAGES, 0);
                __syncwarp();
            }
            if (!ONE && tiles > 1) mbarrier_wait(k_full + 8, 0);
            for (int j = 1; !ONE && j < tiles; j++) {
                const int before = stage;
                const u32 before_phase = phase;
                if (++stage == STAGES) stage = 0, phase ^= 1;
                if (INLINE && loader && j + STAGES < tiles) read_mask(j + STAGES);
                if (PINGPONG) bar_sync(1 + wg, 256);
                dots(s, q, base + K_AT + stage * K_BYTES);
                mbarrier_wait(v_full + before * 8, before_phase);
                gather(acc, p, base + V_AT + before * V_BYTES, j > 1);
                if (PINGPONG) bar_arrive(1 + (wg + 1) % WGS, 256);
                wgmma_wait<1>();
                probabilities(j, stage);
                // the next tile of keys; its branch keeps the compiler from waiting for the second
                // product before the softmax
                const int next = stage + 1 == STAGES ? 0 : stage + 1;
                if (j + 1 < tiles) mbarrier_wait(k_full + next * 8, next ? phase : phase ^ 1);
                wgmma_wait<0>();
                if (lane == 0) mbarrier_arrive(v_empty + before * 8);
                wgmma_hold(acc);
                UNROLLED for (int i = 0; i < VN / 2; i++) acc[i] *= fade[i / 2 % 2];
                pack(p, s);
                if (INLINE && loader) {  // by now the other warps are done with them too
                    if (j + STAGES < tiles) {
                        mbarrier_wait(k_empty + stage * 8, phase);
                        load_keys(j + STAGES, stage);
                        write_mask(j + STAGES, stage);
                    }
                    if (j - 1 + STAGES < tiles) {
                        mbarrier_wait(v_empty + before * 8, before_phase);
                        load_values(j - 1 + STAGES, before);
                    }
                    __syncwarp();
                }
            }
            mbarrier_wait(v_full + stage * 8, phase);
#if LENGTHS || PACKED  // anything may stand after the keys, and 0 times NaN is NaN
            for (int i = max(0, keys - (FROM_TILE + tiles - 1) * TILE) + threadIdx.x / 8; i < TILE; i += WGS * 16)
                UNROLLED for (int c = 0; c < VD; c++)
                    *(uint4*)(smem + V_AT + stage * V_BYTES + (c * TILE + i) * 128 + threadIdx.x % 8 * 16) = make_uint4(0, 0, 0, 0);
            fence_proxy_async();
            bar_sync(8, WGS * 128);
#endif
            gather(acc, p, base + V_AT + stage * V_BYTES, tiles > 1);
            float factor[2], total[2];
            UNROLLED for (int i = 0; i < 2; i++) {
                total[i] = quad_sum(sum[i]);
                factor[i] = GUARD && total[i] == 0 ? 0.0f : 1 / total[i];
                if (lse && lane % 4 == 0 && row + 8 * i < queries)
                    ((float2*)lse)[LSE_ROW + row + 8 * i] = row_lse(top[i] * (NATURAL ? 1.0f : scale), total[i]);
            }
            wgmma_wait<0>();
            wgmma_hold(acc);
            bar_sync(5 + wg, 128);  // all have read this tile's queries
            const u32 to = q + warp % 4 * 2048;
#ifdef SUFFIX  // rows of 64 bytes
            UNROLLED for (int i = 0; i < VN / 4; i++) {
                const float *from = acc + i * 2, by = factor[i % 2];
                const auto codes = Four<TY>::made(SUFFIX(from[0] * by, 0, 0, 0), SUFFIX(from[1] * by, 0, 0, 0), 0, 0);
                const int column = i / 2 * 8 + lane % 4 * 2, at = (lane / 4 + i % 2 * 8) * 64 + column % 64;
                *(unsigned short*)(smem + (to - base) + column / 64 * BOX + at) = codes.word;
            }
#else
            const u32 swizzled = to + lane % 16 * 128;
            UNROLLED for (int i = 0; i < (VN + 15) / 16; i++) {
                u32 out[4] = {};  // of 16 columns, or the last 8
                UNROLLED for (int e = 0; e < (i < VN / 16 ? 4 : 2); e++) {
                    const float* from = acc + i * 8 + e * 2;
                    out[e] = pack2<T>(from[0] * factor[e % 2], from[1] * factor[e % 2]);
                }
                stmatrix_x4(swizzled + i / 4 * BOX + ((i % 4 * 2 + lane / 16 ^ lane % 8) << 4), out[0], out[1], out[2], out[3]);
            }
#endif
            if (GUARD == 2) {  // rows without weights, over what the other lanes wrote
                __syncwarp();
                const T* values = v + b * v_batch + kv * v_head + start * v_row;
                UNROLLED for (int i = 0; i < 2; i++)
                    for (int c = lane % 4; is_dead(total[i]) && c < DV; c += 4) {
                        const int r = lane / 4 + 8 * i;
                        *(T*)(smem + (to - base) + c / 64 * BOX + r * 128 + ((c % 64 / 8 ^ r % 8) << 4) + c % 8 * 2) =
                            from_float<T>(nothing(values + c, v_row, keys));
                    }
            }
            fence_proxy_async();
            __syncwarp();
            const int out = first + tile * 64 + warp % 4 * 16;
#if PACKED
            if (out + 16 > queries)
                store_rows<DV>(y + h * y_head + (i64)(start + out) * y_row, y_row, smem + (to - base), queries - out);
            else
#endif
            if (lane == 0) {
                for (int c = 0; c < VD; c++) tma_store(map_y, to + c * BOX, c * 64, start + out, h, batch);
                tma_store_commit();
            }
        }
        if (lane == 0) tma_store_wait_read<0>();  // a block's memory is there while it is read
    };
    if (INLINE) {
        multiply();
    } else if (warp >= LOADER) {
        if (GROW) registers_shrink<(WGS == 2 ? 24 : 32)>();
        if (loader) fetch();
    } else {
        if (GROW) registers_grow<(WGS == 2 ? 240 : 160)>();
        multiply();
    }
}
