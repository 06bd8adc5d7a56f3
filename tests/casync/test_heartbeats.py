"""Heartbeats: who is silent is named, and what one rank knows all ranks hear."""

import threading
import time

import pytest
from torch.distributed import DistNetworkError, HashStore

from hipress.casync.engine.transport import LinkError
from hipress.casync.ranks import heartbeats
from hipress.casync.ranks.heartbeats import Heartbeats
from hipress.errors import FrameError, PeerError
from tests.grid import thinned

pytestmark = pytest.mark.alone


class Ward:
    """Ranks that beat in one store, and what each was told."""

    def __init__(self, num_ranks, timeout_s):
        self.store = HashStore()
        self.num_lost = 0
        """Number of other ranks to which each rank has lost the connection."""
        self.errors = {}
        self.told = threading.Condition()
        self.ranks = [
            Heartbeats(
                self.store,
                rank,
                num_ranks,
                timeout_s,
                on_failure=self.note(rank),
                num_lost_peers=lambda: self.num_lost,
            )
            for rank in range(num_ranks)
        ]

    def note(self, rank):
        def on_failure(error):
            with self.told:
                assert rank not in self.errors, "told twice"
                self.errors[rank] = error
                self.told.notify_all()

        return on_failure

    def wait(self, ranks):
        """The errors of these ranks; fails where one is not told in time."""
        ranks = list(ranks)
        with self.told:
            assert self.told.wait_for(lambda: set(ranks) <= set(self.errors), 20.0), self.errors
        return [self.errors[rank] for rank in ranks]

    def silence(self, rank):
        """Stops a rank without a word, as a crash does."""
        self.ranks[rank]._closed.set()
        self.ranks[rank]._thread.join(20)

    def leave(self, rank):
        """Closes a rank that has patience with the others, however slow this machine is."""
        self.ranks[rank]._beat_s = 4.0
        self.ranks[rank].close()


@pytest.fixture
def ward():
    made = []

    def make(num_ranks, timeout_s):
        made.append(Ward(num_ranks, timeout_s))
        return made[-1]

    yield make
    for one in made:
        for health in one.ranks:
            health.close()


@pytest.mark.parametrize("num_ranks", thinned([1, 2, 4], keep=(4,)))
def test_ranks_that_beat_are_left_alone(ward, num_ranks):
    watched = ward(num_ranks, 2.5)
    time.sleep(4.0)
    assert watched.errors == {}


@pytest.mark.parametrize("silent", thinned([0, 1, 3], keep=(0, 3)))
def test_a_silent_rank_is_named_on_all_others(ward, silent):
    watched = ward(4, 2.5)
    time.sleep(0.3)
    began = time.monotonic()
    watched.silence(silent)
    for error in watched.wait(rank for rank in range(4) if rank != silent):
        assert isinstance(error, PeerError)
        assert error.ranks == (silent,)
        assert f"rank {silent} has given no sign of life for 2.5 s" in str(error)
    assert 1.2 < time.monotonic() - began < 15


def test_a_rank_that_has_said_goodbye_is_not_missed(ward):
    watched = ward(3, 2.5)
    watched.ranks[1].close()
    time.sleep(4.0)
    assert watched.errors == {}


@pytest.fixture
def quick(monkeypatch):
    """Beats as quick as those of a short timeout."""
    monkeypatch.setattr(heartbeats, "LONGEST_BEAT_S", 0.1)


def test_a_rank_that_has_died_is_named_long_before_the_timeout(ward, quick):
    """Catches: half an hour of waiting for a process that was killed."""
    watched = ward(4, 1800.0)
    time.sleep(0.3)
    watched.silence(2)
    watched.num_lost = 1
    for error in watched.wait([0, 1, 3]):
        assert isinstance(error, PeerError)
        assert error.ranks == (2,)
        assert "rank 2 is gone: connections are closed and heartbeats have stopped" in str(error)


def test_a_rank_that_failed_itself_is_not_counted_among_those_who_know(ward, quick):
    """Catches: rank 0 leaves while rank 1 knows nothing, because rank 2 knows of its own error."""
    watched = ward(3, 1800.0)
    watched.ranks[1]._beat_s = 0.4
    time.sleep(0.3)
    watched.ranks[2].explain(ValueError("out of paper"))
    watched.wait([0])
    watched.leave(0)
    assert watched.store.check(["informed/1"])
    assert [error.ranks for error in watched.wait([1])] == [(2,)]


@pytest.mark.parametrize("silent", [0, 2])
def test_rank_0_keeps_the_store_until_all_know_who_failed(ward, quick, silent):
    """Catches: rank 0 leaves first, and a slower rank blames it for the store that is gone."""
    watched = ward(4, 1800.0)
    for rank in (1, 2, 3):
        watched.ranks[rank]._beat_s = 0.4  # slower than rank 0
    time.sleep(0.3)
    if silent:
        watched.silence(silent)
        watched.num_lost = 1
        watched.wait([0])
    else:
        watched.ranks[0].explain(ValueError("out of paper"))
    watched.leave(0)
    assert watched.store.check(["informed/1", "informed/3"])
    assert [error.ranks for error in watched.wait([1, 3])] == [(silent,)] * 2


def test_what_one_thread_knows_another_does_not_ask_for(ward, quick, monkeypatch):
    """Catches: an exchange that blames rank 0, which has left since the heartbeat knew more."""
    watched = ward(3, 1800.0)
    watched.silence(1)
    watched.num_lost = 1
    watched.wait([2])

    def gone(*_):
        raise DistNetworkError("connection reset")

    monkeypatch.setattr(watched.ranks[2], "_recorded_failure", gone)
    assert watched.ranks[2].explain(LinkError("closed by rank 0")).ranks == (1,)


