"""Published scaling curves of HiPress (SOSP'21), and the same curves by the simulator.

The published throughput is that of Figs 7 and 8 (AWS) and Figs 14 and 15 (the local cluster). Two
systems are simulated on each cluster's preset:

    Ring       Horovod: gradients that became ready within 5 ms form one all-reduce, of at most
               64 MiB. The sum within one node adds to a step of any size what was published for one
               node, where it was not hidden.
    HiPress    gradients of 262,144 elements and more are compressed, as the release does; the sum
               within a node overlaps with backward.

One node is given, not predicted; for the other sizes no number is fitted. The variant of each
system was chosen with the figures at hand; docs/simulate.md has the errors of other variants.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hipress.plan import Decision
from hipress.profile import ModelProfile, Profile
from hipress.secopa.simulate import MOST_WHOLE, Simulator
from hipress.secopa.sosp21.presets import BATCH, CURVE_RATE_BITS, PRESETS, Layer, Preset, profile
from hipress.secopa.what_if import with_rate

CYCLE_S = 5e-3
FUSION_BYTES = 64 * 2**20
"""Defaults of Horovod 0.16."""
MIN_NUMEL = 262_144
"""The least number of elements of a gradient that the release compresses."""
NODES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Images per second of one model on one cluster, on 1, 2, 4, 8 and 16 nodes."""

    name: str
    cluster: str
    model: str
    codec: str
    ring: tuple[float, ...]
    """Horovod's ring without compression."""
    hipress: Mapping[str, tuple[float, ...]]
    """HiPress by strategy."""
    linear: tuple[float, ...]


DGC = "dgc(ratio=0.001)"
FIGURES = (
    Figure(
        name="Figs 7, 8",
        cluster="aws-v100",
        model="vgg19",
        codec="onebit",
        ring=(1562, 2349, 4369, 8157, 14655),
        hipress={
            "ps": (1562, 3143, 6163, 12170, 23507),
            "ring": (1567, 3043, 6053, 11921, 23097),
        },
        linear=(1652, 3305, 6610, 13219, 26438),
    ),
    Figure(
        name="Figs 7, 8",
        cluster="aws-v100",
        model="resnet50",
        codec=DGC,
        ring=(2490, 4797, 9254, 18099, 33133),
        hipress={"ring": (2490, 5061, 10009, 19652, 38864)},
        linear=(2622, 5243, 10486, 20973, 41946),
    ),
    Figure(
        name="Figs 14, 15",
        cluster="local-1080ti",
        model="vgg19",
        codec="onebit",
        ring=(198, 358, 629, 1194, 2118),
        hipress={"ps": (198, 449, 881, 1750, 3396), "ring": (197, 443, 876, 1722, 3374)},
        linear=(235, 469, 938, 1877, 3754),
    ),
    Figure(
        name="Figs 14, 15",
        cluster="local-1080ti",
        model="resnet50",
        codec=DGC,
        ring=(362, 701, 1366, 2751, 4844),
        hipress={"ring": (362, 745, 1473, 2902, 5645)},
        linear=(389, 778, 1555, 3110, 6221),
    ),
)


def compare(
    layers: Mapping[str, Sequence[Layer]], on_part: Callable[[float], None] = lambda fraction: None
) -> list[dict[str, Any]]:
    """Returns simulated and published values, one row for each figure, strategy and size from two
    nodes on.

    Args:
        layers: The layers of each model, in the order of backward.
        on_part: Called with the fraction that is done, from 0 to 1.
    """
    rows = []
    places = list(product(FIGURES, range(1, len(NODES))))
    for done, (figure, place) in enumerate(places, start=1):
        rows += _rows(figure, place, layers[figure.model])
        on_part(done / len(places))
    return rows


def errors(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Returns the median and the largest absolute error of the speed-ups."""
    found = [abs(row["error"]) for row in rows]
    return statistics.median(found), max(found)


def _rows(figure: Figure, place: int, layers: Sequence[Layer]) -> list[dict[str, Any]]:
    cluster, num_nodes = PRESETS[figure.cluster], NODES[place]
    images = BATCH * cluster.gpus * num_nodes
    linear_s = images / figure.linear[place]
    step_s = _step_times(figure, num_nodes, profile(cluster, figure.model, layers), cluster)
    other: dict[str, float] = {}
    if cluster.rate_bits != CURVE_RATE_BITS:
        faster = with_rate(profile(cluster, figure.model, layers), cluster.rate_bits)
        other = _step_times(figure, num_nodes, faster, cluster)
    rows = []
    for strategy, published in figure.hipress.items():
        speedup = published[place] / figure.ring[place]
        simulated = step_s[RING] / step_s[strategy]
        rows.append(
            {
                "figure": figure.name,
                "cluster": figure.cluster,
                "model": figure.model,
                "codec": figure.codec,
                "strategy": strategy,
                "nodes": num_nodes,
                "gpus": num_nodes * cluster.gpus,
                "published_speedup": speedup,
                "simulated_speedup": simulated,
                "error": simulated / speedup - 1,
                "line_rate_speedup": other[RING] / other[strategy] if other else None,
                "published_ring_step_s": images / figure.ring[place],
                "simulated_ring_step_s": step_s[RING],
                "published_step_s": images / published[place],
                "simulated_step_s": step_s[strategy],
                "published_ring_efficiency": figure.ring[place] / figure.linear[place],
                "simulated_ring_efficiency": linear_s / step_s[RING],
                "published_efficiency": published[place] / figure.linear[place],
                "simulated_efficiency": linear_s / step_s[strategy],
            }
        )
    return rows


RING = "Ring"
"""The name of the baseline among the strategies."""


def _step_times(figure: Figure, num_nodes: int, made: Profile, cluster: Preset) -> dict[str, float]:
    """Returns the step times of the baseline and of each strategy."""
    model = made.model
    assert model is not None
    fused = model.model_copy(update={"buckets": cycles(model), "bucket_mb": FUSION_BYTES / 2**20})
    # The time of one node beyond its compute is that of the sum among its GPUs, as published.
    one_node_s = BATCH * cluster.gpus / figure.ring[0] - model.forward_s - model.backward_s
    horovod = fused.model_copy(update={"rest_s": one_node_s})
    ring, hipress = (
        Simulator(made.model_copy(update={"model": each}), num_nodes, most_simulated=MOST_WHOLE)
        for each in (horovod, fused)
    )
    found = {RING: ring.step_s(None)}
    for strategy in figure.hipress:
        found[strategy] = hipress.step_s(
            {
                g.name: Decision(codec=figure.codec, strategy=strategy)
                if g.numel >= MIN_NUMEL
                else Decision(codec="none", strategy="allreduce")
                for g in model.gradients
            }
        )
    return found


def cycles(model: ModelProfile) -> tuple[tuple[str, ...], ...]:
    """Groups gradients as Horovod does: those that became ready in one cycle, as many as fit its
    buffer; a larger gradient travels alone."""
    found: list[list[str]] = []
    filled, last = 0, -1
    for gradient in model.gradients:
        size, now = model.element_bytes * gradient.numel, int(gradient.ready_s / CYCLE_S)
        if now != last or filled + size > FUSION_BYTES:
            found.append([])
            filled = 0
        found[-1].append(gradient.name)
        filled += size
        last = now
    return tuple(map(tuple, found))
