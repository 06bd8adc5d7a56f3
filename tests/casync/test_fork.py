"""Processes that a rank forks, such as workers of a DataLoader, must not touch its exchange."""

import subprocess
import sys
from pathlib import Path

from tests import scenarios

RANK = """
import os, sys
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
import hipress

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return float(index)

rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

def check():
    value = torch.full((100,), float(rank))
    hipress.allreduce(value, strategy="allreduce", name="w")
    assert value.eq(0.5).all()

check()
if rank == 0:
    loader = DataLoader(Data(), num_workers=1, multiprocessing_context="fork")
    assert [batch.item() for batch in loader] == [0.0, 1.0, 2.0, 3.0]
    pid = os.fork()
    if pid == 0:
        try:
            hipress.allreduce(torch.ones(100), strategy="allreduce", name="w")
        except hipress.errors.UsageError as error:
            assert f"was forked from process {os.getppid()}" in str(error), error
            sys.exit(7)  # as programs end, with all that was registered for their end
        os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
for _ in range(5):
    check()
dist.barrier()
print("well")
"""


def test_a_forked_process_leaves_the_exchange_of_its_parent_alone(tmp_path):
    """Catches: a worker that ends and with it, for all ranks, the connections of its parent."""
    script = Path(tmp_path / "rank.py")
    script.write_text(RANK)
    (port,) = scenarios.free_ports(1)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(port)],
            env={**scenarios.os.environ, "HIPRESS_TIMEOUT": "15"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=100)
            assert (rank.returncode, out) == (0, "well\n"), err
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
