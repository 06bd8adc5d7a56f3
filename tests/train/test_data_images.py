"""CIFAR-100 and folders of images: pixels against a slow reference, and refusals of damage."""

from __future__ import annotations

import io
import logging
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from hipress.errors import UsageError
from hipress.train import data
from hipress.train.data import images as image_data
from hipress.train.data.base import tensor_of
from hipress.train.data.image_folder import any_box, centre_box, near_box

NUM_TRAIN, NUM_TEST = 30, 6


def records(num_records: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 256, (num_records, 3074), dtype=np.uint8)
    made[:, 0] %= 20
    made[:, 1] %= 100
    # Channels of different means and deviations.
    made[:, 2 : 2 + 1024] //= 2
    made[:, 2 + 1024 : 2 + 2048] //= 4
    return made


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(image_data, "CIFAR_TRAIN", NUM_TRAIN)
    monkeypatch.setattr(image_data, "CIFAR_TEST", NUM_TEST)
    folder = tmp_path / "data" / "cifar-100-binary"
    folder.mkdir(parents=True)
    (folder / "train.bin").write_bytes(records(NUM_TRAIN, 0).tobytes())
    (folder / "test.bin").write_bytes(records(NUM_TEST, 1).tobytes())
    return folder


def scaled(images: np.ndarray) -> np.ndarray:
    """Bytes as a model gets them: by mean and deviation of each channel over the training set."""
    train = records(NUM_TRAIN, 0)[:, 2:].reshape(-1, 3, 32, 32).astype(float)
    mean = train.mean((0, 2, 3), keepdims=True)[0]
    deviation = train.std((0, 2, 3), keepdims=True)[0]
    return (images - mean) / deviation


@pytest.mark.parametrize("is_parent", [False, True], ids=["folder", "parent"])
def test_cifar_is_tested_as_it_is(cifar: Path, is_parent: bool) -> None:
    found = data.open_data("cifar100", [cifar.parent if is_parent else cifar], task="classify")
    assert (found.num_train, found.num_test) == (NUM_TRAIN, NUM_TEST)
    assert found.sizes == {"num_classes": 100} and found.name == "cifar100"
    images, labels = found.test(torch.tensor([4, 0, 4]))
    raw = records(NUM_TEST, 1)[[4, 0, 4]]
    assert labels.tolist() == raw[:, 1].tolist()  # fine labels
    assert images.dtype == torch.float32
    expected = scaled(raw[:, 2:].reshape(3, 3, 32, 32))
    np.testing.assert_allclose(images, expected, rtol=1e-5, atol=1e-5)


def test_cifar_is_moved_and_flipped_in_training(cifar: Path) -> None:
    found = data.open_data("cifar100", [cifar])
    everything = torch.arange(NUM_TRAIN)
    raw = records(NUM_TRAIN, 0)
    padded = np.zeros((NUM_TRAIN, 3, 40, 40), np.uint8)
    padded[:, :, 4:36, 4:36] = raw[:, 2:].reshape(-1, 3, 32, 32)
    padded = scaled(padded)
    seen = set()
    for seed in range(6):
        images, labels = found.train(everything, seed)
        assert labels.tolist() == raw[:, 1].tolist()
        for image, whole in zip(images.numpy(), padded, strict=True):
            places = [
                (top, left, flip)
                for top in range(9)
                for left in range(9)
                for flip in (False, True)
                # One line first, which is quick.
                if np.allclose(cut(whole, top, left, flip)[:, 16], image[:, 16], atol=1e-4)
                and np.allclose(cut(whole, top, left, flip), image, atol=1e-4)
            ]
            assert len(places) == 1
            seen.update(places)
    # 180 draws: each of 9 places both ways, and both sides.
    for k, num_values in enumerate((9, 9, 2)):
        assert len({place[k] for place in seen}) == num_values
    assert len(seen) > 80  # of 162, so the three do not go together


def cut(whole: np.ndarray, top: int, left: int, flip: bool) -> np.ndarray:
    part = whole[:, top : top + 32, left : left + 32]
    return part[:, :, ::-1] if flip else part


