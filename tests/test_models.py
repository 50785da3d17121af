"""models/: the files the builders write are well formed, repeatable, and compute what they say."""

import dataclasses
import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

Array = NDArray[Any]
Arrays = dict[str, Array]
MODELS = Path(__file__).parent.parent / "models"
GPT = ["--layers", "2", "--heads", "3", "--width", "24", "--vocab", "50", "--context", "16"]
ENCODER = ["--layers", "2", "--heads", "2", "--width", "16", "--vocab", "40", "--context", "12"]
CONVNET = ["--width", "4", "--stages", "2", "--blocks", "2", "--classes", "5"]
VIT = ["--layers", "2", "--heads", "2", "--width", "16", "--image", "12", "--patch", "4"]
LLAMA = ["--layers", "2", "--heads", "4", "--kv_heads", "2", "--width", "24", "--hidden", "20"]


def builder(name: str) -> Any:
    module = importlib.import_module(name)
    assert Path(str(module.__file__)).parent == MODELS
    return module


def write(name: str, path: Path, *options: str) -> Path:
    """The file at `path`, written as `python models/<name>.py -o <path> <options>` would."""
    module = builder(name)
    sys.modules["common"].write(module.build, module.SIZES, ["-o", str(path), *options])
    return path


# ***** The models again, in float64, from the formulas: loops over rows and heads, no masks *****


def linear(p: Arrays, name: str, x: Array) -> Array:
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def gemm(p: Arrays, name: str, x: Array) -> Array:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def layer_norm(p: Arrays, name: str, x: Array, epsilon: float) -> Array:
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    normal: Array = (x - mean) / np.sqrt(var + epsilon)
    return normal * p[f"{name}.weight"] + p[f"{name}.bias"]


erf = np.vectorize(math.erf, otypes=[np.float64])


def gelu(x: Array) -> Array:
    cdf: Array = 0.5 * (1 + erf(x / math.sqrt(2)))
    return x * cdf


def gelu_tanh(x: Array) -> Array:
    cdf: Array = 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x * cdf


def attend(q: Array, k: Array, v: Array, heads: int, keys: Callable[[int], Array]) -> Array:
    """Query t of q [T, width] sees the keys `keys(t)` (indices) of k and v, in each head."""
    y, size = np.zeros_like(q), q.shape[1] // heads
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        for t in range(len(q)):
            scores = k[keys(t), part] @ q[t, part] / math.sqrt(size)
            weights = np.exp(scores - scores.max())
            y[t, part] = weights / weights.sum() @ v[keys(t), part]
    return y


def gpt(p: Arrays, feed: Arrays) -> Arrays:
    rows = []
    for ids in feed["input_ids"]:
        x = p["wte.weight"][ids] + p["wpe.weight"][: len(ids)]
        for i in range(2):
            h = linear(p, f"blocks.{i}.attn.qkv", layer_norm(p, f"blocks.{i}.ln_1", x, 1e-5))
            q, k, v = np.split(h, 3, axis=-1)
            h = attend(q, k, v, 3, lambda t: np.arange(t + 1))
            x = x + linear(p, f"blocks.{i}.attn.proj", h)
            h = linear(p, f"blocks.{i}.mlp.fc", layer_norm(p, f"blocks.{i}.ln_2", x, 1e-5))
            x = x + linear(p, f"blocks.{i}.mlp.proj", gelu_tanh(h))
        head = p.get("head.weight", p["wte.weight"].T)
        rows.append(layer_norm(p, "ln_f", x, 1e-5) @ head)
    return {"logits": np.stack(rows)}


