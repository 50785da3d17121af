// indexing/row_sums.cu: rows of update combined with rows of a table that may repeat: an embedding's gradient.
// Idea     : `group_rows` sorts the places j of update by the row that index[j] names, equal rows by j. A block has
//            IDS rows of the table; its warps have consecutive parts of the index, which they read twice: to count
//            their j of each row, and to put these where the counts before them end. Meanwhile other blocks fill a
//            FRESH table with zeros. `sum_parts` sums every `part` sorted places of a row that has more of them, so
//            that a frequent row is many blocks' work; `sum_rows` sums the others and those parts. More updates are
//            sorted by scan/radix.cu instead (indexing/places.cu). A sum may be another reduction.
// Inputs   : index IDX and sizes Q, d as indexing/places.cuh reads them; an index outside its axis names no row.
//            update, y T [., inner], aligned to VEC elements. start, stop u32: the first sorted place of each row, and
//            the one after the last; found u32 [1]: the sorted places in all; both null where `group_rows` has
//            written start [rows + 1], which holds them. row, order u32 [count]: each sorted place's row and j; sums
//            [2 chunks, inner] of accumulators.
// Macros   : T IDX ELEMENTS Q VEC TEAM IDS, FRESH: y is `elements` zeros before; otherwise sums are added to what y holds.
//            REDUCE 1 add, 2 mul, 3 max, 4 min; without IDX there is no `group_rows`.
// Launch   : group_rows: a block of 1024 threads for IDS rows with (32 IDS + 32) words of shared memory, and any
//            number more for the zeros. sum_parts: a block for `part` places (x) and TEAM VEC columns (y). sum_rows:
//            TEAM threads for a sorted place (x) and TEAM VEC columns (y).
// Numerics : sums of floats in 16 bits are kept in fp32 and rounded once. Their order is that of j, within parts that
//            depend on the index alone: no atomics on floats, same bits. Extremes of floats have no parts (combine.cuh).
// Bound    : memory: update read once, the rows written once.
#include "indexing/combine.cuh"
#ifdef IDX
#include "indexing/places.cuh"
#endif
#define WARPS 32
#define THREADS 256
typedef Accumulator<T>::type Acc;

#ifdef IDX
// The block's share of p's zeros, of which `blocks` have all.
DEVICE void put_zeros(T* p, i64 elements, int block, int blocks) {
    constexpr int EACH = 16 / sizeof(T);
    const Vec<T, EACH> none = {};
    const i64 first = (i64)block * blockDim.x + threadIdx.x, vectors = elements / EACH;
    for (i64 i = first; i < vectors; i += (i64)blocks * blockDim.x) store<EACH>(p + i * EACH, none);
    if (first < elements % EACH) p[vectors * EACH + first] = none.at[0];
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 2)
    group_rows(const IDX* index, u32* start, u32* row, u32* order, T* y, int count, int rows, i64 elements, i64 d0,
               i64 d1, i64 d2, i64 d3, i64 d4, i64 d5) {
    after_previous_launch();
    extern __shared__ u32 memory[];
    u32(*next)[IDS] = (u32(*)[IDS])memory, *scratch = memory + WARPS * IDS;
    const int sorting = (rows - 1) / IDS + 1;
    if (FRESH && blockIdx.x >= sorting) return put_zeros(y, elements, blockIdx.x - sorting, gridDim.x - sorting);
    const Sizes sizes = {{d0, d1, d2, d3, d4, d5}};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int low = blockIdx.x * IDS, own = rows - low < IDS ? rows - low : IDS;
    const int part = (count / (32 * WARPS) + 1) * 32, first = warp * part;
    const int last = count - first < part ? count : first + part;
    for (int i = threadIdx.x; i < WARPS * IDS; i += 32 * WARPS) memory[i] = 0;
    __syncthreads();

    u32 below = 0;
#pragma unroll 4
    for (int j = first + lane; j < last; j += 32) {
        const int to = (int)place(index, j, Q, sizes), k = to - low;
        below += to >= 0 && k < 0;
        if (k >= 0 && k < own) atomicAdd(&next[warp][k], 1u);
    }
    below = block_sum<32 * WARPS>(below, scratch);  // it waits for the counts, too

    // counts -> the sorted place of each warp's first j of each row
    u32 total = 0, before = 0;
    if (threadIdx.x < IDS) {
        for (int w = 0; w < WARPS; w++) total += next[w][threadIdx.x];
        before = total;
        UNROLLED for (int step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(~0u, before, step);
            if (lane >= step) before += other;
        }
    }
    __syncthreads();
    if (lane == 31) scratch[warp] = before;
    __syncthreads();
    if (threadIdx.x < IDS) {
        before += below - total;
        for (int w = 0; w < warp; w++) before += scratch[w];
        if (threadIdx.x < own) start[low + threadIdx.x] = before;
        if (low + threadIdx.x == rows - 1) start[rows] = before + total;
        for (int w = 0; w < WARPS; w++) {
            const u32 here = next[w][threadIdx.x];
            next[w][threadIdx.x] = before;
            before += here;
        }
    }
    __syncthreads();

#pragma unroll 2
    for (int from = first; from < last; from += 32) {
        const int j = from + lane, k = j < last ? (int)place(index, j, Q, sizes) - low : -1;
        const bool mine = k >= 0 && k < own;
        if (!__ballot_sync(~0u, mine)) continue;
        const u32 peers = __match_any_sync(~0u, mine ? k : -1);
        const u32 earlier = __popc(peers & ((1u << lane) - 1));
        const u32 at = mine ? next[warp][k] + earlier : 0;
        __syncwarp();
        if (mine && !earlier) next[warp][k] += __popc(peers);
        __syncwarp();
        if (mine) row[at] = low + k, order[at] = j;
    }
}
#endif

