// sm80.cuh: cp.async, ldmatrix and mma.sync, as PTX spells them.
#pragma once
#include "common.cuh"

DEVICE u32 smem_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes to shared memory, those past `bytes` as zeros (0: nothing is read).
DEVICE void cp_async_16(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
DEVICE void cp_async_4(u32 to, const void* from, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
// 16 bytes to shared memory where they are `there`, else a word four times; nothing else is read.
DEVICE void cp_async_or_fill(u32 to, const void* from, int bytes, bool there, u32 word) {
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16, %2;\n"
                 "@!p st.shared.v4.u32 [%0], {%4, %4, %4, %4};\n}" ::"r"(to), "l"(from), "r"(bytes), "r"((int)there),
                 "r"(word)
                 : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;"); }
template <int N> DEVICE void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
template <bool TRANSPOSE> DEVICE void ldmatrix_x4(u32 (&r)[4], u32 address) {
    if (TRANSPOSE)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(address));
}

// d[16,8] += a[16,k] b[k,8]: lane l holds d rows l/4, l/4+8, columns 2(l%4), +1.
#define MMA_(shape, types)                                                                         \
    asm volatile("mma.sync.aligned." shape ".row.col.f32." types ".f32 {%0,%1,%2,%3}, "            \
                 "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                          \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                  \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
DEVICE void mma(float (&d)[4], const u32 (&a)[4], const u32* b, bf16) {
    MMA_("m16n8k16", "bf16.bf16");
}
DEVICE void mma(float (&d)[4], const u32 (&a)[4], const u32* b, f16) {
    MMA_("m16n8k16", "f16.f16");
}
// the same with k = 8
#define MMA_8_(types)                                                                              \
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." types ".f32 {%0,%1,%2,%3}, "              \
                 "{%4,%5}, {%6}, {%0,%1,%2,%3};"                                                   \
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                  \
                 : "r"(a0), "r"(a1), "r"(b))
DEVICE void mma_8(float (&d)[4], u32 a0, u32 a1, u32 b, bf16) { MMA_8_("bf16.bf16"); }
DEVICE void mma_8(float (&d)[4], u32 a0, u32 a1, u32 b, f16) { MMA_8_("f16.f16"); }
// tf32, k = 8
DEVICE void mma(float (&d)[4], const u32 (&a)[4], const u32* b, float) {
    MMA_("m16n8k8", "tf32.tf32");
}
DEVICE u32 to_tf32(float x) {
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}
// Two float32 numbers as pairs of bf16: what they round to, and what that leaves.
DEVICE void split(float x0, float x1, u32& hi, u32& lo) {
    hi = pack2<bf16>(x0, x1);
    const float2 h = unpack2<bf16>(hi);
    lo = pack2<bf16>(x0 - h.x, x1 - h.y);
}
