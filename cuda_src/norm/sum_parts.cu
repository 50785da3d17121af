// norm/sum_parts.cu: out[n] = sum_p part[p][n], for one or two interleaved vectors.
// Idea     : 32 columns a block, 8 strips of p a column; strips and then their sums in order.
// Inputs   : part [parts, gridDim.y, N] f32.   Outputs: wide [N] f32 (or null) and out0, out1 [N] TO
//            (or null), one a blockIdx.y.
// Macros   : TO.   Launch: grid (ceil(N / 32), 1 or 2), 256 threads.
// Numerics : fixed order: bits depend on parts alone.   Bound: bytes of part.
#include "common.cuh"

extern "C" __global__ __launch_bounds__(256) void sum_parts(
    const float* part, int parts, int N, float* wide, TO* out0, TO* out1) {
    after_previous_launch();
    __shared__ float sums[8][32];
    int lane = threadIdx.x % 32, strip = threadIdx.x / 32, n = blockIdx.x * 32 + lane;
    int each = (parts + 7) / 8, from = strip * each, to = from + each < parts ? from + each : parts;
    float total = 0;
    if (n < N)
#pragma unroll 8
        for (int p = from; p < to; p++)
            total += part[((i64)p * gridDim.y + blockIdx.y) * N + n];
    sums[strip][lane] = total;
    __syncthreads();
    if (strip || n >= N) return;
    total = 0;
    UNROLLED for (int i = 0; i < 8; i++) total += sums[i][lane];
    if (wide && blockIdx.y == 0) wide[n] = total;
    TO* out = blockIdx.y ? out1 : out0;
    if (out) out[n] = from_float<TO>(total);
}
