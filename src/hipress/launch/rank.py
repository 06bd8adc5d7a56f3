"""Around each rank: takes its output to the agent, waits for it, and reports how it ended.

torchrun starts this file in place of the command, as a script and without site packages: it uses
the standard library and one module of hipress, and so starts within 30 ms and keeps 12 MB. torchrun
sends signals to the whole process group, so the command gets them too; here they are only noted.
What the command leaves behind comes to this process, which kills it before it ends: it must not
live into the next attempt.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

if __name__ == "__main__":
    # Last, so that nothing there is taken for a module of the standard library.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from hipress.processes.family import adopt_orphans, die_with_parent, exit_code, kill_descendants

NOT_FOUND, NOT_EXECUTABLE = 127, 126
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
_CLEAN_UP_S = 1.0
"""Seconds that may pass until all that was killed is gone."""


def main(agent_name: str, command: list[str]) -> int:
    """Run the command of a rank.

    Args:
        agent_name: The agent's socket, in the abstract namespace of Unix sockets.
        command: Program and arguments.

    Returns:
        Its exit code; 128 + n where signal n ended it.
    """
    die_with_parent()
    adopt_orphans()
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
        die_with_parent()
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
    kill_descendants(_CLEAN_UP_S)
    try:
        # As subprocess has it: -n where signal n ended it, which no exit code can be.
        agent.send(json.dumps({"code": status, "told": bool(told)}).encode())
    except OSError:
        pass  # the agent is gone; so will be this process
    return exit_code(status)


def _wait_for(command_pid: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)  # orphans too, or they would stay as zombies
        if pid == command_pid:
            return os.waitstatus_to_exitcode(status)


def _become(command: list[str]) -> None:
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        reason, code = "is not there: check its name, and PATH on this host", NOT_FOUND
    except OSError as error:
        reason, code = f"cannot be started: {error.strerror}", NOT_EXECUTABLE
    os.write(2, f"hipress: command {command[0]!r} {reason}\n".encode())
    os._exit(code)


if __name__ == "__main__":
    # Not sys.exit: there is nothing to clean up, and there are no threads.
    os._exit(main(sys.argv[1], sys.argv[2:]))
