"""Pages of the documentation that are made from the code: a hook of mkdocs (see mkdocs.yml).

`reference/cli.md` is what the commands say of themselves, `reference/api.md` names every public
module for mkdocstrings, and the changelog and the guide for contributors come from the root of the
checkout.
"""

import ast
import importlib
import inspect
import os
import re
from collections.abc import Mapping
from html import escape, unescape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def public_modules() -> list[str]:
    """The modules that the test of the public interface lists, those for PyTorch included."""
    tree = ast.parse((ROOT / "tests" / "test_public_api.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PUBLIC":
            code = compile(ast.Expression(node.value), "PUBLIC", "eval")
            return list(eval(code, {"find_spec": bool}))
    raise ValueError("tests/test_public_api.py has no PUBLIC")


def _public(module: str) -> tuple[str, list[str]]:
    """The first paragraph of a module's docstring, and what its `__all__` lists.

    The file is read where the list is written out in it: what it imports may not be installed.
    """
    path = ROOT / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            try:
                names = ast.literal_eval(node.value)
            except ValueError:  # made of tables
                names = list(importlib.import_module(module).__all__)
    about = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    return about, [name for name in names if not name.startswith("__")]


_CALLED = (
    "optimize", "InferenceSession", "validate", "Trainer", "gradient", "quantize", "generate",
    "check_gradients", "load",
)  # fmt: skip
"""The names of the package that people call most, which begin the page."""


def _in_order(names: list[str], first: tuple[str, ...]) -> list[str]:
    """The names, those in `first` before all others, in its order."""
    return [n for n in first if n in names] + [n for n in names if n not in first]


def _first(value: Any) -> str:
    """The first paragraph of a docstring, for a cell of a table."""
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return paragraph.replace("|", "&#124;")


def api_page() -> str:
    """What people call most, then one section for each public module, with every public name."""
    text = ["# Python API", ""]
    text += ["Only the names below are public; all others may change.", ""]
    found = {name: _public(name) for name in public_modules()}
    called = {_module(name, found): None for name in _CALLED}
    found = {name: found[name] for name in _in_order(list(found), ("onnx_fuse", *called))}
    package = importlib.import_module("onnx_fuse")
    for name, (about, own) in found.items():
        text += [f"## {name}", "", about, ""]
        if name == "onnx_fuse":  # most of its names are those of other modules
            homes = {n: _home(n, found) or f"[{name}][{name}.{n}]" for n in _in_order(own, _CALLED)}
            text += ["| name | what it does | described in |", "|---|---|---|"]
            text += [
                f"| `of.{n}` | {_first(getattr(package, n))} | {home} |"
                for n, home in homes.items()
            ]
            text += ["", "`import onnx_fuse as of` gives these names.", ""]
            continue
        text += _described(name, own)
    text += ["## Operators, kernels and replicas", "", "The package lists these names itself.", ""]
    text += _described("onnx_fuse", [n for n in found["onnx_fuse"][1] if not _home(n, found)])
    return "\n".join(text)


def _described(module: str, names: list[str]) -> list[str]:
    """Each name's signature and docstring, which mkdocstrings reads, and its options."""
    text = []
    for n in names:
        text += [f"::: {module}.{n}", "    options:", "      show_root_heading: true"]
        text += ["      show_root_full_path: false", "      heading_level: 3", ""]
        text += _options(f"{module}.{n}")
    return text


def _options(name: str) -> list[str]:
    """The table of a public name's options, which its signature has from a dataclass."""
    from onnx_fuse.generation.options import BatcherOptions, GeneratorOptions
    from onnx_fuse.options import GradientOptions, OutputOptions, options_of
    from onnx_fuse.quantization.options import QuantizeOptions
    from onnx_fuse.training import fit_options, options

    takers: dict[str, type] = {
        "training.trainer.Trainer": options.TrainingOptions,
        "training.fit.fit": fit_options.FitOptions,
        "training.step.training_model": options.StepOptions,
        "validation.validate": OutputOptions,
        "validation.check_gradients": GradientOptions,
        "quantization.quantizer.quantize": QuantizeOptions,
        "generation.generator.Generator": GeneratorOptions,
        "generation.batcher.Batcher": BatcherOptions,
    }
    cls = takers.get(name.removeprefix("onnx_fuse."))
    if cls is None:
        return []
    parameters = inspect.signature(cls).parameters
    text = ["| option | type | default | |", "|---|---|---|---|"]
    for key, option in options_of(cls).items():
        kind = parameters[key].annotation.replace("|", "&#124;")
        default = parameters[key].default
        shown = "required" if default is inspect.Parameter.empty else f"`{default!r}`"
        words = f"{option.help} {option.more or ''}".strip()
        text.append(f"| `{key}` | <code>{kind}</code> | {shown} | {words} |")
    return [*text, ""]


def _module(name: str, found: Mapping[str, tuple[str, list[str]]]) -> str:
    """The public module, other than the package, that lists a name of the package."""
    return next(m for m, (_, names) in found.items() if m != "onnx_fuse" and name in names)


def _home(name: str, found: Mapping[str, tuple[str, list[str]]]) -> str:
    """A link to the module that lists a name of the package, or has this name; "" for none."""
    for module, (_, names) in found.items():
        if module != "onnx_fuse" and name in names:
            return f"[{module}][{module}.{name}]"
        if module.endswith(f".{name}"):
            return f"[{module}](#{module.replace('.', '')})"
    return ""


def cli_page() -> str:
    """The help of every command, as the parser has it."""
    import typer

    from onnx_fuse.cli.app import app

    root: Any = typer.main.get_command(app)
    text = ["# Command line", "", *_paragraphs(root.help), ""]
    text += ["| command | what it does |", "|---|---|"]
    text += [
        f"| [`onnx-fuse {name}`](#onnx-fuse-{name}) | {_paragraphs(command.help)[0].strip()} |"
        for name, command in root.commands.items()
    ]
    text.append("")
    for name, command in root.commands.items():
        context = command.make_context(name, [], resilient_parsing=True)
        usage = " ".join(command.collect_usage_pieces(context))
        text += [f"## onnx-fuse {name}", "", *_paragraphs(command.help), ""]
        text += ["```text", f"onnx-fuse {name} {usage}", "```", ""]
        text += ["| option | |", "|---|---|"]
        for parameter in command.get_params(context):
            record = parameter.get_help_record(context)
            if record is None:  # an argument
                record = (parameter.make_metavar(context), parameter.help or "")
            option, help_text = record
            text.append(f"| `{option}` | {help_text.replace('|', '&#124;')} |")
        examples = [e.removeprefix("\b\n") for e in (command.epilog or "").split("\n\n")[1:]]
        text += ["", "```text", *examples, "```", ""]
    return "\n".join(text)


def _paragraphs(text: str | None) -> list[str]:
    return [" ".join(p.split()) + "\n" for p in (text or "").split("\n\n")]


def from_root(name: str) -> str:
    """A file of the checkout's root, whose links to pages are those of the site."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = text.replace("](docs/", "](").replace("](CHANGELOG.md)", "](changelog.md)")
    return text.replace("](CONTRIBUTING.md)", "](contributing.md)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here."""
    from mkdocs.structure.files import File

    pages = {
        "reference/cli.md": cli_page(),
        "reference/api.md": api_page(),
        "changelog.md": from_root("CHANGELOG.md"),
        "contributing.md": from_root("CONTRIBUTING.md"),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


_CONSOLE = re.compile(r'<div class="highlight">(<pre>.*?</pre>)', re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    """Have the button of a console copy its commands, without prompts and output."""

    def with_commands(match: re.Match[str]) -> str:
        if 'class="gp"' not in match[1]:
            return match[0]
        lines, going = list[str](), False
        for line in unescape(re.sub(r"<[^>]+>", "", match[1])).splitlines():
            if line.startswith("$ ") or going:
                lines.append(line.removeprefix("$ "))
                going = line.endswith("\\")
        return f'<div class="highlight" data-copy="{escape(chr(10).join(lines))}">{match[1]}'

    return _CONSOLE.sub(with_commands, html)


_WORKER = re.compile(r'src="https://[^"]*/iframe-worker/shim"')


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Load the script that lets a file:// page search from the site, and not from the network."""
    up = "../" * page.url.count("/")
    return _WORKER.sub(f'src="{up}assets/iframe-worker/index.js"', output)


def on_post_template(output_content: str, **_: Any) -> str:
    """The same for the page of addresses that are not there, which knows no folder of its own."""
    return _WORKER.sub('src="/assets/iframe-worker/index.js"', output_content)


_NOT_RUN = re.compile(r"<!-- not run: .*? -->\n")


_LINK = re.compile(r"\[([^\]\n]+)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leave out the remarks for the test that runs the pages, and links out of docs/.

    A link to a file of the checkout, such as an example, becomes its text and path.
    """
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def inside(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = Path(os.path.normpath(folder / target.partition("#")[0]))
        if path.is_relative_to(ROOT / "docs"):
            return match[0]
        name = path.relative_to(ROOT).as_posix()
        return f"`{name}`" if text.strip("`") == name else f"{text} (`{name}`)"

    return _LINK.sub(inside, _NOT_RUN.sub("", markdown))
