// gemm/vector.cu: y = epilogue(LN?(x) . op(w)) for one row, all of a block's weights in registers.
// Idea     : a block owns a few columns and all of k, so that nothing is exchanged between blocks. Its
//            weights are on their way before the launch before has ended (STATIC_B): what is left behind
//            that is x, a product of registers, one reduction and the store. Without TRANS_B a thread
//            takes 8 neighbouring columns of 4 rows of w, put in the order of an mma before the wait. The
//            mma's columns are RANGES parts of k, of which a row's lanes read their own. With TRANS_B a
//            warp takes EACH columns, its lanes 8 neighbours of k each. Row statistics come from the
//            registers that hold x.
// Inputs   : x [K] T, w [K,N] (TRANS_B: [N,K]) T with rows of 16-byte pieces; K (without TRANS_B: at
//            most 16 RANGES WARPS QUADS) of any size, with TRANS_B at most 256 STEPS and a multiple of 8.
//            LN: w is folded (wq), col0, col1 = cs, cv; else statistics (if any) in row0...
// Outputs  : y, z [N] TO; mean, rstd [1] f32 (LN).
// Macros   : T, TO, TV, TRANS_B, WARPS, STEPS, EACH (columns of a warp; TRANS_B only), COLS (of a block,
//            8 to 64; without TRANS_B), STATIC_B, LN, RMS; the epilogue's (gemm/epilogue.cuh).
// Launch   : grid ceil(N / columns of a block), 32 WARPS threads.
// Numerics : f32 sums; the order depends on K and the macros alone.
// Bound    : bytes of w; launches in a row are bound by what follows the wait.
#include "gemm/epilogue.cuh"
#include "sm80.cuh"
#ifndef RMS
#define RMS 0
#endif
#if TRANS_B
#define COLS (WARPS * EACH)
#else
#define EACH 8
#endif
constexpr int RANGES = TRANS_B ? 1 : 64 / COLS;  // of 16 rows of w, that a warp multiplies at a time
constexpr int QUADS = (STEPS + 3) / 4;           // without TRANS_B: loads of 4 rows
constexpr int DISTINCT = TRANS_B ? 32 : 4 * RANGES;  // lanes that hold different numbers of x

