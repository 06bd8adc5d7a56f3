"""One run of the convergence benchmark: all workers in this process, or one rank of a group.

Workers         what both kinds share: model, batches, rates, scores
VirtualWorkers  all workers of a run, with a `VirtualSync`
RealWorker      one rank of a run: DDP with `hipress.attach`
train           one run of virtual workers
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import hipress
from hipress.plan import MIN_SIZE
from hipress.session.buckets import has_momentum
from hipress.torch.optim import AdamW
from hipress.train.config import PLAIN
from hipress.train.forms import GRADIENT, SGD_MOMENTUM, sent
from hipress.train.virtual import VirtualSync, is_exempt
from hipress.train.workloads import PLAIN_SGD, ConvergenceTask, Examples, make_model

NUM_POINTS = 16


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of one training run."""

    codec: str
    """The codec as the user named it, or `PLAIN`."""
    form: str = GRADIENT
    seed: int
    device: str = "cpu"
    """cpu, or the name of the GPU."""
    steps: tuple[int, ...]
    """Steps after which the model was tested; the last one is the end."""
    scores: tuple[float, ...]
    """Accuracies in percent, or losses, at those steps."""
    bytes_out: float | None = None
    """Bytes that one virtual worker sends per step, exempt parameters included."""
    bytes_back: float | None = None
    """Bytes that the virtual workers' aggregator answers per step."""
    bytes_out_later: float | None = None
    """Those that a worker sends per step after the warm-up of the second moment, if any step is
    after it."""


class Workers(ABC):
    """All workers of a run in this process, or one rank of it.

    The seed selects first weights, batches and the virtual workers' random numbers, so that runs
    with the same seed differ in the codec only. `expression` is a codec, or `PLAIN`.
    """

    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        expression: str,
        task: ConvergenceTask,
        data: Examples,
        *,
        seed: int,
        num_workers: int,
        device: str = "cpu",
    ) -> None:
        self.expression, self.task, self.data = expression, task, data
        self.seed, self.num_workers, self.device = seed, num_workers, device
        self.model = make_model(task, data, seed).to(device)
        self.parameters = list(self.model.parameters())

    @abstractmethod
    def backward(self, batches: list[Tensor], step: int) -> None:
        """Give every parameter the mean gradient of all workers, or their mean momentum.

        `batches` are the indices of each worker's examples; the optimizer has the step's learning
        rate.
        """

    def train(
        self,
        num_points: int = NUM_POINTS,
        on_point: Callable[[int], None] = lambda num_steps: None,
    ) -> Run:
        """Train, and test `num_points` times, besides the test of the first weights."""
        task = self.task
        batches = _batches(self.data.num_train, task, self.num_workers, self.seed, self.device)
        points = [round(task.num_steps * (k + 1) / num_points) for k in range(num_points)]
        with _repeatable():
            scores = {0: self.score()}
            for step in range(task.num_steps):
                for group in self.optimizer.param_groups:
                    group["lr"] = task.rate_at(step)
                self.backward(next(batches), step)
                if task.clip:
                    nn.utils.clip_grad_norm_(self.parameters, task.clip)
                self.optimizer.step()
                if step + 1 in points:
                    scores[step + 1] = self.score()
                    on_point(step + 1)
        return Run(
            codec=self.expression,
            seed=self.seed,
            device="cpu" if self.device == "cpu" else torch.cuda.get_device_name(),
            steps=tuple(scores),
            scores=tuple(scores.values()),
        )

    def score(self) -> float:
        """Return the accuracy of the test in percent, or its loss."""
        total, count = torch.zeros((), device=self.device), 0
        self.model.eval()
        with torch.no_grad():
            for inputs, targets in self.data.test():
                logits = self.model(inputs)
                if self.task.metric == "loss":
                    total += _cross_entropy(logits, targets, reduction="sum")
                else:
                    total += (logits.argmax(1) == targets).sum()
                count += targets.numel()
        self.model.train()
        return float(total / count) * (1 if self.task.metric == "loss" else 100)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        inputs, targets = self.data.train(batch)
        return _cross_entropy(model(inputs), targets)


