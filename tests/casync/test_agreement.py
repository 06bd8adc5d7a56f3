"""Ranks that were given different things say so, all of them, and name who and what."""

import threading
import time

import pytest
import torch
from torch.distributed import DistNetworkError, HashStore

from hipress.casync.engine import engine
from hipress.casync.engine.engine import Engine, Options
from hipress.casync.engine.loopback import Hub, Loopback
from hipress.casync.ranks import agreement
from hipress.casync.ranks.agreement import Agreement, difference
from hipress.errors import AgreementError, PeerError
from tests.casync.harness import outcomes, run
from tests.grid import full

pytestmark = pytest.mark.alone

# --- the wording ----------------------------------------------------------------------------------


def test_alike_is_no_difference():
    assert difference({0: {"codec": "a", "n": [1, 2]}, 1: {"codec": "a", "n": [1, 2]}}) == (
        None,
        [],
    )
    assert difference({0: {}}) == (None, [])


def test_a_difference_names_values_and_ranks():
    facts = {rank: {"codec": "int8" if rank in (1, 3) else "onebit"} for rank in range(4)}
    assert difference(facts) == (
        "ranks differ in codec ('onebit' on ranks 0, 2, 'int8' on ranks 1, 3): "
        "give all ranks the same.",
        [1, 3],
    )


def test_every_difference_is_named():
    text, ranks = difference({0: {"a": 1, "b": 2, "c": 3}, 1: {"a": 1, "b": 5, "c": 6}})
    assert text == (
        "ranks differ in b (2 on rank 0, 5 on rank 1); and in c (3 on rank 0, 6 on rank 1): "
        "give all ranks the same."
    )
    assert ranks == [1]


def test_of_lists_the_first_place_that_differs_is_named():
    text, _ = difference({0: {"shapes": [5, 6, 7]}, 1: {"shapes": [5, 8, 9]}})
    assert "shapes, at place 1 (6 on rank 0, 8 on rank 1)" in text
    text, _ = difference({0: {"shapes": [5, 6]}, 1: {"shapes": [5, 6, 7]}})
    assert "shapes, in number (2 on rank 0, 3 on rank 1)" in text


def test_a_missing_fact_is_a_difference():
    assert difference({0: {"codec": "onebit"}, 1: {}})[1] == [1]


def test_many_ranks_are_cut_short():
    text, ranks = difference({rank: {"x": rank > 0} for rank in range(20)})
    assert "True on ranks 1, 2, 3, 4, 5, 6, 7, 8 and 11 more" in text
    assert ranks == list(range(1, 20))


# --- the store -----------------------------------------------------------------------------------


