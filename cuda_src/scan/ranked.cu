// scan/ranked.cu: what scan/radix.cu sorts of x[outer, length, inner], and what TopK takes of the order.
// Inputs   : x T; key KEY and at u32 [outer inner, length]; values T and indices i64 [outer, k, inner].
// Macros   : T KEY LARGEST; BITS of a key that differ.
// Launch   : a thread an element.
// Numerics : keys order as the numbers do, NaN above all, -0 as 0.
// Bound    : memory.
#include "scan/order.cuh"

DEVICE KEY ranked(T x) {
    u64 key = ordered(x);
    if (sizeof(T) < 8 && key >> 32) key = (u32)key + (1u << (8 * sizeof(T) - 1));  // of a negative integer too
    const u64 all = BITS == 64 ? ~0ull : (1ull << (BITS % 64)) - 1;
    return (KEY)((LARGEST ? ~key : key) & all);
}

DEVICE i64 thread_index() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

extern "C" __global__ void rank_keys(const T* x, KEY* key, i64 length, i64 inner, i64 total) {
    after_previous_launch();
    const i64 t = thread_index(), row = t / length;
    if (t < total) key[t] = ranked(x[(row / inner * length + t % length) * inner + row % inner]);
}

extern "C" __global__ void take_ranked(const T* x, const u32* at, T* values, i64* indices, i64 length, i64 inner,
                                       i64 k, i64 total) {
    after_previous_launch();
    const i64 t = thread_index();
    if (t >= total) return;
    const i64 row = t / (k * inner) * inner + t % inner;
    const u32 from = at[row * length + t / inner % k];
    values[t] = x[(row / inner * length + from) * inner + row % inner];
    indices[t] = from;
}
