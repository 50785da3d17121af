// regions/nms.cu: the boxes that greedy suppression keeps, of each batch and class (ONNX
// NonMaxSuppression).
// Idea     : a block a (batch, class). Each round its threads find the best box left, keep it and drop
//            those that overlap it; no sort is needed, since few boxes are kept.
// Inputs   : boxes float [batch, count, 4]; scores float [batch, classes, count]; most i64, iou float and
//            least float: one number each, or null (0, 0, none).
// Scratch  : left bool [batch, classes, count].
// Outputs  : chosen i64 [batch, classes, count], best first, the rest undefined; found i64 [batch, classes].
// Macros   : CENTER (0: y1 x1 y2 x2 in either order, 1: x y of the centre, width, height).
// Numerics : of equal scores the first box is better. A score that is no number is never chosen.
// Bound    : count / 256 steps and two barriers a kept box.
#include "common.cuh"

struct Box { float y1, x1, y2, x2; };
DEVICE Box box_at(const float* boxes, int i) {
    const float* b = boxes + (i64)i * 4;
    Box r;
    if (CENTER) {
        r.x1 = b[0] - b[2] / 2;
        r.x2 = b[0] + b[2] / 2;
        r.y1 = b[1] - b[3] / 2;
        r.y2 = b[1] + b[3] / 2;
    } else {
        r.y1 = fminf(b[0], b[2]);
        r.y2 = fmaxf(b[0], b[2]);
        r.x1 = fminf(b[1], b[3]);
        r.x2 = fmaxf(b[1], b[3]);
    }
    return r;
}
DEVICE bool overlaps(const Box& a, const Box& b, float limit) {
    const float w = fminf(a.x2, b.x2) - fmaxf(a.x1, b.x1);
    const float h = fminf(a.y2, b.y2) - fmaxf(a.y1, b.y1);
    if (!(w > 0) || !(h > 0)) return false;
    const float p = (a.x2 - a.x1) * (a.y2 - a.y1), q = (b.x2 - b.x1) * (b.y2 - b.y1);
    const float both = w * h, either = p + q - both;
    return p > 0 && q > 0 && either > 0 && both / either > limit;
}

extern "C" __global__ void __launch_bounds__(256, 1)
    nms(const float* boxes, const float* scores, const i64* most, const float* iou, const float* least,
        bool* left, i64* chosen, i64* found, int classes, int count) {
    after_previous_launch();
    __shared__ float best[256];
    __shared__ int at[256];
    const int t = threadIdx.x;
    const i64 row = blockIdx.x;
    const float* mine = boxes + row / classes * count * 4;
    const float* score = scores + row * count;
    bool* alive = left + row * count;
    const i64 limit = most ? *most : 0;
    const float most_overlap = iou ? *iou : 0.f;
    for (int i = t; i < count; i += 256) alive[i] = score[i] == score[i] && (!least || score[i] > *least);
    i64 kept = 0;
    while (kept < limit && kept < count) {
        __syncthreads();
        int place = -1;
        float top = 0;
        for (int i = t; i < count; i += 256)
            if (alive[i] && (place < 0 || score[i] > top)) {
                top = score[i];
                place = i;
            }
        best[t] = top;
        at[t] = place;
        __syncthreads();
        for (int step = 128; step; step >>= 1) {
            if (t < step) {
                const int other = at[t + step], own = at[t];
                const float v = best[t + step];
                if (other >= 0 && (own < 0 || v > best[t] || (v == best[t] && other < own))) {
                    best[t] = v;
                    at[t] = other;
                }
            }
            __syncthreads();
        }
        const int winner = at[0];
        if (winner < 0) break;
        const Box chosen_box = box_at(mine, winner);
        for (int i = t; i < count; i += 256)
            if (alive[i] && (i == winner || overlaps(chosen_box, box_at(mine, i), most_overlap))) alive[i] = false;
        if (t == 0) chosen[row * count + kept] = winner;
        kept++;
    }
    if (t == 0) found[row] = kept;
}