def test_moves_follow_from_seed_and_index(cifar: Path) -> None:
    found = data.open_data("cifar100", [cifar])
    some = torch.tensor([9, 2, 25, 4, 11])
    images, _ = found.train(some, seed=2**62 + 1)
    alone = data.open_data("cifar100", [cifar]).train(some[2:3], seed=2**62 + 1)[0]
    assert torch.equal(alone[0], images[2])
    other, _ = found.train(some, seed=0)
    assert not torch.equal(other, images)


def test_images_of_a_file_are_not_copied_for_the_processes_of_a_loader(cifar: Path) -> None:
    found = data.open_data("cifar100", [cifar])
    some = torch.tensor([5, 1])
    before = found.train(some, 3), found.test(some)
    # The way of torch's loaders: storages are moved to shared memory.
    content = io.BytesIO()
    ForkingPickler(content).dump(found)
    copy = pickle.loads(content.getvalue())
    for here, there in zip(before, (copy.train(some, 3), copy.test(some)), strict=True):
        assert torch.equal(here[0], there[0]) and torch.equal(here[1], there[1])
    assert not any(tensor_of(part.rows).is_shared() for part in (found._train, found._test))
    assert len(pickle.dumps(found)) < 8000  # of 110,664 bytes in both files


def test_cifar_is_enlarged(cifar: Path) -> None:
    images, _ = data.open_data("cifar100", [cifar], least_side=75).test(torch.tensor([0]))
    small, _ = data.open_data("cifar100", [cifar], least_side=20).test(torch.tensor([0]))
    assert images.shape == (1, 3, 75, 75) and small.shape == (1, 3, 32, 32)
    # The pixel in the middle of 75 is between the two in the middle of 32.
    middle = small[:, :, 15:17, 15:17].mean((2, 3))
    torch.testing.assert_close(images[:, :, 37, 37], middle)


def test_damaged_cifar_gets_one_sentence(cifar: Path) -> None:
    def refused(folder: Path, sentence: str) -> None:
        with pytest.raises(UsageError, match=sentence):
            data.open_data("cifar100", [folder])

    refused(cifar / "no", "no' does not exist; give the folder that holds CIFAR-100")
    whole = (cifar / "train.bin").read_bytes()
    (cifar / "train.bin").write_bytes(whole[:-5])
    refused(cifar, "train.bin' has the wrong size: expected 92220 bytes, found 92215; get the fi")
    (cifar / "train.bin").write_bytes(b"\0\xff" + whole[2:])
    refused(cifar, "train.bin' has a label of 255 where 99 is the largest; get the binary version")
    (cifar / "train.bin").write_bytes(whole)
    (cifar / "test.bin").unlink()
    refused(cifar, "CIFAR-100 needs test.bin, which is not in .*; unpack cifar-100-binary.tar.gz")
    (cifar / "train.bin").unlink()
    refused(cifar, "there is no train.bin in .* or in its folder cifar-100-binary; unpack the bin")
    python = cifar.parent / "cifar-100-python"
    python.mkdir()
    for name in ("train", "test", "meta"):
        (python / name).touch()
    for folder in (python, cifar.parent):
        refused(folder, "cifar-100-python' holds the Python version of CIFAR-100, which is pickled")


def test_published_sizes() -> None:
    assert image_data.CIFAR_TRAIN * image_data._CIFAR_RECORD_BYTES == 153_700_000
    assert image_data.CIFAR_TEST * image_data._CIFAR_RECORD_BYTES == 30_740_000


COLOURS = {"cat": (250, 10, 60), "dog": (20, 200, 90), "emu": (0, 0, 255)}
MEAN = np.array([123.675, 116.28, 103.53])
DEVIATION = np.array([58.395, 57.12, 57.375])


