// sdpa/one_query.cu: y = softmax(scale q k^T + mask) v of one query, the step of a decoder with a cache.
// Idea     : a head has CLUSTER blocks of WARPS warps, which take batches of keys in turns. D / 8 lanes
//            hold a key, so a warp holds 32 / (D / 8) side by side and PER after each other; all of their
//            loads are on their way at once. Each group of lanes keeps a softmax of its own, which warps
//            and blocks merge at the end in the first block's shared memory.
// Inputs   : operands.cuh with rows of 16-byte pieces, one query, D = DV a power of two from 8 to 256.
// Outputs  : y T; lse f32 (or null).
// Macros   : operands.cuh's; WARPS, CLUSTER, PER; LENGTHS (the query of sequence b stands at lengths[b],
//            and sees the keys from `left` before it up to it).
// Launch   : grid (CLUSTER, heads, batch), a cluster of CLUSTER blocks of 32 WARPS threads.
// Numerics : products, probabilities and sums in f32; the order depends on keys and macros alone.
// Bound    : bytes of k and v; for a short cache the latency of one load and one exchange.
#include "sdpa/operands.cuh"
#if CLUSTER > 1
#include "cluster.cuh"
#endif
constexpr int LANES = D / 8, BESIDE = 32 / LANES, BATCH = BESIDE * PER, PARTS = CLUSTER * WARPS;
#ifdef LENGTHS
#define LENGTHS_PARAMETERS , const int* lengths, int left
#else
#define LENGTHS_PARAMETERS
#endif
constexpr int PITCH = D + 4;  // a part: its columns, its largest logit, its sum

extern "C" __global__ void __launch_bounds__(32 * WARPS) sdpa_one_query(OPERANDS, T* y, float* lse, i64 yb, i64 yh, i64 yr LENGTHS_PARAMETERS) {
    launch_dependents();
    __shared__ __align__(16) float parts[PARTS * PITCH];
#if CLUSTER > 1
    cluster_arrive();  // the first block is there when the others write to it
#endif
    GATHER
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / LANES, part = lane % LANES * 8;
    const int h = blockIdx.y, b = blockIdx.z, kv = h / o.group, own = blockIdx.x * WARPS + warp;
    const T* k = o.k + b * o.ks.batch + kv * o.ks.head + part;
    const T* v = o.v + b * o.vs.batch + kv * o.vs.head + part;
    const T* mask = o.mask.at + b * o.mask.batch + h * o.mask.head;
    const T* mask2 = o.mask2.at + b * o.mask2.batch + h * o.mask2.head;
#ifdef LENGTHS
    // before the wait this may be a number of no meaning: a place to fetch from, inside the cache
    int place = *(const volatile int*)(lengths + b);
    int end = min(max(place, 0) + 1, o.keys), begin = max(end - 1 - left, 0);
#else
    const int end = CAUSAL ? min(o.keys, 1) : o.keys, begin = 0;
#endif
    // the rows of before are on their way to L2 while the launch before still makes what is new
    for (int key = begin + own * BATCH + group; key < end; key += PARTS * BATCH)
#pragma unroll
        for (int i = 0; i < PER; i++)
            if (part % 64 == 0 && key + i * BESIDE < end) {  // once a line
                asm volatile("prefetch.global.L2 [%0];" ::"l"(k + (key + i * BESIDE) * o.ks.row));
                asm volatile("prefetch.global.L2 [%0];" ::"l"(v + (key + i * BESIDE) * o.vs.row));
            }
    grid_dependency_wait();
#ifdef LENGTHS
    place = *(const volatile int*)(lengths + b);
    end = min(place + 1, o.keys), begin = max(place - left, 0);
#endif
    const uint4 q8 = *(const uint4*)(o.q + b * o.qs.batch + h * o.qs.head + part);
    float q[8];
    auto wide = [](float (&to)[8], const uint4& from) {
        const u32* words = (const u32*)&from;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 pair = unpack2<T>(words[j]);
            to[2 * j] = pair.x, to[2 * j + 1] = pair.y;
        }
    };
    wide(q, q8);
    const float scale = o.scale * LOG2E;  // logits in units of log 2, if not NATURAL: exp needs no product
    constexpr float UNIT = NATURAL ? LOG2E : 1.0f;
    float acc[8] = {}, top = NEGATIVE_INFINITY, sum = 0;
    for (int first = begin + own * BATCH; first < end; first += PARTS * BATCH) {
        uint4 ks[PER], vs[PER];
        float m[PER], m2[PER], z[PER];
#pragma unroll
        for (int i = 0; i < PER; i++) {
            const int key = first + i * BESIDE + group;
            const bool there = key < end;
            ks[i] = there ? *(const uint4*)(k + key * o.ks.row) : uint4{};
            vs[i] = there ? *(const uint4*)(v + key * o.vs.row) : uint4{};
            m[i] = MASK && there ? to_float(mask[key * o.mask.column]) : 0.0f;
            m2[i] = MASK2 && there ? to_float(mask2[key * o.mask2.column]) : 0.0f;
        }
        float now = top;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            float k8[8], dot = 0;
            wide(k8, ks[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) dot = fmaf(q[j], k8[j], dot);
#pragma unroll
            for (int step = 1; step < LANES; step *= 2) dot += __shfl_xor_sync(~0u, dot, step);
            z[i] = NATURAL ? logit(o, dot, m[i], m2[i]) : dot * scale;
            if (first + i * BESIDE + group >= end) z[i] = NEGATIVE_INFINITY;
            now = fmaxf(now, z[i]);
        }
        const float zero = safe(now), fade = power2((top - zero) * UNIT);
        top = now;
        sum *= fade;
#pragma unroll
        for (int j = 0; j < 8; j++) acc[j] *= fade;
#pragma unroll
        for (int i = 0; i < PER; i++) {
            float v8[8];
            const float p = power2((z[i] - zero) * UNIT);
            sum += p;
            wide(v8, vs[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) acc[j] = fmaf(p, v8[j], acc[j]);
        }
    }
    // the warp's groups to one: each lane is left with a part of its columns
    float best = top;
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) best = fmaxf(best, __shfl_xor_sync(~0u, best, step));
    const float share = power2((top - safe(best)) * UNIT);
    sum *= share;
