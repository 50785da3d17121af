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


def api_page() -> str:
    """One section for each public module, with every name that its `__all__` lists."""
    text = ["# Python API", ""]
    text += ["Only the names below are public; all others may change.", ""]
    found = {name: _public(name) for name in public_modules()}
    for name, (about, own) in found.items():
        text += [f"## {name}", "", about, ""]
        if name == "onnx_fuse":  # most of its names are those of other modules
            homes = {n: _home(n, found) for n in own}
            text += ["| name | described in |", "|---|---|"]
            text += [f"| `{n}` | {home} |" for n, home in homes.items() if home]
            text.append("")
            own = [n for n, home in homes.items() if not home]
        for n in own:
            text += [f"::: {name}.{n}", "    options:", "      show_root_heading: true"]
            text += ["      show_root_full_path: false", "      heading_level: 3", ""]
            text += _options(f"{name}.{n}")
    return "\n".join(text)


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
