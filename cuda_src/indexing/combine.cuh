// combine.cuh: how an update joins what is there: REDUCE 0 none (the last one stays), 1 add, 2 mul, 3 max, 4 min.
// An extreme is onnxruntime's comparison, one update after the other: what stands before a NaN is forgotten, and the
// NaN itself once another update follows. So extremes of floats are combined in order, or with `resets` in mind.
#pragma once
#include "pointwise/math.cuh"

template <class S> DEVICE S combine(S a, S b) {
    if constexpr (REDUCE == 1) return a + b;
    else if constexpr (REDUCE == 2) return a * b;
    else if constexpr (REDUCE == 3) return a > b ? a : b;
    else if constexpr (REDUCE == 4) return a < b ? a : b;
    else return b;
}

// Whether nothing that stands before x counts any more.
template <class S> DEVICE bool resets(S x) { return REDUCE >= 3 && is_nan(x); }

// What combines with any number to that number: -0 of a sum, which keeps -0 + -0.
template <class S> DEVICE S least() { return (S)-1 < (S)0 ? (S)(1ull << (8 * sizeof(S) - 1)) : (S)0; }
template <> DEVICE float least<float>() { return __int_as_float(0xff800000); }
template <> DEVICE double least<double>() { return __longlong_as_double(0xfff0000000000000ull); }
template <class S> DEVICE S most() { return (S)((u64)least<S>() - 1); }
template <> DEVICE bool most<bool>() { return true; }
template <> DEVICE float most<float>() { return -least<float>(); }
template <> DEVICE double most<double>() { return -least<double>(); }
template <class S> DEVICE S combine_unit() {
    if (REDUCE == 2) return (S)1;
    if (REDUCE == 3) return least<S>();
    if (REDUCE == 4) return most<S>();
    return (S)-0.0;
}
