"""Steps with a schedule: the next forward pass waits for single parameters; times by hand."""

import pytest

from hipress.casync.graphs.schedules import SCHEDULES, Schedule
from hipress.errors import UsageError
from hipress.plan import Decision
from hipress.profile import Profile
from hipress.secopa.cluster import SimulatedStep
from hipress.secopa.simulate import Simulator, traces
from tests.secopa.made_up import codec, profile

SLICE = 2**18
"""Bytes of a slice: 64 Ki elements as they are, the smallest that a gradient is cut into."""


def schedule(name: str, credit_bytes: int = SLICE, slice_bytes: int = SLICE) -> Schedule:
    return Schedule(name=name, slice_bytes=slice_bytes, credit_bytes=credit_bytes)


def seconds(step: SimulatedStep, verb: str, rank: int = 0) -> float:
    """How long a rank was busy with something."""
    return sum(s.end_s - s.start_s for s in step.spans if s.verb == verb and s.rank == rank)


# --- times worked out by hand ---------------------------------------------------------------------

# Two layers of 16 MiB on two ranks: each rank sends half of a layer out, and its own half back, in
# 1 s each. Backward computes g0, the second layer, in its first second, and g1 in its second one.
# Forward needs g1 at once and g0 after one second.
TWO_LAYERS = profile(
    numels=(2**22, 2**22), num_ranks=2, bytes_per_s=2**23, forward_s=2.0, backward_s=2.0
)
FEW_SLICES = 4 * SLICE / 2**23


@pytest.mark.parametrize(
    "name, expected_s",
    [
        # g0 from 1 to 3 s, g1 from 3 to 5; then 2 s of forward.
        ("fifo", 7.0),
        # g0 from 1 to 2, g1 from 2 to 4, the rest of g0 from 4 to 5; forward from 4 to 6.
        ("priority", 6.0),
        # g0 out from 1 to 2, g1 out and back from 2 to 4, g0 back from 4 to 5; forward from 4 to 6.
        ("overlap", 6.0),
    ],
)
def test_two_layers_on_a_slow_link(name, expected_s):
    """Catches: orders that are not followed, on either way; a forward pass that waits for all."""
    step = Simulator(TWO_LAYERS).run(None, schedule(name), record=True)
    assert step.step_s == pytest.approx(expected_s, abs=FEW_SLICES)
    assert step.exposed_s == pytest.approx(expected_s - 4.0, abs=FEW_SLICES)
    assert step.backward_end_s == pytest.approx(2.0)
    assert step.exchange_end_s == pytest.approx(5.0, abs=FEW_SLICES)
    for rank in (0, 1):
        assert seconds(step, "forward", rank) == pytest.approx(2.0)
    longest_s = max(seconds(step, "stall", rank) for rank in (0, 1))
    assert longest_s == pytest.approx(step.exposed_s)


def test_without_a_schedule_the_same_step_waits_for_all_means():
    assert Simulator(TWO_LAYERS).step_s(None) == pytest.approx(7.0, abs=FEW_SLICES)


def test_only_what_waits_can_be_overtaken():
    """Catches: a credit that nothing obeys. With one for all, all is under way before g1 comes."""
    step_s = Simulator(TWO_LAYERS).step_s(None, schedule("priority", credit_bytes=2**30))
    assert step_s == pytest.approx(7.0, abs=FEW_SLICES)


def test_a_huge_last_layer_is_overtaken_by_the_first():
    """Catches: priorities that have no effect within a gradient that is under way."""
    made = profile(
        numels=(2**24, 2**20), num_ranks=2, bytes_per_s=2**24, forward_s=4.0, backward_s=2.0
    )
    fifo_s, priority_s = (Simulator(made).step_s(None, schedule(n)) for n in ("fifo", "priority"))
    # g0 takes 4 s from second 1 on, g1 a quarter behind it; then 4 s of forward.
    assert fifo_s == pytest.approx(9.25, abs=FEW_SLICES)
    # g1 from 2 to 2.25; 2 s of forward; a stall until g0 is there at 5.25; 2 s more.
    assert priority_s == pytest.approx(7.25, abs=FEW_SLICES)


def test_the_overlap_keeps_the_way_out_in_the_order_of_backward():
    """Catches: `overlap` that is `priority`. g1 is small, and its way out waits for that of g0."""
    made = profile(
        numels=(2**24, 2**20), num_ranks=2, bytes_per_s=2**24, forward_s=4.0, backward_s=2.0
    )
    # g0 out from 1 to 3, g1 out and back until 3.25, g0 back until 5.25: forward from 3.25 on, with
    # g0 needed, and there, at 5.25.
    assert Simulator(made).step_s(None, schedule("overlap")) == pytest.approx(7.25, abs=FEW_SLICES)
    step = Simulator(made).run(None, schedule("overlap"), record=True)
    first_s = min(span.start_s for span in step.spans if span.verb == "forward")
    assert first_s == pytest.approx(3.25, abs=FEW_SLICES)


