// sdpa/one_query.cu: y = softmax(scale q k^T + mask) v of one query, the step of a decoder with a cache.
// Idea     : HEADS heads of queries that share keys have CLUSTER blocks of WARPS warps, which take batches
//            of keys in turns. D / 8 lanes hold a key, so a warp holds 32 / (D / 8) side by side and PER
//            after each other; STAGES batches are on their way (cp.async, a lane's own place in shared
//            memory) while one is multiplied with all the heads.
//            Each group of lanes keeps a softmax of its own for each head, which warps and blocks merge
//            at the end, each head in the shared memory of one block.
//            With APPEND k and v are a cache, to which a new row of each belongs: blocks take it from
//            where it was made, and one of those that share a head of keys writes it to its place.
// Inputs   : operands.cuh with rows of 16-byte pieces, one query, D = DV a power of two from 8 to 256.
//            APPEND: new_key, new_value [B, heads, D] by strides, and append.cu's inputs. CACHE in steps:
//            key_step, value_step [heads, D] f32; q is multiplied by the one, y by the other. SINK: sink T [heads
//            of queries], a logit of each head, of no value.
// Outputs  : y T; lse f32 (or null); APPEND: present_key, present_value, which k and v may be (else the
//            other rows are copied).
// Macros   : operands.cuh's; WARPS, CLUSTER, PER, STAGES, HEADS (divides the heads that share keys);
//            LENGTHS (the query of sequence b stands at lengths[b], and sees the keys from `left` before
//            it up to it); APPEND (then new_rows.cuh's; KEEP_PAST, PLACED: append.cu's KEEP, PLACED).
// Launch   : grid (CLUSTER, heads / HEADS, batch), a cluster of CLUSTER blocks of 32 WARPS threads; WARPS
//            STAGES PER KB of dynamic shared memory, and SLOTS PARTS PITCH floats.
// Numerics : products, probabilities and sums in f32; the order depends on keys and macros alone.
// Bound    : bytes of k and v; for a short cache the latency of one load and one exchange.
#include "sdpa/cache.cuh"
#include "sdpa/operands.cuh"
#include "sm80.cuh"
#if CLUSTER > 1
#include "cluster.cuh"
#endif
constexpr int LANES = D / 8, BESIDE = 32 / LANES, BATCH = BESIDE * PER, PARTS = CLUSTER * WARPS;
constexpr int SLOTS = (HEADS + CLUSTER - 1) / CLUSTER;  // heads that a block merges
#ifdef LENGTHS
#define LENGTHS_PARAMETERS , const int* lengths, int left
#else
#define LENGTHS_PARAMETERS
#endif
#ifndef APPEND
#define APPEND 0
#endif
#if APPEND
constexpr int PIECE = 8;
typedef float ACC;
#include "sdpa/new_rows.cuh"
#define APPEND_PARAMETERS                                                                                       \
    , const T *new_key, const T *new_value, const int *places, const T *cosines, const T *sines,                \
        const T *q_scale, const T *k_scale, const i64 *positions, CACHE *present_key, CACHE *present_value,     \
        i64 nkb, i64 nkh, i64 nvb, i64 nvh, int context, float epsilon
#else
#define APPEND_PARAMETERS
#endif
#ifdef SINK
#define SINK_PARAMETERS , const T* sink
#else
#define SINK_PARAMETERS
constexpr const T* sink = nullptr;
#endif
// A lane's numbers of a key: 16 bytes of T, or 8 steps.
#if IN_STEPS
typedef uint2 Piece;
#else
typedef uint4 Piece;
#endif
DEVICE void fetch_piece(Piece* to, const CACHE* from, bool there) {
#if IN_STEPS
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(smem_address(to)), "l"(from), "r"(there ? 8 : 0));
#else
    cp_async_16(smem_address(to), from, there ? 16 : 0);
#endif
}
DEVICE void wide(float (&to)[8], const uint4& from) {
    const u32* words = (const u32*)&from;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const float2 pair = unpack2<T>(words[j]);
        to[2 * j] = pair.x, to[2 * j + 1] = pair.y;
    }
}
#if IN_STEPS
DEVICE void wide(float (&to)[8], const Vec<signed char, 8>& from) {
    const u32* words = (const u32*)&from;
#pragma unroll
    for (int j = 0; j < 8; j++) {  // 2^23 + x + 128, whose last byte is x's: a conversion takes as long as eight sums
        const u32 bits = __byte_perm(words[j / 4] ^ 0x80808080u, 0x4b000000, 0x7440 + j % 4);
        to[j] = __uint_as_float(bits) - 8388736.0f;
    }
}
DEVICE void wide(float (&to)[8], const Vec<e4m3fn, 8>& from) {
#if __CUDA_ARCH__ >= 890
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 pair;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(((const u16*)&from)[j]));
        const float2 both = unpack2<f16>(pair);
        to[2 * j] = both.x, to[2 * j + 1] = both.y;
    }
