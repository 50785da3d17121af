// norm/fold.cu: LayerNorm's scale and bias moved into the weights of the product that follows.
//   wq = round(gamma w)   cs[n] = sum_k wq[k, n] (of the ROUNDED wq)   cv[n] = sum_k beta[k] w[k, n] + c[n]
// Idea     : one pass over w, all of it on its way at once where it is small. fold_rows: w is [N,K], a
//            warp a row. fold_columns: w is [K,N], a block takes COLS columns of 1 / PARTS of the rows; the
//            PARTS blocks of a cluster give their sums to the first, which adds them in order. All weights
//            of a program stand in a table; `first`: the strip of columns where one begins.
// Inputs   : w W (bf16, f16: T; or float, of which T is written as well), gamma, beta [K] T or null,
//            c [N] T or null.   Outputs: low (where W is float), wq T, cs, cv [N] f32.
// Macros   : T, VEC (elements an access: 8 where rows are 16-byte aligned, else 1); fold_columns: COLS (at
//            most 32 VEC), WARPS, PARTS (1 below sm_90), HELD loads of w in flight a thread, W, ROWS of the
//            table (a power of two).
// Launch   : fold_rows ceil(N / 4) x 128; fold_columns PARTS sum ceil(N / COLS) x 32 WARPS, clusters of PARTS.
// Numerics : f32 sums in an order that depends on the shape and the macros alone.
// Bound    : bytes, w read and wq written.
#include "sm90.cuh"

// VEC neighbours as pairs in 32-bit words: an array of 16-bit values would take a register each.
constexpr int WORDS = (VEC + 1) / 2;
typedef Vec<u32, WORDS> Words;
DEVICE Words load_words(const T* p) {
    if (VEC > 1) return load<WORDS>((const u32*)p);
    return {{p->bits}};
}
DEVICE void store_words(T* p, const Words& v) {
    if (VEC > 1) store<WORDS>((u32*)p, v);
    else p->bits = (u16)v.at[0];
}
// w becomes wq; `s` and `v` take what it adds to cs and cv.
DEVICE void fold_pair(u32& w, float2 g, float2 b, float& s0, float& s1, float& v0, float& v1) {
    float2 x = unpack2<T>(w);
    w = pack2<T>(g.x * x.x, g.y * x.y);
    float2 q = unpack2<T>(w);
    s0 += q.x, s1 += q.y, v0 += b.x * x.x, v1 += b.y * x.y;
}

#ifndef COLS
extern "C" __global__ __launch_bounds__(128) void fold_rows(
    const T* w, const T* gamma, const T* beta, const T* c, int K, int N, T* wq, float* cs, float* cv) {
    after_previous_launch();
    int n = blockIdx.x * 4 + threadIdx.x / 32;
    if (n >= N) return;
    bool aligned = (((u64)gamma | (u64)beta) & 15) == 0;
    auto scales = [&](const T* p, int k, float otherwise) {
        Words v;
        if (!p) {
            UNROLLED for (int j = 0; j < WORDS; j++) v.at[j] = pack2<T>(otherwise, VEC > 1 ? otherwise : 0.0f);
        } else if (VEC == 1 || aligned) {
            v = load_words(p + k);
        } else {
            UNROLLED for (int j = 0; j < WORDS; j++)
                v.at[j] = p[k + 2 * j].bits | (u32)p[k + 2 * j + 1].bits << 16;
        }
        return v;
    };
    float s[2] = {}, v[2] = {};
    ROLLED for (int k = threadIdx.x % 32 * VEC; k < K; k += 32 * VEC) {
        Words x = load_words(w + (i64)n * K + k), g = scales(gamma, k, 1.0f), b = scales(beta, k, 0.0f);
        UNROLLED for (int j = 0; j < WORDS; j++)
            fold_pair(x.at[j], unpack2<T>(g.at[j]), unpack2<T>(b.at[j]), s[0], s[1], v[0], v[1]);
        store_words(wq + (i64)n * K + k, x);
    }
    float total = warp_sum(s[0] + s[1]), shift = warp_sum(v[0] + v[1]);
    if (threadIdx.x % 32) return;
    cs[n] = total;
    cv[n] = shift + (c ? to_float(c[n]) : 0.0f);
}
#else
constexpr int THREADS = 32 * WARPS, LANES = COLS / VEC, GROUPS = THREADS / LANES;
constexpr int BLOCKS = (HELD > 4 ? 768 : 1024) / THREADS;  // an SM's: as many as the registers let
static_assert(LANES <= 32 && 32 % LANES == 0 && THREADS >= 2 * COLS, "a row is a warp's or less");

template <class E> struct Given { typedef Words type; };  // what a thread loads of w at once
template <> struct Given<float> { typedef Vec<float, VEC> type; };
DEVICE void get(Words& v, const T* p) { v = load_words(p); }
DEVICE void get(Vec<float, VEC>& v, const float* p) { v = load<VEC>(p); }
DEVICE Words rounded(const Words& v) { return v; }
DEVICE Words rounded(const Vec<float, VEC>& v) {
    Words q;
    UNROLLED for (int j = 0; j < WORDS; j++) q.at[j] = pack2<T>(v.at[2 * j], VEC > 1 ? v.at[2 * j + (VEC > 1)] : 0.0f);
    return q;
}
struct Job {
    const W* w;
    const T *gamma, *beta, *c;
    T *low, *wq;
    float *cs, *cv;
    i64 K, N, first;
};
struct Jobs { Job at[ROWS]; };

