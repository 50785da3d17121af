// scan/cumsum.cu: y = running sums of x[outer, length, inner] along the middle axis.
// Idea     : inner = 1: a block a row, BLOCK elements a step: a scan in each warp, then over warps, and
//            a carry. inner > 1: a thread a column, neighbours contiguous.
// Inputs   : x, y [outer, length, inner] T.
// Macros   : T ACC BLOCK (32..1024); EXCLUSIVE, REVERSE.
// Numerics : sums in ACC; order fixed by BLOCK.
// Bound    : HBM, a read and a write; cumsum_column by latency where outer * inner is small.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK) cumsum_row(const T* x, T* y, i64 length) {
    __shared__ ACC sums[BLOCK / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    x += blockIdx.x * length;
    y += blockIdx.x * length;
    ACC carry = 0;
    for (i64 first = 0; first < length; first += BLOCK) {
        const i64 i = first + threadIdx.x, at = REVERSE ? length - 1 - i : i;
        const ACC own = i < length ? (ACC)widen(x[at]) : (ACC)0;
        ACC s = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const ACC before = __shfl_up_sync(~0u, s, step);
            if (lane >= step) s += before;
        }
        if (lane == 31) sums[warp] = s;
        __syncthreads();
        ACC left = carry;
        for (int w = 0; w < BLOCK / 32; w++) {
            if (w < warp) left += sums[w];
            carry += sums[w];
        }
        __syncthreads();
        const ACC before = __shfl_up_sync(~0u, s, 1);
        if (i < length) y[at] = narrow<T>(EXCLUSIVE ? left + (lane ? before : (ACC)0) : left + s);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    cumsum_column(const T* x, T* y, i64 columns, i64 length, i64 inner) {
    const i64 column = (i64)blockIdx.x * BLOCK + threadIdx.x;
    if (column >= columns) return;
    const i64 base = column / inner * length * inner + column % inner;
    ACC s = 0;
    for (i64 i = 0; i < length; i++) {
        const i64 at = base + (REVERSE ? length - 1 - i : i) * inner;
        const ACC own = widen(x[at]);
        y[at] = narrow<T>(EXCLUSIVE ? s : s + own);
        s += own;
    }
}
