"""What a rank of an episode runs: a process that imports once, and forks one for every job.

The first process (`serve`) obeys lines of JSON from a named pipe: it starts the rank of a job,
sends it a signal or passes a line on to it, and tells when it has ended. The rank trains (`train`)
until it is told to stop, or something fails. Both tell what happens in lines of JSON on stdout:

    {"ready": true}                                          the first process obeys
    {"job", "rank", "joined"}                                the process group is made
    {"job", "rank", "began", "digest"}                       training begins at this step
    {"job", "rank", "step", "digest", "finite"}              every `TELL_EVERY` steps
    {"job", "rank", "saved", "digest"}                       rank 0 has written a checkpoint
    {"job", "rank", "unsaved", "kind", "text", "intact"}     rank 0 could not; `intact`: the digest
                                                             of the checkpoint that is there
    {"job", "rank", "struck", "to", "zone", "offset"}        a message was damaged
    {"job", "rank", "jumped"}                                the clock was set by so many seconds
    {"job", "rank", "error", "text", "names", "trace"}       training failed
    {"job", "rank", "stopped", "digest"}                     training was told to stop
    {"job", "rank", "exit"}                                  the process has ended, with this code

Each has `at`, the time in seconds by the monotonic clock, which all emulated hosts share.
"""

import atexit
import faulthandler
import hashlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # once here: the first optimizer of every job would, for seconds
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import hipress
import hipress.session
import hipress.torch
from hipress.casync.engine.transport import GroupTransport
from hipress.errors import UsageError
from hipress.processes.family import die_with_parent
from hipress.train import checkpoints

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests import kernels
from tests.chaos.damage import damaged

TELL_EVERY, SAVE_EVERY = 3, 12
"""Steps."""
MAX_PAUSE_S = 0.012
"""A rank waits for a random time up to this in every step, so that ranks arrive in any order."""
INPUTS, OUTPUTS = 64, 40
LEARNING_RATE = 0.02


def tell(**line):
    """Writes one line, whole: several threads write."""
    line["at"] = time.monotonic()
    os.write(1, json.dumps(line).encode() + b"\n")


# --- the first process ----------------------------------------------------------------------------


def serve(pipe, codecs):
    """Obeys until it is killed; in the process of a new job, returns what that job is to do."""
    rank = int(os.environ["RANK"])
    _warm_up(codecs)
    commands = os.open(pipe, os.O_RDWR)  # also for writing: no end of file between two writers
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    tell(ready=True, rank=rank)
    job, pid, control, text = None, 0, -1, b""
    while True:
        if pid and (ended := os.waitpid(pid, os.WNOHANG))[0]:
            tell(job=job, rank=rank, exit=os.waitstatus_to_exitcode(ended[1]))
            os.close(control)
            pid = 0
        if not select.select([commands], [], [], 0.01)[0]:
            continue
        text += os.read(commands, 1 << 16)
        *lines, text = text.split(b"\n")
        for command in map(json.loads, lines):
            if command["do"] == "start":
                assert not pid, "the last job has not ended"
                job = command["job"]
                theirs, control = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.close(control)
                    os.close(commands)
                    return {**command, "rank": rank, "control": theirs}
                os.close(theirs)
            elif command["do"] == "signal":
                if pid:
                    os.kill(pid, command["signal"])
            elif pid:
                os.write(control, json.dumps(command).encode() + b"\n")


def _warm_up(codecs):
    """Loads the kernels of codecs, and compiles them if they are new, so that no job has to."""
    kernels.compile_once()
    for name in codecs:
        for codec in (hipress.codec(name), *map(hipress.codec(name).aggregator, (1, 2, 3, 4))):
            for coder in (codec, codec.bulk([4096, 100])):
                x = torch.ones(getattr(coder, "numel", 4096))
                payload = coder.encode(x, coder.init(x, seed=0, stream=0))
                coder.decode(payload, out=x)
                coder.decode(payload, out=x, add=True, alpha=0.5)


# --- a rank of a job ------------------------------------------------------------------------------


