// layernorm/suffix.cuh: what a row kernel makes of a result v before it is stored: SUFFIX(v, v1, v2, v3)
// of it and the first OPERANDS of the elements there of e1, e2, e3, in TY; v in T if not given.
#pragma once
#include "pointwise/math.cuh"
#ifndef SUFFIX
#define OPERANDS 0
#define SUFFIX(v0, v1, v2, v3) v0
#endif
#ifndef TY
#define TY T
#endif
