// reducers.cuh: what a reduction keeps (State), how it takes one element, merges, and finishes.
// Macros: T element, U result, ACC accumulator (fp32 for 16-bit floats), REDUCER one of the structs.
#pragma once
#include "reduce/team.cuh"

template <class S> struct Limits;
template <> struct Limits<float> {
    static DEVICE float low() { return __int_as_float(0xff800000); }
    static DEVICE float high() { return __int_as_float(0x7f800000); }
};
template <> struct Limits<double> {
    static DEVICE double low() { return __longlong_as_double(0xfff0000000000000ull); }
    static DEVICE double high() { return __longlong_as_double(0x7ff0000000000000ull); }
};
template <> struct Limits<int> {
    static DEVICE int low() { return 0x80000000; }
    static DEVICE int high() { return 0x7fffffff; }
};
template <> struct Limits<u32> {
    static DEVICE u32 low() { return 0; }
    static DEVICE u32 high() { return 0xffffffffu; }
};
template <> struct Limits<i64> {
    static DEVICE i64 low() { return 0x8000000000000000ll; }
    static DEVICE i64 high() { return 0x7fffffffffffffffll; }
};
template <> struct Limits<u64> {
    static DEVICE u64 low() { return 0; }
    static DEVICE u64 high() { return ~0ull; }
};

template <class To> struct Round {
    template <class S> static DEVICE To of(S x) { return (To)x; }
};
template <> struct Round<bf16> {
    template <class S> static DEVICE bf16 of(S x) { return from_float<bf16>((float)x); }
};
template <> struct Round<f16> {
    template <class S> static DEVICE f16 of(S x) { return from_float<f16>((float)x); }
};

