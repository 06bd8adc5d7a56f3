"""Engines as threads: what every rank holds after a synchronisation, for every codec and strategy.

Gradients of fewer than 2**17 elements are one chunk; larger ones are cut.
"""

import _thread
import dataclasses
import itertools
import queue
import sys
import threading
import time

import pytest
import torch
from torch.distributed import HashStore

import hipress
from hipress.casync.engine.engine import Engine, Options
from hipress.casync.engine.exchange import Exchange
from hipress.casync.engine.executors import Executor
from hipress.casync.engine.loopback import Hub, Loopback
from hipress.casync.engine.memory import clip_norm
from hipress.casync.graphs import partitions
from hipress.casync.graphs.graph import Kind
from hipress.casync.graphs.strategies import STRATEGIES
from hipress.casync.ranks.agreement import Agreement
from hipress.errors import FrameError, PeerError, UsageError
from tests.casync.harness import Reference, end_quickly, gradient, mean_of, outcomes, run
from tests.grid import crossed, thinned

FAMILIES = (
    "none",
    "fp16",
    "bf16",
    "int8",
    "int4",
    "onebit",
    "onebit(block=64, means=2)",
    "onebit(ef=false)",
    "tbq(tau=0.5)",
    "minmax(bits=2)",
    "terngrad",
    "ef(terngrad)",
    "dithering",
    "graddrop",
    "topk(ratio=0.05)",
    "blocktopk(k=9, block=64)",
    "randomk(ratio=0.05)",
    "dgc(ratio=0.05)",
    "momentum(ef(onebit), mu=0.9, nesterov=true)",
)
LIKE_OTHERS = ("int4", "ef(terngrad)", "graddrop")
"""What `make test` leaves out: they are made of what `int8`, `ef`, `terngrad` and `topk` are."""
SOME = ("onebit", "topk(ratio=0.05)", "terngrad", "randomk(ratio=0.05)", "int8", "none")
"""One of each kind: those that `make test` tries where the codec matters less."""
BLOCKWISE = ("none", "fp16", "int8", "int4", "onebit", "onebit(block=64, means=2)", "tbq(tau=0.5)")
"""No random numbers, and no block crosses a multiple of GRAIN."""
FIXED = (*BLOCKWISE, "topk(ratio=0.1, exact=true)")
"""No random numbers."""
SMALL = (7, 1, 17, 1000)
SIZES = ((1,), (4097,), (70_001,), SMALL)
LARGE = 200_003
"""Three chunks for three ranks."""
HOSTS = ("a", "a", "b", "b")
"""Two by two, so that `hierarchical` has something to do."""


def sync_all(codec, strategy, *, named=True, steps=2, sizes=SIZES):
    """Work that synchronises every list of sizes some times; gives all that came out."""

    def work(engine, rank):
        results = []
        for step in range(steps):
            for k, numels in enumerate(sizes):
                values = [gradient(n, rank, step) for n in numels]
                name = f"{k}" if named else None
                engine.allreduce(values, codec=codec, strategy=strategy, name=name).wait()
                results += values
        return results

    return work


def assert_same_bits(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert x.contiguous().view(torch.uint8).equal(y.contiguous().view(torch.uint8))


each_family = pytest.mark.parametrize(
    ("codec", "strategy"),
    thinned(crossed(FAMILIES, [*STRATEGIES]), lambda cell: cell[0] not in LIKE_OTHERS),
)


# --- promise 1: replicas agree bit for bit --------------------------------------------------------


@each_family
def test_replicas_agree_bit_for_bit(codec, strategy):
    for num_ranks in (1, 2, 3, 4):
        found = run(num_ranks, sync_all(codec, strategy), hosts=HOSTS)
        for other in found[1:]:
            assert_same_bits(found[0], other)
        assert all(value.isfinite().all() for value in found[0])
        # Something came of it, and not what the rank put in.
        assert any(value.count_nonzero() for value in found[0])
        if num_ranks > 1:
            assert not found[0][2].equal(gradient(70_001, 0))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("codec", thinned(FAMILIES, keep=SOME[:2]))
def test_a_rerun_with_or_without_tags_gives_the_same_bits(codec, strategy):
    work = sync_all(codec, strategy, sizes=((LARGE, 5, 70_001, 9),))
    first, again, ordered = (
        run(3, work, hosts=HOSTS, ordered=ordered) for ordered in (False, False, True)
    )
    for found in (*first[1:], *again, *ordered):
        assert_same_bits(first[0], found)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("codec", "num_ranks"), crossed(FIXED, [4, 3, 2, 1]))