def encoder(p: Arrays, feed: Arrays) -> Arrays:
    prenorm, rows = "norm.weight" in p, []
    for ids, mask, types in zip(*feed.values(), strict=True):
        seen = np.flatnonzero(mask)

        def attn(i: int, x: Array, seen: Array = seen) -> Array:
            q, k, v = (linear(p, f"layers.{i}.attn.{n}", x) for n in ("query", "key", "value"))
            return linear(p, f"layers.{i}.attn.output", attend(q, k, v, 2, lambda t: seen))

        def mlp(i: int, x: Array) -> Array:
            return linear(p, f"layers.{i}.mlp.down", gelu(linear(p, f"layers.{i}.mlp.up", x)))

        x = p["embeddings.word.weight"][ids] + p["embeddings.token_type.weight"][types]
        x = x + p["embeddings.position.weight"][: len(ids)]
        if not prenorm:
            x = layer_norm(p, "embeddings.norm", x, 1e-12)
        for i in range(2):
            for name, sublayer in (("attn", attn), ("mlp", mlp)):
                norm = f"layers.{i}.{name}_norm"
                if prenorm:
                    x = x + sublayer(i, layer_norm(p, norm, x, 1e-12))
                else:
                    x = layer_norm(p, norm, x + sublayer(i, x), 1e-12)
        rows.append(layer_norm(p, "norm", x, 1e-12) if prenorm else x)
    hidden = np.stack(rows)
    pooled = np.tanh(gemm(p, "pooler.dense", hidden[:, 0]))
    if "classifier.weight" in p:
        return {"logits": gemm(p, "classifier", pooled)}
    return {"last_hidden_state": hidden, "pooler_output": pooled}


def mlp(p: Arrays, feed: Arrays) -> Arrays:
    x = feed["x"]
    for i in range(3):
        x = gemm(p, f"layers.{i}.fc", layer_norm(p, f"layers.{i}.norm", x, 1e-5))
        x = x if i == 2 else gelu(x)
    return {"logits": x}


def vit(p: Arrays, feed: Arrays) -> Arrays:
    rows = []
    for image in feed["pixels"]:
        cut = image.reshape(3, 3, 4, 3, 4).transpose(1, 3, 0, 2, 4).reshape(9, 48)
        weight = p["embeddings.patch.weight"].reshape(16, 48)
        x = np.concatenate([p["embeddings.class_token"][0], cut @ weight.T
                            + p["embeddings.patch.bias"]])  # fmt: skip
        x = x + p["embeddings.positions"][0]
        every = np.arange(len(x))
        for i in range(2):
            h = linear(p, f"blocks.{i}.attn.qkv", layer_norm(p, f"blocks.{i}.norm1", x, 1e-6))
            q, k, v = np.split(h, 3, axis=-1)
            x = x + linear(p, f"blocks.{i}.attn.proj", attend(q, k, v, 2, lambda t: every))  # noqa: B023
            h = gelu(linear(p, f"blocks.{i}.mlp.up", layer_norm(p, f"blocks.{i}.norm2", x, 1e-6)))
            x = x + linear(p, f"blocks.{i}.mlp.down", h)
        rows.append(gemm(p, "head", layer_norm(p, "norm", x, 1e-6)[0]))
    return {"logits": np.stack(rows)}


