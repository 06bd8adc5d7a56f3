"""The data sets of the training jobs, by name: digits, synthetic data, and the user's own files.

Nothing is downloaded. To add a data set, write how to open it and add it to the table below. A name
with a colon is code of the user's own (`own.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hipress import settings
from hipress.errors import UsageError, did_you_mean
from hipress.train.data.base import Data
from hipress.train.data.image_folder import open_imagefolder
from hipress.train.data.images import (
    DataSet,
    load,
    open_cifar100,
    open_digits,
    open_fashion_mnist,
)
from hipress.train.data.own import open_own
from hipress.train.data.synthetic import Synthetic
from hipress.train.data.text import Characters, open_parallel_text, open_text
from hipress.train.tasks import Draw
from hipress.train.user_code import is_own

__all__ = ["NAMES", "TOKENS", "Characters", "Data", "DataSet", "load", "open_data", "usage"]

TOKENS = ("bytes", "words")


@dataclass(frozen=True, kw_only=True)
class _Entry:
    open: Callable[..., Data]
    """Takes the paths, and those arguments of `open_data` that its signature names."""
    tasks: tuple[str, ...]
    """Tasks that the data set has batches for; the first one is the default."""
    has: str
    """Its contents, to complete the sentence "it has ..."."""
    paths: tuple[str, ...] = ()
    """The paths that the user gives after the name."""
    num_optional: int = 0
    options: tuple[str, ...] = ()
    """Those of --side and --tokens that apply to it."""


_NEEDS = {
    "classify": "images with labels",
    "language": "text",
    "masked": "text",
    "translate": "pairs of lines",
    "style": "images of two domains",
}


def _open_fashion_mnist(folder: Path | None = None, *, least_side: int | None) -> Data:
    folder = folder or settings.fashion_mnist()
    if folder is None:
        raise UsageError(
            f"fashion-mnist takes one folder and none is given; write {usage('fashion-mnist')} or "
            "set HIPRESS_FASHION_MNIST."
        )
    return open_fashion_mnist(folder, least_side)


def _open_synthetic(
    *, draw: Draw | None, task: str, seed: int, side: int | None, length: int | None
) -> Data:
    if draw is None:
        raise UsageError(
            "synthetic data is drawn by the model, and this model has no data of its own; choose "
            f"{_choices(usage(name) for name in NAMES if name != 'synthetic')}."
        )
    found = Synthetic(draw, task=task, seed=seed)
    for option, given, own in (("--side", side, found.side), ("--length", length, found.length)):
        if given not in (None, own):
            raise UsageError(
                f"{option} is {given} and the synthetic data of this model has {own or 'none'}; "
                "leave it out."
            )
    return found


_TABLE = {
    "digits": _Entry(open=open_digits, tasks=("classify",), has="images with labels"),
    "synthetic": _Entry(open=_open_synthetic, tasks=tuple(_NEEDS), has="made-up data"),
    "fashion-mnist": _Entry(
        open=_open_fashion_mnist,
        tasks=("classify",),
        has="images with labels",
        paths=("DIR",),
        num_optional=1,
    ),
    "cifar100": _Entry(
        open=open_cifar100,
        tasks=("classify",),
        has="images with labels",
        paths=("DIR",),
    ),
    "imagefolder": _Entry(
        open=open_imagefolder,
        tasks=("classify", "style"),
        has="image files",
        paths=("DIR",),
        options=("--side",),
    ),
    "text": _Entry(
        open=open_text,
        tasks=("language", "masked"),
        has="one text",
        paths=("FILE",),
        options=("--tokens",),
    ),
    "parallel-text": _Entry(
        open=open_parallel_text,
        tasks=("translate",),
        has="pairs of lines",
        paths=("SOURCE", "TARGET"),
        options=("--tokens",),
    ),
}

_TAKES = {
    (): "no path",
    ("DIR",): "one folder",
    ("FILE",): "one file",
    ("SOURCE", "TARGET"): "two files",
}
NAMES = tuple(_TABLE)


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
    """Open a data set by name.

    Args:
        name: One of `NAMES`, or the user's own as package.module:callable, which ignores all below.
        paths: The folder or files of the data set.
        task: Task of the model; None selects the first task of the data set.
        draw: Draws synthetic data for the model.
        least_side: The smallest image side that the model takes; smaller images are enlarged.
        side: Side of the images of imagefolder in pixels, 224 if None; synthetic images always have
            that of the model.
        length: Tokens of an example of text, 128 if None; synthetic text always has that of the
            model, and images ignore it.
        tokens: Kind of tokens of a text, "bytes" or "words".
        seed: Seed of synthetic data.

    Example:
        >>> digits = open_data("digits")
        >>> digits.num_train, digits.num_test, digits.sizes
        (1200, 597, {'num_classes': 10})
    """
    if is_own(name):
        return open_own(name, tuple(paths))
    entry = _entry(name)
    if task is not None and task not in entry.tasks:
        choices = _choices(usage(other) for other, row in _TABLE.items() if task in row.tasks)
        raise UsageError(
            f"the model trains on {_NEEDS[task]} and {name} has {entry.has}; choose {choices}."
        )
    if not len(entry.paths) - entry.num_optional <= len(paths) <= len(entry.paths):
        given = ", ".join(repr(str(path)) for path in paths)
        found = f", not {given}" if given else " and none is given"
        raise UsageError(f"{name} takes {_TAKES[entry.paths]}{found}; write {usage(name)}.")
    if tokens not in TOKENS:
        raise UsageError(f"--tokens {tokens!r} is none of {', '.join(TOKENS)}; choose one.")
    _check_options(name, side, tokens)
    for option, value, least in (("--side", side, 1), ("--length", length, 2)):
        if value is not None and value < least:
            raise UsageError(f"{option} is {value}; it must be {least} or more.")
    arguments = {
        "task": task or entry.tasks[0],
        "draw": draw,
        "least_side": least_side,
        "side": side,
        "length": length,
        "tokens": tokens,
        "seed": seed,
    }
    taken = inspect.signature(entry.open).parameters
    return entry.open(*map(Path, paths), **{k: v for k, v in arguments.items() if k in taken})


def _check_options(name: str, side: int | None, tokens: str) -> None:
    """Raise a UsageError for an option that the data set would ignore."""
    given = {"--side": side is not None and name != "synthetic", "--tokens": tokens != "bytes"}
    for option, is_given in given.items():
        if is_given and option not in _TABLE[name].options:
            takers = [other for other, row in _TABLE.items() if option in row.options]
            raise UsageError(f"{option} is for {' and '.join(takers)}; leave it out.")


def usage(name: str) -> str:
    """Return the options that select a data set on the command line.

    Example:
        >>> usage("text")
        '--data text FILE'
    """
    return " ".join(["--data", name, *_TABLE[name].paths])


def _entry(name: str) -> _Entry:
    if name in _TABLE:
        return _TABLE[name]
    hint = did_you_mean(name.lower(), NAMES)
    raise UsageError(
        f"no data set {name!r}{hint}; there are: {', '.join(NAMES)}; choose one, or "
        "name your own as package.module:callable."
    )


def _choices(choices: Iterable[str]) -> str:
    return f"{', '.join(choices)} or your own, --data package.module:callable"