#else
#pragma unroll
    for (int j = 0; j < 8; j++) {  // exponent and digits in a float's place are 2^120 times too small
        const u32 bits = from.at[j].bits, magnitude = bits & 0x7f;
        to[j] = __uint_as_float((bits & 0x80) << 24 | magnitude << 20) * power_of_two(120);
        if (magnitude == 0x7f) to[j] = NOT_A_NUMBER;
    }
#endif
}
DEVICE void wide(float (&to)[8], const uint2& from) { wide(to, *(const Vec<CACHE, 8>*)&from); }
#endif
// Columns of all heads by their steps, which are read again: to hold them takes registers.
DEVICE void multiply(float (&x)[HEADS][8], const float* step) {
#pragma unroll
    for (int g = 0; g < HEADS && IN_STEPS; g++)
#pragma unroll
        for (int j = 0; j < 8; j++) x[g][j] *= step[j];
}
constexpr int PITCH = D + 4;  // a part: its columns, its largest logit, its sum

extern "C" __global__ void __launch_bounds__(32 * WARPS, IN_STEPS) sdpa_one_query(OPERANDS, T* y, float* lse, i64 yb, i64 yh, i64 yr LENGTHS_PARAMETERS APPEND_PARAMETERS STEPS_PARAMETERS SINK_PARAMETERS) {
    launch_dependents();
    extern __shared__ __align__(16) uint4 ring[];
    float* parts = (float*)((Piece*)ring + WARPS * STAGES * PER * 64);  // [SLOTS][PARTS][PITCH]
#if CLUSTER > 1
    cluster_arrive();  // each block is there when the others write to it
#endif
    GATHER
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / LANES, part = lane % LANES * 8;
    const int h0 = blockIdx.y * HEADS, b = blockIdx.z, kv = h0 / o.group, own = blockIdx.x * WARPS + warp;
    const CACHE *keys = (const CACHE*)o.k, *values = (const CACHE*)o.v;
    const CACHE* k = keys + b * o.ks.batch + kv * o.ks.head + part;
    const CACHE* v = values + b * o.vs.batch + kv * o.vs.head + part;
    const T* mask = o.mask.at + b * o.mask.batch + h0 * o.mask.head;
    const T* mask2 = o.mask2.at + b * o.mask2.batch + h0 * o.mask2.head;
#ifdef LENGTHS
    // before the wait this may be a number of no meaning: a place to fetch from, inside the cache
    int place = *(const volatile int*)(lengths + b);
    int end = min(max(place, 0) + 1, o.keys), begin = max(end - 1 - left, 0);
#else
    const int end = CAUSAL ? min(o.keys, 1) : o.keys, begin = 0;
#endif
    // the first rows, 16 MB of all blocks, are on their way to L2 while the launch before makes what is new
    const i64 turn = (i64)gridDim.x * gridDim.y * gridDim.z * WARPS * BATCH * D;
    const int ahead = turn < 1 << 22 ? (1 << 22) / (int)turn : 1;
    const int last = min(end, begin + ahead * PARTS * BATCH);
    for (int key = begin + own * BATCH + group; key < last; key += PARTS * BATCH)
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (part * sizeof(CACHE) % 128 == 0 && key + i * BESIDE < end) {  // once a line
                asm volatile("prefetch.global.L2 [%0];" ::"l"(k + (key + i * BESIDE) * o.ks.row));
                asm volatile("prefetch.global.L2 [%0];" ::"l"(v + (key + i * BESIDE) * o.vs.row));
            }
    if (IN_STEPS && threadIdx.x * 32 < D) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(key_step + kv * D + threadIdx.x * 32));
        asm volatile("prefetch.global.L2 [%0];" ::"l"(value_step + kv * D + threadIdx.x * 32));
    }
    grid_dependency_wait();
#ifdef LENGTHS
    place = *(const volatile int*)(lengths + b);
    end = min(place + 1, o.keys), begin = max(place - left, 0);
#endif
#if APPEND  // the row at `at_row` is new: nobody reads it from the cache, to which one block writes it
    const int at_row = PLACED ? placed(positions[PLACED == 1 ? b : 0], o.keys) : max(places[b], 0);
#else
    const int at_row = -1;
#endif
    float q[HEADS][8];
    const T* of_q = o.q + b * o.qs.batch + h0 * o.qs.head + part;
