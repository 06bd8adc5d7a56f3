"""Ranks that die, freeze, are cut off or stall while DDP trains; restarts by torchrun.

Starting a rank takes seconds, so a job runs many scenarios (see `scripts/faults.py`); tests look at
what each has told, and at what a user would see. Rank 2 is the one that comes to harm. The
docstring of a test says what would make it fail.
"""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

from hipress.lab import Lab
from tests import scenarios
from tests.scenarios import Told

pytestmark = [pytest.mark.alone, pytest.mark.full]

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 25
"""HIPRESS_TIMEOUT: twenty ranks start at once, and need seconds for their first exchange."""
TORCH_S = 30
"""The timeout of DDP's own group where it has one: longer, so that ours names the rank first."""
ERROR_S, EXIT_S = 10, 20
"""How much longer than that it may take until a rank has its error, and until it is gone."""
OTHERS = (0, 1, 3)


@pytest.fixture(scope="module", autouse=True)
def namespaces():
    if (why := scenarios.refusal()) is not None:
        pytest.skip(why)


@pytest.fixture(scope="module")
def lab():
    with Lab(hosts=4, rate="1gbit") as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


def processes(folder):
    """Those on this machine that were given a file in this folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes()
        except OSError:  # it has just ended
            continue
        if str(folder).encode() in words:
            found.append(words.replace(b"\0", b" ").decode())
    return found


class Harm:
    """What ranks have told, and what a user would see of them."""

    def __init__(self, folder, told):
        self.folder, self.told = folder, told
        self.since = {}

    def exit(self, id, rank):
        """The exit code, and how long after the harm it came; None while there is none."""
        for line in self.told.lines:
            if "exit" in line and (line["id"], line["rank"]) == (id, rank):
                return line["exit"], line["at"] - self.since[id]
        return None

    def wait_for_exits(self, ids, ranks):
        deadline = time.monotonic() + 2 * TIMEOUT_S + EXIT_S
        while time.monotonic() < deadline:
            if all(self.exit(id, rank) for id in ids for rank in ranks):
                return
            time.sleep(0.1)

    def last_line(self, id, rank):
        return (self.folder / f"{id}.{rank}").read_text().splitlines()[-1]

    def check(self, id, *, ranks=OTHERS, named=True):
        """Every other rank has ended in time, with an error that names the one at fault."""
        for rank in ranks:
            kind, text, blamed, at = self.told.error(id, rank)
            assert at - self.since[id] < TIMEOUT_S + ERROR_S
            code, after_s = self.exit(id, rank) or (None, 0)
            assert code == 1
            assert after_s < TIMEOUT_S + EXIT_S
            if named:
                assert (kind, blamed) == ("PeerError", [2]), text
                assert "PeerError: rank 2 " in self.last_line(id, rank)


# --- one job for all of it ------------------------------------------------------------------------

FROZEN, CUT_OFF = "frozen", "cut off"
IN_BACKWARD, AT_BUFFERS = "killed in backward", "killed before DDP sends buffers"
STALLED = "stalled in forward"
STOPPED = "stopped before DDP sends buffers"
LIMITED = "stopped before DDP sends buffers, with a timeout of torch's"
HARMED = {
    IN_BACKWARD: {"how": "kill", "where": "backward"},
    AT_BUFFERS: {"how": "kill", "where": "between", "norm": True},
    STALLED: {"how": "stall", "where": "forward", "strategy": "ring"},
    STOPPED: {"how": "stop", "where": "between", "norm": True},
    LIMITED: {"how": "stop", "where": "between", "norm": True, "torch_s": TORCH_S},
}
"""By what they do to themselves."""


@pytest.fixture(scope="module")
def harm(lab, folder):
    told = Told()
    found = Harm(folder, told)
    stages = [
        [scenario(folder, FROZEN)],
        [scenario(folder, CUT_OFF, strategy="ring")],
        [scenario(folder, id, **options) for id, options in HARMED.items()],
    ]
    job = scenarios.start(lab, SCRIPTS / "faults.py", told, *stages)
    try:
        for id, do, undo in ((FROZEN, lab.pause, lab.resume), (CUT_OFF, lab.cut, lab.heal)):
            told.wait_for("ready", 4, 150, id=id)
            found.since[id] = time.monotonic()
            do(2)
            try:
                found.wait_for_exits([id], (*OTHERS, 2) if id == CUT_OFF else OTHERS)
            finally:
                undo(2)
        for id in HARMED:
            told.wait_for("harmed", 1, 150, id=id)
            found.since[id] = told.find("harmed", id=id)[0]
        found.wait_for_exits(HARMED, OTHERS)
        return found
    finally:
        job.kill()


def scenario(folder, id, **options):
    """Of `scripts/faults.py`."""
    env = {"HIPRESS_TIMEOUT": str(TIMEOUT_S)}
    return {"id": id, "do": "train", "ranks": 4, "folder": str(folder), "env": env, **options}


# --- dead, frozen, cut off ------------------------------------------------------------------------


@pytest.mark.parametrize("id", [IN_BACKWARD, FROZEN, CUT_OFF])
def test_a_lost_rank_is_named_on_all_others(harm, id):
    """Catches: a hang in backward, an error that loses its kind, a process that does not end."""
    harm.check(id)


def test_a_rank_that_is_cut_off_ends_too(harm):
    """Catches: a rank that waits for ever for a store and peers that it cannot reach."""
    harm.check(CUT_OFF, ranks=[2], named=False)
    assert "PeerError: rank 2 does not reach" in harm.last_line(CUT_OFF, 2)


# --- stalled --------------------------------------------------------------------------------------


def test_a_stalled_rank_is_named(harm):
    """Catches: trust in heartbeats, which go on while a rank's own code does not."""
    harm.check(STALLED)
    assert harm.exit(STALLED, 2) is None  # it was there all the time


