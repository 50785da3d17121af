"""Graphs that become fused attention, for `fusion_cases`."""

from cases import fusion_rows

ROWS = """
# --- attention --------------------------------------------------------------------------------
attention_without_mask: Sdpa; fed q k v mask
  ($QKV) => (float[B,H,S,8] y)
  $SCORES  $SCALE  z = Mul (s, f)  p = Softmax <axis = -1> (z)  y = MatMul (p, v)
attention_by_einsum_bhsd: Sdpa; fed q k v; gone Einsum
  (float[2,3,S,8] q, float[2,3,5,8] k, float[2,3,5,8] v) => (float[B,H,S,8] y)
  s = Einsum <equation = "bhid, bhjd -> bhij"> (q, k)  $SCALE  z = Mul (s, f)
  p = Softmax <axis = -1> (z)  y = Einsum <equation = "bhij, bhjd -> bhid"> (p, v)
  spares empty: onnxruntime's Einsum dies of a batch of none (1.32)
attention_by_einsum_bshd: Sdpa; fed q k v; gone Einsum
  (float[2,S,4,8] q, float[2,5,4,8] k, float[2,5,4,8] v) => (float[B,S,4,8] y)
  s = Einsum <equation = "bihd,bjhd->bhij"> (q, k)  $SCALE  z = Mul (s, f)
  p = Softmax <axis = -1> (z)  y = Einsum <equation = "bhij,bjhd->bihd"> (p, v)
  spares empty: onnxruntime's Einsum dies of a batch of none (1.32)
# as Keras writes it
attention_by_einsum_with_heads_in_the_weights: Gemm Gemm Gemm Sdpa Gemm; gone Einsum
  (float[B,T,16] x, float[16,2,8] wq, float[2,8] cq, float[16,2,8] wk, float[2,8] ck,
  float[16,2,8] wv, float[2,8] cv, float[2,8,24] wo, float[24] co)
  mq = Einsum <equation = "abc,cde->abde"> (x, wq)  q = Add (mq, cq)
  mk = Einsum <equation = "abc,cde->abde"> (x, wk)  k = Add (mk, ck)
  mv = Einsum <equation = "abc,cde->abde"> (x, wv)  v = Add (mv, cv)  scale = float {0.35355338}
  qs = Mul (q, scale)  s = Einsum <equation = "aecd,abcd->acbe"> (k, qs)  p = Softmax (s)
  h = Einsum <equation = "acbe,aecd->abcd"> (p, v)  o = Einsum <equation = "abcd,cde->abe"> (h, wo)
  y = Add (o, co)
  spares empty: onnxruntime's Einsum dies of a batch of none (1.32)
product_by_einsum_$name: gone Einsum;
name, x, w, y, equation, of in rows_and_a_batch B,3,5,8 3,4,8 B,3,5,4 bhwc,hkc->bhwk x, w |
last_row_is_first B,3,5,8 5,4,8 B,3,5,4 bhwc,wkc->bhwk x, w |
swapped B,T,8 8,3,2 3,2,B,T cde,abc->deab w, x |
batch_and_two_sums 3,T,2,4 3,2,4,5 3,T,5 nabc,nbcd->nad x, w |
leading_axes B,T,8 4,8 B,T,4 ...d,kd->...k x, w
  (float[$x] x, float[$w] w) => (float[$y] y)
  y = Einsum <equation = "$equation"> ($of)
  spares empty: onnxruntime's Einsum dies of a batch of none (1.32)
product_by_einsum_only_turned: gone Einsum
  (float[B,T,8] x) => (float[8,B,T] y)
  y = Einsum <equation = "abc->cab"> (x)
  spares empty: onnxruntime's Einsum dies of a batch of none (1.32)
product_by_einsum: LayerNormGemm
  ($IN)
  n = LayerNormalization (x, g, b)  m = Einsum <equation = "btk,kn->btn"> (n, w)  y = Add (m, c)
attention_mask_and_guard: SdpaMaskNanGuard; fed q k v mask
  ($QKV, float[B,1,S,T] mask) => (float[B,H,S,8] y)
  $SCORES  $SCALE  zero = float {0.0}  z = Mul (s, f)  zm = Add (z, mask)  p = Softmax (zm)
  i = IsNaN (p)  pn = Where (i, zero, p)  y = MatMul (pn, v)
attention_mask_by_where: SdpaWhere; fed q k v mask
  ($QKV, bool[B,1,S,T] mask) => (float[B,H,S,8] y)
  $SCORES  $SCALE  low = float {-3.4028235e+38}  z = Div (s, f)  zm = Where (mask, z, low)
  p = Softmax (zm)  y = MatMul (p, v)
attention_mask_before_the_scale: SdpaMask; fed q k v mask
  ($QKV, float[B,1,S,T] mask) => (float[B,H,S,8] y)
  $SCORES  f = float {0.25}  zm = Add (s, mask)  z = Mul (zm, f)  p = Softmax (z)
  y = MatMul (p, v)
attention_where_before_the_scale: SdpaWhere; fed q k v mask
  ($QKV, bool[B,1,S,T] mask) => (float[B,H,S,8] y)
  $SCORES  $SCALE  low = float {-3.4028235e+38}  zm = Where (mask, s, low)  z = Mul (zm, f)
  p = Softmax (z)  y = MatMul (p, v)
attention_mask_$name: fed q k v mask; stays mask-scaled: $told;
name, scale, told in before_a_scale_that_rounds 0.35355339 0.353553 |
enlarged_by_the_scale 2.0 2
  ($QKV, float[B,1,S,T] mask) => (float[B,H,S,8] y)
  $SCORES  f = float {$scale}  zm = Add (s, mask)  z = Mul (zm, f)  p = Softmax (z)
  y = MatMul (p, v)
attention_scaled_operands: Sdpa; fed q k v
  (float[B,S,4,8] q, float[B,T,4,8] k, float[B,T,4,8] v) => (float[B,4,S,8] y)
  f = float {0.59460355}  qt = Transpose <perm = [0,2,1,3]> (q)  qs = Mul (qt, f)
  kt = Transpose <perm = [0,2,3,1]> (k)  ks = Mul (kt, f)  s = MatMul (qs, ks)  p = Softmax (s)
  vt = Transpose <perm = [0,2,1,3]> (v)  y = MatMul (p, vt)
attention_grouped_heads: GroupedSdpa; fed q k v
  (float[B,4,S,8] q, float[B,2,T,8] k, float[B,2,T,8] v) => (float[B,4,S,8] y)
  two = int64[1] {2}  one = int64[1] {1}  b = Shape <start = 0, end = 1> (k)
  t = Shape <start = 2, end = 3> (k)  h = int64[1] {4}  d = int64[1] {8}
  five = Concat <axis = 0> (b, two, two, t, d)  four = Concat <axis = 0> (b, h, t, d)
  u = Shape <start = 2, end = 3> (v)  c = Shape <end = 1> (v)
  vs = Concat <axis = 0> (c, two, two, u, d)  k5 = Unsqueeze (k, two)  ke = Expand (k5, five)
  kr = Reshape (ke, four)  v5 = Unsqueeze (v, two)  ve = Expand (v5, vs)
  v4 = Concat <axis = 0> (c, h, u, d)  vr = Reshape (ve, v4)  kt = Transpose <perm = [0,1,3,2]> (kr)
  s = MatMul (q, kt)  p = Softmax (s)  y = MatMul (p, vr)
attention_grouped_heads_turned_in_the_batch: GroupedSdpa; fed q k v
  (float[2,4,S,8] q, float[2,2,5,8] k, float[2,2,5,8] v) => (float[2,4,S,8] y)
  two = int64[1] {2}  five = int64[5] {2,2,2,5,8}  flat = int64[3] {-1,5,8}
  four = int64[4] {2,4,5,8}  turned = int64[4] {2,4,8,5}  k5 = Unsqueeze (k, two)
  ke = Expand (k5, five)  kf = Reshape (ke, flat)  kt3 = Transpose <perm = [0,2,1]> (kf)
  kt = Reshape (kt3, turned)  v5 = Unsqueeze (v, two)  ve = Expand (v5, five)
  vr = Reshape (ve, four)  s = MatMul (q, kt)  p = Softmax (s)  y = MatMul (p, vr)
attention_grouped_heads_turned_in_a_free_batch: GroupedSdpa; fed q k v
  (float[B,4,S,8] q, float[B,2,T,8] k, float[B,2,T,8] v) => (float[B,4,S,8] y)
  less = [-1]  i0 = [0]  i1 = [1]  i2 = [2]  i3 = [3]  i4 = [4]  i8 = [8]  b = Shape <end = 1> (k)
  t = Shape <start = 2, end = 3> (k)  five = Concat <axis = 0> (b, i2, i2, t, i8)
  four = Concat <axis = 0> (b, i4, t, i8)  c = Shape <end = 1> (v)
  u = Shape <start = 2, end = 3> (v)  vs = Concat <axis = 0> (c, i2, i2, u, i8)
  k5 = Unsqueeze (k, i2)  ke = Expand (k5, five)  kr = Reshape (ke, four)  v5 = Unsqueeze (v, i2)
  ve = Expand (v5, vs)  v4 = Concat <axis = 0> (c, i4, u, i8)  vr = Reshape (ve, v4)
  sizes = Shape (kr)  lead = Slice (sizes, i0, i2)  rows = Slice (sizes, i2, i3)
  columns = Slice (sizes, i3, i4)  flat = Concat <axis = 0> (less, rows, columns)
  turned = Concat <axis = 0> (lead, columns, rows)  kf = Reshape (kr, flat)
  kt3 = Transpose <perm = [0,2,1]> (kf)  kt = Reshape (kt3, turned)  s = MatMul (q, kt)
  p = Softmax (s)  y = MatMul (p, vr)
  spares empty: onnxruntime finds no -1 beside no elements
# as torch's exporter writes it: the length is a sum of sizes, the ends of a Slice are the largest
attention_grouped_heads_of_a_growing_cache: GroupedSdpa; fed q k v pk pv
  (float[B,4,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, float[B,2,T,8] pk, float[B,2,T,8] pv)
  => (float[B,4,S,8] y, float[B,2,R,8] kk, float[B,2,U,8] vv)
  kk = Concat <axis = 2> (pk, k)  vv = Concat <axis = -2> (pv, v)  i2 = [2]  i4 = [4]  i8 = [8]
  b = Shape <end = 1> (kk)  n = Shape <start = 2, end = 3> (k)  p0 = Shape <start = 2, end = 3> (pk)
  t = Add (p0, n)  five = Concat <axis = 0> (b, i2, i2, t, i8)
  four = Concat <axis = 0> (b, i4, t, i8)  c = Shape <end = 1> (vv)
  m = Shape <start = 2, end = 3> (v)  p1 = Shape <start = 2, end = 3> (pv)  u = Add (p1, m)
  vs = Concat <axis = 0> (c, i2, i2, u, i8)  v4 = Concat <axis = 0> (c, i4, u, i8)
  k5 = Unsqueeze (kk, i2)  ke = Expand (k5, five)  kr = Reshape (ke, four)  v5 = Unsqueeze (vv, i2)
  ve = Expand (v5, vs)  vr = Reshape (ve, v4)  less = [-1]  less2 = [-2]
  first = [-9223372036854775808]  last = [9223372036854775807]  sizes = Shape (kr)
  lead = Slice (sizes, first, less2)  rows = Slice (sizes, less2, less)
  columns = Slice (sizes, less, last)  flat = Concat <axis = 0> (less, rows, columns)
  turned = Concat <axis = 0> (lead, columns, rows)  kf = Reshape (kr, flat)
  kt3 = Transpose <perm = [0,2,1]> (kf)  kt = Reshape (kt3, turned)  s = MatMul (q, kt)
  p = Softmax (s)  y = MatMul (p, vr)
  spares empty: onnxruntime finds no -1 beside no elements
attention_one_key_head_for_all: GroupedSdpa; fed q k v
  (float[B,4,S,8] q, float[B,1,T,8] k, float[B,1,T,8] v) => (float[B,4,S,8] y)
  $SCORES  p = Softmax (s)  y = MatMul (p, v)
attention_heads_known_at_run_time: Sdpa; fed q k v
  (float[B,H,S,8] q, float[B,G,T,8] k, float[B,G,T,8] v) => (float[B,H,S,8] y)
  $SCORES  p = Softmax (s)  y = MatMul (p, v)
attention_node: GroupedSdpa; fed q k v; opset 23
  (float[B,4,S,8] q, float[B,2,T,8] k, float[B,2,T,8] v) => (float[B,4,S,8] y)
  y = Attention (q, k, v)
# that row is zero
attention_node_bool_with_a_row_masked_whole: SdpaMaskGuard; fed q k v; opset 23
  (float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v) => (float[B,4,S,8] y)
  zero = int64 {0}  one = int64 {1}  last = int64[1] {1}  at = int64[1] {0}
  s1 = Shape <start = 2, end = 3> (q)  t1 = Shape <start = 2, end = 3> (k)  count = Squeeze (s1, at)
  row = Range (zero, count, one)  is_one = Equal (row, one)  column = Unsqueeze (is_one, last)
  size = Concat <axis = 0> (s1, t1)  picked = Not (column)  mask = Expand (picked, size)
  y = Attention (q, k, v, mask)
attention_node_float_with_a_row_of_${drop}_$n: SdpaMaskGuard; fed q k v; opset $n;
drop in -inf -3.4028234663852886e+38; n in 23 25
  (float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v) => (float[B,4,S,8] y)
  zero = int64 {0}  one = int64 {1}  last = int64[1] {1}  at = int64[1] {0}
  s1 = Shape <start = 2, end = 3> (q)  t1 = Shape <start = 2, end = 3> (k)  count = Squeeze (s1, at)
  row = Range (zero, count, one)  is_one = Equal (row, one)  column = Unsqueeze (is_one, last)
  size = Concat <axis = 0> (s1, t1)  keep = float {0.0}  drop = float {$drop}
  picked = Where (column, drop, keep)  mask = Expand (picked, size)  y = Attention (q, k, v, mask)
attention_node_mask_less_one_times_the_largest: SdpaMaskGuard; fed q k v; opset 23
  (float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v) => (float[B,4,S,8] y)
  zero = int64 {0}  one = int64 {1}  last = int64[1] {1}  at = int64[1] {0}
  s1 = Shape <start = 2, end = 3> (q)  t1 = Shape <start = 2, end = 3> (k)  count = Squeeze (s1, at)
  row = Range (zero, count, one)  is_one = Equal (row, one)  column = Unsqueeze (is_one, last)
  size = Concat <axis = 0> (s1, t1)  most = float {3.4028234663852886e+38}  all = float {1.0}
  kept = Not (column)  number = Cast <to = 1> (kept)  less = Sub (number, all)
  low = Mul (less, most)  mask = Expand (low, size)  y = Attention (q, k, v, mask)
attention_node_softcap_of_a_mask: SdpaSoftcapMaskGuard; fed q k v m; opset 23
  (float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v, bool[B,1,S,T] m) => (float[B,4,S,8] y)
  keep = float {0.0}  low = float {-3.4028234663852886e+38}  mask = Where (m, keep, low)
  y = Attention <scale = 0.5, softcap = 2.0> (q, k, v, mask)
  spares float64: onnxruntime (1.32) rounds the scale to float32
attention_node_causal_3d: SdpaCausal; fed q k v; opset 23
  (float[B,S,32] q, float[B,S,32] k, float[B,S,32] v) => (float[B,S,32] y)
  y = Attention <q_num_heads = 4, kv_num_heads = 4, is_causal = 1> (q, k, v)
attention_node_past_${kind}_causal: GroupedSdpaMaskGuard; fed q k v pk pv m0 m1; opset 23;
kind in float bool
  (float[B,4,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, float[B,2,3,8] pk, float[B,2,3,8] pv,
  $kind[B,1,S,3] m0, $kind[B,1,S,S] m1)
  => (float[B,4,S,8] y)
  m = Concat <axis = -1> (m0, m1)  y, kk, vv = Attention <is_causal = 1> (q, k, v, m, pk, pv)
# a single query behind a past sees all keys
attention_node_past_causal_of_one_query: GroupedSdpaMaskGuard; fed q k v pk pv; opset 23
  (float[B,4,1,8] q, float[B,2,T,8] k, float[B,2,T,8] v, float[B,2,3,8] pk, float[B,2,3,8] pv)
  => (float[B,4,1,8] y)
  y, kk, vv = Attention <is_causal = 1> (q, k, v, , pk, pv)
# but not by the function that onnxruntime takes from opset 25 on
attention_node_past_causal_of_one_query_25: GroupedSdpaMaskGuard; fed q k v pk pv; opset 25
  (float[B,4,1,8] q, float[B,2,T,8] k, float[B,2,T,8] v, float[B,2,3,8] pk, float[B,2,3,8] pv)
  => (float[B,4,1,8] y)
  y, kk, vv = Attention <is_causal = 1> (q, k, v, , pk, pv)
  spares float32: huge scores overflow in that function, and are finite in ours
attention_where_then_mask: SdpaWhereMask; fed q k v mask keep
  ($QKV, float[B,1,S,T] mask, bool[S,T] keep) => (float[B,H,S,8] y)
  $SCORES  low = float {-1000000000.0}  w = Where (keep, s, low)  zm = Add (w, mask)
  p = Softmax (zm)  y = MatMul (p, v)
attention_conditions_of_one_fill: SdpaWhere; fed q k v mask drop
  ($QKV, bool[B,1,S,T] mask, bool[1,1] drop) => (float[B,H,S,8] y)
  $SCORES  low = float {-10000.0}  n = Not (mask)  w = Where (n, low, s)
  zm = Where (drop, low, w)  p = Softmax (zm)  y = MatMul (p, v)
attention_mask_subtracted: SdpaMask; fed q k v mask
  ($QKV, float[B,1,S,T] mask) => (float[B,H,S,8] y)
  $SCORES  zm = Sub (s, mask)  p = Softmax (zm)  y = MatMul (p, v)
attention_three_masks: fed q k v mask m2 m3; stays masks: 3
  ($QKV, float[B,1,S,T] mask, float[S,T] m2, float[B,1,1,T] m3) => (float[B,H,S,8] y)
  $SCORES  z1 = Add (s, mask)  z2 = Add (z1, m2)  z3 = Add (z2, m3)  p = Softmax (z3)
  y = MatMul (p, v)
attention_mask_added_twice: SdpaMaskMask; fed q k v mask  # as swinv2's of shifted windows
  (float[B,H,S,8] q, float[B,H,5,8] k, float[B,H,5,8] v, float[B,1,S,5] mask) => (float[B,H,S,8] y)
  $SCORES  m = float[1,1,1,5] {0, -100, 0, -100, -100}  z1 = Add (s, mask)  z2 = Add (z1, m)
  z3 = Add (z2, m)  p = Softmax (z3)  y = MatMul (p, v)
# as vitdet and SAM add theirs by the key's row and column
attention_mask_in_parts: SdpaMaskMask; fed q k v a mask
  (float[2,6,8] q, float[2,6,8] k, float[2,6,8] v, float[2,2,3,2,1] a, float[1,2,3,1,3] mask)
  => (float[B,6,8] y)
  apart = int64[5] {-1, 2, 3, 2, 3}  whole = int64[3] {-1, 6, 6}
  kt = Transpose <perm = [0,2,1]> (k)  s = MatMul (q, kt)  s5 = Reshape (s, apart)  z1 = Add (s5, a)
  z2 = Add (mask, z1)  z = Reshape (z2, whole)  p = Softmax (z)  y = MatMul (p, v)
attention_fed_mask_added_twice_stays: fed q k v mask; stays masks: 3
  ($QKV, float[B,1,S,T] mask) => (float[B,H,S,8] y)
  $SCORES  z1 = Add (s, mask)  z2 = Add (z1, mask)  z3 = Add (z2, mask)  p = Softmax (z3)
  y = MatMul (p, v)
halves_with_scores_in_float32_stay: fed q k v; stays mixed-types  # as GPT-J's in 16 bits
  (float16[B,4,S,8] q, float16[B,4,T,8] k, float16[B,4,T,8] v) => (float16[B,4,S,8] y)
  qw = Cast <to = 1> (q)  kw = Cast <to = 1> (k)  kt = Transpose <perm = [0,1,3,2]> (kw)
  s = MatMul (qw, kt)  p = Softmax (s)  h = Cast <to = 10> (p)  y = MatMul (h, v)
attention_learned_temperature: Sdpa; fed q k v
  (float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v, float[4,1,1] t) => (float[B,4,S,8] y)
  $SCORES  z = Mul (s, t)  p = Softmax (z)  y = MatMul (p, v)
attention_temperature_fed: fed q k v t; stays tensor-scale: of unknown magnitude
  (float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v, float[4,1,1] t) => (float[B,4,S,8] y)
  $SCORES  z = Mul (s, t)  p = Softmax (z)  y = MatMul (p, v)
attention_temperature_by_key: fed q k v; stays tensor-scale: differs by key
  (float[B,4,S,8] q, float[B,4,5,8] k, float[B,4,5,8] v, float[4,1,5] t) => (float[B,4,S,8] y)
  $SCORES  z = Mul (s, t)  p = Softmax (z)  y = MatMul (p, v)
attention_values_first: Sdpa; fed q k v  # v pᵀ
  (float[B,2,8,S] q, float[B,2,8,T] k, float[B,2,6,T] v) => (float[B,2,6,S] y)
  qt = Transpose <perm = [0,1,3,2]> (q)  s = MatMul (qt, k)  $SCALE  z = Mul (s, f)
  p = Softmax (z)  pt = Transpose <perm = [0,1,3,2]> (p)  y = MatMul (v, pt)
attention_over_queries_stays: fed q k v; stays softmax-axis
  (float[B,2,5,8] q, float[B,2,5,8] k, float[B,2,5,8] v) => (float[B,2,5,8] y)
  $SCORES  p = Softmax <axis = 2> (s)  y = MatMul (p, v)
attention_softcap_and_mask: SdpaSoftcapMask; fed q k v mask
  ($QKV, float[B,1,S,T] mask) => (float[B,H,S,8] y)
  $SCORES  $SCALE  cap = float {3.0}  z = Mul (s, f)  c = Div (z, cap)  t = Tanh (c)
  u = Mul (t, cap)  m = Add (u, mask)  p = Softmax (m)  y = MatMul (p, v)
attention_softcap_alone: SdpaSoftcap; fed q k v mask
  ($QKV, float[B,1,S,T] mask) => (float[B,H,S,8] y)
  $SCORES  $SCALE  cap = float {3.0}  z = Mul (s, f)  c = Div (z, cap)  t = Tanh (c)
  u = Mul (t, cap)  m = Identity (u)  p = Softmax (m)  y = MatMul (p, v)
attention_tanh_behind_a_mask: fed q k v mask; stays tanh
  ($QKV, float[B,1,S,T] mask) => (float[B,H,S,8] y)
  $SCORES  m = Add (s, mask)  t = Tanh (m)  p = Softmax (t)  y = MatMul (p, v)
attention_in_windows: SdpaMask; fed q k v
  (float[2,3,2,4,8] q, float[2,3,2,5,8] k, float[2,3,2,5,6] v, float[2,4,5] bias)
  => (float[B,3,2,4,6] y)
  kt = Transpose <perm = [0,1,2,4,3]> (k)  s = MatMul (q, kt)  z = Add (s, bias)  p = Softmax (z)
  y = MatMul (p, v)
attention_in_shifted_windows: SdpaMaskMask  # [B nW, H, S, T], with a mask of nW windows in between
  (float[B,4,5,8] x, float[1,4,5,5] bias, float[3,1,5,5] shift) => (float[N,4,5,8] y)
  three = int64[4] {3,1,1,1}  x3 = Tile (x, three)  five = int64[5] {-1,3,4,5,5}
  four = int64[4] {-1,4,5,5}  kt = Transpose <perm = [0,1,3,2]> (x3)  s = MatMul (x3, kt)
  z = Add (s, bias)  w = Reshape (z, five)  zero = int64[1] {0}  m = Unsqueeze (shift, zero)
  wm = Add (w, m)  zm = Reshape (wm, four)  p = Softmax (zm)  y = MatMul (p, x3)
attention_heads_in_the_batch_unfolded: SdpaWhere; fed q k4 v keep
  (float[B,2,5,8] q, float[B,2,5,8] k4, float[B,2,5,8] v, bool[B,1,5,5] keep) => (float[M,5,8] y)
  rows = int64[3] {-1,5,8}  q3 = Reshape (q, rows)  k = Reshape (k4, rows)  v3 = Reshape (v, rows)
  four = int64[4] {-1,2,5,5}  three = int64[3] {-1,5,5}  kt = Transpose <perm = [0,2,1]> (k)
  s = MatMul (q3, kt)  low = float {-3.4028235e+38}  w = Reshape (s, four)  z = Where (keep, w, low)
  p = Softmax (z)  p3 = Reshape (p, three)  y = MatMul (p3, v3)
# BLOOM, of torch's first exporter
attention_heads_in_the_batch_of_free_sizes: SdpaWhere; fed q keep
  (float[B,4,S,8] q, bool[1,1] keep) => (float[M,S,8] y)
  i1 = [1]  i4 = [4]  i8 = [8]  k = Neg (q)  v = Abs (q)  less = [-1]  none = int64[4] {-1,-1,-1,-1}
  ones = int64[4] {1,1,1,1}  sizes = Shape (q)  zero = int64 {0}  two = int64 {2}  four = int64 {4}
  batch = Gather (sizes, zero)  rows = Gather (sizes, two)  bh = Mul (batch, four)  at = [0]
  bhs = Unsqueeze (bh, at)  bs = Unsqueeze (batch, at)  rs = Unsqueeze (rows, at)
  three = Concat <axis = 0> (bhs, less, i8)  q3 = Reshape (q, three)  k3 = Reshape (k, three)
  v3 = Reshape (v, three)  kt = Transpose <perm = [0,2,1]> (k3)  s = MatMul (q3, kt)
  wide = Concat <axis = 0> (bs, i4, rs, less)  s4 = Reshape (s, wide)
  last = Shape <start = 1> (keep)  to = Concat <axis = 0> (bs, i1, rs, last)
  asked = Equal (to, none)  full = Where (asked, ones, to)  keeps = Expand (keep, full)
  low = float {-3.4028235e+38}  z = Where (keeps, s4, low)  p = Softmax (z)
  back = Concat <axis = 0> (bhs, rs, less)  p3 = Reshape (p, back)  y = MatMul (p3, v3)
attention_of_one_head: SdpaMask; fed q k v mask
  (float[B,1,S,8] q, float[B,1,T,8] k, float[B,T,8] v, float[B,S,T] mask) => (float[B,1,S,8] y)
  $SCORES  one = int64[1] {1}  w = Squeeze (s, one)  m = Add (w, mask)  p = Softmax (m)
  p4 = Unsqueeze (p, one)  v4 = Unsqueeze (v, one)  y = MatMul (p4, v4)
attention_weights_are_an_output: fed q k v; stays other-readers: the weights
  ($QKV) => (float[B,H,S,8] y, float[B,H,S,T] p)
  $SCORES  p = Softmax (s)  y = MatMul (p, v)
attention_mild_where: SdpaWhere; fed q k v mask
  ($QKV, bool[B,1,S,T] mask) => (float[B,H,S,8] y)
  $SCORES  low = float {-100.0}  zm = Where (mask, s, low)  p = Softmax (zm)  y = MatMul (p, v)
attention_weights_of_more_axes_stay: fed q k v; stays ranks
  ($QKV) => (float[1,B,H,S,8] y)
  $SCORES  p = Softmax (s)  first = int64[1] {0}  u = Unsqueeze (p, first)  y = MatMul (u, v)
activation_outside_the_table: Gemm; stays activation: Softsign
  ($X, $LIN)
  $PLAIN  y = Softsign (z)
"""
ATTENTION = tuple(fusion_rows(ROWS))
