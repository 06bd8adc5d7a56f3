"""The planner: what pays is compressed, what does not is left alone, and every choice says why."""

from typing import Any

import pytest

from hipress.casync.graphs.schedules import SCHEDULES, Schedule
from hipress.errors import UsageError
from hipress.plan import Plan
from hipress.profile import Profile
from hipress.secopa.budget import CAREFUL, PASSED, Budget
from hipress.secopa.search import (
    CREDITS,
    SLICES,
    SearchResult,
    least_slice_bytes,
    search,
    shortlist,
    usual_schedule,
)
from hipress.secopa.simulate import Simulator
from tests.secopa.made_up import codec, profile

CODECS = (
    codec("none", 1.0),
    codec("int8", 1 / 4, element_s=1e-9, task_s=2e-5, error=0.01),
    codec("onebit", 1 / 32, element_s=1e-9, task_s=2e-5, error=0.6),
)


def made(**options: object) -> Profile:
    return profile(**{"codecs": CODECS, **options})  # type: ignore[arg-type]


def measured(profile_: Profile, **errors: float) -> Profile:
    """The profile with errors of some codecs, the same on every gradient."""
    assert profile_.model is not None
    gradients = tuple(one.model_copy(update={"errors": errors}) for one in profile_.model.gradients)
    model = profile_.model.model_copy(update={"gradients": gradients})
    return profile_.model_copy(update={"model": model})


def codecs_of(found: SearchResult) -> set[str]:
    return {decision.codec for decision in found.plan.gradients.values()}


def test_a_slow_link_is_compressed_as_much_as_allowed():
    found = search(made(bytes_per_s=1e7))
    assert codecs_of(found) == {"onebit"}
    assert found.step_s < found.plain_step_s / 10


def test_a_fast_link_is_left_alone():
    slow_codec = codec("onebit", 1 / 32, element_s=1e-7)
    found = search(profile(bytes_per_s=1e11, codecs=[codec("none", 1.0), slow_codec]))
    assert codecs_of(found) == {"none"}
    assert found.step_s == found.plain_step_s
    assert all("longer by" in d.reason for d in found.plan.gradients.values())


def test_one_rank_has_nothing_to_exchange():
    found = search(made(num_ranks=1))
    assert codecs_of(found) == {"none"}
    assert {d.reason for d in found.plan.gradients.values()} == {"one rank: nothing is exchanged"}


def test_the_plan_is_never_worse_than_nothing_or_everything():
    for rate in (1e7, 1e8, 1e9, 1e10):
        found = search(made(bytes_per_s=rate, backward_s=0.05), patience_s=3.0)
        assert found.step_s <= min([found.plain_step_s, *found.everything.values()]) * 1.003


def test_what_backward_hides_is_left_alone():
    # The first gradients have all of backward to travel; only the last must hurry.
    found = search(made(numels=(7_000_000,) * 4, bytes_per_s=1e9, backward_s=1.0), patience_s=60.0)
    decisions = list(found.plan.gradients.values())
    assert not decisions[0].is_compressed
    assert decisions[-1].is_compressed


def test_small_gradients_and_vectors_are_exempt():
    found = search(made(numels=(2**20, 100), bytes_per_s=1e6))
    assert found.plan.decision("g1").reason == "100 elements, fewer than min_size=4096"
    assert found.plan.decision("g1").compressed_s is not None
    flat = search(made(dims=1, bytes_per_s=1e6))
    assert {d.reason for d in flat.plan.gradients.values()} == {"one dimension (norm or bias)"}


def test_reasons_of_the_caller_count():
    found = search(made(bytes_per_s=1e6), reasons={"g0": "excluded by 'g0'"})
    assert found.plan.decision("g0").reason == "excluded by 'g0'"
    assert found.plan.decision("g1").is_compressed


