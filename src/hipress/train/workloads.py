"""The trainings of the convergence benchmark: model, data, optimizer and learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn

from hipress import settings
from hipress.errors import UsageError
from hipress.torch.optim import REFRESH_WARMUP
from hipress.train import data as data_sets
from hipress.train.data import Characters, DataSet
from hipress.train.models.resnet import resnet
from hipress.train.models.transformers import Gpt
from hipress.train.models.vgg import cnn

Examples = DataSet | Characters
"""What is trained on: numbered training examples, and a test that is always the same."""

DATA_OF = {
    "mlp": ("digits", "fashion-mnist"),
    "cnn": ("fashion-mnist", "digits"),
    "resnet": ("fashion-mnist",),
    "gpt": ("tiny-shakespeare",),
}
"""The data sets of each model."""


@dataclass(frozen=True, kw_only=True)
class GptSizes:
    """The sizes of a GPT; its vocabulary is that of the text."""

    context: int = 128
    width: int = 384
    num_layers: int = 6
    num_heads: int = 6


@dataclass(frozen=True, kw_only=True)
class ConvergenceTask:
    """The training that is the same for every codec."""

    data: str
    model: str = "mlp"
    optimizer: str = "sgd"
    """sgd, with momentum; plain-sgd, without; or adamw."""
    widths: tuple[int, ...] = ()
    """Hidden units of a perceptron."""
    gpt: GptSizes = field(default_factory=GptSizes)
    num_steps: int
    batch: int
    """Examples per worker and step."""
    rate: float
    """Learning rate at the start, or after the warm-up; it falls along half a cosine."""
    last_rate: float = 0.0
    """The learning rate at the end, as a share of `rate`."""
    warmup: int = 0
    """Steps in which the rate grows linearly."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float = 0.0
    """Largest norm of what the optimizer is given; 0 if it is not clipped."""
    refresh_warmup: int = REFRESH_WARMUP
    """First steps that all refresh the second moment, where momentum travels."""

    @property
    def name(self) -> str:
        """Data, and the model and optimizer if they are not the perceptron and SGD."""
        if (self.model, self.optimizer) == ("mlp", "sgd"):
            return self.data
        return f"{self.model} on {self.data} with {self.optimizer}"

    @property
    def metric(self) -> str:
        """What is measured: the accuracy in percent, or the loss of a language model."""
        return "loss" if self.model == "gpt" else "accuracy"

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, above zero for each."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        share = (step - self.warmup) / (self.num_steps - self.warmup)
        falling = 0.5 * (1 + math.cos(math.pi * share))
        return self.rate * (self.last_rate + (1 - self.last_rate) * falling)

    def check(self, data: Examples, num_workers: int) -> None:
        """Raise a UsageError if the batches of all workers exceed the data."""
        together = self.batch * num_workers
        if together > data.num_train:
            raise UsageError(
                f"{num_workers} workers take {together} {data.unit} in a step and {self.data} has "
                f"{data.num_train}; use at most {data.num_train // self.batch}."
            )


TASKS = {
    name: ConvergenceTask(data=name, widths=(256, 128), num_steps=steps, batch=16, rate=0.05)
    for name, steps in (("digits", 1000), ("fashion-mnist", 3000))
}
"""Tasks of the perceptron by the name of the data set.

The rate was chosen with uncompressed runs only, here and below; the number of steps by the time
that runs take.
"""
PLAIN_SGD = "plain-sgd"
PLAIN_SGD_RATE = 0.25
"""The rate of the perceptron without momentum."""

_IMAGES = ConvergenceTask(data="fashion-mnist", num_steps=1500, batch=32, rate=0.05)
_ADAMW = replace(_IMAGES, optimizer="adamw", rate=0.002, weight_decay=0.05, warmup=100)
LARGER = {
    ("cnn", "sgd"): replace(_IMAGES, model="cnn"),
    ("cnn", "adamw"): replace(_ADAMW, model="cnn", rate=0.001),
    ("resnet", "sgd"): replace(_IMAGES, model="resnet"),
    ("resnet", "adamw"): replace(_ADAMW, model="resnet"),
    ("gpt", "adamw"): ConvergenceTask(
        data="tiny-shakespeare",
        model="gpt",
        optimizer="adamw",
        num_steps=1000,
        batch=16,
        rate=1e-3,
        last_rate=0.1,
        warmup=100,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        clip=1.0,
    ),
}
"""Tasks of the other models, by model and optimizer."""


def task(data: str, model: str = "mlp", optimizer: str = "sgd") -> ConvergenceTask:
    """Return a task; raise a UsageError if there is none of this kind."""
    optimizers = optimizers_of(model)
    if data not in DATA_OF[model]:
        raise UsageError(f"no data set {data!r}; there are: {', '.join(DATA_OF[model])}.")
    if optimizer not in optimizers:
        raise UsageError(
            f"--optimizer {optimizer!r} is not one that {model} is trained with here; choose "
            f"{' or '.join(optimizers)}."
        )
    if model == "mlp":
        found = TASKS[data]
        if optimizer == PLAIN_SGD:
            found = replace(found, optimizer=optimizer, rate=PLAIN_SGD_RATE)
        return found
    found = LARGER[model, optimizer]
    return found if data == found.data else replace(found, data=data, num_steps=300, batch=8)


def optimizers_of(model: str) -> list[str]:
    """Return the optimizers that a model is trained with, the usual one first."""
    if model not in DATA_OF:
        raise UsageError(f"--model {model!r} is none of {', '.join(DATA_OF)}; choose one.")
    return (
        ["sgd", PLAIN_SGD] if model == "mlp" else [name for other, name in LARGER if other == model]
    )


def load(task: ConvergenceTask, folder: Path | None, device: str = "cpu") -> Examples:
    """Return the data of a task, on a device; the last one is kept in memory."""
    return _loaded(task.data, task.model, task.gpt.context, folder, device)


@lru_cache(maxsize=1)
def _loaded(name: str, model: str, context: int, folder: Path | None, device: str) -> Examples:
    if model == "gpt":
        return Characters.read(folder or settings.tiny_shakespeare(), context).to(device)
    found = data_sets.load(name, folder)
    return replace(found, has_channels=model != "mlp").to(device)


def make_model(task: ConvergenceTask, data: Examples, seed: int) -> nn.Module:
    """Return the model of a task, on the CPU; its first weights depend on the seed only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(data, Characters):
            return Gpt(vocabulary=data.vocabulary, **vars(task.gpt))
        num_classes = int(data.train_labels.max()) + 1
        if task.model == "cnn":
            return cnn(num_classes)
        if task.model == "resnet":  # 0.7M parameters
            return resnet((2, 2, 2), is_bottleneck=False, num_classes=num_classes, width=32)
        sizes = [data.train_images.shape[1], *task.widths, num_classes]
        layers: list[nn.Module] = []
        for size_in, size_out in zip(sizes, sizes[1:], strict=False):
            layers += [nn.Linear(size_in, size_out), nn.ReLU()]
        return nn.Sequential(*layers[:-1])
