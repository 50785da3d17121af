// norm/fold.cu: LayerNorm's scale and bias moved into the weights of the product that follows.
//   wq = round(gamma w)   cs[n] = sum_k wq[k, n] (of the ROUNDED wq)   cv[n] = sum_k beta[k] w[k, n] + c[n]
// Idea     : one pass over w. fold_rows: w is [N,K], a block a row. fold_columns: w is [K,N], a block
//            sums 64 rows of 256 columns into part[K/64][2][N]; fold_finish adds those in order, 8 strips
//            a column.
// Inputs   : w T (bf16 or f16), gamma, beta [K] T or null, c [N] T or null.   Outputs: wq T, cs, cv [N] f32.
// Macros   : T, VEC (elements an access: 8 where rows are 16-byte aligned, else 1).
// Launch   : fold_rows N x 128; fold_columns (ceil(N/256), ceil(K/64)) x 256; fold_finish ceil(N/32) x 256.
// Numerics : f32 sums in an order that depends on the shape alone.
// Bound    : bytes, w read and wq written.
#include "common.cuh"

DEVICE void fold_one(T w, float g, float b, T& q, float& cs, float& cv) {
    float x = to_float(w);
    q = from_float<T>(g * x);
    cs += to_float(q);
    cv += b * x;
}

extern "C" __global__ __launch_bounds__(128) void fold_rows(
    const T* w, const T* gamma, const T* beta, const T* c, int K, int N, T* wq, float* cs,
    float* cv) {
    after_previous_launch();
    __shared__ float scratch[4];
    i64 row = (i64)blockIdx.x * K;
    float s = 0, v = 0;
    for (int k = threadIdx.x * VEC; k < K; k += 128 * VEC) {
        auto in = load<VEC>(w + row + k);
        Vec<T, VEC> q;
#pragma unroll
        for (int j = 0; j < VEC; j++)
            fold_one(in.at[j], gamma ? to_float(gamma[k + j]) : 1.0f,
                     beta ? to_float(beta[k + j]) : 0.0f, q.at[j], s, v);
        store<VEC>(wq + row + k, q);
    }
    s = block_sum<128>(s, scratch);
    v = block_sum<128>(v, scratch);
    if (threadIdx.x == 0) {
        cs[blockIdx.x] = s;
        cv[blockIdx.x] = v + (c ? to_float(c[blockIdx.x]) : 0.0f);
    }
}

// VEC neighbours as pairs in 32-bit words: an array of 16-bit values would take a register each.
constexpr int WORDS = (VEC + 1) / 2;

extern "C" __global__ __launch_bounds__(256, 4) void fold_columns(
    const T* w, const T* gamma, const T* beta, int K, int N, T* wq, float* part) {
    after_previous_launch();
    constexpr int LANES = 256 / VEC, DEEP = VEC, HELD = 4;  // HELD loads in flight a thread
    __shared__ float sums[2][DEEP][256];
    int lane = threadIdx.x % LANES, deep = threadIdx.x / LANES, n = blockIdx.x * 256 + lane * VEC;
    float s[2 * WORDS] = {}, v[2 * WORDS] = {};
    if (n < N)
#pragma unroll 1
        for (int i = 0; i < 64 / DEEP; i += HELD) {
            Vec<u32, WORDS> in[HELD];
            float g[HELD], b[HELD];
#pragma unroll
            for (int u = 0; u < HELD; u++) {  // no branch between the loads
                int k = blockIdx.y * 64 + deep + (i + u) * DEEP;
                k = k < K ? k : K - 1;
                const T* from = w + (i64)k * N + n;
                if (VEC > 1) in[u] = load<WORDS>((const u32*)from);
                else in[u].at[0] = from->bits;
                g[u] = gamma ? to_float(gamma[k]) : 1.0f;
                b[u] = beta ? to_float(beta[k]) : 0.0f;
            }
#pragma unroll
            for (int u = 0; u < HELD; u++) {
                int k = blockIdx.y * 64 + deep + (i + u) * DEEP;
                if (k >= K) continue;
#pragma unroll
                for (int j = 0; j < WORDS; j++) {
                    float2 x = unpack2<T>(in[u].at[j]);
                    in[u].at[j] = pack2<T>(g[u] * x.x, g[u] * x.y);
                    float2 q = unpack2<T>(in[u].at[j]);
                    s[2 * j] += q.x, s[2 * j + 1] += q.y;
                    v[2 * j] += b[u] * x.x, v[2 * j + 1] += b[u] * x.y;
                }
                T* to = wq + (i64)k * N + n;
                if (VEC > 1) store<WORDS>((u32*)to, in[u]);
                else to->bits = (u16)in[u].at[0];
            }
        }
#pragma unroll
    for (int j = 0; j < VEC; j++) {
        sums[0][deep][lane * VEC + j] = s[j];
        sums[1][deep][lane * VEC + j] = v[j];
    }
    __syncthreads();
    n = blockIdx.x * 256 + threadIdx.x;
    if (n >= N) return;
#pragma unroll
    for (int which = 0; which < 2; which++) {
        float total = 0;
#pragma unroll
        for (int d = 0; d < DEEP; d++) total += sums[which][d][threadIdx.x];
        part[((i64)blockIdx.y * 2 + which) * N + n] = total;
    }
}

extern "C" __global__ __launch_bounds__(256) void fold_finish(
    const float* part, const T* c, int parts, int N, float* cs, float* cv) {
    after_previous_launch();
    __shared__ float sums[2][8][32];
    int lane = threadIdx.x % 32, strip = threadIdx.x / 32, n = blockIdx.x * 32 + lane;
    int each = (parts + 7) / 8, to = strip * each + each < parts ? strip * each + each : parts;
    float s = 0, v = 0;
    if (n < N)
#pragma unroll 8
        for (int i = strip * each; i < to; i++) {
            s += part[(i64)i * 2 * N + n];
            v += part[((i64)i * 2 + 1) * N + n];
        }
    sums[0][strip][lane] = s, sums[1][strip][lane] = v;
    __syncthreads();
    if (strip || n >= N) return;
    s = 0, v = c ? to_float(c[n]) : 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) s += sums[0][i][lane], v += sums[1][i][lane];
    cs[n] = s;
    cv[n] = v;
}
