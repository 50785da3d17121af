// log_sum_exp.cuh: the log of a sum of exp in one pass: a running maximum and the sum relative to it.
// ACC is the type of the sums.
#pragma once
#include "reduce/team.cuh"

struct Pair { ACC loss, weight; };  // of a row
struct Sofar { ACC top, sum; };

DEVICE Sofar merge(Sofar a, Sofar b) {
    const ACC m = a.top > b.top || a.top != a.top ? a.top : b.top;
    return {m, (a.sum == 0 ? a.sum : a.sum * fast_exp(a.top - m)) + (b.sum == 0 ? b.sum : b.sum * fast_exp(b.top - m))};
}
