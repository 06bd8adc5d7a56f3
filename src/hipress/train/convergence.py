"""Does training still reach the accuracy? One run with one codec, on real data.

`follow` is the training, whoever the workers are. With `train` several virtual workers share one
process. In each step every worker takes its own batch and the gradient goes the way it goes in a
real sync: encode at each worker, decode and add in rank order at the aggregator, encode the mean
with the aggregator's codec, decode at every worker. In `real_worker` every worker is a process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from hipress.errors import UsageError
from hipress.train.data import DataSet
from hipress.train.virtual_sync import VirtualSync

MOMENTUM = 0.9
"""Of the optimizer; it is off for parameters whose codec brings its own."""
NUM_POINTS = 16
"""How often the test accuracy is taken in a run."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, the same for every codec."""

    data: str
    widths: tuple[int, ...]
    """Of the hidden layers of a multi-layer perceptron."""
    num_steps: int
    batch: int
    """Images per worker and step."""
    rate: float
    """The learning rate at the start; it falls to zero along half a cosine."""

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, above zero for each."""
        return self.rate * 0.5 * (1 + math.cos(math.pi * step / self.num_steps))

    def check(self, data: DataSet, num_workers: int) -> None:
        """Raise a UsageError where the workers' batches together are more than there is."""
        together = self.batch * num_workers
        if together > len(data.train_labels):
            raise UsageError(
                f"{num_workers} workers take {together} images in a step and {self.data} has "
                f"{len(data.train_labels)}; use at most {len(data.train_labels) // self.batch}."
            )


TASKS = {
    "digits": Task(
        data="digits",
        widths=(256, 128),
        num_steps=1000,
        batch=16,
        rate=0.05,
    ),
    "fashion-mnist": Task(
        data="fashion-mnist",
        widths=(256, 128),
        num_steps=3000,
        batch=16,
        rate=0.05,
    ),
}
"""By the name of the data set.

The rate was chosen with uncompressed runs only; the number of steps by the time that runs take.
"""


def task(name: str) -> Task:
    """The task of a data set.

    Raises:
        UsageError: There is no such data set.
    """
    if name not in TASKS:
        raise UsageError(f"no data set {name!r}; there are: {', '.join(TASKS)}.")
    return TASKS[name]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run."""

    codec: str
    seed: int
    steps: tuple[int, ...]
    """Where the test accuracy was taken; the last one is the end."""
    accuracy: tuple[float, ...]
    """In percent, at those steps."""
    bytes_out: float | None = None
    """What one virtual worker sends per step, exempt parameters included."""
    bytes_back: float | None = None
    """What the virtual workers' aggregator answers per step."""


class Workers(Protocol):
    """Who makes the gradients of a run: all workers in this process, or one rank of several."""

    model: nn.Module
    optimizer: torch.optim.SGD

    def backward(self, batches: list[Tensor], step: int) -> None:
        """Give every parameter the mean gradient of all workers.

        Args:
            batches: For each worker in rank order, its images; the optimizer has the step's rate.
            step: Of training, from 0.
        """


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums, and so results, must not depend on how many threads torch has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def follow(
    workers: Workers,
    expression: str,
    task: Task,
    data: DataSet,
    *,
    seed: int,
    num_workers: int,
    num_points: int = NUM_POINTS,
    on_point: Callable[[int], None] = lambda num_steps: None,
) -> Run:
    """Train, and take the test accuracy along the way.

    Args:
        workers: They have the model.
        expression: Of their codec.
        task: The number of steps and the rate.
        data: The data set of that task.
        seed: Decides the batches.
        num_workers: How many gradients are averaged in a step.
        num_points: How often the test accuracy is taken, after the first weights'.
        on_point: Told each time after how many steps.
    """
    batches = _batches(len(data.train_labels), task, num_workers, seed)
    points = [round(task.num_steps * (k + 1) / num_points) for k in range(num_points)]
    accuracies = {0: accuracy(workers.model, data)}
    for step in range(task.num_steps):
        for group in workers.optimizer.param_groups:
            group["lr"] = task.rate_at(step)
        workers.backward(next(batches), step)
        workers.optimizer.step()
        if step + 1 in points:
            accuracies[step + 1] = accuracy(workers.model, data)
            on_point(step + 1)
    return Run(
        codec=expression,
        seed=seed,
        steps=tuple(accuracies),
        accuracy=tuple(accuracies.values()),
    )


