"""CIFAR-100 (Krizhevsky, 2009), the binary version: 60,000 colour images of 32 x 32, 100 classes.

A record of its two files is a coarse label, a fine label and 3 x 32 x 32 bytes; fine labels are
used.
"""

from __future__ import annotations

from pathlib import Path

from hipress.errors import UsageError
from hipress.train.data.base import Data
from hipress.train.data.files import Mapped, checked_folder, checked_size
from hipress.train.data.images import Labelled, MemoryImages

NUM_TRAIN = 50_000
"""Records of train.bin."""
NUM_TEST = 10_000
"""Records of test.bin."""

_SHAPE = (3, 32, 32)
_RECORD_BYTES = 2 + 3 * 32 * 32
_MARGIN = 4  # pixels, as in He et al. (2016)


def open_cifar100(folder: Path, least_side: int | None = None) -> Data:
    """The data set; training images are moved by up to 4 pixels and flipped half the time.

    Args:
        folder: Holds train.bin and test.bin, or the folder cifar-100-binary that does.
        least_side: The smallest image side that the model takes.
    """
    folder = _folder(checked_folder(folder, "CIFAR-100"))
    return MemoryImages(
        "cifar100",
        _read(folder / "train.bin", NUM_TRAIN),
        _read(folder / "test.bin", NUM_TEST),
        num_classes=100,
        least_side=least_side,
        margin=_MARGIN,
    )


def _folder(given: Path) -> Path:
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


def _read(path: Path, num_records: int) -> Labelled:
    if not path.is_file():
        raise UsageError(
            f"CIFAR-100 needs {path.name}, which is not in {str(path.parent)!r}; unpack "
            "cifar-100-binary.tar.gz again."
        )
    checked_size(path, num_records * _RECORD_BYTES)
    # The images stay in the file: the ranks of a host share its 184 MB.
    file = Mapped(path, "cifar100")
    records = file.tensor.view(num_records, _RECORD_BYTES)
    labels = records[:, 1].long()
    if int(labels.max()) >= 100:
        raise UsageError(
            f"{str(path)!r} has a label of {int(labels.max())} where 99 is the largest; get the "
            "binary version of CIFAR-100 again."
        )
    return Labelled(rows=file.part(records[:, 2:]), labels=labels, shape=_SHAPE)
