// scan/compact.cu: the positions at which a flag is set, in order.
// Idea     : a warp votes on 32 flags at once. `kept_counts` counts a tile's, `kept_offsets` sums them over the tiles
//            before each, and `kept_positions`, launched once the host knows how many there are, writes them.
// Inputs   : keep u8 [length], 0 or not; counts u32 [tiles]; first i64 [tiles + 1], the last one their number;
//            position i64 [first[tiles]].
// Launch   : a block of 256 threads a TILE of flags; `kept_offsets` one block of 1024.
// Bound    : memory: keep read twice, positions written once, side by side.
#include "common.cuh"
constexpr int THREADS = 256, WARPS = THREADS / 32, ITEMS = 16, TILE = THREADS * ITEMS;

// Bit l of mask[i] is the flag i * 32 + l of the warp's; their number.
DEVICE u32 votes(const u8* keep, i64 length, i64 begin, u32 (&mask)[ITEMS]) {
    bool flag[ITEMS];
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        const i64 at = begin + i * 32 + threadIdx.x % 32;
        flag[i] = at < length && keep[at];
    }
    u32 count = 0;
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        mask[i] = __ballot_sync(~0u, flag[i]);
        count += __popc(mask[i]);
    }
    return count;
}

extern "C" __global__ void __launch_bounds__(THREADS) kept_counts(const u8* keep, u32* counts, i64 length) {
    after_previous_launch();
    __shared__ u32 sums[WARPS];
    u32 mask[ITEMS];
    const int warp = threadIdx.x / 32;
    const u32 count = votes(keep, length, (i64)blockIdx.x * TILE + warp * 32 * ITEMS, mask);
    if (threadIdx.x % 32 == 0) sums[warp] = count;
    __syncthreads();
    if (threadIdx.x) return;
    u32 total = 0;
    for (int w = 0; w < WARPS; w++) total += sums[w];
    counts[blockIdx.x] = total;
}

extern "C" __global__ void __launch_bounds__(1024) kept_offsets(const u32* counts, i64* first, i64 tiles) {
    after_previous_launch();
    __shared__ u32 sums[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 carry = 0;
    for (i64 begin = 0; begin < tiles; begin += 1024) {
        const i64 at = begin + threadIdx.x;
        const u32 own = at < tiles ? counts[at] : 0;
        u32 s = own;
        UNROLLED for (int step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(~0u, s, step);
            if (lane >= step) s += other;
        }
        if (lane == 31) sums[warp] = s;
        __syncthreads();
        i64 left = carry;
        for (int w = 0; w < 32; w++) {
            if (w < warp) left += sums[w];
            carry += sums[w];
        }
        if (at < tiles) first[at] = left + s - own;
        __syncthreads();
    }
    if (threadIdx.x == 0) first[tiles] = carry;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    kept_positions(const u8* keep, const i64* first, i64* position, i64 length) {
    after_previous_launch();
    __shared__ u32 sums[WARPS];
    u32 mask[ITEMS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 begin = (i64)blockIdx.x * TILE + warp * 32 * ITEMS;
    const u32 count = votes(keep, length, begin, mask);
    if (lane == 0) sums[warp] = count;
    __syncthreads();
    i64 to = first[blockIdx.x];
    for (int w = 0; w < warp; w++) to += sums[w];
    UNROLLED for (int i = 0; i < ITEMS; i++) {
        if (mask[i] >> lane & 1) position[to + __popc(mask[i] & ((1u << lane) - 1))] = begin + i * 32 + lane;
        to += __popc(mask[i]);
    }
}
