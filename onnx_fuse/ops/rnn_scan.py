"""The sequential part of LSTM, GRU and RNN, a direction an operator, and its gradient.

Shapes: T steps, B sequences, H hidden units. z [T, B, gates H] are the sums that the activations
take, without the part of the state in the forward operators. `lengths` [B], int32: past its end a
sequence's state stays and its y is 0. The lists `reads` and `writes` (and `_back`, of a gradient's
second pass) say for each sequence of Scan whether time is walked backwards.

    LSTM       i, o, f = σ(z)   g = tanh(z)   c = f c' + i g   h = o tanh(c)      gates i o f g
    GRU        z, r = σ         n = tanh(x + (r ⊙ h') Rᵀ)      h = (1 - z) n + z h'
    GRULinear  z, r = σ         n = tanh(x + r ⊙ (h' Rᵀ + b))  h = (1 - z) n + z h'
    RNN        h = tanh(z) or max(z, 0)
"""

from __future__ import annotations

from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops.opdef import OpDef, register

# A step reads the function's inputs, and makes its own constants: onnx_ir (1.1) does not find what
# nodes of the function around it made.
# A Scan has at least one step: where there is none, one that is past every length is cut again.
TIMES = """
    steps = Shape <start = 0, end = 1> (z)
    some = Max (steps, [1])
    times = Cast <to = 6> (Range (0, Squeeze (some), 1))
    more = Concat <axis = 0> ([0, 0, 0], some - steps, [0, 0])
    start = [0]
"""
ALIVE = """
        alive = Unsqueeze (t < lengths, [-1])
"""


def _steps(name: str, inputs: str, states: str, body: str) -> OpDef:
    """`states` are names of h and c; `body` makes each new one, named with a 1, from its old."""
    names = states.split()
    new = ", ".join(f"{s}n" for s in names)
    updates = "\n".join(f"        {s}n = Where (alive, {s}1, {s})" for s in names)
    finals = ", ".join(f"{s}_T" for s in names)
    starts = ", ".join(f"{s}0" for s in names)
    olds = ", ".join(names)
    return OpDef(
        name,
        domain=FUSE,
        body=f"""{name} <reads: ints, writes: ints> ({inputs}) => (y, {finals}) {{{TIMES}
    z_some = Pad (z, more)
    {finals}, y_some = Scan <num_scan_inputs = 2, scan_input_directions: ints = @reads,
        scan_output_directions: ints = @writes, body = step ({olds}, zt, t) => ({new}, yt) {{
{body}{ALIVE}{updates}
        yt = Where (alive, h1, 0)
    }}> ({starts}, z_some, times)
    y = Slice (y_some, start, steps, start)
}}""",
    )


def _grad(
    name: str, inputs: str, states: str, scanned: str, outputs: str, body: str, before: str = ""
) -> OpDef:
    """`body` makes d<state>1 of the state before a step, and each output of the step with a 1.

    `scanned` are the names of what the step reads, the first being dy; `before` makes
    `<name>_some` of those that are no inputs. A step past the end of its sequence gives zeros and
    passes the states on.
    """
    names = states.split()
    reads = scanned.split()
    ends = outputs.split()
    padded = "".join(f"\n    {s}_some = Pad ({s}, more)" for s in reads if s in inputs.split(", "))
    cut = "\n".join(f"    {o} = Slice ({o}_some, start, steps, start)" for o in ends)
    updates = "\n".join(f"        d{s}n = Where (alive, d{s}1, d{s})" for s in names)
    zeros = "\n".join(f"        {o}t = Where (alive, {o}1, 0)" for o in ends)
    olds, news = (", ".join(f"d{s}{end}" for s in names) for end in ("", "n"))
    results = ", ".join(f"d{s}0" for s in names)
    attributes = "reads: ints, writes: ints, reads_back: ints, writes_back: ints"
    steps_read = ", ".join(f"{s}_t" for s in reads)
    return OpDef(
        name,
        domain=FUSE,
        body=f"""{name} <{attributes}> ({inputs})
        => ({", ".join(ends)}, {results}) {{{TIMES}{padded}{before}
    {results}, {", ".join(f"{o}_some" for o in ends)} = Scan <num_scan_inputs = {len(reads) + 1},
        scan_input_directions: ints = @reads_back, scan_output_directions: ints = @writes_back,
        body = step ({olds}, {steps_read}, t) => ({news}, {", ".join(f"{o}t" for o in ends)}) {{
        dhy = dh + dy_t
{body}{ALIVE}{updates}
{zeros}
    }}> ({", ".join(f"d{s}_T" for s in names)}, {", ".join(f"{s}_some" for s in reads)}, times)
{cut}
}}""",
    )


