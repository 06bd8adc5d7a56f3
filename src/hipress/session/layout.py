"""What is decided for every gradient of a session, where it is cut, and how buckets travel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from hipress.casync.engine.engine import Engine
from hipress.casync.engine.recipe import chunk_numel
from hipress.casync.graphs import schedules, strategies
from hipress.casync.graphs.partitions import CHUNK_NUMEL, Partitioner, Placement
from hipress.casync.graphs.shape import slice_numel
from hipress.codecs.table import codec as named_codec
from hipress.plan import Plan
from hipress.session import selection
from hipress.session.adapter import GradientSpec
from hipress.session.buckets import Bucket, Gradient, grouped
from hipress.session.milder import Override, rung
from hipress.session.selection import NONE, Choice, Rules


class Layout:
    """The gradients of one model with their choices and placements.

    Args:
        rules: What the user asked for.
        offers_momentum: Returns whether the optimizer of a gradient has its momentum exchanged.
    """

    def __init__(
        self, rules: Rules, offers_momentum: Callable[[str], bool] = lambda name: False
    ) -> None:
        self.rules = rules
        self._offers_momentum = offers_momentum
        self.gradients: dict[str, Gradient] = {}
        """All gradients by name, compressed or not."""
        self.is_auto = False
        """Whether plans of `auto` decide instead of the rules alone."""
        self.plan: Plan | None = None
        """The plan of `auto` that gradients are laid out for."""
        self.overrides: dict[str, Override] = {}
        """Gradients whose codec was not accurate enough."""
        self.version = 0
        """Grows with every change of a gradient's codec."""
        self.units: tuple[tuple[str, ...], ...] = ()
        """Where a schedule decides, the gradients that start together, in the order of backward."""
        self._in_backward: list[str] = []
        """All gradients in the order in which backward computes them."""
        self._joined: set[str] = set()
        """Gradients of a unit but its first, with which they share frames."""
        self._placed: dict[str, tuple[Placement, ...]] = {}
        self._engine: Engine | None = None
        self._bucket_numel = 0
        self._partitioner: Partitioner | None = None
        self._buckets: dict[int, Bucket] = {}

    def register(
        self, specs: Iterable[GradientSpec], engine: Engine, bucket_numel: int | None
    ) -> list[Gradient]:
        """Decides for new gradients, given in the order in which backward computes them.

        Args:
            specs: The gradients.
            engine: Gives the number of ranks, the device and the size of chunks.
            bucket_numel: Elements of a full bucket; all given elements if None.
        """
        found = list(specs)
        if self._partitioner is None:
            self._engine = engine
            self._bucket_numel = bucket_numel or sum(spec.numel for spec in found)
            self._partitioner = self._new_partitioner()
        self._in_backward += [spec.name for spec in found]
        return self._place_all(found)

    def install(self, plan: Plan | None) -> None:
        """Lays all gradients out anew; no codec may hold state."""
        self.plan = plan
        self._partitioner = self._new_partitioner()
        self._placed.clear()
        self._buckets.clear()
        self._place_all([self.gradients[name].spec for name in self._in_backward])

    def override(self, name: str, made: Override | None) -> Gradient:
        """Gives a gradient a milder codec, or with None what was chosen for it; no codec of it may
        hold state.
        """
        self.overrides.pop(name, None)
        if made is not None:
            self.overrides[name] = made
        self._buckets.clear()
        return self._place(self.gradients[name].spec)

    def regroup(self, rate_groups: Mapping[str, int]) -> None:
        """Follows the optimizer where a gradient has moved to another group of learning rates."""
        for name, number in rate_groups.items():
            known = self.gradients.get(name)
            if known is not None and known.spec.rate_group != number:
                spec = replace(known.spec, rate_group=number)
                self.gradients[name] = replace(known, spec=spec)
                self._buckets.clear()  # their gradients may have to travel apart now

    def bucket(self, index: int, names: tuple[str, ...], buffer: torch.Tensor) -> Bucket:
        """Returns how the gradients that lie in a buffer travel."""
        known = self._buckets.get(index)
        if known is not None and known.names == names:
            return known
        takes = selection.takes(buffer)
        groups = grouped([self.gradients[name] for name in names]) if takes else ()
        self._buckets[index] = Bucket(names=names, groups=groups)
        return self._buckets[index]

    @property
    def compressed(self) -> list[Gradient]:
        """The gradients that a codec works on."""
        return [gradient for gradient in self.gradients.values() if gradient.is_compressed]

    @property
    def senders(self) -> list[str]:
        """Names of the gradients in whose place momentum is exchanged."""
        return [gradient.name for gradient in self.gradients.values() if gradient.sends_momentum]

    @property
    def bucket_names(self) -> tuple[tuple[str, ...], ...]:
        """Gradients as the framework puts them together, as far as buckets were seen."""
        found: list[tuple[str, ...]] = []
        seen: set[str] = set()
        for index in sorted(self._buckets):
            names = self._buckets[index].names
            if not seen.intersection(names):  # else from the first step, before DDP rebuilt them
                found.append(names)
                seen.update(names)
        return tuple(found)

    def _new_partitioner(self) -> Partitioner:
        assert self._engine is not None
        return Partitioner(
            self._engine.transport.num_ranks,
            bucket_numel=self._bucket_numel,
            on_gpu=self._engine.device.type == "cuda",
        )

    def under(self, name: str, made: Override | None) -> Gradient:
        """Returns what `override` would, and changes nothing."""
        return self._decided(self.gradients[name].spec, made)

    def _place_all(self, specs: Sequence[GradientSpec]) -> list[Gradient]:
        assert self._engine is not None
        if (slice_bytes := self._engine.options.slice_bytes) is None:
            return [self._place(spec) for spec in specs]
        choices = [self._choice(spec) for spec in specs]
        most = max(CHUNK_NUMEL, slice_bytes // 4)
        units = schedules.units(
            [spec.numel for spec in specs],
            [slice_numel(one.codec.wire_bytes, slice_bytes, most) for one in choices],
            [
                (one.codec.name, one.strategy, spec.dtype, spec.device, spec.rate_group)
                for spec, one in zip(specs, choices, strict=True)
            ],
        )
        self.units = tuple(tuple(specs[k].name for k in unit) for unit in units)
        self._joined = {name for unit in self.units for name in unit[1:]}
        return [self._place(specs[k]) for unit in units for k in unit]

    def _place(self, spec: GradientSpec) -> Gradient:
        gradient = self._decided(spec, self.overrides.get(spec.name))
        self.gradients[spec.name] = gradient
        self.version += 1
        return gradient

    def _decided(self, spec: GradientSpec, made: Override | None) -> Gradient:
        assert self._partitioner is not None and self._engine is not None
        choice = self._choice(spec)
        if made is not None:
            choice = _overridden(choice, made)
        sends_momentum = not choice.codec.keeps_sizes and self._offers_momentum(spec.name)
        if sends_momentum:
            choice = replace(choice, codec=choice.codec.for_momentum())
        if made is not None and made.flushes:
            choice, sends_momentum = replace(choice, codec=NONE, reason=made.reason), True
        placements: tuple[Placement, ...] = ()
        # A schedule sends many small exchanges; those without a codec need all aggregators, too.
        is_scheduled = self._engine.options.slice_bytes is not None
        if choice.codec.name != "none" or is_scheduled:
            # A milder codec keeps the place of the one before it, also in a run that is resumed.
            if spec.name not in self._placed:
                most = chunk_numel(choice.codec, spec.device, self._engine.options)
                self._placed[spec.name] = self._partitioner.place(
                    spec.numel, most, choice.partitions, joins_last=spec.name in self._joined
                )
            placements = self._placed[spec.name]
        return Gradient(
            spec=spec, choice=choice, placements=placements, sends_momentum=sends_momentum
        )

    def _choice(self, spec: GradientSpec) -> Choice:
        """Returns what the rules, or a plan of `auto`, say of a gradient."""
        assert self._engine is not None
        if self.is_auto:
            choice = self.rules.choice_under(self.plan, spec)
        else:
            choice = self.rules.choice(spec)
        if choice.codec.name == "none" and self._engine.options.slice_bytes is not None:
            choice = replace(choice, strategy=_with_messages(choice.strategy))
        return choice


def _with_messages(strategy: str) -> str:
    """Returns a strategy whose messages a schedule can order, which torch's own sum has none of."""
    return "ps" if strategies.get(strategy).sums_in_transport("none") else strategy


def _overridden(choice: Choice, made: Override) -> Choice:
    """Returns the choice with the milder codec, unless it is as mild already."""
    if not made.codec or choice.codec.name == "none":
        return choice
    codec = named_codec(made.codec)
    if rung(choice.codec) >= rung(codec):
        return choice
    reason = f"{made.before} was not accurate enough: {made.reason}"
    return replace(choice, codec=codec, reason=reason if codec.name == "none" else "")
