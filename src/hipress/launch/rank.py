"""Around each rank: takes its output to the agent, waits for it, and reports how it ended.

torchrun starts this file in place of the command, as a script and without site packages: it uses
the standard library only, and so starts in 20 ms and keeps 10 MB. torchrun sends signals to the
whole process group, so the command hears them too; here they are only noted. What the command
leaves behind comes to this process, which kills it before it ends: it must not live into the next
attempt.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import time

NOT_FOUND, NOT_EXECUTABLE = 127, 126
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_CLEAN_UP_S = 1.0
"""Seconds that may pass until all that was killed is gone."""


def main(agent_name: str, command: list[str]) -> int:
    """Run the command of a rank.

    Args:
        agent_name: The agent's socket, among those that have no place in the file system.
        command: Program and arguments.

    Returns:
        Its exit code; 128 + n where signal n ended it.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    agent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent.connect(f"\0{agent_name}")
    names = {"rank": "RANK", "local_rank": "LOCAL_RANK", "attempt": "TORCHELASTIC_RESTART_COUNT"}
    agent.send(json.dumps({key: int(os.environ[name]) for key, name in names.items()}).encode())
    _, (stdout, stderr), _, _ = socket.recv_fds(agent, 16, 2)
    for fd in (stdout, stderr):
        os.set_inheritable(fd, False)  # the command has its copies, and no third

    told: list[int] = []
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: told.append(number))
    # Blocked until the command has its own handlers: a signal in between would be lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    mine = os.getpid()
    pid = os.fork()
    if pid == 0:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != mine:
            os._exit(1)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _become(command)
    os.close(stdout)
    os.close(stderr)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    status = _wait_for(pid)
    _kill_children()
    try:
        # As subprocess has it: -n where signal n ended it, which no exit code can be.
        agent.send(json.dumps({"code": status, "told": bool(told)}).encode())
    except OSError:
        pass  # the agent is gone; so will be this process
    return status if status >= 0 else 128 - status


def _wait_for(command_pid: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)  # orphans too, or they would stay as zombies
        if pid == command_pid:
            return os.waitstatus_to_exitcode(status)


def _kill_children() -> None:
    """Kill what is left; the children of those killed become this process's own, and are next."""
    until = time.monotonic() + _CLEAN_UP_S
    while time.monotonic() < until:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in _children():
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass  # gone, or another user's: the agent tells of that
        time.sleep(0.005)


def _children() -> list[int]:
    mine = str(os.getpid())
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", errors="replace") as file:
                # The name in parentheses may hold spaces; the parent is the second word after it.
                if file.read().rpartition(")")[2].split()[1] == mine:
                    found.append(int(name))
        except (OSError, IndexError):
            pass
    return found


def _become(command: list[str]) -> None:
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        said, code = "is not there: check its name, and PATH on this host", NOT_FOUND
    except OSError as error:
        said, code = f"can not be started: {error.strerror}", NOT_EXECUTABLE
    os.write(2, f"hipress: command {command[0]!r} {said}\n".encode())
    os._exit(code)


if __name__ == "__main__":
    # Not sys.exit: nothing is to be cleaned up, and threads there are none.
    os._exit(main(sys.argv[1], sys.argv[2:]))
