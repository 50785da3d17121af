"""Names that several test files share."""

import dataclasses
import fnmatch
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import chain, product
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import typer.main

from onnx_fuse import cli
from onnx_fuse.cuda.source import source_text
from onnx_fuse.importer.save import to_proto
from onnx_fuse.ir.build import text_model
from onnx_fuse.ops.formula import written_out
from onnx_fuse.rewrite import Report

# made once, not for each command that a test runs: it reads the signatures of all commands
typer.main.get_command = cache(typer.main.get_command)

ENCODER = Path(__file__).parent.parent / "models" / "encoder.onnx"


@dataclass(frozen=True)
class Result:
    """What one call of the command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


class Cli:
    """`cli("optimize", path, "--explain")` runs the command in this process."""

    last: Result
    """That of the latest call."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.capsys, self.folder = capsys, folder

    def __call__(self, *arguments: object) -> Result:
        self.capsys.readouterr()
        code = cli.run_command(cli.expand([str(a) for a in arguments]))
        self.last = Result(code, *self.capsys.readouterr())
        return self.last

    def report(self, *arguments: object, code: int = 0) -> dict[str, Any]:
        """What a command that ends with this exit code writes for --json."""
        path = self.folder / "r.json"
        result = self(*arguments, "--json", path)
        assert result.code == code, result
        return json.loads(path.read_text())

    def done(self, *arguments: object) -> str:
        """What a command prints that ends with exit code 0."""
        result = self(*arguments)
        assert result.code == 0, result
        return result.out

    def fails(self, code: int, *arguments: object) -> str:
        """The errors of a command that ends with this exit code."""
        result = self(*arguments)
        assert result.code == code, result
        return result.err

    def line(self, code: int, *arguments: object) -> str:
        """The same, which is one line."""
        err = self.fails(code, *arguments)
        assert err.count("\n") == 1, err
        return err


ENTRY = re.compile(r"(?m)^(?!#)(\S.*?):(?: (.*(?:(?<=[,;|])\n.*)*))?\n((?:  .*\n)+)")


