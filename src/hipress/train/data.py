"""The data sets of the training jobs: digits comes with scikit-learn, Fashion-MNIST from a folder.

Nothing is downloaded. Fashion-MNIST (Xiao et al., 2017) is four files in the IDX format, with or
without `.gz`; their folder is an argument or `HIPRESS_FASHION_MNIST`.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hipress import settings
from hipress.errors import MissingDependencyError, UsageError

NAMES = ("digits", "fashion-mnist")
"""The data sets that `load` knows."""

_FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
_NUM_DIGITS_TESTED = 597  # of 1,797


@dataclass(frozen=True, kw_only=True, eq=False)
class DataSet:
    """Images as rows of bytes with their labels; `pixels` makes a model's input of them."""

    name: str
    train_images: Tensor
    """uint8, one row per image."""
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @cached_property
    def _mean_and_deviation(self) -> tuple[float, float]:
        pixels = self.train_images.float()
        return float(pixels.mean()), float(pixels.std())

    def pixels(self, images: Tensor) -> Tensor:
        """Rows of bytes as float32, so that training pixels have mean 0 and deviation 1."""
        mean, deviation = self._mean_and_deviation
        return images.float().sub_(mean).div_(deviation)


def load(name: str, folder: Path | None = None) -> DataSet:
    """A data set by name.

    Args:
        name: One of `NAMES`.
        folder: Where the files of Fashion-MNIST are; `HIPRESS_FASHION_MNIST` if None.

    Raises:
        UsageError: There is no such data set, or its files are missing or damaged.
        MissingDependencyError: scikit-learn, which brings digits, is not installed.
    """
    if name == "digits":
        return _digits()
    if name == "fashion-mnist":
        return _fashion_mnist(folder or settings.fashion_mnist())
    raise UsageError(f"no data set {name!r}; there are: {', '.join(NAMES)}.")


def _digits() -> DataSet:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependencyError("scikit-learn", extra="data") from error
    digits = load_digits()
    images = torch.from_numpy(digits.data).to(torch.uint8)
    labels = torch.from_numpy(digits.target)
    # Neighbours in the file were written by the same hand, so the split is at random.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    tested, trained = order[:_NUM_DIGITS_TESTED], order[_NUM_DIGITS_TESTED:]
    return DataSet(
        name="digits",
        train_images=images[trained],
        train_labels=labels[trained],
        test_images=images[tested],
        test_labels=labels[tested],
    )


def _fashion_mnist(folder: Path | None) -> DataSet:
    if folder is None:
        raise UsageError(
            "the folder of Fashion-MNIST is not known; set HIPRESS_FASHION_MNIST or --data-dir to "
            f"the folder that holds {_FILES[0]}-ubyte.gz and its three companions."
        )
    parts = [torch.from_numpy(_read_idx(folder, stem)) for stem in _FILES]
    for images, labels in (parts[:2], parts[2:]):
        if len(images) != len(labels) or images.dim() < 2 or labels.dim() != 1:
            raise UsageError(
                f"Fashion-MNIST in {str(folder)!r} has images of shape {tuple(images.shape)} and "
                f"labels of shape {tuple(labels.shape)}; get its four files again."
            )
    return DataSet(
        name="fashion-mnist",
        train_images=parts[0].flatten(1),
        train_labels=parts[1].long(),
        test_images=parts[2].flatten(1),
        test_labels=parts[3].long(),
    )


def _read_idx(folder: Path, stem: str) -> NDArray[np.uint8]:
    """The array of bytes in an IDX file: magic, big-endian sizes, elements."""
    path = folder / f"{stem}-ubyte"
    packed = path.with_name(path.name + ".gz")
    try:
        raw = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    except FileNotFoundError:
        raise UsageError(
            f"Fashion-MNIST needs {packed.name} (or {path.name}), which is not in {str(folder)!r}; "
            "give the folder that holds its four files."
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"cannot read {str(packed)!r}: {error}; get the file again.") from error
    num_dims = raw[3] if len(raw) >= 4 else 0
    start = 4 + 4 * num_dims
    sizes = struct.unpack_from(f">{num_dims}I", raw, 4) if len(raw) >= start else (-1,)
    # 8 is the format's name for bytes without sign.
    if raw[:3] != b"\0\0\x08" or len(raw) - start != math.prod(sizes):
        raise UsageError(f"{str(packed)!r} is not an IDX file of bytes; get the file again.")
    elements: NDArray[np.uint8] = np.frombuffer(raw, np.uint8, offset=start).reshape(sizes)
    copy: NDArray[np.uint8] = elements.copy()  # torch wants memory that may be written
    return copy
