// gemm/epilogue.cuh: what happens to one accumulator between the sum over k and the store.
// Row vectors r0..r3 [M] TR, column vectors col0, col1 [N], c: the element (m, n) of one more operand.
//   ALPHA    v = alpha v
//   ROW_SCALE v = r0 v
//   EPI_LN   v = rstd (v - mean cs) + cv             r0 = rstd, r1 = mean, col0 = cs, col1 = cv
//   EPI_BIAS v = v + bias                            col1 = bias, 2: r0 = bias, one number a row
//   EPI_C    v = v + beta c                          ONNX Gemm's C, before the activation
//   EPI_EXP  v = exp(v - r0)                         r0 in units of log 2; 0 where r0 is inf
//   SAVE_Z   z = v                                   the pre-activation; with EPI_DX: (c - mean) rstd
//   ACT      v = act(v)
//   EPI_SCALE v = v scale                            col0 = scale, with a bias (of columns)
//   EPI_DACT v = v act'(c)                           c = z;  SAVE_ACT z = act(c)
//   EPI_DX   v = rstd (v - c1 - (c - mean) rstd c2)  r0 = rstd, r1 = mean, r2 = c1, r3 = c2, c = x
//   EPI_DW   v = gamma v + beta dbias               r0 = gamma, r1 = beta, col1 = dbias, c = W
//            dots = c v before that, c dbias         summed over n: dgamma, LayerNorm's dbeta
//   EPI_DW 2 the same, transposed                   r0 = dbias, col0 = gamma, col1 = beta; sums over m
//   EPI_RMS  EPI_DX and EPI_DW of RMSNorm            r1 (mean, or beta) and r2 are 0, not read
//   EPI_RES  v = v + c                               after everything
//   EPI_RES 2  v = v + (c - mean) rstd gamma         r0 = rstd, r1 = mean, col0 = gamma; beta is in the bias
//   ACCUMULATE y = y + v                             v rounded to TO first; an element has one owner
//   GATE     y = act(v[n]) v[n + 1]                  n even; column gate_column(n) of y [M, N / 2]; no c, no z
#pragma once
#include "common.cuh"
#ifndef ALPHA
#define ALPHA 0
#endif
#ifndef EPI_LN
#define EPI_LN 0
#endif
#ifndef EPI_BIAS
#define EPI_BIAS 0
#endif
#ifndef EPI_SCALE
#define EPI_SCALE 0
#endif
#ifndef EPI_C
#define EPI_C 0
#endif
#ifndef SAVE_Z
#define SAVE_Z 0
#endif
#ifndef EPI_DACT
#define EPI_DACT 0
#endif
#ifndef EPI_DX
#define EPI_DX 0
#endif
#ifndef EPI_DW
#define EPI_DW 0
#endif
#ifndef EPI_RMS
#define EPI_RMS 0
#endif
#ifndef EPI_RES
#define EPI_RES 0
#endif
#ifndef ACCUMULATE
#define ACCUMULATE 0
#endif
#ifndef GATE
#define GATE 0
#endif
#ifndef ROW_SCALE
#define ROW_SCALE 0
#endif
#ifndef EPI_EXP
#define EPI_EXP 0
#endif
#if EPI_DW == 2
#define EPI_ROWS 1
#define EPI_COLS 2
#elif ROW_SCALE || EPI_EXP
#define EPI_ROWS 1
#define EPI_COLS (EPI_SCALE ? 2 : EPI_BIAS == 1 ? 1 : 0)
#else
#define EPI_ROWS (EPI_DX ? 4 : EPI_LN || EPI_DW || EPI_RES == 2 ? 2 : EPI_BIAS == 2 ? 1 : 0)
#define EPI_COLS (EPI_LN || EPI_RES == 2 || EPI_SCALE ? 2 : EPI_BIAS == 1 || EPI_DW ? 1 : 0)
#endif
#define EPI_R1 (EPI_ROWS > 1 && !EPI_RMS)
#define EPI_R2 (EPI_ROWS > 2 && !EPI_RMS)
#define EPI_OPERAND (EPI_C || EPI_DACT || EPI_DX || EPI_DW || EPI_RES)

#ifndef TR
#define TR float
#endif

// The value that is stored to y.
template <class S> DEVICE TO stored(S v, const TO* y) {
    return ACCUMULATE ? narrow<TO>((S)((S)widen(narrow<TO>(v)) + (S)widen(*y))) : narrow<TO>(v);
}

struct Row { float r0, r1, r2, r3; };
// The numbers of a row, and of a column, that the epilogue reads from the kernel's parameters.
#define GEMM_ROW(m)                                                                                \
    Row{EPI_ROWS > 0 ? to_float(row0[m]) : 0.0f, EPI_R1 ? to_float(row1[m]) : 0.0f,                \
        EPI_R2 ? to_float(row2[m]) : 0.0f, EPI_ROWS > 3 ? to_float(row3[m]) : 0.0f}