#pragma unroll
    for (int g = 0; g < HEADS && !APPEND; g++) wide(q[g], *(const uint4*)(of_q + g * o.qs.head));
    const float scale = o.scale * LOG2E;  // logits in units of log 2, if not NATURAL: exp needs no product
    constexpr float UNIT = NATURAL ? LOG2E : 1.0f;
    float acc[HEADS][8] = {}, top[HEADS], sum[HEADS] = {};
#pragma unroll
    for (int g = 0; g < HEADS; g++) top[g] = NEGATIVE_INFINITY;
    // a lane's place in a stage: its pieces of PER keys and of their values, one lane beside the other
    Piece* mine = (Piece*)ring + warp * STAGES * PER * 64 + lane;
    auto fetch = [&](int first, int stage) {
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const int key = first + i * BESIDE + group, row = min(key, end - 1);
            const bool there = key < end && !(APPEND && key == at_row);
            Piece* to = mine + (stage * PER + i) * 64;
            fetch_piece(to, k + row * o.ks.row, there);
            fetch_piece(to + 32, v + row * o.vs.row, there);
        }
        cp_async_commit();
    };
    int first = begin + own * BATCH, stage = 0;
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++)
        if (end > begin) fetch(first + s * PARTS * BATCH, s);
#if APPEND
    const Angles by = angles_of(cosines, sines, positions, b, 0, 1, at_row, context);
    Vec<CACHE, 8> new_k = {}, new_v = {};
    // quotients take long: only the warps that write the row or multiply it make them
    if (!IN_STEPS || h0 % o.group + own == 0 || (at_row - begin) / BATCH % PARTS == own) {
        new_k = cached(piece_of(new_key + b * nkb + kv * nkh, part, k_scale, by, epsilon), key_step + kv * D + part);
        new_v = cached(load<8>(new_value + b * nvb + kv * nvh + part), value_step + kv * D + part);
    }
#pragma unroll
    for (int g = 0; g < HEADS; g++) {
        const T* row = of_q + g * o.qs.head;
        const Vec<T, 8> piece = TURNED ? piece_of(row - part, part, q_scale, by, epsilon) : load<8>(row);
        wide(q[g], *(const uint4*)&piece);
    }
    const i64 own_key = k - keys, own_value = v - values;
    const int sharer = h0 % o.group / HEADS * CLUSTER + blockIdx.x, step = o.group / HEADS * PARTS * BESIDE;
    if (sharer == 0 && threadIdx.x < LANES && at_row < o.keys) {
        store(present_key + own_key + at_row * o.ks.row, new_k);
        store(present_value + own_value + at_row * o.vs.row, new_v);
    }
    const bool keys_apart = present_key != keys, values_apart = present_value != values;
#pragma unroll 1
    for (int row = (sharer * WARPS + warp) * BESIDE + group; row < o.keys && (keys_apart || values_apart); row += step) {
        if (row == at_row) continue;
        const bool kept = KEEP_PAST || row < at_row;
        if (keys_apart) store(present_key + own_key + row * o.ks.row, kept ? load<8>(k + row * o.ks.row) : Vec<CACHE, 8>{});
        if (values_apart) store(present_value + own_value + row * o.vs.row, kept ? load<8>(v + row * o.vs.row) : Vec<CACHE, 8>{});
    }
#endif
    multiply(q, key_step + kv * D + part);
    for (; first < end; first += PARTS * BATCH) {
        __syncwarp();  // keeps the reads of the stage that comes again before its next load
        fetch(first + (STAGES - 1) * PARTS * BATCH, stage ? stage - 1 : STAGES - 1);
        cp_async_wait<STAGES - 1>();
        __syncwarp();
        Piece* at = mine + stage * PER * 64;
        float z[HEADS][PER];
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const int key = first + i * BESIDE + group;
#if APPEND
            if (key == at_row) at[i * 64] = *(const Piece*)&new_k, at[i * 64 + 32] = *(const Piece*)&new_v;
#endif
            float k8[8];
            wide(k8, at[i * 64]);
#pragma unroll
            for (int g = 0; g < HEADS; g++) {
                float dot = 0;
#pragma unroll
                for (int j = 0; j < 8; j++) dot = fmaf(q[g][j], k8[j], dot);
#pragma unroll
                for (int step = 1; step < LANES; step *= 2) dot += __shfl_xor_sync(~0u, dot, step);
                float m = 0, m2 = 0;
                if (MASK && key < end) m = to_float(mask[g * o.mask.head + key * o.mask.column]);
                if (MASK2 && key < end) m2 = to_float(mask2[g * o.mask2.head + key * o.mask2.column]);
                z[g][i] = key >= end ? NEGATIVE_INFINITY : NATURAL ? logit(o, dot, m, m2) : dot * scale;
            }
        }
