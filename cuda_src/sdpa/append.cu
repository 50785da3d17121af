// sdpa/append.cu: new keys and values go behind those of before in a cache, turned by their places.
// Idea     : a thread moves PIECE numbers of a new row: of a query to `turned`, of a key or value to its
//            place in present. Where past stands apart, threads walk over its rows as well.
// Inputs   : q, k, v [B, heads, rows, D] by strides, lengths int32 [B] (tokens with the new ones, less 1),
//            cos and sin [context, HALF], scales of norms [D], positions i64, past [B, kv_heads, past, D].
// Outputs  : turned [B, heads, rows, D], present [B, kv_heads, length, D]: past, the new rows, zeros.
// Macros   : T element, ACC, D, PIECE elements a piece (of D, and of HALF), HALF pairs turned (0: none),
//            NORMED (RMSNormalization of a query's and a key's head first),
//            INTERLEAVED (a pair are neighbours), POSITIONS (of angles: 0 the place, 1 from the first
//            on, 2 one each, 3 the new row's number), COLUMNS (tables are [context, 2 HALF], a number
//            a column), UNIFORM (each sequence has `past` tokens and the new ones: no lengths),
//            KEEP (what past has behind the new rows stays), PLACED (positions are the new rows' places,
//            1: [B, rows], 2: [rows] for all sequences; the last row of a place stays; no lengths).
// Launch   : any grid (x) of 256 threads.
// Numerics : norms and rotations in ACC, each rounded once.
// Bound    : bytes of the new rows; of past as well where present is another place.
#include "common.cuh"
constexpr int PIECES = D / PIECE;

struct Rows { i64 batch, head, row; };

// 1 / the root of a row's mean square: each thread of the row sums all of it, in one order.
__device__ __forceinline__ ACC reciprocal_deviation(const T* row, float epsilon) {
    ACC sum = 0;
#pragma unroll
    for (int e = 0; e < D; e += PIECE) {
        const Vec<T, PIECE> x = load<PIECE>(row + e);
#pragma unroll
        for (int j = 0; j < PIECE; j++) sum += widen(x.at[j]) * widen(x.at[j]);
    }
    return 1 / sqrt(sum / D + epsilon);
}
__device__ __forceinline__ void normalize(Vec<T, PIECE>& x, ACC rstd, const T* scale) {
    const Vec<T, PIECE> s = load<PIECE>(scale);
#pragma unroll
    for (int j = 0; j < PIECE; j++) x.at[j] = narrow<T>(widen(x.at[j]) * rstd * widen(s.at[j]));
}

// A row's place, which counts from the end where it is negative; `length` where there is none.
__device__ __forceinline__ int placed(i64 at, int length) {
    return at < -length || at >= length ? length : (int)at + (at < 0 ? length : 0);
}
// Whether a row from `row` on goes to a place.
__device__ __forceinline__ bool is_written(const i64* places, int row, int rows, int length, int place) {
    while (row < rows && placed(places[row], length) != place) row++;
    return row < rows;
}

