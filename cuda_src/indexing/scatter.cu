// indexing/scatter.cu: updates written or added to y at integer indices, in the order they stand.
// Idea     : equal indices meet in one thread, or in one warp whose lanes take turns by number: no atomics.
// Inputs   : y holds the data already; update, y of type T; index IDX. An index outside its axis names nothing.
// Macros   : T IDX, REDUCE as indexing/combine.cuh reads it.
// Launch   : scatter_elements a thread a line, scatter_lines a warp a line of which shared memory holds the
//            accumulators, scatter_nd a block of 128 threads an update.
// Numerics : in order; scatter_lines rounds sums of 16-bit floats once.
// Bound    : scatter_lines memory, each operand once; the others the latency of few threads.
#define ELEMENTS 0
#include "indexing/combine.cuh"
#include "indexing/places.cuh"
#define THREADS 128

// What a line's elements are kept in while they are combined.
template <class E, int HOW> struct Slots { typedef typename Accumulator<E>::type type; };
template <class E> struct Slots<E, 0> { typedef E type; };
typedef Slots<T, REDUCE>::type Slot;
template <class E> DEVICE Slot slot_of(E x) {
    if constexpr (REDUCE == 0) return x;
    else return widen(x);
}

// y[o, index[o, j, i], i] gets update[o, j, i]: ScatterElements. One thread a line (o, i).
extern "C" __global__ void scatter_elements(T* y, const IDX* index, const T* update, i64 lines,
                                            i64 inner, i64 count, i64 size) {
    after_previous_launch();
    const i64 line = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (line >= lines) return;
    const i64 i = line % inner, o = line / inner;
    for (i64 j = 0; j < count; j++) {
        const i64 at = (o * count + j) * inner + i;
        i64 k = (i64)index[at];
        if (k < 0) k += size;
        if (k < 0 || k >= size) continue;
        T* p = y + (o * size + k) * inner + i;
        *p = narrow<T>(combine(widen(*p), widen(update[at])));
    }
}

// The same of lines whose elements stand side by side, of fewer than 2^bits elements.
extern "C" __global__ void __launch_bounds__(THREADS)
    scatter_lines(T* y, const IDX* index, const T* update, i64 lines, int count, int size, int bits) {
    after_previous_launch();
    extern __shared__ __align__(16) u8 memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 line = (i64)blockIdx.x * (THREADS / 32) + warp;
    if (line >= lines) return;
    Slot* slot = (Slot*)memory + warp * size;
    y += line * size, index += line * count, update += line * count;
    i64 next = lane < count ? (i64)index[lane] : size;
    T value = {};
    if (lane < count) value = update[lane];
    for (int k = lane; k < size; k += 32) slot[k] = slot_of(y[k]);
    __syncwarp();
    for (int first = 0; first < count; first += 32) {
        const i64 k = next < 0 ? next + size : next;
        const Slot own = slot_of(value);
        const int j = first + 32 + lane;
        next = j < count ? (i64)index[j] : size;
        if (j < count) value = update[j];
        const bool live = k >= 0 && k < size;
        u32 peers = __ballot_sync(~0u, live);
        for (int bit = 0; bit < bits; bit++) {
            const bool set = k >> bit & 1;
            const u32 votes = __ballot_sync(~0u, set);
            peers &= set ? votes : ~votes;
        }
        const int turn = live ? __popc(peers & ((1u << lane) - 1)) : -1;
        for (int t = 0; __any_sync(~0u, turn >= t); t++) {
            if (turn == t) slot[k] = combine(slot[k], own);
            __syncwarp();
        }
    }
    for (int k = lane; k < size; k += 32) y[k] = narrow<T>(slot[k]);
}

// y[index[j, 0], ..., index[j, q-1], i] gets update[j, i]: ScatterND. One block an index; the first
// block of equal ones does them all, in order.
extern "C" __global__ void __launch_bounds__(THREADS, 8)
    scatter_nd(T* y, const IDX* index, const T* update, i64 count, i64 inner, int q, i64 d0,
               i64 d1, i64 d2, i64 d3, i64 d4, i64 d5) {
    after_previous_launch();
    __shared__ int match[THREADS];
    const Sizes sizes = {{d0, d1, d2, d3, d4, d5}};
    const i64 own = blockIdx.x, to = place(index, own, q, sizes);
    if (to < 0) return;
    for (i64 first = 0; first < own; first += THREADS) {
        const i64 j = first + threadIdx.x;
        if (__syncthreads_or(j < own && place(index, j, q, sizes) == to)) return;
    }
    for (i64 first = own - own % THREADS; first < count; first += THREADS) {
        const i64 j = first + threadIdx.x;
        __syncthreads();
        match[threadIdx.x] = j >= own && j < count && place(index, j, q, sizes) == to;
        __syncthreads();
        for (int m = 0; m < THREADS; m++) {
            if (!match[m]) continue;
            for (i64 i = threadIdx.x; i < inner; i += THREADS) {
                T* p = y + to * inner + i;
                *p = narrow<T>(combine(widen(*p), widen(update[(first + m) * inner + i])));
            }
        }
    }
}
