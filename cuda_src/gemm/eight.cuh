// gemm/eight.cuh: wgmma's 8-bit forms, d[64, WIDTH] += a[64, 32] b[32, WIDTH], both along k in shared memory.
// 128 bytes of a swizzled row are 128 elements of 8 bits as they are 64 of 16: descriptors, boxes and
// stages are those of 16-bit operands, for which the host counts k in pairs of elements.
// EIGHT    : 1: a and b are e4m3; 2: a is e5m2; 3: b is e5m2.
// Numerics : the tensor core keeps about 14 bits of a sum of 8-bit products. So it sums 128 of k from
//            zero, and floats add up these sums in the order of k.
#pragma once
#include "sm90.cuh"
#define EIGHT_A (EIGHT == 2)
#define EIGHT_B (EIGHT == 3)
#define EIGHT_(n, types, regs, da, db, sc, ...)                                                    \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #sc ", 0;\n"                                 \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k32.f32." types " {" regs "}, "           \
                 "%" #da ", %" #db ", p, 1, 1;\n}"                                                 \
                 : __VA_ARGS__                                                                     \
                 : "l"(a), "l"(b), "r"(add))
template <int A, int B, int WIDTH> struct Eight;
#define EIGHT_TYPES_(A_, B_, types)                                                                \
    template <> struct Eight<A_, B_, 64> {                                                         \
        DEVICE static void run(float (&d)[32], u64 a, u64 b, int add) {                            \
            EIGHT_(64, types, R30_ "%30,%31", 32, 33, 34, F32_(0));                                \
        }                                                                                          \
    };                                                                                             \
    template <> struct Eight<A_, B_, 128> {                                                        \
        DEVICE static void run(float (&d)[64], u64 a, u64 b, int add) {                            \
            EIGHT_(128, types, R60_ "%60,%61,%62,%63", 64, 65, 66, F32_(0), F32_(32));             \
        }                                                                                          \
    };                                                                                             \
    template <> struct Eight<A_, B_, 192> {                                                        \
        DEVICE static void run(float (&d)[96], u64 a, u64 b, int add) {                            \
            EIGHT_(192, types, R90_ "%90,%91,%92,%93,%94,%95", 96, 97, 98, F32_(0), F32_(32),      \
                   F32_(64));                                                                      \
        }                                                                                          \
    };
EIGHT_TYPES_(0, 0, "e4m3.e4m3")
EIGHT_TYPES_(1, 0, "e5m2.e4m3")
EIGHT_TYPES_(0, 1, "e4m3.e5m2")
