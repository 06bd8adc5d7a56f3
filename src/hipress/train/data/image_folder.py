"""Image files in folders, read with Pillow: a folder for each class, or for each of two domains."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hipress.errors import MissingDependencyError, UsageError
from hipress.train.data.base import Data, checked_folder, numbers
from hipress.train.tasks import Batch

SIDE = 224
"""Side of the images of a batch in pixels, unless the model or the user gives another one."""
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

_HELD_OUT = 10  # one in so many images is a test image
# ImageNet's red, green and blue, as bytes: published models are trained with these.
_MEAN = (123.675, 116.28, 103.53)
_DEVIATION = (58.395, 57.12, 57.375)


def open_imagefolder(
    folder: Path, *, task: str, side: int | None = None, least_side: int | None = None
) -> Data:
    """Open a folder of images; the arguments are those of `open_data`."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("pillow", extra="data") from error
    checked_folder(folder, "the images")
    side = side or max(SIDE, least_side or 0)
    if side < (least_side or 0):
        raise UsageError(
            f"--side is {side} and the model takes images of {least_side} pixels or more; give at "
            f"least --side {least_side}."
        )
    return ImageDomains(folder, side) if task == "style" else ImageClasses(folder, side)


class ImageClasses(Data):
    """Images for the task classify, in `train/CLASS/` and optionally `val/CLASS/`.

    Training images are a random part of the image (8 to 100 % of its area), scaled to a square and
    flipped half the time. Test images are the square in the middle, as if cut out after scaling the
    shorter side to 8/7 of the square's. Pixels have mean 0 and deviation 1 over ImageNet.
    """

    reads_files = True

    def __init__(self, folder: Path, side: int) -> None:
        classes = _class_names(folder / "train")
        train = _labelled(folder / "train", classes)
        if (folder / "val").is_dir():
            for name in _class_names(folder / "val"):
                if name not in classes:
                    raise UsageError(
                        f"{str(folder / 'val')!r} has a class {name!r} that "
                        f"{str(folder / 'train')!r} has not; rename or remove its folder."
                    )
            present = [name for name in classes if (folder / "val" / name).is_dir()]
            test = _labelled(folder / "val", classes, present)
        else:
            train, test = _held_out(train, folder / "val")
        sizes = {"num_classes": len(classes)}
        super().__init__("imagefolder", "classify", sizes, len(train), len(test))
        self._side, self._train, self._test = side, train, test

    def train(self, indices: Tensor, seed: int) -> Batch:
        """Return images and labels, cropped and flipped by the seed."""
        paths, labels = _chosen(self._train, indices)
        randoms = numbers(seed, indices, 1 + NUM_RANDOMS)
        boxes = [partial(any_box, row[1:]) for row in randoms.tolist()]
        pixels = _squares(paths, boxes, self._side)
        return _flipped(_normalised(pixels), torch.from_numpy(randoms[:, 0])), labels

    def test(self, indices: Tensor) -> Batch:
        paths, labels = _chosen(self._test, indices)
        return _normalised(_squares(paths, [centre_box] * len(paths), self._side)), labels


class ImageDomains(Data):
    """Unrelated images of two domains for the task style, in `trainA`, `trainB`.

    They are tested with `testA` and `testB`, if those exist.

    There are as many examples as images in the larger domain; the other image is chosen at random
    in training and in turn in the test. Training images are a square of 7/8 of the shorter side,
    anywhere, flipped half the time; test images are the one in the middle. Pixels are from -1 to 1.
    """

    reads_files = True

    def __init__(self, folder: Path, side: int) -> None:
        train, test = [], []
        for domain in "AB":
            files = _unlabelled(folder / f"train{domain}")
            test_folder = folder / f"test{domain}"
            if test_folder.is_dir():
                held_out = _unlabelled(test_folder)
            else:
                files, held_out = _held_out(files, test_folder)
            train.append(files)
            test.append(held_out)
        super().__init__("imagefolder", "style", {}, max(map(len, train)), max(map(len, test)))
        self._side, self._train, self._test = side, train, test
        # Only one domain follows the indices, or domains of equal size would repeat their pairs.
        self._leader = 0 if len(train[0]) >= len(train[1]) else 1

    def train(self, indices: Tensor, seed: int) -> Batch:
        """Return an image of each domain, paired, cropped and flipped by the seed."""
        batch = []
        for number, files in enumerate(self._train):
            # Each domain has its own stream, or both would be cropped alike.
            randoms = numbers(seed + number, indices, 4)
            anyone = torch.from_numpy(randoms[:, 0] * len(files)).long()
            paths, _ = _chosen(files, indices if number == self._leader else anyone)
            boxes = [partial(near_box, row[2:]) for row in randoms.tolist()]
            pixels = _from_minus_one(_squares(paths, boxes, self._side))
            batch.append(_flipped(pixels, torch.from_numpy(randoms[:, 1])))
        return tuple(batch)

    def test(self, indices: Tensor) -> Batch:
        batch = []
        for files in self._test:
            paths, _ = _chosen(files, indices % len(files))
            batch.append(_from_minus_one(_squares(paths, [centre_box] * len(paths), self._side)))
        return tuple(batch)


# --- lists of files -------------------------------------------------------------------------------

