"""A user's own code by name, `package.module:callable`: finds it, calls it, explains its errors.

The current folder is searched first, as by `python -m`.
"""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hipress.errors import HipressError, UsageError
from hipress.train.tasks import Batch
from hipress.version import docs_url

_log = logging.getLogger("hipress")


def is_own(name: str) -> bool:
    """Return whether a name has the form of a user's own code and not of a table's entry."""
    return ":" in name


def find(what: str, name: str, returns: str) -> Callable[..., Any]:
    """Return the callable of a name.

    Args:
        what: What is named, "model" or "data", for messages.
        name: `package.module:callable`.
        returns: What the callable must return, for messages.
    """
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        dotted = module.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise UsageError(
            f"{what} {name!r} names a file; name its module, as {dotted}:{attribute or 'callable'}."
        )
    if not all(part.isidentifier() for part in f"{module}.{attribute}".split(".")):
        raise UsageError(
            f"{what} {name!r} is not of the form package.module:callable; name a callable that "
            f"returns a {returns}, or a {_ENTRIES[what]} of the table."
        )
    found: Any = _import(what, name, module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(
                f"{what} {name!r}: module {module!r} has no {attribute!r}; name a callable that it "
                "has."
            )
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(
            f"{what} {name!r} is of type {type(found).__name__} and cannot be called; name a "
            f"function or class that returns a {returns}."
        )
    function: Callable[..., Any] = found
    return function


def call(what: str, name: str, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return what the callable of a name returns; its errors become a UsageError."""
    try:
        return function(*args, **options)
    except (Exception, SystemExit) as error:
        raise failure(f"{what} {name!r} failed", error) from error


def failure(said: str, error: BaseException, advice: str = "correct it") -> HipressError:
    """Return a UsageError that says where code of the user's failed; our own errors stay."""
    if isinstance(error, HipressError):
        return error
    _log.debug("%s", said, exc_info=error)
    return UsageError(f"{said}: {_text(error)}{_place(error)}; {advice}.")


def misfit(
    who: str, batch: Batch, error: BaseException, which: str = "its first batch"
) -> HipressError:
    """Return a UsageError for a model that failed on a batch."""
    shapes = ", ".join(str(tuple(part.shape)) for part in batch)
    said = f"{who} failed on {which}, of shapes {shapes}"
    return failure(said, error, f"{docs_url('models')} says what it is called with")


_ENTRIES = {"model": "model", "data": "data set"}


def _import(what: str, name: str, module: str) -> ModuleType:
    folder = str(Path.cwd())
    if sys.path[:1] != [folder]:  # a console script does not search the current folder
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if f"{module}.".startswith(f"{missing}."):
            raise UsageError(
                f"{what} {name!r}: module {missing!r} is neither installed nor in this folder; "
                "correct the name, or run from the folder that holds it."
            ) from error
        raise UsageError(
            f"{what} {name!r}: module {module!r} imports {missing!r}, which is not installed; "
            "install it first."
        ) from error
    except SystemExit as error:
        raise UsageError(
            f"{what} {name!r}: module {module!r} ends the program when it is imported; put its "
            "main part under if __name__ == '__main__'."
        ) from error
    except Exception as error:
        raise failure(f"{what} {name!r}: module {module!r} cannot be imported", error) from error


def _text(error: BaseException) -> str:
    """Return the type of an error and the first line of its text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


def _place(error: BaseException) -> str:
    """Return the last line of a program in the current folder that an error passed, if any."""
    if isinstance(error, SyntaxError):
        return ""  # its text says where
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).is_relative_to(Path.cwd())
        and "site-packages" not in frame.filename
        and not Path(frame.filename).is_relative_to(Path(__file__).parents[1])
    ]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
