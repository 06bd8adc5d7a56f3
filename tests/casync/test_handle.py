"""Futures of one synchronisation and of several."""

import itertools
import threading
import time

import pytest

from hipress.casync.engine.handle import MAX_IDLE, CallbackThreads, Handle, joint


def made(count):
    threads = CallbackThreads()
    return threads, [Handle([], None, threads) for _ in range(count)]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_joint_future_waits_for_all(order):
    """Catches: a bucket that is handed out when the first of its groups is there."""
    threads, handles = made(2)
    future = joint(handles, "bucket")
    handles[order[0]].end(None)
    threads.close()  # after what the first end has put
    assert not future.done()
    handles[order[1]].end(None)
    assert future.wait() == "bucket"


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_any_is_told_once(failing):
    """Catches: an error that is lost because another group ended well, or later."""
    threads, handles = made(2)
    told = []
    future = joint(handles, "bucket", told.append)
    error = ValueError("no")
    for place, handle in enumerate(handles):
        handle.end(error if place == failing else None)
    assert future.wait() == "bucket" and told == [error]
    threads.close()


def test_without_a_listener_the_future_raises():
    threads, (handle,) = made(1)
    future = handle.future("value")
    handle.end(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        future.wait()
    threads.close()


def test_what_has_ended_is_joined_at_once():
    _, handles = made(2)
    for handle in handles:
        handle.end(None)
    assert joint(handles, 7).done()


def test_a_callback_may_close_its_own_threads():
    """Catches: `cannot join current thread` when the last who held an engine is a callback."""
    threads = CallbackThreads()
    problems, done = [], threading.Event()

    def close():
        try:
            threads.close()
        except RuntimeError as error:
            problems.append(error)
        done.set()

    threads.put(close)
    assert done.wait(60) and not problems


def test_a_callback_that_waits_holds_no_other_back():
    """Catches: a future that is awaited in the callback of another and never ends."""
    before = set(threading.enumerate())  # another test may have left some
    threads, handles = made(40)
    futures = [handle.future(None) for handle in handles]
    # Each waits for the next one.
    chains = [a.then(lambda _, b=b: b.wait()) for a, b in itertools.pairwise(futures)]
    for handle in handles:
        handle.end(None)
    wait_until(lambda: all(chain.done() for chain in chains))
    threads.close()
    wait_until(  # some may just be ending
        lambda: "hipress-futures" not in {one.name for one in {*threading.enumerate()} - before}
    )


def test_threads_of_callbacks_are_used_again():
    """Catches: a thread for every callback, or threads of a burst that stay for ever."""
    threads = CallbackThreads()
    gate, seen = threading.Event(), []
    for _ in range(3 * MAX_IDLE):
        threads.put(gate.wait)
    assert len(threads._threads) == 3 * MAX_IDLE
    gate.set()
    wait_until(lambda: len(threads._threads) <= MAX_IDLE)
    assert len(threads._threads) == MAX_IDLE
    for _ in range(50):
        done = threading.Event()
        threads.put(lambda done=done: (seen.append(threading.get_ident()), done.set()))
        assert done.wait(60)
        time.sleep(0.002)  # until its thread is idle again
    assert len(set(seen)) <= MAX_IDLE
    threads.close()


def test_a_callback_that_raises_ends_no_other(caplog):
    """Catches: an error of one callback after which no future of the engine ever ends."""
    threads, (handle,) = made(1)

    def fails():
        raise ValueError("in a callback")

    threads.put(fails)
    future = handle.future("value")
    handle.end(None)
    assert future.wait() == "value"
    threads.close()
    assert "in a callback" in caplog.text
