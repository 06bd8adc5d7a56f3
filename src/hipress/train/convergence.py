"""The accuracy of training with each codec, compared with plain averaging on real data.

VirtualSync     the gradient exchange of virtual workers, which share one process
VirtualWorkers  all workers of a run, with a `VirtualSync`
RealWorker      one rank of a run: DDP with `hipress.attach`
compare         runs every codec with the same task, seeds and steps; one row for each
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hipress
from hipress.codecs import Codec
from hipress.codecs.base import State
from hipress.codecs.table import TABLE
from hipress.errors import UsageError
from hipress.plan import MIN_SIZE, exempt_reason
from hipress.session.buckets import has_momentum
from hipress.train import data as data_sets
from hipress.train.config import PLAIN
from hipress.train.data import DataSet

MOMENTUM = 0.9
"""Momentum of the optimizer, for parameters whose codec has none."""
NUM_POINTS = 16
MAX_LOSS_POINTS = 1.0
"""Largest loss of mean accuracy, in points, that counts as within the bound."""
EXPLANATORY = (
    "onebit(block=256)",
    "onebit(block=4096)",
    "momentum(onebit)",
    "tbq(tau=0.1)",
    "minmax(bits=4)",
    "dithering(levels=8)",
)
"""Codecs shown after those of the table, to explain their rows."""


@dataclass(frozen=True, kw_only=True)
class ConvergenceTask:
    """The training that is the same for every codec."""

    data: str
    widths: tuple[int, ...]
    num_steps: int
    batch: int
    rate: float
    """Learning rate at the start; it falls to zero along half a cosine."""

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, above zero for each."""
        return self.rate * 0.5 * (1 + math.cos(math.pi * step / self.num_steps))

    def check(self, data: DataSet, num_workers: int) -> None:
        """Raise a UsageError if the batches of all workers exceed the data."""
        together = self.batch * num_workers
        if together > len(data.train_labels):
            raise UsageError(
                f"{num_workers} workers take {together} images in a step and {self.data} has "
                f"{len(data.train_labels)}; use at most {len(data.train_labels) // self.batch}."
            )


TASKS = {
    name: ConvergenceTask(data=name, widths=(256, 128), num_steps=steps, batch=16, rate=0.05)
    for name, steps in (("digits", 1000), ("fashion-mnist", 3000))
}
"""Tasks by the name of the data set.

The rate was chosen with uncompressed runs only; the number of steps by the time that runs take.
"""


def task(name: str) -> ConvergenceTask:
    if name not in TASKS:
        raise UsageError(f"no data set {name!r}; there are: {', '.join(TASKS)}.")
    return TASKS[name]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of one training run."""

    codec: str
    seed: int
    steps: tuple[int, ...]
    """Steps after which the test accuracy was measured; the last one is the end."""
    accuracy: tuple[float, ...]
    """In percent, at those steps."""
    bytes_out: float | None = None
    """Bytes that one virtual worker sends per step, exempt parameters included."""
    bytes_back: float | None = None
    """Bytes that the virtual workers' aggregator answers per step."""


# --- the exchange of virtual workers --------------------------------------------------------------


class VirtualSync:
    """The gradient exchange of several workers and one aggregator, without a network.

    With g_w the gradient of worker w and N the number of workers:

        mean      the sum over w of decode(encode(g_w)) / N, in rank order
        update    decode(encode_back(mean)), the same bits for all

    There is no other process, so only the effect of a codec on training remains.
    `expression` is a codec, or `PLAIN`; exempt parameters are averaged uncompressed. Workers are
    ranks 0 to num_workers - 1; the aggregator is one more.

    Example:
        >>> sync = VirtualSync("onebit", [torch.zeros(64, 64)], num_workers=2)
        >>> mean = sync.average([[torch.ones(64, 64)], [torch.full((64, 64), 3.0)]], step=0)
        >>> mean[0].unique()
        tensor([2.])
    """

    def __init__(
        self, expression: str, parameters: Sequence[Tensor], *, num_workers: int, seed: int = 0
    ) -> None:
        self.num_workers = num_workers
        self.bytes_out = 0
        """Bytes that worker 0 has sent."""
        self.bytes_back = 0
        """Bytes that the aggregator has sent to each worker."""
        codec = None if expression == PLAIN else hipress.codec(expression)
        self.tensors = [
            _Exempt(self) if codec is None or is_exempt(p) else _Compressed(self, codec, p, seed, i)
            for i, p in enumerate(parameters)
        ]

    @property
    def has_momentum(self) -> list[bool]:
        """For each parameter, whether its codec applies momentum and the optimizer must not."""
        return [tensor.has_momentum for tensor in self.tensors]

    def average(
        self, gradients: Sequence[Sequence[Tensor]], step: int, lr_ratio: float = 1.0
    ) -> list[Tensor]:
        """Return the averaged gradient of each parameter, as every worker decodes it.

        `gradients` has those of each worker in rank order. The step selects the phase of a codec
        that has phases; `lr_ratio` is the last step's learning rate divided by this one's.
        """
        by_parameter = zip(*gradients, strict=True)
        return [
            tensor.average(group, step, lr_ratio)
            for tensor, group in zip(self.tensors, by_parameter, strict=True)
        ]