def test_what_forward_needs_first_is_measured():
    """Catches: a mirror image of backward in place of what was measured."""
    assert TWO_LAYERS.model is not None
    g0, g1 = TWO_LAYERS.model.gradients
    first, second = (one.model_copy(update={"needed_s": s}) for one, s in ((g0, 0.0), (g1, 1.0)))
    model = TWO_LAYERS.model.model_copy(update={"gradients": (first, second)})
    turned = Simulator(TWO_LAYERS.model_copy(update={"model": model}))
    # Forward uses first what backward computes first: g0 from 1 to 3, g1 from 3 to 5, and forward
    # from 3 on stops at 4 for g1.
    for name in ("fifo", "priority"):
        assert turned.step_s(None, schedule(name)) == pytest.approx(6.0, abs=FEW_SLICES)


def test_the_optimizer_works_on_each_unit():
    """Catches: optimizer work that is lost, done twice, or waited for as a whole."""
    model = TWO_LAYERS.model
    assert model is not None
    made = TWO_LAYERS.model_copy(update={"model": model.model_copy(update={"rest_s": 1.0})})
    step = Simulator(made).run(None, schedule("priority"), record=True)
    # g1 is there at 4 s and updated at 4.5; forward until 5.5, where g0 is there and is updated.
    assert step.step_s == pytest.approx(7.0, abs=FEW_SLICES)
    assert seconds(step, "optimizer") == pytest.approx(1.0)


def test_the_optimizer_uses_a_stall():
    """Catches: a model that only waits where units that are needed later have arrived."""
    model = TWO_LAYERS.model
    assert model is not None
    made = TWO_LAYERS.model_copy(update={"model": model.model_copy(update={"rest_s": 1.0})})
    # g0 is there at 3 s and updated while forward waits for g1, which is there at 5 s.
    step_s = Simulator(made).step_s(None, schedule("fifo"))
    assert step_s == pytest.approx(5.0 + 0.5 + 2.0, abs=FEW_SLICES)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_fast_link_leaves_the_work(name, num_ranks):
    made = profile(num_ranks=num_ranks, bytes_per_s=1e13, forward_s=0.1, backward_s=0.2, rest_s=0.3)
    step = Simulator(made).run(None, schedule(name))
    assert step.step_s == pytest.approx(0.6, rel=1e-3)
    assert step.exposed_s == pytest.approx(0.0, abs=1e-4)


# --- what every schedule keeps --------------------------------------------------------------------

MIXED = profile(
    numels=(3_000_000, 100, 700, 200_000, 2**20, 5000, 0, 2**21),
    backward_s=0.1,
    forward_s=0.05,
    latency_s=1e-4,
    message_work_s=1e-5,
    codecs=[codec("none", 1.0), codec("int8", 1 / 4, element_s=1e-9, task_s=1e-5)],
)


def everything(made: Profile, name: str, strategy: str) -> dict[str, Decision]:
    assert made.model is not None
    return {g.name: Decision(codec=name, strategy=strategy) for g in made.model.gradients}


@pytest.mark.parametrize("name", ["none", "int8"])
def test_a_schedule_never_changes_the_bytes_that_are_sent(name):
    """Catches: slices that are lost, or sent twice."""
    decisions = everything(MIXED, name, "ps")
    simulator = Simulator(MIXED)
    share = 1.0 if name == "none" else 1 / 4
    assert MIXED.model is not None
    expected = 2 * 3 * 4 * share * MIXED.model.num_elements  # of all four ranks together
    sent = set()
    for one in SCHEDULES:
        for slice_bytes in (SLICE, 2**20):
            for credit in (1, 2**30):
                step = simulator.run(
                    decisions, schedule(one, credit, slice_bytes=slice_bytes), record=True
                )
                of_all = sum(s.num_bytes or 0 for s in step.spans if s.verb == "send")
                assert of_all == pytest.approx(expected)
                sent.add((slice_bytes, step.sent_bytes))
    assert len(sent) <= 2  # one number for each size of slices


