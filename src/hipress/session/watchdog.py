"""Ends a process that waits for a lost rank where no error can reach it.

The training loop is told of a lost rank in backward. But it may wait for that rank in what DDP
sends itself, such as buffers in forward, where torch's timeout is half an hour.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from torch import nn

_log = logging.getLogger("hipress")

PATIENCE_S = 300.0
"""How long the training loop may stay inside DDP after a rank was lost, unless told otherwise."""


class Watchdog:
    """Knows whether the training loop is inside DDP, and for how long.

    Args:
        patience_s: How long it may stay there after a rank was lost.
    """

    def __init__(self, patience_s: float) -> None:
        self._was_told = False
        """Whether the training loop has been told of a failure."""
        self._patience_s = patience_s
        self._since: float | None = None

    def enter(self, *_: object) -> None:
        """Notes that the training loop enters DDP."""
        self._since = time.monotonic()

    def leave(self, *_: object) -> None:
        """Notes that the training loop has left DDP."""
        self._since = None

    def error_was_raised(self) -> None:
        """Notes that the training loop has been told of a failure."""
        self._was_told = True
        self._since = None

    def watch_forward(self, module: nn.Module) -> None:
        """Notes when forward begins and ends, if DDP sends buffers in it."""
        if getattr(module, "broadcast_buffers", False) and next(module.buffers(), None) is not None:
            module.register_forward_pre_hook(self.enter)
            module.register_forward_hook(self.leave, always_call=True)

    def start(self, error: BaseException, is_over: Callable[[], bool]) -> None:
        """Logs who is gone, and ends the process if the training loop stays inside DDP.

        Args:
            error: The error that the training loop would get.
            is_over: Returns whether there is nothing to watch any more.
        """
        _log.error(str(error))
        threading.Thread(
            target=self._run,
            args=(error, time.monotonic(), is_over),
            name="hipress-watchdog",
            daemon=True,
        ).start()

    def _run(self, error: BaseException, lost_at: float, is_over: Callable[[], bool]) -> None:
        while not (self._was_told or is_over()):
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
