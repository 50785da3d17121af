// wgmma.cuh: Hopper's wgmma, as PTX spells it: d[64, WIDTH] (+)= a[64, k] b[k, WIDTH], b in shared memory of a 128-byte
// swizzle, a there or in registers.
#pragma once
#include "sm90.cuh"

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// No arithmetic on d moves across: what is in flight is touched by the wgmma alone.
template <int N> DEVICE void wgmma_hold(float (&d)[N]) {
    UNROLLED for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i]));
}
// Operand descriptor. k contiguous: 8-row groups lie 1024 bytes apart. m or n contiguous: 8-k groups
// lie 1024 bytes apart and 64-wide blocks of m or n BLOCK (its k of 128 bytes each).
template <bool CONTIG_K, int BLOCK = 8192> DEVICE u64 wgmma_descriptor(u32 address) {
    u64 lead = CONTIG_K ? 1 : BLOCK >> 4;
    return (u64)((address & 0x3ffff) >> 4) | lead << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
// The lower word of a descriptor, by which operands differ: one that lies further on by 16 n bytes has n more.
template <bool CONTIG_K, int BLOCK = 8192> DEVICE u32 wgmma_low(u32 address) {
    return (u32)wgmma_descriptor<CONTIG_K, BLOCK>(address);
}
DEVICE u64 wgmma_at(u32 low) {
    u64 made;
    asm("mov.b64 %0, {%1, %2};" : "=l"(made) : "r"(low), "n"(1024 >> 4 | 1 << 30));
    return made;
}

// The least width of a product that holds N columns.
constexpr int wgmma_width(int n) {
    return n <= 32 ? 32 : n <= 40 ? 40 : n <= 48 ? 48 : n <= 64 ? 64 : n <= 72 ? 72 : n <= 80 ? 80 : n <= 96 ? 96
           : n <= 128 ? 128 : n <= 160 ? 160 : (n + 63) / 64 * 64;
}

// A lane's sums, WIDTH / 2 of them: RN_ their registers, DN_ the operands that they are.
#define R10_(p)                                                                                    \
    "%" #p "0,%" #p "1,%" #p "2,%" #p "3,%" #p "4,%" #p "5,%" #p "6,%" #p "7,%" #p "8,%" #p "9,"
#define R30_ R10_() R10_(1) R10_(2)
#define R60_ R30_ R10_(3) R10_(4) R10_(5)
#define R120_ R60_ R10_(6) R10_(7) R10_(8) R10_(9) R10_(10) R10_(11)
#define R16_ R10_() "%10,%11,%12,%13,%14,%15"
#define R20_ R10_() "%10,%11,%12,%13,%14,%15,%16,%17,%18,%19"
#define R24_ R10_() R10_(1) "%20,%21,%22,%23"
#define R32_ R30_ "%30,%31"
#define R36_ R30_ "%30,%31,%32,%33,%34,%35"
#define R40_ R30_ "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39"
#define R48_ R30_ R10_(3) "%40,%41,%42,%43,%44,%45,%46,%47"
#define R64_ R60_ "%60,%61,%62,%63"
#define R72_ R60_ R10_(6) "%70,%71"
#define R80_ R60_ R10_(6) "%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define R96_ R60_ R10_(6) R10_(7) R10_(8) "%90,%91,%92,%93,%94,%95"
#define R128_ R120_ "%120,%121,%122,%123,%124,%125,%126,%127"
#define D4_(c, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3])
#define D8_(c, i) D4_(c, i), D4_(c, i + 4)
#define D16_(c) D8_(c, 0), D8_(c, 8)
#define D20_(c) D16_(c), D4_(c, 16)
#define D24_(c) D16_(c), D8_(c, 16)
#define D32_(c) D24_(c), D8_(c, 24)
#define D36_(c) D32_(c), D4_(c, 32)
#define D40_(c) D32_(c), D8_(c, 32)
#define D48_(c) D40_(c), D8_(c, 40)
#define D64_(c) D48_(c), D8_(c, 48), D8_(c, 56)
#define D72_(c) D64_(c), D8_(c, 64)
#define D80_(c) D72_(c), D8_(c, 72)
#define D96_(c) D80_(c), D8_(c, 80), D8_(c, 88)
#define D128_(c) D96_(c), D8_(c, 96), D8_(c, 104), D8_(c, 112), D8_(c, 120)
// A form of the instruction for each width: WIDTH / 2, and the numbers of the operands behind the sums.
#define WGMMA_WIDTHS_(FORM, E_, type)                                                              \
    FORM(E_, type, 32, 16, 17, 18, 19, 20, 21, 22)                                                 \
    FORM(E_, type, 40, 20, 21, 22, 23, 24, 25, 26)                                                 \
    FORM(E_, type, 48, 24, 25, 26, 27, 28, 29, 30)                                                 \
    FORM(E_, type, 64, 32, 33, 34, 35, 36, 37, 38)                                                 \
    FORM(E_, type, 72, 36, 37, 38, 39, 40, 41, 42)                                                 \
    FORM(E_, type, 80, 40, 41, 42, 43, 44, 45, 46)                                                 \
    FORM(E_, type, 96, 48, 49, 50, 51, 52, 53, 54)                                                 \
    FORM(E_, type, 128, 64, 65, 66, 67, 68, 69, 70)                                                \
    FORM(E_, type, 144, 72, 73, 74, 75, 76, 77, 78)                                                \
    FORM(E_, type, 160, 80, 81, 82, 83, 84, 85, 86)                                                \
    FORM(E_, type, 192, 96, 97, 98, 99, 100, 101, 102)                                             \
    FORM(E_, type, 256, 128, 129, 130, 131, 132, 133, 134)
// `what` begins with k and the types; operand `add` 0 starts the sums.
#define WGMMA_(n, what, regs, add, operands)                                                       \
    "{\n.reg .pred p;\nsetp.ne.b32 p, %" #add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n what " {" regs "}, " operands ";\n}"

// 16 bits, k of 16; TA, TB: 1 where m or n is the contiguous dimension. a in registers: in the layout of 16 columns' sums.
template <class E, int WIDTH, int TA, int TB> struct Wgmma;
#define WGMMA_16_(E_, type, n, r0, r1, r2, r3, r4, r5, r6)                                         \
    template <int TA, int TB> struct Wgmma<E_, n, TA, TB> {                                        \
        DEVICE static void run(float (&d)[r0], u64 a, u64 b, int add) {                            \
            asm volatile(WGMMA_(n, "k16.f32." type "." type, R##r0##_, r2,                         \
                                "%" #r0 ", %" #r1 ", p, 1, 1, %" #r3 ", %" #r4)                    \
                         : D##r0##_("+f") : "l"(a), "l"(b), "r"(add), "n"(TA), "n"(TB));           \
        }                                                                                          \
        DEVICE static void run(float (&d)[r0], const u32* a, u64 b, int add) {                     \
            asm volatile(WGMMA_(n, "k16.f32." type "." type, R##r0##_, r5,                         \
                                "{%" #r0 ", %" #r1 ", %" #r2 ", %" #r3 "}, %" #r4 ", p, 1, 1, %" #r6)\
                         : D##r0##_("+f") : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TB));\
        }                                                                                          \
    };
WGMMA_WIDTHS_(WGMMA_16_, bf16, "bf16")
WGMMA_WIDTHS_(WGMMA_16_, f16, "f16")

// Both operands along k, of 32 bytes. TYPES: 0 tf32; float8: 1 e4m3, 2 a is e5m2, 3 b is e5m2.
template <int TYPES, int WIDTH> struct WgmmaAlongK;
#define WGMMA_ALONG_K_(TYPES_, what, n, r0, r1, r2, r3, r4, r5, r6)                                \
    template <> struct WgmmaAlongK<TYPES_, n> {                                                    \
        DEVICE static void run(float (&d)[r0], u64 a, u64 b, int add) {                            \
            asm volatile(WGMMA_(n, what, R##r0##_, r2, "%" #r0 ", %" #r1 ", p, 1, 1")              \
                         : D##r0##_("+f") : "l"(a), "l"(b), "r"(add));                             \
        }                                                                                          \
    };
WGMMA_WIDTHS_(WGMMA_ALONG_K_, 0, "k8.f32.tf32.tf32")
WGMMA_WIDTHS_(WGMMA_ALONG_K_, 1, "k32.f32.e4m3.e4m3")
WGMMA_WIDTHS_(WGMMA_ALONG_K_, 2, "k32.f32.e5m2.e4m3")
WGMMA_WIDTHS_(WGMMA_ALONG_K_, 3, "k32.f32.e4m3.e5m2")
