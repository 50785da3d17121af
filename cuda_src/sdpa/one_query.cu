// sdpa/one_query.cu: y = softmax(scale q k^T + mask) v of one query, the step of a decoder with a cache.
// Idea     : HEADS heads of queries that share keys have CLUSTER blocks of WARPS warps, which take batches
//            of 16 keys in turns; the next is on its way (cp.async, a lane's own place in shared
//            memory). The heads are one side of mma.sync, 8 keys at a time the other, in the order
//            in which lanes load them: a lane's 16 bytes of a key are 8 of k for a product, those of four
//            values 8 columns. The logits of a head, in four lanes, are the other operand of the values.
//            Each warp keeps a softmax of its own for each head, which warps and blocks merge at the end,
//            each head in the shared memory of one block.
//            With APPEND k and v are a cache, to which a new row of each belongs: blocks take it from
//            where it was made, and one of those that share a head of keys writes it to its place.
// Inputs   : operands.cuh with rows of 16-byte pieces, one query, D = DV a power of two from 8 to 256.
//            APPEND: new_key, new_value [B, heads, D] by strides, and append.cu's inputs. CACHE in steps:
//            key_step, value_step [heads, D] f32; q is multiplied by the one, y by the other. SINK: sink T [heads
//            of queries], a logit of each head, of no value.
// Outputs  : y T; lse f32 (or null); APPEND: present_key, present_value, which k and v may be (else the
//            other rows are copied).
// Macros   : operands.cuh's; WARPS, CLUSTER, HEADS (at most 8; divides the heads that share keys);
//            LENGTHS (the query of sequence b stands at lengths[b], and sees the keys from `left` before
//            it up to it); APPEND (then new_rows.cuh's; KEEP_PAST, PLACED: append.cu's KEEP, PLACED).
// Launch   : grid (CLUSTER, heads / HEADS, batch), a cluster of CLUSTER blocks of 32 WARPS threads; dynamic
//            shared memory of WARPS 2 HELD 32 pieces, and SLOTS PARTS PITCH floats.
// Numerics : products and sums in f32, of probabilities in T; with steps q times the keys' in T, too, of its
//            largest. The order depends on keys and macros alone.
// Bound    : bytes of k and v; for a short cache the latency of one load and one exchange.
#include "sdpa/cache.cuh"
#include "sdpa/operands.cuh"
#include "quant/nbits.cuh"
#include "sm80.cuh"
#if CLUSTER > 1
#include "cluster.cuh"
// What blocks of a cluster give each other once: bytes that a block counts, so that none waits for memory's order
// (cluster_sync's takes 0.5 us behind the stores of a new row).
DEVICE void expect_bytes(u32 arrived, u32 bytes) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;\n"
                 "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(arrived), "r"(bytes) : "memory");
}
DEVICE void await_bytes(u32 arrived) {
    asm volatile("{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
                 "@!done bra AGAIN;\n}" ::"r"(arrived) : "memory");
}
DEVICE void give(u32 to, u32 arrived, int block, float4 x) {  // to the same place of a block
    asm volatile("{\n.reg .b32 remote, bar;\nmapa.shared::cluster.u32 remote, %0, %6;\n"
                 "mapa.shared::cluster.u32 bar, %1, %6;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [remote], {%2, %3, %4, %5}, [bar];\n}" ::"r"(to),
                 "r"(arrived), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(block)
                 : "memory");
}
#endif
constexpr int PIECES = D / 8, BATCH = 16, PARTS = CLUSTER * WARPS;
constexpr int OF_KEY = (D + 31) / 32, OF_VALUE = (D + 63) / 64;  // pieces of a lane
constexpr int HELD = 2 * OF_KEY + 4 * OF_VALUE;                  // of a batch: of 2 keys, and of 4 values
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
// Columns 2 j and 2 j + 1 of a piece; its words.
#if IN_STEPS
template <class E> constexpr bool IS_F16 = false;
template <> constexpr bool IS_F16<f16> = true;
DEVICE u32 pair_of(const Vec<signed char, 8>& from, int j) {
    const u32 word = ((const u32*)&from)[j / 2] ^ 0x80808080u;  // x + 128
    if (IS_F16<T>) return fma2<true>(__byte_perm(word, 0x64646464, j % 2 ? 0x4342 : 0x4140), 0x3c003c00, 0xe480e480);
    float x[2];
    UNROLLED for (int e = 0; e < 2; e++)  // 2^23 + x + 128: a conversion takes as long as eight sums
        x[e] = __uint_as_float(__byte_perm(word, 0x4b000000, 0x7440 + j % 2 * 2 + e)) - 8388736.0f;
    return pack2<T>(x[0], x[1]);
}
DEVICE u32 pair_of(const Vec<e4m3fn, 8>& from, int j) {
#if __CUDA_ARCH__ >= 890
    u32 pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(((const u16*)&from)[j]));
    if (IS_F16<T>) return pair;
    const float2 both = unpack2<f16>(pair);
    return pack2<T>(both.x, both.y);
