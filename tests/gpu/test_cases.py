"""Real exported graphs on the GPU: outputs, gradients, training curves; the same bits twice."""

import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from cases import RealCase, real_cases

from onnx_fuse import autodiff, rewrite
from onnx_fuse.importer.load import read
from onnx_fuse.program.problem import PRECISIONS, GemmProblem, Hardware
from onnx_fuse.runtime import states
from onnx_fuse.session import InferenceSession, load
from onnx_fuse.training import optim
from onnx_fuse.training.trainer import Trainer
from onnx_fuse.validation.check import check_outputs
from onnx_fuse.validation.request import Request

CASES = {case.name: case for case in real_cases()}
MODELS = Path(__file__).parents[2] / "models"


@pytest.fixture(autouse=True)
def no_fallback():
    """A node that runs on onnxruntime would test nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def executable(model):
    from onnx_fuse.runtime.executable import Executable

    return Executable(model)


@pytest.mark.parametrize("fused", [False, True], ids=["as exported", "fused"])
@pytest.mark.parametrize("name", CASES)
def test_outputs(name: str, fused: bool) -> None:
    case: RealCase = CASES[name]
    model = load(case.path)
    if fused:
        rewrite.optimize(model)
    runner = executable(model)
    for feeds, expected in case.feeds:
        got, again = runner.run(list(expected), feeds), runner.run(list(expected), feeds)
        for y, twice, want in zip(got, again, expected.values(), strict=True):
            assert y.tobytes() == twice.tobytes()
            np.testing.assert_allclose(y, want, rtol=0, atol=1e-4 * max(1, np.abs(want).max()))


@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str) -> None:
    case: RealCase = CASES[name]
    model = autodiff.gradient(case.path)
    inputs, outputs = case.feeds[0]
    first, *rest = (n for n in (v.name for v in model.graph.inputs) if n.endswith(".grad"))
    cotangent = case.arrays["cotangent"]
    feeds = {n: a for n, a in inputs.items() if n in {v.name for v in model.graph.inputs}}
    feeds[first] = (cotangent / cotangent.size).astype(np.float32)
    feeds |= {n: np.zeros_like(outputs[n.removesuffix(".grad")]) for n in rest}
    names = [f"{n}.grad" for n in case.gradients]
    runner = executable(model)
    got, again = runner.run(names, feeds), runner.run(names, feeds)
    for name_, y, twice, want in zip(names, got, again, case.gradients.values(), strict=True):
        assert y.tobytes() == twice.tobytes(), name_
        # gradients that are zero up to rounding have an absolute floor
        bound = max(1e-3 * np.abs(want).max(), 1e-7)
        np.testing.assert_allclose(y, want, rtol=0, atol=bound, err_msg=name_)


@pytest.mark.parametrize("clip", [None, 1.0], ids=["", "clipped"])
@pytest.mark.parametrize("name", ["mlp_ln__ts17", "bert__ts13", "resnet_train__ts17"])
def test_training_follows_the_portable_backend(name: str, clip: float | None) -> None:
    case: RealCase = CASES[name]
    inputs, outputs = case.feeds[0]
    shape = next(iter(outputs.values())).shape
    rng = np.random.default_rng(0)
    batches = [
        {**inputs, "labels": rng.standard_normal(shape).astype(np.float32)} for _ in range(5)
    ]

    def run(device: str) -> tuple[list[float], dict[str, np.ndarray]]:
        trainer = Trainer(
            case.path, loss="mse", optimizer=optim.AdamW(lr=1e-3), clip_norm=clip, device=device
        )
        return [trainer.step(batch) for batch in batches], trainer.weights()

    losses, _ = run("cpu")
    first, weights = run("cuda")
    second, same = run("cuda")
    np.testing.assert_allclose(first, losses, rtol=1e-4)
    assert first == second
    for key, array in weights.items():
        assert array.tobytes() == same[key].tobytes(), key


LOWER = {"bf16x6": 1e-4, "bf16x3": 1e-4, "tf32": 5e-3, "fp16": 2e-2, "bf16": 1e-1}


@pytest.mark.parametrize(("precision", "bound"), LOWER.items())
@pytest.mark.parametrize("name", CASES)
def test_lower_precision(name: str, precision: str, bound: float) -> None:
    """Outputs keep their type, and differ by what the precision rounds."""
    case: RealCase = CASES[name]
    feeds, expected = case.feeds[0]
    session = InferenceSession(case.path, device="cuda", precision=precision)
    for y, want in zip(session.run(list(expected), feeds), expected.values(), strict=True):
        assert y.dtype == want.dtype
        np.testing.assert_allclose(y, want, rtol=0, atol=bound * max(1, np.abs(want).max()))


LAYER = """<ir_version: 9, opset_import: ["" : 20]>
    g (float[2048,768] x) => (float[2048,768] y) {
    h = LayerNormalization <axis = -1> (x, gamma, beta)
    u = MatMul (h, w) a = Add (u, b) g = Relu (a) v = MatMul (g, o) y = Add (v, x) }"""


BLOCK = """<ir_version: 9, opset_import: ["" : 20]>
    g (float[2048,768] x) => (float[2048,768] y) {
    p = MatMul (x, v) h = LayerNormalization <axis = -1> (p, gamma, beta)
    u = MatMul (h, w) a = Add (u, b) g = Gelu (a) y = MatMul (g, o) }"""


def layer(text: str = LAYER) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    proto, rng = onnx.parser.parse_model(text), np.random.default_rng(0)
    weights = {}
    sizes = {"gamma": (768,), "beta": (768,), "w": (768, 1024), "b": (1024,), "o": (1024, 768)}
    sizes |= {"v": (768, 768)} if text == BLOCK else {}
    for name, shape in sizes.items():
        array = rng.standard_normal(shape) / 30 + (name == "gamma")
        weights[name] = array.astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weights[name], name))
    return proto, {name: array.astype(np.float64) for name, array in weights.items()}


# relative Frobenius errors of two products: 4e-6 each, and what float32's sums leave
@pytest.mark.parametrize(("precision", "bound"), [("bf16x3", 2e-5), ("bf16x6", 5e-6)])
def test_products_of_float32_by_bfloat16(precision: str, bound: float) -> None:
    """They err as stated, run on tensor cores, and train as float32 does, to the same bits."""
    x = np.random.default_rng(1).standard_normal((2048, 768)).astype(np.float32)
    model, w = layer()
    session = InferenceSession(model, device="cuda", precision=precision)
    wide = x.astype(np.float64)
    h = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    h = h * w["gamma"] + w["beta"]
    want = np.maximum(h @ w["w"] + w["b"], 0) @ w["o"] + wide
    [got] = session.run(None, {"x": x})
    assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)
    program, hw = session.program({"x": x})
    chosen = [call.why for call in program.calls if isinstance(call.problem, GemmProblem)]
    assert hw.cc != 90 or all("wgmma_split" in why for why in chosen), chosen

    def losses(precision: str) -> list[float]:
        options = {"loss": "mse", "optimizer": optim.AdamW(lr=1e-3), "device": "cuda"}
        trainer = Trainer(model, precision=precision, **options)
        return [float(trainer.step({"x": x, "labels": x[::-1].copy()})) for _ in range(5)]

    first = losses(precision)
    np.testing.assert_allclose(first, losses("fp32"), rtol=1e-4)
    assert first == losses(precision)


@pytest.mark.parametrize(("precision", "bound"), [("bf16x3", 2e-5), ("bf16x6", 5e-6)])
def test_float32_gradients_by_bfloat16_in_one_call(precision: str, bound: float) -> None:
    """What a step of SGD takes from each weight, beside the step with IEEE products."""
    x = np.random.default_rng(1).standard_normal((2048, 768)).astype(np.float32)
    model, _ = layer(BLOCK)

    def step(precision: str) -> tuple[dict[str, np.ndarray], list[str]]:
        trainer = Trainer(
            model, loss="mse", optimizer=optim.SGD(lr=2.0**20), device="cuda", level=1,
            precision=precision,
        )  # fmt: skip
        before = {name: array.astype(np.float64) for name, array in trainer.weights().items()}
        trainer.step({"x": x, "labels": x[::-1].copy()})
        taken = {name: before[name] - array for name, array in trainer.weights().items()}
        executable = trainer._device._states._executables["update"]
        [program] = executable.programs()
        return taken, [
            call.problem.op for call in program.calls if isinstance(call.problem, GemmProblem)
        ]

    (want, _), (got, ops), (again, _) = step("fp32"), step(precision), step(precision)
    for name, array in want.items():
        assert np.linalg.norm(got[name] - array) <= bound * np.linalg.norm(array), name
        assert got[name].tobytes() == again[name].tobytes(), name
    hopper = Hardware.detect(0).arch == "sm_90a"
    assert ops.count("LayerNormGemmGrad") == hopper


def half_trainer(
    precision: str, name: str = "bert__ts13", **options
) -> tuple[Trainer, dict[str, np.ndarray]]:
    case: RealCase = CASES[name]
    inputs, outputs = case.feeds[0]
    shape = next(iter(outputs.values())).shape
    labels = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    options = {"optimizer": optim.AdamW(lr=1e-3), **options}
    trainer = Trainer(case.path, loss="mse", precision=precision, device="cuda", **options)
    return trainer, {**inputs, "labels": labels}


@pytest.mark.parametrize(
    "options",
    [
        {"level": 0},
        {"level": 0, "clip_norm": 1.0, "accumulate": 2},
        {},
        {"name": "llama__dynamo23"},
        {"name": "encoder_layer_prenorm__dynamo"},
    ],
    ids=["", "clipped", "fused", "fused llama", "fused pre-norm"],
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_training_follows_float32(precision: str, options: dict) -> None:
    def run(precision: str) -> list[float]:
        trainer, batch = half_trainer(precision, **options)
        return [trainer.step(batch) for _ in range(20)]

    np.testing.assert_allclose(run(precision), run("fp32"), rtol=2e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"accumulate": 2, "ema": 0.9, "loss_scale": 1024.0},
        {"name": "vit__dynamo", "frozen": ["*bias*"], "loss_scale": 1024.0},
        {"name": "vit__dynamo", "accumulate": 2, "loss_scale": 1024.0},
    ],
    ids=["accumulated", "frozen biases", "accumulated folds"],
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_copies_of_weights_in_16_bits_change_no_bit(
    precision: str, options: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through evaluations, and weights that are set between steps; copies are always of these."""

    def run(copies: bool) -> list[bytes]:
        if not copies:
            monkeypatch.setattr(states, "_copies_of", lambda *_: {})
        trainer, batch = half_trainer(precision, **options)
        found = []
        for step in range(8):
            losses = [trainer.step(batch), trainer.evaluate(batch, ema="ema" in options).loss]
            found.append(np.array(losses, np.float64).tobytes())
            if step == 4:
                halves = {k: (a * 0.5).astype(a.dtype) for k, a in trainer.state().items()}
                trainer.set_weights(halves)
        assert bool(trainer._device._states._graphs.copies) == copies
        return found + [array.tobytes() for array in trainer.state().values()]

    assert run(copies=True) == run(copies=False)


