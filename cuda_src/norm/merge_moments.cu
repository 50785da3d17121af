// norm/merge_moments.cu: mean and variance of columns from the moments of 64 rows of each.
// Idea     : a block has COLUMNS columns, ROWS threads each. First the mean, then the squared
//            deviations about it: the parts are small, and come from L2 or L1 the second time.
// Inputs   : part [ceil(M / 64), N] pairs of f32: mean, sum of squared deviations from it.
// Outputs  : mean, variance [N] f32.
// Macros   : COLUMNS (4 or 8), ROWS.   Launch: grid ceil(N / COLUMNS), COLUMNS ROWS threads.
// Numerics : means are added as differences from the first part's; the order depends on M and N alone.
// Bound    : latency, or the bytes of part.
#include "common.cuh"
constexpr int WARPS = COLUMNS * ROWS / 32;

// The sum over the threads of a column, to each of them.
DEVICE float of_column(float v, float (&scratch)[WARPS][COLUMNS]) {
    UNROLLED for (int step = 16; step >= COLUMNS; step /= 2) v += __shfl_xor_sync(~0u, v, step);
    const int column = threadIdx.x % COLUMNS;
    if (threadIdx.x % 32 < COLUMNS) scratch[threadIdx.x / 32][column] = v;
    __syncthreads();
    float sum = 0;
    UNROLLED for (int w = 0; w < WARPS; w++) sum += scratch[w][column];
    return sum;
}

extern "C" __global__ __launch_bounds__(COLUMNS * ROWS) void merge_moments(
    const float2* part, int M, int N, float* mean, float* variance) {
    after_previous_launch();
    __shared__ float scratch[2][WARPS][COLUMNS];
    const int row = threadIdx.x / COLUMNS, n = blockIdx.x * COLUMNS + threadIdx.x % COLUMNS;
    const int parts = n < N ? (M + 63) / 64 : 0;
    const float first = n < N ? part[n].x : 0.0f;
    auto rows_of = [&](int p) { return (float)min(M - p * 64, 64); };
    float sum = 0, square = 0;
#pragma unroll 4
    for (int p = row; p < parts; p += ROWS) sum += (part[(i64)p * N + n].x - first) * rows_of(p);
    const float mu = first + of_column(sum, scratch[0]) / M;
#pragma unroll 4
    for (int p = row; p < parts; p += ROWS) {
        const float2 of = part[(i64)p * N + n];
        square += fmaf((of.x - mu) * (of.x - mu), rows_of(p), of.y);
    }
    square = of_column(square, scratch[1]);
    if (row == 0 && n < N) mean[n] = mu, variance[n] = square / M;
}
