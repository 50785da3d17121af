// tma_ring.cuh: COUNT stages of shared memory that TMA fills and warps read in turn, with two barriers each.
#pragma once
#include "wgmma.cuh"

// The view of one of those who go round, the thread that copies or a warp that reads; CTAS of a cluster fill a stage
// together, and all must have read it.
template <int COUNT, int CTAS = 1> struct Ring {
    u32 full, empty;  // barriers: a stage's bytes have come; its readers are through
    int s = 0;        // the stage whose turn it is
    u32 phase;        // of the barrier that is awaited there

    DEVICE Ring(u32 barriers, bool copies) : full(barriers), empty(barriers + COUNT * 8), phase(copies) {}
    // By one thread, before it fences and the block meets: `readers` warps release each stage.
    DEVICE void set_up(int readers) const {
        for (int i = 0; i < COUNT; i++) {
            mbarrier_init(full + i * 8, 1);
            mbarrier_init(empty + i * 8, readers);
        }
    }
    DEVICE void next() {
        if (++s == COUNT) s = 0, phase ^= 1;
    }
    DEVICE void skip(int steps) {
        s += steps;
        phase ^= s / COUNT & 1;
        s %= COUNT;
    }
    DEVICE void await_free() const { mbarrier_wait(empty + s * 8, phase); }
    // The barrier on which `bytes` of copies are to land, once the stage is free.
    DEVICE u32 claim(u32 bytes) const {
        await_free();
        mbarrier_expect(full + s * 8, bytes);
        return full + s * 8;
    }
    DEVICE void await() const { mbarrier_wait(full + s * 8, phase); }
    // By all lanes of a warp that has read the stage, or the one before it.
    DEVICE void release(int lane) const { release_stage(s, lane); }
    DEVICE void release_before(int lane) const { release_stage(s == 0 ? COUNT - 1 : s - 1, lane); }
    DEVICE void release_stage(int stage, int lane) const {
        if (CTAS == 1) {
            if (lane == 0) mbarrier_arrive(empty + stage * 8);
        } else if (lane < CTAS) {
            mbarrier_arrive_remote(empty + stage * 8, lane);
        }
    }
    // products(stage, more) of each step, `more` after the first: it awaits the stage. Those of the last step are not
    // awaited. APART: ptxas sees that the first step needs no sums from before, whose registers are then free until it.
    template <bool APART = false, class Products> DEVICE void multiply(int steps, int lane, Products products) {
        auto turn = [&](bool more) {
            products(s, more);
            wgmma_commit();
            if (more) {  // the step before is done: its stage is free
                wgmma_wait<1>();
                release_before(lane);
            }
            next();
        };
        if (APART) turn(false);
        ROLLED for (int step = APART; step < steps; step++) turn(step > 0);
    }
};
