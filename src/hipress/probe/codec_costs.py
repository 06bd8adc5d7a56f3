"""Measures what codecs cost on this machine: each verb over some sizes, on all ranks at once.

Work is the CPU time of the thread that does it, not the time of the clock: the simulator accounts
for cores that ranks share. The effects of sharing caches and memory are included, because all ranks
measure at the same time, on memory that no cache holds. On a GPU, work is the time between two
events around a batch of calls, launches included.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from hipress.casync.engine.engine import Engine
from hipress.casync.engine.recipe import Options, chunk_numel, codes_local, without_state
from hipress.codecs.base import Codec, State
from hipress.codecs.program import ProgramCodec
from hipress.compll.backends.threads import stay_on_this_thread
from hipress.probe.cache import ERROR, VERBS, Cache, Points, last_phase
from hipress.profile import CodecCosts, Curve

SIZES = (2**12, 2**15, 2**18, 2**20, 2**21)
GPU_SIZES = (2**14, 2**18, 2**21, 2**24)
WORKERS = (2, 3, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
"""Numbers of workers for which the frame back is known; in between it is interpolated."""
VERB_S = 0.1
"""Seconds for one codec and verb, all sizes together."""
MIN_REPEATS, MAX_REPEATS = 3, 30
ERROR_NUMEL = 2**18

COLD_BYTES = 2**26
"""Bytes of gradients and states that are used in turn: twice a cache of 32 MB."""
MIN_SLOTS, MAX_SLOTS = 4, 128
SLOT_BYTES = 24
"""Bytes for one element of a slot: gradient, state and frame, both ways, and a codec's scratch."""
FREE_SHARE = 0.25
"""The share of a GPU's free memory that may be used, in the middle of a model's backward."""

OnPart = Callable[[float, str], None]
"""Called with the fraction that is done, from 0 to 1, and what is measured."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The sizes that are measured, and the memory for it; the same on all ranks."""

    sizes: tuple[int, ...]
    """Numbers of elements to measure with."""
    room_numel: int | None = None
    """Elements that all slots may hold together, if memory is short."""

    @classmethod
    def of(
        cls, sizes: Sequence[int], most_numel: int | None = None, room_numel: int | None = None
    ) -> Extent:
        """Returns as many sizes as a model needs and memory allows, but at least two.

        Example:
            >>> Extent.of((100, 200, 300), most_numel=250).sizes
            (100, 200)
        """
        most = min(most_numel or sizes[-1], (room_numel or 2**62) // MIN_SLOTS)
        within = sum(size <= most for size in sizes)
        return cls(tuple(sizes[: max(within, 2)]), room_numel)

    def num_slots(self, numel: int) -> int:
        """Returns the number of chunks of a size that are used in turn."""
        room = MAX_SLOTS if self.room_numel is None else self.room_numel // numel
        return max(MIN_SLOTS, min(MAX_SLOTS, COLD_BYTES // (8 * numel), room))

    def is_within(self, points: Points) -> bool:
        """Returns whether points that were measured before reach as far."""
        return max(int(numel) for numel, _ in points[VERBS[0]]) >= self.sizes[-1]


def measure(
    names: Sequence[str],
    device: torch.device | str = "cpu",
    num_ranks: int = 2,
    *,
    barrier: Callable[[], None] = lambda: None,
    on_part: OnPart = lambda fraction, label: None,
) -> list[CodecCosts]:
    """Measures codecs on this rank alone.

    Args:
        names: Codec expressions.
        device: The device of the gradients.
        num_ranks: The number of workers whose mean is sent back.
        barrier: Called before each verb and size, so that all ranks are busy at once.
        on_part: Called with the progress.

    Example:
        >>> measure(["fp16"])[0].wire.at(1000) >= 2000
        True
    """
    place = torch.device(device)
    extent = _extent(place, None, _room_numel(place))
    found = _measure_all(names, place, num_ranks, extent, barrier, on_part)
    return [_costs(name, points, place, num_ranks) for name, points in found.items()]


def costs(engine: Engine, names: Sequence[str], **options: Any) -> tuple[CodecCosts, ...]:
    """Measures codecs; returns medians over all ranks. Collective, with the same result on all.

    Args:
        engine: The engine of all ranks; nothing may be under way.
        names: Codec expressions, the same on all ranks.
        options: Options of `points`.
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
    on_part: OnPart = lambda fraction, label: None,
) -> list[dict[str, Points]]:
    """Returns what each rank measured; collective, with the same result on all ranks.

    Rank 0 has a file of what was measured before, and decides what is measured now.

    Args:
        engine: The engine of all ranks; nothing may be under way.
        names: Codec expressions, the same on all ranks.
        num_machine_ranks: Ranks that share a machine, and so slow each other down.
        fresh: Whether to measure what is known already.
        most_numel: Elements of the largest gradient; on a GPU no larger chunks are measured.
        barrier: Returns when all ranks have called it; by the store if None.
        on_part: Called with the progress.
    """
    num_ranks, rank = engine.transport.num_ranks, engine.transport.rank
    place = _place(engine)
    cache = Cache(place, num_ranks, num_machine_ranks) if rank == 0 else None
    known: dict[str, Points] = cache.load(names) if cache is not None and not fresh else {}
    told = engine.agree(
        "codecs to measure", {"codecs": list(names)}, share=[known, _room_numel(place)]
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

    def wait_for_all() -> None:
        engine.agree("the next codec", {})

    own = _measure_all(missing, place, num_ranks, extent, barrier or wait_for_all, on_part)
    of_all = engine.agree("costs of codecs", {}, share=own)
    if cache is not None:
        cache.save({name: _median([one[name] for one in of_all]) for name in missing})
    return [held | one for one in of_all]


def fitted(
    engine: Engine, names: Sequence[str], of_all: Sequence[Mapping[str, Points]]
) -> tuple[CodecCosts, ...]:
    """Returns costs by the medians of what ranks measured; not collective."""
    place, num_ranks = _place(engine), engine.transport.num_ranks
    return tuple(
        _costs(name, _median([one[name] for one in of_all]), place, num_ranks) for name in names
    )


def error_of(codec: Codec, x: torch.Tensor) -> float:
    """Returns the error of one message of some elements, as a share of their norm, without error
    feedback.

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


def _place(engine: Engine) -> torch.device:
    """Returns the device on which codecs work."""
    return torch.device("cpu") if engine.options.compress_on_cpu else engine.device


def _extent(device: torch.device, most_numel: int | None, room_numel: int | None) -> Extent:
    # On a CPU all sizes are measured: the cache keeps the curves for every model.
    if device.type != "cuda":
        return Extent(SIZES)
    return Extent.of(GPU_SIZES, most_numel, room_numel)


def _room_numel(device: torch.device) -> int | None:
    """Returns the elements that fit in a share of the free memory of a GPU."""
    if device.type != "cuda":
        return None
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(FREE_SHARE * free_bytes) // SLOT_BYTES


# --- one codec ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Slot:
    """The memory of one chunk."""

    x: torch.Tensor
    state: State
    frame: torch.Tensor
    back_state: State
    back_frame: torch.Tensor


def _measure_all(
    names: Sequence[str],
    device: torch.device,
    num_ranks: int,
    extent: Extent,
    barrier: Callable[[], None],
    on_part: OnPart,
) -> dict[str, Points]:
    """Measures on a thread of its own, as the executor works: kernels stay on it."""
    future: Future[dict[str, Points]] = Future()

    def measure_one(k: int, name: str) -> Points:
        def report(fraction: float) -> None:
            on_part((k + fraction) / len(names), name)

        return _measure_one(name, device, num_ranks, extent, barrier, report)

    def run() -> None:
        try:
            stay_on_this_thread()
            future.set_result({name: measure_one(k, name) for k, name in enumerate(names)})
        except BaseException as error:  # the caller raises it
            future.set_exception(error)

    threading.Thread(target=run, name="hipress-probe", daemon=True).start()
    return future.result()


def _measure_one(
    name: str,
    device: torch.device,
    num_ranks: int,
    extent: Extent,
    barrier: Callable[[], None],
    on_part: Callable[[float], None],
) -> Points:
    codec = last_phase(name)
    back = codec.aggregator(num_ranks)
    sizes = extent.sizes
    points: Points = {verb: [] for verb in VERBS}
    for k, numel in enumerate(sizes):
        on_part(k / len(sizes))
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
        # The sum has grown with every call: start over, with as many frames as a merge has.
        mean.zero_()
        for k_slot in range(num_ranks):
            add(slots[k_slot % len(slots)])
        found["back"] = time_each(encode_back)
        # The first frame of a sum overwrites it: what that costs more (sparse codecs fill with
        # zeros) or less (others need not read) comes once with each sum, as the frame back does.
        found["back"] = max(found["back"] + time_each(first) - found["add"], 0.0)
        found["decode"] = time_each(lambda s: back.decode(s.back_frame, out=s.x))
        for verb in VERBS:
            points[verb].append((numel, found[verb]))
    normal = torch.randn(ERROR_NUMEL, generator=torch.Generator().manual_seed(0))
    points[ERROR] = [(ERROR_NUMEL, error_of(codec, normal.to(device)))]
    return points


def _slots(codec: Codec, back: Codec, numel: int, device: torch.device, many: int) -> list[_Slot]:
    """Returns chunks to be used in turn: together larger than a cache, each used once already."""
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
        # Twice: with a residual, the second call is like all that follow.
        for _ in range(2):
            codec.encode(x, slot.state, out=slot.frame)
        back.encode(x, slot.back_state, out=slot.back_frame)
        found.append(slot)
    return found


def _seconds(
    call: Callable[[_Slot], object], slots: Sequence[_Slot], device: torch.device, budget_s: float
) -> float:
    """Returns the seconds of one call: the median of rounds over all slots."""
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

    def wire(of: Codec) -> Curve:
        return Curve.fit((numel, of.wire_bytes(numel)) for numel in sizes)

    return CodecCosts(
        codec=name,
        **{verb: Curve.fit(points[verb]) for verb in VERBS},
        wire=wire(codec),
        back_wire={count: wire(codec.aggregator(count)) for count in counts},
        chunk_numel=chunk_numel(codec, device, Options()),
        bulk=isinstance(codec, ProgramCodec),
        codes_local=codes_local(codec, num_ranks),
        error=points[ERROR][0][1],
    )


def _median(of_all: Sequence[Mapping[str, Any]]) -> Points:
    """Returns the medians over ranks, point by point."""
    return {
        verb: [
            (int(same[0][0]), statistics.median(float(seconds) for _, seconds in same))
            for same in zip(*(one[verb] for one in of_all), strict=True)
        ]
        for verb in (*VERBS, ERROR)
    }
