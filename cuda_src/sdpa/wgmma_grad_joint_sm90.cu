// sdpa/wgmma_grad_joint_sm90.cu: dq, dk, dv of attention by one walk over queries and keys: TMA, wgmma.
// Idea     : SPLIT blocks of a cluster share a head's keys, 128 at a time; two warpgroups own 64 of them each
//            and walk over the tiles of 64 queries, which a third warpgroup keeps STAGES deep in flight.
//            Logits are made once, transposed: probabilities and their gradients (dS) stay in registers as
//            operands of dk and dv. dS goes to shared memory also, where the warpgroups in turn make dq's
//            part of a tile of it and of all 128 keys, a step later. Parts are added in L2 to sums that
//            only one thread of one block adds to, one after the other; at the end of a head the cluster
//            adds its blocks' sums by rank. A cluster takes several heads, so that these sums stay in L2.
// Inputs   : q, dy, k, v by 4-D TMA [D, rows, heads, batch] in any order of memory, zeros past their ends;
//            y and dy by their strides too; lse.
// Outputs  : dq, dk, dv by TMA in any order of memory; `sums` [clusters, SPLIT, tiles, 64 x 64] for itself.
// Macros   : operands.cuh's (PACKED: SPLIT is 1, and a sequence has at most 128 rows, whose y comes by TMA too: keys and
//            both tiles are awaited together, since short sequences are made of latencies; boxes count rows from its
//            first, and results have strides for tiles that end within it); SPLIT (blocks of a cluster), STAGES, TILE (64).
// Launch   : grid (SPLIT clusters), clusters of SPLIT, 384 threads.
// Numerics : f32 accumulate; probabilities and their gradients rounded to T as operands; dq is summed over
//            64 x 2 keys by products, over a block's keys in their order, then over blocks.
// Bound    : tensor core, with nearly as many cycles of shared memory beside it.
#include "sdpa/wgmma_grad.cuh"

static_assert(TILE == 64 && D <= 64 && DV <= 64 && !NATURAL && !(PACKED && SPLIT > 1), "");
#if PACKED
#define PACKED_                                                                                                    \
    , const __grid_constant__ TensorMap map_y, const int *offsets, int all, T *dq_, i64 dq_head, i64 dq_row, T *dk_, \
        i64 dk_head, i64 dk_row, T *dv_, i64 dv_head, i64 dv_row
#define PUT(x, width, to, acc, factor, row) \
    put_rows<1, width>(map_##x, x##_ + h * x##_head, x##_row, to, acc, factor, start + (row), h, queries - (row))
#else
#define PACKED_
#define PUT(x, width, to, acc, factor, row) tma_store_rows<1>(map_##x, to, acc, factor, row, h, b)
#endif
constexpr int KEY_ROWS = 128, THREADS = 384, CONSUMERS = 8;  // warps of the two warpgroups with products
constexpr int KV_BYTES = 4 * BOX, SLOPES = 2 * BOX, STAGE_BYTES = (PACKED ? 3 : 2) * BOX, PART = 4096;
// k and v of two blocks of keys; two tiles of dS; tiles of q, dy (and y); a warp's part of dq; barriers; the rows'
constexpr int SLOPES_AT = 2 * KV_BYTES, STAGE_AT = SLOPES_AT + 2 * SLOPES, PART_AT = STAGE_AT + STAGES * STAGE_BYTES;
constexpr int BAR_AT = PART_AT + CONSUMERS * PART, ROWS_AT = BAR_AT + 128;
static_assert(8 * (2 * STAGES + 8) <= 128, "");

DEVICE void store_shared(u32 to, float a, float b, float c, float d) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
// A number to the same place of block `rank`'s shared memory.
DEVICE void store_peer(u32 to, float x, u32 rank) {
    asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
                 "st.shared::cluster.f32 [remote], %2;\n}" ::"r"(to), "r"(rank), "f"(x)
                 : "memory");
}
// Wait until at most N of the thread's stores and additions are not where all can see them.
template <int N> DEVICE void tma_store_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory"); }
// Until a warp's part may be written again, and what it has added to sums is there: PACKED has no sums.
DEVICE void tma_store_settle() { PACKED ? tma_store_wait_read<0>() : tma_store_wait<0>(); }

