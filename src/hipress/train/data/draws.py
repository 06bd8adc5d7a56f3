"""Random numbers that follow from a seed and the number of an example, and from nothing else.

A generator would make what happens to an example depend on its neighbours in the batch. Here every
example has a sequence of its own: SplitMix64 (Steele et al., 2014), started from seed and index.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, made odd
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def numbers(seed: int, indices: Tensor, num_each: int) -> NDArray[np.float64]:
    """Numbers from 0 to below 1: a row of `num_each` for every index.

    Example:
        >>> import torch
        >>> both, one = torch.tensor([4, 7]), torch.tensor([7])
        >>> bool((numbers(1, both, 3)[1] == numbers(1, one, 3)[0]).all())
        True
    """
    # Arrays throughout: they wrap around silently, where a single number would warn.
    start = _scramble(np.array([seed % 2**64], np.uint64))
    rows = _scramble(start ^ _scramble(indices.numpy().astype(np.uint64)))
    steps = np.arange(1, num_each + 1, dtype=np.uint64) * _STEP
    bits = _scramble(rows[:, None] + steps)
    scaled: NDArray[np.float64] = (bits >> np.uint64(11)) * 2.0**-53  # as many bits as a float has
    return scaled


def _scramble(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = bits + _STEP
    bits = (bits ^ (bits >> np.uint64(30))) * _FIRST
    bits = (bits ^ (bits >> np.uint64(27))) * _SECOND
    mixed: NDArray[np.uint64] = bits ^ (bits >> np.uint64(31))
    return mixed
