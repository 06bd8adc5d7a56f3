"""The exception tree: catch `HipressError` to catch everything this package raises on purpose.

    HipressError
      + UsageError (ValueError)               a bad argument, setting or codec expression
      + ProgramError                          a CompLL program that cannot be compiled
      + FrameError (ValueError)               a frame that is refused before any field is used
      + MissingDependencyError (ImportError)  an optional package that is not installed
      + BackendError (RuntimeError)           a backend that cannot do what was asked
      + AgreementError (RuntimeError)         ranks whose codec, plan or model differ
      + PeerError (RuntimeError)              a rank that is gone, late or sends bad messages
      + LabError (RuntimeError)               an emulated cluster, or a job in it, that failed
      + TrainingError (RuntimeError)          a training run that cannot continue

A message is one sentence that names the value, the rule, the choices and the next step. Errors are
pickled when they cross process boundaries; `__reduce__` exists where arguments are keyword-only.
"""

import difflib
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

__all__ = [
    "AgreementError",
    "BackendError",
    "FrameError",
    "HipressError",
    "LabError",
    "MissingDependencyError",
    "PeerError",
    "ProgramError",
    "TrainingError",
    "UsageError",
]


def did_you_mean(value: str, choices: Iterable[str]) -> str:
    """Return a hint for a message that refuses a value; empty if no choice is similar.

    Example:
        >>> did_you_mean("onebitt", ["onebit", "topk"])
        " (did you mean 'onebit'?)"
    """
    near = difflib.get_close_matches(value, list(choices), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def install_command(*packages: str) -> str:
    """Return the command that adds optional packages, for a message.

    It names the packages and not an extra of hipress, so that it works wherever hipress itself
    came from: PyPI, a wheel or a clone.

    Example:
        >>> install_command("matplotlib", "pyroute2")
        'pip install matplotlib pyroute2'
    """
    return f"pip install {' '.join(packages)}"


def public(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a `HipressError` that leaves a public function show its sentence and not our frames.

    The traceback of a script then has the user's line, one line of HiPress and the sentence. With
    HIPRESS_LOG=debug it keeps all frames and the cause.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except HipressError as error:
            from hipress import settings  # which needs this module

            if settings.LOG.text().lower() == "debug":
                raise
            raise error.with_traceback(None) from None

    return call


class HipressError(Exception):
    """The base class of every error that HiPress raises on purpose."""


class UsageError(HipressError, ValueError):
    """User input breaks a rule: an argument, a setting, a codec expression."""


class ProgramError(HipressError):
    """An error in a CompLL program, with the place in the source where it was found.

    Args:
        file: Name of the program as the user gave it.
        line: Line of the error, from 1.
        column: Column of the error in characters, from 1.
        source_line: Text of that line, without its line end; empty when there is none to show.
        message: What was found and what is allowed, without the place.
    """

    def __init__(
        self, *, file: str, line: int, column: int, source_line: str, message: str
    ) -> None:
        super().__init__(message)
        self.file = file
        self.line = line
        self.column = column
        self.source_line = source_line
        self.message = message

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}:{self.column}: {self.message}"
        excerpt = _excerpt(self.source_line, self.column)
        return f"{place}\n{excerpt}" if excerpt else place

    def __reduce__(self) -> tuple[object, ...]:
        names = ("file", "line", "column", "source_line", "message")
        return partial(ProgramError, **{name: getattr(self, name) for name in names}), ()


class FrameError(HipressError, ValueError):
    """A frame is foreign, cut short, too long, or has a field out of range."""


class MissingDependencyError(HipressError, ImportError):
    """An optional package is needed and is not installed.

    Args:
        package: Name of the missing package, as pip knows it.
        extra: The extra of hipress that brings it.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"package {package!r} is needed here and is not installed; "
            f"add it with: {install_command(package)}"
        )
        self.package = package
        self.extra = extra

    def __reduce__(self) -> tuple[object, ...]:
        return (MissingDependencyError, (self.package, self.extra))


class BackendError(HipressError, RuntimeError):
    """A backend that is not available, or that cannot run what it was given."""


class _RanksError(HipressError, RuntimeError):
    """An error that names ranks.

    Args:
        message: What happened, and on which ranks.
        ranks: The ranks at fault, if they are known.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), str(self), ranks=self.ranks), ()


class AgreementError(_RanksError):
    """Ranks differ in what must be the same: codec, plan, tensors, versions.

    `ranks` are those that differ from rank 0.
    """


class PeerError(_RanksError):
    """A rank is gone, late, or sent messages that were not expected."""


class LabError(HipressError, RuntimeError):
    """An emulated cluster cannot be built here, or a job in it failed or took too long."""


class TrainingError(HipressError, RuntimeError):
    """A training run cannot continue, for example because its loss is not finite."""


def _excerpt(source_line: str, column: int) -> str:
    """Return the source line, its indent replaced by four spaces, over a caret at `column`."""
    text = source_line.lstrip()
    if not text:
        return ""
    before = text[: max(column - 1 - (len(source_line) - len(text)), 0)]
    # Tabs stay tabs in the line of the caret: only the terminal knows how wide they are.
    padding = "".join("\t" if char == "\t" else " " for char in before)
    # A program may come from a stranger: no escape sequence reaches the terminal.
    shown = "".join(char if char.isprintable() or char == "\t" else "?" for char in text.rstrip())
    return f"    {shown}\n    {padding}^"