class VirtualWorkers(Workers):
    """All workers of a run, one after the other in this process; see `Workers`."""

    def __init__(
        self,
        expression: str,
        task: ConvergenceTask,
        data: Examples,
        *,
        seed: int,
        num_workers: int,
        form: str = GRADIENT,
        device: str = "cpu",
    ) -> None:
        super().__init__(expression, task, data, seed=seed, num_workers=num_workers, device=device)
        what = sent(expression, task.optimizer, form)
        adamw = make_adamw(task, self.parameters) if task.optimizer == "adamw" else None
        self.sync = VirtualSync(
            what, self.parameters, num_workers=num_workers, seed=seed, optimizer=adamw
        )
        lacks_momentum = [task.optimizer == PLAIN_SGD or own for own in self.sync.has_momentum]
        self.optimizer = adamw or make_sgd(self.parameters, lacks_momentum)
        self.bytes_at_warmup = 0
        """Bytes that a worker has sent when the warm-up of the second moment ends."""
        self._replay: Callable[[list[Tensor]], list[tuple[Tensor, ...]]] | None = None

    def backward(self, batches: list[Tensor], step: int) -> None:
        if step == self.task.refresh_warmup:
            self.bytes_at_warmup = self.sync.bytes_out
        if self.device != "cpu" and self._replay is None:
            self._replay = self._captured(batches)
        gradients = self._gradients(batches) if self._replay is None else self._replay(batches)
        lr_ratio = self.task.rate_at(max(step - 1, 0)) / self.task.rate_at(step)
        means = self.sync.average(gradients, step, lr_ratio)
        for parameter, mean in zip(self.parameters, means, strict=True):
            parameter.grad = mean

    def _gradients(self, batches: list[Tensor]) -> list[tuple[Tensor, ...]]:
        """Return the gradients of each worker."""
        gradients: list[tuple[Tensor, ...]] = []
        kept: list[Tensor] = []
        for batch in batches:
            gradients.append(torch.autograd.grad(self.loss(self.model, batch), self.parameters))
            # As in DDP, each worker normalises by its own batch, and the buffers of rank 0 count.
            kept = kept or [buffer.clone() for buffer in self.model.buffers()]
        for buffer, first in zip(self.model.buffers(), kept, strict=True):
            buffer.copy_(first)
        return gradients

    def _captured(
        self, batches: list[Tensor]
    ) -> Callable[[list[Tensor]], list[tuple[Tensor, ...]]]:
        """Return `_gradients` as a CUDA graph: a small model waits for its launches otherwise."""
        inputs = [batch.clone() for batch in batches]
        kept = [buffer.clone() for buffer in self.model.buffers()]
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # libraries allocate in their first calls
                self._gradients(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            gradients = self._gradients(inputs)
        for buffer, before in zip(self.model.buffers(), kept, strict=True):
            buffer.copy_(before)

        def replay(batches: list[Tensor]) -> list[tuple[Tensor, ...]]:
            for static, batch in zip(inputs, batches, strict=True):
                static.copy_(batch)
            graph.replay()
            return gradients

        return replay


class RealWorker(Workers):
    """One worker of a run as a rank of torch.distributed: DDP with `hipress.attach`.

    It has the model, batches, rates and optimizer of the virtual worker of its rank. Differences
    remain: gradients are partitioned among several aggregators and rounded in another order, and
    codecs draw the same random numbers for every seed. `PLAIN` is DDP alone.
    """

    def __init__(
        self, expression: str, task: ConvergenceTask, data: Examples, *, seed: int, strategy: str
    ) -> None:
        super().__init__(expression, task, data, seed=seed, num_workers=dist.get_world_size())
        self.rank = dist.get_rank()
        self._ddp = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        is_plain = expression == PLAIN
        codec = None if is_plain else hipress.codec(expression)
        brings_momentum = codec is not None and has_momentum(codec)
        self.optimizer = make_sgd(
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
    data: Examples,
    *,
    seed: int = 0,
    num_workers: int = 4,
    num_points: int = NUM_POINTS,
    form: str = GRADIENT,
    device: str = "cpu",
) -> Run:
    """Train virtual workers with one codec; arguments are those of `Workers` and its `train`.

    `form` is what travels (`hipress.train.forms`); the data must be on the device.
    """
    task.check(data, num_workers)
    workers = VirtualWorkers(
        expression, task, data, seed=seed, num_workers=num_workers, form=form, device=device
    )
    run = workers.train(num_points)
    sync, num_later = workers.sync, task.num_steps - task.refresh_warmup
    later = (sync.bytes_out - workers.bytes_at_warmup) / num_later if num_later > 0 else None
    return replace(
        run,
        form=form,
        bytes_out=sync.bytes_out / task.num_steps,
        bytes_back=sync.bytes_back / task.num_steps,
        bytes_out_later=later,
    )


@contextmanager
def _repeatable() -> Iterator[None]:
    """Use one thread, so that sums, and results, do not depend on the number of threads.

    On a GPU matrices are multiplied in TF32, and convolutions are summed in one order.
    """
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    deterministic = torch.backends.cudnn.deterministic
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.deterministic = True
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.backends.cudnn.deterministic = deterministic


def _cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)


def make_sgd(parameters: list[nn.Parameter], lacks_momentum: list[bool]) -> torch.optim.SGD:
    """Return SGD with momentum, except for parameters that are to have none, or whose codec
    applies it already."""
    groups = [
        {
            "params": [p for p, no in zip(parameters, lacks_momentum, strict=True) if no == kind],
            "momentum": 0.0 if kind else SGD_MOMENTUM,
        }
        for kind in (False, True)
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.0)


def make_adamw(task: ConvergenceTask, parameters: list[nn.Parameter]) -> AdamW:
    """Return the AdamW of a task, whose momentum may travel."""
    return AdamW(
        parameters,
        lr=task.rate,
        betas=task.betas,
        weight_decay=task.weight_decay,
        refresh_warmup=task.refresh_warmup,
    )


def _batches(
    num_examples: int, task: ConvergenceTask, num_workers: int, seed: int, device: str
) -> Iterator[list[Tensor]]:
    """Yield the examples of each worker for each step; every epoch has a new order."""
    generator = torch.Generator().manual_seed(seed)
    together = task.batch * num_workers
    while True:
        order = torch.randperm(num_examples, generator=generator).to(device)
        for start in range(0, num_examples - together + 1, together):
            yield list(torch.split(order[start : start + together], task.batch))