def test_a_sync_is_what_the_slow_reference_computes(codec, strategy, num_ranks):
    hosts = [0, 0, 1, 1][:num_ranks]
    sizes, steps = (1, 7, 4097), 3
    references = [Reference(codec, strategy, hosts, numel) for numel in sizes]
    expected = [
        reference.step([gradient(numel, rank, step) for rank in range(num_ranks)])
        for step in range(steps)
        for numel, reference in zip(sizes, references, strict=True)
    ]
    work = sync_all(codec, strategy, steps=steps, sizes=[(numel,) for numel in sizes])
    found = run(num_ranks, work, hosts=HOSTS)[0]
    for wanted, got in zip(expected, found, strict=True):
        if strategy in ("ps", "allreduce") and codec != "none":
            assert_same_bits([wanted], [got])
        else:
            # torch adds a plain gradient with a fused multiply-add. A code on the edge may tip
            # over by that, so a few elements may differ by one level.
            close = torch.isclose(wanted, got, rtol=1e-5, atol=1e-5)
            assert close.all() if wanted.numel() < 10 else close.float().mean() > 0.998


# --- promise 2: exact when asked ------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("num_ranks", "ordered"), crossed([1, 2, 3, 4, 7], [False, True]))
def test_none_is_the_exact_mean(strategy, num_ranks, ordered):
    sizes = (*SIZES, (LARGE,))
    hosts = [str(rank // 2) for rank in range(num_ranks)]
    work = sync_all("none", strategy, sizes=sizes, steps=1)
    found = run(num_ranks, work, hosts=hosts, ordered=ordered)
    flat = [numel for numels in sizes for numel in numels]
    for numel, got in zip(flat, found[-1], strict=True):
        exact = mean_of([gradient(numel, rank) for rank in range(num_ranks)])
        torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("codec", ["none", "onebit", "int8"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_sum_is_n_times_the_mean(strategy, codec, num_ranks):
    def work(engine, rank):
        mean, total = [gradient(5000, rank), gradient(9, rank)], [gradient(5000, rank)]
        engine.allreduce(mean, codec=codec, strategy=strategy).wait()
        engine.allreduce(total, codec=codec, strategy=strategy, total=True).wait()
        return mean[0], total[0]

    for mean, total in run(num_ranks, work, hosts=HOSTS):
        torch.testing.assert_close(total, num_ranks * mean, rtol=1e-6, atol=1e-6)


# --- promise 3: nothing is lost -------------------------------------------------------------------


def residual_of(engine, name, kind, numel):
    """The residual of one kind of frame on this rank, zero where others hold it."""
    whole = torch.zeros(numel, dtype=torch.float64)
    for key, state in engine.states.partitions_of(name).items():
        if key.kind is kind and "residual" in state:
            whole[key.start : key.stop] += state["residual"].double()
    return whole


@pytest.mark.parametrize(
    ("codec", "num_ranks", "numel"),
    crossed(
        ["onebit", "topk(ratio=0.05)", "int8", "tbq(tau=0.5)", "dgc(ratio=0.05, momentum=0)"],
        [4, 3, 2, 1],
        [LARGE, 4097],
    ),
)
def test_what_arrived_and_what_waits_is_what_was_given(codec, num_ranks, numel):
    steps = 5

    def work(engine, rank):
        arrived = torch.zeros(numel, dtype=torch.float64)
        for step in range(steps):
            value = gradient(numel, rank, step)
            engine.allreduce([value], codec=codec, strategy="ps", name="w").wait()
            arrived += value.double()
        kinds = (Kind.FRAME, Kind.BACK)
        return arrived, *(residual_of(engine, "w", kind, numel) for kind in kinds)

    found = run(num_ranks, work)
    given = sum(
        mean_of([gradient(numel, rank, step) for rank in range(num_ranks)]) for step in range(steps)
    )
    waiting_at_workers = sum(worker for _, worker, _ in found) / num_ranks
    waiting_at_aggregators = sum(back for *_, back in found)
    assert waiting_at_workers.abs().max() > 1e-3  # there is something to lose
    arrived = found[0][0] + waiting_at_workers + waiting_at_aggregators
    torch.testing.assert_close(arrived, given, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("strategy", ["ring", "hierarchical"])
@pytest.mark.parametrize("codec", ["onebit", "int8", "topk(ratio=0.05)"])
def test_the_mean_of_many_steps_arrives(strategy, codec):
    # A residual is bounded, so what is lost over many steps is far less than what was given.
    steps, numel = 200, 2000
    slope = torch.linspace(-1, 1, numel)

    def work(engine, rank):
        arrived = torch.zeros(numel)
        for step in range(steps):
            value = slope + 0.5 * gradient(numel, rank, step)
            engine.allreduce([value], codec=codec, strategy=strategy, name="w").wait()
            arrived += value
        return arrived / steps

    mean = run(3, work, hosts=HOSTS)[0]
    noise = sum(
        0.5 * mean_of([gradient(numel, rank, step) for rank in range(3)]) for step in range(steps)
    )
    expected = slope + noise / steps
    assert (mean - expected).norm() < 0.25 * expected.norm()


# --- promise 4: bad numbers stay visible ----------------------------------------------------------


@each_family
def test_a_bad_number_reaches_every_rank_and_no_residual(codec, strategy):
    bad_rank, place = 1, 150_000
    layout = partitions.cut([LARGE], 3)
    bad = next(part for part in layout.partitions if part.start <= place < part.stop)

    def work(engine, rank):
        results = []
        for step, number in enumerate((1.0, torch.nan, torch.inf, 1.0)):
            value = gradient(LARGE, rank, step)
            if rank == bad_rank:
                value[place] = number
            engine.allreduce([value], codec=codec, strategy=strategy, name="w").wait()
            results.append(value)
        memory = [held for _, state in engine.states for held in state.values()]
        return results, all(held.isfinite().all() for held in memory)

    for results, clean in run(3, work, hosts=HOSTS):
        first, nan, inf, after = results
        assert first.isfinite().all() and after.isfinite().all()
        for value in (nan, inf):
            inside = value[bad.start : bad.stop]
            assert not inside.isfinite().all()
            outside = torch.cat([value[: bad.start], value[bad.stop :]])
            assert outside.isfinite().all()
            assert value[place].isnan() or codec == "none" and value[place].isinf()
        assert clean


@pytest.mark.parametrize("codec", thinned(FAMILIES, keep=SOME))
def test_a_bad_number_among_small_gradients_reaches_every_rank(codec):
    def work(engine, rank):
        values = [gradient(n, rank) for n in SMALL]
        if rank == 0:
            values[2][5] = torch.nan
        engine.allreduce(values, codec=codec, strategy="ps", name="b").wait()
        again = [gradient(n, rank, 1) for n in SMALL]
        engine.allreduce(again, codec=codec, strategy="ps", name="b").wait()
        return values, again

    for values, again in run(2, work):
        assert values[2][5].isnan()
        assert all(value.isfinite().all() for value in again)


# --- the same bits whatever is switched -----------------------------------------------------------


@pytest.mark.parametrize("codec", FIXED)
@pytest.mark.parametrize("strategy", ["ps", "allreduce"])
def test_without_bulk_the_bits_are_the_same(codec, strategy):
    # In a ring another route is another order of merging.
    work = sync_all(codec, strategy, sizes=((70, 4097, 1, 5000),))
    together = run(3, work)
    for found in run(3, work, options=Options(bulk=False)):
        assert_same_bits(together[0], found)


@pytest.mark.parametrize("codec", BLOCKWISE)
def test_without_pipelining_the_bits_are_the_same(codec):
    work = sync_all(codec, "ps", sizes=((LARGE,), (1_000_003, 5)))
    on = run(3, work, options=Options(chunk_numel=70_000))
    for found in run(3, work, options=Options(pipelined=False)):
        assert_same_bits(on[0], found)


# --- tensors of every kind ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "dtype", "codec"),
    crossed([*STRATEGIES], [torch.bfloat16, torch.float16], ["none", "onebit"])
    + thinned(itertools.product(STRATEGIES, [torch.bfloat16, torch.float16], ["terngrad"]), ()),
)
def test_sixteen_bits(strategy, dtype, codec):
    sizes = (70_001, 1000, 9, LARGE)

    def work(engine, rank):
        values = [gradient(n, rank).to(dtype) for n in sizes]
        engine.allreduce(values, codec=codec, strategy=strategy, name="h").wait()
        return values

    found = run(3, work, hosts=HOSTS)
    for other in found[1:]:
        assert_same_bits(found[0], other)
    assert all(value.dtype is dtype for value in found[0])
    if codec == "none":
        for numel, got in zip(sizes, found[0], strict=True):
            exact = mean_of([gradient(numel, rank).to(dtype) for rank in range(3)])
            eps = 3 * torch.finfo(dtype).eps
            torch.testing.assert_close(got.double(), exact, rtol=eps, atol=eps)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_elements_that_lie_apart_are_written_in_place(strategy):
    def work(engine, rank):
        base = torch.full((40, 30), -7.0)
        turned, every = base[:20].t(), base[20:, ::3]
        turned.copy_(gradient(600, rank).view(30, 20))
        every.copy_(gradient(200, rank).view(20, 10))
        engine.allreduce([turned, every], codec="none", strategy=strategy).wait()
        return turned.clone(), every.clone(), base[20:, 1::3].clone()

    for turned, every, between in run(2, work):
        for got, numel in ((turned, 600), (every, 200)):
            exact = mean_of([gradient(numel, rank) for rank in range(2)]).view(got.shape)
            torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-6)
        assert (between == -7).all()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("codec", ["none", "onebit"])
def test_empty_tensors(strategy, codec):
    def work(engine, rank):
        nothing, values = [torch.empty(0)], [torch.empty(0, 3), gradient(10, rank), torch.empty(0)]
        for _ in range(2):
            engine.allreduce(nothing, codec=codec, strategy=strategy, name="n").wait()
            engine.allreduce(values, codec=codec, strategy=strategy, name="v").wait()
        return values

    found = run(2, work)
    assert_same_bits(found[0], found[1])
    assert [value.shape for value in found[0]] == [(0, 3), (10,), (0,)]


def test_a_leaf_that_requires_grad():
    def work(engine, rank):
        leaf = gradient(100, rank).requires_grad_()
        engine.allreduce([leaf], codec="none").wait()
        return leaf

    exact = mean_of([gradient(100, rank) for rank in range(2)])
    for leaf in run(2, work):
        assert leaf.requires_grad and leaf.is_leaf and leaf.grad_fn is None
        torch.testing.assert_close(leaf.detach().double(), exact, rtol=1e-6, atol=1e-6)


def test_the_tensors_of_each_step_are_used_though_others_are_alike():
    # A job remembers where its tensors were; new ones must not get the old ones' results.
    def work(engine, rank):
        first, second = gradient(500, rank, 0), gradient(500, rank, 1)
        for value in (first, second, first):
            engine.allreduce([value], codec="none", name="x").wait()
        return first, second

    for first, second in run(2, work):
        exact = [mean_of([gradient(500, rank, step) for rank in range(2)]) for step in range(2)]
        torch.testing.assert_close(first.double(), exact[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(second.double(), exact[1], rtol=1e-6, atol=1e-6)


# --- names, futures, state ------------------------------------------------------------------------


def test_a_future_gives_the_tensor():
    def work(engine, rank):
        value = gradient(LARGE, rank)
        future = engine.allreduce([value], codec="onebit", name="f").future(value)
        return future.wait() is value and future.done()

    assert run(2, work) == [True, True]


def test_several_are_under_way_at_once():
    count = 20

    def together(engine, rank):
        values = [gradient(70_001 + k, rank) for k in range(count)]
        handles = [
            engine.allreduce([value], codec="onebit", name=f"w{k}")
            for k, value in enumerate(values)
        ]
        for handle in reversed(handles):
            handle.wait()
        assert all(handle.done() for handle in handles)
        return values

    def one_by_one(engine, rank):
        values = [gradient(70_001 + k, rank) for k in range(count)]
        for k, value in enumerate(values):
            engine.allreduce([value], codec="onebit", name=f"w{k}").wait()
        return values

    expected = run(3, one_by_one)[0]
    for found in run(3, together):
        assert_same_bits(expected, found)


class Slow(Loopback):
    """The first message of rank 1 is late, so that those of the next job overtake it."""

    was_sent = False

    def send(self, data, to, tag):
        if self.rank == 1 and not self.was_sent:
            self.was_sent = True
            threading.Timer(0.3, super().send, (data.clone(), to, tag)).start()
            return super().send(data[:0], to, -1)
        return super().send(data, to, tag)


def test_one_name_twice_under_way_is_one_after_the_other(monkeypatch):
    def work(overlapping):
        def go(engine, rank):
            values = [gradient(LARGE, rank, step) for step in range(6)]
            handles = []
            for value in values:
                handles.append(engine.allreduce([value], codec="onebit", name="same"))
                # The call itself waits for the one before, whose state it goes on with.
                assert all(handle.done() for handle in handles[:-1])
                if not overlapping:
                    handles[-1].wait()
            for handle in handles:
                handle.wait()
            return values

        return go

    expected = run(2, work(False))[0]
    monkeypatch.setattr("tests.casync.harness.Loopback", Slow)
    for found in run(2, work(True)):
        assert_same_bits(expected, found)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "codec", ["onebit", "int8", "tbq(tau=0.5)", "momentum(ef(onebit))", "topk(exact=true)"]
)
def test_without_a_name_nothing_is_carried_on(codec, strategy):
    def work(engine, rank):
        results = [[gradient(5000, rank), gradient(33, rank)] for _ in range(3)]
        for values in results:
            engine.allreduce(values, codec=codec, strategy=strategy).wait()
        return results

    first, *others = run(3, work, hosts=HOSTS)[0]
    for other in others:
        assert_same_bits(first, other)


@pytest.mark.parametrize("name", ["w", None])
def test_steady_steps_agree_bind_and_allocate_nothing(name, monkeypatch):
    """Catches: ranks that wait for each other in every step, buffers that are made anew."""
    made = []
    for owner, what in ((Agreement, "agree"), (Exchange, "_bind"), (Exchange, "__init__")):
        plain = getattr(owner, what)

        def noted(self, *args, plain=plain, what=what, **options):
            made.append(what)
            return plain(self, *args, **options)

        monkeypatch.setattr(owner, what, noted)

    def work(engine, rank):
        seen = []
        for step in range(4):
            value = gradient(LARGE, rank, step)
            engine.allreduce([value], codec="onebit", name=name).wait()
            engine.wait_idle()
            seen.append((engine.buffer_bytes, engine.states.num_bytes))
        return seen

    for seen in run(2, work):
        assert seen[1:] == seen[:1] * 3
    # Twice for each of two ranks: the start of the engine, and the first exchange.
    assert sorted(made) == ["__init__"] * 2 + ["_bind"] * 2 + ["agree"] * 4


def test_with_a_name_error_feedback_is_carried_on():
    def work(engine, rank):
        values = [gradient(5000, rank) for _ in range(2)]
        for value in values:
            engine.allreduce([value], codec="onebit", name="w").wait()
        return values

    first, second = run(2, work)[0]
    assert not first.equal(second)


def test_names_have_states_of_their_own():
    def work(engine, rank):
        values = [gradient(5000, rank) for _ in range(2)]
        for k, value in enumerate(values):
            engine.allreduce([value], codec="onebit", name=f"{k}").wait()
        return values

    first, second = run(2, work)[0]
    assert_same_bits([first], [second])


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"values": (torch.ones(9),)}, "elements of each tensor"),
        ({"codec": "int8"}, "codec"),
        ({"strategy": "ring"}, "strategy"),
        ({"total": True}, "operation"),
        ({"values": (torch.ones(8, dtype=torch.float16),)}, "dtype"),
    ],
)
def test_a_name_is_refused_for_something_else(changed, what):
    def work(engine, rank):
        usual = {"values": (torch.ones(8),), "codec": "onebit", "strategy": "ps", "name": "w"}
        engine.allreduce(**usual).wait()
        with pytest.raises(UsageError, match=f"name 'w' was used before with another .*{what}"):
            engine.allreduce(**usual | changed)
        engine.allreduce(**usual).wait()  # and all goes on
        return True

    assert run(2, work) == [True, True]


