"""The exchange of AdamW's momentum among several ranks (see `scripts/momentum.py`)."""

from pathlib import Path

import pytest

from tests import scenarios
from tests.grid import selected, thinned

SCRIPT = Path(__file__).parent / "scripts" / "momentum.py"
CASES = [  # codec and strategy
    "onebit ps", "onebit ring", "onebit hierarchical", "topk(ratio=0.05) ps",
]  # fmt: skip

LOADS = [[0], [2], [0, 1]]
"""Ranks that load the optimizer's state, of three."""


@pytest.fixture(scope="module")
def told(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("saved"))
    cases = selected(request, "test_replicas_agree_and_nothing_is_lost", "case")
    stages = [
        [
            {"id": "agree", "do": "agree", "ranks": 4, "cases": cases},
            {"id": "first", "do": "first_half", "ranks": 3, "folder": folder},
            {"id": "detached", "do": "detached", "ranks": 2},
            {"id": "other state", "do": "other_state", "ranks": 2},
            {"id": "warned", "do": "warned", "ranks": 2},
            *({"id": f"loads {loads}", "do": "one_loads", "ranks": 3, "loads": loads}
              for loads in LOADS),
        ],
        [
            {"id": f"second {shards}", "do": "second_half", "ranks": 2, "folder": folder,
             "shards": shards} for shards in (False, True)
        ],
    ]  # fmt: skip
    return scenarios.play(SCRIPT, *stages)


def check(gaps):
    kinds = set()
    for number, step in enumerate(gaps):
        for name, (gap, bound, sends) in step.items():
            assert gap < bound, (number, name, gap)
            kinds.add(sends)
    assert kinds == {False, True}


@pytest.mark.parametrize("case", thinned(CASES, keep=CASES[:1]))
def test_replicas_agree_and_nothing_is_lost(told, case):
    """Catches: ranks that decode different momenta, a residual that a refresh clears or sends."""
    found = [result[case] for result in told.results("agree", range(4))]
    assert len({rank["bits"] for rank in found}) == 1
    for rank in found:
        check(rank["gaps"])
        refreshes = [0, 1, 2, 7]
        sent = {number in refreshes: bytes_ for number, bytes_ in enumerate(rank["sent"])}
        if case in ("onebit ps", "onebit ring"):
            assert sent[True] > 2.5 * sent[False]


@pytest.mark.parametrize("shards", [False, True])
def test_fewer_ranks_go_on_with_the_unsent_momentum(told, shards):
    """Catches: unsent momentum that is lost, or added to a gradient, which counts a tenth."""
    assert told.results("first", range(3))[0]["left"] > 0
    found = told.results(f"second {shards}", range(2))
    assert len({rank["bits"] for rank in found}) == 1
    for rank in found:
        assert max(rank["changes"]) < 1e-6
        check(rank["gaps"])
        assert rank["owed"] == 0


def test_ranks_without_state_flush_momentum_too(told):
    """Catches: ranks that disagree on what a flush sends; only one of a host holds state."""
    assert len(set(told.results("detached", range(2)))) == 1


def test_ranks_that_loaded_different_state_say_so(told):
    """Catches: ranks that wait for each other, since only one of them refreshes."""
    for kind, text in told.results("other state", range(2)):
        assert kind == "AgreementError"
        assert "the optimizer's state ('4 steps, 3 refreshes, the last in step 3 (3 like" in text
        assert "'3 steps, 3 refreshes" in text and "on rank 1" in text


@pytest.mark.parametrize("text", ["attach was given none of them", "set momentum=0 in SGD"])
def test_only_rank_0_warns_of_the_optimizer(told, text):
    """Catches: the same warning from every rank of a large job."""
    first, second = told.results("warned", range(2))
    assert first.count(text) == 1 and text not in second


@pytest.mark.parametrize("loads", LOADS, ids=str)
def test_ranks_that_alone_load_state_are_told_so(told, loads):
    """Catches: a rank that waits until the timeout for ranks that compare nothing."""
    found = told.results(f"loads {loads}", range(3))
    text = "without comparing the optimizer's state: call its load_state_dict on all ranks"
    assert all(text in said for _, said in found), found
    assert {kind for rank, (kind, _) in enumerate(found) if rank not in loads} == {"PeerError"}
    assert "AgreementError" in [found[rank][0] for rank in loads]