def train(
    expression: str,
    task: Task,
    data: DataSet,
    *,
    seed: int = 0,
    num_workers: int = 4,
    num_points: int = NUM_POINTS,
) -> Run:
    """Train virtual workers with one codec and return the test accuracy along the way.

    Args:
        expression: A codec, or `PLAIN`.
        task: The model, the number of steps and the rate.
        data: The data set of that task.
        seed: Decides first weights, batches and the codec's random numbers, so that runs with the
            same seed differ in the codec alone.
        num_workers: How many gradients are averaged in a step.
        num_points: How often the test accuracy is taken.
    """
    task.check(data, num_workers)
    workers = _VirtualWorkers(expression, task, data, seed=seed, num_workers=num_workers)
    run = follow(
        workers,
        expression,
        task,
        data,
        seed=seed,
        num_workers=num_workers,
        num_points=num_points,
    )
    return replace(
        run,
        bytes_out=workers.sync.bytes_out / task.num_steps,
        bytes_back=workers.sync.bytes_back / task.num_steps,
    )


class _VirtualWorkers:
    """All workers of a run, one after the other."""

    def __init__(
        self, expression: str, task: Task, data: DataSet, *, seed: int, num_workers: int
    ) -> None:
        self.task = task
        self.data = data
        self.model = make_model(task, data, seed)
        self.parameters = list(self.model.parameters())
        self.sync = VirtualSync(expression, self.parameters, num_workers=num_workers, seed=seed)
        self.optimizer = make_optimizer(self.parameters, self.sync.has_momentum)

    def backward(self, batches: list[Tensor], step: int) -> None:
        gradients = [
            torch.autograd.grad(loss(self.model, self.data, batch), self.parameters)
            for batch in batches
        ]
        lr_ratio = self.task.rate_at(max(step - 1, 0)) / self.task.rate_at(step)
        means = self.sync.average(gradients, step, lr_ratio)
        for parameter, mean in zip(self.parameters, means, strict=True):
            parameter.grad = mean


def make_model(task: Task, data: DataSet, seed: int) -> nn.Module:
    """A multi-layer perceptron, its first weights decided by the seed."""
    sizes = [data.train_images.shape[1], *task.widths, int(data.train_labels.max()) + 1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for size_in, size_out in zip(sizes, sizes[1:], strict=False):
            layers += [nn.Linear(size_in, size_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_optimizer(parameters: list[nn.Parameter], has_momentum: list[bool]) -> torch.optim.SGD:
    """SGD with momentum, but for parameters whose codec has applied it already."""
    groups = [
        {
            "params": [p for p, own in zip(parameters, has_momentum, strict=True) if own == kind],
            "momentum": 0.0 if kind else MOMENTUM,
        }
        for kind in (False, True)
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.0)


def accuracy(model: nn.Module, data: DataSet) -> float:
    """Test accuracy in percent."""
    with torch.no_grad():
        found = model(data.pixels(data.test_images)).argmax(1)
    return 100 * float((found == data.test_labels).float().mean())


def loss(model: nn.Module, data: DataSet, batch: Tensor) -> Tensor:
    """Of a model on some of the training images."""
    logits = model(data.pixels(data.train_images[batch]))
    return nn.functional.cross_entropy(logits, data.train_labels[batch])


def _batches(num_images: int, task: Task, num_workers: int, seed: int) -> Iterator[list[Tensor]]:
    """For each step, the images of each worker: every epoch in a fresh order, each image once."""
    generator = torch.Generator().manual_seed(seed)
    together = task.batch * num_workers
    while True:
        order = torch.randperm(num_images, generator=generator)
        for start in range(0, num_images - together + 1, together):
            yield list(torch.split(order[start : start + together], task.batch))