class Control(threading.Thread):
    """Reads what the rank is told while it trains, and damages messages and the clock for it."""

    def __init__(self, job, fd):
        super().__init__(daemon=True)
        self.job, self.fd = job, fd
        self.stop_at = None
        self.strike = None
        self._kept = []  # damaged messages, until the process ends: they are being sent
        send = GroupTransport.send
        GroupTransport.send = lambda transport, *message: send(transport, *self.on_send(*message))
        self._time, self._offset_s = time.time, 0.0
        time.time = lambda: self._time() + self._offset_s
        self.start()

    def run(self):
        for line in os.fdopen(self.fd):
            command = json.loads(line)
            if command["do"] == "stop":
                self.stop_at = command["step"]
            elif command["do"] == "strike":
                self.strike = command
            elif command["do"] == "clock":
                self._offset_s += command["seconds"]
                tell(**self.job, jumped=command["seconds"])

    def on_send(self, data, to, tag):
        """Damages the first message that the strike fits."""
        strike = self.strike
        if strike is not None:
            found = damaged(data, strike["zone"], strike["place"], strike["flip"])
            if found is not None:
                self.strike = None
                data, zone, offset = found
                self._kept.append(data)
                tell(**self.job, struck=True, to=to, zone=zone, offset=offset)
        return data, to, tag


class Door:
    """A small model that is trained through one of the public entrances of HiPress."""

    session = None

    def __init__(self, job):
        generator = torch.Generator().manual_seed(7)
        width = job["width"]
        self.first = torch.randn(INPUTS, width, generator=generator).div_(INPUTS**0.5)
        self.second = torch.randn(width, OUTPUTS, generator=generator).div_(width**0.5)
        self.bias = torch.zeros(OUTPUTS)

    def parameters(self):
        return {"first": self.first, "second": self.second, "bias": self.bias}

    def module(self, width):
        """Returns the model for autograd."""
        module = nn.Sequential(nn.Linear(INPUTS, width, False), nn.Linear(width, OUTPUTS))
        with torch.no_grad():
            module[0].weight.copy_(self.first.T)
            module[1].weight.copy_(self.second.T)
            module[1].bias.zero_()
        return module

    def gradients(self, x):
        """Of the mean squared difference to 1, by hand."""
        hidden = x @ self.first
        error = (hidden @ self.second + self.bias - 1) * (2 / len(x) / OUTPUTS)
        return {
            "second": hidden.T @ error,
            "first": x.T @ (error @ self.second.T),
            "bias": error.sum(0),
        }

    def apply(self, means):
        for name, mean in means.items():
            self.parameters()[name].sub_(mean, alpha=LEARNING_RATE)

    def state(self):
        """Returns a checkpoint; collective."""
        found = {"parameters": {n: p.detach().clone() for n, p in self.parameters().items()}}
        if self.session is not None:
            found["session"] = self.session.state_dict()
        return found

    def load(self, state):
        with torch.no_grad():
            for name, parameter in self.parameters().items():
                parameter.copy_(state["parameters"][name])
        if self.session is not None:
            self.session.load_state_dict(state["session"])


class Attach(Door):
    """`hipress.attach`, or the bare hook, under DDP."""

    def __init__(self, job):
        super().__init__(job)
        self.model = DDP(self.module(job["width"]), bucket_cap_mb=0.02)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        codec = None if job["codec"] == "auto" else job["codec"]
        if job["door"] == "attach":
            self.session = hipress.attach(
                self.model, codec, job["strategy"], check_every=job["check_every"]
            )
        else:
            self.session, hook = hipress.torch.comm_hook(codec, job["strategy"])
            self.model.register_comm_hook(self.session, hook)

    def parameters(self):
        return dict(self.model.module.named_parameters())

    def step(self, x):
        self.optimizer.zero_grad()
        (self.model(x) - 1).pow(2).mean().backward()
        self.optimizer.step()


class Loop(Door):
    """`hipress.session.start` and `average`, with NumPy arrays."""

    def __init__(self, job):
        super().__init__(job)
        arrays = {name: value.numpy() for name, value in self.gradients(torch.ones(1, 64)).items()}
        codec = None if job["codec"] == "auto" else job["codec"]
        self.session = hipress.session.start(arrays, codec, job["strategy"], min_size=0)

    def step(self, x):
        arrays = {name: np.ascontiguousarray(g.numpy()) for name, g in self.gradients(x).items()}
        self.session.average(arrays)
        self.apply({name: torch.from_numpy(array) for name, array in arrays.items()})


class Allreduce(Door):
    """`hipress.allreduce` of one tensor after the other; in wide jobs of all of them at once."""

    def __init__(self, job):
        super().__init__(job)
        self.options = {"codec": job["codec"], "strategy": job["strategy"]}
        self.together = job["together"]

    def step(self, x):
        means = {name: gradient.contiguous() for name, gradient in self.gradients(x).items()}
        under_way = [
            hipress.allreduce(mean, name=name, async_op=self.together, **self.options)
            for name, mean in means.items()
        ]
        for future in under_way if self.together else ():
            future.wait()
        self.apply(means)


