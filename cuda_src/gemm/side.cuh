// gemm/side.cuh: row statistics by a GEMM's idle producer warps, while the other warps multiply.
//   SIDE STATS, RMS  (rstd, mean) of a's rows [M,K]; also written to row0, row1
//   SIDE OWN, OWN_RMS  the same where a CTA has one tile: by the other warpgroup, from the tile in smem
//   SIDE COLUMNS     part [ceil(M / 64), K]: column sums of a, from the tiles in smem, of 64 rows each
//   SIDE TILES       sums over a row of the product, exchanged between the tiles of the row (EPI_DX's
//                    c1, c2), and part [ceil(M / BM), K]: column sums of a, from the tiles in smem
// Idea     : a warp takes the next rows by a ticket, LANES lanes a row, reads them from L2 (the main loop
//            needs them there anyway), and publishes two floats in one 64-bit word. Zero says not yet,
//            so the epilogue polls the value itself. Tickets follow the order of the tiles and go only to
//            running warps: no warp ever waits for a CTA that has no SM yet. A warp stays at most one
//            band of tiles ahead of its CTA, so that what it reads is in L2 when the main loop comes.
//            TILES: the CTAs of a row's tiles are neighbours, run at the same time (the launch is
//            cooperative) and share the work of the column sums, each a few of the k-steps.
// sync     : 32 bytes of counters, then two sets of M pairs (TILES: of M a tile of n): a launch fills one and clears the other, the
//            last warp of the grid swaps them. All zero before the first launch, reusable ever after.
// Numerics : one pass, shifted by the mean s of the row's first 8 LANES: sum (x - s)^2 / K - (mean - s)^2
//            cancels at most K / (8 LANES). A row's bits do not depend on which warp took it.
#pragma once
#include "common.cuh"
#define STATS 1
#define RMS 2
#define TILES 3
#define OWN 4
#define OWN_RMS 5
#define COLUMNS 6
enum { PARITY, DONE, TICKET, HEADER = 8 };  // words of sync