def save(path: Path, pixels: np.ndarray | tuple[int, int, int], size: tuple[int, int]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", size, pixels) if isinstance(pixels, tuple) else Image.fromarray(pixels)
    image.save(path)


def write_classes(folder: Path, part: str, num_each: int) -> None:
    for name, colour in COLOURS.items():
        for k in range(num_each):
            save(folder / part / name / f"{k:03}.png", colour, (30 + k, 20))


def test_classes_are_folders(tmp_path: Path) -> None:
    write_classes(tmp_path, "train", 3)
    write_classes(tmp_path, "val", 2)
    (tmp_path / "train" / "dog" / "notes.txt").write_text("no image", "utf-8")
    (tmp_path / "train" / "cat" / "000.png").rename(tmp_path / "train" / "cat" / "000.PNG")
    found = data.open_data("imagefolder", [tmp_path], task="classify", side=8)
    assert (found.num_train, found.num_test, found.sizes) == (9, 6, {"num_classes": 3})
    assert found.reads_files and not data.open_data("digits").reads_files
    colours = (np.array(list(COLOURS.values())) - MEAN) / DEVIATION
    for num_each, (images, labels) in (
        (3, found.train(torch.arange(9), seed=0)),
        (2, found.test(torch.arange(6))),
    ):
        assert labels.tolist() == [label for label in range(3) for _ in range(num_each)]
        expected = np.broadcast_to(colours[labels][:, :, None, None], (len(labels), 3, 8, 8))
        np.testing.assert_allclose(images, expected, rtol=1e-4, atol=1e-4)


def slopes(width: int, height: int) -> np.ndarray:
    """An image whose red says how far right and whose green says how far down a pixel is."""
    across, down = np.meshgrid(np.arange(width), np.arange(height))
    return np.stack([across, down, np.zeros_like(across)], axis=2).astype(np.uint8)


def bytes_of(images: torch.Tensor) -> np.ndarray:
    return images.permute(0, 2, 3, 1).numpy() * DEVIATION + MEAN


def test_the_middle_is_tested(tmp_path: Path) -> None:
    write_classes(tmp_path, "train", 1)
    save(tmp_path / "val" / "dog" / "slopes.png", slopes(200, 112), (0, 0))
    found = data.open_data("imagefolder", [tmp_path], side=98)
    images, labels = found.test(torch.tensor([0]))
    assert labels.tolist() == [1] and found.num_test == 1
    # 7/8 of 112 is 98: nothing is scaled, and 51 and 7 pixels are cut off each side.
    expected = slopes(200, 112)[7:105, 51:149]
    np.testing.assert_allclose(bytes_of(images)[0], expected, atol=0.01)


def test_training_cuts_and_flips(tmp_path: Path) -> None:
    for k in range(40):
        save(tmp_path / "train" / "dog" / f"{k:02}.png", slopes(250, 200), (0, 0))
    write_classes(tmp_path, "val", 1)
    (tmp_path / "train" / "cat").mkdir()
    (tmp_path / "train" / "emu").mkdir()
    for name in ("cat", "emu"):
        save(tmp_path / "train" / name / "0.png", COLOURS["cat"], (9, 9))
    found = data.open_data("imagefolder", [tmp_path], side=50)
    indices = torch.arange(1, 41)
    images, _ = found.train(indices, seed=4)
    red, green = bytes_of(images)[..., 0], bytes_of(images)[..., 1]
    # Where red falls from left to right the image is flipped.
    is_flipped = red[:, 0, 0] > red[:, 0, -1]
    assert 8 <= is_flipped.sum() <= 32
    across = np.abs(red[:, 0, -1] - red[:, 0, 0]) * 50 / 49
    down = (green[:, -1, 0] - green[:, 0, 0]) * 50 / 49
    shares = across * down / (250 * 200)
    assert (shares > 0.07).all() and (shares < 1.01).all() and shares.std() > 0.15
    ratios = across / down
    assert (ratios > 0.72).all() and (ratios < 1.38).all() and ratios.std() > 0.1
    # It is the seed and the index that decide, on any rank and after a resume.
    copy = pickle.loads(pickle.dumps(found))
    assert torch.equal(copy.train(indices[5:7], seed=4)[0], images[5:7])
    assert not torch.equal(found.train(indices, seed=5)[0], images)


def test_boxes() -> None:
    assert centre_box(80, 160) == (5, 45, 75, 115)
    assert near_box((0.0, 1.0), 80, 160) == (0, 90, 70, 160)
    chances = (0.5, 0.5, 1.0, 0.5) + (0.0,) * 28
    assert any_box(chances, 60, 60) == pytest.approx((0, 0, 60, 60))
    # So long that no box of its share fits: the largest square in the middle.
    assert any_box((0.0, 0.0) + (0.9,) * 30, 10, 1000) == (0, 495, 10, 505)


def test_large_jpeg_files_are_cut_in_the_right_place(tmp_path: Path) -> None:
    across, down = np.meshgrid(np.linspace(0, 255, 1600), np.linspace(0, 255, 800))
    pixels = np.stack([across, down, np.zeros_like(across)], axis=2).astype(np.uint8)
    for part in ("train", "val"):
        save(tmp_path / part / "dog" / "slopes.jpg", pixels, (0, 0))
    # 1,600 x 800 is decoded at an eighth for a side of 64; grey files are made coloured.
    grey = Image.fromarray(pixels).convert("L")
    grey.save(tmp_path / "val" / "dog" / "grey.jpg")
    found = data.open_data("imagefolder", [tmp_path], side=64)
    images, _ = found.test(torch.arange(2))
    image = bytes_of(images)
    lines = (50 + 700 * (np.arange(64) + 0.5) / 64) * 255 / 799
    columns = (450 + 700 * (np.arange(64) + 0.5) / 64) * 255 / 1599
    # 3 for what JPEG loses.
    np.testing.assert_allclose(image[1, 32, :, 0], columns, atol=3)
    np.testing.assert_allclose(image[1, :, 32, 1], lines, atol=3)
    assert np.allclose(image[0, :, :, 0], image[0, :, :, 1], atol=1e-3)


def test_a_tenth_is_held_out_where_nothing_is_tested_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for k in range(25):
        save(tmp_path / "train" / "dog" / f"{k:02}.png", (10 * k, 0, 0), (4, 4))
    with caplog.at_level(logging.WARNING, "hipress"):
        first, second = (data.open_data("imagefolder", [tmp_path], side=4) for _ in range(2))
    assert caplog.messages[0] == (
        f"imagefolder: there is no folder {str(tmp_path / 'val')!r}, so 2 of 25 images are held "
        "out to test with"
    )
    assert (first.num_train, first.num_test) == (23, 2)
    tested = first.test(torch.arange(2))[0]
    assert torch.equal(tested, second.test(torch.arange(2))[0])
    trained = first.train(torch.arange(23), seed=0)[0]
    reds = bytes_of(torch.cat([trained, tested]))[:, 0, 0, 0].round().astype(int)
    assert sorted(reds.tolist()) == list(range(0, 250, 10))  # each in one part


def write_domains(folder: Path, num_a: int, num_b: int, part: str = "train") -> None:
    for k in range(num_a):
        save(folder / f"{part}A" / f"{k}.png", (255, k, 0), (16, 16))
    for k in range(num_b):
        save(folder / f"{part}B" / f"{k}.png", (0, k, 255), (16, 16))


def numbers_of(images: torch.Tensor) -> list[int]:
    """What green says, from which the image is known."""
    return [round((green + 1) * 127.5) for green in images[:, 1, 0, 0].tolist()]


@pytest.mark.parametrize(("num_a", "num_b"), [(7, 3), (3, 7), (7, 7)])
def test_two_domains(tmp_path: Path, num_a: int, num_b: int) -> None:
    write_domains(tmp_path, num_a, num_b)
    write_domains(tmp_path, 2, 5, "test")
    found = data.open_data("imagefolder", [tmp_path], task="style", side=8)
    assert (found.num_train, found.num_test, found.sizes) == (7, 5, {})
    assert (found.task, found.reads_files) == ("style", True)
    partners = set()
    for seed in range(8):
        first, second = found.train(torch.arange(7), seed)
        assert first.shape == second.shape == (7, 3, 8, 8)
        assert (first[:, 0] == 1).all() and (first[:, 2] == -1).all()
        assert (second[:, 0] == -1).all() and (second[:, 2] == 1).all()
        a, b = numbers_of(first), numbers_of(second)
        leader, partner = (a, b) if num_a >= num_b else (b, a)
        assert leader == list(range(7)) and max(a) < num_a and max(b) < num_b
        partners.update(zip(leader, partner, strict=True))
    assert len(partners) > 14  # 56 draws out of 21 or 49 pairs
    again = found.train(torch.tensor([6, 1]), 7)
    assert torch.equal(again[0], first[[6, 1]]) and torch.equal(again[1], second[[6, 1]])
    first, second = found.test(torch.arange(5))
    assert numbers_of(first) == [0, 1, 0, 1, 0] and numbers_of(second) == [0, 1, 2, 3, 4]


def test_domains_are_cut_near_the_whole_and_flipped(tmp_path: Path) -> None:
    for domain in "AB":
        for k in range(20):
            save(tmp_path / f"train{domain}" / f"{k:02}.png", slopes(160, 80), (0, 0))
        save(tmp_path / f"test{domain}" / "0.png", slopes(160, 80), (0, 0))
    found = data.open_data("imagefolder", [tmp_path], task="style", side=70)
    (middle, _) = found.test(torch.tensor([0]))
    pixels = ((middle[0].permute(1, 2, 0) + 1) * 127.5).numpy()
    np.testing.assert_allclose(pixels, slopes(160, 80)[5:75, 45:115], atol=0.01)
    first, second = found.train(torch.arange(20), seed=0)
    assert not torch.equal(first, second)  # the same images, cut differently
    for images in (first, second):
        red = ((images[:, 0] + 1) * 127.5).numpy()
        left, right = red[:, 0, 0], red[:, 0, -1]
        np.testing.assert_allclose(np.abs(right - left), 69, atol=0.6)
        assert 3 <= (left > right).sum() <= 17
        starts = np.minimum(left, right)
        assert starts.min() < 30 and starts.max() > 60  # of 0 to 90


def test_wrong_folders_get_one_sentence(tmp_path: Path) -> None:
    def refused(sentence: str, task: str = "classify", **sizes: int) -> None:
        with pytest.raises(UsageError, match=sentence) as caught:
            data.open_data("imagefolder", [tmp_path / "images"], task=task, **sizes)
        assert "\n" not in str(caught.value)

    refused("images' does not exist; give the folder that holds the images")
    (tmp_path / "images").mkdir()
    refused("images' has no folder 'train'; imagefolder needs train/CLASS/ with the images of each")
    refused("images' has no folder 'trainA'; for a model of two domains imagefolder needs", "style")
    train = tmp_path / "images" / "train"
    train.mkdir()
    refused("train' has nothing in it; put the images of each class into a folder of its own")
    save(train / "one.png", (1, 2, 3), (4, 4))
    refused("train' has images without classes in it; put the images of each class into")
    (train / "dog").mkdir()
    refused("there is no image in .*dog'; put .jpg or .png files there, or remove it")
    save(train / "dog" / "one.png", (1, 2, 3), (4, 4))
    refused("one image is too few to train and to test; add images, or the folder .*val' to test")
    save(tmp_path / "images" / "val" / "eel" / "one.png", (1, 2, 3), (4, 4))
    refused("val' has a class 'eel' that .*train' has not; rename or remove its folder")
    refused("--side is 64 and the model takes images of 75 pixels or more", side=64, least_side=75)


@pytest.mark.parametrize(
    "damage", ["cut short", "no image", "empty", "cut short png", "broken png"]
)
def test_a_damaged_image_is_named(tmp_path: Path, damage: str) -> None:
    ending = "png" if damage.endswith("png") else "jpg"
    for name in ("train", "val"):
        noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), dtype=np.uint8)
        save(tmp_path / name / "dog" / f"one.{ending}", noise, (0, 0))
    path = tmp_path / "val" / "dog" / f"one.{ending}"
    content = path.read_bytes()
    # A PNG file has its pixels in pieces, each called IDAT; here the second loses its name.
    broken = content.replace(b"IDAT", b"\0\1\2\3", 2).replace(b"\0\1\2\3", b"IDAT", 1)
    contents = {"no image": b"<html>", "empty": b"", "broken png": broken}
    path.write_bytes(contents.get(damage, content[: len(content) // 2]))
    found = data.open_data("imagefolder", [tmp_path], side=16)
    found.train(torch.tensor([0]), seed=0)
    sentence = rf"^cannot read the image .*one\.{ending}' \(.*\); replace or remove it\.$"
    with pytest.raises(UsageError, match=sentence):
        found.test(torch.tensor([0]))


def test_the_default_side(tmp_path: Path) -> None:
    write_classes(tmp_path, "train", 1)
    write_classes(tmp_path, "val", 1)
    for least_side, side in ((None, 224), (75, 224), (299, 299)):
        found = data.open_data("imagefolder", [tmp_path], least_side=least_side)
        assert found.test(torch.tensor([0]))[0].shape == (1, 3, side, side)
