"""Folders of images as training data: a folder for each class, as torchvision reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from onnx_fuse.arrays import Array
from onnx_fuse.errors import DataError, UsageError

IMAGES = "images"
"""The name of the images until the input that reads them is known."""
_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


@dataclass(frozen=True)
class Images:
    """The images of files, which are read when rows are taken: an array whose first axis is files.

    Each is scaled and cut to the input's size. float32 holds pixels / 255, minus `mean`, over
    `std`; uint8 the pixels.
    """

    files: Sequence[Path]
    classes: Sequence[str]
    image: tuple[int, ...] = ()
    """The shape of one: [C, H, W], or [H, W, C] where `last`."""
    last: bool = False
    dtype: type | np.dtype[Any] = np.float32
    mean: Sequence[float] = (0.0,)
    std: Sequence[float] = (1.0,)

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, C, H, W] or [N, H, W, C]."""
        return (len(self.files), *self.image)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, rows: slice | Array) -> Array:
        """The images at these places. Raises DataError for a file that holds none."""
        read = [self._read(path) for path in self.taken(rows).files]
        return np.stack(read) if read else np.empty((0, *self.image), self.dtype)

    def taken(self, rows: slice | Array) -> Images:
        """The images at these places, unread."""
        places = np.arange(len(self.files))[rows]
        return replace(self, files=[self.files[i] for i in places])

    def _read(self, path: Path) -> Array:
        from PIL import Image, ImageOps

        channels, height, width = self.image if not self.last else (self.image[-1], *self.image[:2])
        try:
            with Image.open(path) as opened:
                image = ImageOps.exif_transpose(opened).convert("L" if channels == 1 else "RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise DataError(f"{path}: no image that Pillow reads: {error}") from error
        fitted = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(fitted).reshape(height, width, channels)
        if self.dtype != np.uint8:
            mean, std = (np.asarray(numbers, np.float32) for numbers in (self.mean, self.std))
            scaled = (pixels / np.float32(255) - mean) / std
            pixels = scaled.astype(self.dtype)
        return pixels if self.last else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def read_folder(folder: Path) -> dict[str, Any]:
    """The images in the folders of a folder, and the numbers of their classes in order of names.

    Raises DataError where there are none, UsageError without Pillow.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise UsageError("folders of images need Pillow: pip install pillow") from error
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    found = [
        [file for file in sorted(path.rglob("*")) if file.suffix.lower() in _ENDINGS]
        for path in classes
    ]
    if empty := [path.name for path, files in zip(classes, found, strict=True) if not files]:
        raise DataError(f"{folder}: it holds no .npy file, and its folder '{empty[0]}' no image")
    labels = np.repeat(np.arange(len(classes)), [len(files) for files in found])
    names = [path.name for path in classes]
    return {IMAGES: Images([f for files in found for f in files], names), "labels": labels}


def for_inputs(
    arrays: Mapping[str, Any],
    inputs: Iterable[ir.Value],
    mean: Sequence[float],
    std: Sequence[float],
) -> dict[str, Any]:
    """The arrays with images by the name, size and type of the input that reads them.

    Raises DataError where the model has no such input.
    """
    images = arrays.get(IMAGES)
    if not isinstance(images, Images):
        return dict(arrays)
    for value in inputs:
        shape = [d if isinstance(d, int) else 0 for d in value.shape or ()]
        if len(shape) != 4 or value.dtype is None or not all(shape[2:3]):
            continue
        last = shape[1] not in (1, 3)
        channels = shape[3] if last else shape[1]
        if channels not in (1, 3) or 0 in shape[1:]:
            continue
        if not {len(mean), len(std)} <= {1, channels} or 0 in std:
            raise UsageError(f"--image-mean and --image-std take 1 or {channels} numbers, none 0")
        fitted = replace(
            images, image=tuple(shape[1:]), last=last, dtype=value.dtype.numpy(), mean=mean, std=std
        )
        return {str(value.name): fitted, **{k: a for k, a in arrays.items() if k != IMAGES}}
    raise DataError(
        "no input of the model is images of 1 or 3 channels and a known height and width: "
        "--input-shapes x:-1,3,224,224 gives an input x its sizes"
    )


def same_classes(train: Mapping[str, Any], held_out: Mapping[str, Any]) -> None:
    """Raise DataError where two folders of images have different classes."""
    names = [getattr(arrays.get(IMAGES), "classes", None) for arrays in (train, held_out)]
    if names[0] != names[1]:
        raise DataError(f"--val has the classes {names[1]}, --data {names[0]}")
