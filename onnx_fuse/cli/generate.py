"""`onnx-fuse generate`: text from a decoder."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from onnx_fuse.cli import files, show
from onnx_fuse.cli.options import with_options
from onnx_fuse.errors import UsageError
from onnx_fuse.generation.options import GeneratorOptions

EXAMPLES = (
    'onnx-fuse generate folder "Why is the sky blue?" --device cuda --precision fp16',
    "onnx-fuse generate model.onnx --ids 5,6,7 --max-new-tokens 20 --temperature 0.8 --seed 1",
)
OPTIONS = """
    model (MODEL_OR_FOLDER): The .onnx file of a decoder, or the folder that it is in, with its
        tokenizer.json and its genai_config.json or generation_config.json.
    prompt (PROMPT): The text to continue.
    ids (--ids 5,6,7): Continue these ids in place of a text, and print ids.
    system (--system TEXT): Begin the chat with this system message.
    raw (--raw): Do not apply the folder's chat template.
    tokenizer (--tokenizer FILE): Use this tokenizer.json instead of the folder's.
    """


@with_options(OPTIONS, GeneratorOptions)
def generate(
    model: Path,
    prompt: str | None = None,
    ids: str | None = None,
    system: str = "",
    raw: bool = False,
    tokenizer: Path | None = None,
    max_new_tokens: int = 128,
    max_length: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    eos: list[int] | None = None,
    chunk: int | None = None,
    draft: Path | None = None,
    guesses: int = 4,
    device: str = "cpu",
    precision: str = "fp32",
    json: Path | None = None,
    debug: bool = False,
) -> None:
    """Continue PROMPT with a decoder, and print the text while it comes.

    The folder's settings are the defaults of --max-length, --eos and the options of sampling,
    --temperature to --repetition-penalty.
    The last line, on standard error, has the time to the first token, tokens a second and memory.
    """
    from onnx_fuse.generation.generator import Generator
    from onnx_fuse.generation.text import Package

    package = Package.at(model)
    files.check_paths(
        {"MODEL": package.model, "--tokenizer": tokenizer, "--draft": draft}, {"--json": json}
    )
    if (prompt is None) == (ids is None):
        both = "" if ids is None else ", not both"
        raise UsageError(f"give a prompt, or ids with --ids 5,6,7{both}")
    text = package.text(tokenizer) if prompt is not None else None
    templated = bool(package.template) and not raw
    if system and not templated:
        raise UsageError(
            "--system needs a chat template: the folder has none, or --raw leaves it out"
        )
    if text is None:
        prompt_ids = _numbers(ids or "")
    else:
        words = package.chat(prompt or "", system) if templated else prompt or ""
        prompt_ids = text.ids(words, special=not templated)
    options: dict[str, Any] = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty,
    }  # fmt: skip
    chosen = {name: value for name, value in options.items() if value is not None}
    if temperature != 0:
        chosen = package.sampling | chosen
    generator = Generator(
        package.model, prompt_ids, max_new_tokens=max_new_tokens, seed=seed, chunk=chunk,
        eos=package.eos if eos is None else eos, max_length=max_length or package.max_length,
        device=device, precision=precision, draft=draft, guesses=guesses, **chosen,
    )  # fmt: skip
    times = [time.perf_counter()]
    pieces = []
    written = text.pieces(_timed(generator, times)) if text else (
        (token, f"{token} ") for token in _timed(generator, times)
    )  # fmt: skip
    try:
        for _, piece in written:
            pieces.append(piece)
            sys.stdout.write(piece)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
    data = {
        "model": str(package.model), "device": device, "prompt": prompt_ids,
        "tokens": generator.tokens[0][len(prompt_ids) :],
        "text": "".join(pieces) if text else None, **_speed(times, generator),
    }  # fmt: skip
    sys.stdout.flush()
    print(_summary(data), file=sys.stderr)
    show.Reports(json=json).write(show.printer(), data)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise UsageError(f"--ids {text}: expected ids such as 5,6,7") from None


def _timed(tokens: Iterable[int], times: list[float]) -> Iterator[int]:
    for token in tokens:
        times.append(time.perf_counter())
        yield token


def _speed(times: list[float], generator: Any) -> dict[str, float | None]:
    """Seconds to the first token, tokens a second behind it, and bytes of memory."""
    first = times[1] - times[0] if len(times) > 1 else None
    rate = (len(times) - 2) / (times[-1] - times[1]) if len(times) > 2 else None
    return {"first_token_s": first, "tokens_per_s": rate, **generator.memory()}


def _summary(data: dict[str, Any]) -> str:
    parts = [f"{len(data['prompt'])} tokens in, {len(data['tokens'])} out"]
    if data["first_token_s"] is not None:
        parts.append(f"the first after {data['first_token_s']:.3f} s")
    if data["tokens_per_s"] is not None:
        parts.append(f"then {data['tokens_per_s']:.1f} tokens/s")
    parts.append(f"cache {data['cache_bytes'] / 1e6:,.1f} MB")
    parts.append(f"memory {data['memory_bytes'] / 1e6:,.0f} MB")
    return ", ".join(parts)
