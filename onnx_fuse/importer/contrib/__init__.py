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
    padding,
    paged,
    products,
    quantized,
)
from onnx_fuse.importer.contrib.apply import bodies_attached as bodies_attached
from onnx_fuse.importer.contrib.apply import expand as expand
from onnx_fuse.importer.contrib.domains import default_domain_left as default_domain_left
from onnx_fuse.importer.contrib.domains import import_domains as import_domains
from onnx_fuse.importer.contrib.domains import in_default_domain as in_default_domain
from onnx_fuse.importer.contrib.domains import put_back as put_back
from onnx_fuse.importer.contrib.domains import set_aside as set_aside
from onnx_fuse.importer.contrib.table import CONTRIB as CONTRIB
from onnx_fuse.importer.contrib.table import MICROSOFT as MICROSOFT
from onnx_fuse.importer.contrib.table import Contrib as Contrib
from onnx_fuse.importer.contrib.table import Unwritable as Unwritable
from onnx_fuse.importer.contrib.table import function as function
from onnx_fuse.importer.contrib.table import is_writable as is_writable
from onnx_fuse.importer.contrib.table import lookup as lookup
from onnx_fuse.importer.contrib.table import signature as signature
from onnx_fuse.importer.contrib.table import wants as wants
from onnx_fuse.importer.contrib.table import write as write