// Four sums to the same place of the cluster's first block, counted by its barrier `bar`.
DEVICE void push(float* to, u64* bar, const Vec<float, 4>& v) {
    asm volatile(
        "{\n.reg .b32 there, counter;\nmapa.shared::cluster.u32 there, %0, 0;\n"
        "mapa.shared::cluster.u32 counter, %1, 0;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%2, %3, %4, %5}, [counter];\n}" ::
            "r"((u32)__cvta_generic_to_shared(to)),
        "r"((u32)__cvta_generic_to_shared(bar)), "f"(v.at[0]), "f"(v.at[1]), "f"(v.at[2]), "f"(v.at[3])
        : "memory");
}

extern "C" __global__ __launch_bounds__(THREADS, BLOCKS) void fold_columns(
    const __grid_constant__ Jobs jobs, int rows) {
    __shared__ float sums[WARPS][2 * COLS];  // of cs, of cv
    __shared__ __align__(16) float total[2 * COLS], parts[PARTS][2 * COLS];
    __shared__ u64 all;  // the parts of the others are there
    int t = threadIdx.x, lane = t % LANES, group = t / LANES, row = 0, strip = blockIdx.x / PARTS;
    int rank = PARTS > 1 ? (int)cluster_rank() : 0;
    u32 bar = (u32)__cvta_generic_to_shared(&all);
    if (PARTS > 1) {
        if (rank == 0 && t == 0) {
            mbarrier_init(bar, 1);
            fence_barrier_init();
        }
        __syncwarp();  // racecheck would have it between a barrier's first two uses
        if (rank == 0 && t == 0) mbarrier_expect(bar, (PARTS - 1) * 8 * COLS);
        cluster_arrive();
    }
    for (int step = ROWS / 2; step; step /= 2)
        if (row + step < rows && jobs.at[row + step].first <= strip) row += step;
    const Job& job = jobs.at[row];
    int K = (int)job.K, N = (int)job.N, n0 = (strip - (int)job.first) * COLS, n = n0 + lane * VEC;
    int each = (K + PARTS - 1) / PARTS, to = (rank + 1) * each < K ? (rank + 1) * each : K;
    bool in = n < N;
    const W* w = job.w + (in ? n : 0);
    const T *gamma = job.gamma ? job.gamma : (const T*)job.w, *beta = job.beta ? job.beta : gamma;
    float s[2 * WORDS] = {}, v[2 * WORDS] = {};
    after_previous_launch();
    ROLLED for (int first = rank * each + group; first - group < to; first += HELD * GROUPS) {
        Given<W>::type from[HELD];
        T g[HELD], b[HELD];
        UNROLLED for (int u = 0; u < HELD; u++) {  // no branch between the loads
            int k = first + u * GROUPS < to ? first + u * GROUPS : to - 1;
            get(from[u], w + (i64)k * N);
            g[u] = gamma[k], b[u] = beta[k];
        }
        __syncwarp();  // all are on their way before the first is used
        UNROLLED for (int u = 0; u < HELD; u++) {
            int k = first + u * GROUPS;
            if (k >= to || !in) continue;
            float scale = job.gamma ? to_float(g[u]) : 1.0f, shift = job.beta ? to_float(b[u]) : 0.0f;
            Words x = rounded(from[u]);
            if (sizeof(W) == 4) store_words(job.low + (i64)k * N + n, x);
            UNROLLED for (int j = 0; j < WORDS; j++)
                fold_pair(x.at[j], make_float2(scale, scale), make_float2(shift, shift), s[2 * j],
                          s[2 * j + 1], v[2 * j], v[2 * j + 1]);
            store_words(job.wq + (i64)k * N + n, x);
        }
    }
    UNROLLED for (int j = 0; j < VEC; j++)
        UNROLLED for (int step = LANES; step < 32; step *= 2) {
            s[j] += __shfl_xor_sync(~0u, s[j], step);
            v[j] += __shfl_xor_sync(~0u, v[j], step);
        }
    if (t % 32 < LANES)
        UNROLLED for (int j = 0; j < VEC; j++)
            sums[t / 32][lane * VEC + j] = s[j], sums[t / 32][COLS + lane * VEC + j] = v[j];
    __syncthreads();
    if (t < 2 * COLS) {
        float sum = 0;
        UNROLLED for (int i = 0; i < WARPS; i++) sum += sums[i][t];
        (rank ? total : parts[0])[t] = sum;
    }
    __syncthreads();
    if (PARTS > 1) cluster_wait();  // the first block's barrier counts
    if (rank) {
        if (t < COLS / 2) push(parts[rank] + t * 4, &all, load<4>(total + t * 4));
        return;
    }
    n = n0 + t;
    if (t >= COLS || n >= N) return;
    float sum = 0, shift = job.c ? to_float(job.c[n]) : 0.0f;
    if (PARTS > 1) mbarrier_wait(bar, 0);
    UNROLLED for (int i = 0; i < PARTS; i++) sum += parts[i][t], shift += parts[i][COLS + t];
    job.cs[n] = sum;
    job.cv[n] = shift;
}
#endif
