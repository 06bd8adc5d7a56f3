"""Scenarios of real processes: a script imports once, then forks a process for each rank of each.

A script holds functions, each with arguments `rank` and `num_ranks`, and ends with
`main(globals())`. A test starts it with a list of stages: once for all ranks (`play`), or on each
rank of a lab, where the network between hosts matters (`start`). A stage is a list of scenarios
that run side by side, each with an `id`, the function to `do`, its number of `ranks`, and more for
that function. A line of JSON tells how each went: {"id", "rank",
"result" or "error", "at"}, and {"id", "rank", "exit"}; `Told` collects them.
"""

import atexit
import faulthandler
import fcntl
import functools
import gc
import inspect
import json
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback

from tests import kernels

LIMIT_S = 400.0
"""No process lives longer, unless its script says so."""
ALL_RANKS = "all ranks"
"""The argument of a script that forks the processes of all ranks, not those of one."""
PORTS = range(10_000, 32_000)
"""Below those that systems hand out themselves."""


# --- in the test ----------------------------------------------------------------------------------


@functools.cache
def refusal():
    """Why there is no lab with a network here, if there is none."""
    from hipress.errors import HipressError
    from hipress.lab import Lab

    try:
        Lab(1, rate="1gbit").close()
    except HipressError as error:
        return str(error)
    return None


class Told:
    """The lines of a job, by scenario and rank."""

    def __init__(self):
        self.lines = []
        self.changed = threading.Condition()
        self.finished = None

    def on_line(self, rank, stream, text):
        if stream == "stdout" and text.startswith("{"):
            with self.changed:
                self.lines.append(json.loads(text))
                self.changed.notify_all()

    def find(self, key, **like):
        """What the lines that are `like` this say for a key."""
        with self.changed:
            return [
                line[key]
                for line in self.lines
                if key in line and all(line.get(k) == v for k, v in like.items())
            ]

    def wait_for(self, key, count, limit_s, **like):
        with self.changed:
            enough = self.changed.wait_for(lambda: len(self.find(key, **like)) >= count, limit_s)
        if not enough:
            self._fail(f"{key!r} was told too rarely", **like)

    def results(self, id, ranks):
        """Returns the results of these ranks; fails with what was told instead."""
        found = [self.find("result", id=id, rank=rank) for rank in ranks]
        if not all(found):
            self._fail("a result is missing", id=id)
        return [one[0] for one in found]

    def error(self, id, rank):
        """Returns the kind of an error, its text, the ranks it names, and when it came."""
        (error,) = self.find("error", id=id, rank=rank) or [None]
        if not error:
            self._fail(f"rank {rank} had no error", id=id)
        return (*error, self.find("at", id=id, rank=rank)[0])

    def _fail(self, why, **like):
        """Fails with what was told, short enough to be read: errors first."""
        import pytest  # ranks do not need it

        with self.changed:
            lines = [one for one in self.lines if all(one.get(k) == v for k, v in like.items())]
        lines.sort(key=lambda one: "error" not in one)
        shown = [{**one, "trace": one["trace"][-300:]} if "trace" in one else one for one in lines]
        told = "\n".join(str(one)[:700] for one in shown[:8])
        pytest.fail(f"{why} {like or ''}; told:\n{told}", pytrace=False)


def start(lab, script, told, *stages):
    """Starts a script on all ranks of a lab; returns the lab's job."""
    command = [sys.executable, str(script), json.dumps(stages)]
    return lab.start(command, on_line=told.on_line)


def play(script, *stages, limit_s=1500):
    """Runs a script as one process, which forks all ranks; returns what they told."""
    from hipress.lab import Lab

    found = Told()
    ports = iter(free_ports(sum(map(len, stages))))  # others are on this machine's ports
    stages = [[{**scenario, "port": next(ports)} for scenario in stage] for stage in stages]
    with Lab(1, shaped=False) as lab:
        command = [sys.executable, str(script), json.dumps(stages), ALL_RANKS]
        found.finished = lab.start(command, on_line=found.on_line).wait(limit_s)
    return found


def free_ports(count):
    """Returns ports that nobody listens on and that the system gives to no connection."""
    found = []
    # Not from the generator of `random`: two processes that have seeded it would get the same.
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(found) == count:
            break
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found


# --- in a rank ------------------------------------------------------------------------------------


def tell(**line):
    with open(__file__) as lock:  # a pipe may mix the lines of two processes where they are long
        fcntl.flock(lock, fcntl.LOCK_EX)
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def main(functions, *, thorough=True, limit_s=LIMIT_S):
    """Plays the stages that the command line holds.

    Args:
        functions: By the name that scenarios give; those that ask for `id` get theirs.
        thorough: Let processes end as all do; False spares them to take Python down, which costs
            each a second, unless a scenario says `thorough` itself.
        limit_s: No process lives longer.
    """
    kernels.compile_once()
    stages = json.loads(sys.argv[1])
    gc.freeze()  # no child looks through, and so copies, the objects that all of them share
    own, number = int(os.environ["RANK"]), 0
    for stage in stages:
        children = {}
        for scenario in stage:
            number += 1
            ranks = range(scenario["ranks"])
            for rank in ranks if ALL_RANKS in sys.argv else {own}.intersection(ranks):
                pid = os.fork()
                if pid == 0:
                    os.environ["RANK"] = str(rank)
                    _play(functions[scenario["do"]], scenario, number, limit_s)
                    if not scenario.get("thorough", thorough):
                        atexit._run_exitfuncs()
                        os._exit(0)
                    return
                children[pid] = {"id": scenario["id"], "rank": rank}
        _wait_for(children, limit_s)


def _play(function, scenario, number, limit_s):
    """In the child."""
    import torch.distributed as dist

    faulthandler.dump_traceback_later(limit_s - 10)
    line = {"id": scenario["id"], "rank": int(os.environ["RANK"])}
    frame = ("do", "ranks", "env", "port", "thorough") + ("id",) * (
        "id" not in inspect.signature(function).parameters
    )
    options = {key: value for key, value in scenario.items() if key not in frame}
    os.environ.update(scenario.get("env", {}))
    os.environ["WORLD_SIZE"] = str(scenario["ranks"])
    port = scenario.get("port") or int(os.environ["MASTER_PORT"]) + 1 + number
    os.environ["MASTER_PORT"] = str(port)
    try:
        dist.init_process_group("gloo")
        dist.barrier()  # on a busy machine one rank starts seconds after another
        result = function(line["rank"], scenario["ranks"], **options)
    except BaseException as error:  # those of torch's checkpoints are no Exceptions
        at = time.monotonic()
        what = [type(error).__name__, str(error), getattr(error, "ranks", [])]
        tell(**line, error=what, at=at, trace=traceback.format_exc()[-2000:])
        raise
    tell(**line, result=result, at=time.monotonic())
    dist.barrier()  # whoever holds the store leaves last


def _wait_for(children, limit_s):
    deadline = time.monotonic() + limit_s
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            tell(**children.pop(pid), exit=code, at=time.monotonic())
        elif time.monotonic() > deadline:
            for pid, child in children.items():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                tell(**child, exit="hung", at=time.monotonic())
            return
        else:
            time.sleep(0.02)


def no_launcher(monkeypatch):
    """Removes a launcher's variables for one test, and those that the test will set."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                 "MASTER_PORT"):  # fmt: skip
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
