"""Image files: which there are, and a square cut out of one, by Pillow."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hipress.errors import MissingDependencyError, UsageError

ENDINGS = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Of the names of image files, in small or capital letters."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels."""

NUM_CHANCES = 32
"""How many random numbers the cutting of one image may use."""

_NUM_TRIES = 10
_LEAST_AREA, _MOST_STRETCH = 0.08, 4 / 3  # Szegedy et al. (2015), section 6
_SPARE = 8 / 7  # shorter side over side cut out: 256 for 224


def need_pillow() -> None:
    """Refuse to go on without Pillow, before the first batch.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("pillow", extra="data") from error


def image_names(folder: Path) -> list[str]:
    """The names of the image files in a folder, sorted."""
    return sorted(name for name in os.listdir(folder) if name.lower().endswith(ENDINGS))


def squares(paths: Sequence[Path], boxes: Sequence[Callable[[int, int], Box]], side: int) -> Tensor:
    """A square of every image, uint8 [B, 3, side, side].

    Args:
        paths: Of the images.
        boxes: For each, what to cut out of it, by its width and height.
        side: Of the square, in pixels.
    """
    pixels = np.empty((len(paths), side, side, 3), np.uint8)
    for row, path, box in zip(pixels, paths, boxes, strict=True):
        row[:] = _square(path, box, side)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


def centre_box(width: int, height: int) -> Box:
    """The square in the middle, seven eighths of the shorter side."""
    return _box(width, height, min(width, height) / _SPARE, 0.5, 0.5)


def near_box(chances: Sequence[float], width: int, height: int) -> Box:
    """A square as large as that of `centre_box`, anywhere."""
    return _box(width, height, min(width, height) / _SPARE, chances[0], chances[1])


def any_box(chances: Sequence[float], width: int, height: int) -> Box:
    """A box of 8 to 100 % of the area, stretched by up to 4 to 3, anywhere."""
    for k in range(_NUM_TRIES):
        share, stretch = chances[2 + 2 * k : 4 + 2 * k]
        area = (_LEAST_AREA + share * (1 - _LEAST_AREA)) * width * height
        ratio = _MOST_STRETCH ** (2 * stretch - 1)
        across, down = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if across <= width and down <= height:
            left, top = chances[0] * (width - across), chances[1] * (height - down)
            return left, top, left + across, top + down
    return _box(width, height, min(width, height), 0.5, 0.5)  # a very long image


def _box(width: int, height: int, size: float, across: float, down: float) -> Box:
    left, top = across * (width - size), down * (height - size)
    return left, top, left + size, top + size


def _square(path: Path, box_of: Callable[[int, int], Box], side: int) -> NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(path) as image:
            width, height = image.size
            left, top, right, bottom = box_of(width, height)
            # A JPEG file can be decoded at 1/2, 1/4 or 1/8 of its size, as long as the box keeps
            # at least as many pixels as it will have.
            scale = min(1.0, side / min(right - left, bottom - top))
            image.draft(None, (math.ceil(width * scale), math.ceil(height * scale)))
            across, down = image.size[0] / width, image.size[1] / height
            box = (left * across, top * down, right * across, bottom * down)
            colour = image.convert("RGB")
            square = colour.resize((side, side), Image.Resampling.BILINEAR, box=box)
            return np.asarray(square)
    # Pillow tells of damage in many ways; SyntaxError is that of PNG.
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise UsageError(
            f"cannot read the image {str(path)!r} ({_one_line(error)}); replace or remove it."
        ) from error


def _one_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
