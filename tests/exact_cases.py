"""Graphs that nearly are what a rule rewrites: each row breaks one thing that a rule relies on.

`fused` are the operators that may be left in spite of it, `reason` what must be said.
"""

from __future__ import annotations

from cases import FusionCase


def _scalar(name: str, value: float, kind: str = "float") -> str:
    return f"{name} = Constant <value = {kind} {{{value}}}> ()\n"


_AXES = "axes = Constant <value = int64[1] {-1}> ()\n"
_X = "float[B,T,8] x"


def _norm(
    x: str = "x",
    centre: str = "mu = ReduceMean ({x}, axes)\n d = Sub ({x}, mu)",
    variance: str = "sq = Mul (d, d)\n v = ReduceMean (sq, axes)",
    shifted: str = "ve = Add (v, eps)",
    root: str = "std = Sqrt (ve)",
    last: str = "y = Div (d, std)",
    epsilon: str = _scalar("eps", 1e-5),
) -> str:
    """A LayerNorm written out, any line of which a row may change."""
    return f"{_AXES}{epsilon}{centre.format(x=x)}\n{variance}\n{shifted}\n{root}\n{last}\n"


def _gelu(
    x: str = "x",
    half: str = _scalar("half", 0.5),
    one: str = _scalar("one", 1.0),
    root: str = _scalar("r", 0.70710678),
    last: str = "p = Mul (x, e1)\n y = Mul (p, half)",
) -> str:
    """A GELU written out, any line of which a row may change."""
    return f"{half}{one}{root}u = Mul ({x}, r)\n e = Erf (u)\n e1 = Add (e, one)\n {last}\n"


_OUT = "float[B,T,8] y"
_RAISED = "float[P,B,T,8] y"
_WITHIN = "it contains a Cast or a constant of more axes"
_16 = "onnxruntime keeps float32 between what it has no float16 for"
_HALVES = (("float16", _16),)


def _branch(then: str, otherwise: str = "o = Neg (x)", out: str = "float[B,T,8]") -> str:
    """y of an If, whose branches end in t and o."""
    return (
        f"y = If (flag) <then_branch = yes () => ({out} t) {{ {then} }}, "
        f"else_branch = no () => ({out} o) {{ {otherwise} }}>\n"
    )


_FLAG = f"{_X}, bool flag"
_IF = {"fed": ("x", "flag")}
_AFFINE = "float[8] g, float[8] b"
_LN = "LayerNormalization <axis = -1>"
_GLU = "z = MatMul (x, w)\n q, u = Split <axis = -1, num_outputs = 2> (z)\n"
_SILU = "s = Sigmoid (q)\n o = Mul (q, s)"
_BN = "float[6] g, float[6] b, float[6] m"
_VARIANCE = "var = Constant <value = float[6] {1.0, 0.5, 2.0, 1.5, 0.7, 3.0}> ()\n"
_IMAGE = "float[B,4,S,T] x, float[6,4,3,3] w"