@pytest.mark.parametrize(
    ("values", "options", "what"),
    [
        ([], {}, "no tensor"),
        ([torch.ones(2), torch.ones(2, dtype=torch.float16)], {}, "must have one dtype"),
        ([torch.ones(2)], {"strategy": "rong"}, "did you mean 'ring'"),
        ([torch.ones(2)], {"codec": "onebitt"}, "onebit"),
        ([torch.ones(2, dtype=torch.int64)], {}, "int64"),
        ([torch.ones(2, device="meta")], {}, "meta"),
    ],
)
def test_what_can_not_be_synchronised_is_refused_at_once(values, options, what):
    def work(engine, rank):
        with pytest.raises(UsageError, match=what):
            engine.allreduce(values, **options)
        value = torch.full((3,), float(rank))
        engine.allreduce([value]).wait()
        return value.tolist()

    assert run(2, work) == [[0.5] * 3] * 2


def test_a_plain_allreduce_takes_any_dtype():
    def work(engine, rank):
        value = torch.tensor([1.5, 2.5], dtype=torch.float64) + rank
        engine.allreduce([value], codec="none", strategy="allreduce").wait()
        return value.tolist()

    assert run(2, work) == [[2.0, 3.0]] * 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_phases_change_in_step(strategy):
    numel = 100_000
    codec = hipress.codec("dgc(ratio=0.01, warmup=4)")

    def work(engine, rank):
        sent, results = [0], []
        for step in range(7):
            value = gradient(numel, rank, step)
            engine.allreduce([value], codec=codec, strategy=strategy, name="w").wait()
            results.append(value)
            sent.append(engine.stats.sent_bytes)
        return [b - a for a, b in zip(sent, sent[1:], strict=False)], results

    found = run(2, work, hosts=("a", "b"))
    for sizes, results in found:
        assert_same_bits(found[0][1], results)
        assert sorted(sizes, reverse=True) == sizes
        assert sizes[0] > 4 * sizes[-1] > 0
        assert len(set(sizes)) >= 3
        assert sizes[4] == sizes[5] == sizes[6]  # four steps of warming up
    if strategy == "ps":
        for step, sizes in enumerate(zip(*(sizes for sizes, _ in found), strict=True)):
            phase = codec.phase(step)
            assert sum(sizes) == phase.wire_bytes(numel) + phase.aggregator(2).wire_bytes(numel)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("named", [False, True])
