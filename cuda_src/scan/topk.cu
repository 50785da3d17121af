// scan/topk.cu: the k largest (or smallest) of x[outer, length, inner] along the middle axis, sorted.
// Idea     : a block a row; a bitonic sort of SIZE (key, index) pairs in shared memory. Longer rows come
//            in pieces: the best SIZE / 2 so far stay, the next SIZE / 2 join them.
// Inputs   : x T; values T and indices i64 [outer, k, inner]; k <= SIZE, or SIZE / 2 where length > SIZE.
// Macros   : T SIZE (power of two) BLOCK LARGEST.
// Numerics : keys order as the numbers do, NaN above all; equal keys by index, the lower first.
// Bound    : shared memory: length * log2(SIZE)^2 compare-exchanges a row.
#include "common.cuh"

DEVICE u64 ordered(float x) { const u32 b = __float_as_uint(x); return b >> 31 ? ~b : b | 0x80000000u; }
DEVICE u64 ordered(double x) {
    const u64 b = __double_as_longlong(x);
    return b >> 63 ? ~b : b | 1ull << 63;
}
DEVICE u64 ordered(bf16 x) { return ordered(to_float(x)); }
DEVICE u64 ordered(f16 x) { return ordered(to_float(x)); }
template <class E> DEVICE u64 ordered(E x) {
    return (E)-1 < (E)0 ? (u64)(i64)x ^ 1ull << 63 : (u64)x;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    topk(const T* x, T* values, i64* indices, i64 length, i64 inner, i64 k) {
    extern __shared__ u64 key[];
    u32* at = (u32*)(key + SIZE);
    const i64 row = blockIdx.x, base = row / inner * length * inner + row % inner;
    for (i64 next = 0, kept = 0; next < length || next == 0; kept = SIZE / 2) {
        for (int i = kept + threadIdx.x; i < SIZE; i += BLOCK) {
            const i64 source = next + i - kept;
            const u64 ranked = source < length ? ordered(x[base + source * inner]) : 0;
            key[i] = source < length ? (LARGEST ? ~ranked : ranked) : ~0ull;
            at[i] = source < length ? (u32)source : ~0u;
        }
        next += SIZE - kept;
        for (int size = 2; size <= SIZE; size *= 2)
            for (int step = size / 2; step; step /= 2) {
                __syncthreads();
                for (int t = threadIdx.x; t < SIZE / 2; t += BLOCK) {
                    const int i = t / step * 2 * step + t % step, j = i + step;
                    const bool after = key[i] > key[j] || (key[i] == key[j] && at[i] > at[j]);
                    if (after == !(i & size)) {
                        const u64 a = key[i];
                        const u32 b = at[i];
                        key[i] = key[j], at[i] = at[j], key[j] = a, at[j] = b;
                    }
                }
            }
        __syncthreads();
    }
    const i64 out = row / inner * k * inner + row % inner;
    for (i64 i = threadIdx.x; i < k; i += BLOCK) {
        values[out + i * inner] = x[base + at[i] * inner];
        indices[out + i * inner] = at[i];
    }
}
