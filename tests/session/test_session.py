"""A session without a framework, and `allreduce` and `init` with NumPy arrays and launchers."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hipress
from hipress import session
from hipress.errors import UsageError
from hipress.session import Mode, StepObserver
from tests.grid import thinned
from tests.scenarios import free_ports


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def arrays(seed=0):
    random = np.random.default_rng(seed)
    return {
        "a": random.standard_normal((64, 80)).astype(np.float32),
        "b": random.standard_normal(7).astype(np.float32),
    }


def test_average_is_one_step_in_place(alone):
    """Catches: copies that never come back, gradients that land in each other's place."""
    given = arrays()
    kept = {name: value.copy() for name, value in given.items()}
    run = session.start(given, codec="none")
    for step in range(1, 3):
        run.average(given)
        assert run.step == step
    for name, value in given.items():
        np.testing.assert_array_equal(value, kept[name])


def test_error_feedback_is_kept_by_name(alone):
    """Catches: state that is lost between steps, or mixed up between gradients."""
    given = arrays()
    run = session.start(given, codec="onebit")
    codec = hipress.codec("onebit")
    wanted = torch.from_numpy(given["a"].copy())
    state = codec.init(wanted)
    for _ in range(3):
        sent = {name: value.copy() for name, value in given.items()}
        run.average(sent)
        # One rank is its own aggregator: what it encoded is encoded once more on the way back.
        assert not np.array_equal(sent["a"], given["a"])
        np.testing.assert_array_equal(sent["b"], given["b"])
        codec.encode(wanted, state)
    saved = run.state_dict()["ranks"]["0"]["a"]["residual"]
    torch.testing.assert_close(saved, state["residual"].reshape(-1), rtol=0, atol=1e-6)


def test_several_dtypes_travel_in_buckets_of_their_own(alone):
    """Catches: bfloat16 elements that are read as float32."""
    given = {"a": np.ones((64, 64), np.float32), "h": torch.ones(64, 64, dtype=torch.bfloat16)}
    run = session.start(given, codec="int8")
    run.average(given)
    assert given["a"].mean() == 1 and bool((given["h"] == 1).all())
    assert run.layout.bucket_names == (("a",), ("h",))


def test_observers_see_the_steps_of_a_loop_without_hooks(alone):
    """Catches: `auto` without times in a loop that only calls `average`."""
    seen = []

    class Note(StepObserver):
        def forward_begin(self, trains=True):
            seen.append("begin")

        def gradient_ready(self, name):
            seen.append(name)

    given = arrays()
    run = session.start(given, codec="none")
    stop = run.adapter.observe(Note())
    run.average(given)
    stop()
    run.average(given)
    assert seen == ["a", "b", "begin"]


def test_modes_of_a_run(alone):
    """Catches: a warm-up that compresses, a detach that leaves a residual behind."""
    given = arrays()
    run = session.start(given, codec="onebit", warmup_steps=1)
    assert run.mode.current is Mode.WARMUP
    first = {name: value.copy() for name, value in given.items()}
    run.average(first)
    np.testing.assert_array_equal(first["a"], given["a"])
    second = {name: value.copy() for name, value in given.items()}
    run.average(second)
    assert run.mode.current is Mode.COMPRESSED
    run.detach()
    last = {name: value.copy() for name, value in given.items()}
    run.average(last)
    assert run.mode.current is Mode.DETACHED
    np.testing.assert_allclose(second["a"] + last["a"], 2 * given["a"], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"c": np.zeros(3, np.float32)}, "gradient 'c' is not registered; the first registered"),
        ({"a": np.zeros(3, np.float32)}, "gradient 'a' has 3 elements and was registered with"),
        ({"a": np.zeros((64, 64))}, "gradient 'a' has dtype float64 and was registered with"),
        ({"a": None}, "a is a NoneType that torch cannot share memory with"),
        ({"a": "text"}, "a is a str that torch cannot share memory with"),
    ],
)  # fmt: skip
def test_what_average_refuses(alone, change, text):
    """Catches: an error of torch's deep inside, on one rank, after others have begun to send."""
    run = session.start(arrays(), codec="onebit")
    with pytest.raises(UsageError, match="^" + text):
        run.average(arrays() | change)
    assert run.step == 0


def test_average_refuses_a_list(alone):
    """Catches: an AttributeError in place of a sentence."""
    run = session.start(arrays(), codec="onebit")
    with pytest.raises(UsageError, match="^average was given a list; give a dictionary of arrays"):
        run.average(list(arrays().values()))


def test_a_read_only_array_is_refused(alone):
    """Catches: memory that must not be written and is."""
    value = np.ones(8, np.float32)
    value.flags.writeable = False
    with pytest.raises(UsageError, match="is a read-only NumPy array; give a copy"):
        hipress.allreduce(value)


def test_allreduce_takes_numpy_arrays_in_place(alone):
    """Catches: a result in a copy, and a torch tensor where an array was given."""
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert hipress.allreduce(value, codec="none") is value
    pair = [np.ones(4, np.float32), torch.ones(3)]
    found = hipress.allreduce(pair, codec="bf16")
    assert found[0] is pair[0] and found[1] is pair[1]
    future = hipress.allreduce(value, async_op=True)
    assert future.wait() is value
    np.testing.assert_array_equal(value, np.arange(6, dtype=np.float32).reshape(2, 3))


@pytest.mark.parametrize("value", [np.float32(1.0), 1.0, [], None, [None]])
def test_allreduce_refuses_what_shares_no_memory(alone, value):
    """Catches: a result that nobody sees."""
    with pytest.raises(UsageError):
        hipress.allreduce(value)


def test_init_keeps_a_group_that_exists(alone):
    """Catches: a second process group beside the user's."""
    hipress.init()
    assert dist.get_world_size() == 1


RANKS = """
import numpy, torch, hipress
hipress.init()
value = numpy.full(8, float(torch.distributed.get_rank()), dtype=numpy.float32)
hipress.allreduce(value, codec="none")
print(value[0], torch.distributed.get_world_size())
torch.distributed.destroy_process_group()
"""


def launcher_variables(launcher, rank, port):
    if launcher == "torchrun":
        return {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    if launcher == "mpirun":
        return {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 2,
                "OMPI_COMM_WORLD_LOCAL_RANK": rank, "OMPI_COMM_WORLD_LOCAL_SIZE": 2,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    return {"SLURM_PROCID": rank, "SLURM_NTASKS": 2, "SLURM_LOCALID": rank,
            "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost",
            "SLURM_NODEID": 0, "SLURM_JOB_ID": 7, "SLURM_STEP_NUM_TASKS": 2,
            "SLURM_STEP_ID": 0,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip


@pytest.mark.parametrize("launcher", thinned(["torchrun", "mpirun", "srun"], keep=("srun",)))
def test_init_joins_the_ranks_of_every_launcher(launcher):
    """Catches: ranks that each believe to be alone, or wait for a store that nobody serves."""
    (port,) = free_ports(1)
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "OMPI", "RANK", "WORLD", "LOCAL_", "MASTER"))
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS],
            env=clean
            | {k: str(v) for k, v in launcher_variables(launcher, rank, port).items()}
            | {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        found = [rank.communicate(timeout=90)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert found == ["0.5 2", "0.5 2"]
