"""Data sets: digits as it comes, Fashion-MNIST from files that are whole, damaged or missing, and
how a data set is asked for.
"""

from __future__ import annotations

import gzip
import os
import pickle
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hipress.errors import MissingDependencyError, UsageError
from hipress.train import data
from hipress.train.data.base import numbers
from hipress.train.data.synthetic import NUM_TEST, NUM_TRAIN
from hipress.train.models import model
from hipress.train.tasks import Draw

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
    nowhere = tmp_path / "nowhere"
    with pytest.raises(UsageError, match=re.escape(f"{str(nowhere)!r} does not exist; give the f")):
        data.load("fashion-mnist", nowhere)
    with pytest.raises(UsageError, match="-ubyte.gz' is a file; give the folder that holds Fash"):
        data.load("fashion-mnist", tmp_path / f"{STEMS[0]}-ubyte.gz")


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


@pytest.mark.parametrize("is_packed", [True, False], ids=["packed", "bare"])
def test_half_a_file_says_what_is_missing(tmp_path: Path, is_packed: bool) -> None:
    write(tmp_path, packed=is_packed)
    ending, unpacked = (".gz", " unpacked") if is_packed else ("", "")
    content = packed(WHOLE[:-1]) if is_packed else WHOLE[:-1]
    (tmp_path / f"{STEMS[0]}-ubyte{ending}").write_bytes(content)
    # 4 bytes of magic, 3 sizes of 4 bytes, 40 images of 5 x 3.
    expected = rf"idx3-ubyte{ending}' has the wrong size: expected 616 bytes{unpacked}, found 615;"
    with pytest.raises(UsageError, match=expected):
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


def ask(
    name: str,
    *paths: Path,
    task: str | None = None,
    draw: Draw | None = None,
    least_side: int | None = None,
) -> data.Data:
    return data.open_data(name, paths, task=task, draw=draw, least_side=least_side)


def test_batches_of_digits() -> None:
    digits, rows = ask("digits"), data.load("digits")
    assert (digits.num_train, digits.num_test) == (1200, 597)
    assert (digits.name, digits.task, digits.sizes) == ("digits", "classify", {"num_classes": 10})
    everything = torch.arange(1200)
    images, labels = digits.train(everything, seed=0)
    assert labels.dtype == torch.int64 and torch.equal(labels, rows.train_labels)
    assert images.dtype == torch.float32 and images.is_contiguous()
    grey = rows.train_images.double().view(1200, 1, 8, 8)
    expected = (grey - grey.mean()) / grey.std(correction=0)
    torch.testing.assert_close(images, expected.float().expand(-1, 3, -1, -1))
    some = torch.tensor([596, 3, 3])
    images, labels = digits.test(some)
    expected = (rows.test_images[some].double().view(3, 1, 8, 8) - grey.mean()) / grey.std()
    torch.testing.assert_close(images, expected.float().expand(-1, 3, -1, -1), rtol=1e-3, atol=1e-5)
    assert labels.tolist() == rows.test_labels[some].tolist()


def test_small_images_are_enlarged() -> None:
    some = torch.tensor([5, 70])
    small, _ = ask("digits", least_side=8).train(some, 0)
    large, _ = ask("digits", least_side=16).train(some, 0)
    assert small.shape == (2, 3, 8, 8) and large.shape == (2, 3, 16, 16)
    # Twice the side: new pixels lie a quarter away from old ones, so inside it is 9 3 3 1 of 16.
    old, new = small[:, :, 2:4, 3:5], large[:, :, 5, 7]
    expected = (9 * old[..., 0, 0] + 3 * old[..., 0, 1] + 3 * old[..., 1, 0] + old[..., 1, 1]) / 16
    torch.testing.assert_close(new, expected)


def test_batches_of_fashion_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    found, raw = ask("fashion-mnist", tmp_path, task="classify"), arrays()
    assert (found.num_train, found.num_test) == (40, 7) and found.task == "classify"
    images, labels = found.test(torch.tensor([6, 0]))
    grey = raw[STEMS[0]].astype(float)
    expected = (raw[STEMS[2]][[6, 0]] - grey.mean()) / grey.std()
    assert images.shape == (2, 3, 5, 3)
    np.testing.assert_allclose(images[:, 2], expected, rtol=1e-5, atol=1e-6)
    assert labels.tolist() == raw[STEMS[3]][[6, 0]].tolist()
    monkeypatch.setenv("HIPRESS_FASHION_MNIST", str(tmp_path))
    again, _ = ask("fashion-mnist").test(torch.tensor([6, 0]))
    assert torch.equal(again, images)


