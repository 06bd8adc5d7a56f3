"""`join` under each launcher: the right rank, one address for all, a sentence when in doubt."""

import json
import os
import subprocess
import sys

import pytest

from hipress.environment import expand_counts, expand_hosts, read_environment
from hipress.errors import UsageError
from hipress.launch import World, join

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "n[01-03]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def world(rank, size, local_rank, local_size):
    return World(rank=rank, size=size, local_rank=local_rank, local_size=local_size)


def without(environ, *names):
    return {name: text for name, text in environ.items() if name not in names}


def test_under_torchrun():
    environ = {**TORCHRUN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    before = dict(environ)
    assert join(environ) == world(5, 8, 1, 4)
    assert environ == before


def test_a_pytorchjob_has_one_rank_per_container():
    environ = dict(TORCHRUN)
    assert join(environ) == world(5, 8, 0, 1)
    assert environ["LOCAL_RANK"] == "0"
    assert environ["LOCAL_WORLD_SIZE"] == "1"


def test_under_srun():
    environ = dict(SLURM)
    assert join(environ) == world(3, 6, 1, 2)
    assert {name: environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} == {
        "RANK": "3",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
    }
    assert environ["LOCAL_WORLD_SIZE"] == "2"
    assert environ["MASTER_ADDR"] == "n01"
    assert environ["MASTER_PORT"] == str(20000 + 4711 * 16 % 10000)
    assert join(environ) == world(3, 6, 1, 2)  # and again, now by what it set itself


def test_under_srun_with_hosts_of_different_size():
    environ = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1,4,1"}
    assert join(environ).local_size == 4


def test_a_step_counts_before_its_job():
    environ = {
        **SLURM,
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_NODELIST": "n[02-03]",
        "SLURM_TASKS_PER_NODE": "2(x3)",  # of the job
        "SLURM_STEP_ID": "2",
    }
    assert join(environ) == world(3, 4, 1, 2)
    assert environ["MASTER_ADDR"] == "n02"
    assert environ["MASTER_PORT"] == str(20000 + (4711 * 16 + 2) % 10000)


def test_a_master_address_that_is_set_stays():
    environ = {**SLURM, "MASTER_ADDR": "here", "MASTER_PORT": "1234"}
    join(environ)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("here", "1234")


def test_under_mpirun_on_one_host():
    environ = dict(MPIRUN)
    assert join(environ) == world(1, 4, 1, 4)
    other = {**MPIRUN, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    join(other)
    assert environ["MASTER_ADDR"] == other["MASTER_ADDR"] == "127.0.0.1"
    assert environ["MASTER_PORT"] == other["MASTER_PORT"]


def test_under_mpirun_on_many_hosts():
    environ = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(UsageError, match="add -x MASTER_ADDR=HOST -x MASTER_PORT=29500 to mpirun"):
        join(dict(environ))
    with pytest.raises(UsageError, match="MASTER_ADDR is set and MASTER_PORT is not"):
        join({**environ, "MASTER_ADDR": "n1"})
    environ.update(MASTER_ADDR="n1", MASTER_PORT="7")
    assert join(environ) == world(1, 4, 1, 2)


def test_alone_it_is_a_world_of_one():
    environ = {"PATH": "x", "RANK": ""}
    assert join(environ) == world(0, 1, 0, 1)
    assert environ["RANK"] == environ["LOCAL_RANK"] == "0"
    assert environ["WORLD_SIZE"] == environ["LOCAL_WORLD_SIZE"] == "1"
    assert environ["MASTER_ADDR"] == "127.0.0.1"
    assert 1024 <= int(environ["MASTER_PORT"]) <= 65535


@pytest.mark.parametrize(
    ("environ", "launcher", "master"),
    [
        (TORCHRUN, "torchrun", ("n1", 29500)),
        ({**MPIRUN, "PMIX_NAMESPACE": "job-1"}, "mpirun", ("127.0.0.1", 28703)),
        (SLURM, "srun", ("n01", 20000 + 4711 * 16 % 10000)),
        ({}, "none", ("127.0.0.1", 0)),
    ],
)
def test_reading_says_who_launched_and_sets_nothing(environ, launcher, master):
    before = dict(environ)
    found = read_environment(environ)
    assert found.launcher == launcher
    assert (found.master_addr, found.master_port) == master
    assert environ == before


def test_torchrun_comes_before_mpirun_and_mpirun_before_slurm():
    assert join({**SLURM, **MPIRUN, **TORCHRUN}).rank == 5
    assert join({**SLURM, **MPIRUN}).rank == 1


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE and MASTER_ADDR and MASTER_PORT are not"),
        (without(TORCHRUN, "RANK"), "WORLD_SIZE is set and RANK is not"),
        (without(TORCHRUN, "MASTER_PORT"), "RANK is set and MASTER_PORT is not"),
        ({"MASTER_ADDR": "n1"}, "MASTER_ADDR is set and RANK and WORLD_SIZE are not"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK is set and RANK and WORLD_SIZE are not"),
        ({**TORCHRUN, "LOCAL_RANK": "1"}, "LOCAL_RANK is set and LOCAL_WORLD_SIZE is not"),
        ({**TORCHRUN, "RANK": "8"}, "rank 8 of 8 cannot be"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK is '-1'; it must be a whole number"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'; it must be a whole number"),
        ({**TORCHRUN, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000; it must be from 1 to 65535"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "9"}, "9 ranks on this host are more than all 8"),
        (without(SLURM, "SLURM_NTASKS"), "SLURM_PROCID is set and SLURM_NTASKS is not"),
        (without(SLURM, "SLURM_LOCALID"), "SLURM_PROCID is set and SLURM_LOCALID is not"),
        (without(SLURM, "SLURM_JOB_ID"), "SLURM_PROCID is set and SLURM_JOB_ID is not"),
        (without(SLURM, "SLURM_JOB_NODELIST"), "SLURM_STEP_TASKS_PER_NODE is not"),
        ({**SLURM, "ENVIRONMENT": "BATCH"}, "write srun in front of the command"),
        ({**SLURM, "SLURM_JOB_NODELIST": "n[1-"}, "the node list 'n[1-' is not one that Slurm"),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2x"}, "the tasks per node '2x' are not counts"),
        (without(MPIRUN, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not"),
    ],
)
def test_what_is_half_set_is_refused(environ, says):
    before = dict(environ)
    with pytest.raises(UsageError) as caught:
        join(environ)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert environ == before


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", ["n1"]),
        ("n1,n2", ["n1", "n2"]),
        ("n[01-03,7],gpu1", ["n01", "n02", "n03", "n7", "gpu1"]),
        ("n[9-11]-ib", ["n9-ib", "n10-ib", "n11-ib"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
        ("r[1-2]n[3,5]", ["r1n3", "r1n5", "r2n3", "r2n5"]),
        ("a.b-c_d", ["a.b-c_d"]),
    ],
)
def test_lists_of_hosts(text, hosts):
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    "text", ["", "n[", "n]", "n[]", "n[1-", "n[3-1]", "n[a]", "a,,b", "n[0-999999999]"]
)
def test_what_is_no_list_of_hosts(text):
    with pytest.raises(UsageError, match="is not one that Slurm writes"):
        expand_hosts(text)


def test_counts_per_host():
    assert expand_counts("4") == [4]
    assert expand_counts("2(x3),1") == [2, 2, 2, 1]


RANK = """
import json, os, torch, torch.distributed as dist
from hipress.launch import join
world = join()
dist.init_process_group("gloo")
x = torch.tensor([1.0 + world.rank])
dist.all_reduce(x)
print(json.dumps([world.rank, world.size, world.local_rank, world.local_size, x.item()]))
dist.destroy_process_group()
"""


def test_two_processes_with_the_variables_of_slurm_meet():
    environ = {
        **os.environ,
        "SLURM_NTASKS": "2",
        # The process id in place of a job's: two runs of this test must not meet.
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_NODELIST": "localhost",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env={**environ, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert said == [[0, 2, 0, 2, 3.0], [1, 2, 1, 2, 3.0]]
