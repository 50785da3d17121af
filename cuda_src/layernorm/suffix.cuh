// layernorm/suffix.cuh: what a row kernel makes of a result v before it is stored: SUFFIX(v, v1, v2, v3)
// of it and the first OPERANDS of the elements there of e1, e2, e3, in TY; v in T if not given. E4M3_STEPS: some are e4m3fn.
#pragma once
#include "pointwise/math.cuh"
#ifdef E4M3_STEPS
#include "quant/e4m3.cuh"
#endif
#ifndef SUFFIX
#define OPERANDS 0
#define SUFFIX(v0, v1, v2, v3) v0
#endif
#ifndef TY
#define TY T
#endif

// V elements of each of e1, e2, e3, and what becomes of a result at the place of one of them.
template <int V> struct Beside {
    Vec<T, V> e[3];
    DEVICE void read(const T* e1, const T* e2, const T* e3, i64 at) {
        if (OPERANDS > 0) e[0] = load<V>(e1 + at);
        if (OPERANDS > 1) e[1] = load<V>(e2 + at);
        if (OPERANDS > 2) e[2] = load<V>(e3 + at);
    }
    template <class S> DEVICE TY after(S v, int j) const {
        return stored<TY>(SUFFIX(v, widen(e[0].at[j]), widen(e[1].at[j]), widen(e[2].at[j])));
    }
};
