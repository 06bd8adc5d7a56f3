"""Labelled images of one size that fit in memory: digits, Fashion-MNIST and CIFAR-100.

    digits         1,797 grey images of 8 x 8 that come with scikit-learn, 1,200 of them to train on
    fashion-mnist  70,000 grey images of 28 x 28 in four IDX files (Xiao et al., 2017), packed (.gz)
                   or not; other images in the same format, such as MNIST, work too
    cifar100       60,000 colour images of 32 x 32 in the binary version of CIFAR-100 (Krizhevsky,
                   2009), whose records are a coarse label, a fine label and 3 x 32 x 32 bytes; fine
                   labels are used

Images are kept as bytes and converted batch by batch.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from hipress import settings
from hipress.errors import MissingDependencyError, UsageError
from hipress.train.data.base import (
    Data,
    Mapped,
    Stored,
    checked_folder,
    numbers,
    tensor_of,
    wrong_size,
)
from hipress.train.tasks import Batch

CIFAR_TRAIN = 50_000
CIFAR_TEST = 10_000

_NUM_TEST_DIGITS = 597  # of 1,797
_IDX_STEMS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_RECORD_BYTES = 2 + 3 * 32 * 32
_CIFAR_MARGIN = 4  # pixels, as in He et al. (2016)
_TEST_IMAGES = 1000  # in one batch of a test, so that a network's activations fit in memory


@dataclass(frozen=True, kw_only=True, eq=False)
class LabelledImages:
    """Images of one size with their labels."""

    rows: Stored
    """uint8, one row per image: channel after channel, line after line."""
    labels: Tensor
    shape: tuple[int, int, int]
    """Channels (1 or 3), height, width."""

    def images(self, indices: Tensor) -> Tensor:
        """Return the images of these indices, uint8 [B, C, H, W]."""
        return tensor_of(self.rows).index_select(0, indices).view(-1, *self.shape)


class MemoryImages(Data):
    """A data set for the task classify.

    Each channel is normalised to mean 0 and standard deviation 1 over the training images. Grey
    images are repeated to three channels, and images smaller than `least_side` are enlarged.

    Augmentation adds `margin` black pixels around a training image before a part of its own size is
    cut out at random and flipped half the time; 0 turns it off.
    """

    def __init__(
        self,
        name: str,
        train: LabelledImages,
        test: LabelledImages,
        *,
        num_classes: int,
        least_side: int | None = None,
        margin: int = 0,
    ) -> None:
        sizes = {"num_classes": num_classes}
        super().__init__(name, "classify", sizes, len(train.labels), len(test.labels))
        self._train, self._test, self._margin = train, test, margin
        height, width = train.shape[1:]
        least = least_side or 1
        self._size = (max(height, least), max(width, least))
        self._mean, self._deviation = _mean_and_deviation(train)

    def train(self, indices: Tensor, seed: int) -> Batch:
        """Return images and labels, augmented by the seed if the data set has a margin."""
        images = self._train.images(indices)
        if self._margin:
            images = _augment(images, numbers(seed, indices, 3), self._margin)
        return self._input(images), self._train.labels.index_select(0, indices)

    def test(self, indices: Tensor) -> Batch:
        """Return images without augmentation, and labels."""
        return self._input(self._test.images(indices)), self._test.labels.index_select(0, indices)

    def _input(self, images: Tensor) -> Tensor:
        pixels = images.float().sub_(self._mean).div_(self._deviation)
        if self._size != pixels.shape[2:]:
            pixels = functional.interpolate(pixels, self._size, mode="bilinear")
        return pixels.expand(-1, 3, -1, -1).contiguous()


def _mean_and_deviation(images: LabelledImages) -> tuple[Tensor, Tensor]:
    """Return those of each channel, [C, 1, 1], from counts of the 256 values: floats would take
    four times the memory of all images."""
    rows = tensor_of(images.rows)
    channels = rows.reshape(len(rows), images.shape[0], -1).unbind(1)
    counts = [torch.bincount(channel.flatten(), minlength=256) for channel in channels]
    shares = torch.stack(counts).double() / channels[0].numel()
    values = torch.arange(256, dtype=torch.float64)
    mean = (shares * values).sum(1)
    deviation = (shares * (values - mean[:, None]) ** 2).sum(1).sqrt()
    deviation[deviation == 0] = 1  # a channel without any contrast
    return mean.float().view(-1, 1, 1), deviation.float().view(-1, 1, 1)


def _augment(images: Tensor, randoms: NDArray[np.float64], margin: int) -> Tensor:
    """Shift each image by up to `margin` pixels each way, and flip it half the time."""
    across, down, flip = torch.as_tensor(randoms).unbind(1)
    num_shifts = 2 * margin + 1
    height, width = images.shape[2:]
    padded = functional.pad(images, (margin,) * 4)
    lines = (down * num_shifts).long()[:, None] + torch.arange(height)
    columns = torch.arange(width).expand(len(images), -1)
    columns = torch.where(flip[:, None] < 0.5, width - 1 - columns, columns)
    columns = columns + (across * num_shifts).long()[:, None]
    # One gather on flat pixels is 7 times faster than indexing lines and columns at once.
    pixels = lines[:, :, None] * (width + 2 * margin) + columns[:, None, :]
    pixels = pixels.flatten(1)[:, None, :].expand(-1, images.shape[1], -1)
    return padded.flatten(2).gather(2, pixels).view(images.shape)


# --- digits ---------------------------------------------------------------------------------------


def open_digits(least_side: int | None = None) -> Data:
    """Open digits; `least_side` is the smallest image side that the model takes."""
    return MemoryImages("digits", *read_digits(), num_classes=10, least_side=least_side)


def read_digits() -> tuple[LabelledImages, LabelledImages]:
    """Return the training and the test images, split the same way every time."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependencyError("scikit-learn", extra="data") from error
    digits = load_digits()
    rows = torch.from_numpy(digits.data).to(torch.uint8)
    labels = torch.from_numpy(digits.target)
    # The split is random because neighbours in the file were written by the same person.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = (
        LabelledImages(rows=rows[chosen], labels=labels[chosen], shape=(1, 8, 8))
        for chosen in (order[_NUM_TEST_DIGITS:], order[:_NUM_TEST_DIGITS])
    )
    return train, test


