"""Pages of the documentation that are made from the code: a hook of mkdocs (see mkdocs.yml).

`reference/cli.md` is what the commands say of themselves, `reference/api.md` names every public
module for mkdocstrings, and the changelog and the guide for contributors come from the root of the
checkout. Pages that belong to parts of the package which are not there are left out of the menu.
"""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OPTIONAL = {
    "Reports and traces": "reports.md",
    "Use it from PyTorch": "torch.md",
    "Write a network in Python": "nn.md",
    "Add operators and kernels of your own": "plugins.md",
}
"""Pages of the section "How to" that are in the menu where the file is there."""


def public_modules() -> list[str]:
    """The modules that the test of the public interface lists."""
    tree = ast.parse((ROOT / "tests" / "test_public_api.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "PUBLIC":
            code = compile(ast.Expression(node.value), "PUBLIC", "eval")
            return list(eval(code, {}))
    raise ValueError("tests/test_public_api.py has no PUBLIC")


def api_page() -> str:
    """One section for each public module, with every name that its `__all__` lists."""
    text = ["# Python API", ""]
    text += ["Public is what a module below lists. All else belongs to the package.", ""]
    for name in public_modules():
        module = importlib.import_module(name)
        own = [n for n in module.__all__ if not n.startswith("__")]
        text += [f"## {name}", "", " ".join((module.__doc__ or "").split("\n\n")[0].split()), ""]
        if name == "onnx_fuse":  # its names are those of other modules
            text += ["| name | described in |", "|---|---|"]
            text += [f"| `{n}` | {_home(getattr(module, n))} |" for n in own]
        else:
            for n in own:
                text += [f"::: {name}.{n}", "    options:", "      show_root_heading: true"]
                text += ["      show_root_full_path: false", "      heading_level: 3", ""]
        text.append("")
    return "\n".join(text)


def _home(value: Any) -> str:
    """The module that defines a public name, as text for a table."""
    return f"`{getattr(value, '__module__', None) or value.__name__}`"


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
            option, help_text = (part.replace("|", "\\|") for part in record)
            text.append(f"| `{option}` | {help_text} |")
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


def on_config(config: Any) -> Any:
    """Add the optional pages that exist to the menu."""
    [howto] = [part["How to"] for part in config.nav if "How to" in part]
    docs = Path(config.docs_dir)
    howto += [{title: page} for title, page in OPTIONAL.items() if (docs / page).is_file()]
    return config


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


_NOT_RUN = re.compile(r"<!-- not run: .*? -->\n")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Leave out the remarks for the test that runs the pages."""
    return _NOT_RUN.sub("", markdown)
