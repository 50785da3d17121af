// indexing/row_sums.cu: rows of update added to rows of a table that may repeat: an embedding's gradient.
// Idea     : `group_rows` sorts the places j of update by the row that index[j] names, equal rows by j. A block has
//            IDS rows of the table; its warps have consecutive parts of the index, which they read twice: to count
//            their j of each row, and to put these where the counts before them end. `sum_parts` sums every `part`
//            sorted places of a row that has more of them, so that a frequent row is many blocks' work, and
//            `sum_rows` sums the others and those parts, and writes each row once.
// Inputs   : index IDX [count, Q], counted from the end if negative; a tuple outside the sizes d names no row.
//            update, y T [., inner], aligned to VEC elements. start u32 [rows + 1]: the first sorted place of each
//            row; row, order u32 [count]: each sorted place's row and j; sums [2 chunks, inner] of accumulators.
// Macros   : T IDX Q VEC TEAM ITEMS FRESH, of `sum_rows`: y is all of it written, zeros where no place names a row;
//            otherwise sums are added to what y holds, and other rows are left alone.
// Launch   : group_rows: a block of 1024 threads for IDS rows. sum_parts: a block for `part` places (x) and TEAM VEC
//            columns (y). sum_rows: TEAM threads for a row, or a sorted place if not FRESH (x), and TEAM VEC ITEMS
//            columns (y).
// Numerics : sums of floats in 16 bits are kept in fp32 and rounded once. Their order is that of j, within parts that
//            depend on the index alone: no atomics on floats, same bits.
// Bound    : memory: update read once, the rows written once.
#include "common.cuh"
#define IDS 256
#define WARPS 32
#define THREADS 256
#ifndef AHEAD
#define AHEAD (32 / sizeof(Acc) / (ITEMS > 2 ? 4 : ITEMS))  // rows whose loads are under way at once
#endif
typedef Accumulator<T>::type Acc;

struct Sizes { i64 d[6]; };