def test_randomk_picks_the_same_places_on_all_ranks(strategy, named):
    # Were they others, more elements than one rank sends would be there.
    numel, ratio = 5000, 0.1

    def work(engine, rank):
        results = []
        for _ in range(3):
            value = torch.full((numel,), float(rank + 1))
            engine.allreduce(
                [value],
                codec=f"randomk(ratio={ratio}, ef=false)",
                strategy=strategy,
                name="r" if named else None,
            ).wait()
            results.append(value)
        return results

    results = run(3, work, hosts=HOSTS)[0]
    for value in results:
        assert value.count_nonzero() == int(ratio * numel)
        assert len(value[value != 0].unique()) == 1
    placements = {tuple(value.nonzero().flatten().tolist()) for value in results}
    assert len(placements) == 3  # others in every step


def test_ranks_round_with_random_numbers_of_their_own():
    # Errors of ranks cancel only if they are not the same.
    numel, num_ranks = 20_000, 4
    work = sync_all("terngrad(clip=0)", "allreduce", steps=1, sizes=((numel,),))

    def alike(engine, rank):
        value = gradient(numel, 0)
        engine.allreduce([value], codec="terngrad(clip=0)", strategy="allreduce", name="t").wait()
        return value

    value = run(num_ranks, alike)[0]
    one = run(1, work)[0][0]
    exact = gradient(numel, 0)
    assert (value - exact).norm() < 0.6 * (one - exact).norm()


