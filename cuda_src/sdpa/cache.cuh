// cache.cuh: keys and values as a cache has them, which may be numbers of steps in 8 bits.
// Macros   : T element; CACHE the cache's (signed char, e4m3fn; not defined: T). Steps: f32 [heads, D].
// Numerics : x / step in f32, to nearest even, saturated; a step of 0 stands for 1. NaN stays in e4m3fn, and
//            is 127 in signed char, as in onnxruntime.
#pragma once
#include "common.cuh"
#ifdef CACHE
#include "quant/narrow.cuh"
#define IN_STEPS 1
#define STEPS_PARAMETERS , const float *key_step, const float *value_step
DEVICE void round_steps(signed char& y, float n) { y = n != n ? 127 : (int)fminf(fmaxf(rintf(n), -128), 127); }
DEVICE void round_steps(e4m3fn& y, float n) {
#if __CUDA_ARCH__ >= 890
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(n));
    y.bits = (u8)pair;
#else
    y = from_float<e4m3fn>(n != n ? n : fminf(fmaxf(n, -448), 448));
#endif
}
#else
#define CACHE T
#define IN_STEPS 0
#define STEPS_PARAMETERS
constexpr const float *key_step = nullptr, *value_step = nullptr;
#endif

// A piece of a new row as the cache has it; `step` are those of its columns.
template <int V> DEVICE Vec<CACHE, V> cached(const Vec<T, V>& x, const float* step) {
#if IN_STEPS
    Vec<CACHE, V> y;
    UNROLLED for (int j = 0; j < V; j++) round_steps(y.at[j], widen(x.at[j]) / (step[j] == 0 ? 1 : step[j]));
    return y;
#else
    return x;
#endif
}
