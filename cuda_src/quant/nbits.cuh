// quant/nbits.cuh: integers of a few bits as pairs of 16-bit numbers, exactly.
#pragma once
#include "common.cuh"

DEVICE u32 twice(u32 x) { return x | x << 16; }
DEVICE u32 and_or(u32 x, u32 mask, u32 bits) {
    u32 y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
    return y;
}
template <bool F16> DEVICE u32 fma2(u32 x, u32 y, u32 z) {
    u32 d;
    if (F16) asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(y), "r"(z));
    else asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(x), "r"(y), "r"(z));
    return d;
}

// Four bits each: (0, 4) (1, 5) (2, 6) (3, 7). A number below 2^10 (2^7) in the mantissa of 1024 (128) is that number
// more. `even`, `odd`: what pairs 0 and 2, 1 and 3 get added, -(1024 + zero) and -(64 + zero) in f16, else -(128 + zero).
template <bool F16> DEVICE void unpack_4(u32 word, u32 even, u32 odd, u32* pair) {
    if (F16) {
        UNROLLED for (int i = 0; i < 2; i++, word >>= 8) {
            pair[2 * i] = fma2<F16>(and_or(word, 0x000f000f, 0x64006400), 0x3c003c00, even);
            pair[2 * i + 1] = fma2<F16>(and_or(word, 0x00f000f0, 0x64006400), 0x2c002c00, odd);  // times 1/16
        }
    } else {
        UNROLLED for (int i = 0; i < 4; i++, word >>= 4)
            pair[i] = fma2<F16>(and_or(word, 0x000f000f, 0x43004300), 0x3f803f80, i % 2 ? odd : even);
    }
}
