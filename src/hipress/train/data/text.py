"""Text files: one text for language models and BERT, or lines and their translations.

A token is a byte, or a word (what stands between spaces), numbered by how often the training part
has it. The last 5 % of a text, or of the pairs of lines, is the test part.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hipress.errors import UsageError
from hipress.train.data.base import Data, Mapped, Stored, checked_file, numbers, part_of, tensor_of
from hipress.train.tasks import PADDING, UNLABELLED, Batch

LENGTH = 128
"""Tokens of an example, unless the model or the user gives another number."""

_TEST_SHARE = 20  # one in so many tokens, or pairs of lines, is for the test

# --- words ----------------------------------------------------------------------------------------

UNKNOWN = "<unk>"
"""Stands for words that are not in the vocabulary; a text may contain it too."""
LINE_END = "<eos>"
MOST_WORDS = 33_278
"""Size of the largest vocabulary: that of WikiText-2 (Merity et al., 2017), `UNKNOWN` and
`LINE_END` included."""

_BLOCK_WORDS = 2**22


class _WordCounter:
    """Numbers words in the order of their appearance while files are read, each once."""

    def __init__(self) -> None:
        self._numbers: defaultdict[str, int] = defaultdict()
        self._numbers.default_factory = self._numbers.__len__

    def read(self, path: Path, *, line_end: str | None) -> tuple[NDArray[np.int32], Tensor]:
        """Read the words of a file in UTF-8; `line_end` is added to every line.

        Return the number of each word, and for each line the index after its last word.
        """
        words, ends = array("i"), array("q")
        look_up = self._numbers.__getitem__
        for line in _lines(path):
            words.extend(map(look_up, line.split()))
            if line_end is not None:
                words.append(look_up(line_end))
            ends.append(len(words))
        # Neither is copied; both are writable.
        return np.asarray(words, np.int32), torch.from_numpy(np.asarray(ends, np.int64))

    def vocabulary(self, *parts: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the token of each word: 0 is `UNKNOWN`, 1 the most frequent word of these parts.

        At most `MOST_WORDS` words get a token above 0.
        """
        counts = np.zeros(len(self._numbers), np.int64)
        for part in parts:
            for start in range(0, len(part), _BLOCK_WORDS):
                counts += np.bincount(part[start : start + _BLOCK_WORDS], minlength=len(counts))
        if UNKNOWN in self._numbers:
            counts[self._numbers[UNKNOWN]] = 0
        # A stable sort keeps words of equal frequency in the order of their appearance.
        order = np.argsort(-counts, kind="stable")[: min(MOST_WORDS - 1, int((counts > 0).sum()))]
        tokens = np.zeros(len(counts), np.int32)
        tokens[order] = np.arange(1, len(order) + 1)
        return tokens


def _renumber(words: NDArray[np.int32], tokens: NDArray[np.int32]) -> Tensor:
    for start in range(0, len(words), _BLOCK_WORDS):
        block = words[start : start + _BLOCK_WORDS]
        block[:] = tokens[block]
    return torch.from_numpy(words)


