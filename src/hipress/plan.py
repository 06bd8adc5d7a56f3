"""A plan: for each gradient by name, what happens to it. Read from JSON, checked, never changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hipress.errors import UsageError

VERSION = 1


class Decision(BaseModel):
    """What happens to one gradient."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    codec: str = "none"
    """An expression; `none` sends the gradient as it is."""
    strategy: str = "ps"
    partitions: int | None = Field(default=None, ge=1)
    """Slices; by size if None."""
    reason: str = ""
    """For people: why."""


class Plan(BaseModel):
    """Decisions by gradient.

    Example:
        >>> plan = Plan(gradients={"fc.weight": Decision(codec="onebit", strategy="ring")})
        >>> plan.decision("fc.weight").codec, plan.decision("fc.bias").codec
        ('onebit', 'none')
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = VERSION
    epoch: int = 0
    """Counts the plans of a run: ranks that hold different ones say so."""
    gradients: dict[str, Decision] = Field(default_factory=dict)
    """By parameter name; those that are not named are sent as they are."""

    def decision(self, name: str) -> Decision:
        """What happens to a gradient."""
        return self.gradients.get(name, Decision(reason="not in the plan"))

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
            return cls._checked(lambda: cls.model_validate(given), "of the call")
        raise UsageError(
            f"plan is {given!r}; give the path of a plan.json, a Plan, or a dictionary."
        )

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file.

        Raises:
            UsageError: There is no such file, it is no plan, or of a version this reader does
                not know.
        """
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise UsageError(
                f"plan {str(path)!r} cannot be read ({error.strerror}); give the path of a "
                "plan.json."
            ) from error
        return cls._checked(lambda: cls.model_validate_json(text), repr(str(path)))

    @classmethod
    def _checked(cls, made: Callable[[], Plan], name: str) -> Plan:
        try:
            plan = made()
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise UsageError(
                f"plan {name} is not a plan: {where}: {first['msg']}; write "
                '{"version": 1, "gradients": {"fc.weight": {"codec": "onebit"}}}.'
            ) from error
        if plan.version > VERSION:
            raise UsageError(
                f"plan {name} has version {plan.version} and this hipress reads up to "
                f"{VERSION}; update hipress, or make the plan again."
            )
        return plan
