// recurrent/steps_grad.cu: the gradient of recurrent/steps.cu, backwards over all steps in one launch.
// Idea     : blocks share units and sequences as there. A step: each thread works out the gradients of
//            its units' sums from dh (and dc, which it keeps), stores them to dz and into the shared
//            memory of every block of the cluster; a barrier; then dh of the step before is their
//            product with the block's columns of R, which stay in shared memory (STORED). LSTM's
//            states c come again in a pass of their own, forwards, through `cells`.
// Inputs   : z [steps, batch, GATES HIDDEN], the sums that the activations took (GRU: of the gates z and
//            r alone, z2 [steps, batch, HIDDEN] that of the new state; GRU_LINEAR: of the inputs alone,
//            z2 [.., 3 HIDDEN] of the states); before [steps, batch, HIDDEN], GRU; r [GATES HIDDEN,
//            HIDDEN] (GRU: [2 HIDDEN, HIDDEN], and rn [HIDDEN, HIDDEN]); c0; lengths; dy; dh_T, dc_T.
// Outputs  : dz [steps, batch, GATES HIDDEN], dz2 the same of z2 (GRU_LINEAR), dh0, dc0.
// Macros   : T ACC; KIND HIDDEN UNITS BATCH BLOCK CLUSTER STORED REVERSE.
// Numerics : sums and states in ACC, in an order fixed by the macros.
// Bound    : latency: the weights' reads, and two barriers of the cluster a step (GRU: four).
#include "recurrent/steps.cuh"

#define DEPTH (GATES * PADDED)

