"""The faults: what is done to a job, and what must hold afterwards.

The docstring of a class is its rule; `judge` is the rule as code, on nothing but what the ranks
have told. A fault is drawn from a seed before its job starts, so that an episode can be repeated.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tests.chaos.seen import (
    ERROR_S,
    Failure,
    Seen,
    ended,
    named,
    replicas_agree,
    went_on,
)

if TYPE_CHECKING:
    from tests.chaos.run import Job

WENT_ON, ENDED, UNSEEN, FINDING, MISSED = "went on", "ended", "unseen", "finding", "missed"
"""Outcomes: the job goes on; all ranks end as they should; replicas differ after damage that no
check covers, in a job without the replica check; a rule is broken; the fault did not happen."""


class Fault:
    """One fault.

    Args:
        draw: Random numbers, of which every fault takes its own.
        num_ranks: The number of ranks of the job.
    """

    name: ClassVar[str]
    may_be_early: ClassVar[bool] = False
    """Whether it can hit a job that has not begun to train."""

    def __init__(self, draw: random.Random, num_ranks: int) -> None:
        self.victim = draw.randrange(num_ranks)
        self.early = self.may_be_early and draw.random() < 0.1
        self.at = 0.0
        """When it was injected."""
        self.target = 0
        """The step that a job which goes on must reach."""
        self.outcome = WENT_ON
        """What the job does if no rule is broken."""
        self.draw(draw)

    def draw(self, draw: random.Random) -> None:
        """Draws how hard it strikes."""

    def strike(self, job: Job) -> None:
        """Injects the fault, undoes it where it is to be undone, and waits for what follows."""
        raise NotImplementedError

    def judge(self, seen: Seen) -> list[str]:
        """Returns how the job has broken the rule."""
        return went_on(seen, self.target) + replicas_agree(seen)

    @property
    def detail(self) -> str:
        """How hard it struck, for the table."""
        return ""

    def seconds(self, seen: Seen) -> float:
        """Returns how long it took until the last of the other ranks had its error, or went on."""
        errors = [error.at for rank in self.others(seen) if (error := seen.error(rank))]
        on = [line["at"] for line in seen.find("step") if line["step"] == self.target // 3 * 3]
        return max([*(errors or on), self.at]) - self.at

    def others(self, seen: Seen) -> list[int]:
        """Returns all ranks but the victim."""
        return [rank for rank in seen.ranks if rank != self.victim]

    def names_the_victim(self, seen: Seen) -> list[str]:
        """The others name the victim. Before training has begun torch may be what fails, and then
        it is enough that nobody else is named."""
        others = self.others(seen)
        if not self.early:
            return named(seen, others, [{self.victim}])
        ours = [rank for rank in others if (e := seen.error(rank)) and e.kind == "PeerError"]
        return named(seen, ours, [{self.victim}, ()])


class Lasting(Fault):
    """A fault that lasts for a while, and that the job must survive."""

    longest_s: ClassVar[float] = 1.5

    def draw(self, draw: random.Random) -> None:
        self.lasts_s = draw.uniform(0.2, self.longest_s)

    def strike(self, job: Job) -> None:
        self.at = job.now()
        self.begin(job)
        try:
            time.sleep(self.lasts_s)
        finally:
            self.end(job)
        self.target = job.wait_progress()

    def begin(self, job: Job) -> None:
        """Injects the fault."""

    def end(self, job: Job) -> None:
        """Undoes it."""

    @property
    def detail(self) -> str:
        return f"{self.lasts_s:.1f} s"


# --- processes ------------------------------------------------------------------------------------


class Kill(Fault):
    """SIGKILL: every other rank ends in time with a PeerError that names the rank."""

    name = "kill"
    may_be_early = True

    def strike(self, job: Job) -> None:
        self.outcome = ENDED
        self.at = job.now()
        job.signal(self.victim, signal.SIGKILL)
        job.wait_exits(job.seen.ranks)

    def judge(self, seen: Seen) -> list[str]:
        problems = ended(seen, self.others(seen), self.at) + self.names_the_victim(seen)
        return problems + replicas_agree(seen)


class Pause(Lasting):
    """SIGSTOP for less than the timeout, then SIGCONT: the job goes on."""

    name = "pause"
    longest_s = 3.0
    may_be_early = True

    def begin(self, job: Job) -> None:
        job.signal(self.victim, signal.SIGSTOP)

    def end(self, job: Job) -> None:
        job.signal(self.victim, signal.SIGCONT)


class Freeze(Fault):
    """SIGSTOP for longer than the timeout: the others end in time and name the rank. After SIGCONT
    it ends too."""

    name = "freeze"
    may_be_early = True

    def draw(self, draw: random.Random) -> None:
        self.thawed_at = 0.0

    def strike(self, job: Job) -> None:
        self.outcome = ENDED
        self.at = job.now()
        job.signal(self.victim, signal.SIGSTOP)
        try:
            job.wait_exits(self.others(job.seen))
        finally:
            job.signal(self.victim, signal.SIGCONT)
            self.thawed_at = job.now()
        job.wait_exits([self.victim])

    def judge(self, seen: Seen) -> list[str]:
        problems = ended(seen, self.others(seen), self.at) + self.names_the_victim(seen)
        return problems + ended(seen, [self.victim], self.thawed_at) + replicas_agree(seen)


class ClockJump(Fault):
    """time.time() jumps by hours on one rank: the job goes on."""

    name = "clock jump"

    def draw(self, draw: random.Random) -> None:
        self.hours = draw.choice([-1, 1]) * draw.uniform(1, 10_000)

    def strike(self, job: Job) -> None:
        self.at = job.now()
        job.tell(self.victim, do="clock", seconds=3600 * self.hours)
        self.target = job.wait_progress()

    def judge(self, seen: Seen) -> list[str]:
        missed = [] if seen.find("jumped", self.victim) else ["the clock was not set"]
        return missed + super().judge(seen)

    @property
    def detail(self) -> str:
        return f"{self.hours:+.0f} h"


# --- links ----------------------------------------------------------------------------------------


class CutOff(Fault):
    """A link that is cut for longer than the timeout: the ranks on both sides end in time. Those on
    the larger side name the rank, and the rank names somebody."""

    name = "cut"
    may_be_early = True

    def strike(self, job: Job) -> None:
        self.outcome = ENDED
        self.at = job.now()
        job.lab.cut(self.victim)
        try:
            job.wait_exits(job.seen.ranks)
        finally:
            job.lab.heal(self.victim)

    def judge(self, seen: Seen) -> list[str]:
        problems = ended(seen, seen.ranks, self.at) + self.names_the_victim(seen)
        own = seen.error(self.victim)
        if not self.early and own is not None and (own.kind != "PeerError" or not own.names):
            problems.append(f"rank {self.victim}, cut off, names nobody ({own.kind}: {own.text})")
        return problems + replicas_agree(seen)


class CutHealed(Lasting):
    """A link that is cut and healed long before the timeout: the job goes on."""

    name = "cut, healed"
    longest_s = 2.0
    may_be_early = True

    def begin(self, job: Job) -> None:
        job.lab.cut(self.victim)

    def end(self, job: Job) -> None:
        job.lab.heal(self.victim)


class Delay(Lasting):
    """Packets from a host are delayed for a while: the job goes on."""

    name = "delay"
    may_be_early = True

    def draw(self, draw: random.Random) -> None:
        super().draw(draw)
        self.delay_ms = draw.uniform(1, 60)

    def begin(self, job: Job) -> None:
        job.lab.set_link(self.victim, delay=f"{self.delay_ms:.1f}ms")

    def end(self, job: Job) -> None:
        job.lab.set_link(self.victim, delay="none")

    @property
    def detail(self) -> str:
        return f"{self.delay_ms:.0f} ms for {self.lasts_s:.1f} s"


class Loss(Lasting):
    """A part of the packets from a host is lost for a while: the job goes on."""

    name = "loss"
    may_be_early = True

    def draw(self, draw: random.Random) -> None:
        super().draw(draw)
        self.percent = draw.uniform(0.5, 5)

    def begin(self, job: Job) -> None:
        job.lab.set_link(self.victim, loss=f"{self.percent:.1f}%")

    def end(self, job: Job) -> None:
        job.lab.set_link(self.victim, loss="none")

    @property
    def detail(self) -> str:
        return f"{self.percent:.1f} % for {self.lasts_s:.1f} s"


class SlowLink(Lasting):
    """A link has a small part of its rate for a while: the job goes on."""

    name = "slow link"

    def draw(self, draw: random.Random) -> None:
        super().draw(draw)
        self.mbit = draw.uniform(2, 20)

    def begin(self, job: Job) -> None:
        job.lab.set_link(self.victim, rate=f"{self.mbit:.1f}mbit")

    def end(self, job: Job) -> None:
        job.lab.set_link(self.victim, rate="1gbit")

    @property
    def detail(self) -> str:
        return f"{self.mbit:.0f} Mbit/s for {self.lasts_s:.1f} s"


# --- the disk -------------------------------------------------------------------------------------


class FullDisk(Fault):
    """The disk is full when rank 0 writes a checkpoint: one error says so, the last checkpoint is
    intact, training goes on, and the next checkpoint is written once there is room."""

    name = "full disk"

    def __init__(self, draw: random.Random, num_ranks: int) -> None:
        super().__init__(draw, num_ranks)
        self.victim = 0

    def strike(self, job: Job) -> None:
        seen = job.seen
        limit_s = seen.timeout_s + ERROR_S
        filler = Path(job.disk) / "filler"
        self.at = job.now()
        try:
            fill(filler)
            seen.wait(lambda: seen.failed or bool(self._since(seen, "unsaved")), limit_s)
        finally:
            filler.unlink()
        there_is_room = job.now()
        seen.wait(
            lambda: seen.failed or any(s["at"] > there_is_room for s in seen.find("saved")), limit_s
        )
        self.target = job.wait_progress()

    def judge(self, seen: Seen) -> list[str]:
        failures = self._since(seen, "unsaved")
        if not failures:
            return ["no checkpoint failed on a full disk", *super().judge(seen)]
        problems = []
        for line in failures:
            if line["kind"] != "UsageError" or "previous checkpoint is intact" not in line["text"]:
                problems.append(f"a checkpoint failed with {line['kind']}: {line['text']}")
            before = [s["digest"] for s in seen.find("saved") if s["at"] < line["at"]]
            before += [b["digest"] for b in seen.find("began", 0) if b["began"] and not before]
            if line["intact"] != (before[-1] if before else None):
                problems.append(f"the checkpoint before holds {line['intact']}, not {before[-1:]}")
        if not any(saved["at"] > failures[-1]["at"] for saved in seen.find("saved")):
            problems.append("no checkpoint was written after there was room")
        return problems + super().judge(seen)

    def _since(self, seen: Seen, key: str) -> list[dict[str, Any]]:
        return [line for line in seen.find(key) if line["at"] > self.at]


def fill(file: Path) -> None:
    """Writes zeros until the file system is full."""
    try:
        with file.open("wb", buffering=0) as out:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while out.write(bytes(size)) == size:
                        pass
                except OSError:
                    continue
    except OSError:
        pass


# --- messages -------------------------------------------------------------------------------------


class BadMessage(Fault):
    """One byte of a message changes on the wire."""

    zones: ClassVar[tuple[str, ...]]

    def draw(self, draw: random.Random) -> None:
        self.zone = draw.choice(self.zones)
        self.place, self.flip = draw.random(), draw.randrange(1, 256)
        self.receiver = -1
        self.offset = -1
        self.check_every, self.is_ring = 0, False

    def strike(self, job: Job) -> None:
        seen = job.seen
        self.at = job.now()
        self.check_every = job.config.check_every
        self.is_ring = job.config.strategy == "ring"
        job.tell(
            self.victim, do="strike", zone=self.zone, place=self.place, flip=self.flip
        )  # fmt: skip
        seen.wait(lambda: seen.failed or bool(self._struck(seen)), 5.0)
        if not self._struck(seen):
            self.outcome = MISSED
            return
        self._note(seen)
        self.target = job.wait_progress(job.config.check_every)
        if seen.failed:
            job.wait_exits(seen.ranks)

    def _struck(self, seen: Seen) -> list[dict[str, Any]]:
        return [line for line in seen.find("struck", self.victim) if line["at"] > self.at]

    def _note(self, seen: Seen) -> None:
        line = self._struck(seen)[-1]
        self.receiver, self.zone, self.offset = line["to"], line["zone"], line["offset"]

    def is_refused(self, seen: Seen) -> list[str]:
        """The receiver refuses the message, or in a ring, where frames are passed on, a rank behind
        it; every other rank ends in time with a PeerError that names such a rank or the sender."""
        self.outcome = ENDED
        refused = [rank for rank in seen.ranks if (e := seen.error(rank)) and is_refusal(e)]
        problems = ended(seen, seen.ranks, self.at)
        if self.receiver not in refused and not (self.is_ring and refused):
            own = seen.error(self.receiver)
            how = f"failed with {own.kind}: {own.text}" if own else "goes on"
            problems.append(f"rank {self.receiver} was sent a damaged frame and {how}")
        suspects = {self.receiver, self.victim, *refused}
        plausible = [
            set(some)
            for size in range(1, len(suspects) + 1)
            for some in itertools.combinations(suspects, size)
        ]
        others = [rank for rank in seen.ranks if rank not in refused]
        return problems + named(seen, others, plausible)

    @property
    def detail(self) -> str:
        return f"byte {self.offset} ({self.zone}) to rank {self.receiver}"


def is_refusal(error: Failure) -> bool:
    """Returns whether an error is a FrameError, or the PeerError that cites it where the rank began
    another exchange first."""
    cites = error.text.startswith("the exchange is down since an earlier error (frame ")
    cites = cites or "earlier error (the frame " in error.text
    return error.kind == "FrameError" or (error.kind == "PeerError" and cites)


class BadHeader(BadMessage):
    """A byte of a frame's header or table changes on the wire, where a check covers it: the
    receiver refuses the frame, and all ranks end in time and name the receiver or the sender."""

    name = "bad header"
    zones = ("header", "header", "table")

    def judge(self, seen: Seen) -> list[str]:
        return self.is_refused(seen) + replicas_agree(seen)


class BadBody(BadMessage):
    """A byte that no check covers changes on the wire: body, flags or step of a frame, or a
    message without a frame. Either the receiver refuses it as above; or the job goes on and
    replicas agree, since the change came before the mean; or it came after, and replicas differ:
    then the replica check ends the job where it is on."""

    name = "bad body"
    zones = ("body", "body", "body", "free")

    def judge(self, seen: Seen) -> list[str]:
        if any((error := seen.error(rank)) and is_refusal(error) for rank in seen.ranks):
            return self.is_refused(seen) + replicas_agree(seen)
        if seen.first_difference() is None and not seen.failed:
            return went_on(seen, self.target)
        if not self.check_every:
            self.outcome = UNSEEN
            return went_on(seen, self.target)
        self.outcome = ENDED
        return ended(seen, seen.ranks, self.at) + [
            f"rank {rank} failed with {error.kind}: {error.text}"
            for rank in seen.ranks
            if (error := seen.error(rank)) and error.kind not in ("AgreementError", "PeerError")
        ]


FAULTS: dict[type[Fault], int] = {
    Kill: 14,
    Pause: 10,
    Freeze: 4,
    ClockJump: 9,
    CutOff: 4,
    CutHealed: 10,
    Delay: 11,
    Loss: 10,
    SlowLink: 8,
    FullDisk: 8,
    BadHeader: 5,
    BadBody: 7,
}
"""How often each is drawn, in percent: those that end a job cost most of the time."""
