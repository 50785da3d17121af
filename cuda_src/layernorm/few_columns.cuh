// layernorm/few_columns.cuh: a thread's share, VEC elements along rows of `length`, of a product with a
// matrix of PRODUCT lines, PRODUCT being few: [PRODUCT, length], or not ALONG: [length, PRODUCT].
#pragma once
#include "reduce/team.cuh"
#ifndef PRODUCT
#define PRODUCT 0
#define TURNED 0
#endif
#if PRODUCT
template <bool ALONG, class E> struct Share {
    Vec<E, VEC> part[PRODUCT];

    DEVICE void read(const E* w, i64 i, i64 length) {
        UNROLLED for (int k = 0; k < PRODUCT; k++)
            part[k] = load<VEC>(w + (ALONG ? k * length + i : i * PRODUCT + k * VEC));
    }
    // Line k at the thread's element j.
    DEVICE ACC at(int k, int j) const {
        const int n = ALONG ? k * VEC + j : j * PRODUCT + k;
        return widen(part[n / VEC].at[n % VEC]);
    }
};
#endif
