"""Compiled files without a GPU: what is written is what is read, and damage is one line."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lowering
import numpy as np
import pytest
from fake_gpu import FakeGpu
from support import ENCODER, assert_same, setting, table

from onnx_fuse import InferenceSession, __version__, container, deploy, rewrite, session
from onnx_fuse.cuda import nvrtc
from onnx_fuse.errors import DeviceError, ModelError, UsageError
from onnx_fuse.ir.build import text_model
from onnx_fuse.program import template
from onnx_fuse.program.call import Program
from onnx_fuse.program.open import SymbolicProgram
from onnx_fuse.program.problem import CHIPS
from onnx_fuse.program.size import Trace
from onnx_fuse.rewrite.precision import in_precision
from onnx_fuse.runtime.deployed import Deployed
from onnx_fuse.runtime.specialize import Specializer

H200, A100 = CHIPS["H200"], CHIPS["A100"]
TANH = "agraph (float[N,4] x) => (float[N,4] y) { y = Tanh(x) }"
IDS = ("input_ids", "attention_mask", "token_type_ids")


def as_read(program: Program, written: Program) -> None:
    """`program`, of a file, is the one that was written, but for the names of its modules."""
    names = {
        (x.source, x.defines): (deploy.unique(x.source), x.defines)
        for call in (*written.setup, *written.calls)
        for x in call.launches
    }
    renamed = deploy.relabel(written, names)
    assert program.calls == tuple(replace(c, problem=None, expression=None) for c in renamed.calls)
    assert program.setup == tuple(replace(c, problem=None, expression=None) for c in renamed.setup)
    assert (program.buffers, program.inputs) == (written.buffers, written.inputs)
    for (name, got), (wanted, value) in zip(program.outputs, written.outputs, strict=True):
        assert name == wanted
        if isinstance(value, np.ndarray):
            assert isinstance(got, np.ndarray)
            assert (got.dtype, got.shape) == (value.dtype, value.shape)
            assert got.tobytes() == value.tobytes()
        else:
            assert got == value
    weights = {b.id for b in written.buffers if b.kind == "weight"}
    for buffer, array in written.constants.items():
        if buffer not in weights:
            assert program.constants[buffer].tobytes() == array.tobytes()


# what a file cannot hold: sizes that data decides, and the state of what is drawn
NOT_IN_FILES = ("depends on data", "Dropout")


@pytest.mark.parametrize(
    "name", [n for n in lowering.GRAPHS if not any(kind in n for kind in NOT_IN_FILES)]
)
@pytest.mark.usefixtures("no_compiler")
def test_programs_are_read_as_they_were_written(name: str, tmp_path: Path) -> None:
    text, feeds = lowering.GRAPHS[name]
    path = tmp_path / "m.fused"
    shapes = {key: np.shape(value) for key, value in feeds.items()}
    made = deploy.compile(text_model(text), path, targets={"h": H200, "a": A100}, shapes=[shapes])
    loaded = Deployed(path)
    for target, hw in (("h", H200), ("a", A100)):
        as_read(loaded.made(loaded.shapes()[0], hw).program, made.programs[target][0])


def compiled(folder: Path, model: Any, **options: Any) -> tuple[deploy.Compiled, Path]:
    """What is compiled, for an H200 unless told otherwise, and its file."""
    model = text_model(model) if isinstance(model, str) else model
    path = folder / "m.fused"
    return deploy.compile(model, path, **{"targets": {"h": H200}, **options}), path


def encoder(path: Path, precision: str = "fp32") -> deploy.Compiled:
    shapes = [dict.fromkeys(IDS, (1, 5)), dict.fromkeys(IDS, (2, 16))]
    return deploy.compile(ENCODER, path, targets={"h200": H200}, shapes=shapes, precision=precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_encoder_with_its_cubins_its_weights_and_its_graph(
    tmp_path: Path, precision: str
) -> None:
    path = tmp_path / "m.fused"
    made = encoder(path, precision)
    loaded = Deployed(path)
    assert [s["input_ids"] for s in loaded.shapes()] == [((1, 5), "int64"), ((2, 16), "int64")]
    for shapes, written in zip(loaded.shapes(), made.programs["h200"], strict=True):
        program = loaded.made(shapes, H200).program
        as_read(program, written)
        for call, original in zip(program.calls, written.calls, strict=True):
            for x, y in zip(call.launches, original.launches, strict=True):
                cubin = nvrtc.compile(x.source, x.defines, "sm_90a")
                assert cubin == nvrtc.compile(y.source, y.defines, "sm_90a")
                assert cubin[:4] == b"\x7fELF"
                assert x.waits == y.waits
        for b in written.buffers:
            if b.kind == "weight" and b.id in written.constants:
                assert loaded.weight(b.name).tobytes() == written.constants[b.id].tobytes()
    rng = np.random.default_rng(0)
    feeds = {name: rng.integers(0, 2, (2, 7)) for name in IDS}  # another shape: the graph has all
    want = InferenceSession(ENCODER).run(None, feeds)
    rtol = 1e-5 if precision == "fp32" else 0.1  # of sums over 32 of bfloat16's 8 bits, two layers
    assert_same(InferenceSession(path).run(None, feeds), want, rtol=rtol, atol=rtol)


def test_the_same_model_gives_the_same_file(tmp_path: Path) -> None:
    encoder(tmp_path / "a.fused")
    encoder(tmp_path / "b.fused")
    assert (tmp_path / "a.fused").read_bytes() == (tmp_path / "b.fused").read_bytes()


def test_a_session_reads_a_compiled_file_without_any_onnx_library(tmp_path: Path) -> None:
    path = tmp_path / "m.fused"
    encoder(path)
    code = (
        "import sys\n"
        "from onnx_fuse import InferenceSession\n"
        "from onnx_fuse.program.problem import CHIPS, Hardware\n"
        "from onnx_fuse.runtime import device, plan\n"
        "from onnx_fuse.cuda import nvrtc\n"
        "device.begin = device.probe = lambda device_id=0: None\n"
        "Hardware.detect = classmethod(lambda cls, device_id=0: CHIPS['H200'])\n"
        f"session = InferenceSession({str(path)!r}, device='cuda')\n"
        f"shapes = dict.fromkeys({IDS!r}, ((1, 5), 'int64'))\n"
        "program = session._executable.program(shapes)\n"
        "plan.plan(program)\n"
        "launches = [x for c in program.calls for x in c.launches]\n"
        "nvrtc.compile_all(launches, 'sm_90a')\n"
        "weight = session._executable.shared.weight\n"
        "for b in program.buffers:\n"
        "    assert b.kind != 'weight' or weight(b.name).nbytes == b.nbytes\n"
        "names = [end.name for end in session.get_inputs() + session.get_outputs()]\n"
        "heavy = {'onnx', 'onnx_ir', 'onnxruntime', 'onnxscript', 'google', 'sympy', 'ml_dtypes',\n"
        "         'cuda.core', 'cuda.bindings.nvrtc', 'safetensors', 'typer', 'rich'}\n"
        "print(names, sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{[*IDS, 'last_hidden_state', 'pooler_output']} []"


RUNTIME = Path(__file__).parents[1] / "runtime_dist"


ABSENT = (
    "import importlib.abc, sys\n"
    "class Absent(importlib.abc.MetaPathFinder):\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name.split('.')[0] in ('onnx', 'onnx_ir', 'onnxruntime', 'onnxscript', 'google',\n"
    "            'sympy', 'ml_dtypes', 'safetensors', 'typer', 'rich', 'nvmath'):\n"
    "            raise ModuleNotFoundError(name)\n"
    "sys.meta_path.insert(0, Absent())\n"
)
"""Code after which none of what onnx-fuse-runtime does without can be imported."""


def runtime_site(folder: Path) -> Path:
    """The files of onnx-fuse-runtime, as they are installed."""
    text = (RUNTIME / "pyproject.toml").read_text()
    for source, target in re.findall(r'^"\.\./(\S+)" = "(\S+)"$', text, re.M):
        path = RUNTIME.parent / source
        (folder / target).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / target)
    return folder


def test_the_runtime_distribution_has_all_that_a_run_imports(tmp_path: Path) -> None:
    """Its files alone, where nothing of ONNX can be imported, open a file and bind a program."""
    site = runtime_site(tmp_path / "site")
    encoder(tmp_path / "m.fused")
    code = ABSENT + (
        "import numpy as np\n"
        "from onnx_fuse import InferenceSession, UsageError\n"
        "from onnx_fuse.cuda import nvrtc\n"
        "from onnx_fuse.program.problem import CHIPS, Hardware\n"
        "from onnx_fuse.runtime import device, plan, executable\n"
        "device.begin = device.probe = lambda device_id=0: None\n"
        "Hardware.detect = classmethod(lambda cls, device_id=0: CHIPS['H200'])\n"
        f"path = {str(tmp_path / 'm.fused')!r}\n"
        "opened = InferenceSession(path, device='cuda')\n"
        f"feeds = dict.fromkeys({IDS!r}, np.ones((1, 5), np.int64))\n"
        "opened._feeds(feeds)\n"
        "shapes = {name: (a.shape, 'int64') for name, a in feeds.items()}\n"
        "program = opened._executable.program(shapes)\n"
        "plan.plan(program)\n"
        "nvrtc.compile_all([x for c in program.calls for x in c.launches], 'sm_90a')\n"
        "for device_name in ('cuda', 'cpu'):\n"
        "    try:\n"
        "        InferenceSession('m.onnx', device=device_name)\n"
        "    except UsageError as error:\n"
        "        print(str(error)[:17])\n"
        "try:\n"
        "    opened._feeds({**feeds, 'z': 1})\n"
        "except UsageError as error:\n"
        "    print(error)\n"
        "try:\n"
        "    opened.add_adapter('a', 'a.safetensors')\n"
        "except UsageError as error:\n"
        "    print('--adapter-rank' in str(error))\n"
        "print(sorted(p for p in sys.modules if p.startswith('onnx_fuse')\n"
        f"             and not sys.modules[p].__file__.startswith({str(site)!r})))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(site)},
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    whole = ["onnx-fuse-runtime", "onnx-fuse-runtime", "Invalid input name: z", "True", "[]"]
    assert done.stdout.splitlines() == whole


def test_both_distributions_have_one_version() -> None:
    texts = [(folder / "pyproject.toml").read_text() for folder in (RUNTIME, RUNTIME.parent)]
    found = [re.search(r'^version = "(.+)"$', text, re.M) for text in texts]
    assert [match and match[1] for match in found] == [__version__] * 2


def told(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, original: Callable[[Any], Program]) -> None:
    """Tell the GPU what a file's launches compute: as the calls of the program they come from."""
    whole = Deployed._check

    def check(self: Deployed, program: Program, shapes: Any) -> None:
        whole(self, program, shapes)
        written, read = original(shapes), (*program.setup, *program.calls)
        for call, source in zip(read, (*written.setup, *written.calls), strict=True):
            for launch in call.launches:
                gpu._calls[id(launch)] = replace(call, expression=source.expression)
                gpu._launches[id(launch)] = launch

    monkeypatch.setattr(Deployed, "_check", check)