def test_another_seed_gives_other_bits():
    work = sync_all("terngrad", "ps", steps=1, sizes=((5000,),))
    first, other = (run(2, work, seed=seed)[0] for seed in (0, 1))
    assert not first[0].equal(other[0])


# --- what is counted and recorded -----------------------------------------------------------------


class Counting(Hub):
    """A hub that counts what goes through it."""

    def __init__(self, num_ranks):
        super().__init__(num_ranks, 20.0)
        self.sizes = {rank: [] for rank in range(num_ranks)}

    def transport(self):
        hub = self

        class Counted(Loopback):
            def send(self, data, to, tag):
                hub.sizes[self.rank].append(data.numel())
                return super().send(data, to, tag)

        return Counted


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("codec", ["none", "onebit", "dgc(ratio=0.05, warmup=4)"])
def test_bytes_and_messages_are_those_of_the_transport(strategy, codec, monkeypatch):
    hub = Counting(3)
    monkeypatch.setattr("tests.casync.harness.Loopback", hub.transport())

    def work(engine, rank):
        for step in range(3):
            values = [gradient(n, rank, step) for n in (LARGE, 5, 6)]
            engine.allreduce(values, codec=codec, strategy=strategy, name="w").wait()
        return engine.stats

    found = run(3, work, hub=hub, hosts=HOSTS)
    assert sum(s.sent_bytes for s in found) == sum(s.received_bytes for s in found)
    for rank, stats in enumerate(found):
        assert stats.num_syncs == 3
        assert stats.gradient_bytes == 3 * 4 * (LARGE + 11)
        if (codec, strategy) != ("none", "allreduce"):  # there the transport counts
            assert stats.sent_bytes == sum(hub.sizes[rank]) > 0
            assert stats.num_messages == len(hub.sizes[rank])


