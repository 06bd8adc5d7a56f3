"""A plan: the codec, strategy and partitions of each gradient, by name. Plans are immutable.

There are two file formats: `plan.json`, which holds everything, and the `SeCoPaPlan.txt` of
SOSP'21, whose lines `name,size,y|n,partitions` say which gradients are compressed, but not with
which codec and strategy (`ANY`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hipress.errors import UsageError
from hipress.profile import version_of

VERSION = 3
"""Version of written plans. Version 1 had only codec, strategy, partitions and reason; version 2
had no schedule."""

ANY = "any"
"""Placeholder for a codec or strategy that the user of the plan names separately."""

ScheduleName = Literal["fifo", "priority", "overlap"]
"""In which order messages leave where a training loop waits for single parameters;
`casync/graphs/schedules.py` says what each means."""

LARGE_NUMEL = 2**17
"""Uncompressed gradients of at least so many elements use the transport's own all-reduce; smaller
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
    """Return the strategy of an uncompressed gradient."""
    return "allreduce" if numel is not None and numel >= LARGE_NUMEL else "ps"


class Decision(BaseModel):
    """What happens to one gradient."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    codec: str = "none"
    """A codec expression; `none` sends the gradient uncompressed, `any` is filled in later."""
    strategy: str = "ps"
    """Name of a strategy; `any` is filled in later."""
    partitions: int | None = Field(default=None, ge=1)
    """Number of partitions; None derives it from the size."""
    bulk: int | None = Field(default=None, ge=0)
    """Gradients of a bucket with the same number may share frames; None groups them by size."""
    order: int | None = None
    """Within a bucket, groups with a lower number start first; None keeps their order."""
    numel: int | None = Field(default=None, ge=0)
    """Number of elements."""
    compressed_s: float | None = Field(default=None, ge=0)
    """Predicted time of the step with this gradient compressed and all others as planned; in a plan
    of the published model, of the exchange of this gradient alone."""
    plain_s: float | None = Field(default=None, ge=0)
    """The same time with this gradient uncompressed; the decision compares the two."""
    reason: str = ""
    """Explanation for people."""

    @property
    def is_compressed(self) -> bool:
        """Whether the gradient is compressed."""
        return self.codec != "none"


class Plan(BaseModel):
    """The decisions for all gradients of a model.

    Example:
        >>> plan = Plan(gradients={"fc.weight": Decision(codec="onebit", strategy="ring")})
        >>> plan.decision("fc.weight").codec, plan.decision("fc.bias").codec
        ('onebit', 'none')
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    version: int = Field(default=VERSION, ge=1)
    epoch: int = 0
    """Number of the plan within a run; ranks with different plans raise an error."""
    num_ranks: int | None = Field(default=None, ge=1)
    """Number of ranks that the plan was made for."""
    step_s: float | None = Field(default=None, ge=0)
    """Predicted time of a step with this plan."""
    plain_step_s: float | None = Field(default=None, ge=0)
    """Predicted time of a step with nothing compressed."""
    made_from: str = ""
    """Description, for people, of the costs that the plan was made from."""
    schedule: ScheduleName | None = None
    """The order in which messages leave; None: not planned. `hipress.attach` has no use for it,
    because DDP decides the order of its buckets, nor for the next two."""
    slice_bytes: int | None = Field(default=None, ge=1)
    """About the size of a message under the schedule; None: not planned."""
    credit_bytes: int | None = Field(default=None, ge=1)
    """Most bytes that a rank has under way at once under the schedule; None: not planned."""
    gradients: dict[str, Decision] = Field(default_factory=dict)
    """Decisions by parameter name; gradients that are not named are sent uncompressed."""

    def decision(self, name: str) -> Decision:
        """Return the decision for a gradient."""
        return self.gradients.get(name, Decision(reason="not in the plan"))

    @property
    def num_compressed(self) -> int:
        """Number of compressed gradients."""
        return sum(decision.is_compressed for decision in self.gradients.values())

    @property
    def takes_strategy(self) -> bool:
        """Whether the plan leaves a strategy open, as a text plan does."""
        return any(decision.strategy == ANY for decision in self.gradients.values())

    @property
    def takes_codec(self) -> bool:
        """Whether the plan leaves a codec open; a text plan does, even without a `y` line."""
        return self.takes_strategy or any(d.codec == ANY for d in self.gradients.values())

    def with_codec(self, codec: str, strategy: str = "ps") -> Plan:
        """Return the plan with every `any` replaced by this codec or strategy.

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
        """Write the plan as JSON, or in the format of SeCoPaPlan.txt if the path ends in `.txt`.

        An existing file is replaced atomically, so that no reader sees half a plan.

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
        """Return the lines `name,size,y|n,partitions`, which omit codec and strategy.

        Raises:
            UsageError: A gradient has no size or no partitions, or its name holds a comma.
        """
        lines = []
        for name, made in self.gradients.items():
            # The original writes the number of ranks for uncompressed gradients; it has no effect.
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
        """Return a plan from a user's argument: a Plan, a path, or the contents of a plan.json.

        Raises:
            UsageError: The argument is none of these.
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
        """Read a plan from a file of either format.

        Raises:
            UsageError: The file does not exist, is not a plan, or has a newer version.
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
        """Read a plan from text, which is JSON if it begins with a brace; errors cite `name`."""
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
    """Parse a line of a text plan; a ValueError says what is wrong."""
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
    # Fields that an older version lacks have their defaults now.
    return plan.model_copy(update={"version": VERSION})


def _no_plan(name: str, where: str, why: str) -> UsageError:
    return UsageError(f"plan {name} is not a plan: {where}: {why}; write {EXAMPLES}.")


def _replace(path: Path, text: str) -> None:
    """Replace a file atomically; what is not a regular file (a pipe) is written to directly."""
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
