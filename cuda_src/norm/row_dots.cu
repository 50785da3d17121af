// norm/row_dots.cu: what LayerNorm's backward needs of a row before the product, and dbias' parts.
//   dz = dy act'(z)    c1[m] = (1/K) sum_n dz cs    c2[m] = (1/K) sum_n dz (z - cv)
//   part[b][n] = sum of dz over the ROWS rows of block b
// Idea     : a warp keeps RPW rows' sums in registers while the block walks along n in steps of 256; the
//            16 warps' column sums meet in smem, in warp order. One pass over dy and z, one step ahead.
// Inputs   : dy, z [M,N] T; cs, cv [N] f32.   Outputs: c1, c2 [M] f32, part [ceil(M/ROWS), N] f32,
//            dz [M,N] T (ACT other than NONE).   N a multiple of 8, rows 16-byte aligned.
// Macros   : T, ACT, RPW.   Launch: ceil(M / (16 RPW)) blocks of 512 threads.
// Bound    : bytes of dy and z (and dz).
#include "common.cuh"
constexpr int ROWS = 16 * RPW;

extern "C" __global__ __launch_bounds__(512) void row_dots(
    const T* __restrict__ dy, const T* __restrict__ z, const float* __restrict__ cs,
    const float* __restrict__ cv, int M, int N, float inv_k, float act_alpha, T* __restrict__ dz,
    float* __restrict__ c1, float* __restrict__ c2, float* __restrict__ part) {
    __shared__ float sums[2][16][256];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m0 = blockIdx.x * ROWS + warp * RPW;
    float s1[RPW] = {}, s2[RPW] = {};
    uint4 g[RPW], v[RPW];  // the next 8 columns of each row, on their way across the barrier
    auto fetch = [&](int n) {
#pragma unroll
        for (int r = 0; r < RPW; r++)
            if (n < N && m0 + r < M) {
                g[r] = *(const uint4*)(dy + (i64)(m0 + r) * N + n);
                v[r] = *(const uint4*)(z + (i64)(m0 + r) * N + n);
            }
    };
    fetch(lane * 8);
    for (int base = 0, turn = 0; base < N; base += 256, turn ^= 1) {
        int n = base + lane * 8;
        float column[8] = {};
        uint4 gn[RPW], vn[RPW];
#pragma unroll
        for (int r = 0; r < RPW; r++) gn[r] = g[r], vn[r] = v[r];
        fetch(n + 256);
        if (n < N) {
            Vec<float, 8> k1 = load<8>(cs + n), k2 = load<8>(cv + n);
#pragma unroll
            for (int r = 0; r < RPW; r++) {
                if (m0 + r >= M) continue;
                const u32 *gw = (const u32*)&gn[r], *vw = (const u32*)&vn[r];
                u32 out[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float2 d = unpack2<T>(gw[j]), zz = unpack2<T>(vw[j]);
                    if (ACT != NONE) {
                        out[j] = pack2<T>(d.x * act_grad<ACT>(zz.x, act_alpha),
                                          d.y * act_grad<ACT>(zz.y, act_alpha));
                        d = unpack2<T>(out[j]);  // what the products will see
                    }
                    s1[r] += d.x * k1.at[2 * j] + d.y * k1.at[2 * j + 1];
                    s2[r] += d.x * (zz.x - k2.at[2 * j]) + d.y * (zz.y - k2.at[2 * j + 1]);
                    column[2 * j] += d.x;
                    column[2 * j + 1] += d.y;
                }
                if (ACT != NONE)
                    *(uint4*)(dz + (i64)(m0 + r) * N + n) =
                        make_uint4(out[0], out[1], out[2], out[3]);
            }
        }
#pragma unroll
        for (int j = 0; j < 8; j++) sums[turn][warp][j * 32 + lane] = column[j];
        __syncthreads();  // the other buffer's readers passed the barrier before this one
        if (threadIdx.x < 256) {
            float total = 0;
#pragma unroll
            for (int w = 0; w < 16; w++) total += sums[turn][w][threadIdx.x];
            int at = base + threadIdx.x % 32 * 8 + threadIdx.x / 32;
            if (at < N) part[(i64)blockIdx.x * N + at] = total;
        }
    }
#pragma unroll
    for (int r = 0; r < RPW; r++) {
        float a = warp_sum(s1[r]), b = warp_sum(s2[r]);
        if (lane == 0 && m0 + r < M) c1[m0 + r] = a * inv_k, c2[m0 + r] = b * inv_k;
    }
}
