// scan/order.cuh: unsigned keys that order as numbers do: -0 as 0, every NaN above all.
#pragma once
#include "common.cuh"

DEVICE u64 ordered(float x) {
    const u32 b = __float_as_uint(x + 0.f);  // -0 + 0 = 0
    return x != x ? 0xffffffffu : b >> 31 ? ~b : b | 0x80000000u;
}
DEVICE u64 ordered(double x) {
    const u64 b = __double_as_longlong(x + 0.);
    return x != x ? ~0ull : b >> 63 ? ~b : b | 1ull << 63;
}
DEVICE u64 ordered(bf16 x) { return ordered(to_float(x)); }
DEVICE u64 ordered(f16 x) { return ordered(to_float(x)); }
template <class E> DEVICE u64 ordered(E x) {
    return (E)-1 < (E)0 ? (u64)(i64)x ^ 1ull << 63 : (u64)x;
}
