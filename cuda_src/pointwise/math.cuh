// pointwise/math.cuh: functions of the expression table, one name for float and double.
// (Template parameters are E: files that include this one are compiled with a macro T.)
#pragma once
#include "common.cuh"

#define BOTH(name, f32, f64)                 \
    DEVICE float name(float x) { return f32; } \
    DEVICE double name(double x) { return f64; }
BOTH(m_abs, fabsf(x), fabs(x))
BOTH(m_acos, acosf(x), acos(x))
BOTH(m_acosh, acoshf(x), acosh(x))
BOTH(m_asin, asinf(x), asin(x))
BOTH(m_asinh, asinhf(x), asinh(x))
BOTH(m_atan, atanf(x), atan(x))
BOTH(m_atanh, atanhf(x), atanh(x))
BOTH(m_ceil, ceilf(x), ceil(x))
BOTH(m_cos, cosf(x), cos(x))
BOTH(m_cosh, coshf(x), cosh(x))
BOTH(m_erf, erff(x), erf(x))
BOTH(m_exp, expf(x), exp(x))
BOTH(m_expm1, expm1f(x), expm1(x))
BOTH(m_floor, floorf(x), floor(x))
BOTH(m_log, logf(x), log(x))
BOTH(m_log1p, log1pf(x), log1p(x))
BOTH(m_rint, rintf(x), rint(x))
BOTH(m_sin, sinf(x), sin(x))
BOTH(m_sinh, sinhf(x), sinh(x))
BOTH(m_sqrt, sqrtf(x), sqrt(x))
BOTH(m_tan, tanf(x), tan(x))
BOTH(m_tanh, tanhf(x), tanh(x))
// x P(X < x) of a normal X as (x + |x|) / 2 - |x| P(X < -|x|), 2 to a polynomial, off by 1e-7 at most; of -inf NaN.
DEVICE float short_gelu(float x) {
    const float a = fminf(fabsf(x), 16.0f);
    const float p[7] = {-0.999993086f, -1.15120173f, -0.458771020f, -0.0534120649f, 0.00808069203f, -0.000769212842f, 3.30920593e-5f};
    float e = p[6];
    UNROLLED for (int i = 5; i >= 0; i--) e = fmaf(e, a, p[i]);
    return fmaf(0.5f, x + fabsf(x), -a * ex2(e));
}
#ifdef SHORT_RESULT  // what is made of it is rounded to 16 bits or 8
BOTH(m_sigmoid, sigmoid<f16>(x), 1.0 / (1.0 + exp(-x)))
BOTH(m_gelu, short_gelu(x), 0.5 * x * (1.0 + erf(x * 0.70710678118654752)))
#else
BOTH(m_sigmoid, 1.0f / (1.0f + expf(-x)), 1.0 / (1.0 + exp(-x)))
BOTH(m_gelu, 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)), 0.5 * x * (1.0 + erf(x * 0.70710678118654752)))
#endif
BOTH(m_softplus, fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))), fmax(x, 0.0) + log1p(exp(-fabs(x))))
#undef BOTH
template <class E> DEVICE E m_abs(E x) { return x < 0 ? -x : x; }
template <class E> DEVICE E m_ceil(E x) { return x; }
template <class E> DEVICE E m_floor(E x) { return x; }

DEVICE bool is_nan(float x) { return x != x; }
DEVICE bool is_nan(double x) { return x != x; }
template <class E> DEVICE bool is_nan(E) { return false; }
// A NaN operand is the result, as in NumPy.
template <class E> DEVICE E m_max(E a, E b) { return is_nan(a) || a > b ? a : b; }
template <class E> DEVICE E m_min(E a, E b) { return is_nan(a) || a < b ? a : b; }

DEVICE float m_pow(float a, float b) { return powf(a, b); }
DEVICE double m_pow(double a, double b) { return pow(a, b); }
template <class E> DEVICE E m_pow(E a, E b) {
    E y = 1;
    if (b < 0) return a == 1 ? 1 : a == (E)-1 ? (b & 1 ? (E)-1 : (E)1) : 0;
    for (; b; b >>= 1, a *= a)
        if (b & 1) y *= a;
    return y;
}
// The sign of the divisor (Mod) and of the dividend (fmod).
DEVICE float m_mod(float a, float b) {
    float r = fmodf(a, b);
    if (r == 0) return copysignf((float)0, b);
    return (r < 0) != (b < 0) ? r + b : r;
}
DEVICE double m_mod(double a, double b) {
    double r = fmod(a, b);
    if (r == 0) return copysign((double)0, b);
    return (r < 0) != (b < 0) ? r + b : r;
}
template <class E> DEVICE E m_mod(E a, E b) {
    if (!b) return 0;
    E r = a % b;
    return r && (r < 0) != (b < 0) ? r + b : r;
}
DEVICE float m_fmod(float a, float b) { return fmodf(a, b); }
DEVICE double m_fmod(double a, double b) { return fmod(a, b); }
template <class E> DEVICE E m_fmod(E a, E b) { return b ? a % b : 0; }
DEVICE float m_div(float a, float b) { return a / b; }
DEVICE double m_div(double a, double b) { return a / b; }
template <class E> DEVICE E m_div(E a, E b) { return b ? a / b : 0; }

