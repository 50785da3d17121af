// quant/float8.cu: q = float8(x / s) and its transpose, s from the largest magnitudes of earlier steps.
// Idea     : a block has 128 x 128 of x. A thread rounds 4 rows of 8 columns, stores them as rows, turns
//            their bytes in registers and passes them through shared memory to rows of the transpose.
// Inputs   : x [M, K] T, M and K multiples of 16; history [HISTORY] f32.
// Outputs  : q [M, K] and qt [K, M] float8 (or null), scale, next [HISTORY] f32, which may be history.
//            scale is the least power of two, of 2^-60 to 2^60, by which the largest float8 reaches the
//            largest of history; where that is zeros, 1, and 2^-16 in e5m2: dividing by it rounds nothing. What is larger
//            than that becomes the largest, NaN stays. next: x's largest finite magnitude, then history.
//            part [ceil(M / 128), K] f32 (or null): the sums of x's columns, of 128 rows each.
// Macros   : T, E5M2 (else e4m3), HISTORY.   Launch: grid (ceil(K / 128), ceil(M / 128)), 256 threads;
//            sync: 2 words, zero.
// Numerics : a maximum has no order, sums have one of M alone.   Bound: bytes of x, q and qt.
#include "common.cuh"

DEVICE u32 float8_pair(float lo, float hi) {
    u16 y;
#if E5M2
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
#else
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
#endif
    return y;
}
// The exponent of the scale: the largest float8 is 1.75 times a power of two.
DEVICE int scale_exponent(float largest) {
    u32 bits = __float_as_uint(largest);
    int e = (int)(bits >> 23) - 127 - (E5M2 ? 15 : 8) + ((bits & 0x7fffff) > 0x600000);
    return largest == 0 ? (E5M2 ? -16 : 0) : e < -60 ? -60 : e > 60 ? 60 : e;
}
DEVICE float two_to(int e) { return __uint_as_float((u32)(e + 127) << 23); }

extern "C" __global__ __launch_bounds__(256) void quantize_float8(
    const T* x, const float* history, int M, int K, u8* q, u8* qt, float* scale, float* next, float* part, u32* sync) {
    __shared__ u32 tile[128 * 32];  // [column][4 rows a word], 16 bytes swizzled by the column's group
    __shared__ u32 tops[8];
    __shared__ float sums[4][128];
    __shared__ bool last;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane % 8;
    int m0 = blockIdx.y * 128, k0 = blockIdx.x * 128, k = k0 + warp % 2 * 64 + group * 8;
    int first = warp / 2 * 16 + lane / 8 * 4;  // of 4 rows, and of 4 more 64 rows on
    after_previous_launch();
    float largest = 0;
    UNROLLED for (int i = 0; i < HISTORY; i++) largest = fmaxf(largest, history[i]);
    int e = scale_exponent(largest);
    float inverse = two_to(-e);
    Vec<T, 8> held[2][4] = {};
    UNROLLED for (int pass = 0; pass < 2; pass++)
        UNROLLED for (int r = 0; r < 4; r++) {
            int m = m0 + pass * 64 + first + r;
            if (m < M && k < K) held[pass][r] = load<8>(x + (i64)m * K + k);
        }
    u32 top = 0;
    float sum[8] = {};  // of a column of this thread's rows
    UNROLLED for (int pass = 0; pass < 2; pass++) {
        u32 row[4][2];
        UNROLLED for (int r = 0; r < 4; r++) {
            UNROLLED for (int half = 0; half < 2; half++) {
                float v[4];
                UNROLLED for (int i = 0; i < 4; i++) {
                    v[i] = to_float(held[pass][r].at[half * 4 + i]);
                    sum[half * 4 + i] += v[i];
                    u32 magnitude = __float_as_uint(v[i]) & 0x7fffffff;
                    if (magnitude < 0x7f800000 && magnitude > top) top = magnitude;
                }
                row[r][half] = float8_pair(v[0] * inverse, v[1] * inverse) |
                               float8_pair(v[2] * inverse, v[3] * inverse) << 16;
            }
            int m = m0 + pass * 64 + first + r;
            if (q && m < M && k < K) *(uint2*)(q + (i64)m * K + k) = make_uint2(row[r][0], row[r][1]);
        }
        int word = pass * 16 + first / 4;  // of a column
        UNROLLED for (int half = 0; half < 2; half++) {
            u32 a = __byte_perm(row[0][half], row[1][half], 0x5140);
            u32 b = __byte_perm(row[2][half], row[3][half], 0x5140);
            u32 c = __byte_perm(row[0][half], row[1][half], 0x7362);
            u32 d = __byte_perm(row[2][half], row[3][half], 0x7362);
            u32* to = tile + (k - k0 + half * 4) * 32 + ((word / 4 ^ group) * 4 + word % 4);
            to[0] = __byte_perm(a, b, 0x5410);
            to[32] = __byte_perm(a, b, 0x7632);
            to[64] = __byte_perm(c, d, 0x5410);
            to[96] = __byte_perm(c, d, 0x7632);
        }
    }
    top = __reduce_max_sync(~0u, top);
    if (lane == 0) tops[warp] = top;
    if (part)
        UNROLLED for (int i = 0; i < 8; i++) {
            sum[i] += __shfl_xor_sync(~0u, sum[i], 8);
            sum[i] += __shfl_xor_sync(~0u, sum[i], 16);
            if (lane < 8) sums[warp / 2][k - k0 + i] = sum[i];
        }
    __syncthreads();
    if (part && threadIdx.x < 128 && k0 + threadIdx.x < K) {
        float total = 0;
        for (int i = 0; i < 4; i++) total += sums[i][threadIdx.x];
        part[(i64)blockIdx.y * K + k0 + threadIdx.x] = total;
    }
    if (qt)
        UNROLLED for (int i = 0; i < 4; i++) {
            int column = i * 32 + threadIdx.x / 8, piece = threadIdx.x % 8, m = m0 + piece * 16;
            if (k0 + column < K && m < M)
                *(uint4*)(qt + (i64)(k0 + column) * M + m) =
                    *(uint4*)(tile + column * 32 + (piece ^ column / 8 % 8) * 4);
        }
    if (threadIdx.x == 0) {
        for (int i = 1; i < 8; i++) top = tops[i] > top ? tops[i] : top;
        atomicMax(sync, top);
        __threadfence();
        last = atomicAdd(sync + 1, 1) == gridDim.x * gridDim.y - 1;
        if (blockIdx.x + blockIdx.y == 0) *scale = two_to(e);
    }
    __syncthreads();
    if (!last || warp) return;
    // every block has read history
    float value = 0;
    if (lane == 0) {
        __threadfence();
        value = __uint_as_float(atomicExch(sync, 0));
        atomicExch(sync + 1, 0);
    } else if (lane < HISTORY) {
        value = history[lane - 1];
    }
    __syncwarp();
    if (lane < HISTORY) next[lane] = value;
}
