// indexing/gather.cu: elements of x picked by integer indices.
// Inputs : x, y in units of T (an element, or several where the inner run allows it), index IDX.
//          An index counts from the end if negative; outside the axis it gives zeros.
// Launch : one thread a unit of y.
#include "common.cuh"
struct alignas(16) u128 { u64 lo, hi; };

DEVICE i64 thread_index() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

// y[o, j, i] = x[o, index[o, j, i], i]: GatherElements.
extern "C" __global__ void gather_elements(const T* x, const IDX* index, T* y, i64 n, i64 inner, i64 count, i64 size) {
    after_previous_launch();
    const i64 at = thread_index();
    if (at >= n) return;
    const i64 i = at % inner, o = at / inner / count;
    i64 k = (i64)index[at];
    if (k < 0) k += size;
    T v = {};
    if (k >= 0 && k < size) v = x[(o * size + k) * inner + i];
    y[at] = v;
}

// y[b, j, i] = x[b, index[b, j, 0], ..., index[b, j, q-1], i]: GatherND.
extern "C" __global__ void gather_nd(const T* x, const IDX* index, T* y, i64 n, i64 inner,
                                     i64 count, int q, i64 d0, i64 d1, i64 d2, i64 d3, i64 d4,
                                     i64 d5) {
    after_previous_launch();
    const i64 at = thread_index();
    if (at >= n) return;
    const i64 i = at % inner, r = at / inner, b = r / count;
    const i64 d[6] = {d0, d1, d2, d3, d4, d5};
    i64 from = b;
    bool inside = true;
    UNROLLED for (int a = 0; a < 6; a++)
        if (a < q) {
            i64 k = (i64)index[r * q + a];
            if (k < 0) k += d[a];
            inside = inside && k >= 0 && k < d[a];
            from = from * d[a] + k;
        }
    T v = {};
    if (inside) v = x[from * inner + i];
    y[at] = v;
}
