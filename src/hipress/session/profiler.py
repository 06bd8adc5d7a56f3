"""Measures a running job and writes a profile of it, for `hipress plan` and `hipress simulate`.

    idle -- begin --> observing -- last step --> all ranks measure, rank 0 writes --> idle

What is measured is what `auto` measures (`planner.py`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from hipress.codecs.table import codec as named_codec
from hipress.errors import UsageError
from hipress.probe import CODECS
from hipress.profile import Profile
from hipress.session.planner import UNCOUNTED_STEPS, Planner, together
from hipress.session.trace import check_path
from hipress.units import counted
from hipress.version import __version__

if TYPE_CHECKING:
    from hipress.session.session import Session

_log = logging.getLogger("hipress")

STEPS = 10
LEAST_STEPS = UNCOUNTED_STEPS + 2
"""The first ones do not count, and the last one has not ended when all ranks measure."""


def made_on(where: str) -> str:
    """Returns the text of a profile that says when, where and with which versions it was made."""
    date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f"{date}, {where}, hipress {__version__}, torch {torch.__version__}"


class Profiler:
    """Profiles one session, once at a time."""

    def __init__(self) -> None:
        self._planner: Planner | None = None
        self._path = Path()
        self._left = 0

    @property
    def is_active(self) -> bool:
        """Whether steps are timed."""
        return self._planner is not None

    def begin(
        self,
        session: Session,
        path: str | os.PathLike[str],
        steps: int,
        codecs: Iterable[str] | None,
    ) -> None:
        """Checks on all ranks whether it can be done, and starts to time the model; collective."""
        engine = session.engine
        names: tuple[str, ...] = ()
        problem = ""
        try:
            names = self._checked(session, steps, codecs)
            if engine.transport.rank == 0:
                check_path(path)
        except UsageError as error:
            problem = str(error)
        planner = Planner(names, keeps_rest=engine.device.type == "cpu")
        problem = problem or planner.observe(session)
        told = engine.agree("profile", {"steps": steps, "codecs": list(names)}, share=problem)
        if problem := next(filter(None, told), ""):
            planner.end()
            raise UsageError(problem if problem.endswith(".") else f"{problem}.")
        self._path, self._left, self._planner = Path(path).absolute(), steps, planner

    def on_step_end(self, session: Session) -> None:
        """Counts a step; after the last one all ranks measure, and rank 0 writes."""
        if self._planner is None:
            return
        self._left -= 1
        if self._left:
            return
        planner, self._planner = self._planner, None
        found = together(session.engine, lambda: planner.measure(session))
        if session.engine.transport.rank == 0:
            self._write(session, found, planner.problem)

    def cancel(self, session: Session) -> None:
        """Stops without a profile: the session is being detached."""
        if self._planner is not None:
            self._planner.end()
            self._planner = None
            if session.engine.transport.rank != 0:
                return
            _log.warning("no profile is written to %s: the session was detached.", self._path)

    def _checked(
        self, session: Session, steps: int, codecs: Iterable[str] | None
    ) -> tuple[str, ...]:
        if self._planner is not None:
            raise UsageError(
                f"steps are being timed for {self._path} already; wait until it is written."
            )
        if type(steps) is not int or steps < LEAST_STEPS:
            raise UsageError(
                f"steps is {steps!r}; give a whole number from {LEAST_STEPS} on: the first "
                f"{UNCOUNTED_STEPS} do not count."
            )
        if isinstance(codecs, str):
            raise UsageError(f"codecs is {codecs!r}; give a list of them, e.g. ['int8', 'onebit'].")
        names = tuple(codecs or (*CODECS, *(codec.name for codec in session.rules.codecs)))
        for name in names:
            named_codec(name)
        return tuple(name for name in dict.fromkeys(names) if name != "none")

    def _write(self, session: Session, found: Profile | None, problem: str) -> None:
        try:
            if found is None or found.model is None:
                raise UsageError(problem or "a rank has timed no whole step")
            model = found.model.model_copy(update={"name": session.adapter.model_name})
            num_ranks = session.engine.transport.num_ranks
            where = made_on(f"a running job of {counted(num_ranks, 'rank')}")
            found.model_copy(update={"made": where, "model": model}).save(self._path)
        except (OSError, UsageError) as error:  # no reason to end a training run
            _log.warning("no profile is written to %s: %s.", self._path, str(error).rstrip("."))
            return
        _log.info(
            "%s holds links, %s and %s of this job; next: hipress plan --profile %s, or hipress "
            "simulate.",
            self._path, counted(len(found.codecs), "codec"),
            counted(len(model.gradients), "gradient"), self._path.name,
        )  # fmt: skip
