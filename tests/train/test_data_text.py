"""Text and pairs of lines: every token is where it belongs, and wrong files get one sentence."""

from __future__ import annotations

import collections
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from hipress.errors import UsageError
from hipress.train import data
from hipress.train.data import text as text_data
from hipress.train.data.text import BEGIN, END, MaskedText
from hipress.train.tasks import PADDING, UNLABELLED


def open_text(
    path: Path, task: str | None = None, length: int = 8, tokens: str = "bytes"
) -> data.Data:
    return data.open_data("text", [path], task=task, length=length, tokens=tokens)


def random_bytes(path: Path, num_bytes: int) -> bytes:
    content = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8).tobytes()
    path.write_bytes(content)
    return content


def test_windows_of_bytes_cover_the_text_once(tmp_path: Path) -> None:
    content = random_bytes(tmp_path / "text", 1003)
    found = open_text(tmp_path / "text")
    assert (found.name, found.task, found.sizes) == ("text", "language", {"vocabulary": 256})
    # 50 of 1,003 are tested; a window needs a next token after its last.
    assert (found.num_train, found.num_test) == (952 // 8, 49 // 8)
    for part, (tokens, following) in (
        (content[:953], found.train(torch.arange(found.num_train), seed=0)),
        (content[953:], found.test(torch.arange(found.num_test))),
    ):
        assert tokens.dtype == following.dtype == torch.int64
        assert tokens.flatten().tolist() == list(part[: tokens.numel()])
        assert following.flatten().tolist() == list(part[1 : 1 + following.numel()])
    one = found.train(torch.tensor([3]), seed=5)
    assert one[0].tolist() == [list(content[24:32])]
    with pytest.raises(IndexError):
        found.train(torch.tensor([found.num_train]), seed=0)  # not into the test part


def test_words_are_numbered_by_how_often_they_are_trained_on(tmp_path: Path) -> None:
    # Ten times over: b and the ends of lines 3 times, a twice, c and d once; "late" is only tested.
    lines = ["a b  b", "\tb c a <unk>", "d"] * 10
    (tmp_path / "text").write_text("\n".join(lines) + "\n" + "late b", "utf-8")
    found = open_text(tmp_path / "text", tokens="words", length=2)
    spelt = [word for line in lines for word in [*line.split(), "<eos>"]] + ["late", "b", "<eos>"]
    assert len(spelt) == 113
    train, test = spelt[:108], spelt[108:]
    counts = collections.Counter(word for word in train if word != "<unk>")
    ranked = sorted(counts, key=lambda word: (-counts[word], train.index(word)))
    assert ranked == ["b", "<eos>", "a", "c", "d"]
    number = {word: k + 1 for k, word in enumerate(ranked)}
    assert found.sizes == {"vocabulary": 6}
    tokens, following = found.train(torch.arange(found.num_train), seed=0)
    assert found.num_train == 53 and found.num_test == 2
    assert tokens.flatten().tolist() == [number.get(word, 0) for word in train[:106]]
    assert following.flatten().tolist() == [number.get(word, 0) for word in train[1:107]]
    assert found.test(torch.arange(2))[0].flatten().tolist() == [
        number.get(word, 0) for word in test[:4]
    ]


def test_rare_words_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_data, "MOST_WORDS", 3)
    monkeypatch.setattr(text_data, "_BLOCK_WORDS", 7)  # so that blocks are seen to fit together
    (tmp_path / "text").write_text("x x y z y x w " * 30, "utf-8")
    found = open_text(tmp_path / "text", tokens="words", length=7)
    assert found.sizes == {"vocabulary": 3}
    assert found.train(torch.tensor([0, 1]), seed=0)[0].tolist() == [[1, 1, 2, 0, 2, 1, 0]] * 2


def test_words_that_are_equally_frequent_keep_their_order(tmp_path: Path) -> None:
    # Of 300 words every second one is there twice; with <eos> a line has 451.
    spelt = [f"w{k}" for k in range(300) for _ in range(1 + k % 2)] + ["<eos>"]
    (tmp_path / "text").write_text(f"{' '.join(spelt[:-1])}\n" * 40, "utf-8")
    found = open_text(tmp_path / "text", tokens="words", length=451)
    ranked = [f"w{k}" for k in (*range(1, 300, 2), *range(0, 300, 2))] + ["<eos>"]
    expected = [1 + ranked.index(word) for word in spelt]
    assert found.train(torch.tensor([0, 5]), seed=0)[0].tolist() == [expected] * 2


def masked(path: Path, tokens: str = "bytes", length: int = 43) -> data.Data:
    return open_text(path, "masked", length, tokens)


