"""The lab's side of the hosts (agent.py): tell them what to do, take what they report."""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from hipress.errors import LabError
from hipress.lab import wire

_ANSWER_S = 10.0


class Listener(Protocol):
    """Who wants to know what the hosts report; called from the thread that listens."""

    def rank_exited(self, job: int, rank: int, code: int, at_s: float) -> None:
        """A rank of a job ended, at a time of the machine's monotonic clock."""

    def host_is_gone(self, host: int) -> None:
        """A host's init ended, and with it the host."""


class Hosts:
    """The sockets to the hosts' inits, and the thread that listens to them."""

    def __init__(self, agents: Sequence[socket.socket], listener: Listener) -> None:
        self._agents = agents
        self._listener = listener
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._answers: dict[int, threading.Event] = {}
        self._thread = start_thread(self._listen)

    def tell(self, host: int, message: wire.Message, fds: Sequence[int] = ()) -> None:
        """Send a host a message; an `OSError` says that it is gone."""
        with self._lock:
            wire.send(self._agents[host], message, fds)

    def tell_all(self, message: wire.Message) -> None:
        """Send every host that is still there a message."""
        for host in range(len(self._agents)):
            with contextlib.suppress(OSError):
                self.tell(host, message)

    def signal(self, host: int, number: int) -> None:
        """Send a signal to all processes of a host and wait until that is done."""
        name = next(self._numbers)
        done = self._answers[name] = threading.Event()
        try:
            self.tell(host, {"do": "signal", "signal": int(number), "id": name})
            if not done.wait(_ANSWER_S):
                raise TimeoutError
        except OSError:
            raise LabError(
                f"host {host} does not answer; close this lab and make another"
            ) from None
        finally:
            del self._answers[name]

    def hang_up(self) -> None:
        """Close the sockets, after the hosts are told to end by the end of this direction."""
        self._thread.join(_ANSWER_S)
        for agent in self._agents:
            agent.close()

    def _listen(self) -> None:
        selector = selectors.DefaultSelector()
        for host, agent in enumerate(self._agents):
            selector.register(agent, selectors.EVENT_READ, host)
        while selector.get_map():
            for key, _ in selector.select():
                agent = self._agents[key.data]
                received = wire.receive(agent)
                if received is None:
                    selector.unregister(agent)
                    self._listener.host_is_gone(key.data)
                    continue
                message = received[0]
                if "did" not in message:
                    self._listener.rank_exited(
                        message["job"], message["rank"], message["exit"], message["at_s"]
                    )
                elif (done := self._answers.get(message["did"])) is not None:
                    done.set()
        selector.close()


def start_thread(target: Callable[[], None]) -> threading.Thread:
    """Start a thread that does not keep a program alive that forgot to close its lab."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread
