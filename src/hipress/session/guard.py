"""The accuracy guard: measures on the job's own gradients what codecs make of them.

On some steps it looks at up to `SAMPLE` elements of each compressed layer. Over a window of such
steps it adds up

    true      what codecs held back before, and what all ranks sent since: the mean over ranks
    decoded   what all ranks received instead

With error feedback one message says little, the sums say all: a healthy codec has delivered most of
what it was given, and a residual that grows without being sent shows as true without decoded. One
small uncompressed exchange gives all ranks the same numbers, so all decide the same without asking.
A layer that falls out takes the next milder codec (`milder.py`).

`places`, `Tally`, `numbers` and `judge` know no ranks; `Guard` takes the samples and switches.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch

from hipress.casync.engine.handle import Handle
from hipress.casync.graphs.graph import Kind
from hipress.codecs import residual
from hipress.codecs.base import Codec
from hipress.session import checkpoint
from hipress.session.buckets import (
    MOMENTUM,
    UNSENT,
    Bucket,
    Content,
    Gradient,
    has_momentum,
    keeps_residual,
)
from hipress.session.milder import Override, decay, milder
from hipress.session.mode import Mode

if TYPE_CHECKING:
    from hipress.session.session import Session

_log = logging.getLogger("hipress")

SAMPLE = 2048
"""Most elements of a layer that are looked at."""
SAMPLE_OF_ALL = 2**18
"""Most elements of all layers together, unless that leaves fewer than `LEAST_SAMPLE` of each."""
LEAST_SAMPLE = 256
LOOKS = (2, 10, 40)
"""Steps of a window after which its sums are looked at: a codec that ruins the model is found by
the first, a good one is left alone after the second, a doubtful one is judged by the third."""
PAUSES = (100, 1000)
"""Steps from the end of a layer's first window to its second; it doubles up to the last."""
RETRY_AFTER = 1000
"""Steps after which an inaccurate codec is tried again, once."""
MOST_GAP = 4
"""Steps without a sample after which a window begins anew: momentum has gone on meanwhile."""
NAME = "the guard's sample"

# The limits lie between healthy and wrong codecs; docs/design-choices.md has the measurements.
LEAST_COSINE = {True: 0.1, False: 0.2}
"""The lowest cosine allowed, by whether the codec has error feedback."""
LEAST_SHARE = 0.2
"""Without error feedback. With it what is missing comes later: dgc(ratio=0.001) has 0.02."""
MOST_ERROR = 1.5
"""With error feedback: a residual that is larger than all that was to be sent."""
MOST_SIZE = 10.0
OPPOSITE = -0.3
GOOD_COSINE, GOOD_SHARE = 0.5, 0.3


# --- numbers and what follows from them -----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What was measured of one layer in one window."""

    steps: int
    cosine: float
    """The cosine between what was decoded and the exact values."""
    share: float
    """How much of the truth has arrived: 1 is all of it."""
    error: float
    """The norm of what is missing or wrong, over that of the truth."""
    size: float
    """The norm of what was decoded, over that of the truth."""
    cancels: bool = False
    """Whether gradients have cancelled each other, so that the direction of their sum is chance."""
    is_finite: bool = True
    """Whether the true mean was finite throughout."""
    is_broken: bool = False
    """Whether the decoded mean stopped to be finite while the gradients of all ranks were."""

    def __str__(self) -> str:
        if self.is_broken:
            return f"not finite within {self.steps} steps, where the true mean is"
        return (
            f"cosine {self.cosine:.2f}, error {self.error:.2g}, share {self.share:.2g} "
            f"over {self.steps} steps"
        )


class Verdict(Enum):
    """What follows from the numbers of one look."""

    GOOD = "good"
    """The window is closed."""
    OPEN = "open"
    """The window goes on to the next look."""
    AGAIN = "again"
    """The window begins anew: the true mean was not finite, which is not the codec's fault."""
    INACCURATE = "inaccurate"
    """The layer takes a milder codec, and may come back."""
    WRONG = "wrong"
    """The layer takes a milder codec for good: no gradient makes a right codec do this."""

    @property
    def falls_out(self) -> bool:
        """Whether the layer takes a milder codec."""
        return self in (Verdict.INACCURATE, Verdict.WRONG)