# --- Fashion-MNIST --------------------------------------------------------------------------------


def open_fashion_mnist(folder: Path, least_side: int | None = None) -> Data:
    """Open Fashion-MNIST; `least_side` is the smallest image side that the model takes."""
    train, test = read_fashion_mnist(folder)
    num_classes = 1 + int(max(train.labels.max(), test.labels.max()))
    return MemoryImages(
        "fashion-mnist", train, test, num_classes=num_classes, least_side=least_side
    )


def read_fashion_mnist(folder: Path) -> tuple[LabelledImages, LabelledImages]:
    """Return the training and the test images of a folder with the four files."""
    checked_folder(folder, "Fashion-MNIST")
    parts = [torch.from_numpy(_read_idx(folder, stem)) for stem in _IDX_STEMS]
    found = []
    for images, labels in (parts[:2], parts[2:]):
        are_pairs = images.dim() == 3 and labels.dim() == 1 and len(images) == len(labels) > 0
        if not are_pairs or images.shape[1:] != parts[0].shape[1:]:
            raise UsageError(
                f"Fashion-MNIST in {str(folder)!r} has images of shape {tuple(images.shape)} and "
                f"labels of shape {tuple(labels.shape)}; get its four files again."
            )
        _, height, width = images.shape
        shape = (1, height, width)
        found.append(LabelledImages(rows=images.flatten(1), labels=labels.long(), shape=shape))
    return found[0], found[1]


