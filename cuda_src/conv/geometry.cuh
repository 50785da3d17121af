// geometry.cuh: which input element a convolution's (output position, filter tap) reads.
// Macros   : KD KH KW filter, SD SH SW stride, DD DH DW dilation, PD PH PW padding before;
//            TRANSPOSED: o = i * stride - pad + tap * dilation instead of i = o * stride - pad + ...
#pragma once
#include "common.cuh"
#define TAPS (KD * KH * KW)

// Input index along one axis, or -1 where the tap falls outside or between the inputs.
template <int STRIDE, int DILATION, int PAD> DEVICE int tap_input(int o, int tap, int size) {
#if TRANSPOSED
    const int at = o + PAD - tap * DILATION;
    return at >= 0 && at % STRIDE == 0 && at / STRIDE < size ? at / STRIDE : -1;
#else
    const int at = o * STRIDE - PAD + tap * DILATION;
    return (unsigned)at < (unsigned)size ? at : -1;
#endif
}
// Offset in a plane [d, h, w] that tap reads for output position (oz, oy, ox), or -1.
DEVICE int plane_offset(int tap, int oz, int oy, int ox, int d, int h, int w) {
    const int z = KD == 1 && SD == 1 && PD == 0 ? oz : tap_input<SD, DD, PD>(oz, tap / (KH * KW), d);
    const int y = KH == 1 && SH == 1 && PH == 0 ? oy : tap_input<SH, DH, PH>(oy, tap / KW % KH, h);
    const int x = KW == 1 && SW == 1 && PW == 0 ? ox : tap_input<SW, DW, PW>(ox, tap % KW, w);
    return (z | y | x) < 0 ? -1 : (z * h + y) * w + x;
}
// Weight of (filter m, channel c, tap) of group g: [groups * filters, channels, TAPS], transposed
// [groups * channels, filters, TAPS].
DEVICE i64 weight_index(int g, int m, int k, int filters, int channels) {
#if TRANSPOSED
    return ((i64)(g * channels + k / TAPS) * filters + m) * TAPS + k % TAPS;
#else
    return (i64)(g * filters + m) * channels * TAPS + k;
#endif
}