def judge(numbers: Numbers, codec: Codec) -> Verdict:
    """Returns what follows from the numbers of a layer with this codec.

    Example:
        >>> import hipress
        >>> good = Numbers(steps=10, cosine=0.9, share=0.8, error=0.4, size=0.9)
        >>> judge(good, hipress.codec("onebit"))
        <Verdict.GOOD: 'good'>
        >>> judge(replace(good, cosine=0.05), hipress.codec("onebit"))
        <Verdict.OPEN: 'open'>
        >>> judge(replace(good, cosine=0.05, steps=40), hipress.codec("onebit"))
        <Verdict.INACCURATE: 'inaccurate'>
    """
    if numbers.is_broken:
        return Verdict.WRONG
    if not numbers.is_finite:
        return Verdict.AGAIN
    has_residual = keeps_residual(codec)
    if numbers.size > MOST_SIZE or (has_residual and numbers.error > MOST_ERROR):
        return Verdict.WRONG
    if numbers.steps >= LOOKS[1] and numbers.cosine < OPPOSITE and not numbers.cancels:
        return Verdict.WRONG
    if numbers.steps < LOOKS[1]:
        return Verdict.OPEN
    if numbers.cosine >= GOOD_COSINE and numbers.share >= GOOD_SHARE:
        return Verdict.GOOD
    if numbers.steps < LOOKS[-1]:
        return Verdict.OPEN
    if numbers.cancels:
        return Verdict.GOOD
    is_bad = numbers.cosine < LEAST_COSINE[has_residual]
    if not has_residual and codec.clip == 0:
        is_bad = is_bad or numbers.share < LEAST_SHARE
    return Verdict.INACCURATE if is_bad else Verdict.GOOD


