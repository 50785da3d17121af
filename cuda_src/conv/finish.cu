// conv/finish.cu: y = act(sum of part[split] in order + bias by channel).
// Macros   : T ACC ACT, suffix.cuh's.   Bound: HBM, the parts once.
#include "common.cuh"
#include "conv/suffix.cuh"

extern "C" __global__ void __launch_bounds__(256)
    conv_finish(const ACC* part, const T* bias, const T* slope, const T* e1, const T* e2,
                const T* e3, TY* y, i64 size, int filters, int pixels, int splits, float alpha) {
    after_previous_launch();
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= size) return;
    ACC z = 0;
    for (int s = 0; s < splits; s++) z += part[s * size + i];
    if (bias) z += (ACC)widen(bias[i / pixels % filters]);
    const float a = slope_of(slope, i / pixels % filters, alpha);
    y[i] = finished(ACTIVE ? (ACC)act<T>((float)z, a) : z, e1, e2, e3, i);
}
