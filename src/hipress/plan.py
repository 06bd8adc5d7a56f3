"""A plan: for each gradient by name, what happens to it. Read from JSON, checked, never changed."""

from __future__ import annotations

from pathlib import Path

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
    def load(cls, path: str | Path) -> Plan:
        """Read a plan from a file.

        Raises:
            UsageError: There is no such file, it is no plan, or of a version this reader does
                not know.
        """
        try:
            plan = cls.model_validate_json(Path(path).read_bytes())
        except OSError as error:
            raise UsageError(
                f"plan {str(path)!r} cannot be read ({error.strerror}); give the path of a "
                "plan.json."
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the file"
            raise UsageError(
                f"plan {str(path)!r} is not a plan: {where}: {first['msg']}; write "
                '{"version": 1, "gradients": {"fc.weight": {"codec": "onebit"}}}.'
            ) from error
        if plan.version > VERSION:
            raise UsageError(
                f"plan {str(path)!r} has version {plan.version} and this hipress reads up to "
                f"{VERSION}; update hipress, or make the plan again."
            )
        return plan
