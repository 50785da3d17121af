"""Rows for the tests of gradients: recurrent operators, Scan and Loop."""

import numpy as np
from gradient_rows import F32, rng, row, rows, scalar


def recurrent(
    name, kind, call="", states=1, outputs=None, dtype=F32, length=None, peepholes=False, **more
):
    """A recurrent node of 4 steps, 3 sequences, 2 inputs and 5 hidden units with all operands."""
    gates, count = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind], 2 if "bidirectional" in call else 1
    names = outputs or ("y", "h", "c")[: 3 if kind == "LSTM" else 2]
    lead = lambda *s: (s[1], s[0], *s[2:]) if "layout = 1" in call else s  # noqa: E731
    inputs = {
        "x": lead(4, 3, 2),
        "w": (count, gates * 5, 2),
        "r": (count, gates * 5, 5),
        **({"b": (count, 2 * gates * 5)} if states is not None else {}),
        **({"n": np.array(length, np.int32)} if length else {}),
        **({"h0": lead(count, 3, 5)} if states else {}),
        **({"c0": lead(count, 3, 5)} if states and kind == "LSTM" else {}),
        **({"p": (count, 15)} if peepholes else {}),
    }
    kinked = kind == "RNN" and "Relu" in call
    reach = 0.1 if kinked else 0.7
    inputs |= {
        k: rng(3).uniform(-reach, reach, v) for k, v in inputs.items() if isinstance(v, tuple)
    }
    if kinked and "b" in inputs:  # far from its kink
        inputs["b"] = inputs["b"] + [1.0, -1.0, 1.0, -1.0, 1.0] * 2
    order = ["x", "w", "r", "b", "n", "h0", "c0", "p"]
    called = ", ".join(k if k in inputs else "" for k in order).rstrip(", ")
    attributes = ", ".join(["hidden_size = 5", *([call] if call else [])])
    left = ", ".join(n if n in names else "" for n in ("y", "h", "c")).rstrip(", ")
    body = f"{left} = {kind} <{attributes}> ({called})"
    return row(
        f"{kind} {name}",
        body,
        **inputs,
        outputs=names,
        dtype=dtype,
        runtime=("n",) if length else (),
        static=("w", "r", "b"),
        **more,
    )


WAYS = {
    "plain": {"states": 0},
    "no bias": {"states": None},
    "states": {},
    "reverse": {"call": 'direction = "reverse"'},
    "bidirectional": {"call": 'direction = "bidirectional"'},
    "lengths": {"length": [4, 0, 2]},
    "bidirectional, lengths": {"call": 'direction = "bidirectional"', "length": [2, 4, 1]},
    "reverse, lengths": {"call": 'direction = "reverse"', "length": [2, 4, 1]},
}
RECURRENT = [
    *(recurrent(name, k, **more) for k in ("LSTM", "GRU", "RNN") for name, more in WAYS.items()),
    *(
        recurrent(
            f"linear_before_reset {name}",
            "GRU",
            **{
                **more,
                "call": ", ".join(["linear_before_reset = 1", *filter(None, [more.get("call")])]),
            },
        )
        for name, more in WAYS.items()
    ),
    recurrent("last h alone", "LSTM", outputs=("h",)),
    recurrent("c alone", "LSTM", outputs=("c",)),
    recurrent("relu", "RNN", call='activations = ["Relu"]'),
    recurrent(
        "relu and tanh", "RNN", call='direction = "bidirectional", activations = ["Relu", "Tanh"]'
    ),
]

OTHER_RECURRENT = [
    recurrent(f"{name}, {ways}", kind, **{**WAYS[ways], "call": ", ".join(
        filter(None, [WAYS[ways].get("call"), call]))})
    for kind, name, call in (
        ("LSTM", "clipped far off", "clip = 9.0"),
        ("LSTM", "coupled", "input_forget = 1"),
        ("GRU", "sigmoids", 'activations = ["Sigmoid", "Sigmoid"]'),
        ("RNN", "scaled", 'activations = ["Affine"], activation_alpha = [0.5], '
         "activation_beta = [0.1]"),
    )
    for ways in ("states", "plain", "reverse, lengths")
]  # fmt: skip