@pytest.mark.parametrize("strategy", ["ps", "ring"])
def test_bulk_saves_messages(strategy, monkeypatch):
    counts = []
    for bulk in (True, False):
        hub = Counting(2)
        monkeypatch.setattr("tests.casync.harness.Loopback", hub.transport())
        work = sync_all("onebit", strategy, steps=1, sizes=((50,) * 100,))
        run(2, work, hub=hub, options=Options(bulk=bulk))
        counts.append(sum(map(len, hub.sizes.values())))
    assert counts == [2, 200]


@pytest.mark.parametrize("ordered", [False, True])
def test_every_task_is_recorded(ordered):
    def work(engine, rank):
        engine.allreduce([gradient(LARGE, rank)], codec="onebit", name="before").wait()
        events = engine.record()
        engine.allreduce([gradient(LARGE, rank)], codec="onebit", name="w").wait()
        return events

    for events in run(2, work, ordered=ordered):
        assert {event.name for event in events} == {"w"}
        assert all(event.start_ns <= event.end_ns for event in events)
        verbs = [event.verb for event in events]
        assert verbs.count("encode") == len(partitions.cut([LARGE], 2).routes)
        assert ("exchange" in verbs) == ordered
        assert ("send" in verbs and "recv" in verbs) != ordered


# --- damage ---------------------------------------------------------------------------------------


def damaging(which):
    """A transport that spoils a byte of what one rank sends."""

    class Damaging(Loopback):
        def send(self, data, to, tag):
            if self.rank == which:
                data = data.clone()
                data[0] ^= 0xFF
            return super().send(data, to, tag)

    return Damaging


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("strategy", ["ps", "ring", "allreduce"])
def test_a_damaged_frame_is_refused_and_all_ranks_hear_of_it(strategy, ordered, monkeypatch):
    monkeypatch.setattr("tests.casync.harness.Loopback", damaging(2))
    end_quickly(monkeypatch)
    # Whoever needs nothing from the damaged frame hears of it in its next step.
    work = sync_all("onebit", strategy, steps=3, sizes=((1000,),))
    began = time.monotonic()
    found = outcomes(3, work, timeout_s=40.0, ordered=ordered)
    assert time.monotonic() - began < 30  # long before the timeout: with the next heartbeat
    refused = [rank for rank, one in enumerate(found) if isinstance(one, FrameError)]
    assert refused
    for rank, one in enumerate(found):
        if rank not in refused:
            assert isinstance(one, PeerError)
            assert one.ranks[0] in refused
            assert f"rank {one.ranks[0]} failed: " in str(one)