def test_a_silent_rank_with_its_connections_is_waited_for(ward, quick):
    """Catches: a rank that is frozen or holds the GIL for a while and is taken for dead."""
    watched = ward(3, 1800.0)
    watched.silence(1)
    time.sleep(1.5)
    assert watched.errors == {}


def test_a_busy_rank_is_not_taken_for_one_that_has_closed(ward, quick):
    """Catches: blame on a rank that is silent for a while as another ends well."""
    watched = ward(4, 1800.0)
    watched.silence(1)
    watched.ranks[2].close()
    watched.num_lost = 1
    time.sleep(1.5)
    assert watched.errors == {}
    # The same rank, busy again or dead now, is the only explanation of a second lost connection.
    watched.num_lost = 2
    assert [error.ranks for error in watched.wait([0, 3])] == [(1,)] * 2


def test_of_two_silent_ranks_the_one_that_comes_back_is_not_blamed(ward, quick):
    """Catches: blame on a rank that is busy while another dies."""
    watched = ward(4, 1800.0)
    time.sleep(0.3)
    watched.silence(1)
    watched.silence(2)
    watched.num_lost = 1
    time.sleep(1.5)
    assert watched.errors == {}
    watched.ranks[1]._beat()
    assert [error.ranks for error in watched.wait([0, 3])] == [(2,)] * 2


def test_an_error_of_a_rank_s_own_reaches_all(ward):
    watched = ward(4, 30.0)
    error = FrameError("the frame is foreign")
    assert watched.ranks[2].explain(error) is error
    for found in watched.wait([0, 1, 3]):
        assert isinstance(found, PeerError)
        assert found.ranks == (2,)
        assert str(found) == "rank 2 failed: the frame is foreign"


def test_a_broken_connection_is_blamed_on_who_is_silent(ward):
    watched = ward(4, 6.0)
    watched.silence(1)
    found = watched.ranks[3].explain(LinkError("Connection reset by 10.0.0.7:41523\nmore"))
    assert isinstance(found, PeerError)
    assert found.ranks == (1,)
    assert "rank 1 is gone or frozen (Connection reset by 10.0.0.7:41523)" in str(found)
    # The others say the same, though they saw nothing.
    assert [str(error) for error in watched.wait([0, 2])] == [str(found)] * 2


def test_a_broken_connection_among_the_living_names_nobody(ward):
    watched = ward(3, 30.0)
    found = watched.ranks[0].explain(LinkError("timed out"))
    assert isinstance(found, PeerError)
    assert found.ranks == ()
    assert "all ranks are alive" in str(found) and "timed out" in str(found)


def test_a_rank_that_ends_after_a_failure_does_not_take_the_blame(ward, quick):
    """Catches: blame on the first rank that ends, not on the one that it ended for."""
    watched = ward(4, 1800.0)
    watched.silence(2)
    watched.num_lost = 1
    watched.wait([0, 1, 3])
    watched.ranks[0].close()
    assert not heartbeats.has_left(watched.store, 0)


def test_the_first_failure_is_what_all_say(ward):
    watched = ward(3, 30.0)
    watched.ranks[1].explain(FrameError("first"))
    second = watched.ranks[2].explain(LinkError("second, a consequence"))
    assert isinstance(second, PeerError)
    assert str(second) == "rank 1 failed: first"
    watched.ranks[2].explain(FrameError("a failure of its own, later"))
    assert str(watched.ranks[0].explain(LinkError("third"))) == "rank 1 failed: first"


def test_a_store_that_is_gone_is_blamed_on_rank_0(monkeypatch):
    class Gone:
        is_gone = False

        def __init__(self):
            self.store = HashStore()

        def __getattr__(self, name):
            if self.is_gone:
                raise RuntimeError("Broken pipe")
            return getattr(self.store, name)

    store, told = Gone(), []
    monkeypatch.setattr(heartbeats, "LONGEST_BEAT_S", 0.1)
    health = Heartbeats(store, 1, 2, 1800.0, on_failure=told.append)
    store.is_gone = True
    found = health.explain(LinkError("Connection reset"))
    assert isinstance(found, PeerError) and found.ranks == (0,)
    assert "is gone or frozen, or the link of rank 1 is down (Connection reset)" in str(found)
    deadline = time.monotonic() + 20
    while not told and time.monotonic() < deadline:
        time.sleep(0.05)
    assert told[0].ranks == (0,)
    assert "rank 1 does not reach the store" in str(told[0])
    health.close()


class Counting:
    """A store that counts the requests made of it."""

    def __init__(self, store):
        self.store, self.num_requests = store, 0

    def __getattr__(self, name):
        if name in ("get", "check", "multi_get"):
            self.num_requests += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("is_missing", [False, True])
def test_a_look_at_all_ranks_is_few_requests(ward, monkeypatch, is_missing):
    """Catches: two requests for each rank of a large job, from every rank that waits."""
    monkeypatch.setattr(heartbeats, "LONGEST_BEAT_S", 60.0)
    watched = ward(8, 1800.0)
    watched.store.set("beat/5", "3/2")
    if is_missing:
        watched.store.delete_key("beat/7")
    health = watched.ranks[0]
    health._store = store = Counting(watched.store)
    assert health.ahead() == [5]
    assert is_missing or store.num_requests == 2
    monkeypatch.setattr(Counting, "has_extended_api", lambda _: False, raising=False)
    assert health.ahead() == [5]


def test_closing_is_quick_and_may_be_done_twice(ward, monkeypatch):
    monkeypatch.setattr(heartbeats, "LONGEST_BEAT_S", 60.0)
    watched = ward(3, 1800.0)
    began = time.monotonic()
    for health in watched.ranks:
        health.close()
        health.close()
    assert time.monotonic() - began < 20  # beats are a minute apart
