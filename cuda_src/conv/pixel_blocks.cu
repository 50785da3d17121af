// conv/pixel_blocks.cu: NCHW images as channels-last blocks of SH x SW pixels in 16 bytes, of codes or quantized here.
// Idea     : a thread makes one block, neighbours in a row: they read neighbours, and store 16 bytes each.
// Inputs   : x T [images, CHANNELS, rows SH, columns SW] by the strides sn, sc, sy, sx; QUANTIZED: its scale, its
//            inverse, the zero point and both ends of the codes, as of pointwise/math.cuh's code_bits.
// Outputs  : y [images, tall, wide, 16 bytes]: of block [top + r, left + c] the codes [SH, SW, CHANNELS] of x's pixels
//            from [r SH, c SW] on, and `border` behind them and in the blocks outside of x.
// Macros   : T, CHANNELS, SH, SW, QUANTIZED.   Launch: a thread a block of y.
// Bound    : HBM, x and y once.
#include "pointwise/math.cuh"

extern "C" __global__ void __launch_bounds__(256)
    pixel_blocks(const T* x, u8* y, i64 blocks, int rows, int columns, int tall, int wide, int top,
                 int left, i64 sn, i64 sc, i64 sy, i64 sx, u32 border, float scale, float inverse, float zero, float low, float high) {
    after_previous_launch();
    const i64 block = (i64)blockIdx.x * 256 + threadIdx.x;
    if (block >= blocks) return;
    const i64 line = block / wide, image = line / tall;
    const int c = (int)(block - line * wide) - left, r = (int)(line - image * tall) - top;
    Vec<u8, 16> out;
    UNROLLED for (int i = 0; i < 16; i++) out.at[i] = (u8)border;
    if ((unsigned)c < (unsigned)columns && (unsigned)r < (unsigned)rows) {
        const T* from = x + image * sn + (i64)r * SH * sy + (i64)c * SW * sx;
        UNROLLED for (int i = 0; i < SH * SW * CHANNELS; i++) {
            const T v = from[i % CHANNELS * sc + i / CHANNELS / SW * sy + i / CHANNELS % SW * sx];
#if QUANTIZED
            out.at[i] = (u8)code_bits(to_float(v), scale, inverse, zero, low, high);
#else
            out.at[i] = (u8)v;
#endif
        }
    }
    store<16>(y + block * 16, out);
}
