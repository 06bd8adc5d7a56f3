"""`sync.report`: what a run has done so far, gathered from all ranks for one page."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hipress.casync.graphs.graph import Kind
from hipress.codecs import residual
from hipress.errors import MissingDependencyError, UsageError
from hipress.session import report_page
from hipress.session.buckets import UNSENT, Gradient
from hipress.session.monitor import Totals, in_words
from hipress.session.policy import Trial
from hipress.session.trace import check_path, replace_file
from hipress.snapshots import Event, Split
from hipress.units import counted
from hipress.version import __version__

if TYPE_CHECKING:
    from hipress.session.session import Session

_log = logging.getLogger("hipress")


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank of the run."""

    rank: int
    host: str
    split: Split | None
    """The mean over all steps; None if there was none beside set-up."""
    setup_steps: int
    setup_s: float
    state_bytes: int
    """Bytes of codec state and buffers."""


@dataclass(frozen=True, kw_only=True)
class LayerRow:
    """One gradient."""

    name: str
    numel: int
    codec: str
    strategy: str
    gradient_bytes: int
    """Bytes of the gradient as float32."""
    frame_bytes: int
    """Bytes of what one rank sends of it, encoded."""
    reason: str
    """The reason why the gradient is not compressed."""
    coding_s: float | None
    """Time of this rank's codecs in a step; a group's time is shared out by elements."""
    under_way_s: float | None
    """Time from the start to the end of its exchange."""
    num_together: int
    """Number of gradients that travel in this exchange."""
    residual: float | None
    """Norm of what a rank has not sent yet: the root mean square over ranks."""
    accuracy: str
    """What the guard has measured."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that a page shows."""

    program: str
    version: str
    made_at: str
    step: int
    mode: str
    plan: str
    """What is compressed with what, in words."""
    why: str
    """What the plan was made from."""
    ranks: tuple[RankRow, ...]
    points: tuple[tuple[int, Split], ...]
    """The history of rank 0: the last step of each point, and the mean since the point before."""
    layers: tuple[LayerRow, ...]
    trials: tuple[Trial, ...]
    """The step times behind the decision of `auto`."""
    events: tuple[Event, ...]
    guard: str
    """What the guard has done, in words."""


def write(session: Session, path: str | os.PathLike[str]) -> None:
    """Gathers a report and writes the page on rank 0; collective.

    Raises:
        UsageError: The file cannot be written.
        MissingDependencyError: plotly is not installed where rank 0 runs.
    """
    engine = session.engine
    problem: list[str] | None = None
    if engine.transport.rank == 0:
        try:
            check_path(path)
            report_page.check()
        except (UsageError, MissingDependencyError) as error:
            problem = [type(error).__name__, str(error)]
    problem = engine.agree("the report", {"step": session.step}, share=problem)[0]
    if problem is not None:
        if problem[0] == MissingDependencyError.__name__:
            raise MissingDependencyError("plotly", "report")
        raise UsageError(problem[1])
    told = engine.gather(json.dumps(_own(session)).encode())
    if engine.transport.rank != 0:
        return
    made = collect(session, [json.loads(one) for one in told])
    target = Path(path).absolute()
    try:
        replace_file(target, report_page.render(made))
    except OSError as error:  # no reason to end a training run
        _log.warning("the report could not be written to %s: %s.", target, error.strerror)
        return
    _log.info("the report of %s is in %s.", counted(session.num_steps, "step"), target)