def test_numbers_follow_from_seed_and_index_alone() -> None:
    some = torch.tensor([3, 10**12, 3, 0])
    drawn = numbers(7, some, 1000)
    assert drawn.shape == (4, 1000) and (drawn[0] == drawn[2]).all()
    for row, index in zip(drawn, some.tolist(), strict=True):
        assert (row == numbers(7, torch.tensor([index]), 1000)[0]).all()
    assert (numbers(7, some, 10) == drawn[:, :10]).all()
    assert (numbers(2**63 - 1, some, 5) != drawn[:, :5]).all()
    many = numbers(0, torch.arange(1000), 100)
    assert 0 <= many.min() and many.max() < 1
    # The mean of 100,000 has a deviation of 0.0009, a share of one in ten of them 0.00095.
    assert many.mean() == pytest.approx(0.5, abs=0.005)
    shares = np.histogram(many, bins=10, range=(0, 1))[0] / many.size
    np.testing.assert_allclose(shares, 0.1, atol=0.005)
    assert abs(np.corrcoef(many[:-1, 0], many[1:, 0])[0, 1]) < 0.15  # neighbours; deviation 0.03


def draw_pairs(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    images = torch.rand(batch, 3, generator=generator)
    return images, torch.randint(0, 10, (batch,), generator=generator)


def test_synthetic_data_follows_from_its_index() -> None:
    first, second = (ask("synthetic", task="style", draw=draw_pairs) for _ in range(2))
    assert (first.num_train, first.num_test, first.sizes) == (NUM_TRAIN, NUM_TEST, {})
    assert (first.name, first.task) == ("synthetic", "style")
    some = torch.tensor([5, NUM_TRAIN - 1, 5, 77])
    images, labels = first.train(some, seed=1)
    assert torch.equal(images[0], images[2]) and not torch.equal(images[0], images[3])
    assert len(set(images[:, 0].tolist())) == 3
    # Other neighbours, another order, another seed of the step, another process: the same.
    again, labels_again = second.train(some.flip(0)[:2], seed=9)
    assert torch.equal(again, images.flip(0)[:2]) and torch.equal(labels_again, labels.flip(0)[:2])
    test, _ = first.test(some % NUM_TEST)
    assert not torch.isin(test, images).any()
    other = data.open_data("synthetic", draw=draw_pairs, seed=1).train(some, seed=1)[0]
    assert not torch.isin(other, images).any()


def test_large_synthetic_examples_are_drawn_once_and_shared() -> None:
    num_drawn = 0

    def draw(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        nonlocal num_drawn
        num_drawn += batch
        value = torch.rand(batch, 1, generator=generator)
        return (value.expand(batch, 2**21),)  # 8 MiB each, of which 64 MiB hold 8

    made = ask("synthetic", task="classify", draw=draw)
    before = num_drawn
    (images,) = made.train(torch.tensor([1, 9, 2]), seed=0)
    assert num_drawn == before + 2
    assert images[0, 0] == images[1, 0] != images[2, 0]
    before = num_drawn
    made.train(torch.tensor([17, 2, 1]), seed=0)
    assert num_drawn == before


def synthetic(name: str, side: int | None = None, length: int | None = None) -> data.Data:
    line = model(name)
    return data.open_data("synthetic", task=line.task, draw=line.draw, side=side, length=length)


@pytest.mark.parametrize("name", ["vgg", "mlp", "gpt", "bert-base", "transformer", "ugatit"])
def test_synthetic_data_may_be_asked_for_as_it_is(name: str) -> None:
    line = model(name)
    some = torch.tensor([3, 9])
    plain = synthetic(name).train(some, seed=0)
    told = synthetic(name, side=line.side, length=line.length).train(some, seed=0)
    for one, two in zip(plain, told, strict=True):
        assert torch.equal(one, two)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "unknown": (
        lambda folder: ask("Cifar10"),
        r"no data set 'Cifar10' \(did you mean 'cifar100'\?\); there are: digits, synthetic, "
        r"fashion-mnist, cifar100, imagefolder, text, parallel-text; choose one, or "
        r"name your own as package\.module:callable\.",
    ),
    "far from any name": (lambda folder: ask("???"), r"no data set '\?\?\?'; there are: digits"),
    "no folder": (
        lambda folder: ask("cifar100"),
        r"cifar100 takes one folder and none is given; write --data cifar100 DIR\.",
    ),
    "no folder anywhere": (
        lambda folder: ask("fashion-mnist"),
        r"fashion-mnist takes one folder and none is given; write --data fashion-mnist DIR or set "
        r"HIPRESS_FASHION_MNIST\.",
    ),
    "two folders": (
        lambda folder: ask("fashion-mnist", Path("a"), Path("b")),
        r"fashion-mnist takes one folder, not 'a', 'b'; write --data fashion-mnist DIR\.",
    ),
    "a folder too many": (
        lambda folder: ask("digits", Path("a")),
        r"digits takes no path, not 'a'; write --data digits\.",
    ),
    "one file of two": (
        lambda folder: ask("parallel-text", Path("a")),
        r"parallel-text takes two files, not 'a'; write --data parallel-text SOURCE TARGET",
    ),
    "images for text": (
        lambda folder: ask("digits", task="language"),
        r"the model trains on text and digits has images with labels; choose --data synthetic, "
        r"--data text FILE or your own, --data package\.module:callable\.",
    ),
    "text for pairs": (
        lambda folder: ask("text", Path("a"), task="translate"),
        r"the model trains on pairs of lines and text has one text; choose --data synthetic, "
        r"--data parallel-text SOURCE TARGET or your own, --data package\.module:callable\.",
    ),
    "digits for two domains": (
        lambda folder: ask("digits", task="style"),
        r"the model trains on images of two domains and digits has images with labels; choose "
        r"--data synthetic, --data imagefolder DIR or your own, --data package\.module:callable\.",
    ),
    "nothing to draw with": (
        lambda folder: ask("synthetic"),
        r"synthetic data is drawn by the model, and this model has no data of its own; choose "
        r"--data digits, .*, --data parallel-text SOURCE TARGET or your own, --data ",
    ),
    "tokens": (
        lambda folder: data.open_data("text", [Path("a")], tokens="letters"),
        r"--tokens 'letters' is none of bytes, words; choose one\.",
    ),
    "length": (
        lambda folder: data.open_data("text", [Path("a")], length=1),
        r"--length is 1; it must be 2 or more\.",
    ),
    "side": (
        lambda folder: data.open_data("imagefolder", [Path("a")], side=0),
        r"--side is 0; it must be 1 or more\.",
    ),
    **{
        f"side of {name}": (
            lambda folder, name=name, num=num: data.open_data(name, [Path("a")] * num, side=32),
            r"--side is for imagefolder; leave it out\.$",
        )
        for name, num in (("digits", 0), ("fashion-mnist", 1), ("cifar100", 1), ("text", 1))
    },
    **{
        f"words of {name}": (
            lambda folder, name=name, num=num: data.open_data(
                name, [Path("a")] * num, draw=draw_pairs, tokens="words"
            ),
            r"--tokens is for text and parallel-text; leave it out\.$",
        )
        for name, num in (("digits", 0), ("synthetic", 0), ("imagefolder", 1))
    },
    "side of synthetic images": (
        lambda folder: synthetic("vgg", side=64),
        r"--side is 64 and the synthetic data of this model has 32; leave it out\.$",
    ),
    "side of synthetic pairs of images": (
        lambda folder: synthetic("ugatit", side=64),
        r"--side is 64 and the synthetic data of this model has 256; leave it out\.$",
    ),
    "side of synthetic text": (
        lambda folder: synthetic("gpt", side=64),
        r"--side is 64 and the synthetic data of this model has none; leave it out\.$",
    ),
    "length of synthetic text": (
        lambda folder: synthetic("gpt", length=32),
        r"--length is 32 and the synthetic data of this model has 64; leave it out\.$",
    ),
    "length of synthetic pairs of lines": (
        lambda folder: synthetic("transformer", length=32),
        r"--length is 32 and the synthetic data of this model has 64; leave it out\.$",
    ),
    "length of synthetic images": (
        lambda folder: synthetic("cnn", length=32),
        r"--length is 32 and the synthetic data of this model has none; leave it out\.$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_request_gets_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.delenv("HIPRESS_FASHION_MNIST", raising=False)
    request, sentence = REFUSED[case]
    with pytest.raises(UsageError, match="^" + sentence) as caught:
        request(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("digits", "sklearn.datasets", "scikit-learn"), ("imagefolder", "PIL.Image", "pillow")],
)
def test_a_package_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=f"pip install {package}$"):
        ask(name, *([tmp_path] if name == "imagefolder" else []))


def test_a_data_set_can_go_to_another_process() -> None:
    there = pickle.loads(pickle.dumps(ask("digits")))
    some = torch.tensor([4, 2])
    for here, copy in zip(ask("digits").train(some, 0), there.train(some, 0), strict=True):
        assert torch.equal(here, copy)


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
    images = data.open_data("fashion-mnist").train(torch.arange(60_000), seed=0)[0][:, 0]
    assert float(images.mean()) == pytest.approx(0, abs=1e-4)
    assert float(images.std()) == pytest.approx(1, abs=1e-4)
