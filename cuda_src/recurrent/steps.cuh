// recurrent/steps.cuh: what the steps of LSTM, GRU and RNN share with those of their gradients.
// A cluster of CLUSTER blocks has BATCH sequences; block r of it the units [r UNITS, (r + 1) UNITS).
#pragma once
#include "cluster.cuh"

#define LSTM 0
#define GRU 1
#define GRU_LINEAR 2
#define RNN_TANH 3
#define RNN_RELU 4
#define GATES (KIND == LSTM ? 4 : KIND == GRU || KIND == GRU_LINEAR ? 3 : 1)
#define PADDED ((HIDDEN + 3) / 4 * 4)
#define ITEMS ((BATCH * UNITS + BLOCK - 1) / BLOCK)
#define PARTS_MOST 8

DEVICE ACC sigmoid_of(ACC x) { return ACC(1) / (ACC(1) + exp(-x)); }

// All blocks of the cluster, and what each wrote into the others.
DEVICE void cluster_or_block_sync() {
#if CLUSTER > 1
    cluster_sync();
#else
    __syncthreads();
#endif
}

// A value to the same place of every block's shared memory.
DEVICE void to_all(ACC* to, ACC value) {
#if CLUSTER > 1
    const u32 own = (u32)__cvta_generic_to_shared(to);
    UNROLLED for (u32 rank = 0; rank < CLUSTER; rank++) {
        u32 remote;
        asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(own), "r"(rank));
        if constexpr (sizeof(ACC) == 8)
            asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(remote), "d"((double)value) : "memory");
        else
            asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(remote), "f"((float)value) : "memory");
    }
#else
    *to = value;
#endif
}

// sums[part][b][FIRST + r] = parts of Σ_k from[b][k] weight(k, FIRST + r) for r < COUNT, k in
// [0, DEPTH), DEPTH a multiple of 4. The rows of `from` are STRIDE long. Ends with all parts visible.
template <int FIRST, int COUNT, int DEPTH, int STRIDE, int WIDTH, class Weight>
DEVICE void product(const ACC* from, ACC* sums, Weight weight) {
    constexpr int LANES = COUNT >= BLOCK ? BLOCK : (COUNT + 31) / 32 * 32;
    constexpr int PARTS = BLOCK / LANES < PARTS_MOST ? BLOCK / LANES : PARTS_MOST;
    constexpr int PIECE = (DEPTH / 4 + PARTS - 1) / PARTS * 4;
    const int part = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    if (part < PARTS) {
        const int begin = part * PIECE, end = begin + PIECE < DEPTH ? begin + PIECE : DEPTH;
        for (int r = lane; r < COUNT; r += LANES) {
            ACC total[BATCH];
            UNROLLED for (int b = 0; b < BATCH; b++) total[b] = 0;
            for (int k = begin; k < end; k += 4) {
                ACC w[4];
                UNROLLED for (int i = 0; i < 4; i++) w[i] = weight(k + i, FIRST + r);
                UNROLLED for (int b = 0; b < BATCH; b++) {
                    const Vec<ACC, 4> h = load<4>(from + b * STRIDE + k);
                    UNROLLED for (int i = 0; i < 4; i++) total[b] += h.at[i] * w[i];
                }
            }
            UNROLLED for (int b = 0; b < BATCH; b++) sums[(part * BATCH + b) * WIDTH + FIRST + r] = total[b];
        }
    }
    __syncthreads();
}
// The sum over the parts that product<, COUNT,> left.
template <int COUNT, int WIDTH> DEVICE ACC total_of(const ACC* sums, int b, int row) {
    constexpr int LANES = COUNT >= BLOCK ? BLOCK : (COUNT + 31) / 32 * 32;
    constexpr int PARTS = BLOCK / LANES < PARTS_MOST ? BLOCK / LANES : PARTS_MOST;
    ACC total = 0;
    UNROLLED for (int part = 0; part < PARTS; part++) total += sums[(part * BATCH + b) * WIDTH + row];
    return total;
}
