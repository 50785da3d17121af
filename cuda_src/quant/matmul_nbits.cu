// quant/matmul_nbits.cu: y[M, N] = a[M, K] · w[N, K]ᵀ + bias of weights that stay in 4 or 8 bits; few rows of a.
//
// w[n, k] = (q[n, k] - zero[n, k / BLOCK]) scale[n, k / BLOCK]. The integers q - zero are exact in 16 bits: the
// tensor cores multiply them by a, 16 rows of w the 16 rows of an mma, and a block's sum is scaled in float32.
// A lane reads 16 bytes of a row of w at a time, RUN weights, and a quad of lanes four such runs: what k a place
// of the mma stands for is free, as long as a's place is the same one. Where the quad's runs lie in CB > 1 blocks,
// each block has a column of its own: a there, zeros in the columns of the others. So a column is (row of a, block).
// float32 a: three bfloat16 parts, whose sum it is, multiplied one after the other.
//
// Inputs:   a [M, K] T, rows 16-byte aligned, K % 8 == 0; q [N, row_bytes] u8, 16-byte aligned, row_bytes % 16 == 0;
//           scale [N, blocks] T; zero: null, or [N, ceil(blocks * BITS / 8)] u8 (ZERO); bias [N] T (BIAS).
// Macros:   T; BITS 4 or 8; BLOCK weights a scale, 16 and on, a power of two or a multiple of 128; CB columns a row
//           of a; SETS tiles of 8 columns; TILES of 16 rows of w; WARPS that share k, a step of four
//           runs in turn; ZERO, BIAS; PAIRED: the blocks of two columns in one load; WHOLE:
//           steps of four runs are; AHEAD: weights are constants, read before the launch before has ended.
// Launch:   (ceil(N / (16 TILES)), ceil(M / (SETS * 8 / CB))), 32 WARPS threads.
// Bound by: reading q once; M rows at once cost SETS products.
// Sums:     in k's order within a warp, warps in theirs: they depend on the shape and the macros alone.
#include "sm80.cuh"
#include "quant/nbits.cuh"

constexpr int RUN = 128 / BITS, WORDS = 4, PER_WORD = 32 / BITS;   // weights in 16 bytes; 4-byte words; weights a word
constexpr int HOLDS = BLOCK < RUN ? RUN / BLOCK : 1;             // blocks in a lane's run
constexpr int ROWS = SETS * 8 / CB;                              // rows of a
constexpr int PLANES = sizeof(T) == 4 ? 3 : 1;
constexpr int HALVES = PER_WORD / 4;                             // products a word
template <class E> struct Operand { typedef E type; };
template <> struct Operand<float> { typedef bf16 type; };
typedef Operand<T>::type Math;
template <class E> struct Is16 { static constexpr bool value = false; };
template <> struct Is16<f16> { static constexpr bool value = true; };
constexpr bool F16 = Is16<T>::value;

