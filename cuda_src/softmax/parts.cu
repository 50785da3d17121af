// softmax/parts.cu: softmax (or its logarithm, LOG) of few long rows, each by many blocks.
// Idea     : `softmax_parts` finds the largest element of each chunk of a row and the sum of the exponentials below
//            it; each block of `softmax_apply` merges all parts of its row, and writes its chunk.
// Inputs   : x, y T [rows, length], rows aligned to VEC elements; parts ACC [rows, chunks, 2].
// Macros   : T ACC LOG VEC BLOCK.
// Launch   : a block a chunk of a row.
// Numerics : sums in ACC, in an order that the length and the chunks alone decide.
// Bound    : memory: x read twice, y written once.
#include "reduce/team.cuh"

struct State { ACC largest, sum; };

// The sum is of exp(x - largest); a NaN is no largest element, but its sum is NaN.
DEVICE State merged(State a, State b) {
    const ACC top = a.largest > b.largest ? a.largest : b.largest;
    const ACC left = a.sum == 0 ? a.sum : a.sum * fast_exp(a.largest - top);
    return {top, left + (b.sum == 0 ? b.sum : b.sum * fast_exp(b.largest - top))};
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    softmax_parts(const T* x, State* parts, i64 length, i64 chunk, i64 chunks) {
    after_previous_launch();
    __shared__ State scratch[BLOCK / 32];
    const i64 first = blockIdx.x % chunks * chunk, end = min(first + chunk, length);
    x += blockIdx.x / chunks * length;
    State s = {-INFINITE, 0};
    for (i64 i = first + threadIdx.x * VEC; i < end; i += BLOCK * VEC) {
        const Vec<T, VEC> t = load<VEC>(x + i);
        ACC top = s.largest;
        UNROLLED for (int j = 0; j < VEC; j++) top = (ACC)widen(t.at[j]) > top ? (ACC)widen(t.at[j]) : top;
        if (top > s.largest) s.sum *= fast_exp(s.largest - top), s.largest = top;
        UNROLLED for (int j = 0; j < VEC; j++) {
            const ACC at = widen(t.at[j]);
            s.sum += at == -INFINITE ? (ACC)0 : fast_exp(at - s.largest);
        }
    }
    s = team_merge<BLOCK>(s, merged, scratch);
    if (threadIdx.x == 0) parts[blockIdx.x] = s;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    softmax_apply(const T* x, T* y, const State* parts, i64 length, i64 chunk, i64 chunks) {
    after_previous_launch();
    __shared__ State scratch[BLOCK / 32];
    const i64 row = blockIdx.x / chunks, first = blockIdx.x % chunks * chunk, end = min(first + chunk, length);
    x += row * length;
    y += row * length;
    State s = {-INFINITE, 0};
    for (i64 c = threadIdx.x; c < chunks; c += BLOCK) s = merged(s, parts[row * chunks + c]);
    s = team_merge<BLOCK>(s, merged, scratch);
    const ACC scale = LOG ? s.largest + log(s.sum) : 1 / s.sum;
    for (i64 i = first + threadIdx.x * VEC; i < end; i += BLOCK * VEC) {
        Vec<T, VEC> t = load<VEC>(x + i);
        UNROLLED for (int j = 0; j < VEC; j++) {
            const ACC at = widen(t.at[j]);
            t.at[j] = narrow<T>(LOG ? at - scale : fast_exp(at - s.largest) * scale);
        }
        store<VEC>(y + i, t);
    }
}
