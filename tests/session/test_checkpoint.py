"""Runs that stop and go on: with the same ranks bit for bit, with others without a loss."""

import itertools
from pathlib import Path

import pytest

from tests import scenarios
from tests.grid import full, selected, thinned

SCRIPT = Path(__file__).parents[1] / "torch" / "scripts" / "saved.py"
CODECS = ["onebit", "dgc(ratio=0.05, warmup=6)", "terngrad"]
STRATEGIES = ["ps", "ring", "hierarchical"]
WHOLE = [("onebit", "ps"), ("dgc(ratio=0.05, warmup=6)", "ring")]
SHARDED = [("onebit", "ps"), ("dgc(ratio=0.05, warmup=6)", "ring"), ("onebit", "hierarchical")]
ROUNDING = 1e-6
"""Of sums of some gradients in float32, against their largest element."""

SAVED = {
    "4 ps": {"ranks": 4, "codec": "onebit", "strategy": "ps"},
    "4 hosts": {"ranks": 4, "codec": "int8", "strategy": "hierarchical", "per_host": 2},
    "2 ring": {"ranks": 2, "codec": "topk(ratio=0.05)", "strategy": "ring"},
}
LOADED = {
    "4 to 2, ps": ("4 ps", {"ranks": 2, "codec": "onebit", "strategy": "ps"}),
    "4 to 2, hosts to one": ("4 hosts", {"ranks": 2, "codec": "int8", "strategy": "hierarchical"}),
    "2 to 3, ring": ("2 ring", {"ranks": 3, "codec": "topk(ratio=0.05)", "strategy": "ring"}),
    "another codec": ("4 hosts", {"ranks": 4, "codec": "onebit", "strategy": "ring"}),
    "other hosts": (
        "4 hosts",
        {"ranks": 4, "codec": "int8", "strategy": "hierarchical", "per_host": 1},
    ),
    "4 to 2, dcp": ("4 ps", {"ranks": 2, "codec": "onebit", "strategy": "ps", "whole": True}),
    "2 to 3, dcp": (
        "2 ring",
        {"ranks": 3, "codec": "topk(ratio=0.05)", "strategy": "ring", "whole": True},
    ),
    "4 to 2, shards": ("4 ps", {"ranks": 2, "codec": "onebit", "strategy": "ps", "shards": True}),
    "2 to 3, shards": (
        "2 ring",
        {"ranks": 3, "codec": "topk(ratio=0.05)", "strategy": "ring", "shards": True},
    ),
    "other hosts, shards": (
        "4 hosts",
        {"ranks": 4, "codec": "int8", "strategy": "hierarchical", "per_host": 1, "shards": True},
    ),
}


KEPT = ("4 to 2, ps", "other hosts", "2 to 3, dcp", "4 to 2, shards", "other hosts, shards")


@pytest.fixture(scope="module")
def told(request, tmp_path_factory):
    def folder(name):
        return str(tmp_path_factory.mktemp(name))

    folders = {name: folder(name.replace(" ", "-")) for name in SAVED}
    loaded = selected(request, "test_others_go_on_without_a_loss", "name")
    cases = selected(request, "test_a_run_goes_on_bit_for_bit", "codec", "strategy")
    cases = list(dict.fromkeys([*(("onebit", strategy) for strategy in STRATEGIES), *cases]))
    stages = [
        [
            {"id": "file", "do": "resume", "ranks": 4, "folder": folder("file"), "cases": cases,
             "writer": 2},
            {"id": "dcp", "do": "resume", "ranks": 2, "folder": folder("dcp"), "cases": WHOLE,
             "whole": True},
            {"id": "shards", "do": "resume", "ranks": 4, "folder": folder("shards"),
             "cases": SHARDED, "shards": True},
            {"id": "full disk", "do": "full_disk", "ranks": 2, "folder": folder("full")},
            *({"id": name, "do": "first_half", "folder": folders[name], **options}
              for name, options in SAVED.items()),
        ],
        [
            *({"id": name, "do": "second_half", "folder": folders[saved], **options}
              for name, (saved, options) in LOADED.items() if name in loaded),
            *({"id": f"owed {whole}", "do": "owed_saved", "ranks": 2, "folder": folder("owed"),
               "whole": whole} for whole in (True, False)),
            *({"id": name, "do": name, "ranks": 2}
              for name in ("resume_scaled", "late_start", "bad_loads", "resume_rates",
                           "other_scales", "detach_loaded")),
        ],
    ]  # fmt: skip
    if any(item.name.startswith("test_shards_need") for item in request.session.items):
        stages.append([{"id": "memory", "do": "memory", "ranks": 4, "folder": folder("memory")}])
    return scenarios.play(SCRIPT, *stages)


