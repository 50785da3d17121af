// gemm/portable.cuh: the parameter list of the portable GEMMs and their guarded store.
// y[b, m, n] = epilogue(sum_k op(a)[b, m, k] op(b)[b, k, n]); batches are up to three dims, the
// strides of which (0: broadcast) are given for a, b and c; y and z are dense.
#pragma once
#include "gemm/epilogue.cuh"
#define GEMM_PARAMS                                                                                \
    const T *a, const T *b, TO *y, int M, int N, int K, i64 lda, i64 ldb, int nb1, int nb2, i64 a0,\
        i64 a1, i64 a2, i64 b0, i64 b1, i64 b2, const TO *c, i64 c0, i64 c1, i64 c2, i64 crow,     \
        i64 ccol, TO *z, const TR *row0, const TR *row1, const TR *row2, const TR *row3,           \
        const TV *col0, const TV *col1, float alpha, float beta, float act_alpha, float *part

// The batch's operands: advances a, b, c, y and z to matrix blockIdx.z.
#define GEMM_BATCH                                                                                 \
    {                                                                                              \
        int i2 = blockIdx.z % nb2, i1 = blockIdx.z / nb2 % nb1, i0 = blockIdx.z / nb2 / nb1;       \
        a += i0 * a0 + i1 * a1 + i2 * a2;                                                          \
        b += i0 * b0 + i1 * b1 + i2 * b2;                                                          \
        if (EPI_OPERAND) c += i0 * c0 + i1 * c1 + i2 * c2;                                         \
        y += (i64)blockIdx.z * M * (GATE ? N / 2 : N);                                             \
        if (SAVE_Z) z += (i64)blockIdx.z * M * N;                                                  \
    }

// Finish accumulator v of element (m, n), which lies inside.
#define GEMM_STORE(S, v, m, n, row, dots)                                                          \
    {                                                                                              \
        S z_ = 0, c_ = EPI_OPERAND ? (S)widen(c[(m)*crow + (n)*ccol]) : (S)0;                      \
        S r_ = epilogue<S>(v, row, EPI_COLS > 1 ? (S)widen(col0[n]) : (S)0,                        \
                           EPI_COLS > 0 ? (S)widen(col1[n]) : (S)0, c_, alpha, beta, act_alpha,    \
                           z_, dots);                                                              \
        if (SAVE_Z) z[(i64)(m)*N + (n)] = narrow<TO>(z_);                                          \
        y[(i64)(m)*N + (n)] = stored<S>(r_, y + (i64)(m)*N + (n));                                 \
    }

// GATE: finish the accumulators of a gate in column n and of what it lets through in n + 1.
#define GEMM_STORE_GATED(S, gate, through, m, n, row)                                              \
    {                                                                                              \
        S z_ = 0, v_[2] = {gate, through};                                                         \
        UNROLLED for (int e_ = 0; e_ < 2; e_++) v_[e_] =                                  \
            before_act<S>(v_[e_], row, EPI_COLS > 1 ? (S)widen(col0[(n) + e_]) : (S)0,             \
                          EPI_COLS > 0 ? (S)widen(col1[(n) + e_]) : (S)0, (S)0, alpha, beta, z_);  \
        y[(i64)(m) * (N / 2) + gate_column(n)] = narrow<TO>(gated<S>(v_[0], v_[1], act_alpha));    \
    }

#if EPI_DW
// Reduce row m's sums over LANES and write them to plane `at` of part [planes, 2, M].
template <int LANES> DEVICE void store_dots(Dots dots, float *part, int at, int m, int M) {
    u32 lane = threadIdx.x % 32, mates = (LANES < 32 ? (1u << LANES) - 1 : ~0u) << (lane & ~(LANES - 1));
    UNROLLED for (int step = LANES / 2; step; step >>= 1) {
        dots.gamma += __shfl_xor_sync(mates, dots.gamma, step);
        dots.beta += __shfl_xor_sync(mates, dots.beta, step);
    }
    if (lane & (LANES - 1)) return;
    part[(i64)at * 2 * M + m] = dots.gamma;
    part[((i64)at * 2 + 1) * M + m] = dots.beta;
}
#endif
