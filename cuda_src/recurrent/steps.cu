// recurrent/steps.cu: all steps of one direction of an LSTM, GRU or RNN in one launch.
// Idea     : a cluster holds BATCH sequences, each block of it UNITS hidden units with their columns
//            of Rᵀ in shared memory (STORED; else they come from L2 at each step). A step: the block
//            multiplies all h by its columns (threads a column and a piece of k each), works out its
//            units, and stores the new h into the shared memory of every block; one barrier.
// Inputs   : z [steps, batch, GATES HIDDEN], rt [HIDDEN, GATES HIDDEN] (GRU: rt of the gates z and r,
//            rn of the new state), bn [HIDDEN] (GRU_LINEAR), h0, c0 [batch, HIDDEN] T; lengths [batch].
// Outputs  : y [steps, batch, HIDDEN], 0 past a sequence's length; h, c [batch, HIDDEN].
// Macros   : T ACC; KIND HIDDEN UNITS BATCH BLOCK CLUSTER STORED REVERSE.
// Numerics : sums and states in ACC, in an order fixed by the macros.
// Bound    : latency: shared memory's reads of the weights, and a cluster's barrier a step.
#include "recurrent/steps.cuh"

#define ROWS (GATES * UNITS)

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    recurrent_steps(const T* z, const T* rt, const T* rn, const T* bn, const T* h0, const T* c0,
                    const int* lengths, T* y, T* h, T* c, int steps, int batch) {
    after_previous_launch();
    extern __shared__ __align__(16) ACC shared[];
    ACC* const state = shared;                                      // [2][BATCH][PADDED]
    ACC* const kept = state + 2 * BATCH * PADDED;                   // [BATCH][PADDED], GRU
    ACC* const sums = kept + (KIND == GRU ? BATCH * PADDED : 0);    // [PARTS][BATCH][ROWS]
    T* const stored = (T*)(sums + PARTS_MOST * BATCH * ROWS);       // [PADDED][ROWS]
    const int rank = blockIdx.x % CLUSTER, first = rank * UNITS;
    const int row0 = blockIdx.x / CLUSTER * BATCH;

    const auto original = [&](int k, int row) {
        const int gate = row / UNITS, u = first + row % UNITS;
        if (k >= HIDDEN || u >= HIDDEN) return T{};
        if (KIND == GRU)
            return gate < 2 ? rt[(i64)k * 2 * HIDDEN + gate * HIDDEN + u] : rn[(i64)k * HIDDEN + u];
        return rt[(i64)k * GATES * HIDDEN + gate * HIDDEN + u];
    };
    const auto weight = [&](int k, int row) {
        return (ACC)widen(STORED ? stored[k * ROWS + row] : original(k, row));
    };
    if (STORED)
        for (int i = threadIdx.x; i < PADDED * ROWS; i += BLOCK) stored[i] = original(i / ROWS, i % ROWS);
    for (int i = threadIdx.x; i < BATCH * PADDED; i += BLOCK) {
        const int b = row0 + i / PADDED, u = i % PADDED;
        state[i] = b < batch && u < HIDDEN ? (ACC)widen(h0[(i64)b * HIDDEN + u]) : ACC(0);
        state[BATCH * PADDED + i] = 0;
        if (KIND == GRU) kept[i] = 0;
    }
    __syncthreads();
    ACC hold[ITEMS], cell[ITEMS], bias[ITEMS];
    int length[ITEMS];
    UNROLLED for (int n = 0; n < ITEMS; n++) {
        const int item = threadIdx.x + n * BLOCK, b = row0 + item / UNITS, u = first + item % UNITS;
        const bool real = item < BATCH * UNITS && b < batch && u < HIDDEN;
        length[n] = real ? lengths[b] : -1;
        hold[n] = real ? state[item / UNITS * PADDED + u] : ACC(0);
        cell[n] = real && KIND == LSTM ? (ACC)widen(c0[(i64)b * HIDDEN + u]) : ACC(0);
        bias[n] = real && KIND == GRU_LINEAR ? (ACC)widen(bn[u]) : ACC(0);
    }
    cluster_or_block_sync();  // every block is there, and has its zeros

    for (int s = 0; s < steps; s++) {
        const int t = REVERSE ? steps - 1 - s : s;
        const ACC* const now = state + s % 2 * BATCH * PADDED;
        ACC* const next = state + (s + 1) % 2 * BATCH * PADDED;
        ACC x[ITEMS][4];
        UNROLLED for (int n = 0; n < ITEMS; n++) {
            const int item = threadIdx.x + n * BLOCK, b = row0 + item / UNITS, u = first + item % UNITS;
            UNROLLED for (int g = 0; g < GATES; g++)
                x[n][g] = length[n] >= 0
                              ? (ACC)widen(z[((i64)t * batch + b) * GATES * HIDDEN + g * HIDDEN + u])
                              : ACC(0);
        }
        constexpr int ALL = KIND == GRU ? 2 * UNITS : ROWS;
        product<0, ALL, PADDED, PADDED, ROWS>(now, sums, weight);
        if (KIND == GRU) {
            UNROLLED for (int n = 0; n < ITEMS; n++) {
                const int item = threadIdx.x + n * BLOCK, b = item / UNITS, j = item % UNITS;
                if (length[n] < 0) continue;
                x[n][0] = sigmoid_of(x[n][0] + total_of<ALL, ROWS>(sums, b, j));
                const ACC reset = sigmoid_of(x[n][1] + total_of<ALL, ROWS>(sums, b, UNITS + j));
                to_all(kept + b * PADDED + first + j, reset * hold[n]);
            }
            cluster_or_block_sync();
            product<(KIND == GRU ? 2 * UNITS : 0), UNITS, PADDED, PADDED, ROWS>(kept, sums, weight);
        }
        UNROLLED for (int n = 0; n < ITEMS; n++) {
            const int item = threadIdx.x + n * BLOCK, b = item / UNITS, j = item % UNITS, u = first + j;
            if (length[n] < 0) continue;
            const auto sum = [&](int gate) { return total_of<ALL, ROWS>(sums, b, gate * UNITS + j); };
            ACC fresh, inner = cell[n];
            if (KIND == LSTM) {
                const ACC i = sigmoid_of(x[n][0] + sum(0)), f = sigmoid_of(x[n][2] + sum(2));
                inner = f * cell[n];
                inner += i * tanh(x[n][3] + sum(3));
                fresh = sigmoid_of(x[n][1] + sum(1)) * tanh(inner);
            } else if (KIND == GRU || KIND == GRU_LINEAR) {
                ACC update, made;
                if (KIND == GRU) {
                    update = x[n][0];
                    made = tanh(x[n][2] + total_of<UNITS, ROWS>(sums, b, 2 * UNITS + j));
                } else {
                    update = sigmoid_of(x[n][0] + sum(0));
                    made = tanh(x[n][2] + sigmoid_of(x[n][1] + sum(1)) * (sum(2) + bias[n]));
                }
                fresh = (ACC(1) - update) * made + update * hold[n];
            } else {
                const ACC a = x[n][0] + sum(0);
                fresh = KIND == RNN_TANH ? tanh(a) : a > 0 || a != a ? a : ACC(0);
            }
            const bool alive = t < length[n];
            if (alive) {
                hold[n] = (ACC)widen(narrow<T>(fresh));
                cell[n] = inner;
            }
            to_all(next + b * PADDED + u, hold[n]);
            y[((i64)t * batch + row0 + b) * HIDDEN + u] = alive ? narrow<T>(fresh) : narrow<T>(ACC(0));
        }
        cluster_or_block_sync();
    }
    UNROLLED for (int n = 0; n < ITEMS; n++) {
        const int item = threadIdx.x + n * BLOCK, b = row0 + item / UNITS, u = first + item % UNITS;
        if (length[n] < 0) continue;
        h[(i64)b * HIDDEN + u] = narrow<T>(hold[n]);
        if (KIND == LSTM) c[(i64)b * HIDDEN + u] = narrow<T>(cell[n]);
    }
}
