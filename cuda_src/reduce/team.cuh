// team.cuh: a value agreed on by N neighbouring threads, merged in an order N alone decides.
#pragma once
#include "common.cuh"

// Any struct of 4-byte words through a shuffle.
template <class S> DEVICE S shuffle_xor(S s, int step) {
    union { S s; u32 word[sizeof(S) / 4]; } a;
    a.s = s;
    UNROLLED for (int i = 0; i < (int)(sizeof(S) / 4); i++) a.word[i] = __shfl_xor_sync(~0u, a.word[i], step);
    return a.s;
}
// N is a power of two; above 32 it is the whole block, and `scratch` holds N / 32 values.
template <int N, class S, class Merge> DEVICE S team_merge(S s, Merge merge, S* scratch) {
    UNROLLED for (int step = 1; step < (N < 32 ? N : 32); step *= 2) s = merge(s, shuffle_xor(s, step));
    if (N <= 32) return s;
    __syncthreads();  // scratch may still be read from the last merge
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = s;
    __syncthreads();
    s = scratch[threadIdx.x % (N / 32)];
    UNROLLED for (int step = 1; step < N / 32; step *= 2) s = merge(s, shuffle_xor(s, step));
    return s;
}
template <int N, class S> DEVICE S team_sum(S s, S* scratch) {
    return team_merge<N>(s, [](S a, S b) { return a + b; }, scratch);
}
template <int N, class S> DEVICE S team_max(S s, S* scratch) {
    return team_merge<N>(s, [](S a, S b) { return a > b || a != a ? a : b; }, scratch);
}

// Sums over N neighbouring threads (or a warp of them) of COUNT values each: those from `first` to
// `end` are a thread's own in the end, from s[0] on. Of half as many values in each step.
struct Part { int first, end; };
template <int N, class S, int COUNT> DEVICE Part spread_sum(S (&s)[COUNT]) {
    Part mine = {0, COUNT};
    int count = COUNT;
    UNROLLED for (int step = (N < 32 ? N : 32) / 2; step; step /= 2) {
        const int half = (count + 1) / 2;
        const bool upper = threadIdx.x & step;
        UNROLLED for (int c = 0; c < half; c++) {
            const S low = s[c], high = c + half < count ? s[c + half] : S(0);
            s[c] = (upper ? high : low) + __shfl_xor_sync(~0u, upper ? low : high, step);
        }
        if (upper) mine.first += half;
        else if (mine.first + half < mine.end) mine.end = mine.first + half;
        count = half;
    }
    return mine;
}

// exp by the hardware's 2^x: relative error 2^-22 + |x| 2^-23, which sums of exp(x - max) do not feel.
DEVICE float fast_exp(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950408889634f));
    return y;
}
DEVICE double fast_exp(double x) { return exp(x); }

#ifdef ACC
#define INFINITE ((ACC)__int_as_float(0x7f800000))
#endif
