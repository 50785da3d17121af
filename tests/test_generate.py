"""Text from ids: every form of a decoder, against a plain loop over onnxruntime."""

import ctypes
import gc
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from decoders import VOCABULARY, bytes_of, gpt_cache, growing, slotted, whole
from fake_gpu import FakeGpu
from lowering import interpreted

import onnx_fuse as of
from onnx_fuse.feeds import argument
from onnx_fuse.generation import engine
from onnx_fuse.generation.decoder import decoder_of
from onnx_fuse.generation.options import DecoderOptions
from onnx_fuse.generation.sampling import LAST, sampler
from onnx_fuse.ir.build import Builder, text_model
from onnx_fuse.runtime.binding import Binding
from onnx_fuse.runtime.device import Memory, Stream
from onnx_fuse.runtime.tensor import Argument, DeviceTensor

PROMPTS = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6]]
FORMS: dict[str, Callable[[], ir.Model]] = {
    "slotted": slotted,
    "growing": growing,
    "whole": whole,
    "whole without a mask": lambda: whole(mask=False),
    "whole of one size": lambda: whole(mask=False, ids="int64[batch,16] input_ids"),
}
MODELS = {name: make() for name, make in FORMS.items()}


def by_hand(model: ir.Model, prompt: list[int], count: int) -> list[int]:
    """The most probable tokens, of one prompt, by a plain loop over onnxruntime."""
    session = onnxruntime.InferenceSession(bytes_of(model))
    ends = {v.name: v for v in session.get_inputs()}
    pasts = {
        n: np.zeros([d if isinstance(d, int) else (1 if i == 0 else 0) for i, d in
                     enumerate(v.shape)], np.float16 if "16" in v.type else np.float32)
        for n, v in ends.items() if "past" in n
    }  # fmt: skip
    tokens, given = list(prompt), 0
    outputs = [v.name for v in session.get_outputs()]
    for _ in range(count):
        ids = np.array([tokens[given:]])
        width = ends["input_ids"].shape[1]
        if isinstance(width, int):
            ids = np.array([tokens + [0] * (width - len(tokens))])
        feeds = {"input_ids": ids, **pasts}
        if "attention_mask" in ends:
            feeds["attention_mask"] = np.ones((1, len(tokens)), np.int64)
        if "position_ids" in ends:
            feeds["position_ids"] = np.arange(given, len(tokens))[None]
        results = dict(zip(outputs, session.run(None, feeds), strict=True))
        pasts = {n: results[n.replace("past_key_values", "present")] for n in pasts}
        given = len(tokens) if pasts else 0
        place = len(tokens) - 1 if isinstance(width, int) else -1
        tokens.append(int(results["logits"][0, place].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("form", FORMS)
def test_each_prompt_of_a_batch_goes_on_as_by_hand(form: str) -> None:
    model = MODELS[form]
    wanted = [by_hand(model, prompt, 6) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in wanted}) == len(wanted)
    for source in (model, of.InferenceSession(model)):
        assert of.generate(source, PROMPTS, max_new_tokens=6) == wanted
        assert of.generate(source, PROMPTS[2], max_new_tokens=6) == wanted[2]
        assert of.generate(source, np.array([PROMPTS[2]] * 2), max_new_tokens=6) == [wanted[2]] * 2


@pytest.mark.parametrize("form", ["slotted", "growing"])
def test_a_prompt_in_chunks_gives_the_same(form: str) -> None:
    model = MODELS[form]
    wanted = of.generate(model, PROMPTS, max_new_tokens=5)
    for chunk in (1, 2, 4, 99):
        assert of.generate(model, PROMPTS, max_new_tokens=5, chunk=chunk) == wanted


class OnDevice(of.InferenceSession):
    """A session whose memory is a GPU's made of the host's, and whose programs NumPy runs."""

    def __init__(self, model: Any, *, device: str = "cuda", precision: str = "fp32") -> None:
        assert device.startswith("cuda")
        super().__init__(model)
        self.device, self.runs = "cuda", list[dict[str, Any]]()

    def io_binding(self) -> Binding:
        return Binding([v.name for v in self.get_outputs()], 0)

    def run_with_iobinding(self, iobinding: Any, *_: Any, synchronize: bool = True) -> None:
        feeds = {n: np.asarray(v) for n, v in iobinding.feeds.items()}
        self.runs.append(dict(iobinding.feeds))
        results = interpreted(self.model, feeds)
        iobinding.results = {}
        for name, where in iobinding.targets.items():
            array = np.ascontiguousarray(results[name])
            result: Any = array
            if where == "cuda":
                place = iobinding.places.get(name)
                memory = None if place else Memory(array.nbytes, "an output")
                result = place or DeviceTensor(memory.address, array.shape, array.dtype, 0, memory)
                assert (result.shape, result.dtype) == (array.shape, array.dtype), name
                ctypes.memmove(result.address, array.ctypes.data, array.nbytes)
                result.ready = None if synchronize else Stream()
            iobinding.results[name] = result


def test_runs_of_a_text_that_nobody_reads_are_waited_for(gpu: FakeGpu) -> None:
    """They write to memory of the host's, which goes with the text."""
    generator = of.Generator(MODELS["growing"], PROMPTS[0], max_new_tokens=9, device="cuda")
    next(generator), next(generator)
    assert len(generator._begun_runs) == 2
    gpu.order.clear()
    del generator
    gc.collect()
    assert "done" in [kind for kind, *_ in gpu.order]


@pytest.mark.parametrize("capacity", [0, 64])
def test_a_token_follows_another_without_a_copy(capacity: int, gpu: FakeGpu) -> None:
    """How many came before is counted on the GPU."""
    model = gpt_cache.build(gpt_cache.Config(capacity=capacity))
    options = {"max_new_tokens": 20, "device": "cuda", "precision": "fp16"}
    generator = of.Generator(model, [5], **options)
    tokens = [next(generator) for _ in range(12)]
    gpu.counts.clear()
    tokens += [next(generator) for _ in range(4)]
    assert not [name for name in gpu.counts if name.startswith("cuMemcpy")]
    assert tokens == of.generate(model, [5], max_new_tokens=16)


@pytest.mark.parametrize("form", FORMS)
def test_on_a_gpu_neither_cache_nor_logits_go_through_the_host(
    form: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[form]
    wanted = of.generate(model, PROMPTS[:2], max_new_tokens=4)
    monkeypatch.setattr(engine, "InferenceSession", OnDevice)
    for source in (model, OnDevice(model)):
        generator = of.Generator(source, PROMPTS[:2], max_new_tokens=4, device="cuda")
        assert [list(new) for new in zip(*generator, strict=True)] == wanted
        # a token is not waited for before the run that reads it begins
        assert generator._is_ahead == ("whole" not in form)
        assert gpu.counts["cuEventSynchronize"] == 3 * generator._is_ahead
        assert not gpu.counts["cuMemcpyDtoHAsync"], "the run itself writes where the host reads"
        gpu.counts.clear()
        sessions = [s for s in (generator._engine.session, generator._engine.sampler) if s]
        for feeds in [feeds for session in sessions for feeds in session.runs]:
            host = {n for n, v in feeds.items() if isinstance(v, np.ndarray) and v.size}
            assert not {n for n in host if "past" in n or "logits" in n}
    if form == "growing":  # and the draft's cache is cut there
        options = {"max_new_tokens": 4, "draft": OnDevice(NEAR[form])}
        assert of.generate(OnDevice(model), PROMPTS[0], **options) == wanted[0]


options_of = partial(DecoderOptions, None)


def drawing(logits: np.ndarray, sampling: DecoderOptions, **inputs: np.ndarray) -> np.ndarray:
    """The tokens that the sampler's graph takes from logits [B, S, V]."""
    shape = ["batch", "sequence", logits.shape[2]]
    name = "float16" if logits.dtype == np.float16 else "float"
    model = sampler(Argument("logits", f"tensor({name})", shape), sampling, LAST in inputs)
    return of.InferenceSession(model).run(None, {"logits": logits, **inputs})[0][:, 0]


def test_tokens_come_as_often_as_their_probabilities_say() -> None:
    rng = np.random.default_rng(0)
    logits = rng.standard_normal(VOCABULARY).astype(np.float32) * 2
    share = np.exp(logits / 0.8)
    share /= share.sum()
    order = np.argsort(-share)
    nucleus = order[: int(np.searchsorted(np.cumsum(share[order]), 0.7)) + 1]
    cases = {
        options_of(temperature=0.8): order,
        options_of(temperature=0.8, top_k=5): order[:5],
        options_of(temperature=0.8, top_p=0.7): nucleus,
        options_of(temperature=0.8, min_p=0.2): np.flatnonzero(share >= 0.2 * share.max()),
        options_of(temperature=0.8, top_k=1): order[:1],
        options_of(temperature=0.8, top_k=99, top_p=0.7, min_p=0.3): [
            t for t in nucleus if share[t] >= 0.3 * share.max()
        ],
    }
    count = 20_000
    drawn = rng.random((count, 1), np.float32)
    for sampling, allowed in cases.items():
        tokens = drawing(np.tile(logits, (count, 1, 1)), sampling, drawn=drawn)
        wanted = np.zeros(VOCABULARY)
        wanted[allowed] = share[allowed] / share[allowed].sum() * count
        times = np.bincount(tokens, minlength=VOCABULARY)
        assert not times[wanted == 0].any()
        there = wanted > 0
        squares = ((times - wanted)[there] ** 2 / wanted[there]).sum()
        assert squares < 2 * there.sum() + 20, sampling


def test_no_draw_takes_a_token_without_a_share() -> None:
    logits = np.full((4, 1, 6), -np.inf, np.float16)
    logits[:, :, 2:4] = 1
    ends = np.array([[0], [np.nextafter(np.float32(1), np.float32(0))], [0.4999], [0.5]])
    options: list[dict[str, Any]] = [
        {"temperature": 1}, {"temperature": 1, "top_p": 0.9}, {"temperature": 1e-50},
        {"temperature": 2, "top_k": 3, "min_p": 0.5}, {"temperature": 1e30},
    ]  # fmt: skip
    for sampling in (options_of(**each) for each in options):
        tokens = drawing(logits, sampling, drawn=ends.astype(np.float32))
        assert tokens.tolist() == [2, 3, 2, 3]


def test_a_penalty_counts_once_for_each_token_that_came() -> None:
    logits = np.array([[[3, 2.5, -1, -3]], [[-1, -1.5, -9, -9]]], np.float32)
    came = np.array([[0, 0, 2], [0, 3, 0]])
    found = drawing(logits, options_of(repetition_penalty=1.4), tokens_so_far=came)
    assert found.tolist() == [1, 0]
    found = drawing(logits, options_of(repetition_penalty=1.6), tokens_so_far=came)
    assert found.tolist() == [1, 1]


def test_each_sequence_has_its_last_position() -> None:
    logits = np.eye(5, dtype=np.float32)[None].repeat(3, 0)
    places = np.array([[4], [0], [2]])
    assert drawing(logits, options_of(), last_position=places).tolist() == [4, 0, 2]
    assert drawing(logits, options_of()).tolist() == [4, 4, 4]


@pytest.mark.parametrize("form", FORMS)
def test_one_seed_gives_one_text(form: str) -> None:
    options = {"max_new_tokens": 6, "temperature": 1.5, "top_k": 30, "repetition_penalty": 1.2}
    session = of.InferenceSession(MODELS[form])
    first = of.generate(session, PROMPTS, seed=1, **options)
    assert of.generate(MODELS[form], PROMPTS, seed=1, **options) == first
    assert of.generate(session, PROMPTS[0], seed=1, **options) == first[0]
    assert of.generate(session, PROMPTS, seed=2, **options) != first
    assert of.generate(session, PROMPTS, **options) != of.generate(session, PROMPTS, **options)
    greedy = of.generate(session, PROMPTS, max_new_tokens=6)
    assert of.generate(session, PROMPTS, max_new_tokens=6, temperature=2, top_k=1) == greedy


def collect(into: list[tuple[int, int]], row: int, token: int) -> None:
    into.append((row, token))


def test_a_sequence_ends_by_itself() -> None:
    for form in ("slotted", "growing", "whole"):
        session = of.InferenceSession(MODELS[form])
        free = of.generate(session, PROMPTS, max_new_tokens=6)
        ends = [free[0][1], free[1][3]]
        seen: list[tuple[int, int]] = []
        options = {"max_new_tokens": 6, "stream": partial(collect, seen)}
        ended = of.generate(session, PROMPTS, eos=ends, **options)
        for row, tokens in enumerate(free):
            stop = next((i + 1 for i, t in enumerate(tokens) if t in ends), 6)
            assert ended[row] == tokens[:stop] == [t for r, t in seen if r == row]
        assert of.generate(session, PROMPTS[0], max_new_tokens=6, eos=free[0][0]) == free[0][:1]
        assert of.generate(session, PROMPTS, max_new_tokens=0) == [[], [], []]


REFUSED = {
    "an empty prompt": (lambda: of.generate(growing(), []), "prompt 0 is empty: give one id"),
    "an empty prompt of two": (lambda: of.generate(growing(), [[1], []]), "prompt 1 is empty"),
    "floats": (lambda: of.generate(growing(), [0.5]), "prompt 0 is not a sequence of integers"),
    "an id": (lambda: of.generate(growing(), [1, 40]), "prompt 0 has the id 40: .* ids 0 to 39"),
    "a ragged batch": (
        lambda: of.generate(growing(mask=False), PROMPTS),
        "prompts of different lengths need its input attention_mask, which it has not",
    ),
    "too long": (lambda: of.generate(slotted(), [1] * 513), "holds 512 tokens of a sequence, and"),
    "a limit": (
        lambda: of.generate(growing(), [1, 2], max_new_tokens=9, max_length=4),
        "holds 4 tokens of a sequence, and token 5 has no place",
    ),
    "top_p": (lambda: of.generate(growing(), [1], top_p=0.5), "top_p needs a temperature above 0"),
    "temperature": (lambda: of.generate(growing(), [1], temperature=-1), "temperature is -1: it"),
    "a chunk": (lambda: of.generate(growing(), [1], chunk=0), "chunk is 0: it must be at least 1"),
    "tokens of a half": (
        lambda: of.generate(growing(), [1], max_new_tokens=2.5),  # type: ignore[arg-type]
        "max_new_tokens is 2.5: it takes a whole number",
    ),
    "a chunk of a half": (
        lambda: of.generate(growing(), [1], chunk=1.5),  # type: ignore[arg-type]
        "chunk is 1.5: it takes a whole number",
    ),
    "a text as a number": (
        lambda: of.generate(growing(), [1], temperature="1"),  # type: ignore[arg-type]
        "temperature is '1': it takes a number",
    ),
    "no end": (
        lambda: of.generate(growing(), [1], eos=None),  # type: ignore[arg-type]
        "eos is None: give the id of a token, or several",
    ),
    "a text as an end": (
        lambda: of.generate(growing(), [1], eos="5"),  # type: ignore[arg-type]
        "eos is '5': give the id of a token",
    ),
    "one id alone": (
        lambda: of.generate(growing(), 5),  # type: ignore[arg-type]
        "ids is 5: it takes a list",
    ),
    "one id among prompts": (
        lambda: of.generate(growing(), [[1, 2], 3]), "prompt 1 is not a sequence of integers",
    ),
    "prompts in a prompt": (
        lambda: of.generate(growing(), [[[1], [2, 3]]]), "prompt 0 is not a sequence of integers",
    ),
    "an encoder": (
        lambda: of.generate(
            text_model("g (int64[N,S] input_ids) => (float[N,S] last_hidden_state)"
                       "{ last_hidden_state = Cast<to = 1>(input_ids) }"), [1]
        ),
        "needs one output 'logits' .*: none",
    ),
    "positions without a row": (
        lambda: of.generate(growing(), [1] * 65), "holds 64 tokens of a sequence, and token 65",
    ),
    "no decoder": (
        lambda: of.generate(text_model("g (float[N] x) => (float[N] y) { y = Relu(x) }"), [1]),
        r"the model: input 'x' \(float, rank 1\) is not one that generate fills",
    ),
    "another input of rank 4": (
        lambda: of.generate(
            text_model("g (int64[N,S] ids, float[N,1,S,S] bias) => (float[N,S] y)"
                       "{ y = Cast<to = 1>(ids) }"), [1]
        ),
        "input 'bias' .* is not one that generate fills",
    ),
    "two outputs": (
        lambda: of.generate(
            text_model("g (int64[N,S] ids) => (float[N,S] y, float[N,S] z)"
                       "{ y = Cast<to = 1>(ids) z = Neg(y) }"), [1]
        ),
        "needs one output 'logits' .*: y, z",
    ),
    "NaN": (
        lambda: of.generate(
            text_model("g (int64[N,S] ids) => (float[N,S,4] y) { s = Constant<value = int64[1] {2}>"
                       "() u = Unsqueeze(ids, s) f = Cast<to = 1>(u) l = Log(f)"
                       " z = Constant<value = float[4] {-1, 1, 1, 1}>() y = Mul(l, z)"
                       " }"), [[2, 3], [2, 0]],
        ),
        "the logits of token 2 of sequence 1 are not finite",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_a_sentence(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises((of.UsageError, of.ModelError), match=words) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_full_cache_keeps_what_is_in_it() -> None:
    model = slotted()
    for layer in range(2):
        for value in (*model.graph.inputs, *model.graph.outputs):
            if f".{layer}." in value.name:
                value.shape = ir.Shape([1, 2, 8, 16])
    generator = of.Generator(model, [1, 2, 3], max_new_tokens=9)
    tokens = [next(generator) for _ in range(6)]
    before = {n: memory[2].copy() for n, memory in generator._engine._slots.items()}
    with pytest.raises(of.UsageError, match="holds 8 tokens of a sequence, and token 9 has no"):
        next(generator)
    for name, (_, _, memory) in generator._engine._slots.items():
        np.testing.assert_array_equal(memory, before[name])
    assert tokens == of.generate(MODELS["slotted"], [1, 2, 3], max_new_tokens=6)


def test_a_file_in_the_cache_has_the_sampler_of_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONNX_FUSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("onnx_fuse.session._KEPT", 1)
    path = tmp_path / "model.onnx"
    path.write_bytes(bytes_of(MODELS["slotted"]))
    for options in ({}, {"repetition_penalty": 1.5}):
        wanted = of.generate(MODELS["slotted"], PROMPTS[0], max_new_tokens=6, **options)
        for _ in range(2):
            assert of.generate(path, PROMPTS[0], max_new_tokens=6, **options) == wanted
            for thread in threading.enumerate():
                if thread.name == "onnx_fuse cache":
                    thread.join()
    assert len([*(tmp_path / "graphs").iterdir()]) == 2


def test_a_mask_is_as_long_as_the_tokens_where_a_graph_asks() -> None:
    """As where the number of tokens chooses the angles of a long text."""
    for asked, elastic in ((None, True), ("ReduceSum", True), ("Shape", False), ("Cast", False)):
        model = slotted()
        mask = next(v for v in model.graph.inputs if v.name == "attention_mask")
        node = next((n for n in model.graph if n.op_type == asked), None)
        value = mask if asked == "Cast" else None if node is None else node.outputs[0]
        if value is not None:
            op = Builder()
            op.Greater(value, 7) if asked == "Shape" else op.Neg(value)
            model.graph.extend(op.nodes)
        ends = [[argument(v) for v in side] for side in (model.graph.inputs, model.graph.outputs)]
        assert decoder_of(*ends, model.graph).elastic is elastic, asked


def test_names_of_other_exporters_are_understood() -> None:
    wanted = of.generate(MODELS["growing"], PROMPTS, max_new_tokens=4)
    for names in (
        ("past_key_0", "past_value_0", "present_key_0", "present_value_0"),
        ("past_0_key", "past_0_value", "out_0_value", "out_0_key"),
        ("past_k", "past_v", "new_a", "new_b"),
    ):
        model = growing(names=names)
        if names[2] == "out_0_value":  # as they are called, not as they come
            names = (*names[:2], names[3], names[2])
            model = growing(names=names)
        assert of.generate(model, PROMPTS, max_new_tokens=4) == wanted


def test_positions_may_be_those_of_the_cache() -> None:
    wanted = of.generate(MODELS["growing"], PROMPTS[2], max_new_tokens=4)
    for positions in ("int64[sequence] cache_position", "int64[sequence] position"):
        model = growing(positions=positions)
        assert of.generate(model, PROMPTS[2], max_new_tokens=4, chunk=4) == wanted


def test_a_fixed_cache_with_a_position_takes_one_token_at_a_time() -> None:
    grown, fixed = (gpt_cache.build(gpt_cache.Config(capacity=c)) for c in (0, 12))
    wanted = of.generate(grown, [1, 2, 3], max_new_tokens=5)
    assert of.generate(fixed, [1, 2, 3], max_new_tokens=5) == wanted


def near(model: ir.Model) -> ir.Model:
    """A decoder that often says the same."""
    model = model.clone()
    for name, value in model.graph.initializers.items():
        if name in ("head", "head.weight"):
            array = value.const_value.numpy()
            noise = np.random.default_rng(1).standard_normal(array.shape).astype(array.dtype)
            value.const_value = ir.tensor(array + noise * array.std() * array.dtype.type(0.3))
    return model


NEAR = {name: near(model) for name, model in MODELS.items()}
PAIRS = [(form, form) for form in FORMS]
PAIRS += [("slotted", "growing"), ("growing", "slotted"), ("whole", "growing")]


@pytest.mark.parametrize(("form", "drafted"), PAIRS)
def test_a_draft_changes_no_token(form: str, drafted: str) -> None:
    session, draft = of.InferenceSession(MODELS[form]), of.InferenceSession(NEAR[drafted])
    prompt = PROMPTS[2]
    wanted = of.generate(session, prompt, max_new_tokens=9)
    for more in ({"guesses": 1}, {"guesses": 3, "chunk": 4}):
        assert of.generate(session, prompt, max_new_tokens=9, draft=draft, **more) == wanted
    ended = of.generate(session, prompt, max_new_tokens=9, draft=session, eos=wanted[4])
    assert ended == wanted[: wanted.index(wanted[4]) + 1]


def test_a_draft_that_is_right_saves_runs() -> None:
    runs = []

    class Counted(of.InferenceSession):
        def run_with_iobinding(self, *arguments: Any, **more: Any) -> None:
            runs.append(self)
            super().run_with_iobinding(*arguments, **more)

    for form in ("slotted", "growing"):
        runs.clear()
        session = Counted(MODELS[form])
        of.generate(session, [1, 2], max_new_tokens=11, draft=MODELS[form], guesses=4)
        assert len(runs) == 3  # the prompt, then 5 tokens each


def test_a_draft_is_refused_where_it_cannot_guess() -> None:
    model = MODELS["growing"]
    for options in ({"temperature": 1}, {"repetition_penalty": 2}):
        with pytest.raises(of.UsageError, match="a draft needs one prompt, a temperature of 0"):
            of.generate(model, [1], draft=model, **options)
    with pytest.raises(of.UsageError, match="a draft needs one prompt"):
        of.generate(model, PROMPTS, draft=model)
    fixed = gpt_cache.build(gpt_cache.Config(capacity=12))
    with pytest.raises(of.ModelError, match="takes one token at a time: leave the draft out"):
        of.generate(fixed, [1], draft=model)
    wanted = of.generate(slotted(), [1, 2, 3], max_new_tokens=6)
    assert of.generate(slotted(), [1, 2, 3], max_new_tokens=6, draft=fixed) == wanted