#define GEMM_COL0(n) (EPI_COLS > 1 ? to_float(col0[n]) : 0.0f)
#define GEMM_COL1(n) (EPI_COLS > 0 ? to_float(col1[n]) : 0.0f)
struct Dots { float gamma, beta; };  // EPI_DW's sums of a row, or of a column

template <class S> struct Activate {
    DEVICE static S value(S v, float alpha) { return v; }
    DEVICE static S times_slope_at(S v, S z, float alpha) { return v; }
};
template <> struct Activate<float> {
    DEVICE static float value(float v, float alpha) { return act<TO>(v, alpha); }
    DEVICE static float times_slope_at(float v, float z, float alpha) { return times_slope<TO>(v, z, alpha); }
};

// Up to the activation; the activation of N elements, each hiding another's latency; what follows it.
template <class S> DEVICE S before_act(S v, const Row& row, S col0, S col1, S c, float alpha, float beta, S& z) {
    if (ALPHA) v *= alpha;
    if (ROW_SCALE) v *= row.r0;
    if (EPI_LN) v = row.r0 * (v - row.r1 * col0) + col1;
    if (EPI_BIAS) v += EPI_BIAS == 2 ? (S)row.r0 : col1;
    if (EPI_C) v += beta * c;
    if (EPI_EXP) v = ex2(fmaf((float)v, 1.4426950408889634f, -row.r0));
    if (SAVE_Z && !EPI_DX) z = v;
    return v;
}
template <int N> DEVICE void activate_all(float (&v)[N], const float (&c)[N], float act_alpha) {
    if (EPI_DACT) times_slope<TO>(v, c, act_alpha);
    else if (ACTIVE) activate<TO>(v, act_alpha);
}
// GELU where f16 is stored and nothing follows: of two at once, in half the instructions. It is that of x
// rounded to f16, as a model of separate operators has it, and errs by 1.2e-4 (of the norm) beside the
// rounding's own 2.0e-4; normal_tail's terms as f16 has them, from the last to the first.
template <class E> constexpr bool IS_F16 = false;
template <> constexpr bool IS_F16<f16> = true;
constexpr bool PACKED_ACT =
    ACT_NORMAL && IS_F16<TO> && !EPI_DACT && !EPI_DX && !EPI_DW && !EPI_RES && !EPI_SCALE && !GATE;
DEVICE u32 gelu_f16x2(u32 x) {
    u32 y;
    asm("{\n.reg .b32 a, e, top;\nabs.f16x2 a, %1;\nmin.f16x2 a, a, %2;\n"  // at most 16
        "fma.rn.f16x2 e, a, %3, %4;\nfma.rn.f16x2 e, e, a, %5;\nfma.rn.f16x2 e, e, a, %6;\n"
        "fma.rn.f16x2 e, e, a, %7;\nex2.approx.f16x2 e, e;\nneg.f16x2 a, a;\n"
        "max.NaN.f16x2 top, %1, %8;\nfma.rn.f16x2 %0, a, e, top;\n}"
        : "=r"(y)
        : "r"(x), "r"(0x4c004c00), "r"(0x1b4f1b4f), "r"(0xa987a987), "r"(0xb77eb77e), "r"(0xbc98bc98),
          "r"(0xbc00bc00), "r"(0));
    return y;
}
// GATE: the columns of b come in blocks of 16, eight gates and the eight that they let through, in pairs;
// the pairs' columns of y are 0 2 4 6 1 3 5 7, so that a lane's of two groups of 8 are neighbours there.
DEVICE int gate_column(int n) { return n / 16 * 8 + n % 8 + n / 8 % 2; }
template <class S> DEVICE S gated(S gate, S through, float act_alpha) {
    return Activate<S>::value(gate, act_alpha) * through;
}
template <class S> DEVICE S after_act(S v, const Row& row, S col0, S col1, S c, S& z, Dots& dots) {
    if (EPI_DX) {
        S xh = (c - row.r1) * row.r0;
        if (SAVE_Z) z = xh;
        v = row.r0 * (v - row.r2 - xh * row.r3);
    }
#if EPI_DW == 2
    dots.gamma += c * v;
    dots.beta += c * row.r0;
    v = col0 * v + (EPI_RMS ? 0 : col1 * row.r0);
#else
    if (EPI_DW) {
        dots.gamma += c * v;
        dots.beta += c * col1;
        v = row.r0 * v + row.r1 * col1;
    }
#endif
    if (EPI_SCALE) v *= col0;
    if (EPI_RES == 1) v += c;
    if (EPI_RES == 2) v += (c * row.r0 - row.r1 * row.r0) * col0;
    return v;
}

template <class S>
DEVICE S epilogue(S v, const Row& row, S col0, S col1, S c, float alpha, float beta,
                  float act_alpha, S& z, Dots& dots) {
    v = before_act(v, row, col0, col1, c, alpha, beta, z);
    if (ACTIVE && !EPI_DACT) v = Activate<S>::value(v, act_alpha);
    if (EPI_DACT) v = Activate<S>::times_slope_at(v, c, act_alpha);
    return after_act(v, row, col0, col1, c, z, dots);
}
