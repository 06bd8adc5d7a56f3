"""Buffers of a model: what forward passes change, such as BatchNorm's running statistics, and
what they do not.

DDP sends all buffers of rank 0 to all ranks before each forward pass. Here ranks take the mean of
those that change, which is exchanged while backward computes, and the others of rank 0 once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hipress.casync.graphs.schedules import Order
from hipress.errors import UsageError
from hipress.session import Session, replicas
from hipress.torch.ddp import clean

ALWAYS = ("running_mean", "running_var")
"""Buffers with these names are exchanged also if the first forward pass does not change them."""


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a buffer is: forward passes may put another tensor there."""

    module: nn.Module
    key: str
    first: torch.Tensor
    version: int

    @property
    def value(self) -> torch.Tensor | None:
        found: torch.Tensor | None = getattr(self.module, self.key, None)
        return found

    def told(self) -> tuple[int, bool, str]:
        """Returns the number of elements, whether a mean is to be taken, and a hash."""
        value = self.value
        if value is None or not value.numel():
            return 0, False, ""
        is_changed = value is not self.first or value._version != self.version
        is_mean = value.is_floating_point() and (is_changed or self.key in ALWAYS)
        digest = "" if is_mean or is_changed else replicas.digests([("", value)])[""]
        return value.numel(), is_mean, digest


class RunningStatistics:
    """The buffers of a model, which are alike on all ranks after each step.

    Args:
        names: The names of the model's parameters, which tell where a module belongs.
        session: The session that exchanges them.
    """

    def __init__(self, names: Mapping[torch.Tensor, str], session: Session) -> None:
        self._names = names
        self._session = session
        self._places: dict[str, _Place] = {}
        self._sizes: dict[str, int] = {}
        """Elements of each buffer that is exchanged, in one order on all ranks."""
        self._means: tuple[Any, torch.Tensor] | None = None
        self._sent = torch.empty(0)

    def note(self, module: nn.Module) -> None:
        """Takes note of a module's buffers before its first forward pass."""
        prefix = self._prefix(module)
        for name, part in module.named_modules():
            for key, value in part.named_buffers(recurse=False):
                if value.numel() and value.device == self._session.engine.device:
                    full = prefix + clean(f"{name}.{key}" if name else key)
                    self._places.setdefault(full, _Place(part, key, value, value._version))

    def _prefix(self, module: nn.Module) -> str:
        """Returns where a module is in the model; submodules may be called on their own."""
        found = Counter[str]()
        for name, parameter in module.named_parameters():
            known, local = self._names.get(parameter), clean(name)
            if known is not None and known.endswith(local):
                found[known.removesuffix(local)] += 1
        return found.most_common(1)[0][0] if found else ""

    def agree(self) -> None:
        """Agrees on what is exchanged, in the first step, and sends the rest of rank 0; collective.

        Buffers of modules that some rank has not called are left alone.
        """
        mine = {name: place.told() for name, place in self._places.items()}
        told = self._session.engine.agree("buffers", {}, mine)
        for name in sorted(set.intersection(*map(set, told))):
            each = [one[name] for one in told]
            if len({numel for numel, *_ in each}) > 1:
                continue
            if any(is_mean for _, is_mean, _ in each):
                self._sizes[name] = each[0][0]
            elif len({digest for *_, digest in each}) > 1:
                value = self._places[name].value
                assert value is not None
                try:
                    dist.broadcast(value.detach(), group=self._session.process_group, group_src=0)
                except RuntimeError as error:
                    raise self._session.engine.explain(error) from error

    def start(self) -> None:
        """Starts to exchange what the last forward pass has left."""
        if not self._sizes:
            return
        flats = self._flats()
        self._sent = flats.clone()
        handle = self._session.engine.allreduce(
            [flats], names=("(running statistics)",), step=self._session.step, order=Order(-1, -1)
        )
        self._means = handle, flats

    def end(self) -> None:
        """Puts the means into the buffers."""
        if self._means is None:
            return
        (handle, flats), self._means = self._means, None
        handle.wait()
        # Further forward passes may have changed them; the next exchange has the rest.
        now = self._flats()
        changed = now + (flats - self._sent)
        means = torch.where(now == self._sent, flats, changed)
        parts = torch.split(means, list(self._sizes.values()))
        for name, part in zip(self._sizes, parts, strict=True):
            value = self._value(name)
            value.copy_(part.view(value.shape))

    def _flats(self) -> torch.Tensor:
        return torch.cat([self._value(name).float().reshape(-1) for name in self._sizes])

    def _value(self, name: str) -> torch.Tensor:
        value, numel = self._places[name].value, self._sizes[name]
        if value is None or value.numel() != numel:
            now = "None" if value is None else f"a tensor of {value.numel()} elements"
            raise UsageError(
                f"buffer {name!r} is {now} and had {numel} elements in the first step, so ranks "
                "cannot take its mean; keep its size."
            )
        return value.detach()
