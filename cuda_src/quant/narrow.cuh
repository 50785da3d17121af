// quant/narrow.cuh: elements of at most 8 bits, one a byte: float8, float4, int4 and int2.
// A float is stored rounded to nearest even, and beyond the largest as NaN (infinity in e5m2, which has
// one; the largest in e2m1, which has neither): who wants it saturated clips it before.
#pragma once
#include "common.cuh"

enum Beyond { HAS_INFINITY, ONE_NAN, NEGATIVE_ZERO_IS_NAN, FINITE };  // IEEE, fn, fnuz, no special value

template <int EXP, int MAN, int BIAS, int KIND> struct Small {
    u8 bits;
    static constexpr u32 LARGEST = (1u << (EXP + MAN)) - 1 - (KIND == HAS_INFINITY ? 1 << MAN : KIND == ONE_NAN);
    static constexpr u32 NAN_BITS = KIND == NEGATIVE_ZERO_IS_NAN ? 0x80 : LARGEST + (KIND == HAS_INFINITY ? 3 : 1);
};
typedef Small<4, 3, 7, ONE_NAN> e4m3fn;
typedef Small<5, 2, 15, HAS_INFINITY> e5m2;
typedef Small<4, 3, 8, NEGATIVE_ZERO_IS_NAN> e4m3fnuz;
typedef Small<5, 2, 16, NEGATIVE_ZERO_IS_NAN> e5m2fnuz;
typedef Small<2, 1, 1, FINITE> e2m1fn;
struct e8m0fnu { u8 bits; };
struct i4 { u8 bits; };
struct u4 { u8 bits; };
struct i2 { u8 bits; };
struct u2 { u8 bits; };

DEVICE int widen(i4 x) { return (int)((u32)x.bits << 28) >> 28; }
DEVICE int widen(u4 x) { return x.bits & 15; }
DEVICE int widen(i2 x) { return (int)((u32)x.bits << 30) >> 30; }
DEVICE int widen(u2 x) { return x.bits & 3; }
DEVICE float widen(e8m0fnu x) {  // 2^(bits - 127), the least one a subnormal float
    return __uint_as_float(x.bits == 255 ? 0x7fc00000u : x.bits ? (u32)x.bits << 23 : 0x00400000u);
}
// 2^power, of a normal float.
DEVICE float power_of_two(int power) { return __uint_as_float((u32)(power + 127) << 23); }

template <int EXP, int MAN, int BIAS, int KIND> DEVICE float widen(Small<EXP, MAN, BIAS, KIND> x) {
    typedef Small<EXP, MAN, BIAS, KIND> E;
    const u32 magnitude = x.bits & ((1u << (EXP + MAN)) - 1), sign = x.bits >> (EXP + MAN) & 1;
    if (KIND == NEGATIVE_ZERO_IS_NAN ? x.bits == 0x80 : KIND != FINITE && magnitude > E::LARGEST)
        return __uint_as_float(KIND == HAS_INFINITY && magnitude == E::LARGEST + 1 ? 0x7f800000u | sign << 31 : 0x7fc00000u);
    const float y = magnitude >> MAN ? __uint_as_float((magnitude << (23 - MAN)) + ((127u - BIAS) << 23))
                                     : (float)magnitude * power_of_two(1 - BIAS - MAN);
    return sign ? -y : y;
}

template <int EXP, int MAN, int BIAS, int KIND> DEVICE void round_to(Small<EXP, MAN, BIAS, KIND>& y, float x) {
    typedef Small<EXP, MAN, BIAS, KIND> E;
    const u32 a = __float_as_uint(x) & 0x7fffffffu, sign = __float_as_uint(x) >> 31 << (EXP + MAN);
    u32 code;
    if (a < (u32)(128 - BIAS) << 23)  // below the least normal number: a multiple of the least of all
        code = (u32)rintf(__uint_as_float(a) * power_of_two(BIAS + MAN - 1));
    else
        code = ((a + (1u << (22 - MAN)) - 1 + (a >> (23 - MAN) & 1)) >> (23 - MAN)) - ((127u - BIAS) << MAN);
    if (KIND == FINITE) {
        y.bits = (code > E::LARGEST ? E::LARGEST : code) | sign;  // a NaN, which it lacks, becomes the largest
        return;
    }
    const bool none = a > 0x7f800000u || (KIND != HAS_INFINITY && code > E::LARGEST);
    if (none) code = E::NAN_BITS;
    else if (code > E::LARGEST) code = E::LARGEST + 1;
    y.bits = KIND == NEGATIVE_ZERO_IS_NAN && (none || !code) ? code : code | sign;
}
#define FROM_FLOAT(E)                                 \
    template <> DEVICE E from_float<E>(float x) { \
        E y;                                          \
        round_to(y, x);                               \
        return y;                                     \
    }
FROM_FLOAT(e4m3fn)
FROM_FLOAT(e5m2)
FROM_FLOAT(e4m3fnuz)
FROM_FLOAT(e5m2fnuz)
FROM_FLOAT(e2m1fn)
#undef FROM_FLOAT