def one(values):
    """What all ranks have told alike."""
    assert all(value == values[0] for value in values), values
    return values[0]


# --- the same ranks -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "strategy"),
    thinned(
        itertools.product(CODECS, STRATEGIES),
        lambda cell: cell[0] == "onebit" or cell == (CODECS[1], "ring"),
    ),
)
def test_a_run_goes_on_bit_for_bit(told, codec, strategy):
    """Catches: state that is not saved, not loaded, loaded by the wrong rank, or a wrong step."""
    results = [result[f"{codec} {strategy}"] for result in told.results("file", range(4))]
    one([found["bits"] for found in results])
    for found in results:
        assert found["losses"][0] == found["losses"][1]
        assert found["bits"][0] == found["bits"][1]
        assert found["steps"] == [9, 9]
        assert (found["kept"] > 0) == (codec != "terngrad")


@pytest.mark.parametrize("case", WHOLE, ids=" ".join)
def test_a_run_goes_on_from_a_distributed_checkpoint(told, case):
    """Catches: an exchange that is no Stateful, or whose state DCP cannot write and read."""
    results = [result[" ".join(case)] for result in told.results("dcp", range(2))]
    one([found["bits"] for found in results])
    for found in results:
        assert found["losses"][0] == found["losses"][1]
        assert found["bits"][0] == found["bits"][1]
        assert found["steps"] == [9, 9]


@pytest.mark.parametrize("case", SHARDED, ids=" ".join)
def test_a_run_goes_on_from_shards(told, case):
    """Catches: partitions that are not written, or are read by another rank or for another role."""
    results = [result[" ".join(case)] for result in told.results("shards", range(4))]
    one([found["bits"] for found in results])
    for found in results:
        assert found["losses"][0] == found["losses"][1]
        assert found["bits"][0] == found["bits"][1]
        assert found["steps"] == [9, 9] and found["straight"]


@full
def test_shards_need_little_memory(told):
    """Catches: state that is gathered, or copied as a whole, where a rank needs its own alone."""
    for found in told.results("memory", range(4)):
        assert found["held"] > 64e6
        assert found["save"] < 0.5
        assert found["load"] < 1.5
        assert found["load, other codec"] < 1.5
        assert 4 < found["state_dict"] < 9  # what the complete form needs


def test_a_rank_that_cannot_write_stops_all(told):
    """Catches: ranks that wait for the one that failed, and a last checkpoint that is gone."""
    kind, text, is_intact = one(told.results("full disk", range(2)))
    assert kind == "UsageError" and "\n" not in text
    assert "cannot be written to" in text and "rank 1: a file could not be written whole" in text
    assert is_intact


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_was_loaded_is_saved_as_it_was(told, strategy):
    """Catches: a checkpoint that is spoilt when it is saved again before the next step."""
    for result in told.results("file", range(4)):
        assert result[f"onebit {strategy}"]["straight"]


def test_a_run_that_stops_as_the_scale_changes(told):
    """Catches: residuals that are loaded in the units of the scale before."""
    for on, resumed, then, now in told.results("resume_scaled", range(2)):
        assert (then, now) == (1024.0, 2048.0)
        assert on == resumed


def test_a_run_whose_learning_rate_falls_goes_on_bit_for_bit(told):
    """Catches: a first step after the restart that does not know the rate before it."""
    for on, resumed, without in told.results("resume_rates", range(2)):
        assert on == resumed
        assert on != without


