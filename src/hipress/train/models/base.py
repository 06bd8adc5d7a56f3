"""The description of a model: how to build it, which task it learns, how large it is."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from hipress.errors import UsageError
from hipress.train.tasks import Batch, Draw

CUSTOM_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model of the table, or one of the user's own."""

    about: str
    """One line for the manual."""
    num_parameters: int
    """Number of parameters of `build()`; 0 if only building the model tells."""
    published: str = "ours"
    """Source of that number."""
    batch: int
    """Examples per rank and step, unless the user gives another number."""
    task: str | None
    """Key in `hipress.train.tasks.TASKS`; None if the data decides."""
    build: Callable[..., nn.Module]
    """Builds the model, with weights from torch's global generator, from the sizes of its task
    (num_classes or vocabulary)."""
    draw: Draw | None
    least_side: int | None = None
    side: int | None = None
    """Image side of the synthetic data, and of folders of images."""
    length: int | None = None
    """Tokens in a sequence, unless the user gives another number."""
    is_hidden: bool = False
    """Whether the model is left out of lists: a test model or an old name."""

    def make(self, seed: int = 0, **sizes: int) -> nn.Module:
        """Return the model with weights that depend on the seed only."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build(**sizes)

    def data(self, rank: int, batch: int | None = None) -> Batch:
        """Return one batch of synthetic data, different on every rank."""
        if self.draw is None:
            raise UsageError(
                f"there is no made-up data for {self.about}; name a model of the table, or train "
                "this one with data of its own."
            )
        return self.draw(batch or self.batch, torch.Generator().manual_seed(rank))


def custom(name: str) -> Model:
    """Return the description of a user's own model, `package.module:callable`.

    The module may also be in the working folder. The callable gets those sizes of the data
    (num_classes, vocabulary) that its signature takes, and returns a torch.nn.Module.
    """
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in f"{module}.{attribute}".split(".")):
        raise UsageError(
            f"model {name!r} is not of the form package.module:callable; name a callable that "
            "returns a torch.nn.Module, or a model of the table."
        )
    maker: Any = _import(name, module)
    for part in attribute.split("."):
        if not hasattr(maker, part):
            raise UsageError(
                f"model {name!r}: module {module!r} has no {attribute!r}; name a callable that it "
                "has."
            )
        maker = getattr(maker, part)
    if not callable(maker):
        raise UsageError(
            f"model {name!r} is of type {type(maker).__name__} and cannot be called; name a "
            "function or class that returns a torch.nn.Module."
        )
    return Model(
        about=f"the model {name!r}",
        num_parameters=0,
        published="yours",
        batch=CUSTOM_BATCH,
        task=None,
        build=lambda **sizes: _build_custom(name, maker, sizes),
        draw=None,
    )


def _import(name: str, module: str) -> ModuleType:
    # A console script does not search the working folder; at the end of the path it hides nothing.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if f"{module}.".startswith(f"{missing}."):
            raise UsageError(
                f"model {name!r}: module {missing!r} is neither installed nor in this folder; "
                "correct the name, or run from the folder that holds it."
            ) from error
        raise UsageError(
            f"model {name!r}: module {module!r} imports {missing!r}, which is not installed; "
            "install it first."
        ) from error


def _build_custom(name: str, maker: Callable[..., Any], sizes: dict[str, int]) -> nn.Module:
    try:
        signature = inspect.signature(maker)
    except ValueError:  # not every builtin has one
        signature = inspect.Signature()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    given = {key: size for key, size in sizes.items() if takes_all or key in signature.parameters}
    try:
        signature.bind(**given)
    except TypeError as error:
        offered = ", ".join(sizes) or "nothing"
        raise UsageError(
            f"model {name!r} cannot be called with what this data gives ({offered}): {error}; "
            "give its other arguments defaults."
        ) from error
    built = maker(**given)
    if not isinstance(built, nn.Module):
        raise UsageError(
            f"model {name!r} returned {type(built).__name__} and not a torch.nn.Module; name a "
            "callable that does."
        )
    return built
