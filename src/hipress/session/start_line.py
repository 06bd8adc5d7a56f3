"""The line at the start of a run: what is compressed, with what, and how many bytes that saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from hipress.casync.engine.recipe import codes_local
from hipress.casync.graphs import strategies
from hipress.casync.graphs.graph import Kind, Verb
from hipress.session.stats import fewer_bytes

if TYPE_CHECKING:
    from hipress.codecs.base import Codec
    from hipress.session.buckets import Gradient
    from hipress.session.session import Session


def line(session: Session) -> str:
    """Returns what is compressed, without a full stop."""
    gradients, compressed = session.gradients.values(), session.layout.compressed
    total = sum(g.numel for g in gradients)
    inside = sum(g.numel for g in compressed)
    codecs = ", ".join(sorted({g.choice.codec.name for g in compressed})) or "none"
    text = (
        f"{len(compressed)} of {len(gradients)} gradients ({100 * inside / max(total, 1):.1f} % of "
        f"the elements) are compressed with {codecs}"
    )
    if session.settings.warmup_steps > session.step and session.auto is None:
        text += f" from step {session.settings.warmup_steps} on"
    hosts = session.engine.hosts
    if len(hosts) == 1:
        text += ", although one rank has no other rank to send to"
    else:
        text += f": {fewer_bytes(sent_ratio(gradients, hosts))}"
    if session.layout.senders:
        text += "; momentum is sent in place of the gradients"
        if left := session.adapter.momentum_warmup():
            text += f" after {left} steps with int8"
    return text


def sent_ratio(gradients: Iterable[Gradient], hosts: tuple[int, ...]) -> float:
    """Returns the bytes that a plain all-reduce of float32 sends, over those of one step.

    Messages of all ranks are counted, those of uncompressed gradients too. Codecs that change their
    rate are taken as they are in the end.

    Args:
        gradients: All gradients, with what was decided for them.
        hosts: The host of each rank.
    """
    plain = sent = 0.0
    known: dict[tuple[str, str], Counter[tuple[Kind, int]]] = {}
    for gradient in gradients:
        choice = gradient.choice
        codec = choice.codec.phases[-1][1]
        whole = 2 * (len(hosts) - 1) * gradient.numel
        element_bytes = gradient.spec.dtype.itemsize
        plain += 4 * whole
        if strategies.get(choice.strategy).sums_in_transport(codec.name):
            sent += element_bytes * whole
            continue
        parts = [part.stop - part.start for part in gradient.placements] or [gradient.numel]
        key = (choice.strategy, codec.name)
        if key not in known:
            known[key] = _messages(choice.strategy, hosts, codec)
        for (kind, merged), count in known[key].items():
            if kind in (Kind.GRADIENT, Kind.RAW):
                sent += count * element_bytes * gradient.numel
            else:
                coder = codec if kind is Kind.FRAME else codec.aggregator(merged)
                sent += count * sum(map(coder.wire_bytes, parts))
    return plain / sent if sent else 1.0


def _messages(strategy: str, hosts: tuple[int, ...], codec: Codec) -> Counter[tuple[Kind, int]]:
    """Counts the messages of one partition by what they hold.

    A rank sends for one partition on each route as many as all ranks do for one partition.
    """
    cluster = strategies.Cluster(hosts=hosts, codes_local=codes_local(codec, len(hosts)))
    graph = strategies.get(strategy).build(cluster, 0, range(len(hosts)))
    slots = (slot for task in graph.tasks if task.verb is Verb.SEND for slot in task.reads)
    return Counter((slot.kind, slot.merged) for slot in slots)
