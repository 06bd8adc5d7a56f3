"""A job on all hosts: an agent on each, their output here, one end for all.

Everything happens in one loop of one thread, and nothing in it waits for anybody: what is shown
goes through an outlet, what is told through outboxes. Agents speak as `messages` says; what else
comes out of an ssh is shown with its host in front.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial

from hipress.launch import failure_text, remote
from hipress.launch.hosts import Host
from hipress.launch.job import Job, Outcome
from hipress.launch.peer import Peer
from hipress.launch.protocol import GRACE_S, SILENCE_S, Message, exit_code, unpack
from hipress.launch.screen import Screen, open_files
from hipress.launch.stdout_writer import StdoutWriter
from hipress.version import __version__

__all__ = ["TIMED_OUT", "Job", "Outcome", "launch"]

TIMED_OUT = 124
"""Exit code where ranks did not start in time, as timeout(1) has it."""
_BROKEN_PIPE = 128 + signal.SIGPIPE
_END_S = 10.0
"""Seconds that the end may take beyond the grace."""
_KILL_S = 2.0
"""Seconds that it may take at the second Ctrl-C; and the last words, at the first."""
_SAY_S = 20.0
"""Seconds after which a start that hangs is explained."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)


def launch(job: Job) -> Outcome:
    """Run a job to its end, and say on stderr what went wrong.

    Only the main thread may call this: it takes care of Ctrl-C and SIGTERM meanwhile.
    """
    launcher = _Launcher(job)
    try:
        return launcher.run()
    finally:
        launcher.close()