def test_a_run_of_a_compiled_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU of host memory, whose kernels are NumPy's, told which calls the launches are of."""
    text = (
        "agraph (float[N,8] x, float[8] b) => (float[N,8] y, float[8,N] z)"
        "{ s = Add(x, b) y = Tanh(s) t = Transpose(y) z = Neg(t) }"
    )
    path, rows = tmp_path / "m.fused", (3, 5)
    shapes = [{"x": (n, 8)} for n in rows]
    made = deploy.compile(text_model(text), path, targets={"h": H200}, shapes=shapes)
    gpu = FakeGpu().use(monkeypatch)
    told(gpu, monkeypatch, lambda shapes: made.programs["h"][rows.index(shapes["x"][0][0])])
    opened = InferenceSession(path, device="cuda")
    b = np.linspace(-1, 1, 8, dtype=np.float32)
    for n in (*rows, *rows, *rows):
        x = np.random.default_rng(n).standard_normal((n, 8)).astype(np.float32)
        y, z = opened.run(None, {"x": x, "b": b})
        np.testing.assert_allclose(y, np.tanh(x + b), atol=1e-6)
        np.testing.assert_allclose(z, -y.T)
    with pytest.raises(UsageError, match=r"no program for x \[4, 8\]"):
        opened.run(None, {"x": np.zeros((4, 8), np.float32), "b": b})