#pragma unroll
    for (int j = 0; j < 8; j++) acc[j] *= share;
    int have = 8, column = part;
    bool last = true;
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) {
        const bool upper = lane & step;
        sum += __shfl_xor_sync(~0u, sum, step);
        if (have > 1) {
            have /= 2;
            column += upper ? have : 0;
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (j < have) {
                    const float give = upper ? acc[j] : acc[j + have];
                    acc[j] = (upper ? acc[j + have] : acc[j]) + __shfl_xor_sync(~0u, give, step);
                }
        } else {
            acc[0] += __shfl_xor_sync(~0u, acc[0], step);
            last = last && !upper;
        }
    }
    float* mine = parts + own * PITCH;
#if CLUSTER > 1
    auto put = [&](float* to, float value) {  // at the same place of the first block
        asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, 0;\n"
                     "st.shared::cluster.f32 [remote], %1;\n}" ::"r"((u32)__cvta_generic_to_shared(to)), "f"(value)
                     : "memory");
    };
    cluster_wait();
#else
    auto put = [&](float* to, float value) { *to = value; };
#endif
    if (last)
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (j < have) put(mine + column + j, acc[j]);
    if (lane == 0) put(mine + D, best), put(mine + D + 1, sum);
#if CLUSTER > 1
    cluster_sync();
#else
    __syncthreads();
#endif
    if (blockIdx.x) return;
    // each lane has a part or a few, and hands its weight on
    float most = NEGATIVE_INFINITY, total = 0;
    constexpr int OWN = (PARTS + 31) / 32;
    float weights[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int at = i * 32 + lane;
        weights[i] = at < PARTS ? parts[at * PITCH + D] : NEGATIVE_INFINITY;
        most = fmaxf(most, weights[i]);
    }
#pragma unroll
    for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int at = i * 32 + lane;
        weights[i] = power2((weights[i] - safe(most)) * UNIT);
        total += at < PARTS ? weights[i] * parts[at * PITCH + D + 1] : 0.0f;
    }
    total = warp_sum(total);
    for (int d = threadIdx.x; d < (D + 31) / 32 * 32; d += 32 * WARPS) {
        float value = 0;
#pragma unroll
        for (int i = 0; i < PARTS; i++) value += __shfl_sync(~0u, weights[i / 32], i % 32) * parts[i * PITCH + min(d, D - 1)];
        if (d >= D) continue;
        value *= GUARD && total == 0 ? 0.0f : 1 / total;
        if (is_dead(total)) value = nothing(v - part + d, o.vs.row, o.keys);
        y[b * yb + h * yh + d] = from_float<T>(value);
        if (d == 0 && lse) ((float2*)lse)[(i64)b * o.heads + h] = row_lse(NATURAL ? most : most * (1 / LOG2E), total);
    }
}
