// conv/weight_sum.cu: dw[m, c, tap] = sum of part[split, m, tap, c], in an order of their number alone.
// Inputs   : part ACC [splits, size], where size = rows * taps * channels.   Outputs: dw TY.
// Macros   : TY ACC LANES (threads a sum).   Launch: 256 / LANES sums a block of 256 threads.
// Bound    : HBM, the parts once.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    conv_weight_sum(const ACC* part, TY* dw, u32 size, u32 channels, u32 taps, int splits) {
    after_previous_launch();
    constexpr int ACROSS = 256 / LANES;
    __shared__ ACC sums[LANES][ACROSS];
    const u32 tx = threadIdx.x % ACROSS, ty = threadIdx.x / ACROSS, i = blockIdx.x * ACROSS + tx;
    ACC z = 0;
    if (i < size)
#pragma unroll 4
        for (int k = ty; k < splits; k += LANES) z += part[(i64)k * size + i];
    if (LANES > 1) {
        sums[ty][tx] = z;
        __syncthreads();
    }
    if (ty || i >= size) return;
#pragma unroll
    for (int k = 1; k < LANES; k++) z += sums[k][tx];
    const u32 c = i % channels, tap = i / channels % taps, m = i / channels / taps;
    dw[((i64)m * channels + c) * taps + tap] = narrow<TY>(z);
}
