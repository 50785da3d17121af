// norm/planes.cuh: float32 values as sums of bf16: two hold them to 2^-17, three to 2^-25.
#pragma once
#include "common.cuh"

// V neighbours, the next plane `stride` elements on; V 4 or 8, `to` aligned to as many elements.
template <int PLANES_, int V> DEVICE void store_planes(bf16* to, i64 stride, float (&rest)[V]) {
    UNROLLED for (int i = 0; i < PLANES_; i++) {
        Vec<u32, V / 2> words;
        UNROLLED for (int j = 0; j < V / 2; j++) {
            words.at[j] = pack2<bf16>(rest[2 * j], rest[2 * j + 1]);
            float2 held = unpack2<bf16>(words.at[j]);
            rest[2 * j] -= held.x, rest[2 * j + 1] -= held.y;
        }
        store<V / 2>((u32*)(to + i * stride), words);
    }
}
