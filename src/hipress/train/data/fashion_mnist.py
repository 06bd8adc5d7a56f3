"""Fashion-MNIST (Xiao et al., 2017): 70,000 grey images of 28 x 28 in four IDX files.

Any images of the same make will do, MNIST among them. The files may be packed (`.gz`) or not.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from hipress.errors import UsageError
from hipress.train.data.base import Data
from hipress.train.data.files import checked_folder
from hipress.train.data.images import Labelled, MemoryImages

_STEMS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def open_fashion_mnist(folder: Path, least_side: int | None = None) -> Data:
    """The data set.

    Args:
        folder: Holds the four files.
        least_side: The smallest image side that the model takes.
    """
    train, test = read_fashion_mnist(folder)
    num_classes = 1 + int(max(train.labels.max(), test.labels.max()))
    return MemoryImages(
        "fashion-mnist", train, test, num_classes=num_classes, least_side=least_side
    )


def read_fashion_mnist(folder: Path) -> tuple[Labelled, Labelled]:
    """The images to train on and to test with.

    Raises:
        UsageError: A file is missing or damaged.
    """
    checked_folder(folder, "Fashion-MNIST")
    parts = [torch.from_numpy(_read_idx(folder, stem)) for stem in _STEMS]
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
        found.append(Labelled(rows=images.flatten(1), labels=labels.long(), shape=shape))
    return found[0], found[1]


def _read_idx(folder: Path, stem: str) -> NDArray[np.uint8]:
    """The array of bytes in an IDX file: magic, big-endian sizes, elements."""
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
    # 8 is the format's name for bytes without sign.
    if raw[:3] != b"\0\0\x08" or len(raw) < start:
        raise UsageError(f"{str(path)!r} is not an IDX file of bytes; get the file again.")
    sizes = struct.unpack_from(f">{num_dims}I", raw, 4)
    if len(raw) - start != math.prod(sizes):
        raise UsageError(
            f"{str(path)!r} has the wrong size: expected {start + math.prod(sizes)} bytes"
            f"{' unpacked' if path is packed else ''}, found {len(raw)}; get the file again."
        )
    elements: NDArray[np.uint8] = np.frombuffer(raw, np.uint8, offset=start).reshape(sizes)
    copy: NDArray[np.uint8] = elements.copy()  # torch wants memory that may be written
    return copy
