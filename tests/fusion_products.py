"""Graphs that become fused norms and products, for `fusion_cases`."""

from __future__ import annotations

from cases import (
    AFFINE,
    BIAS,
    CENTRE,
    DIV,
    ERF,
    IN,
    LIN,
    LINEAR,
    LN,
    MUL,
    ONE_OVER,
    PAD,
    PAD_AND_ROLL,
    PADDED,
    PLAIN,
    POW,
    RECIPROCAL,
    TANH,
    FusionCase,
    X,
    scalar,
    written_norm,
)

PRODUCTS = (
    # --- LayerNormalization in every form that exporters write -----------------------------------
    *(
        FusionCase(
            f"norm_with_{name}_of_one_number",
            f"{X}, {affine}, {LIN}",
            LN + LINEAR + "y = Identity (z)",
            ("LayerNormGemm",),
            spares=(("huge", "onnxruntime's variance overflows later where it broadcasts (1.32)"),),
        )
        for name, affine in (
            ("a_shift", "float[16] g, float[1] b"),
            ("a_scale", "float[1] g, float[16] b"),
        )
    ),
    FusionCase("norm_node", IN, LN + LINEAR + "y = Identity (z)", ("LayerNormGemm",)),
    FusionCase(
        "norm_with_mean_and_rstd",
        IN,
        "n, mean, rstd = LayerNormalization <axis = 2> (x, g, b)\n" + LINEAR + "y = Identity (z)",
        ("LayerNormGemm",),
    ),
    FusionCase(
        "norm_without_bias",
        f"{X}, float[16] g, {LIN}",
        "n = LayerNormalization (x, g)\n" + LINEAR + "y = Identity (z)",
        ("LayerNormGemm",),
    ),
    *(
        FusionCase(
            f"norm_written_out_{name}",
            IN,
            written_norm(CENTRE, square, normalize, BIAS) + LINEAR + "y = Identity (z)",
            ("LayerNormGemm",),
        )
        for name, square, normalize in (
            ("pow_div", POW, DIV),
            ("mul_reciprocal", MUL, RECIPROCAL),
            ("mul_one_over", MUL, ONE_OVER),
        )
    ),
    FusionCase(
        "norm_written_out_width_from_sizes",  # [B·4, -1, 16], as patches are unfolded
        f"float[B,4,T,16] x, {AFFINE}, {LIN}",
        "zero = Constant <value = int64 {0}> ()\n four = Constant <value = int64 {4}> ()\n"
        "at = Constant <value = int64[1] {0}> ()\n rest = Constant <value = int64[1] {-1}> ()\n"
        "all = Shape (x)\n b0 = Gather (all, zero)\n t = Shape <start = 2, end = 3> (x)\n"
        "b4 = Mul (b0, four)\n b1 = Unsqueeze (b4, at)\n to = Concat <axis = 0> (b1, t, rest)\n"
        "x3 = Reshape (x, to)\n"
        + written_norm(CENTRE.replace("(x", "(x3"), POW, DIV, BIAS)
        + LINEAR
        + "y = Identity (z)",
        ("LayerNormGemm",),
        output="float[R,T,24] y",
    ),
    FusionCase(
        "norm_written_out_with_var_and_mean",  # torch.var_mean: its axes are put back by Reshape
        IN,
        scalar("eps", 1e-5)
        + scalar("width", 16.0)
        + "last = Constant <value = int64[1] {2}> ()\n unit = Constant <value = int64[1] {1}> ()\n"
        "axes = Constant <value = int64[1] {-1}> ()\n"
        "b0 = Shape <start = 0, end = 1> (x)\n t0 = Shape <start = 1, end = 2> (x)\n"
        "to = Concat <axis = 0> (b0, t0, unit)\n"
        "mu = ReduceMean (x, last)\n d = Sub (x, mu)\n sq = Mul (d, d)\n"
        "v = ReduceMean <keepdims = 0> (sq, last)\n vr = Reshape (v, to)\n vx = Expand (vr, to)\n"
        "total = ReduceSum <keepdims = 0> (x, axes)\n tr = Reshape (total, to)\n"
        "mean = Div (tr, width)\n d2 = Sub (x, mean)\n"
        "ve = Add (vx, eps)\n std = Sqrt (ve)\n p = Div (d2, std)\n"
        + f"{BIAS}\n"
        + LINEAR
        + "y = Identity (z)",
        ("LayerNormGemm",),
        gone=("ReduceMean", "ReduceSum"),
        spares=(("float16:huge", "onnxruntime has float32 between operators without float16"),),
    ),
    FusionCase(
        "norm_written_out_around_an_rms_norm",
        IN,
        scalar("one", 1.0)
        + "axes = Constant <value = int64[1] {-1}> ()\n"
        + f"{CENTRE}\n q = RMSNormalization (d, g)\n n = Add (q, b)\n"
        + LINEAR
        + "y = Identity (z)",
        ("LayerNormGemm",),
        opset=23,
        gone=("ReduceMean",),
    ),
    FusionCase(
        "norm_written_out_operands_swapped",
        IN,
        written_norm(CENTRE, POW, DIV, "q = Mul (g, p)\n n = Add (b, q)")
        + "m = MatMul (n, w)\n z = Add (c, m)\n y = Identity (z)",
        ("LayerNormGemm",),
    ),
    FusionCase(
        "norm_written_out_without_affine",
        f"{X}, {LIN}",
        written_norm(CENTRE, POW, DIV, "n = Identity (p)") + LINEAR + "y = Identity (z)",
        ("LayerNormGemm",),
    ),
    FusionCase(
        "norm_with_casts_between",
        "float16[B,T,16] x, float16[16] g, float16[16] b, float16[16,24] w, float16[24] c",
        "xf = Cast <to = 1> (x)\n"
        + written_norm(
            "mu = ReduceMean (xf, axes)\n d = Sub (xf, mu)",
            POW,
            DIV,
            "ph = Cast <to = 10> (p)\n q = Mul (ph, g)\n n = Add (q, b)",
        )
        + LINEAR
        + "y = Identity (z)",
        ("LayerNormGemm",),
        output="float16[B,T,24] y",
    ),
    FusionCase(
        "norm_over_two_axes_stays",
        f"{X}, float[5,16] g, float[5,16] b, {LIN}".replace("B,T,16", "B,5,16"),
        "n = LayerNormalization <axis = 1> (x, g, b)\n" + LINEAR + "y = Identity (z)",
        ("Gemm",),
        reason="normalizes from axis 1",
        output="float[B,5,24] y",
    ),
    # --- RMSNormalization -------------------------------------------------------------------------
    *(
        FusionCase(
            f"rms_{name}",
            f"{X}, float[16] g, {LIN}",
            written_norm("d = Identity (x)", square, normalize, "n = Mul (g, p)")
            + LINEAR
            + "y = Identity (z)",
            ("RMSNormGemm",),
        )
        for name, square, normalize in (
            ("pow_div", POW, DIV),
            ("mul_reciprocal", MUL, RECIPROCAL),
        )
    ),
    FusionCase(
        "rms_without_epsilon",  # which dynamo's exporter takes for zero where it is 1e-8
        f"{X}, float[16] g, {LIN}",
        written_norm("d = Identity (x)", MUL, RECIPROCAL, "n = Mul (g, p)").replace("(ve)", "(v)")
        + LINEAR
        + "y = Identity (z)",
        ("RMSNormGemm",),
    ),
    FusionCase(
        "rms_between_casts_with_its_scale_in_float32_stays",
        "float16[B,T,16] x, float[16] g, float16[16,24] w, float16[24] c",
        "d = Cast <to = 1> (x)\n"
        + written_norm("", MUL, RECIPROCAL, "f = Mul (g, p)\n n = Cast <to = 10> (f)")
        + LINEAR
        + "y = Identity (z)",
        ("RMSNormalization", "Gemm"),
        reason="a Cast between it and the product rounds",
        output="float16[B,T,24] y",
    ),
    FusionCase(
        "rms_node",
        f"{X}, float[16] g, {LIN}",
        "n = RMSNormalization <axis = -1> (x, g)\n" + LINEAR + "y = Identity (z)",
        ("RMSNormGemm",),
        opset=23,
    ),
    # --- Gemm with bias and activation ------------------------------------------------------------
    FusionCase("matmul_add", f"{X}, {LIN}", PLAIN + "y = Identity (z)", ("Gemm",)),
    FusionCase(
        "bias_scalar",
        f"{X}, float[16,24] w, float c",
        PLAIN + "y = Relu (z)",
        ("GemmRelu",),
    ),
    FusionCase(
        "bias_per_row",
        "float[5,16] x, float[16,24] w, float[5,1] c",
        PLAIN + "y = Relu (z)",
        ("GemmRelu",),
        output="float[5,24] y",
    ),
    FusionCase(
        "bias_none", f"{X}, float[16,24] w", "z = MatMul (x, w)\n y = Relu (z)", ("GemmRelu",)
    ),
    FusionCase(
        "residual_is_no_bias",
        f"{X}, float[B,T,24] r, float[16,24] w",
        "m = MatMul (x, w)\n y = Add (m, r)",
        fed=("x", "r"),
    ),
    FusionCase(
        "gemm_transposed_weight",
        "float[B,16] x, float[24,16] w, float[24] c",
        "z = Gemm <transB = 1> (x, w, c)\n y = Tanh (z)",
        ("GemmTanh",),
        output="float[B,24] y",
    ),
    FusionCase(
        "gemm_with_alpha_stays",
        "float[B,16] x, float[24,16] w, float[24] c",
        "z = Gemm <transB = 1, alpha = 0.5> (x, w, c)\n y = Tanh (z)",
        reason="alpha other than 1",
        output="float[B,24] y",
    ),
    *(
        FusionCase(f"activation_{name}", f"{X}, {LIN}", PLAIN + body, (f"Gemm{fused}",))
        for name, fused, body in (
            ("leaky_relu", "LeakyRelu", "y = LeakyRelu <alpha = 0.2> (z)"),
            ("relu_6", "ClippedRelu", scalar("o", 0) + scalar("six", 6) + "y = Clip (z, o, six)"),
            ("sigmoid", "Sigmoid", "y = Sigmoid (z)"),
            ("tanh", "Tanh", "y = Tanh (z)"),
            ("elu", "Elu", "y = Elu <alpha = 0.7> (z)"),
            ("selu", "Selu", "y = Selu (z)"),
            ("mish", "Mish", "y = Mish (z)"),
            ("mish_of_opset_17", "Mish", "s = Softplus (z)\n t = Tanh (s)\n y = Mul (z, t)"),
            ("softplus", "Softplus", "y = Softplus (z)"),
            ("hard_sigmoid", "HardSigmoid", "y = HardSigmoid <alpha = 0.16666667> (z)"),
            ("hard_swish", "HardSwish", "y = HardSwish (z)"),
            (
                "hard_swish_of_opset_13",
                "HardSwish",
                "s = HardSigmoid <alpha = 0.16666667> (z)\n y = Mul (s, z)",
            ),
            *(
                (
                    f"hard_swish_of_relu_6_{name}",
                    "HardSwish",
                    scalar("o", 0)
                    + scalar("three", 3)
                    + scalar("six", 6)
                    + scalar("sixth", 1 / 6)
                    + "a = Add (z, three)\n u = Clip (a, o, six)\n"
                    + ending,
                )
                for name, ending in (
                    ("last", "t = Mul (z, u)\n y = Div (t, six)"),
                    ("first", "d = Mul (u, sixth)\n y = Mul (z, d)"),
                )
            ),
            (
                "hard_sigmoid_of_relu_6",
                "HardSigmoid",
                scalar("o", 0)
                + scalar("three", 3)
                + scalar("six", 6)
                + "a = Add (three, z)\n u = Clip (a, o, six)\n y = Div (u, six)",
            ),
            ("gelu", "Gelu", "y = Gelu (z)"),
            ("gelu_tanh", "GeluTanh", 'y = Gelu <approximate = "tanh"> (z)'),
            ("gelu_erf_half_last", "Gelu", ERF + "t = Mul (z, e1)\n y = Mul (t, half)"),
            ("gelu_erf_half_first", "Gelu", ERF + "h = Mul (half, z)\n y = Mul (h, e1)"),
            ("gelu_erf_half_inner", "Gelu", ERF + "h = Mul (e1, half)\n y = Mul (z, h)"),
            (
                "gelu_tanh_pow",
                "GeluTanh",
                TANH
                + "z3 = Pow (z, three)\n az = Mul (z3, a)\n i = Add (z, az)\n ki = Mul (i, k)\n"
                "t = Tanh (ki)\n t1 = Add (one, t)\n h = Mul (z, half)\n y = Mul (h, t1)",
            ),
            (
                "gelu_tanh_fast",
                "GeluTanh",
                TANH
                + "zk = Mul (z, k)\n az = Mul (a, z)\n azz = Mul (az, z)\n i = Add (azz, one)\n"
                "ki = Mul (zk, i)\n t = Tanh (ki)\n t1 = Add (t, one)\n h = Mul (t1, z)\n"
                "y = Mul (h, half)",
            ),
            ("silu", "Silu", "s = Sigmoid (z)\n y = Mul (s, z)"),
            (
                "quick_gelu",
                "QuickGelu",
                scalar("al", 1.702) + "az = Mul (al, z)\n s = Sigmoid (az)\n y = Mul (z, s)",
            ),
        )
    ),
    FusionCase(
        "activation_behind_a_reshape",
        f"{X}, {LIN}",
        PLAIN + "to = Constant <value = int64[2] {-1, 24}> ()\n f = Reshape (z, to)\n y = Relu (f)",
        ("GemmRelu",),
        output="float[N,24] y",
    ),
    FusionCase(
        "activation_input_read_twice",
        f"{X}, {LIN}",
        PLAIN + "t = Tanh (z)\n y = Mul (t, z)",
        ("Gemm",),
        reason="other reader",
    ),
    FusionCase("norm_and_activation", IN, LN + LINEAR + "y = Gelu (z)", ("LayerNormGemmGelu",)),
    # --- layer scale ------------------------------------------------------------------------------
    FusionCase(
        "scale_of_columns",
        f"{X}, {LIN}, float[24] s",
        PLAIN + "y0 = Mul (s, z)\n y = Relu (y0)",
        ("GemmRelu",),
        level=1,
        gone=("Mul",),
    ),
    FusionCase(
        "scale_of_a_gemm",
        "float[B,16] x, float[24,16] w, float[24] c, float[24] s",
        "z = Gemm <transB = 1> (x, w, c)\n t = Mul (z, s)\n y = Tanh (t)",
        ("GemmTanh",),
        level=3,
        output="float[B,24] y",
        gone=("Mul",),
    ),
    FusionCase(
        "scale_of_a_gemm_with_a_bias_of_rows_stays",  # as many rows as columns
        "float[24,16] x, float[16,24] w, float[24,1] c, float[24] s",
        "z = Gemm (x, w, c)\n t = Mul (z, s)\n y = Tanh (t)",
        level=3,
        output="float[24,24] y",
        reason="not one number a column",
    ),
    FusionCase(
        "scale_behind_nchw",
        "float[B,4,6,16] x, float[16,24] w, float[24] c, float[B,24,4,6] r, float[24,1,1] s",
        PLAIN + "t = Transpose <perm = [0,3,1,2]> (z)\n t2 = Mul (t, s)\n y = Add (r, t2)",
        ("Gemm",),
        fed=("x", "r"),
        level=3,
        output="float[B,24,4,6] y",
        gone=("Mul",),
    ),
    FusionCase(
        "scale_behind_a_convolution",
        "float[B,3,S,T] x, float[B,6,S,T] r, float[6,3,3,3] w, float[6] c, float[6,1,1] s",
        "z = Conv <pads = [1,1,1,1]> (x, w, c)\n t = Mul (z, s)\n y = Add (t, r)",
        ("ConvAdd",),
        fed=("x", "r"),
        level=3,
        output="float[B,6,S,T] y",
        gone=("Mul", "Add"),
    ),
    FusionCase(
        "scale_of_what_is_read_twice_stays",
        f"{X}, {LIN}, float[24] s",
        PLAIN + "t = Mul (s, z)\n y = Add (t, z)",
        ("Gemm",),
        level=3,
        reason="layer scale that is not folded",
    ),
    FusionCase(
        "scale_of_rows_stays",
        "float[5,16] x, float[16,24] w, float[24] c, float[5,1] s",
        PLAIN + "y = Mul (s, z)",
        ("Gemm",),
        level=3,
        output="float[5,24] y",
    ),
    FusionCase(
        "scale_of_a_product_with_a_vector_stays",  # the product's only axis is of rows
        "float[B,16,16] x, float[16] w, float[16] s",
        "z = MatMul (x, w)\n t = Mul (s, z)\n y = Relu (t)",
        level=1,
        output="float[B,16] y",
    ),
    # --- the norm's other readers -----------------------------------------------------------------
    FusionCase(
        "norm_read_by_a_residual",
        f"{X}, {AFFINE}, float[16,16] w, float[16] c",
        LN + LINEAR + "y = Add (z, n)",
        ("LayerNormGemm_n",),
        output="float[B,T,16] y",
    ),
    FusionCase(
        "norm_read_by_its_shape_only",
        IN,
        LN + LINEAR + "sh = Shape (n)\n y = Identity (z)",
        ("LayerNormGemm",),
        output="float[B,T,24] y, int64[3] sh",
    ),
    FusionCase(
        "norm_through_a_gather",
        IN,
        "i = Constant <value = int64 {0}> ()\n"
        + LN
        + "r = Gather <axis = 1> (n, i)\n m = MatMul (r, w)\n y = Add (m, c)",
        ("LayerNormGemm",),
        output="float[B,24] y",
    ),
    FusionCase(
        "norm_through_a_roll",
        IN,
        "zero = Constant <value = int64[1] {0}> ()\n one = Constant <value = int64[1] {1}> ()\n"
        "big = Constant <value = int64[1] {9999}> ()\n"
        + LN
        + "head = Slice (n, zero, one, one)\n tail = Slice (n, one, big, one)\n"
        "r = Concat <axis = 1> (tail, head)\n m = MatMul (r, w)\n y = Add (m, c)",
        ("LayerNormGemm",),
    ),
    FusionCase(
        "norm_through_nchw_and_back",
        "float[B,4,6,16] x, float[16] g, float[16] b, float[16,24] w, float[24] c",
        "to = Constant <value = int64[3] {0, 24, 16}> ()\n"
        + LN
        + "u = Transpose <perm = [0,3,1,2]> "
        "(n)\n v = Transpose <perm = [0,2,3,1]> (u)\n r = Reshape (v, to)\n m = MatMul (r, w)\n"
        "y = Add (m, c)",
        ("LayerNormGemm",),
        output="float[B,24,24] y",
        gone=("Transpose",),
    ),
    FusionCase(
        "norm_through_windows_of_nchw",
        "float[B,4,6,16] x, float[16] g, float[16] b, float[16,24] w, float[24] c",
        "six = Constant <value = int64[6] {-1, 16, 2, 2, 3, 2}> ()\n"
        "rows = Constant <value = int64[3] {-1, 4, 16}> ()\n" + LN + "u = Transpose "
        "<perm = [0,3,1,2]> (n)\n s = Reshape (u, six)\n t = Transpose <perm = [0,2,4,3,5,1]> (s)\n"
        "r = Reshape (t, rows)\n m = MatMul (r, w)\n y = Add (m, c)",
        ("LayerNormGemm",),
        output="float[R,4,24] y",
    ),
    FusionCase(
        "norm_through_rows_that_are_mixed_stays",  # the last axis is 16, but of other elements
        "float[B,16,16] x, float[16] g, float[16] b, float[16,24] w, float[24] c",
        LN + "u = Transpose <perm = [0,2,1]> (n)\n m = MatMul (u, w)\n y = Add (m, c)",
        ("Gemm",),
        reason="mix its rows",
        output="float[B,16,24] y",
    ),
    FusionCase(
        "norm_without_bias_through_a_pad",
        f"{X}, float[16] g, {LIN}",
        "pads = Constant <value = int64[6] {0, 1, 0, 0, 2, 0}> ()\n"
        "n = LayerNormalization (x, g)\n p = Pad (n, pads)\n m = MatMul (p, w)\n y = Add (m, c)",
        ("LayerNormGemm",),
        output="float[B,U,24] y",
    ),
    FusionCase(
        "rms_through_a_pad",
        f"{X}, float[16] g, {LIN}",
        "pads = Constant <value = int64[6] {0, 1, 0, 0, 2, 0}> ()\n"
        + written_norm("d = Identity (x)", POW, DIV, "n = Mul (g, p)")
        + "q2 = Pad (n, pads)\n m = MatMul (q2, w)\n y = Add (m, c)",
        ("RMSNormGemm",),
        output="float[B,U,24] y",
    ),
    FusionCase(
        "norm_of_no_epsilon_through_a_pad_stays",  # zeros become NaN
        f"{X}, float[16] g, {LIN}",
        "pads = Constant <value = int64[6] {0, 1, 0, 0, 2, 0}> ()\n"
        "n = LayerNormalization <epsilon = 0.0> (x, g)\n p = Pad (n, pads)\n m = MatMul (p, w)\n"
        "y = Add (m, c)",
        ("Gemm",),
        reason="a Pad between",
        output="float[B,U,24] y",
    ),
    FusionCase(
        "norm_with_bias_through_a_pad_stays",
        IN,
        "pads = Constant <value = int64[6] {0, 1, 0, 0, 2, 0}> ()\n"
        + LN
        + "p = Pad (n, pads)\n m = MatMul (p, w)\n y = Add (m, c)",
        ("Gemm",),
        reason="a Pad between adds rows of zeros",
        output="float[B,U,24] y",
    ),
    *(
        FusionCase(
            f"norm_with_bias_before_a_pad_{name}",  # [2, 3] padded to windows of [3, 3]
            f"float[B,2,3,16] x, {AFFINE}, float[16,{n}] w"
            + (f", float[{n}] c" if tail.find("c)") > 0 else ""),
            "pads = Constant <value = int64[8] {0, 1, 2, 0, 0, 3, 1, 0}> ()\n"
            "cut = Constant <value = int64[6] {-1, 2, 3, 2, 3, 16}> ()\n"
            "flat = Constant <value = int64[3] {-1, 9, 16}> ()\n"
            f"none = Constant <value = float[24] {{0, -0.0{', 0' * 22}}}> ()\n"
            f"{LN}{pad}t = Reshape (p, cut)\n u = Transpose <perm = [0,1,3,2,4,5]> (t)\n"
            f"v = Reshape (u, flat)\n{tail}",
            fused,
            output=f"float[U,9,{n}] y",
            reason=reason,
        )
        for name, n, pad, tail, fused, reason in (
            ("of_many_rows", 24, PAD, PADDED, ("LayerNormGemm",), ""),
            ("bias_less", 24, PAD, "y = MatMul (v, w)", ("LayerNormGemm",), ""),
            (
                "of_a_zero_bias",
                24,
                PAD,
                "m = MatMul (v, w)\n y = Add (m, none)",
                ("LayerNormGemm",),
                "",
            ),
            (
                "and_an_activation",
                24,
                PAD,
                f"{PADDED.replace('y', 'z')}\n y = Relu (z)",
                ("LayerNormGemm",),
                "",
            ),
            ("of_a_roll", 24, PAD_AND_ROLL, PADDED, ("LayerNormGemm",), ""),
            (
                "whose_sizes_are_asked_for",
                24,
                PAD,
                "s = Shape (v)\n f = Cast <to = 1> (s)\n e = ReduceSum <keepdims = 0> (f)\n"
                "d = Shape <start = 1> (t)\n h = Cast <to = 1> (d)\n"
                "i = ReduceMax <keepdims = 0> (h)\n"
                "j = Div (e, i)\n" + PADDED.replace("y =", "z =") + "\n y = Div (z, j)",
                ("LayerNormGemm",),
                "",
            ),
            ("of_many_columns_stays", 120, PAD, PADDED, ("Gemm",), "costs more than the norm's"),
            (
                "and_others_stays",
                24,
                PAD,
                "e = Exp (v)\n f = Add (v, e)\n y = MatMul (f, w)",
                (),
                "",
            ),
            (
                "and_its_bias_of_rows_stays",
                24,
                PAD,
                "k = Constant <value = float[9,1] {1,2,3,4,5,6,7,8,9}> ()\n m = MatMul (v, w)\n"
                "y = Add (m, k)",
                ("Gemm",),
                "not one number a column",
            ),
        )
    ),
    FusionCase(
        "norm_through_a_pad_of_ones_stays",
        f"{X}, float[16] g, {LIN}",
        "pads = Constant <value = int64[6] {0, 1, 0, 0, 2, 0}> ()\n"
        + scalar("one", 1.0)
        + "n = LayerNormalization (x, g)\n p = Pad (n, pads, one)\n m = MatMul (p, w)\n"
        "y = Add (m, c)",
        ("Gemm",),
        reason="mix its rows",
        output="float[B,U,24] y",
    ),
    FusionCase(
        "residual_then_norm",
        f"{X}, float[B,T,16] r, {AFFINE}",
        "x2 = Add (x, r)\n n = LayerNormalization (x2, g, b)\n t = Tanh (n)\n y = Add (t, x2)",
        ("SkipLayerNorm",),
        fed=("x", "r"),
        output="float[B,T,16] y",
    ),
    # --- merged products --------------------------------------------------------------------------
    FusionCase(
        "merge_query_key_value",
        f"{X}, {AFFINE}, float[16,8] w, float[16,4] w1, float[16,12] w2, float[8] c, float[12] c2",
        LN + "m = MatMul (n, w)\n q = Add (m, c)\n k = MatMul (n, w1)\n m2 = MatMul (n, w2)\n"
        "v = Add (m2, c2)\n y = Concat <axis = -1> (q, k, v)",
        ("LayerNormGemm",),
    ),
    FusionCase(
        "merge_gate_and_up",
        f"{X}, float[16] g, float[16,24] w, float[16,24] w1",
        written_norm("d = Identity (x)", POW, DIV, "n = Mul (p, g)")
        + "a = MatMul (n, w)\n s = Sigmoid (a)\n gate = Mul (a, s)\n up = MatMul (n, w1)\n"
        "y = Mul (gate, up)",
        ("RMSNormGateFirstGemmSilu",),
    ),
    # --- gated products ---------------------------------------------------------------------------
    FusionCase(
        "gate_in_the_last_half_behind_a_layer_norm",
        f"{X}, {AFFINE}, float[16,48] w, float[48] c",
        LN + "m = MatMul (n, w)\n z = Add (m, c)\n"
        "u, q = Split <axis = -1, num_outputs = 2> (z)\n o = Gelu (q)\n y = Mul (u, o)",
        ("LayerNormGateLastGemmGelu",),
        gone=("Split", "Mul"),
    ),
    FusionCase(
        "gate_in_the_first_slice",
        f"{X}, float[16,48] w, float[48] c",
        "m = MatMul (x, w)\n z = Add (c, m)\n zero = Constant <value_ints = [0]> ()\n"
        "half = Constant <value_ints = [24]> ()\n all = Constant <value_ints = [48]> ()\n"
        "last = Constant <value_ints = [2]> ()\n q = Slice (z, zero, half, last)\n"
        'u = Slice (z, half, all, last)\n o = Gelu <approximate = "tanh"> (q)\n y = Mul (o, u)',
        ("GateFirstGemmGeluTanh",),
        gone=("Slice",),
    ),
    FusionCase(
        "gate_and_up_with_one_bias",
        f"{X}, {LIN}, float[16,24] w1",
        "m = MatMul (x, w)\n z = Add (m, c)\n u = MatMul (x, w1)\n o = Sigmoid (z)\ny = Mul (u, o)",
        ("GateFirstGemmSigmoid",),
    ),
    FusionCase(
        "gate_and_up_of_transposed_gemms",
        "float[B,16] x, float[24,16] w, float[24] c, float[24,16] w1, float[24] c1",
        "z = Gemm <transB = 1> (x, w, c)\n u = Gemm <transB = 1> (x, w1, c1)\n"
        "o = LeakyRelu <alpha = 0.3> (z)\n y = Mul (o, u)",
        ("GateFirstGemmLeakyRelu",),
        output="float[B,24] y",
    ),
    FusionCase(
        "gate_of_a_split_gemm_without_bias",
        "float[B,16] x, float[48,16] w",
        "z = Gemm <transB = 1> (x, w)\n n = Constant <value_ints = [24, 24]> ()\n"
        "u, q = Split <axis = 1> (z, n)\n o = Relu (q)\n y = Mul (u, o)",
        ("GateLastGemmRelu",),
        output="float[B,24] y",
    ),
    FusionCase(
        "gate_with_a_computed_weight",
        f"{X}, float[16,48] w",
        "z = MatMul (x, w)\n q, u = Split <axis = -1, num_outputs = 2> (z)\n"
        + scalar("a", 1.702)
        + "qa = Mul (q, a)\n s = Sigmoid (qa)\n o = Mul (q, s)\n y = Mul (o, u)",
        ("GateFirstGemmQuickGelu",),
        fed=("x", "w"),
    ),
    FusionCase(
        "gate_and_up_are_parts_below_level_2",
        f"{X}, float[16,24] w, float[16,24] w1",
        "z = MatMul (x, w)\n u = MatMul (x, w1)\n o = Tanh (z)\n y = Mul (o, u)",
        ("GemmTanh",),
        level=1,
    ),
    FusionCase(
        "merge_not_at_level_1",
        f"{X}, float[16,24] w, float[16,24] w1",
        "a = MatMul (x, w)\n b2 = MatMul (x, w1)\n y = Add (a, b2)",
        level=1,
    ),
)
