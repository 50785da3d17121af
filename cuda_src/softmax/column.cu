// softmax/column.cu: y = softmax(x) or log_softmax(x) over the middle axis of x[outer, length, inner].
// Idea     : BX neighbouring columns by BY rows a block; a running (maximum, sum) a thread, merged
//            over BY in shared memory, then a second read (mostly from L2) writes y.
// Inputs   : x, y [outer, length, inner] T.
// Macros   : T ACC LOG; BX, BY powers of two.
// Numerics : as softmax/row.cu.
// Bound    : HBM, two reads and a write.
#include "reduce/team.cuh"

extern "C" __global__ void __launch_bounds__(BX* BY) softmax_column(const T* x, T* y, i64 length, i64 inner) {
    after_previous_launch();
    const int tx = threadIdx.x % BX, ty = threadIdx.x / BX;
    const i64 tiles = (inner + BX - 1) / BX, column = blockIdx.x % tiles * BX + tx;
    const i64 base = blockIdx.x / tiles * length * inner + column;
    const i64 rows = column < inner ? length : 0;
    ACC largest = -INFINITE, sum = 0;
    for (i64 r = ty; r < rows; r += BY) {
        const ACC at = widen(x[base + r * inner]);
        if (at > largest) sum *= fast_exp(largest - at), largest = at;
        sum += at == -INFINITE ? (ACC)0 : fast_exp(at - largest);  // of a NaN: NaN
    }
    __shared__ ACC top[BY][BX], total[BY][BX];
    top[ty][tx] = largest, total[ty][tx] = sum;
    for (int step = BY / 2; step; step /= 2) {
        __syncthreads();
        if (ty < step) {
            const ACC a = top[ty][tx], b = top[ty + step][tx], m = a > b ? a : b;
            const ACC p = total[ty][tx], q = total[ty + step][tx];
            top[ty][tx] = m;
            total[ty][tx] = (p == 0 ? p : p * fast_exp(a - m)) + (q == 0 ? q : q * fast_exp(b - m));
        }
    }
    __syncthreads();
    const ACC m = top[0][tx], scale = LOG ? m + log(total[0][tx]) : 1 / total[0][tx];
    for (i64 r = ty; r < rows; r += BY) {
        const ACC at = widen(x[base + r * inner]);
        y[base + r * inner] = narrow<T>(LOG ? at - scale : fast_exp(at - m) * scale);
    }
}
