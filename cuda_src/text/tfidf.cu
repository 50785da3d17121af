// text/tfidf.cu: how often each n-gram of a pool stands in each row (ONNX TfIdfVectorizer).
// Idea     : a warp a (row, column): its lanes try the places where the n-gram may start, at every
//            distance between its words.
// Inputs   : x X [rows, length]; pool i64 [words]; entry int [columns, 3]: the first word in the pool,
//            the length (0: no n-gram has this column), and how many distances count, of the column's
//            n-gram; weight float [columns] or null.
// Output   : y float [rows, columns].
// Macros   : X, MODE (0 TF, 1 IDF, 2 TFIDF).
// Numerics : counts are integers below 2^24.
// Bound    : length * distances comparisons a warp.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256, 1) tfidf(
    const X* x, const i64* pool, const int* entry, const float* weight, float* y, i64 size, int columns, i64 length) {
    after_previous_launch();
    const i64 i = ((i64)blockIdx.x * 256 + threadIdx.x) / 32;
    if (i >= size) return;
    const int lane = threadIdx.x % 32, column = (int)(i % columns);
    const int* gram = entry + column * 3;
    const int n = gram[1];
    const i64* words = pool + gram[0];
    const X* row = x + i / columns * length;
    int found = 0;
    for (int apart = 1; n && apart <= gram[2]; apart++)
        for (i64 start = lane; start + (i64)apart * (n - 1) < length; start += 32) {
            int k = 0;
            while (k < n && (i64)row[start + (i64)apart * k] == words[k]) k++;
            found += k == n;
        }
    found = warp_sum(found);
    if (lane) return;
    const float by = weight ? weight[column] : 1.f;
    y[i] = MODE == 0 ? (float)found : MODE == 1 ? (found ? by : 0.f) : (float)found * by;
}
