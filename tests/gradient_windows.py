"""Rows for the tests of gradients: convolutions and pools."""

from gradient_rows import F32, apart, row, rows

CONV = list(
    rows("""
Conv plain: x=(2, 3, 5, 6), w=(4, 3, 3, 2), b=(4,), dtype=F32, static=("w",)
  y = Conv <group = 1> (x, w, b)
Conv 1x1: x=(2, 3, 4, 5), w=(4, 3, 1, 1), b=(4,), dtype=F32, static=("w",)
  y = Conv <group = 1> (x, w, b)
Conv 1x1 stride: x=(2, 3, 5, 4), w=(4, 3, 1, 1), b=(4,), dtype=F32, static=("w",)
  y = Conv <strides = [2, 2]> (x, w, b)
Conv pads: x=(2, 3, 5, 6), w=(4, 3, 3, 3), b=(4,), dtype=F32, static=("w",)
  y = Conv <pads = [1, 0, 2, 1]> (x, w, b)
Conv stride: x=(2, 3, 7, 9), w=(4, 3, 3, 3), b=(4,), dtype=F32, static=("w",)
  y = Conv <strides = [2, 3], pads = [1, 1, 1, 1]> (x, w, b)
Conv stride, rows left over: x=(1, 2, 8, 6), w=(2, 2, 3, 3), b=(2,), dtype=F32, static=("w",)
  y = Conv <strides = [3, 2]> (x, w, b)
Conv dilated: x=(2, 2, 7, 6), w=(3, 2, 2, 3), b=(3,), dtype=F32, static=("w",)
  y = Conv <dilations = [2, 1], strides = [1, 2]> (x, w, b)
Conv group: x=(2, 4, 4, 5), w=(6, 2, 3, 3), b=(6,), dtype=F32, static=("w",)
  y = Conv <group = 2, pads = [1, 1, 1, 1]> (x, w, b)
Conv depthwise: x=(2, 4, 6, 5), w=(4, 1, 3, 3), b=(4,), dtype=F32, static=("w",)
  y = Conv <group = 4, strides = [2, 2], pads = [1, 1, 1, 1]> (x, w, b)
Conv 1-D: x=(2, 3, 8), w=(4, 3, 3), b=(4,), dtype=F32, static=("w",)
  y = Conv <strides = [2], pads = [1, 1]> (x, w, b)
Conv 3-D: x=(1, 2, 3, 4, 3), w=(2, 2, 2, 3, 2), b=(2,), dtype=F32, static=("w",)
  y = Conv <strides = [1, 2, 1], pads = [0, 1, 0, 0, 1, 0]> (x, w, b)
Conv same upper: x=(1, 2, 6, 5), w=(2, 2, 3, 4), b=(2,), dtype=F32, static=("w",)
  y = Conv <auto_pad = "SAME_UPPER", strides = [2, 2]> (x, w, b)
Conv same lower: x=(1, 2, 5, 6), w=(2, 2, 4, 3), b=(2,), dtype=F32, static=("w",)
  y = Conv <auto_pad = "SAME_LOWER"> (x, w, b)
Conv valid: x=(1, 2, 5, 6), w=(2, 2, 3, 3), b=(2,), dtype=F32, static=("w",)
  y = Conv <auto_pad = "VALID"> (x, w, b)
Conv SAME_UPPER cuts: x=(1, 2, 8, 6), w=(2, 2, 1, 2), b=(2,), dtype=F32, static=("w",)
  y = Conv <auto_pad = "SAME_UPPER", strides = [4, 6]> (x, w, b)
Conv SAME_LOWER cuts: x=(1, 2, 8, 6), w=(2, 2, 1, 2), b=(2,), dtype=F32, static=("w",)
  y = Conv <auto_pad = "SAME_LOWER", strides = [4, 6]> (x, w, b)
Conv no images: x=(0, 4, 5, 6), w=(4, 4, 3, 3), b=(4,), dtype=F32, static=("w",)
  y = Conv <pads = [1, 1, 1, 1]> (x, w, b)
Conv no channels: x=(2, 0, 5, 6), w=(4, 0, 3, 3), b=(4,), dtype=F32, static=("w",)
  y = Conv <pads = [1, 1, 1, 1]> (x, w, b)
Conv no filters: x=(2, 4, 5, 6), w=(0, 4, 3, 3), b=(0,), dtype=F32, static=("w",)
  y = Conv <pads = [1, 1, 1, 1]> (x, w, b)
Conv same upper run-time kernel: x=(1, 2, 7, 6), w=(2, 2, 3, 3), dtype=F32, static=("w",)
  y = Conv <auto_pad = "SAME_UPPER", kernel_shape = [3, 3], strides = [2, 2]> (x, w)
Conv no pixels: x=(2, 4, 0, 4), w=(4, 4, 2, 3), dtype=F32, dynamic=(0, 1)
  y = Conv <pads = [1, 0, 1, 1]> (x, w)
ConvTranspose plain: x=(2, 3, 4, 5), w=(3, 2, 3, 2), b=(2,), dtype=F32, static=("w",)
  y = ConvTranspose <group = 1> (x, w, b)
ConvTranspose stride: x=(2, 3, 4, 3), w=(3, 2, 3, 4), b=(2,), dtype=F32, static=("w",)
  y = ConvTranspose <strides = [2, 3], pads = [1, 0, 1, 2]> (x, w, b)
ConvTranspose output_padding: x=(1, 3, 4, 3), w=(3, 2, 3, 3), b=(2,), dtype=F32, static=("w",)
  y = ConvTranspose <strides = [2, 2], output_padding = [1, 1]> (x, w, b)
ConvTranspose group, dilated: x=(2, 4, 3, 4), w=(4, 3, 2, 3), b=(6,), dtype=F32, static=("w",)
  y = ConvTranspose <group = 2, dilations = [2, 1]> (x, w, b)
ConvTranspose 1-D: x=(2, 3, 4), w=(3, 2, 4), b=(2,), dtype=F32, static=("w",)
  y = ConvTranspose <strides = [2], pads = [1, 1]> (x, w, b)
ConvTranspose 3-D: x=(1, 2, 3, 2, 2), w=(2, 2, 2, 3, 2), b=(2,), dtype=F32, static=("w",)
  y = ConvTranspose <strides = [1, 2, 1]> (x, w, b)
ConvTranspose same upper: x=(1, 2, 3, 4), w=(2, 2, 3, 3), b=(2,), dtype=F32, static=("w",)
  y = ConvTranspose <auto_pad = "SAME_UPPER", strides = [2, 2]> (x, w, b)
ConvTranspose same lower: x=(1, 2, 3, 4), w=(2, 2, 3, 3), b=(2,), dtype=F32, static=("w",)
  y = ConvTranspose <auto_pad = "SAME_LOWER", strides = [2, 2]> (x, w, b)
ConvTranspose output_shape: x=(1, 2, 3, 4), w=(2, 2, 4, 5), b=(2,), dtype=F32, dynamic=(0, 1),
static=("w",)
  y = ConvTranspose <output_shape = [7, 8], strides = [2, 2]> (x, w, b)
ConvTranspose output_shape, auto_pad = "VALID": x=(1, 2, 3, 4), w=(2, 2, 4, 5), b=(2,), dtype=F32,
dynamic=(0, 1), static=("w",)
  y = ConvTranspose <output_shape = [7, 8], strides = [2, 2], auto_pad = "VALID"> (x, w, b)
ConvTranspose output_shape, auto_pad = "SAME_UPPER": x=(1, 2, 3, 4), w=(2, 2, 4, 5), b=(2,),
dtype=F32, dynamic=(0, 1), static=("w",)
  y = ConvTranspose <output_shape = [7, 8], strides = [2, 2], auto_pad = "SAME_UPPER"> (x, w, b)
""")
)

