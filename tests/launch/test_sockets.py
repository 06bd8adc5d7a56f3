"""Which sockets a job on one host listens on: 127.0.0.1, and nothing that other hosts reach.

A real job: torchrun with its store, two ranks with gloo, and an exchange of HiPress.
"""

import ipaddress
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hipress import environment
from tests.grid import marked as full
from tests.launch.conftest import SOURCE, marked
from tests.scenarios import free_ports

RANK = """
import os, sys, time, torch, torch.distributed as dist, hipress
{init}
value = torch.ones(5000) * (1 + dist.get_rank())
hipress.allreduce(value, codec="none", name="w")
assert value[0] == 1.5
attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
# Nothing of an attempt before.
assert dist.distributed_c10d._get_default_store().add("seen", 1) <= 2
dist.barrier()
if attempt == "0" and sys.argv[2] == "restarts":
    sys.exit(5)
open(f"{{sys.argv[1]}}/up{{dist.get_rank()}}", "w").close()
while not os.path.exists(sys.argv[1] + "/go"):
    time.sleep(0.05)
dist.destroy_process_group()
"""
TORCH = RANK.format(init="dist.init_process_group('gloo')")
OURS = RANK.format(init="hipress.init()")


def listening(pids):
    """The addresses on which processes listen."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                target = os.readlink(fd)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:  # LISTEN
                host = words[1].split(":")[0]
                parts = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
                packed = b"".join(struct.pack("=I", part) for part in parts)
                found.append(ipaddress.ip_address(packed))
    return found


def is_loopback(address):
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def test_the_check_sees_sockets_that_others_reach():
    """Catches: a check that sees nothing."""
    with socket.create_server(("", 0)), socket.create_server(("127.0.0.1", 0)):
        found = listening([os.getpid()])
    assert sorted(map(is_loopback, found))[:1] == [False] and any(map(is_loopback, found))


def wait_for(paths, program):
    until = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert program.poll() is None and time.monotonic() < until, program.stderr.read()
        time.sleep(0.05)


@pytest.mark.parametrize("kind", ["once", full("restarts")])
def test_a_job_on_one_host_listens_on_loopback_only(kind, tmp_path, marker):
    """Catches: a store of torchrun's, or a rank, that every host of the network can connect to."""
    restarts = ("--max-restarts", "1") if kind == "restarts" else ()
    program = subprocess.Popen(
        [
            *(sys.executable, "-m", "hipress", "run", "-n", "2", *restarts, "--"),
            *(sys.executable, "-c", TORCH, str(tmp_path), kind),
        ],
        env={
            **{name: text for name, text in os.environ.items()
               if name not in environment.INTERFACE_VARIABLES},
            "PYTHONPATH": str(SOURCE),
            "MARKER": marker,
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        wait_for([tmp_path / "up0", tmp_path / "up1"], program)
        found = listening(marked(marker))
        (tmp_path / "go").touch()
        assert program.wait(60) == 0, program.stderr.read()
    finally:
        program.kill()
        program.wait()
        program.stderr.close()
    assert len(found) >= 3  # the store, and gloo in each rank
    assert all(map(is_loopback, found)), found


def test_init_on_one_host_listens_on_loopback_only(tmp_path):
    """Catches: the store of rank 0 under mpirun or in a lab that other hosts can connect to."""
    (port,) = free_ports(1)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", OURS, str(tmp_path), "once"],
            env={
                **os.environ,
                "PYTHONPATH": str(SOURCE),
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        wait_for([tmp_path / "up0", tmp_path / "up1"], ranks[0])
        found = listening([rank.pid for rank in ranks])
        (tmp_path / "go").touch()
        assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stderr.close()
    assert len(found) >= 3
    assert all(map(is_loopback, found)), found
