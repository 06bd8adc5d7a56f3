"""`DistributedOptimizer` among ranks: what it trains to, and what users do to it.

The ranks of a job play cases one after the other (see `scripts/distributed_optimizer.py`), with
random delays of messages, so that updates are on their way when something happens. The docstring of
a test says what would make it fail.
"""

from pathlib import Path

import pytest
import torch

from hipress.torch.exchanger import why_whole
from tests import scenarios
from tests.grid import full, selected, thinned

SCRIPT = Path(__file__).parent / "scripts" / "distributed_optimizer.py"
RANKS = 4
SCHEDULES = ("fifo", "priority", "overlap")
EQUAL = [
    *((opt, schedule, "before") for opt in ("sgd", "adamw", "adagrad") for schedule in SCHEDULES),
    *(("sgd", "overlap", clear) for clear in ("after", "module", "zeros")),
]
KEPT = [
    ("sgd", "fifo", "before"), ("adamw", "priority", "before"), ("adagrad", "overlap", "before"),
    ("sgd", "overlap", "after"), ("sgd", "overlap", "zeros"),
]  # fmt: skip
LIKE_DDP = {
    "rates": {},
    "tensor_rate": {},
    "accumulation": {},
    "two_backwards": {},
    "discarded": {},
    "closure": {},
    "checkpointed": {},
    "odd_steps": {},
    "retried": {},
    "gradients_read": {},
    "partly_used": {},
    "partly_used, read on rank 1": {"readers": [1]},
    "clip": {},
    "clip, partly used": {"use": False},
    "scaled": {},
    "scaled, fused": {"fused": True},
}
"""Cases that are compared with DDP, and their options."""
READ = (
    "evaluation", "inference", "average", "state", "optimizer", "copy", "saved", "data", "vector",
    "functional",
)  # fmt: skip
REPLICAS = [("onebit", "ps"), ("int8", "ps"), ("topk(ratio=0.05)", "ps"), ("onebit", "ring")]
NUM_STRESS, NUM_FULL_STRESS = 6, 40
REFUSED = {
    "moved": "is float64 on cpu and was float32 on cpu when the DistributedOptimizer was made",
    "unfrozen": "parameter 4 of group 0 of the optimizer has a gradient and had none to exchange",
    "added": "parameter 0 of group 1 of the optimizer has a gradient and had none to exchange",
    "local": "all gradients since the last one were accumulated in no_sync()",
    "sparse": "parameter 'weight' has a sparse gradient",
    "read_in_backward": "a gradient is read in the middle of a backward pass",
    "wrapped": "is in a DistributedDataParallel, so its gradients would be exchanged twice",
}


ALONE = {
    "test_momentum_is_exchanged_as_with_ddp": ["exchange"],
    "test_momentum_survives_what_users_do": ["exchange_loads", "inner_cleared"],
    "test_a_frozen_layer_stays": ["frozen"],
    "test_updates_are_outside_of_autocast": ["autocast"],
    "test_collectives_of_the_program_may_come_in_between": ["user_collectives"],
    "test_running_statistics_are_averaged": ["norms", "parts", "micro_batches"],
    "test_two_models_do_not_meet": ["two_models"],
    "test_a_layer_that_no_rank_uses_stands_still": ["alternating"],
    "test_a_batch_that_one_rank_leaves_out_ends_training": ["left_out", "left_out_and_saved"],
    "test_residuals_of_unused_layers_are_kept": ["unused_residuals"],
    "test_buffers_are_alike_on_all_ranks": ["buffers"],
    "test_other_threads_may_read": ["watched"],
    "test_an_update_that_failed_is_made_later": ["interrupted"],
    "test_the_state_of_the_wrapped_optimizer_is_complete": ["inner_state"],
    "test_kept_gradients_stay": ["kept_gradients"],
    "test_hooks_before_steps_may_read_gradients": ["clipping_hook"],
    "test_hooks_of_all_optimizers_are_called": ["global_hooks"],
    "test_an_optimizer_may_be_made_again": ["made_again"],
    "test_transforms_and_traces_may_read_first": ["transformed"],
    "test_a_parameter_may_have_several_names": ["several_names"],
    "test_one_rank_may_read_gradients": ["read_by_one"],
    "test_auto_takes_the_fastest_schedule": ["auto"],
    "test_auto_decides_from_measurements": ["auto_measured"],
    "test_hooks_of_the_wrapped_optimizer_are_called": ["hooks", "schedulers_of_inner"],
    "test_what_cannot_work_is_said": ["refused"],
    "test_what_is_dropped_ends": ["dropped"],
}
"""Tests with cases of their own."""


