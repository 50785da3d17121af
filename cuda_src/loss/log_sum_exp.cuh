// log_sum_exp.cuh: the log of a sum of exp in one pass: a running maximum and the sum relative to it.
// ACC is the type of the sums.
#pragma once
#include "reduce/team.cuh"

struct Pair { ACC loss, weight; };  // of a row
struct Sofar { ACC top, sum; };

DEVICE Sofar merge(Sofar a, Sofar b) {
    const ACC m = a.top > b.top || a.top != a.top ? a.top : b.top;
    return {m, (a.sum == 0 ? a.sum : a.sum * fast_exp(a.top - m)) +
                   (b.sum == 0 ? b.sum : b.sum * fast_exp(b.top - m))};
}
template <int V, class E> DEVICE Sofar take(Sofar s, const Vec<E, V>& t) {
    ACC top = s.top;
#pragma unroll
    for (int j = 0; j < V; j++) top = (ACC)widen(t.at[j]) > top ? (ACC)widen(t.at[j]) : top;
    if (top > s.top) s.sum *= fast_exp(s.top - top), s.top = top;
    if (s.top == -INFINITE) top = 0;  // exp(-inf - 0) is 0
#pragma unroll
    for (int j = 0; j < V; j++) s.sum += fast_exp((ACC)widen(t.at[j]) - top);
    return s;
}
