// cluster.cuh: what the blocks of a cluster (sm_90) say to each other, as PTX spells it.
#pragma once
#include "common.cuh"

DEVICE u32 cluster_rank() {
    u32 r;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
DEVICE void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
// In two halves: what comes between need not wait. No memory is ordered.
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// 16 bytes to the same place of block `rank`'s shared memory.
DEVICE void store_peer(float* to, const Vec<float, 4>& v, u32 rank) {
    asm volatile(
        "{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %0, %1;\n"
        "st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5};\n}" ::"r"(
            (u32)__cvta_generic_to_shared(to)),
        "r"(rank), "f"(v.at[0]), "f"(v.at[1]), "f"(v.at[2]), "f"(v.at[3])
        : "memory");
}
