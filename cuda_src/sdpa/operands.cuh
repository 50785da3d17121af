// operands.cuh: what all attention kernels take: strided q, k, v, heads, up to two masks of the logits.
// Shapes   : q [B, H, S, D], k [B, H / group, T, D], v [B, H / group, T, DV], masks [B, H, S, T] by
//            strides (0 where broadcast), y and dy [B, H, S, DV] by strides too; rows contiguous.
//            lse [B, H, S, 2]: a row's largest logit and the log of the sum of exp(z - it);
//            delta [B, H, S], gradients [B, H, S or T, D or DV].
// Macros   : T element, D, DV head sizes; MASK, MASK2 (not 0: there is one), KEEP, KEEP2 (it does not
//            add: where it is 0, the logit is `fill`), applied in this order; SOFTCAP (before them
//            z = softcap tanh(z)); FLOOR (T is f16: an added -65504 stands for `floor`, a number beyond
//            its range); CAUSAL (key j <= query i); GUARD 1: rows all -inf give 0;
//            2: weights that are NaN are 0. PACKED (B is 1, and S = T rows are sequences one behind the
//            other, by offsets [grid z]; strides of batch are 0, but those of masks [sequences, H, S, S]. Block z has one each, and the last
//            what is behind them: rows without keys, which give 0, or where a block's rows are keys
//            (KEYS_FIRST), without queries).
#pragma once
#include "common.cuh"

struct Strides { i64 batch, head, row; };
struct Mask { const T* at; i64 batch, head, row, column; };
struct Operands {
    const T *q, *k, *v;
    Strides qs, ks, vs;
    Mask mask, mask2;
    int heads, group, queries, keys;
    float scale, softcap, floor;
    double fill, fill2;
#if PACKED
    int begin, rows;  // the sequence's first row, and all rows
#endif
};
#if PACKED
#define SEQUENCES , const int *offsets_, int rows_
#define BEGIN o.begin
// Strides of a gradient, which may be a part of one tensor, and where a head's rows are, with their stride.
#define PARTS(x) , i64 x##b, i64 x##h, i64 x##r
#define PART(x, head, out, width) x + head * x##h + o.begin * x##r, x##r
#else
#define SEQUENCES
#define BEGIN 0
#define PARTS(x)
#define PART(x, head, out, width) x + out * width, width
#endif
// As kernel parameters (the host passes scalars, no structs), and gathered again inside.
#define OPERANDS                                                                                   \
    const T *q_, const T *k_, const T *v_, const T *mask_, const T *mask2_, i64 qb_, i64 qh_,      \
        i64 qr_, i64 kb_, i64 kh_, i64 kr_, i64 vb_, i64 vh_, i64 vr_, i64 mb_, i64 mh_, i64 mr_,  \
        i64 mc_, i64 nb_, i64 nh_, i64 nr_, i64 nc_, int heads_, int group_, int queries_,         \
        int keys_, float scale_, float softcap_, float floor_, double fill_, double fill2_ SEQUENCES
#if PACKED
// The same of a block's own sequence.
DEVICE Operands of_sequence(Operands o, const int* offsets, int rows, bool keys_first) {
    const bool behind = blockIdx.z + 1 == gridDim.z;
    o.begin = offsets[blockIdx.z], o.rows = rows;
    o.q += (i64)o.begin * o.qs.row, o.k += (i64)o.begin * o.ks.row, o.v += (i64)o.begin * o.vs.row;
    o.queries = o.keys = (behind ? rows : offsets[blockIdx.z + 1]) - o.begin;
    if (behind) (keys_first ? o.queries : o.keys) = 0;
    return o;
}
// The first `rows` of a warp's 16 rows, after which another sequence begins, from swizzled shared memory: a row
// there has 64 columns, and the next 64 columns of all are 64 rows further.
template <int WIDTH> DEVICE void store_rows(T* to, i64 stride, const u8* from, int rows) {
    for (int i = threadIdx.x % 32; i < 16 * (WIDTH / 8); i += 32) {
        const int r = i / (WIDTH / 8), c = i % (WIDTH / 8);
        if (r < rows) *(uint4*)(to + r * stride + c * 8) = *(const uint4*)(from + (c / 8 * 64 + r) * 128 + ((c % 8 ^ r % 8) << 4));
    }
}
#endif
#define GATHER_ALL                                                                                 \
    {q_, k_, v_, {qb_, qh_, qr_}, {kb_, kh_, kr_}, {vb_, vh_, vr_}, {mask_, mb_, mh_, mr_, mc_},   \
     {mask2_, nb_, nh_, nr_, nc_}, heads_, group_, queries_, keys_, scale_, softcap_, floor_,      \
     fill_, fill2_}