def collect(session: Session, told: list[dict[str, Any]]) -> Report:
    """Returns the report of a session.

    Args:
        session: That of rank 0.
        told: What `_own` returned on each rank, in rank order.
    """
    times = session.engine.exchange_times()
    measured = {} if session.guard is None else session.guard.measured
    skipped = session.skipped
    residuals = [one["residuals"] for one in told]
    layers = []
    for name, gradient in session.gradients.items():
        coding_s = under_way_s = None
        together: list[int] = []
        if (known := times.get(name)) is not None:
            together = [session.gradients[one].numel for one in known.names]
            coding_s = known.coding_s * gradient.numel / max(sum(together), 1)
            under_way_s = known.under_way_s
        layers.append(
            LayerRow(
                name=name,
                numel=gradient.numel,
                codec=gradient.choice.codec.name,
                strategy=gradient.choice.strategy,
                gradient_bytes=4 * gradient.numel,
                frame_bytes=_frame_bytes(gradient),
                reason=skipped.get(name, ""),
                coding_s=coding_s,
                under_way_s=under_way_s,
                num_together=len(together),
                residual=_mean_norm([one.get(name) for one in residuals]),
                accuracy=str(measured.get(name, "")),
            )
        )
    return Report(
        program=os.path.basename(sys.argv[0]) or "python",
        version=__version__,
        made_at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        step=session.step,
        mode=session.mode.current.value,
        plan=in_words(session),
        why=_why(session),
        ranks=tuple(_rank_row(rank, one) for rank, one in enumerate(told)),
        points=tuple(_points(session)),
        layers=tuple(sorted(layers, key=lambda layer: -layer.numel)),
        trials=tuple([] if session.auto is None else session.auto.trials()),
        events=tuple(session.monitor.events),
        guard=_guard(session),
    )


def _own(session: Session) -> dict[str, Any]:
    """Returns what rank 0 must be told of this rank."""
    split, monitor, engine = session.monitor.totals.split(), session.monitor, session.engine
    engine.wait_idle()
    return {
        "host": monitor.host,
        "split": None if split is None else split.model_dump(),
        "setup_steps": monitor.setup_steps,
        "setup_s": monitor.setup_ns / 1e9,
        "state_bytes": engine.states.num_bytes + engine.buffer_bytes,
        "residuals": {g.name: _residual(session, g.name) for g in session.layout.compressed},
    }


def _rank_row(rank: int, told: dict[str, Any]) -> RankRow:
    fields = {name: told[name] for name in ("host", "setup_steps", "setup_s", "state_bytes")}
    split = None if told["split"] is None else Split.model_validate(told["split"])
    return RankRow(rank=rank, split=split, **fields)


def _residual(session: Session, name: str) -> float | None:
    """Returns the norm of what this rank's codec has not sent of a gradient; None if not finite."""
    squares = 0.0
    found = False
    for key, state in session.engine.states.partitions_of(name).items():
        for part in UNSENT:
            if part in state and key.kind is Kind.FRAME:
                found = True
                values = residual.values(state[part], key.numel)
                squares += float(torch.linalg.vector_norm(values)) ** 2
    norm = math.sqrt(squares) / session.scale
    return norm if found and math.isfinite(norm) else None


def _mean_norm(norms: list[float | None]) -> float | None:
    known = [norm for norm in norms if norm is not None]
    return math.sqrt(sum(n * n for n in known) / len(known)) if known else None


def _frame_bytes(gradient: Gradient) -> int:
    codec = gradient.choice.codec
    if not gradient.is_compressed:
        return gradient.numel * gradient.spec.dtype.itemsize
    return sum(codec.wire_bytes(place.stop - place.start) for place in gradient.placements)


def _points(session: Session) -> list[tuple[int, Split]]:
    before, found = Totals(), []
    for step, totals in session.monitor.history.points():
        if (split := totals.since(before).split()) is not None:
            found.append((step, split))
        before = totals
    return found


def _why(session: Session) -> str:
    plan = session.plan
    if session.auto is not None:
        found = f"auto decides from step times: {session.auto.reason}"
    elif plan is not None:
        found = (
            f"a plan was given to attach{f', made from {plan.made_from}' * bool(plan.made_from)}"
        )
    else:
        found = "the codec was given to attach, so nothing was measured to choose it"
    if plan is not None and plan.step_s is not None and plan.plain_step_s is not None:
        found += f"; the plan predicts {1e3 * plan.step_s:.1f} ms a step"
        found += f" against {1e3 * plan.plain_step_s:.1f} ms uncompressed"
    return found


def _guard(session: Session) -> str:
    if session.guard is None:
        return "The accuracy guard is off; guard=True turns it on."
    stats = session.guard.stats(session)
    if not stats.num_looks:
        return "The accuracy guard has measured nothing yet."
    text = f"The accuracy guard has looked {stats.num_looks} times at {len(stats.measured)} layers"
    return f"{text}, and gave {len(stats.overrides) or 'none'} of them a milder codec."
