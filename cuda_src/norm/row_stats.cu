// norm/row_stats.cu: mean and rstd of every row of x [M,K]; optionally the row itself, rewritten.
// Idea     : TPR threads a row hold it in registers (HELD vectors each), so the two passes (mean, then
//            sum of (x - mean)^2) read memory once; a longer row is read again from L2.
// Inputs   : x [M,K] T, row stride ldx; VEC elements an access (1 where rows are not 16-byte aligned).
// Outputs  : mean, rstd [M] f32 (STATS 1); PLANES 1: out [M,K] TO; PLANES 2, 3: out [PLANES][M][K] bf16,
//            planes whose sum is the value to 2^-17, 2^-25. The value: NORM ? (x - mean) rstd gamma + beta : x.
// Macros   : T, TO, TP (gamma, beta), STATS, NORM, PLANES, TPR, ROWS, HELD, VEC.
// Launch   : ceil(M / ROWS) blocks of TPR * ROWS threads (ROWS 1 unless TPR is 32).
// Numerics : two-pass f32, fixed tree: bits depend on K alone. RMS: 1 leaves the mean out (mean = 0).
// Bound    : bytes, one read of x.
#include "common.cuh"
#ifndef RMS
#define RMS 0
#endif

extern "C" __global__ __launch_bounds__(TPR* ROWS) void row_stats(
    const T* __restrict__ x, int M, int K, i64 ldx, float epsilon, float* __restrict__ mean,
    float* __restrict__ rstd, const TP* __restrict__ gamma, const TP* __restrict__ beta,
    TO* __restrict__ out) {
#if __CUDA_ARCH__ >= 900
    // a GEMM that reads these statistics in its epilogue alone may start as soon as SMs are free
    asm volatile("griddepcontrol.launch_dependents;");
#endif
    __shared__ float scratch[TPR / 32];
    int row = blockIdx.x * ROWS + threadIdx.x / TPR, t = threadIdx.x % TPR;
    if (row >= M) return;  // whole warps, and ROWS > 1 uses no block barrier
    const T* p = x + row * ldx;
    auto sum = [&](float v) { return TPR == 32 ? warp_sum(v) : block_sum<TPR>(v, scratch); };
    Vec<T, VEC> held[HELD];
    float mu = 0, rs = 0;
    auto each = [&](auto f) {  // f(vector, its first column, how many of it exist)
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            int k = (t + i * TPR) * VEC;
            if (k < K) f(held[i], k, K - k < VEC ? K - k : VEC);
        }
        for (int k = (t + HELD * TPR) * VEC; k < K; k += TPR * VEC) {
            Vec<T, VEC> v;
#pragma unroll
            for (int j = 0; j < VEC; j++) v.at[j] = k + j < K ? p[k + j] : T{};
            f(v, k, K - k < VEC ? K - k : VEC);
        }
    };
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        int k = (t + i * TPR) * VEC;
        if (k + VEC <= K) {
            held[i] = load<VEC>(p + k);
        } else {
#pragma unroll
            for (int j = 0; j < VEC; j++) held[i].at[j] = k + j < K ? p[k + j] : T{};
        }
    }
    if (STATS || NORM) {
        float s = 0;
        if (!RMS) {
            each([&](const Vec<T, VEC>& v, int, int n) {
#pragma unroll
                for (int j = 0; j < VEC; j++) s += j < n ? to_float(v.at[j]) : 0.0f;
            });
            mu = sum(s) / K;
        }
        s = 0;
        each([&](const Vec<T, VEC>& v, int, int n) {
#pragma unroll
            for (int j = 0; j < VEC; j++) {
                float d = j < n ? to_float(v.at[j]) - mu : 0.0f;
                s += d * d;
            }
        });
        rs = rsqrtf(sum(s) / K + epsilon);
        if (STATS && t == 0) mean[row] = mu, rstd[row] = rs;
    }
#if PLANES
    TO* q = out + (i64)row * K;
    each([&](const Vec<T, VEC>& v, int k, int n) {
        Vec<TO, VEC> plane[PLANES];
#pragma unroll
        for (int j = 0; j < VEC; j++) {
            float value = to_float(v.at[j]);
            if (NORM && j < n) {
                value = (value - mu) * rs;
                if (gamma) value *= to_float(gamma[k + j]);
                if (beta) value += to_float(beta[k + j]);
            }
#pragma unroll
            for (int i = 0; i < PLANES; i++) {
                plane[i].at[j] = from_float<TO>(value);
                value -= to_float(plane[i].at[j]);
            }
        }
#pragma unroll
        for (int i = 0; i < PLANES; i++) {
            TO* to = q + (i64)i * M * K + k;
            if (n == VEC)
                store<VEC>(to, plane[i]);
            else
#pragma unroll
                for (int j = 0; j < VEC; j++)
                    if (j < n) to[j] = plane[i].at[j];
        }
    });
#endif
}
