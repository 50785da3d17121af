// random/philox.cu: uniform, normal and Bernoulli numbers from Philox4x32-10.
// Idea     : the counter is (block of four elements, draw, stream), the key the seed: each number is
//            a function of these alone, whatever the launch. state[0] is the seed and state[1] the
//            draw, counted up once a run, in device memory.
// Macros   : T output type; KIND 0 uniform in [a, b), 1 normal of mean a and deviation b,
//            2 Bernoulli (x[i] is the probability), 3 dropout scale: a where kept, else 0.
//            FIXED: the seed is the argument and the draw 0.
// Bound    : HBM, y written once.
#include "common.cuh"
#ifndef T
#define T float
#endif
#ifndef KIND
#define KIND 0
#endif
#ifndef X
#define X float
#endif

DEVICE uint4 philox(uint4 c, u32 k0, u32 k1) {
    UNROLLED for (int round = 0; round < 10; round++) {
        const u64 a = (u64)0xD2511F53u * c.x, b = (u64)0xCD9E8D57u * c.z;
        c = make_uint4((u32)(b >> 32) ^ c.y ^ k0, (u32)b, (u32)(a >> 32) ^ c.w ^ k1, (u32)a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}
// In [0, 1) with 24 bits, exact in float.
DEVICE float unit(u32 x) { return (x >> 8) * 5.9604644775390625e-08f; }

extern "C" __global__ void __launch_bounds__(256) philox_fill(
    const u64* state, const X* x, T* y, i64 n, i64 fixed_seed, i64 stream, float a, float b) {
    after_previous_launch();
    const i64 block = (i64)blockIdx.x * 256 + threadIdx.x;
    if (block * 4 >= n) return;
    const u64 seed = FIXED ? (u64)fixed_seed : state[0], draw = FIXED ? 0 : state[1];
    const uint4 r = philox(make_uint4((u32)block, (u32)(block >> 32), (u32)draw, (u32)stream),
                           (u32)seed, (u32)(seed >> 32));
    const u32 bits[4] = {r.x, r.y, r.z, r.w};
    UNROLLED for (int j = 0; j < 4; j++) {
        const i64 i = block * 4 + j;
        if (i >= n) return;
        const float u = unit(bits[j]);
        float v;
        if (KIND == 0) v = a + (b - a) * u;
        if (KIND == 1) {  // Box-Muller on the pair; 1 - u is never 0
            const float radius = sqrtf(-2.0f * logf(1.0f - unit(bits[j & 2])));
            const float angle = 6.283185307179586f * unit(bits[j | 1]);
            v = a + b * radius * (j & 1 ? sinf(angle) : cosf(angle));
        }
        if (KIND == 2) v = u < (float)widen(x[i]) ? 1.0f : 0.0f;
        if (KIND == 3) v = u >= b ? a : 0.0f;
        y[i] = narrow<T>(v);
    }
}
