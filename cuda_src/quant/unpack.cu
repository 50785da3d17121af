// quant/unpack.cu: w[N, K] of MatMulNBits' weights: (q - zero) scale, rounded once.
//
// Inputs:   q [N, row_bytes] u8, low bits first; scale [N, blocks] T; zero: [N, ceil(blocks * BITS / 8)] u8
//           (ZERO 1), [N, blocks] T (ZERO 2), or none: 2^(BITS-1); groups: [K] int, the block of each k (GROUPS).
// Output:   w [N, K] T.
// Macros:   T, BITS 2, 4 or 8, BLOCK, ZERO, GROUPS; WHOLE: K % 8 == 0, and no GROUPS.
// Launch:   (ceil(N K / 2048)), 256 threads, 8 weights each.
// Bound by: writing w.
#include "common.cuh"

DEVICE float zero_of(const void* zero, i64 n, int block, int zeros, int blocks) {
    if (ZERO == 1) return ((const u8*)zero)[n * zeros + block * BITS / 8] >> (block * BITS % 8) & ((1 << BITS) - 1);
    if (ZERO == 2) return to_float(((const T*)zero)[n * blocks + block]);
    return 1 << (BITS - 1);
}

extern "C" __global__ void __launch_bounds__(256) unpack(const u8* q, const T* scale, const void* zero, const int* groups,
                                                         T* w, i64 size, int K, int row_bytes, int blocks) {
    after_previous_launch();
    const int zeros = (blocks * BITS + 7) / 8;
    const i64 first = ((i64)blockIdx.x * 256 + threadIdx.x) * 8;
    if (first >= size) return;
    i64 n = first / K;
    int k = (int)(first - n * K);
    Vec<T, 8> out;
    if (WHOLE) {
        const int block = k / BLOCK;
        u64 bits = 0;
        if (BITS == 8) bits = *(const u64*)(q + n * row_bytes + k);
        if (BITS == 4) bits = *(const u32*)(q + n * row_bytes + k / 2);
        if (BITS == 2) bits = *(const u16*)(q + n * row_bytes + k / 4);
        const float step = to_float(scale[n * blocks + block]), less = zero_of(zero, n, block, zeros, blocks);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const u32 word = (u32)(i * BITS < 32 ? bits : bits >> 32) >> (i * BITS % 32);
            out.at[i] = from_float<T>(((float)(word & ((1 << BITS) - 1)) - less) * step);
        }
        store(w + first, out);
        return;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (n * K + k < size) {
            const int block = GROUPS ? groups[k] : k / BLOCK;
            const int value = q[n * row_bytes + (i64)k * BITS / 8] >> (k * BITS % 8) & ((1 << BITS) - 1);
            out.at[i] = from_float<T>((value - zero_of(zero, n, block, zeros, blocks)) * to_float(scale[n * blocks + block]));
        }
        if (++k == K) k = 0, n++;
    }
    if (first + 8 <= size) store(w + first, out);
    else
        for (int i = 0; i < 8; i++)
            if (first + i < size) w[first + i] = out.at[i];
}