@pytest.mark.parametrize("strategy", ["ps", "ring", "hierarchical", "allreduce"])
@pytest.mark.parametrize("num_ranks", [2, 3, 9, 33])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_ends_with_the_smallest_credit(strategy, num_ranks, name):
    """Catches: ranks that wait for each other with their credit used up."""
    hosts = 2 if strategy == "hierarchical" else 1
    simulator = Simulator(MIXED, num_ranks, ranks_per_host=hosts)
    assert simulator.step_s(everything(MIXED, "int8", strategy), schedule(name, 1)) > 0.15


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_same_step_twice_is_the_same(name):
    """Catches: an order that depends on a set or on what was simulated before."""
    decisions = everything(MIXED, "int8", "ps")
    found = [Simulator(MIXED).run(decisions, schedule(name), record=True) for _ in range(2)]
    again = Simulator(MIXED)
    for other in SCHEDULES:
        again.step_s(decisions, schedule(other, slice_bytes=2**20))
        again.step_s(None, schedule(other))
    found.append(again.run(decisions, schedule(name), record=True))
    assert found[0].spans == found[1].spans == found[2].spans
    assert found[0].step_s == found[1].step_s == found[2].step_s


def test_small_gradients_travel_together_and_large_ones_alone():
    step = Simulator(MIXED).run(None, schedule("fifo"))
    # Backward has computed much more than a slice since g1 when g5 is there, so these do not wait
    # for g6, which is empty.
    assert [s.name for s in step.syncs] == ["g0", "g3", "g4", "g1 and 2 more", "g6", "g7"]
    assert [sync.order.out for sync in step.syncs if sync.order] == [0, 1, 2, 3, 4, 5]
    assert {len(sync.graphs[0].receives) for sync in step.syncs if sync.name == "g6"} == {0}
    chunks = {task.chunk for task in step.syncs[3].graphs[0].tasks}
    assert len(chunks) == 1  # one message each way


def test_the_gradients_of_a_unit_share_one_message():
    """Catches: members of a unit that go to an aggregator each."""
    step = Simulator(profile(numels=(100, 200, 300))).run(None, schedule("fifo"), record=True)
    sent = [span.num_bytes for span in step.spans if span.verb == "send"]
    assert sent == [2400.0] * 6  # three out and three back


@pytest.mark.parametrize("name", ["none", "int8"])
@pytest.mark.parametrize("slice_bytes", [SLICE, 2**20])
def test_messages_are_about_as_large_as_a_slice(name, slice_bytes):
    """Catches: slices in elements, whatever the codec makes of them; chunks that are not cut."""
    made = MIXED.model_copy(update={"model": profile(numels=(2**23, 2**22)).model})
    decisions = everything(made, name, "ps")
    step = Simulator(made).run(decisions, schedule("fifo", slice_bytes=slice_bytes), record=True)
    sent = {span.num_bytes for span in step.spans if span.verb == "send"}
    assert sent == {slice_bytes}


def test_the_all_reduce_of_torch_is_cut_too():
    """Catches: a large gradient without a codec that nothing can overtake."""
    plain, whole = everything(MIXED, "none", "ps"), everything(MIXED, "none", "allreduce")
    simulator = Simulator(MIXED)
    for name in SCHEDULES:
        one, other = (simulator.run(made, schedule(name)) for made in (plain, whole))
        assert (one.step_s, one.sent_bytes) == (other.step_s, other.sent_bytes)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("num_ranks", [4, 16])
def test_one_rank_stands_for_all(name, num_ranks):
    """Catches: messages of other ranks that never come, or all at once."""
    made = profile(
        numels=(2**21,) * 8 + (50_000,) * 6 + (2**21,) * 8,
        backward_s=0.4,
        forward_s=0.2,
        bytes_per_s=2e8,
        latency_s=1e-4,
        message_work_s=1e-4,
    )
    few, many = (Simulator(made, num_ranks, most_simulated=most) for most in (1, 64))
    alone_s, all_s = (one.step_s(None, schedule(name, 2**20, 2**20)) for one in (few, many))
    # With `priority` some ranks get more urgent work than others, which one rank does not see.
    assert alone_s == pytest.approx(all_s, rel=0.2 if name == "priority" else 0.06)


def test_a_timeline_shows_what_forward_waits_for():
    step = Simulator(TWO_LAYERS).run(None, schedule("fifo"), record=True)
    events = traces(step)[0].events
    stalls = [event for event in events if event.verb == "stall"]
    assert {event.label for event in stalls} == {"g1"} and {e.queue for e in stalls} == {"model"}


@pytest.mark.parametrize(
    "options, text",
    [
        ({"name": "lifo"}, "schedule 'lifo'.* is none of fifo, priority, overlap; choose one"),
        ({"slice_bytes": 0}, "slice_bytes is 0; give at least 1"),
        ({"credit_bytes": -5}, "credit_bytes is -5; give at least 1"),
    ],
)
def test_what_is_no_schedule(options, text):
    with pytest.raises(UsageError, match=text):
        Schedule(**{"name": "fifo", "slice_bytes": 1, "credit_bytes": 1, **options})
