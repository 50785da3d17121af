"""`onnx-fuse generate`: folders of exporters, text and ids, and what it says where it cannot."""

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
from decoders import growing, slotted
from support import Cli
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import onnx_fuse as of
from onnx_fuse.generation.text import Package
from onnx_fuse.importer.save import save

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenizer() -> Tokenizer:
    """A token for each byte, and two that are no text."""
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(BYTES[:254])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|user|>", "<|end|>"])
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As onnxruntime-genai has it."""
    path = tmp_path_factory.mktemp("llama")
    save(slotted(), path / "decoder.onnx")
    tokenizer().save(str(path / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}"
    for name, content in {
        "genai_config.json": {
            "model": {
                "context_length": 40, "eos_token_id": [255, 169],
                "decoder": {"filename": "decoder.onnx"},
            },
            "search": {"do_sample": True, "temperature": 0.7, "top_k": 3, "top_p": 0.9, "x": 1},
        },
        "tokenizer_config.json": {"bos_token": {"content": "<|user|>"}, "chat_template": template},
    }.items():  # fmt: skip
        (path / name).write_text(json.dumps(content))
    return path


def test_a_text_is_continued(folder: Path, cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--raw", "--temperature", "0", "--max-new-tokens", "12", "--json", out]
    result = cli("generate", folder, "abc", *options)
    data = json.loads(out.read_text())
    ids = tokenizer().encode("abc").ids
    assert result.code == 0
    assert data["prompt"] == ids
    wanted = of.generate(folder / "decoder.onnx", ids, max_new_tokens=12, eos=[255, 169])
    assert data["tokens"] == wanted
    text = tokenizer().decode(wanted)
    assert data["text"] == text.rstrip("\ufffd")  # a character that is not whole waits
    assert result.out == data["text"] + "\n"
    assert result.err.startswith(f"3 tokens in, {len(wanted)} out, the first after 0.")
    assert {"first_token_s", "tokens_per_s", "cache_bytes", "memory_bytes"} <= data.keys()
    assert data["cache_bytes"] == 2 * 2 * 2 * (3 + 12) * 16 * 2  # layers, kinds, heads, numbers


def test_a_chat_begins_as_its_template_says(folder: Path, cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ["generate", folder, "hi", "--system", "be", "--seed", 1, "--json", out]
    assert cli(*arguments).code == 0
    data = json.loads(out.read_text())
    assert data["prompt"] == tokenizer().encode("<|user|>s:be\nu:hi\n").ids
    options = {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "seed": 1, "eos": [255, 169]}
    model = folder / "decoder.onnx"
    wanted = of.generate(model, data["prompt"], max_length=40, max_new_tokens=26, **options)
    assert data["tokens"] == wanted[: len(data["tokens"])]


def test_ids_need_no_tokenizer(cli: Cli, tmp_path: Path) -> None:
    save(growing(), tmp_path / "model.onnx")
    (tmp_path / "config.json").write_text('{"eos_token_id": 39, "max_position_embeddings": 9}')
    wanted = of.generate(tmp_path / "model.onnx", [5, 6, 7], max_new_tokens=4)
    for path in (tmp_path, tmp_path / "model.onnx"):
        result = cli("generate", path, "--ids", "5,6,7", "--max-new-tokens", 4)
        assert (result.code, result.out.split()) == (0, [str(t) for t in wanted])
    assert Package.at(tmp_path).eos == (39,)
    result = cli("generate", tmp_path, "--ids", "5,6,7", "--eos", wanted[1])
    assert result.out.split() == [str(t) for t in wanted[:2]]
    result = cli("generate", tmp_path, "--ids", "5 6 7")
    assert len(result.out.split()) == 7
    assert result.code == 2
    assert "holds 9 tokens of a sequence, and token 10 has no place" in result.err


WRONG: dict[str, tuple[list[Any], int, str]] = {
    "nothing": ([], 2, "give a prompt, or ids with --ids 5,6,7"),
    "both": (["abc", "--ids", "5"], 2, "give a prompt, or ids with --ids 5,6,7, not both"),
    "no ids": (["--ids", "5,x"], 2, "--ids 5,x: expected ids such as 5,6,7"),
    "no tokenizer": (["abc"], 2, "there is no tokenizer.json beside it: give one with --tokenizer"),
    "a broken one": (["abc", "--tokenizer", "model.onnx"], 1, "model.onnx: it is no tokenizer: "),
    "no template": (["--ids", "5", "--system", "x"], 2, "--system needs a chat template: the fol"),
    "an option": (["--ids", "5", "--top-p", "0.5"], 2, "top_p needs a temperature above 0: at 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_a_sentence(
    case: str, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(growing(), tmp_path / "model.onnx")
    arguments, code, words = WRONG[case]
    result = cli("generate", "model.onnx", *arguments)
    assert (result.code, result.out) == (code, "")
    assert words in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_a_missing_package_is_named_with_its_command(
    package: str, folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def refused(name: str, *more: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return original(name, *more)

    monkeypatch.setattr(builtins, "__import__", refused)
    err = cli.fails(2, "generate", folder, "abc")
    assert f"needs {'the package ' * (package == 'tokenizers')}{package}" in err
    assert 'pip install ".[text]"' in err


FOLDERS = {
    "nothing": ({}, "it has no .onnx file: give the file of the decoder"),
    "two files": ({"a.onnx": "", "b.onnx": ""}, "it has a.onnx, b.onnx: give the file"),
    "a way out": (
        {"genai_config.json": '{"model": {"decoder": {"filename": "../x.onnx"}}}'},
        "../x.onnx is not in the folder",
    ),
    "no JSON": ({"genai_config.json": "{"}, "genai_config.json: it is no JSON: "),
    "no object": ({"config.json": "[1]"}, "config.json: it must hold a JSON object"),
    "settings of other types": (
        {"model.onnx": "x", "genai_config.json": '{"model": {"eos_token_id": "x", "context_length":'
         '[]}, "search": {"do_sample": 1, "top_p": "x"}}', "tokenizer.json": tokenizer().to_str()},
        "model.onnx: not an ONNX file",
    ),
    "a template": (
        {"model.onnx": "", "chat_template.jinja": "{{ raise_exception('no') }}",
         "tokenizer.json": tokenizer().to_str()},
        "model.onnx: no; --raw leaves it out",
    ),
    "a way in": (
        {"model.onnx": "", "chat_template.jinja": "{{ messages.__class__.__mro__ }}",
         "tokenizer.json": tokenizer().to_str()},
        "is unsafe",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_a_folder_that_is_none_of_a_decoder(case: str, cli: Cli, tmp_path: Path) -> None:
    files, words = FOLDERS[case]
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    result = cli("generate", tmp_path, "abc")
    assert (result.code, result.out) == (1, "")
    assert words in result.err
    assert result.err.count("\n") == 1


def test_a_path_that_is_not_there_is_said(cli: Cli, tmp_path: Path) -> None:
    result = cli("generate", tmp_path / "none", "hello")
    assert (result.code, result.out) == (2, "")
    assert f"{tmp_path / 'none'}: there is no such file or folder" in result.err
