// regions/roi_align.cu: y[r, c, p, q] = the mean (or maximum) of samples of x[batch[r], c] in bin (p, q)
// of region r (ONNX RoiAlign; Mask R-CNN, https://arxiv.org/abs/1703.06870).
// Idea     : a thread an output element; its samples stand on a regular grid in the bin, and each is
//            interpolated between four pixels.
// Inputs   : x T [batch, channels, h, w]; rois T [count, 4] as x1 y1 x2 y2; index I [count].
// Output   : y T [count, channels, rows, columns].
// Macros   : T I ACC, MAXIMUM (0 mean, 1 maximum of the samples' largest weighted pixel, as the
//            standard's operator has it), HALF_PIXEL (0, 1).
// Numerics : sums in ACC in the order of the samples. A region of a batch that does not exist is 0, one
//            that is not finite NaN. A sample outside of the image is its first pixel times 0, and a
//            maximum is std::max, as in onnxruntime: NaN and infinities differ otherwise.
// Bound    : L2, four pixels a sample.
#include "common.cuh"

static DEVICE ACC larger(ACC a, ACC b) { return a < b ? b : a; }

extern "C" __global__ void __launch_bounds__(128, 1)
    roi_align(const T* x, const T* rois, const I* index, T* y, i64 size, i64 batch, int channels, int h,
              int w, int rows, int columns, int samples, float spatial_scale) {
    after_previous_launch();
    const i64 i = (i64)blockIdx.x * 128 + threadIdx.x;
    if (i >= size) return;
    const int q = (int)(i % columns), p = (int)(i / columns % rows);
    const i64 plane = i / columns / rows, r = plane / channels, c = plane % channels;
    const i64 image = (i64)index[r];
    const ACC shift = HALF_PIXEL ? (ACC)0.5 : (ACC)0, scale = (ACC)spatial_scale;
    ACC edge[4], result = 0;
    UNROLLED for (int k = 0; k < 4; k++) {
        edge[k] = (ACC)widen(rois[r * 4 + k]) * scale - shift;
        result += 0 * edge[k];
    }
    if (image < 0 || image >= batch || result != result) {
        y[i] = narrow<T>(result);
        return;
    }
    ACC width = edge[2] - edge[0], height = edge[3] - edge[1];
    if (!HALF_PIXEL) {
        width = fmax(width, (ACC)1);
        height = fmax(height, (ACC)1);
    }
    const ACC step_y = height / (ACC)rows, step_x = width / (ACC)columns;
    const int grid_y = samples > 0 ? samples : (int)ceil(step_y);
    const int grid_x = samples > 0 ? samples : (int)ceil(step_x);
    const T* pixels = x + (image * channels + c) * h * w;
    bool first = true;
    for (int a = 0; a < grid_y; a++)
        for (int b = 0; b < grid_x; b++) {
            ACC v = edge[1] + (ACC)p * step_y + ((ACC)a + (ACC)0.5) * step_y / (ACC)grid_y;
            ACC u = edge[0] + (ACC)q * step_x + ((ACC)b + (ACC)0.5) * step_x / (ACC)grid_x;
            ACC part[4];
            if (v >= -1 && v <= (ACC)h && u >= -1 && u <= (ACC)w) {
                v = fmax(v, (ACC)0);
                u = fmax(u, (ACC)0);
                int top = (int)v, left = (int)u;
                if (top >= h - 1) v = (ACC)(top = h - 1);
                if (left >= w - 1) u = (ACC)(left = w - 1);
                const int bottom = min(top + 1, h - 1), right = min(left + 1, w - 1);
                const ACC dy = v - (ACC)top, dx = u - (ACC)left;
                part[0] = (1 - dy) * (1 - dx) * (ACC)widen(pixels[(i64)top * w + left]);
                part[1] = (1 - dy) * dx * (ACC)widen(pixels[(i64)top * w + right]);
                part[2] = dy * (1 - dx) * (ACC)widen(pixels[(i64)bottom * w + left]);
                part[3] = dy * dx * (ACC)widen(pixels[(i64)bottom * w + right]);
            } else {
                part[0] = part[1] = part[2] = part[3] = 0 * (ACC)widen(pixels[0]);
            }
            if (MAXIMUM) {
                const ACC top = larger(larger(larger(part[0], part[1]), part[2]), part[3]);
                result = first ? top : larger(result, top);
                first = false;
            } else {
                result += part[0] + part[1] + part[2] + part[3];
            }
        }
    if (!MAXIMUM) result /= (ACC)max(grid_y * grid_x, 1);
    y[i] = narrow<T>(result);
}
