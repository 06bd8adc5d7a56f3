"""Training jobs with `--schedule`: DistributedOptimizer in the place of DDP and attach.

One job runs all scenarios (see `scripts/jobs.py`).
"""

import json
from pathlib import Path

import pytest

from tests import scenarios
from tests.grid import selected, thinned
from tests.traces import check_trace

SCRIPT = Path(__file__).parent / "scripts" / "jobs.py"
NETS = "tests.train.scripts.nets"
PLAIN = {"model": f"{NETS}:plain"}
SMALL = {"slice": "16KiB", "credit": "32KiB"}
PAIRS = {
    "ps": {**PLAIN, "codec": "none", "order": "overlap", **SMALL},
    "clipped": {**PLAIN, "codec": "none", "order": "fifo", "clip_norm": 0.1, "batch": 8,
                "accumulate": 2},
    "adam": {**PLAIN, "codec": "onebit", "optimizer": "adamw", "order": "priority", **SMALL},
    "momentum": {**PLAIN, "codec": "momentum(ef(onebit))", "order": "priority", "plain_steps": 0},
}  # fmt: skip
RESUMED = {
    "overlap": {**PLAIN, "codec": "onebit", "order": "overlap", "rate_mode": "cosine", **SMALL},
    "adam": {**PLAIN, "codec": "onebit", "optimizer": "adam", "order": "priority"},
    "fp16": {**PLAIN, "codec": "int8", "order": "overlap", "amp": "fp16", "clip_norm": 1.0},
    "norm": {"model": f"{NETS}:with_norm", "codec": "none", "order": "overlap"},
    "ring": {**PLAIN, "codec": "int8", "order": "fifo", "strategy": "ring"},
}
STEPPED = {**PLAIN, "codec": "onebit", "order": "overlap", "rate": 0.03, **SMALL}


MOVED = {"4 to 3": (3, 25), "4 to 1": (1, 75)}
"""Ranks that go on, and their steps in an epoch."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def told(request, folder):
    resumed = selected(request, "test_a_run_that_dies_goes_on_bit_for_bit", "name")

    def one(id, do, ranks=2, **options):
        return {"id": id, "do": do, "ranks": ranks, **options}

    return scenarios.play(
        SCRIPT,
        [one(name, "trains", check_every=2, **options) for name, options in PAIRS.items()]
        + [
            one(f"{name} in DDP", "trains", **_without_schedule(options))
            for name, options in PAIRS.items()
        ],
        [
            one("guarded", "trains", **PLAIN, codec="minmax(bits=1)", order="overlap", guard=True,
                steps=120, rate=0.03, log_every=20, eval_every=0.0),
            one("drawn", "trains", codec="none", order="overlap", slice="256KiB",
                timeline=str(folder / "trace.json")),
            *(one(f"before {name}", "trains", 4, checkpoint=str(folder / name), **STEPPED, steps=40)
              for name in MOVED),
        ],
        [
            one(name, "trains", num_ranks, checkpoint=str(folder / name), resume=True, epochs=2.4,
                **STEPPED) for name, (num_ranks, _) in MOVED.items()
        ],
        [
            one(f"resume {name}", "resumes", dies_at=10, checkpoint=str(folder / name), **options)
            for name, options in RESUMED.items() if name in resumed
        ],
    )  # fmt: skip


def _without_schedule(options):
    return {k: v for k, v in options.items() if k not in ("order", "slice", "credit")}


@pytest.mark.parametrize("name", PAIRS)
def test_weights_are_those_of_training_in_ddp(told, name):
    """Catches: updates that are lost, made twice, or with the rate of another step."""
    ranks, others = told.results(name, range(2)), told.results(f"{name} in DDP", range(2))
    assert ranks[0]["bits"] == ranks[1]["bits"] == others[0]["bits"]
    assert ranks[0]["losses"] == others[0]["losses"]
    assert ranks[0]["result"]["accuracy"] == others[0]["result"]["accuracy"]
    assert ranks[0]["facts"]["schedule"] == PAIRS[name]["order"]
    assert others[0]["facts"]["schedule"] is None


@pytest.mark.parametrize("name", thinned(RESUMED, keep=("overlap", "norm")))
def test_a_run_that_dies_goes_on_bit_for_bit(told, name):
    """Catches: a checkpoint without the updates that were on their way."""
    for rank in told.results(f"resume {name}", range(2)):
        whole, went_on = rank["whole"], rank["went_on"]
        assert went_on["first"] == 8 and went_on["steps"] == [9, 10, 11, 12]
        assert went_on["losses"] == {k: v for k, v in whole["losses"].items() if int(k) > 8}
        assert went_on["bits"] == whole["bits"] != rank["died"]["bits"]


@pytest.mark.parametrize("name", MOVED)
def test_another_number_of_ranks_goes_on_at_the_same_example(told, name):
    """Catches: residuals that only some ranks load; one rank, which sends no messages."""
    before, after = (told.results(id, [0])[0] for id in (f"before {name}", name))
    per_epoch = MOVED[name][1]
    ranks = after["facts"]["num_ranks"]
    assert before["steps"][-1] == 40
    assert after["first"] == 2 * per_epoch + 4 * 64 // (16 * ranks)
    assert list(after["losses"].values())[-1] < list(before["losses"].values())[0] / 2


def test_the_guard_replaces_codecs(told):
    ranks = told.results("guarded", range(2))
    assert ranks[0]["bits"] == ranks[1]["bits"]
    assert ranks[0]["losses"] == ranks[1]["losses"]


def test_a_timeline_shows_slices_their_order_and_what_forward_waited_for(told, folder):
    """Catches: ranks that record other steps; waits that are drawn as those of DDP."""
    told.results("drawn", range(2))
    trace = json.loads((folder / "trace.json").read_text())
    assert check_trace(trace) == []
    for pid in (1, 2):
        spans = [one for one in trace["traceEvents"] if one["pid"] == pid and one["ph"] == "X"]
        steps = [one["args"]["step"] for one in spans if one["name"] == "backward"]
        assert steps == [0, 1, 2, 3, 4]
        forwards = [one["args"]["step"] for one in spans if one["name"] == "forward"]
        assert forwards == [0, 1, 2, 3, 4]
        sends = [one["args"] for one in spans if one["name"] == "send"]
        slices = [args for args in sends if "[" in args["gradient"]]
        assert len({args["gradient"] for args in slices}) >= 8
        assert all(args["bytes"] <= 2**18 for args in slices)
        # Backward has the gradient of this layer first, and forward needs its mean last.
        large = {args["priority"] for args in slices if args["gradient"].startswith("9.weight[")}
        assert large == {0, max(args["priority"] for args in sends)}
        waits = [one for one in spans if one["name"] == "wait"]
        assert waits and all(one["args"]["note"] for one in waits)


def test_processes_end_well(told):
    exits = [line for line in told.lines if "exit" in line and line["exit"] != 0]
    assert not exits and told.finished.exit_code == 0
