// indexing/pieces.cu: copies of runs of elements at two outer strides, several copies in one launch.
// Inputs   : a table with a row a copy: x, y; n elements a run; sizes d0, d1 and strides of x and y of the
//            outer dimensions in elements; the copy's first block. A copy has less than 2^31 elements.
// Macros   : T (an unsigned integer of the elements' size), ROWS of the table.
// Launch   : one block for 16 BLOCK EACH bytes of a copy.
// Bound    : HBM, one read and one write; 16 bytes an access where all of a copy is of such pieces.
#include "common.cuh"
constexpr int BLOCK = 256, EACH = 2;  // threads, and accesses of 16 bytes that each of them makes

struct Row {
    u64 x, y;
    i64 n, d0, d1, x0, x1, y0, y1, first;
};
struct Rows { Row at[ROWS]; };

template <class V> DEVICE void move(const Row& r, u32 begin, u32 end) {
    constexpr u32 PER = sizeof(V) / sizeof(T);
    const u32 n = (u32)r.n / PER, d1 = (u32)r.d1;
    V kept[EACH];
    V* to[EACH];
    for (u32 first = begin / PER; first < end / PER; first += BLOCK * EACH) {
        UNROLLED for (int i = 0; i < EACH; i++) {
            const u32 at = first + i * BLOCK + threadIdx.x;
            to[i] = nullptr;
            if (at >= end / PER) continue;
            const u32 run = at / n, i0 = run / d1, i1 = run % d1;
            kept[i] = ((const V*)((const T*)r.x + i0 * r.x0 + i1 * r.x1))[at % n];
            to[i] = (V*)((T*)r.y + i0 * r.y0 + i1 * r.y1) + at % n;
        }
        UNROLLED for (int i = 0; i < EACH; i++)
            if (to[i]) *to[i] = kept[i];
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK) copy_pieces(const __grid_constant__ Rows table, int rows) {
    after_previous_launch();
    int k = 0;
    while (k + 1 < rows && table.at[k + 1].first <= blockIdx.x) k++;
    const Row& r = table.at[k];
    constexpr u32 SHARE = 16 * BLOCK * EACH / sizeof(T);
    const u32 total = (u32)(r.n * r.d0 * r.d1), begin = (blockIdx.x - (u32)r.first) * SHARE;
    const u32 end = min(begin + SHARE, total);
    const u64 bits = r.x | r.y | (u64)(r.n | r.x0 | r.x1 | r.y0 | r.y1) * sizeof(T);
    if (bits % 16) move<T>(r, begin, end);
    else move<uint4>(r, begin, end);
}
