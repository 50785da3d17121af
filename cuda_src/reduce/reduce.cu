// reduce/reduce.cu: y[outer, inner] = reduce over r of x[outer, r, inner], one pass of a Reduce*.
// Idea     : any set of axes is a sequence of such passes, innermost reduced axis first; a pass that
//            would leave the chip idle is split into chunks of r and becomes two passes over States.
//            reduce_row (inner = 1): TEAM threads a row, 16-byte loads. reduce_column: BX threads of
//            VEC columns by BY rows.
// Inputs   : x dense, aligned to VEC elements; T, or State where FROM_STATE (an earlier pass's). PAIR: the
//            elements are x times x2, in ACC.
// Outputs  : y [outer, splits, inner] State where TO_STATE, else U; y2 the variance of Moments.
// Macros   : T U ACC REDUCER FROM_STATE TO_STATE VEC; TEAM (power of two <= 1024), BLOCK; BX, BY;
//            BATCHED where REDUCER can take a vector at once; PAIR.
// Numerics : states in ACC; the order depends on the shape and the macros alone.
// Bound    : HBM, bytes of x once.
#include "reduce/reducers.cuh"

typedef REDUCER<ACC> R;
typedef R::State State;
#if FROM_STATE
typedef State In;
DEVICE State add(State s, State x, i64) { return R::merge(s, x); }
#elif defined PAIR
typedef ACC In;
DEVICE State add(State s, ACC x, i64 at) { return R::take(s, x, at); }
#else
typedef T In;
DEVICE State add(State s, T x, i64 at) { return R::take(s, (ACC)widen(x), at); }
#endif
#if TO_STATE
typedef State Out;
#else
typedef U Out;
#endif
#ifdef PAIR
#define READ const T *x, const T *x2
#define FIRST (Source{x, x2})
struct Source {
    const T *x, *x2;
    DEVICE Source operator+(i64 n) const { return {x + n, x2 + n}; }
};
struct Pack { In at[VEC]; };
DEVICE Pack fetch(Source p) {
    const Vec<T, VEC> a = load<VEC>(p.x), b = load<VEC>(p.x2);
    Pack v;
    UNROLLED for (int j = 0; j < VEC; j++) v.at[j] = (ACC)widen(a.at[j]) * (ACC)widen(b.at[j]);
    return v;
}
#else
#define READ const In* x
#define FIRST x
typedef const In* Source;
struct alignas(FROM_STATE ? alignof(In) : sizeof(In) * VEC < 16 ? sizeof(In) * VEC : 16) Pack { In at[VEC]; };
DEVICE Pack fetch(const In* p) { return *(const Pack*)p; }
#endif

DEVICE State add_all(State s, const Pack& v, i64 at) {
#if defined BATCHED && !FROM_STATE
    return R::take_all(s, v.at);
#else
    UNROLLED for (int j = 0; j < VEC; j++) s = add(s, v.at[j], at + j);
    return s;
#endif
}

DEVICE void emit(State s, i64 at, i64 count, Out* y, ACC* y2) {
#if TO_STATE
    y[at] = s;
#else
    y[at] = Round<U>::of(R::value(s, count));
#ifdef SECOND
    y2[at] = R::second(s, count);
#endif
#endif
}

