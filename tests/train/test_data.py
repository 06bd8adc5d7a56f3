"""Data sets: digits as it comes, Fashion-MNIST from files that are whole, damaged or missing."""

from __future__ import annotations

import gzip
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from hipress.errors import UsageError
from hipress.train import data

STEMS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


def idx(array: np.ndarray) -> bytes:
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((40, 5, 3), (40,), (7, 5, 3), (7,))
    return {
        stem: rng.integers(0, 10 if len(shape) == 1 else 256, shape, dtype=np.uint8)
        for stem, shape in zip(STEMS, shapes, strict=True)
    }


def write(folder: Path, *, packed: bool = True) -> None:
    for stem, array in arrays().items():
        if packed:
            (folder / f"{stem}-ubyte.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / f"{stem}-ubyte").write_bytes(idx(array))


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files(tmp_path: Path, packed: bool) -> None:
    write(tmp_path, packed=packed)
    found, expected = data.load("fashion-mnist", tmp_path), arrays()
    assert found.train_images.tolist() == expected[STEMS[0]].reshape(40, 15).tolist()
    assert found.train_labels.tolist() == expected[STEMS[1]].tolist()
    assert found.test_images.tolist() == expected[STEMS[2]].reshape(7, 15).tolist()
    assert found.test_labels.tolist() == expected[STEMS[3]].tolist()
    pixels = found.pixels(found.train_images)
    assert abs(float(pixels.mean())) < 1e-5 and float(pixels.std()) == pytest.approx(1, abs=1e-5)


def test_the_folder_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setenv("HIPRESS_FASHION_MNIST", str(tmp_path))
    assert len(data.load("fashion-mnist").train_labels) == 40
    monkeypatch.delenv("HIPRESS_FASHION_MNIST")
    with pytest.raises(UsageError, match="set HIPRESS_FASHION_MNIST or --data-dir to the folder"):
        data.load("fashion-mnist")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / f"{STEMS[3]}-ubyte.gz").unlink()
    with pytest.raises(UsageError, match=r"needs t10k-labels-idx1-ubyte\.gz \(or t10k-labels-idx1"):
        data.load("fashion-mnist", tmp_path)
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "nowhere"))):
        data.load("fashion-mnist", tmp_path / "nowhere")


WHOLE = idx(arrays()[STEMS[0]])


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)  # without the time, which would be part of a test's name


@pytest.mark.parametrize(
    "content",
    [
        b"",
        packed(b""),
        packed(b"\0\0"),
        packed(WHOLE[:-1]),
        packed(WHOLE + b"\0"),
        packed(b"\1" + WHOLE[1:]),
        packed(WHOLE[:2] + b"\x0d" + WHOLE[3:]),  # of floats
        packed(WHOLE[:3] + b"\xff" + WHOLE[4:]),  # of 255 dimensions
        packed(WHOLE)[:-9],
        packed(WHOLE)[:20] + b"xxxx" + packed(WHOLE)[24:],
        b"<html>not found</html>",
    ],
    ids=[f"damage {k}" for k in range(11)],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    write(tmp_path)
    (tmp_path / f"{STEMS[0]}-ubyte.gz").write_bytes(content)
    with pytest.raises(UsageError, match=r"train-images-idx3-ubyte\.gz.*get the file again"):
        data.load("fashion-mnist", tmp_path)


def test_images_and_labels_must_belong_together(tmp_path: Path) -> None:
    write(tmp_path)
    labels = arrays()[STEMS[1]][:-1]
    (tmp_path / f"{STEMS[1]}-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    with pytest.raises(UsageError, match=r"images of shape \(40, 5, 3\) and labels of shape \(39,"):
        data.load("fashion-mnist", tmp_path)


def test_digits_are_split_once_and_for_all() -> None:
    first, second = data.load("digits"), data.load("digits")
    assert (len(first.train_labels), len(first.test_labels)) == (1200, 597)
    assert torch.equal(first.train_images, second.train_images)
    assert torch.bincount(first.test_labels).min() > 40  # every digit is tested


def test_unknown_name() -> None:
    with pytest.raises(UsageError, match="no data set 'mnist'; there are: digits, fashion-mnist"):
        data.load("mnist")


@pytest.mark.skipif(
    not os.environ.get("HIPRESS_FASHION_MNIST"),
    reason="needs Fashion-MNIST: set HIPRESS_FASHION_MNIST to the folder of its files",
)
def test_the_real_fashion_mnist() -> None:
    found = data.load("fashion-mnist")
    assert found.train_images.shape == (60_000, 784) and found.test_images.shape == (10_000, 784)
    # Of train and test together: copies with another split than the published one are about.
    labels = torch.cat([found.train_labels, found.test_labels])
    assert torch.bincount(labels).tolist() == [7000] * 10