def python(code: str) -> str:
    """What the code prints in an interpreter of its own."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def entries(text: str) -> Iterator[tuple[str, str, str]]:
    """(name, header, body) of each `name: header` and the indented lines below it.

    A header goes on in the next line behind a comma, ; or |. Lines that start with # are
    comments. An entry whose header ends in `; op in Add Mul; low, high in 0 1 | 2 3` stands for one
    of each combination, with $op, $low and $high in its parts.
    """
    rest = re.sub(r"(?m)^#.*$", "", ENTRY.sub("", text)).strip()
    assert not rest, f"no entry: {rest}"
    for name, header, body in ENTRY.findall(text):
        body = "\n".join(line.strip() for line in body.splitlines())
        header, *loops = re.split(r";\s+(?=\w+(?:, \w+)* in )", header)
        names = [name for loop in loops for name in loop.split(" in ")[0].split(", ")]
        for values in product(*map(_choices, loops)):
            words = dict(zip(names, chain(*values), strict=True))
            parts = [Template(part).safe_substitute(words) for part in (name, header, body)]
            yield tuple(parts) if loops else (name, header, body)


def _choices(loop: str) -> list[list[str]]:
    """[["0", "1"], ["2", "3"]] of "low, high in 0 1 | 2 3"; a | may be left out of single words."""
    names, values = loop.split(" in ", 1)
    if more := names.count(","):
        rows = [value.strip().split(None, more) for value in values.split("|")]
        return [[*row, *[""] * (more + 1 - len(row))] for row in rows]
    return [[value.strip()] for value in values.split("|" if "|" in values else None)]


def table(scope: dict[str, Any], at: int = 0) -> Callable[[str], dict[str, Any]]:
    """Reads rows by name: the header's values, in terms of `scope`, with the body in place `at`,
    and last the text behind a line's `-> `; or the body alone where there is nothing else. $NAME in
    the body stands for a text of `scope`.
    """

    def read(text: str) -> dict[str, Any]:
        rows = {}
        for name, header, body in entries(text):
            values = eval(f"[{header}]", scope)
            body, arrow, last = body.partition("\n-> ")
            values.insert(at, Template(body.replace("\n", " ")).substitute(scope))
            values += [last.replace("\n", " ")] if arrow else []
            assert name not in rows, f"two entries {name}"
            rows[name] = tuple(values) if len(values) > 1 else values[0]
        return rows

    return read


def says(report: Report, reason: str) -> bool:
    """Whether nodes stayed for a reason, "code" or "code: words of its values"; "" is any."""
    code, _, words = reason.partition(": ")
    return not reason or any(r.code == code and words in r.reason for r in report.not_fused)


def with_weights(
    model: onnx_ir.Model, weights: Mapping[str, Any] | Callable[[onnx_ir.Value], Any]
) -> onnx_ir.Model:
    """The model, with arrays by name in place of its inputs, or of what nothing declares; a
    function gives one for each input but the first.
    """
    inputs = model.graph.inputs
    read = [v for node in model.graph for v in node.inputs if v is not None and not v.producer()]
    values = inputs[1:] if callable(weights) else [*inputs, *read]
    for value in dict.fromkeys(values):
        if callable(weights) or value.name in weights:
            array = weights(value) if callable(weights) else weights[value.name or ""]
            value.const_value = onnx_ir.tensor(np.asarray(array), name=value.name)
            value.type = value.type or onnx_ir.TensorType(value.const_value.dtype)
            value.shape = value.shape or onnx_ir.Shape(np.shape(array))
            if value in inputs:
                inputs.remove(value)
            model.graph.register_initializer(value)
    return model


def stock(
    model: onnx_ir.Model | onnx.ModelProto | bytes | str | Path, optimized: bool = False
) -> onnxruntime.InferenceSession:
    """onnxruntime on one thread, quiet, and node by node as the model has them unless optimized."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if isinstance(model, onnx_ir.Model | onnx.ModelProto):
        proto = model if isinstance(model, onnx.ModelProto) else to_proto(model)
        model = proto.SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run(model: Any, feeds: Mapping[str, Any], optimized: bool = False) -> list[Any]:
    """The outputs by `stock`; feeds that are no inputs are left out."""
    return list(answers(stock(model, optimized), feeds).values())


def step_of(model: Any, optimizer: Any) -> Callable[..., Any]:
    """A step of training with cross-entropy, on tensors of `onnx_fuse.nn`."""
    from onnx_fuse.nn import functional

    def step(x: Any, y: Any) -> Any:
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def answers(session: onnxruntime.InferenceSession, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """The outputs by name; feeds that are no inputs are left out."""
    names = [value.name for value in session.get_outputs()]
    given = {value.name: feeds[value.name] for value in session.get_inputs() if value.name in feeds}
    return dict(zip(names, session.run(names, given), strict=True))


@cache
def sums_saturate() -> bool:
    """Whether onnxruntime sums products of uint8 and int8 in 16 bits, as on CPUs without VNNI."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["" : 17]>
      g (uint8[1,64] a, int8[64,16] b) => (int32[1,16] y) { y = MatMulInteger(a, b) }""")
    feeds = {"a": np.full((1, 64), 255, np.uint8), "b": np.full((64, 16), 127, np.int8)}
    return bool((answers(stock(model), feeds)["y"] != 64 * 255 * 127).any())


def step_results(step: onnx_ir.Model, spec: Any, feeds: Mapping[str, Any]) -> list[Any]:
    """The loss and the next states of a training step; 0.5 is fed where nothing is given."""
    given = {v.name: feeds.get(str(v.name), np.array(0.5, np.float32)) for v in step.graph.inputs}
    found = answers(stock(step, optimized=True), given)
    return [found[spec.loss], *(found[s.next] for s in spec.states if s.next)]