def test_every_decision_carries_the_two_times():
    found = search(made(bytes_per_s=1e7))
    for decision in found.plan.gradients.values():
        assert decision.compressed_s is not None and decision.plain_s is not None
        assert decision.compressed_s < decision.plain_s
        assert decision.reason.startswith("saves ")
        assert decision.bulk is not None and decision.numel == 2**20


def test_the_predicted_step_is_that_of_the_plan():
    profile_ = made(bytes_per_s=1e8, backward_s=0.02)
    found = search(profile_)
    assert Simulator(profile_).step_s(found.plan) == pytest.approx(found.step_s)


def test_a_plan_goes_through_a_file(tmp_path):
    plan = search(made(bytes_per_s=1e7)).plan
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_codecs_that_are_named_are_the_ones():
    found = search(made(bytes_per_s=1e7), codecs=["int8"])
    assert codecs_of(found) == {"int8"}
    with pytest.raises(UsageError, match=r"'dgc' is not in the profile"):
        search(made(), codecs=["dgc"])


def test_a_bound_keeps_coarse_codecs_away():
    profile_ = measured(made(bytes_per_s=1e7), int8=0.01, onebit=0.6)
    assert codecs_of(search(profile_, budget=Budget.read("0.1"))) == {"int8"}
    assert codecs_of(search(profile_, budget=Budget.read(0.001))) == {"none"}


def test_a_bound_is_not_on_errors_of_noise():
    """Catches: a codec that is chosen, or left out, for what it makes of something else."""
    profile_ = made(bytes_per_s=1e7)
    assert {costs.codec: costs.error for costs in profile_.codecs}["int8"] == 0.01
    with pytest.raises(UsageError) as caught:
        search(profile_, budget=Budget.read(0.1))
    assert str(caught.value) == (
        "budget 0.1 bounds the error of a layer's message, and the profile has no error of "
        "int8, onebit that was measured on gradients of its model; measure with hipress profile "
        "--model, or give a budget by name: careful or table."
    )
    found = search(measured(profile_, onebit=0.05, int8=0.2), budget=Budget.read(0.1))
    assert codecs_of(found) == {"onebit"}
    found = search(measured(profile_, int8=0.05), budget=Budget.read(0.9))
    assert codecs_of(found) == {"int8"}


def test_a_bound_is_on_each_layer():
    profile_ = measured(made(bytes_per_s=1e7), onebit=0.6)
    assert profile_.model is not None
    first = profile_.model.gradients[0].model_copy(update={"errors": {"onebit": 0.9}})
    model = profile_.model.model_copy(update={"gradients": (first, *profile_.model.gradients[1:])})
    found = search(
        profile_.model_copy(update={"model": model}), codecs=["onebit"], budget=Budget.read(0.7)
    )
    assert not found.plan.decision("g0").is_compressed
    assert "0.9 off, more than 0.7" in found.plan.decision("g0").reason
    assert found.plan.decision("g1").codec == "onebit"


@pytest.mark.parametrize("given", ["cheap", "0", 2.0, "nan", []])
def test_a_budget_that_is_none_is_refused(given):
    with pytest.raises(UsageError, match=r"budget .* is neither careful nor table nor a bound"):
        Budget.read(given)


def test_budgets_have_names():
    assert Budget.read("careful").codecs == CAREFUL
    assert Budget.read(None).codecs == Budget.read("table").codecs == PASSED


def test_a_shortlist_holds_what_may_pay():
    names = [one.label for one in shortlist(made(bytes_per_s=1e7), most=2)]
    assert len(names) == 2 and any("onebit" in name for name in names)
    slow_codec = codec("onebit", 1 / 32, element_s=1e-6)
    assert shortlist(profile(bytes_per_s=1e11, codecs=[codec("none", 1.0), slow_codec])) == []


def test_a_search_ends_with_its_patience():
    found = search(made(bytes_per_s=1e8, numels=(2**20,) * 20), patience_s=0.0)
    assert found.step_s <= min(found.everything.values())


# --- schedules ------------------------------------------------------------------------------------

