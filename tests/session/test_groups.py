"""A program may start over: destroy torch's groups and make new ones; engines end with groups."""

import gc
import os
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import hipress
from hipress.session import groups
from hipress.session.groups import engine_of
from tests.grid import full
from tests.scenarios import free_ports

CPU = torch.device("cpu")
LIMIT_S = 120


def run(program, *lives):
    """Returns what a program prints as each of some processes, which it imports torch for once.

    Args:
        program: Its function `live` is called with the arguments of a process.
        lives: The rank and other arguments of each process.
    """
    code = PROGRAM.format(program=program, lives=lives)
    environ = {
        "WORLD_SIZE": str(1 + max(rank for rank, *_ in lives)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(*free_ports(1)),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert found.returncode == 0, found.stderr
    return sorted(found.stdout.splitlines())


PROGRAM = """
import os, threading, time, torch, torch.distributed as dist, hipress

{program}

def exchange(rank):
    value = torch.full((10,), float(rank))
    hipress.allreduce(value, codec="none", name="w")
    os.write(1, f"rank {{rank}}: {{value[0].item()}}\\n".encode())  # in one piece

for rank, *rest in {lives}:
    if os.fork() == 0:
        os.environ["RANK"] = str(rank)
        live(rank, *rest)
        raise SystemExit
assert [os.wait()[1] for _ in {lives}] == [0] * len({lives})
"""


SAME_STORE = """
def live(rank):
    for _ in range(3):
        dist.init_process_group("gloo")
        exchange(rank)
        dist.destroy_process_group()
        time.sleep(2.0 * rank)  # or it would meet rank 0's store of this round
"""


@full
@pytest.mark.alone
def test_groups_may_be_destroyed_and_made_again():
    """Catches: an engine that keeps the old store alive, so that the second round waits."""
    assert run(SAME_STORE, (0,), (1,)) == ["rank 0: 0.5"] * 3 + ["rank 1: 0.5"] * 3


OTHER_STORE = """
def live(rank, *ports):
    for port in ports:
        os.environ["MASTER_PORT"] = str(port)
        dist.init_process_group("gloo")
        exchange(rank)
        dist.destroy_process_group()
"""


def test_a_process_that_stays_meets_one_that_was_started_anew(monkeypatch):
    """Catches: a count of engines in the process, which the other one does not share."""
    monkeypatch.setenv("HIPRESS_TIMEOUT", "30")
    first, second = free_ports(2)
    found = run(OTHER_STORE, (0, first, second), (1, first), (1, second))
    assert found == ["rank 0: 0.5"] * 2 + ["rank 1: 0.5"] * 2


DIES = """
def live(rank):
    dist.init_process_group("gloo")
    if rank == 1:
        dist.ProcessGroupGloo = lambda *args: os._exit(0)
    try:
        exchange(rank)
    except hipress.errors.PeerError as error:
        os.write(1, f"{error.ranks}\\n".encode())
        os._exit(0)  # torch's own group waits for the other rank
"""


@full
@pytest.mark.alone
def test_a_rank_that_dies_before_it_has_connected_is_named(monkeypatch):
    """Catches: a wait of minutes for its address, and an error that blames the store."""
    monkeypatch.setenv("HIPRESS_TIMEOUT", "10")
    assert run(DIES, (0,), (1,)) == ["(1,)"]


DIES_LATER = """
def live(rank):
    dist.init_process_group("gloo")
    gloo = dist.ProcessGroupGloo

    def publish_and_die(store, *args):
        own = dist.HashStore()
        threading.Thread(target=gloo, args=(own, *args), daemon=True).start()
        store.set("0/2", own.get("0/2"))
        os._exit(0)

    if rank == 2:
        dist.ProcessGroupGloo = publish_and_die
    start = time.monotonic()
    try:
        exchange(rank)
    except hipress.errors.PeerError as error:
        soon = time.monotonic() - start < 40
        os.write(1, f"{error.ranks} {soon}\\n".encode())
        os._exit(0)  # torch's own group waits for the other ranks
"""


@full
@pytest.mark.alone
def test_a_rank_that_dies_while_it_connects_is_named(monkeypatch):
    """Catches: gloo's own wait of five times the timeout, and blame of a rank that waits in it."""
    monkeypatch.setenv("HIPRESS_TIMEOUT", "10")
    assert run(DIES_LATER, (0,), (1,), (2,)) == ["(2,) True"] * 2


def test_a_rank_does_not_connect_for_ever():
    """Catches: a wait in gloo that neither the time limit nor the failure of another rank ends."""
    store, forever = dist.HashStore(), threading.Event()
    with pytest.raises(TimeoutError, match="not within 0.2 s"):
        groups._connected(forever.wait, store, 0, 1, 0.2)
    store.set(groups.UNCONNECTED, "rank 1: too many open files")
    with pytest.raises(TimeoutError, match="rank 1: too many"):
        groups._connected(forever.wait, store, 0, 1, 60.0)
    forever.set()
    with pytest.raises(ZeroDivisionError):
        groups._connected(lambda: 1 // 0, store, 0, 1, 60.0)
    for thread in threading.enumerate():
        if thread.name == "hipress-connect":
            thread.join(10)


def hipress_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("hipress-")}


@pytest.mark.alone
def test_an_engine_ends_with_its_group():
    """Catches: threads and buffers of destroyed groups that stay until the process ends."""
    gc.collect()
    before = hipress_threads()
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        hipress.allreduce(torch.ones(10), codec="none", name="w")
        engine = engine_of(None, CPU)
        assert engine is engine_of(None, CPU) and not engine.is_closed
        dist.destroy_process_group()
        gc.collect()
        assert engine.is_closed
        assert not hipress_threads() - before  # those of another test may end meanwhile


@pytest.mark.alone
def test_a_late_rank_is_waited_for_as_long_as_torch_does(monkeypatch):
    """Catches: a limit of our own that ends jobs which plain DDP survives."""
    monkeypatch.delenv("HIPRESS_TIMEOUT", raising=False)
    for given, expected_s in ((None, 1800.0), (timedelta(seconds=77), 77.0)):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=given)
        other = dist.new_group([0], timeout=timedelta(seconds=99))
        found = [engine_of(None, CPU).timeout_s, engine_of(other, CPU).timeout_s]
        monkeypatch.setenv("HIPRESS_TIMEOUT", "5")
        found.append(engine_of(dist.new_group([0]), CPU).timeout_s)
        monkeypatch.delenv("HIPRESS_TIMEOUT")
        dist.destroy_process_group()
        assert found == [expected_s, 99.0, 5.0]
