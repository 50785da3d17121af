// quant/range.cu: the range of a tensor, 0 in it, and the scale and zero point of uint8 for it.
//
// least_and_largest: x [n] float, 16-byte aligned -> workspace [blocks] float2: least and largest of 0 and
//   the elements block by block; NaN is left out, as by onnxruntime. Launch (blocks), 256 threads.
// scale_and_zero: workspace -> scale = (largest - least) / 255, 1 where that is 0, zero point =
//   round(-least / scale) within 0..255, 255 where that is NaN. Launch (1), 256 threads.
// Bound by reading x. Least and largest do not depend on an order, so two runs give the same bits.
#include "common.cuh"

DEVICE float2 both(float2 a, float2 b) { return make_float2(fminf(a.x, b.x), fmaxf(a.y, b.y)); }

// Of all threads, given to thread 0.
DEVICE float2 of_block(float2 range) {
    __shared__ float2 warps[8];
    UNROLLED for (int step = 16; step; step >>= 1)
        range = both(range, make_float2(__shfl_xor_sync(~0u, range.x, step), __shfl_xor_sync(~0u, range.y, step)));
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = range;
    __syncthreads();
    if (threadIdx.x == 0)
        for (int w = 0; w < 8; w++) range = both(range, warps[w]);
    return range;
}

extern "C" __global__ void __launch_bounds__(256) least_and_largest(const float* x, float2* part, i64 n) {
    after_previous_launch();
    float2 range = make_float2(0, 0);
    const i64 step = (i64)gridDim.x * 256, whole = n / 4;
    for (i64 i = (i64)blockIdx.x * 256 + threadIdx.x; i < whole; i += step) {
        const Vec<float, 4> v = load<4>(x + 4 * i);
        UNROLLED for (int j = 0; j < 4; j++) range = both(range, make_float2(v.at[j], v.at[j]));
    }
    const i64 rest = 4 * whole + threadIdx.x;
    if (blockIdx.x == 0 && rest < n) range = both(range, make_float2(x[rest], x[rest]));
    range = of_block(range);
    if (threadIdx.x == 0) part[blockIdx.x] = range;
}

extern "C" __global__ void __launch_bounds__(256) scale_and_zero(const float2* part, float* scale, u8* zero, int parts) {
    after_previous_launch();
    float2 range = make_float2(0, 0);
    for (int i = threadIdx.x; i < parts; i += 256) range = both(range, part[i]);
    range = of_block(range);
    if (threadIdx.x) return;
    const float s = (range.y - range.x) / 255.0f, step = s == 0.0f ? 1.0f : s;
    const float z = rintf(-range.x / step);
    *scale = step;
    *zero = (u8)(z < 255.0f ? z > 0.0f ? z : 0.0f : 255.0f);
}
