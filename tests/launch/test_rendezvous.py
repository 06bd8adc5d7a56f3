"""Where hosts meet: a port that is kept until torchrun listens, and the way to it."""

import asyncio
import socket

import pytest

from hipress.launch import torchrun
from tests.scenarios import free_ports


@pytest.mark.parametrize("is_chosen", [False, True])
def test_a_port_is_kept_for_who_may_share_it(is_chosen):
    with torchrun.reserve(0) as found:
        port = found.getsockname()[1]
        if is_chosen:
            found.close()
            found = torchrun.reserve(port)
        with found:
            with socket.socket() as other, pytest.raises(OSError, match="already in use"):
                other.bind(("127.0.0.1", port))
            # As torch does, which sets SO_REUSEADDR.
            with socket.create_server(("", port)), pytest.raises(OSError, match="already in use"):
                torchrun.reserve(port)


def test_what_was_said_of_the_way_is_taken_back():
    (port,) = free_ports(1)
    said, servers = [], []

    def may_go_on():
        if said:
            servers.append(socket.create_server(("127.0.0.1", port)))
        return True

    assert asyncio.run(torchrun.reach("127.0.0.1", port, said.append, may_go_on))
    servers[0].close()
    assert said == ["Connection refused", None]
    assert not asyncio.run(torchrun.reach("127.0.0.1", port, said.append, lambda: False))
