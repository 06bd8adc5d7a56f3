"""The accuracy guard among several ranks (see `scripts/guard.py`)."""

from pathlib import Path

import pytest

from tests import scenarios
from tests.grid import selected, thinned

SCRIPT = Path(__file__).parent / "scripts" / "guard.py"
SGD = ["zeros ps 1", "zeros ring 1", "zeros hierarchical 1", "sign ps 2"]
"""What is wrong, strategy, and backward passes of a step."""
ADAMW = ["zeros", "sign"]
HEALTHY = ["onebit adamw", "onebit sgd", "topk(ratio=0.01) sgd"]


@pytest.fixture(scope="module")
def told(request, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("saved"))
    sgd = selected(request, "test_a_wrong_codec_is_left_at_one_step_and_nothing_is_lost", "case")
    adamw = selected(request, "test_unsent_momentum_is_sent_before_gradients_are", "kind")
    healthy = selected(request, "test_healthy_codecs_stay", "case")
    stages = [
        [{"id": "sgd", "do": "sgd", "ranks": 4, "cases": sgd}],
        [
            {"id": "adamw", "do": "adamw", "ranks": 2, "cases": adamw},
            {"id": "auto", "do": "under_auto", "ranks": 2},
        ],
        [
            {"id": "healthy", "do": "healthy", "ranks": 2, "cases": healthy, "steps": 320},
            {"id": "resumed", "do": "resumed", "ranks": 2, "folder": folder},
        ],
    ]
    return scenarios.play(SCRIPT, *stages)


def steps_of_change(codecs):
    return [step for step in range(1, len(codecs)) if codecs[step] != codecs[step - 1]]


@pytest.mark.parametrize("case", thinned(SGD, keep=[SGD[0], SGD[3]]))
def test_a_wrong_codec_is_left_at_one_step_and_nothing_is_lost(told, case):
    """Catches: a codec that stays, ranks that switch apart, residuals that are not sent on."""
    found = [result[case] for result in told.results("sgd", range(4))]
    for rank in found:
        assert rank["codecs"] == found[0]["codecs"] and rank["bits"] == found[0]["bits"]
        assert set(rank["codecs"][0]) == {rank["wrong"]}
        assert rank["wrong"] not in rank["codecs"][-1]
        assert max(rank["gaps"].values()) < 1e-3
    assert [len(rank["lines"]) for rank in found] == [len(found[0]["lines"]), 0, 0, 0]
    (line,) = [text for text in found[0]["lines"] if text.startswith("guard")]
    assert "from " in line and "5.weight (cosine" in line


@pytest.mark.parametrize("kind", thinned(ADAMW, keep=ADAMW[:1]))
def test_unsent_momentum_is_sent_before_gradients_are(told, kind):
    """Catches: unsent momentum that is lost, or is added to a gradient, at the switch."""
    found = [result[kind] for result in told.results("adamw", range(2))]
    assert found[0]["bits"] == found[1]["bits"] and found[0]["codecs"] == found[1]["codecs"]
    for rank in found:
        for number, step in enumerate(rank["gaps"]):
            for name, (gap, bound, _) in step.items():
                assert gap < bound, (number, name, gap)
        changes = steps_of_change(rank["codecs"])
        assert changes and max(changes) < 53
        codecs = [rank["codecs"][at] for at in changes]
        # One step uncompressed with all that was unsent, and the milder codec from then on.
        assert set(codecs[0]) == {"none"} and len(changes) == 2 and changes[1] == changes[0] + 1
        assert set(codecs[-1]) == {"int4"} and rank["senders"][-1] == 0
        assert rank["owed"] == 0


def test_auto_keeps_the_milder_codec_in_later_plans(told):
    """Catches: a plan of auto that brings the wrong codec back, or loses residuals with it."""
    found = told.results("auto", range(2))
    assert found[0]["bits"] == found[1]["bits"]
    for rank in found:
        path = rank["path"]
        first = next(k for k, one in enumerate(rank["modes"]) if one == "compressed")
        (left, *_) = [k for k in range(first, 150) if path not in rank["codecs"][k]]
        assert left - first < 50
        assert not any(path in names for names in rank["codecs"][left:])
        assert len({epoch for epoch, _, _ in rank["seen"][left:]} - {None}) > 1
        assert max(rank["gaps"].values()) < 1e-3
    assert any(text.startswith("guard, step") for text in found[0]["lines"])


@pytest.mark.parametrize("case", thinned(HEALTHY, keep=HEALTHY[:1]))
def test_healthy_codecs_stay(told, case):
    """Catches: a false alarm; a guard that never looks."""
    found = [result[case] for result in told.results("healthy", range(2))]
    assert found[0] == found[1]
    assert found[0]["overrides"] == {} and found[0]["looks"] >= 3, found[0]
    assert set(found[0]["measured"]) == {"0.weight", "3.weight", "5.weight"}


def test_ranks_go_on_with_the_milder_codec(told):
    """Catches: shards that bring the wrong codec back, or are not those of the milder codec."""
    found = told.results("resumed", range(2))
    for rank in found:
        assert rank["wrong"] not in rank["codecs"]
        assert rank["bits"][0] == rank["bits"][1] == found[0]["bits"][0]
