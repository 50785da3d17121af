"""What a command shows: in the terminal, as JSON, and as one HTML page."""

from onnx_fuse.report.files import write_json as write_json
from onnx_fuse.report.files import write_whole as write_whole
from onnx_fuse.report.terminal import Printer as Printer
from onnx_fuse.report.terminal import Summary as Summary
from onnx_fuse.report.terminal import as_dict as as_dict
from onnx_fuse.report.terminal import check_lines as check_lines
from onnx_fuse.report.terminal import file_bytes as file_bytes
from onnx_fuse.report.terminal import gradient_lines as gradient_lines
from onnx_fuse.report.terminal import models_rows as models_rows
from onnx_fuse.report.terminal import relative_size as relative_size
from onnx_fuse.report.terminal import summary as summary
