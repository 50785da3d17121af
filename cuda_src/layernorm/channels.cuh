// channels.cuh: what stands once a channel, for the vector of channels * inner columns that begins at q.
#pragma once
#include "common.cuh"

// A thread's neighbours have other channels, so that single numbers would take a cache line each.
template <class E> DEVICE Vec<E, VEC> of_channels(const E* from, i64 q, i64 inner) {
    if (inner == 1 && ((u64)from & 15) == 0) return load<VEC>(from + q);
    Vec<E, VEC> found;
    UNROLLED for (int j = 0; j < VEC; j++) found.at[j] = from[inner == 1 ? q + j : (q + j) / inner];
    return found;
}
