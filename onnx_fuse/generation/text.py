"""A folder with a decoder: the file, its settings, its tokenizer and its chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx_fuse.errors import INSTALL_TEXT, ModelError, UsageError

_FILES = ("model.onnx", "decoder_model_merged.onnx", "onnx/model.onnx")
"""What exporters call a decoder."""
_OPTIONS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Package:
    """A decoder's file, and what stands beside it."""

    model: Path
    eos: tuple[int, ...] = ()
    max_length: int | None = None
    """Tokens of a sequence, of which a prompt is a part."""
    sampling: dict[str, Any] = field(default_factory=dict)
    """Options of `generate` that the folder proposes."""
    tokenizer: Path | None = None
    template: str | None = None
    """The chat template, a text of Jinja."""
    tokens: dict[str, str] = field(default_factory=dict)
    """bos_token and eos_token, by which a template names them."""

    @classmethod
    def at(cls, path: Path) -> Package:
        """Read what is in a folder, or beside a file: genai_config.json or those of transformers.

        Raises ModelError where a file is missing or malformed.
        """
        folder = path if path.is_dir() else path.parent
        genai = _json(folder / "genai_config.json")
        search, model = _part(genai, "search"), _part(genai, "model")
        if not genai:
            model = _json(folder / "config.json") | _json(folder / "generation_config.json")
            search = model
        ends = model.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        length = model.get("context_length") or model.get("max_position_embeddings")
        beside = (folder, folder.parent) if folder.name == "onnx" else (folder,)
        of_text = next((c for p in beside if (c := _json(p / "tokenizer_config.json"))), {})
        template = of_text.get("chat_template")
        if isinstance(template, list):  # several of a name each
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        for file in (p / "chat_template.jinja" for p in beside):
            template = file.read_text(encoding="utf-8") if file.is_file() else template
        tokens = {}
        for name in ("bos_token", "eos_token"):
            token = of_text.get(name)
            tokens[name] = str(token.get("content", "") if isinstance(token, dict) else token or "")
        return cls(
            path if not path.is_dir() else _file_in(path, _part(model, "decoder").get("filename")),
            tuple(e for e in ends if isinstance(e, int)),
            length if isinstance(length, int) else None,
            {n: v for n in _OPTIONS if isinstance(v := search.get(n), int | float)}
            if search.get("do_sample")
            else {},
            next((f for p in beside if (f := p / "tokenizer.json").is_file()), None),
            template if isinstance(template, str) else None,
            tokens,
        )

    def text(self, tokenizer: Path | None = None) -> Text:
        """The tokenizer. Raises UsageError where there is none, or no package that reads it."""
        path = tokenizer or self.tokenizer
        if path is None and not self.model.exists():
            raise UsageError(f"{self.model}: there is no such file or folder")
        if path is None:
            raise UsageError(
                f"{self.model}: there is no tokenizer.json beside it: give one with --tokenizer, "
                "or a prompt of ids with --ids"
            )
        return Text(path)

    def chat(self, prompt: str, system: str = "") -> str:
        """The prompt as the chat template puts it, or as it is where there is none."""
        if self.template is None:
            return prompt
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise UsageError(
                f"the chat template needs jinja2: {INSTALL_TEXT}; or leave it out with --raw"
            ) from error

        def refuse(text: str) -> None:
            raise TemplateError(text)

        turns = [{"role": "system", "content": system}] if system else []
        turns.append({"role": "user", "content": prompt})
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(self.template).render(
                messages=turns, add_generation_prompt=True, **self.tokens
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ModelError(
                f"the chat template of {self.model}: {error}; --raw leaves it out"
            ) from error


class Text:
    """A tokenizer.json: text to ids, and ids to text while they come."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
            from tokenizers.decoders import DecodeStream
        except ImportError as error:
            raise UsageError(
                f"{path}: text needs the package tokenizers: {INSTALL_TEXT}; or give ids with --ids"
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises no class of its own
            raise ModelError(f"{path}: it is no tokenizer: {error}") from error
        self._stream = DecodeStream

    def ids(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of a text, with those that a prompt begins and ends with where `special`."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def pieces(self, tokens: Iterator[int]) -> Iterator[tuple[int, str]]:
        """Each token with the text that it completes, which may be empty."""
        stream = self._stream(skip_special_tokens=True)
        for token in tokens:
            yield token, stream.step(self._tokenizer, token) or ""


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path}: it is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: it must hold a JSON object")
    return content


def _part(content: dict[str, Any], name: str) -> dict[str, Any]:
    part = content.get(name)
    return part if isinstance(part, dict) else {}


def _file_in(folder: Path, name: object) -> Path:
    """The decoder of a folder; a `name` of its settings may not lead out of it."""
    if isinstance(name, str):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ModelError(f"{folder}/genai_config.json: {name} is not in the folder")
        candidates: Sequence[Path] = [folder / name]
    else:
        candidates = [folder / file for file in _FILES if (folder / file).is_file()]
        candidates = candidates or sorted(folder.glob("*.onnx"))
    if not candidates or (len(candidates) > 1 and candidates[0].name != _FILES[0]):
        names = ", ".join(path.name for path in candidates) or "no .onnx file"
        raise ModelError(f"{folder}: it has {names}: give the file of the decoder")
    return candidates[0]