_Files = list[tuple[Path, str, int]]
"""Folder, name and label of each file; folders are shared, as a million paths would be 300 MB."""


def _image_names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.lower().endswith(SUFFIXES))


def _class_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise UsageError(
            f"{str(folder.parent)!r} has no folder {folder.name!r}; imagefolder needs "
            f"{folder.name}/CLASS/ with the images of each class."
        )
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.is_dir())
    if names:
        return names
    found = "images without classes" if _image_names(folder) else "nothing"
    raise UsageError(
        f"{str(folder)!r} has {found} in it; put the images of each class into a folder of its "
        f"own, {folder.name}/CLASS/."
    )


def _labelled(folder: Path, classes: Sequence[str], present: Sequence[str] | None = None) -> _Files:
    """Return the images of the classes that are present (all if None); labels number `classes`."""
    found: _Files = []
    for label, name in enumerate(classes):
        if present is None or name in present:
            found += _files(folder / name, label)
    return found


def _unlabelled(folder: Path) -> _Files:
    if not folder.is_dir():
        raise UsageError(
            f"{str(folder.parent)!r} has no folder {folder.name!r}; for a model of two domains "
            "imagefolder needs trainA/ and trainB/ with the images of each."
        )
    return _files(folder, 0)


def _files(folder: Path, label: int) -> _Files:
    names = _image_names(folder)
    if not names:
        raise UsageError(
            f"there is no image in {str(folder)!r}; put .jpg or .png files there, or remove it."
        )
    return [(folder, name, label) for name in names]


def _held_out(files: _Files, missing: Path) -> tuple[_Files, _Files]:
    """Split the files into training files and a tenth for the test, always the same way."""
    num_test = max(1, len(files) // _HELD_OUT)
    if len(files) < 2:
        raise UsageError(
            f"one image is too few to train and to test; add images, or the folder "
            f"{str(missing)!r} to test with."
        )
    logging.getLogger("hipress").warning(
        "imagefolder: there is no folder %r, so %d of %d images are held out to test with",
        str(missing),
        num_test,
        len(files),
    )
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    test, train = sorted(order[:num_test]), sorted(order[num_test:])
    return [files[k] for k in train], [files[k] for k in test]


def _chosen(files: _Files, indices: Tensor) -> tuple[list[Path], Tensor]:
    rows = [files[index] for index in indices.tolist()]
    return [folder / name for folder, name, _ in rows], torch.tensor([row[2] for row in rows])


# --- pixels ---------------------------------------------------------------------------------------

Box = tuple[float, float, float, float]

NUM_RANDOMS = 32
"""Number of random numbers that `any_box` may use."""

_NUM_TRIES = 10
_LEAST_AREA, _MOST_STRETCH = 0.08, 4 / 3  # Szegedy et al. (2015), section 6
_MARGIN = 8 / 7  # shorter side over the side that is cut out: 256 for 224


def centre_box(width: int, height: int) -> Box:
    """Return the square in the middle, seven eighths of the shorter side."""
    return _box(width, height, min(width, height) / _MARGIN, 0.5, 0.5)


def near_box(randoms: Sequence[float], width: int, height: int) -> Box:
    """Return a square as large as that of `centre_box`, anywhere."""
    return _box(width, height, min(width, height) / _MARGIN, randoms[0], randoms[1])


def any_box(randoms: Sequence[float], width: int, height: int) -> Box:
    """Return a box of 8 to 100 % of the area, stretched by up to 4 to 3, anywhere."""
    for k in range(_NUM_TRIES):
        share, stretch = randoms[2 + 2 * k : 4 + 2 * k]
        area = (_LEAST_AREA + share * (1 - _LEAST_AREA)) * width * height
        ratio = _MOST_STRETCH ** (2 * stretch - 1)
        across, down = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if across <= width and down <= height:
            left, top = randoms[0] * (width - across), randoms[1] * (height - down)
            return left, top, left + across, top + down
    return _box(width, height, min(width, height), 0.5, 0.5)  # a very long image


def _box(width: int, height: int, size: float, across: float, down: float) -> Box:
    left, top = across * (width - size), down * (height - size)
    return left, top, left + size, top + size


def _squares(
    paths: Sequence[Path], boxes: Sequence[Callable[[int, int], Box]], side: int
) -> Tensor:
    """Return a square of every image, uint8 [B, 3, side, side]; boxes take width and height."""
    pixels = np.empty((len(paths), side, side, 3), np.uint8)
    for row, path, box in zip(pixels, paths, boxes, strict=True):
        row[:] = _square(path, box, side)
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


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
    # Pillow has many errors for damaged files; SyntaxError is that of PNG.
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"cannot read the image {str(path)!r} ({reason}); replace or remove it."
        ) from error


def _normalised(pixels: Tensor) -> Tensor:
    mean, deviation = (torch.tensor(three).view(3, 1, 1) for three in (_MEAN, _DEVIATION))
    return pixels.contiguous().float().sub_(mean).div_(deviation)


def _from_minus_one(pixels: Tensor) -> Tensor:
    return pixels.contiguous().float().div_(127.5).sub_(1)


def _flipped(images: Tensor, randoms: Tensor) -> Tensor:
    return torch.where(randoms.view(-1, 1, 1, 1) < 0.5, images.flip(3), images)
