"""The attention operators: one template for the bodies and gradients of all kinds.

    y = softmax(z) v,  z = steps(scale · q kᵀ),  q [B, H, S, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv]
A kind's name says what it does, in this order:
    Grouped   H is a multiple of Hkv: query head h reads key head h // (H / Hkv)
    Sdpa
    Wide      the logits are cast to float32 for the softmax, its result back to q's dtype
    Softcap   z = softcap · tanh(z)
    Causal    query i sees the keys j <= i
    Packed    sequences stand one behind the other on the axes S and T, B is 1: query i sees the
              keys of its own; offsets [sequences + 1] int32 say where each begins and the last one
              ends, the rows behind it give 0 (NaN without a guard); no sequence is longer than the
              last axis of `longest`
    Mask      z = z + mask, broadcastable to [B, H, S, T]; of packed sequences by their own places,
              to [sequences, H, longest, longest]
    Where     z = Where(keep, z, fill): keep bool, broadcastable to [B, H, S, T], fill a scalar
    Guard     a row whose mask is -inf everywhere gives 0
    NanGuard  weights that are NaN are 0 (the Softmax, IsNaN, Where of exporters)
Up to two of Mask and Where follow each other; their inputs come behind q, k and v in that order.
The two guards differ: a NaN in q reaches the result through a Guard, and not through a NanGuard.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from onnx_fuse.ops.activations import signature

STEPS: tuple[tuple[str, ...], ...] = (
    (),
    ("Mask",),
    ("Where",),
    *product(("Mask", "Where"), repeat=2),
)


@dataclass(frozen=True)
class Kind:
    """What one attention operator does beside the two products and the softmax."""

    grouped: bool = False
    wide: bool = False
    softcap: bool = False
    causal: bool = False
    packed: bool = False
    steps: tuple[str, ...] = ()
    guard: str = ""
    """"" , "Guard" or "NanGuard"."""

    @property
    def name(self) -> str:
        flags = {
            "Grouped": self.grouped,
            "Sdpa": True,
            "Wide": self.wide,
            "Softcap": self.softcap,
            "Causal": self.causal,
            "Packed": self.packed,
        }
        return "".join((*(n for n, on in flags.items() if on), *self.steps, self.guard))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the body's inputs: q, k, v, then mask or keep and fill for each step."""
        names = ["q", "k", "v", *(("offsets", "longest") if self.packed else ())]
        for i, step in enumerate(self.steps, 1):
            names += [f"mask{i}"] if step == "Mask" else [f"keep{i}", f"fill{i}"]
        return tuple(names)

    @property
    def added(self) -> tuple[int, ...]:
        """The steps, counted from 1, that add a mask."""
        return tuple(i for i, step in enumerate(self.steps, 1) if step == "Mask")

    @property
    def signature(self) -> str:
        """The attributes of a body."""
        return signature(
            "kv_rows, q_rows" if self.grouped else "",
            "scale: float = 1.0",
            "softcap: float = 1.0" if self.softcap else "",
        )


def _kinds() -> Iterator[Kind]:
    for grouped, wide, softcap in product((False, True), repeat=3):
        for steps, guard in product(STEPS, ("", "NanGuard")):
            yield Kind(grouped, wide, softcap, steps=steps, guard=guard)
        yield Kind(grouped, wide, softcap, steps=("Mask",), guard="Guard")
        # causal ones come from the standard's Attention, whose guard this is
        yield Kind(grouped, wide, softcap, True)
        yield Kind(grouped, wide, softcap, True, steps=("Mask",), guard="Guard")
        for guard in ("", "Guard"):
            yield Kind(grouped, wide, softcap, packed=True, steps=("Mask",), guard=guard)
        for causal, guard in product((False, True), ("Guard", "NanGuard")):
            yield Kind(grouped, wide, softcap, causal, packed=True, guard=guard)


FLOOR = "floor"
"""Attribute for kernels, not used by bodies: the mask value, beyond float16's range, that became
-65504 when the graph was converted to float16."""

KINDS: dict[str, Kind] = {kind.name: kind for kind in _kinds()}
"""Every attention operator by its name."""


def _folded(kind: Kind, name: str) -> str:
    """`name` as its body calls it where the query heads that share a key head are its rows."""
    return f"{name}g" if kind.grouped else name


def _fold(kind: Kind, *names: str) -> list[str]:
    """[B, H, S, .] as [B, Hkv, H/Hkv · S, .], for kinds that are grouped."""
    return [f"{n}g = Reshape ({n}, fold)" for n in names] if kind.grouped else []


