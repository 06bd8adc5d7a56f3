"""The simulator against times worked out by hand, against itself, and against the engine."""

import pytest
import torch

import hipress
from hipress.casync.engine.recipe import Options, Recipe, chunk_numel, codes_local
from hipress.casync.graphs.partitions import Partitioner
from hipress.casync.graphs.shape import Shape
from hipress.errors import UsageError
from hipress.plan import Decision
from hipress.profile import Profile
from hipress.secopa.hardware import Clock, Link, Processor
from hipress.secopa.simulate import Simulator, ddp_buckets
from tests.secopa.made_up import codec, profile


def everything(made: Profile, name: str, strategy: str) -> dict[str, Decision]:
    assert made.model is not None
    return {g.name: Decision(codec=name, strategy=strategy) for g in made.model.gradients}


# --- hardware -------------------------------------------------------------------------------------


def test_a_processor_shares_its_cores_evenly():
    clock = Clock()
    processor = Processor(clock, 1.0)
    ends = []
    processor.work(1.0, lambda: ends.append(clock.now_s))
    processor.work(2.0, lambda: ends.append(clock.now_s))
    clock.run()
    assert ends == pytest.approx([2.0, 3.0])


def test_work_on_several_threads_needs_as_many_cores():
    clock = Clock()
    processor = Processor(clock, 2.0)
    ends = []
    processor.work(4.0, lambda: ends.append(clock.now_s), 2.0)
    processor.work(1.0, lambda: ends.append(clock.now_s))
    clock.run()
    # Three threads on two cores: each runs at 2/3 until the short one is done.
    assert ends == pytest.approx([1.5, 2.5])


def test_what_the_network_takes_is_not_there_for_work():
    clock = Clock()
    processor = Processor(clock, 1.0)
    link = Link(clock, 100.0, 1000.0, processor, byte_work_s=0.005)
    link.carry(0, 1000.0, lambda share, last: None)
    ends = []
    processor.work(1.0, lambda: ends.append(clock.now_s))
    clock.run()
    assert ends == pytest.approx([2.0])


def test_connections_share_a_link():
    clock = Clock()
    link = Link(clock, 100.0, 10.0, Processor(clock, 1.0))
    ends = {}
    for name in (0, 1):
        link.carry(name, 100.0, lambda share, last, name=name: ends.update({name: clock.now_s}))
    clock.run()
    assert ends == pytest.approx({0: 1.9, 1: 2.0})


# --- steps worked out by hand ---------------------------------------------------------------------


def test_one_rank_only_computes():
    made = profile(num_ranks=1, forward_s=0.1, backward_s=0.2, rest_s=0.3)
    assert Simulator(made).step_s(None) == pytest.approx(0.6)


def test_plain_takes_what_the_wire_takes():
    made = profile(bytes_per_s=1e8)  # four gradients of 4 MiB among four ranks
    wire_s = 2 * 3 / 4 * 16 * 2**20 / 1e8
    assert Simulator(made).step_s(None) == pytest.approx(wire_s, rel=0.01)


@pytest.mark.parametrize("strategy", ["ps", "ring"])
def test_a_codec_takes_its_share_of_the_wire(strategy):
    made = profile(bytes_per_s=1e7)
    plain_s = Simulator(made).step_s(None)
    step_s = Simulator(made).step_s(everything(made, "onebit", strategy))
    # Not less than a thirty-second; the first and the last message cannot overlap with others.
    assert 1 / 32 < step_s / plain_s < 1 / 32 * 1.6


def test_backward_hides_what_it_has_time_for():
    made = profile(backward_s=10.0, rest_s=0.5)
    step = Simulator(made).run(None)
    assert step.step_s == pytest.approx(10.5 + step.exposed_s)
    assert step.exposed_s < 0.6  # the last bucket alone


def test_ranks_on_one_machine_wait_for_each_other():
    apart = profile(backward_s=1.0, bytes_per_s=1e12, cores=2.0, num_local_ranks=1)
    together = profile(backward_s=1.0, bytes_per_s=1e12, cores=2.0, num_local_ranks=4)
    ratio = Simulator(together).step_s(None) / Simulator(apart).step_s(None)
    assert ratio == pytest.approx(2.0, rel=0.01)


def test_codec_work_slows_the_step():
    slow = profile(codecs=[codec("none", 1.0), codec("onebit", 1 / 32, element_s=1e-6)])
    fast = profile(codecs=[codec("none", 1.0), codec("onebit", 1 / 32, element_s=1e-9)])
    times = [Simulator(m).step_s(everything(m, "onebit", "ps")) for m in (slow, fast)]
    assert times[0] > times[1] + 4.0  # at least the encodes of 4 Mi elements


def test_messages_cost_work():
    few = profile(bytes_per_s=1e9)
    many = profile(bytes_per_s=1e9, message_work_s=0.05)
    times = [Simulator(m).step_s(everything(m, "onebit", "ps")) for m in (few, many)]
    assert times[1] > times[0] + 0.2


def test_a_profile_without_a_model_is_refused():
    made = profile().model_copy(update={"model": None})
    with pytest.raises(UsageError, match=r"no model.*hipress profile --model"):
        Simulator(made)


