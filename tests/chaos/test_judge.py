"""The judge of `make chaos`: every rule holds for what a sound job tells, and fails for others.

The ranks' lines are made up; no process is started.
"""

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import hipress
from hipress.casync.graphs.schedules import SCHEDULES
from hipress.codecs import frame
from hipress.errors import FrameError
from tests.chaos import DOORS, report
from tests.chaos.damage import damaged
from tests.chaos.faults import (
    ENDED,
    FAULTS,
    UNSEEN,
    WENT_ON,
    BadBody,
    BadHeader,
    ClockJump,
    CutOff,
    Freeze,
    FullDisk,
    Kill,
    Pause,
    fill,
)
from tests.chaos.run import HOSTS, Cluster, Episode, draw_config, draw_fault
from tests.chaos.seen import EXIT_S, Seen, replicas_agree, resumed, stopped

AT, TIMEOUT_S, RANKS = 100.0, 8.0, 3


def fault(kind, victim=2, **more):
    """A fault that was injected at `AT`."""
    made = kind(random.Random(0), RANKS)
    made.victim, made.early, made.at, made.target = victim, False, AT, 12
    for name, value in more.items():
        setattr(made, name, value)
    return made


def steps(rank, last=15, digest="{step}", finite=True):
    """What a rank tells that trains."""
    return [
        {"rank": rank, "step": step, "digest": digest.format(step=step), "finite": finite,
         "at": AT - 5 + step / 2}
        for step in range(3, last + 1, 3)
    ]  # fmt: skip


def failure(rank, names=(2,), kind="PeerError", after_s=4.0, code=1, exit_after_s=1.0):
    """What a rank tells that fails."""
    return [
        {"rank": rank, "error": kind, "text": "a text", "names": list(names), "trace": "",
         "at": AT + after_s},
        {"rank": rank, "exit": code, "at": AT + after_s + exit_after_s},
    ]  # fmt: skip


def seen(*lines):
    return Seen(RANKS, TIMEOUT_S, [one for part in lines for one in part])


KILLED = [[{"rank": 2, "exit": -9, "at": AT}], failure(0), failure(1)]


# --- ranks that are lost --------------------------------------------------------------------------


def test_a_kill_that_is_named_is_fine():
    """Catches: a judge that no job can please."""
    assert fault(Kill).judge(seen(steps(0), steps(1), *KILLED)) == []


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (failure(1, names=[0]), "rank 1 names [0]"),
        (failure(1, names=[]), "rank 1 names []"),
        (failure(1, names=[0, 2]), "rank 1 names [0, 2]"),
        (failure(1, kind="RuntimeError", names=[]), "rank 1 failed with RuntimeError"),
        (failure(1, after_s=18.5), "rank 1 failed after 18.5 s"),
        (failure(1, exit_after_s=EXIT_S + 1), "rank 1 ended 21.0 s after its error"),
        (failure(1, code=-6), "rank 1 ended with exit code -6"),
        (failure(1)[:1], "rank 1 has an error and has not ended"),
        (failure(1)[1:], "rank 1 has no error and ended with exit code 1"),
        (steps(1), "rank 1 has no error and runs on"),
    ],
)
def test_a_rank_that_does_not_end_as_it_should(lines, problem):
    """Catches: a judge that overlooks a wrong rank, a hang, a late or violent end."""
    (found,) = fault(Kill).judge(seen(*KILLED[:2], lines))
    assert found.startswith(problem)


def test_at_the_start_nobody_else_may_be_named():
    """Catches: a judge that asks torch's own errors for names, or allows wrong ones."""
    early = fault(Kill, early=True)
    torch_failed = failure(1, kind="DistStoreError", names=[])
    assert early.judge(seen(*KILLED[:2], torch_failed)) == []
    assert early.judge(seen(*KILLED[:2], failure(1, names=[]))) == []
    assert early.judge(seen(*KILLED[:2], failure(1, names=[0])))


def test_replicas_that_differ_are_found_under_every_fault():
    """Catches: a judge that compares parameters only where jobs go on."""
    same, other = seen(steps(0), steps(1)), seen(steps(0), steps(1, digest="other"))
    assert replicas_agree(same) == []
    assert replicas_agree(other) == ["replicas differ after step 3"]
    different = steps(0, digest="other")
    assert fault(Kill).judge(seen(different, steps(1), *KILLED)) != []
    assert fault(Pause).judge(seen(different, steps(1), steps(2))) != []


