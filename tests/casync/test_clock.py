"""Clocks of ranks: what is found is right within its own bound, and who is missing is named."""

import doctest
import threading
import time

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from hipress.casync.ranks import agreement
from hipress.casync.ranks.agreement import Agreement
from hipress.errors import PeerError
from tests.grid import full

pytestmark = pytest.mark.alone

SKEWS_NS = [0, 10**15, -(10**12), 12_345]
"""What the clock of each rank is ahead of the true one."""


def on_ranks(num_ranks, work, *, absent=()):
    """What `work(rank)` gives on every rank but the absent, or the error it ends with."""
    found = {}

    def go(rank):
        try:
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    threads = [
        threading.Thread(target=go, args=(rank,), daemon=True)
        for rank in range(num_ranks)
        if rank not in absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return found


def offset(store, rank, num_ranks, *, timeout_s=60.0, **options):
    return Agreement(store, rank, num_ranks, timeout_s).clock_offset(**options)


def skewed(rank):
    return lambda: time.perf_counter_ns() + SKEWS_NS[rank]


def check_offsets(found, most_error_ns):
    assert found[0] == (0, 0)
    for rank in range(1, len(found)):
        offset_ns, error_ns = found[rank]
        true_ns = SKEWS_NS[0] - SKEWS_NS[rank]
        assert abs(offset_ns - true_ns) <= error_ns
        assert 0 < error_ns < most_error_ns


def test_examples_run():
    result = doctest.testmod(agreement)
    assert result.attempted >= 2 and result.failed == 0


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_the_offset_is_right_within_its_bound(num_ranks):
    store = HashStore()
    found = on_ranks(num_ranks, lambda r: offset(store, r, num_ranks, clock=skewed(r)))
    check_offsets(found, 50e6)


def test_through_a_real_store():
    # Port 0: any that is free.
    first = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def work(rank):
        mine = first if rank == 0 else TCPStore("127.0.0.1", first.port, is_master=False)
        store = PrefixStore("engine", mine)
        return [offset(store, rank, 4, clock=skewed(rank)) for _ in range(3)]

    found = on_ranks(4, work)
    for error in found.values():
        assert not isinstance(error, Exception), error
    for call in range(3):
        check_offsets({rank: found[rank][call] for rank in range(4)}, 50e6)
    assert not first.check(["engine/clock/3/end"]) and not first.check(["engine/clock/1/1/0/ask"])
    assert first.add("engine/clock/calls/3", 0) == 3


def test_nothing_is_left_but_the_count_of_calls():
    store = HashStore()
    for _ in range(3):
        on_ranks(3, lambda r: offset(store, r, 3, rounds=2))
        # HashStore has no list of keys.
        assert store.num_keys() == 3
    assert [store.add(f"clock/calls/{rank}", 0) for rank in range(3)] == [3, 3, 3]


def test_one_rank_asks_nobody():
    store = HashStore()
    assert offset(store, 0, 1) == (0, 0)
    assert store.num_keys() == 0


class Slow:
    """A store in which some keys take their time."""

    def __init__(self, store, set_s=lambda key: 0.0, seen_s=lambda key: 0.0):
        self._store, self._set_s, self._seen_s = store, set_s, seen_s

    def set(self, key, value):
        time.sleep(self._set_s(key))
        self._store.set(key, value)

    def wait(self, keys, timeout):
        self._store.wait(keys, timeout)
        time.sleep(self._seen_s(keys[0]))

    def __getattr__(self, name):
        return getattr(self._store, name)


def test_the_bound_holds_where_one_way_takes_all_the_time():
    """The worst network there is: off by half the round trip, and not more."""
    store = HashStore()
    slow = {
        1: Slow(store, set_s=lambda key: 0.02 if "ask" in key else 0),
        2: Slow(store, seen_s=lambda key: 0.02 if "answer" in key else 0),
    }
    found = on_ranks(
        3,
        lambda r: offset(slow.get(r, store), r, 3, rounds=16, clock=skewed(r)),
    )
    check_offsets(found, 40e6)
    for rank, sign in ((1, 1), (2, -1)):
        offset_ns, error_ns = found[rank]
        off_ns = sign * (offset_ns + SKEWS_NS[rank])
        assert 0.6 * error_ns < off_ns <= error_ns
        assert error_ns >= 10e6


def test_the_quickest_round_counts():
    store = HashStore()
    asks = [f"/{k}/ask" for k in range(9) if k not in (3, 4, 5)]
    quick = Slow(store, set_s=lambda key: 0.1 * key.endswith(tuple(asks)))
    found = on_ranks(
        2,
        lambda r: offset(quick if r else store, r, 2, rounds=8, clock=skewed(r)),
    )
    check_offsets(found, 45e6)  # that of a slow round is 50e6


def test_the_wait_for_ones_turn_is_not_measured():
    """Rank 2 asks at once; rank 1 comes late and slow."""
    store = HashStore()
    slow = Slow(store, set_s=lambda key: 0.5 * ("ask" in key))
    found = on_ranks(
        3,
        lambda r: offset(slow if r == 1 else store, r, 3, rounds=1, clock=skewed(r)),
    )
    assert found[2][1] < 250e6 <= found[1][1]
    check_offsets(found, 2e9)


@pytest.mark.parametrize(
    "absent",
    [
        pytest.param((1,), marks=full),
        pytest.param((3,), marks=full),
        (1, 3),
        pytest.param((2,), marks=full),
        (0,),
    ],
)
def test_who_never_comes_is_named_on_all_ranks(absent, monkeypatch):
    if 0 in absent:  # otherwise the others need time to hear of it from rank 0
        monkeypatch.setattr(agreement, "GRACE_S", 0.5)
    store = HashStore()
    began = time.monotonic()
    found = on_ranks(4, lambda r: offset(store, r, 4, rounds=2, timeout_s=2.0), absent=absent)
    assert 1.9 < time.monotonic() - began < 15
    assert len(found) == 4 - len(absent)
    names = ", ".join(map(str, absent))
    for error in found.values():
        assert isinstance(error, PeerError)
        assert error.ranks == absent
        expected = f"rank{'s' * (len(absent) > 1)} {names} did not come to compare clocks within"
        assert str(error).startswith(expected)


def test_who_goes_in_the_middle_is_named():
    store = HashStore()

    class Gone(Slow):
        def set(self, key, value):
            if "/1/ask" in key:
                raise ZeroDivisionError
            super().set(key, value)

    found = on_ranks(
        4,
        lambda r: offset(Gone(store) if r == 2 else store, r, 4, rounds=3, timeout_s=2.0),
    )
    assert isinstance(found.pop(2), ZeroDivisionError)
    assert {error.ranks for error in found.values()} == {(2,)}


def test_a_call_after_one_that_failed_meets_nothing_of_it():
    store = HashStore()
    late = on_ranks(3, lambda r: offset(store, r, 3, timeout_s=2.0), absent=(2,))
    assert {error.ranks for error in late.values()} == {(2,)}
    # The rank that was missing hears of it, then all are together again.
    with pytest.raises(PeerError) as found:
        offset(store, 2, 3, timeout_s=2.0)
    assert found.value.ranks == (2,)
    check_offsets(on_ranks(3, lambda r: offset(store, r, 3, clock=skewed(r))), 50e6)
