// wgmma_grad.cuh: what the kernels of attention's gradient on Hopper share: the products of a warpgroup's 64
// rows by a tile of TILE (a macro, 64) of the other side, and results by TMA.
#pragma once
#include "sdpa/operands.cuh"
#include "tma_ring.cuh"

constexpr int BOX = 64 * 128;  // 64 rows of 64 columns, 128 bytes a row

// s[64, TILE] = a . b^T over WIDTH; operands by the lower words of their descriptors
template <int WIDTH> DEVICE void dots(float (&s)[TILE / 2], u32 a, u32 b) {
    wgmma_fence();
    UNROLLED for (int i = 0; i < (WIDTH + 15) / 16; i++)
        Wgmma<T, TILE, 0, 0>::run(s, wgmma_at(a + i / 4 * (BOX / 16) + i % 4 * 2),
                                  wgmma_at(b + i / 4 * (TILE * 8) + i % 4 * 2), i);
    wgmma_commit();
}
// acc[64, 64 BOXES] += p . b
template <int BOXES> DEVICE void gather(float (&acc)[BOXES * 32], const u32 (&p)[TILE / 4], u32 b) {
    wgmma_fence();
    UNROLLED for (int i = 0; i < TILE / 16; i++)
        Wgmma<T, BOXES * 64, 0, 1>::run(acc, p + 4 * i, wgmma_at(b + i * 128), 1);
    wgmma_commit();
}
#if PACKED
// The last `past` rows of COUNT tiles become 0: the next sequence's may be anything, and 0 times NaN is NaN.
template <int COUNT, int THREADS_> DEVICE void zero_rows(u8* tiles, int rows, int past, u32 thread) {
    for (int i = rows - past + thread / 8; i < rows; i += THREADS_ / 8)
        UNROLLED for (int c = 0; c < COUNT; c++)
            *(uint4*)(tiles + (c * rows + i) * 128 + thread % 8 * 16) = make_uint4(0, 0, 0, 0);
    fence_proxy_async();
}
template <int COUNT, int THREADS_> DEVICE void clear_rows(u8* tiles, int rows, int past) {
    zero_rows<COUNT, THREADS_>(tiles, rows, past, threadIdx.x);
    bar_sync(8, THREADS_);
}
#endif
// Sums to a warp's 16 rows in shared memory, whose next columns are BOX further.
template <int BOXES> DEVICE void to_shared(u32 to, float (&acc)[BOXES * 32], float factor) {
    const int lane = threadIdx.x % 32;
    UNROLLED for (int c = 0; c < BOXES; c++)
        UNROLLED for (int i = 0; i < 4; i++) {
            u32 out[4];
            UNROLLED for (int e = 0; e < 4; e++) {
                const float* from = acc + c * 32 + i * 8 + e * 2;
                out[e] = pack2<T>(from[0] * factor, from[1] * factor);
            }
            stmatrix_x4(to + lane % 16 * 128 + c * BOX + ((i * 2 + lane / 16 ^ lane % 8) << 4), out[0], out[1], out[2], out[3]);
        }
    fence_proxy_async();
    __syncwarp();
}
// The same, and from there by TMA.
template <int BOXES>
DEVICE void tma_store_rows(const TensorMap& map, u32 to, float (&acc)[BOXES * 32], float factor, int row, int head, int b) {
    to_shared<BOXES>(to, acc, factor);
    if (threadIdx.x % 32 == 0) {
        for (int c = 0; c < BOXES; c++) tma_store(map, to + c * BOX, c * 64, row, head, b);
        tma_store_commit();
    }
}
#if PACKED
// The same of the first `left` of them, where they are not 16: another sequence's stand behind.
template <int BOXES, int WIDTH>
DEVICE void put_rows(const TensorMap& map, T* out, i64 stride, u32 to, float (&acc)[BOXES * 32], float factor, int row,
                     int head, int left) {
    if (left >= 16) return tma_store_rows<BOXES>(map, to, acc, factor, row, head, 0);
    to_shared<BOXES>(to, acc, factor);
    store_rows<WIDTH>(out + row * stride, stride, (const u8*)__cvta_shared_to_generic(to), left);
    __syncwarp();
}
#endif