@pytest.fixture(scope="module")
def told(request, tmp_path_factory):
    """Plays what the selected tests need."""
    file = str(tmp_path_factory.mktemp("saved") / "file")
    cases = {}
    for name in selected(request, "test_what_users_do_gives_what_ddp_gives", "name"):
        cases[name] = [name.partition(",")[0], LIKE_DDP[name]]
    for opt, schedule, clear in selected(
        request, "test_losses_and_bits_are_those_of_ddp", "opt", "schedule", "clear"
    ):
        options = {"opt": opt, "schedule": schedule, "clear": clear}
        cases[f"{opt} {schedule} {clear}"] = ["equal", options]
    for how in selected(request, "test_whoever_reads_waits", "how"):
        cases[f"read {how}"] = ["read", {"how": how}]
    for codec, strategy in selected(
        request, "test_replicas_have_the_same_bits", "codec", "strategy"
    ):
        options = {"codec": codec, "strategy": strategy}
        cases[f"{codec} {strategy}"] = ["replicas", options]
    for schedule in selected(request, "test_ranks_agree_on_orders", "schedule"):
        cases[f"order {schedule}"] = ["other_order", {"schedule": schedule}]
    for num in selected(request, "test_no_delay_changes_anything", "num_runs"):
        cases[f"stress {num}"] = ["stress", {"seeds": list(range(num))}]
    tests = {getattr(item, "originalname", None) for item in request.session.items}
    for test in sorted(tests & set(ALONE)):
        cases |= {name: [name, {}] for name in ALONE[test]}
    first = [{"id": "cases", "do": "play_cases", "ranks": RANKS, "cases": cases}]
    second, third = [], []
    if "test_the_last_step_is_made_at_exit" in tests:
        cases["expected"] = ["expected", {"steps": 3}]
        second.append({"id": "ends", "do": "ends", "ranks": RANKS})
    if "test_compiled_models_train_alike" in tests:
        second.append({"id": "compiled", "do": "compiled", "ranks": 2})
    if "test_fewer_ranks_go_on" in tests:
        second.append({"id": "first", "do": "first_half", "ranks": 3, "file": file})
        third.append({"id": "second", "do": "second_half", "ranks": 2, "file": file})
    if "test_one_process_only_steps" in tests:
        second.append({"id": "one", "do": "one_process", "ranks": 1})
    env = {"HIPRESS_TIMEOUT": "60"}
    stages = [[{**one, "env": env} for one in stage] for stage in (first, second, third)]
    return scenarios.play(SCRIPT, *stages)


@pytest.fixture
def case(told):
    """Returns what the ranks say of a case."""

    def find(key, num_ranks=RANKS):
        found = [one[key] for one in told.results("cases", range(num_ranks))]
        for one in found:
            if isinstance(one, dict) and "error" in one:
                pytest.fail(one["error"][-1], pytrace=False)
        return found

    return find


def check_like(found, reference="ddp"):
    """Losses of each rank, and all parameters."""
    for one in found:
        assert one["own"]["losses"] == one[reference]["losses"]
        assert one["own"]["bits"] == one[reference]["bits"]
    assert len({one["own"]["bits"] for one in found}) == 1


