// column_moments.cuh: mean and sum of squared deviations of the columns of a product, as they are
// stored: each warp's of its 16 rows, from the box that TMA is about to store, then of four warps'.
// Sums are of differences from one of the numbers themselves. That number deviates from the mean no
// more than all of them together, so that N of them cost N roundings, whatever the mean.
#pragma once
#include "common.cuh"

// What a warp leaves of WIDE columns: sums of differences and of their squares, and the numbers
// from which they differ.
template <class T, int WIDE> struct Differences {
    float2 sums[WIDE];
    T from[WIDE];
};

// Of a box [16][64] of T with a swizzle of 128 bytes, of which `rows` are rows of y: a lane has two
// neighbouring columns, and no two lanes read from one bank.
template <class T> DEVICE void box_moments(const u8* box, int lane, int rows, float2* sums, T* from) {
    auto at = [&](int r) {
        return *(const u32*)(box + r * 128 + ((lane / 4 ^ (r & 7)) << 4) + lane % 4 * 4);
    };
    const u32 first = at(0);
    const float2 c = unpack2<T>(first);
    float2 x = {}, y = {};
    auto add = [&](int r) {
        const float2 v = unpack2<T>(at(r));
        const float dx = v.x - c.x, dy = v.y - c.y;
        x.x += dx, x.y = fmaf(dx, dx, x.y);
        y.x += dy, y.y = fmaf(dy, dy, y.y);
    };
    if (rows >= 16) {
        UNROLLED for (int r = 0; r < 16; r++) add(r);
    } else {
        ROLLED for (int r = 0; r < rows; r++) add(r);
    }
    ((float4*)sums)[lane] = {x.x, x.y, y.x, y.y};
    ((u32*)from)[lane] = first;
}

// Of four warps', the first `columns` columns of `rows` rows, by 128 threads.
template <class T, int WIDE>
DEVICE void merge_boxes(const Differences<T, WIDE>* of, int thread, int rows, int columns, float2* to) {
    if (rows <= 0) return;
    const float each = rows >= 64 ? 0.015625f : 1.0f / rows;
    UNROLLED for (int column = thread; column < WIDE; column += 128) {
        const float c = to_float(of[0].from[column]);
        float2 sum = of[0].sums[column];
        UNROLLED for (int w = 1; w < 4; w++) {
            if (rows <= 16 * w) break;
            const float n = min(rows - 16 * w, 16), d = to_float(of[w].from[column]) - c;
            const float2 own = of[w].sums[column];
            sum.x += fmaf(n, d, own.x);
            // of differences from c; infinite is infinite, whatever is taken from it
            sum.y += isinf(own.y) ? own.y : fmaf(d, fmaf(n, d, 2 * own.x), own.y);
        }
        const float mean = sum.x * each;
        const float m2 = isinf(sum.y) ? sum.y : max_nan(fmaf(-sum.x, mean, sum.y), 0.0f);
        if (column < columns) to[column] = {c + mean, m2};
    }
}