def _lines(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode()
            except UnicodeDecodeError:
                raise UsageError(
                    f"line {number} of {str(path)!r} is not UTF-8, which --tokens words needs; "
                    "convert the file, or use --tokens bytes."
                ) from None


# --- one text -------------------------------------------------------------------------------------

_CHOSEN, _MASKED, _SWAPPED = 0.15, 0.8, 0.1  # Devlin et al. (2019), section 3.1
_NUM_SPECIALS = 3


def open_text(path: Path, *, task: str, length: int | None = None, tokens: str = "bytes") -> Data:
    """Open a text file; the arguments are those of `open_data`."""
    kind = MaskedText if task == "masked" else LanguageText
    length = length or LENGTH
    checked_file(path, "text")
    stored: Stored = Mapped(path, "text")
    vocabulary = 256
    if tokens == "words":
        counter = _WordCounter()
        words, _ = counter.read(path, line_end=LINE_END)
        final = counter.vocabulary(words[: len(words) - len(words) // _TEST_SHARE])
        stored, vocabulary = _renumber(words, final), 1 + int(final.max(initial=0))
    stream = tensor_of(stored)
    num_test = len(stream) // _TEST_SHARE
    if num_test < kind.tokens_needed(length):
        raise UsageError(
            f"{str(path)!r} has {len(stream)} tokens, and its last 5 % is too short for a test "
            f"example of {length}; give a file of at least "
            f"{_TEST_SHARE * kind.tokens_needed(length)} {tokens}, or a smaller --length."
        )
    train, test = (part_of(stored, part) for part in (stream[:-num_test], stream[-num_test:]))
    return kind(train, test, vocabulary=vocabulary, length=length)


class _Text(Data):
    """Examples of `length` tokens, special ones included, from a training and a test part of a text
    whose tokens have any integer type."""

    kind: str
    """The task."""
    num_specials = 0
    """Special tokens of an example, numbered after those of the text."""

    def __init__(self, train: Stored, test: Stored, *, vocabulary: int, length: int) -> None:
        self._length, self._vocabulary = length, vocabulary
        num_train, num_test = (self._num_examples(len(tensor_of(part))) for part in (train, test))
        sizes = {"vocabulary": vocabulary + self.num_specials}
        super().__init__("text", self.kind, sizes, num_train, num_test)
        self._train, self._test = train, test

    def train(self, indices: Tensor, seed: int) -> Batch:
        return self._batch(tensor_of(self._train), self.num_train, indices, seed)

    def test(self, indices: Tensor) -> Batch:
        return self._batch(tensor_of(self._test), self.num_test, indices, seed=0)

    @abstractmethod
    def _num_examples(self, num_tokens: int) -> int: ...

    @abstractmethod
    def _batch(self, stream: Tensor, num_examples: int, indices: Tensor, seed: int) -> Batch: ...


class LanguageText(_Text):
    """Consecutive windows of a text for the task language; each token's target is the next one."""

    kind = "language"

    @staticmethod
    def tokens_needed(length: int) -> int:
        """Return the smallest number of tokens that makes an example."""
        return length + 1

    def _num_examples(self, num_tokens: int) -> int:
        return (num_tokens - 1) // self._length

    def _batch(self, stream: Tensor, num_examples: int, indices: Tensor, seed: int) -> Batch:
        offsets = torch.arange(self._length + 1)
        window = stream[indices[:, None] * self._length + offsets].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


class MaskedText(_Text):
    """Examples `[CLS] A [SEP] B [SEP]` for the task masked, in which some tokens are predicted.

    A is a part of the text; B is what follows it half the time, else what follows another part.
    15 % of the tokens of A and B are chosen: 80 % of these become [MASK], 10 % a random token, the
    rest stay. `vocabulary` does not count the three special tokens, `length` does.
    """

    kind = "masked"
    num_specials = _NUM_SPECIALS

    @staticmethod
    def tokens_needed(length: int) -> int:
        """Return the smallest number of tokens: two examples, as B may come from another one."""
        if length < _NUM_SPECIALS + 2:
            raise UsageError(
                f"--length is {length}, of which {_NUM_SPECIALS} tokens are special and each "
                f"segment needs one; give at least {_NUM_SPECIALS + 2}."
            )
        return 2 * (length - _NUM_SPECIALS)

    def _num_examples(self, num_tokens: int) -> int:
        return num_tokens // (self._length - _NUM_SPECIALS)

    def _batch(self, stream: Tensor, num_examples: int, indices: Tensor, seed: int) -> Batch:
        num_ordinary = self._length - _NUM_SPECIALS
        num_a = num_ordinary // 2
        num_chosen = max(1, round(_CHOSEN * num_ordinary))
        randoms = torch.from_numpy(numbers(seed, indices, 2 + num_ordinary + 2 * num_chosen))
        widths = [2, num_ordinary, num_chosen, num_chosen]
        pair, order, kind, other = torch.split_with_sizes(randoms, widths, dim=1)

        is_next = pair[:, 0] < 0.5
        # From 1 to num_examples - 1 further on, so never the same part.
        further = 1 + (pair[:, 1] * (num_examples - 1)).long()
        parts = torch.where(is_next, indices, (indices + further) % num_examples)
        inside = torch.arange(num_ordinary)
        start = torch.where(inside < num_a, indices[:, None], parts[:, None]) * num_ordinary
        ordinary = stream[start + inside].long()

        chosen = order.topk(num_chosen, dim=1).indices
        answers = ordinary.gather(1, chosen)
        shown = torch.where(kind < _MASKED, self._vocabulary + 2, answers)
        swapped = (other * self._vocabulary).long()
        is_swapped = (kind >= _MASKED) & (kind < _MASKED + _SWAPPED)
        shown = torch.where(is_swapped, swapped, shown)
        ordinary.scatter_(1, chosen, shown)
        labels = torch.full_like(ordinary, UNLABELLED).scatter_(1, chosen, answers)

        tokens = self._framed(ordinary, num_a, self._vocabulary, self._vocabulary + 1)
        labels = self._framed(labels, num_a, UNLABELLED, UNLABELLED)
        segments = (torch.arange(self._length) >= num_a + 2).long().repeat(len(indices), 1)
        return tokens, segments, labels, is_next.long()

    @staticmethod
    def _framed(ordinary: Tensor, num_a: int, first: int, separator: int) -> Tensor:
        begin = ordinary.new_full((len(ordinary), 1), first)
        end = ordinary.new_full((len(ordinary), 1), separator)
        return torch.cat([begin, ordinary[:, :num_a], end, ordinary[:, num_a:], end], dim=1)


# --- characters, for the convergence benchmark ----------------------------------------------------

_TEST_WINDOWS = 128  # in one batch of a test


@dataclass(frozen=True, kw_only=True, eq=False)
class Characters:
    """A text as numbers of its characters, 90 % to train on and the rest to test with.

    A training example is any window of `length` characters; the test has all that follow each
    other. The target of a character is the next one.
    """

    unit: ClassVar[str] = "windows"
    train_tokens: Tensor
    test_tokens: Tensor
    vocabulary: int
    length: int

    @classmethod
    def read(cls, path: Path | None, length: int) -> Characters:
        """Read a text in UTF-8: a file, or `input.txt` in a folder."""
        if path is None:
            raise UsageError(
                "the folder of tiny-shakespeare is not known; set HIPRESS_TINY_SHAKESPEARE or "
                "--data-dir to the folder that holds input.txt."
            )
        path = checked_file(path / "input.txt" if path.is_dir() else path, "tiny-shakespeare")
        try:
            return cls.of(path.read_bytes().decode(), length)
        except UnicodeDecodeError:
            raise UsageError(f"{str(path)!r} is not UTF-8; convert the file.") from None

    @classmethod
    def of(cls, text: str, length: int) -> Characters:
        """Number the characters of a text in the order of their codes."""
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        kinds, tokens = np.unique(codes, return_inverse=True)
        num_train = len(tokens) * 9 // 10
        if len(tokens) - num_train <= length:
            raise UsageError(
                f"the text has {len(tokens)} characters, and the last 10 % is too short for a "
                f"window of {length}; give one of at least {10 * (length + 2)}."
            )
        train, test = torch.from_numpy(tokens.astype(np.int64)).tensor_split([num_train])
        return cls(train_tokens=train, test_tokens=test, vocabulary=len(kinds), length=length)

    @property
    def num_train(self) -> int:
        return len(self.train_tokens) - self.length

    def to(self, device: str) -> Characters:
        """Return the text in the memory of a device."""
        train, test = self.train_tokens.to(device), self.test_tokens.to(device)
        return replace(self, train_tokens=train, test_tokens=test)

    def train(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the windows that start at some characters, and their targets."""
        return self._windows(self.train_tokens, indices)

    def test(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the windows of the test, and their targets."""
        stop = len(self.test_tokens) - self.length
        starts = torch.arange(0, stop, self.length, device=self.test_tokens.device)
        for some in torch.split(starts, _TEST_WINDOWS):
            yield self._windows(self.test_tokens, some)

    def _windows(self, tokens: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        offsets = torch.arange(self.length + 1, device=starts.device)
        window = tokens[starts[:, None] + offsets]
        return window[:, :-1], window[:, 1:]


# --- lines and their translations -----------------------------------------------------------------

BEGIN, END = 1, 2
"""Special tokens, besides `PADDING` (0); those of the text are numbered after them."""

_BLOCK_BYTES = 2**24
_NEW_LINE, _RETURN = 10, 13


@dataclass(frozen=True, kw_only=True, eq=False)
class Lines:
    """The lines of a file as parts of one stream of tokens."""

    stream: Stored
    """uint8 or int32, without the special tokens."""
    starts: Tensor
    """int64, the index of the first token of each line."""
    ends: Tensor
    """The index after the last token of each line."""

    @property
    def lengths(self) -> Tensor:
        return self.ends - self.starts

    def chosen(self, which: Tensor) -> Lines:
        return Lines(stream=self.stream, starts=self.starts[which], ends=self.ends[which])

    def tokens(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return a row of tokens for each line, numbered after the special ones, and the lengths.

        Every row ends with at least one `PADDING`.
        """
        starts, ends = self.starts[indices, None], self.ends[indices, None]
        lengths = ends - starts
        positions = starts + torch.arange(int(lengths.max()) + 1)
        inside = positions < ends
        # Positions after a line may be after the file too.
        stream = tensor_of(self.stream)
        tokens = stream[torch.where(inside, positions, starts)].long() + _NUM_SPECIALS
        return tokens.where(inside, PADDING), lengths


class ParallelText(Data):
    """Pairs of lines for the task translate; a batch is padded to its longest line.

    No line is empty, and both files share one vocabulary, special tokens included.
    """

    def __init__(self, source: Lines, target: Lines, *, vocabulary: int) -> None:
        num_pairs = len(source.starts)
        num_test = max(1, num_pairs // _TEST_SHARE)
        sizes = {"vocabulary": vocabulary}
        super().__init__("parallel-text", "translate", sizes, num_pairs - num_test, num_test)
        self._source, self._target = source, target

    def train(self, indices: Tensor, seed: int) -> Batch:
        if int(indices.max()) >= self.num_train:
            raise IndexError(f"index {int(indices.max())} of {self.num_train} training pairs")
        return self._batch(indices)

    def test(self, indices: Tensor) -> Batch:
        return self._batch(self.num_train + indices)

    def _batch(self, indices: Tensor) -> Batch:
        source, lengths = self._source.tokens(indices)
        source.scatter_(1, lengths, END)
        target, lengths = self._target.tokens(indices)
        target_in = torch.nn.functional.pad(target[:, :-1], (1, 0), value=BEGIN)
        return source, target_in, target.scatter(1, lengths, END)


def open_parallel_text(
    source: Path, target: Path, *, length: int | None = None, tokens: str = "bytes"
) -> Data:
    """Open two files whose lines are translations of each other.

    Pairs with a line of more than `length` tokens, its end included, are left out; the other
    arguments are those of `open_data`.
    """
    length = length or LENGTH
    both = [checked_file(path, "parallel-text") for path in (source, target)]
    counter = _WordCounter()
    if tokens == "words":
        lines = [_read_words(path, counter) for path in both]
    else:
        lines = [_read_bytes(Mapped(path, "parallel-text")) for path in both]
    num_lines = [len(side.starts) for side in lines]
    if num_lines[0] != num_lines[1]:
        raise UsageError(
            f"{str(source)!r} has {num_lines[0]} lines and {str(target)!r} has {num_lines[1]}; "
            "line by line they must be translations, so give files that belong together."
        )
    kept = _kept(lines[0].lengths, lines[1].lengths, length)
    if len(kept) < 2:
        raise UsageError(
            f"{str(source)!r} and {str(target)!r} have {len(kept)} pairs of lines with 1 to "
            f"{length - 1} {tokens} each, where 2 are needed to train and to test; give longer "
            "files, or a larger --length."
        )
    vocabulary = 256
    if tokens == "words":
        last = int(kept[-1 - max(1, len(kept) // _TEST_SHARE)])
        parts = [tensor_of(side.stream)[: int(side.ends[last])].numpy() for side in lines]
        final = counter.vocabulary(*parts)
        for side in lines:
            _renumber(tensor_of(side.stream).numpy(), final)
        vocabulary = 1 + int(final.max())
    return ParallelText(
        lines[0].chosen(kept), lines[1].chosen(kept), vocabulary=vocabulary + _NUM_SPECIALS
    )


def _kept(source: Tensor, target: Tensor, length: int) -> Tensor:
    """Return the indices of the pairs that are neither empty nor too long."""
    is_empty = (source == 0) | (target == 0)
    is_long = torch.maximum(source, target) + 1 > length
    num_empty, num_long = int(is_empty.sum()), int((is_long & ~is_empty).sum())
    if num_empty or num_long:
        logging.getLogger("hipress").warning(
            "parallel-text: of %d pairs of lines %d are left out as longer than --length %d allows "
            "and %d because a line is empty",
            len(source),
            num_long,
            length,
            num_empty,
        )
    return (~(is_empty | is_long)).nonzero().flatten()


def _read_words(path: Path, counter: _WordCounter) -> Lines:
    words, ends = counter.read(path, line_end=None)
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    return Lines(stream=torch.from_numpy(words), starts=starts, ends=ends)


def _read_bytes(file: Mapped) -> Lines:
    """Return the lines without their ends: a new line, after a carriage return or not."""
    raw = file.tensor.numpy()
    found = [
        start + np.flatnonzero(raw[start : start + _BLOCK_BYTES] == _NEW_LINE)
        for start in range(0, len(raw), _BLOCK_BYTES)
    ]
    ends = torch.from_numpy(np.concatenate(found))
    if raw[-1] != _NEW_LINE:
        ends = torch.cat([ends, torch.tensor([len(raw)])])
    starts = torch.nn.functional.pad(ends[:-1] + 1, (1, 0))
    returns = (ends > starts) & (file.tensor[(ends - 1).clamp(min=0)] == _RETURN)
    return Lines(stream=file, starts=starts, ends=ends - returns.long())