def check_near(found):
    """Torch's own sums, of plain steps, round in another order."""
    for one in found:
        assert one["own"]["losses"] == pytest.approx(one["ddp"]["losses"], rel=1e-3, abs=1e-4)
    assert len({one["own"]["bits"] for one in found}) == 1


@pytest.mark.parametrize(("opt", "schedule", "clear"), thinned(EQUAL, keep=KEPT))
def test_losses_and_bits_are_those_of_ddp(case, opt, schedule, clear):
    """Catches: an update with a later learning rate, a lost one, or one that is read too early."""
    found = case(f"{opt} {schedule} {clear}")
    check_like(found)
    check_like(found, "barrier")
    assert all(one["own"]["extra"] > 0 for one in found)  # something was on its way


@pytest.mark.parametrize("name", LIKE_DDP)
def test_what_users_do_gives_what_ddp_gives(case, name):
    """Catches: gradients of one rank that are clipped, scaled or logged; steps that do not match;
    parameters that only some ranks update."""
    found = case(name)
    check_like(found)
    if name.startswith(("clip", "scaled", "gradients_read")):
        assert all(one["own"]["extra"] == one["ddp"]["extra"] for one in found)
    if name.startswith("clip"):
        assert [one["said"] for one in found] == [1, 0, 0, 0]
    if name.startswith("scaled"):
        assert found[0]["own"]["extra"][2:] == [512.0] * 3


@pytest.mark.parametrize("how", READ)
def test_whoever_reads_waits(case, how):
    """Catches: an evaluation, average, copy or checkpoint of parameters before their update."""
    found = case(f"read {how}")
    check_like(found)
    for one in found:
        assert one["own"]["extra"][0] == one["ddp"]["extra"][0]
        assert one["own"]["extra"][1] > 0


@pytest.mark.parametrize(("codec", "strategy"), REPLICAS)
def test_replicas_have_the_same_bits(case, codec, strategy):
    """Catches: ranks that decode or update differently; a schedule that changes a result."""
    check_like(case(f"{codec} {strategy}"), "barrier")


def test_momentum_is_exchanged_as_with_ddp(case):
    """Catches: momentum taken for a gradient, refreshes in other steps."""
    for one in case("exchange"):
        assert one["own"]["bits"] == one["ddp"]["bits"]
        assert one["own"]["losses"] == one["ddp"]["losses"]
        sent = one["own"]["sent"]
        assert min(sent[0], sent[1], sent[4]) > 2 * max(sent[2], sent[3], sent[5])


def test_momentum_survives_what_users_do(case):
    """Catches: a KeyError with the state of torch's AdamW; momentum that is taken for a gradient
    when the wrapped optimizer is cleared."""
    assert len(set(case("exchange_loads"))) == 1
    assert {plain == inner for plain, inner in case("inner_cleared")} == {True}


def test_a_frozen_layer_stays(case):
    """Catches: momentum and weight decay that go on moving what was frozen."""
    found = case("frozen")
    check_like(found, "barrier")
    assert all(one["own"]["extra"] for one in found)


def test_running_statistics_are_averaged(case):
    """Catches: evaluation with the statistics of one rank; a part of the model without them."""
    found = case("norms")
    assert len({(one["bits"], one["parameters"]) for one in found}) == 1
    assert max(one["gap"] for one in found) < 1e-6
    assert {tuple(one["wide"]) for one in found} == {(0.0, 0.0)}
    assert len(set(map(tuple, case("parts")))) == 1
    assert max(case("micro_batches")) < 1e-6


def test_a_layer_that_no_rank_uses_stands_still(case):
    """Catches: momentum or weight decay in a step in which no rank has had a gradient."""
    found = case("alternating")
    check_like(found)
    assert all(one["own"]["extra"] == one["ddp"]["extra"] for one in found)
    first = found[0]["own"]["extra"]
    assert first[0] == first[1] != first[2] == first[3]


def test_a_batch_that_one_rank_leaves_out_ends_training(case):
    """Catches: replicas that differ, because one rank made no update with a mean of all ranks."""
    for kind, text in case("left_out"):
        assert kind == "PeerError"
        assert "backward ended with an error on rank 0 in step 2" in text
    assert {kind for kind, _ in case("left_out_and_saved")} == {"PeerError"}


