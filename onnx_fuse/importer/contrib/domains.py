"""Contrib operators where the standard's checks would stumble over them.

onnxruntime keeps some of its operators in the default domain (SimplifiedLayerNormalization, and
LayerNormalization in opsets before the standard's own), where ONNX's checker and its version
converter find no definition; and the files that its optimizer writes need not import com.microsoft.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import onnx_ir as ir

from onnx_fuse.importer.contrib.table import CONTRIB, MICROSOFT

# In the default domain before the standard had them, and with the same meaning: name and the opset
# of the standard's.
_EARLY = {"LayerNormalization": 17}


def in_default_domain(node: ir.Node) -> bool:
    """Whether a node of the default domain is, or may be in an old opset, a contrib operator."""
    return node.domain == "" and (("", node.op_type) in CONTRIB or node.op_type in _EARLY)


def import_domains(model: ir.Model) -> None:
    """Import com.microsoft where nodes call its operators and the file forgot to say so."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain == MICROSOFT and (MICROSOFT, node.op_type) in CONTRIB:
            model.graph.opset_imports.setdefault(MICROSOFT, 1)
            return


def set_aside(model: ir.Model) -> None:
    """Put contrib operators of the default domain into com.microsoft, until `put_back`."""
    opset = model.graph.opset_imports.get("", 1)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if in_default_domain(node) and opset < _EARLY.get(node.op_type, opset + 1):
            node.domain = MICROSOFT
            model.graph.opset_imports.setdefault(MICROSOFT, 1)


def put_back(model: ir.Model) -> None:
    """Put the operators back that `set_aside` has moved: com.microsoft has none of their names."""
    moved = {name for domain, name in CONTRIB if not domain} | set(_EARLY)
    left = False
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.domain == MICROSOFT and node.op_type in moved:
            node.domain = ""
        left = left or node.domain == MICROSOFT
    if not left:
        model.graph.opset_imports.pop(MICROSOFT, None)


@contextlib.contextmanager
def default_domain_left(model: ir.Model) -> Iterator[None]:
    """Within the block no contrib operator is in the default domain."""
    set_aside(model)
    try:
        yield
    finally:
        put_back(model)
