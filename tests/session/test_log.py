"""What is shown of the logger `hipress`, with whatever logging a program has set up."""

import contextlib
import io
import logging

import pytest
import torch
import torch.distributed as dist

import hipress
import hipress.torch
from hipress import session
from hipress.session import setup
from hipress.session.auto import AutoStats
from hipress.session.stats import Stats, VerbTimes, log_line, since

LINE = (
    "1 of 1 gradients (100.0 % of the elements) are compressed with onebit, although one rank has "
    "no other rank to send to"
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A program that has not set up logging, as if hipress had not been used before."""
    monkeypatch.delenv("HIPRESS_LOG", raising=False)
    logger = logging.getLogger("hipress")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(setup._stderr, "given", None)
    level = logger.level
    logger.setLevel(logging.NOTSET)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    logger.setLevel(level)


@contextlib.contextmanager
def bare():
    """Takes pytest's own handlers away, which it adds to the root logger for each test."""
    root = logging.getLogger()
    kept = list(root.handlers)
    root.handlers[:] = []
    try:
        yield
    finally:
        root.handlers[:] = kept


def start(**options):
    return session.start({"a": torch.zeros(64, 80)}, codec="onebit", **options)


@pytest.mark.parametrize(
    ("level", "shown"), [(None, True), ("info", True), ("warning", False), ("debug", True)]
)
@bare()
def test_the_start_is_one_line(monkeypatch, capsys, level, shown):
    """Catches: silence, a line for every attach before it, and a default that changes what is shown
    when it is set."""
    if level is not None:
        monkeypatch.setenv("HIPRESS_LOG", level)
    for _ in range(2):
        start()
        assert capsys.readouterr().err == (f"hipress: {LINE}.\n" if shown else "")


@bare()
def test_the_level_can_be_changed(monkeypatch, capsys):
    """Catches: a level that the first session of a process sets for good."""
    start()
    monkeypatch.setenv("HIPRESS_LOG", "warning")
    capsys.readouterr()
    start()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("when", ["before", "after"])
@bare()
def test_a_program_that_logs_gets_the_line_once(capsys, when):
    """Catches: a line that is shown twice, or not at all."""
    handler = logging.StreamHandler(stream := io.StringIO())
    if when == "after":
        start()
        capsys.readouterr()
    logging.getLogger().addHandler(handler)
    start()
    assert stream.getvalue() == f"{LINE}.\n"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("level", [None, "info", "debug"])
@bare()
def test_the_level_of_the_program_stays(monkeypatch, capsys, level):
    """Catches: lines that a program has turned off."""
    if level is not None:
        monkeypatch.setenv("HIPRESS_LOG", level)
    logging.getLogger("hipress").setLevel(logging.WARNING)
    start()
    assert capsys.readouterr().err == ""
    assert logging.getLogger("hipress").level == logging.WARNING


@bare()
def test_a_bare_hook_says_it_after_its_first_step(capsys):
    """Catches: a hook without a start line."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(128, 64))
    model.register_comm_hook(*hipress.torch.comm_hook("onebit"))
    assert capsys.readouterr().err == ""
    for _ in range(2):
        model(torch.ones(2, 128)).sum().backward()
    line, unchecked = capsys.readouterr().err.splitlines()
    assert line == (
        "hipress: 1 of 2 gradients (99.2 % of the elements) are compressed with onebit, although "
        "one rank has no other rank to send to; no optimizer was given to check."
    )
    assert unchecked.startswith("hipress: onebit depends on the optimizer, which could not be")


@bare()
def test_a_hook_that_is_detached_before_its_first_step_says_no_more(capsys):
    """Catches: a start line that says that gradients are compressed after the session has ended."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(128, 64))
    state, hook = hipress.torch.comm_hook("onebit")
    model.register_comm_hook(state, hook)
    state.detach()
    model(torch.ones(2, 128)).sum().backward()
    assert "are compressed with onebit" not in capsys.readouterr().err


@bare()
def test_a_warm_up_is_in_the_line(capsys):
    """Catches: a line that says that gradients are compressed while they are not."""
    start(warmup_steps=7)
    assert "are compressed with onebit from step 7 on, although" in capsys.readouterr().err


# --- figures --------------------------------------------------------------------------------------


class Counting:
    """An engine that only counts."""

    def __init__(self):
        self.executor, self.stats = type("", (), {"verb_ns": {}})(), type("", (), {})()
        self.stats.num_first_uses = 0


def test_times_leave_steps_out_in_which_kernels_are_compiled():
    """Catches: a first line of the log that tells seconds of compilation as milliseconds a step."""
    engine, times = Counting(), VerbTimes()
    for encode_ns, new in ((5_000_000_000, 2), (3_000_000_000, 1), (40, 0), (60, 0), (10**9, 1)):
        engine.executor.verb_ns["encode"] = engine.executor.verb_ns.get("encode", 0) + encode_ns
        engine.stats.num_first_uses += new
        times.end_step(engine)
        assert times.is_steady == (not new)
    assert (times.num_steps, times.verb_ns) == (2, {"encode": 100})


def figures(**changes):
    given = {
        "num_steps": 10, "num_gradients": 5, "num_compressed": 2, "gradient_bytes": 8_000_000,
        "sent_bytes": 400_000, "received_bytes": 500_000, "num_messages": 60, "ratio": 30.0,
        "verb_seconds": {"encode": 0.05, "recv": 0.4}, "num_timed_steps": 8,
        "state_bytes": 8_000_000, "buffer_bytes": 500_000, "skipped": {"b": "small", "c": "small"},
    }  # fmt: skip
    return Stats(**given | changes)


def test_a_line_is_of_the_steps_since_the_last():
    """Catches: figures since the start, in which a change drowns."""
    before = figures()
    now = figures(
        num_steps=14, sent_bytes=1_200_000, ratio=15.0, num_timed_steps=10,
        verb_seconds={"encode": 0.07, "recv": 0.4, "decode": 0.002},
    )  # fmt: skip
    found = since(before, now)
    assert (found.num_steps, found.sent_bytes, found.num_timed_steps) == (4, 800_000, 2)
    assert found.ratio == pytest.approx((15 * 1.2 - 30 * 0.4) / 0.8)
    assert log_line(14, found) == (
        "step 14: rank 0 sent 0.200 MB per step, 7.5 times fewer bytes than float32; time per "
        "step: encode 10.0 ms, decode 1.0 ms; memory 8.5 MB."
    )
    assert log_line(1, figures(ratio=1.0, verb_seconds={}, num_timed_steps=0)) == (
        "step 1: rank 0 sent 0.040 MB per step, no fewer bytes than float32; no step was timed, "
        "because kernels were compiled; memory 8.5 MB."
    )
    assert "float32; nothing was encoded; memory" in log_line(1, figures(verb_seconds={}))
    assert since(None, now) is now
    assert since(now, now).ratio == 1.0


def test_five_lines_are_printed():
    """Catches: a printed dictionary of a thousand gradients."""
    auto = AutoStats(mode="trial", epoch=3, reason="it measures first", num_switches=1)
    assert str(figures(auto=auto)).splitlines() == [
        "10 steps: 0.400 MB sent, 0.500 MB received, 60 messages",
        "0.040 MB sent per step: this rank sent 30.0 times fewer bytes than float32",
        "time per step: encode 6.2 ms",
        "memory: 8.0 MB of codec state, 0.5 MB of buffers",
        "2 of 5 gradients are compressed; not compressed: 2 (small); auto: trial, because it "
        "measures first",
    ]
    assert repr(figures()).startswith("Stats(num_steps=10, num_gradients=5, ")
    many = {f"{k}": f"reason {k % 5}" for k in range(20)}
    printed = str(figures(skipped=many))
    assert len(printed.splitlines()) == 5
    assert printed.endswith("4 (reason 0), 4 (reason 1), 4 (reason 2) and 8 others")
    assert "no step was timed, because kernels were compiled" in str(figures(num_timed_steps=0))
