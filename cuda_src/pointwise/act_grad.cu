// pointwise/act_grad.cu: dz = dy act'(z), part[b][n] = sum of dz over the rows of blocks b: dbias' parts.
// Idea     : a block owns 256 columns of some rows; a lane keeps 8 columns' sums in registers while its warp
//            walks down, every WARPS-th row, BATCH rows in flight; the warps' sums meet in smem, in warp order.
// Inputs   : dy, z [M,N] T (without ACT: dz, null).   Outputs: dz [M,N] T (with ACT), part [gridDim.y, N] f32;
//            with gridDim.y 1 dbias [N] T instead, where it is not null.   N a multiple of 8, rows 16-byte aligned.
// Macros   : T, ACT (common.cuh's).   Launch: grid (ceil(N / 256), parts), 256 threads.
// Numerics : fixed order: bits depend on M, N and parts alone.   Bound: bytes of dy, z and dz.
#include "common.cuh"
constexpr int WARPS = 8, BATCH = 4;

extern "C" __global__ __launch_bounds__(256) void act_grad_rows(
    const T* dy, const T* z, int M, int N, float act_alpha, T* dz, float* part, T* dbias) {
    after_previous_launch();
    __shared__ float sums[WARPS][256];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, n = blockIdx.x * 256 + lane * 8;
    int each = (M + gridDim.y - 1) / gridDim.y, from = blockIdx.y * each;
    int to = from + each < M ? from + each : M;
    float column[8] = {};
    if (n < N)
        for (int m = from + warp; m < to; m += WARPS * BATCH) {
            Vec<T, 8> g[BATCH], v[BATCH];
            UNROLLED for (int r = 0; r < BATCH; r++)
                if (m + r * WARPS < to) {
                    g[r] = load<8>(dy + (i64)(m + r * WARPS) * N + n);
                    if (ACTIVE) v[r] = load<8>(z + (i64)(m + r * WARPS) * N + n);
                }
            UNROLLED for (int r = 0; r < BATCH; r++) {
                if (m + r * WARPS >= to) break;
                float d[8], at[8];
                UNROLLED for (int j = 0; j < 8; j++) {
                    d[j] = to_float(g[r].at[j]);
                    at[j] = ACTIVE ? to_float(v[r].at[j]) : 0.0f;
                }
                times_slope<T>(d, at, act_alpha);
                UNROLLED for (int j = 0; j < 8; j++) {
                    g[r].at[j] = from_float<T>(d[j]);
                    column[j] += to_float(g[r].at[j]);  // what the products will see
                }
                if (ACTIVE) store<8>(dz + (i64)(m + r * WARPS) * N + n, g[r]);
            }
        }
    UNROLLED for (int j = 0; j < 8; j++) sums[warp][j * 32 + lane] = column[j];
    __syncthreads();
    float total = 0;
    UNROLLED for (int w = 0; w < WARPS; w++) total += sums[w][threadIdx.x];
    int at = blockIdx.x * 256 + threadIdx.x % 32 * 8 + threadIdx.x / 32;
    if (at >= N) return;
    if (gridDim.y > 1 || !dbias) part[(i64)blockIdx.y * N + at] = total;
    else dbias[at] = from_float<T>(total);
}