#if PACKED
#define GATHER_FOR(keys_first) const Operands o = of_sequence(GATHER_ALL, offsets_, rows_, keys_first);
#else
#define GATHER_FOR(keys_first) const Operands o = GATHER_ALL;
#endif
#define GATHER GATHER_FOR(false)
#define KEYS_FIRST GATHER_FOR(true)
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define NOT_A_NUMBER __int_as_float(0x7fc00000)
#define LOG2E 1.4426950408889634f
// Whether logits are more than products: then they are kept as they are, else in units of log 2.
#define NATURAL (MASK || SOFTCAP)

// Where the rows of a head begin in a tensor [B, heads, S, .]; a sequence's, with PACKED.
DEVICE i64 first_row(const Operands& o, int b, int h, int heads, int rows) {
#if PACKED
    return (i64)h * o.rows + o.begin;
#else
    return ((i64)b * heads + h) * rows;
#endif
}
// tanh with an absolute error of 1e-7, in half the instructions.
DEVICE float squash(float x) { return 1 - __fdividef(2.0f, __expf(2 * x) + 1); }
DEVICE double squash(double x) { return tanh(x); }
// What an added element of a mask stands for.
template <class S> DEVICE S meant(S m, float floor) { return FLOOR && m == (S)-65504 ? (S)floor : m; }
// A logit from a product: scaled, under the tanh, and through the masks' elements m and m2.
template <class S> DEVICE S logit(const Operands& o, S dot, S m, S m2) {
    S z = dot * (S)o.scale;
    if (SOFTCAP) z = (S)o.softcap * squash(z);
    if (MASK) z = KEEP ? (m != 0 ? z : (S)o.fill) : z + meant(m, o.floor);
    if (MASK2) z = KEEP2 ? (m2 != 0 ? z : (S)o.fill2) : z + meant(m2, o.floor);
    return z;
}
// d logit / d (scale dot): what a fill replaced has none.
template <class S> DEVICE S slope(const Operands& o, S dot, S m, S m2) {
    if ((MASK && KEEP && m == 0) || (MASK2 && KEEP2 && m2 == 0)) return 0;
    if (!SOFTCAP) return 1;
    const S t = squash(dot * (S)o.scale);
    return (S)o.softcap * (1 - t * t);
}
// Whether query and key meet.
DEVICE bool meet(const Operands& o, int query, int key) { return key < o.keys && !(CAUSAL && key > query); }
// The mask's row of a query (of the last one for those past it, whose results nobody sees).
DEVICE const T* mask_row(const Operands& o, const Mask& mask, int b, int h, int query) {
    return mask.at + b * mask.batch + h * mask.head + min(query, o.queries - 1) * mask.row;
}
// Largest finite-safe reference point of a row: exp(z - top) is 0, not NaN, for a row all -inf.
template <class S> DEVICE S safe(S top) { return top == (S)NEGATIVE_INFINITY ? (S)0 : top; }
// A row's lse from its largest logit and sum; a row without weights has no sum, one with a NaN no logit.
template <class S> DEVICE float2 row_lse(S top, S sum) {
    return make_float2(sum == sum ? (float)top : NOT_A_NUMBER, sum > 0 ? (float)log(sum) : NOT_A_NUMBER);
}
// Probability of a logit under its row's lse (top +inf: no such row); with a GUARD a row without has 0.
template <class S> DEVICE S probability(S z, S top, S spread) {
    return GUARD && spread != spread ? (S)0 : exp(z - top - spread);
}
// GUARD 2 sets all weights of a row to 0; 0 times an infinity or NaN in a column of v is NaN.
DEVICE bool is_dead(float sum) { return GUARD == 2 && !(sum > 0); }
DEVICE bool is_dead(double sum) { return GUARD == 2 && !(sum > 0); }
DEVICE float nothing(const T* v, i64 stride, int keys) {
    float s = 0;
    for (int j = 0; j < keys; j++) s += (float)(widen(v[j * stride]) * 0);
    return s;
}

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