# Norm of how an SGD step in 16 bits differs from one in float32, as a part of the norm of the step.
# Twice what rounding each operator's result to the type gives (onnxruntime, sums in float32):
# behind normalizations over a batch of few pixels resnet's gradients lose four bits more.
CONVOLUTIONS = {
    ("resnet_train__ts17", "bf16"): 0.34, ("resnet_train__ts17", "fp16"): 0.076,
    ("vit__dynamo", "bf16"): 0.032, ("vit__dynamo", "fp16"): 0.0062,
    ("whisper_encoder__ts13", "bf16"): 0.024, ("whisper_encoder__ts13", "fp16"): 0.0028,
}  # fmt: skip


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize(("name", "precision"), CONVOLUTIONS)
def test_a_16_bit_step_of_convolutions_is_the_one_of_float32(name, precision, level) -> None:
    """Of every weight, and the same bits twice; then AdamW's losses for 20 steps."""

    def stepped(kind: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        # scaled by 65536, vit's first gradients are beyond float16, and the step is left out
        trainer, batch = half_trainer(
            kind, name, optimizer=optim.SGD(lr=0.1), loss_scale=1024.0, level=level
        )
        before = {k: a.copy() for k, a in trainer.weights().items()}
        trainer.step(batch)
        after = trainer.weights()
        return {k: after[k].astype(np.float64) - a for k, a in before.items()}, after

    (want, _), (got, bits), (_, again) = stepped("fp32"), stepped(precision), stepped(precision)
    assert all(a.tobytes() == again[k].tobytes() for k, a in bits.items())
    bound = CONVOLUTIONS[name, precision]
    size = np.sqrt(sum(np.sum(d**2) for d in want.values()))
    assert np.sqrt(sum(np.sum((got[k] - d) ** 2) for k, d in want.items())) <= bound * size
    longest = max(np.linalg.norm(d) for d in want.values())
    for key, step in want.items():  # a key's bias has no gradient but rounding: a floor
        floor = max(np.linalg.norm(step), 0.05 * longest)
        assert np.linalg.norm(got[key] - step) <= 2 * bound * floor, key

    def losses(kind: str) -> np.ndarray:
        trainer, batch = half_trainer(kind, name, loss_scale=1024.0, level=level)
        return np.array([trainer.step(batch) for _ in range(20)])

    exact = losses("fp32")
    np.testing.assert_allclose(losses(precision), exact, rtol=0, atol=1e-2 * exact[0])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_mask_of_the_lowest_float_trains_in_16_bits(precision: str) -> None:
    rng, shape = np.random.default_rng(0), (4, 24)
    ids = rng.integers(0, 200, shape)
    batch = {"input_ids": ids, "attention_mask": np.ones(shape, np.int64),
             "token_type_ids": 0 * ids,
             "labels": rng.standard_normal((*shape, 32)).astype(np.float32)}  # fmt: skip
    batch["attention_mask"][:2, 17:] = 0
    losses = []
    for kind in (precision, "fp32"):
        trainer = Trainer(
            MODELS / "encoder.onnx", loss="mse", optimizer=optim.AdamW(lr=1e-3), precision=kind,
            device="cuda", level=2,
        )  # fmt: skip
        losses.append([trainer.step(batch) for _ in range(5)])
    np.testing.assert_allclose(*losses, rtol=2e-2)


def test_float16_overflow_is_left_out_and_halves_the_scale(tmp_path) -> None:
    """One captured graph throughout; then the bits of a run that starts where it stopped."""
    trainer, batch = half_trainer("fp16", loss_scale=2.0**40)
    start, scales = trainer.state(), [2.0**40]
    while len(scales) < 3 or scales[-1] != scales[-2]:
        trainer.step(batch)
        state = trainer.state()
        scales.append(float(state["loss_scale"]))
        same = [np.array_equal(state[k], start[k]) for k in start if not k.startswith("loss_scale")]
        assert all(same) == (scales[-1] < scales[-2])
        assert len(scales) < 40
    assert scales[:-1] == [2.0 ** (40 - i) for i in range(len(scales) - 1)]
    fresh, _ = half_trainer("fp16", loss_scale=scales[-1])
    fresh.step(batch)
    trainer.checkpoint(tmp_path)
    resumed = Trainer.resume(tmp_path, CASES["bert__ts13"].path, device="cuda")
    for _ in range(3):
        assert trainer.step(batch) == fresh.step(batch) == resumed.step(batch)
    for key, array in trainer.state().items():
        assert array.tobytes() == fresh.state()[key].tobytes(), key
        assert array.tobytes() == resumed.state()[key].tobytes(), key


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "fp32"])
@pytest.mark.parametrize("name", ["bert__ts13", "llama__dynamo23", "vit__dynamo"])
def test_a_precision_is_validated_against_the_original(name: str, precision: str) -> None:
    path = CASES[name].path
    fused = load(read(path))
    rewrite.optimize(fused)
    check = check_outputs(path, fused, Request(device="cuda", precision=precision))
    assert check.ok, [d for d in check.differences if not d.ok]