def test_a_thawed_rank_must_end():
    """Catches: a judge that forgets the rank that was frozen."""
    frozen = fault(Freeze, thawed_at=AT + 10)
    assert frozen.judge(seen(failure(0), failure(1), failure(2, [0], after_s=12))) == []
    assert frozen.judge(seen(failure(0), failure(1), steps(2))) == [
        "rank 2 has no error and runs on"
    ]


def test_a_rank_that_is_cut_off_names_somebody():
    """Catches: a judge that looks at one side of the cut."""
    assert fault(CutOff).judge(seen(failure(0), failure(1), failure(2, [0]))) == []
    assert fault(CutOff).judge(seen(failure(0), failure(1), failure(2, []))) != []
    assert fault(CutOff).judge(seen(failure(0), failure(1), steps(2))) != []


# --- jobs that go on ------------------------------------------------------------------------------


def test_a_job_that_goes_on():
    """Catches: a judge that no job can please."""
    paused = fault(Pause)
    assert paused.judge(seen(steps(0), steps(1), steps(2))) == []
    assert paused.outcome == WENT_ON


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (steps(1, last=9), "rank 1 stands at step 9 and not 12"),
        (failure(1), "rank 1 failed with PeerError"),
        ([{"rank": 1, "exit": -11, "at": AT}], "rank 1 ended with exit code -11"),
    ],
)
def test_a_job_that_does_not_go_on(lines, problem):
    """Catches: a judge that takes a job which stands still, or has failed, for one that runs."""
    (found,) = fault(Pause).judge(seen(steps(0), lines, steps(2)))
    assert found.startswith(problem)


def test_a_clock_that_was_not_set():
    """Catches: a fault that never happens."""
    sound = [steps(0), steps(1), steps(2)]
    assert fault(ClockJump).judge(seen(*sound)) == ["the clock was not set"]
    assert fault(ClockJump).judge(seen(*sound, [{"rank": 2, "jumped": 1, "at": AT}])) == []


# --- the disk -------------------------------------------------------------------------------------

INTACT = "the checkpoint cannot be written; make room: the previous checkpoint is intact."


def disk(kind="UsageError", text=INTACT, intact="3", saved_again=True):
    lines = [
        {"rank": 0, "saved": 3, "digest": "3", "at": AT - 3},
        {"rank": 0, "unsaved": 6, "kind": kind, "text": text, "intact": intact, "at": AT + 1},
        *([{"rank": 0, "saved": 9, "digest": "9", "at": AT + 2}] * saved_again),
    ]
    return seen(steps(0), steps(1), steps(2), lines)


def test_a_full_disk():
    """Catches: a judge that takes a damaged checkpoint, a vague error or silence for fine."""
    assert fault(FullDisk).judge(disk()) == []
    assert fault(FullDisk).judge(disk(intact="other")) != []
    assert fault(FullDisk).judge(disk(intact=None)) != []
    assert fault(FullDisk).judge(disk(kind="OSError")) != []
    assert fault(FullDisk).judge(disk(text="no space left")) != []
    assert fault(FullDisk).judge(disk(saved_again=False)) != []
    nothing_failed = seen(steps(0), steps(1), steps(2))
    assert fault(FullDisk).judge(nothing_failed) == ["no checkpoint failed on a full disk"]


def test_filling_a_disk_stops_at_its_end():
    """Catches: a fault that fills the disk of whoever runs it."""
    written = []

    class Disk:
        def open(self, mode, buffering):
            return self

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def write(self, data):
            if sum(written) + len(data) > 3 * 2**20 + 5000:
                raise OSError
            written.append(len(data))
            return len(data)

    fill(Disk())
    assert sum(written) == 3 * 2**20 + 5000


# --- messages -------------------------------------------------------------------------------------