POOL = [
    row("GlobalAveragePool", "y = GlobalAveragePool (x)", x=(2, 3, 4, 5), dtype=F32),
    row("GlobalMaxPool", "y = GlobalMaxPool (x)", x=apart(2, 3, 4, 5), dtype=F32),
    *rows("""
$op tiles: x=apart(2, 2, 7, 6), dtype=F32; op in MaxPool AveragePool LpPool
  y = $op <kernel_shape = [2, 2], strides = [2, 2]> (x)
$op overlap: x=apart(2, 2, 7, 6), dtype=F32; op in MaxPool AveragePool LpPool
  y = $op <kernel_shape = [3, 2]> (x)
$op pads: x=apart(2, 2, 7, 6), dtype=F32; op in MaxPool AveragePool LpPool
  y = $op <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 0]> (x)
$op ceil: x=apart(2, 2, 7, 6), dtype=F32; op in MaxPool AveragePool LpPool
  y = $op <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1> (x)
$op ceil, pads: x=apart(2, 2, 7, 6), dtype=F32; op in MaxPool AveragePool LpPool
  y = $op <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 0, 1, 0], ceil_mode = 1> (x)
$op dilated: x=apart(2, 2, 7, 6), dtype=F32; op in MaxPool AveragePool LpPool
  y = $op <kernel_shape = [2, 2], dilations = [2, 3]> (x)
$op same: x=apart(2, 2, 7, 6), dtype=F32; op in MaxPool AveragePool LpPool
  y = $op <kernel_shape = [3, 2], strides = [2, 2], auto_pad = "SAME_UPPER"> (x)
$op gaps: x=apart(2, 2, 7, 6), dtype=F32; op in MaxPool AveragePool LpPool
  y = $op <kernel_shape = [1, 2], strides = [2, 3]> (x)
$op cut like upper: x=apart(2, 2, 8, 6), dtype=F32; op in AveragePool LpPool
  y = $op <kernel_shape = [1, 2], strides = [4, 6], auto_pad = "SAME_UPPER"> (x)
$op cut like lower: x=apart(2, 2, 8, 6), dtype=F32; op in AveragePool LpPool
  y = $op <kernel_shape = [1, 2], strides = [4, 6], auto_pad = "SAME_LOWER"> (x)
$op cut, dilated: x=apart(2, 2, 8, 9), dtype=F32; op in AveragePool LpPool
  y = $op <kernel_shape = [1, 2], strides = [4, 6], dilations = [1, 2], auto_pad = "VALID"> (x)
$op of no images: x=np.zeros((0, 2, 5, 6)), dtype=F32; op in AveragePool LpPool
  y = $op <kernel_shape = [1, 2], strides = [2, 2], pads = [0, 1, 0, 0]> (x)
$op without a window: x=(1, 2, 3, 1), dtype=F32; op in AveragePool LpPool
  y = $op <kernel_shape = [1, 2], strides = [2, 1], ceil_mode = 1> (x)
AveragePool cut, padding counts: x=(2, 3, 12), dtype=F32
  y = AveragePool <kernel_shape = [3], strides = [6], auto_pad = "SAME_LOWER",
  count_include_pad = 1> (x)
AveragePool smaller than its window: x=(1, 4, 1), dtype=F32
  y = AveragePool <kernel_shape = [3], strides = [2], ceil_mode = 1, count_include_pad = 1> (x)
AveragePool dilated, padding counts: x=(2, 3, 8), dtype=F32
  y = AveragePool <kernel_shape = [3], strides = [2], dilations = [2], pads = [2, 1],
  count_include_pad = 1> (x)
AveragePool count_include_pad $more: x=(2, 2, 6, 8), dtype=F32; more in | , ceil_mode = 1
  y = AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1],
  count_include_pad = 1$more> (x)
GlobalLpPool p=$p: x=apart(1, 2, 4, 5), dtype=F32, opset=21; p in 1 2 3
  y = GlobalLpPool <p = $p> (x)
MaxPool column-major: x=apart(1, 2, 4, 5), dtype=F32
  y, i = MaxPool <kernel_shape = [2, 2], storage_order = 1> (x)
MaxPool 1-D: x=apart(2, 3, 9), dtype=F32
  y = MaxPool <kernel_shape = [3], strides = [2]> (x)
MaxPool 3-D: x=apart(1, 2, 3, 4, 3), dtype=F32
  y = MaxPool <kernel_shape = [2, 2, 2]> (x)
AveragePool 1-D: x=(2, 3, 7), dtype=F32
  y = AveragePool <kernel_shape = [3], pads = [1, 1]> (x)
AveragePool 3-D: x=(1, 2, 4, 3, 5), dtype=F32
  y = AveragePool <kernel_shape = [2, 2, 2], strides = [2, 1, 2]> (x)
LpPool p=3: x=apart(1, 2, 4, 5), dtype=F32
  y = LpPool <kernel_shape = [2, 2], p = 3> (x)
LpPool p=1: x=apart(1, 2, 4, 5), dtype=F32
  y = LpPool <kernel_shape = [2, 2], p = 1> (x)
"""),
]