#pragma unroll
        for (int g = 0; g < HEADS; g++) {
            float now = top[g];
#pragma unroll
            for (int i = 0; i < PER; i++) now = fmaxf(now, z[g][i]);
            const float zero = safe(now), fade = power2((top[g] - zero) * UNIT);
            top[g] = now;
            sum[g] *= fade;
#pragma unroll
            for (int j = 0; j < 8; j++) acc[g][j] *= fade;
#pragma unroll
            for (int i = 0; i < PER; i++) {
                z[g][i] = power2((z[g][i] - zero) * UNIT);
                sum[g] += z[g][i];
            }
        }
#pragma unroll
        for (int i = 0; i < PER; i++) {
            float v8[8];
            wide(v8, at[i * 64 + 32]);
#pragma unroll
            for (int g = 0; g < HEADS; g++)
#pragma unroll
                for (int j = 0; j < 8; j++) acc[g][j] = fmaf(z[g][i], v8[j], acc[g][j]);
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
    multiply(acc, value_step + kv * D + part);
    cp_async_wait<0>();  // nothing is on its way to the memory of a block that has ended
#if CLUSTER > 1
    auto put = [&](int block, float* to, float value) {  // at the same place of another block
        asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
                     "st.shared::cluster.f32 [remote], %2;\n}" ::"r"((u32)__cvta_generic_to_shared(to)),
                     "r"(block), "f"(value)
                     : "memory");
    };
    cluster_wait();
#else
    auto put = [&](int, float* to, float value) { *to = value; };
#endif
    // the warp's groups to one: each lane is left with a part of its columns
#pragma unroll
    for (int g = 0; g < HEADS; g++) {
        float best = top[g];
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, step));
        const float share = power2((top[g] - safe(best)) * UNIT);
        float total = sum[g] * share;
#pragma unroll
        for (int j = 0; j < 8; j++) acc[g][j] *= share;
        int have = 8, column = part;
        bool last = true;
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) {
            const bool upper = lane & step;
            total += __shfl_xor_sync(~0u, total, step);
            if (have > 1) {
                have /= 2;
                column += upper ? have : 0;
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (j < have) {
                        const float give = upper ? acc[g][j] : acc[g][j + have];
                        acc[g][j] = (upper ? acc[g][j + have] : acc[g][j]) + __shfl_xor_sync(~0u, give, step);
                    }
            } else {
                acc[g][0] += __shfl_xor_sync(~0u, acc[g][0], step);
                last = last && !upper;
            }
        }
        float* part_of_head = parts + (g / CLUSTER * PARTS + own) * PITCH;
        if (last)
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (j < have) put(g % CLUSTER, part_of_head + column + j, acc[g][j]);
        if (lane == 0) put(g % CLUSTER, part_of_head + D, best), put(g % CLUSTER, part_of_head + D + 1, total);
    }
#if CLUSTER > 1
    cluster_sync();
#else
    __syncthreads();
#endif
    constexpr int OWN = (PARTS + 31) / 32;
    for (int g = blockIdx.x, slot = 0; g < HEADS; g += CLUSTER, slot++) {
        const float* from = parts + slot * PARTS * PITCH;
        // each lane has a part or a few, and hands its weight on
        float most = NEGATIVE_INFINITY, total = 0;
        float weights[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int at = i * 32 + lane;
            weights[i] = at < PARTS ? from[at * PITCH + D] : NEGATIVE_INFINITY;
            most = fmaxf(most, weights[i]);
        }
#pragma unroll
        for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        const int h = h0 + g;
        const float drain = sink ? to_float(sink[h]) * (LOG2E / UNIT) : NEGATIVE_INFINITY;
        most = fmaxf(most, drain);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int at = i * 32 + lane;
            weights[i] = power2((weights[i] - safe(most)) * UNIT);
            total += at < PARTS ? weights[i] * from[at * PITCH + D + 1] : 0.0f;
        }
        total = warp_sum(total);
        if (sink) total += power2((drain - safe(most)) * UNIT);
        for (int d = threadIdx.x; d < (D + 31) / 32 * 32; d += 32 * WARPS) {
            float value = 0;
#pragma unroll
            for (int i = 0; i < PARTS; i++) value += __shfl_sync(~0u, weights[i / 32], i % 32) * from[i * PITCH + min(d, D - 1)];
            if (d >= D) continue;
            value *= GUARD && total == 0 ? 0.0f : 1 / total;
            if (is_dead(total)) value = nothing(o.v + b * o.vs.batch + kv * o.vs.head + d, o.vs.row, o.keys);
            y[b * yb + h * yh + d] = from_float<T>(value);
            if (d == 0 && lse) ((float2*)lse)[(i64)b * o.heads + h] = row_lse(NATURAL ? most : most * (1 / LOG2E), total);
        }
    }
}