def test_a_damaged_header_is_refused_by_its_receiver():
    """Catches: a judge that lets a damaged frame into training, or a third rank be blamed."""
    refused = [failure(0, kind="FrameError", names=[]), failure(1, [0]), failure(2, [0])]
    bad = fault(BadHeader, receiver=0)
    assert bad.judge(seen(*refused)) == []
    assert bad.outcome == ENDED
    assert bad.judge(seen(refused[0], failure(1, [2]), refused[2])) == []
    assert bad.judge(seen(refused[0], failure(1, [1]), refused[2])) != []
    assert bad.judge(seen(failure(0, [2]), *refused[1:])) != []
    passed_on = [failure(0, [1]), failure(1, kind="FrameError", names=[]), failure(2, [1])]
    assert fault(BadHeader, receiver=0, is_ring=True).judge(seen(*passed_on)) == []
    assert bad.judge(seen(*passed_on)) != []
    cited = failure(0, [])
    cited[0]["text"] = "the exchange is down since an earlier error (frame has check 0x1); restart."
    assert bad.judge(seen(cited, *refused[1:])) == []
    assert bad.judge(seen(steps(0), steps(1), steps(2))) != []


def test_a_damaged_body():
    """Catches: a difference of replicas that is called fine, or missed by the replica check."""
    same = [steps(0), steps(1), steps(2)]
    differ = [steps(0, digest="other"), steps(1), steps(2)]
    bad = fault(BadBody, receiver=0)
    assert (bad.judge(seen(*same)), bad.outcome) == ([], WENT_ON)
    assert (bad.judge(seen(*differ)), bad.outcome) == ([], UNSEEN)
    checked = fault(BadBody, receiver=0, check_every=6)
    assert checked.judge(seen(*differ)) != []
    found = [failure(rank, [0], kind="AgreementError") for rank in range(RANKS)]
    assert (checked.judge(seen(*differ, *found)), checked.outcome) == ([], ENDED)
    refused = [failure(0, kind="FrameError", names=[]), failure(1, [0]), failure(2, [0])]
    bad = fault(BadBody, receiver=0)
    assert (bad.judge(seen(*refused)), bad.outcome) == ([], ENDED)
    assert bad.judge(seen(failure(0, kind="IndexError", names=[]), *refused[1:])) != []


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.999])
@pytest.mark.parametrize("zone", ["header", "table", "free", "body"])
def test_damage_hits_its_zone(zone, place):
    """Catches: damage that the checks of a frame would never see, or always."""
    codec = hipress.codec("none")
    x = torch.arange(64.0)
    sent = codec.encode(x, codec.init(x))
    changed, told, offset = damaged(sent, zone, place, flip=2)
    assert told == zone and int((changed != sent).sum()) == 1 and changed[offset] != sent[offset]
    if zone in ("header", "table"):
        with pytest.raises(FrameError):
            frame.read_single(changed.numpy())
    if zone == "body":
        assert not torch.equal(codec.decode(changed), x)


def test_a_message_without_a_frame_has_a_body_only():
    """Catches: damage at a place that a message does not have."""
    assert damaged(torch.ones(8), "header", 0.5, 1) is None
    changed, told, _ = damaged(torch.ones(8), "body", 0.5, 1)
    assert told == "plain" and not torch.equal(changed, torch.ones(8))


# --- what a job leaves ----------------------------------------------------------------------------


def test_a_process_that_is_left_is_found(monkeypatch):
    """Catches: a judge that does not count."""
    cluster = object.__new__(Cluster)
    monkeypatch.setattr(cluster, "processes", lambda: set(range(HOSTS)), raising=False)
    assert cluster.left() == []
    monkeypatch.setattr(cluster, "processes", lambda: set(range(HOSTS + 1)))
    assert cluster.left() == ["1 processes are left"]


def test_processes_are_found_by_their_command_line(tmp_path):
    """Catches: a search that finds nothing."""
    cluster = object.__new__(Cluster)
    cluster.folder = tmp_path
    assert cluster.processes() == set()
    command = [sys.executable, "-c", "import time; time.sleep(60)", f"{tmp_path}/pipe"]
    child = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + 20  # it has another command line until it has started
        while not cluster.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert cluster.processes() == {child.pid}
    finally:
        child.kill()
        child.wait()


def test_a_job_that_was_told_to_stop():
    """Catches: a process that outlives its last step, or dies in it."""
    over = [{"rank": rank, "exit": 0, "at": AT} for rank in range(RANKS)]
    assert stopped(seen(over)) == []
    assert stopped(seen(over[:2])) == ["rank 2 was told to stop and runs on"]
    assert stopped(seen(over[:2], failure(2))) != []
    assert stopped(seen(over[:2], [{"rank": 2, "exit": -6, "at": AT}])) != []