def test_residuals_of_unused_layers_are_kept(case):
    """Catches: what codecs have sent for a layer that no rank used, and no update was made with."""
    check_like(case("unused_residuals"))


def test_buffers_are_alike_on_all_ranks(case):
    """Catches: layers whose statistics are mixed up, buffers that forward replaces, constants that
    overflow in a sum."""
    found = case("buffers")
    assert len({one["bits"] for one in found}) == 1
    assert all(one["near"] > 0.1 and one["mean"] > 0 for one in found)
    assert {tuple(one["mask"]) for one in found} == {(torch.finfo(torch.float32).min,) * 2}


def test_other_threads_may_read(case):
    """Catches: an update that two threads make."""
    found = case("watched")
    check_like(found, "barrier")
    assert all(one["own"]["extra"] == [] for one in found)


def test_an_update_that_failed_is_made_later(case):
    """Catches: parameters that are read as if they had been updated."""
    found = case("interrupted")
    check_like(found, "barrier")
    assert all(one["own"]["extra"] for one in found)


def test_the_state_of_the_wrapped_optimizer_is_complete(case):
    """Catches: a checkpoint with momentum of the step before."""
    found = case("inner_state")
    check_like(found, "barrier")
    assert all(one["own"]["extra"] == one["barrier"]["extra"] for one in found)


def test_kept_gradients_stay(case):
    """Catches: gradients that the next step writes over while the program still has them."""
    found = case("kept_gradients")
    check_like(found)
    assert all(one["own"]["extra"] == one["ddp"]["extra"] for one in found)


def test_hooks_before_steps_may_read_gradients(case):
    """Catches: a step that is closed by its own hooks."""
    check_like(case("clipping_hook"))


def test_hooks_of_all_optimizers_are_called(case):
    """Catches: profilers and loggers that see no step."""
    found = case("global_hooks")
    check_like(found)
    assert all(one["own"]["extra"] == one["ddp"]["extra"] != [] for one in found)


def test_an_optimizer_may_be_made_again(case):
    """Catches: hooks of an optimizer that is gone, or is not gone yet."""
    found = case("made_again")
    assert len({one["bits"] for one in found}) == 1
    for one in found:
        assert one["hooks"] == 1
        assert "another DistributedOptimizer was made" in one["said"][0][1]


def test_transforms_and_traces_may_read_first(case):
    """Catches: updates inside a transform or a trace."""
    found = case("transformed")
    check_like(found)
    assert all(one["own"]["extra"] == one["ddp"]["extra"] for one in found)


def test_a_parameter_may_have_several_names(case):
    """Catches: a gradient that is exchanged twice."""
    assert len(set(case("several_names"))) == 1


def test_one_rank_may_read_gradients(case):
    """Catches: an exchange that a rank starts after a collective of the program, on which the
    others wait."""
    found = case("read_by_one")
    check_like(found)
    assert all(one["own"]["extra"] == one["ddp"]["extra"] for one in found)


def test_collectives_of_the_program_may_come_in_between(case):
    """Catches: plain sums that share an order with collectives of the program, which ranks call
    before or after them."""
    found = case("user_collectives")
    check_near(found)
    assert all(one["own"]["extra"] == one["ddp"]["extra"] for one in found)


def test_updates_are_outside_of_autocast(case):
    """Catches: parameters that differ by which means had arrived before the forward pass."""
    check_like(case("autocast"), "barrier")


def test_an_optimizer_of_others_updates_all_at_once():
    """Catches: a name taken for the optimizer of torch, such as a Lamb that clips by a norm of all
    gradients and counts steps in its groups."""

    class SGD(torch.optim.Optimizer):
        pass

    parameters = [torch.nn.Parameter(torch.ones(2))]
    assert "may depend on all parameters" in why_whole(SGD(parameters, {}))
    assert why_whole(torch.optim.SGD(parameters, lr=0.1)) == ""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_agree_on_orders(case, schedule):
    """Catches: ranks whose messages leave in orders of their own, since they call layers so."""
    found = case(f"order {schedule}")
    assert found.count(found[0]) == RANKS


