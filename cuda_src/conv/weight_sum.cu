// conv/weight_sum.cu: dw[m, c, tap] = sum of part[split, m, tap, c], in an order of their number alone.
// Idea     : a block sums the parts of CB channels of a row and TB of its taps, VEC channels an access, LANES
//            threads a sum; they are put in order in shared memory, so that dw is written side by side.
// Inputs   : part ACC [splits, rows, taps, channels], VEC divides channels.   Outputs: dw TY.
// Macros   : TY ACC VEC LANES CB TB.   Launch: rows * blocks of channels x blocks of taps, of up to 256 threads.
// Bound    : HBM, the parts once.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    conv_weight_sum(const ACC* part, TY* dw, u32 rows, u32 channels, u32 taps, u32 splits) {
    after_previous_launch();
    __shared__ ACC sums[LANES][CB * TB];
    const u32 blocks = (channels + CB - 1) / CB, m = blockIdx.x / blocks, c0 = blockIdx.x % blocks * CB;
    const u32 t0 = blockIdx.y * TB, wide = min(CB, channels - c0), high = min(TB, taps - t0);
    const i64 size = (i64)rows * taps * channels;
    part += ((i64)m * taps + t0) * channels + c0;
    for (u32 i = threadIdx.x; i < CB / VEC * TB * LANES; i += blockDim.x) {
        const u32 c = i % (CB / VEC) * VEC, t = i / (CB / VEC) % TB, lane = i / (CB / VEC * TB);
        if (c >= wide || t >= high) continue;
        ACC z[VEC] = {};
#pragma unroll 4
        for (u32 k = lane; k < splits; k += LANES) {
            const Vec<ACC, VEC> v = load<VEC>(part + k * size + (i64)t * channels + c);
            UNROLLED for (int j = 0; j < VEC; j++) z[j] += v.at[j];
        }
        UNROLLED for (int j = 0; j < VEC; j++) sums[lane][(c + j) * high + t] = z[j];
    }
    __syncthreads();
    dw += ((i64)m * channels + c0) * taps + t0;
    for (u32 i = threadIdx.x; i < wide * high; i += blockDim.x) {
        ACC z = sums[0][i];
        UNROLLED for (int k = 1; k < LANES; k++) z += sums[k][i];
        dw[(i64)(i / high) * taps + i % high] = narrow<TY>(z);
    }
}
