// conv/codes.cuh: elements four at a time, those of 8 bits in a word: as floats, and of integers that saturate to them.
#pragma once
#include "quant/e4m3.cuh"

template <class E> struct Four {
    Vec<E, 4> of;
    DEVICE E operator[](int k) const { return of.at[k]; }
    template <class S> DEVICE static Four made(S a, S b, S c, S d) {
        return {stored<E>(a), stored<E>(b), stored<E>(c), stored<E>(d)};
    }
};
// One of four codes; as a float it is the low bits of 2^23.
template <class E> struct Code {
    u32 word, at;
    static constexpr bool SIGNED = (E)-1 < 0;
    DEVICE operator E() const { return (E)(word >> at * 8); }
    // The compiler may not know 2^23: as an immediate it would move each selector to a register.
    DEVICE float raised() const {
        const u32 high = 0x4AFFFFFF + blockDim.y;
        return __uint_as_float(__byte_perm(SIGNED ? word ^ 0x80808080 : word, high, 0x7440 + at));
    }
    DEVICE explicit operator float() const { return raised() - (SIGNED ? 8388608.0f + 128 : 8388608.0f); }
};
// Rounded once: 2^23 times a scale is a float.
DEVICE float scaled(Code<u8> x, float scale) { return __fmaf_rn(x.raised(), scale, -8388608.0f * scale); }
#define CODES_(E, type)                                                                            \
    template <> struct Four<E> {                                                                   \
        u32 word;                                                                                  \
        DEVICE Code<E> operator[](u32 k) const { return {word, k}; }                               \
        DEVICE static Four made(int a, int b, int c, int d) {                                      \
            Four y;                                                                                \
            asm("{\n.reg .b32 t;\ncvt.pack.sat." type ".s32.b32 t, %4, %3, 0;\n"                   \
                "cvt.pack.sat." type ".s32.b32 %0, %2, %1, t;\n}"                                  \
                : "=r"(y.word) : "r"(a), "r"(b), "r"(c), "r"(d));                                  \
            return y;                                                                              \
        }                                                                                          \
    };
CODES_(u8, "u8")
CODES_(signed char, "s8")
#if __CUDA_ARCH__ >= 890
template <> struct Four<e4m3fn> {
    u32 word;
    DEVICE float operator[](int k) const {
        const float2 pair = from_e4m3_pair(word >> k / 2 * 16);
        return k % 2 ? pair.y : pair.x;
    }
    DEVICE static Four made(float a, float b, float c, float d) { return {e4m3_pair(a, b) | e4m3_pair(c, d) << 16}; }
};
#endif

// PIECE neighbours, by fours; of an operand, if there is one.
template <class E, int PIECE> using Piece = Vec<Four<E>, PIECE / 4>;
template <int PIECE, bool USED = true, class E> DEVICE Piece<E, PIECE> piece_of(const E* e, i64 at = 0) {
    const Piece<E, PIECE> none = {};
    return USED ? *(const Piece<E, PIECE>*)(e + at) : none;
}