STEP_OF_RNN = (
    "body = step (double[2, 3] h, double[2, 3] xt) => (double[2, 3] n, double[2, 3] yt) "
    "{ p = MatMul (h, w) s = Add (p, xt) n = Tanh (s) yt = Mul (n, xt) }"
)
LOOPS = [
    row(
        f"Scan {name}",
        f"e, y = Scan <num_scan_inputs = 1{more}, {STEP_OF_RNN}> (h0, x)",
        h0=(2, 3),
        x=shape,
        w=(3, 3),
        outputs=("e", "y"),
        static=("h0", "w", "x"),
    )
    for name, more, shape in (
        ("forward", "", (4, 2, 3)),
        ("reverse", ", scan_input_directions = [1], scan_output_directions = [1]", (4, 2, 3)),
        ("of the last axis", ", scan_input_axes = [-1], scan_output_axes = [1]", (2, 3, 5)),
        ("there and back", ", scan_input_directions = [1]", (4, 2, 3)),
    )
] + [
    *(
        row(
            f"Loop of {steps} run-time steps",
            "y = Loop <body = step (int64 i, bool c, double[3] s) => (bool k, double[3] t)"
            " { k = Identity (c) q = Mul (s, s) t = Add (q, w) }> (n, , x)",
            n=scalar(steps),
            x=(3,),
            w=(3,),
            runtime=("n",),
            static=("x", "w"),
        )
        for steps in (2, 0)
    ),
    *rows("""
Loop counted, with a weight: x=(3,), w=(3, 3), outputs=("y", "z"), static=("x", "w")
  n = Constant <value = int64 {3}> ()  go = Constant <value = bool {1}> ()
  y, z = Loop <body = step (int64 i, bool c, double[3] s) => (bool k, double[3] t, double[3] u) {
    k = Identity (c)  p = MatMul (s, w)  t = Sin (p)  j = Cast <to = 11> (i)  u = Mul (t, j)
  }> (n, go, x)
Loop until its condition fails: x=within(1.0, 1.5, 3), r0=(), outputs=("a", "y"), static=("x", "r0")
  go = Constant <value = bool {1}> ()
  a, y = Loop <body = step (int64 i, bool c, double[3] s, double r)
    => (bool k, double[3] t, double v) { half = Constant <value = double {0.7}> ()
    t = Mul (s, half)  m = ReduceSumSquare <keepdims = 0> (t)  v = Add (r, m)
    l = Constant <value = double {0.5}> ()  k = Greater (m, l) }> (, go, x, r0)
Loop with an If, a state that passes and one value as two outputs: x=(3,), q=(3,), w=(3,),
outputs=("y", "z", "v"), static=("x", "q", "w")
  n = Constant <value = int64 {3}> ()
  y, z, v = Loop <body = step (int64 i, bool c, double[3] s, double[3] o)
    => (bool k, double[3] t, double[3] o1, double[3] t1) { k = Identity (c)
    one = Constant <value = int64 {1}> ()  e = Equal (i, one)
    t = If (e) <then_branch = a () => (double[3] g) { g = Mul (s, o) },
                else_branch = b () => (double[3] f) { f = Add (s, w) }>
    o1 = Identity (o)  t1 = Identity (t) }> (n, , x, q)
Scan in a Loop: h0=(2, 3), x=(4, 2, 3), w=within(-0.4, 0.4, 3, 3), static=("h0", "x", "w")
  n = Constant <value = int64 {2}> ()
  y = Loop <body = outer (int64 i, bool c, double[2, 3] s) => (bool k, double[2, 3] t) {
    k = Identity (c)
    t = Scan <num_scan_inputs = 1, body = step (double[2, 3] h, double[2, 3] xt)
      => (double[2, 3] g) { p = MatMul (h, w)  m = Add (p, xt)  g = Tanh (m) }> (s, x)
  }> (n, , h0)
"""),
]
