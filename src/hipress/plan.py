"""A plan: for each gradient by name, what happens to it. Read, checked, never changed.

Two formats: `plan.json`, which says everything, and the `SeCoPaPlan.txt` of SOSP'21, whose lines
`name,size,y|n,partitions` say which gradients are compressed, not how (`ANY`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hipress.errors import UsageError
from hipress.profile import version_of

VERSION = 2
"""Of what is written; 1, which is read too, had only codec, strategy, partitions and reason."""

ANY = "any"
"""Stands for a codec or strategy that is named beside the plan, by who uses it."""

LARGE_NUMEL = 2**17
"""From so many elements on, a gradient that is left alone goes by the transport's own sum; smaller
ones share a message with others of their bucket."""

EXAMPLES = (
    f'{{"version": {VERSION}, "gradients": {{"fc.weight": {{"codec": "onebit"}}}}}}, or lines '
    "name,size,y|n,partitions or name,y|n,partitions"
)


MIN_SIZE = 4096
"""Gradients with fewer elements are exempt by default: compressing them saves little. Those with
one dimension (norm, bias) are exempt because compressing them costs most accuracy."""


def exempt_reason(dims: int, numel: int, min_size: int = MIN_SIZE) -> str:
    """Returns why a gradient is exempt from compression by default; empty if it is not.

    Example:
        >>> exempt_reason(1, 10**6), exempt_reason(2, 100), exempt_reason(2, 10**6)
        ('one dimension (norm or bias)', '100 elements, fewer than min_size=4096', '')
    """
    if dims < 2:
        return "one dimension (norm or bias)"
    if numel < min_size:
        return f"{numel} elements, fewer than min_size={min_size}"
    return ""


def plain_strategy(numel: int | None) -> str:
    """How a gradient travels that is left alone."""
    return "allreduce" if numel is not None and numel >= LARGE_NUMEL else "ps"


class Decision(BaseModel):
    """What happens to one gradient."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    codec: str = "none"
    """An expression; `none` sends the gradient as it is, `any` is to be filled in."""
    strategy: str = "ps"
    """A name, or `any`, which is to be filled in."""
    partitions: int | None = Field(default=None, ge=1)
    """Slices; by size if None."""
    bulk: int | None = Field(default=None, ge=0)
    """Gradients of one bucket with the same number may share frames; by size if None."""
    order: int | None = None
    """Lower starts first among the groups of a bucket; as they come if None."""
    numel: int | None = Field(default=None, ge=0)
    """Elements."""
    compressed_s: float | None = Field(default=None, ge=0)
    """One of the two times that it was decided from: the step with this gradient compressed, all
    else as planned; in a plan of the published model, the exchange of this gradient alone."""
    plain_s: float | None = Field(default=None, ge=0)
    """The other: with this gradient left alone."""
    reason: str = ""
    """For people: why."""

    @property
    def is_compressed(self) -> bool:
        """Whether a codec works on it."""
        return self.codec != "none"


