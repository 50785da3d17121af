// linalg/det_rows.cu: y[b] = det(x[b]) of small square matrices (ONNX Det): many of them a block.
// Idea     : SIDE lanes a matrix, a row each, in registers. Gaussian elimination with partial pivoting as in
//            linalg/det.cu, but rows stay where they are: a lane knows the place that its row has been
//            exchanged to, the pivot's row comes by shuffles.
// Inputs   : x T [batch, n, n], n <= SIDE, aligned to VEC elements.   Output: y T [batch].
// Macros   : T ACC; SIDE (a power of two <= 32); VEC (divides n; 16 bytes at most).
// Launch   : SIDE threads a matrix, blocks of 256.
// Numerics : in ACC; of equal pivots the first row's. A matrix of no rows has determinant 1.
// Bound    : HBM, x once; n^2 / 2 shuffles a warp from n = 16 on.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) det_rows(const T* x, T* y, i64 batch, int n) {
    after_previous_launch();
    const i64 matrix = (i64)blockIdx.x * (256 / SIDE) + threadIdx.x / SIDE;
    const int lane = threadIdx.x % SIDE;
    ACC a[SIDE] = {};
    if (matrix < batch && lane < n) {
        const T* row = x + (matrix * n + lane) * n;
        UNROLLED for (int c = 0; c < SIDE; c += VEC)
            if (c < n) {
                const Vec<T, VEC> v = load<VEC>(row + c);
                UNROLLED for (int j = 0; j < VEC; j++) a[c + j] = (ACC)widen(v.at[j]);
            }
    }
    ACC result = 1;
    int place = lane;  // the row that this one has come to by exchanges
    bool singular = false;
    UNROLLED for (int k = 0; k < SIDE; k++) {
        if (k >= n) break;
        // the largest of the rows that are left; nothing is larger than a NaN, and the result is one
        ACC most = place >= k && place < n ? fabs(a[k]) : (ACC)-1;
        int row = place, from = lane;
        UNROLLED for (int step = SIDE / 2; step; step >>= 1) {
            const ACC q = __shfl_xor_sync(~0u, most, step, SIDE);
            const int r = __shfl_xor_sync(~0u, row, step, SIDE), f = __shfl_xor_sync(~0u, from, step, SIDE);
            const bool earlier = r < row, nan = q != q, mine = most != most;
            if (nan || mine ? nan && (!mine || earlier) : q > most || (q == most && earlier)) {
                most = q;
                row = r;
                from = f;
            }
        }
        const ACC pivot = __shfl_sync(~0u, a[k], from, SIDE);
        if (!singular) result *= row == k ? pivot : -pivot;
        singular |= pivot == 0;
        if (place == k)
            place = row;
        else if (place == row)
            place = k;
        const bool below = place > k && !singular;
        const ACC factor = below ? a[k] / pivot : (ACC)0;
        UNROLLED for (int c = k + 1; c < SIDE; c++) {
            const ACC above = __shfl_sync(~0u, a[c], from, SIDE);
            if (below) a[c] -= factor * above;
        }
    }
    if (matrix < batch && lane == 0) y[matrix] = narrow<T>(result);
}
