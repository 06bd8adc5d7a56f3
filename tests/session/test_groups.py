"""A program may start over: destroy torch's groups and make new ones, with the same store."""

import os
import socket
import subprocess
import sys

import pytest

from tests.grid import full

pytestmark = pytest.mark.alone

PROGRAM = """
import os, time, torch, torch.distributed as dist, hipress
for _ in range(3):
    dist.init_process_group("gloo")
    value = torch.full((10,), float(dist.get_rank()))
    hipress.allreduce(value, codec="none", name="w")
    dist.destroy_process_group()
    print(value[0].item())
    time.sleep(2.0 * int(os.environ["RANK"]))  # or it would meet rank 0's store of this round
"""


@full
def test_groups_may_be_destroyed_and_made_again():
    # An engine that kept the old store alive made the second round wait for good.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert outputs == ["0.5\n0.5\n0.5\n"] * 2