def agreed(num_ranks, call, *, timeout_s=5.0, absent=()):
    """What `call(agreement, rank)` gives on each rank but the absent, or the error; and seconds."""
    store = HashStore()
    found = {}

    def go(rank):
        began = time.monotonic()
        try:
            result = call(Agreement(store, rank, num_ranks, timeout_s), rank)
        except Exception as error:
            result = error
        found[rank] = (result, time.monotonic() - began)

    ranks = [rank for rank in range(num_ranks) if rank not in absent]
    threads = [threading.Thread(target=go, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def test_what_each_is_told_comes_to_all():
    found = agreed(4, lambda c, rank: c.agree("tea", {"cups": (1, 2)}, share=f"host{rank % 2}"))
    assert {tuple(result) for result, _ in found.values()} == {("host0", "host1", "host0", "host1")}


def test_occasions_do_not_meet():
    def call(c, rank):
        return [c.agree(f"round {k}", {"k": k}, share=[rank, k]) for k in range(5)]

    for result, _ in agreed(3, call).values():
        assert result == [[[rank, k] for rank in range(3)] for k in range(5)]


def test_a_difference_is_raised_on_every_rank():
    found = agreed(4, lambda c, rank: c.agree("tea", {"sugar": int(rank == 2)}))
    for result, _ in found.values():
        assert isinstance(result, AgreementError)
        assert result.ranks == (2,)
        assert "sugar (0 on ranks 0, 1, 3, 1 on rank 2)" in str(result)


def test_rank_0_stays_until_the_others_know_the_difference(monkeypatch):
    """Catches: a rank 0 that ends, and the store with it, before the others have read why."""
    monkeypatch.setattr(agreement, "READ_S", 20.0)
    read, order = Agreement._verdict, []

    def slowly(self, *args):
        time.sleep(0.5)
        verdict = read(self, *args)
        order.append("rank 1 has read it")
        return verdict

    def call(c, rank):
        try:
            c.agree("tea", {"sugar": rank})
        finally:
            if rank == 0:
                order.append("rank 0 leaves")

    monkeypatch.setattr(Agreement, "_verdict", slowly)
    found = agreed(2, call)
    assert order == ["rank 1 has read it", "rank 0 leaves"]
    assert all(isinstance(result, AgreementError) for result, _ in found.values())


def test_another_call_is_named_before_its_facts():
    found = agreed(2, lambda c, rank: c.agree(f"allreduce of {rank}", {"x": rank, f"y{rank}": 0}))
    for result, _ in found.values():
        assert isinstance(result, AgreementError)
        assert "call ('allreduce of 0' on rank 0, 'allreduce of 1' on rank 1)" in str(result)


@pytest.mark.parametrize(
    "absent", [pytest.param((2,), marks=full), (1, 3), pytest.param((0,), marks=full)]
)
def test_a_rank_that_never_comes_is_named_in_time(absent, monkeypatch):
    if 0 in absent:  # otherwise the others need time to hear of it from rank 0
        monkeypatch.setattr(agreement, "GRACE_S", 1.0)
    found = agreed(4, lambda c, rank: c.agree("tea", {}), timeout_s=2.5, absent=absent)
    assert len(found) == 4 - len(absent)
    for result, seconds in found.values():
        assert isinstance(result, PeerError)
        assert result.ranks == absent
        names = ", ".join(map(str, absent))
        assert f"rank{'s' * (len(absent) > 1)} {names} did not come to tea within 2.5 s" in str(
            result
        )
        assert 1 < seconds < 15


class Gone:
    """A store whose holder has died."""

    def __getattr__(self, name):
        def call(*_):
            raise DistNetworkError("[TCPStore.cpp:106] [c10d] recv, Connection reset by peer\nmore")

        return call


CALLS = {
    "agree": lambda c: c.agree("tea", {}),
    "gather": lambda c: c.gather(b"leaves"),
    "post": lambda c: c.post(70, "milk"),
    "read_post": lambda c: c.read_post(70, "the order"),
    "clock_offset": lambda c: c.clock_offset(),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", CALLS)
def test_a_store_that_is_gone_is_blamed_on_its_holder(call, rank):
    """Catches: torch's bare DistNetworkError in the first step, state_dict or the replica check."""
    with pytest.raises(PeerError) as found:
        CALLS[call](Agreement(Gone(), rank, 2, timeout_s=60))
    assert found.value.ranks == ((0,) if rank else ())
    assert str(found.value).startswith(f"rank {rank} does not reach the store: ")
    assert "is down ([c10d] recv, Connection reset by peer); look" in str(found.value)


def test_a_connection_that_was_lost_is_not_used_again():
    """Catches: a late answer that is taken for that of the next question."""
    store = Gone()
    agreement = Agreement(store, 1, 2, timeout_s=60)
    with pytest.raises(PeerError):
        agreement.agree("tea", {})
    agreement._store = HashStore()
    with pytest.raises(PeerError, match="rank 1 does not reach the store"):
        agreement.post(3, "milk")


def test_a_store_that_ended_after_a_failure_is_not_blamed():
    """Catches: rank 0, which has left because rank 2 failed, named in its place."""

    def check():
        raise PeerError("rank 2 is gone", ranks=(2,))

    with pytest.raises(PeerError) as found:
        Agreement(Gone(), 1, 3, timeout_s=60, check=check).agree("tea", {})
    assert found.value.ranks == (2,)


@pytest.mark.parametrize("left", [0, 2])
def test_a_rank_that_has_left_is_not_waited_for(left):
    """Catches: a wait of half an hour for a rank that has ended with an error of its own."""

    def call(c, rank):
        if rank == left:
            c._store.set(f"beat/{rank}", "bye")
        else:
            c.agree("tea", {})

    found = agreed(4, call, timeout_s=60.0)
    del found[left]
    for result, seconds in found.values():
        assert isinstance(result, PeerError)
        assert result.ranks == (left,)
        assert f"rank {left} did not come to tea and will not" in str(result)
        assert seconds < 20


def test_what_a_rank_wrote_before_it_left_counts():
    """Catches: an error on ranks that are later than one that has ended well."""

    def call(c, rank):
        if rank == 0:
            time.sleep(1.5)
        c.agree("tea", {})
        c._store.set(f"beat/{rank}", "bye")

    assert [result for result, _ in agreed(3, call).values()] == [None] * 3


# --- the engine asks ------------------------------------------------------------------------------


def differing(usual, other):
    """Arguments of `allreduce`: those of rank 1 are others."""

    def work(engine, rank):
        given = {"values": [torch.ones(9)], "codec": "onebit", "name": "w", **usual}
        engine.allreduce(**given | (other if rank == 1 else {})).wait()

    return work


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"codec": "int8"}, "codec ('onebit' on ranks 0, 2, 'int8' on rank 1)"),
        ({"codec": "onebit(block=64)"}, "'onebit(block=64)' on rank 1"),
        ({"strategy": "ring"}, "strategy ('ps' on ranks 0, 2, 'ring' on rank 1)"),
        ({"total": True}, "operation ('mean' on ranks 0, 2, 'sum' on rank 1)"),
        (
            {"values": [torch.ones(10)]},
            "elements of each tensor, at place 0 (9 on ranks 0, 2, 10 on rank 1)",
        ),
        (
            {"values": [torch.ones(9), torch.ones(1)]},
            "number of tensors (1 on ranks 0, 2, 2 on rank 1)",
        ),
        (
            {"values": [torch.ones(9, dtype=torch.float16)]},
            "dtype ('float32' on ranks 0, 2, 'float16' on rank 1)",
        ),
        (
            {"name": "v"},
            "call (\"allreduce of 'w'\" on ranks 0, 2, \"allreduce of 'v'\" on rank 1)",
        ),
        ({"name": None}, "'an allreduce' on rank 1"),
    ],
)
def test_ranks_that_differ_in_a_call(other, text, num_ranks):
    if num_ranks == 2:
        text = text.replace("ranks 0, 2", "rank 0")
    found = outcomes(num_ranks, differing({}, other))
    for one in found:
        assert isinstance(one, AgreementError)
        assert one.ranks == (1,)
        assert text in str(one)


