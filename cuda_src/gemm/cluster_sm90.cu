// gemm/cluster_sm90.cu: y = epilogue(LN?(op(a)) . op(b)) on Hopper for few tiles: clusters share k.
// Idea     : a product of few tiles is a chain of latencies, so all bytes start at once and k is split:
//            SPLIT CTAs of a cluster own one tile, each multiplies its range of k with wgmma as the
//            TMA loads land and pushes its sums (st.async) to the CTA that finishes those columns.
//            SHARE CTAs side by side in n load the tile of a together, by multicast. EPI_LN with STATS:
//            four more warps take (mean, M2) of the rows of a from the same shared memory, about a
//            shift near the mean; the cluster's parts are merged by Chan's formula, in order.
//            NORM: a CTA's part of a stays in shared memory, where the warps of the statistics and those
//            that will multiply make (a - mean) rstd gamma + beta of it; gamma and beta are then not in b.
//            STATIC_B: b does not change while the graph runs, so its loads start before the launch
//            before is through (programmatic dependent launch); everything else waits for that.
//            LATE: the last third of the clusters, which find no room before then, load a beside b,
//            step by step: all of b ahead of it would only delay the first products.
//            IM2COL: a is gathered from images (gemm/im2col.cuh).
// Inputs   : a [M,K] (TRANS_A: [K,M]), b [K,N] (TRANS_B: [N,K]), bf16 or f16, by TMA: row strides and
//            addresses multiples of 16 bytes; STATS: K a multiple of 8.
// Outputs  : y, z [M,N] TO; mean, rstd [M] f32 (STATS).
// Macros   : T, TO, TV, TRANS_A, TRANS_B, WGM (64-row blocks of a tile, a warpgroup each), ROWS (rows
//            loaded of the 64 WGM), BN, SPLIT, SHARE, STAGES, RING (1: a CTA has more steps of 64 k than
//            STAGES), STATS, RMS, NORM (with STATS), HELD (its steps of 64 k), STATIC_B, LATE (with
//            STATIC_B, not NORM), N_STEP (1, 2, 8 or 64: divides N); the epilogue's.
// Launch   : grid SPLIT SHARE ceil(M / (64 WGM)) ceil(N / (BN SHARE)), clusters of SPLIT SHARE.
// Numerics : f32 sums, each CTA's k in order, CTAs in order: bits depend on K and SPLIT alone.
// Bound    : bytes of b from memory; latency below a few MB.
#include "gemm/epilogue.cuh"
#include "tma_ring.cuh"
#include "gemm/im2col.cuh"
#ifndef STATS
#define STATS 0
#endif
#ifndef RMS
#define RMS 0
#endif
#ifndef NORM
#define NORM 0
#define HELD 0
#endif
#ifndef LATE
#define LATE 0
#endif
constexpr int BK = 64, A_BYTES = ROWS * BK * 2, B_BYTES = BN * BK * 2;
constexpr int STAGE = (NORM ? 0 : A_BYTES) + B_BYTES;  // of the ring, behind what of a stays
constexpr int RING_AT = HELD * A_BYTES, B_AT = RING_AT + (NORM ? 0 : A_BYTES);
constexpr int CLUSTER = SPLIT * SHARE, MMA_WARPS = 4 * WGM;
constexpr int TEAM = 128 + (NORM ? 32 * MMA_WARPS : 0), LINES = TEAM / 8;  // of the statistics
constexpr int THREADS = 32 * (MMA_WARPS + (STATS ? 4 : 0) + 1), PRODUCER = THREADS / 32 - 1;
constexpr int LIVE = (ROWS + 15) / 16;             // multiplying warps whose rows exist
constexpr int WIDTH = BN / SPLIT, GROUPS = WIDTH / 8;  // columns a CTA finishes, in groups of 8
// groups of 8 columns that a quad's lanes exchange to store 4 WIDE bytes each
constexpr int OUTS = GATE ? GROUPS / 2 : GROUPS;   // groups of y: GATE makes one of two
constexpr int WIDE = sizeof(TO) > 2 || N_STEP < 8 ? 1 : OUTS % 4 == 0 ? 4 : OUTS % 2 == 0 ? 2 : 1;
static_assert(!GATE || GROUPS % 2 == 0, "a gate and what it lets through are one CTA's");
constexpr int READERS = NORM ? MMA_WARPS : (MMA_WARPS + (STATS ? 4 : 0)) * SHARE;  // warps that free a stage
// sums pushed by the other CTAs: [SPLIT - 1][GROUPS][32 LIVE] float4
constexpr int SUM_AT = RING_AT + STAGES * STAGE, SUM_BYTES = (SPLIT - 1) * GROUPS * LIVE * 512;
constexpr int MOMENT_AT = SUM_AT + SUM_BYTES, MOMENT_BYTES = STATS ? SPLIT * ROWS * 8 : 0;
constexpr int COLUMN_AT = MOMENT_AT + MOMENT_BYTES, GAIN_AT = COLUMN_AT + EPI_COLS * WIDTH * 4;
constexpr int BAR_AT = GAIN_AT + HELD * BK * 4;  // gamma and beta of this CTA's k