#else
    return pack2<T>(widen(from.at[2 * j]), widen(from.at[2 * j + 1]));
#endif
}
DEVICE uint4 words_of(const Piece& x) {
    const Vec<CACHE, 8>& codes = *(const Vec<CACHE, 8>*)&x;
    return make_uint4(pair_of(codes, 0), pair_of(codes, 1), pair_of(codes, 2), pair_of(codes, 3));
}
#else
DEVICE uint4 words_of(const Piece& x) { return x; }
#endif
constexpr int PITCH = D + 4;  // a part: its columns, its largest logit, its sum

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) sdpa_one_query(OPERANDS, T* y, float* lse, i64 yb, i64 yh, i64 yr LENGTHS_PARAMETERS APPEND_PARAMETERS STEPS_PARAMETERS SINK_PARAMETERS) {
    launch_dependents();
    extern __shared__ __align__(16) uint4 ring[];
    float* parts = (float*)((Piece*)ring + WARPS * 2 * HELD * 32);  // [SLOTS][PARTS][PITCH]
#if CLUSTER > 1
    __shared__ u64 barrier;  // what blocks give each other: all parts of the heads that are merged here
    const u32 arrived = smem_address(&barrier), own_heads = (HEADS + CLUSTER - 1 - blockIdx.x) / CLUSTER;
    if (threadIdx.x == 0) expect_bytes(arrived, own_heads * PARTS * PITCH * 4);
    cluster_arrive();  // each block is there when the others write to it
#endif
    GATHER
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, t = lane % 4;
    const int h0 = blockIdx.y * HEADS, b = blockIdx.z, kv = h0 / o.group, own = blockIdx.x * WARPS + warp;
    const int sharer = (h0 - kv * o.group) / HEADS * CLUSTER + blockIdx.x;
    const CACHE *keys = (const CACHE*)o.k, *values = (const CACHE*)o.v;
    const CACHE* k = keys + b * o.ks.batch + kv * o.ks.head;
    const CACHE* v = values + b * o.vs.batch + kv * o.vs.head;
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
    constexpr int LINES = (D * (int)sizeof(CACHE) + 127) / 128;  // of a row
    for (int key = begin + own * BATCH; key < last; key += PARTS * BATCH)
        UNROLLED for (int i = lane; i < BATCH * LINES; i += 32)
            if (const int row = key + i / LINES, at = i % LINES * 128 / sizeof(CACHE); row < end) {
                asm volatile("prefetch.global.L2 [%0];" ::"l"(k + row * o.ks.row + at));
                asm volatile("prefetch.global.L2 [%0];" ::"l"(v + row * o.vs.row + at));
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
#if PLACED
    const int at_row = placed(positions[PLACED == 1 ? b : 0], o.keys);
#elif defined(LENGTHS)
    const int at_row = max(place, 0);
#else
    const int at_row = max(places[b], 0);
#endif
#else
    const int at_row = -1;
#endif
    const bool asks = group < HEADS;  // the head whose logits this lane has
    const T* const of_q = o.q + b * o.qs.batch + (h0 + (asks ? group : 0)) * o.qs.head;
    uint4 q[OF_KEY];
    UNROLLED for (int p = 0; p < OF_KEY && !APPEND; p++)
        q[p] = asks && t + 4 * p < PIECES ? *(const uint4*)(of_q + (t + 4 * p) * 8) : uint4{};
    const float scale = o.scale * LOG2E;  // logits in units of log 2, if not NATURAL: exp needs no product
    constexpr float UNIT = NATURAL ? LOG2E : 1.0f;
    // of heads 2 t and 2 t + 1, columns 8 (group + 8 s) + 2 w and the next one
    float acc[OF_VALUE][4][4] = {}, top = NEGATIVE_INFINITY, sum = 0;
    // a lane's place in a stage: its pieces of keys and values, one lane beside the other
    Piece* mine = (Piece*)ring + warp * 2 * HELD * 32 + lane;
    auto value_key = [&](int j) { return j / 2 * 8 + 2 * t + j % 2; };  // of a batch, whose value a lane has
    int first = begin + own * BATCH, coming = first, stage = 0;  // the batch that is multiplied, and fetched, next
    const CACHE *key_at[2], *value_at[4];
    UNROLLED for (int j = 0; j < 2; j++) key_at[j] = k + (first + j * 8 + group) * o.ks.row + t * 8;
    UNROLLED for (int j = 0; j < 4; j++) value_at[j] = v + (first + value_key(j)) * o.vs.row + group * 8;
    auto fetch = [&](int stage) {
        auto there = [&](int key) { return key < end && !(APPEND && key == at_row); };
        Piece* const to = mine + stage * HELD * 32;
        UNROLLED for (int x = 0; x < 2 * OF_KEY; x++) {
            const int j = x / OF_KEY, p = x % OF_KEY * 4;
            const bool some = there(coming + j * 8 + group) && (D % 32 == 0 || t + p < PIECES);
            fetch_piece(to + x * 32, key_at[j] + p * 8, some);
        }
        UNROLLED for (int x = 0; x < 4 * OF_VALUE; x++) {
            const int j = x / OF_VALUE, p = x % OF_VALUE * 8;
            const bool some = there(coming + value_key(j)) && (D % 64 == 0 || group + p < PIECES);
            fetch_piece(to + (2 * OF_KEY + x) * 32, value_at[j] + p * 8, some);
        }
        cp_async_commit();
        coming += PARTS * BATCH;
        UNROLLED for (int j = 0; j < 2; j++) key_at[j] += PARTS * BATCH * o.ks.row;
        UNROLLED for (int j = 0; j < 4; j++) value_at[j] += PARTS * BATCH * o.vs.row;
    };
    if (end > begin) fetch(0);
#if APPEND
    const Angles by = angles_of(cosines, sines, positions, b, 0, 1, at_row, context);
    Piece new_k[OF_KEY] = {}, new_v[OF_VALUE] = {};
    const i64 own_key = k - keys, own_value = v - values;
    const bool writes = sharer == 0 && warp == 0 && at_row < o.keys;
    // it takes long: only the warps that write the row or multiply it make it
    if (writes || (at_row >= begin && (at_row - begin) / BATCH % PARTS == own)) {
        UNROLLED for (int p = 0; p < OF_KEY; p++) {
            const int piece = t + 4 * p, e = piece * 8;
            if (piece >= PIECES) continue;
            const Vec<CACHE, 8> x = cached(piece_of(new_key + b * nkb + kv * nkh, e, k_scale, by, epsilon), key_step + kv * D + e);
            new_k[p] = *(const Piece*)&x;
            if (writes && group == 0) store(present_key + own_key + at_row * o.ks.row + e, x);
        }
        UNROLLED for (int s = 0; s < OF_VALUE; s++) {
            const int piece = group + 8 * s, e = piece * 8;
            if (piece >= PIECES) continue;
            const Vec<CACHE, 8> x = cached(load<8>(new_value + b * nvb + kv * nvh + e), value_step + kv * D + e);
            new_v[s] = *(const Piece*)&x;
            if (writes && t == 0) store(present_value + own_value + at_row * o.vs.row + e, x);
        }
    }
    UNROLLED for (int p = 0; p < OF_KEY; p++) {
        q[p] = {};
        if (!asks || t + 4 * p >= PIECES) continue;
        const int e = (t + 4 * p) * 8;
        const Vec<T, 8> piece = TURNED ? piece_of(of_q, e, q_scale, by, epsilon) : load<8>(of_q + e);
        q[p] = *(const uint4*)&piece;
    }
    const bool keys_apart = present_key != keys, values_apart = present_value != values;
    const int copied = keys_apart || values_apart ? o.keys * PIECES : 0;
    ROLLED for (int i = sharer * 32 * WARPS + threadIdx.x; i < copied; i += o.group / HEADS * PARTS * 32) {
        const int row = i / PIECES, e = i % PIECES * 8;
        if (row == at_row) continue;
        const bool kept = KEEP_PAST || row < at_row;
        if (keys_apart) store(present_key + own_key + row * o.ks.row + e, kept ? load<8>(k + row * o.ks.row + e) : Vec<CACHE, 8>{});
        if (values_apart) store(present_value + own_value + row * o.vs.row + e, kept ? load<8>(v + row * o.vs.row + e) : Vec<CACHE, 8>{});
    }
#endif
    float unit = 1;  // of the head's logits
#if IN_STEPS
    float most_of_q = 0;
    auto by_steps = [&](int p, int j) {  // two of q's numbers, in the keys' steps
        float2 x = unpack2<T>(((const u32*)&q[p])[j]);
        const float* step = key_step + kv * D + (t + 4 * p) % PIECES * 8 + 2 * j;
        return make_float2(x.x * step[0], x.y * step[1]);
    };
    UNROLLED for (int x = 0; x < 4 * OF_KEY; x++) {
        const float2 two = by_steps(x / 4, x % 4);
        most_of_q = fmaxf(most_of_q, fmaxf(fabsf(two.x), fabsf(two.y)));
    }
    most_of_q = quad_max(most_of_q);
    if (most_of_q > 0 && most_of_q < -NEGATIVE_INFINITY) unit = most_of_q;
    UNROLLED for (int x = 0; x < 4 * OF_KEY; x++) {
        const float2 two = by_steps(x / 4, x % 4);
        ((u32*)&q[x / 4])[x % 4] = pack2<T>(two.x / unit, two.y / unit);
    }
#endif
    for (; first < end; first += PARTS * BATCH) {
        __syncwarp();  // keeps the reads of the stage that comes again before its next load
        fetch(stage ^ 1);
        cp_async_wait<1>();
        __syncwarp();
        Piece* const at = mine + stage * HELD * 32;
#if APPEND
        if (at_row >= first && at_row < first + BATCH) {
            UNROLLED for (int x = 0; x < 2 * OF_KEY; x++)
                if (first + x / OF_KEY * 8 + group == at_row) at[x * 32] = new_k[x % OF_KEY];
            UNROLLED for (int x = 0; x < 4 * OF_VALUE; x++)
                if (first + value_key(x / OF_VALUE) == at_row) at[(2 * OF_KEY + x) * 32] = new_v[x % OF_VALUE];
        }
#endif
        float z[4];  // of the head, the keys whose values the lane has
        UNROLLED for (int half = 0; half < 2; half++) {
            float dot[4] = {};
            UNROLLED for (int p = 0; p < OF_KEY; p++) {
                const uint4 words = words_of(at[(half * OF_KEY + p) * 32]);
                mma(dot, {q[p].x, 0, q[p].y, 0}, &words.x, T());
                mma(dot, {q[p].z, 0, q[p].w, 0}, &words.z, T());
            }
            UNROLLED for (int e = 0; e < 2; e++) {
                const int j = half * 2 + e, key = first + value_key(j);
                float m = 0, m2 = 0;
                if (MASK && asks && key < end) m = to_float(mask[group * o.mask.head + key * o.mask.column]);
                if (MASK2 && asks && key < end) m2 = to_float(mask2[group * o.mask2.head + key * o.mask2.column]);
                const float product = dot[e] * unit;
                z[j] = key >= end ? NEGATIVE_INFINITY : NATURAL ? logit(o, product, m, m2) : product * scale;
            }
        }
        const float now = quad_max(fmaxf(fmaxf(fmaxf(top, z[0]), fmaxf(z[1], z[2])), z[3]));
        const float zero = safe(now), fade = power2((top - zero) * UNIT);
        top = now;
        sum *= fade;
        const float fades[2] = {__shfl_sync(~0u, fade, 8 * t), __shfl_sync(~0u, fade, 8 * t + 4)};
        UNROLLED for (int j = 0; j < 4; j++) {
            z[j] = power2((z[j] - zero) * UNIT);
            sum += z[j];
        }
        const u32 weights[2] = {pack2<T>(z[0], z[1]), pack2<T>(z[2], z[3])};
        UNROLLED for (int s = 0; s < OF_VALUE; s++) {
            uint4 rows[4];
            UNROLLED for (int j = 0; j < 4; j++) rows[j] = words_of(at[(2 * OF_KEY + j * OF_VALUE + s) * 32]);
            UNROLLED for (int w = 0; w < 4; w++) {
                UNROLLED for (int r = 0; r < 4; r++) acc[s][w][r] *= fades[r % 2];
                auto word = [&](int j) { return ((const u32*)&rows[j])[w]; };
                mma(acc[s][w],
                    {__byte_perm(word(0), word(1), 0x5410), __byte_perm(word(0), word(1), 0x7632),
                     __byte_perm(word(2), word(3), 0x5410), __byte_perm(word(2), word(3), 0x7632)},
                    weights, T());
            }
        }
        stage ^= 1;
    }
    cp_async_wait<0>();  // nothing is on its way to the memory of a block that has ended
#if CLUSTER > 1
    auto put = [&](int block, float* to, float4 x) { give(smem_address(to), arrived, block, x); };
    cluster_wait();
#else
    auto put = [&](int, float* to, float4 x) { *(float4*)to = x; };
#endif
    auto part_of = [&](int head) { return parts + (head / CLUSTER * PARTS + own) * PITCH; };
    UNROLLED for (int s = 0; s < OF_VALUE; s++)
        UNROLLED for (int e = 0; e < 2; e++) {
            const int head = 2 * t + e, piece = group + 8 * s;
            if (head >= HEADS || piece >= PIECES) continue;
            UNROLLED for (int w = 0; w < 4; w += 2) {
                float4 x = make_float4(acc[s][w][e], acc[s][w][2 + e], acc[s][w + 1][e], acc[s][w + 1][2 + e]);
#if IN_STEPS
                const float* step = value_step + kv * D + piece * 8 + 2 * w;
                x.x *= step[0], x.y *= step[1], x.z *= step[2], x.w *= step[3];
#endif
                put(head % CLUSTER, part_of(head) + piece * 8 + 2 * w, x);
            }
        }
    UNROLLED for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (asks && t == 0) put(group % CLUSTER, part_of(group) + D, make_float4(top, sum, 0, 0));
#if CLUSTER > 1
    if (own_heads) await_bytes(arrived);
#else
    __syncthreads();
#endif
    constexpr int OWN = (PARTS + 31) / 32, WIDE = (D + 31) / 32;
    for (int i = warp; i < SLOTS * WIDE; i += WARPS) {  // 32 columns of a head
        const int slot = i / WIDE, g = blockIdx.x + slot * CLUSTER, d = i % WIDE * 32 + lane;
        if (g >= HEADS) break;
        const float* from = parts + slot * PARTS * PITCH;
        // each lane has a part or a few, and hands its weight on
        float most = NEGATIVE_INFINITY, total = 0;
        float weights[OWN];
        UNROLLED for (int i = 0; i < OWN; i++) {
            const int at = i * 32 + lane;
            weights[i] = at < PARTS ? from[at * PITCH + D] : NEGATIVE_INFINITY;
            most = fmaxf(most, weights[i]);
        }
        UNROLLED for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
        const int h = h0 + g;
        const float drain = sink ? to_float(sink[h]) * (LOG2E / UNIT) : NEGATIVE_INFINITY;
        most = fmaxf(most, drain);
        UNROLLED for (int i = 0; i < OWN; i++) {
            const int at = i * 32 + lane;
            weights[i] = power2((weights[i] - safe(most)) * UNIT);
            total += at < PARTS ? weights[i] * from[at * PITCH + D + 1] : 0.0f;
        }
        total = warp_sum(total);
        if (sink) total += power2((drain - safe(most)) * UNIT);
        float value = 0;
        UNROLLED for (int i = 0; i < PARTS; i++)
            value += __shfl_sync(~0u, weights[i / 32], i % 32) * from[i * PITCH + min(d, D - 1)];
        if (d >= D) continue;
        value *= GUARD && total == 0 ? 0.0f : 1 / total;
        if (is_dead(total)) value = nothing(o.v + b * o.vs.batch + kv * o.vs.head + d, o.vs.row, o.keys);
        y[b * yb + h * yh + d] = from_float<T>(value);
        if (d == 0 && lse) ((float2*)lse)[(i64)b * o.heads + h] = row_lse(NATURAL ? most : most * (1 / LOG2E), total);
    }
}