def _unfold(kind: Kind, name: str, formula: str) -> list[str]:
    """Lines that set `name` to the product `formula`, with the heads it joins unfolded again."""
    if kind.grouped:
        return [f"{name}g = {formula}", f"{name} = Reshape ({name}g, unfold)"]
    return [f"{name} = {formula}"]


def _logits(kind: Kind) -> tuple[list[str], str]:
    """Lines of a body up to the softmax's input, in q's dtype, and its name there."""
    lines = [
        "a = CastLike (Constant <value_float: float = @scale> (), q)",
        "kt = Transpose <perm: ints = [0, 1, 3, 2]> (k)",
        "last = [-1]",
    ]
    if kind.grouped:
        lines += [
            # Reshape cannot find a size of -1 beside one of 0, so that it is worked out here.
            "folded = Constant <value_ints: ints = @kv_rows> ()",
            "apart = Constant <value_ints: ints = @q_rows> ()",
            "at0 = [0]",
            "at1 = [1]",
            "at2 = [2]",
            "folded_head = Slice (folded, at0, at2)",
            "apart_head = Slice (apart, at0, at2)",
            "group = Slice (apart, at1, at2) / Slice (folded, at1, at2)",
            "rows = Shape <start: int = 2, end: int = 3> (q)",
            "all_rows = rows * group",
            "fold = Concat <axis: int = 0> (folded_head, all_rows, at0)",
            "unfold = Concat <axis: int = 0> (apart_head, rows, at0)",
        ]
    lines += _fold(kind, "q")
    # onnxruntime fuses this Mul with the MatMul that follows
    lines += [f"qa = {_folded(kind, 'q')} * a"]
    lines += _unfold(kind, "s", "MatMul (qa, kt)")
    z = "s"
    if kind.softcap:
        lines += ["t = Tanh (s)", "zc = t * @softcap"]
        z = "zc"
    if kind.packed:
        lines += [
            "place = Range (0, Squeeze (Shape <start: int = 2, end: int = 3> (q)), 1)",
            "begins = Unsqueeze (Cast <to: int = 7> (offsets), [1])",
            "passed = Cast <to: int = 7> (begins <= place)",
            "sequence = ReduceSum <keepdims: int = 0> (passed, [0])",
            # those behind the last have passed all
            "seen = And (Unsqueeze (sequence, [1]) == sequence, sequence < Shape (offsets))",
        ]
        seen = "seen"
        if kind.causal:
            lines += ["not_later = And (seen, place <= Unsqueeze (place, [1]))"]
            seen = "not_later"
        if kind.steps:  # of two places of one sequence; any of others, which do not meet
            lines += [
                "sequences = Shape (offsets) - 1",
                "each = Min (sequence, sequences) - 1",
                "most = Shape <start: int = 3, end: int = 4> (mask1) - 1",
                "within = Min (place - Gather (Squeeze (begins, [1]), each), most)",
                "square = Concat <axis: int = 0> (Shape (place), Shape (place), [1])",
                "i0 = Expand (Unsqueeze (each, [1, 2]), square)",
                "i1 = Expand (Unsqueeze (within, [1, 2]), square)",
                "i2 = Expand (Unsqueeze (within, [0, 2]), square)",
                "pairs = Concat <axis: int = 2> (i0, i1, i2)",
                "every = Expand (mask1, Concat <axis: int = 0> (sequences, [1, 1, 1]))",
                "heads_last = Transpose <perm: ints = [0, 2, 3, 1]> (every)",
                "picked = Transpose <perm: ints = [2, 0, 1]> (GatherND (heads_last, pairs))",
            ]
        lines += [
            "low = CastLike (Constant <value: tensor = float {-inf}> (), s)",
            f"z1 = Where ({seen}, {f'{z} + picked' if kind.steps else z}, low)",  # of others no NaN
        ]
        if kind.guard == "Guard":
            lines += [f"mask = Where ({seen}, {'picked' if kind.steps else '0'}, low)"]
        return lines, "z1"
    if kind.causal:
        lines += [
            "q_size = Shape <start: int = 2, end: int = 3> (q)",
            "k_size = Shape <start: int = 2, end: int = 3> (k)",
            "square = Concat <axis: int = 0> (q_size, k_size)",
            "ones = ConstantOfShape <value: tensor = float[1] {1.0}> (square)",
            "seen = Cast <to: int = 9> (Trilu <upper: int = 0> (ones))",
            "low = CastLike (Constant <value: tensor = float {-inf}> (), s)",
            f"mask = Where (seen, {'mask1' if kind.steps else '0'}, low)",
            f"z1 = {z} + mask",
        ]
        return lines, "z1"
    for i, step in enumerate(kind.steps, 1):
        if step == "Mask":
            lines += [f"z{i} = {z} + mask{i}"]
        else:
            # kernels hand their body a keep of another dtype, for which this Cast stands
            lines += [f"kept{i} = Cast <to: int = 9> (keep{i})"]
            lines += [f"z{i} = Where (kept{i}, {z}, fill{i})"]
        z = f"z{i}"
    return lines, z


