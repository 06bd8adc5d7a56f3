"""How Linux processes start and end together: with their parent, as a group, with all descendants.

The process around each rank imports this module (see launch/rank.py), so it imports little.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, as init does."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: int,
    stderr: int,
    cwd: str | None = None,
    parent_signal: int = signal.SIGKILL,
) -> int:
    """Start a program in a session of its own, and return its process ID; `reap` reports its end.

    Args:
        argv: The program and its arguments.
        env: Its whole environment.
        stdout: Descriptor for its standard output.
        stderr: Descriptor for its standard error.
        cwd: The folder it runs in; that of this process if None.
        parent_signal: The signal it gets when this process ends.
    """
    import subprocess  # takes 10 ms, which ranks do not need to spend

    def prepare() -> None:
        die_with_parent(parent_signal)
        # Popen leaves ignored signals ignored in the child: SIGTERM must end it.
        for number in (*TERMINATION_SIGNALS, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)

    child = subprocess.Popen(
        argv,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=prepare,
    )
    # A Popen that is dropped before its child was reaped would warn, and later wait by itself.
    child.returncode = 0
    return child.pid


def reap() -> list[tuple[int, int]]:
    """Return process ID and status of every child that has ended; -n means ended by signal n."""
    ended = []
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((found[0], os.waitstatus_to_exitcode(found[1])))
    except ChildProcessError:
        pass
    return ended


def exit_code(status: int) -> int:
    """Return the exit code that a shell reports for a status: 128 + n for -n, which is signal n."""
    return status if status >= 0 else 128 - status


def signal_group(group: int, number: int) -> None:
    """Send a signal to a process group, where it still exists and belongs to this user."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        pass


def signal_descendants(number: int) -> list[int]:
    """Send a signal to all descendants; repeated, as some fork while /proc is read.

    Returns:
        Those that could not be signalled, because they belong to another user.
    """
    refused: list[int] = []
    signalled: set[int] = set()
    while new := set(descendants(os.getpid())) - signalled:
        signalled |= new
        for pid in new:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
            except PermissionError:
                refused.append(pid)
    return refused


def kill_descendants(timeout_s: float) -> None:
    """Kill all descendants and wait until they are gone, for a process that adopts orphans."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        signal_descendants(signal.SIGKILL)
        time.sleep(0.005)


def descendants(root: int) -> list[int]:
    """Return every living process below one, as /proc shows their parents."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", errors="replace") as file:
                # The name in parentheses may hold spaces; state and parent are the words after it.
                state, parent = file.read().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != "Z":  # ended, and only not yet reaped
            children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found