# --- one rank for all -----------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["ps", "ring"])
@pytest.mark.parametrize("num_ranks", [4, 8, 16])
@pytest.mark.parametrize("num_layers", [16, 4])
def test_one_rank_stands_for_all(strategy, num_ranks, num_layers):
    made = profile(
        numels=(2**21,) * num_layers + (50_000,) * 6,
        backward_s=0.1,
        bytes_per_s=1e8,
        latency_s=1e-4,
        message_work_s=1e-4,
        codecs=[codec("none", 1.0), codec("int8", 1 / 4, element_s=1e-9, task_s=1e-5)],
    )
    decisions = everything(made, "int8", strategy)
    alone_s = Simulator(made, num_ranks, most_simulated=1).step_s(decisions)
    all_s = Simulator(made, num_ranks, most_simulated=64).step_s(decisions)
    # Few chunks do not divide among many ranks, so these are less alike.
    assert alone_s == pytest.approx(all_s, rel=0.05 if num_layers == 16 else 0.2)


@pytest.mark.parametrize("strategy", ["ps", "ring", "hierarchical", "allreduce"])
@pytest.mark.parametrize("num_ranks", [2, 3, 7, 9, 33])
def test_every_strategy_ends_with_any_number_of_ranks(strategy, num_ranks):
    made = profile(
        numels=(100_000, 5_000_000, 10), codecs=[codec("none", 1.0), codec("onebit", 0.03)]
    )
    simulator = Simulator(made, num_ranks, ranks_per_host=2 if strategy == "hierarchical" else 1)
    assert simulator.step_s(everything(made, "onebit", strategy)) > 0


def test_more_ranks_than_partitions_still_end():
    made = profile(numels=(5000,))
    assert Simulator(made, 64).step_s(everything(made, "onebit", "ring")) > 0


# --- the same as the engine -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "onebit", "int8", "dgc(ratio=0.001)"])
@pytest.mark.parametrize("strategy", ["ps", "ring"])
def test_it_simulates_the_graph_that_the_engine_runs(name, strategy):
    numels, num_ranks = (3_000_000, 4096, 100, 70_000), 4
    made_by = hipress.codec(name)
    partitioner = Partitioner(num_ranks, bucket_numel=2**21)
    placements = tuple(partitioner.place(n, 2**19) for n in numels)
    recipe = Recipe(
        names=tuple("abcd"),
        numels=numels,
        dtype=torch.float32,
        device=torch.device("cpu"),
        codec=made_by,
        strategy=strategy,
        total=False,
        rank=1,
        hosts=(0, 1, 2, 3),
        ordered=False,
        placements=placements,
    )
    shape = Shape(
        numels=numels,
        hosts=(0, 1, 2, 3),
        strategy=strategy,
        codes_local=codes_local(made_by, num_ranks),
        chunk_numel=chunk_numel(made_by, torch.device("cpu"), Options()),
        placements=placements,
    )
    assert shape.graph(1) == recipe.graph


def test_buckets_are_those_of_ddp():
    numels = [10, 300_000, 5_000_000, 7_000_000, 100, 100]
    made = profile(numels=numels)
    assert made.model is not None
    tensors = [torch.empty(n) for n in numels]
    caps = [2**20, 25 * 2**20]
    assignment, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, caps)
    found = [[int(g.name[1:]) for g in b] for b in ddp_buckets(made.model.gradients, None, 4)]
    assert found == assignment


def test_what_happened_is_noted():
    made = profile(backward_s=0.1)
    step = Simulator(made).run(everything(made, "onebit", "ps"), record=True)
    verbs = {span.verb for span in step.spans}
    assert verbs == {
        "forward",
        "backward",
        "optimizer",
        "encode",
        "send",
        "recv",
        "merge",
        "decode",
    }
    assert all(span.start_s <= span.end_s <= step.step_s + 1e-9 for span in step.spans)
    sent = sum(span.num_bytes or 0 for span in step.spans if span.verb == "send" and span.rank == 0)
    assert sent == pytest.approx(step.sent_bytes)


@pytest.mark.parametrize("strategy", ["ps", "ring"])
def test_one_rank_stands_for_all_of_a_model_with_few_partitions(strategy):
    """Catches: hops between ranks that are not simulated, and so cost nothing."""
    made = profile(
        numels=(2_000_000,),
        bytes_per_s=1e8,
        codecs=[codec("none", 1.0), codec("int8", 1 / 4, element_s=1e-9)],
    )
    decisions = {"g0": Decision(codec="int8", strategy=strategy, partitions=4)}
    alone_s = Simulator(made, 16, most_simulated=1).step_s(decisions)
    all_s = Simulator(made, 16, most_simulated=64).step_s(decisions)
    assert alone_s == pytest.approx(all_s, rel=0.15)


def test_fewer_ranks_have_more_of_their_machine():
    made = profile(num_ranks=4, backward_s=1.0, bytes_per_s=1e12, cores=2.0, num_local_ranks=4)
    assert Simulator(made, 2).step_s(None) == pytest.approx(1.0, rel=0.01)
    assert Simulator(made, 4).step_s(None) == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize("num_ranks", [1, 4, 16])
def test_time_on_a_shared_gpu_is_shared_already(num_ranks):
    """Catches: ranks that share a GPU counted twice, or only up to some number of them."""
    made = profile(num_ranks=4, backward_s=1.0, bytes_per_s=1e12)
    machine = made.machine.model_copy(update={"device": "cuda", "num_device_ranks": 4})
    made = made.model_copy(update={"machine": machine})
    assert Simulator(made, num_ranks).step_s(None) == pytest.approx(1.0, rel=0.01)


def test_bytes_of_an_all_reduce_are_those_it_must_send():
    made = profile()
    slow = made.network.all_reduce.model_copy(update={"slope": 2 * made.network.all_reduce.slope})
    network = made.network.model_copy(update={"all_reduce": slow})
    step = Simulator(made.model_copy(update={"network": network})).run(None)
    assert step.sent_bytes == pytest.approx(2 * 3 / 4 * 16 * 2**20)
