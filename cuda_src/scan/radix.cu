// scan/radix.cu: rows of (key, index) sorted by 8 bits of the key, equal digits in their order: one pass of
// a radix sort, from the lowest bits to the highest.
// Idea     : `radix_count` counts the digits of each tile, `radix_offsets` sums a digit's counts over the tiles
//            before each, and `radix_scatter` ranks the pairs of a tile (equal digits of a warp meet by
//            a vote a bit, which is faster than match.any), brings them in order in shared memory, and writes each digit's run side by side.
//            Digits that all keys of a row share need no pass: `radix_bits` and `radix_sides` find them first. Such
//            passes are left out two by two, so that the sorted pairs stand where they would; one left over copies.
// Inputs   : key KEY and at u32 [rows, length] to key_to and at_to; counts u32 [rows, 256, tiles];
//            totals u32 [rows, 256]. In the FIRST pass an element's index is its place.
//            bits KEY [rows, tiles]; sides u32 [rows, passes + 1], or null: which of both pairs a pass reads.
// Macros   : KEY (u32 or u64) FIRST.
// Launch   : a block of 256 threads a tile of ITEMS elements a thread, rows x tiles; `radix_offsets` rows x 256.
// Numerics : integers; ranks depend on the keys alone.
// Bound    : memory: keys read twice, pairs read and written once, a pass.
#include "common.cuh"
constexpr int THREADS = 256, WARPS = THREADS / 32, BINS = 256, ITEMS = sizeof(KEY) == 8 ? 8 : 16;
constexpr int TILE = THREADS * ITEMS;

DEVICE int digit(KEY key, int shift) { return (int)(key >> shift) & (BINS - 1); }

// The lanes whose digit is d as well.
DEVICE u32 equal_digits(int d) {
    u32 peers = ~0u;
    UNROLLED for (int bit = 0; bit < 8; bit++) {
        const bool set = d >> bit & 1;
        const u32 votes = __ballot_sync(~0u, set);
        peers &= set ? votes : ~votes;
    }
    return peers;
}

// The sum of what the threads before this one have; `total` is that of all.
DEVICE u32 before(u32 own, u32& total, u32* sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 s = own;
    UNROLLED for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(~0u, s, step);
        if (lane >= step) s += other;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = s;
    __syncthreads();
    u32 left = 0;
    total = 0;
    UNROLLED for (int w = 0; w < WARPS; w++) {
        if (w < warp) left += sums[w];
        total += sums[w];
    }
    return left + s - own;
}

extern "C" __global__ void __launch_bounds__(THREADS) radix_bits(const KEY* key, KEY* bits, i64 length, i64 tiles) {
    after_previous_launch();
    __shared__ KEY parts[WARPS];
    const i64 row = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    key += row * length;
    KEY unlike = 0;
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        const i64 at = tile * TILE + i * THREADS + threadIdx.x;
        if (at < length) unlike |= key[at] ^ key[0];
    }
    UNROLLED for (int step = 16; step; step /= 2) unlike |= __shfl_xor_sync(~0u, unlike, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = unlike;
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < WARPS; w++) unlike |= parts[w];
    bits[blockIdx.x] = unlike;
}

extern "C" __global__ void __launch_bounds__(THREADS) radix_sides(const KEY* bits, u32* sides, i64 tiles, int passes) {
    after_previous_launch();
    __shared__ KEY parts[WARPS];
    KEY unlike = 0;
    for (i64 t = threadIdx.x; t < tiles; t += THREADS) unlike |= bits[blockIdx.x * tiles + t];
    UNROLLED for (int step = 16; step; step /= 2) unlike |= __shfl_xor_sync(~0u, unlike, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = unlike;
    __syncthreads();
    if (threadIdx.x) return;
    for (int w = 1; w < WARPS; w++) unlike |= parts[w];
    sides += blockIdx.x * (passes + 1);
    int spare = 0;  // the first pass makes the indices
    for (int k = 1; k < passes; k++) spare += !digit(unlike, 8 * k);
    spare -= spare % 2;
    u32 side = 0;
    for (int k = 0; k < passes; k++) {
        sides[k] = side;
        if (k && spare && !digit(unlike, 8 * k)) spare--;
        else side ^= 1;
    }
    sides[passes] = side;
}

// Whether a pass is left out; and whether it reads the pair that it would write if none were.
struct Turn { bool none, turned; };
DEVICE Turn turn_of(const u32* sides, i64 row, int pass, int passes) {
    if (!sides) return {false, false};
    sides += row * (passes + 1) + pass;
    return {sides[0] == sides[1], sides[0] != (pass & 1)};
}

extern "C" __global__ void __launch_bounds__(THREADS) radix_count(
    const KEY* key, const KEY* key_to, const u32* sides, u32* counts, i64 length, i64 tiles, int pass, int passes) {
    after_previous_launch();
    __shared__ u32 bins[BINS];
    const i64 row = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const Turn turn = turn_of(sides, row, pass, passes);
    if (turn.none) return;
    if (turn.turned) key = key_to;
    const int shift = 8 * pass;
    bins[threadIdx.x] = 0;
    __syncthreads();
    key += row * length;
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        const i64 at = tile * TILE + i * THREADS + threadIdx.x;
        if (at < length) atomicAdd(&bins[digit(key[at], shift)], 1u);
    }
    __syncthreads();
    counts[(row * BINS + threadIdx.x) * tiles + tile] = bins[threadIdx.x];
}

