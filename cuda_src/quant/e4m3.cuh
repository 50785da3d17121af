// quant/e4m3.cuh: floats as e4m3fn that saturate, and back, by the instructions that Ada and later have.
#pragma once
#include "pointwise/math.cuh"
#include "quant/narrow.cuh"

#if __CUDA_ARCH__ >= 890
// Two floats in 16 bits, the first one below.
DEVICE u32 e4m3_pair(float a, float b) {
    unsigned short y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(y) : "f"(a), "f"(b));
    return y;
}
DEVICE float2 from_e4m3_pair(u32 pair) {
    u32 y;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"((unsigned short)pair));
    return unpack2<f16>(y);
}
DEVICE float round_e4m3(float x) { return from_e4m3_pair(e4m3_pair(x, 0.0f)).x; }
template <> DEVICE e4m3fn stored<e4m3fn, float>(float x) { return {(u8)e4m3_pair(x, 0.0f)}; }
#else
template <> DEVICE e4m3fn stored<e4m3fn, float>(float x) {
    return from_float<e4m3fn>(x < -448.0f ? -448.0f : x > 448.0f ? 448.0f : x);
}
DEVICE float round_e4m3(float x) { return widen(stored<e4m3fn>(x)); }
#endif
// A float as it is stored where it does not saturate: what rounds to more than 448 is a NaN.
DEVICE float unsaturated_e4m3(float x) { return x > 464.0f || x < -464.0f ? __uint_as_float(0x7fc00000) : x; }
