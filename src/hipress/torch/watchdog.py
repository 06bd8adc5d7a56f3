"""Ends a process that waits for a lost rank where nothing can wake it.

A training loop hears of a lost rank in backward. But it may wait for that rank in what DDP sends
itself, such as buffers in forward, where torch's patience is half an hour.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from torch import nn

_log = logging.getLogger("hipress")


class Watchdog:
    """Knows whether the training loop is inside DDP, and for how long.

    Args:
        patience_s: How long it may be there after a rank was lost.
    """

    def __init__(self, patience_s: float) -> None:
        self.is_heard = False
        """Whether the training loop has been told of a failure."""
        self._patience_s = patience_s
        self._since: float | None = None

    def go_in(self, *_: object) -> None:
        """The training loop goes into DDP."""
        self._since = time.monotonic()

    def come_out(self, *_: object) -> None:
        """It has come out."""
        self._since = None

    def stand_at(self, module: nn.Module) -> None:
        """Notes when forward begins and ends, where DDP sends buffers in it."""
        if getattr(module, "broadcast_buffers", False) and next(module.buffers(), None) is not None:
            module.register_forward_pre_hook(self.go_in)
            module.register_forward_hook(self.come_out, always_call=True)

    def watch(self, error: BaseException, is_over: Callable[[], bool]) -> None:
        """Says who is gone, and ends the process if the training loop stays inside DDP.

        Args:
            error: What it would be told.
            is_over: Whether there is no longer anything to watch.
        """
        _log.error(str(error))
        threading.Thread(
            target=self._run,
            args=(error, time.monotonic(), is_over),
            name="hipress-watchdog",
            daemon=True,
        ).start()

    def _run(self, error: BaseException, lost_at: float, is_over: Callable[[], bool]) -> None:
        while not (self.is_heard or is_over()):
            since = self._since
            if since is not None and time.monotonic() - max(since, lost_at) > self._patience_s:
                _log.critical(
                    "this process ends here: it has waited %g s inside DDP for a rank that is "
                    "gone (%s)",
                    self._patience_s, error,
                )  # fmt: skip
                logging.shutdown()
                os._exit(1)
            time.sleep(min(1.0, self._patience_s / 10))
