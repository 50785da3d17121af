// pool/lrn.cu: y = x / (bias + alpha / window * sum of x^2 over `window` neighbouring channels)^beta.
// Inputs   : x, y [n, channels, inner] T.   Macros: T ACC.   Bound: L1, window reads an output.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    lrn(const T* x, T* y, i64 size, int channels, i64 inner, int window, float alpha, float beta, float bias) {
    after_previous_launch();
    const i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
    if (i >= size) return;
    const int c = i / inner % channels;
    ACC s = 0;
    for (int k = max(0, c - (window - 1) / 2); k <= min(channels - 1, c + window / 2); k++) {
        const ACC v = widen(x[i + (k - c) * inner]);
        s += v * v;
    }
    y[i] = narrow<T>((ACC)widen(x[i]) / pow((ACC)bias + (ACC)alpha / window * s, (ACC)beta));
}
