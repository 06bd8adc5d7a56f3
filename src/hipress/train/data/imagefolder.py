"""Image files in folders: a folder for each class, or one for each of two domains."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hipress.errors import UsageError
from hipress.train.data.base import Data
from hipress.train.data.draws import numbers
from hipress.train.data.files import checked_folder
from hipress.train.data.image_files import (
    NUM_CHANCES,
    any_box,
    centre_box,
    image_names,
    near_box,
    need_pillow,
    squares,
)
from hipress.train.tasks import Batch

SIDE = 224
"""Of the images of a batch in pixels, unless the model or the user says otherwise."""

_HELD_OUT = 10  # one in so many
# Of ImageNet, red, green and blue, on the scale of bytes: what published models are trained with.
_MEAN = (123.675, 116.28, 103.53)
_DEVIATION = (58.395, 57.12, 57.375)


def open_imagefolder(
    folder: Path, *, task: str, side: int | None = None, least_side: int | None = None
) -> Data:
    """The data set of a folder.

    Args:
        folder: Has `train/CLASS/` and `val/CLASS/`, or `trainA/` and `trainB/` for the task style.
        task: "classify" or "style".
        side: Of the images of a batch; `SIDE` if None.
        least_side: The smallest that the model takes.
    """
    need_pillow()
    checked_folder(folder, "the images")
    side = side or max(SIDE, least_side or 0)
    if side < (least_side or 0):
        raise UsageError(
            f"--side is {side} and the model takes images of {least_side} pixels or more; give at "
            f"least --side {least_side}."
        )
    return ImageDomains(folder, side) if task == "style" else ImageClasses(folder, side)


class ImageClasses(Data):
    """For the task classify: a class is a folder in `train`.

    Training: a random part of the image (8 to 100 % of its area), scaled to a square and flipped
    half the time. Test: the square in the middle, as if cut out after scaling the shorter side to
    8/7 of the square's. Pixels are brought to mean 0 and deviation 1 over ImageNet.

    Args:
        folder: Has `train/CLASS/` and, if it is to be tested with, `val/CLASS/`.
        side: Of the squares, in pixels.
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
            test = _labelled(folder / "val", classes, may_lack=True)
        else:
            train, test = _held_out(train, folder / "val")
        super().__init__(
            name="imagefolder",
            task="classify",
            sizes={"num_classes": len(classes)},
            num_train=len(train),
            num_test=len(test),
        )
        self._side = side
        self._train = train
        self._test = test

    def train(self, indices: Tensor, seed: int) -> Batch:
        """Images and labels, cut and flipped by the seed."""
        images, labels = _chosen(self._train, indices)
        chances = numbers(seed, indices, 1 + NUM_CHANCES)
        boxes = [partial(any_box, row[1:]) for row in chances.tolist()]
        pixels = squares(images, boxes, self._side)
        return _flipped(_coloured(pixels), torch.from_numpy(chances[:, 0])), labels

    def test(self, indices: Tensor) -> Batch:
        """The middle of the images, and labels."""
        images, labels = _chosen(self._test, indices)
        return _coloured(squares(images, [centre_box] * len(images), self._side)), labels


class ImageDomains(Data):
    """For the task style: images of two domains, of which no two belong together.

    The number of examples is that of the larger domain; its partner is taken at random in training
    and by turns in the test. Training: a square of 7/8 of the shorter side, anywhere, flipped
    half the time. Test: the same in the middle. Pixels are from -1 to 1.

    Args:
        folder: Has `trainA` and `trainB` and, if they are to be tested with, `testA` and `testB`.
        side: Of the squares, in pixels.
    """

    reads_files = True

    def __init__(self, folder: Path, side: int) -> None:
        train, test = [], []
        for domain in "AB":
            files = _unlabelled(folder / f"train{domain}")
            tested = folder / f"test{domain}"
            if tested.is_dir():
                held_out = _unlabelled(tested)
            else:
                files, held_out = _held_out(files, tested)
            train.append(files)
            test.append(held_out)
        super().__init__(
            name="imagefolder",
            task="style",
            sizes={},
            num_train=max(map(len, train)),
            num_test=max(map(len, test)),
        )
        self._side = side
        self._train = train
        self._test = test
        # One domain only, or domains of the same size would always meet in the same pairs.
        self._leader = 0 if len(train[0]) >= len(train[1]) else 1

    def train(self, indices: Tensor, seed: int) -> Batch:
        """An image of each domain, paired, cut and flipped by the seed."""
        batch = []
        for number, files in enumerate(self._train):
            # A stream of its own for each domain, or both would be cut alike.
            chances = numbers(seed + number, indices, 4)
            anyone = torch.from_numpy(chances[:, 0] * len(files)).long()
            images, _ = _chosen(files, indices if number == self._leader else anyone)
            boxes = [partial(near_box, row[2:]) for row in chances.tolist()]
            pixels = _from_minus_one(squares(images, boxes, self._side))
            batch.append(_flipped(pixels, torch.from_numpy(chances[:, 1])))
        return tuple(batch)

    def test(self, indices: Tensor) -> Batch:
        """The middle of an image of each domain."""
        batch = []
        for files in self._test:
            images, _ = _chosen(files, indices % len(files))
            boxes = [centre_box] * len(images)
            batch.append(_from_minus_one(squares(images, boxes, self._side)))
        return tuple(batch)


_Files = list[tuple[Path, str, int]]
"""Folder, name and label of each file: folders are shared, a million paths would be 300 MB."""


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
    found = "images without classes" if image_names(folder) else "nothing"
    raise UsageError(
        f"{str(folder)!r} has {found} in it; put the images of each class into a folder of its "
        f"own, {folder.name}/CLASS/."
    )


def _labelled(folder: Path, classes: Sequence[str], *, may_lack: bool = False) -> _Files:
    found: _Files = []
    for label, name in enumerate(classes):
        place = folder / name
        if may_lack and not place.is_dir():
            continue
        found += _files(place, label)
    return found


def _unlabelled(folder: Path) -> _Files:
    if not folder.is_dir():
        raise UsageError(
            f"{str(folder.parent)!r} has no folder {folder.name!r}; for a model of two domains "
            "imagefolder needs trainA/ and trainB/ with the images of each."
        )
    return _files(folder, 0)


def _files(folder: Path, label: int) -> _Files:
    names = image_names(folder)
    if not names:
        raise UsageError(
            f"there is no image in {str(folder)!r}; put .jpg or .png files there, or remove it."
        )
    return [(folder, name, label) for name in names]


def _held_out(files: _Files, missing: Path) -> tuple[_Files, _Files]:
    """What is left to train on, and a tenth to test with: always the same one."""
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
    tested, trained = sorted(order[:num_test]), sorted(order[num_test:])
    return [files[k] for k in trained], [files[k] for k in tested]


def _chosen(files: _Files, indices: Tensor) -> tuple[list[Path], Tensor]:
    """The paths and labels of these numbers."""
    rows = [files[index] for index in indices.tolist()]
    return [folder / name for folder, name, _ in rows], torch.tensor([row[2] for row in rows])


def _coloured(pixels: Tensor) -> Tensor:
    mean, deviation = (torch.tensor(three).view(3, 1, 1) for three in (_MEAN, _DEVIATION))
    return pixels.contiguous().float().sub_(mean).div_(deviation)


def _from_minus_one(pixels: Tensor) -> Tensor:
    return pixels.contiguous().float().div_(127.5).sub_(1)


def _flipped(images: Tensor, chances: Tensor) -> Tensor:
    return torch.where(chances.view(-1, 1, 1, 1) < 0.5, images.flip(3), images)
