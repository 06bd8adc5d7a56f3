"""Lines in one language and their translations: two files, line by line; the last 5 % is tested."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hipress.errors import UsageError
from hipress.train.data.base import Data
from hipress.train.data.files import Held, Mapped, checked_file, tensor_of
from hipress.train.data.text import LENGTH
from hipress.train.data.words import Counter, renumber
from hipress.train.tasks import Batch

PADDING, BEGIN, END = 0, 1, 2
"""The special tokens; those of the text are numbered after them."""

_NUM_SPECIALS = 3
_TEST_SHARE = 20  # one in so many pairs
_BLOCK_BYTES = 2**24
_NEW_LINE, _RETURN = 10, 13


@dataclass(frozen=True, kw_only=True, eq=False)
class Lines:
    """The lines of a file: pieces of one stream of tokens."""

    stream: Held
    """uint8 or int32, from 0; special tokens are not counted."""
    starts: Tensor
    """int64, one for each line."""
    ends: Tensor
    """The place after the last token."""

    @property
    def lengths(self) -> Tensor:
        """Tokens of each line."""
        return self.ends - self.starts

    def chosen(self, which: Tensor) -> Lines:
        """Some of the lines."""
        return Lines(stream=self.stream, starts=self.starts[which], ends=self.ends[which])

    def tokens(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Lines of these numbers, their tokens above the special ones, and their lengths.

        Returns:
            A row for each, with at least one `PADDING` at its end, and the number of tokens in it.
        """
        starts, ends = self.starts[indices, None], self.ends[indices, None]
        lengths = ends - starts
        places = starts + torch.arange(int(lengths.max()) + 1)
        inside = places < ends
        # Places past a line may be past the file too.
        stream = tensor_of(self.stream)
        tokens = stream[torch.where(inside, places, starts)].long() + _NUM_SPECIALS
        return tokens.where(inside, PADDING), lengths


class ParallelText(Data):
    """For the task translate; a batch is padded to its longest line.

    Args:
        source: What is translated.
        target: As many lines, none empty.
        vocabulary: Of both together, with the special tokens.
    """

    def __init__(self, source: Lines, target: Lines, *, vocabulary: int) -> None:
        num_pairs = len(source.starts)
        num_test = max(1, num_pairs // _TEST_SHARE)
        super().__init__(
            name="parallel-text",
            task="translate",
            sizes={"vocabulary": vocabulary},
            num_train=num_pairs - num_test,
            num_test=num_test,
        )
        self._source = source
        self._target = target

    def train(self, indices: Tensor, seed: int) -> Batch:
        """The pairs of these numbers; nothing about them is random."""
        if int(indices.max()) >= self.num_train:
            raise IndexError(f"index {int(indices.max())} of {self.num_train} training pairs")
        return self._batch(indices)

    def test(self, indices: Tensor) -> Batch:
        """The pairs of these numbers."""
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
    """The data set of two files.

    Args:
        source: What is translated.
        target: The same number of lines.
        length: Tokens of a line, its end included; pairs with a longer one are left out. `LENGTH`
            if None.
        tokens: "bytes", or "words" for what stands between spaces.
    """
    length = length or LENGTH
    both = [checked_file(path, "parallel-text") for path in (source, target)]
    counter = Counter()
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
    if tokens == "words":
        last = int(kept[-1 - max(1, len(kept) // _TEST_SHARE)])
        parts = [tensor_of(side.stream)[: int(side.ends[last])].numpy() for side in lines]
        final = counter.vocabulary(*parts)
        for side in lines:
            renumber(tensor_of(side.stream).numpy(), final)
        vocabulary = 1 + int(final.max())
    else:
        vocabulary = 256
    return ParallelText(
        lines[0].chosen(kept), lines[1].chosen(kept), vocabulary=vocabulary + _NUM_SPECIALS
    )


def _kept(source: Tensor, target: Tensor, length: int) -> Tensor:
    """The numbers of the pairs that are neither empty nor too long, by lengths of their lines."""
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


def _read_words(path: Path, counter: Counter) -> Lines:
    words, ends = counter.read(path, line_end=None)
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    return Lines(stream=torch.from_numpy(words), starts=starts, ends=ends)


def _read_bytes(file: Mapped) -> Lines:
    """Lines without what ends them: a new line, after a carriage return or not."""
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
