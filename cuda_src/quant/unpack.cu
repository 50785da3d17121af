// quant/unpack.cu: w[N, K] of MatMulNBits' weights: (q - zero) scale, rounded once.
//
// Inputs:   q [N, row_bytes] u8, low bits first; scale [N, blocks] T; zero: [N, ceil(blocks * BITS / 8)] u8
//           (ZERO 1), [N, blocks] T (ZERO 2), or none: 2^(BITS-1); groups: [K] int, the block of each k (GROUPS).
// Output:   w [N, K] T.
//           TILED: q [tiles, K / 64, 32, 16], scale [tiles, K / BLOCK, 8, 2 (ZERO: 4)], as program/nbits_tiles.py.
// Macros:   T, BITS 2, 4 or 8, BLOCK, ZERO, GROUPS, TILED; WHOLE: K % 8 == 0, and no GROUPS.
// Launch:   (ceil(N K / 2048)), 256 threads, 8 weights each.
// Bound by: writing w.
#include "common.cuh"

template <class E> constexpr bool IS_F16 = false;
template <> constexpr bool IS_F16<f16> = true;
constexpr bool F16 = IS_F16<T>;

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
    if (TILED) {
        const int g = n % 8, r = n % 16 / 8;
        const i64 tile = n / 16;
        const u32* words = (const u32*)q + ((tile * (K / 64) + k / 64) * 32 + g * 4 + k % 32 / 8) * 4 + k % 64 / 32 * 2;
        const T* factors = scale + ((tile * blocks + k / BLOCK) * 8 + g) * (ZERO ? 4 : 2) + r;
        float less = 8;
        if (ZERO) less = -to_float(factors[2]) - (!F16 ? 128 : r ? 64 : 1024);
#pragma unroll
        for (int i = 0; i < 8; i++) {  // i = 4 h + 2 p + e, in nibble 4 e + 2 p + r of word h
            const u32 value = words[i / 4] >> 4 * (i % 2 * 4 + i / 2 % 2 * 2 + r) & 15;
            out.at[i] = from_float<T>(((float)value - less) * to_float(factors[0]));
        }
        store(w + first, out);
        return;
    }
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
