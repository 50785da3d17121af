// scan/sort.cu: the order that sorts rows of any length, equal elements by index.
// Idea     : a bitonic sort of each row's indices, padded to a power of two: chunks of SIZE in shared memory
//            (`sort_chunks`), then for each size above them the wide steps in memory (`sort_step`) and those
//            within a chunk in shared memory again (`sort_merge`).
// Inputs   : x T; element i of row r, of `width` numbers that decide one after the other, stands at
//            r / inner * length * inner + r % inner + i * stride. key u64 and at u32 [rows, padded].
// Macros   : T SIZE BLOCK (SIZE / 2) LARGEST, WIDE (elements of several numbers: they are read from x, key is
//            not used).
// Launch   : a block a chunk, row after row; `sort_step` BLOCK pairs a block; `sort_take` and `sort_order` BLOCK
//            results a block.
// Numerics : keys order as the numbers do, NaN above all, -0 as 0.
// Bound    : memory: log2(padded / SIZE)^2 / 2 passes over the pairs.
#include "scan/order.cuh"

struct Pair { u64 key; u32 at; };

DEVICE i64 place(i64 row, i64 length, i64 inner) { return row / inner * length * inner + row % inner; }

DEVICE u64 ranked(T x) { return LARGEST ? ~ordered(x) : ordered(x); }

// whether a stands behind b; padding has the largest index
DEVICE bool behind(const T* x, i64 stride, i64 width, const Pair a, const Pair b) {
    if (WIDE) {
        if (a.at == ~0u || b.at == ~0u) return a.at > b.at;
        for (i64 c = 0; c < width; ++c) {
            const u64 p = ranked(x[a.at * stride + c]), q = ranked(x[b.at * stride + c]);
            if (p != q) return p > q;
        }
        return a.at > b.at;
    }
    return a.key > b.key || (a.key == b.key && a.at > b.at);
}

// steps of `size` from `step` down, within a chunk that begins at `first` of the row
DEVICE void steps(Pair* held, const T* x, i64 stride, i64 width, i64 first, i64 size, int step) {
    for (; step; step /= 2) {
        __syncthreads();
        const int i = threadIdx.x / step * 2 * step + threadIdx.x % step, j = i + step;
        const Pair a = held[i], b = held[j];
        if (behind(x, stride, width, a, b) == !(first + i & size)) held[i] = b, held[j] = a;
    }
}

DEVICE void store(const Pair* held, u64* key, u32* at) {
    __syncthreads();
    for (int i = threadIdx.x; i < SIZE; i += BLOCK) {
        if (!WIDE) key[i] = held[i].key;
        at[i] = held[i].at;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) sort_chunks(
    const T* x, u64* key, u32* at, i64 length, i64 inner, i64 stride, i64 width, i64 padded) {
    after_previous_launch();
    __shared__ Pair held[SIZE];
    const i64 row = blockIdx.x * (i64)SIZE / padded, first = blockIdx.x * (i64)SIZE % padded;
    x += place(row, length, inner);
    for (int i = threadIdx.x; i < SIZE; i += BLOCK) {
        const i64 mine = first + i;
        held[i] = mine < length ? Pair{WIDE ? 0 : ranked(x[mine * stride]), (u32)mine} : Pair{~0ull, ~0u};
    }
    for (int size = 2; size <= SIZE; size *= 2) steps(held, x, stride, width, first, size, size / 2);
    store(held, key + row * padded + first, at + row * padded + first);
}

extern "C" __global__ void __launch_bounds__(BLOCK) sort_step(
    const T* x, u64* key, u32* at, i64 length, i64 inner, i64 stride, i64 width, i64 padded, i64 size, i64 step) {
    after_previous_launch();
    const i64 t = blockIdx.x * (i64)BLOCK + threadIdx.x, row = t / (padded / 2), pair = t % (padded / 2);
    const i64 i = pair / step * 2 * step + pair % step, j = i + step;
    x += place(row, length, inner), key += row * padded, at += row * padded;
    const Pair a{WIDE ? 0 : key[i], at[i]}, b{WIDE ? 0 : key[j], at[j]};
    if (behind(x, stride, width, a, b) == !(i & size)) {
        if (!WIDE) key[i] = b.key, key[j] = a.key;
        at[i] = b.at, at[j] = a.at;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) sort_merge(
    const T* x, u64* key, u32* at, i64 length, i64 inner, i64 stride, i64 width, i64 padded, i64 size) {
    after_previous_launch();
    __shared__ Pair held[SIZE];
    const i64 row = blockIdx.x * (i64)SIZE / padded, first = blockIdx.x * (i64)SIZE % padded;
    x += place(row, length, inner), key += row * padded + first, at += row * padded + first;
    for (int i = threadIdx.x; i < SIZE; i += BLOCK) held[i] = Pair{WIDE ? 0 : key[i], at[i]};
    steps(held, x, stride, width, first, size, SIZE / 2);
    store(held, key, at);
}

// the first k of each row [outer, k, inner]
extern "C" __global__ void __launch_bounds__(BLOCK) sort_take(
    const T* x, const u32* at, T* values, i64* indices, i64 length, i64 inner, i64 padded, i64 k, i64 total) {
    after_previous_launch();
    const i64 t = blockIdx.x * (i64)BLOCK + threadIdx.x;
    if (t >= total) return;
    const i64 row = t / (k * inner) * inner + t % inner;
    const u32 from = at[row * padded + t / inner % k];
    values[t] = x[place(row, length, inner) + from * inner];
    indices[t] = from;
}

extern "C" __global__ void __launch_bounds__(BLOCK) sort_order(const u32* at, i64* indices, i64 length) {
    after_previous_launch();
    const i64 t = blockIdx.x * (i64)BLOCK + threadIdx.x;
    if (t < length) indices[t] = at[t];
}
