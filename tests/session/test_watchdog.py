"""When a process is ended that waits for a lost rank, and when it is left alone."""

import threading
import time

import pytest
from torch import nn

from hipress.session import watchdog
from hipress.session.watchdog import Watchdog

PATIENCE_S = 0.3


class Left(Exception):
    """In place of the end of the process."""


@pytest.fixture
def ends(monkeypatch):
    """The codes of processes that would have ended."""
    found = []

    def leave(code):
        found.append(code)
        raise Left

    monkeypatch.setattr(watchdog.os, "_exit", leave)
    monkeypatch.setattr(watchdog.logging, "shutdown", lambda: None)
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    return found


def watched(dog, seconds, is_enough=lambda: False):
    over = threading.Event()
    dog.start(RuntimeError("rank 2 is gone"), over.is_set)
    until = time.monotonic() + seconds
    while time.monotonic() < until and not is_enough():
        time.sleep(0.01)
    over.set()
    for thread in threading.enumerate():
        if thread.name == "hipress-watchdog":
            thread.join(20)


def test_a_process_that_stays_inside_is_ended(ends):
    """Catches: a hang for half an hour in what DDP sends itself."""
    dog = Watchdog(PATIENCE_S)
    dog.enter()
    watched(dog, 60, lambda: ends)
    assert ends == [1]


def test_time_before_the_loss_does_not_count(ends):
    """Catches: an end before backward could raise, after a long wait in the same step."""
    dog = Watchdog(60)
    dog.enter()
    dog._since -= 120
    watched(dog, PATIENCE_S)
    assert ends == []


@pytest.mark.parametrize("how", ["heard", "outside", "never in"])
def test_others_are_left_alone(ends, how):
    """Catches: a healthy process that is ended, e.g. one that evaluates after training."""
    dog = Watchdog(PATIENCE_S)
    if how != "never in":
        dog.enter()
    if how == "outside":
        dog.leave()
    if how == "heard":
        dog.error_was_raised()
    watched(dog, 4 * PATIENCE_S)
    assert ends == []


def test_a_forward_that_raises_comes_out():
    """Catches: a process that is ended later for a forward that failed long ago."""

    class Bad(nn.Module):
        broadcast_buffers = True

        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            raise ValueError(x)

    dog, module = Watchdog(PATIENCE_S), Bad()
    dog.watch_forward(module)
    with pytest.raises(ValueError):
        module(1)
    assert dog._since is None
