// indexing/run_sums.cu: sorted updates of one element each, combined with the elements of y that they are for.
// Idea     : equal rows stand side by side. A thread has ITEMS of them one behind the other, and a block a tile, whose
//            open runs a segmented scan carries from thread to thread: `run_sums` combines the runs that begin and end
//            in a tile with y, and leaves what the tile has of its first and last run; `run_joins`, one block, carries
//            these from tile to tile. However long a run is, no thread walks it.
// Inputs   : row u32 [count], sorted, the rows of y or more (none); order u32 [count]: the places of the updates, or
//            VALUES, their bits; update, y T; tiles Tile [ceil(count / TILE)].
// Macros   : T VALUES, REDUCE as indexing/combine.cuh reads it.
// Launch   : run_sums a block of THREADS a TILE; run_joins one block of JOINERS.
// Numerics : floats in 16 bits are combined in fp32 and rounded once; the order is that of the updates, in groups that
//            the tiles and the index decide.
// Bound    : memory: each sorted pair once, an element of y read and written.
#include "indexing/combine.cuh"
constexpr int THREADS = 256, ITEMS = 8, TILE = THREADS * ITEMS, JOINERS = 1024;
typedef Accumulator<T>::type Acc;

// Of the tile's last run `last`, all of it here if the tile has a `start`; of its first run, which began in a tile
// before, `first`, if it ends here and is for `row`.
struct Tile { Acc last, first; u32 row, start; };
// The sum of what is open: OPEN from before, a run from its START on, or what a RESET left, of which y is no part.
enum { OPEN, START, RESET };
struct Open { Acc sum; u32 start; };

DEVICE Open joined(Open a, Open b) {
    return {b.start ? b.sum : combine(a.sum, b.sum), b.start ? b.start : a.start};
}
DEVICE Open opened(Acc value, bool start) { return {value, resets(value) ? RESET : start ? START : OPEN}; }

template <class S> DEVICE S shuffled(S x, int step) { return __shfl_up_sync(~0u, x, step); }
template <> DEVICE bool shuffled(bool x, int step) { return __shfl_up_sync(~0u, (int)x, step); }
template <> DEVICE u8 shuffled(u8 x, int step) { return (u8)__shfl_up_sync(~0u, (int)x, step); }
template <> DEVICE signed char shuffled(signed char x, int step) { return (signed char)__shfl_up_sync(~0u, (int)x, step); }
template <> DEVICE short shuffled(short x, int step) { return (short)__shfl_up_sync(~0u, (int)x, step); }
template <> DEVICE u16 shuffled(u16 x, int step) { return (u16)__shfl_up_sync(~0u, (int)x, step); }

// What is open in front of this thread; `all` is that of all threads.
template <int COUNT> DEVICE Open open_before(Open own, Open& all, Open* scratch) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const Open none = {combine_unit<Acc>(), OPEN};
    Open s = own;
    UNROLLED for (int step = 1; step < 32; step *= 2) {
        const Open left = {shuffled(s.sum, step), shuffled(s.start, step)};
        if (lane >= step) s = joined(left, s);
    }
    __syncthreads();
    if (lane == 31) scratch[warp] = s;
    __syncthreads();
    const Open up = {shuffled(s.sum, 1), shuffled(s.start, 1)};
    Open left = none;
    all = none;
    for (int w = 0; w < COUNT / 32; w++) {
        if (w == warp) left = all;
        all = joined(all, scratch[w]);
    }
    return lane ? joined(left, up) : left;
}

DEVICE void combine_into(T* y, u32 row, u32 rows, Open run) {
    if (row < rows) y[row] = narrow<T>(run.start == RESET ? run.sum : combine((Acc)widen(y[row]), run.sum));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    run_sums(const u32* row, const u32* order, const T* update, T* y, Tile* tiles, u32 count, u32 rows) {
    after_previous_launch();
    __shared__ Open scratch[THREADS / 32];
    __shared__ Acc first_sum;
    __shared__ u32 first_row;
    const u32 begin = blockIdx.x * TILE, at = begin + threadIdx.x * ITEMS;
    const int live = at >= count ? 0 : count - at < ITEMS ? (int)(count - at) : ITEMS;
    u32 own[ITEMS + 2];  // with its neighbours'; ~0 beyond the ends, which is no row
    Acc value[ITEMS];
    own[0] = live && at ? row[at - 1] : ~0u;
    UNROLLED for (int i = 0; i < ITEMS; i++) own[i + 1] = i < live ? row[at + i] : ~0u;
    own[ITEMS + 1] = live == ITEMS && at + ITEMS < count ? row[at + ITEMS] : ~0u;
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        value[i] = combine_unit<Acc>();
        if (i < live) {
            const u32 from = order[at + i];
#if VALUES
            value[i] = widen(*(const T*)&from);
#else
            value[i] = widen(update[from]);
#endif
        }
    }
    Open mine = {combine_unit<Acc>(), OPEN};
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        const bool start = i < live && own[i + 1] != own[i];
        mine = joined(mine, opened(value[i], start));
    }
    if (threadIdx.x == 0) first_row = ~0u;
    Open all, open = open_before<THREADS>(mine, all, scratch);
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        if (i >= live) break;
        open = joined(open, opened(value[i], own[i + 1] != own[i]));
        if (own[i + 2] == own[i + 1]) continue;
        if (open.start) combine_into(y, own[i + 1], rows, open);
        else first_sum = open.sum, first_row = own[i + 1];  // the one run that began before the tile
    }
    __syncthreads();
    if (threadIdx.x == 0) tiles[blockIdx.x] = {all.sum, first_sum, first_row, all.start};
}

extern "C" __global__ void __launch_bounds__(JOINERS) run_joins(const Tile* tiles, T* y, u32 count, u32 rows) {
    after_previous_launch();
    __shared__ Open scratch[JOINERS / 32];
    Open carry = {combine_unit<Acc>(), OPEN};
    for (u32 begin = 0; begin < count; begin += JOINERS) {
        const u32 t = begin + threadIdx.x;
        Tile own = {combine_unit<Acc>(), combine_unit<Acc>(), ~0u, 0};
        if (t < count) own = tiles[t];
        Open all, left = open_before<JOINERS>({own.last, own.start}, all, scratch);
        left = joined(carry, left);
        if (own.row != ~0u) combine_into(y, own.row, rows, {combine(left.sum, own.first), left.start});
        carry = joined(carry, all);
    }
}
