"""Ranks as threads: engines over a hub in memory, and what a strategy computes, written out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import hipress
from hipress.casync.engine.engine import Engine
from hipress.casync.engine.loopback import Hub, Loopback

LIMIT_S = 60.0
"""No rank of any test may take longer."""


def outcomes(
    num_ranks: int,
    work: Callable[[Engine, int], Any],
    *,
    ordered: bool = False,
    hosts: Sequence[str] | None = None,
    timeout_s: float = 20.0,
    hub: Hub | None = None,
    each: Callable[[int], dict[str, Any]] = lambda rank: {},
    **options: Any,
) -> list[Any]:
    """What `work(engine, rank)` gives on each rank, or the error it ends with.

    Args:
        num_ranks: N.
        work: Runs in the thread of its rank.
        ordered: A transport without tags.
        hosts: The name of each rank's host; one for all if None.
        timeout_s: Of the engine.
        hub: Where messages meet; one that works if None.
        each: Arguments of a rank's engine that differ from the others'.
        **options: Other arguments of all engines.
    """
    hub = hub or Hub(num_ranks, timeout_s)
    store = HashStore()
    found: list[Any] = [None] * num_ranks

    def run(rank: int) -> None:
        engine = None
        try:
            name = hosts[rank] if hosts else "here"
            given = {"host": name, "timeout_s": timeout_s, **options, **each(rank)}
            engine = Engine(Loopback(hub, rank, ordered=ordered), store, **given)
            found[rank] = work(engine, rank)
        except BaseException as error:  # for the caller to look at
            found[rank] = error
        finally:
            if engine is not None:
                engine.close()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    late = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not late, f"ranks {late} hang"
    return found


def run(num_ranks: int, work: Callable[[Engine, int], Any], **options: Any) -> list[Any]:
    """As `outcomes`; an error of a rank is raised."""
    found = outcomes(num_ranks, work, **options)
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def end_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks hear of a failure soon, and no `close` waits for threads that wait for messages.

    Timeouts stay long, so that a machine that stands still for a while does not end a rank.
    """
    monkeypatch.setattr("hipress.casync.ranks.heartbeats.LONGEST_BEAT_S", 0.3)
    monkeypatch.setattr("hipress.casync.engine.executors.CLOSE_S", 0.2)


def gradient(numel: int, rank: int, step: int = 0) -> torch.Tensor:
    """Normal, another one for each rank and step, the same in every run."""
    seed = 1_000_003 * numel + 1009 * rank + step
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def mean_of(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Exact to the last bits of float64."""
    return torch.stack([value.double() for value in values]).mean(0)


# --- what strategies compute, for one chunk of route 0, slow and obvious --------------------------


class Reference:
    """All ranks of one name: `step` gives what every rank must hold afterwards.

    Args:
        expr: A codec that draws no random numbers.
        strategy: Which.
        hosts: Of each rank.
        numel: Of the gradient.
    """

    def __init__(self, expr: str, strategy: str, hosts: Sequence[int], numel: int) -> None:
        self.codec, self.hosts, self.numel = hipress.codec(expr), hosts, numel
        self.rule = getattr(self, f"_{strategy}")
        self.states: dict[Any, Any] = {}

    def step(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.rule([gradient.float() for gradient in gradients])

    def _coded(self, x: torch.Tensor, codec: Any, who: Any) -> torch.Tensor:
        """Through a codec with the state of `who`."""
        if who not in self.states:
            self.states[who] = codec.init(x)
        return codec.decode(codec.encode(x, self.states[who]))

    def _among(self, values: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
        """A parameter server among some: each counts as much as its size."""
        shares = [size / sum(sizes) for size in sizes]
        there = [self._coded(x, self.codec, ("worker", k)) for k, x in enumerate(values)]
        mean = _weighted(there, shares)
        return self._coded(mean, self.codec.aggregator(len(values)), "aggregator")

    def _ps(self, values: list[torch.Tensor]) -> torch.Tensor:
        return self._among(values, [1] * len(values))

    def _hierarchical(self, values: list[torch.Tensor]) -> torch.Tensor:
        groups = [[r for r, h in enumerate(self.hosts) if h == host] for host in set(self.hosts)]
        means = [
            _weighted([values[r] for r in group], [1 / len(group)] * len(group))
            if len(group) > 1
            else values[group[0]]
            for group in groups
        ]
        return self._among(means, [len(group) for group in groups])

    def _allreduce(self, values: list[torch.Tensor]) -> torch.Tensor:
        if self.codec.name == "none":
            return sum(values[1:], values[0].clone()) / len(values)
        there = [self._coded(x, self.codec, ("worker", k)) for k, x in enumerate(values)]
        return _weighted(there, [1 / len(values)] * len(values))

    def _ring(self, values: list[torch.Tensor]) -> torch.Tensor:
        # The codecs that are compared have a way back with all the worker's memory.
        if len(values) == 1:
            return self._among(values, [1])
        mean = self._coded(values[0], self.codec, ("worker", 0))
        for k, value in enumerate(values[1:], 1):
            mean = _weighted([mean, value], [k / (k + 1), 1 / (k + 1)])
            mean = self._coded(mean, self.codec.aggregator(k + 1), ("hop", k))
        return mean


def _weighted(values: Sequence[torch.Tensor], shares: Sequence[float]) -> torch.Tensor:
    total = values[0] * shares[0]
    for value, share in zip(values[1:], shares[1:], strict=True):
        total = total + value * share
    return total