def test_auto_takes_the_fastest_schedule(case):
    """Catches: gradients that are lost or sent twice when units and orders change; ranks in
    different schedules; a schedule that is chosen and not used."""
    found = case("auto")
    assert len({(one["bits"], one["mode"]) for one in found}) == 1
    assert max(one["gap"] for one in found) < 1e-6
    seen = found[0]["seen"]
    assert all(one["seen"] == seen for one in found)
    assert {name for name, _ in seen} == set(SCHEDULES)
    assert seen[-1] == ["priority", "compressed"]
    # Controls of the choice have the messages of the first steps, as DDP does, and not the plan's.
    assert [name for name, mode in seen[20:] if mode == "plain"].count("fifo") >= 2


def test_auto_decides_from_measurements(case):
    """Catches: a search that fails with what was measured in a loop without DDP."""
    found = case("auto_measured")
    assert len({one["bits"] for one in found}) == 1
    assert all(one["mode"] in ("plain", "compressed") for one in found)
    assert found[0]["reason"]


def test_two_models_do_not_meet(case):
    """Catches: an optimizer that waits for, or updates, the parameters of another."""
    found = case("two_models")
    assert {one["together"] for one in found} == {found[0]["alone"]}


def test_hooks_of_the_wrapped_optimizer_are_called(case):
    """Catches: a hook after a step that sees parameters before it; a false warning."""
    for one in case("hooks"):
        assert one["own"]["extra"] == one["ddp"]["extra"]
    assert case("schedulers_of_inner") == [[[], 0.0125]] * RANKS


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_said(case, name):
    """Catches: ranks that train apart without a word."""
    for one in case("refused"):
        assert one[name] is not None, "nothing was said"
        kind, text = one[name]
        assert kind == "UsageError"
        assert REFUSED[name] in text


def test_what_is_dropped_ends(case):
    """Catches: threads that pile up; a model that loses its last step with its optimizer."""
    for one in case("dropped"):
        assert one["left"] == []
        assert one["engines"] == [True, True]
        assert one["pending"] > 0
    assert len({one["kept"] for one in case("dropped")}) == 1


@pytest.mark.parametrize("num_runs", [NUM_STRESS, pytest.param(NUM_FULL_STRESS, marks=full)])
def test_no_delay_changes_anything(case, num_runs):
    """Catches: a deadlock, or a result that depends on which message comes first."""
    found = case(f"stress {num_runs}")
    for runs in zip(*found, strict=True):
        assert all(is_equal for is_equal, _ in runs)
        assert len({bits for _, bits in runs}) == 1


def test_the_last_step_is_made_at_exit(told, case):
    """Catches: a program that ends with one step less."""
    (expected,) = set(case("expected"))
    pending = told.results("ends", range(RANKS))
    assert max(pending) > 0
    for rank in range(RANKS):
        assert told.find("left", id="ends", rank=rank) == [expected]
        assert told.find("waiting", id="ends", rank=rank) == [0]
        assert told.find("exit", id="ends", rank=rank) == [0]


def test_compiled_models_train_alike(told):
    """Catches: a compiled graph that reads parameters before their update."""
    for one in told.results("compiled", range(2)):
        for when in (0, 2):
            assert one[f"{when} own"] == one[f"{when} barrier"]


def test_fewer_ranks_go_on(told):
    """Catches: a checkpoint without the last step, or one that only as many ranks can load."""
    (before,) = set(told.results("first", range(3)))
    first, step, last = zip(*told.results("second", range(2)), strict=True)
    assert set(first) == {before}
    assert set(step) == {4}
    assert len(set(last)) == 1


def test_one_process_only_steps(told):
    assert told.results("one", [0]) == [True]
