// common.cuh: element types without headers, 16-byte access, fixed-order reductions, activations.
// Macros given to a kernel (T, ACT, ...) are #defined above this text: no name here may clash.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__
#define UNROLLED _Pragma("unroll")  // before a loop: a copy of its body for each turn
#define ROLLED _Pragma("unroll 1")  // one copy, whatever the compiler thinks

// ---- launches (programmatic dependent launch, sm_90) ----
// A kernel may come up while the one before it still runs: it waits here for that one's results. Only
// then may the next come up, so what was written two launches ago is always there. It may do so early
// where this one leaves multiprocessors idle, or where the next one's blocks take one each (NEXT_ALONE):
// elsewhere the first to finish would get all its blocks.
// No pointer is __restrict__: what a kernel only reads through such a one is taken for constant while
// it runs, and its loads go ahead of the wait.
DEVICE void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
DEVICE void after_previous_launch() {
    grid_dependency_wait();
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred few;\nsetp.le.u32 few, %0, 128;\n@few griddepcontrol.launch_dependents;\n}" ::"r"(
                     gridDim.x * gridDim.y * gridDim.z)
                 : "memory");
#endif
}

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

// ---- conversions: f16 and bf16 round to nearest even ----
DEVICE float to_float(float x) { return x; }
DEVICE float to_float(double x) { return (float)x; }
DEVICE float to_float(int x) { return (float)x; }
DEVICE float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE float to_float(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
template <class E> DEVICE E from_float(float x) { return (E)x; }
template <> DEVICE bf16 from_float<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> DEVICE f16 from_float<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// Two neighbours in one 32-bit register, the lower index in the lower half.
template <class E> DEVICE u32 pack2(float lo, float hi);
template <> DEVICE u32 pack2<bf16>(float lo, float hi) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}
template <> DEVICE u32 pack2<f16>(float lo, float hi) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}
template <class E> DEVICE float2 unpack2(u32 x);
template <> DEVICE float2 unpack2<bf16>(u32 x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xffff0000u));
}
template <> DEVICE float2 unpack2<f16>(u32 x) {
    f16 lo = {(u16)x}, hi = {(u16)(x >> 16)};
    return make_float2(to_float(lo), to_float(hi));
}

// What sums are kept in: fp32 for the 16-bit floats and fp32, the type itself otherwise.
template <class E> struct Accumulator { typedef E type; };
template <> struct Accumulator<bf16> { typedef float type; };
template <> struct Accumulator<f16> { typedef float type; };
DEVICE float widen(float x) { return x; }
DEVICE double widen(double x) { return x; }
DEVICE float widen(bf16 x) { return to_float(x); }
DEVICE float widen(f16 x) { return to_float(x); }
template <class E> DEVICE E widen(E x) { return x; }
template <class E> DEVICE E narrow(float x) { return from_float<E>(x); }
template <class E> DEVICE E narrow(double x) { return (E)x; }
template <class E> DEVICE E narrow(E x) { return x; }

// ---- V elements of E by accesses of at most 16 bytes ----
template <class E, int V> struct alignas(sizeof(E) * V < 16 ? sizeof(E) * V : 16) Vec { E at[V]; };
template <int V, class E> DEVICE Vec<E, V> load(const E* p) { return *(const Vec<E, V>*)p; }
template <int V, class E> DEVICE void store(E* p, const Vec<E, V>& v) { *(Vec<E, V>*)p = v; }

// ---- reductions whose order depends on the thread count alone ----
// Of a quad of lanes, which hold a row of a product's accumulators.
template <class S> DEVICE S quad_sum(S x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
template <class S> DEVICE S warp_sum(S x) {
    UNROLLED for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
    return x;
}
// Sum over THREADS threads, given to all of them; `scratch` holds THREADS / 32 values.
template <int THREADS, class S> DEVICE S block_sum(S x, S* scratch) {
    x = warp_sum(x);
    if (THREADS == 32) return x;
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    S total = 0;
    UNROLLED for (int w = 0; w < THREADS / 32; w++) total += scratch[w];
    return total;
}

// ---- the activation of a kernel: one row of ops/activations.py, as macros ----
//   ACT         its name; not defined where the kernel has none
//   ACT_VALUE   body of a function of x and alpha: act(x), which the caller rounds to Out
//   ACT_SLOPE   body of a function of y, z and alpha: y act'(z)
//   ACT_NORMAL  1: act(x) = x P(X < x) of a normal X
#ifdef ACT
constexpr bool ACTIVE = true;
#else
constexpr bool ACTIVE = false;
#define ACT_VALUE return x;
#define ACT_SLOPE return y;
#endif
#ifndef ACT_NORMAL
#define ACT_NORMAL 0
#endif

DEVICE float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// 1 / (1 + e^-x); rounded to 16 bits afterwards, without the scaling that spares tiny values.
template <class Out = float> DEVICE float sigmoid(float x) {
    if (sizeof(Out) > 2) return __fdividef(1.0f, 1.0f + __expf(-x));
    float y = 1.0f + ex2(-1.4426950408889634f * x);
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(y));
    return y;
}

