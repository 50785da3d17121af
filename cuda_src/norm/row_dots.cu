// norm/row_dots.cu: what LayerNorm's backward needs of a row before the product, and dbias' parts.
//   dz = dy act'(z)    c1[m] = (1/K) sum_n dz cs    c2[m] = (1/K) sum_n dz (z - cv)
//   part[b][n] = sum of dz over the ROWS rows of block b
// Idea     : a warp keeps RPW rows' sums in registers while the block walks along n in steps of 256; the
//            16 warps' column sums meet in smem, in warp order. One pass over dy and z.
// Inputs   : dy, z [M,N] T; cs, cv [N] f32.   Outputs: c1, c2 [M] f32, part [ceil(M/ROWS), N] f32,
//            dz [M,N] T (with ACT; or, T float, [PLANES,M,N] bf16 that add up to it).
//            N a multiple of 8, rows 16-byte aligned; RAGGED: any N, one element an access, no PLANES.
// Macros   : T, ACT, RPW, PLANES, RAGGED.   Launch: ceil(M / (16 RPW)) blocks of 512 threads.
// Bound    : bytes of dy and z (and dz).
#ifndef PLANES
#define PLANES 0
#endif
#include "common.cuh"
#include "norm/planes.cuh"
constexpr int ROWS = 16 * RPW;
#if PLANES
typedef bf16 TZ;
#else
typedef T TZ;
#endif

extern "C" __global__ __launch_bounds__(512) void row_dots(
    const T* dy, const T* z, const float* cs, const float* cv, int M, int N, float inv_k, float act_alpha, TZ* dz,
    float* c1, float* c2, float* part) {
    after_previous_launch();
    __shared__ float sums[2][16][256];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m0 = blockIdx.x * ROWS + warp * RPW;
    float s1[RPW] = {}, s2[RPW] = {};
    for (int base = 0, turn = 0; base < N; base += 256, turn ^= 1) {
        int n = base + lane * 8;
        float column[8] = {};
        if (n < N) {
            Vec<T, 8> g[RPW], v[RPW];
            UNROLLED for (int r = 0; r < RPW; r++)
                if (m0 + r < M) {
                    g[r] = load_some<8>(dy + (i64)(m0 + r) * N + n, N - n);
                    v[r] = load_some<8>(z + (i64)(m0 + r) * N + n, N - n);
                }
            Vec<float, 8> k1 = load_some<8>(cs + n, N - n), k2 = load_some<8>(cv + n, N - n);
            UNROLLED for (int r = 0; r < RPW; r++) {
                if (m0 + r >= M) continue;
                Vec<TZ, 8> out;
                float whole[8];
                UNROLLED for (int j = 0; j < 8; j++) {
                    float d = to_float(g[r].at[j]), zz = to_float(v[r].at[j]);
                    if (ACTIVE) d = times_slope<T>(d, zz, act_alpha);
                    if (ACTIVE && !PLANES) {
                        out.at[j] = from_float<TZ>(d);
                        d = to_float(out.at[j]);  // what the products will see
                    }
                    whole[j] = d;
                    s1[r] += d * k1.at[j], s2[r] += d * (zz - k2.at[j]);
                    column[j] += d;
                }
                TZ* to = dz + (i64)(m0 + r) * N + n;
#if PLANES
                store_planes<PLANES>(to, (i64)M * N, whole);
#else
                if (ACTIVE) store_some<8>(to, out, N - n);
#endif
            }
        }
        UNROLLED for (int j = 0; j < 8; j++) sums[turn][warp][j * 32 + lane] = column[j];
        __syncthreads();  // the other buffer's readers passed the barrier before this one
        if (threadIdx.x < 256) {
            float total = 0;
            UNROLLED for (int w = 0; w < 16; w++) total += sums[turn][w][threadIdx.x];
            int at = base + threadIdx.x % 32 * 8 + threadIdx.x / 32;
            if (at < N) part[(i64)blockIdx.x * N + at] = total;
        }
    }
    UNROLLED for (int r = 0; r < RPW; r++) {
        float a = warp_sum(s1[r]), b = warp_sum(s2[r]);
        if (lane == 0 && m0 + r < M) c1[m0 + r] = a * inv_k, c2[m0 + r] = b * inv_k;
    }
}