class _Launcher:
    def __init__(self, job: Job) -> None:
        self._job = job
        files = {} if job.output is None else open_files(job.output, job.num_ranks)
        self._wake, self._wake_out = socket.socketpair()
        for end in (self._wake, self._wake_out):
            end.setblocking(False)
        self._outlet = StdoutWriter(self._wake_up)
        self._screen = Screen(self._outlet, files)
        self._job_id = secrets.token_hex(8)
        self._outcome: Outcome | None = None
        self._give_up_s: float | None = None  # when agents may take no longer to end
        self._port = job.port
        self._peers: list[Peer] = []
        self._machines: dict[str, Peer] = {}
        self._is_held = False
        self._is_explained = False
        self._num_starts: Counter[int] = Counter()
        self._num_rounds = 0
        self._signals: list[int] = []
        self._was_signalled = False
        self._began_s = self._spoke_s = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)

    def run(self) -> Outcome:
        with self._signal_handlers():
            first_rank = 0
            for node, host in enumerate(self._job.hosts):
                if (peer := self._start(host, node, first_rank)) is None:
                    break
                self._peers.append(peer)
                first_rank += host.slots
            while any(peer.code is None for peer in self._peers):
                self._turn()
                self._look_at_the_clock()
            if self._screen.num_dropped:
                self._note(f"{self._screen.num_dropped} lines were dropped: nobody read them")
            if self._outcome is not None and self._outcome.sentence is not None:
                self._note(self._outcome.sentence)
            self._screen.close()
            self._drain()
        return self._outcome or Outcome(code=0)

    def close(self) -> None:
        """Leave nothing behind, whatever happened."""
        for peer in self._peers:
            peer.close()
        for peer in self._peers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                peer.process.wait(GRACE_S + 1)
            if peer.process.poll() is None:
                peer.process.kill()
                peer.process.wait()
        self._selector.close()
        self._screen.close()

    def _start(self, host: Host, node: int, first_rank: int) -> Peer | None:
        job = self._job
        command = (
            remote.local_command(job.python)
            if job.is_local
            else remote.ssh_command(host, ssh=job.ssh, port=job.ssh_port, python=job.python)
        )
        try:
            peer = Peer(host, node, first_rank, command)
        except OSError as error:
            self._decide(
                127,
                f"{command[0]!r} can not be started: {error.strerror}; name another with "
                f"{'--python' if job.is_local else '--ssh'}",
            )
            return None
        for stream, fd in peer.streams.items():
            self._selector.register(fd, selectors.EVENT_READ, partial(self._read, peer, stream))
        return peer

    # --- signals -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        before_fd = signal.set_wakeup_fd(self._wake_out.fileno())
        # Those that are ignored stay so: nohup, and a shell that runs a script's job with "&".
        before = {
            number: signal.signal(number, lambda number, _: self._signals.append(number))
            for number in _SIGNALS
            if signal.getsignal(number) != signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(before_fd)

    def _take_signal(self, number: int) -> None:
        if number == signal.SIGTSTP:
            self._stop()
            return
        self._was_signalled = True
        if self._give_up_s is None or number != signal.SIGINT:
            self._decide(128 + number, None)
        else:
            self._end_all(0.0, _KILL_S)

    def _stop(self) -> None:
        """Stop as Ctrl-Z asks; ranks go on, and agents do not take the silence for an end."""
        for peer in self._peers:
            self._tell(peer, {"is": "stopped"})
        stopped_s = time.monotonic()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        signal.pthread_kill(threading.get_ident(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)
        self._began_s += time.monotonic() - stopped_s
        self._speak()

    # --- the loop ------------------------------------------------------------------------------

    def _turn(self) -> None:
        self._hold(self._outlet.is_full and self._give_up_s is None)
        for key, _ in self._selector.select(min(0.5, SILENCE_S / 8)):
            # What was called before in this turn may have closed it.
            if key.fd in self._selector.get_map():
                key.data()
        for peer in self._peers:
            # Not the end of stderr: an ssh that serves others too may hold it open for long.
            if peer.code is None and "stdout" not in peer.streams:
                self._take_end(peer)
        self._look_at_the_streams()
        while self._signals:
            self._take_signal(self._signals.pop(0))

    def _hold(self, is_held: bool) -> None:
        """Read agents no more while those who read here are slow, and again when they are not."""
        if is_held == self._is_held:
            return
        self._is_held = is_held
        for peer in self._peers:
            for stream, fd in peer.streams.items():
                if is_held:
                    self._selector.unregister(fd)
                else:
                    then = partial(self._read, peer, stream)
                    self._selector.register(fd, selectors.EVENT_READ, then)

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_out.send(b"\0")

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.recv(4096)

    def _read(self, peer: Peer, stream: str) -> None:
        data = os.read(peer.streams[stream], 1 << 16)
        for line in peer.lines(stream, data):
            self._take(peer, stream, line)
        if not data:
            self._selector.unregister(peer.streams.pop(stream))
            if stream == "stdout":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    peer.process.wait(0.2)

    def _look_at_the_streams(self) -> None:
        while self._outlet.errors:
            stream, error = self._outlet.errors.popleft()
            if isinstance(error, BrokenPipeError):  # `hipress run ... | head`
                self._decide(_BROKEN_PIPE, None)
            else:
                self._note(f"{stream} can not be written any more ({error.strerror})")

    def _look_at_the_clock(self) -> None:
        now_s = time.monotonic()
        if now_s > self._spoke_s + SILENCE_S / 4:
            self._speak()
        if self._give_up_s is not None:
            for peer in self._peers if now_s > self._give_up_s else ():
                # Its host does not answer; there the agent hears nothing and ends by itself.
                peer.process.kill()
            return
        if all(peer.has_started for peer in self._peers):
            return
        seconds = now_s - self._began_s
        if seconds > self._job.timeout_s:
            self._decide(
                TIMED_OUT,
                f"not all ranks have started after {self._job.timeout_s:g} s: "
                f"{failure_text.who_waits(self._job, self._peers, self._port)}",
            )
        elif seconds > _SAY_S and not self._is_explained:
            self._is_explained = True
            waits = failure_text.who_waits(self._job, self._peers, self._port)
            self._note(f"still starting: {waits}")

    def _drain(self) -> None:
        """Wait until all is shown, as long as it takes; after a signal, or at one, not longer."""
        until = time.monotonic() + _KILL_S
        while not self._outlet.is_empty:
            if self._was_signalled and time.monotonic() > until:
                return
            self._turn()

    # --- what agents are told ------------------------------------------------------------------

    def _tell(self, peer: Peer, message: Message) -> None:
        if peer.code is not None or peer.process.poll() is not None:
            return
        peer.tell(message)
        self._mind_the_outbox(peer)

    def _mind_the_outbox(self, peer: Peer) -> None:
        out = peer.out
        if out.is_empty == (out.fd in self._selector.get_map()):
            if out.is_empty:
                self._selector.unregister(out.fd)
            else:
                self._selector.register(out.fd, selectors.EVENT_WRITE, partial(self._write, peer))

    def _write(self, peer: Peer) -> None:
        peer.out.flush()
        self._mind_the_outbox(peer)

    def _speak(self) -> None:
        """Let all agents know that this end is there."""
        self._spoke_s = time.monotonic()
        for peer in self._peers:
            if peer.is_up:
                self._tell(peer, {"is": "here"})

    def _tell_job(self, peer: Peer) -> None:
        job = self._job
        if peer.was_told or not peer.is_up or self._give_up_s is not None:
            return
        peer.was_told = True
        self._tell(
            peer,
            {
                "is": "job",
                "silence_s": SILENCE_S,
                "folder": job.folder,
                "env": dict(job.env),
                "command": list(job.command),
                "place": {
                    "node": peer.node,
                    "num_nodes": len(job.hosts),
                    "slots": peer.host.slots,
                    # One host alone needs no port that others reach.
                    "meeting": job.hosts[0].address if len(job.hosts) > 1 else "",
                    "port": self._port,
                    "job_id": self._job_id,
                    "max_restarts": job.max_restarts,
                },
            },
        )

    # --- what agents say -----------------------------------------------------------------------

    def _take(self, peer: Peer, stream: str, line: bytes) -> None:
        message = None
        if stream == "stdout":
            line, message = unpack(line)
        if line or message is None:
            text = line.decode(errors="replace").rstrip("\r")
            if stream == "stderr" and not peer.is_up:
                # Told in the sentence if the connection fails, and shown if it does not.
                peer.said.append(text)
            else:
                self._screen.show(peer.name, stream, text)
        if message is not None:
            self._obey(peer, message)

    def _obey(self, peer: Peer, message: Message) -> None:
        what = message["is"]
        if what == "line":
            rank, text = message.get("rank"), message["text"]
            if rank is not None:
                self._screen.keep(rank, text)
            prefix = peer.name if rank is None else f"rank {rank}"
            self._screen.show(prefix, message["stream"], text, message["end"])
        elif what == "note":
            self._note(f"{peer.name}: {message['text']}")
        elif what == "up":
            self._take_up(peer, message["version"], message.get("machine", ""))
        elif what == "meeting":
            self._port = message["port"]
            self._note(failure_text.who_is_where(self._job, self._peers, self._port))
            for other in self._peers:
                self._tell_job(other)
        elif what == "waiting":
            peer.waits_for = message["why"]
        elif what == "refused":
            self._decide(2, f"{peer.name}: {message['why']}")
        elif what == "started":
            self._take_start(peer, message["rank"])
        elif what == "ended":
            if message["code"] and not message["told"]:
                self._take_failure(peer, message["rank"], message["code"])
        elif what == "over":
            peer.over = message
            if message["code"]:
                self._fail(peer, message["rank"], message["code"])

    def _take_up(self, peer: Peer, version: str, machine: str) -> None:
        peer.is_up = True
        for text in peer.said:
            self._screen.show(peer.name, "stderr", text)
        if version != __version__:
            self._decide(
                2,
                f"{peer.name} has hipress {version} and this machine {__version__}; install the "
                f"same on all, or name another Python there with --python",
            )
        if machine and self._machines.setdefault(machine, peer) is not peer:
            self._note(failure_text.one_machine(self._machines[machine], peer))
        # The first host says where it listens before the others are told.
        if peer.node == 0 or self._port and self._peers[0].was_told:
            self._tell_job(peer)

    def _take_start(self, peer: Peer, rank: int) -> None:
        peer.started.add(rank)
        self._num_starts[rank] += 1
        if self._num_starts[rank] > self._num_rounds:
            self._num_rounds += 1
            if self._num_rounds > 1:
                self._note(f"all ranks start over, for the {self._num_rounds}. time")

    def _take_failure(self, peer: Peer, rank: int, status: int) -> None:
        if not self._job.max_restarts:
            self._fail(peer, rank, status)
        elif self._outcome is None:
            # What it means is for torchrun to decide; the end of the agent tells.
            self._note(failure_text.how(self._job, peer, rank, status))

    def _take_end(self, peer: Peer) -> None:
        """Policy an agent whose output has ended, once its process has."""
        status = peer.process.poll()
        if status is None:
            return
        if "stderr" in peer.streams:
            # The last words, and no longer than they are there.
            for line in peer.last_errors():
                self._take(peer, "stderr", line)
            fd = peer.streams.pop("stderr")
            with contextlib.suppress(KeyError):  # held
                self._selector.unregister(fd)
        with contextlib.suppress(KeyError):
            self._selector.unregister(peer.out.fd)
        peer.code = exit_code(status)
        if peer.over is None and self._outcome is None:
            self._decide(peer.code or 1, failure_text.why_it_ended(self._job, peer, peer.code))

    # --- the end -------------------------------------------------------------------------------

    def _fail(self, peer: Peer, rank: int | None, status: int) -> None:
        others = "; the others were ended" if self._job.num_ranks > 1 else ""
        self._decide(exit_code(status), failure_text.how(self._job, peer, rank, status) + others)

    def _decide(self, code: int, sentence: str | None) -> None:
        """Settle how the job ends, if nothing has so far, and end what still runs."""
        if self._outcome is None:
            self._outcome = Outcome(code=code, sentence=sentence)
        if self._give_up_s is None:
            self._end_all(GRACE_S, GRACE_S + _END_S)

    def _end_all(self, grace_s: float, most_s: float) -> None:
        self._give_up_s = time.monotonic() + most_s
        # Nobody may be there to read, and the end must not wait for that.
        self._screen.drops = True
        for peer in self._peers:
            self._tell(peer, {"is": "end", "grace_s": grace_s})
            if not peer.was_told:
                # It waits for its job, or ssh for its host: there is nothing to end in order.
                peer.process.kill()

    def _note(self, text: str) -> None:
        self._screen.note(text)
