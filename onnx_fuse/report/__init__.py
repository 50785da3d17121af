"""What a command shows: in the terminal, as JSON, and as one HTML page."""

from onnx_fuse.report.files import write_json, write_whole
from onnx_fuse.report.terminal import (
    Printer,
    Summary,
    as_dict,
    check_lines,
    file_bytes,
    gradient_lines,
    models_rows,
    relative_size,
    summary,
)

__all__ = [
    "Printer",
    "Summary",
    "as_dict",
    "check_lines",
    "file_bytes",
    "gradient_lines",
    "models_rows",
    "relative_size",
    "summary",
    "write_json",
    "write_whole",
]
