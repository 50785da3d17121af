// scan/cumsum.cu: y = running sums (or products, PRODUCT) of x[outer, length, inner] along the middle axis.
// Idea     : inner = 1: a block a row, 4 BLOCK elements a step: four in a thread, a scan in each warp,
//            then over warps, and a carry. inner > 1: BX neighbouring columns by BY segments a block;
//            each thread adds up its segment, then reads it again behind the sum of those before.
// Inputs   : x, y [outer, length, inner] T.
// Macros   : T ACC; BLOCK (32..1024), or BX, BY (powers of two); EXCLUSIVE, REVERSE, PRODUCT.
// Numerics : sums in ACC; order fixed by the macros and the length.
// Bound    : HBM, a read and a write (columns: two reads).
#include "common.cuh"

#define UNIT ((ACC)PRODUCT)  // 0 of a sum, 1 of a product
DEVICE ACC join(ACC a, ACC b) { return PRODUCT ? a * b : a + b; }

#ifdef BLOCK
extern "C" __global__ void __launch_bounds__(BLOCK) cumsum_row(const T* x, T* y, i64 length) {
    after_previous_launch();
    __shared__ ACC sums[BLOCK / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    x += blockIdx.x * length;
    y += blockIdx.x * length;
    ACC carry = UNIT;
    for (i64 first = 0; first < length; first += 4 * BLOCK) {
        const i64 begin = first + threadIdx.x * 4;
        ACC own[4], s = UNIT;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const i64 i = begin + j;
            own[j] = i < length ? (ACC)widen(x[REVERSE ? length - 1 - i : i]) : UNIT;
        }
#pragma unroll
        for (int j = 0; j < 4; j++) s = join(s, own[j]);
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const ACC before = __shfl_up_sync(~0u, s, step);
            if (lane >= step) s = join(before, s);
        }
        if (lane == 31) sums[warp] = s;
        __syncthreads();
        ACC left = carry;
        for (int w = 0; w < BLOCK / 32; w++) {
            if (w < warp) left = join(left, sums[w]);
            carry = join(carry, sums[w]);
        }
        __syncthreads();
        const ACC before = __shfl_up_sync(~0u, s, 1);
        if (lane) left = join(left, before);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const i64 i = begin + j;
            if (i < length) y[REVERSE ? length - 1 - i : i] = narrow<T>(EXCLUSIVE ? left : join(left, own[j]));
            left = join(left, own[j]);
        }
    }
}
#else
extern "C" __global__ void __launch_bounds__(BX* BY)
    cumsum_column(const T* x, T* y, i64 length, i64 inner) {
    after_previous_launch();
    __shared__ ACC sums[BY][BX];
    const int tx = threadIdx.x % BX, ty = threadIdx.x / BX;
    const i64 tiles = (inner + BX - 1) / BX, column = blockIdx.x % tiles * BX + tx;
    const i64 base = blockIdx.x / tiles * length * inner + column;
    const i64 segment = (length + BY - 1) / BY, first = ty * segment;
    const i64 last = column < inner ? min(first + segment, length) : 0;
    ACC s = UNIT;
    for (i64 i = first; i < last; i++)
        s = join(s, (ACC)widen(x[base + (REVERSE ? length - 1 - i : i) * inner]));
    sums[ty][tx] = s;
    __syncthreads();
    s = UNIT;
    for (int w = 0; w < ty; w++) s = join(s, sums[w][tx]);
    for (i64 i = first; i < last; i++) {
        const i64 at = base + (REVERSE ? length - 1 - i : i) * inner;
        const ACC own = widen(x[at]);
        y[at] = narrow<T>(EXCLUSIVE ? s : join(s, own));
        s = join(s, own);
    }
}
#endif