def body(kind: Kind) -> str:
    """The forward function. Its inner value `lse` is for the backward alone, in float32 whatever
    q is: (max z, log Σ exp(z - max z)) of each row, [B, H, S, 2]. As one number they would lose
    the sum where a row is masked whole by a large negative number.
    """
    lines, z = _logits(kind)
    lines += [
        f"zf = Cast <to: int = 1> ({z})",
        "top = ReduceMax <keepdims: int = 1> (zf, last)",
        "spread = ReduceLogSumExp <keepdims: int = 1> (zf - top, last)",
        "lse = Concat <axis: int = -1> (top, spread)",
    ]
    y = "yn" if kind.guard == "NanGuard" else "y"
    p = "weights" if kind.guard == "Guard" else "p"
    softmax = f"Softmax <axis: int = -1> ({z})"
    if kind.wide:
        softmax = f"CastLike (Softmax <axis: int = -1> (Cast <to: int = 1> ({z})), q)"
    lines += [f"{p} = {softmax}"]
    if kind.guard == "Guard":
        # Rows are told by the mask, which heads and layers share; of a NaN in v 0 weights make NaN.
        mask = "mask" if kind.causal or kind.packed else "mask1"
        lines += [
            f"highest = ReduceMax <keepdims: int = 1> ({mask}, last)",
            "dead = IsInf <detect_positive: int = 0> (highest)",
            "p = Where (dead, 0, weights)",
        ]
    lines += _fold(kind, "p")
    product = f"MatMul ({_folded(kind, 'p')}, v)"
    if kind.packed:
        # What is not finite reaches its sequence alone: of others' 0 weights would make NaN.
        lines += [
            "endless = Or (IsNaN (v), IsInf (v))",
            "ends = Cast <to: int = 1> (Where (endless, v, 0))",  # no type of 16 bits is scattered
            "listed = Transpose <perm: ints = [2, 0, 1, 3]> (ends)",
            "sizes = Concat <axis: int = 0> (Shape (offsets) + 1, Shape <start: int = 1> (listed))",
            "no_ends = ConstantOfShape <value: tensor = float[1] {0.0}> (sizes)",
            "at_rows = Unsqueeze (sequence, [1])",
            'sums = ScatterND <reduction: string = "add"> (no_ends, at_rows, listed)',
            "summed = Transpose <perm: ints = [1, 2, 0, 3]> (Gather (sums, sequence))",
            "times = Concat <axis: int = 0> ([1, 1], group, [1])" if kind.grouped else "",
            f"own = CastLike ({'Tile (summed, times)' if kind.grouped else 'summed'}, v)",
        ]
        product = f"MatMul ({_folded(kind, 'p')}, Where (endless, 0, v)) + own"
    lines += _unfold(kind, y, product)
    if kind.guard == "NanGuard":
        # A softmax is NaN in a whole row or nowhere, so one weight tells of its row; what 0 weights
        # make of v is 0, or NaN where v is not finite. All this is far less than the weights are.
        lines += [
            "from = [0]",
            "to = [1]",
            "first = Slice (p, from, to, last)",
            # where there are no keys the sum is 0, and no row is dead
            "dead = IsNaN (ReduceSum <keepdims: int = 1> (first, last))",
            "row = Concat <axis: int = 0> (to, Shape <start: int = 2, end: int = 3> (v))",
            "none = ConstantOfShape <value: tensor = float[1] {0.0}> (row)",
            "yz = own * 0" if kind.packed else "yz = MatMul (CastLike (none, v), v)",
        ]
        if kind.grouped:
            lines += ["y = Reshape (Where (Reshape (dead, fold), yz, yng), unfold)"]
        else:
            lines += ["y = Where (dead, yz, yn)"]
    inputs = ", ".join(kind.inputs)
    return _function(f"{kind.name} {kind.signature}({inputs}) => (y)", lines)