class Plan(BaseModel):
    """Decisions by gradient.

    Example:
        >>> plan = Plan(gradients={"fc.weight": Decision(codec="onebit", strategy="ring")})
        >>> plan.decision("fc.weight").codec, plan.decision("fc.bias").codec
        ('onebit', 'none')
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    version: int = Field(default=VERSION, ge=1)
    epoch: int = 0
    """Counts the plans of a run: ranks that hold different ones say so."""
    num_ranks: int | None = Field(default=None, ge=1)
    """That it was made for."""
    step_s: float | None = Field(default=None, ge=0)
    """Predicted time of a step with this plan."""
    plain_step_s: float | None = Field(default=None, ge=0)
    """Predicted time of a step with nothing compressed."""
    made_from: str = ""
    """For people: what it was made from."""
    gradients: dict[str, Decision] = Field(default_factory=dict)
    """By parameter name; those that are not named are sent as they are."""

    def decision(self, name: str) -> Decision:
        """What happens to a gradient."""
        return self.gradients.get(name, Decision(reason="not in the plan"))

    @property
    def num_compressed(self) -> int:
        """Gradients that a codec works on."""
        return sum(decision.is_compressed for decision in self.gradients.values())

    @property
    def takes_strategy(self) -> bool:
        """Whether it leaves a strategy open, as a text plan does."""
        return any(decision.strategy == ANY for decision in self.gradients.values())

    @property
    def takes_codec(self) -> bool:
        """Whether it leaves a codec open; a text plan does, also one that compresses nothing."""
        return self.takes_strategy or any(d.codec == ANY for d in self.gradients.values())

    def with_codec(self, codec: str, strategy: str = "ps") -> Plan:
        """The plan with `any` filled in; what it names itself stays.

        Example:
            >>> plan = Plan.parse("fc.weight,y,4", "plan.txt").with_codec("onebit", "ring")
            >>> made = plan.decision("fc.weight")
            >>> made.codec, made.strategy, made.partitions
            ('onebit', 'ring', 4)
        """
        filled = {}
        for name, made in self.gradients.items():
            way = strategy if made.is_compressed else plain_strategy(made.numel)
            filled[name] = made.model_copy(
                update={
                    "codec": codec if made.codec == ANY else made.codec,
                    "strategy": way if made.strategy == ANY else made.strategy,
                }
            )
        return self.model_copy(update={"gradients": filled})

    def save(self, path: str | Path) -> None:
        """Writes it: as JSON, or as SeCoPaPlan.txt does where the path ends in `.txt`.

        What was there is replaced at once, so that no reader meets half a plan.

        Raises:
            UsageError: The file cannot be written, or its lines cannot hold the plan.
        """
        if str(path).endswith(".txt"):
            text = self.as_text()
        else:
            text = self.model_dump_json(indent=1, exclude_none=True) + "\n"
        try:
            _replace(Path(path), text)
        except OSError as error:
            raise UsageError(
                f"plan {str(path)!r} cannot be written ({error.strerror}); give a file in a folder "
                "that exists and may be written."
            ) from error

    def as_text(self) -> str:
        """The lines `name,size,y|n,partitions`; codec and strategy have no place there.

        Raises:
            UsageError: A gradient has no size or no partitions, or its name holds a comma.
        """
        lines = []
        for name, made in self.gradients.items():
            # Of a gradient left alone the number means nothing; the original writes N.
            plain = None if made.is_compressed else self.num_ranks or 1
            partitions = made.partitions or plain
            for is_missing, what in (
                (made.numel is None, "has no size (numel)"),
                (partitions is None, "has no partitions"),
                (name != name.strip() or set(name) & set(",\r\n"), "has a name with , or blanks"),
            ):
                if is_missing:
                    raise UsageError(
                        f"gradient {name!r} {what}, and a text plan is lines "
                        "name,size,y|n,partitions; save the plan as .json."
                    )
            lines.append(f"{name},{made.numel},{'y' if made.is_compressed else 'n'},{partitions}\n")
        return "".join(lines)

    @classmethod
    def read(cls, given: Any) -> Plan:
        """A plan from what a user gave: one, the path of one, or what its file would hold.

        Raises:
            UsageError: It is none of these.
        """
        if isinstance(given, Plan):
            return given
        if isinstance(given, str | Path):
            return cls.load(given)
        if isinstance(given, dict):
            return _checked(lambda: cls.model_validate(given), given, "of the call")
        raise UsageError(
            f"plan is {given!r}; give the path of a plan.json, a Plan, or a dictionary."
        )

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan from a file of either format.

        Raises:
            UsageError: There is no such file, it is no plan, or of a version this reader does
                not know.
        """
        try:
            found = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(
                f"plan {str(path)!r} cannot be read ({error.strerror}); give the path of a "
                "plan.json."
            ) from error
        try:
            text = found.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise _no_plan(repr(str(path)), "the file", "it is no UTF-8 text") from error
        return cls.parse(text, repr(str(path)))

    @classmethod
    def parse(cls, text: str, name: str = "given") -> Plan:
        """Reads a plan from its text: JSON where it begins with a brace; `name` is for errors."""
        if text.lstrip().startswith("{"):
            return _checked(lambda: cls.model_validate_json(text), text, name)
        gradients: dict[str, Decision] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip():
                continue
            try:
                gradient, decision = _row(line)
                if gradient in gradients:
                    raise ValueError(f"{gradient!r} is there twice")
            except ValueError as error:
                raise _no_plan(name, f"line {number}", str(error)) from error
            gradients[gradient] = decision
        if not gradients:
            raise _no_plan(name, "the file", "it is empty")
        return cls(gradients=gradients)


def _row(line: str) -> tuple[str, Decision]:
    """Gradient and decision of a line of a text plan; a ValueError says what is wrong."""
    fields = [field.strip() for field in line.split(",")]
    if len(fields) not in (3, 4):
        raise ValueError(f"{line.strip()!r} has {len(fields)} fields")
    name, *size, answer, partitions = fields
    if not name:
        raise ValueError(f"{line.strip()!r} has no name")
    if size and not re.fullmatch("[0-9]+", size[0]):
        raise ValueError(f"size {size[0]!r} is no number of elements")
    if answer.lower() not in ("y", "n"):
        raise ValueError(f"{answer!r} is neither y nor n")
    if not re.fullmatch("0*[1-9][0-9]*", partitions):
        raise ValueError(f"partitions {partitions!r} is no number from 1 on")
    return name, Decision(
        codec=ANY if answer.lower() == "y" else "none",
        strategy=ANY,
        partitions=int(partitions),
        numel=int(size[0]) if size else None,
    )


def _checked(made: Callable[[], Plan], source: object, name: str) -> Plan:
    version = version_of(source, other="network")
    if version > VERSION:
        raise UsageError(
            f"plan {name} has version {version} and this hipress reads up to {VERSION}; update "
            "hipress, or make the plan again."
        )
    try:
        plan = made()
    except ValidationError as error:
        if any(one["loc"] == ("network",) for one in error.errors()):
            raise UsageError(
                f"plan {name} is a profile; make a plan from it with hipress plan --profile."
            ) from error
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise _no_plan(name, where, first["msg"]) from error
    # What an older one lacks has its default now, so it would be written as a new one.
    return plan.model_copy(update={"version": VERSION})


def _no_plan(name: str, where: str, why: str) -> UsageError:
    return UsageError(f"plan {name} is not a plan: {where}: {why}; write {EXAMPLES}.")


def _replace(path: Path, text: str) -> None:
    """Writes a file beside and moves it there; what is no plain file (a pipe) is written to."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
