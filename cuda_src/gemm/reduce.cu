// gemm/reduce.cu: y = epilogue(sum_s part[s]) after a GEMM whose k was split, the splits in order.
// Idea     : a block 1024 columns of a row, so that its part of the row's sums has one owner.
// Inputs   : partial [splits, M, N] f32; c [M,N] TO.   Outputs: y, z [M,N] TO; part [ceil(N / 1024), 2, M] f32 (EPI_DW).
// Macros   : TO, TV; the epilogue's (GATE: y [M,N/2], N a multiple of 16).   Launch: grid (M, ceil(N / 1024)), 256 threads.
// Bound    : bytes.
#include "gemm/epilogue.cuh"

extern "C" __global__ __launch_bounds__(256) void gemm_reduce(
    const float* partial, int splits, int M, int N, TO* y, TO* z, const TO* c, const TR* row0, const TR* row1,
    const TR* row2, const TR* row3, const TV* col0, const TV* col1, float alpha, float beta, float act_alpha,
    float* part) {
    after_previous_launch();
    __shared__ float scratch[8];
    int m = blockIdx.x;
    Row row = GEMM_ROW(m);
    Dots dots = {};
    int to = (blockIdx.y + 1) * 1024 < N ? (blockIdx.y + 1) * 1024 : N;
#if GATE
    UNROLLED for (int n = blockIdx.y * 1024 + threadIdx.x * 2; n < to; n += 512) {
        float2 v = {};
        float zz = 0;
#pragma unroll 8
        for (int s = 0; s < splits; s++) {
            float2 term = *(const float2*)(partial + ((i64)s * M + m) * N + n);
            v.x += term.x, v.y += term.y;
        }
        v.x = before_act(v.x, row, GEMM_COL0(n), GEMM_COL1(n), 0.0f, alpha, beta, zz);
        v.y = before_act(v.y, row, GEMM_COL0(n + 1), GEMM_COL1(n + 1), 0.0f, alpha, beta, zz);
        y[(i64)m * (N / 2) + gate_column(n)] = from_float<TO>(gated<float>(v.x, v.y, act_alpha));
    }
    return;
#endif
    UNROLLED for (int n = blockIdx.y * 1024 + threadIdx.x; n < to; n += 256) {
        i64 at = (i64)m * N + n;
        float v = 0, zz = 0;
#pragma unroll 8
        for (int s = 0; s < splits; s++) v += partial[(i64)s * M * N + at];
        v = epilogue<float>(v, row, GEMM_COL0(n), GEMM_COL1(n), EPI_OPERAND ? to_float(c[at]) : 0.0f, alpha, beta,
                            act_alpha, zz, dots);
        y[at] = stored<float>(v, y + at);
        if (SAVE_Z) z[at] = from_float<TO>(zz);
    }
    if (EPI_DW) {
        dots.gamma = block_sum<256>(dots.gamma, scratch);
        dots.beta = block_sum<256>(dots.beta, scratch);
        float* at = part + (i64)blockIdx.y * 2 * M + m;
        if (threadIdx.x == 0) at[0] = dots.gamma, at[M] = dots.beta;
    }
}