SLOW: dict[str, Any] = {"numels": (2**21,) * 4, "forward_s": 1.0, "backward_s": 1.0, "rest_s": 0.01}


def test_every_schedule_is_tried_with_what_was_found_and_with_nothing_compressed():
    profile_ = made(bytes_per_s=2e7, **SLOW)
    found = search(profile_, patience_s=60.0)
    assert found.plan.num_compressed > 0
    tried = {(one.schedule.name, one.is_compressed) for one in found.schedules}
    assert tried == {(name, side) for name in SCHEDULES for side in (True, False)}
    assert len(found.schedules) == len(set(found.schedules)) == 3 * 2 * len(SLICES) * len(CREDITS)
    times = [one.step_s for one in found.schedules]
    assert times == sorted(times)
    simulator = Simulator(profile_)
    for one in (found.schedules[0], found.schedules[-1]):
        decisions = found.plan if one.is_compressed else None
        assert simulator.step_s(decisions, one.schedule) == one.step_s


def test_the_plan_has_the_best_schedule_for_its_own_decisions():
    """Catches: the best schedule of another choice; the slowest."""
    # The codec takes so long that it only pays where forward hides nothing, as with DDP.
    slow_codec = codec("int8", 1 / 4, element_s=4e-8, error=0.01)
    found = search(profile(bytes_per_s=5e7, codecs=[codec("none", 1.0), slow_codec], **SLOW))
    plan = found.plan
    assert plan.num_compressed > 0 and not found.schedules[0].is_compressed
    best = next(one for one in found.schedules if one.is_compressed).schedule
    assert plan.schedule == best.name
    assert (plan.slice_bytes, plan.credit_bytes) == (best.slice_bytes, best.credit_bytes)


def test_a_schedule_hides_the_way_back_where_nothing_may_be_compressed():
    profile_ = measured(made(bytes_per_s=4e7, **SLOW), int8=0.01, onebit=0.6)
    found = search(profile_, budget=Budget.read(0.001))
    assert codecs_of(found) == {"none"} and found.plan.schedule in ("priority", "overlap")
    assert not any(one.is_compressed for one in found.schedules)
    fifo_s = min(one.step_s for one in found.schedules if one.schedule.name == "fifo")
    best_s = found.schedules[0].step_s
    assert best_s < 0.85 * found.plain_step_s and best_s < 0.95 * fifo_s
    assert found.step_s == found.plain_step_s  # of DDP, which has no schedule


def test_slices_are_worth_their_messages():
    """Catches: slices of which most of the time is latency."""
    # A message costs 10 ms without its bytes: 4 times that is 4 MB at 100 MB/s, and a little more.
    slow = made(bytes_per_s=1e8, latency_s=0.006, message_work_s=0.004)
    assert least_slice_bytes(slow.network) == 4_000_000
    assert {one.schedule.slice_bytes for one in search(slow).schedules} == {4_000_000, 2**22}
    assert usual_schedule("fifo", slow.network) == Schedule(
        name="fifo", slice_bytes=4_000_000, credit_bytes=16_000_000
    )


def test_schedules_that_nobody_asked_for_are_not_tried():
    found = search(made(bytes_per_s=1e7), schedules=())
    assert found.schedules == () and found.plan.schedule is None
    assert search(made(num_ranks=1)).plan.schedule is None
    only = search(made(bytes_per_s=1e7), schedules=["overlap"])
    assert {one.schedule.name for one in only.schedules} == {"overlap"}


def test_plans_for_ddp_spend_no_time_on_schedules(monkeypatch):
    """Catches: a running job that waits for tries which it has no use for."""
    monkeypatch.setattr(Simulator, "_scheduled", None)
    assert shortlist(made(bytes_per_s=1e7))


def test_without_patience_the_usual_sizes_are_tried():
    found = search(made(bytes_per_s=1e7), patience_s=0.0)
    assert len(found.schedules) == 3 * 2
    assert {one.schedule.slice_bytes for one in found.schedules} == {SLICES[0]}
