"""Digits: 1,797 grey images of 8 x 8 that come with scikit-learn, 1,200 of them to train on."""

from __future__ import annotations

import torch

from hipress.errors import MissingDependencyError
from hipress.train.data.base import Data
from hipress.train.data.images import Labelled, MemoryImages

_NUM_TESTED = 597  # of 1,797


def open_digits(least_side: int | None = None) -> Data:
    """The data set; `least_side` is the smallest image side that the model takes."""
    return MemoryImages("digits", *read_digits(), num_classes=10, least_side=least_side)


def read_digits() -> tuple[Labelled, Labelled]:
    """The images to train on and to test with, split the same way every time.

    Raises:
        MissingDependencyError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependencyError("scikit-learn", extra="data") from error
    digits = load_digits()
    rows = torch.from_numpy(digits.data).to(torch.uint8)
    labels = torch.from_numpy(digits.target)
    # Neighbours in the file were written by the same hand, so the split is at random.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = (
        Labelled(rows=rows[chosen], labels=labels[chosen], shape=(1, 8, 8))
        for chosen in (order[_NUM_TESTED:], order[:_NUM_TESTED])
    )
    return train, test