def places(name: str, numel: int, sample: int = SAMPLE) -> slice:
    """Returns which elements of a gradient are looked at: evenly spread, the same on all ranks.

    Example:
        >>> places("weight", 10)
        slice(0, 10, 1)
    """
    stride = max(1, -(-numel // sample))
    # Rows of a matrix often have 2^a * 3^b * ... elements: such a stride would see few columns.
    while stride > 8 and math.gcd(stride, 210) > 1:
        stride += 1
    first = zlib.crc32(name.encode()) % stride
    return slice(first, numel, stride)


def num_places(which: slice) -> int:
    """Returns how many elements these places are."""
    return len(range(which.start, which.stop, which.step))


class Tally:
    """The sums of a window for several layers, a row each.

    Args:
        numels: Number of sampled elements of each layer.
        device: Where gradients are.
    """

    def __init__(self, numels: Sequence[int], device: torch.device | None = None) -> None:
        most = max(numels, default=0)
        self.told = torch.zeros(len(numels), most + 2, device=device)
        """What differs between ranks and is averaged: the truth, and two columns more."""
        self.true = self.told[:, :most]
        self.energy = self.told[:, most]
        """Sums of the squares of what this rank should have sent."""
        self.broken = self.told[:, most + 1]
        """1 where decoded values stopped to be finite before the true ones did."""
        self.decoded = torch.zeros(len(numels), most, device=device)
        self.path = torch.zeros(len(numels), most, device=device)
        """This rank's momentum as it would be if nothing had been compressed since the window
        began; without momentum, the gradient."""
        self.num_finite = torch.zeros(2, len(numels), device=device)
        """Number of steps in which the true and the decoded values of each row were finite."""

    def begin(self, row: int, held: torch.Tensor | None, momentum: torch.Tensor | None) -> None:
        """Begins the window of a layer.

        Args:
            row: The row of the layer.
            held: What codecs have not sent yet, of this rank's share.
            momentum: The momentum before the first step.
        """
        for one in (self.told, self.decoded, self.path):
            one[row].zero_()
        self.num_finite[:, row].zero_()
        if momentum is not None:
            self.path[row, : momentum.numel()].add_(momentum)
        if held is not None:
            self.true[row, : held.numel()].add_(held)

    def add_true(self, row: int, value: torch.Tensor, decay: float = 0.0) -> None:
        """Adds a gradient of this rank, or with `decay` what it adds to the momentum."""
        path = self.path[row, : value.numel()]
        path.mul_(decay).add_(value)
        self.true[row, : value.numel()].add_(path)
        self.energy[row].add_(path.square().sum())

    def end_step(self) -> None:
        """Notes which rows are still finite."""
        self.num_finite[0].add_(self.true.sum(1).isfinite())
        self.num_finite[1].add_(self.decoded.sum(1).isfinite())
        self.broken.copy_(self.num_finite[0] > self.num_finite[1])

    def scale(self, ratio: float) -> None:
        """Brings everything to another loss scale."""
        for one in (self.true, self.decoded, self.path):
            one.mul_(ratio)
        self.energy.mul_(ratio * ratio)


def sums(told: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
    """Returns what `numbers` needs, a row for each layer.

    Args:
        told: The mean of `Tally.told` over ranks.
        decoded: What all ranks have decoded.
    """
    true, decoded = told[:, : decoded.shape[1]].double(), decoded.double()
    wrong = decoded - true
    pairs = ((true, true), (decoded, decoded), (wrong, wrong), (true, decoded))
    products = torch.stack([(a * b).sum(1) for a, b in pairs], 1)
    return torch.cat([products, told[:, decoded.shape[1] :].double()], 1)


def numbers(row: Sequence[float], steps: int, num_ranks: int) -> Numbers:
    """Returns the numbers of one layer.

    Args:
        row: Its row of `sums`.
        steps: Steps of the window.
        num_ranks: The number of ranks.
    """
    true2, decoded2, wrong2, product, energy, broken = row
    is_broken = broken > 1 - 0.5 / num_ranks
    if not all(map(math.isfinite, row)):
        return Numbers(
            steps=steps, cosine=0.0, share=0.0, error=0.0, size=0.0,
            is_finite=False, is_broken=is_broken,
        )  # fmt: skip
    # The norm of a sum of gradients that have nothing to do with each other.
    chance = math.sqrt(energy / num_ranks)
    true = max(math.sqrt(true2), chance, 1e-30)
    return Numbers(
        steps=steps,
        cosine=product / math.sqrt(true2 * decoded2) if true2 * decoded2 > 0 else 0.0,
        share=product / true2 if true2 > 0 else 0.0,
        error=math.sqrt(wrong2) / true,
        size=math.sqrt(decoded2) / true,
        cancels=math.sqrt(true2) <= 0.5 * chance or true2 == 0,
        is_broken=is_broken,
    )


# --- the samples and the switch -------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GuardStats:
    """What the guard has found so far."""

    num_looks: int
    """How often the sums of windows were looked at."""
    codecs: dict[str, str]
    """The codec of each compressed gradient."""
    measured: dict[str, Numbers]
    """The last numbers of each gradient."""
    overrides: dict[str, Override]
    """Gradients that have a milder codec than was asked for, since when and why."""


@dataclass(slots=True)
class _Watch:
    """One compressed gradient under the guard."""

    gradient: Gradient
    row: int
    which: slice
    opens_at: int
    """The step, counted in compressed ones, from which on it is sampled."""
    pause: int = PAUSES[0]
    look: int = 0
    """The index in `LOOKS` of the next look."""
    steps: int = 0
    """Steps of the window so far."""
    last_step: int = 0
    is_looked_at: bool = False

    @property
    def name(self) -> str:
        return self.gradient.name


@dataclass(slots=True)
class _Look:
    """Numbers that are on their way."""

    windows: list[tuple[_Watch, int]]
    """The layers, each with the steps of its window."""
    told: torch.Tensor
    decoded: torch.Tensor
    exchange: Handle
    rows: torch.Tensor | None = None
    """The sums, on the host; a GPU may still be writing them until `written`."""
    written: Any = None


@dataclass(slots=True)
class _Noted:
    """A layer that was sampled before the exchange of this step."""

    watch: _Watch
    part: torch.Tensor


@dataclass
class Guard:
    """Watches the codecs of a session, and replaces those that are not accurate enough."""

    measured: dict[str, Numbers] = field(default_factory=dict)
    num_looks: int = 0
    is_active: bool = False
    """Whether some layers are sampled in this step."""
    _tick: int = 0
    """Number of compressed steps."""
    _next: int = 0
    """The first tick in which a layer is sampled."""
    _watches: dict[str, _Watch] = field(default_factory=dict)
    _version: int = -1
    """The version of the layout that the watches belong to."""
    _tally: Tally | None = None
    _noted: list[_Noted] = field(default_factory=list)
    _look: _Look | None = None

    # In a step, in this order.

    def begin(self, session: Session) -> None:
        """Carries out what was decided, and finds out which layers are sampled in this step."""
        if self._noted:
            self.restart()  # the last step was broken off, and its means were not seen
        self.is_active = False
        if session.mode.current is not Mode.COMPRESSED:
            if session.mode.current is Mode.FLUSHING:
                self.restart()
            return
        self._tick += 1
        self._end_flushes(session)
        self._follow(session)
        changes = self._decided(session) | self._retries(session)
        if changes:
            self._switch(session, changes)
            self._follow(session)
        self.is_active = bool(self._watches) and self._tick >= self._next

    def take(
        self,
        session: Session,
        bucket: Bucket,
        buffer: torch.Tensor,
        contents: Sequence[Content],
        later: Iterable[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Takes samples of what is about to be sent.

        Args:
            session: The session.
            bucket: What lies in the buffer.
            buffer: Its elements.
            contents: What the part of each group holds.
            later: Parts of the buffer, and what is added to their means.
        """
        owed = {part.data_ptr(): value for part, value in later}
        poison: torch.Tensor | None = None
        for group, content in zip(bucket.groups, contents, strict=True):
            if content is Content.REFRESH:
                continue  # the gradients go with another codec in this step
            is_momentum = content is Content.MOMENTUM
            for name, (start, stop) in zip(group.names, group.spans, strict=True):
                watch = self._watches.get(name)
                if watch is None or watch.opens_at > self._tick:
                    continue
                if poison is None:  # a codec makes NaN of a whole frame if one element is NaN
                    poison = buffer.sum(dtype=torch.float32).mul_(0.0)
                part = buffer[start:stop]
                self._take(session, watch, part, poison, is_momentum, owed.get(part.data_ptr()))

    def end(self, session: Session) -> None:
        """Takes samples of the means, and starts or ends a look at the sums."""
        if self._look is not None and self._look.rows is None:
            self._read(self._look)
        if not self._noted:
            return
        tally = self._tally
        assert tally is not None
        due = []
        for noted in self._noted:
            watch, sampled = noted.watch, noted.part[noted.watch.which]
            tally.decoded[watch.row, : sampled.numel()].add_(sampled)
            watch.steps += 1
            watch.last_step = session.step
            if watch.steps >= LOOKS[watch.look] and not watch.is_looked_at:
                due.append(watch)
        self._noted.clear()
        tally.end_step()
        if due and self._look is None:
            self._start_look(session, due, tally)

    def restart(self) -> None:
        """Begins all windows anew, and forgets numbers that are on their way."""
        self._look = None
        self._noted.clear()
        for watch in self._watches.values():
            watch.steps, watch.is_looked_at = 0, False
        self._note_next()

    def scale(self, ratio: float) -> None:
        """Brings the sums to another loss scale."""
        if self._tally is not None:
            self._tally.scale(ratio)

    def stats(self, session: Session) -> GuardStats:
        """Returns what was found so far."""
        return GuardStats(
            num_looks=self.num_looks,
            codecs={g.name: g.choice.codec.name for g in session.layout.compressed},
            measured=dict(self.measured),
            overrides={n: made for n, made in session.layout.overrides.items() if made.codec},
        )

    # Samples.

    def _follow(self, session: Session) -> None:
        """Follows the layout: a layer with another codec gets a new window."""
        layout = session.layout
        if layout.version == self._version:
            return
        self._version = layout.version
        found = [g for g in layout.compressed if g.numel]
        sample = max(LEAST_SAMPLE, min(SAMPLE, SAMPLE_OF_ALL // max(len(found), 1)))
        old, self._watches = self._watches, {}
        for row, gradient in enumerate(found):
            watch = _Watch(
                gradient, row, places(gradient.name, gradient.numel, sample), opens_at=self._tick
            )
            known = old.get(gradient.name)
            if known is not None and known.gradient.choice.codec.name == gradient.choice.codec.name:
                watch.opens_at, watch.pause, watch.look = known.opens_at, known.pause, known.look
            self._watches[gradient.name] = watch
        self._tally = None
        if found:
            sizes = [num_places(watch.which) for watch in self._watches.values()]
            self._tally = Tally(sizes, session.engine.device)
            if session.schedule is not None:
                # Ranks agree on a new exchange here, where all begin a step, and not at its end,
                # which is wherever a rank next reads a parameter.
                session.engine.allreduce([self._tally.told.clone()], name=NAME, step=session.step)
        self.restart()

    def _take(
        self,
        session: Session,
        watch: _Watch,
        part: torch.Tensor,
        poison: torch.Tensor,
        is_momentum: bool,
        owed: torch.Tensor | None,
    ) -> None:
        tally, adapter = self._tally, session.adapter
        assert tally is not None
        if is_momentum and session.step - watch.last_step > MOST_GAP:
            watch.steps = 0
        factor = decay(watch.gradient.choice.codec)
        known: torch.Tensor | None = None
        if is_momentum:
            factor = adapter.momentum_factor(watch.name)
            known = adapter.known_momentum(watch.name, session.scale)[watch.which].float()
        if watch.steps == 0:
            if session.engine.states.has_preloaded(watch.name):
                return  # it is taken over in this step
            held, momentum = _held(session, watch)
            if known is not None:
                momentum = known / factor if factor else None
            tally.begin(watch.row, held, momentum)
        value = part[watch.which].float() + poison
        tally.add_true(watch.row, value if known is None else value - known, factor)
        if owed is not None:
            sampled = owed[watch.which]
            tally.true[watch.row, : sampled.numel()].add_(sampled)
        self._noted.append(_Noted(watch, part))

    # Looks: numbers of step n are exchanged after it, read after step n + 1, and decided on before
    # step n + 2, so that nobody waits for a network or a GPU.

    def _start_look(self, session: Session, due: list[_Watch], tally: Tally) -> None:
        told, decoded = tally.told.clone(), tally.decoded.clone()
        exchange = session.engine.allreduce([told], name=NAME, step=session.step)
        self._look = _Look([(watch, watch.steps) for watch in due], told, decoded, exchange)
        for watch in due:
            watch.is_looked_at = True

    def _read(self, look: _Look) -> None:
        look.exchange.wait()
        rows = sums(look.told, look.decoded)
        if rows.is_cuda:
            look.rows = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            look.rows.copy_(rows, non_blocking=True)
            look.written = torch.cuda.current_stream(rows.device).record_event()
        else:
            look.rows = rows

    def _decided(self, session: Session) -> dict[str, Override]:
        """Returns the layers that fall out, if numbers have come; updates all windows."""
        look = self._look
        if look is None or look.rows is None:
            return {}
        self._look = None
        self.num_looks += 1
        if look.written is not None:
            look.written.synchronize()
        rows, num_ranks = look.rows.tolist(), session.engine.transport.num_ranks
        changes: dict[str, Override] = {}
        for watch, steps in look.windows:
            found = numbers(rows[watch.row], steps, num_ranks)
            codec = watch.gradient.choice.codec
            verdict = judge(found, codec)
            watch.is_looked_at = False
            self.measured[watch.name] = found
            next_codec = milder(codec) if verdict.falls_out else None
            if next_codec is not None:
                changes[watch.name] = self._override(session, watch, next_codec, found, verdict)
            elif verdict is Verdict.AGAIN:
                watch.steps = 0
            elif verdict is Verdict.OPEN:
                watch.look += 1
            else:
                watch.steps, watch.look = 0, 1
                watch.opens_at = self._tick + watch.pause
                watch.pause = min(2 * watch.pause, PAUSES[1])
        self._note_next()
        return changes

    def _note_next(self) -> None:
        never = self._tick + PAUSES[1]
        self._next = min((watch.opens_at for watch in self._watches.values()), default=never)

    def _override(
        self, session: Session, watch: _Watch, codec: str, found: Numbers, verdict: Verdict
    ) -> Override:
        last = session.layout.overrides.get(watch.name)
        retries = verdict is Verdict.INACCURATE and (last is None or last.retry_at is not None)
        return Override(
            codec=codec,
            before=watch.gradient.choice.codec.name,
            reason=str(found),
            step=session.step,
            retry_at=session.step + RETRY_AFTER if retries else None,
        )

    # The switch.

    def _retries(self, session: Session) -> dict[str, Override]:
        """Returns the layers whose faster codec is tried again now."""
        return {
            name: replace(
                made, codec="", reason="it is tried again", retry_at=None, step=session.step
            )
            for name, made in session.layout.overrides.items()
            if made.retry_at is not None and session.step >= made.retry_at and not made.flushes
        }

    def _switch(self, session: Session, changes: Mapping[str, Override]) -> None:
        """Gives layers another codec, in this step on all ranks; collective.

        What the old codecs have not sent is owed to the next gradients.
        """
        engine, layout = session.engine, session.layout
        engine.wait_idle()
        wanted = {name: made.codec for name, made in changes.items()}
        engine.agree("a switch of the guard", {"step": session.step, "codecs": wanted})
        lines: dict[tuple[str, str], list[str]] = {}
        for name, made in changes.items():
            old = session.gradients[name]
            momentum = checkpoint.own_momentum(engine, old)
            left = checkpoint.unsent(engine, old)
            engine.allreduce([left]).wait()
            engine.forget((name, old.refresh_name))
            new = layout.override(name, made)
            if left.isfinite().all() and left.any():
                if old.sends_momentum:
                    checkpoint.owe_momentum(session, name, left)
                else:
                    checkpoint.owe(session, name, left)
            if old.sends_momentum and not new.sends_momentum and name in session.owed.momentum:
                layout.override(name, replace(made, flushes=True))
            if momentum is not None and has_momentum(new.choice.codec):
                checkpoint.give_momentum(engine, name, {"momentum": momentum})
            key = (old.choice.codec.name, new.choice.codec.name)
            lines.setdefault(key, []).append(f"{name} ({made.reason})")
        for line in _lines(lines):
            session.monitor.note(session.step, "guard", line)
            if engine.transport.rank == 0:
                _log.warning("guard, step %d: %s.", session.step, line)

    def _end_flushes(self, session: Session) -> None:
        """Gives layers their milder codec whose unsent momentum has been sent."""
        for name, made in list(session.layout.overrides.items()):
            if made.flushes and name not in session.owed.momentum:
                session.engine.forget((name, session.gradients[name].refresh_name))
                session.layout.override(name, replace(made, flushes=False))


def _held(session: Session, watch: _Watch) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Returns samples of what codecs of this rank have not sent, and of their momentum."""
    engine, which = session.engine, watch.which
    found: dict[bool, torch.Tensor] = {}
    for key, state in engine.states.partitions_of(watch.name).items():
        first = max(0, -(-(key.start - which.start) // which.step))
        inside = which.start + first * which.step - key.start
        if inside >= key.stop - key.start:
            continue
        for name, value in state.items():
            is_unsent = name in UNSENT
            if not is_unsent and not (name in MOMENTUM and key.kind is Kind.FRAME):
                continue
            if is_unsent not in found:
                found[is_unsent] = torch.zeros(num_places(which), device=engine.device)
            sampled = residual.values(value, key.numel)[inside :: which.step].to(engine.device)
            share = checkpoint.own_factor(engine, watch.gradient, key) if is_unsent else 1
            found[is_unsent][first : first + sampled.numel()].add_(sampled, alpha=share)
    return found.get(True), found.get(False)


def _lines(switches: Mapping[tuple[str, str], Sequence[str]]) -> Iterator[str]:
    """Yields a sentence for each pair of an old and a new codec."""
    for (before, after), layers in switches.items():
        shown = ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" * (len(layers) > 3))
        yield f"from {before} to {after}: {shown}"
