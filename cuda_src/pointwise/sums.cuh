// pointwise/sums.cuh: what a generated kernel over [m, n] needs to sum one of its results as well.
// Blocks of 256 threads: blockIdx.x has 32 W columns, blockIdx.y a part of the rows, of which warp w takes
// every eighth. Each block leaves its sums in `part`; the last one to do so adds up the parts, in order.
//   OVER_COLUMNS  part [gridDim.y, n] -> sum [n]     OVER_ROWS  part [gridDim.x, m] -> sum [m]
//   OVER_ALL      part [gridDim.x gridDim.y] -> sum [1]
// Numerics : f32 sums in an order that depends on the shape alone.
#pragma once
#include "common.cuh"

// Of a row: the sums of this thread's columns go on, or the row's own are left.
DEVICE void add_row(float (&total)[W], const float (&found)[W], float* to) {
#ifdef OVER_ROWS
    float sum = 0;
    UNROLLED for (int v = 0; v < W; v++) sum += found[v];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) *to = sum;
#else
    UNROLLED for (int v = 0; v < W; v++) total[v] += found[v];
#endif
}

// The block's sums, of its warps in order.
DEVICE void leave_sums(const float (&total)[W], float* part, i64 n) {
#ifndef OVER_ROWS
    __shared__ float sums[8][32 * W];
    UNROLLED for (int v = 0; v < W; v++) sums[threadIdx.x / 32][threadIdx.x % 32 * W + v] = total[v];
    __syncthreads();
#endif
#ifdef OVER_COLUMNS
    for (int c = threadIdx.x; c < 32 * W; c += 256) {
        float sum = 0;
        UNROLLED for (int w = 0; w < 8; w++) sum += sums[w][c];
        i64 column = (i64)blockIdx.x * 32 * W + c;
        if (column < n) part[blockIdx.y * n + column] = sum;
    }
#endif
#ifdef OVER_ALL
    if (threadIdx.x < 32) {
        float sum = 0;
        UNROLLED for (int v = 0; v < W; v++)
            UNROLLED for (int w = 0; w < 8; w++) sum += sums[w][threadIdx.x * W + v];
        sum = warp_sum(sum);
        if (threadIdx.x == 0) part[blockIdx.y * gridDim.x + blockIdx.x] = sum;
    }
#endif
}

// Whether the other blocks that share the counter have left their sums, which are seen then.
DEVICE bool last_to_come(u32* counter, u32 blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(counter, blocks - 1) == blocks - 1;  // the last one leaves 0
    __syncthreads();
    __threadfence();
    return last;
}

template <class E> DEVICE void add_parts(const float* part, i64 m, i64 n, i64 from, i64 to, E* sum) {
#ifdef OVER_COLUMNS
    for (int c = threadIdx.x; c < 32 * W; c += 256) {
        i64 column = (i64)blockIdx.x * 32 * W + c;
        if (column >= n) continue;
        float all = 0;
#pragma unroll 8
        for (u32 p = 0; p < gridDim.y; p++) all += __ldcg(part + p * n + column);
        sum[column] = from_float<E>(all);
    }
#endif
#ifdef OVER_ROWS
    for (i64 row = from + threadIdx.x; row < to; row += 256) {
        float all = 0;
#pragma unroll 8
        for (u32 p = 0; p < gridDim.x; p++) all += __ldcg(part + p * m + row);
        sum[row] = from_float<E>(all);
    }
#endif
#ifdef OVER_ALL
    __shared__ float scratch[8];
    float all = 0;
    for (u32 p = threadIdx.x; p < gridDim.x * gridDim.y; p += 256) all += __ldcg(part + p);
    all = block_sum<256>(all, scratch);
    if (threadIdx.x == 0) *sum = from_float<E>(all);
#endif
}
