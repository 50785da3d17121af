"""A small graph for each fusion: what the tests of fusion run, and what tools start from."""

from cases import fusion_rows
from fusion_attention import ATTENTION
from fusion_products import PRODUCTS

ROWS = """
# --- Conv, losses -----------------------------------------------------------------------------
group_norm_alone: GroupNorm; gone InstanceNormalization Silu Sigmoid
  (float[B,8,S,T] x, float[8,1,1] g, float[8,1,1] b) => (float[B,8,S,T] y)
  to = int64[3] {0, 4, -1}  one = float[4] {1.0, 1.0, 1.0, 1.0}
  zero = float[4] {0.0, 0.0, 0.0, 0.0}  v = Reshape (x, to)
  i = InstanceNormalization <epsilon = 0.001> (v, one, zero)  size = Shape (x)
  n = Reshape (i, size)  m = Mul (g, n)  y = Add (m, b)
group_norm_silu: GroupNormSilu; gone InstanceNormalization Silu Sigmoid
  (float[B,8,S,T] x, float[8,1,1] g, float[8,1,1] b) => (float[B,8,S,T] y)
  to = int64[3] {0, 4, -1}  one = float[4] {1.0, 1.0, 1.0, 1.0}
  zero = float[4] {0.0, 0.0, 0.0, 0.0}  v = Reshape (x, to)
  i = InstanceNormalization <epsilon = 0.001> (v, one, zero)  size = Shape (x)
  n = Reshape (i, size)  m = Mul (n, g)  z = Add (b, m)  s = Sigmoid (z)  y = Mul (s, z)
group_norm_node_$name: GroupNorm$act; gone GroupNormalization Relu; name, then, act in alone Neg |
relu Relu Relu
  (float[B,8,T] x, float[8] g, float[8] b) => (float[B,8,T] y)
  z = GroupNormalization <num_groups = 4> (x, g, b)  y = $then (z)
norm_of_groups_in_half: GroupNormRelu
  (float16[B,8,T] x, float16[8] g, float16[8] b) => (float16[B,8,T] y)
  z = GroupNormalization <num_groups = 2> (x, g, b)  y = Relu (z)
group_norm_with_scales_of_groups_stays: stays group-scale
  (float[B,8,S] x, float[4] g, float[4] b, float[8,1] u, float[8,1] w) => (float[B,8,S] y)
  to = int64[3] {0, 4, -1}  v = Reshape (x, to)  i = InstanceNormalization (v, g, b)
  size = Shape (x)  n = Reshape (i, size)  m = Mul (n, u)  y = Add (m, w)
conv_relu_without_bias: ConvRelu
  (float[B,3,S,T] x, float[6,3,3,3] w) => (float[B,6,P,Q] y)
  z = Conv <pads = [1,1,1,1], strides = [2,2]> (x, w)  y = Relu (z)
conv_batch_norm_relu: ConvRelu
  (float[B,3,S,T] x, float[6,3,3,3] w, float[6] g, float[6] b) => (float[B,6,P,Q] y)
  $VARIANCE  z = Conv <pads = [1,1,1,1]> (x, w)  n = BatchNormalization (z, g, b, b, var)
  y = Relu (n)
product_batch_norm_through_a_reshape: Gemm; gone BatchNormalization
  (float[B,T,16] x, float[16,6] w, float[6] g, float[6] b) => (float[N,6] y)
  $ROWS_OF_6  r = Reshape (m, flat)  y = BatchNormalization (r, g, b, b, var)
product_batch_norm_of_a_biased_product: Gemm; gone BatchNormalization
  (float[B,T,16] x, float[16,6] w, float[6] g, float[6] b, float[6] c) => (float[N,6] y)
  $ROWS_OF_6  a = Add (c, m)  r = Reshape (a, flat)  y = BatchNormalization (r, g, b, b, var)
product_batch_norm_through_a_transpose: GemmRelu; gone BatchNormalization
  (float[B,T,16] x, float[16,6] w, float[6] g, float[6] b) => (float[B,6,T] y)
  var = float[6] {1.0, 0.5, 2.0, 1.5, 0.7, 3.0}  flat = int64[2] {-1, 6}  m = MatMul (x, w)
  r = Transpose <perm = [0,2,1]> (m)  n = BatchNormalization (r, g, b, b, var)  y = Relu (n)
product_batch_norm_whose_shape_is_read: GemmHardSwish; gone BatchNormalization HardSwish
  (float[B,T,16] x, float[16,6] w, float[6] g, float[6] b) => (float[B,T,6] y)
  $ROWS_OF_6  size = Shape (m)  r = Reshape (m, flat)  n = BatchNormalization (r, g, b, b, var)
  v = Reshape (n, size)  y = HardSwish (v)
product_batch_norm_read_twice_stays:
  (float[B,T,16] x, float[16,6] w, float[6] g, float[6] b) => (float[N,6] y)
  $ROWS_OF_6  r = Reshape (m, flat)  n = BatchNormalization (r, g, b, b, var)  y = Add (n, r)
product_batch_norm_of_a_residual_stays:
  (float[B,T,16] x, float[16,6] w, float[6] g, float[6] b) => (float[N,6] y)
  var = float[6] {1.0, 0.5, 2.0, 1.5, 0.7, 3.0}  flat = int64[2] {-1, 6}  m = MatMul (x, w)
  t = Tanh (m)  a = Add (m, t)  r = Reshape (a, flat)  y = BatchNormalization (r, g, b, b, var)
product_batch_norm_of_other_axis_stays:
  (float[B,6,16] x, float[16,5] w, float[6] g, float[6] b) => (float[B,6,5] y)
  $VARIANCE  m = MatMul (x, w)  y = BatchNormalization (m, g, b, b, var)
conv_add_relu: ConvAddRelu; fed x r; gone Conv Add Relu
  (float[B,3,S,T] x, float[B,6,S,T] r, float[6,3,3,3] w, float[6] c) => (float[B,6,S,T] y)
  z = Conv <pads = [1,1,1,1]> (x, w, c)  s = Add (z, r)  y = Relu (s)
conv_add_silu: ConvAddSilu; fed x r; gone Conv Add Relu
  (float[B,3,S,T] x, float[B,6,S,T] r, float[6,3,3,3] w, float[6] c) => (float[B,6,S,T] y)
  z = Conv <pads = [1,1,1,1]> (x, w, c)  s = Add (r, z)  g = Sigmoid (s)  y = Mul (g, s)
conv_add_alone: ConvAdd; fed x r; gone Conv Add Relu
  (float[B,3,S,T] x, float[B,6,S,T] r, float[6,3,3,3] w, float[6] c) => (float[B,6,S,T] y)
  z = Conv <pads = [1,1,1,1]> (x, w, c)  y = Add (r, z)
conv_bias_behind_it_alone: fed x r; gone Add Relu Mul
  (float[B,3,S,T] x, float[B,6,S,T] r, float[6,3,3,3] w, float[1,6,1,1] c) => (float[B,6,S,T] y)
  z = Conv <pads = [1,1,1,1]> (x, w)  y = Add (z, c)
conv_bias_behind_it_rank_3: ConvRelu; fed x r; gone Add Relu Mul
  (float[B,3,S,T] x, float[B,6,S,T] r, float[6,3,3,3] w, float[6,1,1] c) => (float[B,6,S,T] y)
  z = Conv <pads = [1,1,1,1]> (x, w)  s = Add (c, z)  y = Relu (s)
conv_bias_behind_it_and_residual: ConvAddRelu; fed x r; gone Add Relu Mul
  (float[B,3,S,T] x, float[B,6,S,T] r, float[6,3,3,3] w, float[1,6,1,1] c) => (float[B,6,S,T] y)
  z = Conv <pads = [1,1,1,1]> (x, w)  b = Add (c, z)  s = Add (b, r)  y = Relu (s)
conv_clip_from_0_to_$name: ConvClippedRelu; name, high in 6 6 | half 0.5
  (float[B,3,S,T] x, float[6,3,3,3] w, float[6] c) => (float[B,6,S,T] y)
  low = float {0}  high = float {$high}  z = Conv <pads = [1,1,1,1]> (x, w, c)
  y = Clip (z, low, high)
conv_clip_$name: stays activation; name, low, high, of in from_minus_1 -1 6 z, low, high |
to_0 0 0 z, low, high | without_bounds 0 6 z | without_a_low_bound 0 6 z, , high
  (float[B,3,S,T] x, float[6,3,3,3] w, float[6] c) => (float[B,6,S,T] y)
  low = float {$low}  high = float {$high}  z = Conv <pads = [1,1,1,1]> (x, w, c)  y = Clip ($of)
conv_sum_that_is_no_bias_of_columns:
  (float[B,3,S,6] x, float[6,3,3,3] w, float[1,1,1,6] b) => (float[B,6,S,6] y)
  z = Conv <pads = [1,1,1,1]> (x, w)  s = Add (z, b)  y = Relu (s)
conv_sum_that_is_no_bias_of_columns_in_rank_1:
  (float[B,3,S,6] x, float[6,3,3,3] w, float[6] b) => (float[B,6,S,6] y)
  z = Conv <pads = [1,1,1,1]> (x, w)  s = Add (z, b)  y = Relu (s)
conv_sum_that_is_no_bias_behind_another:
  (float[B,3,S,6] x, float[6,3,3,3] w, float[6] c, float[6,1,1] b) => (float[B,6,S,6] y)
  z = Conv <pads = [1,1,1,1]> (x, w, c)  s = Add (z, b)  y = Relu (s)
conv_add_read_twice: ConvAdd; fed x r
  (float[B,3,S,T] x, float[B,6,S,T] r, float[6,3,3,3] w) => (float[B,6,S,T] y)
  z = Conv <pads = [1,1,1,1]> (x, w)  s = Add (z, r)  a = Relu (s)  y = Mul (a, s)
# the larger filter takes the sum
conv_add_of_two_convolutions: ConvAddRelu; fed x u; gone Add Relu
  (float[B,3,S,T] x, float[B,6,S,T] u, float[6,3,1,1] w1, float[6,6,3,3] w, float[6] c)
  => (float[B,6,S,T] y)
  d = Conv (x, w1)  z = Conv <pads = [1,1,1,1]> (u, w, c)  s = Add (d, z)  y = Relu (s)
conv_add_broadcast_stays: fed x r; stays follows: an Add
  (float[B,3,S,T] x, float[B,1,S,T] r, float[6,3,3,3] w) => (float[B,6,S,T] y)
  z = Conv <pads = [1,1,1,1]> (x, w)  s = Add (z, r)  y = Relu (s)
convolution_of_single_taps_behind_a_norm_narrow: LayerNormGemmRelu; gone Conv
  (float[B,8,S,T] x, float[8] g, float[8] b, float[8,8,1,1] w) => (float[B,8,S,T] y)
  $IMAGE_NORM  z = Conv <group = 1, pads = [0,0,0,0], strides = [1,1]> (u, w)  y = Relu (z)
convolution_of_single_taps_behind_a_norm_and_another: LayerNormGemmGelu; gone Conv
  (float[B,8,S,T] x, float[8] g, float[8] b, float[32,8,1,1] w, float[32] c, float[8,32,1,1] v)
  => (float[B,8,S,T] y)
  $IMAGE_NORM  z = Conv <group = 1, pads = [0,0,0,0], strides = [1,1]> (u, w, c)  h = Gelu (z)
  y = Conv (h, v)
convolution_of_single_taps_behind_a_norm_wide: stays transpose-cost: 32
  (float[B,8,S,T] x, float[8] g, float[8] b, float[32,8,1,1] w, float[32] c) => (float[B,32,S,T] y)
  $IMAGE_NORM  z = Conv <group = 1, pads = [0,0,0,0], strides = [1,1]> (u, w, c)  y = Neg (z)
convolution_of_single_taps_behind_a_norm_of_groups:
  (float[B,8,S,T] x, float[8] g, float[8] b, float[8,4,1,1] w) => (float[B,8,S,T] y)
  $IMAGE_NORM  z = Conv <group = 2, pads = [0,0,0,0], strides = [1,1]> (u, w)  y = Neg (z)
convolution_of_single_taps_behind_a_norm_of_nine:
  (float[B,8,S,T] x, float[8] g, float[8] b, float[8,8,3,3] w) => (float[B,8,S,T] y)
  $IMAGE_NORM  z = Conv <group = 1, pads = [1,1,1,1], strides = [1,1]> (u, w)  y = Neg (z)
convolution_of_single_taps_behind_a_norm_in_steps:
  (float[B,8,S,T] x, float[8] g, float[8] b, float[8,8,1,1] w) => (float[B,8,S,T] y)
  $IMAGE_NORM  z = Conv <group = 1, pads = [0,0,0,0], strides = [2,2]> (u, w)  y = Neg (z)
convolution_of_single_taps_behind_a_norm_padded:
  (float[B,8,S,T] x, float[8] g, float[8] b, float[8,8,1,1] w) => (float[B,8,S,T] y)
  $IMAGE_NORM  z = Conv <group = 1, pads = [1,1,1,1], strides = [1,1]> (u, w)  y = Neg (z)
convolution_of_single_taps_behind_a_norm_turned:
  (float[B,8,S,T] x, float[8] g, float[8] b, float[8,8,1,1] w) => (float[B,8,S,T] y)
  t = Transpose <perm = [0,2,3,1]> (x)  n = LayerNormalization (t, g, b)
  u = Transpose <perm = [0,3,2,1]> (n)
  z = Conv <group = 1, pads = [0,0,0,0], strides = [1,1]> (u, w)  y = Neg (z)
convolution_of_single_taps_behind_a_norm_read_twice: stays other-readers: the norm or its Transpose
  (float[B,8,S,T] x, float[8] g, float[8] b, float[8,8,1,1] w) => (float[B,8,S,T] y)
  $IMAGE_NORM  z = Conv <group = 1, pads = [0,0,0,0], strides = [1,1]> (u, w)  y = Mul (z, u)
conv_prelu: ConvPRelu; gone PRelu
  (float[B,3,S,T] x, float[6,3,3,3] w, float[6] c, float[6,1,1] a) => (float[B,6,S,T] y)
  z = Conv <pads = [1,1,1,1]> (x, w, c)  y = PRelu (z, a)
conv_as_the_slope_of_another_stays: fed x u
  (float[6,S,T] x, float[1,3,S,T] u, float[6,3,3,3] w) => (float[1,6,S,T] y)
  z = Conv <pads = [1,1,1,1]> (u, w)  at = int64[1] {0}  v = Unsqueeze (x, at)  y = PRelu (v, z)
conv_as_the_slope_of_itself_stays: fed x u
  (float[6,S,T] x, float[1,3,S,T] u, float[6,3,3,3] w) => (float[1,6,S,T] y)
  z = Conv <pads = [1,1,1,1]> (u, w)  y = PRelu (z, z)
prelu_of_one_slope: GemmLeakyRelu
  ($X, $LIN)
  a = float {0.25}  $PLAIN  y = PRelu (z, a)
prelu_of_a_slope_that_adds_an_axis_stays: Gemm
  ($X, $LIN) => (float[1,B,T,24] y)
  a = float[1,1,1,1] {0.25}  $PLAIN  y = PRelu (z, a)
prelu_of_a_negative_slope_stays: Gemm; stays activation: PRelu  # the sign of a zero
  ($X, $LIN)
  a = float {-0.25}  $PLAIN  y = PRelu (z, a)
conv_activation_behind_views: ConvGelu
  (float[B,3,S,T] x, float[6,3,3,3] w) => (float[B,N,6] y)
  to = int64[3] {0, 6, -1}  z = Conv <pads = [1,1,1,1]> (x, w)  f = Reshape (z, to)
  t = Transpose <perm = [0,2,1]> (f)  y = Gelu (t)
cross_entropy_written_out: fed x labels; gone LogSoftmax NegativeLogLikelihoodLoss
  (float[2,6,T] x, int64[2,T] labels) => (float y)
  l = LogSoftmax <axis = 1> (x)  y = NegativeLogLikelihoodLoss <ignore_index = 5> (l, labels)
cross_entropy_of_rows_that_may_be_none_stays: fed x labels; stays no-rows;
gone SoftmaxCrossEntropyLoss
  (float[B,24] x, int64[B] labels) => (float y)
  l = LogSoftmax <axis = 1> (x)  y = NegativeLogLikelihoodLoss <ignore_index = 5> (l, labels)
linear_cross_entropy: LinearCrossEntropy; fed x labels; gone MatMul SoftmaxCrossEntropyLoss
  (float[B,T,8] x, float[2051,8] w, int64[B,T] labels) => (float y)
  wt = Transpose <perm = [1, 0]> (w)  l = MatMul (x, wt)  to = int64[2] {-1, 2051}
  r = Reshape (l, to)  flat = int64[1] {-1}  t = Reshape (labels, flat)
  y = SoftmaxCrossEntropyLoss <ignore_index = 5> (r, t)
  spares empty: onnxruntime's SoftmaxCrossEntropyLoss takes no batch of none (1.32)
"""
FUSION_CASES = (*PRODUCTS, *ATTENTION, *fusion_rows(ROWS))
