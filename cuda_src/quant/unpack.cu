// quant/unpack.cu: w[N, K] of MatMulNBits' weights: (q - zero) scale, rounded once.
//
// Inputs:   q [N, row_bytes] u8, low bits first; scale [N, blocks] T; zero: [N, ceil(blocks * BITS / 8)] u8
//           (ZERO 1), [N, blocks] T (ZERO 2), or none: 2^(BITS-1); groups: [K] int, the block of each k (GROUPS).
// Output:   w [N, K] T.
//           unpack_tiles: q [tiles, K / 64, 32, 16], scale [tiles, K / BLOCK, 8, 2 (ZERO: 4)], as
//           program/nbits_tiles.py. GATE: rows of w in pairs of both halves (gemm/epilogue.cuh).
// Macros:   T, BITS 2, 4 or 8, BLOCK, ZERO, GROUPS, TILED, GATE; WHOLE: K % 8 == 0, and no GROUPS.
// Launch:   (ceil(N K / 2048)), 256 threads, 8 weights each; tiles: a quarter, 32 weights each.
// Bound by: writing w.
#include "quant/nbits.cuh"

template <class E> constexpr bool IS_F16 = false;
template <> constexpr bool IS_F16<f16> = true;
constexpr bool F16 = IS_F16<T>;
#ifdef TILED
// A lane's 16 bytes are 8 k of two runs of 32, for rows g and g + 8.
extern "C" __global__ void __launch_bounds__(256) unpack_tiles(const uint4* q, const T* scale, T* w, int N, int K, int blocks) {
    after_previous_launch();
    const int warp = (blockIdx.x * 256 + threadIdx.x) / 32, lane = threadIdx.x % 32, chunks = K / 64;
    const int tile = warp / chunks, chunk = warp % chunks, g = lane / 4;
    if (tile * 16 >= N) return;
    const uint4 packed = q[(i64)warp * 32 + lane];
    const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
    UNROLLED for (int run = 0; run < 2; run++) {
        const int k = chunk * 64 + run * 32;
        const u16* numbers = (const u16*)scale + ((tile * (i64)blocks + k / BLOCK) * 8 + g) * (ZERO ? 4 : 2);
        const u32 even = ZERO ? twice(numbers[2]) : F16 ? 0xe408e408 : 0xc308c308;
        const u32 odd = ZERO ? twice(numbers[3]) : F16 ? 0xd480d480 : 0xc308c308;
        u32 pairs[2][4];
        for (int h = 0; h < 2; h++) unpack_4<F16>(words[2 * run + h], even, odd, pairs[h]);
        UNROLLED for (int r = 0; r < 2; r++) {
            int n = tile * 16 + 8 * r + g;
            if (n >= N) continue;
            if (GATE) {
                const int through = n >= N / 2, y = n - through * (N / 2);  // its column of y
                n = y / 8 * 16 + (y % 8 / 2 + y % 2 * 4) * 2 + through;
            }
            const u32 by = twice(numbers[r]), negative_zero = 0x80008000;  // added, it leaves a product as it is
            *(uint4*)(w + (i64)n * K + k + lane % 4 * 8) =
                make_uint4(fma2<F16>(pairs[0][r], by, negative_zero), fma2<F16>(pairs[0][2 + r], by, negative_zero),
                           fma2<F16>(pairs[1][r], by, negative_zero), fma2<F16>(pairs[1][2 + r], by, negative_zero));
        }
    }
}
#else

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
        UNROLLED for (int i = 0; i < 8; i++) {
            const u32 word = (u32)(i * BITS < 32 ? bits : bits >> 32) >> (i * BITS % 32);
            out.at[i] = from_float<T>(((float)(word & ((1 << BITS) - 1)) - less) * step);
        }
        store(w + first, out);
        return;
    }
    UNROLLED for (int i = 0; i < 8; i++) {
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
#endif
