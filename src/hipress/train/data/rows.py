"""Images as rows of bytes, for the convergence benchmark: digits and Fashion-MNIST."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from hipress import settings
from hipress.errors import UsageError
from hipress.train.data.digits import read_digits
from hipress.train.data.fashion_mnist import read_fashion_mnist
from hipress.train.data.files import tensor_of

ROW_NAMES = ("digits", "fashion-mnist")
"""The data sets that `load` knows."""


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
        name: One of `ROW_NAMES`.
        folder: Where the files of Fashion-MNIST are; `HIPRESS_FASHION_MNIST` if None.

    Raises:
        UsageError: There is no such data set, or its files are missing or damaged.
        MissingDependencyError: scikit-learn, which brings digits, is not installed.
    """
    if name == "digits":
        train, test = read_digits()
    elif name == "fashion-mnist":
        train, test = read_fashion_mnist(_folder(folder or settings.fashion_mnist()))
    else:
        raise UsageError(f"no data set {name!r}; there are: {', '.join(ROW_NAMES)}.")
    return DataSet(
        name=name,
        train_images=tensor_of(train.rows),
        train_labels=train.labels,
        test_images=tensor_of(test.rows),
        test_labels=test.labels,
    )


def _folder(folder: Path | None) -> Path:
    if folder is None:
        raise UsageError(
            "the folder of Fashion-MNIST is not known; set HIPRESS_FASHION_MNIST or --data-dir to "
            "the folder that holds train-images-idx3-ubyte.gz and its three companions."
        )
    return folder
