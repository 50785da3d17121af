// new_rows.cuh: where a cache takes a new row, and the row as attention sees it: through its norm, then turned.
// Macros   : cache.cuh's T and CACHE, ACC, D numbers of a head, PIECE elements a piece (of D, and of HALF), HALF pairs turned
//            (0: none), NORMED (RMSNormalization of a query's and a key's head first), INTERLEAVED (a pair are
//            neighbours), POSITIONS (of angles: 0 the place, 1 from the first on, 2 one each, 3 the new row's
//            number), COLUMNS (tables are [context, 2 HALF], a number a column).
// Numerics : norms and rotations in ACC, each rounded once.
#pragma once
#include "sdpa/cache.cuh"

// 1 / the root of a row's mean square: each thread of the row sums all of it, in one order.
DEVICE ACC reciprocal_deviation(const T* row, float epsilon) {
    ACC sum = 0;
    ROLLED for (int e = 0; e < D; e += PIECE) {
        const Vec<T, PIECE> x = load<PIECE>(row + e);
        UNROLLED for (int j = 0; j < PIECE; j++) sum += widen(x.at[j]) * widen(x.at[j]);
    }
    return 1 / sqrt(sum / D + epsilon);
}
DEVICE void normalize(Vec<T, PIECE>& x, ACC rstd, const T* scale) {
    const Vec<T, PIECE> s = load<PIECE>(scale);
    UNROLLED for (int j = 0; j < PIECE; j++) x.at[j] = narrow<T>(widen(x.at[j]) * rstd * widen(s.at[j]));
}

// A row's place, which counts from the end where it is negative; `length` where there is none.
DEVICE int placed(i64 at, int length) {
    return at < -length || at >= length ? length : (int)at + (at < 0 ? length : 0);
}

struct Angles { const T *cosines, *sines; };
// The angles of new row `row` of sequence b, which goes to `place`.
DEVICE Angles angles_of(const T* cosines, const T* sines, const i64* positions, int b, int row, int rows, int place, int context) {
    const i64 token = (i64)b * rows + row;
    const i64 angle = POSITIONS == 0 ? place : POSITIONS == 1 ? positions[0] + row : POSITIONS == 2 ? positions[token] : token;
    const i64 line = (angle < 0 ? 0 : angle < context ? angle : context - 1) * (COLUMNS ? 2 * HALF : HALF);
    return {cosines + line, sines + line};
}
// The piece from column e on of a new query or key.
DEVICE Vec<T, PIECE> piece_of(const T* from, int e, const T* scale, Angles by, float epsilon) {
    Vec<T, PIECE> x = load<PIECE>(from + e);
    ACC rstd = 1;
    if (NORMED) {
        rstd = reciprocal_deviation(from, epsilon);
        normalize(x, rstd, scale + e);
    }
    if (!HALF || e >= 2 * HALF) return x;
    if (INTERLEAVED) {
        UNROLLED for (int j = 0; j + 1 < PIECE; j += 2) {
            const ACC c = widen(by.cosines[(e + j) / 2]), s = widen(by.sines[(e + j) / 2]);
            const ACC one = widen(x.at[j]), two = widen(x.at[j + 1]);
            x.at[j] = narrow<T>(one * c - two * s), x.at[j + 1] = narrow<T>(two * c + one * s);
        }
        return x;
    }
    const bool second = e >= HALF;
    const int across = second ? e - HALF : e + HALF, column = second && !COLUMNS ? e - HALF : e;
    const Vec<T, PIECE> cosines = load<PIECE>(by.cosines + column), sines = load<PIECE>(by.sines + column);
    Vec<T, PIECE> other = load<PIECE>(from + across);
    if (NORMED) normalize(other, rstd, scale + across);
    UNROLLED for (int j = 0; j < PIECE; j++) {
        const ACC turn = widen(other.at[j]) * widen(sines.at[j]);
        x.at[j] = narrow<T>(widen(x.at[j]) * widen(cosines.at[j]) + (second ? turn : -turn));
    }
    return x;
}
