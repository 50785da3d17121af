// places.cuh: the row of y that an update of ScatterElements (ELEMENTS) or ScatterND is for.
// An index IDX counts from the end if negative; outside the axis it names no row.
#pragma once
#include "common.cuh"

struct Sizes { i64 d[6]; };

// The row of y that update j is for, -1 for none.
DEVICE i64 place(const IDX* index, i64 j, int q, const Sizes& sizes) {
#if ELEMENTS
    const u32 inner = (u32)sizes.d[0], count = (u32)sizes.d[1], at = (u32)j;  // less than 2^31 of all
    i64 k = (i64)index[j];
    if (k < 0) k += sizes.d[2];
    return k < 0 || k >= sizes.d[2] ? -1 : (at / inner / count * sizes.d[2] + k) * inner + at % inner;
#else
    i64 to = 0;
    bool inside = true;
    UNROLLED for (int a = 0; a < 6; a++)  // all six, so that d stays in registers
        if (a < q) {
            i64 k = (i64)index[j * q + a];
            if (k < 0) k += sizes.d[a];
            inside = inside && k >= 0 && k < sizes.d[a];
            to = to * sizes.d[a] + k;
        }
    return inside ? to : -1;
#endif
}