EXACT_CASES = (
    # --- norms: types ---------------------------------------------------------------------------
    FusionCase(
        "ln_in_double_between_casts",
        _X,
        "xd = Cast <to = 11> (x)\n"
        + _norm("xd", last="n = Div (d, std)\n y = CastLike (n, x)").replace(
            _scalar("eps", 1e-5), _scalar("eps", 1e-5, "double")
        ),
        output=_OUT,
        reason="LayerNormalization computes in float32",
    ),
    FusionCase(
        "rms_in_double_between_casts",
        _X,
        "d = Cast <to = 11> (x)\n"
        + _norm("d", centre="", last="n = Div (d, std)\n y = CastLike (n, x)").replace(
            _scalar("eps", 1e-5), _scalar("eps", 1e-6, "double")
        ),
        output=_OUT,
        reason="its epsilon 1e-06 is a double",
    ),
    FusionCase(
        "ln_variance_rounded",
        _X,
        _norm(shifted="vh = Cast <to = 10> (v)\n vf = CastLike (vh, v)\n ve = Add (vf, eps)"),
        output=_OUT,
        reason=_WITHIN,
        spares=_HALVES,
    ),
    FusionCase(
        "ln_mean_rounded",
        _X,
        _norm(
            centre="mf = ReduceMean (x, axes)\n mh = Cast <to = 10> (mf)\n mu = CastLike (mh, x)\n"
            "d = Sub (x, mu)"
        ),
        ("RMSNormalization",),  # of the deviation from the rounded mean
        output=_OUT,
        spares=_HALVES,
    ),
    FusionCase(
        "rms_root_rounded",
        _X,
        _norm(
            centre="d = Identity (x)",
            root="s = Sqrt (ve)\n sh = Cast <to = 10> (s)\n std = CastLike (sh, s)",
        ),
        output=_OUT,
        reason=_WITHIN,
        spares=_HALVES,
    ),
    FusionCase(
        "ln_in_float16",
        "float16[B,T,8] x",
        _norm(epsilon=_scalar("e32", 1e-5) + "eps = Cast <to = 10> (e32)\n"),
        output="float16[B,T,8] y",
        reason="computed in float16",
        spares=_HALVES,
    ),
    FusionCase(
        "ln_deviation_rounded_before_an_rms_norm",
        "float16[B,T,8] x, float16[8] g",
        f"{_AXES}mu = ReduceMean (x, axes)\n d = Sub (x, mu)\n y = RMSNormalization (d, g)",
        ("RMSNormalization",),
        output="float16[B,T,8] y",
        opset=23,
    ),
    # --- norms: shapes --------------------------------------------------------------------------
    *(
        FusionCase(f"ln_{name}_raises_the_rank", _X, body, output=_RAISED, reason=_WITHIN)
        for name, body in (
            ("epsilon", _norm(epsilon="eps = Constant <value = float[1,1,1,1] {0.001}> ()\n")),
            (
                "exponent",
                _norm(variance="sq = Pow (d, two)\n v = ReduceMean (sq, axes)").replace(
                    _AXES, _AXES + "two = Constant <value = float[1,1,1,1] {2.0}> ()\n"
                ),
            ),
            (
                "root",
                _norm(root="std = Pow (ve, h)").replace(
                    _AXES, _AXES + "h = Constant <value = float[1,1,1,1] {0.5}> ()\n"
                ),
            ),
            (
                "one",
                _norm(last="r = Div (one, std)\n y = Mul (d, r)").replace(
                    _AXES, _AXES + "one = Constant <value = float[1,1,1,1] {1.0}> ()\n"
                ),
            ),
        )
    ),
    FusionCase(
        "ln_scale_of_one_element",
        f"{_X}, float[1] g, float[1] b",
        _norm(last="n = Div (d, std)\n s = Mul (n, g)\n y = Add (s, b)"),
        output=_OUT,
    ),
    FusionCase(
        "ln_unbiased_variance",
        _X,
        _norm(variance="sq = Mul (d, d)\n t = ReduceSum (sq, axes)\n v = Div (t, seven)").replace(
            _AXES, _AXES + _scalar("seven", 7.0)
        ),
        output=_OUT,
    ),
    FusionCase(
        "ln_epsilon_outside_the_root",
        _X,
        _norm(shifted="", root="s = Sqrt (v)\n std = Add (s, eps)"),
        output=_OUT,
    ),
    FusionCase(
        "ln_over_another_axis",
        _X,
        _norm().replace("{-1}", "{1}"),
        output=_OUT,
    ),
    FusionCase(
        "ln_negative_scale_of_a_constant_row",  # -0.0, which a bias of 0.0 would lose
        f"{_X}, float[8] g",
        "zero = Constant <value = float {0.0}> ()\n k = Mul (x, zero)\n a = Abs (g)\n"
        f"s = Neg (a)\n n = {_LN} (k, s)\n y = Reciprocal (n)",
        output=_OUT,
        spares=(("empty", "the same"),),
    ),
    FusionCase(
        "shape_of_the_mean",
        "float[B,8] x, float[8,5] w, float[8] g, float[8] b",
        f"n, mean, rstd = {_LN} (x, g, b)\n y = MatMul (n, w)\n s = Shape (mean)\nt = Shape (rstd)",
        ("LayerNormGemm",),
        output="float[B,5] y, int64[2] s, int64[2] t",
    ),
    FusionCase(
        "skip_norm_scaled_by_its_own_sum",
        f"{_X}, float[B,T,8] r, float[8] b",
        "s = Add (x, r)\n axes = Constant <value = int64[2] {0, 1}> ()\n"
        f"g = ReduceMean <keepdims = 0> (s, axes)\n y = {_LN} (s, g, b)",
        output=_OUT,
        fed=("x", "r"),
        reason="scale is computed in the graph",
    ),
    # --- activations ----------------------------------------------------------------------------
    *(
        FusionCase(f"gelu_{name}_raises_the_rank", _X, _gelu(**{name: text}), output=_RAISED)
        for name, text in (
            ("half", "half = Constant <value = float[1,1,1,1] {0.5}> ()\n"),
            ("one", "one = Constant <value = float[1,1,1,1] {1.0}> ()\n"),
            ("root", "r = Constant <value = float[1,1,1,1] {0.70710678}> ()\n"),
        )
    ),
    FusionCase(
        "quick_gelu_factor_raises_the_rank",
        _X,
        "a = Constant <value = float[1,1,1,1] {1.702}> ()\n u = Mul (x, a)\n s = Sigmoid (u)\n"
        "y = Mul (x, s)",
        output=_RAISED,
    ),
    *(
        FusionCase(
            f"gelu_with_{name}",
            _X,
            _gelu(**{place: _scalar(held, value)}),
            output=_OUT,
            reason="near those of Gelu",
        )
        for name, place, held, value in (
            ("a_half_of_0.5009", "half", "half", 0.5009),
            ("a_half_of_0.5000001", "half", "half", 0.50000012),
            ("a_root_of_four_digits", "root", "r", 0.7071),
            ("a_one_of_1.0005", "one", "one", 1.0005),
        )
    ),
    FusionCase(
        "gelu_as_a_sum",  # -0.0 · ½ + -0.0 · ½ · erf is 0.0
        _X,
        _gelu(last="h = Mul (x, half)\n he = Mul (h, e)\n y = Add (h, he)"),
        output=_OUT,
        reason="loses a sign",
    ),
    FusionCase(
        "gelu_that_overflows",
        _X,
        _gelu(half=_scalar("half", 0.5e-30) + _scalar("large", 1e30))
        .replace("u = Mul (x, r)", "xl = Mul (x, large)\n u = Mul (x, r)")
        .replace("Mul (x, e1)", "Mul (xl, e1)"),
        output=_OUT,
        spares=_HALVES,
    ),
    FusionCase(
        "silu_of_1.0019",
        _X,
        _scalar("a", 1.0019) + "u = Mul (x, a)\n s = Sigmoid (u)\n y = Mul (x, s)",
        ("QuickGelu",),
        output=_OUT,
    ),
    FusionCase(
        "quick_gelu_divided",  # 1 / 0.6 is no float32
        _X,
        _scalar("a", 0.6) + "u = Div (x, a)\n s = Sigmoid (u)\n y = Mul (x, s)",
        output=_OUT,
        reason="that a float32 holds",
    ),
    # --- products -------------------------------------------------------------------------------
    FusionCase(
        "gemm_transposed_by_2",
        "float[B,8] x, float[8,8] w",
        "z = Gemm <transB = 2> (x, w)\n y = Relu (z)",
        ("GemmRelu",),
        output="float[B,8] y",
    ),
    FusionCase(
        "gemm_beta_0_and_a_bias",
        "float[B,8] x, float[8,6] w, float[6] c",
        "z = Gemm <beta = 0.0> (x, w, c)\n y = Relu (z)",
        output="float[B,6] y",
        reason="beta other than 1",
    ),
    FusionCase(
        "bias_per_row_makes_more_rows",
        "float[B,8] x, float[8,6] w, float[5,1] c",
        "at = Constant <value = int64[1] {0}> ()\n h = ReduceMean (x, at)\n"
        "z = MatMul (h, w)\n a = Add (z, c)\n y = Relu (a)",
        output="float[P,6] y",
    ),
    FusionCase(
        "merge_of_products_one_plus_zero",
        f"{_X}, float[8,6] w, float[8,6] w1",
        _scalar("zero", 0.0)
        + "m = MatMul (x, w)\n p = Add (m, zero)\n q = MatMul (x, w1)\n pr = Reciprocal (p)\n"
        "qr = Reciprocal (q)\n y = Concat <axis = -1> (pr, qr)",
        ("Gemm",),
        output="float[B,T,12] y",
    ),
    FusionCase(
        "einsum_contracts_one_with_many",
        "float[B,5,3] x, float[B,1,4] z",
        'y = Einsum <equation = "bij,bjk->bik"> (x, z)',
        fed=("x", "z"),
        output="float[B,5,4] y",
        spares=(("empty", "onnxruntime's Einsum dies of a batch of none (1.32)"),),
    ),
    FusionCase(
        "einsum_contracts_one_of_two_axes_with_many",
        "float[B,T,1,8] x, float[2,8,5] w",
        'y = Einsum <equation = "abcd,cde->abe"> (x, w)',
        output="float[B,T,5] y",
        gone=("MatMul",),
        spares=(("empty", "onnxruntime's Einsum dies of a batch of none (1.32)"),),
    ),
    FusionCase(
        "einsum_contracts_sizes_of_two_names",
        "float[2,5,H] x, float[2,G,4] z",
        'y = Einsum <equation = "bij,bjk->bik"> (x, z)',
        fed=("x", "z"),
        output="float[2,5,4] y",
        gone=("MatMul",),
    ),
    # --- no-ops ---------------------------------------------------------------------------------
    FusionCase(
        "plus_zero_is_seen",
        _X,
        _scalar("zero", 0.0) + "a = Add (x, zero)\n y = Reciprocal (a)",
        output=_OUT,
    ),
    FusionCase(
        "minus_zero_added_is_not",
        _X,
        _scalar("zero", -0.0) + "a = Add (x, zero)\n y = Reciprocal (a)",
        output=_OUT,
        gone=("Add",),
    ),
    FusionCase(
        "minus_minus_zero_is_seen",
        _X,
        _scalar("zero", -0.0) + "a = Sub (x, zero)\n y = Reciprocal (a)",
        output=_OUT,
    ),
    FusionCase(
        "times_one_raises_the_rank",
        _X,
        "one = Constant <value = float[1,1,1,1] {1.0}> ()\n a = Mul (x, one)\n y = Relu (a)",
        output=_RAISED,
    ),
    # --- bodies ---------------------------------------------------------------------------------
    FusionCase(
        "skip_norm_in_a_branch",
        f"{_FLAG}, {_AFFINE}",
        "s = Add (x, x)\n" + _branch(f"t = {_LN} (s, g, b)", "o = Neg (s)"),
        output=_OUT,
        **_IF,
    ),
    FusionCase(
        "skip_norm_in_a_branch_with_its_scale",
        f"{_FLAG}, float[8] g, float[8] b",
        "s = Add (x, x)\n" + _branch(f"h = Neg (g)\n n = {_LN} (s, h, b)\n t = Neg (n)"),
        output=_OUT,
        **_IF,
    ),
    FusionCase(
        "skip_norm_in_a_loop_with_its_scale",
        f"{_X}, {_AFFINE}",
        "s = Add (x, x)\n three = Constant <value = int64 {3}> ()\n"
        "go = Constant <value = bool {1}> ()\n"
        "y = Loop (three, go, x) <body = each (int64 i, bool ci, float[B,T,8] h) => "
        "(bool co, float[B,T,8] ho) { co = Identity (ci)\n"
        "ax = Constant <value_ints = [0,1]> ()\n k = ReduceMean <keepdims = 0> (h, ax)\n"
        f"n = {_LN} (s, k, b)\n ho = Add (n, h) }}>",
        output=_OUT,
    ),
    FusionCase(
        "loss_in_a_branch",
        "float[B,8] x, int64[B] labels, bool flag",
        "l = LogSoftmax <axis = 1> (x)\n"
        + _branch(
            "t = NegativeLogLikelihoodLoss (l, labels)", "o = ReduceMax <keepdims = 0> (x)", "float"
        ),
        fed=("x", "labels", "flag"),
        output="float y, float[B,8] l",
        spares=(("empty", "there is no maximum over none"),),
    ),
    FusionCase(
        "activation_in_a_branch",
        f"{_FLAG}, float[8,8] w, float[8] c",
        "m = MatMul (x, w)\n z = Add (m, c)\n" + _branch("t = Gelu (z)", "o = Relu (z)"),
        ("Gemm",),
        output=_OUT,
        **_IF,
    ),
    FusionCase(
        "gelu_in_a_branch",
        _FLAG,
        _gelu(last="p = Mul (x, e1)") + _branch("t = Mul (p, half)", "o = Relu (p)"),
        output=_OUT,
        **_IF,
    ),
    FusionCase(
        "norm_before_a_branch",
        f"{_FLAG}, {_AFFINE}, float[8,8] w",
        f"n = {_LN} (x, g, b)\n" + _branch("t = MatMul (n, w)", "o = Neg (n)"),
        output=_OUT,
        **_IF,
    ),
    FusionCase(
        "products_of_one_input_in_two_bodies",
        f"{_FLAG}, float[8,8] w, float[8,8] w1, float[8,8] w2",
        "a = MatMul (x, w)\n"
        + _branch("u = MatMul (x, w1)\n t = Add (u, a)", "v = MatMul (x, w2)\n o = Mul (v, a)"),
        output=_OUT,
        **_IF,
    ),
    FusionCase(
        "batch_norm_in_a_branch",
        f"float[B,4,S,T] x, bool flag, float[6,4,1,1] w, {_BN}",
        _VARIANCE
        + "z = Conv (x, w)\n"
        + _branch("t = BatchNormalization (z, g, b, m, var)", "o = Relu (z)", "float[B,6,S,T]"),
        output="float[B,6,S,T] y",
        **_IF,
    ),
    FusionCase(
        "nested_branches",
        f"{_FLAG}, {_AFFINE}, float[8,8] w",
        "s = Add (x, x)\n"
        + _branch(
            _branch(f"t = {_LN} (s, g, b)", "o = MatMul (s, w)").replace("y = If", "i = If")
            + "t = Relu (i)",
            "o = Neg (s)",
        ),
        output=_OUT,
        **_IF,
    ),
    # --- losses ---------------------------------------------------------------------------------
    FusionCase(
        "cross_entropy_of_a_rounded_softmax_stays",
        "float[B,24] x, int64[B] labels",
        "p = Softmax <axis = 1> (x)\n l = Log (p)\n y = NegativeLogLikelihoodLoss (l, labels)",
        fed=("x", "labels"),
        output="float y",
        reason="where Softmax rounds to 0",
    ),
    FusionCase(
        "loss_against_its_own_best_guess",
        "float[B,8] x",
        "l = LogSoftmax <axis = 1> (x)\n k = ArgMax <axis = 1, keepdims = 0> (l)\n"
        "y = NegativeLogLikelihoodLoss (l, k)",
        output="float y, float[B,8] l",
        reason="worked out from the probabilities",
    ),
    # --- batch norms ----------------------------------------------------------------------------
    FusionCase(
        "batch_norm_of_two_types",
        "float16[B,4,S,T] x, float16[6,4,3,3] w, float[6] g, float[6] b, float[6] m",
        _VARIANCE + "z = Conv (x, w)\n y = BatchNormalization (z, g, b, m, var)",
        output="float16[B,6,P,Q] y",
        reason="its parameters are of float and float16",
    ),
    FusionCase(
        "batch_norm_of_a_convolution_of_the_weight_with_itself",
        f"float[B,6,S,T] x, float[6,6,3,3] w, {_BN}",
        _VARIANCE + "z = Conv <pads = [1, 1, 1, 1]> (w, w)\n"
        "n = BatchNormalization (z, g, b, m, var)\n y = Conv <pads = [1, 1, 1, 1]> (x, n)",
        output="float[B,6,S,T] y",
        reason="more than this reads the weight 'w'",
    ),
    FusionCase(
        "batch_norm_beside_a_tensor_named_as_the_bias",
        f"{_IMAGE}, float[6] w_bias, {_BN}",
        _VARIANCE + "z = Conv (x, w)\n n = BatchNormalization (z, g, b, m, var)\n"
        "at = Constant <value = int64[2] {1, 2}> ()\n k = Unsqueeze (w_bias, at)\n"
        "y = Add (n, k)",
        output="float[B,6,P,Q] y",
        gone=("BatchNormalization",),
    ),
    FusionCase(
        "batch_norms_with_one_bias",
        f"{_IMAGE}, float[6,4,3,3] w1, float[6] c, {_BN}",
        _VARIANCE + "z = Conv (x, w, c)\n n = BatchNormalization (z, g, b, m, var)\n"
        "z1 = Conv (x, w1, c)\n n1 = BatchNormalization (z1, b, g, m, var)\n y = Add (n, n1)",
        ("ConvAdd",),
        output="float[B,6,P,Q] y",
        gone=("BatchNormalization",),
    ),
    FusionCase(
        "batch_norm_of_no_variance",
        f"{_IMAGE}, {_BN}",
        "var = Constant <value = float[6] {0.0, -1.0, 2.0, 1.5, 0.7, 3.0}> ()\n"
        "z = Conv (x, w)\n y = BatchNormalization (z, g, b, m, var)",
        output="float[B,6,P,Q] y",
        reason="not finite",
    ),
    FusionCase(
        "batch_norm_behind_grouped_transposed_convolution",
        f"float[B,4,S,T] x, float[4,3,2,2] w, {_BN}",
        _VARIANCE
        + "z = ConvTranspose <group = 2> (x, w)\n y = BatchNormalization (z, g, b, m, var)",
        output="float[B,6,P,Q] y",
        gone=("BatchNormalization",),
    ),
    *(
        FusionCase(
            f"batch_norm_behind_a_gemm_with_bias_{name}",
            f"float[5,8] x, float[8,6] w, {shape} c, {_BN}",
            _VARIANCE + "z = Gemm <alpha = 0.5, beta = 2.0> (x, w, c)\n"
            "y = BatchNormalization (z, g, b, m, var)",
            output="float[5,6] y",
            gone=() if name == "per_row" else ("BatchNormalization",),
        )
        for name, shape in (
            ("scalar", "float"),
            ("matrix", "float[1,6]"),
            ("per_row", "float[5,1]"),
        )
    ),
    # --- attention: sizes -----------------------------------------------------------------------
    FusionCase(
        "attention_of_one_head_with_a_mask_of_more",
        "float[B,1,S,8] q, float[B,1,T,8] k, float[B,1,T,8] v, float[B,H,S,T] mask",
        "kt = Transpose <perm = [0,1,3,2]> (k)\n s = MatMul (q, kt)\n z = Add (s, mask)\n"
        "p = Softmax (z)\n y = MatMul (p, v)",
        fed=("q", "k", "v", "mask"),
        output="float[B,H,S,8] y",
        reason="makes the scores larger",
    ),
    # --- gated products: what must be the halves of one -------------------------------------------
    FusionCase(
        "gate_whose_half_is_read_elsewhere",
        f"{_X}, float[8,16] w",
        f"{_GLU}{_SILU}\n t = Mul (o, u)\n y = Add (t, u)",
        ("Silu",),
        output=_OUT,
        reason="other nodes read the product or one of its halves, too",
    ),
    FusionCase(
        "gate_whose_product_is_an_output",
        f"{_X}, float[8,16] w",
        f"{_GLU}{_SILU}\n y = Mul (o, u)",
        ("Silu",),
        output="float[B,T,8] y, float[B,T,16] z",
        reason="other nodes read the product or one of its halves, too",
    ),
    FusionCase(
        "gate_that_lets_through_one_column",
        f"{_X}, float[8,9] w",
        "z = MatMul (x, w)\n n = Constant <value_ints = [8, 1]> ()\n"
        f"q, u = Split <axis = -1> (z, n)\n {_SILU}\n y = Mul (o, u)",
        ("Silu",),
        output=_OUT,
        reason="are not the halves of a product",
    ),
    FusionCase(
        "gate_among_three_parts",
        f"{_X}, float[8,24] w",
        "z = MatMul (x, w)\n q, u, t = Split <axis = -1, num_outputs = 3> (z)\n"
        f"{_SILU}\n y = Mul (o, t)",
        ("Silu",),
        output=_OUT,
        reason="are not the halves of a product",
    ),
    FusionCase(
        "gate_on_itself",
        f"{_X}, float[8,16] w",
        f"{_GLU}o = Tanh (q)\n y = Mul (o, q)",
        output=_OUT,
        reason="are not the halves of a product",
    ),
    FusionCase(
        "gate_of_other_rows",
        "float[B,6,8] x, float[8,16] w",
        "z = MatMul (x, w)\n q, u = Split <axis = 1, num_outputs = 2> (z)\n"
        "o = Sigmoid (q)\n y = Mul (o, u)",
        output="float[B,3,16] y",
        reason="along another axis",
    ),
    FusionCase(
        "gate_and_up_of_one_column",
        f"{_X}, float[8,8] w, float[8,1] w1",
        "q = MatMul (x, w)\n u = MatMul (x, w1)\n o = Tanh (q)\n y = Mul (o, u)",
        ("Gemm",),
        output=_OUT,
        reason="its two products differ in width",
    ),
    FusionCase(
        "gate_and_up_with_a_computed_weight",
        f"{_X}, float[8,8] w, float[8,8] w1",
        "q = MatMul (x, w)\n u = MatMul (x, w1)\n o = Tanh (q)\n y = Mul (o, u)",
        ("GemmTanh",),
        fed=("x", "w1"),
        output=_OUT,
        reason="its weights are computed",
    ),
    FusionCase(
        "gate_and_up_that_is_read_elsewhere",
        f"{_X}, float[8,8] w, float[8,8] w1",
        "q = MatMul (x, w)\n u = MatMul (x, w1)\n o = Tanh (q)\n t = Mul (o, u)\ny = Add (t, u)",
        ("Gemm",),
        output=_OUT,
        reason="other nodes read one of its two products, too",
    ),
    FusionCase(
        "gate_and_up_with_a_bias_of_each_row",
        "float[B,4,8] x, float[8,8] w, float[4,1] c, float[8,8] w1",
        "m = MatMul (x, w)\n q = Add (m, c)\n u = MatMul (x, w1)\n o = Tanh (q)\ny = Mul (o, u)",
        ("GemmTanh",),
        output="float[B,4,8] y",
        reason="the bias is not one number a column",
    ),
    FusionCase(
        "gate_and_up_behind_norms_of_their_own",
        f"{_X}, float[8] g, float[8] b, float[8] g1, float[8,8] w, float[8,8] w1",
        "n = LayerNormalization (x, g, b)\n n1 = LayerNormalization (x, g1, b)\n"
        "q = MatMul (n, w)\n u = MatMul (n1, w1)\n o = Tanh (q)\n y = Mul (o, u)",
        ("LayerNormGemm", "LayerNormGemmTanh"),
        output=_OUT,
    ),
    FusionCase(
        "gate_behind_a_norm_that_is_read_elsewhere",
        f"{_X}, {_AFFINE}, float[8,16] w",
        "n = LayerNormalization (x, g, b)\n"
        + _GLU.replace("(x,", "(n,")
        + "o = Tanh (q)\n t = Mul (o, u)\n y = Add (t, n)",
        ("LayerNormGemm_n",),
        output=_OUT,
        reason="other nodes read its norm, too",
    ),
)
