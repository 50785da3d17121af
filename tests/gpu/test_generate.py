"""Tokens of decoders on a GPU: those of onnxruntime, in every form, and the same from a seed."""

import pytest
import test_batcher
from test_generate import FORMS, MODELS, PROMPTS, by_hand

import onnx_fuse as of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", FORMS)
def test_each_prompt_of_a_batch_goes_on_as_by_hand(form: str) -> None:
    wanted = [by_hand(MODELS[form], prompt, 6) for prompt in PROMPTS]
    for source in (MODELS[form], of.InferenceSession(MODELS[form], device="cuda")):
        options = {"max_new_tokens": 6, "device": "cuda"}
        assert of.generate(source, PROMPTS, **options) == wanted
        options |= {"temperature": 1.5, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3}
        first = of.generate(source, PROMPTS, **options)
        assert of.generate(source, PROMPTS, **options) == first
        assert of.generate(source, PROMPTS[0], **options) == first[0]


def test_each_request_of_a_batcher_goes_on_as_alone() -> None:
    how = {"device": "cuda", "max_tokens": 40, "max_sequences": 3}
    with of.Batcher(MODELS["slotted"], **how, chunk=4) as batcher:
        test_batcher.test_each_request_gets_the_tokens_that_it_gets_alone(batcher)
