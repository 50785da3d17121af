// sdpa/append.cu: new keys and values go behind those of before in a cache, turned by their places.
// Idea     : a thread moves PIECE numbers of a new row: of a query to `turned`, of a key or value to its
//            place in present. Where past stands apart, threads walk over its rows as well.
// Inputs   : q, k, v [B, heads, rows, D] by strides, lengths int32 [B] (tokens with the new ones, less 1),
//            cos and sin [context, HALF], scales of norms [D], positions i64, past [B, kv_heads, past, D]
//            in CACHE; key_step, value_step [kv_heads, D] where that is not T.
// Outputs  : turned [B, heads, rows, D], present [B, kv_heads, length, D]: past, the new rows, zeros.
// Macros   : new_rows.cuh's; UNIFORM (each sequence has `past` tokens and the new ones: no lengths), KEEP (what
//            past has behind the new rows stays), PLACED (positions are the new rows' places, 1: [B, rows],
//            2: [rows] for all sequences; the last row of a place stays; no lengths).
// Launch   : any grid (x) of 256 threads.
// Bound    : bytes of the new rows; of past as well where present is another place.
#include "sdpa/new_rows.cuh"
constexpr int PIECES = D / PIECE;

struct Rows { i64 batch, head, row; };

// Whether a row from `row` on goes to a place.
DEVICE bool is_written(const i64* places, int row, int rows, int length, int place) {
    while (row < rows && placed(places[row], length) != place) row++;
    return row < rows;
}

extern "C" __global__ void __launch_bounds__(256) cache_append(
    const T* q, const T* k, const T* v, const int* lengths, const T* cosines, const T* sines, const T* q_scale,
    const T* k_scale, const i64* positions, const CACHE* past_key, const CACHE* past_value, T* turned, CACHE* present_key,
    CACHE* present_value, i64 qb, i64 qh, i64 qr, i64 kb, i64 kh, i64 kr, i64 vb, i64 vh, i64 vr, int batch, int rows,
    int heads, int kv_heads, int length, int past, int context, float epsilon STEPS_PARAMETERS) {
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
        const Angles by = angles_of(cosines, sines, positions, b, row, rows, place, context);
        const Vec<T, PIECE> x = query || key ? piece_of(from, e, query ? q_scale : k_scale, by, epsilon) : load<PIECE>(from + e);
        if (query)
            store<PIECE>(turned + (((i64)b * heads + head) * rows + row) * D + e, x);
        else if (place < length && !(PLACED && is_written(places, row + 1, rows, length, place)))
            store<PIECE>((key ? present_key : present_value) + (((i64)b * kv_heads + head) * length + place) * D + e,
                         cached(x, (key ? key_step : value_step) + head * D + e));
    }
    if (UNIFORM) {  // a block takes a chunk of one head's past at a time, with its loads all on their way
        constexpr int EACH = 4, CHUNK = 256 * EACH;
        const i64 pieces = (i64)past * PIECES;
        const int chunks = (pieces + CHUNK - 1) / CHUNK, lines = batch * kv_heads;
        for (int task = blockIdx.x; task < 2 * lines * chunks; task += gridDim.x) {
            const int line = task / chunks % lines;
            const bool value = task / chunks >= lines;
            const i64 start = (i64)(task % chunks) * CHUNK + threadIdx.x;
            const CACHE* from = (value ? past_value : past_key) + (i64)line * past * D;
            CACHE* to = (value ? present_value : present_key) + (i64)line * length * D;
            Vec<CACHE, PIECE> x[EACH];
            UNROLLED for (int j = 0; j < EACH; j++)
                if (start + j * 256 < pieces) x[j] = load<PIECE>(from + (start + j * 256) * PIECE);
            UNROLLED for (int j = 0; j < EACH; j++)
                if (start + j * 256 < pieces) store<PIECE>(to + (start + j * 256) * PIECE, x[j]);
        }
        return;
    }
    // one place for past and present: what is old is there
    const i64 each = (i64)batch * kv_heads * length * PIECES;
    UNROLLED for (int which = 0; which < 2; which++) {
        const CACHE* old = which ? past_value : past_key;
        CACHE* to = which ? present_value : present_key;
        if (old == to) continue;
        for (i64 i = first; i < each; i += step) {
            const i64 line = i / PIECES;
            const int e = i % PIECES * PIECE, place = line % length, b = line / length / kv_heads;
            const int start = PLACED ? 0 : max(lengths[b] + 1 - rows, 0);
            const i64* places = positions + (PLACED == 1 ? (i64)b * rows : 0);
            if (PLACED ? is_written(places, 0, rows, length, place) : place >= start && place < start + rows) continue;
            Vec<CACHE, PIECE> x = {};
            if ((KEEP || place < start) && place < past) x = load<PIECE>(old + (line / length * past + place) * D + e);
            store<PIECE>(to + line * D + e, x);
        }
    }
}
