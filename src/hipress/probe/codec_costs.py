"""What codecs cost on this machine: each verb over some sizes, all ranks at once, kept on disk.

Work is the CPU time of the thread that does it, not the time of the clock: what ranks take from
each other by sharing cores is left to whoever simulates them. What they take from each other by
sharing caches and memory is in it, because all measure at the same time, on memory that no cache
holds. On a GPU it is the time between two events around a batch of calls, launches among it.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hipress.casync.engine.engine import Engine
from hipress.casync.engine.recipe import Options, chunk_numel, codes_local, without_state
from hipress.codecs.base import Codec, State
from hipress.codecs.program import ProgramCodec
from hipress.compll.backends.threads import stay_on_this_thread
from hipress.probe.cache import ERROR, VERBS, Cache, Points, last_phase
from hipress.probe.extent import Extent, room_numel
from hipress.profile import CodecCosts, Curve

SIZES = (2**12, 2**15, 2**18, 2**20, 2**21)
GPU_SIZES = (2**14, 2**18, 2**21, 2**24)
WORKERS = (2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Whose way back is known; between them it is a straight line."""
VERB_S = 0.1
"""Of the clock, for one codec and verb, all sizes together."""
MIN_REPEATS, MAX_REPEATS = 3, 30
ERROR_NUMEL = 2**18


@dataclass(frozen=True, slots=True)
class Measured:
    """One codec, as a rank saw it."""

    codec: str
    points: Points


def measure(
    names: Sequence[str],
    device: torch.device | str = "cpu",
    num_ranks: int = 2,
    *,
    barrier: Callable[[], None] | None = None,
    on_part: Callable[[float, str], None] = lambda fraction, label: None,
) -> list[CodecCosts]:
    """What codecs cost here, by this rank alone.

    Args:
        names: Expressions.
        device: Of the gradients.
        num_ranks: Workers whose mean goes back.
        barrier: Called before each verb and size, so that all ranks are busy at once.
        on_part: Told how far it is, from 0 to 1, and with what.

    Example:
        >>> measure(["fp16"])[0].wire.at(1000) >= 2000
        True
    """
    place = torch.device(device)
    extent = _extent(place, None, room_numel(place))
    wait = barrier or (lambda: None)
    found = [
        _measured(name, place, num_ranks, extent, wait, part(on_part, k, len(names)))
        for k, name in enumerate(names)
    ]
    return [_costs(one.codec, one.points, place, num_ranks) for one in found]


def costs(engine: Engine, names: Sequence[str], **options: Any) -> tuple[CodecCosts, ...]:
    """What codecs cost, the median over all ranks; collective, and the same on all of them.

    Args:
        engine: Of all ranks; nothing may be under way.
        names: Expressions, the same on all ranks.
        options: Of `points`.
    """
    return fitted(engine, names, points(engine, names, **options))


def points(
    engine: Engine,
    names: Sequence[str],
    *,
    num_machine_ranks: int,
    fresh: bool = False,
    most_numel: int | None = None,
    barrier: Callable[[], None] | None = None,
    on_part: Callable[[float, str], None] = lambda fraction, label: None,
) -> list[dict[str, Points]]:
    """What each rank saw codecs cost; collective, and the same on all of them.

    Rank 0 has a file of what was measured before, and decides what is measured now.

    Args:
        engine: Of all ranks; nothing may be under way.
        names: Expressions, the same on all ranks.
        num_machine_ranks: Ranks that share a machine, and so are in each other's way.
        fresh: Measure, whatever is known.
        most_numel: Of the largest gradient: on a GPU larger chunks are not measured.
        barrier: Returns when all ranks have called it; by the store if None.
        on_part: Told how far it is, from 0 to 1, and with what.
    """
    num_ranks, rank = engine.transport.num_ranks, engine.transport.rank
    place = _place(engine)
    cache = Cache(place, num_ranks, num_machine_ranks) if rank == 0 else None
    known: dict[str, Points] = cache.load(names) if cache is not None and not fresh else {}
    told = engine.agree(
        "codecs to measure", {"codecs": list(names)}, share=[known, room_numel(place)]
    )
    rooms = [room for _, room in told if room is not None]
    extent = _extent(place, most_numel, min(rooms, default=None))
    held: dict[str, Points] = {
        name: found
        for name, found in told[0][0].items()
        if place.type != "cuda" or extent.is_within(found)
    }
    missing = [name for name in names if name not in held]
    if not missing:
        return [held]
    wait = barrier or (lambda: void(engine.agree("the next codec", {})))
    own = {
        name: _measured(name, place, num_ranks, extent, wait, part(on_part, k, len(missing))).points
        for k, name in enumerate(missing)
    }
    of_all = engine.agree("costs of codecs", {}, share=own)
    if cache is not None:
        cache.save({name: _median([one[name] for one in of_all]) for name in missing})
    return [held | one for one in of_all]