def is_exempt(parameter: Tensor) -> bool:
    return bool(exempt_reason(parameter.dim(), parameter.numel()))


class _Exempt:
    has_momentum = False

    def __init__(self, sync: VirtualSync) -> None:
        self.sync = sync

    def average(self, gradients: Sequence[Tensor], step: int, lr_ratio: float) -> Tensor:
        mean = torch.zeros_like(gradients[0])
        for gradient in gradients:
            mean.add_(gradient, alpha=1 / len(gradients))
        self.sync.bytes_out += 4 * mean.numel()
        self.sync.bytes_back += 4 * mean.numel()
        return mean


class _Compressed:
    def __init__(
        self, sync: VirtualSync, codec: Codec, parameter: Tensor, seed: int, index: int
    ) -> None:
        self.sync = sync
        self.codec = codec
        self.frame_back = torch.empty(0, dtype=torch.uint8)
        self._backs: dict[str, Codec] = {}
        # Parameters differ in seed; ranks differ in stream unless they must draw the same numbers.
        seed = 1_000_003 * seed + index
        streams = [0 if codec.shares_stream else rank for rank in range(sync.num_workers + 1)]
        self.states: list[State] = [
            codec.init(parameter, seed=seed, stream=stream) for stream in streams[:-1]
        ]
        self.state_back = self.back(0).init(parameter, seed=seed, stream=streams[-1])
        own = set(self.states[0])
        self.has_momentum = bool(own & {"momentum", "velocity"})
        # dist-EF-SGDM corrects residuals for a changing rate (Zheng et al., NeurIPS 2019).
        self._follows_rate = "momentum" in own

    def back(self, step: int) -> Codec:
        """Return the aggregator's codec in the phase of a step."""
        codec = self.codec.phase(step)
        if codec.name not in self._backs:
            self._backs[codec.name] = codec.aggregator(self.sync.num_workers)
        return self._backs[codec.name]

    def average(self, gradients: Sequence[Tensor], step: int, lr_ratio: float) -> Tensor:
        codec, back = self.codec.phase(step), self.back(step)
        if self._follows_rate:
            ratio = torch.tensor(lr_ratio)
            for state in (*self.states, self.state_back):
                state["lr_ratio"] = ratio
        mean = torch.zeros_like(gradients[0], memory_format=torch.contiguous_format)
        for gradient, state in zip(gradients, self.states, strict=True):
            frame = codec.encode(gradient, state)
            codec.decode(frame, out=mean, add=True, alpha=1 / len(gradients))
        self.frame_back = back.encode(mean, self.state_back)
        self.sync.bytes_out += frame.numel()
        self.sync.bytes_back += self.frame_back.numel()
        return back.decode(self.frame_back, out=mean)


# --- one run --------------------------------------------------------------------------------------


class Workers(ABC):
    """All workers of a run in this process, or one rank of it.

    The seed selects first weights, batches and the virtual workers' random numbers, so that runs
    with the same seed differ in the codec only. `expression` is a codec, or `PLAIN`.
    """

    optimizer: torch.optim.SGD

    def __init__(
        self, expression: str, task: ConvergenceTask, data: DataSet, *, seed: int, num_workers: int
    ) -> None:
        self.expression, self.task, self.data = expression, task, data
        self.seed, self.num_workers = seed, num_workers
        self.model = make_model(task, data, seed)
        self.parameters = list(self.model.parameters())

    @abstractmethod
    def backward(self, batches: list[Tensor], step: int) -> None:
        """Give every parameter the mean gradient of all workers.

        `batches` are the indices of each worker's images; the optimizer has the step's learning
        rate.
        """

    def train(
        self,
        num_points: int = NUM_POINTS,
        on_point: Callable[[int], None] = lambda num_steps: None,
    ) -> Run:
        """Train, and measure the test accuracy `num_points` times, besides that of the first
        weights.
        """
        task = self.task
        batches = _batches(len(self.data.train_labels), task, self.num_workers, self.seed)
        points = [round(task.num_steps * (k + 1) / num_points) for k in range(num_points)]
        with _one_thread():
            accuracies = {0: self.accuracy()}
            for step in range(task.num_steps):
                for group in self.optimizer.param_groups:
                    group["lr"] = task.rate_at(step)
                self.backward(next(batches), step)
                self.optimizer.step()
                if step + 1 in points:
                    accuracies[step + 1] = self.accuracy()
                    on_point(step + 1)
        return Run(
            codec=self.expression,
            seed=self.seed,
            steps=tuple(accuracies),
            accuracy=tuple(accuracies.values()),
        )

    def accuracy(self) -> float:
        with torch.no_grad():
            found = self.model(self.data.pixels(self.data.test_images)).argmax(1)
        return 100 * float((found == self.data.test_labels).float().mean())

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(self.data.pixels(self.data.train_images[batch]))
        return nn.functional.cross_entropy(logits, self.data.train_labels[batch])


