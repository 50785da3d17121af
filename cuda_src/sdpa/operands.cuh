// operands.cuh: what all attention kernels take: strided q, k, v, a broadcast additive mask, heads.
// Shapes   : q [B, H, S, D], k [B, H / group, T, D], v [B, H / group, T, DV], mask [B, H, S, T] by
//            strides (0 where broadcast), y and dy [B, H, S, DV] by strides too; rows contiguous.
//            lse, delta [B, H, S], gradients [B, H, S or T, D or DV].
// Macros   : T element, D, DV head sizes; MASK, CAUSAL (key j <= query i), GUARD (rows all -inf give 0).
#pragma once
#include "common.cuh"

struct Strides { i64 batch, head, row; };
struct Operands {
    const T *q, *k, *v, *mask;
    Strides qs, ks, vs;
    i64 mask_batch, mask_head, mask_row, mask_column;
    int heads, group, queries, keys;
    float scale;
};
// As kernel parameters (the host passes scalars, no structs), and gathered again inside.
#define OPERANDS                                                                                   \
    const T *q_, const T *k_, const T *v_, const T *mask_, i64 qb_, i64 qh_, i64 qr_, i64 kb_,     \
        i64 kh_, i64 kr_, i64 vb_, i64 vh_, i64 vr_, i64 mb_, i64 mh_, i64 mr_, i64 mc_,           \
        int heads_, int group_, int queries_, int keys_, float scale_
#define GATHER                                                                                     \
    const Operands o = {q_, k_, v_, mask_, {qb_, qh_, qr_}, {kb_, kh_, kr_}, {vb_, vh_, vr_},      \
                        mb_, mh_, mr_, mc_, heads_, group_, queries_, keys_, scale_};
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define LOG2E 1.4426950408889634f

// scale * dot + mask, -inf where the key is not there or later than the query.
template <class S> DEVICE S logit(const Operands& o, S dot, const T* mask, int query, int key) {
    S z = dot * (S)o.scale;
#if MASK
    if (key < o.keys) z += (S)widen(mask[key * o.mask_column]);
#endif
    return key >= o.keys || (CAUSAL && key > query) ? (S)NEGATIVE_INFINITY : z;
}
// The mask's row of a query (of the last one for those past it, whose results nobody sees).
DEVICE const T* mask_row(const Operands& o, int b, int h, int query) {
    return MASK ? o.mask + b * o.mask_batch + h * o.mask_head + min(query, o.queries - 1) * o.mask_row : o.mask;
}
// Largest finite-safe reference point of a row: exp(z - top) is 0, not NaN, for a row all -inf.
template <class S> DEVICE S safe(S top) { return top == (S)NEGATIVE_INFINITY ? (S)0 : top; }

// ---- softmax in powers of two; rows spread over quads of lanes, as products leave them ----
DEVICE float power2(float x) {  // exp2f without its care for denormals
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
// A mask's element in units of log 2; a finite one stays finite (no float16 leaves the range), NaN NaN.
template <class E> DEVICE float mask_power(float x);
template <> DEVICE float mask_power<f16>(float x) { return x * LOG2E; }
// rounded towards zero the product of a finite one is at most the largest number
template <> DEVICE float mask_power<bf16>(float x) { return __fmul_rz(x, LOG2E); }
