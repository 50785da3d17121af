// indexing/transpose.cu: a copy whose source and target run along different axes.
// Idea     : a block moves a square tile through shared memory, so that both sides are read and
//            written in whole lines. Axis p has stride 1 in x, axis q in y; three more axes are walked
//            tile by tile.
// Inputs   : x, y in units of T; VEC units an access (where sizes and strides are multiples of it).
//            INNER: p is two axes that follow each other in x, as the places of a filter do, `inner` elements
//            that are y_inner apart in y, and p / inner; from x_from and y_from on where x runs back.
// Launch   : one block of 256 threads a tile; IDX counts elements.
// Bound    : HBM, one read and one write: 3.3 TB/s in float, 3.6 in 16 bits at 8192 x 4096 on an H200,
//            where element by element gives 1.1 and 0.6.
#include "common.cuh"
#ifdef INNER
#define INNER_PARAMS , IDX x_from, IDX y_from, IDX inner, IDX y_inner
#define ROW_OF_Y p / inner * y_p + p % inner * y_inner
#else
#define INNER_PARAMS
#define ROW_OF_Y p * y_p
#endif
#define TILE (32 * VEC)

extern "C" __global__ void __launch_bounds__(256)
    transpose(const T* x, T* y, IDX dp, IDX dq, IDX x_q, IDX y_p, IDX d1, IDX d2, IDX x_0, IDX x_1,
              IDX x_2, IDX y_0, IDX y_1, IDX y_2 INNER_PARAMS) {
    // a padded row: columns of a tile lie in different banks
    __shared__ T tile[TILE][TILE + (sizeof(T) < 4 ? 4 / sizeof(T) : 1)];
    after_previous_launch();
    const IDX across = (dp + TILE - 1) / TILE, down = (dq + TILE - 1) / TILE;
    IDX b = (IDX)blockIdx.x;
    const IDX p0 = b % across * TILE;
    b /= across;
    const IDX q0 = b % down * TILE;
    b /= down;
    const IDX i2 = b % d2, i1 = b / d2 % d1, i0 = b / d2 / d1;
    x += i0 * x_0 + i1 * x_1 + i2 * x_2;
    y += i0 * y_0 + i1 * y_1 + i2 * y_2;
#ifdef INNER
    x += x_from, y += y_from;
#endif
    const int lane = threadIdx.x % 32 * VEC, warp = threadIdx.x / 32;
    Vec<T, VEC> v[TILE / 8];
    UNROLLED for (int k = 0; k < TILE / 8; k++) {
        const IDX q = q0 + warp + 8 * k, p = p0 + lane;
        if (q < dq && p < dp) v[k] = load<VEC>(x + q * x_q + p);
    }
    UNROLLED for (int k = 0; k < TILE / 8; k++)
        UNROLLED for (int j = 0; j < VEC; j++) tile[warp + 8 * k][lane + j] = v[k].at[j];
    __syncthreads();
    UNROLLED for (int k = 0; k < TILE / 8; k++) {
        const IDX p = p0 + warp + 8 * k, q = q0 + lane;
        Vec<T, VEC> w;
        UNROLLED for (int j = 0; j < VEC; j++) w.at[j] = tile[lane + j][warp + 8 * k];
        if (q < dq && p < dp) store<VEC>(y + ROW_OF_Y + q, w);
    }
}
