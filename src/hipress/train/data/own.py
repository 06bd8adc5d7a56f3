"""Data of the user's own, `package.module:callable`: its batches, and the loss that they define.

    def data():          returns a Dataset of examples, or a pair of them: to train and to test
    def data(batch):     returns one batch of so many examples, for commands that only time steps

An example, and so a batch, has one of these forms:

    (inputs, target)     the model is called with the inputs; its output is compared with the target
    anything else        the model is called with all of it and returns its loss

Inputs are a tensor, model(x), a tuple of tensors, model(*x), or a dictionary, model(**x).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import IterableDataset, default_collate

from hipress.errors import UsageError
from hipress.train.data.base import Data
from hipress.train.tasks import Batch, Draw, LearningTask, cross_entropy
from hipress.train.user_code import call, failure, find

WHAT = "data"
FEW = 2
"""Examples of the batch that shows what batches consist of."""
_STEP = 0x9E3779B97F4A7C15
_HOLDS = "tensors (or numbers), in a pair (inputs, target), a tuple or a dictionary"


@dataclass(frozen=True, kw_only=True)
class OwnSource:
    """What timing needs of the user's data."""

    task: LearningTask
    draw: Draw
    sizes: dict[str, int] = field(default_factory=dict)


class OwnData(Data):
    """A data set of the user's own.

    Each example is read with torch's random numbers seeded by its index and the step, so that
    random transforms are the same in a run that is resumed.
    """

    learning_task: LearningTask

    def __init__(self, name: str, train: Any, test: Any = None) -> None:
        self._train = _checked(name, train)
        self._test = _checked(name, [] if test is None else test, may_be_empty=True)
        classes: Any = getattr(train, "classes", None)  # as data sets of torchvision have
        sizes = {"num_classes": len(classes)} if hasattr(classes, "__len__") else {}
        super().__init__(name, "own", sizes, len(self._train), len(self._test))
        self._form, _ = _take_apart(name, self._read(self._train, [0], 0))
        self.learning_task = _task(self._form)

    def train(self, indices: Tensor, seed: int) -> Batch:
        return self._batch(self._train, indices, seed)

    def test(self, indices: Tensor) -> Batch:
        return self._batch(self._test, indices, 0)

    def draw(self, batch: int, generator: torch.Generator) -> Batch:
        """Return examples drawn at random."""
        indices = torch.randint(self.num_train, (batch,), generator=generator)
        return self.train(indices, generator.initial_seed())

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader process makes the data set itself: not every one can be pickled.
        return open_own, (self.name,)

    def _batch(self, examples: Any, indices: Tensor, seed: int) -> Batch:
        form, batch = _take_apart(self.name, self._read(examples, indices.tolist(), seed))
        if form != self._form:
            raise UsageError(
                f"data {self.name!r} has examples of different forms: {form.about} and "
                f"{self._form.about}; give all of them one form."
            )
        return batch

    def _read(self, examples: Any, indices: list[int], seed: int) -> Any:
        found = []
        for index in indices:
            with _seeded((seed + index * _STEP) % 2**63):
                try:
                    found.append(examples[index])
                except Exception as error:
                    raise failure(f"data {self.name!r} failed on example {index}", error) from error
        try:
            return default_collate(found)
        except Exception as error:
            advice = f"give each example {_HOLDS}, of the same shapes in all examples"
            said = f"examples of data {self.name!r} make no batch"
            raise failure(said, error, advice) from error


def open_own(name: str, paths: tuple[Path, ...] = ()) -> OwnData:
    """Return the user's data set, to train with."""
    if paths:
        raise UsageError(
            f"data {name!r} is your own and takes no path, not {str(paths[0])!r}; leave it out."
        )
    maker = _find(name)
    if _takes_size(maker):
        raise UsageError(
            f"data {name!r} takes an argument, so it makes batches to time a model with; training "
            "needs a callable without arguments that returns a torch.utils.data.Dataset."
        )
    return _data_set(name, maker)