// ---- reducers ----
template <class S> struct Single {  // one number is the whole state
    typedef S State;
    static DEVICE S merge(S a, S b) { return a + b; }
    static DEVICE S identity() { return 0; }
    static DEVICE S value(S s, i64) { return s; }
};
template <class S> struct Sum : Single<S> {
    static DEVICE S take(S s, S x, i64) { return s + x; }
};
template <class S> struct Dot : Sum<S> {};
template <class S> struct Mean : Sum<S> {
    static DEVICE S value(S s, i64 count) { return s / (S)count; }
};
template <class S> struct SumSquare : Single<S> {
    static DEVICE S take(S s, S x, i64) { return s + x * x; }
};
template <class S> struct L1 : Single<S> {
    static DEVICE S take(S s, S x, i64) { return s + (x < (S)0 ? (S)0 - x : x); }
};
template <class S> struct L2 : SumSquare<S> {
    static DEVICE S value(S s, i64) { return sqrt(s); }
};
template <class S> struct LogSum : Sum<S> {
    static DEVICE S value(S s, i64) { return log(s); }
};
template <class S> struct Prod {
    typedef S State;
    static DEVICE S identity() { return 1; }
    static DEVICE S take(S s, S x, i64) { return s * x; }
    static DEVICE S merge(S a, S b) { return a * b; }
    static DEVICE S value(S s, i64) { return s; }
};
template <class S> struct Max {  // a NaN wins, as in numpy
    typedef S State;
    static DEVICE S identity() { return Limits<S>::low(); }
    static DEVICE S take(S s, S x, i64) { return s >= x || s != s ? s : x; }
    static DEVICE S merge(S a, S b) { return take(a, b, 0); }
    static DEVICE S value(S s, i64) { return s; }
};
template <class S> struct Min : Max<S> {
    static DEVICE S identity() { return Limits<S>::high(); }
    static DEVICE S take(S s, S x, i64) { return s <= x || s != s ? s : x; }
    static DEVICE S merge(S a, S b) { return take(a, b, 0); }
};
template <class S, bool COUNT = false> struct LogSumExp {  // m the largest, s = sum of exp(x - m)
    struct State { S m, s; };
    static DEVICE State identity() { return {Limits<S>::low(), 0}; }
    static DEVICE State take(State a, S x, i64) { return merge(a, {x, 1}); }
    static DEVICE State merge(State a, State b) {
        const S m = a.m > b.m || a.m != a.m ? a.m : b.m;
        if (m == Limits<S>::low() || m == Limits<S>::high()) return {m, a.s + b.s};
        if (COUNT) return {m, (a.m == m ? a.s : 0) + (b.m == m ? b.s : 0)};
        return {m, a.s * fast_exp(a.m - m) + b.s * fast_exp(b.m - m)};
    }
    static DEVICE S value(State s, i64) { return s.m + log(s.s); }
};
// of integers, whose terms onnxruntime cuts to integers: 1 for each of the largest, else 0
template <class S> struct LogCount : LogSumExp<S, true> {};
// ties: the first index, or the last; a NaN stays at index 0 and is passed over later, as in onnxruntime's
// loop of comparisons
template <class S, bool MAX, bool LAST> struct Arg {
    struct State { S x; i64 at; };
    static DEVICE State identity() { return {MAX ? Limits<S>::low() : Limits<S>::high(), -1}; }
    static DEVICE State take(State s, S x, i64 at) { return merge(s, {x, at}); }
    static DEVICE State merge(State a, State b) {
        const bool earlier = (u64)a.at < (u64)b.at;  // -1, nothing yet, is the largest
        if (a.at < 0 || b.at < 0) return b.at < 0 ? a : b;
        if (a.x != a.x) return a.at == 0 || (b.x != b.x && earlier) ? a : b;
        if (b.x != b.x) return b.at == 0 ? b : a;
        if (a.x == b.x) return earlier != LAST ? a : b;
        return (a.x > b.x) == MAX ? a : b;
    }
    static DEVICE i64 value(State s, i64) { return s.at; }
};
template <class S> struct ArgMax : Arg<S, true, false> {};
template <class S> struct ArgMin : Arg<S, false, false> {};
template <class S> struct ArgMaxLast : Arg<S, true, true> {};
template <class S> struct ArgMinLast : Arg<S, false, true> {};
template <class S> struct ArgMaxFinite : ArgMax<S> {  // -1 where one is not a number or inf, or none is finite
    typedef typename ArgMax<S>::State State;
    static DEVICE State take(State s, S x, i64 at) { return ArgMax<S>::merge(s, {x == x ? x : Limits<S>::high(), at}); }
    static DEVICE i64 value(State s, i64) { return Limits<S>::low() < s.x && s.x < Limits<S>::high() ? s.at : -1; }
};
template <class S> struct Moments {  // Welford inside a thread, Chan's merge between threads
    struct State { S n, mean, m2; };
    static DEVICE State identity() { return {0, 0, 0}; }
    static DEVICE State take(State s, S x, i64) {
        const S n = s.n + 1, d = x - s.mean, mean = s.mean + d / n;
        return {n, mean, s.m2 + d * (x - mean)};
    }
    static DEVICE State merge(State a, State b) {
        const S n = a.n + b.n;
        if (n == 0) return a;
        const S d = b.mean - a.mean, f = b.n / n;
        return {n, a.mean + d * f, a.m2 + b.m2 + d * (a.n * f) * d};  // d * d may be inf, n 0
    }
    // N elements at once: one division, and no chain through the mean
    template <int N, class E> static DEVICE State take_all(State s, const E (&x)[N]) {
        S sum = 0, m2 = 0;
        UNROLLED for (int i = 0; i < N; i++) sum += (S)widen(x[i]);
        const S mean = sum / N;
        UNROLLED for (int i = 0; i < N; i++) m2 += ((S)widen(x[i]) - mean) * ((S)widen(x[i]) - mean);
        return merge(s, {N, mean, m2});
    }
    // V columns of N rows at once; all columns have had as many rows, so that one division serves them
    template <int V, int N, class P> static DEVICE void take_rows(State (&s)[V], const P (&rows)[N]) {
        const S n = s[0].n + N, f = N / n, weight = s[0].n * f;
        UNROLLED for (int j = 0; j < V; j++) {
            S sum = 0, m2 = 0;
            UNROLLED for (int i = 0; i < N; i++) sum += (S)widen(rows[i].at[j]);
            const S mean = sum / N;
            UNROLLED for (int i = 0; i < N; i++)
                m2 += ((S)widen(rows[i].at[j]) - mean) * ((S)widen(rows[i].at[j]) - mean);
            const S d = mean - s[j].mean;
            s[j] = {n, s[j].mean + d * f, s[j].m2 + m2 + d * weight * d};
        }
    }
    // the first `n` of N elements, at least one
    template <int N, class E> static DEVICE State take_some(State s, const E (&x)[N], int n) {
        S sum = 0, m2 = 0;
        UNROLLED for (int i = 0; i < N; i++)
            if (i < n) sum += (S)widen(x[i]);
        const S mean = sum / n;
        UNROLLED for (int i = 0; i < N; i++)
            if (i < n) m2 += ((S)widen(x[i]) - mean) * ((S)widen(x[i]) - mean);
        return merge(s, {(S)n, mean, m2});
    }
    static DEVICE S value(State s, i64) { return s.mean; }
    static DEVICE S second(State s, i64 count) { return s.m2 / (S)count; }
};