extern "C" __global__ void __launch_bounds__(256) cache_append(
    const T* q, const T* k, const T* v, const int* lengths, const T* cosines, const T* sines, const T* q_scale,
    const T* k_scale, const i64* positions, const T* past_key, const T* past_value, T* turned, T* present_key,
    T* present_value, i64 qb, i64 qh, i64 qr, i64 kb, i64 kh, i64 kr, i64 vb, i64 vh, i64 vr, int batch, int rows,
    int heads, int kv_heads, int length, int past, int context, float epsilon) {
    after_previous_launch();
    const i64 first = (i64)blockIdx.x * 256 + threadIdx.x, step = (i64)gridDim.x * 256;
    const int all = heads + 2 * kv_heads;
    for (i64 i = first; i < (i64)batch * rows * all * PIECES; i += step) {
        const int e = i % PIECES * PIECE, row = i / PIECES / all % rows, b = i / PIECES / all / rows;
        int head = i / PIECES % all;
        const i64* places = positions + (PLACED == 1 ? (i64)b * rows : 0);
        const int place = PLACED ? placed(places[row], length) : (UNIFORM ? past : max(lengths[b] + 1 - rows, 0)) + row;
        const bool query = head < heads, key = !query && head < heads + kv_heads;
        head -= query ? 0 : key ? heads : heads + kv_heads;
        const Rows at = query ? Rows{qb, qh, qr} : key ? Rows{kb, kh, kr} : Rows{vb, vh, vr};
        const T* from = (query ? q : key ? k : v) + b * at.batch + head * at.head + row * at.row;
        Vec<T, PIECE> x = load<PIECE>(from + e);
        const T* scale = query ? q_scale : k_scale;
        ACC rstd = 1;
        if (NORMED && (query || key)) {
            rstd = reciprocal_deviation(from, epsilon);
            normalize(x, rstd, scale + e);
        }
        if (HALF && (query || key) && e < 2 * HALF) {
            const i64 token = (i64)b * rows + row;
            const i64 angle = POSITIONS == 0 ? place : POSITIONS == 1 ? positions[0] + row : POSITIONS == 2 ? positions[token] : token;
            const i64 line = (angle < 0 ? 0 : angle < context ? angle : context - 1) * (COLUMNS ? 2 * HALF : HALF);
            if (INTERLEAVED) {
#pragma unroll
                for (int j = 0; j + 1 < PIECE; j += 2) {
                    const ACC c = widen(cosines[line + (e + j) / 2]), s = widen(sines[line + (e + j) / 2]);
                    const ACC one = widen(x.at[j]), two = widen(x.at[j + 1]);
                    x.at[j] = narrow<T>(one * c - two * s), x.at[j + 1] = narrow<T>(two * c + one * s);
                }
            } else {
                const bool second = e >= HALF;
                const int across = second ? e - HALF : e + HALF;
                Vec<T, PIECE> other = load<PIECE>(from + across);
                if (NORMED) normalize(other, rstd, scale + across);
                const i64 column = line + (second && !COLUMNS ? e - HALF : e);
#pragma unroll
                for (int j = 0; j < PIECE; j++) {
                    const ACC c = widen(cosines[column + j]), s = widen(sines[column + j]);
                    const ACC turn = widen(other.at[j]) * s;
                    x.at[j] = narrow<T>(widen(x.at[j]) * c + (second ? turn : -turn));
                }
            }
        }
        if (query)
            store<PIECE>(turned + (((i64)b * heads + head) * rows + row) * D + e, x);
        else if (place < length && !(PLACED && is_written(places, row + 1, rows, length, place)))
            store<PIECE>((key ? present_key : present_value) + (((i64)b * kv_heads + head) * length + place) * D + e, x);
    }
    if (UNIFORM) {  // a block takes a chunk of one head's past at a time, with its loads all on their way
        constexpr int EACH = 4, CHUNK = 256 * EACH;
        const i64 pieces = (i64)past * PIECES;
        const int chunks = (pieces + CHUNK - 1) / CHUNK, lines = batch * kv_heads;
        for (int task = blockIdx.x; task < 2 * lines * chunks; task += gridDim.x) {
            const int line = task / chunks % lines;
            const bool value = task / chunks >= lines;
            const i64 start = (i64)(task % chunks) * CHUNK + threadIdx.x;
            const T* from = (value ? past_value : past_key) + (i64)line * past * D;
            T* to = (value ? present_value : present_key) + (i64)line * length * D;
            Vec<T, PIECE> x[EACH];
#pragma unroll
            for (int j = 0; j < EACH; j++)
                if (start + j * 256 < pieces) x[j] = load<PIECE>(from + (start + j * 256) * PIECE);
#pragma unroll
            for (int j = 0; j < EACH; j++)
                if (start + j * 256 < pieces) store<PIECE>(to + (start + j * 256) * PIECE, x[j]);
        }
        return;
    }
    // one place for past and present: what is old is there
    const i64 each = (i64)batch * kv_heads * length * PIECES;
#pragma unroll
    for (int which = 0; which < 2; which++) {
        const T* old = which ? past_value : past_key;
        T* to = which ? present_value : present_key;
        if (old == to) continue;
        for (i64 i = first; i < each; i += step) {
            const i64 line = i / PIECES;
            const int e = i % PIECES * PIECE, place = line % length, b = line / length / kv_heads;
            const int start = PLACED ? 0 : max(lengths[b] + 1 - rows, 0);
            const i64* places = positions + (PLACED == 1 ? (i64)b * rows : 0);
            if (PLACED ? is_written(places, 0, rows, length, place) : place >= start && place < start + rows) continue;
            Vec<T, PIECE> x = {};
            if ((KEEP || place < start) && place < past) x = load<PIECE>(old + (line / length * past + place) * D + e);
            store<PIECE>(to + line * D + e, x);
        }
    }
}
