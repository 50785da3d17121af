// gemm/vector.cu: y = epilogue(LN?(x) . op(w)) for one row, all of a block's weights in registers.
// Idea     : a block owns a few columns and all of k, so that nothing is exchanged between blocks. Its
//            weights are on their way before the launch before has ended (STATIC_B): what is left behind
//            that is x, a product of registers, one reduction and the store. Without TRANS_B a thread
//            takes 8 neighbouring columns of every ROWS-th row of w, with it a warp takes EACH columns,
//            its lanes 8 neighbours of k each. Row statistics come from the registers that hold x.
// Inputs   : x [K] T, w [K,N] (TRANS_B: [N,K]) T with rows of 16-byte pieces; K (without TRANS_B: at
//            most STEPS ROWS) of any size, with TRANS_B at most 256 STEPS and a multiple of 8.
//            LN: w is folded (wq), col0, col1 = cs, cv; else statistics (if any) in row0...
// Outputs  : y, z [N] TO; mean, rstd [1] f32 (LN).
// Macros   : T, TO, TV, TRANS_B, WARPS, STEPS, EACH (columns of a warp; TRANS_B only), COLS (of a block,
//            8 to 64; without TRANS_B), STATIC_B, LN, RMS; the epilogue's (gemm/epilogue.cuh).
// Launch   : grid ceil(N / columns of a block), 32 WARPS threads.
// Numerics : f32 sums; the order depends on K and the macros alone.
// Bound    : bytes of w; launches in a row are bound by what follows the wait.
#include "gemm/epilogue.cuh"
#ifndef RMS
#define RMS 0
#endif
#if TRANS_B
#define COLS (WARPS * EACH)
#else
#define EACH 8
#endif
constexpr int LANES = TRANS_B ? 1 : COLS / 8;  // side by side along n
constexpr int ROWS = 32 / LANES * WARPS;       // of w that a block takes at a time

extern "C" __global__ __launch_bounds__(32 * WARPS, 1) void gemm_vector(
    const T* x, const T* w, TO* y, TO* z, const TO* c, int N, int K, i64 ldw, float epsilon, float* mean,
    float* rstd, const TR* row0, const TR* row1, const TR* row2, const TR* row3, const TV* col0, const TV* col1,
    float alpha, float beta, float act_alpha) {
    launch_dependents();  // no block waits for another: these go on whatever comes up beside them
    __shared__ float sums[WARPS][COLS];
    __shared__ float4 moments[WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int n0 = blockIdx.x * COLS;
    uint4 held[TRANS_B ? EACH : 1][STEPS];
    auto load_w = [&] {
#pragma unroll
        for (int i = 0; i < STEPS; i++)
#if TRANS_B
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                const int k = i * 256 + lane * 8, n = n0 + warp * EACH + e;
                held[e][i] = k < K && n < N ? *(const uint4*)(w + n * ldw + k) : uint4{};
            }
#else
        {
            const int k = i * ROWS + warp * (32 / LANES) + lane / LANES, n = n0 + lane % LANES * 8;
            held[0][i] = k < K && n < N ? *(const uint4*)(w + k * ldw + n) : uint4{};
        }
#endif
    };
    if (STATIC_B) load_w();
    // of x: how many values the warp will see
    float count = K;
    if (!TRANS_B) {
        count = 0;
#pragma unroll
        for (int i = 0; i < STEPS; i++) count += max(0, min(32 / LANES, K - i * ROWS - warp * (32 / LANES)));
    }
    const float part_of_warp = count > 0 ? 1.0f / count : 0.0f, part_of_all = 1.0f / K;
    grid_dependency_wait();
    if (!STATIC_B) load_w();

    // what only the end needs is on its way as early as x
    const int n = n0 + threadIdx.x;
    const bool owner = threadIdx.x < COLS && n < N;
    float of_c = 0, of_col0 = 0, of_col1 = 0;
    Row row = {};
    float acc[EACH] = {};
#if TRANS_B
    uint4 xs[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const int k = i * 256 + lane * 8;
        xs[i] = k < K ? *(const uint4*)(x + k) : uint4{};
    }
#else
    float xs[STEPS];
#pragma unroll
    for (int i = 0; i < STEPS; i++) {
        const int k = i * ROWS + warp * (32 / LANES) + lane / LANES;
        xs[i] = k < K ? to_float(x[k]) : 0.0f;
    }
#endif
    if (owner) {
        if (EPI_OPERAND) of_c = to_float(c[n]);
        if (EPI_COLS > 0) of_col1 = to_float(col1[n]);
        if (EPI_COLS > 1) of_col0 = to_float(col0[n]);
        if (!LN && EPI_ROWS > 0) {
            row.r0 = to_float(row0[0]);
            if (EPI_R1) row.r1 = to_float(row1[0]);
            if (EPI_R2) row.r2 = to_float(row2[0]);
            if (EPI_ROWS > 3) row.r3 = to_float(row3[0]);
        }
    }
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int e = 0; e < (TRANS_B ? EACH : 1); e++) {
            const u32* words = (const u32*)&held[e][i];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float2 b = unpack2<T>(words[j]);
#if TRANS_B
                const float2 a = unpack2<T>(((const u32*)&xs[i])[j]);
                acc[e] = fmaf(a.y, b.y, fmaf(a.x, b.x, acc[e]));
#else
                acc[2 * j] = fmaf(xs[i], b.x, acc[2 * j]);
                acc[2 * j + 1] = fmaf(xs[i], b.y, acc[2 * j + 1]);
#endif
            }
        }
    float total = 0, spread = 0, centre = 0;
    if (LN) {  // of the warp's share of x: its sum, then its squared deviations
#if TRANS_B
        auto each = [&](auto&& use) {
#pragma unroll
            for (int i = 0; i < STEPS; i++)
                if (i * 256 + lane * 8 < K)
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                        const float2 a = unpack2<T>(((const u32*)&xs[i])[j]);
                        use(a.x), use(a.y);
                    }
        };