# ---- ranges of sizes ----------------------------------------------------------------------------


@pytest.mark.usefixtures("no_compiler")
def test_a_range_of_sizes_needs_few_programs(tmp_path: Path) -> None:
    """Each size of the range has the program that lowering makes for it, from a few in the file."""
    open_length = {"shapes": [dict.fromkeys(IDS, (2, -1))], "ranges": {"sequence": (3, 40)}}
    made, path = compiled(tmp_path, ENCODER, precision="fp16", **open_length)
    loaded = Deployed(path)
    assert len(made.programs["h"]) == len(loaded.entries) < 20
    graph = session.load(ENCODER)
    rewrite.optimize(graph, own_kernels=True)
    graph, math = in_precision(graph, "fp16")
    programs = Specializer(graph, H200, math=math)
    plans = set()
    for length in range(40, 2, -1):  # as they were compiled: the first of a class lowers it
        shapes = dict.fromkeys(IDS, ((2, length), "int64"))
        found = loaded.made(shapes, H200)
        as_read(found.program, programs.of(shapes).program)
        plans.add(id(found.plan))
    assert len(plans) <= len(loaded.entries)
    for sizes in ((2, 41), (3, 40), (2, 0)):
        with pytest.raises(
            UsageError, match=r"those for input_ids \[2, sequence\].* with sequence from 3 to 40;"
        ):
            loaded.made(dict.fromkeys(IDS, (sizes, "int64")), H200)
    with pytest.raises(UsageError, match="no program"):
        loaded.made(dict.fromkeys(IDS, ((2, 40), "int32")), H200)
    unequal = dict(zip(IDS, (((2, n), "int64") for n in (8, 8, 9)), strict=True))
    with pytest.raises(UsageError, match="no program"):
        loaded.made(unequal, H200)


