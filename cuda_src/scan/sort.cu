// scan/sort.cu: the order that sorts rows of several numbers, equal rows by index.
// Idea     : a bitonic sort of the rows' indices, padded to a power of two: chunks of SIZE in shared memory
//            (`sort_chunks`), then for each size above them the wide steps in memory (`sort_step`) and those
//            within a chunk in shared memory again (`sort_merge`). The rows are read where they stand.
// Inputs   : x T [length, width], whose numbers decide one after the other; at u32 [padded].
// Macros   : T SIZE BLOCK (SIZE / 2).
// Launch   : a block a chunk; `sort_step` BLOCK pairs a block; `sort_order` BLOCK results a block.
// Numerics : rows order as their numbers do, NaN above all, -0 as 0.
// Bound    : memory: log2(padded / SIZE)^2 / 2 passes over the rows.
#include "scan/order.cuh"

// whether row a stands behind row b; padding has the largest index
DEVICE bool behind(const T* x, i64 width, u32 a, u32 b) {
    if (a == ~0u || b == ~0u) return a > b;
    for (i64 c = 0; c < width; ++c) {
        const u64 p = ordered(x[a * width + c]), q = ordered(x[b * width + c]);
        if (p != q) return p > q;
    }
    return a > b;
}

// steps of `size` from `step` down, within a chunk that begins at `first`
DEVICE void steps(u32* held, const T* x, i64 width, i64 first, i64 size, int step) {
    for (; step; step /= 2) {
        __syncthreads();
        const int i = threadIdx.x / step * 2 * step + threadIdx.x % step, j = i + step;
        const u32 a = held[i], b = held[j];
        if (behind(x, width, a, b) == !(first + i & size)) held[i] = b, held[j] = a;
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(BLOCK) sort_chunks(const T* x, u32* at, i64 length, i64 width) {
    after_previous_launch();
    __shared__ u32 held[SIZE];
    const i64 first = blockIdx.x * (i64)SIZE;
    for (int i = threadIdx.x; i < SIZE; i += BLOCK) held[i] = first + i < length ? (u32)(first + i) : ~0u;
    for (int size = 2; size <= SIZE; size *= 2) steps(held, x, width, first, size, size / 2);
    for (int i = threadIdx.x; i < SIZE; i += BLOCK) at[first + i] = held[i];
}

extern "C" __global__ void __launch_bounds__(BLOCK) sort_step(const T* x, u32* at, i64 width, i64 size, i64 step) {
    after_previous_launch();
    const i64 pair = blockIdx.x * (i64)BLOCK + threadIdx.x;
    const i64 i = pair / step * 2 * step + pair % step, j = i + step;
    const u32 a = at[i], b = at[j];
    if (behind(x, width, a, b) == !(i & size)) at[i] = b, at[j] = a;
}

extern "C" __global__ void __launch_bounds__(BLOCK) sort_merge(const T* x, u32* at, i64 width, i64 size) {
    after_previous_launch();
    __shared__ u32 held[SIZE];
    const i64 first = blockIdx.x * (i64)SIZE;
    for (int i = threadIdx.x; i < SIZE; i += BLOCK) held[i] = at[first + i];
    steps(held, x, width, first, size, SIZE / 2);
    for (int i = threadIdx.x; i < SIZE; i += BLOCK) at[first + i] = held[i];
}

extern "C" __global__ void __launch_bounds__(BLOCK) sort_order(const u32* at, i64* indices, i64 length) {
    after_previous_launch();
    const i64 t = blockIdx.x * (i64)BLOCK + threadIdx.x;
    if (t < length) indices[t] = at[t];
}