def own_source(name: str) -> OwnSource:
    """Return the user's data, to time a model with."""
    maker = _find(name)
    if not (_takes_size(maker) or _names_size(maker)):
        data = _data_set(name, maker)
        return OwnSource(task=data.learning_task, draw=data.draw, sizes=data.sizes)
    form, _ = _take_apart(name, _ask(name, maker, FEW))
    return OwnSource(task=_task(form), draw=partial(_made, name, maker))


def _find(name: str) -> Callable[..., Any]:
    return find(WHAT, name, "torch.utils.data.Dataset")


def _takes_size(maker: Callable[..., Any]) -> bool:
    """Return whether a callable has an argument without a default: the size of a batch."""
    try:
        inspect.signature(maker).bind()
    except TypeError:
        return True
    except ValueError:  # not every builtin has a signature
        return False
    return False


def _names_size(maker: Callable[..., Any]) -> bool:
    """Return whether a function has an argument `batch`, which may have a default."""
    if not inspect.isfunction(maker):
        return False
    found = inspect.signature(maker).parameters.get("batch")
    return found is not None and found.kind is not found.POSITIONAL_ONLY


def _ask(name: str, maker: Callable[..., Any], size: int) -> Any:
    """Return a batch of so many examples."""
    given = {"batch": size} if _names_size(maker) else {}
    return call(WHAT, name, maker, *([] if given else [size]), **given)


def _data_set(name: str, maker: Callable[..., Any]) -> OwnData:
    with _seeded(0):  # the same examples on all ranks
        found = call(WHAT, name, maker)
    if isinstance(found, tuple):
        if len(found) != 2:
            raise UsageError(
                f"data {name!r} returned {len(found)} values; return a torch.utils.data.Dataset, "
                "or a pair of them, to train and to test."
            )
        return OwnData(name, *found)
    return OwnData(name, found)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed torch's random numbers on the CPU, and put them back afterwards."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def _checked(name: str, found: Any, *, may_be_empty: bool = False) -> Any:
    """Return a data set that has a length and examples by index."""
    wrong = (IterableDataset, Mapping, Tensor, np.ndarray, str, tuple)
    if isinstance(found, wrong) or not all(hasattr(found, n) for n in ("__len__", "__getitem__")):
        raise UsageError(
            f"data {name!r} returned {type(found).__name__}, which is no map-style data set; "
            "return a torch.utils.data.Dataset with a length and examples by index, or take the "
            "size of a batch as an argument and return a batch."
        )
    if not len(found) and not may_be_empty:
        raise UsageError(f"data {name!r} has no examples; return a data set that has some.")
    return found


def _made(name: str, maker: Callable[..., Any], batch: int, generator: torch.Generator) -> Batch:
    """Return a batch of the user's factory, with torch's random numbers seeded."""
    with _seeded(generator.initial_seed()):
        _, found = _take_apart(name, _ask(name, maker, batch))
    if any(part.ndim == 0 or len(part) != batch for part in found):
        shapes = ", ".join(str(tuple(part.shape)) for part in found)
        raise UsageError(
            f"data {name!r} was asked for {batch} examples and returned tensors of shapes "
            f"{shapes}; the first dimension of each must count the examples."
        )
    return found


# --- forms of batches, and their loss -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Form:
    """What the parts of a batch are."""

    keys: tuple[str, ...] | None
    """Names of the inputs; None if they have none."""
    num_inputs: int
    has_target: bool

    @property
    def about(self) -> str:
        """The form in words."""
        inputs = f"{self.num_inputs} tensor(s)" if self.keys is None else ", ".join(self.keys)
        return f"{inputs} {'with' if self.has_target else 'without'} a target"

    def output(self, model: nn.Module, batch: Batch) -> Any:
        """Call the model with the inputs of a batch."""
        inputs = batch[: self.num_inputs]
        if self.keys is None:
            return model(*inputs)
        return model(**dict(zip(self.keys, inputs, strict=True)))