def _read_idx(folder: Path, stem: str) -> NDArray[np.uint8]:
    """Return the array of bytes in an IDX file: magic, big-endian sizes, elements."""
    bare = folder / f"{stem}-ubyte"
    packed = bare.with_name(bare.name + ".gz")
    path = packed if packed.exists() else bare
    try:
        raw = path.read_bytes() if path is bare else gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(
            f"Fashion-MNIST needs {packed.name} (or {bare.name}), which is not in {str(folder)!r}; "
            "give the folder that holds its four files."
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot read {str(path)!r}: {error}; get the file again.") from error
    num_dims = raw[3] if len(raw) >= 4 else 0
    start = 4 + 4 * num_dims
    # 8 is the format's code for unsigned bytes.
    if raw[:3] != b"\0\0\x08" or len(raw) < start:
        raise UsageError(f"{str(path)!r} is not an IDX file of bytes; get the file again.")
    sizes = struct.unpack_from(f">{num_dims}I", raw, 4)
    if len(raw) - start != math.prod(sizes):
        unpacked = " unpacked" if path is packed else ""
        raise wrong_size(path, f"{start + math.prod(sizes)} bytes{unpacked}", len(raw))
    elements: NDArray[np.uint8] = np.frombuffer(raw, np.uint8, offset=start).reshape(sizes)
    copy: NDArray[np.uint8] = elements.copy()  # torch needs writable memory
    return copy


# --- CIFAR-100 ------------------------------------------------------------------------------------


def open_cifar100(folder: Path, least_side: int | None = None) -> Data:
    """Open CIFAR-100; training images are shifted by up to 4 pixels and flipped half the time."""
    folder = _cifar_folder(checked_folder(folder, "CIFAR-100"))
    return MemoryImages(
        "cifar100",
        _read_cifar(folder / "train.bin", CIFAR_TRAIN),
        _read_cifar(folder / "test.bin", CIFAR_TEST),
        num_classes=100,
        least_side=least_side,
        margin=_CIFAR_MARGIN,
    )


def _cifar_folder(given: Path) -> Path:
    for folder in (given, given / "cifar-100-binary"):
        if (folder / "train.bin").is_file():
            return folder
    for folder in (given, given / "cifar-100-python"):
        if (folder / "meta").is_file() and (folder / "train").is_file():
            raise UsageError(
                f"{str(folder)!r} holds the Python version of CIFAR-100, which is pickled; get the "
                "binary version, cifar-100-binary.tar.gz, and give its folder."
            )
    raise UsageError(
        f"there is no train.bin in {str(given)!r} or in its folder cifar-100-binary; unpack the "
        "binary version of CIFAR-100, cifar-100-binary.tar.gz, and give its folder."
    )


def _read_cifar(path: Path, num_records: int) -> LabelledImages:
    if not path.is_file():
        raise UsageError(
            f"CIFAR-100 needs {path.name}, which is not in {str(path.parent)!r}; unpack "
            "cifar-100-binary.tar.gz again."
        )
    if path.stat().st_size != num_records * _CIFAR_RECORD_BYTES:
        expected = f"{num_records * _CIFAR_RECORD_BYTES} bytes"
        raise wrong_size(path, expected, path.stat().st_size)
    # The images stay in the file, so that the ranks of a host share its 184 MB.
    file = Mapped(path, "cifar100")
    records = file.tensor.view(num_records, _CIFAR_RECORD_BYTES)
    labels = records[:, 1].long()
    if int(labels.max()) >= 100:
        raise UsageError(
            f"{str(path)!r} has a label of {int(labels.max())} where 99 is the largest; get the "
            "binary version of CIFAR-100 again."
        )
    return LabelledImages(rows=file.part(records[:, 2:]), labels=labels, shape=_CIFAR_SHAPE)


# --- rows of bytes, for the convergence benchmark -------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class DataSet:
    """Images as rows of bytes with their labels; `pixels` converts them for a model."""

    unit: ClassVar[str] = "images"
    name: str
    train_images: Tensor
    """uint8, one row per image."""
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    has_channels: bool = False
    """Whether the model takes square images of three equal channels, and not rows."""

    @property
    def num_train(self) -> int:
        return len(self.train_labels)

    def to(self, device: str) -> DataSet:
        """Return the data set in the memory of a device."""
        names = ("train_images", "train_labels", "test_images", "test_labels")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def train(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the pixels and labels of training images."""
        return self.pixels(self.train_images[indices]), self.train_labels[indices]

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the pixels and labels of all test images, rows all at once."""
        size = _TEST_IMAGES if self.has_channels else len(self.test_labels)
        parts = (torch.split(part, size) for part in (self.test_images, self.test_labels))
        for images, labels in zip(*parts, strict=True):
            yield self.pixels(images), labels

    @cached_property
    def _mean_and_deviation(self) -> tuple[float, float]:
        pixels = self.train_images.float()
        return float(pixels.mean()), float(pixels.std())

    def pixels(self, images: Tensor) -> Tensor:
        """Return rows as float32; training pixels have mean 0 and standard deviation 1."""
        mean, deviation = self._mean_and_deviation
        rows = images.float().sub_(mean).div_(deviation)
        if not self.has_channels:
            return rows
        side = math.isqrt(rows.shape[1])
        return rows.view(-1, 1, side, side).expand(-1, 3, -1, -1).contiguous()


def load(name: str, folder: Path | None = None) -> DataSet:
    """Load digits or Fashion-MNIST as rows; the folder is `HIPRESS_FASHION_MNIST` if None."""
    if name == "digits":
        train, test = read_digits()
    elif name == "fashion-mnist":
        folder = folder or settings.fashion_mnist()
        if folder is None:
            raise UsageError(
                "the folder of Fashion-MNIST is not known; set HIPRESS_FASHION_MNIST or --data-dir "
                "to the folder that holds train-images-idx3-ubyte.gz and its three companions."
            )
        train, test = read_fashion_mnist(folder)
    else:
        raise UsageError(f"no data set {name!r}; there are: digits, fashion-mnist.")
    return DataSet(
        name=name,
        train_images=tensor_of(train.rows),
        train_labels=train.labels,
        test_images=tensor_of(test.rows),
        test_labels=test.labels,
    )
