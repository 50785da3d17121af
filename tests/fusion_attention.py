"""Graphs that become fused attention, for `fusion_cases`."""

from __future__ import annotations

import numpy as np
from cases import (
    ATT,
    IN,
    LIN,
    PLAIN,
    QKV,
    SCALE,
    SCORES,
    FusionCase,
    X,
    scalar,
)

ATTENTION = (
    # --- attention --------------------------------------------------------------------------------
    FusionCase(
        "attention_without_mask",
        QKV,
        SCORES + SCALE + "z = Mul (s, f)\n p = Softmax <axis = -1> (z)\n y = MatMul (p, v)",
        ("Sdpa",),
        **ATT,
    ),
    *(
        FusionCase(
            f"attention_by_einsum_{name}",
            f"{q}, {q.replace('S', '5').replace(' q', ' k')}, "
            f"{q.replace('S', '5').replace(' q', ' v')}",
            f's = Einsum <equation = "{scores}"> (q, k)\n'
            + SCALE
            + "z = Mul (s, f)\n p = Softmax <axis = -1> (z)\n"
            + f'y = Einsum <equation = "{mix}"> (p, v)',
            ("Sdpa",),
            fed=("q", "k", "v"),
            output=y,
            gone=("Einsum",),
            spares=(("empty", "onnxruntime's Einsum dies of a batch of none (1.32)"),),
        )
        for name, q, scores, mix, y in (
            ("bhsd", "float[2,3,S,8] q", "bhid, bhjd -> bhij", "bhij, bhjd -> bhid", ATT["output"]),
            ("bshd", "float[2,S,4,8] q", "bihd,bjhd->bhij", "bhij,bjhd->bihd", "float[B,S,4,8] y"),
        )
    ),
    FusionCase(
        "attention_by_einsum_with_heads_in_the_weights",  # as Keras writes it
        "float[B,T,16] x, float[16,2,8] wq, float[2,8] cq, float[16,2,8] wk, float[2,8] ck, "
        "float[16,2,8] wv, float[2,8] cv, float[2,8,24] wo, float[24] co",
        "".join(
            f'm{n} = Einsum <equation = "abc,cde->abde"> (x, w{n})\n {n} = Add (m{n}, c{n})\n'
            for n in "qkv"
        )
        + scalar("scale", 0.35355338)
        + "qs = Mul (q, scale)\n"
        's = Einsum <equation = "aecd,abcd->acbe"> (k, qs)\n p = Softmax (s)\n'
        'h = Einsum <equation = "acbe,aecd->abcd"> (p, v)\n'
        'o = Einsum <equation = "abcd,cde->abe"> (h, wo)\n y = Add (o, co)',
        ("Gemm", "Gemm", "Gemm", "Sdpa", "Gemm"),
        gone=("Einsum",),
        spares=(("empty", "onnxruntime's Einsum dies of a batch of none (1.32)"),),
    ),
    *(
        FusionCase(
            f"product_by_einsum_{name}",
            f"float[{x}] x{w}",
            f'y = Einsum <equation = "{equation}"> ({operands})',
            output=f"float[{y}] y",
            gone=("Einsum",),
            spares=(("empty", "onnxruntime's Einsum dies of a batch of none (1.32)"),),
        )
        for name, x, w, equation, operands, y in (
            (
                "rows_and_a_batch",
                "B,3,5,8",
                ", float[3,4,8] w",
                "bhwc,hkc->bhwk",
                "x, w",
                "B,3,5,4",
            ),
            (
                "last_row_is_first",
                "B,3,5,8",
                ", float[5,4,8] w",
                "bhwc,wkc->bhwk",
                "x, w",
                "B,3,5,4",
            ),
            ("swapped", "B,T,8", ", float[8,3,2] w", "cde,abc->deab", "w, x", "3,2,B,T"),
            (
                "batch_and_two_sums",
                "3,T,2,4",
                ", float[3,2,4,5] w",
                "nabc,nbcd->nad",
                "x, w",
                "3,T,5",
            ),
            ("leading_axes", "B,T,8", ", float[4,8] w", "...d,kd->...k", "x, w", "B,T,4"),
            ("only_turned", "B,T,8", "", "abc->cab", "x", "8,B,T"),
        )
    ),
    FusionCase(
        "product_by_einsum",
        IN,
        'n = LayerNormalization (x, g, b)\n m = Einsum <equation = "btk,kn->btn"> (n, w)\n'
        "y = Add (m, c)",
        ("LayerNormGemm",),
    ),
    FusionCase(
        "attention_mask_and_guard",
        f"{QKV}, float[B,1,S,T] mask",
        SCORES
        + SCALE
        + scalar("zero", 0.0)
        + "z = Mul (s, f)\n zm = Add (z, mask)\n p = Softmax (zm)\n i = IsNaN (p)\n"
        "pn = Where (i, zero, p)\n y = MatMul (pn, v)",
        ("SdpaMaskNanGuard",),
        **ATT,
    ),
    FusionCase(
        "attention_mask_by_where",
        f"{QKV}, bool[B,1,S,T] mask",
        SCORES
        + SCALE
        + scalar("low", -3.4028235e38)
        + "z = Div (s, f)\n zm = Where (mask, z, low)\n p = Softmax (zm)\n y = MatMul (p, v)",
        ("SdpaWhere",),
        **ATT,
    ),
    FusionCase(
        "attention_mask_before_the_scale",
        f"{QKV}, float[B,1,S,T] mask",
        SCORES
        + scalar("f", 0.25)
        + "zm = Add (s, mask)\n z = Mul (zm, f)\n p = Softmax (z)\n y = MatMul (p, v)",
        ("SdpaMask",),
        **ATT,
    ),
    FusionCase(
        "attention_where_before_the_scale",
        f"{QKV}, bool[B,1,S,T] mask",
        SCORES
        + SCALE
        + scalar("low", -3.4028235e38)
        + "zm = Where (mask, s, low)\n z = Mul (zm, f)\n p = Softmax (z)\n y = MatMul (p, v)",
        ("SdpaWhere",),
        **ATT,
    ),
    FusionCase(
        "attention_mask_before_a_scale_that_rounds",
        f"{QKV}, float[B,1,S,T] mask",
        SCORES
        + SCALE
        + "zm = Add (s, mask)\n z = Mul (zm, f)\n p = Softmax (z)\n y = MatMul (p, v)",
        reason="a mask is added before the scores are scaled by 0.353553",
        **ATT,
    ),
    FusionCase(
        "attention_mask_enlarged_by_the_scale",
        f"{QKV}, float[B,1,S,T] mask",
        SCORES
        + scalar("f", 2.0)
        + "zm = Add (s, mask)\n z = Mul (zm, f)\n p = Softmax (z)\n y = MatMul (p, v)",
        reason="a mask is added before the scores are scaled by 2",
        **ATT,
    ),
    FusionCase(
        "attention_scaled_operands",
        "float[B,S,4,8] q, float[B,T,4,8] k, float[B,T,4,8] v",
        scalar("f", 0.59460355) + "qt = Transpose <perm = [0,2,1,3]> (q)\n qs = Mul (qt, f)\n"
        "kt = Transpose <perm = [0,2,3,1]> (k)\n ks = Mul (kt, f)\n s = MatMul (qs, ks)\n"
        "p = Softmax (s)\n vt = Transpose <perm = [0,2,1,3]> (v)\n y = MatMul (p, vt)",
        ("Sdpa",),
        fed=("q", "k", "v"),
        output="float[B,4,S,8] y",
    ),
    FusionCase(
        "attention_grouped_heads",
        "float[B,4,S,8] q, float[B,2,T,8] k, float[B,2,T,8] v",
        "two = Constant <value = int64[1] {2}> ()\n one = Constant <value = int64[1] {1}> ()\n"
        "b = Shape <start = 0, end = 1> (k)\n t = Shape <start = 2, end = 3> (k)\n"
        "h = Constant <value = int64[1] {4}> ()\n d = Constant <value = int64[1] {8}> ()\n"
        "five = Concat <axis = 0> (b, two, two, t, d)\n four = Concat <axis = 0> (b, h, t, d)\n"
        "u = Shape <start = 2, end = 3> (v)\n c = Shape <end = 1> (v)\n"
        "vs = Concat <axis = 0> (c, two, two, u, d)\n"
        "k5 = Unsqueeze (k, two)\n ke = Expand (k5, five)\n kr = Reshape (ke, four)\n"
        "v5 = Unsqueeze (v, two)\n ve = Expand (v5, vs)\n v4 = Concat <axis = 0> (c, h, u, d)\n"
        "vr = Reshape (ve, v4)\n"
        "kt = Transpose <perm = [0,1,3,2]> (kr)\n s = MatMul (q, kt)\n p = Softmax (s)\n"
        "y = MatMul (p, vr)",
        ("GroupedSdpa",),
        fed=("q", "k", "v"),
        output="float[B,4,S,8] y",
    ),
    FusionCase(
        "attention_grouped_heads_turned_in_the_batch",
        "float[2,4,S,8] q, float[2,2,5,8] k, float[2,2,5,8] v",
        "two = Constant <value = int64[1] {2}> ()\n"
        "five = Constant <value = int64[5] {2,2,2,5,8}> ()\n"
        "flat = Constant <value = int64[3] {-1,5,8}> ()\n"
        "four = Constant <value = int64[4] {2,4,5,8}> ()\n"
        "turned = Constant <value = int64[4] {2,4,8,5}> ()\n"
        "k5 = Unsqueeze (k, two)\n ke = Expand (k5, five)\n kf = Reshape (ke, flat)\n"
        "kt3 = Transpose <perm = [0,2,1]> (kf)\n kt = Reshape (kt3, turned)\n"
        "v5 = Unsqueeze (v, two)\n ve = Expand (v5, five)\n vr = Reshape (ve, four)\n"
        "s = MatMul (q, kt)\n p = Softmax (s)\n y = MatMul (p, vr)",
        ("GroupedSdpa",),
        fed=("q", "k", "v"),
        output="float[2,4,S,8] y",
    ),
    FusionCase(
        "attention_grouped_heads_turned_in_a_free_batch",
        "float[B,4,S,8] q, float[B,2,T,8] k, float[B,2,T,8] v",
        "".join(
            f"i{i} = Constant <value_ints = [{i}]> ()\n" for i in (-1, 0, 1, 2, 3, 4, 8)
        ).replace("i-1", "less")
        + "b = Shape <end = 1> (k)\n t = Shape <start = 2, end = 3> (k)\n"
        "five = Concat <axis = 0> (b, i2, i2, t, i8)\n four = Concat <axis = 0> (b, i4, t, i8)\n"
        "c = Shape <end = 1> (v)\n u = Shape <start = 2, end = 3> (v)\n"
        "vs = Concat <axis = 0> (c, i2, i2, u, i8)\n"
        "k5 = Unsqueeze (k, i2)\n ke = Expand (k5, five)\n kr = Reshape (ke, four)\n"
        "v5 = Unsqueeze (v, i2)\n ve = Expand (v5, vs)\n v4 = Concat <axis = 0> (c, i4, u, i8)\n"
        "vr = Reshape (ve, v4)\n"
        "sizes = Shape (kr)\n lead = Slice (sizes, i0, i2)\n rows = Slice (sizes, i2, i3)\n"
        "columns = Slice (sizes, i3, i4)\n flat = Concat <axis = 0> (less, rows, columns)\n"
        "turned = Concat <axis = 0> (lead, columns, rows)\n kf = Reshape (kr, flat)\n"
        "kt3 = Transpose <perm = [0,2,1]> (kf)\n kt = Reshape (kt3, turned)\n"
        "s = MatMul (q, kt)\n p = Softmax (s)\n y = MatMul (p, vr)",
        ("GroupedSdpa",),
        fed=("q", "k", "v"),
        output="float[B,4,S,8] y",
        spares=(("empty", "onnxruntime finds no -1 beside no elements"),),
    ),
    FusionCase(
        "attention_one_key_head_for_all",
        "float[B,4,S,8] q, float[B,1,T,8] k, float[B,1,T,8] v",
        SCORES + "p = Softmax (s)\n y = MatMul (p, v)",
        ("GroupedSdpa",),
        fed=("q", "k", "v"),
        output="float[B,4,S,8] y",
    ),
    FusionCase(
        "attention_heads_known_at_run_time",
        "float[B,H,S,8] q, float[B,G,T,8] k, float[B,G,T,8] v",
        SCORES + "p = Softmax (s)\n y = MatMul (p, v)",
        ("Sdpa",),
        fed=("q", "k", "v"),
        output="float[B,H,S,8] y",
    ),
    FusionCase(
        "attention_node",
        "float[B,4,S,8] q, float[B,2,T,8] k, float[B,2,T,8] v",
        "y = Attention (q, k, v)",
        ("GroupedSdpa",),
        fed=("q", "k", "v"),
        output="float[B,4,S,8] y",
        opset=23,
    ),
    *(
        FusionCase(
            f"attention_node_{name}_with_a_row_masked_whole",  # that row is zero
            "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v",
            "zero = Constant <value = int64 {0}> ()\n one = Constant <value = int64 {1}> ()\n"
            "last = Constant <value = int64[1] {1}> ()\n at = Constant <value = int64[1] {0}> ()\n"
            "s1 = Shape <start = 2, end = 3> (q)\n t1 = Shape <start = 2, end = 3> (k)\n"
            "count = Squeeze (s1, at)\n row = Range (zero, count, one)\n"
            "is_one = Equal (row, one)\n column = Unsqueeze (is_one, last)\n"
            "size = Concat <axis = 0> (s1, t1)\n"
            f"{pick}\n mask = Expand (picked, size)\n y = Attention (q, k, v, mask)",
            ("SdpaMaskGuard",),
            fed=("q", "k", "v"),
            output="float[B,4,S,8] y",
            opset=23,
        )
        for name, pick in (
            ("bool", "picked = Not (column)"),
            (
                "float",
                scalar("keep", 0.0)
                + scalar("drop", -np.inf)
                + "picked = Where (column, drop, keep)",
            ),
        )
    ),
    FusionCase(
        "attention_node_causal_3d",
        "float[B,S,32] q, float[B,S,32] k, float[B,S,32] v",
        "y = Attention <q_num_heads = 4, kv_num_heads = 4, is_causal = 1> (q, k, v)",
        ("SdpaCausal",),
        fed=("q", "k", "v"),
        output="float[B,S,32] y",
        opset=23,
    ),
    *(
        FusionCase(
            f"attention_node_past_{name}_causal",
            f"float[B,4,S,8] q, float[B,2,S,8] k, float[B,2,S,8] v, float[B,2,3,8] pk, "
            f"float[B,2,3,8] pv, {name}[B,1,S,3] m0, {name}[B,1,S,S] m1",
            "m = Concat <axis = -1> (m0, m1)\n"
            "y, kk, vv = Attention <is_causal = 1> (q, k, v, m, pk, pv)",
            ("GroupedSdpaMaskGuard",),
            fed=("q", "k", "v", "pk", "pv", "m0", "m1"),
            output="float[B,4,S,8] y",
            opset=23,
        )
        for name in ("float", "bool")
    ),
    FusionCase(
        "attention_where_then_mask",
        f"{QKV}, float[B,1,S,T] mask, bool[S,T] keep",
        SCORES
        + scalar("low", -1e9)
        + "w = Where (keep, s, low)\n zm = Add (w, mask)\n p = Softmax (zm)\n y = MatMul (p, v)",
        ("SdpaWhereMask",),
        fed=("q", "k", "v", "mask", "keep"),
        output=ATT["output"],
    ),
    FusionCase(
        "attention_conditions_of_one_fill",
        f"{QKV}, bool[B,1,S,T] mask, bool[1,1] drop",
        SCORES
        + scalar("low", -1e4)
        + "n = Not (mask)\n w = Where (n, low, s)\n zm = Where (drop, low, w)\n"
        "p = Softmax (zm)\n y = MatMul (p, v)",
        ("SdpaWhere",),
        fed=("q", "k", "v", "mask", "drop"),
        output=ATT["output"],
    ),
    FusionCase(
        "attention_mask_subtracted",
        f"{QKV}, float[B,1,S,T] mask",
        SCORES + "zm = Sub (s, mask)\n p = Softmax (zm)\n y = MatMul (p, v)",
        ("SdpaMask",),
        **ATT,
    ),
    FusionCase(
        "attention_three_masks",
        f"{QKV}, float[B,1,S,T] mask, float[S,T] m2, float[B,1,1,T] m3",
        SCORES + "z1 = Add (s, mask)\n z2 = Add (z1, m2)\n z3 = Add (z2, m3)\n"
        "p = Softmax (z3)\n y = MatMul (p, v)",
        reason="3 masks and conditions follow each other",
        fed=("q", "k", "v", "mask", "m2", "m3"),
        output=ATT["output"],
    ),
    FusionCase(
        "attention_mask_added_twice",  # as swinv2's of shifted windows
        "float[B,H,S,8] q, float[B,H,5,8] k, float[B,H,5,8] v, float[B,1,S,5] mask",
        SCORES + "m = Constant <value = float[1,1,1,5] {0, -100, 0, -100, -100}> ()\n"
        "z1 = Add (s, mask)\n z2 = Add (z1, m)\n z3 = Add (z2, m)\n"
        "p = Softmax (z3)\n y = MatMul (p, v)",
        ("SdpaMaskMask",),
        **ATT,
    ),
    FusionCase(
        "attention_mask_in_parts",  # as vitdet and SAM add theirs by the key's row and column
        "float[2,6,8] q, float[2,6,8] k, float[2,6,8] v, float[2,2,3,2,1] a, float[1,2,3,1,3] mask",
        "apart = Constant <value = int64[5] {-1, 2, 3, 2, 3}> ()\n"
        "whole = Constant <value = int64[3] {-1, 6, 6}> ()\n"
        "kt = Transpose <perm = [0,2,1]> (k)\n s = MatMul (q, kt)\n s5 = Reshape (s, apart)\n"
        "z1 = Add (s5, a)\n z2 = Add (mask, z1)\n z = Reshape (z2, whole)\n"
        "p = Softmax (z)\n y = MatMul (p, v)",
        ("SdpaMaskMask",),
        fed=("q", "k", "v", "a", "mask"),
        output="float[B,6,8] y",
    ),
    FusionCase(
        "attention_fed_mask_added_twice_stays",
        f"{QKV}, float[B,1,S,T] mask",
        SCORES + "z1 = Add (s, mask)\n z2 = Add (z1, mask)\n z3 = Add (z2, mask)\n"
        "p = Softmax (z3)\n y = MatMul (p, v)",
        reason="3 masks and conditions follow each other",
        **ATT,
    ),
    FusionCase(
        "halves_with_scores_in_float32_stay",  # as GPT-J's in 16 bits
        "float16[B,4,S,8] q, float16[B,4,T,8] k, float16[B,4,T,8] v",
        "qw = Cast <to = 1> (q)\n kw = Cast <to = 1> (k)\n"
        "kt = Transpose <perm = [0,1,3,2]> (kw)\n s = MatMul (qw, kt)\n p = Softmax (s)\n"
        "h = Cast <to = 10> (p)\n y = MatMul (h, v)",
        reason="is in float32, that with the values in 16 bits",
        fed=("q", "k", "v"),
        output="float16[B,4,S,8] y",
    ),
    FusionCase(
        "attention_learned_temperature",
        "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v, float[4,1,1] t",
        SCORES + "z = Mul (s, t)\n p = Softmax (z)\n y = MatMul (p, v)",
        ("Sdpa",),
        fed=("q", "k", "v"),
        output="float[B,4,S,8] y",
    ),
    FusionCase(
        "attention_temperature_fed",
        "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v, float[4,1,1] t",
        SCORES + "z = Mul (s, t)\n p = Softmax (z)\n y = MatMul (p, v)",
        reason="of any magnitude",
        fed=("q", "k", "v", "t"),
        output="float[B,4,S,8] y",
    ),
    FusionCase(
        "attention_temperature_by_key",
        "float[B,4,S,8] q, float[B,4,5,8] k, float[B,4,5,8] v, float[4,1,5] t",
        SCORES + "z = Mul (s, t)\n p = Softmax (z)\n y = MatMul (p, v)",
        reason="which differs by key",
        fed=("q", "k", "v"),
        output="float[B,4,S,8] y",
    ),
    FusionCase(
        "attention_values_first",  # v pᵀ
        "float[B,2,8,S] q, float[B,2,8,T] k, float[B,2,6,T] v",
        "qt = Transpose <perm = [0,1,3,2]> (q)\n s = MatMul (qt, k)\n"
        + SCALE
        + "z = Mul (s, f)\n p = Softmax (z)\n pt = Transpose <perm = [0,1,3,2]> (p)\n"
        "y = MatMul (v, pt)",
        ("Sdpa",),
        fed=("q", "k", "v"),
        output="float[B,2,6,S] y",
    ),
    FusionCase(
        "attention_over_queries_stays",
        "float[B,2,5,8] q, float[B,2,5,8] k, float[B,2,5,8] v",
        SCORES + "p = Softmax <axis = 2> (s)\n y = MatMul (p, v)",
        reason="the softmax is not over the keys",
        fed=("q", "k", "v"),
        output="float[B,2,5,8] y",
    ),
    *(
        FusionCase(
            f"attention_softcap_{name}",
            f"{QKV}, float[B,1,S,T] mask",
            SCORES
            + SCALE
            + scalar("cap", 3.0)
            + "z = Mul (s, f)\n c = Div (z, cap)\n t = Tanh (c)\n u = Mul (t, cap)\n"
            + f"{masked}\n p = Softmax (m)\n y = MatMul (p, v)",
            (fused,),
            reason=reason,
            **ATT,
        )
        for name, masked, fused, reason in (
            ("and_mask", "m = Add (u, mask)", "SdpaSoftcapMask", ""),
            ("alone", "m = Identity (u)", "SdpaSoftcap", ""),
        )
    ),
    FusionCase(
        "attention_tanh_behind_a_mask",
        f"{QKV}, float[B,1,S,T] mask",
        SCORES + "m = Add (s, mask)\n t = Tanh (m)\n p = Softmax (t)\n y = MatMul (p, v)",
        reason="a Tanh behind a mask",
        **ATT,
    ),
    FusionCase(
        "attention_in_windows",
        "float[2,3,2,4,8] q, float[2,3,2,5,8] k, float[2,3,2,5,6] v, float[2,4,5] bias",
        "kt = Transpose <perm = [0,1,2,4,3]> (k)\n s = MatMul (q, kt)\n z = Add (s, bias)\n"
        "p = Softmax (z)\n y = MatMul (p, v)",
        ("SdpaMask",),
        fed=("q", "k", "v"),
        output="float[B,3,2,4,6] y",
    ),
    FusionCase(
        "attention_in_shifted_windows",  # [B nW, H, S, T], with a mask of nW windows in between
        "float[B,4,5,8] x, float[1,4,5,5] bias, float[3,1,5,5] shift",
        "three = Constant <value = int64[4] {3,1,1,1}> ()\n x3 = Tile (x, three)\n"
        "five = Constant <value = int64[5] {-1,3,4,5,5}> ()\n"
        "four = Constant <value = int64[4] {-1,4,5,5}> ()\n"
        "kt = Transpose <perm = [0,1,3,2]> (x3)\n s = MatMul (x3, kt)\n z = Add (s, bias)\n"
        "w = Reshape (z, five)\n zero = Constant <value = int64[1] {0}> ()\n"
        "m = Unsqueeze (shift, zero)\n wm = Add (w, m)\n zm = Reshape (wm, four)\n"
        "p = Softmax (zm)\n y = MatMul (p, x3)",
        ("SdpaMaskMask",),
        output="float[N,4,5,8] y",
    ),
    *(
        FusionCase(
            f"attention_heads_in_the_batch{name}",
            f"{q}, bool[B,1,5,5] keep",
            f"{unfold}four = Constant <value = int64[4] {{-1,2,5,5}}> ()\n"
            "three = Constant <value = int64[3] {-1,5,5}> ()\n"
            "kt = Transpose <perm = [0,2,1]> (k)\n s = MatMul (q3, kt)\n"
            + scalar("low", -3.4028235e38)
            + "w = Reshape (s, four)\n z = Where (keep, w, low)\n p = Softmax (z)\n"
            "p3 = Reshape (p, three)\n y = MatMul (p3, v3)",
            ("SdpaWhere",),
            fed=("q", "k4", "v", "keep"),
            output="float[M,5,8] y",
        )
        for name, q, unfold in (
            (
                "_unfolded",
                "float[B,2,5,8] q, float[B,2,5,8] k4, float[B,2,5,8] v",
                "rows = Constant <value = int64[3] {-1,5,8}> ()\n q3 = Reshape (q, rows)\n"
                "k = Reshape (k4, rows)\n v3 = Reshape (v, rows)\n",
            ),
        )
    ),
    FusionCase(
        "attention_heads_in_the_batch_of_free_sizes",  # BLOOM, of torch's first exporter
        "float[B,4,S,8] q, bool[1,1] keep",
        "".join(f"i{i} = Constant <value_ints = [{i}]> ()\n" for i in (1, 4, 8))
        + "k = Neg (q)\n v = Abs (q)\n"
        + "less = Constant <value_ints = [-1]> ()\n"
        "none = Constant <value = int64[4] {-1,-1,-1,-1}> ()\n"
        "ones = Constant <value = int64[4] {1,1,1,1}> ()\n"
        "sizes = Shape (q)\n zero = Constant <value = int64 {0}> ()\n"
        "two = Constant <value = int64 {2}> ()\n four = Constant <value = int64 {4}> ()\n"
        "batch = Gather (sizes, zero)\n rows = Gather (sizes, two)\n bh = Mul (batch, four)\n"
        "at = Constant <value_ints = [0]> ()\n bhs = Unsqueeze (bh, at)\n"
        "bs = Unsqueeze (batch, at)\n rs = Unsqueeze (rows, at)\n"
        "three = Concat <axis = 0> (bhs, less, i8)\n"
        "q3 = Reshape (q, three)\n k3 = Reshape (k, three)\n v3 = Reshape (v, three)\n"
        "kt = Transpose <perm = [0,2,1]> (k3)\n s = MatMul (q3, kt)\n"
        "wide = Concat <axis = 0> (bs, i4, rs, less)\n s4 = Reshape (s, wide)\n"
        "last = Shape <start = 1> (keep)\n to = Concat <axis = 0> (bs, i1, rs, last)\n"
        "asked = Equal (to, none)\n full = Where (asked, ones, to)\n"
        "keeps = Expand (keep, full)\n"
        + scalar("low", -3.4028235e38)
        + "z = Where (keeps, s4, low)\n p = Softmax (z)\n"
        "back = Concat <axis = 0> (bhs, rs, less)\n p3 = Reshape (p, back)\n"
        "y = MatMul (p3, v3)",
        ("SdpaWhere",),
        fed=("q", "keep"),
        output="float[M,S,8] y",
    ),
    FusionCase(
        "attention_of_one_head",
        "float[B,1,S,8] q, float[B,1,T,8] k, float[B,T,8] v, float[B,S,T] mask",
        SCORES + "one = Constant <value = int64[1] {1}> ()\n w = Squeeze (s, one)\n"
        "m = Add (w, mask)\n p = Softmax (m)\n p4 = Unsqueeze (p, one)\n"
        "v4 = Unsqueeze (v, one)\n y = MatMul (p4, v4)",
        ("SdpaMask",),
        fed=("q", "k", "v", "mask"),
        output="float[B,1,S,8] y",
    ),
    FusionCase(
        "attention_weights_are_an_output",
        QKV,
        SCORES + "p = Softmax (s)\n y = MatMul (p, v)",
        reason="are an output of the model",
        fed=("q", "k", "v"),
        output="float[B,H,S,8] y, float[B,H,S,T] p",
    ),
    FusionCase(
        "attention_mild_where",
        f"{QKV}, bool[B,1,S,T] mask",
        SCORES
        + scalar("low", -100.0)
        + "zm = Where (mask, s, low)\n p = Softmax (zm)\n y = MatMul (p, v)",
        ("SdpaWhere",),
        **ATT,
    ),
    FusionCase(
        "attention_weights_of_more_axes_stay",
        QKV,
        SCORES
        + "p = Softmax (s)\n first = Constant <value = int64[1] {0}> ()\n"
        + "u = Unsqueeze (p, first)\n y = MatMul (u, v)",
        reason="the weights differ in rank from what they multiply",
        fed=("q", "k", "v"),
        output="float[1,B,H,S,8] y",
    ),
    FusionCase(
        "activation_outside_the_table",
        f"{X}, {LIN}",
        PLAIN + "y = Softsign (z)",
        ("Gemm",),
        reason="Softsign is not one of the fused activations",
    ),
)
