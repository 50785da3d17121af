"""Decoders as onnxruntime-genai writes them: GroupQueryAttention over a cache, without an option.

The lengths that the node is told follow from its caches: a growing cache holds past + new tokens,
a shared buffer is at least as long as the tokens after the call.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir
import pytest
from decoders import slotted
from support import answers, assert_near, formula_model, stock

from onnx_fuse import bench, rewrite
from onnx_fuse.errors import ModelError
from onnx_fuse.importer.save import inline
from onnx_fuse.lower.walk import lower
from onnx_fuse.program.call import Program
from onnx_fuse.program.interpret import interpret
from onnx_fuse.program.problem import CHIPS, Hardware
from onnx_fuse.runtime.specialize import Specializer
from onnx_fuse.session import InferenceSession, load
from onnx_fuse.validation.check import check_outputs
from onnx_fuse.validation.gradients import check_gradients
from onnx_fuse.validation.inputs import Feeds, generate


class Layer(ABC):
    """A layer of attention over a cache, in floats of a kind."""

    kind: str
    ROOM = 0
    """Places of past and present, where these do not grow."""
    SAMPLE = (2, 1, 9)
    """Sequences, new tokens and tokens of before of the program of a GPU."""

    @abstractmethod
    def model(self) -> onnx_ir.Model:
        """One layer, whose inputs `feeds` draws."""

    def feeds(self, batch: int, new: int, past: int, rng: np.random.Generator) -> Feeds | None:
        """Random numbers for each input."""
        sizes = {"B": batch, "S": new, "P": self.ROOM or past, "T": past + new}
        feeds: Feeds = {}
        for value in self.model().graph.inputs:
            dims = [d if isinstance(d, int) else sizes[str(d.value)] for d in value.shape or ()]
            feeds[value.name or ""] = rng.standard_normal(dims).astype(self.dtype)
        return feeds

    @property
    def dtype(self) -> Any:
        return np.float16 if self.kind == "float16" else np.float32

    @property
    def limit(self) -> float:
        """Of differences; float16 rounds rotated keys and the result."""
        return 4e-3 if self.kind == "float16" else 2e-5

    def program(self, hw: Hardware) -> Program:
        """The program of a GPU for SAMPLE."""
        model = load(self.model())
        rewrite.optimize(model, own_kernels=True)
        feeds = self.feeds(*self.SAMPLE, np.random.default_rng(0))
        assert feeds is not None
        return lower(model, shapes_of(feeds), hw, values=values_of(feeds))

    def variants(self, program: Program, hw: Hardware) -> list[Any]:
        """None: each kernel has rows of its own."""
        return []


def shapes_of(feeds: Feeds) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (x.shape, x.dtype.name) for name, x in feeds.items()}


def values_of(feeds: Feeds) -> Feeds:
    """What lowering is told: the number of tokens."""
    return {name: feeds[name] for name in feeds.keys() & {"total"}}


@dataclass(frozen=True)
class Decoder(Layer):
    """One layer of attention: 4 heads of 16 over 2 of keys and values.

    `told` is how the node learns lengths: by inputs of their own, or from an attention mask.
    """

    name: str
    attributes: str = ""
    kind: str = "float"
    packed: bool = True
    cache: str = "growing"  # shared, none
    told: str = "mask"  # vector, scalar
    scales: str = ""  # of a quantized cache: PER_TENSOR, PER_CHANNEL
    steps: str = "int8"  # its type; float8e4m3fn is cast from and to floats, which arrays have
    sink: bool = False

    @property
    def float8(self) -> bool:
        return bool(self.scales) and self.steps != "int8"

    def answers(self, feeds: Feeds) -> Feeds:
        """By onnxruntime; in float32 for a cache in float8, for which its CPU has no kernel."""
        if not self.float8:
            return answers(stock(self.model(), optimized=True), feeds)
        feeds = {n: x.astype("f4") if x.dtype == np.float16 else x for n, x in feeds.items()}
        return answers(stock(inline(load(replace(self, kind="float").model()))), feeds)

    def model(self) -> onnx_ir.Model:
        kind, inputs = self.kind, [f"{self.kind}[B,S,{128 if self.packed else 64}] q"]
        inputs += [] if self.packed else [f"{kind}[B,S,32] {x}" for x in "kv"]
        caches = [] if self.cache == "none" else ["past_k", "past_v"]
        stored = "float" if self.float8 else "int8" if self.scales else kind
        inputs += [f"{stored}[B,2,P,16] {x}" for x in caches]
        body = ""
        if self.told == "mask":
            inputs.append("int64[B,T] attention_mask")
            body = """
                l = Cast <to = 6> (ReduceSum (attention_mask, [1]) - [1])
                total = Cast <to = 6> (Gather (Shape (attention_mask), Constant <value_int = 1> ()))
            """
        else:
            inputs += ["int32[B] l", f"int32{'[1]' if self.told == 'vector' else ''} total"]
        rotary = "do_rotary = 1" in self.attributes
        size = "P" if self.cache == "shared" else "T"
        operands = ["q", *(("", "") if self.packed else "kv"), *(caches or ("", "")), "l", "total"]
        operands += ["cos", "sin"] if rotary else []
        more = self.attributes
        if self.sink:
            inputs += [f"{kind}[4] sink"]
            operands += [""] * (11 - len(operands)) + ["sink"]
        if self.scales:
            inputs += [f"float[{1 if self.scales == 'PER_TENSOR' else 32}] {x}s" for x in "kv"]
            operands += [""] * (12 - len(operands)) + ["ks", "vs"]
            more += "".join(f', {x}_quant_type = "{self.scales}"' for x in "kv")
            more += ", kv_cache_bit_width = 8"
        numbers = np.random.default_rng(0).standard_normal(40 * 8).round(3)
        listed = f"{{{', '.join(map(str, numbers))}}}"
        tables = [f"float[40,8] {x}_table = {listed}" for x in operands[7:9] if rotary]
        to = 10 if kind == "float16" else 1
        body += "".join(f"{x} = Cast <to = {to}> ({x}_table)\n" for x in operands[7:9] if rotary)
        after = ["present_k", "present_v"]
        if self.float8:
            body += "".join(f"{x}8 = Cast <to = 17> ({x})\n" for x in caches)
            operands = [f"{x}8" if x in caches else x for x in operands]
            after = [f"{x}8" for x in after]
        return formula_model(f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
            decoder ({", ".join(inputs)}) => ({kind}[B,S,64] y,
                {stored}[B,2,{size},16] present_k, {stored}[B,2,{size},16] present_v)
            {"<" + ", ".join(tables) + ">" if tables else ""} {{
            {body}
            y, {", ".join(after)} = com.microsoft.GroupQueryAttention
                <num_heads = 4, kv_num_heads = 2 {more}> ({", ".join(operands)})
            {"".join(f"present_{x} = Cast <to = 1> (present_{x}8) " for x in "kv" * self.float8)}
        }}""")

    @property
    def SAMPLE(self) -> tuple[int, int, int]:
        return (3, 4, 0) if self.cache == "none" else (2, 1, 39)

    def feeds(self, batch: int, new: int, past: int, rng: np.random.Generator) -> Feeds | None:
        """Sequences of lengths of their own; None where the row has none such."""
        if (self.cache == "none") != (past == 0):
            return None

        def random(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(self.dtype)

        total = past if self.cache == "shared" else past + new
        last = rng.integers(new - 1, total, batch)
        last[0] = total - 1
        feeds: Feeds = {"q": random(batch, new, 128 if self.packed else 64)}
        feeds |= {} if self.packed else {x: random(batch, new, 32) for x in "kv"}
        feeds |= {x: random(batch, 2, past, 16) for x in ("past_k", "past_v")} if past else {}
        if self.sink:
            feeds["sink"] = np.array([-np.inf, -1, 0.5, 9], self.dtype)
        if self.scales:
            kept = "f4" if self.float8 else "i1"
            feeds |= {x: (40 * feeds[x]).clip(-128, 127).astype(kept) for x in ("past_k", "past_v")}
            count = 1 if self.scales == "PER_TENSOR" else 32
            feeds |= {f"{x}s": 2.0 ** -rng.integers(4, 7, count).astype("f4") for x in "kv"}
            new = feeds["q"][..., 64:] if self.packed else feeds["v"]
            new[-1, -1, -1], new[0, -1, -2:-1] = np.nan, 6e4  # beyond every step
            feeds["ks"][1:2] = feeds["vs"][3:5] = 0
        if self.told == "mask":
            mask = np.arange(total) <= last[:, None]
            return feeds | {"attention_mask": mask.astype(np.int64)}
        length = np.array(total, np.int32).reshape([1] * (self.told == "vector"))
        return feeds | {"l": last.astype(np.int32), "total": length}


ROTARY, WINDOW = ", do_rotary = 1", ", local_window_size = 3"
SOFTCAP = ", softcap = 5.0"
DECODERS = [
    Decoder("packed", ROTARY),
    Decoder("in pairs", ROTARY + ", rotary_interleaved = 1", packed=False),
    Decoder("without rotary", packed=False),
    Decoder("window", ROTARY + WINDOW),
    Decoder("softcap", ROTARY + ", softcap = 5.0, scale = 0.3"),
    Decoder("smooth", ROTARY + ", smooth_softmax = 1"),
    Decoder("shared buffer", ROTARY, cache="shared"),
    Decoder("shared buffer, all", ROTARY + WINDOW + ", softcap = 5.0, smooth_softmax = 1",
            packed=False, cache="shared"),
    Decoder("prompt", ROTARY, cache="none"),
    Decoder("float16", kind="float16", cache="shared"),
    Decoder("lengths given", ROTARY, told="vector"),
    Decoder("lengths given, a scalar", ROTARY + WINDOW, packed=False, told="scalar"),
    Decoder("lengths given, shared buffer", ROTARY, cache="shared", told="vector"),
    Decoder("lengths given, prompt", cache="none", told="scalar"),
]  # fmt: skip


QUANTIZED = [
    Decoder("int8", ROTARY, scales="PER_TENSOR"),
    Decoder("int8 of channels", ROTARY, packed=False, told="vector", scales="PER_CHANNEL"),
    Decoder("int8 of channels float16", ROTARY, "float16", cache="shared", scales="PER_CHANNEL"),
    Decoder("int8, window", WINDOW, "float16", told="scalar", scales="PER_TENSOR"),
    Decoder("int8, sinks", WINDOW + SOFTCAP, "float16", cache="shared", scales="PER_TENSOR",
            sink=True),
    Decoder("float8", ROTARY, scales="PER_TENSOR", steps="float8e4m3fn"),
    Decoder("float8 of channels", ROTARY + WINDOW, packed=False, cache="shared",
            scales="PER_CHANNEL", steps="float8e4m3fn"),
    Decoder("float8 of channels float16", WINDOW + ", softcap = 5.0", "float16", cache="shared",
            told="vector", scales="PER_CHANNEL", steps="float8e4m3fn"),
]  # fmt: skip
TURNED_FLOAT8 = Decoder("float8 float16, rotated", ROTARY, "float16", cache="shared",
                        scales="PER_CHANNEL", steps="float8e4m3fn")  # fmt: skip
"""Its rotated keys are rounded to float16 once; onnxruntime rounds in the middle as well."""


@pytest.mark.parametrize("row", DECODERS, ids=lambda d: d.name)
def test_the_lengths_follow_from_the_caches(row: Decoder) -> None:
    """Generated inputs, onnxruntime's kernel against the body, the program of a GPU, gradients."""
    model = load(row.model())
    check = check_outputs(model, inline(model))
    assert check.ok, check.worst
    assert not any("refused" in note for note in check.notes)
    seen = set()
    for feed, _ in generate(model, lambda f: [np.ones(1)]):
        batch, new = feed["q"].shape[:2]
        past = feed["past_k"].shape[2] if "past_k" in feed else 0
        total = told(feed)
        assert total <= past if row.cache == "shared" else total == past + new
        assert row.cache == "none" or batch == 1 or new == 1  # onnxruntime takes no other
        seen.add((batch > 1, new > 1))
    assert row.cache == "none" or seen == {(True, False), (False, True)}
    assert bench.program(model, CHIPS["H200"]).calls
    assert row.kind == "float16" or check_gradients(model).ok


def test_a_cpu_without_the_kernel_of_a_float8_cache_says_so() -> None:
    row = next(x for x in QUANTIZED if x.float8)
    with pytest.raises(ModelError, match=r"CPU cannot run .* types of GroupQueryAttention"):
        InferenceSession(row.model(), device="cpu").get_inputs()


@pytest.mark.parametrize("row", [x for x in QUANTIZED if not x.float8], ids=lambda row: row.name)
def test_a_quantized_cache_takes_any_scale(row: Decoder) -> None:
    """Generated inputs, with scales of 0, negative and tiny ones."""
    model = load(row.model())
    check = check_outputs(model, inline(model))
    assert check.ok, check.worst


def told(feed: Feeds) -> int:
    """The number of tokens after the call; each sequence ends before it."""
    if "attention_mask" in feed:
        return feed["attention_mask"].shape[1]
    total = int(feed["total"].item())
    assert feed["l"].max() == total - 1
    assert feed["l"].min() >= 0
    return total


HALF = [
    *(
        replace(row, name=f"float16 {row.name}", kind="float16", attributes=attributes)
        for row, attributes in (
            (Decoder("packed"), ROTARY), (Decoder("apart", packed=False), ROTARY),
            (Decoder("window", cache="shared"), ROTARY + WINDOW),
            (Decoder("neighbours"), ROTARY + ", rotary_interleaved = 1"),
            (Decoder("softcap", cache="shared", told="vector"), ROTARY + ", softcap = 5.0"),
            (Decoder("smooth", cache="shared"), ROTARY + WINDOW + ", smooth_softmax = 1"),
            (Decoder("sinks", sink=True), WINDOW), (Decoder("sinks, softcap", sink=True), SOFTCAP),
        )
    ),
]  # fmt: skip
BATCHES = ((1, 1, 9), (3, 1, 20), (2, 1, 39), (1, 3, 12), (1, 5, 0), (3, 4, 0))
"""Sequences, new tokens and places of the past."""


def lengths_of(feeds: Feeds) -> np.ndarray:
    """The tokens of each sequence after the call."""
    lengths: np.ndarray = (
        feeds["attention_mask"].sum(1) if "attention_mask" in feeds else feeds["l"] + 1
    )
    return lengths


def agree(
    row: Layer, seed: int, growth: Iterable[tuple[int, int, int]]
) -> Iterator[tuple[Feeds, Program, tuple[int, int, int]]]:
    """Inputs and a program for each of `growth`, whose results are compared with onnxruntime's.

    For two sequences also the program over closed sizes.
    """
    rng, theirs = np.random.default_rng(seed), stock(row.model(), optimized=True)
    model = load(row.model())
    specializer, weights = program_of(model)
    for sizes in growth:
        if (feeds := row.feeds(*sizes, rng)) is None:
            continue
        spoil(row, feeds)
        shapes = shapes_of(feeds)
        programs = [specializer.of(shapes).program]
        programs += [lower(model, shapes, CHIPS["H200"])] if sizes[0] == 2 else []
        wanted = answers(theirs, feeds)
        for program in programs:
            yield feeds, program, sizes
            assert not program.fallbacks
            got = interpret(program, feeds, weights)
            assert_near(got, wanted, rtol=row.limit, atol=row.limit)


def spoil(row: Layer, feeds: Feeds) -> None:
    """NaN in a sequence stays there."""
    if isinstance(row, Exported | Fixed):
        feeds["k"][-1, -1] = feeds["v"][-1, 0] = np.nan
    if isinstance(row, Fixed) and feeds["q"].shape[2] > 2 and row.form == "copy":
        feeds["at"][1] = feeds["at"][0]  # the later one stays


def problems(program: Program) -> list[str]:
    return [c.problem.op for c in program.calls if c.problem is not None]


def program_of(model: onnx_ir.Model) -> tuple[Specializer, Feeds]:
    """The programs of a GPU over open sizes, and the model's weights."""
    rewrite.optimize(model, own_kernels=True)
    weights = model.graph.initializers.items()
    return Specializer(model, CHIPS["H200"]), {k: v.const_value.numpy() for k, v in weights}


def rotated(x: str, rows: str, cos: str, sin: str, width: int = 16) -> str:
    """Lines that make {x}r of the rows of q or k, of which the first `width` numbers turn."""
    first, result = (rows, f"{x}r") if width == 16 else (f"{x}_first", f"{x}_turned")
    cut = f"{x}_first, {x}_rest = Split <axis = -1> ({rows}, [{width}, {16 - width}])"
    join = f"{x}r = Concat <axis = -1> ({x}_turned, {x}_rest)"
    return f"""
        {cut if width < 16 else ""}
        {x}a, {x}z = Split <axis = -1, num_outputs = 2> ({first})
        {result} = {first} * {cos} + Concat <axis = -1> (Neg ({x}z), {x}a) * {sin}
        {join if width < 16 else ""}
    """


@dataclass(frozen=True)
class Exported(Layer):
    """One layer of attention as PyTorch's exporters write it: Concats of past and new tokens.

    Of `tables`, those of each sequence's positions or of one, q and k are rotated; "apart" has
    other tables for k. `width`: the numbers of a head that turn. `repeats`: 4 heads of q over 2 of
    keys. `normed`: an RMSNorm of each head of q and k goes before.
    """

    name: str
    kind: str = "float"
    tables: str = ""  # each, one, apart
    repeats: bool = False
    normed: bool = False
    masked: bool = True
    width: int = 16
    SAMPLE = (2, 2, 39)

    def model(self) -> onnx_ir.Model:
        kind, heads = self.kind, 2 if self.repeats else 4
        inputs = [f"{kind}[B,S,64] q", *(f"{kind}[B,S,{16 * heads}] {x}" for x in "kv")]
        inputs += [f"{kind}[B,{heads},P,16] {x}" for x in ("past_k", "past_v")]
        inputs += [f"{kind}[B,1,S,T] mask"] if self.masked else []
        body = ""
        for x, count in (("q", 4), ("k", heads), ("v", heads)):
            body += f"{x}3 = Reshape ({x}, [0, 0, {count}, 16])\n"
            rows = f"{x}3"
            if self.normed and x in "qk":
                rows = f"{x}_normed"
                scale = [round(1.5 - 0.1 * i, 1) for i in range(16)]
                to = 10 if kind == "float16" else 1
                body += f"""
                    {x}_scale = Cast <to = {to}> (Constant <value_floats = {scale}> ())
                    {x}_wide = Cast <to = 1> ({x}3)
                    {x}_mean = ReduceMean <keepdims = 1> ({x}_wide * {x}_wide, [-1])
                    {rows} = {x}_scale * CastLike ({x}_wide / Sqrt ({x}_mean + 1e-3), {x}3)
                """
            body += f"{x}4 = Transpose <perm = [0, 2, 1, 3]> ({rows})\n"
        new = {"k": "k4", "v": "v4"}
        if self.tables:
            names = ["cos", "sin", *(("cos2", "sin2") if self.tables == "apart" else ())]
            rows = "1" if self.tables == "one" else "B"
            inputs += [f"{kind}[{rows},S,{self.width}] {x}" for x in names]
            body += "".join(f"{x}4 = Unsqueeze ({x}, [1])\n" for x in names)
            for x, (cos, sin) in zip("qk", (names[:2], names[-2:]), strict=True):
                body += rotated(x, f"{x}4", f"{cos}4", f"{sin}4", self.width)
            new["k"] = "kr"
        for x in "kv":
            body += f"present_{x} = Concat <axis = -2> (past_{x}, {new[x]})\n"
            body += (
                f"{x}7 = Identity (present_{x})\n"
                if not self.repeats
                else f"""
                {x}b = Shape <end = 1> ({x}4)
                {x}l = Shape <start = 2, end = 3> (past_{x}) + Shape <start = 2, end = 3> ({x}4)
                {x}w = Concat <axis = 0> ({x}b, [2], [2], {x}l, [16])
                {x}6 = Expand (Unsqueeze (present_{x}, [2]), {x}w)
                {x}7 = Reshape ({x}6, Concat <axis = 0> ({x}b, [4], {x}l, [16]))
            """
            )
        return formula_model(f"""<ir_version: 10, opset_import: ["" : 21]>
            exported ({", ".join(inputs)}) => ({kind}[B,S,64] y,
                {kind}[B,{heads},R,16] present_k, {kind}[B,{heads},R,16] present_v) {{
            {body}
            kt = Transpose <perm = [0, 1, 3, 2]> (k7)
            z = 0.25 * MatMul ({"qr" if self.tables else "q4"}, kt)
            p = Softmax <axis = -1> ({"z + mask" if self.masked else "z"})
            y = Reshape (Transpose <perm = [0, 2, 1, 3]> (MatMul (p, v7)), [0, 0, 64])
        }}""")

    def feeds(self, batch: int, new: int, past: int, rng: np.random.Generator) -> Feeds:
        """Sequences that are padded at the left, the first by none."""
        feeds = super().feeds(batch, new, past, rng)
        place, column = past + np.arange(new)[:, None], np.arange(past + new)
        padding = np.minimum(np.arange(batch), past)[:, None, None, None]
        if self.masked:
            hidden = (column > place) | (column < padding)
            feeds["mask"] = np.where(hidden, -1e4, 0).astype(self.dtype)
        return feeds


EXPORTED = [
    Exported("growing"),
    Exported("growing, rotated", tables="each"),
    Exported("growing, rotated by one table, repeated", tables="one", repeats=True),
    Exported("growing, rotated apart", tables="apart"),
    Exported("growing float16", "float16", repeats=True),
    Exported("growing float16, rotated", "float16", tables="each", repeats=True),
    Exported("growing, norms", tables="each", normed=True),
    Exported("growing float16, norms", "float16", tables="one", repeats=True, normed=True),
    Exported("growing, partly rotated", tables="each", width=12),
    Exported("growing float16, partly rotated", "float16", tables="each", width=4, repeats=True),
    Exported("growing, norms, partly rotated", tables="each", normed=True, width=8),
]
ROOMY = [
    Exported("plain", "float16", masked=False),
    Exported("rotated", "float16", tables="each", repeats=True, masked=False),
    Exported("norms", "float16", tables="one", repeats=True, normed=True, masked=False),
    Exported("partly rotated", "float16", tables="each", masked=False, width=8),
]
"""Caches that have room behind, for one new token each."""
GROWTH = tuple(itertools.product((1, 2, 3), (1, 2, 5), (0, 1, 9)))
"""Sequences, new tokens and tokens of before."""


@pytest.mark.parametrize("row", EXPORTED, ids=lambda row: row.name)
def test_a_growing_cache_is_one_launch(row: Exported) -> None:
    """Programs over open sizes and over closed ones; NaN in a sequence stays there."""
    for _, program, _ in agree(row, 4, GROWTH):
        assert problems(program)[-2:] == ["CacheAppend", "Sdpa"]
        assert len(problems(program)) == 2 or row.tables in ("one", "apart")


@dataclass(frozen=True)
class Fixed(Layer):
    """Attention over a buffer of 15 places, into which new rows are written as exporters do it.

    `form`: "put" is torch's index_put (dynamo), "copy" its index_copy (TorchScript), "scatter" its
    scatter by places of each sequence's own, "linear" and "circular" are TensorScatter's,
    "coordinates" is index_put by TorchScript; in "swapped" it changes the heads.
    """

    name: str
    form: str = "copy"
    kind: str = "float"
    rotated: bool = False
    told: str = "mask"  # lengths, causal: how Attention learns which keys there are
    ROOM, SAMPLE = 15, (2, 2, 9)

    def model(self) -> onnx_ir.Model:
        kind, each = self.kind, self.form in ("scatter", "each")
        inputs = [f"{kind}[B,4,S,16] q", *(f"{kind}[B,S,32] {x}" for x in "kv")]
        masked = self.told == "mask"
        inputs += [f"{kind}[B,2,P,16] {x}" for x in ("past_k", "past_v")]
        inputs += [f"{kind}[B,1,S,P] m" if masked else "int64[B] m"]
        starts = self.form in ("linear", "circular")
        inputs += [f"int64[{'B,S' if each else 'B' if starts else 'S'}] at"]
        inputs += [f"{kind}[1,1,S,16] {x}" for x in ("cos", "sin")] if self.rotated else []
        body = ""
        for x in "kv":
            body += f"{x}4 = Transpose <perm = [0, 2, 1, 3]> (Reshape ({x}, [0, 0, 2, 16]))\n"
        new = {"q": "q", "k": "k4", "v": "v4"}
        for x, y in (("q", "q"), ("k", "k4")) if self.rotated else ():
            body += rotated(x, y, "cos", "sin")
            new[x] = f"{x}r"
        for x in "kv":
            n, past, present = new[x], f"past_{x}", f"present_{x}"
            if self.form == "put":
                body += f"""
                    {x}p = Transpose <perm = [2, 0, 1, 3]> ({past})
                    {x}u = Transpose <perm = [2, 0, 1, 3]> ({n})
                    {x}s = ScatterND ({x}p, Unsqueeze (at, [1]), {x}u)
                    {present} = Transpose <perm = [1, 2, 0, 3]> ({x}s)
                """
            elif self.form in ("coordinates", "swapped"):
                heads = "1, 0" if self.form == "swapped" else "0, 1"
                body += f"""
                    {x}zero = Constant <value_int = 0> ()
                    {x}one = Constant <value_int = 1> ()
                    {x}range = Range ({x}zero, Squeeze (Shape <end = 1> ({past})), {x}one)
                    {x}batch = Reshape ({x}range, [-1, 1, 1])
                    {x}heads = Constant <value = int64[2,1] {{{heads}}}> ()
                    {x}lead = Concat <axis = 0> (Shape <end = 2> ({past}), Shape (at))
                    {x}i0 = Unsqueeze (Expand ({x}batch, {x}lead), [-1])
                    {x}i1 = Unsqueeze (Expand ({x}heads, {x}lead), [-1])
                    {x}i2 = Unsqueeze (Expand (at, {x}lead), [-1])
                    {x}u = Reshape ({n}, Concat <axis = 0> ({x}lead, [16]))
                    {present} = ScatterND ({past}, Concat <axis = -1> ({x}i0, {x}i1, {x}i2), {x}u)
                """
            elif starts:
                body += f'{present} = TensorScatter <mode = "{self.form}"> ({past}, {n}, at)\n'
            else:
                index = f"Unsqueeze (at, {[1, 3] if each else [0, 1, 3]})"
                rows = f"{past}, Expand ({index}, Shape ({n})), {n}"
                body += f"{present} = ScatterElements <axis = 2> ({rows})\n"
        causal, mask = int(self.told == "causal"), "m" if masked else ", , , m"
        return formula_model(f"""<ir_version: 11, opset_import: ["" : 24]>
            fixed ({", ".join(inputs)}) => ({kind}[B,4,S,16] y,
                {kind}[B,2,P,16] present_k, {kind}[B,2,P,16] present_v) {{
            {body}
            y = Attention <scale = 0.25, is_causal = {causal}>
                ({new["q"]}, present_k, present_v, {mask})
        }}""")

    def feeds(self, batch: int, new: int, past: int, rng: np.random.Generator) -> Feeds:
        """Each sequence has tokens of its own number before, or all as many."""
        room, feeds = self.ROOM, super().feeds(batch, new, past, rng)
        before = np.minimum(past + np.arange(batch), room - new)
        before = before if self.form in ("scatter", "linear", "circular") else before[:1]
        at = before[:, None] + np.arange(new)
        low = np.where(np.arange(room) <= at[:, :, None], 0, -np.inf).astype(self.dtype)[:, None]
        feeds["m"] = np.broadcast_to(low, (batch, 1, new, room)).copy()
        if self.told != "mask":
            feeds["m"] = np.broadcast_to(at[:, -1] + 1, batch).copy()
        if self.form == "circular":
            feeds["at"] = before + room - 2  # round the end
        elif self.form == "linear":
            feeds["at"] = before
        else:
            at[:, ::2] -= room  # from the end, the same place
            feeds["at"] = at if self.form == "scatter" else at[0]
        return feeds


FIXED = [
    Fixed("index_copy"),
    Fixed("index_copy, rotated", rotated=True),
    Fixed("index_put, rotated", "put", rotated=True),
    Fixed("scatter", "scatter"),
    Fixed("scatter, rotated float16", "scatter", "float16", rotated=True),
    Fixed("index_put float16", "put", "float16"),
    Fixed("coordinates, rotated", "coordinates", rotated=True),
    Fixed("coordinates float16", "coordinates", "float16"),
    Fixed("other heads", "swapped"),
    Fixed("TensorScatter", "linear", rotated=True),
    Fixed("TensorScatter, circular float16", "circular", "float16"),
    Fixed("TensorScatter and lengths", "linear", told="lengths"),
    Fixed("TensorScatter and lengths, causal float16", "linear", "float16", told="causal"),
]


@pytest.mark.parametrize("row", FIXED, ids=lambda row: row.name)
def test_a_cache_of_a_fixed_size_is_one_launch(row: Fixed) -> None:
    """An empty, a partly filled and a full buffer; NaN in a sequence stays there."""
    for _, program, (_, new, _) in agree(row, 6, (*GROWTH, (3, 2, 13), (2, 15, 0))):
        calls = [(c.problem.op, len(c.inplace)) for c in program.calls if c.problem is not None]
        if new == 1 and row.kind == "float16" and row.told != "causal":
            assert calls[-1] == ("CachedAttention", 2)
            assert ("CacheAppend", 2) not in calls
            continue
        assert calls[-1] == ("Sdpa", 0)
        assert calls.count(("CacheAppend", 2)) == (row.form != "swapped")


@dataclass(frozen=True)
class Buffered(Layer):
    """Attention over a buffer that past and present share: 4 heads of 16, all as full."""

    name: str
    operator: str = "MultiHeadAttention"
    attributes: str = ""
    kind: str = "float"
    bias: bool = False
    ROOM = 15

    def model(self) -> onnx_ir.Model:
        kind, alone = self.kind, self.operator.startswith("Decoder")
        inputs = [f"{kind}[B,{1 if alone else 'S'},64] {x}" for x in "qkv"]
        inputs += [f"{kind}[B,4,P,16] {x}" for x in ("past_k", "past_v")]
        inputs += ["int32[1] before", *([f"{kind}[192] bias"] if self.bias else [])]
        bias = "bias" if self.bias else ""
        places = ["", "", "past_k", "past_v", "before", "", "", bias]
        places = places if alone else [bias, "", "", "past_k", "past_v", "before"]
        return formula_model(f"""<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
            buffered ({", ".join(inputs)}) => ({kind}[B,S,64] y,
                {kind}[B,4,P,16] present_k, {kind}[B,4,P,16] present_v) {{
            y, present_k, present_v = com.microsoft.{self.operator}
                <num_heads = 4 {self.attributes}> (q, k, v, {", ".join(places)})
        }}""")

    def feeds(self, batch: int, new: int, past: int, rng: np.random.Generator) -> Feeds:
        """What stands behind the tokens of before is not a number."""
        feeds = super().feeds(batch, new, past, rng)
        for name in ("past_k", "past_v"):
            feeds[name][:, :, past:] = np.nan
        return feeds | {"before": np.array([past], np.int32)}


ALONE = ("DecoderMaskedMultiHeadAttention", ", past_present_share_buffer = 1")
BUFFERED = [
    Buffered("buffer float16", kind="float16"),
    Buffered("buffer float16, a token", *ALONE, kind="float16"),
    Buffered("buffer float16, scale", *ALONE[:1], ALONE[1] + ", scale = 0.5", "float16"),
    Buffered("buffer"),
    Buffered("buffer, causal", attributes=", unidirectional = 1"),
    Buffered("buffer, a token and a bias", *ALONE, bias=True),
]


@pytest.mark.parametrize("row", BUFFERED, ids=lambda row: row.name)
def test_a_shared_buffer_needs_no_onnxruntime(row: Buffered) -> None:
    growth = [sizes for sizes in GROWTH if sizes[1] == 1 or "Decoder" not in row.operator]
    for _, program, (_, new, _) in agree(row, 8, growth):
        one = new == 1 and row.kind == "float16"
        assert (problems(program)[-1] == "CachedAttention") == one


@pytest.mark.parametrize("row", [*DECODERS, *QUANTIZED, *HALF], ids=lambda row: row.name)
def test_each_sequence_of_a_program_is_the_one_of_onnxruntime(row: Decoder) -> None:
    """Sequences of lengths of their own; what stands behind their ends is nobody's."""
    rng, count = np.random.default_rng(3), 0
    specializer, weights = program_of(load(row.model()))
    for sizes in BATCHES:
        if (feeds := row.feeds(*sizes, rng)) is None:
            continue
        program = specializer.of(shapes_of(feeds), values_of(feeds)).program
        assert not program.fallbacks
        if row.scales and row.kind == "float16" and sizes[1] == 1:
            assert "GatherND" not in problems(program)
            assert [c.problem.cache for c in program.calls if hasattr(c.problem, "lengths")] == [
                row.steps.replace("8e", "8_e")
            ]
        got = interpret(program, feeds, weights)
        for name, wanted in row.answers(feeds).items():
            assert got[name].shape == wanted.shape
            for b, length in enumerate(lengths_of(feeds)):
                part = b if name == "y" else (b, slice(None), slice(length))
                x, y, limit = got[name][part], wanted[part], row.limit
                np.testing.assert_allclose(x, y, rtol=limit, atol=limit, err_msg=f"{name} {b}")
        count += 1
    assert count >= 2


def test_a_token_more_needs_no_new_program() -> None:
    """The mask grows by a token each run, and the length reaches the node as int32."""
    specializer, _ = program_of(load(Decoder("", ROTARY, "float16", cache="shared").model()))
    for total in range(1001, 1011):
        shapes = {"q": ((1, 1, 128), "float16"), "attention_mask": ((1, total), "int64")}
        shapes |= dict.fromkeys(("past_k", "past_v"), ((1, 2, 2048, 16), "float16"))
        program = specializer.of(shapes).program
    assert specializer.traced <= 2  # rows of the mask that are pairs, and those that are not
    assert problems(program)[-1] == "CachedAttention"


def test_products_of_every_layer_are_merged() -> None:
    """The sizes of a layer follow from those of the layer before, through its cached attention."""
    fused = rewrite.optimize(load(slotted(layers=6)), own_kernels=True).fusions
    assert (fused["MergedGemm"], fused["RMSNormGateFirstGemmSilu"]) == (6, 6)