DEVICE u64 load_relaxed(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void store_relaxed(u64* p, u64 v) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

struct Pairs {
    u64 *now, *next;
    Pairs() = default;
    DEVICE Pairs(u32* sync, int count) {
        u32 odd = *(volatile u32*)(sync + PARITY);
        u64* first = (u64*)(sync + HEADER);
        now = first + (odd ? count : 0);
        next = first + (odd ? 0 : count);
    }
    DEVICE void put(int m, float a, float b) const {
        u64 both = (u64)__float_as_uint(b) << 32 | __float_as_uint(a);
        store_relaxed(now + m, both ? both : 1ull << 31);  // (0, 0) is sent as (-0, 0)
        store_relaxed(next + m, 0);
    }
    DEVICE bool get(int m, float& a, float& b) const {
        u64 both = load_relaxed(now + m);
        a = __uint_as_float((u32)both);
        b = __uint_as_float((u32)(both >> 32));
        return both;
    }
};

// A warp that will neither take a ticket nor read a pair any more; `warps` is how many there are.
DEVICE void side_done(u32* sync, int warps) {
    __syncwarp();
    if (threadIdx.x % 32 == 0 && atomicAdd(sync + DONE, 1) == warps - 1) {
        sync[DONE] = sync[TICKET] = 0;
        sync[PARITY] ^= 1;
    }
}

// `limit`: the first row that is too far ahead yet, kept by the producer; it and those who poll it do
// so by atomics alone.
template <int SIDE_, int LANES, class E>
DEVICE void side_rows(u32* sync, const E* x, i64 ld, int M, int K, float epsilon,
                      float* rstd, float* mean, int* limit) {
    constexpr int HELD = 4, ROWS = 32 / LANES;  // 16-byte loads in flight a lane, rows a ticket
    Pairs pairs(sync, M);
    int lane = threadIdx.x % 32, vectors = K / 8;
    uint4 v[HELD];
    auto take = [&] { return lane == 0 ? (int)atomicAdd(sync + TICKET, ROWS) : 0; };
    auto bound = [&] { return lane == 0 ? atomicOr(limit, 0) : 0; };
    auto fetch = [&](int first, int i, int at) {
        int row = first + lane / LANES;
        at += i * LANES + lane % LANES;
        bool in = row < M && at < vectors;
        v[i] = in ? *(const uint4*)(x + row * ld + at * 8) : make_uint4(0, 0, 0, 0);
    };
    auto each = [&](const uint4& line, auto f) {
        UNROLLED for (int j = 0; j < 4; j++) {
            float2 both = unpack2<E>(((const u32*)&line)[j]);
            f(both.x), f(both.y);
        }
    };
    auto row_sum = [&](float value) {
        UNROLLED for (int step = LANES / 2; step; step >>= 1) value += __shfl_xor_sync(~0u, value, step);
        return value;
    };
    float inv_k = 1.0f / K, inv_first = 1.0f / (K < LANES * 8 ? K : LANES * 8);
    int first = __shfl_sync(~0u, take(), 0);
    bool here = false;
    while (first < M) {
        if (!here) {
            while (first >= __shfl_sync(~0u, bound(), 0)) __nanosleep(200);
            UNROLLED for (int i = 0; i < HELD; i++) fetch(first, i, 0);
        }
        int ticket = take(), end = bound(), following = M;  // waited for when they are needed
        float shift = 0, sum = 0, square = 0;
        if (SIDE_ != RMS) {
            each(v[0], [&](float value) { shift += value; });
            shift = row_sum(shift) * inv_first;
        }
        here = false;
        for (int at = 0; at < vectors; at += LANES * HELD) {
            bool last = at + LANES * HELD >= vectors;
            if (last) {  // the next rows' loads take the place of these, if they may
                following = __shfl_sync(~0u, ticket, 0);
                here = following < M && following < __shfl_sync(~0u, end, 0);
            }
            UNROLLED for (int i = 0; i < HELD; i++) {
                if (at + i * LANES + lane % LANES < vectors)
                    each(v[i], [&](float value) {
                        value -= shift;
                        sum += value;
                        square += value * value;
                    });
                if (!last) fetch(first, i, at + LANES * HELD);
                else if (here) fetch(following, i, 0);
            }
        }
        float off = row_sum(sum) * inv_k, mu = shift + off;
        if (SIDE_ == RMS) off = mu = 0;
        float rs = rsqrtf(max_nan(fmaf(-off, off, row_sum(square) * inv_k), 0.0f) + epsilon);
        int row = first + lane / LANES;
        if (lane % LANES == 0 && row < M) {
            pairs.put(row, rs, mu);
            rstd[row] = rs;
            if (mean) mean[row] = mu;
        }
        first = following;
    }
}

// Sums over a lane's four chunks of (v - shift) and its square; `left` of their elements exist.
template <bool RAGGED, class E>
DEVICE void own_sums(const uint4 (&v)[4], float shift, int left, float& sum, float& square) {
    float sums[4] = {}, squares[4] = {};
    UNROLLED for (int c = 0; c < 4; c++) {
        if (RAGGED && c * 8 >= left) continue;
        UNROLLED for (int j = 0; j < 4; j++) {
            float2 both = unpack2<E>(((const u32*)&v[c])[j]);
            both.x -= shift, both.y -= shift;
            sums[c] += both.x + both.y;
            squares[c] += both.x * both.x;
            squares[c] += both.y * both.y;
        }
    }
    sum += (sums[0] + sums[1]) + (sums[2] + sums[3]);
    square += (squares[0] + squares[1]) + (squares[2] + squares[3]);
}
// (rstd, mean) of a tile's 64 rows by 128 threads, two a row, from its swizzled steps [64][64] in shared
// memory: step(i) waits for one and gives it, done(i) frees it. The shift is the mean of the first.
template <bool RMS_, class E, class Step, class Done>
DEVICE float2 side_own(int K, float epsilon, Step step, Done done) {
    int row = threadIdx.x % 128 / 2, half = threadIdx.x % 2;
    float shift = 0, sum = 0, square = 0;
    for (int i = 0; i * 64 < K; i++) {
        const u8* line = step(i) + row * 128;
        int left = K - i * 64 - half * 32;
        uint4 v[4];
        UNROLLED for (int c = 0; c < 4; c++) v[c] = *(const uint4*)(line + ((half * 4 + c ^ row & 7) << 4));
        if (!RMS_ && i == 0) {  // (zeros follow the last column)
            float unused = 0;
            own_sums<false, E>(v, 0.0f, 32, shift, unused);
            shift += __shfl_xor_sync(~0u, shift, 1);
            shift /= K < 64 ? K : 64;
        }
        if (K - i * 64 >= 64) own_sums<false, E>(v, shift, 32, sum, square);
        else own_sums<true, E>(v, shift, left, sum, square);
        done(i);
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    square += __shfl_xor_sync(~0u, square, 1);
    float off = RMS_ ? 0.0f : sum / K;
    return make_float2(rsqrtf(max_nan(fmaf(-off, off, square / K), 0.0f) + epsilon), shift + off);
}

// Column sums of a swizzled tile [ROWS_][64] in shared memory, to[0..64) of which `left` exist.
template <int ROWS_, class E> DEVICE void side_columns(const u8* tile, float* to, int left) {
    int lane = threadIdx.x % 32, chunk = lane % 8;
    float sum[8] = {};
#pragma unroll 8
    for (int row = lane / 8; row < ROWS_; row += 4) {
        uint4 v = *(const uint4*)(tile + row * 128 + ((chunk ^ (row & 7)) << 4));
        UNROLLED for (int j = 0; j < 4; j++) {
            float2 both = unpack2<E>(((const u32*)&v)[j]);
            sum[j * 2] += both.x;
            sum[j * 2 + 1] += both.y;
        }
    }
    UNROLLED for (int j = 0; j < 8; j++) {
        sum[j] += __shfl_xor_sync(~0u, sum[j], 8);
        sum[j] += __shfl_xor_sync(~0u, sum[j], 16);
    }
    if (lane < 8 && chunk * 8 < left) store<8>(to + chunk * 8, *(Vec<float, 8>*)sum);
}
