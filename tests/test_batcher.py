"""Requests that come and go: each is continued as it would be alone, whatever the others do."""

import asyncio
import time
from collections.abc import Iterator
from threading import Thread
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from decoders import growing, slotted
from fake_gpu import FakeGpu
from test_generate import OnDevice

import onnx_fuse as of
from onnx_fuse.generation import engine
from onnx_fuse.generation.decoder import Decoder

PROMPTS = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6], [7] * 20, [3, 1], [250, 13]]
SESSION = of.InferenceSession(slotted())
SAMPLED = {"temperature": 1.2, "top_k": 40, "repetition_penalty": 1.1}


def alone(row: int, **options: Any) -> list[int]:
    return of.generate(SESSION, PROMPTS[row], max_new_tokens=5 + row, **options)


WANTED = [alone(row) for row in range(len(PROMPTS))]


@pytest.fixture(params=["cpu", "cuda"])
def batcher(
    gpu: FakeGpu, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[of.Batcher]:
    """On "cuda" a run begins before the tokens of the last one are read."""
    on_gpu = request.param == "cuda"
    with monkeypatch.context() as patch:
        if on_gpu:
            patch.setattr(engine, "InferenceSession", OnDevice)
        how: dict[str, Any] = {"device": request.param, "max_tokens": 40, "max_sequences": 3}
        made = of.Batcher(slotted() if on_gpu else SESSION, chunk=4, **how)
    with made:
        yield made
    made._engine.__dict__.clear()  # what pytest keeps holds nothing of the driver behind `gpu`


def test_each_request_gets_the_tokens_that_it_gets_alone(batcher: of.Batcher) -> None:
    for order in (range(6), reversed(range(6))):
        requests = {
            row: batcher.submit(PROMPTS[row], max_new_tokens=5 + row) for row in order
        }  # fmt: skip
        assert [requests[row].result(60) for row in range(6)] == WANTED
        assert [list(requests[row]) for row in range(6)] == WANTED
    end = WANTED[2][3]
    ended = batcher.submit(PROMPTS[2], max_new_tokens=7, eos=[end]).result(60)
    assert ended == WANTED[2][: WANTED[2].index(end) + 1]
    assert batcher.submit([1], max_new_tokens=0).result(60) == []


def test_a_seed_draws_as_it_does_alone() -> None:
    wanted = [alone(row, seed=row, **SAMPLED) for row in range(6)]
    for slots in (1, 4):
        with of.Batcher(SESSION, max_tokens=64, max_sequences=slots, chunk=3, **SAMPLED) as made:
            requests = [
                made.submit(prompt, max_new_tokens=5 + row, seed=row)
                for row, prompt in enumerate(PROMPTS)
            ]
            assert [request.result(60) for request in requests] == wanted


def test_threads_and_coroutines_may_submit(batcher: of.Batcher) -> None:
    found: dict[int, list[int]] = {}

    def work(row: int) -> None:
        found[row] = list(batcher.submit(PROMPTS[row], max_new_tokens=5 + row))

    threads = [Thread(target=work, args=(row,)) for row in range(6)]
    for thread in threads:
        thread.start()

    async def one(row: int) -> list[int]:
        return [token async for token in batcher.submit(PROMPTS[row], max_new_tokens=5 + row)]

    async def several() -> list[list[int]]:
        awaited = batcher.submit(PROMPTS[0], max_new_tokens=5)
        tokens = await asyncio.gather(*map(one, range(6)))
        assert await awaited == WANTED[0]
        async for _ in batcher.submit(PROMPTS[0], max_new_tokens=30):
            break  # nobody listens to the rest
        return list(tokens)

    assert asyncio.run(several()) == WANTED
    for thread in threads:
        thread.join(60)
    assert [found[row] for row in range(6)] == WANTED


def test_prompts_of_all_lengths_take_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, feeds = set(), Decoder.feeds

    def seen(decoder: Decoder, *given: Any) -> Any:
        found = feeds(decoder, *given)
        shapes.add((found["input_ids"].shape, found["attention_mask"].shape))
        return found

    prompts = [[n % 250 for n in range(length)] for length in (5, 33, 47, 64, 70, 99, 130, 205)]
    wanted = [of.generate(SESSION, prompt, max_new_tokens=3) for prompt in prompts]
    monkeypatch.setattr(Decoder, "feeds", seen)
    with of.Batcher(SESSION, max_tokens=256, max_sequences=6, chunk=64) as batcher:
        requests = [batcher.submit(prompt, max_new_tokens=3) for prompt in prompts]
        assert [request.result(60) for request in requests] == wanted
    alone = {((1, n), (1, 256)) for n in (5, 32, 64)}
    assert alone < shapes <= alone | {((n, 1), (n, 256)) for n in (1, 4, 6)}


def test_a_request_that_is_cancelled_leaves_its_slot() -> None:
    with of.Batcher(SESSION, max_tokens=500, max_sequences=1, chunk=2) as batcher:
        long = batcher.submit([4, 4], max_new_tokens=490)
        behind = batcher.submit(PROMPTS[0], max_new_tokens=5)
        never = batcher.submit([1] * 100, max_new_tokens=5)
        never.cancel()
        first = next(iter(long))
        long.cancel()
        assert behind.result(60) == WANTED[0]
        assert long.result(60)[0] == first
        assert len(long.result(60)) < 490
        assert never.result(60) == []


def test_what_is_under_way_ends_when_it_is_closed() -> None:
    batcher = of.Batcher(SESSION, max_tokens=500, max_sequences=1)
    requests = [batcher.submit([4], max_new_tokens=490) for _ in range(2)]
    next(iter(requests[0]))
    batcher.close()
    assert 0 < len(requests[0].result(0)) < 490
    assert requests[1].result(0) == []
    with pytest.raises(of.UsageError, match="the batcher takes no requests: it is closed"):
        batcher.submit([1])
    batcher.close()


def test_a_sequence_that_is_not_a_number_is_the_only_one_to_fail() -> None:
    model = slotted()
    table = next(v for n, v in model.graph.initializers.items() if n == "tokens.weight")
    rows = table.const_value.numpy().copy()
    rows[13] = np.nan
    table.const_value = ir.tensor(rows)
    with of.Batcher(model, max_tokens=64, max_sequences=3) as batcher:
        for _ in range(2):  # and what it left in a slot harms nobody
            requests = [batcher.submit(p, max_new_tokens=5 + i) for i, p in enumerate(PROMPTS)]
            assert [request.result(60) for request in requests[:5]] == WANTED[:5]
            with pytest.raises(of.ModelError, match="logits of token 2 are not finite"):
                requests[5].result(60)
            with pytest.raises(of.ModelError, match="logits of token 2 are not finite"):
                list(requests[5])


def test_a_fault_of_the_decoder_reaches_every_request(batcher: of.Batcher) -> None:
    def fail(*_: object) -> None:
        time.sleep(0.05)
        raise of.DeviceError("the GPU is gone")

    batcher._engine.run = fail  # type: ignore[method-assign, assignment]
    requests = [batcher.submit([1], max_new_tokens=9) for _ in range(5)]
    for request in requests:
        with pytest.raises(of.DeviceError, match="the GPU is gone"):
            request.result(60)
    with pytest.raises(of.UsageError, match="the batcher takes no requests: the GPU is gone"):
        batcher.submit([1], max_new_tokens=9)


def test_what_has_no_room_is_refused(batcher: of.Batcher) -> None:
    with pytest.raises(of.UsageError, match="of 30 tokens and 11 new ones do not fit a slot of 40"):
        batcher.submit([1] * 30, max_new_tokens=11)
    with pytest.raises(of.UsageError, match="submit takes one prompt"):
        batcher.submit([[1], [2]])  # type: ignore[list-item]
    with pytest.raises(of.UsageError, match="prompt 0 has the id 256"):
        batcher.submit([256])
    with pytest.raises(of.UsageError, match="max_sequences is 0: it must be at least 1"):
        of.Batcher(SESSION, max_sequences=0)
    with pytest.raises(of.ModelError, match="needs a decoder with GroupQueryAttention"):
        of.Batcher(growing())