# --- where the others wait for what DDP itself sends ----------------------------------------------


def test_a_killed_rank_ends_those_that_wait_for_buffers(harm):
    """Catches: ranks that do not end after an error of torch's own."""
    harm.check(AT_BUFFERS, named=False)


def test_a_stopped_rank_ends_those_that_wait_for_buffers(harm):
    """Catches: a hang in what DDP itself sends, and a rank that ends without saying why."""
    for rank in OTHERS:
        code, after_s = harm.exit(STOPPED, rank) or (None, 0)
        assert code == 1
        assert after_s < 2 * TIMEOUT_S + EXIT_S
        assert "rank 2 has given no sign of life" in (harm.folder / f"{STOPPED}.{rank}").read_text()


def test_a_timeout_of_torch_ends_those_that_wait_for_buffers(harm):
    """Catches: the advice to give init_process_group a timeout being of no use."""
    harm.check(LIMITED, named=False)
    harm.check(LIMITED, ranks=[1, 3])  # rank 0, which sends them, has an error of torch's


# --- restarts -------------------------------------------------------------------------------------

STEPS, EVERY, KILLED_AT = 12, 4, 10
RENDEZVOUS = [
    "--nnodes=4",
    "--nproc-per-node=1",
    "--max-restarts=2",
    "--rdzv-backend=c10d",
    "--rdzv-endpoint=host0:29400",
    "--rdzv-id=digits",
]


def example(folder, agent=()):
    options = ["--folder", str(folder), "--steps", str(STEPS), "--every", str(EVERY)]
    return [sys.executable, *agent, str(SCRIPTS / "resume.py"), *options]


@pytest.fixture(scope="module")
def restarted(lab, folder):
    """A job that torchrun starts again since a worker was killed; its checkpoint is kept."""
    script = str(SCRIPTS / "resume.py")
    argv = example(folder / "restarted", [script, "agent", *RENDEZVOUS])
    harm = {"rank": 2, "step": KILLED_AT, "keep": str(folder / "kept")}
    env = {
        "HIPRESS_TIMEOUT": str(TIMEOUT_S),
        "HARM": json.dumps(harm),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see the example
    }
    return lab.run(argv, env=env, timeout=150)


@pytest.fixture(scope="module")
def undisturbed(lab, folder, restarted):
    """The last lines of a run without harm, and of one that goes on without residuals."""
    env = {"HIPRESS_TIMEOUT": "60"}
    jobs = [
        lab.start(example(folder / "whole"), env=env),
        lab.start(example(folder / "kept"), env={**env, "HARM": json.dumps({"forget": True})}),
    ]
    ends = [job.wait(90) for job in jobs]
    assert [end.exit_code for end in ends] == [0, 0], [end.stderr[0] for end in ends]
    return [end.stdout[0].splitlines() for end in ends]


def test_a_restarted_job_ends_as_if_nothing_had_been(restarted, undisturbed):
    """Catches: residuals, momentum or steps that a checkpoint loses, or gives to another rank."""
    assert restarted.exit_codes == (0,) * 4, restarted.stderr
    told = [line for text in restarted.stdout for line in text.splitlines()]
    assert sum('"killed"' in line for line in told) == 1
    assert sum('"began"' in line for line in told) == 8
    whole, _ = undisturbed
    shown = [line for line in told if line.startswith(("from", "step"))]
    assert shown == ["from step 0", "from step 8", whole[-1]]
    assert whole[-1].startswith(f"step {STEPS}: ")


def test_its_last_checkpoint_is_that_of_a_run_without_harm(restarted, undisturbed, folder):
    """Catches: momentum or residuals of any rank that differ in a bit."""
    found, wanted = [
        torch.load(folder / name / "checkpoint.pt", weights_only=True)
        for name in ("restarted", "whole")
    ]
    assert found["step"] == found["sync"]["step"] == STEPS
    residuals = [state["residual"] for r in found["sync"]["ranks"].values() for state in r.values()]
    assert len(residuals) == 4 * 2 and all(residual.any() for residual in residuals)
    found, wanted = dict(leaves(found)), dict(leaves(wanted))
    assert list(found) == list(wanted)
    assert [path for path in found if found[path] != wanted[path]] == []


def leaves(state, path=""):
    """What a checkpoint holds, tensors as bytes, each with its place."""
    if isinstance(state, dict | list | tuple):
        for key, value in state.items() if isinstance(state, dict) else enumerate(state):
            yield from leaves(value, f"{path}/{key}")
    else:
        is_tensor = isinstance(state, torch.Tensor)
        yield path, state.contiguous().numpy().tobytes() if is_tensor else state


def test_without_residuals_it_ends_elsewhere(undisturbed):
    """Catches: a test above that compares nothing."""
    whole, forgetful = undisturbed
    assert forgetful[-2] == "from step 8"
    assert forgetful[-1].startswith(f"step {STEPS}: ")
    assert forgetful[-1] != whole[-1]


def test_torchrun_leaves_no_process(restarted):
    """Catches: workers of the first attempt that outlive it."""
    for text in restarted.stdout:
        assert json.loads(text.splitlines()[-1]) == {"left": []}


@pytest.mark.parametrize("how", ["harm", "restarted", "undisturbed"])
def test_no_process_is_left(how, request, folder):
    """Catches: a process that outlives its job."""
    request.getfixturevalue(how)
    assert processes(folder) == []
