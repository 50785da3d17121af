// norm/row_stats.cu: mean and rstd of every row of x [M,K]; optionally the row itself, rewritten.
// Idea     : TPR threads a row hold it in registers (HELD vectors each), so the two passes (mean, then
//            sum of (x - mean)^2) read memory once; a longer row is read again from L2. A block walks
//            over rows, the next one already on its way while this one is summed.
// Inputs   : x [M,K] T, row stride ldx; VEC elements an access (1 where rows are not 16-byte aligned).
// Outputs  : mean, rstd [M] f32 (STATS 1); PLANES 1: out [M,K] TO; PLANES 2, 3: out [PLANES][M][K] bf16,
//            planes whose sum is the value to 2^-17, 2^-25. The value: NORM ? (x - mean) rstd gamma + beta : x;
//            NORM 2: by the mean and rstd that are given.
// Macros   : T, TO, TP (gamma, beta), STATS, NORM, PLANES, TPR, ROWS, HELD, VEC.
// Launch   : up to ceil(M / ROWS) blocks of TPR * ROWS threads (ROWS 1 unless TPR is 32).
// Numerics : two-pass f32, fixed tree: bits depend on K alone. RMS: 1 leaves the mean out (mean = 0).
// Bound    : bytes, one read of x.
#include "common.cuh"
#ifndef RMS
#define RMS 0
#endif

// One access: 16 raw bytes (kept packed: an array of 16-bit values takes a register each), or one value.
template <class E, bool WIDE> struct Line {
    uint4 raw;
    DEVICE float at(int j) const {
        u32 word = ((const u32*)&raw)[sizeof(E) == 2 ? j / 2 : j];
        if constexpr (sizeof(E) == 2) {
            float2 both = unpack2<E>(word);
            return j % 2 ? both.y : both.x;
        }
        return __uint_as_float(word);
    }
    DEVICE void read(const E* p, int n) {
        if (n >= 16 / (int)sizeof(E)) {
            raw = *(const uint4*)p;
        } else {  // the end of a row: element by element
            u32 words[4] = {};
            UNROLLED for (int j = 0; j < 16 / (int)sizeof(E); j++) {
                if (j >= n) continue;
                if constexpr (sizeof(E) == 2) words[j / 2] |= (u32)p[j].bits << j % 2 * 16;
                else words[j] = __float_as_uint(to_float(p[j]));
            }
            raw = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
};
template <class E> struct Line<E, false> {
    E raw;
    DEVICE float at(int) const { return to_float(raw); }
    DEVICE void read(const E* p, int n) { raw = n > 0 ? *p : E{}; }
};

extern "C" __global__ __launch_bounds__(TPR* ROWS, (PLANES ? 512 : 1024) / (TPR * ROWS)) void row_stats(
    const T* x, int M, int K, i64 ldx, float epsilon, float* mean, float* rstd, const TP* gamma, const TP* beta,
    TO* out) {
    after_previous_launch();
    __shared__ float scratch[2][TPR / 32];
    int t = threadIdx.x % TPR, step = gridDim.x * ROWS, turn = 0;
    // the threads of a row are whole warps, and a barrier is used only where they are the block
    auto sum = [&](float v) {
        v = warp_sum(v);
        if (TPR == 32) return v;
        turn ^= 1;  // the other half's readers have passed the barrier after it
        if (threadIdx.x % 32 == 0) scratch[turn][threadIdx.x / 32] = v;
        __syncthreads();
        v = 0;
        UNROLLED for (int w = 0; w < TPR / 32; w++) v += scratch[turn][w];
        return v;
    };
    const T* p = x;
    Line<T, (VEC > 1)> held[HELD], next[HELD];
    float2 ahead = {};
    auto fetch = [&](int row) {
        const T* from = x + row * ldx;
        UNROLLED for (int i = 0; i < HELD; i++) {
            int k = (t + i * TPR) * VEC;
            next[i].read(from + k, K - k);
        }
        if (NORM == 2) ahead = {RMS ? 0.0f : mean[row], rstd[row]};
    };
    float mu = 0, rs = 0;
    auto each = [&](auto f) {  // f(vector, its first column, how many of it exist)
        UNROLLED for (int i = 0; i < HELD; i++) {
            int k = (t + i * TPR) * VEC;
            if (k < K) f(held[i], k, K - k < VEC ? K - k : VEC);
        }
        for (int k = (t + HELD * TPR) * VEC; k < K; k += TPR * VEC) {
            Line<T, (VEC > 1)> v;
            v.read(p + k, K - k);
            f(v, k, K - k < VEC ? K - k : VEC);
        }
    };
    int row = blockIdx.x * ROWS + threadIdx.x / TPR;
    if (row < M) fetch(row);
    for (; row < M; row += step) {
        p = x + row * ldx;
        UNROLLED for (int i = 0; i < HELD; i++) held[i] = next[i];
        if (NORM == 2) mu = ahead.x, rs = ahead.y;
        if (row + step < M) fetch(row + step);
        if (STATS || NORM == 1) {
            float s = 0;
            if (!RMS) {
                each([&](const Line<T, (VEC > 1)>& v, int, int n) {
                    UNROLLED for (int j = 0; j < VEC; j++) s += j < n ? v.at(j) : 0.0f;
                });
                mu = sum(s) / K;
            }
            s = 0;
            each([&](const Line<T, (VEC > 1)>& v, int, int n) {
                UNROLLED for (int j = 0; j < VEC; j++) {
                    float d = j < n ? v.at(j) - mu : 0.0f;
                    s += d * d;
                }
            });
            rs = rsqrtf(sum(s) / K + epsilon);
            if (STATS && t == 0) mean[row] = mu, rstd[row] = rs;
        }
#if PLANES
        TO* q = out + (i64)row * K;
        each([&](const Line<T, (VEC > 1)>& v, int k, int n) {
            Vec<TO, VEC> plane[PLANES];
            UNROLLED for (int j = 0; j < VEC; j++) {
                float value = v.at(j);
                if (NORM && j < n) {
                    value = (value - mu) * rs;
                    if (gamma) value *= to_float(gamma[k + j]);
                    if (beta) value += to_float(beta[k + j]);
                }
                UNROLLED for (int i = 0; i < PLANES; i++) {
                    plane[i].at[j] = from_float<TO>(value);
                    value -= to_float(plane[i].at[j]);
                }
            }
            UNROLLED for (int i = 0; i < PLANES; i++) {
                TO* to = q + (i64)i * M * K + k;
                if (n == VEC)
                    store<VEC>(to, plane[i]);
                else
                    UNROLLED for (int j = 0; j < VEC; j++)
                        if (j < n) to[j] = plane[i].at[j];
            }
        });
#endif
    }
}
