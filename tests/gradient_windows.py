"""Rows for the tests of gradients: convolutions and pools."""

from gradient_rows import F32, apart, row, rows

CONV = list(
    rows("""
Conv $name: x=($x), w=($w), b=($b,), dtype=F32, static=("w",);
name, x, w, b, how in plain 2,3,5,6 4,3,3,2 4 group = 1 |
1x1 2,3,4,5 4,3,1,1 4 group = 1 |
1x1_stride 2,3,5,4 4,3,1,1 4 strides = [2, 2] |
pads 2,3,5,6 4,3,3,3 4 pads = [1, 0, 2, 1] |
stride 2,3,7,9 4,3,3,3 4 strides = [2, 3], pads = [1, 1, 1, 1] |
stride_rows_left_over 1,2,8,6 2,2,3,3 2 strides = [3, 2] |
dilated 2,2,7,6 3,2,2,3 3 dilations = [2, 1], strides = [1, 2] |
group 2,4,4,5 6,2,3,3 6 group = 2, pads = [1, 1, 1, 1] |
depthwise 2,4,6,5 4,1,3,3 4 group = 4, strides = [2, 2], pads = [1, 1, 1, 1] |
1-D 2,3,8 4,3,3 4 strides = [2], pads = [1, 1] |
3-D 1,2,3,4,3 2,2,2,3,2 2 strides = [1, 2, 1], pads = [0, 1, 0, 0, 1, 0] |
same_upper 1,2,6,5 2,2,3,4 2 auto_pad = "SAME_UPPER", strides = [2, 2] |
same_lower 1,2,5,6 2,2,4,3 2 auto_pad = "SAME_LOWER" |
valid 1,2,5,6 2,2,3,3 2 auto_pad = "VALID" |
SAME_UPPER_cuts 1,2,8,6 2,2,1,2 2 auto_pad = "SAME_UPPER", strides = [4, 6] |
SAME_LOWER_cuts 1,2,8,6 2,2,1,2 2 auto_pad = "SAME_LOWER", strides = [4, 6] |
no_images 0,4,5,6 4,4,3,3 4 pads = [1, 1, 1, 1] |
no_channels 2,0,5,6 4,0,3,3 4 pads = [1, 1, 1, 1] |
no_filters 2,4,5,6 0,4,3,3 0 pads = [1, 1, 1, 1] |
8_channels 2,8,4,3 2,8,2,2 2 pads = [1, 0, 0, 1] |
8_channels_stride 2,8,7,6 2,8,3,2 2 strides = [2, 3], pads = [1, 1, 0, 1] |
8_channels_dilated 1,8,6,5 2,8,2,2 2 dilations = [2, 1], strides = [1, 2], pads = [1, 0, 1, 0] |
8_channels_1x1 2,8,3,4 2,8,1,1 2 strides = [2, 2] |
8_channels_1-D 2,8,7 2,8,3 2 strides = [2], pads = [1, 1] |
8_channels_3-D 1,8,2,3,2 2,8,2,2,1 2 strides = [1, 2, 1], pads = [0, 1, 0, 0, 1, 0] |
8_channels_same 1,8,5,4 2,8,3,4 2 auto_pad = "SAME_UPPER", strides = [2, 2] |
8_channels_cut 1,8,8,6 2,8,1,2 2 auto_pad = "SAME_LOWER", strides = [4, 6] |
8_channels_no_images 0,8,5,6 2,8,3,3 2 pads = [1, 1, 1, 1]
  y = Conv <$how> (x, w, b)
Conv same upper run-time kernel: x=(1, 2, 7, 6), w=(2, 2, 3, 3), dtype=F32, static=("w",)
  y = Conv <auto_pad = "SAME_UPPER", kernel_shape = [3, 3], strides = [2, 2]> (x, w)
Conv no pixels: x=(2, 4, 0, 4), w=(4, 4, 2, 3), dtype=F32, dynamic=(0, 1)
  y = Conv <pads = [1, 0, 1, 1]> (x, w)
Conv 8 channels, no pixels: x=(2, 8, 0, 4), w=(4, 8, 2, 3), dtype=F32, dynamic=(0, 1)
  y = Conv <pads = [1, 0, 1, 1]> (x, w)
ConvTranspose $name: x=($x), w=($w), b=($b,), dtype=F32, static=("w",);
name, x, w, b, how in plain 2,3,4,5 3,2,3,2 2 group = 1 |
stride 2,3,4,3 3,2,3,4 2 strides = [2, 3], pads = [1, 0, 1, 2] |
output_padding 1,3,4,3 3,2,3,3 2 strides = [2, 2], output_padding = [1, 1] |
group_dilated 2,4,3,4 4,3,2,3 6 group = 2, dilations = [2, 1] |
1-D 2,3,4 3,2,4 2 strides = [2], pads = [1, 1] |
3-D 1,2,3,2,2 2,2,2,3,2 2 strides = [1, 2, 1] |
same_upper 1,2,3,4 2,2,3,3 2 auto_pad = "SAME_UPPER", strides = [2, 2] |
same_lower 1,2,3,4 2,2,3,3 2 auto_pad = "SAME_LOWER", strides = [2, 2]
  y = ConvTranspose <$how> (x, w, b)
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
$op $name: x=apart(2, 2, 7, 6), dtype=F32; op in MaxPool AveragePool LpPool;
name, how in tiles kernel_shape = [2, 2], strides = [2, 2] |
overlap kernel_shape = [3, 2] |
pads kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 0] |
ceil kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1 |
ceil_pads kernel_shape = [3, 3], strides = [2, 2], pads = [1, 0, 1, 0], ceil_mode = 1 |
dilated kernel_shape = [2, 2], dilations = [2, 3] |
same kernel_shape = [3, 2], strides = [2, 2], auto_pad = "SAME_UPPER" |
gaps kernel_shape = [1, 2], strides = [2, 3]
  y = $op <$how> (x)
$op $name: x=apart(2, 2, 8, 6), dtype=F32; op in AveragePool LpPool;
name, how in cut_like_upper kernel_shape = [1, 2], strides = [4, 6], auto_pad = "SAME_UPPER" |
cut_like_lower kernel_shape = [1, 2], strides = [4, 6], auto_pad = "SAME_LOWER"
  y = $op <$how> (x)
AveragePool with holes over what SAME cuts, $way: x=apart(2, 2, 6), dtype=F32; way in UPPER LOWER
  y = AveragePool <kernel_shape = [2], strides = [3], dilations = [2], auto_pad = "SAME_$way"> (x)
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
$op of fewer windows than inferred, $name: x=apart(1, 2, 2), dtype=F32, opset=21;
op in AveragePool LpPool; name, how in ceil kernel_shape = [1], strides = [3], ceil_mode = 1 |
dilated kernel_shape = [2], dilations = [2], auto_pad = "SAME_UPPER"
  p = $op <$how> (x)  n = Neg (p)  y = Mul (n, p)
LpPool p=1: x=apart(1, 2, 4, 5), dtype=F32
  y = LpPool <kernel_shape = [2, 2], p = 1> (x)
"""),
]
