"""Models of the user's own, named by the place of what makes them: `package.module:callable`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from hipress.errors import UsageError
from hipress.train.models.base import Model

BATCH = 32
"""Examples per rank and step: the user's model says nothing of that."""


def custom(name: str) -> Model:
    """The line of a model that is not in the table.

    Args:
        name: Module and callable, a colon between. The module is also looked for in the working
            folder. The callable gets those of the data's sizes (num_classes, vocabulary) that its
            signature takes, and returns a module.

    Raises:
        UsageError: There is no such callable.
    """
    place, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in f"{place}.{attribute}".split(".")):
        raise UsageError(
            f"model {name!r} is not of the form package.module:callable; name a callable that "
            "returns a torch.nn.Module, or a model of the table."
        )
    maker: Any = _imported(name, place)
    for part in attribute.split("."):
        if not hasattr(maker, part):
            raise UsageError(
                f"model {name!r}: module {place!r} has no {attribute!r}; name a callable that it "
                "has."
            )
        maker = getattr(maker, part)
    if not callable(maker):
        raise UsageError(
            f"model {name!r} is of type {type(maker).__name__} and can not be called; name a "
            "function or class that returns a torch.nn.Module."
        )
    return Model(
        about=f"the model {name!r}",
        num_parameters=0,
        published="yours",
        batch=BATCH,
        task=None,
        build=lambda **sizes: _built(name, maker, sizes),
        draw=None,
    )


def _imported(name: str, place: str) -> ModuleType:
    # A console script does not look there by itself; at the end, so that nothing is hidden by it.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or place
        if f"{place}.".startswith(f"{missing}."):
            raise UsageError(
                f"model {name!r}: module {missing!r} is neither installed nor in this folder; "
                "correct the name, or run from the folder that holds it."
            ) from error
        raise UsageError(
            f"model {name!r}: module {place!r} imports {missing!r}, which is not installed; "
            "install it first."
        ) from error


def _built(name: str, maker: Callable[..., Any], sizes: dict[str, int]) -> nn.Module:
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
            f"model {name!r} can not be called with what this data gives ({offered}): {error}; "
            "give its other arguments defaults."
        ) from error
    built = maker(**given)
    if not isinstance(built, nn.Module):
        raise UsageError(
            f"model {name!r} returned {type(built).__name__} and not a torch.nn.Module; name a "
            "callable that does."
        )
    return built
