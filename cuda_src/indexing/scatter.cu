// indexing/scatter.cu: updates written or added to y at integer indices, in the order they stand.
// Inputs : y holds the data already; update, y of type T; REDUCE 0 none (the last one stays), 1 add,
//          2 mul, 3 max, 4 min. Equal indices meet in one thread, in order: no atomics, same bits.
#include "pointwise/math.cuh"
#ifndef T
#define T float
#endif
#ifndef IDX
#define IDX i64
#endif
#ifndef REDUCE
#define REDUCE 1
#endif
#define THREADS 128

template <class S> DEVICE S combine(S a, S b) {
    if (REDUCE == 1) return a + b;
    if (REDUCE == 2) return a * b;
    if (REDUCE == 3) return m_max(a, b);
    if (REDUCE == 4) return m_min(a, b);
    return b;
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

// y[index[j, 0], ..., index[j, q-1], i] gets update[j, i]: ScatterND. One block an index; the first
// block of equal ones does them all, in order.
extern "C" __global__ void __launch_bounds__(THREADS)
    scatter_nd(T* y, const IDX* index, const T* update, i64 count, i64 inner, int q, i64 d0,
               i64 d1, i64 d2, i64 d3, i64 d4, i64 d5) {
    after_previous_launch();
    __shared__ int match[THREADS];
    const i64 d[6] = {d0, d1, d2, d3, d4, d5};
    auto place = [&](i64 j) {
        i64 to = 0;
        bool inside = true;
#pragma unroll
        for (int a = 0; a < 6; a++)  // all six, so that d stays in registers
            if (a < q) {
                i64 k = (i64)index[j * q + a];
                if (k < 0) k += d[a];
                inside = inside && k >= 0 && k < d[a];
                to = to * d[a] + k;
            }
        return inside ? to : (i64)-1;
    };
    const i64 own = blockIdx.x, to = place(own);
    if (to < 0) return;
    for (i64 first = 0; first < own; first += THREADS) {
        const i64 j = first + threadIdx.x;
        if (__syncthreads_or(j < own && place(j) == to)) return;
    }
    for (i64 first = own - own % THREADS; first < count; first += THREADS) {
        const i64 j = first + threadIdx.x;
        __syncthreads();
        match[threadIdx.x] = j >= own && j < count && place(j) == to;
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