class Optimizer(Door):
    """`hipress.torch.DistributedOptimizer`, without DDP."""

    def __init__(self, job):
        super().__init__(job)
        self.model = self.module(job["width"])
        with torch.no_grad():
            for parameter in self.model.parameters():  # those of rank 0 are sent to all ranks
                parameter.add_(job["rank"])
        if job["optimizer"] == "AdamW":
            inner = hipress.torch.AdamW(self.model.parameters(), lr=LEARNING_RATE / 10)
        else:
            inner = torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE)
        sizes = {}
        if job["schedule"] is not None:
            sizes = {
                "schedule": job["schedule"],
                "slice_bytes": job["slice_bytes"],
                "credit_bytes": job["num_credits"] * job["slice_bytes"],
            }
        self.optimizer = hipress.torch.DistributedOptimizer(
            inner, self.model.named_parameters(), job["codec"], job["strategy"], **sizes,
            min_size=0, check_every=job["check_every"],
        )  # fmt: skip
        self.session = self.optimizer.sync
        self.clips = job["clips"]

    def parameters(self):
        return dict(self.model.named_parameters())

    def step(self, x):
        self.optimizer.zero_grad()
        (self.model(x) - 1).pow(2).mean().backward()
        if self.clips:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def state(self):
        return {**super().state(), "optimizer": self.optimizer.state_dict()}

    def load(self, state):
        super().load(state)
        self.optimizer.load_state_dict(state["optimizer"])


DOORS = {
    "attach": Attach,
    "hook": Attach,
    "session": Loop,
    "allreduce": Allreduce,
    "optimizer": Optimizer,
}


def train(job):
    """Trains until it is told to stop, or until something fails."""
    rank = job["rank"]
    me = {"job": job["job"], "rank": rank}
    # What a user would see of this rank, apart from what others print.
    os.dup2(os.open(f"{job['log']}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    die_with_parent()
    faulthandler.register(signal.SIGUSR1)  # asks a rank that hangs where its threads are
    os.environ.update(
        WORLD_SIZE=str(job["ranks"]), GROUP_WORLD_SIZE=str(job["ranks"]),
        MASTER_PORT=str(job["port"]), HIPRESS_TIMEOUT=str(job["timeout_s"]),
    )  # fmt: skip
    if job["pairs"]:  # hosts have one rank each, and `hierarchical` is about hosts with several
        socket.gethostname = lambda: f"pair{rank // 2}"
    try:
        control = Control(me, job["control"])
        folder = Path(job["folder"])
        hipress.init()
        tell(**me, joined=True)
        door = DOORS[job["door"]](job)
        found = checkpoints.read(folder)
        step = 0
        if found is not None:
            step = found["step"]
            door.load(found)
        tell(**me, began=step, digest=digest(door))
        _steps(job, me, door, control, folder, step)
        dist.destroy_process_group()
    except BaseException as error:
        tell(
            **me,
            error=type(error).__name__,
            text=str(error)[:500],
            names=list(getattr(error, "ranks", [])),
            trace=traceback.format_exc()[-2000:],
        )
        if job["thorough"]:
            raise
        _leave(1)
    if not job["thorough"]:
        _leave(0)


def _leave(code):
    """Ends the process without taking Python down, which takes seconds on a busy machine."""
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


def _steps(job, me, door, control, folder, step):
    pauses = np.random.default_rng([job["rank"], job["port"]])
    while control.stop_at is None or step < control.stop_at:
        generator = torch.Generator().manual_seed(1009 * step + job["rank"])
        door.step(torch.randn(16, INPUTS, generator=generator))
        step += 1
        if step % TELL_EVERY == 0:
            finite = all(bool(p.isfinite().all()) for p in door.parameters().values())
            tell(**me, step=step, digest=digest(door), finite=finite)
        if step % SAVE_EVERY == 0:
            state = door.state()
            if job["rank"] == 0:
                _save(me, door, folder, step, state)
        time.sleep(pauses.uniform(0, MAX_PAUSE_S))
    tell(**me, stopped=step, digest=digest(door))


def _save(me, door, folder, step, state):
    try:
        checkpoints.write(folder, {"step": step, "digest": digest(door), **state})
    except UsageError as error:
        before = checkpoints.read(folder)
        intact = None if before is None else before["digest"]
        tell(**me, unsaved=step, kind=type(error).__name__, text=str(error), intact=intact)
    else:
        tell(**me, saved=step, digest=digest(door))


def digest(door):
    """Returns a text that differs where parameters differ in a bit."""
    found = hashlib.blake2b(digest_size=8)
    for parameter in door.parameters().values():
        found.update(parameter.detach().contiguous().numpy())
    return found.hexdigest()


if __name__ == "__main__":
    train(serve(sys.argv[1] + os.environ["RANK"], json.loads(sys.argv[2])))
