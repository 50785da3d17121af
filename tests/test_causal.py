"""Masks that are proved causal: kernels then read none, and skip what it hides."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from lowering import interpreted, program_of, weights_of
from support import normal, run

from onnx_fuse import autodiff, rewrite
from onnx_fuse.autodiff.load import load
from onnx_fuse.ir.build import text_model
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.contractions import Attention
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.program.size import Trace
from onnx_fuse.rewrite.precision import in_precision

LOW = "Constant <value = float {-3.4028235e38}> ()"
INF = "Constant <value = float {-inf}> ()"
NIL = "Constant <value = float {0.0}> ()"
ONE = "Constant <value = float {1.0}> ()"
LENGTH = """size = Shape <start = 2, end = 3> (q)
    none = Constant <value_ints = [0]> ()
    first = Constant <value_ints = [1]> ()
    length = Squeeze (size, none)"""
POSITIONS = f"""{LENGTH}
    from = Constant <value = int64 {{0}}> ()
    by = Constant <value = int64 {{1}}> ()
    at = Range (from, length, by)
    queries = Unsqueeze (at, first)
    keys = Unsqueeze (at, none)"""
SQUARE = f"""{LENGTH}
    both = Concat <axis = 0> (size, size)"""
BUFFER = f"""{LENGTH}
    rows = Constant <value_ints = [2]> ()
    columns = Constant <value_ints = [3]> ()
    upper = Slice (triangle, none, size, rows)
    seen = Slice (upper, none, size, columns)"""
LATE = f"{POSITIONS} late = Greater (keys, queries)"
FAR, NEVER = (f"low = {low} nil = {NIL}" for low in (LOW, INF))
ONES = f"{SQUARE} ones = ConstantOfShape <value = float[1] {{1}}> (both)"
MASK = "mask = Where (late, low, nil)"
ADDED = "z = Add (s, mask)"
KEPT = f"low = {LOW} z = Where (keep, s, low)"

# name: what makes the mask, what the logits are; then whether it is proved causal
PROVED = {
    "positions": (f"{LATE} {FAR} {MASK}", ADDED),
    "positions of each batch": ("""keys = Constant <value = int64[2,1,1,9]
            {0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4, 5, 6, 7, 8}> ()
        queries = Constant <value = int64[2,1,9,1]
            {0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4, 5, 6, 7, 8}> ()
        one_text = Equal (keys, keys) seen = LessOrEqual (keys, queries)""" f"""
        both = And (seen, one_text) low = {INF} nil = {NIL} mask = Where (seen, nil, low)""",
        ADDED),
    "not less or equal": (f"""{POSITIONS} seen = LessOrEqual (keys, queries) late = Not (seen)
        {NEVER} {MASK}""", ADDED),
    "queries below": (f"{POSITIONS} keep = GreaterOrEqual (queries, keys)", KEPT),
    "a distance": (f"""{POSITIONS} ahead = Sub (queries, keys)
        keep = GreaterOrEqual (ahead, from)""", KEPT),
    "hidden": (f"{POSITIONS} late = Less (queries, keys)", f"low = {LOW} z = Where (late, low, s)"),
    "triu of -inf": (f"""{SQUARE}
        low = ConstantOfShape <value = float[1] {{-inf}}> (both)
        by = Constant <value = int64 {{1}}> () mask = Trilu <upper = 1> (low, by)""", ADDED),
    "expanded": (f"""{SQUARE} one = {ONE} ones = Expand (one, both)
        lower = Trilu <upper = 0> (ones) nil = {NIL} late = Equal (lower, nil) low = {INF}
        mask = Where (late, low, nil)""", ADDED),
    "tril of ones": (f"""{ONES}
        lower = Trilu <upper = 0> (ones) keep = Cast <to = 9> (lower)""", KEPT),
    "one minus tril": (f"""{ONES}
        lower = Trilu <upper = 0> (ones) one = {ONE} late = Sub (one, lower)
        low = {LOW} mask = Mul (late, low)""", ADDED),
    "a buffer": (f"{BUFFER} keep = Cast <to = 9> (seen)", KEPT),
    "a buffer equals zero": (f"""{BUFFER} nil = {NIL} late = Equal (seen, nil)""",
        f"low = {INF} z = Where (late, low, s)"),
    "behind a mask of keys": (f"{LATE} {NEVER} {MASK}", "z0 = Add (s, padding) z = Add (z0, mask)"),
}  # fmt: skip
READ = {  # they hide more than the keys behind a query
    "and padding": (f"""{POSITIONS} nil = {NIL} low = {INF} some = Greater (padding, nil)
        before = LessOrEqual (keys, queries) seen = And (before, some)
        mask = Where (seen, nil, low)""", ADDED),
    "and padding, kept": (f"""{POSITIONS} nil = {NIL} some = Greater (padding, nil)
        before = LessOrEqual (keys, queries) keep = And (some, before)""",
        f"low = {INF} z = Where (keep, s, low)"),
    "two conditions": (f"""{POSITIONS} nil = {NIL} some = Greater (padding, nil)
        late = Greater (keys, queries)""",
        f"low = {INF} z0 = Where (late, low, s) z = Where (some, z0, low)"),
}  # fmt: skip
KEPT_AS_THEY_ARE = {
    "and padding, by lowest": (f"""{POSITIONS} nil = {NIL} low = {LOW} some = Greater (padding, nil)
        before = LessOrEqual (keys, queries) seen = And (before, some)
        mask = Where (seen, nil, low)""", ADDED),
    "or padding": (f"""{POSITIONS} nil = {NIL} low = {INF} some = Greater (padding, nil)
        before = LessOrEqual (keys, queries) seen = Or (before, some)
        mask = Where (seen, nil, low)""", ADDED),
    "not far enough": (f"""{POSITIONS} late = Greater (keys, queries)
        low = Constant <value = float {{-10000.0}}> () nil = {NIL}
        mask = Where (late, low, nil)""", ADDED),
    "itself hidden": (f"{POSITIONS} late = GreaterOrEqual (keys, queries) {FAR} {MASK}", ADDED),
    "one key ahead": (f"""{ONES}
        by = Constant <value = int64 {{1}}> ()
        lower = Trilu <upper = 0> (ones, by) keep = Cast <to = 9> (lower)""", KEPT),
    "the other way": (f"{POSITIONS} keep = GreaterOrEqual (keys, queries)", KEPT),
    "visible is not zero": (f"{LATE} low = {LOW} one = {ONE} mask = Where (late, low, one)", ADDED),
    "by lowest behind a mask": (f"{LATE} {FAR} {MASK}", "z0 = Add (s, padding) z = Add (z0, mask)"),
    "before a mask": (f"{LATE} {NEVER} {MASK}", "z0 = Add (s, mask) z = Add (z0, padding)"),
    "given": ("", "z = Add (s, padding)"),
}  # fmt: skip


FOUR = "four = Constant <value = int64 {4}> ()"
NEAR = f"{POSITIONS} {FOUR} start = Sub (queries, four) near = Greater (keys, start)"
FROM = (
    f"{SQUARE} back = Constant <value = int64 {{-3}}> () zero = Constant <value = int64 {{0}}> ()"
)
# as transformers exports open sizes: a text begins where positions do not go on by one, and
# positions are gathered by the numbers of texts and rows
TEXTS = f"""{POSITIONS} batch = Shape <start = 0, end = 1> (q)
    sizes = Concat <axis = 0> (batch, size) {FOUR}
    places = Expand (keys, sizes) last = Constant <value_ints = [-1]> ()
    start = Slice (places, none, first, first) before = Sub (start, by)
    line = Concat <axis = -1> (before, places) end = Constant <value_ints = [9999]> ()
    later = Slice (line, first, end, first) sooner = Slice (line, none, last, first)
    step = Sub (later, sooner) goes_on = Equal (step, by) jumps = Not (goes_on)
    numbers = Cast <to = 7> (jumps) text = CumSum (numbers, by)
    every = Squeeze (batch, none) texts = Range (from, every, by)
    three = Constant <value_ints = [1, 2, 3]> () two = Constant <value_ints = [0, 1, 3]> ()
    front = Constant <value_ints = [0, 1, 2]> () texts4 = Unsqueeze (texts, three)
    rows4 = Unsqueeze (at, two) columns4 = Unsqueeze (at, front)
    row_sizes = Concat <axis = 0> (batch, first, size, first)
    column_sizes = Concat <axis = 0> (batch, first, first, size)
    texts_a = Expand (texts4, row_sizes) rows_a = Expand (rows4, row_sizes)
    texts_b = Expand (texts4, column_sizes) columns_b = Expand (columns4, column_sizes)
    ta = Unsqueeze (texts_a, last) ra = Unsqueeze (rows_a, last)
    tb = Unsqueeze (texts_b, last) cb = Unsqueeze (columns_b, last)
    ia = Concat <axis = -1> (ta, ra) ib = Concat <axis = -1> (tb, cb)
    text_a = GatherND (text, ia) text_b = GatherND (text, ib) one_text = Equal (text_a, text_b)
    qa = GatherND (places, ia) kb = GatherND (places, ib) begin = Sub (qa, four)
    near = Greater (kb, begin) seen = LessOrEqual (kb, qa) inside = And (near, seen)
    keep = And (one_text, inside)"""
# name: what makes the mask, what the logits are, (left, right), whether the mask is read besides
WINDOWS = {
    "near and not late": (f"""{NEAR} seen = LessOrEqual (keys, queries) keep = And (near, seen)""",
        KEPT, (3, 0), False),
    "of a mask that holds everywhere": (f"""{NEAR}
        everything = Constant <value = bool {{1}}> ()
        first_two = And (everything, near) seen = LessOrEqual (keys, queries)
        both_of = And (first_two, seen) low = {INF} nil = {NIL} mask = Where (both_of, nil, low)""",
        ADDED, (3, 0), False),
    "late or early": (f"""{LATE} {FAR} {FOUR} start = Sub (queries, four)
        early = LessOrEqual (keys, start) out = Or (late, early) mask = Where (out, low, nil)""",
        ADDED, (3, 0), False),
    "one fill after the other": (f"""{LATE} {FAR} mask0 = Where (late, low, nil)
        both = Concat <axis = 0> (size, size)
        yes = Constant <value = float {{1.0}}> () ones = Expand (yes, both)
        behind = Constant <value = int64 {{-4}}> () lower = Trilu <upper = 0> (ones, behind)
        early = Cast <to = 9> (lower) mask = Where (early, low, mask0)""", ADDED, (3, 0), False),
    "two triangles and their logarithm": (f"""{FROM}
        ones = ConstantOfShape <value = float[1] {{1}}> (both)
        lower = Trilu <upper = 0> (ones, zero) inside = Trilu <upper = 1> (lower, back)
        mask = Log (inside)""", ADDED, (3, 0), False),
    "a distance": (f"""{POSITIONS} apart = Sub (queries, keys) distance = Abs (apart)
        two = Constant <value = int64 {{2}}> () near = LessOrEqual (distance, two)
        far = Not (near) low = {LOW} nil = {NIL} mask = Where (far, low, nil)""",
        ADDED, (2, 2), False),
    "less than a distance": (f"""{POSITIONS} apart = Sub (keys, queries) distance = Abs (apart)
        two = Constant <value = int64 {{2}}> () near = Greater (two, distance)""",
        f"low = {LOW} z = Where (near, s, low)", (1, 1), False),
    "of texts by their positions": (TEXTS, KEPT, (3, 0), False),
    "from no index below zero": (f"""{NEAR} seen = LessOrEqual (keys, queries)
        there = GreaterOrEqual (queries, from) inside = And (near, seen)
        keep = And (inside, there)""",
        KEPT, (3, 0), False),
    "not early": (NEAR, f"low = {LOW} z = Where (near, s, low)", (3, -1), False),
    "one key ahead": (f"""{ONES} by = Constant <value = int64 {{1}}> ()
        lower = Trilu <upper = 0> (ones, by) keep = Cast <to = 9> (lower)""", KEPT, (-1, 1), False),
    "a buffer": (BUFFER.replace("triangle", "band") + " keep = Cast <to = 9> (seen)",
        KEPT, (3, 0), False),
    "and padding": (f"""{NEAR} nil = {NIL} low = {INF} some = Greater (padding, nil)
        before = LessOrEqual (keys, queries) inside = And (before, near)
        seen = And (inside, some) mask = Where (seen, nil, low)""", ADDED, (3, 0), True),
    "and padding before the window": (f"""{NEAR} nil = {NIL} low = {INF}
        some = Greater (padding, nil) before = LessOrEqual (keys, queries)
        inside = And (some, before) seen = And (inside, near) mask = Where (seen, nil, low)""",
        ADDED, (3, 0), True),
    "and padding before the window, kept": (f"""{NEAR} nil = {NIL} some = Greater (padding, nil)
        before = LessOrEqual (keys, queries) inside = And (before, some)
        keep = And (near, inside)""",
        f"low = {INF} z = Where (keep, s, low)", (3, 0), True),
}  # fmt: skip
NO_WINDOWS = {  # name: what makes the mask, what the logits are
    "itself too early": (f"""{POSITIONS} seen = LessOrEqual (keys, queries)
        near = Greater (keys, queries) keep = And (near, seen)""", KEPT),
    "two numbers beyond": (f"""{LATE} {FAR} mask0 = Where (late, low, nil) {FOUR}
        start = Sub (queries, four) early = LessOrEqual (keys, start)
        least = Constant <value = float {{-1e38}}> () mask = Where (early, least, mask0)""", ADDED),
    "by lowest and padding": (f"""{NEAR} nil = {NIL} low = {LOW} some = Greater (padding, nil)
        before = LessOrEqual (keys, queries) inside = And (before, near)
        seen = And (inside, some) mask = Where (seen, nil, low)""", ADDED),
    "outside of a band": (f"""{NEAR} seen = LessOrEqual (keys, queries) inside = And (near, seen)
        keep = Not (inside)""", KEPT),
    "of texts that begin anew": (TEXTS.replace("(line, first, end", "(line, none, last"),
        KEPT),
    "squares of positions": (f"""{NEAR} square = Mul (queries, queries) product = Mul (keys, keys)
        seen = LessOrEqual (product, square) keep = And (near, seen)""", KEPT),
    "every second key": (BUFFER.replace("triangle", "stripes") + " keep = Cast <to = 9> (seen)",
        KEPT),
}  # fmt: skip

SIZES = {"q": (2, 3, 9, 8), "k": (2, 3, 9, 8), "v": (2, 3, 9, 8), "padding": (2, 1, 1, 9)}
TRIANGLE = ", ".join("1" if j <= i else "0" for i in range(32) for j in range(32))

BAND = ", ".join("1" if 0 <= i - j <= 3 else "0" for i in range(32) for j in range(32))
STRIPES = ", ".join("1" if (i - j) % 2 == 0 else "0" for i in range(32) for j in range(32))


def model_of(mask: str, logits: str, keys: str = "S") -> ir.Model:
    """Attention of heads of 8 with the mask; `padding` is a further input, `triangle` a buffer."""
    head = '<ir_version: 10, opset_import: ["" : 21]>'
    return load(
        text_model(f"""{head} agraph (float[B,H,S,8] q, float[B,H,{keys},8] k,
        float[B,H,{keys},8] v, float[B,1,1,{keys}] padding) => (float[B,H,S,8] y)
        <float[1,1,32,32] triangle = {{{TRIANGLE}}}, float[1,1,32,32] band = {{{BAND}}},
        float[1,1,32,32] stripes = {{{STRIPES}}}, int64[B,S] later, int64[B,S] sooner,
        int64[B,1] start> {{
        {mask}
        kt = Transpose <perm = [0, 1, 3, 2]> (k)
        s = MatMul (q, kt)
        {logits}
        p = Softmax <axis = -1> (z)
        y = MatMul (p, v) }}""")
    )


def attention_of(model: ir.Model, shapes: dict[str, tuple[int, ...]]) -> Attention:
    program = lower(model, {n: (s, "float32") for n, s in shapes.items()}, CHIPS["H200"])
    (found,) = [c.problem for c in program.calls if getattr(c.problem, "op", "") == "Sdpa"]
    assert isinstance(found, Attention)
    return found


@pytest.mark.parametrize("name", [*PROVED, *READ, *KEPT_AS_THEY_ARE])
def test_a_mask_is_dropped_only_where_it_is_proved_causal(name: str) -> None:
    """With the result of onnxruntime in each case."""
    model = model_of(*(PROVED | READ | KEPT_AS_THEY_ARE)[name])
    feeds = normal(SIZES, 1)
    feeds = {str(v.name): feeds[str(v.name)] for v in model.graph.inputs}
    (expected,) = run(model, feeds, optimized=True)
    rewrite.optimize(model, own_kernels=True)
    problem = attention_of(model, SIZES)
    masks = 2 if "behind" in name or "before" in name else 1
    assert problem.causal == (name in PROVED or name in READ)
    assert sum(bool(strides) for strides in (problem.mask, problem.mask2)) == masks - (
        name in PROVED
    )
    np.testing.assert_allclose(interpreted(model, feeds)["y"], expected, atol=2e-6)


@pytest.mark.parametrize("name", [*WINDOWS, *NO_WINDOWS])
def test_a_window_is_skipped_only_where_it_is_proved(name: str) -> None:
    """In float16, whose kernel knows windows; in float32 the mask is read."""
    mask, logits, window, read = WINDOWS.get(name, (*NO_WINDOWS.get(name, ("", "")), (), True))
    model = model_of(mask, logits)
    sizes = {n: tuple(16 if size == 9 else size for size in s) for n, s in SIZES.items()}
    feeds = normal(sizes, 1)
    feeds["padding"][..., ::3] = 1.0  # each window has a key that is no padding
    feeds = {str(v.name): feeds[str(v.name)] for v in model.graph.inputs}
    (expected,) = run(model, feeds, optimized=True)
    rewrite.optimize(model, own_kernels=True)
    narrow, _ = in_precision(model, "fp16")
    for one, bound, seen in ((model, 2e-6, ()), (narrow, 4e-3, window)):
        program = program_of(one, feeds)
        (problem,) = [c.problem for c in program.calls if isinstance(c.problem, Attention)]
        assert problem.window == seen
        assert bool(problem.mask) == (read or seen == ())
        got = interpret(program, feeds, weights_of(one))["y"]
        np.testing.assert_allclose(got, expected, atol=bound)


def test_a_window_over_all_keys_is_causal() -> None:
    """And one that leaves a query without a key is read as a mask."""
    mask, logits, _, _ = WINDOWS["near and not late"]
    model = model_of(mask, logits, keys="T")
    rewrite.optimize(model, own_kernels=True)
    model, _ = in_precision(model, "fp16")
    for queries, keys, causal, window in ((4, 4, True, ()), (5, 5, False, (3, 0))):
        sizes = {
            "q": (2, 3, queries, 8),
            "padding": (2, 1, 1, keys),
            **dict.fromkeys("kv", (2, 3, keys, 8)),
        }
        found = attention_of(model, sizes)
        assert (found.causal, found.window, found.mask) == (causal, window, ())


ALL = f"""{LENGTH}
    seen = Constant <value = bool[1,1,1,1] {{1}}> ()
    batch = Shape <start = 0, end = 1> (q)
    room = Concat <axis = 0> (batch, first, size, size)
    everywhere = Expand (seen, room)"""
IDLE = {
    "a condition that always holds": (ALL, f"low = {LOW} z = Where (everywhere, s, low)", True),
    "0 wherever it holds": (f"""{ALL} nil = {NIL} low = {INF}
        mask = Where (everywhere, nil, low)""", ADDED, True),
    "zeros": ("zeros = Constant <value = float[1,1,1,1] {0.0}> ()", "z = Add (s, zeros)", True),
    "zeros of more batches than are known": (
        "zeros = Constant <value = float[2,1,1,1] {0.0, 0.0}> ()", "z = Add (s, zeros)", False),
    "a condition that never holds": (
        f"{ALL} none_seen = Not (everywhere)", f"low = {LOW} z = Where (none_seen, s, low)", False),
    "one everywhere": ("ones = Constant <value = float[1,1,1,1] {1.0}> ()", "z = Add (s, ones)",
                       False),
}  # fmt: skip


@pytest.mark.parametrize("name", IDLE)
def test_a_mask_that_hides_nothing_is_no_mask(name: str) -> None:
    mask, logits, idle = IDLE[name]
    model = model_of(mask, logits)
    feeds = normal(SIZES, 1)
    (expected,) = run(model, feeds, optimized=True)
    rewrite.optimize(model, own_kernels=True)
    assert bool(attention_of(model, SIZES).mask) != idle
    np.testing.assert_allclose(interpreted(model, feeds)["y"], expected, atol=2e-6)


@pytest.mark.parametrize("name", [*PROVED, *READ])
def test_the_proof_holds_for_sizes_that_are_open(name: str) -> None:
    model, trace = model_of(*(PROVED | READ)[name]), Trace()
    rewrite.optimize(model, own_kernels=True)
    b, t = trace.symbol("s0", 2), trace.symbol("s1", 9)
    sizes = dict.fromkeys("qkv", (b, 3, t, 8)) | {"padding": (b, 1, 1, t)}
    assert attention_of(model, sizes).causal


def test_a_mask_of_one_element_is_no_triangle() -> None:
    """A proved mask that is broadcast to the scores hides nothing."""
    model = model_of(*PROVED["positions"], keys="T")
    rewrite.optimize(model, own_kernels=True)
    for (queries, keys), causal in (((1, 1), True), ((1, 9), False)):
        sizes = {"q": (2, 3, queries, 8), "padding": (2, 1, 1, keys)}
        sizes |= dict.fromkeys("kv", (2, 3, keys, 8))
        assert attention_of(model, sizes).causal == causal


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 23, reason="onnx has no Attention yet")
@pytest.mark.parametrize(
    ("name", "mask"), [("positions", "mask"), ("queries below", "keep"), ("triu of -inf", "mask")]
)
def test_a_mask_of_the_attention_node_is_proved_too(name: str, mask: str) -> None:
    """Of either kind: numbers that are added, or whether a key is seen."""
    model = text_model(f"""<ir_version: 10, opset_import: ["" : 23]>
        agraph (float[B,3,S,8] q, float[B,3,S,8] k, float[B,3,S,8] v) => (float[B,3,S,8] y) {{
        {PROVED[name][0]}
        y = Attention (q, k, v, {mask}) }}""")
    rewrite.optimize(model, own_kernels=True)
    problem = attention_of(model, {n: SIZES[n] for n in "qkv"})
    assert (problem.causal, problem.mask) == (True, ())


def test_the_gradient_skips_what_the_forward_skips() -> None:
    model = model_of(*PROVED["positions"])
    sizes = {n: s for n, s in SIZES.items() if n != "padding"}
    rewrite.optimize(model, training=True)
    gradient = autodiff.gradient(model, wrt=list(sizes))
    sizes |= {str(v.name): sizes["q"] for v in gradient.graph.inputs if v.name not in sizes}
    program = lower(gradient, {n: (s, "float32") for n, s in sizes.items()}, CHIPS["H200"])
    found = [c.problem for c in program.calls if isinstance(c.problem, Attention)]
    assert [(p.op, p.causal, p.mask) for p in found if "Sdpa" in p.op] == [
        ("Sdpa", True, ()),
        ("SdpaGrad", True, ()),
    ]


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 25, reason="onnx knows no windows yet")
@pytest.mark.parametrize(
    ("attributes", "causal", "window"),
    [
        ("right_window_size = 0", True, ()),
        ("is_causal = 1", True, ()),
        ("is_causal = 1, left_window_size = 2", False, (2, 0)),
        ("left_window_size = 2", False, (2, -1)),
        ("right_window_size = 1", False, (-1, 1)),
        ("left_window_size = 8, right_window_size = 0", True, ()),
    ],
)
def test_an_attention_node_says_its_window(
    attributes: str, causal: bool, window: tuple[int, ...]
) -> None:
    """As it is lowered without a pass before, in float16."""
    model = text_model(f"""<ir_version: 10, opset_import: ["" : 25]>
        agraph (float16[2,3,9,8] q, float16[2,3,9,8] k, float16[2,3,9,8] v) => (float16[2,3,9,8] y)
        {{ y = Attention <{attributes}> (q, k, v) }}""")
    program = lower(model, {n: (SIZES[n], "float16") for n in "qkv"}, CHIPS["H200"])
    (problem,) = [c.problem for c in program.calls if isinstance(c.problem, Attention)]
    assert (problem.causal, problem.window, problem.mask) == (causal, window, ())
