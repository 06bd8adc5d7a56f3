"""What travels for an optimizer that must learn sizes from other gradients than codecs make.

The optimizer answers through the `Adapter`, in every step for each group of gradients that travel
together, whether a refresh is due: the gradients travel with a mild codec, and it learns sizes from
them. In other steps its momentum travels with the group's codec. A codec without error feedback
gets the gradients: they are right on average, and the momentum in the optimizer smooths them, where
the noise of a momentum would go into the parameters at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hipress.casync.engine.engine import Engine
from hipress.codecs.table import codec as named_codec
from hipress.errors import UsageError
from hipress.session.adapter import Adapter
from hipress.session.buckets import Bucket, Content, Group, keeps_residual
from hipress.session.layout import Layout
from hipress.session.mode import Mode
from hipress.session.owed import Owed

REFRESH = named_codec("int8(ef=false)")
"""Sends the gradients themselves where otherwise momentum is exchanged."""


class Momentum:
    """Knows in whose place momentum is exchanged.

    Args:
        adapter: Asks the optimizer.
        layout: Decides which gradients may have their momentum exchanged.
        owed: Momentum that is owed.
    """

    def __init__(self, adapter: Adapter, layout: Layout, owed: Owed) -> None:
        self._adapter = adapter
        self._layout = layout
        self._owed = owed
        self._exchanged: list[str] = []
        """Gradients of this step that are not a refresh."""
        self._unsent: set[str] = set()
        """Gradients whose codecs may hold momentum on some rank; the same on all ranks."""

    def check(self, engine: Engine, step: int) -> None:
        """Compares among ranks what decides refreshes, after the optimizer has loaded its state.

        Raises:
            AgreementError: Ranks differ; it names a gradient.
            UsageError: The optimizer has got another parameter whose momentum should be exchanged.
        """
        if self._adapter.has_new_parameters():
            self._check_new_parameters()
        counts = self._adapter.new_momentum_counts(self._layout.senders)
        if counts is not None:
            told: dict[str, list[str]] = {}
            for name, text in counts.items():
                told.setdefault(text, []).append(name)
            texts = [f"{text} ({len(names)} like {names[0]})" for text, names in told.items()]
            facts = {"step": step, "the optimizer's state": "; ".join(texts)}
            engine.agree(
                "the optimizer's state",
                facts,
                skipped="without comparing the optimizer's state: call its load_state_dict on all "
                "ranks.",
            )

    def _check_new_parameters(self) -> None:
        layout = self._layout
        for gradient in layout.compressed:
            now = layout.under(gradient.name, layout.overrides.get(gradient.name))
            if now.sends_momentum and not gradient.sends_momentum:
                raise UsageError(
                    f"parameter {gradient.name!r} was added to the optimizer after attach, which "
                    f"had decided to send its gradient with {gradient.choice.codec.name} and not "
                    "its momentum: give the optimizer all parameters before attach, or exclude "
                    "this one."
                )

    def make(self, bucket: Bucket, buffer: torch.Tensor, mode: Mode, scale: float) -> list[Content]:
        """Turns gradients into momentum, in place, where the optimizer wants that exchanged.

        Returns what the part of each group of the bucket holds now.
        """
        found = []
        for group in bucket.groups:
            found.append(content := self._content(group, mode))
            if not group.sends_momentum or content is Content.REFRESH:
                continue
            self._exchanged += group.names
            if content is Content.GRADIENTS:
                self._adapter.note_noisy(group.names)
            else:
                if mode is Mode.FLUSHING:
                    self._unsent.difference_update(group.names)
                else:
                    self._unsent.update(group.names)
                self._adapter.note_exchanged(group.names, is_momentum=True)
                for name, (start, stop) in zip(group.names, group.spans, strict=True):
                    self._adapter.make_momentum(name, buffer[start:stop], scale)
        return found

    def forget(self) -> None:
        """Tells the optimizer that it receives gradients, unless it is told otherwise."""
        if self._exchanged:
            self._adapter.note_exchanged(self._exchanged, is_momentum=False)
            self._exchanged = []

    def note_unsent(self, names: Iterable[str]) -> None:
        """Takes note that a checkpoint may have given unsent momentum to some rank."""
        self._unsent.update(names)

    def _content(self, group: Group, mode: Mode) -> Content:
        if not group.sends_momentum:
            return Content.GRADIENTS
        if mode is Mode.FLUSHING:
            # What codecs hold is momentum; without it nothing has been exchanged but gradients. The
            # state of this rank does not tell: with `hierarchical` it may hold nothing.
            unsent = self._unsent.union(self._owed.momentum)
            return Content.REFRESH if unsent.isdisjoint(group.names) else Content.MOMENTUM
        if not mode.compresses or self._adapter.wants_gradients(group.names):
            return Content.REFRESH
        is_noisy = not keeps_residual(group.codec) and self._adapter.takes_noisy
        if is_noisy and group.codec.name != "none":
            if not any(name in self._owed.momentum for name in group.names):
                return Content.GRADIENTS
        return Content.MOMENTUM