def test_after_a_failure_every_call_fails_at_once(monkeypatch):
    monkeypatch.setattr("tests.casync.harness.Loopback", damaging(1))
    end_quickly(monkeypatch)

    def work(engine, rank):
        errors, times = [], []
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises((FrameError, PeerError)) as caught:
                engine.allreduce([torch.ones(1000)], codec="onebit", name="w").wait()
            errors.append(str(caught.value))
            times.append(time.monotonic() - began)
        return errors, times

    for (first, *later), times in run(2, work, timeout_s=40.0):
        assert max(times) < 30
        for error in later:
            assert error.startswith("the exchange is down since an earlier error (")
            assert first.removesuffix(".") in error


def test_a_job_is_not_done_before_what_it_sent_has_left(monkeypatch):
    # A caller that is slow to return from `submit`, and sends that take their time.
    class Late:
        def wait(self):
            time.sleep(0.05)

    class Slow(Loopback):
        def send(self, data, to, tag):
            super().send(data, to, tag)
            return Late()

    dispatch = Executor._dispatch

    def slow_dispatch(self, job, place):
        dispatch(self, job, place)
        if sys._getframe(1).f_code.co_name == "submit":
            time.sleep(0.02)

    monkeypatch.setattr("tests.casync.harness.Loopback", Slow)
    monkeypatch.setattr(Executor, "_dispatch", slow_dispatch)

    def work(engine, rank):
        results = []
        for step in range(4):
            value = torch.full((8,), float(rank + 10 * step))
            engine.allreduce([value], codec="none", name="w").wait()
            results.append(value[0].item())
        return results

    assert run(2, work) == [[10.0 * step + 0.5 for step in range(4)]] * 2


def test_elements_that_lie_apart_in_one_dimension():
    def work(engine, rank):
        whole = torch.full((20,), float(rank))
        for strategy in STRATEGIES:
            engine.allreduce([whole[::2]], codec="none", strategy=strategy, name=strategy).wait()
        return whole

    for rank, whole in enumerate(run(2, work, hosts=("a", "a"))):
        assert whole[::2].eq(0.5).all() and whole[1::2].eq(rank).all()


def test_what_cannot_be_written_is_refused_and_does_no_harm():
    def work(engine, rank):
        with pytest.raises(UsageError, match="expanded"):
            engine.allreduce([torch.ones(4, 1).expand(4, 5)], codec="none")
        with pytest.raises(UsageError, match="need not be a whole number"):
            engine.allreduce([torch.ones(3, dtype=torch.int64)], strategy="allreduce")
        value = torch.full((3,), float(rank))
        engine.allreduce([value]).wait()
        return value[0].item()

    assert run(2, work) == [0.5, 0.5]


def test_a_mean_of_16_bits_does_not_overflow():
    def work(engine, rank):
        value = torch.full((100,), 40000.0, dtype=torch.float16)
        engine.allreduce([value], strategy="allreduce").wait()
        return value

    assert all(value.eq(40000.0).all() for value in run(2, work))


def test_what_hangs_on_a_future_may_exchange_too():
    def work(engine, rank):
        first, second = torch.ones(3), torch.full((3,), float(rank))
        future = engine.allreduce([first], name="a").future(first)
        nested = future.then(lambda _: engine.allreduce([second], name="b").wait())
        nested.wait()
        return second[0].item()

    assert run(2, work) == [0.5, 0.5]


def test_a_future_may_be_awaited_in_the_callback_of_another():
    """Catches: hooks such as torch's PowerSGD that hang, since one thread runs all callbacks."""

    def work(engine, rank):
        names = [f"w{k}" for k in range(4)]
        for name in (*names, *(f"{name} again" for name in names)):
            engine.allreduce([torch.ones(3)], name=name).wait()
        values = [torch.full((3,), float(rank + k)) for k in range(4)]

        def again(name, value):
            return lambda _: engine.allreduce([value], name=f"{name} again").future(value).wait()

        futures = [
            engine.allreduce([value], name=name).future(value).then(again(name, value))
            for name, value in zip(names, values, strict=True)
        ]
        deadline = time.monotonic() + 40
        while not all(future.done() for future in futures) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert all(future.done() for future in futures)
        return [value[0].item() for value in values]

    assert run(2, work) == [[0.5, 1.5, 2.5, 3.5]] * 2


