// norm/fold_planes.cu: LayerNorm's scale moved into float32 weights, for products in float32.
//   wq = gamma w    part[b] = over the ROWS rows k of block b: sum wq[k, n], sum beta[k] w[k, n]
// Idea     : a block 128 columns, a warp every eighth row, 4 columns a lane; a warp's rows are all on
//            their way at once. The warps' sums meet in smem; norm/sum_parts.cu adds up the parts.
// Inputs   : w [K,N], gamma, beta [K] or null, c [N], f32; N a multiple of 4, rows 16-byte aligned;
//            RAGGED: any N, one element an access, no PLANES.
// Outputs  : wq [PLANES,K,N] bf16, or with PLANES 0 [K,N] f32, with TURNED [N,K];
//            part [ceil(K / ROWS), 2, N] f32: of cs, and of cv (c in the first).
// Macros   : PLANES, ROWS (a multiple of 8), RAGGED, TURNED.   Launch: (ceil(N / 128), ceil(K / ROWS)) blocks of 256.
// Numerics : f32 sums in an order that depends on ROWS alone.
// Bound    : bytes, w read and wq written.
#include "norm/planes.cuh"
#ifndef TURNED
#define TURNED 0
#endif
#if PLANES
typedef bf16 TQ;
#else
typedef float TQ;
#endif

extern "C" __global__ __launch_bounds__(256) void fold_planes(
    const float* w, const float* gamma, const float* beta, const float* c, int K, int N, TQ* wq, float* part) {
    after_previous_launch();
    __shared__ float sums[8][2][128];
#if TURNED
    __shared__ float tile[128][ROWS + 1];
#endif
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = blockIdx.x * 128 + lane * 4;
    float s[4] = {}, v[4] = {};
    if (n < N) {
        Vec<float, 4> from[ROWS / 8];
        float g[ROWS / 8], b[ROWS / 8];
        UNROLLED for (int i = 0; i < ROWS / 8; i++) {
            int k = blockIdx.y * ROWS + i * 8 + warp;
            if (k >= K) continue;
            from[i] = load_some<4>(w + (i64)k * N + n, N - n);
            g[i] = gamma[k], b[i] = beta ? beta[k] : 0.0f;
        }
        UNROLLED for (int i = 0; i < ROWS / 8; i++) {
            int k = blockIdx.y * ROWS + i * 8 + warp;
            if (k >= K) continue;
            float q[4];
            UNROLLED for (int j = 0; j < 4; j++) {
                q[j] = g[i] * from[i].at[j];
                s[j] += q[j], v[j] += b[i] * from[i].at[j];
            }
#if PLANES
            store_planes<PLANES>(wq + (i64)k * N + n, (i64)K * N, q);
#elif TURNED
            UNROLLED for (int j = 0; j < 4; j++) tile[lane * 4 + j][i * 8 + warp] = q[j];
#else
            UNROLLED for (int j = 0; j < 4; j++) from[i].at[j] = q[j];
            store_some<4>(wq + (i64)k * N + n, from[i], N - n);
#endif
        }
    }
    store<4>(&sums[warp][0][lane * 4], Vec<float, 4>{{s[0], s[1], s[2], s[3]}});
    store<4>(&sums[warp][1][lane * 4], Vec<float, 4>{{v[0], v[1], v[2], v[3]}});
    __syncthreads();
#if TURNED
    for (int i = threadIdx.x; i < 128 * ROWS; i += 256) {
        int column = blockIdx.x * 128 + i / ROWS, k = blockIdx.y * ROWS + i % ROWS;
        if (column < N && k < K) wq[(i64)column * K + k] = tile[i / ROWS][i % ROWS];
    }
#endif
    int which = threadIdx.x / 128, column = threadIdx.x % 128, at = blockIdx.x * 128 + column;
    if (at >= N) return;
    float total = which && blockIdx.y == 0 ? c[at] : 0.0f;
    UNROLLED for (int i = 0; i < 8; i++) total += sums[i][which][column];
    part[((i64)blockIdx.y * 2 + which) * N + at] = total;
}
