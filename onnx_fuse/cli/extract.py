"""`onnx-fuse extract`: a part of a model as a model of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnx_fuse.cli import files, show
from onnx_fuse.cli.options import split_names, with_options
from onnx_fuse.errors import UsageError, did_you_mean

EXAMPLES = (
    "onnx-fuse extract model.onnx --to layer1.output -o first.onnx",
    "onnx-fuse extract model.onnx --from layer1.output --to layer2.output -o second.onnx",
)
OPTIONS = """
    output (-o, --output OUT): Write to this file. The default is MODEL with the ending
        .part.onnx.
    begin (--from NAME): Make this value an input, and leave out what computes it. MODEL's inputs
        stay where they are still read.
    end (--to NAME): Make this value an output. The default is all outputs of MODEL.
    """


@with_options(OPTIONS)
def extract(
    *,
    model: Path,
    output: Path | None = None,
    begin: list[str] | None = None,
    end: list[str] | None = None,
    external: bool = False,
    reports: show.Reports,
) -> None:
    """Write the part of MODEL between some of its values, such as the layer that is wrong."""
    output = output or files.default_output(model, ".part.onnx")
    files.check_paths({"MODEL": model}, {"-o": files.with_weights(output), **reports.paths})
    from onnx_fuse import report
    from onnx_fuse.files import written
    from onnx_fuse.importer.load import read
    from onnx_fuse.importer.save import save

    printer, original = show.printer(), read(model)
    part = _part(original, split_names(begin), split_names(end))
    with written(output) as draft:
        save(part, draft, external=external)
        summaries = [
            report.summary(original, "original", model),
            report.summary(part, "part", draft),
        ]
    printer.table("", ["", *(m.name for m in summaries)], report.models_rows(summaries))
    data = {"output": str(output), "models": [report.as_dict(m) for m in summaries]}
    named = {str(model): original, str(output): part}
    reports.write(printer, data, sections=lambda: show.pages().inspected(named))
    printer.text(f"wrote {output}")


def _part(original: Any, begin: list[str], end: list[str]) -> Any:
    """A model of what lies between values. Raises UsageError for what is no part."""
    import onnx_ir as ir

    from onnx_fuse.importer.shapes import infer_shapes

    model = original.clone()
    infer_shapes(model)
    graph, functions = model.graph, model.functions.values()
    values = ir.convenience.create_value_mapping(graph, include_subgraphs=False)
    for name in (*begin, *end):
        if name not in values:
            text = f"the model has no value '{name}'{did_you_mean(name, values)}"
            raise UsageError(f"{text}: onnx-fuse inspect MODEL --html FILE shows their names")
        if name in begin and values[name].type is None:
            raise UsageError(f"the type of '{name}' is not known: an input has to have one")
    inputs = [values[name] for name in begin]
    others = [v for v in graph.inputs if v.name not in begin]
    outputs = [values[name] for name in end] or list(graph.outputs)
    part = ir.convenience.extract(graph, [*inputs, *others], outputs)
    for value in list(part.inputs):
        if not value.uses() and not value.is_graph_output() and value.name not in begin:
            part.inputs.remove(value)
    return ir.Model(part, ir_version=model.ir_version, functions=functions)