// Read by this block alone: no place in L1.
DEVICE uint4 once(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
// The weights of a word, less their zero point: pairs as the mma wants them. 8 bits: (0, 1) (2, 3).
DEVICE void unpack(u32 word, int zero, u32 (&pair)[PER_WORD / 2]) {
    if (BITS == 4) {
        unpack_4<F16>(word, twice((F16 ? 0xe400 : 0xc300) + zero), twice(F16 ? 0xd400 + 16 * zero : 0xc300 + zero), pair);
    } else if (F16) {
        const u32 low = twice(0xe400 + zero);
        pair[0] = fma2<F16>(__byte_perm(word, 0x64646464, 0x4140), 0x3c003c00, low);
        pair[PER_WORD / 2 - 1] = fma2<F16>(__byte_perm(word, 0x64646464, 0x4342), 0x3c003c00, low);
    } else {
        float w[4];
        UNROLLED for (int i = 0; i < 4; i++)
            w[i] = __uint_as_float(__byte_perm(word, 0x4b000000, 0x7540 | i)) - (8388608.0f + zero);
        pair[0] = pack2<bf16>(w[0], w[1]);
        pair[PER_WORD / 2 - 1] = pack2<bf16>(w[2], w[3]);
    }
}

// Elements of a row of a, as many as a word has weights, as the planes' column operands of a word's products;
// `pair` as in unpack.
typedef Vec<u32, PER_WORD * sizeof(T) / 4> Elements;
DEVICE void columns(const Elements& a, u32 (&pair)[PLANES][PER_WORD / 2]) {
    u32 x[PLANES][PER_WORD / 2];
    if (PLANES == 1) {
        UNROLLED for (int i = 0; i < PER_WORD / 2; i++) x[0][i] = a.at[i];
    } else {
        UNROLLED for (int i = 0; i < PER_WORD / 4; i++) {
            float rest[4];
            UNROLLED for (int j = 0; j < 4; j++) rest[j] = __uint_as_float(a.at[4 * i + j]);
            UNROLLED for (int p = 0; p < PLANES; p++)
                UNROLLED for (int j = 0; j < 2; j++) {
                    const u32 both = pack2<bf16>(rest[2 * j], rest[2 * j + 1]);
                    const float2 taken = unpack2<bf16>(both);
                    x[p][2 * i + j] = both;
                    // an infinity or NaN is whole in the first part
                    rest[2 * j] = fabsf(taken.x) < 3.4e38f ? rest[2 * j] - taken.x : 0.0f;
                    rest[2 * j + 1] = fabsf(taken.y) < 3.4e38f ? rest[2 * j + 1] - taken.y : 0.0f;
                }
        }
    }
    UNROLLED for (int p = 0; p < PLANES; p++) {
        if (BITS == 4) {
            pair[p][0] = __byte_perm(x[p][0], x[p][PER_WORD / 4], 0x5410);
            pair[p][1] = __byte_perm(x[p][0], x[p][PER_WORD / 4], 0x7632);
            pair[p][PER_WORD / 2 - 2] = __byte_perm(x[p][1], x[p][PER_WORD / 2 - 1], 0x5410);
            pair[p][PER_WORD / 2 - 1] = __byte_perm(x[p][1], x[p][PER_WORD / 2 - 1], 0x7632);
        } else {
            pair[p][0] = x[p][0], pair[p][1] = x[p][1];
        }
    }
}

// What a lane holds of one step of k, for each row of w that it has a part of.
constexpr int SCALES = CB > 1 ? 2 * HOLDS : 1;                   // of its two columns' blocks, neighbours
struct Part {
    uint4 q[2 * TILES];
    Vec<T, SCALES> scale[2 * TILES];
    u8 zero[2 * TILES][HOLDS];
};
// And of a, where that is little.
constexpr bool KEPT = SETS == 1 && PLANES == 1;
struct Kept {
    Elements a[KEPT ? WORDS : 1];
};
// Blocks a multiprocessor: 64 registers a thread, where those are enough.
constexpr int LEAST = KEPT && F16 && HOLDS == 1 && TILES == 1 ? 32 / WARPS : 1;

extern "C" __global__ void __launch_bounds__(32 * WARPS, LEAST) matmul_nbits(
    const T* a, const u8* q, const T* scale, const u8* zero, const T* bias, T* y, int M, int N, int K, int row_bytes,
    int blocks) {
    __shared__ float sums[WARPS][ROWS][16 * TILES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, t = lane % 4;
    const int n0 = blockIdx.x * 16 * TILES, m0 = blockIdx.y * ROWS;
    const int runs = row_bytes / 16, steps = (runs + 3) / 4, zeros = (blocks * BITS + 7) / 8;
    const int columns_block = CB > 1 ? 2 * t % CB * HOLDS : 0;

    const uint4* q_row[2 * TILES];
    const T* scale_row[2 * TILES];
    const u8* zero_row[2 * TILES];
    UNROLLED for (int r = 0; r < 2 * TILES; r++) {
        const i64 row = min(n0 + 8 * r + group, N - 1);
        q_row[r] = (const uint4*)(q + row * row_bytes) + 4 * warp + t;
        scale_row[r] = scale + row * blocks + columns_block;
        if (ZERO) zero_row[r] = zero + row * zeros;
    }
    // runs 4 step .. 4 step + 3 of k, the lane's the t-th: the warp's steps one after the other
    auto fetch = [&](Part& part, int step) {
        const bool inside = WHOLE || 4 * step + t < runs;
        const int first = CB > 1 ? step * (4 * RUN / BLOCK) : step * (4 * RUN) / BLOCK;
        const int left = blocks - 1 - first - columns_block;
        UNROLLED for (int r = 0; r < 2 * TILES; r++) {
            part.q[r] = make_uint4(0, 0, 0, 0);
            if (inside) part.q[r] = once(q_row[r]);
            q_row[r] += 4 * WARPS;
            if (PAIRED) {
                part.scale[r] = load<SCALES>(scale_row[r] + (WHOLE || left >= 0 ? first : -columns_block));
            } else {
                UNROLLED for (int i = 0; i < SCALES; i++)
                    part.scale[r].at[i] = scale_row[r][first + (WHOLE || CB == 1 ? i : min(i, left))];
            }
            UNROLLED for (int h = 0; h < HOLDS; h++) {
                part.zero[r][h] = 1 << (BITS - 1);
                if (ZERO) {
                    const int last = blocks - 1, at = (4 * step + t) * RUN / BLOCK + h, block = WHOLE ? at : min(at, last);
                    part.zero[r][h] = zero_row[r][BITS == 8 ? block : block / 2] >> (BITS == 8 ? 0 : block % 2 * 4) &
                                      ((1 << BITS) - 1);
                }
            }
        }
    };
    const T* a_row[SETS];
    int a_left[SETS];
    UNROLLED for (int s = 0; s < SETS; s++) {
        const int m = m0 + s * (8 / CB) + group / CB;
        const bool mine = (CB == 1 || t / (4 / CB) == group % CB) && m < M;
        a_row[s] = a + (i64)min(m, M - 1) * K + t * RUN;
        a_left[s] = mine ? K - t * RUN : 0;
    }

    auto elements = [&](int s, int at) {
        Elements v = {};
        if (at < a_left[s]) v = load<PER_WORD * sizeof(T) / 4>((const u32*)(a_row[s] + at));
        return v;
    };
    auto keep = [&](Kept& kept, int step) {
        if constexpr (KEPT)
            UNROLLED for (int j = 0; j < WORDS; j++) {
                const int at = step * (4 * RUN) + j * PER_WORD;
                if (!WHOLE) kept.a[j] = elements(0, at);
                else if (a_left[0] > 0) kept.a[j] = load<PER_WORD * sizeof(T) / 4>((const u32*)(a_row[0] + at));
            }
    };

    float total[TILES][SETS][4] = {};
    auto multiply = [&](const Part& part, const Kept& kept, int step) {
        const int k = step * (4 * RUN);
        float sum[TILES][SETS][4] = {};
        UNROLLED for (int j = 0; j < WORDS; j++) {
            const int h = j * HOLDS / WORDS;
            u32 w[2 * TILES][PER_WORD / 2];
            UNROLLED for (int r = 0; r < 2 * TILES; r++) {
                const u32 words[4] = {part.q[r].x, part.q[r].y, part.q[r].z, part.q[r].w};
                unpack(words[j], part.zero[r][h], w[r]);
            }
            UNROLLED for (int s = 0; s < SETS; s++) {
                u32 x[PLANES][PER_WORD / 2];
                columns(KEPT ? kept.a[KEPT ? j : 0] : elements(s, k + j * PER_WORD), x);
                UNROLLED for (int p = 0; p < PLANES; p++)
                    UNROLLED for (int i = 0; i < HALVES; i++)
                        UNROLLED for (int u = 0; u < TILES; u++) {
                            const u32 rows[4] = {w[2 * u][2 * i], w[2 * u + 1][2 * i], w[2 * u][2 * i + 1],
                                                 w[2 * u + 1][2 * i + 1]};
                            mma(sum[u][s], rows, &x[p][2 * i], Math());
                        }
            }
            if ((j + 1) * HOLDS % WORDS) continue;
            UNROLLED for (int u = 0; u < TILES; u++)
                UNROLLED for (int s = 0; s < SETS; s++)
                    UNROLLED for (int i = 0; i < 4; i++) {
                        const float step = to_float(part.scale[2 * u + i / 2].at[CB > 1 ? i % 2 * HOLDS + h : 0]);
                        total[u][s][i] = fmaf(sum[u][s][i], step, total[u][s][i]);
                        sum[u][s][i] = 0;
                    }
        }
    };

    // Other warps multiply while a step's operands come: registers for more of them ahead would keep those away. The
    // launch behind may come up now: what it reads of its weights ahead fills the gaps between these blocks.
    if (!AHEAD) after_previous_launch();
    Part part;
    Kept kept = {};
    if (warp < steps) fetch(part, warp);
    if (AHEAD) after_previous_launch();
    launch_dependents();
    if (warp < steps) keep(kept, warp);
    for (int step = warp; step < steps; step += WARPS) {
        multiply(part, kept, step);
        if (step + WARPS < steps) fetch(part, step + WARPS), keep(kept, step + WARPS);
    }

    // the columns of one row of a: pairs of a lane, then neighbours
    UNROLLED for (int u = 0; u < TILES; u++)
        UNROLLED for (int s = 0; s < SETS; s++)
            UNROLLED for (int i = 0; i < 2; i++) {
                float x = total[u][s][2 * i];
                const int n = 16 * u + 8 * i + group;
                if (CB == 1) {
                    sums[warp][s * 8 + 2 * t][n] = x;
                    sums[warp][s * 8 + 2 * t + 1][n] = total[u][s][2 * i + 1];
                } else {
                    x += total[u][s][2 * i + 1];
                    if (CB == 4) x += __shfl_xor_sync(~0u, x, 1);
                    if (CB == 2 || t % 2 == 0) sums[warp][s * (8 / CB) + (CB == 2 ? t : t / 2)][n] = x;
                }
            }
    __syncthreads();
    ROLLED for (int i = threadIdx.x; i < ROWS * 16 * TILES; i += 32 * WARPS) {
        const int m = i / (16 * TILES), n = i % (16 * TILES);
        if (m0 + m >= M || n0 + n >= N) continue;
        float x = 0;
        UNROLLED for (int w = 0; w < WARPS; w++) x += sums[w][m][n];
        if (BIAS) x += to_float(bias[n0 + n]);
        y[(i64)(m0 + m) * N + n0 + n] = from_float<T>(x);
    }
}
