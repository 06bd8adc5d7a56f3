"""What the ranks of a benchmark on an emulated cluster are told, whatever they measure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

T = TypeVar("T", bound="ClusterConfig")


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """The cluster, and how often to measure on it."""

    num_hosts: int
    rate: str
    """As the user wrote it; none: not shaped."""
    rate_bits: int | None
    delay: str
    is_shaped: bool
    """Whether each rank has an eth0 of its own."""
    repeats: int
    device: str
    result: str
    """File that rank 0 writes."""

    @property
    def size_bytes(self) -> int:
        """Of the whole gradient as float32."""
        raise NotImplementedError

    @property
    def all_reduce_bytes(self) -> float:
        """What each rank must send in an all-reduce of float32."""
        return 2 * (self.num_hosts - 1) / self.num_hosts * self.size_bytes

    def dump(self) -> str:
        """The text that `load` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls: type[T], text: str) -> T:
        """A config from its text."""
        fields: dict[str, Any] = json.loads(text)
        for name, value in fields.items():
            if isinstance(value, list):
                fields[name] = tuple(value)
        return cls(**fields)