_LSTM_GATES = """
        zi, zo, zf, zg = Split <axis = -1, num_outputs = 4> (s)
        i = Sigmoid (zi)
        o = Sigmoid (zo)
        f = Sigmoid (zf)
        g = Tanh (zg)
        c1 = f * c + i * g
"""
_LSTM = f"""
        s = zt + MatMul (h, rt){_LSTM_GATES}
        h1 = o * Tanh (c1)
"""
# σ' = σ (1 - σ), tanh' = 1 - tanh²
_LSTM_GRAD = (
    _LSTM_GATES.replace("(s)", "(z_t)").replace("f * c ", "f * c_t ")
    + """
        tc = Tanh (c1)
        dcs = dc + dhy * o * (1 - tc * tc)
        dzi = dcs * g * (i * (1 - i))
        dzo = dhy * tc * (o * (1 - o))
        dzf = dcs * c_t * (f * (1 - f))
        dzg = dcs * i * (1 - g * g)
        dz1 = Concat <axis = -1> (dzi, dzo, dzf, dzg)
        dh1 = MatMul (dz1, r)
        dc1 = dcs * f
"""
)
_LSTM_STATES = f"""
    c_T, c_some = Scan <num_scan_inputs = 2, scan_input_directions: ints = @reads,
        scan_output_directions: ints = @writes, body = cell (c, s, t) => (cn, ct) {{
{_LSTM_GATES}{ALIVE}
        cn = Where (alive, c1, c)
        ct = Identity (c)
    }}> (c0, z_some, times)
"""
_GRU_NEW = """
        h1 = (1 - zg) * n + zg * h
"""
_GRU_FORWARD = (
    """
        xz, xr, xn = Split <axis = -1, num_outputs = 3> (zt)
        hz, hr = Split <axis = -1, num_outputs = 2> (MatMul (h, rt_gates))
        zg = Sigmoid (xz + hz)
        rg = Sigmoid (xr + hr)
        n = Tanh (xn + MatMul (rg * h, rt_new))"""
    + _GRU_NEW
)
_GRU_LINEAR = (
    """
        xz, xr, xn = Split <axis = -1, num_outputs = 3> (zt)
        hz, hr, hc = Split <axis = -1, num_outputs = 3> (MatMul (h, rt))
        zg = Sigmoid (xz + hz)
        rg = Sigmoid (xr + hr)
        n = Tanh (xn + rg * (hc + bn))"""
    + _GRU_NEW
)
_GRU_GRAD = """
        nz = 1 - zg
        dn = dhy * nz * (1 - n * n)
        dzz = dhy * (h_t - n) * (zg * nz)
        sr = rg * (1 - rg)
        stays = dhy * zg
"""


def _rnn(act: str) -> list[OpDef]:
    slope = {
        "Tanh": "a = Tanh (z_t)\n        slope = 1 - a * a",
        "Relu": "slope = CastLike (z_t > 0, z_t)",
    }[act]
    forward = f"""
        h1 = {act} (zt + MatMul (h, rt))
"""
    backward = f"""
        {slope}
        dz1 = dhy * slope
        dh1 = MatMul (dz1, r)
"""
    name, reads = f"RNN{act}Steps", "z, r, lengths, dy, dh_T"
    return [
        _steps(name, "z, rt, h0, lengths", "h", forward),
        _grad(f"{name}Grad", reads, "h", "dy z", "dz", backward),
    ]


register(
    _steps("LSTMSteps", "z, rt, h0, c0, lengths", "h c", _LSTM),
    _grad(
        "LSTMStepsGrad",
        "z, r, c0, lengths, dy, dh_T, dc_T",
        "h c",
        "dy z c",
        "dz",
        _LSTM_GRAD,
        _LSTM_STATES,
    ),
    _steps("GRULinearSteps", "z, rt, bn, h0, lengths", "h", _GRU_LINEAR),
    _grad(
        "GRULinearStepsGrad",
        "z, zh, before, r, lengths, dy, dh_T",
        "h",
        "dy z zh h",
        "dz dzh",
        """
        xz, xr, xn = Split <axis = -1, num_outputs = 3> (z_t)
        hz, hr, hc = Split <axis = -1, num_outputs = 3> (zh_t)
        zg = Sigmoid (xz + hz)
        rg = Sigmoid (xr + hr)
        n = Tanh (xn + rg * hc)"""
        + _GRU_GRAD
        + """
        dzr = dn * hc * sr
        dz1 = Concat <axis = -1> (dzz, dzr, dn)
        dzh1 = Concat <axis = -1> (dzz, dzr, dn * rg)
        dh1 = stays + MatMul (dzh1, r)
""",
        "    h_some = Pad (before, more)\n",
    ),
    _steps("GRUSteps", "z, rt_gates, rt_new, h0, lengths", "h", _GRU_FORWARD),
    _grad(
        "GRUStepsGrad",
        "z, zn, before, r_gates, r_new, lengths, dy, dh_T",
        "h",
        "dy z zn h",
        "dz",
        """
        zg, rg = Split <axis = -1, num_outputs = 2> (Sigmoid (z_t))
        n = Tanh (zn_t)"""
        + _GRU_GRAD
        + """
        u = MatMul (dn, r_new)
        dgates = Concat <axis = -1> (dzz, u * h_t * sr)
        dz1 = Concat <axis = -1> (dgates, dn)
        dh1 = stays + (u * rg + MatMul (dgates, r_gates))
""",
        "    h_some = Pad (before, more)\n",
    ),
    *_rnn("Tanh"),
    *_rnn("Relu"),
)