template <bool V> struct Constant { static constexpr bool value = V; };

extern "C" __global__ void __launch_bounds__(THREADS, 1) sdpa_gradients_joint(
    const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_dy,
    const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v,
    const __grid_constant__ TensorMap map_dq, const __grid_constant__ TensorMap map_dk,
    const __grid_constant__ TensorMap map_dv, const __grid_constant__ TensorMap map_sums, const T* y, i64 y_batch,
    i64 y_head, i64 y_row, const T* dy, i64 dy_batch, i64 dy_head, i64 dy_row, const float* lse, const float* sums,
    int batches, int heads, int queries, int keys, float scale PACKED_) {
    extern __shared__ __align__(1024) u8 smem[];
    const u32 base = smem_address(smem);
    const u32 full = base + BAR_AT, empty = full + STAGES * 8, kv_full = empty + STAGES * 8, kv_empty = kv_full + 16;
    const u32 slopes_full = kv_empty + 16, slopes_empty = slopes_full + 16;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, wg = warp / 4;
    if (threadIdx.x == 0) {
        Ring<STAGES>(full, true).set_up(CONSUMERS * WARP_ARRIVALS);
        for (int i = 0; i < 2; i++) {
            mbarrier_init(kv_full + i * 8, PACKED ? 2 : 1);
            mbarrier_init(kv_empty + i * 8, CONSUMERS * WARP_ARRIVALS);
            mbarrier_init(slopes_full + i * 8, CONSUMERS * WARP_ARRIVALS);
            mbarrier_init(slopes_empty + i * 8, CONSUMERS / 2 * WARP_ARRIVALS);
        }
        fence_barrier_init();
    }
    if (warp == CONSUMERS && elect()) {
        tma_prefetch(map_k);
        tma_prefetch(map_v);
        tma_prefetch(map_q);
        tma_prefetch(map_dy);
#if PACKED
        tma_prefetch(map_y);
#endif
    }
    __syncthreads();
    if (SPLIT > 1) cluster_sync();  // the peers' shared memory is there
    after_previous_launch();

    const int rank = SPLIT > 1 ? blockIdx.x % SPLIT : 0, cluster = blockIdx.x / SPLIT, clusters = gridDim.x / SPLIT;
    int b, h, start = 0, tiles = (queries + TILE - 1) / TILE, blocks = (keys + KEY_ROWS - 1) / KEY_ROWS;
#if PACKED  // where a head's sequence begins and ends; rows behind the last one are of none
    auto ends_of = [&](int head) {
        return make_int2(offsets[head / heads], head + heads < batches ? offsets[head / heads + 1] : all);
    };
    auto enter_sequence = [&](int head, int2 ends) {
        b = 0, h = head % heads, start = ends.x, queries = keys = ends.y - start;
        tiles = head + heads < batches ? (queries + TILE - 1) / TILE : 0, blocks = min(tiles, 1);
    };
    // of two heads: levels, then sums of dy y, of as many rows; and the ends of their sequences
    auto rows_at = [&](u32 count) { return (float*)(smem + ROWS_AT) + count % 2 * (2 * KEY_ROWS); };
    int2* const ends_at = (int2*)(smem + ROWS_AT + 4 * KEY_ROWS * 4);
#else
    auto enter = [&](int head) { b = head / heads, h = head - b * heads; };
    float* const levels = (float*)(smem + ROWS_AT);
#endif
    // Blocks of keys are dealt there and back: 0 1 1 0 0 1, so that causal ones come to the same work.
    auto block_of = [&](int i) { return i * SPLIT + (i % 2 ? SPLIT - 1 - rank : rank); };
    auto first_tile = [&](int block) { return CAUSAL ? block * (KEY_ROWS / TILE) : 0; };

    if (wg == 2) {
        registers_shrink<24>();
        u32 step = 0, count = 0;
#if PACKED  // a warp has the sequence's ends and its rows' levels ready as soon as its keys
        for (int head = cluster; warp == CONSUMERS + 1 && head < batches; head += clusters, count++) {
            const int2 ends = ends_of(head);
            const float2* from = (const float2*)lse + (i64)(head % heads) * all + ends.x;
            if (count >= 2) mbarrier_wait(kv_empty + count % 2 * 8, count / 2 + 1 & 1);
#pragma unroll 1
            for (int row = lane; row < KEY_ROWS; row += 32) {
                float level = -NEGATIVE_INFINITY;  // past the last row: no probabilities
                if (row < ends.y - ends.x) {
                    const float2 pair = from[row];
                    if (!GUARD || pair.y == pair.y) level = (pair.x + pair.y) * LOG2E;
                }
                rows_at(count)[row] = level;
            }
            ends_at[count % 2] = ends;
            __syncwarp();
            if (lane == 0) mbarrier_arrive(kv_full + count % 2 * 8);
        }
#endif
        for (int head = cluster; head < batches; head += clusters) {
            if (SPLIT > 1) cluster_arrive();
#if PACKED
            enter_sequence(head, ends_of(head));
#else
            enter(head);
#endif
            for (int i = 0; warp == CONSUMERS && block_of(i) < (PACKED ? 1 : blocks); i++, count++) {
                const int block = block_of(i);
                const u32 kv = base + count % 2 * KV_BYTES, kv_bar = kv_full + count % 2 * 8;
                if (count >= 2) mbarrier_wait(kv_empty + count % 2 * 8, count / 2 + 1 & 1);
                if (elect()) {
                    mbarrier_expect(kv_bar, blocks ? KV_BYTES : 0);
                    for (int w = 0; w < 2 * min(blocks, 1); w++) {
                        tma_load(kv + w * BOX, map_k, kv_bar, 0, start + block * KEY_ROWS + w * 64, h, b);
                        tma_load(kv + (2 + w) * BOX, map_v, kv_bar, 0, start + block * KEY_ROWS + w * 64, h, b);
                    }
                }
                __syncwarp();
                for (int t = first_tile(block); t < tiles; t++, step++) {
                    const u32 s = step % STAGES, to = base + STAGE_AT + s * STAGE_BYTES;
                    if (step >= STAGES) mbarrier_wait(empty + s * 8, step / STAGES + 1 & 1);
                    if (elect()) {
                        mbarrier_expect(full + s * 8, STAGE_BYTES);
                        tma_load(to, map_q, full + s * 8, 0, start + t * TILE, h, b);
                        tma_load(to + BOX, map_dy, full + s * 8, 0, start + t * TILE, h, b);
#if PACKED
                        tma_load(to + 2 * BOX, map_y, full + s * 8, 0, start + t * TILE, h, b);
#endif
                    }
                    __syncwarp();
                }
            }
            if (SPLIT > 1) {
                cluster_wait();
                cluster_arrive();
                cluster_wait();
            }
        }
        return;
    }
    registers_grow<240>();
    // All warps with products, of all blocks of the cluster. (A block that is no cluster would arrive with
    // its wait only, before which the loads come.)
    auto meet = [] {
        if (SPLIT > 1)
            cluster_sync();
        else
            bar_sync(1, CONSUMERS * 32);
    };

    const u32 own_part = base + PART_AT + warp * PART;
    const int own_sums = (cluster * SPLIT + rank) * tiles * 4 + warp % 4;  // of tile 0, in parts
    const float power = scale * LOG2E;
    float dk[32], dv[32];
    u32 step = 0, count = 0;  // tiles and blocks of keys walked over, of all heads

    // Nobody reads a block of keys any more, as far as this warp knows.
    auto leave_keys = [&](u32 j) {
        __syncwarp();
        if (arrives(lane)) mbarrier_arrive(kv_empty + j % 2 * 8);
    };

    for (int head = cluster; head < batches; head += clusters) {
#if PACKED
        mbarrier_wait(kv_full + count % 2 * 8, count / 2 & 1);
        enter_sequence(head, ends_at[count % 2]);
        float* const levels = rows_at(count);
        int thread = threadIdx.x;
        asm volatile("" : "+r"(thread));  // or numbers computed from it would stay in registers beside the products
        constexpr int padded = KEY_ROWS;
        auto clear = [&](T* to, i64 stride, int width) {
            for (int i = thread; i < queries * width / 8; i += CONSUMERS * 32)
                store<8>(to + (start + i / (width / 8)) * stride + i % (width / 8) * 8, Vec<T, 8>{});
        };
        if (!tiles) {
            clear(dq_ + h * dq_head, dq_row, D);
            clear(dk_ + h * dk_head, dk_row, D);
            clear(dv_ + h * dv_head, dv_row, DV);
            leave_keys(count++);
            continue;
        }
        for (int t = 0; t < tiles; t++) mbarrier_wait(full + (step + t) % STAGES * 8, (step + t) / STAGES & 1);
#pragma unroll 1  // fewer instructions to fetch, for which a short sequence waits
        for (int row = thread / 8; row < KEY_ROWS; row += 32) {
            const u8* from = smem + STAGE_AT + (step + row / TILE) % STAGES * STAGE_BYTES + row % TILE * 128 +
                             ((thread ^ row) % 8 << 4);
            const Vec<T, 8> dy_row = load<8>((const T*)(from + BOX)), y_row = load<8>((const T*)(from + 2 * BOX));
            float sum = 0;
            UNROLLED for (int e = 0; e < 8; e++) sum += to_float(y_row.at[e]) * to_float(dy_row.at[e]);
            UNROLLED for (int d = 1; d < 8; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
            if (thread % 8 == 0) levels[padded + row] = row < queries ? sum : 0;
        }
        if (queries < KEY_ROWS) {
            u8* const tile = smem + STAGE_AT + (step + tiles - 1) % STAGES * STAGE_BYTES;
            zero_rows<2, CONSUMERS * 32>(smem + count % 2 * KV_BYTES, KEY_ROWS, KEY_ROWS - queries, thread);
            zero_rows<2, CONSUMERS * 32>(tile, TILE, tiles * TILE - queries, thread);
        }
#else
        enter(head);
        const int padded = tiles * TILE;
        // The rows' levels, in units of log 2, and the sums of dy y: each block makes some for all. A warp
        // has four rows at a time, and eight of four tiles in flight.
        for (int t = rank; t < tiles; t += 4 * SPLIT) {
            Vec<T, 8> one[8], two[8];
            float2 pair[8];
            const int column = min(lane % 8 * 8, DV - 8);
            UNROLLED for (int i = 0; i < 8; i++) {
                const int row = min((t + i / 2 * SPLIT) * TILE + warp * 8 + i % 2 * 4 + lane / 8, queries - 1);
                one[i] = load<8>(y + b * y_batch + h * y_head + row * y_row + column);
                two[i] = load<8>(dy + b * dy_batch + h * dy_head + row * dy_row + column);
                pair[i] = ((const float2*)lse)[(i64)head * queries + row];
            }
            UNROLLED for (int i = 0; i < 8; i++) {
                const int row = (t + i / 2 * SPLIT) * TILE + warp * 8 + i % 2 * 4 + lane / 8;
                float sum = 0;
                UNROLLED for (int e = 0; e < 8; e++) sum += to_float(one[i].at[e]) * to_float(two[i].at[e]);
                if (lane % 8 * 8 >= DV) sum = 0;
                UNROLLED for (int d = 1; d < 8; d *= 2) sum += __shfl_xor_sync(~0u, sum, d);
                if (lane % 8 == 0 && row < padded) {
                    const bool there = row < queries && !(GUARD && pair[i].y != pair[i].y);
                    const float level = there ? (pair[i].x + pair[i].y) * LOG2E : -NEGATIVE_INFINITY;
                    if (row >= queries) sum = 0;  // past the last row: no probabilities
                    UNROLLED for (int r = 0; r < SPLIT; r++) {
                        store_peer(base + ROWS_AT + row * 4, level, r);
                        store_peer(base + ROWS_AT + (padded + row) * 4, sum, r);
                    }
                }
            }
        }
#endif
        meet();

        bool behind = false, pending = false;  // the stage, and dq's part, of the tile before are open
        int before = 0;                        // that tile
        u32 before_k = 0;
        bool before_first = false;
        auto release = [&](u32 j) {
            __syncwarp();
            if (arrives(lane)) mbarrier_arrive(empty + j % STAGES * 8);
        };
        // dq's part of the tile before, by its dS and all 128 keys
        auto begin_part = [&](float(&dq)[32]) {
            const u32 j = step - 1, a = wgmma_low<false>(base + SLOPES_AT + j % 2 * SLOPES), k = wgmma_low<false>(before_k);
            mbarrier_wait(slopes_full + j % 2 * 8, j / 2 & 1);
            wgmma_fence();
            UNROLLED for (int i = 0; i < KEY_ROWS / 16; i++)
                Wgmma<T, 64, 1, 1>::run(dq, wgmma_at(a + i * 128), wgmma_at(k + i * 128), i);
            wgmma_commit();
        };
        // A warp's rows of it go to the sums; the one before must have arrived, which may be of the same rows.
        auto end_part = [&](float(&dq)[32]) {
            wgmma_hold(dq);
            __syncwarp();
            if (arrives(lane)) mbarrier_arrive(slopes_empty + (step - 1) % 2 * 8);
            if (lane == 0) tma_store_settle();
            __syncwarp();
            if (PACKED || blocks == 1) {
                PUT(dq, D, own_part, dq, scale, before * TILE + warp % 4 * 16);
                return;
            }
            UNROLLED for (int i = 0; i < 8; i++)
                store_shared(own_part + i * 512 + lane * 16, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
            fence_proxy_async();
            __syncwarp();
            if (lane == 0) {
                if (before_first)
                    tma_store(map_sums, own_part, 0, 0, own_sums + before * 4);
                else
                    tma_add(map_sums, own_part, 0, 0, own_sums + before * 4);
                tma_store_commit();
            }
        };
        // dS of a tile is in shared memory.
        auto publish = [&] {
            fence_proxy_async();
            __syncwarp();
            if (arrives(lane)) mbarrier_arrive(slopes_full + step % 2 * 8);
        };
        for (int i = 0; block_of(i) < blocks; i++, count++) {
            const int block = block_of(i), first = first_tile(block), mine = block * KEY_ROWS + wg * 64;
            const int row = mine + warp % 4 * 16 + lane / 4;  // the thread's, and 8 below
            const u32 k_all = base + count % 2 * KV_BYTES, k_own = k_all + wg * BOX, v_own = k_own + 2 * BOX;
            UNROLLED for (int e = 0; e < 32; e++) dk[e] = dv[e] = 0;
            wgmma_hold(dk);
            wgmma_hold(dv);
            if (!PACKED) mbarrier_wait(kv_full + count % 2 * 8, count / 2 & 1);
            for (int t = first; t < tiles; t++, step++) {
                const u32 q_tile = base + STAGE_AT + step % STAGES * STAGE_BYTES, dy_tile = q_tile + BOX;
                const u32 slopes = base + SLOPES_AT + step % 2 * SLOPES + wg * BOX + warp % 4 * 2048;
                const bool turn = pending && before % 2 == wg, seen = mine < keys && (!CAUSAL || t * TILE + TILE > mine);
                if (!PACKED) mbarrier_wait(full + step % STAGES * 8, step / STAGES & 1);
                auto walk = [&](auto part) {
                    float s[TILE / 2], dp[TILE / 2], dq[32];
                    u32 p[TILE / 4], ds[TILE / 4];
                    dots<D>(s, wgmma_low<true>(k_own), wgmma_low<true>(q_tile));
                    wgmma_wait<1>();
                    if (behind) release(step - 1);
                    dots<DV>(dp, wgmma_low<true>(v_own), wgmma_low<true>(dy_tile));
                    wgmma_wait<1>();
                    wgmma_hold(s);
                    const float* level = levels + t * TILE + lane % 4 * 2;
                    UNROLLED for (int n = 0; n < TILE / 8; n++) {
                        const float2 top = *(const float2*)(level + n * 8);
                        UNROLLED for (int e = 0; e < 4; e++) {
                            const float l = e % 2 ? top.y : top.x;
                            float& x = s[n * 4 + e];
                            x = power2(x * power - l);
                            if (GUARD && l == -NEGATIVE_INFINITY) x = 0;
                        }
                    }
                    if (mine + 64 > keys || (CAUSAL && t * TILE < mine + 63)) {
                        UNROLLED for (int e = 0; e < TILE / 2; e++) {
                            const int key = row + e / 2 % 2 * 8, query = t * TILE + e / 4 * 8 + lane % 4 * 2 + e % 2;
                            if (key >= keys || (CAUSAL && key > query)) s[e] = 0;
                        }
                    }
                    UNROLLED for (int e = 0; e < TILE / 4; e++) p[e] = pack2<T>(s[2 * e], s[2 * e + 1]);
                    gather<1>(dv, p, wgmma_low<false>(dy_tile));
                    wgmma_wait<1>();
                    wgmma_hold(dp);
                    UNROLLED for (int n = 0; n < TILE / 8; n++) {
                        const float2 delta = *(const float2*)(level + padded + n * 8);
                        UNROLLED for (int e = 0; e < 4; e++)
                            dp[n * 4 + e] = s[n * 4 + e] * (dp[n * 4 + e] - (e % 2 ? delta.y : delta.x));
                    }
                    UNROLLED for (int e = 0; e < TILE / 4; e++) ds[e] = pack2<T>(dp[2 * e], dp[2 * e + 1]);
                    if (step >= 2) mbarrier_wait(slopes_empty + step % 2 * 8, step / 2 + 1 & 1);
                    UNROLLED for (int e = 0; e < 4; e++)
                        stmatrix_x4(slopes + lane % 16 * 128 + ((e * 2 + lane / 16 ^ lane % 8) << 4), ds[4 * e], ds[4 * e + 1],
                                    ds[4 * e + 2], ds[4 * e + 3]);
                    publish();
                    if (part.value) begin_part(dq);
                    gather<1>(dk, ds, wgmma_low<false>(q_tile));
                    if (part.value) {
                        wgmma_wait<1>();
                        end_part(dq);
                    }
                };
                // a tile with none to see; one with the part of the tile before, and one without
                if (!seen) {
                    wgmma_wait<0>();
                    if (behind) release(step - 1);
                    if (turn) {
                        float dq[32];
                        begin_part(dq);
                        wgmma_wait<0>();
                        end_part(dq);
                    }
                    if (step >= 2) mbarrier_wait(slopes_empty + step % 2 * 8, step / 2 + 1 & 1);
                    UNROLLED for (int e = 0; e < 4; e++)
                        stmatrix_x4(slopes + lane % 16 * 128 + ((e * 2 + lane / 16) << 4), 0, 0, 0, 0);
                    publish();
                    release(step);
                } else if (turn) {
                    walk(Constant<true>());
                } else {
                    walk(Constant<false>());
                }
                behind = seen;
                if (t == first && pending) leave_keys(count - 1);
                pending = true, before = t, before_k = k_all, before_first = i == 0;
            }
            wgmma_wait<0>();
            wgmma_hold(dk);
            wgmma_hold(dv);
            if (behind) release(step - 1);
            behind = false;
            const int out_row = mine + warp % 4 * 16;
            if (out_row < keys) {
                if (lane == 0) tma_store_settle();
                __syncwarp();
                PUT(dk, D, own_part, dk, scale, out_row);
                PUT(dv, DV, own_part + 2048, dv, 1, out_row);
            }
        }
        if (pending && before % 2 == wg) {
            float dq[32];
            begin_part(dq);
            wgmma_wait<0>();
            end_part(dq);
        }
        if (pending) leave_keys(count - 1);
        if (lane == 0) tma_store_settle();
        __syncwarp();
        meet();
        for (int t = rank * 2 + wg; !PACKED && blocks > 1 && t < tiles; t += SPLIT * 2) {
            const float4* from = (const float4*)(sums + ((i64)cluster * SPLIT * tiles + t) * (TILE * 64)) + warp % 4 * 256 + lane;
            float4 parts[SPLIT][8];
            UNROLLED for (int r = 0; r < SPLIT; r++)
                UNROLLED for (int e = 0; e < 8; e++)
                    parts[r][e] = __ldcg(from + (i64)(t < first_tile(r) ? 0 : r) * tiles * (TILE * 16) + e * 32);
            float dq[32];
            UNROLLED for (int e = 0; e < 32; e++) {
                dq[e] = 0;
                UNROLLED for (int r = 0; r < SPLIT; r++)
                    if (t >= first_tile(r)) dq[e] += (&parts[r][e / 4].x)[e % 4];
            }
            if (lane == 0) tma_store_settle();
            __syncwarp();
            tma_store_rows<1>(map_dq, own_part, dq, scale, t * TILE + warp % 4 * 16, h, b);
        }
    }
    if (lane == 0) tma_store_wait_read<0>();  // a block's memory is there while it is read
}
