// wgmma_widths.cuh: sm90.cuh's wgmma at the further widths of attention: head sizes such as 40, 80 and 160, and
// tiles of 80 and 96 keys. They have a name of their own, so that the products on Wgmma stay the code they were.
#pragma once
#include "sm90.cuh"

// The least width of a product that holds N columns.
constexpr int wgmma_width(int n) {
    return n <= 32 ? 32 : n <= 40 ? 40 : n <= 48 ? 48 : n <= 64 ? 64 : n <= 72 ? 72 : n <= 80 ? 80 : n <= 96 ? 96
           : n <= 128 ? 128 : n <= 160 ? 160 : (n + 63) / 64 * 64;
}

#define R40_ R30_ "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,"
#define R80_ R60_ R10_(6) "%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define F16_(i) F8_(i), F8_(i + 8)
#define F4_(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])

// d[64, WIDTH] (+)= a[64, 16] b[16, WIDTH]; a by descriptor or in registers, as of Wgmma.
template <class E, int WIDTH, int TA, int TB> struct WideWgmma : Wgmma<E, WIDTH, TA, TB> {};
#define WGMMA_WIDTH_(E_, type, n, r0, r1, r2, r3, r4, r5, r6, regs, ...)                           \
    template <int TA, int TB> struct WideWgmma<E_, n, TA, TB> {                                    \
        DEVICE static void run(float (&d)[r0], u64 a, u64 b, int add) {                            \
            WGMMA_(n, type, regs, r0, r1, r2, r3, r4, __VA_ARGS__);                                \
        }                                                                                          \
        DEVICE static void run(float (&d)[r0], const u32* a, u64 b, int add) {                     \
            WGMMA_A_(n, type, regs, r0, r1, r2, r3, r4, r5, r6, __VA_ARGS__);                      \
        }                                                                                          \
    };
#define WGMMA_WIDTHS_(E_, type)                                                                    \
    WGMMA_WIDTH_(E_, type, 32, 16, 17, 18, 19, 20, 21, 22,                                         \
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15", F16_(0))                 \
    WGMMA_WIDTH_(E_, type, 40, 20, 21, 22, 23, 24, 25, 26,                                         \
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19",          \
                 F16_(0), F4_(16))                                                                 \
    WGMMA_WIDTH_(E_, type, 48, 24, 25, 26, 27, 28, 29, 30,                                         \
                 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," R10_(1) "%20,%21,%22,%23", F16_(0), F8_(16))     \
    WGMMA_WIDTH_(E_, type, 72, 36, 37, 38, 39, 40, 41, 42, R30_ "%30,%31,%32,%33,%34,%35",         \
                 F32_(0), F4_(32))                                                                 \
    WGMMA_WIDTH_(E_, type, 80, 40, 41, 42, 43, 44, 45, 46,                                         \
                 R30_ "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39", F32_(0), F8_(32))                 \
    WGMMA_WIDTH_(E_, type, 96, 48, 49, 50, 51, 52, 53, 54,                                         \
                 R40_ "%40,%41,%42,%43,%44,%45,%46,%47", F32_(0), F16_(32))                        \
    WGMMA_WIDTH_(E_, type, 160, 80, 81, 82, 83, 84, 85, 86, R80_, F32_(0), F32_(32), F16_(64))
WGMMA_WIDTHS_(bf16, "bf16")
WGMMA_WIDTHS_(f16, "f16")
