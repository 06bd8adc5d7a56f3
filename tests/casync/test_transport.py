"""The connections of a process: which of them are lost, and what a frozen peer does to them."""

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from hipress.casync.engine import transport
from hipress.casync.engine.transport import connections, is_lost, opened_sockets
from hipress.casync.ranks.agreement import Agreement
from hipress.errors import PeerError


@pytest.fixture
def pair():
    """The two ends of a TCP connection, and the socket that listened for it."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
        with one, other:
            yield one, other, listening


def inode(one):
    return os.fstat(one.fileno()).st_ino


def test_only_connections_are_watched(pair):
    """Catches: a socket that listens, or one between threads, in the number of connections."""
    one, other, listening = pair
    ends = socket.socketpair()
    made = {s.fileno(): inode(s) for s in (one, other, listening, *ends)}
    assert connections(made) == {one.fileno(): inode(one), other.fileno(): inode(other)}
    assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 0
    connections(made, timeout_s=60.0)
    assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000
    for end in ends:
        end.close()


def test_an_idle_host_that_vanishes_is_noticed_in_time(pair):
    """Catches: probes that the system begins after two hours."""
    one, *_ = pair
    connections({one.fileno(): inode(one)})
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    idle_s, interval_s, count = (one.getsockopt(socket.IPPROTO_TCP, name) for name in options)
    assert 15 <= idle_s + interval_s * count <= 30


def test_a_closed_connection_is_lost(pair):
    """Catches: a socket that is taken for another with the same number."""
    one, other, _ = pair
    fd, before = one.fileno(), inode(one)
    assert not is_lost(fd, before)
    one.close()
    assert is_lost(fd, before)
    with socket.socket() as new:  # takes the number of the closed one
        assert new.fileno() == fd
        assert is_lost(fd, before)


def test_a_peer_that_reads_nothing_is_not_lost(pair, monkeypatch):
    """Catches: a frozen process, whose system still answers, taken for a vanished host."""
    one, _, _ = pair
    monkeypatch.setattr(transport, "VANISHED_S", 0.0)
    one.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            one.send(bytes(2**20))
    assert not is_lost(one.fileno(), inode(one))


def test_sockets_of_a_block_are_found():
    """Catches: sockets of others in the list, or none."""
    with socket.socket(), opened_sockets() as made:
        new = socket.socket()
    assert made == {new.fileno(): inode(new)}
    new.close()


HOLD = """
import time
from datetime import timedelta
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30))
print(store.port, flush=True)
time.sleep(60)
"""


def test_a_process_that_freezes_with_the_store_is_named_in_time():
    """Catches: a wait without end for the answer of rank 0, which is stopped."""
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank_0:
        try:
            port = int(rank_0.stdout.readline())
            with opened_sockets() as made:
                store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30))
            connections(made, timeout_s=2.0)
            agreement = Agreement(store, 1, 2, timeout_s=2.0)
            rank_0.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            with pytest.raises(PeerError, match="rank 1 does not reach the store") as found:
                agreement.agree("tea", {})
            assert found.value.ranks == (0,)
            assert time.monotonic() - began < 20  # the store itself waits 30 s
        finally:
            rank_0.kill()