def assert_same(found: Iterable[Any], expected: Iterable[Any], **tolerance: Any) -> None:
    """As many arrays, each the same to the bit, or as `assert_allclose` with what is given."""
    for a, b in zip(found, expected, strict=True):
        if tolerance:
            np.testing.assert_allclose(a, b, **tolerance)
        else:
            np.testing.assert_array_equal(a, b)


def normal(
    shapes: Mapping[str, Sequence[int]], seed: int = 0, dtype: Any = np.float32
) -> dict[str, np.ndarray]:
    """Random arrays of a type by name."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def drawn(
    model: onnx_ir.Model, sizes: Mapping[str, int] | int = 1, seed: int = 0
) -> dict[str, np.ndarray]:
    """Random floats for the inputs of a model; `sizes` are those of its open dimensions."""
    rng, feeds = np.random.default_rng(seed), {}
    for value in model.graph.inputs:
        dims = [getattr(d, "value", d) for d in value.shape or ()]
        given = dict.fromkeys(dims, sizes) if isinstance(sizes, int) else sizes
        shape = [d if isinstance(d, int) else given[d] for d in dims]
        feeds[str(value.name)] = rng.standard_normal(shape).astype(value.dtype.numpy())
    return feeds


def formula_model(text: str) -> onnx_ir.Model:
    """The model of an ONNX text whose lines may be formulas (`onnx_fuse.ops.formula`)."""
    return text_model(written_out(text))


def parsed(graph: str, opset: int = 21) -> onnx.ModelProto:
    """The model of an ONNX text without its head."""
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}]> {graph}')


def assert_near(
    found: Mapping[str, Any], expected: Mapping[str, Any], rtol: float = 1e-7, atol: float = 0
) -> None:
    """What is expected by name is found there, in its shape."""
    for name, want in expected.items():
        assert np.shape(found[name]) == np.shape(want), name
        np.testing.assert_allclose(found[name], want, rtol=rtol, atol=atol, err_msg=name)


def in_threads(work: Callable[[Any], object], values: Iterable[Any]) -> None:
    """Call `work` with each value in a thread of its own, and raise what one of them raised."""
    with ThreadPoolExecutor(len(items := list(values))) as pool:
        for _ in pool.map(work, items):
            pass


_WAIT = re.compile(r"\b(after_previous_launch|grid_dependency_wait)\(\)")


@cache
def waits(source: str) -> str:
    """`Launch.waits` of a source, as its text says: at most one statement stands before "first"."""
    kernels = source_text(source).split('extern "C" __global__')[1:]
    heads = [";".join(kernel.partition("{")[2].split(";")[:2]) for kernel in kernels]
    if all(map(_WAIT.search, heads)):
        return "first"
    return "later" if all(map(_WAIT.search, kernels)) else ""


def setting(*keys: Any, to: Any) -> Callable[[Any], None]:
    """Changes an item of nested lists and dictionaries."""

    def change(data: Any) -> None:
        for key in keys[:-1]:
            data = data[key]
        data[keys[-1]] = to

    return change


def write_adapter(path: Path, model: Any, rank: int, seed: int, weights: str = "*") -> Path:
    """An adapter of random numbers, as `Trainer.save_adapters` writes it."""
    from onnx_fuse.adapters.files import write
    from onnx_fuse.adapters.products import adaptable
    from onnx_fuse.autodiff.load import load

    rng, tensors, found = np.random.default_rng(seed), dict[str, np.ndarray](), []
    graph = load(model)
    for each in adaptable(graph).values():
        if fnmatch.fnmatchcase(each.weight, weights):
            k, n = graph.graph.initializers[each.weight].shape.numpy()[:: 1 - 2 * each.transposed]
            tensors |= {each.a: (rng.normal(size=(k, rank)) / k**0.5).astype(np.float32)}
            tensors |= {each.b: (rng.normal(size=(rank, n)) / rank).astype(np.float32)}
            found.append(dataclasses.replace(each, scale=1.5))
    write(path, tensors, found, graph.graph)
    return path
