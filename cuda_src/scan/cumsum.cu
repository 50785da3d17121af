// scan/cumsum.cu: y = running sums (or products, PRODUCT) of x[outer, length, inner] along the middle axis.
// Idea     : inner = 1: a block a row, 4 BLOCK elements a step: four in a thread, a scan in each warp,
//            then over warps, and a carry. inner > 1: BX neighbouring columns by BY segments a block;
//            each thread adds up its segment, then reads it again behind the sum of those before.
//            Where that leaves the chip idle, a row or column is cut into chunks: the `_parts` entry sums
//            each of them first, and a chunk's carry is the sum of the parts before it, in their order.
// Inputs   : x, y [outer, length, inner] T, rows aligned to VEC elements; parts ACC [outer, chunks, inner].
// Macros   : T ACC; BLOCK (32..1024) and VEC (1 or 4), or BX, BY (powers of two); EXCLUSIVE, REVERSE, PRODUCT.
// Launch   : a block a chunk of a row; or for BX columns of a chunk.
// Numerics : sums in ACC; order fixed by the macros, the length and the chunks: no look-back, whose sums
//            would depend on which block is first.
// Bound    : HBM, a read and a write (columns, and what is cut: two reads).
#include "common.cuh"

#define UNIT ((ACC)(PRODUCT ? 1.0 : EXCLUSIVE ? 0.0 : -0.0))  // -0 + -0 is -0: the first sum is the first element
DEVICE ACC join(ACC a, ACC b) { return PRODUCT ? a * b : a + b; }

#ifdef BLOCK
// Four elements from `begin` on, in the order of the sums.
DEVICE void take(const T* x, i64 begin, i64 end, i64 length, ACC (&own)[4]) {
    if (VEC == 4) {
        Vec<T, 4> v;
        if (begin < end) v = load<4>(x + (REVERSE ? length - 4 - begin : begin));
        UNROLLED for (int j = 0; j < 4; j++) own[j] = begin < end ? (ACC)widen(v.at[REVERSE ? 3 - j : j]) : UNIT;
    } else {
        UNROLLED for (int j = 0; j < 4; j++)
            own[j] = begin + j < end ? (ACC)widen(x[REVERSE ? length - 1 - begin - j : begin + j]) : UNIT;
    }
}

