"""Write docs/gradients.md: which operator has which gradient, from the operator table itself.

python tools/gradient_table.py [--check]
"""

import sys
from pathlib import Path
from typing import Any

import onnx

import onnx_fuse.ops.fused  # noqa: F401  (fills the table)
from onnx_fuse.ir.constants import FUSE
from onnx_fuse.ops import OPS, NoGrad
from onnx_fuse.ops.fused.sdpa import KINDS

PAGE = Path(__file__).parent.parent / "docs" / "gradients.md"

HEAD = """# Gradients

Made by `python tools/gradient_table.py` from the operator table; a test checks that it is current.

This page lists the operators that have a gradient. `onnx-fuse gradient` (in Python
`onnx_fuse.gradient(model)`) walks a graph backwards and writes the gradients as ONNX operators that
stock onnxruntime runs:

```console
$ onnx-fuse gradient models/encoder.onnx --check
```

- **rule**: the operator has a rule of its own, checked against central differences in
  `tests/test_gradients.py`.
- **body**: no rule; the node is replaced by its function body (ours, or the one the ONNX standard
  gives), which is differentiated.
- **none**: no gradient flows; asking for one that could only come through such a node is an error
  that says why.

The gradient of an If is an If of its branches' gradients; that of a Loop or a Scan is one over the
same steps backwards, which computes each step again from the states that the forward node then
returns, whatever ends the Loop. A state must keep its shape. LSTM, GRU and RNN with the
standard's default activations (RNN also with Relu) have gradients of their own; with others, with
peepholes, clip or input_forget they become a Scan of their steps.
Operators that are not listed here have none.
"""


def kinds() -> dict[str, dict[str, str]]:
    """{"rule" | "body" | "none": {operator: remark}} of ai.onnx, and "fused" for our own."""
    found: dict[str, dict[str, str]] = {"rule": {}, "body": {}, "none": {}, "fused": {}}
    schemas = {s.name: s for s in onnx.defs.get_all_schemas() if s.domain == ""}
    for (domain, name), definition in sorted(OPS.items()):
        if domain == FUSE:
            if name != "Sdpa" and name.partition("Grad")[0] in KINDS:
                continue  # one template makes them all
            own = definition.grad is not None and not isinstance(definition.grad, NoGrad)
            saves = ", ".join(definition.saves)
            found["fused"][name] = "" if not own else f"rule; saves {saves}" if saves else "rule"
            if name == "Sdpa":
                found["fused"][name] += f"; so for all its {len(KINDS)} kinds"
        elif isinstance(definition.grad, NoGrad):
            found["none"][name] = definition.grad.reason
        elif definition.grad is not None and name in schemas:
            found["rule"][name] = ""
    for name, schema in schemas.items():
        if ("", name) not in OPS and _has_plain_body(schema):
            found["body"][name] = ""
    return found


def _has_plain_body(schema: Any) -> bool:
    """Whether the standard gives the operator a body without control flow."""
    if schema.has_function:
        data = schema.get_function_with_opset_version(schema.function_opset_versions[-1])
    elif schema.has_context_dependent_function:
        names = [i.name for i in schema.inputs]
        node = onnx.helper.make_node(schema.name, names, [o.name for o in schema.outputs])
        kind = onnx.helper.make_tensor_type_proto(1, (2, 4, 6)).SerializeToString()
        data = schema.get_context_dependent_function_with_opset_version(
            schema.context_dependent_function_opset_versions[-1],
            node.SerializeToString(),
            [kind] * len(names),
        )
    else:
        return False
    nodes = onnx.FunctionProto.FromString(data).node
    held = [a.type for n in nodes for a in n.attribute]
    return bool(nodes) and onnx.AttributeProto.GRAPH not in held


def page() -> str:
    found = kinds()
    fused = {name: remark for name, remark in found["fused"].items() if remark}
    rest = [name for name, remark in found["fused"].items() if not remark]
    reasons: dict[str, list[str]] = {}
    for name, reason in found["none"].items():
        reasons.setdefault(reason, []).append(name)
    lines = [HEAD, f"## ai.onnx: {len(found['rule'])} rules\n", ", ".join(found["rule"]) + ".\n"]
    lines += [f"## ai.onnx through the body: {len(found['body'])}\n"]
    lines += [", ".join(sorted(found["body"])) + ".\n"]
    lines += ["## ai.onnx without gradient\n", "| operators | reason |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {reason} |" for reason, names in reasons.items()]
    lines += ["\n## onnx_fuse\n", "| operator | gradient |", "|---|---|"]
    lines += [f"| {name} | {remark} |" for name, remark in fused.items()]
    lines += [f"\nThrough the body: {', '.join(rest)}."]
    return "\n".join(lines) + "\n"


def main() -> int:
    if "--check" in sys.argv:
        return int(PAGE.read_text() != page())
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