extern "C" __global__ void __launch_bounds__(BLOCK, 1) recurrent_steps_grad(
    const T* z, const T* z2, const T* before, const T* r, const T* rn, const T* c0, const int* lengths, const T* dy,
    const T* dh_T, const T* dc_T, ACC* cells, T* dz, T* dz2, T* dh0, T* dc0, int steps, int batch) {
    after_previous_launch();
    extern __shared__ __align__(16) ACC shared[];
    ACC* const slopes = shared;                                 // [BATCH][GATES][PADDED]
    ACC* const sums = slopes + BATCH * DEPTH;                   // [PARTS][BATCH][UNITS]
    T* const stored = (T*)(sums + PARTS_MOST * BATCH * UNITS);  // [GATES][PADDED][UNITS]
    const int rank = blockIdx.x % CLUSTER, first = rank * UNITS;
    const int row0 = blockIdx.x / CLUSTER * BATCH;

    const auto original = [&](int k, int j) {
        const int gate = k / PADDED, unit = k % PADDED, u = first + j;
        if (unit >= HIDDEN || u >= HIDDEN) return T{};
        if (KIND == GRU && gate == 2) return rn[(i64)unit * HIDDEN + u];
        return r[((i64)gate * HIDDEN + unit) * HIDDEN + u];
    };
    if (STORED)
        for (int i = threadIdx.x; i < DEPTH * UNITS; i += BLOCK) stored[i] = original(i / UNITS, i % UNITS);
    for (int i = threadIdx.x; i < BATCH * DEPTH; i += BLOCK) slopes[i] = 0;

    ACC dh[ITEMS], dc[ITEMS];
    int length[ITEMS];
    UNROLLED for (int n = 0; n < ITEMS; n++) {
        const int item = threadIdx.x + n * BLOCK, b = row0 + item / UNITS, u = first + item % UNITS;
        const bool real = item < BATCH * UNITS && b < batch && u < HIDDEN;
        length[n] = real ? lengths[b] : -1;
        const i64 place = (i64)b * HIDDEN + u;
        dh[n] = real ? (ACC)widen(dh_T[place]) : ACC(0);
        dc[n] = real && KIND == LSTM ? (ACC)widen(dc_T[place]) : ACC(0);
        if (KIND != LSTM || !real) continue;
        ACC c = (ACC)widen(c0[place]);
        for (int s = 0; s < steps; s++) {
            const int t = REVERSE ? steps - 1 - s : s;
            const T* const row = z + ((i64)t * batch + b) * GATES * HIDDEN + u;
            cells[((i64)t * batch + b) * HIDDEN + u] = c;
            const ACC i = sigmoid_of((ACC)widen(row[0])), f = sigmoid_of((ACC)widen(row[2 * HIDDEN]));
            const ACC g = tanh((ACC)widen(row[3 * HIDDEN]));
            if (t < length[n]) c = f * c + i * g;
        }
    }
    cluster_or_block_sync();

    for (int s = steps - 1; s >= 0; s--) {
        const int t = REVERSE ? steps - 1 - s : s;
        ACC stays[ITEMS], reset[ITEMS], old[ITEMS], slope_r[ITEMS];
        UNROLLED for (int n = 0; n < ITEMS; n++) {
            const int item = threadIdx.x + n * BLOCK, b = item / UNITS, u = first + item % UNITS;
            if (length[n] < 0) continue;
            const bool alive = t < length[n];
            const i64 cell = (i64)t * batch + row0 + b;
            const ACC g = dh[n] + (ACC)widen(dy[cell * HIDDEN + u]);
            ACC out[4], out2 = 0;
            stays[n] = 0;
            if (KIND == LSTM) {
                const T* const row = z + cell * GATES * HIDDEN + u;
                const ACC i = sigmoid_of((ACC)widen(row[0])), o = sigmoid_of((ACC)widen(row[HIDDEN]));
                const ACC f = sigmoid_of((ACC)widen(row[2 * HIDDEN])), a = tanh((ACC)widen(row[3 * HIDDEN]));
                const ACC c = cells[cell * HIDDEN + u], tc = tanh(f * c + i * a);
                const ACC dcell = dc[n] + g * o * (ACC(1) - tc * tc);
                out[0] = dcell * a * i * (ACC(1) - i);
                out[1] = g * tc * o * (ACC(1) - o);
                out[2] = dcell * c * f * (ACC(1) - f);
                out[3] = dcell * i * (ACC(1) - a * a);
                if (alive) dc[n] = dcell * f;
            } else if (KIND == GRU || KIND == GRU_LINEAR) {
                const ACC h = (ACC)widen(before[cell * HIDDEN + u]);
                ACC update, made, inner = 0;
                if (KIND == GRU) {
                    const T* const row = z + cell * 2 * HIDDEN + u;
                    update = sigmoid_of((ACC)widen(row[0]));
                    reset[n] = sigmoid_of((ACC)widen(row[HIDDEN]));
                    made = tanh((ACC)widen(z2[cell * HIDDEN + u]));
                } else {
                    const T* const row = z + cell * GATES * HIDDEN + u;
                    const T* const own = z2 + cell * GATES * HIDDEN + u;
                    update = sigmoid_of((ACC)widen(row[0]) + (ACC)widen(own[0]));
                    reset[n] = sigmoid_of((ACC)widen(row[HIDDEN]) + (ACC)widen(own[HIDDEN]));
                    inner = (ACC)widen(own[2 * HIDDEN]);
                    made = tanh((ACC)widen(row[2 * HIDDEN]) + reset[n] * inner);
                }
                out[2] = g * (ACC(1) - update) * (ACC(1) - made * made);
                out[0] = g * (h - made) * update * (ACC(1) - update);
                slope_r[n] = reset[n] * (ACC(1) - reset[n]);
                out[1] = out[2] * inner * slope_r[n];  // GRU: when R's product is there
                out2 = out[2] * reset[n];
                stays[n] = g * update;
                old[n] = h;
            } else {
                const ACC a = (ACC)widen(z[cell * HIDDEN + u]), v = tanh(a);
                out[0] = g * (KIND == RNN_TANH ? ACC(1) - v * v : a > 0 ? ACC(1) : ACC(0));
            }
            UNROLLED for (int k = 0; k < GATES; k++) {
                if (KIND == GRU && k == 1) continue;
                const ACC value = alive ? out[k] : ACC(0);
                dz[cell * GATES * HIDDEN + k * HIDDEN + u] = narrow<T>(value);
                ACC passed = value;
                if (KIND == GRU_LINEAR) {
                    if (k == 2) passed = alive ? out2 : ACC(0);
                    dz2[cell * GATES * HIDDEN + k * HIDDEN + u] = narrow<T>(passed);
                }
                to_all(slopes + b * DEPTH + k * PADDED + u, passed);
            }
        }
        cluster_or_block_sync();
        constexpr int GATES_FIRST = KIND == GRU ? 2 * PADDED : 0;
        const auto weight_at = [&](int k, int j) {
            return (ACC)widen(STORED ? stored[k * UNITS + j] : original(k, j));
        };
        if (KIND == GRU) {  // u = dn R_n, of which r's gradient is made
            const auto weight = [&](int k, int j) { return weight_at(GATES_FIRST + k, j); };
            product<0, UNITS, PADDED, DEPTH, UNITS>(slopes + GATES_FIRST, sums, weight);
            UNROLLED for (int n = 0; n < ITEMS; n++) {
                const int item = threadIdx.x + n * BLOCK, b = item / UNITS, j = item % UNITS;
                if (length[n] < 0) continue;
                const ACC through = total_of<UNITS, UNITS>(sums, b, j);
                const ACC value = t < length[n] ? through * old[n] * slope_r[n] : ACC(0);
                stays[n] += through * reset[n];
                dz[((i64)t * batch + row0 + b) * GATES * HIDDEN + HIDDEN + first + j] = narrow<T>(value);
                to_all(slopes + b * DEPTH + PADDED + first + j, value);
            }
            cluster_or_block_sync();
        }
        constexpr int REST = KIND == GRU ? 2 * PADDED : DEPTH;
        product<0, UNITS, REST, DEPTH, UNITS>(slopes, sums, weight_at);
        UNROLLED for (int n = 0; n < ITEMS; n++) {
            const int item = threadIdx.x + n * BLOCK, b = item / UNITS, j = item % UNITS;
            if (length[n] >= 0 && t < length[n]) dh[n] = stays[n] + total_of<UNITS, UNITS>(sums, b, j);
        }
        cluster_or_block_sync();  // the slopes are read: the next step may write over them
    }
    UNROLLED for (int n = 0; n < ITEMS; n++) {
        const int item = threadIdx.x + n * BLOCK, b = row0 + item / UNITS, u = first + item % UNITS;
        if (length[n] < 0) continue;
        dh0[(i64)b * HIDDEN + u] = narrow<T>(dh[n]);
        if (KIND == LSTM) dc0[(i64)b * HIDDEN + u] = narrow<T>(dc[n]);
    }
}
