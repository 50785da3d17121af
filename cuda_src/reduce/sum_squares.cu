// reduce/sum_squares.cu: y = sum of x^2 over many tensors: the square of all gradients' norm.
// Idea     : the tensors stand in a table; a block takes CHUNK elements of one of them, found by its
//            first block, and writes one part; sum_squares_total adds the parts up.
// Inputs   : x_t [n] T, aligned to 16 bytes; first: the block where tensor t begins.
// Outputs  : part ACC [blocks]; y U.
// Macros   : T U ACC CHUNK; ROWS of the table (a power of two).
// Numerics : ACC a block, float64 over the parts; the order depends on the sizes alone.
// Bound    : HBM, bytes of x once.
#include "reduce/reducers.cuh"

struct Row { const T* x; i64 n; i64 first; };
struct Rows { Row at[ROWS]; };

extern "C" __global__ void __launch_bounds__(256) sum_squares(const __grid_constant__ Rows table, int rows, ACC* part) {
    after_previous_launch();
    __shared__ ACC scratch[8];
    int t = 0;
    for (int step = ROWS / 2; step; step /= 2)
        if (t + step < rows && table.at[t + step].first <= blockIdx.x) t += step;
    constexpr int VEC = 16 / sizeof(T);
    const i64 from = (blockIdx.x - table.at[t].first) * CHUNK;
    const int n = (int)min(table.at[t].n - from, (i64)CHUNK), whole = n / VEC * VEC;
    const T* x = table.at[t].x + from;
    ACC s = 0;
#pragma unroll 4
    for (int i = threadIdx.x * VEC; i < whole; i += 256 * VEC) {
        const Vec<T, VEC> v = load<VEC>(x + i);
        UNROLLED for (int j = 0; j < VEC; j++) s += (ACC)widen(v.at[j]) * (ACC)widen(v.at[j]);
    }
    if (whole + (int)threadIdx.x < n) {
        const ACC v = widen(x[whole + threadIdx.x]);
        s += v * v;
    }
    s = block_sum<256>(s, scratch);
    if (threadIdx.x == 0) part[blockIdx.x] = s;
}

extern "C" __global__ void __launch_bounds__(1024) sum_squares_total(const ACC* part, i64 parts, U* y) {
    after_previous_launch();
    __shared__ double scratch[32];
    double s = 0;
#pragma unroll 4
    for (i64 i = threadIdx.x; i < parts; i += 1024) s += (double)part[i];
    s = block_sum<1024>(s, scratch);
    if (threadIdx.x == 0) *y = Round<U>::of(s);
}
