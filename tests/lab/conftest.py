"""What the tests of the lab share: commands for ranks, and whether namespaces can be had."""

import functools
import sys

import pytest

from hipress.errors import HipressError
from hipress.lab import Lab
from tests.lab.programs import MOVE, PING


@functools.cache
def refusal() -> str | None:
    """Return why this system has no emulated cluster, or None."""
    try:
        Lab(1, rate="1gbit").close()
    except HipressError as error:
        return str(error)
    return None


@pytest.fixture
def namespaces() -> None:
    """Skip a test that needs an emulated cluster where there is none."""
    if (why := refusal()) is not None:
        pytest.skip(why)


@pytest.fixture
def python():
    """Return a function from Python text and arguments to a command."""
    # -S: what ranks need here is in the standard library, and they start quicker.
    return lambda text, *args: [sys.executable, "-S", "-c", text, *map(str, args)]


@pytest.fixture
def move(python):
    """Return a function that makes the command which moves bytes from rank 0 to rank 1."""
    return lambda size, rounds=1: python(MOVE, size, rounds)


@pytest.fixture
def ping(python):
    """Return a function that makes the command which times round trips from rank 0 to rank 1."""
    return lambda rounds: python(PING, rounds)
