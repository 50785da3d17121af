// norm/planes.cuh: float32 values as sums of bf16: two hold them to 2^-17, three to 2^-25; accesses that may be RAGGED.
#pragma once
#include "common.cuh"

#ifndef RAGGED
#define RAGGED 0
#endif

// V neighbours, of which `count` are there.
template <int V, class E> DEVICE Vec<E, V> load_some(const E* p, int count) {
    if (!RAGGED) return load<V>(p);
    Vec<E, V> v;
    UNROLLED for (int j = 0; j < V; j++) v.at[j] = j < count ? p[j] : E{};
    return v;
}
template <int V, class E> DEVICE void store_some(E* p, const Vec<E, V>& v, int count) {
    if (!RAGGED) return store<V>(p, v);
    UNROLLED for (int j = 0; j < V; j++)
        if (j < count) p[j] = v.at[j];
}

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
