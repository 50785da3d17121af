"""Graphs that become fused norms and products, for `fusion_cases`."""

from cases import fusion_rows

ROWS = """
# --- LayerNormalization in every form that exporters write -----------------------------------
norm_with_a_$name: LayerNormGemm; name, g, b in shift_of_one_number 16 1 |
scale_of_one_number 1 16
  ($X, float[$g] g, float[$b] b, $LIN)
  $LN  $LINEAR  y = Identity (z)
  spares huge: onnxruntime's variance overflows later where it broadcasts (1.32)
norm_node: LayerNormGemm
  ($IN)
  $LN  $LINEAR  y = Identity (z)
norm_with_mean_and_rstd: LayerNormGemm
  ($IN)
  n, mean, rstd = LayerNormalization <axis = 2> (x, g, b)  $LINEAR  y = Identity (z)
norm_without_bias: LayerNormGemm
  ($X, float[16] g, $LIN)
  n = LayerNormalization (x, g)  $LINEAR  y = Identity (z)
norm_written_out_pow_div: LayerNormGemm
  ($IN)
  $NUMBERS  $CENTRE  sq = Pow (d, two)  $STD  p = Div (d, std)  $BIAS  $LINEAR  y = Identity (z)
norm_written_out_mul_reciprocal: LayerNormGemm
  ($IN)
  $NUMBERS  $CENTRE  sq = Mul (d, d)  $STD  r = Reciprocal (std)  p = Mul (r, d)  $BIAS  $LINEAR
  y = Identity (z)
norm_written_out_mul_one_over: LayerNormGemm
  ($IN)
  $NUMBERS  $CENTRE  sq = Mul (d, d)  $STD  r = Div (one, std)  p = Mul (d, r)  $BIAS  $LINEAR
  y = Identity (z)
norm_written_out_width_from_sizes: LayerNormGemm  # [B·4, -1, 16], as patches are unfolded
  (float[B,4,T,16] x, $AFFINE, $LIN) => (float[R,T,24] y)
  zero = int64 {0}  four = int64 {4}  at = int64[1] {0}  rest = int64[1] {-1}  all = Shape (x)
  b0 = Gather (all, zero)  t = Shape <start = 2, end = 3> (x)  b4 = Mul (b0, four)
  b1 = Unsqueeze (b4, at)  to = Concat <axis = 0> (b1, t, rest)  x3 = Reshape (x, to)  $NUMBERS
  mu = ReduceMean (x3, axes)  d = Sub (x3, mu)  sq = Pow (d, two)  $STD  p = Div (d, std)
  q = Mul (p, g)  n = Add (q, b)  $LINEAR  y = Identity (z)
# torch.var_mean: its axes are put back by Reshape
norm_written_out_with_var_and_mean: LayerNormGemm; gone ReduceMean ReduceSum
  ($IN)
  eps = float {1e-05}  width = float {16.0}  last = int64[1] {2}  unit = int64[1] {1}
  axes = int64[1] {-1}  b0 = Shape <start = 0, end = 1> (x)  t0 = Shape <start = 1, end = 2> (x)
  to = Concat <axis = 0> (b0, t0, unit)  mu = ReduceMean (x, last)  d = Sub (x, mu)  sq = Mul (d, d)
  v = ReduceMean <keepdims = 0> (sq, last)  vr = Reshape (v, to)  vx = Expand (vr, to)
  total = ReduceSum <keepdims = 0> (x, axes)  tr = Reshape (total, to)  mean = Div (tr, width)
  d2 = Sub (x, mean)  ve = Add (vx, eps)  std = Sqrt (ve)  p = Div (d2, std)  $BIAS  $LINEAR
  y = Identity (z)
  spares float16:huge: onnxruntime has float32 between operators without float16
norm_written_out_around_an_rms_norm: LayerNormGemm; gone ReduceMean; opset 23
  ($IN)
  one = float {1.0}  axes = int64[1] {-1}  $CENTRE  q = RMSNormalization (d, g)  n = Add (q, b)
  $LINEAR  y = Identity (z)
norm_written_out_operands_swapped: LayerNormGemm
  ($IN)
  $NUMBERS  $CENTRE  sq = Pow (d, two)  $STD  p = Div (d, std)  q = Mul (g, p)  n = Add (b, q)
  m = MatMul (n, w)  z = Add (c, m)  y = Identity (z)
norm_written_out_without_affine: LayerNormGemm
  ($X, $LIN)
  $NUMBERS  $CENTRE  sq = Pow (d, two)  $STD  p = Div (d, std)  n = Identity (p)  $LINEAR
  y = Identity (z)
norm_with_casts_between: LayerNormGemm
  (float16[B,T,16] x, float16[16] g, float16[16] b, float16[16,24] w, float16[24] c)
  => (float16[B,T,24] y)
  xf = Cast <to = 1> (x)  $NUMBERS  mu = ReduceMean (xf, axes)  d = Sub (xf, mu)  sq = Pow (d, two)
  $STD  p = Div (d, std)  ph = Cast <to = 10> (p)  q = Mul (ph, g)  n = Add (q, b)  $LINEAR
  y = Identity (z)
norm_over_two_axes_stays: Gemm; stays norm-axis: from axis 1
  (float[B,5,16] x, float[5,16] g, float[5,16] b, float[16,24] w, float[24] c) => (float[B,5,24] y)
  n = LayerNormalization <axis = 1> (x, g, b)  $LINEAR  y = Identity (z)
# --- RMSNormalization -------------------------------------------------------------------------
rms_pow_div: RMSNormGemm
  (float[B,T,16] x, float[16] g, $LIN)
  $NUMBERS  d = Identity (x)  sq = Pow (d, two)  $STD  p = Div (d, std)  n = Mul (g, p)
  m = MatMul (n, w)  z = Add (m, c)  y = Identity (z)
rms_mul_reciprocal: RMSNormGemm
  (float[B,T,16] x, float[16] g, $LIN)
  $NUMBERS  d = Identity (x)  sq = Mul (d, d)  $STD  r = Reciprocal (std)  p = Mul (r, d)
  n = Mul (g, p)  m = MatMul (n, w)  z = Add (m, c)  y = Identity (z)
rms_without_epsilon: RMSNormGemm  # which dynamo's exporter takes for zero where it is 1e-8
  ($X, float[16] g, $LIN)
  $NUMBERS  d = Identity (x)  sq = Mul (d, d)  v = ReduceMean (sq, axes)  ve = Add (v, eps)
  std = Sqrt (v)  r = Reciprocal (std)  p = Mul (r, d)  n = Mul (g, p)  $LINEAR  y = Identity (z)
rms_between_casts_with_its_scale_in_float32_stays: RMSNormalization Gemm; stays norm-cast
  (float16[B,T,16] x, float[16] g, float16[16,24] w, float16[24] c) => (float16[B,T,24] y)
  d = Cast <to = 1> (x)  $NUMBERS  sq = Mul (d, d)  $STD  r = Reciprocal (std)  p = Mul (r, d)
  f = Mul (g, p)  n = Cast <to = 10> (f)  $LINEAR  y = Identity (z)
rms_node: RMSNormGemm; opset 23
  ($X, float[16] g, $LIN)
  n = RMSNormalization <axis = -1> (x, g)  $LINEAR  y = Identity (z)
# --- Gemm with bias and activation ------------------------------------------------------------
matmul_add: Gemm
  ($X, $LIN)
  $PLAIN  y = Identity (z)
bias_scalar: GemmRelu
  ($X, float[16,24] w, float c)
  $PLAIN  y = Relu (z)
bias_per_row: GemmRelu
  (float[5,16] x, float[16,24] w, float[5,1] c) => (float[5,24] y)
  $PLAIN  y = Relu (z)
bias_none: GemmRelu
  ($X, float[16,24] w)
  z = MatMul (x, w)  y = Relu (z)
residual_is_no_bias: fed x r
  ($X, float[B,T,24] r, float[16,24] w)
  m = MatMul (x, w)  y = Add (m, r)
gemm_transposed_weight: GemmTanh
  (float[B,16] x, float[24,16] w, float[24] c) => (float[B,24] y)
  z = Gemm <transB = 1> (x, w, c)  y = Tanh (z)
gemm_with_alpha_stays: stays scaled: alpha
  (float[B,16] x, float[24,16] w, float[24] c) => (float[B,24] y)
  z = Gemm <transB = 1, alpha = 0.5> (x, w, c)  y = Tanh (z)
activation_$name: Gemm$op; name, op, body in leaky_relu LeakyRelu y = LeakyRelu <alpha = 0.2> (z) |
relu_6 ClippedRelu o = float {0}  six = float {6}  y = Clip (z, o, six) |
sigmoid Sigmoid y = Sigmoid (z) |
tanh Tanh y = Tanh (z) |
elu Elu y = Elu <alpha = 0.7> (z) |
selu Selu y = Selu (z) |
mish Mish y = Mish (z) |
mish_of_opset_17 Mish s = Softplus (z)  t = Tanh (s)  y = Mul (z, t) |
softplus Softplus y = Softplus (z) |
hard_sigmoid HardSigmoid y = HardSigmoid <alpha = 0.16666667> (z) |
hard_swish HardSwish y = HardSwish (z) |
hard_swish_of_opset_13 HardSwish s = HardSigmoid <alpha = 0.16666667> (z)  y = Mul (s, z) |
gelu Gelu y = Gelu (z) |
gelu_tanh GeluTanh y = Gelu <approximate = "tanh"> (z) |
gelu_erf_half_last Gelu $ERF  t = Mul (z, e1)  y = Mul (t, half) |
gelu_erf_half_first Gelu $ERF  h = Mul (half, z)  y = Mul (h, e1) |
gelu_erf_half_inner Gelu $ERF  h = Mul (e1, half)  y = Mul (z, h) |
silu Silu s = Sigmoid (z)  y = Mul (s, z) |
quick_gelu QuickGelu al = float {1.702}  az = Mul (al, z)  s = Sigmoid (az)  y = Mul (z, s)
  ($X, $LIN)
  $PLAIN  $body
activation_hard_swish_of_relu_6_last: GemmHardSwish
  ($X, $LIN)
  $PLAIN  o = float {0}  three = float {3}  six = float {6}  sixth = float {0.16666666666666666}
  a = Add (z, three)  u = Clip (a, o, six)  t = Mul (z, u)  y = Div (t, six)
activation_hard_swish_of_relu_6_first: GemmHardSwish
  ($X, $LIN)
  $PLAIN  o = float {0}  three = float {3}  six = float {6}  sixth = float {0.16666666666666666}
  a = Add (z, three)  u = Clip (a, o, six)  d = Mul (u, sixth)  y = Mul (z, d)
activation_hard_sigmoid_of_relu_6: GemmHardSigmoid
  ($X, $LIN)
  $PLAIN  o = float {0}  three = float {3}  six = float {6}  a = Add (three, z)
  u = Clip (a, o, six)  y = Div (u, six)
activation_gelu_tanh_pow: GemmGeluTanh
  ($X, $LIN)
  $PLAIN  $TANH  z3 = Pow (z, three)  az = Mul (z3, a)  i = Add (z, az)  ki = Mul (i, k)
  t = Tanh (ki)  t1 = Add (one, t)  h = Mul (z, half)  y = Mul (h, t1)
activation_gelu_tanh_fast: GemmGeluTanh
  ($X, $LIN)
  $PLAIN  $TANH  zk = Mul (z, k)  az = Mul (a, z)  azz = Mul (az, z)  i = Add (azz, one)
  ki = Mul (zk, i)  t = Tanh (ki)  t1 = Add (t, one)  h = Mul (t1, z)  y = Mul (h, half)
activation_behind_a_reshape: GemmRelu
  ($X, $LIN) => (float[N,24] y)
  $PLAIN  to = int64[2] {-1, 24}  f = Reshape (z, to)  y = Relu (f)
activation_input_read_twice: Gemm; stays other-readers
  ($X, $LIN)
  $PLAIN  t = Tanh (z)  y = Mul (t, z)
norm_and_activation: LayerNormGemmGelu
  ($IN)
  $LN  $LINEAR  y = Gelu (z)
# --- layer scale ------------------------------------------------------------------------------
scale_of_columns: GemmRelu; gone Mul; level 1
  ($X, $LIN, float[24] s)
  $PLAIN  y0 = Mul (s, z)  y = Relu (y0)
scale_of_a_gemm: GemmTanh; gone Mul; level 3
  (float[B,16] x, float[24,16] w, float[24] c, float[24] s) => (float[B,24] y)
  z = Gemm <transB = 1> (x, w, c)  t = Mul (z, s)  y = Tanh (t)
scale_of_a_gemm_with_a_bias_of_rows_stays: level 3; stays bias-shape  # as many rows as columns
  (float[24,16] x, float[16,24] w, float[24,1] c, float[24] s) => (float[24,24] y)
  z = Gemm (x, w, c)  t = Mul (z, s)  y = Tanh (t)
scale_behind_nchw: Gemm; fed x r; gone Mul; level 3
  (float[B,4,6,16] x, float[16,24] w, float[24] c, float[B,24,4,6] r, float[24,1,1] s)
  => (float[B,24,4,6] y)
  $PLAIN  t = Transpose <perm = [0,3,1,2]> (z)  t2 = Mul (t, s)  y = Add (r, t2)
scale_behind_a_convolution: ConvAdd; fed x r; gone Mul Add; level 3
  (float[B,3,S,T] x, float[B,6,S,T] r, float[6,3,3,3] w, float[6] c, float[6,1,1] s)
  => (float[B,6,S,T] y)
  z = Conv <pads = [1,1,1,1]> (x, w, c)  t = Mul (z, s)  y = Add (t, r)
scale_of_what_is_read_twice_stays: Gemm; level 3; stays other-readers: the matrix
  ($X, $LIN, float[24] s)
  $PLAIN  t = Mul (s, z)  y = Add (t, z)
scale_of_rows_stays: Gemm; level 3
  (float[5,16] x, float[16,24] w, float[24] c, float[5,1] s) => (float[5,24] y)
  $PLAIN  y = Mul (s, z)
scale_of_a_product_with_a_vector_stays: level 1  # the product's only axis is of rows
  (float[B,16,16] x, float[16] w, float[16] s) => (float[B,16] y)
  z = MatMul (x, w)  t = Mul (s, z)  y = Relu (t)
# --- the norm's other readers -----------------------------------------------------------------
norm_read_by_a_residual: LayerNormGemm_n
  ($X, $AFFINE, float[16,16] w, float[16] c) => (float[B,T,16] y)
  $LN  $LINEAR  y = Add (z, n)
norm_read_by_its_shape_only: LayerNormGemm
  ($IN) => (float[B,T,24] y, int64[3] sh)
  $LN  $LINEAR  sh = Shape (n)  y = Identity (z)
norm_through_a_gather: LayerNormGemm
  ($IN) => (float[B,24] y)
  i = int64 {0}  $LN  r = Gather <axis = 1> (n, i)  m = MatMul (r, w)  y = Add (m, c)
norm_through_a_roll: LayerNormGemm
  ($IN)
  zero = int64[1] {0}  one = int64[1] {1}  big = int64[1] {9999}  $LN
  head = Slice (n, zero, one, one)  tail = Slice (n, one, big, one)
  r = Concat <axis = 1> (tail, head)  m = MatMul (r, w)  y = Add (m, c)
norm_through_nchw_and_back: LayerNormGemm; gone Transpose
  (float[B,4,6,16] x, float[16] g, float[16] b, float[16,24] w, float[24] c) => (float[B,24,24] y)
  to = int64[3] {0, 24, 16}  $LN  u = Transpose <perm = [0,3,1,2]> (n)
  v = Transpose <perm = [0,2,3,1]> (u)  r = Reshape (v, to)  m = MatMul (r, w)  y = Add (m, c)
norm_through_windows_of_nchw: LayerNormGemm
  (float[B,4,6,16] x, float[16] g, float[16] b, float[16,24] w, float[24] c) => (float[R,4,24] y)
  six = int64[6] {-1, 16, 2, 2, 3, 2}  rows = int64[3] {-1, 4, 16}  $LN
  u = Transpose <perm = [0,3,1,2]> (n)  s = Reshape (u, six)
  t = Transpose <perm = [0,2,4,3,5,1]> (s)  r = Reshape (t, rows)  m = MatMul (r, w)  y = Add (m, c)
norm_through_rows_that_are_mixed_stays: Gemm; stays norm-mixed  # 16 others on the last axis
  (float[B,16,16] x, float[16] g, float[16] b, float[16,24] w, float[24] c) => (float[B,16,24] y)
  $LN  u = Transpose <perm = [0,2,1]> (n)  m = MatMul (u, w)  y = Add (m, c)
norm_without_bias_through_a_pad: LayerNormGemm
  ($X, float[16] g, $LIN) => (float[B,U,24] y)
  pads = int64[6] {0, 1, 0, 0, 2, 0}  n = LayerNormalization (x, g)  p = Pad (n, pads)
  m = MatMul (p, w)  y = Add (m, c)
rms_through_a_pad: RMSNormGemm
  ($X, float[16] g, $LIN) => (float[B,U,24] y)
  pads = int64[6] {0, 1, 0, 0, 2, 0}  $NUMBERS  d = Identity (x)  sq = Pow (d, two)  $STD
  p = Div (d, std)  n = Mul (g, p)  q2 = Pad (n, pads)  m = MatMul (q2, w)  y = Add (m, c)
norm_of_no_epsilon_through_a_pad_stays: Gemm; stays zero-rows/unknown  # zeros become NaN
  ($X, float[16] g, $LIN) => (float[B,U,24] y)
  pads = int64[6] {0, 1, 0, 0, 2, 0}  n = LayerNormalization <epsilon = 0.0> (x, g)
  p = Pad (n, pads)  m = MatMul (p, w)  y = Add (m, c)
norm_with_bias_through_a_pad_stays: Gemm; stays zero-rows/unknown
  ($IN) => (float[B,U,24] y)
  pads = int64[6] {0, 1, 0, 0, 2, 0}  $LN  p = Pad (n, pads)  m = MatMul (p, w)  y = Add (m, c)
# [2, 3] padded to windows of [3, 3]
norm_with_bias_before_a_pad_of_many_rows: LayerNormGemm
  (float[B,2,3,16] x, $AFFINE, $LIN) => (float[U,9,24] y)
  $PADDED_NORM  $PADDED
norm_with_bias_before_a_pad_bias_less: LayerNormGemm
  (float[B,2,3,16] x, $AFFINE, float[16,24] w) => (float[U,9,24] y)
  $PADDED_NORM  y = MatMul (v, w)
norm_with_bias_before_a_pad_of_a_zero_bias: LayerNormGemm
  (float[B,2,3,16] x, $AFFINE, float[16,24] w) => (float[U,9,24] y)
  $PADDED_NORM  m = MatMul (v, w)  y = Add (m, none)
norm_with_bias_before_a_pad_and_an_activation: LayerNormGemm
  (float[B,2,3,16] x, $AFFINE, $LIN) => (float[U,9,24] y)
  $PADDED_NORM  m = MatMul (v, w)  z = Add (m, c)  y = Relu (z)
norm_with_bias_before_a_pad_of_a_roll: LayerNormGemm
  (float[B,2,3,16] x, $AFFINE, $LIN) => (float[U,9,24] y)
  pads = int64[8] {0, 1, 2, 0, 0, 3, 1, 0}  cut = int64[6] {-1, 2, 3, 2, 3, 16}
  flat = int64[3] {-1, 9, 16}
  none = float[24] {0, -0.0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
  $LN  one = [1]  two = [2]  end = [99]  start = [0]  q = Pad (n, pads)
  low = Slice (q, start, two, one)  high = Slice (q, two, end, one)
  p = Concat <axis = 1> (high, low)  t = Reshape (p, cut)  u = Transpose <perm = [0,1,3,2,4,5]> (t)
  v = Reshape (u, flat)  $PADDED
norm_with_bias_before_a_pad_whose_sizes_are_asked_for: LayerNormGemm
  (float[B,2,3,16] x, $AFFINE, $LIN) => (float[U,9,24] y)
  $PADDED_NORM  s = Shape (v)  f = Cast <to = 1> (s)  e = ReduceSum <keepdims = 0> (f)
  d = Shape <start = 1> (t)  h = Cast <to = 1> (d)  i = ReduceMax <keepdims = 0> (h)  j = Div (e, i)
  m = MatMul (v, w)  z = Add (m, c)  y = Div (z, j)
norm_with_bias_before_a_pad_of_many_columns_stays: Gemm; stays zero-rows/padded-cost
  (float[B,2,3,16] x, $AFFINE, float[16,120] w, float[120] c) => (float[U,9,120] y)
  $PADDED_NORM  $PADDED
norm_with_bias_before_a_pad_and_others_stays:
  (float[B,2,3,16] x, $AFFINE, float[16,24] w) => (float[U,9,24] y)
  $PADDED_NORM  e = Exp (v)  f = Add (v, e)  y = MatMul (f, w)
norm_with_bias_before_a_pad_and_its_bias_of_rows_stays: Gemm; stays zero-rows/bias-shape
  (float[B,2,3,16] x, $AFFINE, float[16,24] w) => (float[U,9,24] y)
  $PADDED_NORM  k = float[9,1] {1,2,3,4,5,6,7,8,9}  m = MatMul (v, w)  y = Add (m, k)
norm_through_a_pad_of_ones_stays: Gemm; stays norm-mixed
  ($X, float[16] g, $LIN) => (float[B,U,24] y)
  pads = int64[6] {0, 1, 0, 0, 2, 0}  one = float {1.0}  n = LayerNormalization (x, g)
  p = Pad (n, pads, one)  m = MatMul (p, w)  y = Add (m, c)
residual_then_norm: SkipLayerNorm; fed x r
  ($X, float[B,T,16] r, $AFFINE) => (float[B,T,16] y)
  x2 = Add (x, r)  n = LayerNormalization (x2, g, b)  t = Tanh (n)  y = Add (t, x2)
# --- merged products --------------------------------------------------------------------------
merge_query_key_value: LayerNormGemm
  ($X, $AFFINE, float[16,8] w, float[16,4] w1, float[16,12] w2, float[8] c, float[12] c2)
  $LN  m = MatMul (n, w)  q = Add (m, c)  k = MatMul (n, w1)  m2 = MatMul (n, w2)
  v = Add (m2, c2)  y = Concat <axis = -1> (q, k, v)
# what a low-rank product, of matrices that are fed, adds to has an epilogue of its own
merge_not_beside_residuals_of_products: Gemm Gemm; fed x a a1 d; gone Split
  ($X, $AFFINE, float[16,12] w, float[16,12] w1, float[12] c, float[16,2] a, float[16,2] a1,
  float[2,12] d)
  $LN  m = MatMul (n, w)  z = Add (m, c)  m1 = MatMul (n, w1)  z1 = Add (m1, c)
  l = MatMul (n, a)  l1 = MatMul (n, a1)  e = MatMul (l, d)  e1 = MatMul (l1, d)
  q = Add (z, e)  k = Add (z1, e1)  y = Concat <axis = -1> (q, k)
merge_gate_and_up: RMSNormGateFirstGemmSilu
  ($X, float[16] g, float[16,24] w, float[16,24] w1)
  $NUMBERS  d = Identity (x)  sq = Pow (d, two)  $STD  p = Div (d, std)  n = Mul (p, g)
  a = MatMul (n, w)  s = Sigmoid (a)  gate = Mul (a, s)  up = MatMul (n, w1)  y = Mul (gate, up)
# --- gated products ---------------------------------------------------------------------------
gate_in_the_last_half_behind_a_layer_norm: LayerNormGateLastGemmGelu; gone Split Mul
  ($X, $AFFINE, float[16,48] w, float[48] c)
  $LN  m = MatMul (n, w)  z = Add (m, c)  u, q = Split <axis = -1, num_outputs = 2> (z)
  o = Gelu (q)  y = Mul (u, o)
gate_in_the_first_slice: GateFirstGemmGeluTanh; gone Slice
  ($X, float[16,48] w, float[48] c)
  m = MatMul (x, w)  z = Add (c, m)  zero = [0]  half = [24]  all = [48]  last = [2]
  q = Slice (z, zero, half, last)  u = Slice (z, half, all, last)
  o = Gelu <approximate = "tanh"> (q)  y = Mul (o, u)
gate_and_up_with_one_bias: GateFirstGemmSigmoid
  ($X, $LIN, float[16,24] w1)
  m = MatMul (x, w)  z = Add (m, c)  u = MatMul (x, w1)  o = Sigmoid (z)  y = Mul (u, o)
gate_and_up_of_transposed_gemms: GateFirstGemmLeakyRelu
  (float[B,16] x, float[24,16] w, float[24] c, float[24,16] w1, float[24] c1) => (float[B,24] y)
  z = Gemm <transB = 1> (x, w, c)  u = Gemm <transB = 1> (x, w1, c1)
  o = LeakyRelu <alpha = 0.3> (z)  y = Mul (o, u)
gate_of_a_split_gemm_without_bias: GateLastGemmRelu
  (float[B,16] x, float[48,16] w) => (float[B,24] y)
  z = Gemm <transB = 1> (x, w)  n = [24, 24]  u, q = Split <axis = 1> (z, n)  o = Relu (q)
  y = Mul (u, o)
gate_with_a_computed_weight: GateFirstGemmQuickGelu; fed x w
  ($X, float[16,48] w)
  z = MatMul (x, w)  q, u = Split <axis = -1, num_outputs = 2> (z)  a = float {1.702}
  qa = Mul (q, a)  s = Sigmoid (qa)  o = Mul (q, s)  y = Mul (o, u)
gate_and_up_are_parts_below_level_2: GemmTanh; level 1
  ($X, float[16,24] w, float[16,24] w1)
  z = MatMul (x, w)  u = MatMul (x, w1)  o = Tanh (z)  y = Mul (o, u)
merge_not_at_level_1: level 1
  ($X, float[16,24] w, float[16,24] w1)
  a = MatMul (x, w)  b2 = MatMul (x, w1)  y = Add (a, b2)
"""
PRODUCTS = tuple(fusion_rows(ROWS))
