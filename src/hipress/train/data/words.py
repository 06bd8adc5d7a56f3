"""Words as numbers: what stands between spaces, numbered by how often the training part has it."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hipress.errors import UsageError

UNKNOWN = "<unk>"
"""Stands for words that the vocabulary does not have; a text may hold it too."""
LINE_END = "<eos>"
"""Stands for the end of a line, where lines are put together."""
MOST_WORDS = 33_278
"""Of a vocabulary: that of WikiText-2 (Merity et al., 2017), `UNKNOWN` and `LINE_END` included."""

_BLOCK = 2**22


class Counter:
    """Numbers words in the order of their appearance while files are read, each once."""

    def __init__(self) -> None:
        self._numbers: defaultdict[str, int] = defaultdict()
        self._numbers.default_factory = self._numbers.__len__

    def read(self, path: Path, *, line_end: str | None) -> tuple[NDArray[np.int32], Tensor]:
        """The words of a file.

        Args:
            path: Of a file in UTF-8.
            line_end: A word to add to every line.

        Returns:
            The number of each word, and for each line the place where it ends.
        """
        words, ends = array("i"), array("q")
        look_up = self._numbers.__getitem__
        for line in _lines(path):
            words.extend(map(look_up, line.split()))
            if line_end is not None:
                words.append(look_up(line_end))
            ends.append(len(words))
        # Neither is copied; both may be written.
        return np.asarray(words, np.int32), torch.from_numpy(np.asarray(ends, np.int64))

    def vocabulary(self, *parts: NDArray[np.int32]) -> NDArray[np.int32]:
        """For each word of this counter its final number: 0 is `UNKNOWN`, 1 the most frequent.

        Args:
            parts: Numbers from `read` that are trained on; at most `MOST_WORDS` of their words
                get a number above 0.
        """
        counts = np.zeros(len(self._numbers), np.int64)
        for part in parts:
            for start in range(0, len(part), _BLOCK):
                counts += np.bincount(part[start : start + _BLOCK], minlength=len(counts))
        if UNKNOWN in self._numbers:
            counts[self._numbers[UNKNOWN]] = 0
        # Stable: words that are equally frequent stay in the order of their appearance.
        order = np.argsort(-counts, kind="stable")[: min(MOST_WORDS - 1, int((counts > 0).sum()))]
        final = np.zeros(len(counts), np.int32)
        final[order] = np.arange(1, len(order) + 1)
        return final


def renumber(words: NDArray[np.int32], final: NDArray[np.int32]) -> Tensor:
    """The final numbers of words, in the memory of the first ones."""
    for start in range(0, len(words), _BLOCK):
        block = words[start : start + _BLOCK]
        block[:] = final[block]
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