extern "C" __global__ __launch_bounds__(32 * WARPS, 1) void gemm_vector(
    const T* x, const T* w, TO* y, TO* z, const TO* c, int N, int K, i64 ldw, float epsilon, float* mean,
    float* rstd, const TR* row0, const TR* row1, const TR* row2, const TR* row3, const TV* col0, const TV* col1,
    float alpha, float beta, float act_alpha) {
    launch_dependents();  // no block waits for another: these go on whatever comes up beside them
    __shared__ __align__(16) float sums[TRANS_B ? 1 : WARPS][RANGES][COLS];
    __shared__ float4 moments[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int n0 = blockIdx.x * COLS;
    uint4 held[TRANS_B ? EACH : QUADS][TRANS_B ? STEPS : 4];
#if TRANS_B
    auto load_w = [&] {
        UNROLLED for (int i = 0; i < STEPS; i++)
            UNROLLED for (int e = 0; e < EACH; e++) {
                const int k = i * 256 + lane * 8, n = n0 + warp * EACH + e;
                held[e][i] = k < K && n < N ? *(const uint4*)(w + n * ldw + k) : uint4{};
            }
    };
#else
    const int group = lane / 4, t = lane % 4, range = group / (COLS / 8);
    auto row_of = [&](int i, int range) { return ((i * WARPS + warp) * RANGES + range) * 16 + 4 * t; };
    auto load_w = [&] {
        const int n = n0 + group % (COLS / 8) * 8;
        UNROLLED for (int i = 0; i < QUADS; i++)
            UNROLLED for (int j = 0; j < 4; j++) {
                const int k = row_of(i, range) + j;
                held[i][j] = k < K && n < N ? *(const uint4*)(w + k * ldw + n) : uint4{};
            }
        UNROLLED for (int i = 0; i < QUADS; i++) {  // neighbours of k in a word: 4 words of each 2 columns
            u32* const words = (u32*)held[i];
            UNROLLED for (int j = 0; j < 4; j++) {
                const u32 row[4] = {words[j], words[4 + j], words[8 + j], words[12 + j]};
                words[j] = __byte_perm(row[0], row[1], 0x5410), words[4 + j] = __byte_perm(row[0], row[1], 0x7632);
                words[8 + j] = __byte_perm(row[2], row[3], 0x5410), words[12 + j] = __byte_perm(row[2], row[3], 0x7632);
            }
        }
    };
#endif
    if (STATIC_B) load_w();
    // of x: how many values the warp will see
    float count = K;
    if (!TRANS_B) {
        count = 0;
        UNROLLED for (int i = 0; i < QUADS; i++)
            count += max(0, min(16 * RANGES, K - (i * WARPS + warp) * 16 * RANGES));
    }
    const float part_of_warp = count > 0 ? 1.0f / count : 0.0f, part_of_all = 1.0f / K;
    grid_dependency_wait();
    if (!STATIC_B) load_w();

    // what only the end needs is on its way as early as x
    const int n = n0 + threadIdx.x / RANGES;
    const bool owner = threadIdx.x < COLS * RANGES && n < N;
    float of_c = 0, of_col0 = 0, of_col1 = 0;
    Row row = {};
    float acc[TRANS_B ? EACH : 4][TRANS_B ? 1 : 4] = {};
#if TRANS_B
    uint4 xs[STEPS];
    UNROLLED for (int i = 0; i < STEPS; i++) {
        const int k = i * 256 + lane * 8;
        xs[i] = k < K ? *(const uint4*)(x + k) : uint4{};
    }
#else
    Vec<T, 4> xs[QUADS];  // a lane holds a column of the mma's other operand, its range of k
    UNROLLED for (int i = 0; i < QUADS; i++) {
        const int k = row_of(i, group % RANGES);
        xs[i] = {};
        if (k + 4 <= K && (u64)(x + k) % 8 == 0) xs[i] = load<4>(x + k);
        else
            UNROLLED for (int j = 0; j < 4; j++)
                if (k + j < K) xs[i].at[j] = x[k + j];
    }
#endif
    if (owner) {
        if (EPI_OPERAND) of_c = to_float(c[n]);
        if (EPI_COLS > 0) of_col1 = to_float(col1[n]);
        if (EPI_COLS > 1) of_col0 = to_float(col0[n]);
        if (!LN && EPI_ROWS > 0) row = GEMM_ROW(0);
    }
#if TRANS_B
    UNROLLED for (int i = 0; i < STEPS; i++)
        UNROLLED for (int e = 0; e < EACH; e++) {
            const u32* words = (const u32*)&held[e][i];
            UNROLLED for (int j = 0; j < 4; j++) {
                const float2 b = unpack2<T>(words[j]), a = unpack2<T>(((const u32*)&xs[i])[j]);
                acc[e][0] = fmaf(a.y, b.y, fmaf(a.x, b.x, acc[e][0]));
            }
        }
#else
    UNROLLED for (int i = 0; i < QUADS; i++)
        UNROLLED for (int j = 0; j < 4; j++) {
            const u32* words = (const u32*)held[i];
            const u32 columns[4] = {words[j], words[4 + j], words[8 + j], words[12 + j]};
            mma(acc[j], columns, (const u32*)&xs[i], T());
        }
#endif
    float total = 0, spread = 0, centre = 0;
    if (LN) {  // of the warp's share of x: its sum, then its squared deviations
#if TRANS_B
        auto each = [&](auto&& use) {
            UNROLLED for (int i = 0; i < STEPS; i++)
                if (i * 256 + lane * 8 < K)
                    UNROLLED for (int j = 0; j < 4; j++) {
                        const float2 a = unpack2<T>(((const u32*)&xs[i])[j]);
                        use(a.x), use(a.y);
                    }
        };
#else
        auto each = [&](auto&& use) {
            UNROLLED for (int i = 0; i < QUADS; i++)
                UNROLLED for (int j = 0; j < 4; j++)
                    if (row_of(i, group % RANGES) + j < K) use(to_float(xs[i].at[j]));
        };
#endif
        each([&](float v) { total += v; });
        UNROLLED for (int step = 1; step < DISTINCT; step *= 2) total += __shfl_xor_sync(~0u, total, step);
        centre = RMS ? 0.0f : total * part_of_warp;
        each([&](float v) { spread += (v - centre) * (v - centre); });
        UNROLLED for (int step = 1; step < DISTINCT; step *= 2) spread += __shfl_xor_sync(~0u, spread, step);
        if (lane == 0) moments[warp] = make_float4(total, centre, spread, count);
    }
#if TRANS_B
    // a lane keeps half of its columns and hands on the others, until it has one
    int column = 0, have = EACH;
    bool last = true;
    UNROLLED for (int step = 1; step < 32; step *= 2) {
        const bool upper = lane & step;
        if (have > 1) {
            have /= 2;
            column += upper ? have : 0;
            UNROLLED for (int j = 0; j < EACH / 2; j++)
                if (j < have) {
                    const float give = upper ? acc[j][0] : acc[j + have][0];
                    acc[j][0] = (upper ? acc[j + have][0] : acc[j][0]) + __shfl_xor_sync(~0u, give, step);
                }
        } else {
            acc[0][0] += __shfl_xor_sync(~0u, acc[0][0], step);
            last = last && !upper;
        }
    }
    if (last)
        UNROLLED for (int j = 0; j < EACH; j++)
            if (j < have) sums[0][0][warp * EACH + column + j] = acc[j][0];
#else
    // of the mma's columns a lane holds two: one lane of four has its rows' own range
    if (t == range / 2)
        UNROLLED for (int j = 0; j < 4; j++)
            *(float2*)&sums[warp][range][group % (COLS / 8) * 8 + 2 * j] =
                range % 2 ? make_float2(acc[j][1], acc[j][3]) : make_float2(acc[j][0], acc[j][2]);
#endif
    __syncthreads();
    if (threadIdx.x >= COLS * RANGES) return;
    float v = 0;
    UNROLLED for (int i = 0; i < (TRANS_B ? 1 : WARPS); i++) v += sums[i][threadIdx.x % RANGES][threadIdx.x / RANGES];
    UNROLLED for (int step = 1; step < RANGES; step *= 2) v += __shfl_xor_sync(~0u, v, step);
    if (!owner || threadIdx.x % RANGES) return;
    if (LN) {
        constexpr int SHARES = TRANS_B ? 1 : WARPS;  // with TRANS_B every warp has seen all of x
        float all = 0, deviations = 0;
        UNROLLED for (int i = 0; i < SHARES; i++) all += moments[i].x;
        const float middle = RMS ? 0.0f : all * part_of_all;
        UNROLLED for (int i = 0; i < SHARES; i++) {
            const float off = moments[i].y - middle;
            deviations += moments[i].z + moments[i].w * off * off;
        }
        row.r1 = middle;
        row.r0 = rsqrtf(deviations * part_of_all + epsilon);
        if (n == 0) mean[0] = row.r1, rstd[0] = row.r0;
    }
    float zz = 0;
    Dots dots = {};
    v = epilogue<float>(v, row, of_col0, of_col1, of_c, alpha, beta, act_alpha, zz, dots);
    y[n] = stored<float>(v, y + n);
    if (SAVE_Z) z[n] = from_float<TO>(zz);
}
