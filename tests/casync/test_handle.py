"""Futures of one synchronisation and of several."""

import threading

import pytest

from hipress.casync.engine.handle import CallbackThread, Handle, joint


def made(count):
    callback_thread = CallbackThread()
    return callback_thread, [Handle([], None, callback_thread) for _ in range(count)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_joint_future_waits_for_all(order):
    """Catches: a bucket that is handed out when the first of its groups is there."""
    callback_thread, handles = made(2)
    future = joint(handles, "bucket")
    handles[order[0]].end(None)
    settled = threading.Event()
    callback_thread.put(settled.set)  # behind what the first end has put
    assert settled.wait(10) and not future.done()
    handles[order[1]].end(None)
    assert future.wait() == "bucket"
    callback_thread.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_any_is_told_once(failing):
    """Catches: an error that is lost because another group ended well, or later."""
    callback_thread, handles = made(2)
    told = []
    future = joint(handles, "bucket", told.append)
    error = ValueError("no")
    for place, handle in enumerate(handles):
        handle.end(error if place == failing else None)
    assert future.wait() == "bucket" and told == [error]
    callback_thread.close()


def test_without_a_listener_the_future_raises():
    callback_thread, (handle,) = made(1)
    future = handle.future("value")
    handle.end(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        future.wait()
    callback_thread.close()


def test_what_has_ended_is_joined_at_once():
    _, handles = made(2)
    for handle in handles:
        handle.end(None)
    assert joint(handles, 7).done()


def test_the_settler_may_be_closed_by_itself():
    """Catches: `cannot join current thread` when the last who held an engine is a callback."""
    callback_thread = CallbackThread()
    problems, done = [], threading.Event()

    def close():
        try:
            callback_thread.close()
        except RuntimeError as error:
            problems.append(error)
        done.set()

    callback_thread.put(close)
    assert done.wait(10) and not problems
