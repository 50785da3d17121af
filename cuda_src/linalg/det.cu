// linalg/det.cu: y[b] = det(x[b]) of square matrices (ONNX Det).
// Idea     : a block a matrix: Gaussian elimination with partial pivoting on a copy, the determinant
//            being the product of the pivots and the sign of the exchanges (Golub and Van Loan,
//            Matrix Computations, 3.4).
// Inputs   : x T [batch, n, n].   Scratch: work ACC [batch, n, n].   Output: y T [batch]. Any n.
// Macros   : T ACC.
// Numerics : in ACC; of equal pivots the first row's. A matrix of no rows has determinant 1.
// Bound    : n rounds of a block barrier each, n^3 / 3 multiplications a block.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) det(const T* x, ACC* work, T* y, int n) {
    after_previous_launch();
    __shared__ ACC best[256];
    __shared__ int at[256];
    const int t = threadIdx.x;
    const i64 size = (i64)n * n;
    const T* from = x + blockIdx.x * size;
    ACC* a = work + blockIdx.x * size;
    for (i64 i = t; i < size; i += 256) a[i] = (ACC)widen(from[i]);
    ACC result = 1;
    for (int k = 0; k < n; k++) {
        __syncthreads();
        ACC most = -1;
        int row = k;
        for (int r = k + t; r < n; r += 256) {
            const ACC v = fabs(a[(i64)r * n + k]);
            if (v > most || v != v) {
                most = v;
                row = r;
                if (v != v) break;  // nothing is larger than a NaN: the result is one
            }
        }
        best[t] = most;
        at[t] = row;
        __syncthreads();
        for (int step = 128; step; step >>= 1) {
            if (t < step) {
                const ACC p = best[t], q = best[t + step];
                const bool other = p == p && (q != q || q > p || (q == p && at[t + step] < at[t]));
                if (other) {
                    best[t] = q;
                    at[t] = at[t + step];
                }
            }
            __syncthreads();
        }
        const int chosen = at[0];
        const ACC pivot = a[(i64)chosen * n + k];
        __syncthreads();
        if (chosen != k)
            for (int c = k + t; c < n; c += 256) {
                const ACC v = a[(i64)k * n + c];
                a[(i64)k * n + c] = a[(i64)chosen * n + c];
                a[(i64)chosen * n + c] = v;
            }
        result *= chosen == k ? pivot : -pivot;
        if (pivot == 0) break;
        __syncthreads();
        const i64 rest = (i64)(n - k - 1) * (n - k - 1);
        for (i64 i = t; i < rest; i += 256) {
            const i64 r = k + 1 + i / (n - k - 1), c = k + 1 + i % (n - k - 1);
            a[r * n + c] -= a[r * n + k] / pivot * a[(i64)k * n + c];
        }
    }
    if (t == 0) y[blockIdx.x] = narrow<T>(result);
}