extern "C" __global__ void __launch_bounds__(THREADS)
    radix_offsets(const u32* sides, u32* counts, u32* totals, i64 tiles, int pass, int passes) {
    after_previous_launch();
    __shared__ u32 sums[WARPS];
    if (turn_of(sides, blockIdx.x / BINS, pass, passes).none) return;
    counts += blockIdx.x * tiles;
    u32 carry = 0, total;
    for (i64 first = 0; first < tiles; first += THREADS) {
        const i64 at = first + threadIdx.x;
        const u32 own = at < tiles ? counts[at] : 0, left = before(own, total, sums);
        if (at < tiles) counts[at] = carry + left;
        carry += total;
    }
    if (threadIdx.x == 0) totals[blockIdx.x] = carry;
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    radix_scatter(KEY* key, u32* at, KEY* key_to, u32* at_to, const u32* sides, const u32* counts,
                  const u32* totals, i64 length, i64 tiles, int pass, int passes) {
    after_previous_launch();
    __shared__ u32 bins[WARPS][BINS], from[BINS], sums[WARPS], order[TILE];
    __shared__ KEY keys[TILE];
    const i64 row = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 begin = (u32)tile * TILE;
    const Turn turn = turn_of(sides, row, pass, passes);
    if (turn.none) return;
    if (turn.turned) {
        KEY* const k = key;
        u32* const a = at;
        key = key_to, key_to = k, at = at_to, at_to = a;
    }
    const int shift = 8 * pass;
    const int live = length - begin < TILE ? (int)(length - begin) : TILE;
    key += row * length + begin, at += row * length + begin;
    key_to += row * length, at_to += row * length;
    // one digit of all, such as a high one of small numbers: they stay where they are
    if (live && totals[row * BINS + digit(*key, shift)] == length) {
        for (int j = threadIdx.x; j < live; j += THREADS)
            key_to[begin + j] = key[j], at_to[begin + j] = FIRST ? begin + j : at[j];
        return;
    }
    KEY own[ITEMS];
    u32 index[ITEMS], rank[ITEMS];
    UNROLLED for (int i = 0; i < ITEMS; i++) {  // a warp's elements are consecutive
        const int j = (warp * ITEMS + i) * 32 + lane;
        own[i] = j < live ? key[j] : ~(KEY)0;  // behind all others of the tile
        index[i] = FIRST ? begin + j : j < live ? at[j] : 0;
    }
    for (int i = threadIdx.x; i < WARPS * BINS; i += THREADS) bins[i / BINS][i % BINS] = 0;
    __syncthreads();
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        const int d = digit(own[i], shift);
        const u32 peers = equal_digits(d), earlier = __popc(peers & ((1u << lane) - 1));
        const u32 had = bins[warp][d];
        __syncwarp();
        if (!earlier) bins[warp][d] = had + __popc(peers);
        __syncwarp();
        rank[i] = had + earlier;
    }
    __syncthreads();
    u32 mine = 0, total;
    for (int w = 0; w < WARPS; w++) {  // a thread a digit
        const u32 here = bins[w][threadIdx.x];
        bins[w][threadIdx.x] = mine;
        mine += here;
    }
    const u32 first = before(mine, total, sums);
    const u32 start = before(totals[row * BINS + threadIdx.x], total, sums);
    for (int w = 0; w < WARPS; w++) bins[w][threadIdx.x] += first;
    from[threadIdx.x] = start + counts[(row * BINS + threadIdx.x) * tiles + tile] - first;
    __syncthreads();
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        const u32 to = bins[warp][digit(own[i], shift)] + rank[i];
        keys[to] = own[i], order[to] = index[i];
    }
    __syncthreads();
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        const int j = i * THREADS + threadIdx.x;
        if (j >= live) continue;
        const u32 to = from[digit(keys[j], shift)] + j;
        key_to[to] = keys[j], at_to[to] = order[j];
    }
}
