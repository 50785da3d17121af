// im2col.cuh: a product whose a is gathered from channels-last images: IM2COL, with the convolution's window
// KW, SH SW (steps), DH DW (dilation), PH PW (padding before). Row m of a is a pixel of the result
// [oh, ow] of an image; a step of k is 64 channels of a tap, which has `blocks` of them; b is
// [taps, N, channels]. DEEP: volumes of a third axis, with KH, SD, DD and PD too, and a result [od, oh, ow].
#pragma once
#include "sm90.cuh"
#if defined(IM2COL) && defined(DEEP)
#define PIXEL_SIZES int od, int oh, int ow
#define IM2COL_PARAMS , PIXEL_SIZES, int blocks
#define PIXELS_OF_Y od, oh, ow

struct Pixel { int x, y, z, image; };
// Where the window of row m begins.
DEVICE Pixel first_pixel(int m, int od, int oh, int ow) {
    const int plane = m / (oh * ow);
    return {m % ow * SW - PW, m / ow % oh * SH - PH, plane % od * SD - PD, plane / od};
}
// 64 channels from c on of the rows' pixels under a tap; of several CTAs where `sharers` are.
DEVICE void load_pixels(u32 to, const TensorMap& map, u32 bar, int c, const Pixel& at, int tap, u16 sharers = 0) {
    const u16 dx = tap % KW * DW, dy = tap / KW % KH * DH, dz = tap / (KW * KH) * DD;
    if (sharers)
        asm volatile(
            "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
            ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10}, %11;" ::"r"(to),
            "l"(&map), "r"(bar), "r"(c), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.image), "h"(dx), "h"(dy),
            "h"(dz), "h"(sharers)
            : "memory");
    else
        asm volatile(
            "cp.async.bulk.tensor.5d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};" ::"r"(to),
            "l"(&map), "r"(bar), "r"(c), "r"(at.x), "r"(at.y), "r"(at.z), "r"(at.image), "h"(dx), "h"(dy),
            "h"(dz)
            : "memory");
}
#elif defined(IM2COL)
#define PIXEL_SIZES int oh, int ow
#define IM2COL_PARAMS , PIXEL_SIZES, int blocks
#define PIXELS_OF_Y oh, ow

struct Pixel { int x, y, image; };
// Where the window of row m begins.
DEVICE Pixel first_pixel(int m, int oh, int ow) {
    return {m % ow * SW - PW, m / ow % oh * SH - PH, m / (oh * ow)};
}
// 64 channels from c on of the rows' pixels under a tap; of several CTAs where `sharers` are.
DEVICE void load_pixels(u32 to, const TensorMap& map, u32 bar, int c, const Pixel& at, int tap, u16 sharers = 0) {
    const u16 dx = tap % KW * DW, dy = tap / KW * DH;
    if (sharers) tma_load_im2col_multicast(to, map, bar, c, at.x, at.y, at.image, dx, dy, sharers);
    else tma_load_im2col(to, map, bar, c, at.x, at.y, at.image, dx, dy);
}
#else
#define IM2COL 0
#define IM2COL_PARAMS
#define PIXELS_OF_Y 0, 0
enum { blocks = 1 };  // what no product reads that gathers nothing
struct Pixel {};
DEVICE Pixel first_pixel(int, int, int) { return {}; }
DEVICE void load_pixels(u32, const TensorMap&, u32, int, const Pixel&, int, u16 = 0) {}
#endif
// GAPS: y's pixels stand apart, as of one phase of a transposed convolution's stride.
#ifndef GAPS
#define GAPS 0
#endif
#if IM2COL && defined(DEEP)
static_assert(!GAPS, "pixels apart are those of images");
DEVICE void store_pixels(const TensorMap&, u32, int, int, int, int, int) {}
#else
// Rows of a product from m on, which are pixels, with so many columns from n on.
DEVICE void store_pixels(const TensorMap& map, u32 from, int n, int m, int oh, int ow) {
    if (GAPS) tma_store_im2col(map, from, n, m % ow, m / ow % oh, m / (oh * ow));
}
#endif
