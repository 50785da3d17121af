// conv/pack.cu: weights by tap: packed[g, tap, m, c] from weight[g, m, c, tap] (transposed [g, c, m, tap]).
// Idea     : 32 x 32 tiles of (channel, tap) through shared memory; channels padded with zeros to a
//            multiple of 8, so that the filters read 16 bytes at once and a step has one tap.
// Macros   : T, geometry.cuh's.   Launch: (TAPS / 32, padded / 32, groups * filters), 256 threads.
// Bound    : HBM, weights once.
#include "conv/geometry.cuh"

extern "C" __global__ void __launch_bounds__(256)
    conv_pack(const T* weight, T* packed, int filters, int channels, int padded) {
    after_previous_launch();
    __shared__ T tile[32][33];
    const int g = blockIdx.z / filters, m = blockIdx.z % filters;
    const int tx = threadIdx.x % 32, ty = threadIdx.x / 32, tap0 = blockIdx.x * 32, c0 = blockIdx.y * 32;
    for (int i = ty; i < 32; i += 8) {
        const bool there = tap0 + tx < TAPS && c0 + i < channels;
        tile[i][tx] = there ? weight[weight_index(g, m, (c0 + i) * TAPS + tap0 + tx, filters, channels)] : T();
    }
    __syncthreads();
    for (int i = ty; i < 32; i += 8)
        if (tap0 + i < TAPS && c0 + tx < padded)
            packed[(((i64)g * TAPS + tap0 + i) * filters + m) * padded + c0 + tx] = tile[tx][i];
}