def llama(p: Arrays, feed: Arrays) -> Arrays:
    def norm(name: str, x: Array) -> Array:
        root = np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        scaled: Array = x / root * p[f"{name}.weight"]
        return scaled

    def turned(x: Array) -> Array:
        """Pairs (j, j + 3) of each head of six turn by t / 10000^(j / 3) at position t."""
        heads = x.reshape(len(x), -1, 2, 3)
        z = heads[:, :, 0] + 1j * heads[:, :, 1]
        z = z * np.exp(1j * np.arange(len(x))[:, None, None] * 10000.0 ** (-np.arange(3) / 3))
        return np.stack([z.real, z.imag], 2).reshape(x.shape)

    def shared(x: Array) -> Array:
        return np.repeat(x.reshape(len(x), 2, 6), 2, axis=1).reshape(len(x), 24)

    rows = []
    for ids in feed["input_ids"]:
        x = p["tokens.weight"][ids]
        for i in range(2):
            h = norm(f"blocks.{i}.attn_norm", x)
            q, k, v = (h @ p[f"blocks.{i}.attn.{n}.weight"] for n in "qkv")
            h = attend(turned(q), shared(turned(k)), shared(v), 4, lambda t: np.arange(t + 1))
            x = x + h @ p[f"blocks.{i}.attn.o.weight"]
            h = norm(f"blocks.{i}.mlp_norm", x)
            gate, up = (h @ p[f"blocks.{i}.mlp.{n}.weight"] for n in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ p[f"blocks.{i}.mlp.down.weight"]
        rows.append(norm("norm", x) @ p["head.weight"])
    return {"logits": np.stack(rows)}


def conv(w: Array, x: Array, stride: int) -> Array:
    """Each output pixel from its window of the zero-padded image."""
    size = w.shape[2]
    padded = np.pad(x, [(0, 0), (0, 0), (size // 2, size // 2), (size // 2, size // 2)])
    rows, columns = (range(0, n, stride) for n in x.shape[2:])
    y = np.zeros((len(x), len(w), len(rows), len(columns)))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            window = padded[:, :, row : row + size, column : column + size]
            y[:, :, i, j] = np.tensordot(window, w, ([1, 2, 3], [1, 2, 3]))
    return y


def convnet(p: Arrays, feed: Arrays, training: bool = False) -> Arrays:
    def conv_norm(name: str, x: Array, stride: int = 1) -> Array:
        x = conv(p[f"{name}.conv.weight"], x, stride).transpose(0, 2, 3, 1)
        stats = [p[f"{name}.norm.running_{s}"] for s in ("mean", "var")]
        mean, var = (x.mean((0, 1, 2)), x.var((0, 1, 2))) if training else stats
        x = (x - mean) / np.sqrt(var + 1e-5) * p[f"{name}.norm.weight"] + p[f"{name}.norm.bias"]
        return x.transpose(0, 3, 1, 2)

    x = np.maximum(conv_norm("stem", feed["x"]), 0)
    for stage, i in ((0, 0), (0, 1), (1, 0), (1, 1)):
        name, stride = f"stages.{stage}.{i}", 2 if (stage, i) == (1, 0) else 1
        h = np.maximum(conv_norm(f"{name}.conv1", x, stride), 0)
        x = x if stride == 1 else conv_norm(f"{name}.shortcut", x, stride)
        x = np.maximum(conv_norm(f"{name}.conv2", h) + x, 0)
    return {"logits": gemm(p, "head", x.mean((2, 3)))}


# ***** Arrayss, and the table of cases *****


def token_feed(rng: np.random.Generator, batch: int, length: int) -> Arrays:
    return {"input_ids": rng.integers(0, 40, (batch, length))}


def padded_feed(rng: np.random.Generator, batch: int, length: int) -> Arrays:
    mask = np.ones((batch, length), np.int64)
    mask[-1, length // 2 :] = 0
    types = rng.integers(0, 2, (batch, length))
    return {**token_feed(rng, batch, length), "attention_mask": mask, "token_type_ids": types}


def vector_feed(rng: np.random.Generator, batch: int, _: int) -> Arrays:
    return {"x": rng.standard_normal((batch, 20)).astype(np.float32)}


def image_feed(rng: np.random.Generator, batch: int, size: int) -> Arrays:
    return {"x": rng.standard_normal((batch, 3, size, size + 3)).astype(np.float32)}


def square_feed(rng: np.random.Generator, batch: int, _: int) -> Arrays:
    return {"pixels": rng.standard_normal((batch, 3, 12, 12)).astype(np.float32)}


CASES = {
    "gpt tied": ("gpt", GPT, token_feed, gpt),
    "gpt untied": ("gpt", [*GPT, "--no-tied"], token_feed, gpt),
    "encoder postnorm": ("encoder", ENCODER, padded_feed, encoder),
    "encoder prenorm": ("encoder", [*ENCODER, "--prenorm"], padded_feed, encoder),
    "encoder classifier": ("encoder", [*ENCODER, "--classes", "3"], padded_feed, encoder),
    "vit": ("vit", VIT, square_feed, vit),
    "llama": ("llama", LLAMA, token_feed, llama),
    "mlp": ("mlp", ["--widths", "20", "24", "16", "5"], vector_feed, mlp),
    "convnet": ("convnet", CONVNET, image_feed, convnet),
    "convnet training": (
        "convnet",
        [*CONVNET, "--training"],
        image_feed,
        lambda p, feed: convnet(p, feed, training=True),
    ),
}


def randomized(model: onnx.ModelProto, rng: np.random.Generator) -> Arrays:
    """Moves every parameter off its start, in place, and returns them in float64.

    At the start biases are 0, norms 1 and attention flat: much that is wrong would not show.
    """
    parameters = {}
    for tensor in model.graph.initializer:
        if tensor.name.startswith("const."):
            continue
        array = onnx.numpy_helper.to_array(tensor)
        moved = array + 0.3 * rng.standard_normal(array.shape)
        moved = np.abs(moved) + 0.5 if tensor.name.endswith("running_var") else moved
        tensor.CopyFrom(onnx.numpy_helper.from_array(moved.astype(np.float32), tensor.name))
        parameters[tensor.name] = moved.astype(np.float32).astype(np.float64)
    return parameters


@pytest.mark.parametrize("case", CASES)
def test_computes_its_formula(case: str, tmp_path: Path) -> None:
    name, options, make_feed, forward = CASES[case]
    model = onnx.load(write(name, tmp_path / "model.onnx", *options))
    rng = np.random.default_rng(0)
    parameters = randomized(model, rng)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for batch, size in ((2, 7), (3, 12)):
        feed = make_feed(rng, batch, size)
        expected = forward(parameters, feed)
        assert [output.name for output in session.get_outputs()] == list(expected)
        for got, want in zip(session.run(None, feed), expected.values(), strict=True):
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("case", CASES)
def test_well_formed(case: str, tmp_path: Path) -> None:
    """The checker agrees, inferred shapes reach every value, and node names are unique."""
    name, options, _, _ = CASES[case]
    model = onnx.load(write(name, tmp_path / "model.onnx", *options))
    onnx.checker.check_model(model, full_check=True)
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True).graph
    ranks = {v.name: v.type.tensor_type.HasField("shape") for v in inferred.value_info}
    outputs = {v.name for v in model.graph.output}
    assert all(ranks.get(v) or v in outputs for node in model.graph.node for v in node.output)
    for value in [*model.graph.input, *model.graph.output]:
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    assert [model.producer_name, model.producer_version] == ["onnx-fuse", ""]
    assert len({node.name for node in model.graph.node}) == len(model.graph.node)


def test_encoder_in_git_is_what_the_defaults_write(tmp_path: Path) -> None:
    written = write("encoder", tmp_path / "encoder.onnx")
    assert written.read_bytes() == (MODELS / "encoder.onnx").read_bytes()
    assert written.stat().st_size < 300_000


@pytest.mark.parametrize("name", ["gpt", "encoder", "vit", "llama", "mlp", "convnet"])
def test_bytes_follow_the_seed(name: str, tmp_path: Path) -> None:
    first, again, other = (
        write(name, tmp_path / f"{i}.onnx", "--seed", seed).read_bytes()
        for i, seed in enumerate(("3", "3", "4"))
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("name", "size", "parameters"),
    [
        ("gpt", "gpt2-small", 124_439_808),  # the published sizes
        ("encoder", "bert-base", 109_482_240),
        ("vit", "vit-b16", 86_567_656),
    ],
)
def test_full_size(name: str, size: str, parameters: int) -> None:
    """The published parameter count, from the model with no layer and with one."""
    module = builder(name)
    config = module.SIZES[size]

    def count(layers: int) -> int:
        graph = module.build(dataclasses.replace(config, layers=layers)).graph
        weights = (v for k, v in graph.initializers.items() if not k.startswith("const."))
        return sum(v.const_value.size for v in weights)

    embeddings = count(0)
    assert embeddings + config.layers * (count(1) - embeddings) == parameters


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt", ["--heads", "3"], "width 64 is not a multiple of heads 3"),
        ("encoder", ["--heads", "0"], "width 32 is not a multiple of heads 0"),
        ("vit", ["--patch", "7"], "image 32 is not a multiple of patch 7"),
        ("llama", ["--heads", "3"], "width 64 is not heads 3 times an even number"),
        ("llama", ["--kv_heads", "3"], "heads 4 are not a multiple of kv_heads 3"),
        ("mlp", ["--widths", "8"], "widths needs at least an input and an output"),
    ],
)
def test_refuses(
    name: str, options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        write(name, tmp_path / "model.onnx", *options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "model.onnx").exists()
