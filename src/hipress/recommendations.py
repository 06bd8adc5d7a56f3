"""Recommends a codec for each optimizer: the lines to write, and the results that were measured.

Warnings, `hipress doctor`, `hipress plan`, `hipress train`, `auto` and the documentation read their
advice here. The figures are in recommendations.json, which docs/generate.py makes from
benchmarks/results, together with the tables of README.md and docs/pytorch.md.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from pathlib import Path

from hipress.version import docs_url

SGD = "sgd"
SGD_MOMENTUM = "sgd-momentum"
ADAM = "adam"
UNKNOWN = "unknown"

FIGURES = Path(__file__).with_suffix(".json")


def url() -> str:
    """Returns the page that holds the table."""
    return docs_url("pytorch", "which-codec-for-my-optimizer")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What training reached with a codec, and without; a row of `hipress bench convergence`."""

    codec: str
    model: str
    data: str
    optimizer: str
    metric: str
    """accuracy, in percent, or loss."""
    score: float
    uncompressed: float
    ratio: float
    """How many times fewer bytes a worker sends."""
    later_ratio: float | None = None
    """The same after the warm-up of `hipress.torch.AdamW`."""
    recommended: float | None = None
    """What the recommended codec reached with the same seeds; for a warning only."""
    num_seeds: int
    source: str
    """The file in benchmarks/results."""

    @property
    def task(self) -> str:
        """Model, data, optimizer and number of seeds."""
        seeds = "1 seed" if self.num_seeds == 1 else f"{self.num_seeds} seeds"
        return f"{self.model} on {self.data}, {self.optimizer}, {seeds}"

    @property
    def result(self) -> str:
        """The score beside that without compression."""
        if self.metric == "loss":
            return f"loss {rounded(self.score, 3)}, uncompressed {rounded(self.uncompressed, 3)}"
        score, uncompressed = rounded(self.score, 2), rounded(self.uncompressed, 2)
        return f"accuracy {score} %, uncompressed {uncompressed} %"

    @property
    def fewer_bytes(self) -> str:
        """How many times fewer bytes, in words."""
        if self.later_ratio is None:
            return rounded(self.ratio, 0 if self.ratio >= 10 else 1)
        return f"{rounded(self.ratio, 0)}, {rounded(self.later_ratio, 0)} after warm-up"


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to write for one kind of optimizer."""

    kind: str
    title: str
    codec: str
    optimizer: str = ""
    """The line that makes the optimizer, if another than the usual one is needed."""
    needs_optimizer: bool = True
    """Whether `attach` must be given the optimizer."""

    def lines(self, codec: str | None = None, strategy: str | None = None) -> tuple[str, ...]:
        """Returns the lines of Python to write, with the recommended codec or with another.

        Example:
            >>> recommended("sgd").lines()
            ('sync = hipress.attach(model, codec="onebit", optimizer=optimizer)',)
        """
        given = f'codec="{codec or self.codec}"'
        given += f', strategy="{strategy}"' if strategy else ""
        given += ", optimizer=optimizer" if self.needs_optimizer else ""
        attach = f"sync = hipress.attach(model, {given})"
        return (self.optimizer, attach) if self.optimizer else (attach,)

    @property
    def text(self) -> str:
        """The lines as one sentence can hold them."""
        return "; ".join(self.lines())

    @property
    def measured(self) -> tuple[Measured, ...]:
        """What was measured with it; the first is the main one."""
        return _figures()[0][self.kind]


def momentum_codec(mu: float, *, nesterov: bool) -> str:
    """Returns the codec for SGD with this momentum, which it takes over.

    Example:
        >>> momentum_codec(0.9, nesterov=False)
        'momentum(ef(onebit), mu=0.9, nesterov=false)'
    """
    return f"momentum(ef(onebit), mu={mu:g}, nesterov={str(nesterov).lower()})"


RECOMMENDED = {
    one.kind: one
    for one in (
        Recommendation(kind=SGD, title="SGD without momentum", codec="onebit"),
        Recommendation(
            kind=SGD_MOMENTUM,
            title="SGD with momentum",
            codec=momentum_codec(0.9, nesterov=False),
            optimizer="optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0)",
        ),
        Recommendation(
            kind=ADAM,
            title="Adam or AdamW",
            codec="onebit",
            optimizer="optimizer = hipress.torch.AdamW(model.parameters(), lr=3e-4)",
        ),
        Recommendation(
            kind=UNKNOWN, title="any other, or not known", codec="int8", needs_optimizer=False
        ),
    )
}
"""The recommendation for each kind of optimizer."""

SAFE = RECOMMENDED[UNKNOWN].codec
"""The codec that works with every optimizer."""


def recommended(kind: str) -> Recommendation:
    """Returns what to write for a kind of optimizer."""
    return RECOMMENDED[kind]


def warned(kind: str) -> Measured:
    """Returns what `onebit` on gradients did with `SGD_MOMENTUM`, or with torch's `ADAM`."""
    return _figures()[1][kind]


def warning(kind: str) -> str:
    """Returns what `warned` holds as a sentence, with what is recommended beside it."""
    bad = warned(kind)
    assert bad.recommended is not None
    unit, digits = ("", 3) if bad.metric == "loss" else (" %", 2)
    bad_score, good_score, plain_score = (
        f"{rounded(score, digits)}{unit}"
        for score in (bad.score, bad.recommended, bad.uncompressed)
    )
    return (
        f"{bad.task}: {bad.metric} {bad_score} with "
        f"{bad.codec} on gradients, {good_score} as recommended, {plain_score} uncompressed"
    )


def rounded(number: float, digits: int) -> str:
    """Returns a number as all pages show it: a half of its decimal digits goes up.

    Example:
        >>> rounded(1.5105, 3), f"{1.5105:.3f}"
        ('1.511', '1.510')
    """
    return str(Decimal(repr(number)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


@lru_cache(maxsize=1)
def _figures() -> tuple[dict[str, tuple[Measured, ...]], dict[str, Measured]]:
    found = json.loads(FIGURES.read_text("utf-8"))
    good = {
        kind: tuple(Measured(**row) for row in rows) for kind, rows in found["recommended"].items()
    }
    return good, {kind: Measured(**row) for kind, row in found["warned"].items()}
