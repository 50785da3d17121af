// scan/topk.cu: the k largest (or smallest) of x[outer, length, inner] along the middle axis, sorted.
// Idea     : a block a row; candidates, those better than the k-th so far, collect in shared memory as
//            (key, index) pairs and are sorted (bitonic) whenever SIZE would overflow. Where rows are few and long,
//            a block has one of `chunks` of a row, and a later launch takes the k of what those have found: x is
//            then the values of the launch before, and `from` their indices, which stand in the order of x.
// Inputs   : x T [., length, inner_x]; values T and indices i64 [., k, inner_y]; a chunk has k elements at least, and
//            SIZE at most, or k + 2 BLOCK <= SIZE. from i64 [rows, length], or null.
// Macros   : T SIZE (power of two) BLOCK LARGEST.
// Numerics : keys order as the numbers do, NaN above all, -0 as 0; equal keys by index, the lower first.
// Bound    : reading x where few elements qualify; each sort is SIZE log2(SIZE)^2 / 4 exchanges.
#include "scan/order.cuh"

// bitonic sort of SIZE pairs, ascending
DEVICE void sort(u64* key, u32* at) {
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

extern "C" __global__ void __launch_bounds__(BLOCK) topk(
    const T* x, const i64* from, T* values, i64* indices, i64 length, i64 inner_x, i64 inner_y, i64 k, i64 chunks) {
    after_previous_launch();
    extern __shared__ u64 key[];
    __shared__ int found;
    u32* at = (u32*)(key + SIZE);
    const i64 row = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
    const i64 begin = chunk * length / chunks, end = (chunk + 1) * length / chunks;
    const i64 base = row / inner_x * length * inner_x + row % inner_x;
    u64 worst = 0;        // the k-th so far: what comes later must be better
    bool full = false;    // whether there are k already
    if (threadIdx.x == 0) found = 0;
    __syncthreads();
    for (i64 next = begin; next < end; next += BLOCK) {
        const i64 i = next + threadIdx.x;
        if (i < end) {
            const u64 ranked = ordered(x[base + i * inner_x]), mine = LARGEST ? ~ranked : ranked;
            if (!full || mine < worst) {
                const int slot = atomicAdd(&found, 1);  // in any order: the sort makes it one
                key[slot] = mine, at[slot] = (u32)i;
            }
        }
        __syncthreads();
        const int count = found;
        const bool last = next + BLOCK >= end;
        if (count + BLOCK > SIZE || last) {
            for (int s = count + threadIdx.x; s < SIZE; s += BLOCK) key[s] = ~0ull, at[s] = ~0u;
            sort(key, at);
            if (count >= k && !last) {
                full = true, worst = key[k - 1];
                if (threadIdx.x == 0) found = k;
            }
        }
        __syncthreads();
    }
    const i64 y = blockIdx.x, out = y / inner_y * k * inner_y + y % inner_y;
    for (i64 i = threadIdx.x; i < k; i += BLOCK) {
        values[out + i * inner_y] = x[base + at[i] * inner_x];
        indices[out + i * inner_y] = from ? from[row * length + at[i]] : at[i];
    }
}
