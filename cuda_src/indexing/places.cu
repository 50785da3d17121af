// indexing/places.cu: many updates at integer indices: which rows of y they are for, and which is the last of each.
// Idea     : `mark_last` keeps the largest number of an update of each row of y, and `write_last` writes the update
//            that has it: onnxruntime's last writer, in any order of the threads (last null: each). Where updates are combined,
//            `row_keys` gives each its row, scan/radix.cu sorts them stably, `mark_runs` notes where a row's run
//            begins and ends, and indexing/row_sums.cu combines a run in order.
// Inputs   : index IDX, counted from the end if negative; an index outside the axis names no row. ELEMENTS: update j
//            is for the element of y [., d2, d0] whose index along d2 is index[j], of index [., d1, d0]. Otherwise
//            index is [count, q], of sizes d. update, y [., inner] in units of T (an element, or several where the inner
//            run allows it). last u32 [rows], start and stop u32 [rows], found u32 [1].
// Macros   : T IDX ELEMENTS.
// Launch   : a thread an update, or a unit of one; `clear_last` a thread a row.
// Numerics : integers; atomicMax gives the same in any order.
// Bound    : memory: index read twice, update and y once; a row's number read and written.
#include "indexing/places.cuh"
struct alignas(16) u128 { u64 lo, hi; };

DEVICE i64 thread_index() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }

extern "C" __global__ void clear_last(u32* last, i64 rows) {
    after_previous_launch();
    const i64 row = thread_index();
    if (row < rows) last[row] = 0;
}

extern "C" __global__ void mark_last(const IDX* index, u32* last, i64 count, int q, i64 d0, i64 d1, i64 d2, i64 d3,
                                     i64 d4, i64 d5) {
    after_previous_launch();
    const i64 j = thread_index();
    if (j >= count) return;
    const i64 to = place(index, j, q, {{d0, d1, d2, d3, d4, d5}});
    if (to >= 0) atomicMax(last + to, (u32)j + 1);
}

extern "C" __global__ void write_last(const IDX* index, const T* update, const u32* last, T* y, i64 total, i64 inner,
                                      int q, i64 d0, i64 d1, i64 d2, i64 d3, i64 d4, i64 d5) {
    after_previous_launch();
    const i64 t = thread_index();
    if (t >= total) return;
    const i64 j = t / inner;
    const i64 to = place(index, j, q, {{d0, d1, d2, d3, d4, d5}});
    if (to >= 0 && (!last || last[to] == (u32)j + 1)) y[to * inner + t % inner] = update[t];
}

extern "C" __global__ void row_keys(const IDX* index, u32* key, i64 count, u32 none, int q, i64 d0, i64 d1, i64 d2,
                                    i64 d3, i64 d4, i64 d5) {
    after_previous_launch();
    const i64 j = thread_index();
    if (j >= count) return;
    const i64 to = place(index, j, q, {{d0, d1, d2, d3, d4, d5}});
    key[j] = to < 0 ? none : (u32)to;
}

extern "C" __global__ void mark_runs(const u32* row, u32* start, u32* stop, u32* found, i64 count, u32 none) {
    after_previous_launch();
    const i64 at = thread_index();
    if (at >= count) return;
    const u32 own = row[at];
    const bool first = at == 0 || row[at - 1] != own, last = at == count - 1 || row[at + 1] != own;
    if (own == none) {
        if (first) *found = (u32)at;
        return;
    }
    if (first) start[own] = (u32)at;
    if (last) stop[own] = (u32)at + 1;
    if (at == count - 1) *found = (u32)count;
}
