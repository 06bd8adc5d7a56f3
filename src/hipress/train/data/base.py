"""What every data set is to a training job: numbered examples, and batches made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from hipress.train.tasks import Batch


class Data(ABC):
    """A data set: training and test examples by number.

    Args:
        name: One of `NAMES`.
        task: Which task of `hipress.train.tasks` its batches are for.
        sizes: What the model must fit, as arguments of its `build`: `num_classes` or `vocabulary`.
        num_train: Training examples.
        num_test: Test examples.
    """

    reads_files = False
    """Whether each batch opens files, so that processes which prepare batches pay."""

    def __init__(
        self, *, name: str, task: str, sizes: dict[str, int], num_train: int, num_test: int
    ) -> None:
        self.name = name
        self.task = task
        self.sizes = sizes
        self.num_train = num_train
        self.num_test = num_test

    @abstractmethod
    def train(self, indices: Tensor, seed: int) -> Batch:
        """A batch of training examples.

        Args:
            indices: int64, each from 0 to below `num_train`.
            seed: Decides what is random. What becomes of an example follows from its index and
                the seed alone, whatever else is in the batch, on any rank and after a resume.
        """

    @abstractmethod
    def test(self, indices: Tensor) -> Batch:
        """A batch of test examples, always the same; indices from 0 to below `num_test`."""
