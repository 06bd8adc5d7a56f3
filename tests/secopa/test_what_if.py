"""Other questions to a profile: another rate, own machines, one choice for all; and timelines."""

import pytest

from hipress.profile import Curve
from hipress.secopa.simulate import MOST_WHOLE, Simulator, traces
from hipress.secopa.what_if import (
    on_own_machines,
    uniform,
    with_plain,
    with_rate,
)
from hipress.timeline import chrome_trace
from tests.secopa.made_up import codec, profile
from tests.traces import check_trace, summary


def network(made, **changes):
    return made.model_copy(update={"network": made.network.model_copy(update=changes)})


def test_a_rate_keeps_the_measured_share():
    """Catches: a link at another rate that brings another share of it than was measured."""
    made = network(profile(bytes_per_s=1e8), rate_bits=10**9)  # 80 %
    changed = with_rate(made, 10**10).network
    assert changed.bytes_per_s == pytest.approx(1e9)
    assert changed.rate_bits == 10**10


def test_a_rate_without_a_measured_share_brings_94_percent():
    """Catches: a line rate taken for what a link brings."""
    assert with_rate(profile(), 10**9).network.bytes_per_s == pytest.approx(0.94 * 1.25e8)


def test_only_the_wire_of_an_all_reduce_changes():
    """Catches: a host's work on an all-reduce that gets faster with the link."""
    made = profile(num_ranks=4, bytes_per_s=0.94 * 1.25e8)
    wire = 1.5 / (0.94 * 1.25e8)
    made = network(made, all_reduce=Curve(fixed=1e-3, slope=wire + 1e-9))
    changed = with_rate(made, 10**10).network.all_reduce
    assert changed.slope == pytest.approx(wire / 10 + 1e-9)
    assert changed.fixed == 1e-3


def test_a_faster_link_makes_a_shorter_step():
    """Catches: a rate that the simulator does not see."""
    slow, fast = (Simulator(with_rate(profile(), 10**k), 4).step_s(None) for k in (8, 9))
    assert slow == pytest.approx(10 * fast)


def test_own_machines_share_no_cores():
    """Catches: ranks of a lab that still wait for each other on hosts of their own."""
    made = profile(num_local_ranks=4, cores=2.0, backward_s=1.0)
    assert Simulator(made, 1).step_s({}) == pytest.approx(2.0)
    assert Simulator(on_own_machines(made), 1).step_s({}) == pytest.approx(1.0)


def test_a_profile_without_none_can_leave_gradients_alone():
    """Catches: a profile of compressed codecs only, on which nothing can be simulated."""
    made = with_plain(profile(codecs=[codec("onebit", 1 / 32)]))
    assert made.codec("none").wire.at(1) == 4
    assert with_plain(made) is made


def test_uniform_leaves_small_and_one_dimensional_gradients_alone():
    """Catches: a norm that is compressed."""
    made = uniform(profile(numels=(100, 2**20)), "onebit", "ring")
    assert [made[name].codec for name in ("g0", "g1")] == ["none", "onebit"]
    flat = uniform(profile(numels=(2**20,), dims=1), "onebit", "ring")
    assert (flat["g0"].codec, flat["g0"].strategy) == ("none", "ps")  # as attach has it


def test_a_whole_cluster_simulates_every_rank_up_to_16():
    """Catches: one rank that stands for all where all can be simulated."""
    assert len(Simulator(profile(), 16, most_simulated=MOST_WHOLE).ranks) == 16
    assert len(Simulator(profile(), 17, most_simulated=MOST_WHOLE).ranks) == 1


def test_a_simulated_step_is_a_timeline_that_perfetto_takes():
    """Catches: spans that overlap in a row, have no name, or miss the codec's work."""
    made = profile(
        num_ranks=2,
        backward_s=0.1,
        forward_s=0.05,
        codecs=[codec("none", 1.0), codec("onebit", 1 / 32, element_s=1e-9)],
    )
    simulator = Simulator(made, 2)
    step = simulator.run(uniform(made, "onebit", "ps"), record=True)
    trace = chrome_trace(traces(step))
    assert check_trace(trace) == []
    found = summary(trace)
    assert [one.rank for one in found] == [0, 1]
    assert found[0].verb_s["forward"] == pytest.approx(0.05)
    assert found[0].verb_s["encode"] > 0
    ends = [e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert max(ends) * 1e-6 == pytest.approx(step.step_s, rel=1e-3)