def test_after_a_difference_a_call_that_all_make_works():
    def work(engine, rank):
        with pytest.raises(AgreementError):
            engine.allreduce([torch.ones(3 + rank)]).wait()
        value = torch.full((5,), float(rank))
        engine.allreduce([value]).wait()
        return value.tolist()

    assert run(2, work) == [[0.5] * 5] * 2


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"options": Options(pipelined=False)}, "pipelining (True on ranks 0, 2, False on rank 1)"),
        ({"options": Options(bulk=False)}, "bulk (True on ranks 0, 2, False on rank 1)"),
        (
            {"options": Options(chunk_numel=4096)},
            "elements of a chunk (None on ranks 0, 2, 4096 on rank 1)",
        ),
        ({"seed": 5}, "seed (0 on ranks 0, 2, 5 on rank 1)"),
    ],
)
def test_ranks_that_differ_at_the_start(other, text):
    found = outcomes(3, lambda engine, rank: None, each=lambda r: other if r == 1 else {})
    for one in found:
        assert isinstance(one, AgreementError)
        assert one.ranks == (1,)
        assert text in str(one)


@pytest.mark.parametrize("what", ["version of hipress", "version of torch", "version of frames"])
def test_ranks_of_another_version(what, monkeypatch):
    facts = Engine._facts
    monkeypatch.setattr(
        Engine,
        "_facts",
        lambda self: facts(self) | ({what: "0.0"} if self.transport.rank == 2 else {}),
    )
    for one in outcomes(3, lambda engine, rank: None):
        assert isinstance(one, AgreementError)
        assert one.ranks == (2,)
        assert f"{what} (" in str(one) and "'0.0' on rank 2" in str(one)


def test_versions_are_those_of_the_packages():
    def work(engine, rank):
        return engine._facts()

    facts = run(1, work)[0]
    assert facts["version of torch"] == torch.__version__.split("+")[0]
    assert {"version of hipress", "version of frames", "byte order"} <= set(facts)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_does_not_call_is_named(late, monkeypatch):
    monkeypatch.setattr(agreement, "GRACE_S", 1.0)
    gone = threading.Event()

    def work(engine, rank):
        if rank == late:
            gone.wait(50)
            return None
        try:
            began = time.monotonic()
            with pytest.raises(PeerError) as caught:
                engine.allreduce([torch.ones(3)], name="w").wait()
            return caught.value.ranks, time.monotonic() - began
        finally:
            gone.set()

    found = run(2, work, timeout_s=4.0)[1 - late]
    assert found[0] == (late,)
    assert found[1] < 15


def test_hosts_are_told_by_name():
    found = run(5, lambda engine, rank: engine.hosts, hosts=("b", "a", "b", "c", "a"))
    assert found == [(0, 1, 0, 2, 1)] * 5


class Clock:
    """Stands still between two looks."""

    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def waiting(monkeypatch):
    """A rank that waits in a comparison: its engine, a clock, and how often it has looked."""
    made, clock, looks = Engine(Loopback(Hub(1), 0), HashStore()), Clock(), []
    monkeypatch.setattr(engine, "time", clock)
    monkeypatch.setattr(made, "_if_skipped", "without comparing.")

    def ahead():
        looks.append(clock.now)
        if clock.now == 5.0:
            raise RuntimeError("Socket Timeout")
        return [1]

    monkeypatch.setattr(made._heartbeats, "ahead", ahead)
    yield made, clock, looks
    made.close()


def test_ranks_that_went_on_are_looked_for_every_few_seconds(waiting):
    """Catches: requests of every waiting rank in every second, and a store that does not answer
    once, which ends training."""
    made, clock, looks = waiting
    with pytest.raises(AgreementError, match="rank 1 began the next exchange without comparing"):
        for clock.now in range(20):
            made._check_alive()
    assert looks == [0, 5, 10]