@pytest.mark.parametrize("case", range(3))
def test_a_scaler_may_come_and_go_with_a_restart(told, case):
    """Catches: residuals in the units of a scale that no longer is."""
    *changes, least = one([result[case] for result in told.results("other_scales", range(2))])
    assert max(changes) < 1e-6 * -least
    assert least < 0


def test_what_was_loaded_is_sent_by_detach(told):
    """Catches: residuals that were loaded, that no step has taken up, and that detach drops."""
    with_it, without = one(told.results("detach_loaded", range(2)))
    assert max(with_it.values()) < ROUNDING
    assert max(without.values()) > 1e-3


# --- other ranks, other codecs --------------------------------------------------------------------


@pytest.mark.parametrize("name", SAVED)
def test_what_is_saved_is_all_that_was_not_sent(told, name):
    """Catches: a mean residual that leaves out the way back, a hop, or a rank."""
    found = one(told.results(name, range(SAVED[name]["ranks"])))
    assert max(found["gaps"].values()) < ROUNDING
    assert found["left"] > 1e-5


@pytest.mark.parametrize("name", thinned(LOADED, keep=KEPT))
def test_others_go_on_without_a_loss(told, name):
    """Catches: residuals that are dropped, or counted once for each rank, in another run."""
    found = one(told.results(name, range(LOADED[name][1]["ranks"])))
    assert max(found["changes"]) < 1e-7
    assert max(found["first"].values()) < ROUNDING
    assert max(found["gaps"].values()) < ROUNDING
    assert found["steps"] == [4, 8]
    # The sum without what was carried over is wrong, so there was something to lose.
    assert found["carried"] > 1e-5
    assert max(found["without"].values()) > 1e-3


@pytest.mark.parametrize("whole", [False, True])
def test_what_is_owed_is_saved_too(told, whole):
    """Catches: what was sent of a parameter that no rank used, lost at a restart."""
    for before, after in told.results(f"owed {whole}", range(2)):
        assert before["b.weight"] > 0
        assert before == after


def test_a_run_that_warms_up_keeps_what_it_loaded(told):
    """Catches: residuals that are lost where a run begins without compression."""
    assert max(one(told.results("late_start", range(2))).values()) < ROUNDING


# --- what is no checkpoint ------------------------------------------------------------------------

BAD = {
    "none": "was given something else than what sync.state_dict() returned: 'version' is None",
    "list": "was given something else than what sync.state_dict() returned",
    "empty": "was given something else than what sync.state_dict() returned",
    "model": "was given something else than what sync.state_dict() returned",
    "newer": "the checkpoint has version 99 and this hipress reads up to 1; update hipress.",
    "other": "the checkpoint holds unsent state of 'second.weight', which this model does",
    "wider": "the checkpoint's '5.weight' has 8000 elements and this model's has 6400; load the",
    "version": "'version' is '1'; load the entry of your checkpoint that holds it.",
    "cut": "load",
    "part": "load",
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_checkpoint_of_this_model(told, case):
    """Catches: an error of another kind, or without the next step."""
    kind, text = one([result[case][:2] for result in told.results("bad_loads", range(2))])
    assert kind == "UsageError"
    assert BAD[case] in text and "\n" not in text


def test_a_checkpoint_that_one_rank_lacks_is_refused_by_all(told):
    """Catches: a rank that waits for the other, and calls that no longer match from then on."""
    first, second = (result["one rank"] for result in told.results("bad_loads", range(2)))
    assert first[1] == f"rank 1: {second[1]}"
    assert [first[0], second[0]] == ["UsageError"] * 2 and first[2] and second[2]


@pytest.mark.parametrize("case", BAD)
def test_a_refused_checkpoint_changes_nothing(told, case):
    """Catches: residuals and steps that are gone although nothing was loaded."""
    assert one([result[case][2] for result in told.results("bad_loads", range(2))])


def test_training_goes_on_after_refused_checkpoints(told):
    """Catches: ranks that no longer agree."""
    one([result["after"] for result in told.results("bad_loads", range(2))])