@pytest.mark.usefixtures("no_compiler")
def test_a_run_in_any_size_of_a_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "agraph (float[N,M] x, float[M] b) => (float[N,M] y, float[M,N] z, float[N,N] o)"
        "{ s = Add(x, b) y = Tanh(s) t = Transpose(y) z = Neg(t) one = Constant<value_ints = [0]>()"
        "n = Shape<end = 1>(x) nn = Concat<axis = 0>(n, n) f = ConstantOfShape(nn) o = Cos(f) }"
    )
    made, path = compiled(tmp_path, text, ranges={"M": (2, 20), "N": (1, 40)})
    gpu = FakeGpu().use(monkeypatch)
    monkeypatch.setenv("ONNX_FUSE_AHEAD", "1")  # which a compiled file has nothing to do with
    entries = Deployed(path).entries

    def original(shapes: Any) -> Program:
        given = {n: (tuple(s), d) for n, (s, d) in shapes.items()}
        k = next(i for i, e in enumerate(entries) if e.numbers(given) is not None)
        return made.programs["h"][k]

    told(gpu, monkeypatch, original)
    opened = InferenceSession(path, device="cuda")
    rng = np.random.default_rng(0)
    for n, m in [(3, 5), (4, 8), (3, 5), (40, 20), (1, 2), (7, 6), (3, 5), (40, 3), (3, 5)]:
        x, b = (rng.standard_normal(s).astype(np.float32) for s in ((n, m), m))
        y, z, o = opened.run(None, {"x": x, "b": b})
        np.testing.assert_allclose(y, np.tanh(x + b), atol=1e-6)
        np.testing.assert_allclose(z, -y.T)
        np.testing.assert_array_equal(o, np.ones((n, n)))
    with pytest.raises(UsageError, match=r"x \[N, M\], b \[M\] with M from 2 to 20 and N from 1"):
        opened.run(None, {"x": np.zeros((2, 300), np.float32), "b": np.zeros(300, np.float32)})


RANGES = {
    "an unknown symbol": ({"Z": (1, 2)}, "no input has a dimension called 'Z'"),
    "no sizes": ({"N": (3, 2)}, "from 3 to 2: expected sizes from 1 on"),
    "nothing": ({"N": (0, 2)}, "from 0 to 2: expected sizes from 1 on"),
    "too many": ({"N": (1, 1 << 20)}, "over 131,072 shapes"),
}


@pytest.mark.parametrize("case", RANGES)
def test_what_is_no_range_is_refused(case: str, tmp_path: Path) -> None:
    ranges, match = RANGES[case]
    with pytest.raises(UsageError, match=match):
        compiled(tmp_path, TANH, ranges=ranges)


@pytest.fixture
def ranged(tmp_path: Path, no_compiler: None) -> Path:
    return compiled(tmp_path, TANH, ranges={"N": (2, 9)})[1]


BAD_RANGES = {
    "symbols of numbers": setting("symbols", to=[1]),
    "a symbol of no input": setting("symbols", 0, 0, to="z"),
    "an axis that is not there": setting("symbols", 0, 1, to=7),
    "a largest size of text": setting("largest", to={"s0": "9"}),
    "a largest size of nothing": setting("largest", to={"s9": 9}),
    "ranges of numbers": setting("ranges", to=[1]),
    "no names": lambda d: d.pop("names"),
}


