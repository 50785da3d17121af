// im2col.cuh: a product whose a is gathered from channels-last images: IM2COL, with the convolution's window
// KW, SH SW (steps), DH DW (dilation), PH PW (padding before). Row m of a is a pixel of the result
// [oh, ow] of an image; a step of k is 64 channels of a tap, which has `blocks` of them; b is
// [taps, N, channels].
#pragma once
#include "sm90.cuh"
#ifdef IM2COL
#define IM2COL_PARAMS , int oh, int ow, int blocks
#define PIXELS_OF_Y oh, ow

struct Pixel { int x, y, image; };
// Where the window of row m begins.
DEVICE Pixel first_pixel(int m, int oh, int ow) {
    return {m % ow * SW - PW, m / ow % oh * SH - PH, m / (oh * ow)};
}
// 64 channels from c on of the rows' pixels under a tap; of several CTAs where `sharers` are.
DEVICE void load_pixels(u32 to, const TensorMap& map, u32 bar, int c, const Pixel& at, int tap,
                        u16 sharers = 0) {
    const u16 dx = tap % KW * DW, dy = tap / KW * DH;
    if (sharers) tma_load_im2col_multicast(to, map, bar, c, at.x, at.y, at.image, dx, dy, sharers);
    else tma_load_im2col(to, map, bar, c, at.x, at.y, at.image, dx, dy);
}
#else
#define IM2COL 0
#define IM2COL_PARAMS
#define PIXELS_OF_Y 0, 0
#endif
// GAPS: y's pixels stand apart, as of one phase of a transposed convolution's stride.
#ifndef GAPS
#define GAPS 0
#endif
// Rows of a product from m on, which are pixels, with so many columns from n on.
DEVICE void store_pixels(const TensorMap& map, u32 from, int n, int m, int oh, int ow) {
    if (GAPS) tma_store_im2col(map, from, n, m % ow, m / ow % oh, m / (oh * ow));
}
