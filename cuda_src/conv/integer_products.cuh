// conv/integer_products.cuh: wgmma of 8-bit integers, d[64, WIDTH] += a[64, 32] b[32, WIDTH] with sums in 32 bits, and
// the descriptors of its operands' rows.
#pragma once
#include "wgmma.cuh"

#define I8_(i)                                                                                     \
    "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]),    \
        "+r"(d[i + 6]), "+r"(d[i + 7])
#define I32_(i) I8_(i), I8_(i + 8), I8_(i + 16), I8_(i + 24)
// d[64, WIDTH] += a[64, 32] b[32, WIDTH], both along k in shared memory.
#define INTEGERS_(n, type, regs, da, db, ...)                                                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k32.s32." type ".s8 {" regs "}, %" #da    \
                 ", %" #db ", 1;"                                                                  \
                 : __VA_ARGS__                                                                     \
                 : "l"(a), "l"(b))
template <class E, int WIDTH> struct Integers;
#define INTEGERS_OF_(E_, type)                                                                     \
    template <> struct Integers<E_, 64> {                                                          \
        DEVICE static void run(int (&d)[32], u64 a, u64 b) {                                       \
            INTEGERS_(64, type, R30_ "%30,%31", 32, 33, I32_(0));                                  \
        }                                                                                          \
    };                                                                                             \
    template <> struct Integers<E_, 128> {                                                         \
        DEVICE static void run(int (&d)[64], u64 a, u64 b) {                                       \
            INTEGERS_(128, type, R60_ "%60,%61,%62,%63", 64, 65, I32_(0), I32_(32));               \
        }                                                                                          \
    };                                                                                             \
    template <> struct Integers<E_, 256> {                                                         \
        DEVICE static void run(int (&d)[128], u64 a, u64 b) {                                      \
            INTEGERS_(256, type, R120_ "%120,%121,%122,%123,%124,%125,%126,%127", 128, 129,        \
                      I32_(0), I32_(32), I32_(64), I32_(96));                                      \
        }                                                                                          \
    };
INTEGERS_OF_(signed char, "s8")
INTEGERS_OF_(u8, "u8")

// The descriptor of rows of BYTES, 64 or 128, swizzled as wide.
template <int BYTES> DEVICE u64 rows_of(u32 address) {
    return (u64)((address & 0x3ffff) >> 4) | 1ull << 16 | (u64)(8 * BYTES >> 4) << 32 | (BYTES == 128 ? 1ull : 2ull) << 62;
}
