// indexing/transpose_short.cu: a copy that turns matrices whose rows have few elements, as filters of 3 x 3 places.
// Idea     : x has dp elements for each of dq columns, all one run, of which a block reads the part of 256
//            columns as it lies; y has dp rows, in which they are written side by side. Three more axes are
//            walked. (Element by element, neighbours in y lie dp elements apart in x, each in a sector of its own.)
// Inputs   : x, y in units of T; VEC units an access (where sizes and strides are multiples of it); x_from, y_from:
//            the first place that is read, where x runs back, and where it goes.
// Launch   : one block of 256 threads for 256 columns; IDX counts elements. dp is at most 23.
// Bound    : bytes.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    transpose_short(const T* x, T* y, IDX dp, IDX dq, IDX y_p, IDX d1, IDX d2, IDX x_0, IDX x_1, IDX x_2,
                    IDX y_0, IDX y_1, IDX y_2, IDX x_from, IDX y_from) {
    __shared__ __align__(16) T run[256 * 23];
    after_previous_launch();
    const IDX down = (dq + 255) / 256;
    IDX b = (IDX)blockIdx.x;
    const IDX q0 = b % down * 256;
    b /= down;
    const IDX i2 = b % d2, i1 = b / d2 % d1, i0 = b / d2 / d1;
    x += i0 * x_0 + i1 * x_1 + i2 * x_2 + x_from + q0 * dp;
    y += i0 * y_0 + i1 * y_1 + i2 * y_2 + y_from + q0;
    const int wide = (int)min(dq - q0, (IDX)256), high = (int)dp;
#pragma unroll 4
    for (int k = threadIdx.x * VEC; k < wide * high; k += 256 * VEC) store<VEC>(run + k, load<VEC>(x + k));
    __syncthreads();
    for (int k = threadIdx.x * VEC; k < wide * high; k += 256 * VEC) {
        const int p = k / wide, q = k % wide;
        Vec<T, VEC> w;
        UNROLLED for (int j = 0; j < VEC; j++) w.at[j] = run[(q + j) * high + p];
        store<VEC>(y + p * y_p + q, w);
    }
}