@pytest.mark.parametrize("fault", BAD_RANGES)
def test_a_range_that_nobody_wrote_is_refused(ranged: Path, fault: str) -> None:
    manifest = copy.deepcopy(container.Container(ranged).manifest)
    for entry in manifest["programs"]:
        BAD_RANGES[fault](entry["open"])
    rewritten(ranged, manifest=manifest)
    with pytest.raises(ModelError, match="damaged"):
        Deployed(ranged).made({"x": ((5, 4), "float32")}, H200)


# ---- which program, which GPU -------------------------------------------------------------------


@pytest.mark.usefixtures("no_compiler")
def test_the_target_is_the_largest_that_fits_the_gpu(tmp_path: Path) -> None:
    targets = {"h200": H200, "small": replace(H200, sm_count=100), "a100": A100}
    _, path = compiled(tmp_path, TANH, targets=targets, shapes=[{"x": (2, 4)}])
    loaded = Deployed(path)
    assert loaded.target(H200) == "h200"
    assert loaded.target(replace(H200, sm_count=114)) == "small"
    assert loaded.target(A100) == "a100"
    with pytest.raises(DeviceError, match=r"this GPU is NVIDIA H200 \(sm_90a, 99\).*--recompile"):
        loaded.target(replace(H200, sm_count=99))
    with pytest.raises(DeviceError, match=r"h200 \(sm_90a, 132 multiprocessors\).*NVIDIA B200"):
        loaded.target(CHIPS["B200"])
    with pytest.raises(UsageError, match=r"no program for x \[3, 4\]; .* those for x \[2, 4\];"):
        loaded.made({"x": ((3, 4), "float32")}, H200)
    loaded.check_precision("fp32")
    with pytest.raises(UsageError, match="compiled for precision fp32, not bf16"):
        loaded.check_precision("bf16")


REFUSED = table(globals())(r"""
a dynamic size: {}, UsageError, "axis 0 is dynamic.*--dim N=8"
  $TANH
an unknown input: {"z": (1,)}, UsageError, "no input 'z'"
  $TANH
a wrong rank: {"x": (1,)}, UsageError, "2 dimensions, not 1"
  $TANH
a fixed size: {"x": (1, 5)}, UsageError, "axis 1 must be 4, not 5"
  $TANH
a shape of data: {}, ModelError, "the sizes of what computes 'y' depend on data"
  agraph (float[4] x) => (int64[1,N] y) { y = NonZero(x) }
a shape of values: {}, ModelError, "the values of input n decide about sizes"
  agraph (float[4] x, int64[1] n) => (float[N] y) { y = Expand(x, n) }
random numbers: {}, ModelError, "draws random numbers"
  agraph (float[4] x) => (float[4] y) { y = RandomNormalLike(x) }
onnxruntime: {}, ModelError, r"com\.microsoft\.Unknown: no kernel, so it would run on onnxruntime"
  <ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
  agraph (float[4] x) => (float[4] y) { y = com.microsoft.Unknown(x) }
""")


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.usefixtures("no_compiler")
def test_what_no_file_can_hold_is_refused(case: str, tmp_path: Path) -> None:
    text, shapes, error, match = REFUSED[case]
    with pytest.raises(error, match=match):
        compiled(tmp_path, text, shapes=[shapes])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("options", "words"), [
    ({"adapter_rank": -3}, "adapter_rank is -3"),
    ({"adapter_rank": 4, "adapter_weights": []}, "adapter_weights has at least one glob"),
    ({"adapter_weights": ["w"]}, "is for an adapter_rank"),
    ({"pack": "Zero"}, "pack is True, 'zero' or False, not 'Zero'"),
    ({"pack": "exact"}, "not 'exact'"),
])  # fmt: skip
def test_an_option_without_a_meaning_is_refused(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words):
        deploy.compile(b"", tmp_path / "a.fused", targets={"h": H200}, **options)


# ---- damage -------------------------------------------------------------------------------------


@pytest.fixture
def tanh(tmp_path: Path, no_compiler: None) -> Path:
    text = (
        "agraph (float[2,4] x) => (float[2,4] y, float[2,4] z)"
        "{ s = Softmax(x) y = Tanh(s) z = Softmax<axis = 0>(y) }"
    )
    return compiled(tmp_path, text)[1]


