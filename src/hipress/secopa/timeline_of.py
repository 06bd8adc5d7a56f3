"""A simulated step as a timeline: the same picture as that of a real run."""

from __future__ import annotations

from hipress.secopa.simulate import Simulated
from hipress.secopa.step import Span
from hipress.timeline import Event, RankTrace


def traces(simulated: Simulated, *, device: str = "cpu") -> list[RankTrace]:
    """What each rank that was played did; `hipress.timeline.chrome_trace` draws it.

    Args:
        simulated: Played with `record=True`.
        device: The kind that the model is on.
    """
    ranks: dict[int, list[Event]] = {}
    for span in simulated.played.spans:
        ranks.setdefault(span.rank, []).append(_event(span, simulated))
    return [
        RankTrace(rank=rank, host=f"simulated {rank}", events=tuple(events), device=device)
        for rank, events in sorted(ranks.items())
    ]


def _event(span: Span, simulated: Simulated) -> Event:
    job = simulated.jobs[span.job] if span.job >= 0 else None
    return Event(
        verb=span.verb,
        name=job.name if job else "",
        piece=span.chunk,
        queue=span.queue,
        start_ns=round(span.start_s * 1e9),
        end_ns=round(span.end_s * 1e9),
        label=job.label if job else "",
        wire_bytes=None if span.num_bytes is None else round(span.num_bytes),
    )