def test_ranks_that_swap_two_names_do_not_mix_them():
    def work(engine, rank):
        a, b = torch.ones(8), torch.full((8,), 100.0)
        for name, value in (("a", a), ("b", b)):
            engine.allreduce([value], name=name).wait()
        calls = [("a", a), ("b", b)]
        with pytest.raises(PeerError):
            for name, value in calls if rank == 0 else reversed(calls):
                engine.allreduce([value], name=name).wait()

    run(2, work, timeout_s=4.0)


def test_a_closed_engine_says_so():
    def work(engine, rank):
        engine.allreduce([torch.ones(3)]).wait()
        engine.close()
        with pytest.raises(UsageError, match="closed"):
            engine.allreduce([torch.ones(3)])

    run(1, work)


def test_closing_leaves_no_thread_behind():
    before = {thread.ident for thread in threading.enumerate()}
    run(3, sync_all("onebit", "ps", steps=1))
    left = [t for t in threading.enumerate() if t.ident not in before and t.is_alive()]
    assert not [thread.name for thread in left if thread.name.startswith("hipress")]


# --- clipping -------------------------------------------------------------------------------------

CLIP = "dgc(ratio=1.0, momentum=0.0, clip=2.0)"
"""Sends all elements but the very smallest, so that the mean shows what was clipped."""


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("chunk_numel", [2**16, 2**21])
def test_a_gradient_is_clipped_as_a_whole(num_ranks, chunk_numel):
    """Catches: partitions that are clipped one by one, so that the norm grows with their number."""

    def work(engine, rank):
        value, small = gradient(LARGE, rank), 0.001 * gradient(100, rank)
        engine.allreduce([value, small], codec=CLIP, name="g").wait()
        return value, small

    options = Options(chunk_numel=chunk_numel)
    wanted = [gradient(LARGE, rank) for rank in range(num_ranks)]
    wanted = mean_of([g * (2.0 / g.norm()) for g in wanted]).float()
    small = mean_of([0.001 * gradient(100, rank) for rank in range(num_ranks)]).float()
    for found in run(num_ranks, work, options=options):
        torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[1], small, rtol=1e-4, atol=1e-5)


def test_a_gradient_that_is_clipped_keeps_its_nan():
    """Catches: a NaN that clipping hides from the other ranks, or an infinity that becomes zero."""

    def work(engine, rank):
        found = []
        for bad in (torch.nan, torch.inf):
            value = gradient(LARGE, rank)
            value[7] = bad if rank == 1 else 0.0
            engine.allreduce([value], codec=CLIP, name="g").wait()
            found.append(bool(value[7].isnan()))
        return found

    assert run(2, work) == [[True, True]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4, 1e30])
def test_norms_are_clipped_in_every_dtype(dtype, size):
    """Catches: squares that overflow, and a factor that is rounded to zero in 16 bits."""
    size = min(size, torch.finfo(dtype).max / 8)
    value = (size * gradient(4097, 0)).to(dtype)
    wanted = value.double() * min(1.0, 0.5 / float(value.double().norm()))
    clip_norm(value, 0.5)
    assert abs(float(value.double().norm() / wanted.norm()) - 1) < 1e-3
    torch.testing.assert_close(value.double(), wanted, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("ordered", [False, True])
def test_busy_times_end_with_a_failure(ordered, monkeypatch):
    """Catches: time that goes on being counted after a task and its exchange have failed."""
    end_quickly(monkeypatch)

    def work(engine, rank):
        engine.allreduce([torch.ones(64)], codec="int8", name="x").wait()
        (prepared,) = engine._recipes.values()
        exchange = prepared.exchange
        for codec, bound in exchange._bounds.items():
            broken = tuple(one and (lambda: 1 / 0) for one in bound.work)
            exchange._bounds[codec] = dataclasses.replace(bound, work=broken)
        with pytest.raises(ZeroDivisionError):
            engine.allreduce([torch.ones(64)], codec="int8", name="x").wait()
        times = engine.executor.coding, engine.executor.exchanging
        time.sleep(0.1)  # the thread that failed leaves its task
        return [[busy.read_ns() for busy in times] for _ in range(2)]

    ((before, after),) = run(1, work, ordered=ordered)
    assert before == after


def test_a_thread_of_gloo_does_not_join_itself():
    """Catches: an abort where such a thread frees the last reference to an engine's owner."""
    engine = Engine(Loopback(Hub(1), 0), HashStore())
    closed = queue.SimpleQueue()
    engine.transport.close = lambda: closed.put(threading.current_thread().name)
    _thread.start_new_thread(engine.close, ())  # Python did not make it
    assert closed.get(timeout=20) == "hipress-close"