def test_masked_pairs(tmp_path: Path) -> None:
    content = random_bytes(tmp_path / "text", 40_000)
    found = masked(tmp_path / "text")
    assert found.sizes == {"vocabulary": 259} and found.task == "masked"
    assert (found.num_train, found.num_test) == (38_000 // 40, 2_000 // 40)
    text = torch.tensor(list(content[: 950 * 40])).view(950, 2, 20)
    indices = torch.arange(950)
    tokens, segments, labels, is_next = found.train(indices, seed=3)
    cls, separator, mask = 256, 257, 258
    assert (tokens[:, 0] == cls).all()
    assert (tokens[:, [21, 42]] == separator).all()
    assert (segments == torch.tensor([0] * 22 + [1] * 21)).all() and segments.shape == (950, 43)
    is_guessed = labels != UNLABELLED
    assert not is_guessed[:, [0, 21, 42]].any()
    assert (is_guessed.sum(1) == 6).all()  # 15 % of 40

    # With the answers put back it is the text: A of the index, B of the index or of another.
    whole = torch.where(is_guessed, labels, tokens)
    assert torch.equal(whole[:, 1:21], text[:, 0])
    follows = (whole[:, 22:42] == text[:, 1]).all(1)
    assert torch.equal(follows, is_next.bool())
    others = (whole[:, None, 22:42] == text[None, :, 1]).all(2)
    assert (others.sum(1) == 1).all()
    # 950 throws have a deviation of 1.6 %.
    assert is_next.double().mean() == pytest.approx(0.5, abs=0.08)
    assert others.float().argmax(1)[~follows].unique().numel() > 300  # not always the same one

    # Of 5,700 guessed: 80, 10 and 10 %, with deviations of 0.5 and 0.4 %.
    was, seen = labels[is_guessed], tokens[is_guessed]
    is_masked = seen == mask
    assert is_masked.double().mean() == pytest.approx(0.8, abs=0.025)
    assert (seen == was).double().mean() == pytest.approx(0.1 + 0.1 / 256, abs=0.02)
    swapped = seen[~is_masked & (seen != was)]
    assert swapped.max() < 256 and swapped.unique().numel() > 200
    # Any place of A and B may be chosen.
    shares = is_guessed[:, [*range(1, 21), *range(22, 42)]].double().mean(0)
    np.testing.assert_allclose(shares, 0.15, atol=0.06)


def test_what_does_not_follow_is_never_what_follows() -> None:
    text = torch.arange(80)  # two pairs: B is that of the pair, or of the other one
    found = MaskedText(text, text, vocabulary=80, length=43)
    for seed in range(20):
        tokens, _, labels, is_next = found.train(torch.tensor([0]), seed)
        whole = torch.where(labels == UNLABELLED, tokens, labels)
        start = 20 if is_next[0] else 60
        assert whole[0, 22:42].tolist() == list(range(start, start + 20))


def test_masks_follow_from_seed_and_index(tmp_path: Path) -> None:
    random_bytes(tmp_path / "text", 10_000)
    found = masked(tmp_path / "text")
    some = torch.tensor([3, 50, 7])
    first = found.train(some, seed=1)
    again = masked(tmp_path / "text").train(some[1:], seed=1)
    other = found.train(some, seed=2)
    for part, repeated in zip(first, again, strict=True):
        assert torch.equal(part[1:], repeated)
    assert not torch.equal(first[2], other[2])
    for part, repeated in zip(found.test(some % 12), found.test(some % 12), strict=True):
        assert torch.equal(part, repeated)


def test_masked_words(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("one two three four five six seven eight\n" * 100, "utf-8")
    found = masked(tmp_path / "text", "words", length=12)
    assert found.sizes == {"vocabulary": 10 + 3}
    tokens, _, labels, _ = found.train(torch.arange(found.num_train), seed=0)
    assert (tokens[:, 0] == 10).all() and (tokens[:, [5, 11]] == 11).all()
    # Nine tokens make a line and an example, so the text without its masks is known.
    whole = torch.where(labels == UNLABELLED, tokens, labels)
    assert (whole[:, [1, 2, 3, 4, 6, 7, 8, 9, 10]] == torch.tensor(range(1, 10))).all()


def write_pairs(folder: Path, source: bytes, target: bytes) -> list[Path]:
    paths = [folder / "source", folder / "target"]
    for path, content in zip(paths, (source, target), strict=True):
        path.write_bytes(content)
    return paths


def open_pairs(paths: list[Path], length: int = 8, tokens: str = "bytes") -> data.Data:
    return data.open_data("parallel-text", paths, task="translate", length=length, tokens=tokens)


def ids(line: bytes) -> list[int]:
    return [byte + 3 for byte in line]


def test_pairs_of_lines_of_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = write_pairs(tmp_path, b"ab\nc\r\ndef", b"xyz\nuvwxy\r\nw\n")
    found = open_pairs(paths)
    assert (found.num_train, found.num_test) == (2, 1) and found.sizes == {"vocabulary": 259}
    source, target_in, target_out = found.train(torch.tensor([1, 0]), seed=0)
    pad = PADDING
    assert source.tolist() == [[*ids(b"c"), END, pad], [*ids(b"ab"), END]]
    assert target_in.tolist() == [[BEGIN, *ids(b"uvwxy")], [BEGIN, *ids(b"xyz"), pad, pad]]
    assert target_out.tolist() == [[*ids(b"uvwxy"), END], [*ids(b"xyz"), END, pad, pad]]
    source, target_in, target_out = found.test(torch.tensor([0]))
    assert source.tolist() == [[*ids(b"def"), END]]
    assert (target_in.tolist(), target_out.tolist()) == ([[BEGIN, *ids(b"w")]], [[*ids(b"w"), END]])
    with pytest.raises(IndexError):
        found.train(torch.tensor([2]), seed=0)
    assert not caplog.records


def test_long_and_empty_lines_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = b"1234567\n12345678\n\na\nb\nc\n"
    target = b"1\n2\n3\n12345678\n\n1234567\n"
    with caplog.at_level(logging.WARNING, "hipress"):
        found = open_pairs(write_pairs(tmp_path, source, target))
    assert caplog.messages == [
        "parallel-text: of 6 pairs of lines 2 are left out as longer than --length 8 allows and 2 "
        "because a line is empty"
    ]
    assert (found.num_train, found.num_test) == (1, 1)
    assert found.train(torch.tensor([0]), seed=0)[0].tolist() == [[*ids(b"1234567"), END]]
    assert found.test(torch.tensor([0]))[2].tolist() == [[*ids(b"1234567"), END]]


def test_both_sides_share_one_vocabulary_of_words(tmp_path: Path) -> None:
    paths = write_pairs(tmp_path, b"a b\nb\nnew b\n", b"b c c\n a\na c\n")
    found = open_pairs(paths, tokens="words")
    # b 3 times, then a and c twice, a first: after padding, begin, end and <unk>.
    a, b, c, unknown = 5, 4, 6, 3
    assert found.sizes == {"vocabulary": 7}
    source, target_in, target_out = found.train(torch.tensor([0, 1]), seed=0)
    assert source.tolist() == [[a, b, END], [b, END, PADDING]]
    assert target_in.tolist() == [[BEGIN, b, c, c], [BEGIN, a, PADDING, PADDING]]
    assert target_out.tolist() == [[b, c, c, END], [a, END, PADDING, PADDING]]
    assert found.test(torch.tensor([0]))[0].tolist() == [[unknown, b, END]]


def test_lines_that_cross_a_block_of_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hipress.train.data.text._BLOCK_BYTES", 3)
    lines = [b"ab", b"c", b"defg", b"h"]
    paths = write_pairs(tmp_path, b"\n".join(lines), b"\n".join(lines))
    found = open_pairs(paths)
    for k, line in enumerate(lines[:3]):
        assert found.train(torch.tensor([k]), seed=0)[0].tolist() == [[*ids(line), END]]


@pytest.mark.parametrize("tokens", ["bytes", "words"])
def test_wrong_files_get_one_sentence(tmp_path: Path, tokens: str) -> None:
    def refused(paths: list[Path], sentence: str, task: str | None = None, length: int = 8) -> None:
        name = "text" if len(paths) == 1 else "parallel-text"
        with pytest.raises(UsageError, match="^" + sentence) as caught:
            data.open_data(name, paths, task=task, length=length, tokens=tokens)
        assert "\n" not in str(caught.value)

    nowhere, folder, empty, short = (tmp_path / name for name in ("no", "folder", "empty", "short"))
    folder.mkdir()
    empty.touch()
    short.write_text("x\n" * 89, "utf-8")  # of which 8 bytes or words are tested
    refused([nowhere], f"{re.escape(repr(str(nowhere)))} does not exist; text needs a text file")
    refused([folder], ".*folder' is not a file; text needs a text file")
    refused([empty], ".*empty' is empty; text needs a file with text in it")
    num_tokens, least = 178, 180
    sentence = f".*short' has {num_tokens} tokens, and its last 5 % is too short for a test example"
    refused([short], f"{sentence} of 8; give a file of at least {least} {tokens}, or a smaller")
    refused([short], "--length is 4, of which 3 tokens .* give at least 5", "masked", length=4)
    refused([short], ".* a file of at least 200 ", "masked")
    refused([short, nowhere], ".*no' does not exist; parallel-text needs a text file")
    other = tmp_path / "other"
    other.write_text("x\n" * 90, "utf-8")
    refused([short, other], ".*short' has 89 lines and .*other' has 90; line by line they must be")
    blank = tmp_path / "blank"
    blank.write_text("\n" * 89, "utf-8")
    refused([short, blank], f".*have 0 pairs of lines with 1 to 7 {tokens} each, where 2 are")


def test_words_must_be_utf_8(tmp_path: Path) -> None:
    latin = tmp_path / "latin"
    latin.write_bytes(b"one\ntwo\ncaf\xe9\n" * 50)
    sentence = r"line 3 of .*latin' is not UTF-8, which --tokens words needs; convert the file, or "
    with pytest.raises(UsageError, match=sentence + r"use --tokens bytes\."):
        open_text(latin, tokens="words")
    with pytest.raises(UsageError, match=sentence):
        open_pairs([latin, latin], tokens="words")
    assert open_text(latin).num_train > 0