def fitted(
    engine: Engine, names: Sequence[str], of_all: Sequence[Mapping[str, Points]]
) -> tuple[CodecCosts, ...]:
    """Costs from what ranks saw, the medians; each rank by itself."""
    place, num_ranks = _place(engine), engine.transport.num_ranks
    return tuple(
        _costs(name, _median([one[name] for one in of_all]), place, num_ranks) for name in names
    )


def _place(engine: Engine) -> torch.device:
    """Where codecs work."""
    return torch.device("cpu") if engine.options.compress_on_cpu else engine.device


def _extent(device: torch.device, most_numel: int | None, room_numel: int | None) -> Extent:
    """What is measured: on a CPU all sizes, whose curves are kept for every model."""
    if device.type != "cuda":
        return Extent(SIZES)
    return Extent.of(GPU_SIZES, most_numel, room_numel)


def void(_: object) -> None:
    """Drops a value."""


def part(
    on_part: Callable[[float, str], None], k: int, num_parts: int
) -> Callable[[float, str], None]:
    """The k-th part of a progress, as one of its own."""
    return lambda fraction, label: on_part((k + fraction) / max(num_parts, 1), label)


def error_of(codec: Codec, x: torch.Tensor) -> float:
    """Of one message of some elements, as a share of their norm, without error feedback.

    Example:
        >>> error_of(last_phase("none"), torch.ones(10))
        0.0
    """
    plain = without_state(codec)
    x = x.detach().reshape(-1).float()
    norm = float(torch.linalg.vector_norm(x))
    if norm == 0.0 or not math.isfinite(norm):
        return 0.0
    out = torch.empty_like(x)
    plain.decode(plain.encode(x, plain.init(x)), out=out)
    return float(torch.linalg.vector_norm(x - out)) / norm


# --- one codec ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Slot:
    """The memory of one chunk."""

    x: torch.Tensor
    state: State
    frame: torch.Tensor
    back_state: State
    back_frame: torch.Tensor


def _measured(
    name: str,
    device: torch.device,
    num_ranks: int,
    extent: Extent,
    barrier: Callable[[], None],
    on_part: Callable[[float, str], None],
) -> Measured:
    """Runs on a thread of its own, as in the executor: kernels stay on it."""
    found: list[Measured | BaseException] = []

    def run() -> None:
        try:
            stay_on_this_thread()
            found.append(_measure_one(name, device, num_ranks, extent, barrier, on_part))
        except BaseException as error:  # for the caller
            found.append(error)

    thread = threading.Thread(target=run, name="hipress-probe", daemon=True)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def _measure_one(
    name: str,
    device: torch.device,
    num_ranks: int,
    extent: Extent,
    barrier: Callable[[], None],
    on_part: Callable[[float, str], None],
) -> Measured:
    codec = last_phase(name)
    back = codec.aggregator(num_ranks)
    sizes = extent.sizes
    points: Points = {verb: [] for verb in VERBS}
    for k, numel in enumerate(sizes):
        on_part(k / len(sizes), name)
        slots = _slots(codec, back, numel, device, extent.num_slots(numel))
        mean = torch.zeros(numel, device=device)
        alpha = 1.0 / num_ranks
        budget_s = VERB_S / len(sizes)

        def time_each(call: Callable[[_Slot], object]) -> float:
            barrier()
            return _seconds(call, slots, device, budget_s)  # noqa: B023

        def add(slot: _Slot) -> None:
            codec.decode(slot.frame, out=mean, add=True, alpha=alpha)  # noqa: B023

        def first(slot: _Slot) -> None:
            codec.decode(slot.frame, out=mean, add=False, alpha=alpha)  # noqa: B023

        def encode_back(slot: _Slot) -> None:
            back.encode(mean, slot.back_state, out=slot.back_frame)  # noqa: B023

        found = {"encode": time_each(lambda s: codec.encode(s.x, s.state, out=s.frame))}
        found["add"] = time_each(add)
        # Sums that no frame was ever taken out of would grow: start over, with as many as merge.
        mean.zero_()
        for k_slot in range(num_ranks):
            add(slots[k_slot % len(slots)])
        found["back"] = time_each(encode_back)
        # The first frame of a sum overwrites it: what that costs more (sparse codecs fill with
        # zeros) or less (others need not read) comes once with each sum, as the way back does.
        found["back"] = max(found["back"] + time_each(first) - found["add"], 0.0)
        found["decode"] = time_each(lambda s: back.decode(s.back_frame, out=s.x))
        for verb in VERBS:
            points[verb].append((numel, found[verb]))
    normal = torch.randn(ERROR_NUMEL, generator=torch.Generator().manual_seed(0))
    points[ERROR] = [(ERROR_NUMEL, error_of(codec, normal.to(device)))]
    return Measured(name, points)


