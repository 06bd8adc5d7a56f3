"""Batches by other processes: the same ones, small to send, and errors are one sentence."""

from __future__ import annotations

import io
import multiprocessing
import pickle
import re
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hipress.errors import UsageError
from hipress.train import batches, data  # not the name test_batches, which pytest would run
from hipress.train.batches import Sampler
from hipress.train.tasks import Batch

FILE_BYTES = 4 * 2**20


def sampler_of(found: data.Data, batch: int = 3) -> Sampler:
    return Sampler(num_examples=found.num_train, batch=batch, rank=1, num_ranks=2, seed=5)


def assert_same(found: Iterable[Batch], expected: Iterable[Batch]) -> None:
    for one, two in zip(found, expected, strict=True):
        assert isinstance(one, tuple) and isinstance(two, tuple)
        for here, there in zip(one, two, strict=True):
            assert torch.equal(here, there)


@pytest.fixture
def images(tmp_path: Path) -> data.Data:
    """Noise, in two classes: 16 to train on and 6 to test with, of which the fifth is damaged."""
    rng = np.random.default_rng(0)
    for part, num_each in (("train", 8), ("val", 3)):
        for label in ("cat", "dog"):
            (tmp_path / part / label).mkdir(parents=True)
            for k in range(num_each):
                pixels = rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / label / f"{k}.png")
    (tmp_path / "val" / "dog" / "1.png").write_bytes(b"<html>")
    return data.open_data("imagefolder", [tmp_path], task="classify", side=8)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    content = np.random.default_rng(0).integers(0, 256, FILE_BYTES, dtype=np.uint8)
    (tmp_path / "text").write_bytes(content.tobytes())
    return tmp_path / "text"


def test_loaders_prepare_the_batches_of_the_steps(images: data.Data) -> None:
    sampler = sampler_of(images)
    steps = range(1, 6)  # of 2 in an epoch
    expected = [images.train(sampler.indices(k), sampler.seed_of(k)) for k in steps]
    assert_same(batches.train_batches(images, sampler, 1, 6, num_loaders=0), expected)
    torch.manual_seed(7)
    loaded = list(batches.train_batches(images, sampler, 1, 6, num_loaders=2))
    assert_same(loaded, expected)
    assert multiprocessing.active_children() == []
    # What comes after, dropout and all, is not changed by it.
    after = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(3))


@pytest.mark.parametrize("num_loaders", [0, 1])
def test_a_damaged_image_is_one_sentence(
    images: data.Data, capfd: pytest.CaptureFixture[str], num_loaders: int
) -> None:
    found = batches.test_batches(images, torch.tensor([5, 0, 3, 4]), 2, num_loaders)
    assert_same([next(found)], [images.test(torch.tensor([5, 0]))])
    sentence = r"cannot read the image .*1\.png' \(cannot identify .*\); replace or remove it\."
    with pytest.raises(UsageError) as caught:
        next(found)
    assert re.fullmatch(sentence, str(caught.value))
    assert caught.value.__context__ is None or num_loaders == 0
    assert multiprocessing.active_children() == []  # not some time later
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("num_loaders", [0, 1])
def test_all_test_examples_are_there_in_their_order(text_file: Path, num_loaders: int) -> None:
    found = data.open_data("text", [text_file], task="language", length=64)
    indices = torch.arange(1, 30, 3)
    expected = [found.test(torch.tensor(part)) for part in ([1, 4, 7, 10], [13, 16, 19, 22])]
    expected.append(found.test(torch.tensor([25, 28])))
    assert_same(batches.test_batches(found, indices, 4, num_loaders), expected)
    nothing = torch.arange(0)
    assert list(batches.test_batches(found, nothing, 4, num_loaders)) == []
    assert list(batches.train_batches(found, sampler_of(found), 4, 4, num_loaders)) == []


def shared_bytes() -> int:
    """Of the shared memory that this process has."""
    sizes = []
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        if "/dev/shm/" in line:
            first, last = line.split()[0].split("-")
            sizes.append(int(last, 16) - int(first, 16))
    return sum(sizes)


def sent(found: object) -> bytes:
    """As the processes of a loader get it: torch moves tensors to shared memory for that."""
    content = io.BytesIO()
    ForkingPickler(content).dump(found)
    return content.getvalue()


def bytes_of_a_text(path: Path, task: str) -> data.Data:
    return data.open_data("text", [path], task=task, length=32)


FROM_FILES: dict[str, Callable[[Path], data.Data]] = {
    "language": lambda path: bytes_of_a_text(path, "language"),
    "masked": lambda path: bytes_of_a_text(path, "masked"),
    # Lines of noise: what is longer than 20 is left out, and few are shorter.
    "parallel-text": lambda path: data.open_data("parallel-text", [path, path], length=20),
}


@pytest.mark.parametrize("name", FROM_FILES)
def test_a_file_is_not_copied_for_the_loaders(
    text_file: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(text_file.parent)
    found = FROM_FILES[name](Path(text_file.name))
    steps = batches._Batches(partial(batches._train_batch, found, sampler_of(found)), range(4))
    expected = [*(steps[k] for k in range(4)), found.test(torch.arange(3))]
    before = shared_bytes()
    content = sent(steps)
    assert len(content) < 5000
    assert shared_bytes() - before < FILE_BYTES / 8
    monkeypatch.chdir("/")  # a process of a loader may be elsewhere
    copy = pickle.loads(content)
    assert_same([*(copy[k] for k in range(4)), copy.make.args[0].test(torch.arange(3))], expected)


def test_the_measure_of_shared_memory_sees_a_copy() -> None:
    tensor = torch.zeros(FILE_BYTES, dtype=torch.uint8)
    before = shared_bytes()
    sent(tensor)
    assert shared_bytes() - before >= FILE_BYTES


def test_a_file_that_has_gone_is_one_sentence(text_file: Path) -> None:
    copy = pickle.loads(pickle.dumps(bytes_of_a_text(text_file, "language")))
    text_file.unlink()
    with pytest.raises(UsageError, match=r"^'.*text' does not exist; text needs a text file\.$"):
        copy.train(torch.arange(2), seed=0)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_batches_are_pinned_for_a_gpu(
    text_file: Path, monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    num_pinned = 0

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal num_pinned
        num_pinned += 1
        return tensor

    asked = []

    def loader(made: object, *, pin_memory: bool, **others: object) -> list[Batch]:
        asked.append(pin_memory)
        return []

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(batches, "DataLoader", loader)
    found = bytes_of_a_text(text_file, "language")
    sampler, some = sampler_of(found), torch.arange(5)
    plain = list(batches.train_batches(found, sampler, 0, 2, 0))
    assert num_pinned == 0
    assert_same(batches.train_batches(found, sampler, 0, 2, 0, pin=True), plain)
    assert num_pinned == (4 if has_gpu else 0)
    list(batches.test_batches(found, some, 3, 0, pin=True))
    assert num_pinned == (8 if has_gpu else 0)
    for pin in (False, True):
        list(batches.train_batches(found, sampler, 0, 2, 1, pin))
        list(batches.test_batches(found, some, 3, 1, pin))
    assert asked == [False, False, has_gpu, has_gpu]
