"""Where one rank stands for all: what it receives when, told from what it does itself.

Ranks that are alike do alike things at the same time. So a message comes in when a send of the
same kind of this rank's own goes out.
"""

from __future__ import annotations

from collections.abc import Sequence

from hipress.casync.graph import Verb
from hipress.secopa.costs import Step

BEGIN = -1
"""Stands for the begin of a synchronisation, where a step is named."""

Mirrors = dict[int, list[tuple[int, float]]]
"""By send: the receives that come with it, and how much later."""


def mirrors(steps: Sequence[Step], hop_s: float) -> tuple[Mirrors, Mirrors]:
    """Pairs receives with sends, and with other steps where there is no such send.

    A receive is one below its send in the life of a piece, so it is paired with a send of the
    same kind one above it; where the rank has none, with one further up and a while later. Depth
    only grows, so nothing waits for itself.

    Args:
        steps: Of the rank.
        hop_s: What each depth takes, about.

    Returns:
        Receives by send; and by computing step, or `BEGIN`, where the rank sends nothing of the
        kind: others have what it has when they have made it.
    """
    sends: dict[int, dict[int, list[int]]] = {}
    receives: dict[tuple[int, int], list[int]] = {}
    encodes: dict[int, int] = {}
    for place, step in enumerate(steps):
        if step.verb is Verb.SEND:
            sends.setdefault(step.kind, {}).setdefault(step.depth, []).append(place)
        elif step.verb is Verb.RECV:
            receives.setdefault((step.kind, step.depth - 1), []).append(place)
        elif step.verb is Verb.ENCODE:
            encodes.setdefault(step.piece, place)
    with_sends: Mirrors = {}
    with_others: Mirrors = {}
    for (kind, depth), places in receives.items():
        known = [above for above in sends.get(kind, ()) if above <= depth]
        own = sends[kind][max(known)] if known else []
        for k, place in enumerate(places):
            if own:
                source = own[k * len(own) // len(places)]
                with_sends.setdefault(source, []).append((place, (depth - max(known)) * hop_s))
            else:
                source = encodes.get(steps[place].piece, BEGIN)
                with_others.setdefault(source, []).append((place, 0.0))
    return with_sends, with_others
