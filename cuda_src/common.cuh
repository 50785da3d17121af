// common.cuh: element types without headers, 16-byte access, fixed-order reductions, activations.
// Macros given to a kernel (T, ACT, ...) are #defined above this text: no name here may clash.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEVICE __device__ __forceinline__

// ---- launches (programmatic dependent launch, sm_90) ----
// A kernel may come up while the one before it still runs: it waits here for that one's results. Only
// then may the next come up, so what was written two launches ago is always there. It may do so early
// where this one leaves multiprocessors idle: elsewhere the first to finish would get all its blocks.
// No pointer is __restrict__: what a kernel only reads through such a one is taken for constant while
// it runs, and its loads go ahead of the wait.
DEVICE void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
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
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
template <class S> DEVICE S warp_sum(S x) {
#pragma unroll
    for (int step = 16; step; step >>= 1) x += __shfl_xor_sync(~0u, x, step);
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
#pragma unroll
    for (int w = 0; w < THREADS / 32; w++) total += scratch[w];
    return total;
}

// ---- activations and their derivatives with respect to the pre-activation z ----
enum Activation { NONE, RELU, LEAKY_RELU, GELU, GELU_TANH, QUICK_GELU, SILU, SIGMOID, TANH };

DEVICE float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// Normal distribution function. Where the result is rounded to 16 bits: a sigmoid, off by 7e-6 at most,
// x times it by 3e-6; erff would be two branches that no other element's work could hide.
template <class Out> DEVICE float normal_cdf(float x) {
    if (sizeof(Out) > 2) return 0.5f * (1.0f + erff(x * 0.70710678118654752f));
    float u = x * x, q = -3.22899672e-06f, y;
    q = q * u + 8.82382635e-05f;
    q = q * u + 3.60273921e-04f;
    q = q * u - 1.05226687e-01f;
    q = q * u - 2.30204539f;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * q));
    y += 1.0f;
    asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(y));
    return y;
}
// `Out` is what the caller rounds the result to.
template <int ACT, class Out = float> DEVICE float act(float x, float alpha) {
    if (ACT == RELU) return fmaxf(x, 0.0f);
    if (ACT == LEAKY_RELU) return x > 0.0f ? x : alpha * x;
    if (ACT == GELU) return x * normal_cdf<Out>(x);
    if (ACT == GELU_TANH)
        return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    if (ACT == QUICK_GELU) return x * sigmoid(alpha * x);
    if (ACT == SILU) return x * sigmoid(x);
    if (ACT == SIGMOID) return sigmoid(x);
    if (ACT == TANH) return tanhf(x);
    return x;
}
template <int ACT, class Out = float> DEVICE float act_grad(float z, float alpha) {
    if (ACT == RELU) return z > 0.0f ? 1.0f : 0.0f;
    if (ACT == LEAKY_RELU) return z > 0.0f ? 1.0f : alpha;
    if (ACT == GELU)
        return normal_cdf<Out>(z) + z * 0.3989422804014327f * __expf(-0.5f * z * z);
    if (ACT == GELU_TANH) {
        float s = sigmoid(1.5957691216057308f * (z + 0.044715f * z * z * z));
        return s + z * s * (1.0f - s) * 1.5957691216057308f * (1.0f + 0.134145f * z * z);
    }
    if (ACT == QUICK_GELU) {
        float s = sigmoid(alpha * z);
        return s + alpha * z * s * (1.0f - s);
    }
    if (ACT == SILU) {
        float s = sigmoid(z);
        return s + z * s * (1.0f - s);
    }
    if (ACT == SIGMOID) {
        float s = sigmoid(z);
        return s * (1.0f - s);
    }
    if (ACT == TANH) {
        float t = tanhf(z);
        return 1.0f - t * t;
    }
    return 1.0f;
}