def _slots(codec: Codec, back: Codec, numel: int, device: torch.device, many: int) -> list[_Slot]:
    """Chunks to be used in turn: together larger than a cache, each used once already."""
    generator = torch.Generator().manual_seed(numel)
    drawn = torch.randn(numel, generator=generator).to(device)
    found = []
    for k in range(many):
        x = drawn * (1.0 + k / many)
        slot = _Slot(
            x=x,
            state=codec.init(x, stream=k),
            frame=torch.empty(codec.wire_bytes(numel), dtype=torch.uint8, device=device),
            back_state=back.init(x, stream=k),
            back_frame=torch.empty(back.wire_bytes(numel), dtype=torch.uint8, device=device),
        )
        # Twice: the second of a codec with a residual is as all that follow.
        for _ in range(2):
            codec.encode(x, slot.state, out=slot.frame)
        back.encode(x, slot.back_state, out=slot.back_frame)
        found.append(slot)
    return found


def _seconds(
    call: Callable[[_Slot], object], slots: Sequence[_Slot], device: torch.device, budget_s: float
) -> float:
    """Of one call: the median of rounds over all slots."""
    samples: list[float] = []
    until = time.perf_counter() + budget_s
    while len(samples) < MIN_REPEATS or (
        len(samples) < MAX_REPEATS and time.perf_counter() < until
    ):
        samples.append(_round_s(call, slots, device) / len(slots))
    return statistics.median(samples)


def _round_s(
    call: Callable[[_Slot], object], slots: Sequence[_Slot], device: torch.device
) -> float:
    if device.type != "cuda":
        start = time.thread_time()
        for slot in slots:
            call(slot)
        return time.thread_time() - start
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    with torch.cuda.device(device):
        events[0].record()
        for slot in slots:
            call(slot)
        events[1].record()
    torch.cuda.synchronize(device)
    return float(events[0].elapsed_time(events[1])) * 1e-3


def _costs(name: str, points: Points, device: torch.device, num_ranks: int) -> CodecCosts:
    codec = last_phase(name)
    sizes = GPU_SIZES if device.type == "cuda" else SIZES
    counts = sorted({*WORKERS, max(num_ranks, 2)})
    return CodecCosts(
        codec=name,
        encode=Curve.fit(points["encode"]),
        decode=Curve.fit(points["decode"]),
        add=Curve.fit(points["add"]),
        back=Curve.fit(points["back"]),
        wire=_wire(codec, sizes),
        back_wire={count: _wire(codec.aggregator(count), sizes) for count in counts},
        chunk_numel=chunk_numel(codec, device, Options()),
        bulk=isinstance(codec, ProgramCodec),
        codes_local=codes_local(codec, num_ranks),
        error=points[ERROR][0][1],
    )


def _wire(codec: Codec, sizes: Sequence[int]) -> Curve:
    return Curve.fit((numel, codec.wire_bytes(numel)) for numel in sizes)


def _median(of_all: Sequence[Mapping[str, Any]]) -> Points:
    """Point by point, over ranks."""
    return {
        verb: [
            (int(same[0][0]), statistics.median(float(seconds) for _, seconds in same))
            for same in zip(*(one[verb] for one in of_all), strict=True)
        ]
        for verb in (*VERBS, ERROR)
    }