#else
        auto each = [&](auto&& use) {
#pragma unroll
            for (int i = 0; i < STEPS; i++)
                if (i * ROWS + warp * (32 / LANES) + lane / LANES < K) use(xs[i]);
        };
#endif
        each([&](float v) { total += v; });
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
        centre = RMS ? 0.0f : total * part_of_warp;
        each([&](float v) { spread += (v - centre) * (v - centre); });
#pragma unroll
        for (int step = LANES; step < 32; step *= 2) spread += __shfl_xor_sync(~0u, spread, step);
        if (lane == 0) moments[warp] = make_float4(total, centre, spread, count);
    }
    // a lane keeps half of its columns and hands on the others, until it has one
    int column = TRANS_B ? 0 : lane % LANES * 8;
    int have = EACH;
    bool last = true;
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) {
        const bool upper = lane & step;
        if (have > 1) {
            have /= 2;
            column += upper ? have : 0;
#pragma unroll
            for (int j = 0; j < EACH / 2; j++)
                if (j < have) {
                    const float give = upper ? acc[j] : acc[j + have];
                    acc[j] = (upper ? acc[j + have] : acc[j]) + __shfl_xor_sync(~0u, give, step);
                }
        } else {
            acc[0] += __shfl_xor_sync(~0u, acc[0], step);
            last = last && !upper;
        }
    }
    if (last)
#pragma unroll
        for (int j = 0; j < EACH; j++)
            if (j < have) sums[TRANS_B ? 0 : warp][(TRANS_B ? warp * EACH : 0) + column + j] = acc[j];
    __syncthreads();
    if (!owner) return;
    float v = 0;
#pragma unroll
    for (int i = 0; i < (TRANS_B ? 1 : WARPS); i++) v += sums[i][threadIdx.x];
    if (LN) {
        constexpr int SHARES = TRANS_B ? 1 : WARPS;  // with TRANS_B every warp has seen all of x
        float all = 0, deviations = 0;
#pragma unroll
        for (int i = 0; i < SHARES; i++) all += moments[i].x;
        const float middle = RMS ? 0.0f : all * part_of_all;
#pragma unroll
        for (int i = 0; i < SHARES; i++) {
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