class VirtualWorkers(Workers):
    """All workers of a run, one after the other in this process; see `Workers`."""

    def __init__(
        self, expression: str, task: ConvergenceTask, data: DataSet, *, seed: int, num_workers: int
    ) -> None:
        super().__init__(expression, task, data, seed=seed, num_workers=num_workers)
        self.sync = VirtualSync(expression, self.parameters, num_workers=num_workers, seed=seed)
        self.optimizer = make_optimizer(self.parameters, self.sync.has_momentum)

    def backward(self, batches: list[Tensor], step: int) -> None:
        gradients = [
            torch.autograd.grad(self.loss(self.model, batch), self.parameters) for batch in batches
        ]
        lr_ratio = self.task.rate_at(max(step - 1, 0)) / self.task.rate_at(step)
        means = self.sync.average(gradients, step, lr_ratio)
        for parameter, mean in zip(self.parameters, means, strict=True):
            parameter.grad = mean


class RealWorker(Workers):
    """One worker of a run as a rank of torch.distributed: DDP with `hipress.attach`.

    It has the model, batches, rates and optimizer of the virtual worker of its rank. Differences
    remain: gradients are partitioned among several aggregators and rounded in another order, and
    codecs draw the same random numbers for every seed. `PLAIN` is DDP alone.
    """

    def __init__(
        self, expression: str, task: ConvergenceTask, data: DataSet, *, seed: int, strategy: str
    ) -> None:
        super().__init__(expression, task, data, seed=seed, num_workers=dist.get_world_size())
        self.rank = dist.get_rank()
        self._ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        is_plain = expression == PLAIN
        codec = None if is_plain else hipress.codec(expression)
        brings_momentum = codec is not None and has_momentum(codec)
        self.optimizer = make_optimizer(
            self.parameters, [brings_momentum and not is_exempt(p) for p in self.parameters]
        )
        self.sync = hipress.attach(
            self._ddp,
            codec=codec,
            strategy=strategy,
            min_size=MIN_SIZE,
            optimizer=self.optimizer,
            enabled=not is_plain,
        )

    def backward(self, batches: list[Tensor], step: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(self.loss(self._ddp, batches[self.rank]))

    def close(self) -> None:
        """End the exchange, when all ranks have finished with it."""
        if self.sync.enabled:
            self.sync.engine.close()


def train(
    expression: str,
    task: ConvergenceTask,
    data: DataSet,
    *,
    seed: int = 0,
    num_workers: int = 4,
    num_points: int = NUM_POINTS,
) -> Run:
    """Train virtual workers with one codec; arguments are those of `Workers` and its `train`."""
    task.check(data, num_workers)
    workers = VirtualWorkers(expression, task, data, seed=seed, num_workers=num_workers)
    return replace(
        workers.train(num_points),
        bytes_out=workers.sync.bytes_out / task.num_steps,
        bytes_back=workers.sync.bytes_back / task.num_steps,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread, so that sums, and results, do not depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_model(task: ConvergenceTask, data: DataSet, seed: int) -> nn.Module:
    """Return a multi-layer perceptron whose first weights depend on the seed only."""
    sizes = [data.train_images.shape[1], *task.widths, int(data.train_labels.max()) + 1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for size_in, size_out in zip(sizes, sizes[1:], strict=False):
            layers += [nn.Linear(size_in, size_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_optimizer(parameters: list[nn.Parameter], has_momentum: list[bool]) -> torch.optim.SGD:
    """Return SGD with momentum, except for parameters whose codec applies it already."""
    groups = [
        {
            "params": [p for p, own in zip(parameters, has_momentum, strict=True) if own == kind],
            "momentum": 0.0 if kind else MOMENTUM,
        }
        for kind in (False, True)
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.0)


def _batches(
    num_images: int, task: ConvergenceTask, num_workers: int, seed: int
) -> Iterator[list[Tensor]]:
    """Yield the images of each worker for each step; every epoch has a new order."""
    generator = torch.Generator().manual_seed(seed)
    together = task.batch * num_workers
    while True:
        order = torch.randperm(num_images, generator=generator)
        for start in range(0, num_images - together + 1, together):
            yield list(torch.split(order[start : start + together], task.batch))


# --- every codec beside plain averaging -----------------------------------------------------------


def default_codecs() -> list[str]:
    """Return every built-in codec with its defaults, then those that explain a row."""
    return [*TABLE, *EXPLANATORY]


def names_of(expressions: Sequence[str]) -> list[str]:
    """Return the names of the rows: plain averaging, then each codec once."""
    return [PLAIN, *(name for name in dict.fromkeys(expressions) if name != PLAIN)]


def compare(
    task: ConvergenceTask,
    expressions: Sequence[str],
    *,
    num_seeds: int = 3,
    num_workers: int = 4,
    folder: Path | None = None,
    jobs: int = 1,
    on_run: Callable[[str], None] = lambda label: None,
) -> list[dict[str, Any]]:
    """Train with plain averaging and with each codec; return one row of plain numbers for each.

    Seeds are 0, 1, ...; `jobs` runs work at a time, each in its own process, unless it is 1.
    `on_run` is called with a label after each run.
    """
    names = names_of(expressions)
    check(task, names, num_workers=num_workers, folder=folder)
    todo = [(name, task, seed, num_workers, folder) for seed in range(num_seeds) for name in names]
    runs = []
    for run in _run_all(todo, jobs):
        runs.append(run)
        on_run(f"{task.data}, {run.codec}, seed {run.seed}")
    return rows(task, names, runs, num_workers=num_workers)


def check(
    task: ConvergenceTask,
    expressions: Sequence[str],
    *,
    num_workers: int,
    folder: Path | None = None,
) -> None:
    """Raise a UsageError, before a comparison takes minutes, if a codec is misspelt, the data is
    missing, or there are too many workers for it.
    """
    for expression in expressions:
        if expression != PLAIN:
            hipress.codec(expression)
    task.check(loaded(task.data, folder), num_workers)


@lru_cache(maxsize=1)
def loaded(name: str, folder: Path | None) -> DataSet:
    """Return a data set by name; the last one is kept in memory."""
    return data_sets.load(name, folder)


_RunArguments = tuple[str, ConvergenceTask, int, int, Path | None]


def _run_all(todo: list[_RunArguments], jobs: int) -> Iterator[Run]:
    if jobs == 1:
        yield from (_run(*arguments) for arguments in todo)
        return
    # Not fork: torch and numba have started threads.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context)
    try:
        for done in as_completed([pool.submit(_run, *arguments) for arguments in todo]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)  # after an error or ctrl-C


def _run(
    expression: str, task: ConvergenceTask, seed: int, num_workers: int, folder: Path | None
) -> Run:
    return train(expression, task, loaded(task.data, folder), seed=seed, num_workers=num_workers)


def rows(
    task: ConvergenceTask, names: Sequence[str], runs: Sequence[Run], *, num_workers: int
) -> list[dict[str, Any]]:
    """Return one row for each of the names, of which plain averaging must be one."""
    ordered = sorted(runs, key=lambda run: run.seed)  # parallel runs end in any order
    by_name = {name: [run for run in ordered if run.codec == name] for name in names}
    return [_row(task, num_workers, by_name[name], by_name[PLAIN]) for name in names]


def _row(
    task: ConvergenceTask, num_workers: int, runs: list[Run], plain: list[Run]
) -> dict[str, Any]:
    """Return one flat row; accuracies in percent have two digits (one image of 10,000 is 0.01)."""
    ends = [run.accuracy[-1] for run in runs]
    differences = [
        run.accuracy[-1] - base.accuracy[-1] for run, base in zip(runs, plain, strict=True)
    ]
    difference = statistics.fmean(differences)
    return {
        "data": task.data,
        "codec": runs[0].codec,
        "num_workers": num_workers,
        "num_steps": task.num_steps,
        "rate": task.rate,
        "ratio_out": _ratio(plain[0].bytes_out, runs[0].bytes_out),
        "ratio_back": _ratio(plain[0].bytes_out, runs[0].bytes_back),
        "accuracy": round(statistics.fmean(ends), 2),
        "accuracies": [round(end, 2) for end in ends],
        "difference": round(difference, 2),
        "difference_min": round(min(differences), 2),
        "difference_max": round(max(differences), 2),
        "within": round(difference, 2) >= -MAX_LOSS_POINTS,
        "curve_steps": list(runs[0].steps),
        "curves": [[round(point, 2) for point in run.accuracy] for run in runs],
    }


def _ratio(plain_bytes: float | None, num_bytes: float | None) -> float | None:
    """Return how many times smaller the messages are; None if bytes were not counted."""
    return None if plain_bytes is None or num_bytes is None else round(plain_bytes / num_bytes, 2)