def read(path: Path) -> Program:
    loaded = Deployed(path)
    return loaded.made(loaded.shapes()[0], H200).program


@pytest.mark.parametrize("member", ["programs/0.json", "weights.safetensors", "model.onnx"])
def test_one_byte_that_changed_is_noticed(tanh: Path, member: str) -> None:
    places, _ = container.members_of(tanh.open("rb"))
    data = bytearray(tanh.read_bytes())
    data[places[member][0] + places[member][1] // 2] ^= 1
    tanh.write_bytes(data)
    with pytest.raises(ModelError, match=f"damaged: {member} has another digest"):
        container.Container(tanh).member(member)
    if member == "programs/0.json":
        with pytest.raises(ModelError, match="damaged"):
            read(tanh)
    if member == "model.onnx":
        with pytest.raises(ModelError, match="damaged"):
            session.load(tanh)


def test_every_truncation_is_one_line(tanh: Path) -> None:
    data = tanh.read_bytes()
    for size in [4, 30, 100, *range(0, len(data), len(data) // 20 + 1)][1:]:
        tanh.write_bytes(data[:size])
        with pytest.raises(ModelError):
            read(tanh)


def test_a_zip_archive_of_somebody_else(tmp_path: Path) -> None:
    path = tmp_path / "m.fused"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", "{}")
    with pytest.raises(ModelError, match="none that onnx-fuse compile has made"):
        session.load(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", "{}" * 99)
    with pytest.raises(ModelError, match="is compressed"):
        Deployed(path)


def test_a_file_that_is_overwritten_is_noticed(tanh: Path) -> None:
    loaded = Deployed(tanh)
    tanh.write_bytes(b"")  # reading the map would end the process
    with pytest.raises(ModelError, match="changed while it is in use"):
        loaded.made(loaded.shapes()[0], H200)


def rewritten(path: Path, manifest: Any = None, program: Any = None) -> None:
    """The file with another manifest or program, its digests as they should be."""
    whole = container.Container(path)
    names = [n for n in whole.manifest["files"] if n != container.WEIGHTS]
    members = {name: bytes(whole.member(name)) for name in names}
    table = json.loads(bytes(whole.member(container.WEIGHTS))[8:].split(b"  ")[0])
    tensors = {name: np.array(whole.tensor(name)) for name in table}
    if program is not None:
        members["programs/0.json"] = json.dumps(program).encode()
    container.write(path, manifest or whole.manifest, members, tensors)


@pytest.mark.parametrize("ends", ["inputs", "outputs"])
def test_a_program_with_other_ends_is_refused(tanh: Path, ends: str) -> None:
    program = read(tanh)
    (_, tensor), *rest = getattr(program, ends)
    other = replace(program, **{ends: (("other", tensor), *rest)})
    for each in (program, other):
        written = template.write(SymbolicProgram(each, Trace()), lambda array: "none")
        rewritten(tanh, program=written)
        if each is program:
            assert read(tanh) == program
    with pytest.raises(ModelError, match=r"m\.fused: .*than"):
        read(tanh)


BAD_MANIFESTS = {
    "another format": (setting("format", to=99), "of format 99.*reads format 7.*recompile"),
    "no programs": (lambda m: m.pop("programs"), "manifest lacks"),
    "inputs of numbers": (setting("inputs", to=[1]), "manifest lacks"),
    "a negative size": (setting("inputs", 0, 2, to=[-3]), "manifest lacks"),
    "a target of text": (setting("targets", "h", "sm_count", to="many"), "manifest lacks"),
    "a shape of text": (setting("programs", 0, "inputs", "x", to=["24", "f"]), "manifest lacks"),
    "a member that is not there": (setting("programs", 0, "member", to="../x"), "is missing"),
    "a module without code": (lambda m: m["modules"][0].pop("cubins"), "manifest lacks"),
    "modules of numbers": (setting("modules", to=[1, 2]), "manifest lacks"),
}


@pytest.mark.parametrize("fault", BAD_MANIFESTS)
def test_a_manifest_that_nobody_wrote_is_refused(tanh: Path, fault: str) -> None:
    change, match = BAD_MANIFESTS[fault]
    manifest = copy.deepcopy(container.Container(tanh).manifest)
    change(manifest)
    rewritten(tanh, manifest=manifest)
    with pytest.raises(ModelError, match=match):
        read(tanh)