#ifdef TEAM
extern "C" __global__ void __launch_bounds__(BLOCK)
    reduce_row(READ, Out* y, ACC* y2, i64 rows, i64 length, i64 chunk, i64 splits, i64 count) {
    after_previous_launch();
    const i64 task = (i64)blockIdx.x * (BLOCK / TEAM) + threadIdx.x / TEAM;
    const int lane = threadIdx.x % TEAM;
    const bool live = task < rows * splits;
    const i64 row = live ? task / splits : 0, first = live ? task % splits * chunk : 0;
    const int n = live ? (int)min(chunk, length - first) : 0;
    const Source p = FIRST + (row * length + first);
    State s = R::identity();
    constexpr int STEP = TEAM * VEC, UNROLL = 4;
    for (int i = lane * VEC; i < n; i += UNROLL * STEP) {
        Pack v[UNROLL];
        UNROLLED for (int u = 0; u < UNROLL; u++)
            if (i + u * STEP < n) v[u] = fetch(p + i + u * STEP);
        UNROLLED for (int u = 0; u < UNROLL; u++)
            if (i + u * STEP < n) s = add_all(s, v[u], first + i + u * STEP);
    }
    __shared__ State scratch[TEAM > 32 ? TEAM / 32 : 1];
    s = team_merge<TEAM>(s, [](State a, State b) { return R::merge(a, b); }, scratch);
    if (live && lane == 0) emit(s, task, count, y, y2);
}
#endif

#ifdef BX
extern "C" __global__ void __launch_bounds__(BX* BY)
    reduce_column(READ, Out* y, ACC* y2, i64 length, i64 inner, i64 chunk, i64 splits, i64 count) {
    after_previous_launch();
    const int tx = threadIdx.x % BX, ty = threadIdx.x / BX;
    const i64 tiles = (inner + BX * VEC - 1) / (BX * VEC), rest = blockIdx.x / tiles;
    const i64 column = blockIdx.x % tiles * (BX * VEC) + tx * VEC;
    const i64 first = rest % splits * chunk, last = min(first + chunk, length);
    State s[VEC];
    UNROLLED for (int j = 0; j < VEC; j++) s[j] = R::identity();
    if (column < inner) {
        const Source p = FIRST + (rest / splits * length * inner + column);
#if defined BATCHED && !FROM_STATE
        constexpr int UNROLL = 8;
#else
        constexpr int UNROLL = 4;
#endif
        i64 r = first + ty;
        for (; r + (UNROLL - 1) * BY < last; r += UNROLL * BY) {
            Pack v[UNROLL];
            UNROLLED for (int u = 0; u < UNROLL; u++) v[u] = fetch(p + (r + u * BY) * inner);
#if defined BATCHED && !FROM_STATE
            R::take_rows(s, v);
#else
            UNROLLED for (int u = 0; u < UNROLL; u++)
                UNROLLED for (int j = 0; j < VEC; j++) s[j] = add(s[j], v[u].at[j], r + u * BY);
#endif
        }
#if defined BATCHED && !FROM_STATE
        if (r < last) {  // fewer rows than that, at once as well
            const int left = (int)((last - r + BY - 1) / BY);
            Pack v[UNROLL];
            UNROLLED for (int u = 0; u < UNROLL; u++)
                if (u < left) v[u] = fetch(p + (r + u * BY) * inner);
            UNROLLED for (int j = 0; j < VEC; j++) {
                In column[UNROLL];
                UNROLLED for (int u = 0; u < UNROLL; u++) column[u] = v[u].at[j];
                s[j] = R::take_some(s[j], column, left);
            }
        }
#else
        for (; r < last; r += BY) {
            const Pack v = fetch(p + r * inner);
            UNROLLED for (int j = 0; j < VEC; j++) s[j] = add(s[j], v.at[j], r);
        }
#endif
    }
    __shared__ State part[BY][VEC * BX];  // a column's neighbours side by side: no two in one bank
    UNROLLED for (int j = 0; j < VEC; j++) part[ty][j * BX + tx] = s[j];
    for (int step = BY / 2; step; step /= 2) {
        __syncthreads();
        if (ty < step)
            UNROLLED for (int j = 0; j < VEC; j++)
                part[ty][j * BX + tx] = R::merge(part[ty][j * BX + tx], part[ty + step][j * BX + tx]);
    }
    if (ty == 0 && column < inner)
        UNROLLED for (int j = 0; j < VEC; j++) emit(part[0][j * BX + tx], rest * inner + column + j, count, y, y2);
}
#endif
