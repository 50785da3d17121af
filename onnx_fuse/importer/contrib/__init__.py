"""Contrib operators (com.microsoft, and those that onnxruntime keeps in the default domain), each
with a body in standard ONNX. Importing this package fills `CONTRIB`."""

from __future__ import annotations

from onnx_fuse.importer.contrib import (  # noqa: F401
    attention,
    experts,
    forms,
    grouped,
    norms,
    others,
    products,
    quantized,
)
from onnx_fuse.importer.contrib.apply import bodies_attached, expand
from onnx_fuse.importer.contrib.domains import (
    default_domain_left,
    import_domains,
    in_default_domain,
    put_back,
    set_aside,
)
from onnx_fuse.importer.contrib.table import (
    CONTRIB,
    MICROSOFT,
    Contrib,
    Unwritable,
    function,
    is_writable,
    lookup,
    signature,
    wants,
    write,
)

__all__ = [
    "CONTRIB",
    "MICROSOFT",
    "Contrib",
    "Unwritable",
    "bodies_attached",
    "default_domain_left",
    "expand",
    "function",
    "import_domains",
    "in_default_domain",
    "is_writable",
    "lookup",
    "put_back",
    "set_aside",
    "signature",
    "wants",
    "write",
]