// The carry joined with what the threads before this one have; the carry is then joined with all.
DEVICE ACC before(ACC own, ACC& carry, ACC* sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    UNROLLED for (int step = 1; step < 32; step *= 2) {
        const ACC other = __shfl_up_sync(~0u, own, step);
        if (lane >= step) own = join(other, own);
    }
    if (lane == 31) sums[warp] = own;
    __syncthreads();
    ACC left = carry;
    for (int w = 0; w < BLOCK / 32; w++) {
        if (w < warp) left = join(left, sums[w]);
        carry = join(carry, sums[w]);
    }
    __syncthreads();
    const ACC other = __shfl_up_sync(~0u, own, 1);
    return lane ? join(left, other) : left;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    cumsum_row_parts(const T* x, ACC* parts, i64 length, i64 chunk, i64 chunks) {
    after_previous_launch();
    __shared__ ACC sums[BLOCK / 32];
    const i64 at = blockIdx.x % chunks;
    x += blockIdx.x / chunks * length;
    const i64 start = at * chunk, end = min(start + chunk, length);
    ACC carry = UNIT, own[4], s = UNIT;
    for (i64 begin = start + threadIdx.x * 4; begin < end; begin += 4 * BLOCK) {
        take(x, begin, end, length, own);
        s = join(s, join(join(own[0], own[1]), join(own[2], own[3])));
    }
    before(s, carry, sums);
    if (threadIdx.x == 0) parts[blockIdx.x] = carry;
}

extern "C" __global__ void __launch_bounds__(BLOCK)
    cumsum_row(const T* x, T* y, const ACC* parts, i64 length, i64 chunk, i64 chunks) {
    after_previous_launch();
    __shared__ ACC sums[BLOCK / 32];
    const i64 row = blockIdx.x / chunks, at = blockIdx.x % chunks;
    x += row * length;
    y += row * length;
    parts += row * chunks;
    const i64 start = at * chunk, end = min(start + chunk, length);
    ACC carry = UNIT, own[4];
    for (i64 first = 0; first < at; first += BLOCK)
        before(first + threadIdx.x < at ? parts[first + threadIdx.x] : UNIT, carry, sums);
    for (i64 first = start; first < end; first += 4 * BLOCK) {
        const i64 begin = first + threadIdx.x * 4;
        take(x, begin, end, length, own);
        ACC left = before(join(join(join(own[0], own[1]), own[2]), own[3]), carry, sums);
        Vec<T, 4> v;
        UNROLLED for (int j = 0; j < 4; j++) {
            const ACC next = join(left, own[j]);
            v.at[REVERSE ? 3 - j : j] = narrow<T>(EXCLUSIVE ? left : next);
            left = next;
        }
        if (VEC == 4) {
            if (begin < end) store<4>(y + (REVERSE ? length - 4 - begin : begin), v);
        } else {
            UNROLLED for (int j = 0; j < 4; j++)
                if (begin + j < end)
                    y[REVERSE ? length - 1 - begin - j : begin + j] = v.at[REVERSE ? 3 - j : j];
        }
    }
}
#else
// A block's column, and the elements of it that a thread joins: those of its segment of a chunk.
struct Segment {
    i64 column, row, at, first, last;
    DEVICE Segment(i64 length, i64 inner, i64 chunk, i64 chunks) {
        const i64 tiles = (inner + BX - 1) / BX, rest = blockIdx.x / tiles;
        column = blockIdx.x % tiles * BX + threadIdx.x % BX;
        row = rest / chunks, at = rest % chunks;
        const i64 end = min((at + 1) * chunk, length), each = (min(chunk, length) + BY - 1) / BY;
        first = at * chunk + threadIdx.x / BX * each;
        last = column < inner ? min(first + each, end) : 0;
    }
};

DEVICE ACC segment_sum(const T* x, const Segment& s, i64 length, i64 inner) {
    ACC sum = UNIT;
    for (i64 i = s.first; i < s.last; i++) sum = join(sum, (ACC)widen(x[(REVERSE ? length - 1 - i : i) * inner]));
    return sum;
}

extern "C" __global__ void __launch_bounds__(BX* BY, 1)
    cumsum_column_parts(const T* x, ACC* parts, i64 length, i64 inner, i64 chunk, i64 chunks) {
    after_previous_launch();
    __shared__ ACC sums[BY][BX];
    const int tx = threadIdx.x % BX, ty = threadIdx.x / BX;
    const Segment s(length, inner, chunk, chunks);
    sums[ty][tx] = segment_sum(x + s.row * length * inner + s.column, s, length, inner);
    __syncthreads();
    if (ty || s.column >= inner) return;
    ACC sum = UNIT;
    for (int w = 0; w < BY; w++) sum = join(sum, sums[w][tx]);
    parts[(s.row * chunks + s.at) * inner + s.column] = sum;
}

extern "C" __global__ void __launch_bounds__(BX* BY, 1)
    cumsum_column(const T* x, T* y, const ACC* parts, i64 length, i64 inner, i64 chunk, i64 chunks) {
    after_previous_launch();
    __shared__ ACC sums[BY][BX], carries[BY][BX];
    const int tx = threadIdx.x % BX, ty = threadIdx.x / BX;
    const Segment s(length, inner, chunk, chunks);
    const i64 base = s.row * length * inner + s.column;
    sums[ty][tx] = segment_sum(x + base, s, length, inner);
    ACC carry = UNIT;
    if (s.column < inner) {
        const i64 each = (s.at + BY - 1) / BY, last = min((ty + 1) * each, s.at);
        for (i64 c = ty * each; c < last; c++)
            carry = join(carry, parts[(s.row * chunks + c) * inner + s.column]);
    }
    carries[ty][tx] = carry;
    __syncthreads();
    carry = UNIT;
    for (int w = 0; w < BY; w++) carry = join(carry, carries[w][tx]);
    for (int w = 0; w < ty; w++) carry = join(carry, sums[w][tx]);
    for (i64 i = s.first; i < s.last; i++) {
        const i64 at = base + (REVERSE ? length - 1 - i : i) * inner;
        const ACC own = widen(x[at]);
        y[at] = narrow<T>(EXCLUSIVE ? carry : join(carry, own));
        carry = join(carry, own);
    }
}
#endif