def _take_apart(name: str, found: Any) -> tuple[_Form, Batch]:
    """Return the form of a batch and its tensors, the target last."""
    has_target = isinstance(found, tuple | list) and len(found) == 2
    inputs, *targets = found if has_target else (found,)
    keys = None
    if isinstance(inputs, Mapping):
        keys, parts = tuple(map(str, inputs)), [*inputs.values(), *targets]
    else:
        parts = [*(inputs if isinstance(inputs, tuple | list) else (inputs,)), *targets]
    if len(parts) == has_target:
        raise UsageError(f"a batch of data {name!r} is empty; it must hold {_HOLDS}.")
    for part in parts:
        if not isinstance(part, Tensor):
            kind = type(part).__name__
            if isinstance(part, tuple | list) and part:
                kind += f" of {type(part[0]).__name__}"
            raise UsageError(f"a batch of data {name!r} holds a {kind}; it must hold {_HOLDS}.")
    form = _Form(keys=keys, num_inputs=len(parts) - has_target, has_target=has_target)
    return form, tuple(parts)


def _task(form: _Form) -> LearningTask:
    return LearningTask(
        name="own",
        unit="examples",
        forward=partial(_forward, form),
        num_units=_num_examples,
        targets=-1,
    )


def _num_examples(batch: Batch) -> int:
    return len(batch[0])


def _forward(form: _Form, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """Return the loss, and the logits if targets are integers."""
    output = form.output(model, batch)
    loss = _field(output, "loss")
    if loss is None and not form.has_target:
        loss = _only_scalar(output)
    if loss is not None:
        return loss, None
    if not form.has_target:
        raise UsageError(
            f"the model returned {_about(output)}, in which there is no loss, and the data has no "
            "target; return a scalar or an object with .loss, or give pairs (inputs, target)."
        )
    target, found = batch[-1], _field(output, "logits")
    predicted = output if found is None else found
    if not isinstance(predicted, Tensor):
        raise UsageError(
            f"the model returned {_about(output)}, which cannot be compared with a target; return "
            "a tensor, or an object with .loss or .logits."
        )
    if target.is_floating_point():
        return _squared_error(predicted, target), None
    logits = _classes_last(predicted, target)
    return cross_entropy(logits, target.long()), logits


def _field(output: Any, name: str) -> Tensor | None:
    if isinstance(output, Mapping):
        found = output.get(name)
    else:
        found = getattr(output, name, None)
    return found if isinstance(found, Tensor) else None


def _only_scalar(output: Any) -> Tensor | None:
    """Return the output if it is a scalar, or the only scalar of a tuple of outputs."""
    parts = output if isinstance(output, tuple | list) else (output,)
    found = [part for part in parts if isinstance(part, Tensor) and part.ndim == 0]
    return found[0] if len(found) == 1 else None


def _about(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    return f"a {type(output).__name__}"


def _squared_error(predicted: Tensor, target: Tensor) -> Tensor:
    if predicted.numel() != target.numel() or predicted.shape[:1] != target.shape[:1]:
        raise UsageError(
            f"the model returned {_about(predicted)} for targets of shape {tuple(target.shape)}; "
            "floating-point targets get the mean squared error, for which both must have one shape."
        )
    return functional.mse_loss(predicted.reshape(target.shape), target.to(predicted.dtype))


def _classes_last(logits: Tensor, target: Tensor) -> Tensor:
    """Return logits of shape (*target, classes); they may be of (batch, classes, *rest) too."""
    if logits.ndim == target.ndim + 1 and logits.ndim > 1:
        if logits.shape[:-1] == target.shape and logits.shape[-1] > 1:
            return logits
        if (logits.shape[0], *logits.shape[2:]) == tuple(target.shape) and logits.shape[1] > 1:
            return logits.movedim(1, -1)
    raise UsageError(
        f"the model returned {_about(logits)} for integer targets of shape {tuple(target.shape)}; "
        "integer targets get the cross entropy, which needs one more dimension, the classes, last "
        "or second."
    )