DEVICE Acc unit() { return REDUCE == 1 && FRESH ? (Acc)0 : combine_unit<Acc>(); }

// VEC columns of the rows that take(0), ..., take(count - 1) point to, combined with sum in order.
template <class S, class Take> DEVICE void add_rows(Acc (&sum)[VEC], u32 count, Take take) {
    constexpr int AHEAD = sizeof(Acc) < 4 ? 8 : 32 / sizeof(Acc);  // rows whose loads are under way at once
    u32 k = 0;
    for (; k + AHEAD <= count; k += AHEAD) {
        const S* from[AHEAD];
        Vec<S, VEC> v[AHEAD];
        UNROLLED for (int u = 0; u < AHEAD; u++) from[u] = take(k + u);
        UNROLLED for (int u = 0; u < AHEAD; u++) v[u] = load<VEC>(from[u]);
        UNROLLED for (int u = 0; u < AHEAD; u++)
            UNROLLED for (int i = 0; i < VEC; i++) sum[i] = combine(sum[i], widen(v[u].at[i]));
    }
    for (; k < count; k++) {
        const Vec<S, VEC> v = load<VEC>(take(k));
        UNROLLED for (int i = 0; i < VEC; i++) sum[i] = combine(sum[i], widen(v.at[i]));
    }
}

// Slot 0 of a chunk of `part` sorted places is of the row that its first place has, slot 1 of the row that its last
// one has: no third row in between has more than `part`. The teams of a block have consecutive places of a chunk.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    sum_parts(const u32* start, const u32* stop, const u32* found, const u32* row, const u32* order,
              const T* update, Acc* sums, int rows, int inner, int part) {
    after_previous_launch();
    if (!stop) stop = start + 1, found = start + rows;
    constexpr int TEAMS = THREADS / TEAM, WIDE = TEAM * VEC;
    __shared__ __align__(16) Acc shared[TEAMS][WIDE];
    const int team = threadIdx.x / TEAM, own = threadIdx.x % TEAM * VEC, left = inner - blockIdx.y * WIDE;
    const u32 places = *found, begin = blockIdx.x * part;
    if (begin >= places) return;
    const u32 end = places - begin < part ? places : begin + part;
    const u32 head = row[begin], tail = row[end - 1];
    update += blockIdx.y * WIDE + own;
    sums += (i64)2 * blockIdx.x * inner + blockIdx.y * WIDE;
    ROLLED for (int slot = 0; slot < 2; slot++, sums += inner) {
        const u32 of = slot ? tail : head, from = start[of], to = stop[of];
        if (to - from <= part || (slot && head == tail)) continue;  // the same for the block
        const u32 low = from > begin ? from : begin, high = to < end ? to : end;
        const u32 each = (high - low + TEAMS - 1) / TEAMS, first = low + team * each;
        u32 count = first >= high ? 0 : high - first < each ? high - first : each;
        if (own >= left) count = 0;
        Acc sum[VEC];
        UNROLLED for (int i = 0; i < VEC; i++) sum[i] = unit();
        add_rows<T>(sum, count, [&](u32 k) { return update + (i64)order[first + k] * inner; });
        __syncthreads();
        UNROLLED for (int i = 0; i < VEC; i++) shared[team][own + i] = sum[i];
        __syncthreads();
        for (int c = threadIdx.x; c < WIDE && c < left; c += THREADS) {
            Acc total = unit();
#pragma unroll 8
            for (int k = 0; k < TEAMS; k++) total = combine(total, shared[k][c]);
            sums[c] = total;
        }
    }
}

// A sorted place that is its row's first sums the row.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    sum_rows(const u32* start, const u32* stop, const u32* found, const u32* row, const u32* order, const T* update,
             const Acc* sums, T* y, int rows, int inner, int part) {
    after_previous_launch();
    if (!stop) stop = start + 1, found = start + rows;
    const u32 at = blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM;
    const int column = (blockIdx.y * TEAM + threadIdx.x % TEAM) * VEC;
    if (at >= *found || column >= inner) return;
    const u32 own = row[at], from = start[own], count = stop[own] - from;
    if (at != from) return;
    y += (i64)own * inner + column;
    Acc sum[VEC];
    UNROLLED for (int i = 0; i < VEC; i++) sum[i] = unit();
    if (!FRESH) add_rows<T>(sum, 1, [&](u32) { return y; });
    if (count <= part) {
        update += column;
        add_rows<T>(sum, count, [&](u32 k) { return update + (i64)order[from + k] * inner; });
    } else {
        const u32 first = from / part, last = (from + count - 1) / part;
        sums += column;
        add_rows<Acc>(sum, last - first + 1, [&](u32 k) {
            const u32 chunk = first + k;
            return sums + (i64)(2 * chunk + (from > chunk * part)) * inner;
        });
    }
    Vec<T, VEC> v;
    UNROLLED for (int i = 0; i < VEC; i++) v.at[i] = narrow<T>(sum[i]);
    store<VEC>(y, v);
}