// The larger one, NaN where x is.
DEVICE float max_nan(float x, float y) {
#if __CUDA_ARCH__ >= 800
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
    return x;
#else
    return x < y ? y : x;
#endif
}

// e = P(X < -|x|) of a normal X, a = |x| (16 beyond it, where e is 0), for N values side by side, each
// hiding another's latency: 2 to a polynomial. Every instruction of an epilogue holds up the other
// warpgroup's products, so there are no more terms than 16 bits show: max(x, 0) - a e is off by 2.4e-5
// for f16 and 1.9e-4 for bf16 at most; of itself, above x = -2, by 3.2e-4 and 2.8e-3.
template <class Out> struct TailTerms { static constexpr int count = 5; };
template <> struct TailTerms<bf16> { static constexpr int count = 4; };
template <class Out, int N> DEVICE void normal_tail(const float (&x)[N], float (&a)[N], float (&e)[N]) {
    constexpr int TERMS = TailTerms<Out>::count;
    const float four[5] = {-1.00089913f, -1.13591613f, -0.49628059f, -0.0245251570f};
    const float five[5] = {-1.00012632f, -1.14835984f, -0.468085496f, -0.0431929518f, 0.00356854584f};
    const float(&p)[5] = TERMS == 4 ? four : five;
    UNROLLED for (int j = 0; j < N; j++) a[j] = fminf(fabsf(x[j]), 16.0f), e[j] = p[TERMS - 1];
    UNROLLED for (int i = TERMS - 2; i >= 0; i--)
        UNROLLED for (int j = 0; j < N; j++) e[j] = fmaf(e[j], a[j], p[i]);
    UNROLLED for (int j = 0; j < N; j++) e[j] = ex2(e[j]);
}
DEVICE float normal_cdf(float x) { return 0.5f * (1.0f + erff(x * 0.70710678118654752f)); }
DEVICE float normal_slope(float y, float z, float cdf) {  // y times the derivative of z P(X < z)
    return y * (cdf + z * 0.3989422804014327f * ex2(-0.72134752044448171f * z * z));
}
template <class Out> DEVICE float tanh_cdf(float x) {  // the approximation of it by tanh
    return sigmoid<Out>(x * (1.5957691216057308f + 0.071354816f * x * x));
}
DEVICE float tanh_softplus(float x) {  // tanh(log(1 + e^x)) = (e^2x + 2 e^x) / (e^2x + 2 e^x + 2)
    float e = __expf(fminf(x, 20.0f)), n = e * (e + 2.0f);
    return __fdividef(n, n + 2.0f);
}
template <class Out> DEVICE float act_value(float x, float alpha) { ACT_VALUE }
template <class Out> DEVICE float act_slope(float y, float z, float alpha) { ACT_SLOPE }
// x = act(x), N values side by side; `Out` is what the caller rounds the result to.
template <class Out, int N> DEVICE void activate(float (&x)[N], float alpha) {
    constexpr bool TAIL = ACT_NORMAL && sizeof(Out) == 2;
    float a[N], e[N];
    if (TAIL) normal_tail<Out>(x, a, e);
    UNROLLED for (int j = 0; j < N; j++)
        x[j] = TAIL ? fmaf(-a[j], e[j], max_nan(x[j], 0.0f)) : act_value<Out>(x[j], alpha);
}
// y *= act'(z), N values side by side.
template <class Out, int N> DEVICE void times_slope(float (&y)[N], const float (&z)[N], float alpha) {
    constexpr bool TAIL = ACT_NORMAL && sizeof(Out) == 2;
    float a[N], e[N];
    if (TAIL) normal_tail<Out>(z, a, e);
    UNROLLED for (int j = 0; j < N; j++)
        y[j] = TAIL ? normal_slope(y[j], z[j], z[j] < 0.0f ? e[j] : 1.0f - e[j]) : act_slope<Out>(y[j], z[j], alpha);
}
template <class Out> DEVICE float act(float x, float alpha) {
    float y[1] = {x};
    activate<Out>(y, alpha);
    return y[0];
}
template <class Out> DEVICE float times_slope(float y, float z, float alpha) {
    float to[1] = {y}, at[1] = {z};
    times_slope<Out>(to, at, alpha);
    return to[0];
}