// The address in CTA `rank` of the cluster that `address` has in this one.
DEVICE u32 cluster_address(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
// Stores into a CTA of the cluster, counted by the barrier `bar` there.
DEVICE void push(u32 to, u32 bar, float a, float b, float c, float d) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(to),
        "f"(a), "f"(b), "f"(c), "f"(d), "r"(bar)
        : "memory");
}
DEVICE void push(u32 to, u32 bar, float a, float b) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];" ::
                     "r"(to), "f"(a), "f"(b), "r"(bar)
                 : "memory");
}
// All of the cluster: `arrive`, then `wait`. In a lone CTA the producer's warp need not wait: it arrives
// at the barriers where the others, the multiplying warps and those of the statistics, wait for it.
enum { PRODUCT = 1, COLUMNS, MOMENTS_START, MOMENTS_DONE, NORMED };
constexpr int PRODUCT_THREADS = 32 + (NORM ? TEAM : 32 * MMA_WARPS), MOMENTS_THREADS = 128 + 32;
DEVICE void arrive() {
    if (CLUSTER > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
DEVICE void wait(int barrier, int threads) {
    if (CLUSTER > 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    else bar_sync(barrier, threads);
}

template <class E> struct Pack { DEVICE static u32 of(float2 v) { return pack2<E>(v.x, v.y); } };
template <> struct Pack<float> { DEVICE static u32 of(float2) { return 0; } };  // never stored so
DEVICE u32 bits(float2 v) { return Pack<TO>::of(v); }
// Lane q of a quad has columns 2q, 2q + 1 of N groups of 8; afterwards 2 N neighbours of one group:
// of group q where N is 4, the lower or upper four of group q % 2 where N is 2.
template <int N> DEVICE void transpose(u32 (&v)[N]) {
    UNROLLED for (int step = 1; step < N; step *= 2)
        UNROLLED for (int i = 0; i < N; i++) {
            if (i & step) continue;
            bool odd = threadIdx.x & step;
            u32 got = __shfl_xor_sync(~0u, odd ? v[i] : v[i + step], step);
            if (odd) v[i] = got;
            else v[i + step] = got;
        }
}
DEVICE float2 two(Vec<TO, 2> v) { return make_float2(to_float(v.at[0]), to_float(v.at[1])); }
// Neighbours at p, of which `count` exist: both or none where N is even.
DEVICE Vec<TO, 2> load_pair(const TO* p, int count) {
    if (N_STEP > 1) return count > 0 ? load<2>(p) : Vec<TO, 2>{};
    return {count > 0 ? p[0] : TO{}, count > 1 ? p[1] : TO{}};
}
DEVICE void store_pair(TO* p, int count, float2 v) {
    Vec<TO, 2> both = {from_float<TO>(v.x), from_float<TO>(v.y)};
    if (N_STEP > 1 && count > 0) store<2>(p, both);
    if (N_STEP == 1 && count > 0) p[0] = both.at[0];
    if (N_STEP == 1 && count > 1) p[1] = both.at[1];
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void gemm_cluster(
    const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, TO* y, TO* z, const TO* c, int M,
    int N, int K, float epsilon, float* mean, float* rstd, const TR* row0, const TR* row1, const TR* row2,
    const TR* row3, const TV* col0, const TV* col1, float alpha, float beta, float act_alpha, const T* gamma,
    const T* beta_ IM2COL_PARAMS) {
    extern __shared__ __align__(1024) u8 smem[];
    u32 base = smem_address(smem), full = base + BAR_AT, empty = full + STAGES * 8;
    u32 summed = empty + STAGES * 8, counted = summed + 8, here = counted + 8;  // here: NORM's a, by steps
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int rank = CLUSTER > 1 ? (int)cluster_rank() : 0, part = rank % SPLIT, side = rank / SPLIT;
    int tiles_m = (M + 64 * WGM - 1) / (64 * WGM), tile = blockIdx.x / CLUSTER;
    int m0 = tile % tiles_m * (64 * WGM), n0 = (tile / tiles_m * SHARE + side) * BN;
    int all = (K + BK - 1) / BK, per = (all + SPLIT - 1) / SPLIT, first = part * per;
    int steps = all - first < per ? all - first : per;
    // the stage of a step that will be loaded again is free, in every CTA that loads a part of it
    auto release = [&](int step) {
        if (RING && step + STAGES < steps) {
            u32 bar = empty + step % STAGES * 8;
            if (SHARE == 1 || NORM) {
                if (lane == 0) mbarrier_arrive(bar);
            } else if (lane < SHARE) {
                mbarrier_arrive_remote(bar, part + SPLIT * lane);
            }
        }
    };
    // The rows' (mean, rstd) of all the cluster's parts.
    auto moments = [&](int r) {
        float mu = 0, m2 = 0;  // m2: sum of squared deviations
        UNROLLED for (int o = 0; o < SPLIT; o++) {
            int left = K - o * per * BK;
            float count = left < per * BK ? left : per * BK, before = o * per * BK;
            float share = o ? __fdividef(count, before + count) : 1.0f;
            float2 v = *(const float2*)(smem + MOMENT_AT + (o * ROWS + r) * 8);
            float d = v.x - mu;
            m2 += v.y + d * (before * share) * d;  // d * d may be inf, before 0
            mu += d * share;
        }
        return make_float2(mu, rsqrtf(max_nan(m2, 0.0f) / K + epsilon));
    };
    // By thread t of TEAM: 8 lanes a row, a lane has one 16-byte chunk of each step.
    auto take_moments = [&](int t) {
        constexpr int EACH = ROWS / SHARE, PASSES = (EACH + LINES - 1) / LINES;
        int sub = t / 8, chunk = lane % 8;
        int left = K - first * BK;
        float shift[PASSES] = {}, s1[PASSES] = {}, s2[PASSES] = {};
        auto over_lanes = [&](float (&v)[PASSES]) {  // sums over the 8 lanes of a row, to all of them
            UNROLLED for (int step = 1; step < 8; step *= 2)
                UNROLLED for (int i = 0; i < PASSES; i++) v[i] += __shfl_xor_sync(~0u, v[i], step);
        };
        struct Chunks { uint4 of[PASSES]; } even, odd;
        auto fetch = [&](Chunks& v, int step) {
            int s = step % STAGES;
            mbarrier_wait(NORM ? here + step * 8 : full + s * 8, NORM ? 0 : step / STAGES & 1);
            UNROLLED for (int i = 0; i < PASSES; i++) {
                int r = side * EACH + i * LINES + sub;
                v.of[i] = uint4{};
                if (EACH % LINES == 0 || i * LINES + sub < EACH)
                    v.of[i] = *(const uint4*)(smem + (NORM ? step * A_BYTES : s * STAGE) + r * 128 +
                                              ((chunk ^ (r & 7)) << 4));
            }
        };
        auto observe = [&](const Chunks& v, int step) {
            if (!RMS && step == 0) {  // the rows' first 64 values tell where about the mean is
                UNROLLED for (int i = 0; i < PASSES; i++) {
                    float2 a = unpack2<T>(v.of[i].x), b = unpack2<T>(v.of[i].y);
                    float2 c = unpack2<T>(v.of[i].z), d = unpack2<T>(v.of[i].w);
                    shift[i] = ((a.x + a.y) + (b.x + b.y)) + ((c.x + c.y) + (d.x + d.y));
                }
                over_lanes(shift);
                UNROLLED for (int i = 0; i < PASSES; i++) shift[i] *= 1.0f / (left < BK ? left : BK);
            }
            if (step * BK + chunk * 8 < left)
                UNROLLED for (int i = 0; i < PASSES; i++) {
                    u32 words[4] = {v.of[i].x, v.of[i].y, v.of[i].z, v.of[i].w};
                    float t1 = 0, t2 = 0;  // added up first: fewer roundings of the long sums
                    UNROLLED for (int j = 0; j < 4; j++) {
                        float2 p = unpack2<T>(words[j]);
                        float a = p.x - shift[i], b = p.y - shift[i];
                        t1 += a + b;
                        t2 += a * a;
                        t2 += b * b;
                    }
                    s1[i] += t1;
                    s2[i] += t2;
                }
            if (RING && !NORM) {
                __syncwarp();
                release(step);
            }
        };
        fetch(even, 0);
        for (int step = 0; step < steps; step += 2) {  // one step is read while another is added up
            if (step + 1 < steps) fetch(odd, step + 1);
            observe(even, step);
            if (step + 1 == steps) break;
            if (step + 2 < steps) fetch(even, step + 2);
            observe(odd, step + 1);
        }
        over_lanes(s1);
        over_lanes(s2);
        float inverse = 1.0f / (left < per * BK ? left : per * BK);
        u32 at = base + MOMENT_AT + (part * ROWS + side * EACH + sub) * 8, bar = counted;
        if (CLUSTER > 1) {  // lane j of a row tells CTA j
            at = cluster_address(at, chunk % CLUSTER);
            bar = cluster_address(bar, chunk % CLUSTER);
        }
        UNROLLED for (int i = 0; i < PASSES; i++) {
            float over = s1[i] * inverse, mu = RMS ? 0.0f : shift[i] + over;
            float m2 = RMS ? s2[i] : fmaf(-s1[i], over, s2[i]);
            if (chunk < CLUSTER && (EACH % LINES == 0 || i * LINES + sub < EACH)) {
                if (CLUSTER > 1) push(at + i * LINES * 8, bar, mu, m2);
                else *(float2*)(smem + (at - base) + i * LINES * 8) = make_float2(mu, m2);
            }
        }
    };
    // NORM: this CTA's part of a, as soon as all its bytes and gamma and beta are there.
    auto normalise = [&] {
        constexpr int GAINS = NORM ? (HELD * BK + TEAM - 1) / TEAM : 1, EACH = (ROWS + LINES - 1) / LINES;
        const int t = threadIdx.x;
        T* gain = (T*)(smem + GAIN_AT);
        T g[GAINS], b[GAINS];
        UNROLLED for (int i = 0; i < GAINS; i++) {
            int k = first * BK + t + i * TEAM;
            g[i] = k < K ? gamma[k] : T{};
            b[i] = k < K && beta_ ? beta_[k] : T{};
        }
        take_moments(t);
        UNROLLED for (int i = 0; i < GAINS; i++)
            if (HELD * BK % TEAM == 0 || t + i * TEAM < HELD * BK)
                gain[t + i * TEAM] = g[i], gain[HELD * BK + t + i * TEAM] = b[i];
        bar_sync(MOMENTS_DONE, TEAM);
        if (CLUSTER > 1) mbarrier_wait(counted, 0);
        float2 of[EACH];
        UNROLLED for (int i = 0; i < EACH; i++) {
            int r = t / 8 + i * LINES;
            of[i] = moments(min(r, ROWS - 1));
            if (n0 == 0 && part == 0 && t % 8 == 0 && r < ROWS && m0 + r < M)
                mean[m0 + r] = of[i].x, rstd[m0 + r] = of[i].y;
        }
#pragma unroll 2
        for (int step = 0; step < steps; step++) {
            const uint4 g4 = *(const uint4*)(gain + step * BK + t % 8 * 8);
            const uint4 b4 = *(const uint4*)(gain + (HELD + step) * BK + t % 8 * 8);
            mbarrier_wait(here + step * 8, 0);
            UNROLLED for (int i = 0; i < EACH; i++) {
                int r = t / 8 + i * LINES;
                if (ROWS % LINES && r >= ROWS) continue;
                uint4* at = (uint4*)(smem + step * A_BYTES + r * 128 + ((t % 8 ^ (r & 7)) << 4));
                uint4 v = *at;
                auto word = [&](u32& both, u32 gs, u32 bs) {
                    float2 x = unpack2<T>(both), g = unpack2<T>(gs), b = unpack2<T>(bs);
                    both = pack2<T>((x.x - of[i].x) * of[i].y * g.x + b.x, (x.y - of[i].x) * of[i].y * g.y + b.y);
                };
                word(v.x, g4.x, b4.x), word(v.y, g4.y, b4.y), word(v.z, g4.z, b4.z), word(v.w, g4.w, b4.w);
                *at = v;
            }
        }
        fence_proxy_async();
        bar_sync(NORMED, TEAM);
    };
    launch_dependents();

    if (warp == PRODUCER) {
        auto load_b = [&](int step) {
            int s = step % STAGES, k = (first + step) * BK;
            u32 b = base + B_AT + s * STAGE, bar = full + s * 8;
            mbarrier_expect(bar, STAGE);
            const int tap = IM2COL ? (first + step) / blocks : 0;
            if (IM2COL || TRANS_B)
                tma_load(b, map_b, bar, k - tap * blocks * BK, n0, tap);
            else if (N_STEP == 64)  // 64-wide blocks of n are the map's third dimension
                tma_load(b, map_b, bar, 0, k, n0 / 64);
            else
                UNROLLED for (int i = 0; i < BN / 64; i++) tma_load(b + i * 8192, map_b, bar, n0 + i * 64, k, 0);
        };
        Pixel pixel = first_pixel(m0 + side * (ROWS / SHARE), PIXELS_OF_Y);
        auto load_a = [&](int step) {  // this CTA's share of the rows (TRANS_A: of k), to all sharers
            int s = step % STAGES, k = (first + step) * BK;
            u32 a = base + (NORM ? step * A_BYTES : s * STAGE), bar = NORM ? here + step * 8 : full + s * 8;
            if (NORM) mbarrier_expect(bar, A_BYTES);
            u16 sharers = 0;
            for (int i = 0; i < SHARE; i++) sharers |= 1 << (part + SPLIT * i);
            UNROLLED for (int i = 0; i < (TRANS_A ? WGM : 1); i++) {
                u32 to = a + i * 8192 + side * ((TRANS_A ? BK : ROWS) / SHARE * 128);
                int x = TRANS_A ? m0 + i * 64 : k;
                int row = TRANS_A ? k + side * (BK / SHARE) : m0 + side * (ROWS / SHARE);
                const int tap = IM2COL ? (first + step) / blocks : 0;
                if (IM2COL) load_pixels(to, map_a, bar, k - tap * blocks * BK, pixel, tap, SHARE > 1 ? sharers : 0);
                else if (SHARE == 1) tma_load(to, map_a, bar, x, row, 0);
                else tma_load_multicast(to, map_a, bar, x, row, 0, sharers);
            }
        };
#if LATE
        const bool ahead = 3 * tile < 2 * (int)(gridDim.x / CLUSTER);
#endif
        if (elect()) {
            tma_prefetch(map_b);
            tma_prefetch(map_a);
            Ring<STAGES>(full, true).set_up(READERS);
            mbarrier_init(summed, 1);
            mbarrier_init(counted, 1);
            for (int step = 0; step < HELD; step++) mbarrier_init(here + step * 8, 1);
            fence_barrier_init();
            if (SPLIT > 1) mbarrier_expect(summed, SUM_BYTES);
            if (STATS && CLUSTER > 1) mbarrier_expect(counted, MOMENT_BYTES);
#if LATE
            if (ahead)
#else
            if (STATIC_B)
#endif
                for (int step = 0; step < STAGES && step < steps; step++) load_b(step);
        }
        __syncwarp();
        arrive();
        if (CLUSTER == 1) bar_arrive(PRODUCT, PRODUCT_THREADS);
        if (CLUSTER == 1 && STATS && !NORM) bar_arrive(MOMENTS_START, MOMENTS_THREADS);
        if (SHARE > 1) wait(0, 0);
        if (elect()) {
            grid_dependency_wait();
            if (NORM)
                for (int step = 0; step < steps; step++) load_a(step);
            for (int step = 0; step < STAGES && step < steps; step++) {
#if LATE
                if (!ahead) load_b(step);
#else
                if (!STATIC_B) load_b(step);
#endif
                if (!NORM) load_a(step);
            }
        }
        __syncwarp();
        // before it needs what the others do after theirs: under racecheck all wait, or none passes
        if (SHARE == 1 && CLUSTER > 1) wait(0, 0);
        if (RING && elect())
            for (int step = STAGES; step < steps; step++) {
                mbarrier_wait(empty + step % STAGES * 8, step / STAGES - 1 & 1);
                load_b(step);
                if (!NORM) load_a(step);
            }
        return;
    }
    if (NORM) {  // one copy of the code for both kinds of warps
        arrive();
        wait(PRODUCT, PRODUCT_THREADS);
        grid_dependency_wait();
        normalise();
    }
    if (warp < MMA_WARPS) {
        if (!NORM) {
            arrive();
            wait(PRODUCT, PRODUCT_THREADS);
            grid_dependency_wait();
        }
        // what the epilogue will need starts its way before the multiplication
        constexpr int MANY = EPI_COLS ? (WIDTH + 128 * WGM - 1) / (128 * WGM) : 1;
        float columns[MANY][2];
        UNROLLED for (int i = 0; i < MANY; i++) {
            int at = threadIdx.x + i * 128 * WGM, n = n0 + part * WIDTH + at;
            bool in = at < WIDTH && n < N;
            columns[i][0] = EPI_COLS > 0 && in ? to_float(col1[n]) : 0.0f;
            columns[i][1] = EPI_COLS > 1 && in ? to_float(col0[n]) : 0.0f;
        }
        int row = warp * 16 + lane / 4, m = m0 + row;  // and 8 below
        int n = n0 + part * WIDTH + lane % 4 * 2;      // and 8 more a group
        constexpr bool EARLY = EPI_OPERAND && GROUPS <= 8;
        Vec<TO, 2> cs[EARLY ? GROUPS : 1][2];
        auto load_c = [&](int g, int h) {
            int there = m + h * 8 < M ? N - n - g * 8 : 0;
            return load_pair(c + (i64)(m + h * 8) * N + n + g * 8, there);
        };
        if (EARLY && warp < LIVE)
            UNROLLED for (int g = 0; g < GROUPS; g++)
                UNROLLED for (int h = 0; h < 2; h++) cs[g][h] = load_c(g, h);
        Row rows[2] = {};
        if (!STATS && EPI_ROWS)
            UNROLLED for (int h = 0; h < 2; h++) {
                int r = m + h * 8;
                bool in = r < M;
                rows[h] = {in ? to_float(row0[r]) : 0.0f, EPI_R1 && in ? to_float(row1[r]) : 0.0f,
                           EPI_R2 && in ? to_float(row2[r]) : 0.0f,
                           EPI_ROWS > 2 && in ? to_float(row3[r]) : 0.0f};
            }

        float acc[BN / 2];
        int step = 0;
        do {  // (a loop that might not run at all has ptxas serialise the products)
            int s = step % STAGES;
            u32 a = base + (NORM ? step * A_BYTES : s * STAGE) + warp / 4 * 8192, b = base + B_AT + s * STAGE;
            mbarrier_wait(full + s * 8, step / STAGES & 1);
            wgmma_fence();
            UNROLLED for (int q = 0; q < BK / 16; q++)  // rows past ROWS are garbage, never stored
                Wgmma<T, BN, TRANS_A, !TRANS_B>::run(
                    acc, wgmma_descriptor<!TRANS_A>(a + q * (TRANS_A ? 2048 : 32)),
                    wgmma_descriptor<TRANS_B>(b + q * (TRANS_B ? 32 : 2048)), step | q);
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0) release(step - 1);
        } while (++step < steps);
        wgmma_wait<0>();

        if (EPI_COLS) {
            float* to = (float*)(smem + COLUMN_AT);
            UNROLLED for (int i = 0; i < MANY; i++) {
                int at = threadIdx.x + i * 128 * WGM;
                if (at < WIDTH) {
                    to[at] = columns[i][0];
                    if (EPI_COLS > 1) to[WIDTH + at] = columns[i][1];
                }
            }
        }
        // a wait long over: in one block with the stores, ptxas would serialise the products
        if (CLUSTER == 1) mbarrier_wait(full + (steps - 1) % STAGES * 8, (steps - 1) / STAGES & 1);
        if (EPI_COLS) bar_sync(COLUMNS, 128 * WGM);
        if (warp < LIVE) {
            float sum[GROUPS * 4];
            if (SPLIT == 1) {
                UNROLLED for (int i = 0; i < GROUPS * 4; i++) sum[i] = acc[i];
            } else {
                u32 mine = base + SUM_AT + threadIdx.x * 16;
                constexpr int SLOT = GROUPS * LIVE * 512;
                UNROLLED for (int o = 0; o < SPLIT; o++) {
                    if (o == part) continue;
                    u32 to = cluster_address(mine + (part < o ? part : part - 1) * SLOT, o + SPLIT * side);
                    u32 bar = cluster_address(summed, o + SPLIT * side);
                    UNROLLED for (int g = 0; g < GROUPS; g++) {
                        const float* v = acc + (o * GROUPS + g) * 4;
                        push(to + g * LIVE * 512, bar, v[0], v[1], v[2], v[3]);
                    }
                }
                float own[GROUPS * 4];
                UNROLLED for (int i = 0; i < GROUPS * 4; i++) {
                    own[i] = acc[i];
                    UNROLLED for (int o = 1; o < SPLIT; o++)
                        if (o == part) own[i] = acc[o * GROUPS * 4 + i];
                }
                mbarrier_wait(summed, 0);
                UNROLLED for (int o = 0; o < SPLIT; o++) {
                    const u8* from = smem + SUM_AT + threadIdx.x * 16 + (o < part ? o : o - 1) * SLOT;
                    UNROLLED for (int g = 0; g < GROUPS; g++) {
                        float* v = own + g * 4;
                        float4 got = make_float4(v[0], v[1], v[2], v[3]);
                        if (o != part) got = *(const float4*)(from + g * LIVE * 512);
                        float* t = sum + g * 4;
                        t[0] = o ? t[0] + got.x : got.x, t[1] = o ? t[1] + got.y : got.y;
                        t[2] = o ? t[2] + got.z : got.z, t[3] = o ? t[3] + got.w : got.w;
                    }
                }
            }
            if (STATS && !NORM) {
                if (CLUSTER > 1) mbarrier_wait(counted, 0);
                else bar_sync(MOMENTS_DONE, 32 * LIVE + 128);
                UNROLLED for (int h = 0; h < 2; h++) {
                    int r = row + h * 8;
                    if (ROWS % 16 && r >= ROWS) continue;
                    float2 of = moments(r);
                    rows[h].r0 = of.y, rows[h].r1 = of.x;
                    if (n0 == 0 && part == 0 && lane % 4 == 0 && m + h * 8 < M) {
                        mean[m + h * 8] = of.x;
                        rstd[m + h * 8] = of.y;
                    }
                }
            }
            UNROLLED for (int block = 0; block < OUTS; block += WIDE) {
                constexpr int EACH = GATE ? 2 : 1;  // groups of the product to one of y
                float2 k0[EACH * WIDE] = {}, k1[EACH * WIDE] = {};
                UNROLLED for (int j = 0; j < EACH * WIDE; j++) {
                    const float* from = (const float*)(smem + COLUMN_AT) + (EACH * block + j) * 8 + lane % 4 * 2;
                    if (EPI_COLS > 0) k1[j] = *(const float2*)from;
                    if (EPI_COLS > 1) k0[j] = *(const float2*)(from + WIDTH);
                }
                UNROLLED for (int h = 0; h < 2; h++) {
                    u32 out[WIDE], out_z[WIDE];
                    UNROLLED for (int j = 0; j < WIDE; j++) {
                        int g = block + j;
#if GATE
                        float pair[2], unused = 0;
                        UNROLLED for (int e = 0; e < 2; e++) {
                            const float* from = sum + (2 * g + e) * 4 + h * 2;
                            const float2 c0 = k0[2 * j + e], c1 = k1[2 * j + e];
                            float gate = before_act(from[0], rows[h], c0.x, c1.x, 0.0f, alpha, beta, unused);
                            float through = before_act(from[1], rows[h], c0.y, c1.y, 0.0f, alpha, beta, unused);
                            pair[e] = gated<float>(gate, through, act_alpha);
                        }
                        if (WIDE > 1) {
                            out[j] = bits(make_float2(pair[0], pair[1]));
                        } else if (m + h * 8 < M && n0 + part * WIDTH + g * 16 < N) {
                            int at = (n0 + part * WIDTH) / 2 + g * 8 + lane % 4 * 2;
                            Vec<TO, 2> both = {from_float<TO>(pair[0]), from_float<TO>(pair[1])};
                            store<2>(y + (i64)(m + h * 8) * (N / 2) + at, both);
                        }
                        continue;
#endif
                        float2 cc = {}, zz = {}, v = {sum[g * 4 + h * 2], sum[g * 4 + h * 2 + 1]};
                        if (EARLY) cc = two(cs[EARLY ? g : 0][h]);
                        else if (EPI_OPERAND) cc = two(load_c(g, h));
                        Dots dots = {};
                        v.x = epilogue<float>(v.x, rows[h], k0[j].x, k1[j].x, cc.x, alpha, beta, act_alpha, zz.x, dots);
                        v.y = epilogue<float>(v.y, rows[h], k0[j].y, k1[j].y, cc.y, alpha, beta, act_alpha, zz.y, dots);
                        if (WIDE > 1) {
                            out[j] = bits(v);
                            out_z[j] = bits(zz);
                            continue;
                        }
                        i64 at = (i64)(m + h * 8) * N + n + g * 8;
                        int there = m + h * 8 < M ? N - n - g * 8 : 0;
                        store_pair(y + at, there, v);
                        if (SAVE_Z) store_pair(z + at, there, zz);
                    }
                    if (WIDE > 1) {
                        transpose(out);
                        if (SAVE_Z) transpose(out_z);
                        int at = (n0 + part * WIDTH) / EACH + (block + lane % WIDE) * 8 + lane % 4 / WIDE * 4;
                        if (m + h * 8 < M && at < N / EACH) {
                            i64 to = (i64)(m + h * 8) * (N / EACH) + at;
                            store<WIDE>((u32*)(y + to), *(Vec<u32, WIDE>*)out);
                            if (SAVE_Z) store<WIDE>((u32*)(z + to), *(Vec<u32, WIDE>*)out_z);
                        }
                    }
                }
            }
        }
    } else if (STATS && !NORM) {  // 8 lanes a row, a lane takes one 16-byte chunk of each step
        arrive();
        wait(MOMENTS_START, MOMENTS_THREADS);
        take_moments(threadIdx.x - 32 * MMA_WARPS);
        if (CLUSTER == 1) bar_arrive(MOMENTS_DONE, 32 * LIVE + 128);  // st.async is for clusters alone
    }
}
