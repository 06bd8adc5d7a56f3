"""Text from one file, for language models and for BERT; the last 5 % is the test part."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hipress.errors import UsageError
from hipress.train.data.base import Data
from hipress.train.data.draws import numbers
from hipress.train.data.files import Held, Mapped, checked_file, part_of, tensor_of
from hipress.train.data.words import LINE_END, Counter, renumber
from hipress.train.tasks import Batch

LENGTH = 128
"""Tokens of an example, unless the model or the user says otherwise."""
NOT_SCORED = -100
"""The label of a position where nothing is to be guessed."""

_TEST_SHARE = 20  # one in so many tokens
_CHOSEN, _MASKED, _SWAPPED = 0.15, 0.8, 0.1  # Devlin et al. (2019), section 3.1
_NUM_SPECIALS = 3


def open_text(path: Path, *, task: str, length: int | None = None, tokens: str = "bytes") -> Data:
    """The data set of a file.

    Args:
        path: Of the file.
        task: "language" or "masked".
        length: Tokens of an example; `LENGTH` if None.
        tokens: "bytes", or "words" for what stands between spaces.
    """
    kind = MaskedText if task == "masked" else LanguageText
    length = length or LENGTH
    checked_file(path, "text")
    held, vocabulary = _words(path) if tokens == "words" else (Mapped(path, "text"), 256)
    stream = tensor_of(held)
    num_test = len(stream) // _TEST_SHARE
    if num_test < kind.tokens_needed(length):
        raise UsageError(
            f"{str(path)!r} has {len(stream)} tokens, and its last 5 % is too short for a test "
            f"example of {length}; give a file of at least "
            f"{_TEST_SHARE * kind.tokens_needed(length)} {tokens}, or a smaller --length."
        )
    train, test = (part_of(held, part) for part in (stream[:-num_test], stream[-num_test:]))
    return kind(train, test, vocabulary=vocabulary, length=length)


def _words(path: Path) -> tuple[Held, int]:
    """The words of a file and the size of their vocabulary."""
    counter = Counter()
    words, _ = counter.read(path, line_end=LINE_END)
    final = counter.vocabulary(words[: len(words) - len(words) // _TEST_SHARE])
    return renumber(words, final), 1 + int(final.max(initial=0))


class LanguageText(Data):
    """For the task language: window after window, and for each token the next one.

    Args:
        train: Tokens, of any integer type.
        test: The same of the test part.
        vocabulary: Tokens are below it.
        length: Of a window.
    """

    def __init__(self, train: Held, test: Held, *, vocabulary: int, length: int) -> None:
        super().__init__(
            name="text",
            task="language",
            sizes={"vocabulary": vocabulary},
            num_train=(len(tensor_of(train)) - 1) // length,
            num_test=(len(tensor_of(test)) - 1) // length,
        )
        self._train = train
        self._test = test
        self._places = torch.arange(length + 1)

    @staticmethod
    def tokens_needed(length: int) -> int:
        """The fewest that make an example."""
        return length + 1

    def train(self, indices: Tensor, seed: int) -> Batch:
        """The windows of these numbers; nothing about them is random."""
        return self._batch(tensor_of(self._train), indices)

    def test(self, indices: Tensor) -> Batch:
        """The windows of these numbers."""
        return self._batch(tensor_of(self._test), indices)

    def _batch(self, stream: Tensor, indices: Tensor) -> Batch:
        length = len(self._places) - 1
        window = stream[indices[:, None] * length + self._places].long()
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()


class MaskedText(Data):
    """For the task masked: `[CLS] A [SEP] B [SEP]`, where some tokens of A and B are to be guessed.

    A is a piece of the text; B is what follows half the time, else what follows another piece. Of
    the tokens of both 15 % are chosen: 80 % of these become [MASK], 10 % any token, the rest stay.
    The three special tokens are numbered after those of the text.

    Args:
        train: Tokens, of any integer type.
        test: The same of the test part.
        vocabulary: Of the text, without the special tokens.
        length: Of an example, all together.
    """

    def __init__(self, train: Held, test: Held, *, vocabulary: int, length: int) -> None:
        num_ordinary = length - _NUM_SPECIALS
        super().__init__(
            name="text",
            task="masked",
            sizes={"vocabulary": vocabulary + _NUM_SPECIALS},
            num_train=len(tensor_of(train)) // num_ordinary,
            num_test=len(tensor_of(test)) // num_ordinary,
        )
        self._train = train
        self._test = test
        self._length = length
        self._vocabulary = vocabulary

    @staticmethod
    def tokens_needed(length: int) -> int:
        """The fewest that make an example: two, since B may be taken from another."""
        if length < _NUM_SPECIALS + 2:
            raise UsageError(
                f"--length is {length}, of which {_NUM_SPECIALS} tokens are special and each "
                f"segment needs one; give at least {_NUM_SPECIALS + 2}."
            )
        return 2 * (length - _NUM_SPECIALS)

    def train(self, indices: Tensor, seed: int) -> Batch:
        """Pairs and what is to be guessed of them, by the seed."""
        return self._batch(tensor_of(self._train), self.num_train, indices, seed)

    def test(self, indices: Tensor) -> Batch:
        """Pairs and what is to be guessed of them, always the same."""
        return self._batch(tensor_of(self._test), self.num_test, indices, seed=0)

    def _batch(self, stream: Tensor, num_pairs: int, indices: Tensor, seed: int) -> Batch:
        num_ordinary = self._length - _NUM_SPECIALS
        num_a = num_ordinary // 2
        num_chosen = max(1, round(_CHOSEN * num_ordinary))
        chances = torch.from_numpy(numbers(seed, indices, 2 + num_ordinary + 2 * num_chosen))
        parts = [2, num_ordinary, num_chosen, num_chosen]
        pair, order, kind, other = torch.split_with_sizes(chances, parts, dim=1)

        is_next = pair[:, 0] < 0.5
        # From 1 to num_pairs - 1 further on, so never the piece itself.
        further = 1 + (pair[:, 1] * (num_pairs - 1)).long()
        pieces = torch.where(is_next, indices, (indices + further) % num_pairs)
        inside = torch.arange(num_ordinary)
        start = torch.where(inside < num_a, indices[:, None], pieces[:, None]) * num_ordinary
        ordinary = stream[start + inside].long()

        chosen = order.topk(num_chosen, dim=1).indices
        answers = ordinary.gather(1, chosen)
        guessed = torch.where(kind < _MASKED, self._vocabulary + 2, answers)
        swapped = (other * self._vocabulary).long()
        is_swapped = (kind >= _MASKED) & (kind < _MASKED + _SWAPPED)
        guessed = torch.where(is_swapped, swapped, guessed)
        ordinary.scatter_(1, chosen, guessed)
        labels = torch.full_like(ordinary, NOT_SCORED).scatter_(1, chosen, answers)

        tokens = self._framed(ordinary, num_a, self._vocabulary, self._vocabulary + 1)
        labels = self._framed(labels, num_a, NOT_SCORED, NOT_SCORED)
        segments = (torch.arange(self._length) >= num_a + 2).long().repeat(len(indices), 1)
        return tokens, segments, labels, is_next.long()

    @staticmethod
    def _framed(ordinary: Tensor, num_a: int, first: int, separator: int) -> Tensor:
        """The tokens of A and B, with what stands before, between and after them."""
        begin = ordinary.new_full((len(ordinary), 1), first)
        end = ordinary.new_full((len(ordinary), 1), separator)
        return torch.cat([begin, ordinary[:, :num_a], end, ordinary[:, num_a:], end], dim=1)