def grad_body(kind: Kind, masks: bool = False) -> str:
    """dv = pᵀ dy, dq = scale ds k, dk = scale dsᵀ q; p = exp(z - lse), dz = p (dy vᵀ - Σ dy y).

    What a Where fills in has no gradient. With `masks` the function gives instead the gradients of
    the masks that were added, [B, H, S, T] each, of packed sequences as masks are.
    """
    lines, z = _logits(kind)
    e = "en" if kind.guard else "e"
    lines += [
        f"zf = CastLike ({z}, lse)",
        "top, spread = Split <axis: int = -1, num_outputs: int = 2> (lse)",
        f"{e} = Exp (zf - top - spread)",
    ]
    if kind.guard:
        lines += ["e = Where (IsNaN (en), 0, en)"]
    lines += [
        "p = CastLike (e, q)",
        "delta = ReduceSum <keepdims: int = 1> (dy * y, last)",
        *_fold(kind, "p", "dy"),
        "vt = Transpose <perm: ints = [0, 1, 3, 2]> (v)",
        *_unfold(kind, "dp", f"MatMul ({_folded(kind, 'dy')}, vt)"),
        "dz = p * (dp - delta)",
    ]
    ds = "dz"
    for i in range(len(kind.steps), 0, -1):
        lines += [f"dz{i} = Identity ({ds})"]
        ds = f"dz{i}"
        if kind.steps[i - 1] == "Where":
            lines += [f"open{i} = Where (kept{i}, {ds}, 0)"]
            ds = f"open{i}"
    if kind.softcap:
        lines += [f"dc = {ds} * ((1 - t * t) * @softcap)"]
        ds = "dc"
    if kind.steps and not masks:
        # steps may broadcast the logits of one key to several, whose gradients then add up
        lines += [
            "keys = Shape <start: int = 2, end: int = 3> (k)",
            f"many = Shape <start: int = 3, end: int = 4> ({ds})",
            "times = many / Max (keys, [1])",
            f"before = Shape <start: int = 0, end: int = 3> ({ds})",
            "shared = Concat <axis: int = 0> (before, times, keys)",
            f"spread_ds = Reshape <allowzero: int = 1> ({ds}, shared)",
            "ds = ReduceSum <keepdims: int = 0> (spread_ds, [3])",
        ]
    else:
        lines += [f"ds = Identity ({ds})"]
    lines += _fold(kind, "ds")
    lines += [
        f"dst = Transpose <perm: ints = [0, 1, 3, 2]> ({_folded(kind, 'ds')})",
        f"pt = Transpose <perm: ints = [0, 1, 3, 2]> ({_folded(kind, 'p')})",
        *_unfold(kind, "dqa", f"MatMul ({_folded(kind, 'ds')}, k)"),
        "dq = dqa * a",
        "dk = MatMul (dst, qa)",
        f"dv = MatMul (pt, {_folded(kind, 'dy')})",
    ]
    inputs = ", ".join(("dy", "y", "lse", *kind.inputs))
    if masks:
        if kind.packed:  # each pair of tokens that meet adds to its place of the mask
            lines += [
                "met = Squeeze (Transpose <perm: ints = [0, 2, 3, 1]> (Where (seen, dz1, 0)), [0])",
                "side = Shape <start: int = 3, end: int = 4> (mask1)",
                "count = Shape <start: int = 1, end: int = 2> (q)",
                "whole = Concat <axis: int = 0> (sequences, side, side, count)",
                "none = CastLike (ConstantOfShape <value: tensor = float[1] {0.0}> (whole), q)",
                'sums = ScatterND <reduction: string = "add"> (none, pairs, met)',
                "sums1 = Transpose <perm: ints = [0, 3, 1, 2]> (sums)",
            ]
        grads = ", ".join(f"{'sums' if kind.packed else 'dz'}{i}" for i in kind.added)
        return _function(f"{kind.name}GradMasks {kind.signature}({inputs}) => ({grads})", lines)
    return _function(f"{kind.name}Grad {kind.signature}({inputs}) => (dq, dk, dv)", lines)


def attention_body(kind: Kind) -> str:
    """The Attention node of opset 23, which gives 0 too where a row is masked whole."""
    masked = kind.steps == ("Mask",) and kind.guard == "Guard"
    if kind.wide or kind.softcap or not (masked or not (kind.steps or kind.guard)):
        return ""
    inputs = ", ".join(kind.inputs)
    causal = ", is_causal: int = 1" if kind.causal else ""
    call = f"y = Attention <scale: float = @scale{causal}> ({inputs})"
    return _function(f"{kind.name} {kind.signature}({inputs}) => (y)", [call])


def _function(head: str, lines: list[str]) -> str:
    return f"{head} {{\n  " + "\n  ".join(lines) + "\n}"