// 1.5 * 2^23, whose ulp is 1, and round(x) or round(x / scale), clipped to low - zero and high - zero, without branches: the same
// integer as by a division, where inverse is 1 / scale rounded and the scale one of lower/quant.py's
// `divides_exactly`. A NaN becomes the least.
DEVICE float rounded_steps(float x, float zero, float low, float high) {
    return __fadd_rn(fminf(fmaxf(x, low - zero), high - zero), 12582912.0f);
}
template <class E> DEVICE float scaled(E x, float scale) { return __fmul_rn((float)x, scale); }
DEVICE float quotient(float scale, float inverse, float x) {
    const float near = __fmul_rn(x, inverse);
    return __fmaf_rn(__fmaf_rn(-near, scale, x), inverse, near);
}
DEVICE float rounded_ratio(float x, float scale, float inverse, float zero, float low, float high) {
    x = fminf(fmaxf(x, __fmul_rn(low - zero, scale)), __fmul_rn(high - zero, scale));
    return __fadd_rn(quotient(scale, inverse, x), 12582912.0f);
}
// saturate(round(x / scale) + zero) as a float, the same less zero, and an integer whose low 8 bits are its. Without
// a scale and its inverse, x counts in steps of the scale.
#define CODES_(parameters, rounded)                                                       \
    DEVICE float quantized parameters { return __fadd_rn(rounded, zero - 12582912.0f); } \
    DEVICE float quantized_less_zero parameters { return rounded - 12582912.0f; }         \
    DEVICE int code_bits parameters { return __float_as_int(rounded) + (int)zero; }
CODES_((float x, float scale, float inverse, float zero, float low, float high),
       rounded_ratio(x, scale, inverse, zero, low, high))
CODES_((float x, float zero, float low, float high), rounded_steps(x, zero, low, high))
#undef CODES_
// A result in y's type: a wide code saturates.
template <class Y, class S> DEVICE Y stored(S v) { return narrow<Y>((typename Accumulator<Y>::type)v); }
template <> DEVICE u8 stored<u8, int>(int v) { return (u8)min(max(v, 0), 255); }
template <> DEVICE signed char stored<signed char, int>(int v) { return (signed char)min(max(v, -128), 127); }
// An integer that saturates to the code; x in steps is no NaN, and a quotient that is one is of a number too large. From 0
// on, the zero point, codes are the bits of floats whose steps are 2^-149.
DEVICE int wide_code(float x, float zero, float low) {
    return __float_as_int(__fadd_rn(fmaxf(x, low - zero), 12582912.0f)) - (0x4B400000 - (int)zero);
}
DEVICE int wide_code(float scale, float inverse, float x, float zero, float low) {
    return wide_code(quotient(scale, inverse, fmaxf(x, __fmul_rn(low - zero, scale))), zero, low);
}
DEVICE int code_from_0(float x) { return __float_as_int(__fmul_rn(x, 0x1p-149f)); }
DEVICE int code_from_0(float scale, float inverse, float x) {
    return code_from_0(quotient(scale, inverse, fmaxf(x, 0.0f)));
}

// A count below 0 or past the width shifts everything out: 0, or the sign.
template <class E, class C> DEVICE E m_shift_right(E a, C count) {
    return (u64)count < 8 * sizeof(E) ? a >> count : a < 0 ? (E)-1 : (E)0;
}

DEVICE float round_f16(float x) { return to_float(from_float<f16>(x)); }
DEVICE float round_bf16(float x) { return to_float(from_float<bf16>(x)); }
template <class E> DEVICE float round_f16(E x) { return round_f16((float)x); }
template <class E> DEVICE float round_bf16(E x) { return round_bf16((float)x); }

template <> DEVICE f16 narrow<f16>(double x) { return from_float<f16>((float)x); }
template <> DEVICE bf16 narrow<bf16>(double x) { return from_float<bf16>((float)x); }

// The place on an axis of `size` that an index names, negative ones from the end; -1 outside.
template <class E> DEVICE i64 row_at(E index, i64 size) {
    const i64 k = index < 0 ? (i64)index + size : (i64)index;
    return k < size ? k < 0 ? -1 : k : -1;
}

// The part of a vector that lies inside the tensor.
template <int V, class E> DEVICE Vec<E, V> load_part(const E* p, i64 left) {
    Vec<E, V> x = {};
    UNROLLED for (int v = 0; v < V; v++)
        if (v < left) x.at[v] = p[v];
    return x;
}
template <int V, class E> DEVICE void store_part(E* p, const Vec<E, V>& x, i64 left) {
    UNROLLED for (int v = 0; v < V; v++)
        if (v < left) p[v] = x.at[v];
}