// The row that a tuple of indices names, -1 for none.
DEVICE int place(const IDX* index, int j, const Sizes& sizes) {
    int to = 0;
    bool inside = true;
    index += (i64)j * Q;
#pragma unroll
    for (int a = 0; a < Q; a++) {
        i64 k = (i64)index[a];
        if (k < 0) k += sizes.d[a];
        inside = inside && k >= 0 && k < sizes.d[a];
        to = to * (int)sizes.d[a] + (int)k;
    }
    return inside ? to : -1;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS)
    group_rows(const IDX* index, u32* start, u32* row, u32* order, int count, int rows, i64 d0, i64 d1, i64 d2,
               i64 d3, i64 d4, i64 d5) {
    after_previous_launch();
    __shared__ u32 next[WARPS][IDS], scratch[WARPS];
    const Sizes sizes = {{d0, d1, d2, d3, d4, d5}};
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int low = blockIdx.x * IDS, own = rows - low < IDS ? rows - low : IDS;
    const int part = (count / (32 * WARPS) + 1) * 32, first = warp * part;
    const int last = count - first < part ? count : first + part;
    for (int i = threadIdx.x; i < WARPS * IDS; i += 32 * WARPS) (&next[0][0])[i] = 0;
    __syncthreads();

    u32 below = 0;
#pragma unroll 4
    for (int j = first + lane; j < last; j += 32) {
        const int to = place(index, j, sizes), k = to - low;
        below += to >= 0 && k < 0;
        if (k >= 0 && k < own) atomicAdd(&next[warp][k], 1u);
    }
    below = block_sum<32 * WARPS>(below, scratch);  // it waits for the counts, too

    // counts -> the sorted place of each warp's first j of each row
    u32 total = 0, before = 0;
    if (threadIdx.x < IDS) {
        for (int w = 0; w < WARPS; w++) total += next[w][threadIdx.x];
        before = total;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
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
        const int j = from + lane, k = j < last ? place(index, j, sizes) - low : -1;
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

// N vectors of a row's columns, STRIDE elements apart.
template <class E, int N> struct Columns {
    E at[N][VEC];
    static constexpr int STRIDE = VEC * TEAM;
    template <class S> DEVICE void add(const S* p, int left) {
#pragma unroll
        for (int n = 0; n < N; n++)
            if (n * STRIDE < left) {
                const Vec<S, VEC> v = load<VEC>(p + n * STRIDE);
#pragma unroll
                for (int i = 0; i < VEC; i++) at[n][i] += widen(v.at[i]);
            }
    }
    // adds the rows that take(0), ..., take(count - 1) point to, in order; UNROLL of them are loaded at a time
    template <int UNROLL, class S, class Take> DEVICE void add_rows(u32 count, int left, Take take) {
        u32 k = 0;
        for (; k + UNROLL <= count; k += UNROLL) {
            const S* from[UNROLL];
            Vec<S, VEC> v[UNROLL][N];
#pragma unroll
            for (int u = 0; u < UNROLL; u++) from[u] = take(k + u);
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
#pragma unroll
                for (int n = 0; n < N; n++)
                    if (n * STRIDE < left) v[u][n] = load<VEC>(from[u] + n * STRIDE);
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
#pragma unroll
                for (int n = 0; n < N; n++)
                    if (n * STRIDE < left)
#pragma unroll
                        for (int i = 0; i < VEC; i++) at[n][i] += widen(v[u][n].at[i]);
        }
        for (; k < count; k++) add(take(k), left);
    }
    template <class S> DEVICE void put(S* p, int left) const {
#pragma unroll
        for (int n = 0; n < N; n++)
            if (n * STRIDE < left) {
                Vec<S, VEC> v;
#pragma unroll
                for (int i = 0; i < VEC; i++) v.at[i] = narrow<S>(at[n][i]);
                store<VEC>(p + n * STRIDE, v);
            }
    }
};

// Slot 0 of a chunk of `part` sorted places is of the row that its first place has, slot 1 of the row that its last
// one has: no third row in between has more than `part`. The teams of a block have consecutive places of a chunk.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    sum_parts(const u32* start, const u32* row, const u32* order, const T* update, Acc* sums, int rows, int inner,
              int part) {
    after_previous_launch();
    constexpr int TEAMS = THREADS / TEAM, WIDE = TEAM * VEC;
    __shared__ __align__(16) Acc shared[TEAMS][WIDE];
    const int team = threadIdx.x / TEAM, own = threadIdx.x % TEAM * VEC, left = inner - blockIdx.y * WIDE;
    const u32 found = start[rows], begin = blockIdx.x * part;
    if (begin >= found) return;
    const u32 end = found - begin < part ? found : begin + part;
    const u32 head = row[begin], tail = row[end - 1];
    update += blockIdx.y * WIDE + own;
    sums += (i64)2 * blockIdx.x * inner + blockIdx.y * WIDE;
#pragma unroll 1
    for (int slot = 0; slot < 2; slot++, sums += inner) {
        const u32 of = slot ? tail : head, from = start[of], to = start[of + 1];
        if (to - from <= part || (slot && head == tail)) continue;  // the same for the block
        const u32 low = from > begin ? from : begin, high = to < end ? to : end;
        const u32 each = (high - low + TEAMS - 1) / TEAMS, first = low + team * each;
        const u32 count = first >= high ? 0 : high - first < each ? high - first : each;
        Columns<Acc, 1> sum = {};
        sum.add_rows<8, T>(count, left - own, [&](u32 k) { return update + (i64)order[first + k] * inner; });
        __syncthreads();
        sum.put(&shared[team][own], WIDE);
        __syncthreads();
        for (int c = threadIdx.x; c < WIDE && c < left; c += THREADS) {
            Acc total = 0;
#pragma unroll 8
            for (int k = 0; k < TEAMS; k++) total += shared[k][c];
            sums[c] = total;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    sum_rows(const u32* start, const u32* row, const u32* order, const T* update, const Acc* sums, T* y, int rows,
             int inner, int units, int part) {
    after_previous_launch();
    const int unit = blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM;
    const int column = (blockIdx.y * TEAM * ITEMS + threadIdx.x % TEAM) * VEC, left = inner - column;
    if (unit >= units || left <= 0) return;
    if (!FRESH && unit >= start[rows]) return;
    const u32 own = FRESH ? unit : row[unit], from = start[own], count = start[own + 1] - from;
    if (!FRESH && unit != from) return;
    y += (i64)own * inner + column;
    Columns<Acc, ITEMS> sum = {};
    if (!FRESH) sum.add(y, left);
    if (count <= part) {
        update += column;
        sum.add_rows<AHEAD, T>(count, left, [&](u32 k) { return update + (i64)order[from + k] * inner; });
    } else {
        const u32 first = from / part, last = (from + count - 1) / part;
        sums += column;
        sum.add_rows<AHEAD, Acc>(last - first + 1, left, [&](u32 k) {
            const u32 chunk = first + k;
            return sums + (i64)(2 * chunk + (from > chunk * part)) * inner;
        });
    }
    sum.put(y, left);
}
