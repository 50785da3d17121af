"""Graphs that nearly are what a rule rewrites: each row breaks one thing that a rule relies on.

`fused` are the operators that may be left in spite of it, `reason` the code of why the graph stays.
"""

from cases import fusion_rows

PARTS = {
    "AXES": "axes = int64[1] {-1}",
    "EPS": "eps = float {1e-05}",
    "X": "float[B,T,8] x",
    "OUT": "float[B,T,8] y",
    "RAISED": "float[P,B,T,8] y",
    "KEPT_WIDE": "onnxruntime keeps float32 between what it has no float16 for",
    "FLAG": "float[B,T,8] x, bool flag",
    "AFFINE": "float[8] g, float[8] b",
    "GLU": "z = MatMul (x, w)  q, u = Split <axis = -1, num_outputs = 2> (z)",
    "SILU": "s = Sigmoid (q)  o = Mul (q, s)",
    "BN": "float[6] g, float[6] b, float[6] m",
    "IMAGE": "float[B,4,S,T] x, float[6,4,3,3] w",
}
ROWS = """
# --- norms: types ---------------------------------------------------------------------------
ln_in_double_between_casts: stays norm-type: LayerNormalization
  ($X) => ($OUT)
  xd = Cast <to = 11> (x)  axes = int64[1] {-1}  eps = double {1e-05}  mu = ReduceMean (xd, axes)
  d = Sub (xd, mu)  sq = Mul (d, d)  $STD  n = Div (d, std)  y = CastLike (n, x)
rms_in_double_between_casts: stays not-float32: its epsilon 1e-06
  ($X) => ($OUT)
  d = Cast <to = 11> (x)  axes = int64[1] {-1}  eps = double {1e-06}  sq = Mul (d, d)  $STD
  n = Div (d, std)  y = CastLike (n, x)
ln_variance_rounded: stays norm-form
  ($X) => ($OUT)
  axes = int64[1] {-1}  eps = float {1e-05}  mu = ReduceMean (x, axes)  d = Sub (x, mu)
  sq = Mul (d, d)  v = ReduceMean (sq, axes)  vh = Cast <to = 10> (v)  vf = CastLike (vh, v)
  ve = Add (vf, eps)  std = Sqrt (ve)  y = Div (d, std)
  spares float16: $KEPT_WIDE
ln_mean_rounded: RMSNormalization  # of the deviation from the rounded mean
  ($X) => ($OUT)
  axes = int64[1] {-1}  eps = float {1e-05}  mf = ReduceMean (x, axes)  mh = Cast <to = 10> (mf)
  mu = CastLike (mh, x)  d = Sub (x, mu)  sq = Mul (d, d)  $STD  y = Div (d, std)
  spares float16: $KEPT_WIDE
rms_root_rounded: stays norm-form
  ($X) => ($OUT)
  axes = int64[1] {-1}  eps = float {1e-05}  d = Identity (x)  sq = Mul (d, d)
  v = ReduceMean (sq, axes)  ve = Add (v, eps)  s = Sqrt (ve)  sh = Cast <to = 10> (s)
  std = CastLike (sh, s)  y = Div (d, std)
  spares float16: $KEPT_WIDE
ln_in_float16: stays norm-type: float16
  (float16[B,T,8] x) => (float16[B,T,8] y)
  axes = int64[1] {-1}  e32 = float {1e-05}  eps = Cast <to = 10> (e32)  $CENTRE  sq = Mul (d, d)
  $STD  y = Div (d, std)
  spares float16: $KEPT_WIDE
ln_deviation_rounded_before_an_rms_norm: RMSNormalization; opset 23
  (float16[B,T,8] x, float16[8] g) => (float16[B,T,8] y)
  $AXES  mu = ReduceMean (x, axes)  d = Sub (x, mu)  y = RMSNormalization (d, g)
# --- norms: shapes --------------------------------------------------------------------------
ln_epsilon_raises_the_rank: stays norm-form
  ($X) => ($RAISED)
  $AXES  eps = float[1,1,1,1] {0.001}  $CENTRE  sq = Mul (d, d)  $STD  y = Div (d, std)
ln_exponent_raises_the_rank: stays norm-form
  ($X) => ($RAISED)
  $AXES  two = float[1,1,1,1] {2.0}  $EPS  $CENTRE  sq = Pow (d, two)  $STD  y = Div (d, std)
ln_root_raises_the_rank: stays norm-form
  ($X) => ($RAISED)
  axes = int64[1] {-1}  h = float[1,1,1,1] {0.5}  eps = float {1e-05}  $CENTRE  sq = Mul (d, d)
  v = ReduceMean (sq, axes)  ve = Add (v, eps)  std = Pow (ve, h)  y = Div (d, std)
ln_one_raises_the_rank: stays norm-form
  ($X) => ($RAISED)
  $AXES  one = float[1,1,1,1] {1.0}  $EPS  $CENTRE  sq = Mul (d, d)  $STD  r = Div (one, std)
  y = Mul (d, r)
ln_scale_of_one_element:
  ($X, float[1] g, float[1] b) => ($OUT)
  $AXES  $EPS  $CENTRE  sq = Mul (d, d)  $STD  n = Div (d, std)  s = Mul (n, g)  y = Add (s, b)
ln_unbiased_variance:
  ($X) => ($OUT)
  axes = int64[1] {-1}  seven = float {7.0}  eps = float {1e-05}  $CENTRE  sq = Mul (d, d)
  t = ReduceSum (sq, axes)  v = Div (t, seven)  ve = Add (v, eps)  std = Sqrt (ve)  y = Div (d, std)
ln_epsilon_outside_the_root:
  ($X) => ($OUT)
  axes = int64[1] {-1}  eps = float {1e-05}  mu = ReduceMean (x, axes)  d = Sub (x, mu)
  sq = Mul (d, d)  v = ReduceMean (sq, axes)  s = Sqrt (v)  std = Add (s, eps)  y = Div (d, std)
ln_over_another_axis:
  ($X) => ($OUT)
  axes = int64[1] {1}  eps = float {1e-05}  $CENTRE  sq = Mul (d, d)  $STD  y = Div (d, std)
ln_negative_scale_of_a_constant_row:  # -0.0, which a bias of 0.0 would lose
  ($X, float[8] g) => ($OUT)
  zero = float {0.0}  k = Mul (x, zero)  a = Abs (g)  s = Neg (a)
  n = LayerNormalization <axis = -1> (k, s)  y = Reciprocal (n)
  spares empty: the same
shape_of_the_mean: LayerNormGemm
  (float[B,8] x, float[8,5] w, float[8] g, float[8] b) => (float[B,5] y, int64[2] s, int64[2] t)
  n, mean, rstd = LayerNormalization <axis = -1> (x, g, b)  y = MatMul (n, w)  s = Shape (mean)
  t = Shape (rstd)
skip_norm_scaled_by_its_own_sum: fed x r; stays computed: its scale
  ($X, float[B,T,8] r, float[8] b) => ($OUT)
  s = Add (x, r)  axes = int64[2] {0, 1}  g = ReduceMean <keepdims = 0> (s, axes)
  y = LayerNormalization <axis = -1> (s, g, b)
# --- activations ----------------------------------------------------------------------------
gelu_$name: ; name, half, one, root in half_raises_the_rank float[1,1,1,1] float float |
one_raises_the_rank float float[1,1,1,1] float | root_raises_the_rank float float float[1,1,1,1]
  ($X) => ($RAISED)
  half = $half {0.5}  one = $one {1.0}  r = $root {0.70710678}  $GELU_OF_X
quick_gelu_factor_raises_the_rank:
  ($X) => ($RAISED)
  a = float[1,1,1,1] {1.702}  u = Mul (x, a)  s = Sigmoid (u)  y = Mul (x, s)
gelu_with_a_$name: stays near: Gelu; name, half, one, root in half_of_0.5009 0.5009 1.0 0.70710678 |
half_of_0.5000001 0.50000012 1.0 0.70710678 | root_of_four_digits 0.5 1.0 0.7071 |
one_of_1.0005 0.5 1.0005 0.70710678
  ($X) => ($OUT)
  half = float {$half}  one = float {$one}  r = float {$root}  $GELU_OF_X
gelu_as_a_sum: stays unlike  # -0.0 · ½ + -0.0 · ½ · erf is 0.0
  ($X) => ($OUT)
  half = float {0.5}  one = float {1.0}  r = float {0.70710678}  u = Mul (x, r)  e = Erf (u)
  e1 = Add (e, one)  h = Mul (x, half)  he = Mul (h, e)  y = Add (h, he)
gelu_that_overflows:
  ($X) => ($OUT)
  half = float {5e-31}  large = float {1e+30}  one = float {1.0}  r = float {0.70710678}
  xl = Mul (x, large)  $ERF_OF_X  p = Mul (xl, e1)  y = Mul (p, half)
  spares float16: $KEPT_WIDE
silu_of_1.0019: QuickGelu
  ($X) => ($OUT)
  a = float {1.0019}  u = Mul (x, a)  s = Sigmoid (u)  y = Mul (x, s)
quick_gelu_divided: stays not-float32: its factor  # 1 / 0.6 is no float32
  ($X) => ($OUT)
  a = float {0.6}  u = Div (x, a)  s = Sigmoid (u)  y = Mul (x, s)
# --- products -------------------------------------------------------------------------------
gemm_transposed_by_2: GemmRelu
  (float[B,8] x, float[8,8] w) => (float[B,8] y)
  z = Gemm <transB = 2> (x, w)  y = Relu (z)
gemm_beta_0_and_a_bias: stays scaled: beta
  (float[B,8] x, float[8,6] w, float[6] c) => (float[B,6] y)
  z = Gemm <beta = 0.0> (x, w, c)  y = Relu (z)
bias_per_row_makes_more_rows:
  (float[B,8] x, float[8,6] w, float[5,1] c) => (float[P,6] y)
  at = int64[1] {0}  h = ReduceMean (x, at)  z = MatMul (h, w)  a = Add (z, c)  y = Relu (a)
merge_of_products_one_plus_zero: Gemm
  ($X, float[8,6] w, float[8,6] w1) => (float[B,T,12] y)
  zero = float {0.0}  m = MatMul (x, w)  p = Add (m, zero)  q = MatMul (x, w1)  pr = Reciprocal (p)
  qr = Reciprocal (q)  y = Concat <axis = -1> (pr, qr)
einsum_contracts_one_with_many: fed x z
  (float[B,5,3] x, float[B,1,4] z) => (float[B,5,4] y)
  y = Einsum <equation = "bij,bjk->bik"> (x, z)
  spares empty: onnxruntime's Einsum dies of a batch of none (1.32)
einsum_contracts_one_of_two_axes_with_many: gone MatMul
  (float[B,T,1,8] x, float[2,8,5] w) => (float[B,T,5] y)
  y = Einsum <equation = "abcd,cde->abe"> (x, w)
  spares empty: onnxruntime's Einsum dies of a batch of none (1.32)
einsum_contracts_sizes_of_two_names: fed x z; gone MatMul
  (float[2,5,H] x, float[2,G,4] z) => (float[2,5,4] y)
  y = Einsum <equation = "bij,bjk->bik"> (x, z)
# --- no-ops ---------------------------------------------------------------------------------
plus_zero_is_seen:
  ($X) => ($OUT)
  zero = float {0.0}  a = Add (x, zero)  y = Reciprocal (a)
minus_zero_added_is_not: gone Add
  ($X) => ($OUT)
  zero = float {-0.0}  a = Add (x, zero)  y = Reciprocal (a)
minus_minus_zero_is_seen:
  ($X) => ($OUT)
  zero = float {-0.0}  a = Sub (x, zero)  y = Reciprocal (a)
times_one_raises_the_rank:
  ($X) => ($RAISED)
  one = float[1,1,1,1] {1.0}  a = Mul (x, one)  y = Relu (a)
# --- bodies ---------------------------------------------------------------------------------
skip_norm_in_a_branch: fed x flag
  ($FLAG, $AFFINE) => ($OUT)
  s = Add (x, x)
  y = If (flag) <
  then_branch = yes () => (float[B,T,8] t) { t = LayerNormalization <axis = -1> (s, g, b) },
  else_branch = no () => (float[B,T,8] o) { o = Neg (s) }>
skip_norm_in_a_branch_with_its_scale: fed x flag
  ($FLAG, float[8] g, float[8] b) => ($OUT)
  s = Add (x, x)
  y = If (flag) <
  then_branch = yes () => (float[B,T,8] t) {
  h = Neg (g) n = LayerNormalization <axis = -1> (s, h, b) t = Neg (n) },
  else_branch = no () => (float[B,T,8] o) { o = Neg (x) }>
skip_norm_in_a_loop_with_its_scale:
  ($X, $AFFINE) => ($OUT)
  s = Add (x, x)  three = int64 {3}  go = bool {1}
  y = Loop (three, go, x) <body = each (int64 i, bool ci, float[B,T,8] h)
  => (bool co, float[B,T,8] ho) { co = Identity (ci)  ax = [0,1]
  k = ReduceMean <keepdims = 0> (h, ax)  n = LayerNormalization <axis = -1> (s, k, b)
  ho = Add (n, h) }>
loss_in_a_branch: fed x labels flag
  (float[6,8] x, int64[6] labels, bool flag) => (float y, float[6,8] l)
  l = LogSoftmax <axis = 1> (x)
  y = If (flag) <
  then_branch = yes () => (float t) { t = NegativeLogLikelihoodLoss (l, labels) },
  else_branch = no () => (float o) { o = ReduceMax <keepdims = 0> (x) }>
activation_in_a_branch: Gemm; fed x flag
  ($FLAG, float[8,8] w, float[8] c) => ($OUT)
  m = MatMul (x, w)  z = Add (m, c)
  y = If (flag) <
  then_branch = yes () => (float[B,T,8] t) { t = Gelu (z) },
  else_branch = no () => (float[B,T,8] o) { o = Relu (z) }>
gelu_in_a_branch: fed x flag
  ($FLAG) => ($OUT)
  half = float {0.5}  one = float {1.0}  r = float {0.70710678}  $ERF_OF_X  p = Mul (x, e1)
  y = If (flag) <  then_branch = yes () => (float[B,T,8] t) { t = Mul (p, half) },
  else_branch = no () => (float[B,T,8] o) { o = Relu (p) }>
norm_before_a_branch: fed x flag
  ($FLAG, $AFFINE, float[8,8] w) => ($OUT)
  n = LayerNormalization <axis = -1> (x, g, b)
  y = If (flag) <
  then_branch = yes () => (float[B,T,8] t) { t = MatMul (n, w) },
  else_branch = no () => (float[B,T,8] o) { o = Neg (n) }>
products_of_one_input_in_two_bodies: fed x flag
  ($FLAG, float[8,8] w, float[8,8] w1, float[8,8] w2) => ($OUT)
  a = MatMul (x, w)
  y = If (flag) <
  then_branch = yes () => (float[B,T,8] t) { u = MatMul (x, w1) t = Add (u, a) },
  else_branch = no () => (float[B,T,8] o) { v = MatMul (x, w2) o = Mul (v, a) }>
batch_norm_in_a_branch: fed x flag
  (float[B,4,S,T] x, bool flag, float[6,4,1,1] w, $BN) => (float[B,6,S,T] y)
  $VARIANCE  z = Conv (x, w)
  y = If (flag) <
  then_branch = yes () => (float[B,6,S,T] t) { t = BatchNormalization (z, g, b, m, var) },
  else_branch = no () => (float[B,6,S,T] o) { o = Relu (z) }>
nested_branches: fed x flag
  ($FLAG, $AFFINE, float[8,8] w) => ($OUT)
  s = Add (x, x)
  y = If (flag) <
  then_branch = yes () => (float[B,T,8] t) {
  i = If (flag) <
  then_branch = yes () => (float[B,T,8] t) { t = LayerNormalization <axis = -1> (s, g, b) },
  else_branch = no () => (float[B,T,8] o) { o = MatMul (s, w) }>
  t = Relu (i) },
  else_branch = no () => (float[B,T,8] o) { o = Neg (s) }>
# --- losses ---------------------------------------------------------------------------------
cross_entropy_of_a_rounded_softmax_stays: fed x labels; stays log-of-zero
  (float[B,24] x, int64[B] labels) => (float y)
  p = Softmax <axis = 1> (x)  l = Log (p)  y = NegativeLogLikelihoodLoss (l, labels)
loss_against_its_own_best_guess: stays labels-computed
  (float[B,8] x) => (float y, float[B,8] l)
  l = LogSoftmax <axis = 1> (x)  k = ArgMax <axis = 1, keepdims = 0> (l)
  y = NegativeLogLikelihoodLoss (l, k)
# --- batch norms ----------------------------------------------------------------------------
batch_norm_of_two_types: stays batch-dtypes: float and float16
  (float16[B,4,S,T] x, float16[6,4,3,3] w, float[6] g, float[6] b, float[6] m)
  => (float16[B,6,P,Q] y)
  $VARIANCE  z = Conv (x, w)  y = BatchNormalization (z, g, b, m, var)
batch_norm_of_a_convolution_of_the_weight_with_itself: stays other-readers: the weight 'w'
  (float[B,6,S,T] x, float[6,6,3,3] w, $BN) => (float[B,6,S,T] y)
  $VARIANCE  z = Conv <pads = [1, 1, 1, 1]> (w, w)  n = BatchNormalization (z, g, b, m, var)
  y = Conv <pads = [1, 1, 1, 1]> (x, n)
batch_norm_beside_a_tensor_named_as_the_bias: gone BatchNormalization
  ($IMAGE, float[6] w_bias, $BN) => (float[B,6,P,Q] y)
  $VARIANCE  z = Conv (x, w)  n = BatchNormalization (z, g, b, m, var)  at = int64[2] {1, 2}
  k = Unsqueeze (w_bias, at)  y = Add (n, k)
batch_norms_with_one_bias: ConvAdd; gone BatchNormalization
  ($IMAGE, float[6,4,3,3] w1, float[6] c, $BN) => (float[B,6,P,Q] y)
  $VARIANCE  z = Conv (x, w, c)  n = BatchNormalization (z, g, b, m, var)  z1 = Conv (x, w1, c)
  n1 = BatchNormalization (z1, b, g, m, var)  y = Add (n, n1)
batch_norm_of_no_variance: stays not-finite
  ($IMAGE, $BN) => (float[B,6,P,Q] y)
  var = float[6] {0.0, -1.0, 2.0, 1.5, 0.7, 3.0}  z = Conv (x, w)
  y = BatchNormalization (z, g, b, m, var)
batch_norm_behind_grouped_transposed_convolution: gone BatchNormalization
  (float[B,4,S,T] x, float[4,3,2,2] w, $BN) => (float[B,6,P,Q] y)
  $VARIANCE  z = ConvTranspose <group = 2> (x, w)  y = BatchNormalization (z, g, b, m, var)
batch_norm_behind_a_gemm_with_bias_$name: gone BatchNormalization; name, bias in scalar float |
matrix float[1,6]
  (float[5,8] x, float[8,6] w, $bias c, $BN) => (float[5,6] y)
  $VARIANCE  z = Gemm <alpha = 0.5, beta = 2.0> (x, w, c)  y = BatchNormalization (z, g, b, m, var)
batch_norm_behind_a_gemm_with_bias_per_row:
  (float[5,8] x, float[8,6] w, float[5,1] c, $BN) => (float[5,6] y)
  $VARIANCE  z = Gemm <alpha = 0.5, beta = 2.0> (x, w, c)  y = BatchNormalization (z, g, b, m, var)
# --- attention: sizes -----------------------------------------------------------------------
attention_of_one_head_with_a_mask_of_more: fed q k v mask; stays mask-grows
  (float[B,1,S,8] q, float[B,1,T,8] k, float[B,1,T,8] v, float[B,H,S,T] mask) => (float[B,H,S,8] y)
  kt = Transpose <perm = [0,1,3,2]> (k)  s = MatMul (q, kt)  z = Add (s, mask)  p = Softmax (z)
  y = MatMul (p, v)
# --- gated products: what must be the halves of one -------------------------------------------
gate_whose_half_is_read_elsewhere: Silu; stays other-readers: what is split
  ($X, float[8,16] w) => ($OUT)
  $GLU  $SILU  t = Mul (o, u)  y = Add (t, u)
gate_whose_product_is_an_output: Silu; stays other-readers: what is split
  ($X, float[8,16] w) => (float[B,T,8] y, float[B,T,16] z)
  $GLU  $SILU  y = Mul (o, u)
gate_that_lets_through_one_column: Silu; stays gate-halves
  ($X, float[8,9] w) => ($OUT)
  z = MatMul (x, w)  n = [8, 1]  q, u = Split <axis = -1> (z, n)  $SILU  y = Mul (o, u)
gate_among_three_parts: Silu; stays gate-halves
  ($X, float[8,24] w) => ($OUT)
  z = MatMul (x, w)  q, u, t = Split <axis = -1, num_outputs = 3> (z)  $SILU  y = Mul (o, t)
gate_on_itself: stays gate-halves
  ($X, float[8,16] w) => ($OUT)
  $GLU  o = Tanh (q)  y = Mul (o, q)
gate_of_other_rows: stays gate-halves
  (float[B,6,8] x, float[8,16] w) => (float[B,3,16] y)
  z = MatMul (x, w)  q, u = Split <axis = 1, num_outputs = 2> (z)  o = Sigmoid (q)  y = Mul (o, u)
gate_and_up_of_one_column: Gemm; stays gate-widths
  ($X, float[8,8] w, float[8,1] w1) => ($OUT)
  q = MatMul (x, w)  u = MatMul (x, w1)  o = Tanh (q)  y = Mul (o, u)
gate_and_up_with_a_computed_weight: GemmTanh; fed x w1; stays computed: its weights
  ($X, float[8,8] w, float[8,8] w1) => ($OUT)
  q = MatMul (x, w)  u = MatMul (x, w1)  o = Tanh (q)  y = Mul (o, u)
gate_and_up_that_is_read_elsewhere: Gemm; stays other-readers: its two matrix multiplications
  ($X, float[8,8] w, float[8,8] w1) => ($OUT)
  q = MatMul (x, w)  u = MatMul (x, w1)  o = Tanh (q)  t = Mul (o, u)  y = Add (t, u)
gate_and_up_with_a_bias_of_each_row: GemmTanh; stays bias-shape
  (float[B,4,8] x, float[8,8] w, float[4,1] c, float[8,8] w1) => (float[B,4,8] y)
  m = MatMul (x, w)  q = Add (m, c)  u = MatMul (x, w1)  o = Tanh (q)  y = Mul (o, u)
gate_and_up_behind_norms_of_their_own: LayerNormGemm LayerNormGemmTanh
  ($X, float[8] g, float[8] b, float[8] g1, float[8,8] w, float[8,8] w1) => ($OUT)
  n = LayerNormalization (x, g, b)  n1 = LayerNormalization (x, g1, b)  q = MatMul (n, w)
  u = MatMul (n1, w1)  o = Tanh (q)  y = Mul (o, u)
gate_behind_a_norm_that_is_read_elsewhere: LayerNormGemm_n; stays other-readers: its norm
  ($X, $AFFINE, float[8,16] w) => ($OUT)
  n = LayerNormalization (x, g, b)  z = MatMul (n, w)  q, u = Split <axis = -1, num_outputs = 2> (z)
  o = Tanh (q)  t = Mul (o, u)  y = Add (t, n)
"""
EXACT_CASES = tuple(fusion_rows(ROWS, **PARTS))
