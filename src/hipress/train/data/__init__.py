"""The data sets of the training jobs, by name: digits, made-up data, and files of the user's.

Nothing is downloaded. To add one, write its module and add a line to the table below.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hipress import settings
from hipress.errors import UsageError
from hipress.train.data.base import Data
from hipress.train.data.cifar100 import open_cifar100
from hipress.train.data.digits import open_digits
from hipress.train.data.fashion_mnist import open_fashion_mnist
from hipress.train.data.imagefolder import open_imagefolder
from hipress.train.data.parallel_text import open_parallel_text
from hipress.train.data.rows import DataSet, load
from hipress.train.data.synthetic import Draw, Synthetic
from hipress.train.data.text import open_text

__all__ = ["NAMES", "TOKENS", "Data", "DataSet", "Draw", "load", "open_data", "usage"]

TOKENS = ("bytes", "words")
"""What a token of a text may be."""


@dataclass(frozen=True, kw_only=True)
class _Request:
    """What `open_data` was asked for."""

    paths: tuple[Path, ...]
    task: str
    draw: Draw | None
    least_side: int | None
    side: int | None
    length: int | None
    tokens: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class _Line:
    """One line of the table."""

    open: Callable[[_Request], Data]
    tasks: tuple[str, ...]
    """Those it has batches for; the first one where the model does not say."""
    has: str
    """What it has, to complete the sentence "it has ..."."""
    paths: tuple[str, ...] = ()
    """What the user gives after the name."""
    takes: str = "no path"
    """The same in words."""
    num_optional: int = 0
    """How many of the paths may be missing."""
    options: tuple[str, ...] = ()
    """Those of --side and --tokens that it takes."""


_NEEDS = {
    "classify": "images with labels",
    "language": "text",
    "masked": "text",
    "translate": "pairs of lines",
    "style": "images of two domains",
}
"""Task: what is needed for it."""


def _open_fashion_mnist(request: _Request) -> Data:
    folder = request.paths[0] if request.paths else settings.fashion_mnist()
    if folder is None:
        raise UsageError(
            f"fashion-mnist takes one folder and none is given; write {usage('fashion-mnist')} or "
            "set HIPRESS_FASHION_MNIST."
        )
    return open_fashion_mnist(folder, request.least_side)


def _open_synthetic(request: _Request) -> Data:
    if request.draw is None:
        raise UsageError(
            "synthetic data is drawn by the model, and this model has no data of its own; choose "
            f"{_listed(usage(name) for name in NAMES if name != 'synthetic')}."
        )
    found = Synthetic(request.draw, task=request.task, seed=request.seed)
    for option, given, own in (
        ("--side", request.side, found.side),
        ("--length", request.length, found.length),
    ):
        if given not in (None, own):
            raise UsageError(
                f"{option} is {given} and the synthetic data of this model has {own or 'none'}; "
                "leave it out."
            )
    return found


_TABLE = {
    "digits": _Line(
        open=lambda request: open_digits(request.least_side),
        tasks=("classify",),
        has="images with labels",
    ),
    "synthetic": _Line(open=_open_synthetic, tasks=tuple(_NEEDS), has="made-up data"),
    "fashion-mnist": _Line(
        open=_open_fashion_mnist,
        tasks=("classify",),
        has="images with labels",
        paths=("DIR",),
        takes="one folder",
        num_optional=1,
    ),
    "cifar100": _Line(
        open=lambda request: open_cifar100(request.paths[0], request.least_side),
        tasks=("classify",),
        has="images with labels",
        paths=("DIR",),
        takes="one folder",
    ),
    "imagefolder": _Line(
        open=lambda request: open_imagefolder(
            request.paths[0],
            task=request.task,
            side=request.side,
            least_side=request.least_side,
        ),
        tasks=("classify", "style"),
        has="image files",
        paths=("DIR",),
        takes="one folder",
        options=("--side",),
    ),
    "text": _Line(
        open=lambda request: open_text(
            request.paths[0], task=request.task, length=request.length, tokens=request.tokens
        ),
        tasks=("language", "masked"),
        has="one text",
        paths=("FILE",),
        takes="one file",
        options=("--tokens",),
    ),
    "parallel-text": _Line(
        open=lambda request: open_parallel_text(
            *request.paths, length=request.length, tokens=request.tokens
        ),
        tasks=("translate",),
        has="pairs of lines",
        paths=("SOURCE", "TARGET"),
        takes="two files",
        options=("--tokens",),
    ),
}

NAMES = tuple(_TABLE)
"""The data sets that `open_data` knows."""


def open_data(
    name: str,
    paths: Sequence[Path] = (),
    *,
    task: str | None = None,
    draw: Draw | None = None,
    least_side: int | None = None,
    side: int | None = None,
    length: int | None = None,
    tokens: str = "bytes",
    seed: int = 0,
) -> Data:
    """A data set by name.

    Args:
        name: One of `NAMES`.
        paths: The folder or files that it takes.
        task: Of the model; None if it has none, for the first that the data set is for.
        draw: Of the model, which draws synthetic data.
        least_side: The smallest image side that the model takes; smaller images are enlarged.
        side: Of the images of imagefolder in pixels, 224 if None; synthetic images have that of
            the model and no other.
        length: Tokens of an example of text, 128 if None; synthetic text has that of the model and
            no other, and images do not mind it.
        tokens: What a token of a text is, "bytes" or "words".
        seed: Of synthetic data.

    Raises:
        UsageError: There is no such data set, it is not for this task, it has no such option, or
            its files are missing, damaged or of another kind.
        MissingDependencyError: A package that is needed to read it is not installed.

    Example:
        >>> digits = open_data("digits")
        >>> digits.num_train, digits.num_test, digits.sizes
        (1200, 597, {'num_classes': 10})
    """
    line = _line(name)
    if task is not None and task not in line.tasks:
        choices = _listed(usage(other) for other, row in _TABLE.items() if task in row.tasks)
        raise UsageError(
            f"the model trains on {_NEEDS[task]} and {name} has {line.has}; choose {choices}."
        )
    if not len(line.paths) - line.num_optional <= len(paths) <= len(line.paths):
        given = ", ".join(repr(str(path)) for path in paths)
        found = f", not {given}" if given else " and none is given"
        raise UsageError(f"{name} takes {line.takes}{found}; write {usage(name)}.")
    if tokens not in TOKENS:
        raise UsageError(f"--tokens {tokens!r} is none of {', '.join(TOKENS)}; choose one.")
    _check_options(name, side, tokens)
    for option, value, least in (("--side", side, 1), ("--length", length, 2)):
        if value is not None and value < least:
            raise UsageError(f"{option} is {value}; it must be {least} or more.")
    request = _Request(
        paths=tuple(map(Path, paths)),
        task=task or line.tasks[0],
        draw=draw,
        least_side=least_side,
        side=side,
        length=length,
        tokens=tokens,
        seed=seed,
    )
    return line.open(request)


def _check_options(name: str, side: int | None, tokens: str) -> None:
    """Refuse what the data set would ignore."""
    given = {"--side": side is not None and name != "synthetic", "--tokens": tokens != "bytes"}
    for option, is_given in given.items():
        if is_given and option not in _TABLE[name].options:
            takers = [other for other, row in _TABLE.items() if option in row.options]
            raise UsageError(f"{option} is for {' and '.join(takers)}; leave it out.")


def usage(name: str) -> str:
    """How a user writes a data set.

    Example:
        >>> usage("text")
        '--data text FILE'
    """
    return " ".join(["--data", name, *_TABLE[name].paths])


def _line(name: str) -> _Line:
    if name in _TABLE:
        return _TABLE[name]
    near = difflib.get_close_matches(name.lower(), NAMES, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise UsageError(f"no data set {name!r}{hint}; there are: {', '.join(NAMES)}; choose one.")


def _listed(choices: Iterable[str]) -> str:
    *first, last = choices
    return f"{', '.join(first)} or {last}" if first else last