def test_a_resumed_job():
    """Catches: a checkpoint that loads something else than what was saved."""
    began = [{"rank": rank, "began": 24, "digest": "a", "at": AT} for rank in range(RANKS)]
    assert resumed(seen(began), (24, "a")) == []
    assert len(resumed(seen(began), (24, "b"))) == RANKS
    assert len(resumed(seen(began), (12, "a"))) == RANKS
    assert len(resumed(seen(began), None)) == RANKS


# --- drawing and reporting ------------------------------------------------------------------------


def test_an_episode_is_drawn_from_its_seed_alone(tmp_path):
    """Catches: an episode that cannot be repeated."""
    cluster = object.__new__(Cluster)
    cluster.disk = tmp_path
    made = [Episode(cluster, 5, 9) for _ in range(2)]
    assert made[0].config == made[1].config
    drawn = [
        vars(draw_fault(random.Random("5/9/0"), made[0].config, 4)) for _ in range(2)
    ]  # fmt: skip
    assert drawn[0] == drawn[1]
    assert len({Episode(cluster, 5, number).config for number in range(20)}) > 10


def test_everything_is_drawn_at_times():
    """Catches: a door, codec, strategy or fault that never comes."""
    draw = random.Random(1)
    configs = [draw_config(draw) for _ in range(400)]
    assert {config.door for config in configs} == set(DOORS)
    assert {config.strategy for config in configs} > {"ps", "ring", "hierarchical", "allreduce"}
    assert "auto" in {config.codec for config in configs}
    kinds = {type(draw_fault(draw, config, 4)) for config in configs}
    assert kinds == set(FAULTS)
    own = [draw_config(draw, "optimizer") for _ in range(200)]
    assert {config.door for config in own} == {"optimizer"}
    assert {config.schedule for config in own} == {None, *SCHEDULES}
    assert {config.strategy for config in own} == {None, "ps", "ring", "hierarchical"}


def row(**more):
    values = dict(
        seed=1, episode=2, place=0, fault="kill", victim=2, detail="", door="attach",
        codec="onebit", strategy="ps", ranks=3, step=17, seconds=4.2, outcome=ENDED, problem="",
    )  # fmt: skip
    return report.Row(**{**values, **more})


def test_results_survive_the_file():
    """Catches: a table that is made from other values than those measured."""
    rows = [row(), row(place=1, fault="delay", outcome=WENT_ON), row(problem='"a", b')]
    assert report.from_csv(report.to_csv(rows)) == rows


def test_results_of_one_door_leave_the_others(monkeypatch, tmp_path):
    """Catches: a record that loses rows, or keeps those of an earlier run of the same door."""
    before = [row(), row(place=1, door="optimizer"), row(seed=3)]
    page, results = tmp_path / "chaos.md", tmp_path / "results.csv"
    results.write_text(report.to_csv(before))
    page.write_text(report.BEGIN + report.END)
    monkeypatch.setattr(report, "RESULTS", results)
    monkeypatch.setattr(report, "PAGE", page)
    report.record([row(seed=2, door="optimizer")], "optimizer")
    assert report.from_csv(results.read_text()) == [
        row(), row(seed=2, door="optimizer"), row(seed=3)
    ]  # fmt: skip
    assert "3 faults in 3 episodes; seeds 1, 2, 3." in page.read_text()
    report.record([row(seed=4)])
    assert report.from_csv(results.read_text()) == [row(seed=4)]
    assert "1 faults in 1 episodes; seed 4." in page.read_text()


def test_the_table_counts():
    """Catches: faults or findings that are missing from the table."""
    lines = report.table([row(), row(outcome="finding", seconds=9), row(fault="delay")])
    (kill,) = [line for line in lines.splitlines() if line.startswith("| kill |")]
    assert kill.endswith("| 2 | 0 | 1 | 0 | 1 | 9.0 s |")
    assert lines.splitlines()[-1].endswith("| 3 | 0 | 2 | 0 | 1 | 9.0 s |")


def test_the_page_holds_the_table_of_the_results():
    """Catches: a page that is older than the results, or edited by hand."""
    page = report.PAGE.read_text("utf-8")
    rows = report.from_csv(report.RESULTS.read_text("utf-8"))
    assert report.page_with(page, rows) == page
    assert Path(report.PAGE).name == "chaos.md"
