"""A small graph for each fusion: what the tests of fusion run, and what tools start from."""

from __future__ import annotations

from cases import (
    LIN,
    PLAIN,
    FusionCase,
    X,
    scalar,
)
from fusion_attention import ATTENTION
from fusion_products import PRODUCTS

FUSION_CASES = (
    *PRODUCTS,
    *ATTENTION,
    # --- Conv, losses -----------------------------------------------------------------------------
    *(
        FusionCase(
            f"group_norm_{name}",
            "float[B,8,S,T] x, float[8,1,1] g, float[8,1,1] b",
            "to = Constant <value = int64[3] {0, 4, -1}> ()\n"
            "one = Constant <value = float[4] {1.0, 1.0, 1.0, 1.0}> ()\n"
            "zero = Constant <value = float[4] {0.0, 0.0, 0.0, 0.0}> ()\n"
            "v = Reshape (x, to)\n i = InstanceNormalization <epsilon = 0.001> (v, one, zero)\n"
            f"size = Shape (x)\n n = Reshape (i, size)\n{body}",
            (f"GroupNorm{fused}",),
            output="float[B,8,S,T] y",
            gone=("InstanceNormalization", "Silu", "Sigmoid"),
        )
        for name, fused, body in (
            ("alone", "", "m = Mul (g, n)\n y = Add (m, b)"),
            ("silu", "Silu", "m = Mul (n, g)\n z = Add (b, m)\n s = Sigmoid (z)\n y = Mul (s, z)"),
        )
    ),
    *(
        FusionCase(
            f"group_norm_node_{name}",
            "float[B,8,T] x, float[8] g, float[8] b",
            f"z = GroupNormalization <num_groups = 4> (x, g, b)\n{body}",
            (f"GroupNorm{fused}",),
            output="float[B,8,T] y",
            gone=("GroupNormalization", "Relu"),
        )
        for name, fused, body in (("alone", "", "y = Neg (z)"), ("relu", "Relu", "y = Relu (z)"))
    ),
    FusionCase(
        "norm_of_groups_in_half",
        "float16[B,8,T] x, float16[8] g, float16[8] b",
        "z = GroupNormalization <num_groups = 2> (x, g, b)\n y = Relu (z)",
        ("GroupNormRelu",),
        output="float16[B,8,T] y",
    ),
    FusionCase(
        "group_norm_with_scales_of_groups_stays",
        "float[B,8,S] x, float[4] g, float[4] b, float[8,1] u, float[8,1] w",
        "to = Constant <value = int64[3] {0, 4, -1}> ()\n v = Reshape (x, to)\n"
        "i = InstanceNormalization (v, g, b)\n size = Shape (x)\n n = Reshape (i, size)\n"
        "m = Mul (n, u)\n y = Add (m, w)",
        output="float[B,8,S] y",
        reason="are a group's, not a channel's",
    ),
    FusionCase(
        "conv_relu_without_bias",
        "float[B,3,S,T] x, float[6,3,3,3] w",
        "z = Conv <pads = [1,1,1,1], strides = [2,2]> (x, w)\n y = Relu (z)",
        ("ConvRelu",),
        output="float[B,6,P,Q] y",
    ),
    FusionCase(
        "conv_batch_norm_relu",
        "float[B,3,S,T] x, float[6,3,3,3] w, float[6] g, float[6] b",
        "var = Constant <value = float[6] {1.0, 0.5, 2.0, 1.5, 0.7, 3.0}> ()\n"
        "z = Conv <pads = [1,1,1,1]> (x, w)\n n = BatchNormalization (z, g, b, b, var)\n"
        "y = Relu (n)",
        ("ConvRelu",),
        output="float[B,6,P,Q] y",
    ),
    *(
        FusionCase(
            f"product_batch_norm_{name}",
            f"float[B,T,16] x, float[16,6] w, float[6] g, float[6] b{more}",
            "var = Constant <value = float[6] {1.0, 0.5, 2.0, 1.5, 0.7, 3.0}> ()\n"
            f"flat = Constant <value = int64[2] {{-1, 6}}> ()\n m = MatMul (x, w)\n {body}",
            fused,
            output=output,
            gone=gone,
        )
        for name, more, body, fused, output, gone in (
            (
                "through_a_reshape",
                "",
                "r = Reshape (m, flat)\n y = BatchNormalization (r, g, b, b, var)",
                ("Gemm",),
                "float[N,6] y",
                ("BatchNormalization",),
            ),
            (
                "of_a_biased_product",
                ", float[6] c",
                "a = Add (c, m)\n r = Reshape (a, flat)\n y = BatchNormalization (r, g, b, b, var)",
                ("Gemm",),
                "float[N,6] y",
                ("BatchNormalization",),
            ),
            (
                "through_a_transpose",
                "",
                "r = Transpose <perm = [0,2,1]> (m)\n n = BatchNormalization (r, g, b, b, var)\n"
                "y = Relu (n)",
                ("GemmRelu",),
                "float[B,6,T] y",
                ("BatchNormalization",),
            ),
            (
                "whose_shape_is_read",
                "",
                "size = Shape (m)\n r = Reshape (m, flat)\n"
                "n = BatchNormalization (r, g, b, b, var)\n"
                "v = Reshape (n, size)\n y = HardSwish (v)",
                ("GemmHardSwish",),
                "float[B,T,6] y",
                ("BatchNormalization", "HardSwish"),
            ),
            (
                "read_twice_stays",
                "",
                "r = Reshape (m, flat)\n n = BatchNormalization (r, g, b, b, var)\n y = Add (n, r)",
                (),
                "float[N,6] y",
                (),
            ),
            (
                "of_a_residual_stays",
                "",
                "t = Tanh (m)\n a = Add (m, t)\n r = Reshape (a, flat)\n"
                "y = BatchNormalization (r, g, b, b, var)",
                (),
                "float[N,6] y",
                (),
            ),
        )
    ),
    FusionCase(
        "product_batch_norm_of_other_axis_stays",
        "float[B,6,16] x, float[16,5] w, float[6] g, float[6] b",
        "var = Constant <value = float[6] {1.0, 0.5, 2.0, 1.5, 0.7, 3.0}> ()\n"
        "m = MatMul (x, w)\n y = BatchNormalization (m, g, b, b, var)",
        output="float[B,6,5] y",
    ),
    *(
        FusionCase(
            f"conv_add_{name}",
            "float[B,3,S,T] x, float[B,6,S,T] r, float[6,3,3,3] w, float[6] c",
            "z = Conv <pads = [1,1,1,1]> (x, w, c)\n" + body,
            (f"ConvAdd{fused}",),
            fed=("x", "r"),
            output="float[B,6,S,T] y",
            gone=("Conv", "Add", "Relu"),
        )
        for name, fused, body in (
            ("relu", "Relu", "s = Add (z, r)\n y = Relu (s)"),
            ("silu", "Silu", "s = Add (r, z)\n g = Sigmoid (s)\n y = Mul (g, s)"),
            ("alone", "", "y = Add (r, z)"),
        )
    ),
    *(
        FusionCase(
            f"conv_bias_behind_it_{name}",
            f"float[B,3,S,T] x, float[B,6,S,T] r, float[6,3,3,3] w, {bias} c",
            "z = Conv <pads = [1,1,1,1]> (x, w)\n" + body,
            fused,
            fed=("x", "r"),
            output="float[B,6,S,T] y",
            gone=("Add", "Relu", "Mul"),
        )
        for name, bias, body, fused in (
            ("alone", "float[1,6,1,1]", "y = Add (z, c)", ()),
            ("rank_3", "float[6,1,1]", "s = Add (c, z)\n y = Relu (s)", ("ConvRelu",)),
            (
                "and_residual",
                "float[1,6,1,1]",
                "b = Add (c, z)\n s = Add (b, r)\n y = Relu (s)",
                ("ConvAddRelu",),
            ),
        )
    ),
    *(
        FusionCase(
            f"conv_clip_{name}",
            "float[B,3,S,T] x, float[6,3,3,3] w, float[6] c",
            scalar("low", low)
            + scalar("high", high)
            + "z = Conv <pads = [1,1,1,1]> (x, w, c)\n"
            + f"y = Clip ({operands})",
            fused,
            output="float[B,6,S,T] y",
            reason="" if fused else "not one of the activations",
        )
        for name, low, high, operands, fused in (
            ("from_0_to_6", 0, 6, "z, low, high", ("ConvClippedRelu",)),
            ("from_0_to_half", 0, 0.5, "z, low, high", ("ConvClippedRelu",)),
            ("from_minus_1", -1, 6, "z, low, high", ()),
            ("to_0", 0, 0, "z, low, high", ()),
            ("without_bounds", 0, 6, "z", ()),
            ("without_a_low_bound", 0, 6, "z, , high", ()),
        )
    ),
    *(
        FusionCase(
            f"conv_sum_that_is_no_bias_{name}",
            f"float[B,3,S,6] x, float[6,3,3,3] w, {inputs}",
            f"z = Conv <pads = [1,1,1,1]> (x, {weights})\n s = Add (z, b)\n y = Relu (s)",
            output="float[B,6,S,6] y",
        )
        for name, inputs, weights in (
            ("of_columns", "float[1,1,1,6] b", "w"),
            ("of_columns_in_rank_1", "float[6] b", "w"),
            ("behind_another", "float[6] c, float[6,1,1] b", "w, c"),
        )
    ),
    FusionCase(
        "conv_add_read_twice",
        "float[B,3,S,T] x, float[B,6,S,T] r, float[6,3,3,3] w",
        "z = Conv <pads = [1,1,1,1]> (x, w)\n s = Add (z, r)\n a = Relu (s)\n y = Mul (a, s)",
        ("ConvAdd",),
        fed=("x", "r"),
        output="float[B,6,S,T] y",
    ),
    FusionCase(
        "conv_add_of_two_convolutions",  # the larger filter takes the sum
        "float[B,3,S,T] x, float[B,6,S,T] u, float[6,3,1,1] w1, float[6,6,3,3] w, float[6] c",
        "d = Conv (x, w1)\n z = Conv <pads = [1,1,1,1]> (u, w, c)\n s = Add (d, z)\n y = Relu (s)",
        ("ConvAddRelu",),
        fed=("x", "u"),
        output="float[B,6,S,T] y",
        gone=("Add", "Relu"),
    ),
    FusionCase(
        "conv_add_broadcast_stays",
        "float[B,3,S,T] x, float[B,1,S,T] r, float[6,3,3,3] w",
        "z = Conv <pads = [1,1,1,1]> (x, w)\n s = Add (z, r)\n y = Relu (s)",
        fed=("x", "r"),
        output="float[B,6,S,T] y",
        reason="it follows an Add",
    ),
    *(
        FusionCase(
            f"convolution_of_single_taps_behind_a_norm_{name}",
            "float[B,8,S,T] x, float[8] g, float[8] b, "
            f"float[{wide},{8 // group},{taps},{taps}] w"
            + (", float[32] c" if "c" in read else "")
            + (", float[8,32,1,1] v" if "v" in body else ""),
            "t = Transpose <perm = [0,2,3,1]> (x)\n n = LayerNormalization (t, g, b)\n"
            f"u = Transpose <perm = {perm}> (n)\n"
            f"z = Conv <group = {group}, pads = [{pads}], strides = [{step},{step}]> ({read})\n"
            f"{body}",
            fused,
            output=f"float[B,{out},S,T] y",
            reason=reason,
            gone=("Conv",) if fused else (),
        )
        for name, wide, group, taps, perm, pads, step, read, out, body, fused, reason in (
            (
                "narrow",
                8,
                1,
                1,
                "[0,3,1,2]",
                "0,0,0,0",
                1,
                "u, w",
                8,
                "y = Relu (z)",
                ("LayerNormGemmRelu",),
                "",
            ),
            (
                "and_another",
                32,
                1,
                1,
                "[0,3,1,2]",
                "0,0,0,0",
                1,
                "u, w, c",
                8,
                "h = Gelu (z)\n y = Conv (h, v)",
                ("LayerNormGemmGelu",),
                "",
            ),
            (
                "wide",
                32,
                1,
                1,
                "[0,3,1,2]",
                "0,0,0,0",
                1,
                "u, w, c",
                32,
                "y = Neg (z)",
                (),
                "the Transpose would move 32 numbers a pixel, not 8",
            ),
            ("of_groups", 8, 2, 1, "[0,3,1,2]", "0,0,0,0", 1, "u, w", 8, "y = Neg (z)", (), ""),
            ("of_nine", 8, 1, 3, "[0,3,1,2]", "1,1,1,1", 1, "u, w", 8, "y = Neg (z)", (), ""),
            ("in_steps", 8, 1, 1, "[0,3,1,2]", "0,0,0,0", 2, "u, w", 8, "y = Neg (z)", (), ""),
            ("padded", 8, 1, 1, "[0,3,1,2]", "1,1,1,1", 1, "u, w", 8, "y = Neg (z)", (), ""),
            ("turned", 8, 1, 1, "[0,3,2,1]", "0,0,0,0", 1, "u, w", 8, "y = Neg (z)", (), ""),
            (
                "read_twice",
                8,
                1,
                1,
                "[0,3,1,2]",
                "0,0,0,0",
                1,
                "u, w",
                8,
                "y = Mul (z, u)",
                (),
                "others read the norm or its Transpose",
            ),
        )
    ),
    FusionCase(
        "conv_prelu",
        "float[B,3,S,T] x, float[6,3,3,3] w, float[6] c, float[6,1,1] a",
        "z = Conv <pads = [1,1,1,1]> (x, w, c)\n y = PRelu (z, a)",
        ("ConvPRelu",),
        output="float[B,6,S,T] y",
        gone=("PRelu",),
    ),
    *(
        FusionCase(
            f"conv_as_the_slope_of_{name}_stays",
            "float[6,S,T] x, float[1,3,S,T] u, float[6,3,3,3] w",
            f"z = Conv <pads = [1,1,1,1]> (u, w)\n{body}",
            fed=("x", "u"),
            output="float[1,6,S,T] y",
        )
        for name, body in (
            (
                "another",
                "at = Constant <value = int64[1] {0}> ()\n v = Unsqueeze (x, at)\ny = PRelu (v, z)",
            ),
            ("itself", "y = PRelu (z, z)"),
        )
    ),
    FusionCase(
        "prelu_of_one_slope",
        f"{X}, {LIN}",
        scalar("a", 0.25) + PLAIN + "y = PRelu (z, a)",
        ("GemmLeakyRelu",),
    ),
    FusionCase(
        "prelu_of_a_slope_that_adds_an_axis_stays",
        f"{X}, {LIN}",
        "a = Constant <value = float[1,1,1,1] {0.25}> ()\n" + PLAIN + "y = PRelu (z, a)",
        ("Gemm",),
        output="float[1,B,T,24] y",
    ),
    FusionCase(
        "prelu_of_a_negative_slope_stays",  # the sign of a zero
        f"{X}, {LIN}",
        scalar("a", -0.25) + PLAIN + "y = PRelu (z, a)",
        ("Gemm",),
        reason="PRelu is not one of the fused activations",
    ),
    FusionCase(
        "conv_activation_behind_views",
        "float[B,3,S,T] x, float[6,3,3,3] w",
        "to = Constant <value = int64[3] {0, 6, -1}> ()\n"
        "z = Conv <pads = [1,1,1,1]> (x, w)\n f = Reshape (z, to)\n"
        "t = Transpose <perm = [0,2,1]> (f)\n y = Gelu (t)",
        ("ConvGelu",),
        output="float[B,N,6] y",
    ),
    FusionCase(
        "cross_entropy_written_out",
        "float[B,24] x, int64[B] labels",
        "l = LogSoftmax <axis = 1> (x)\n"
        "y = NegativeLogLikelihoodLoss <ignore_index = 5> (l, labels)",
        fed=("x", "labels"),
        output="float y",
        gone=("LogSoftmax", "NegativeLogLikelihoodLoss"),
        spares=(("empty", "onnxruntime's SoftmaxCrossEntropyLoss takes no batch of none (1.32)"),),
    ),
    FusionCase(
        "linear_cross_entropy",
        "float[B,T,8] x, float[2051,8] w, int64[B,T] labels",
        "wt = Transpose <perm = [1, 0]> (w)\n l = MatMul (x, wt)\n"
        "to = Constant <value = int64[2] {-1, 2051}> ()\n r = Reshape (l, to)\n"
        "flat = Constant <value = int64[1] {-1}> ()\n t = Reshape (labels, flat)\n"
        "y = SoftmaxCrossEntropyLoss <ignore_index = 5> (r, t)",
        ("LinearCrossEntropy",),
        fed=("x", "labels"),
        output="float y",
        gone=("MatMul", "SoftmaxCrossEntropyLoss"),
        spares=(("empty", "onnxruntime's SoftmaxCrossEntropyLoss takes no batch of none (1.32)"),),
    ),
)
