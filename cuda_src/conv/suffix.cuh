// conv/suffix.cuh: what stands behind a convolution, element by element: layernorm/suffix.cuh's SUFFIX of a
// result v (of type ACC) and the elements at its place of e1, e2, e3, which are laid out as y.
// SLOPE: the activation's alpha is that of the filter, slope T [groups * filters] (PRelu).
#pragma once
#include "layernorm/suffix.cuh"
#ifndef SLOPE
#define SLOPE 0
#endif

DEVICE float slope_of(const T* slope, int filter, float alpha) {
    return SLOPE ? (float)widen(slope[filter]) : alpha;
}
template <class S> DEVICE TY finished(S v, const T* e1, const T* e2, const T* e3, i64 at) {
    const S a = OPERANDS > 0 ? (S)widen(e1[at]) : S(), b = OPERANDS > 1 ? (S)widen(e2[at]) : S();
    const S c = OPERANDS > 2 ? (S)widen(e3[at]) : S();
    return narrow<TY>((typename Accumulator<TY>::type)SUFFIX(v, a, b, c));
}
