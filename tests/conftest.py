"""Options of the whole test run, what runs when and where, and what no test may leave behind."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import grid, kernels
from tests.codecs import cases

# Some virtual machines report AMX and forbid it: bfloat16 in torch then ends the process (SIGILL).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# The same examples in every run, however slow the machine is that makes them.
settings.register_profile(
    "tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")

LONGEST = (
    "jobs",
    "tests/gpu/test_interpreted.py",
    "topk",
    "dithering",
)
"""The groups that take longest: they start first, so that all processes end at about one time."""
RANKS = ("tests/session/test_auto.py", "tests/train/test_job.py")
"""Files whose jobs of several ranks take minutes: `make test-all` runs those. In `make test` the
rest of these files, `test_policy.py`, `test_nothing_is_lost.py`, `test_attach.py` and
`test_checkpoint.py` hold the same promises."""
JOBS = (
    *RANKS,
    "tests/torch/test_attach.py",
    "tests/torch/test_distributed_optimizer.py",
    "tests/torch/test_momentum_ranks.py",
    "tests/torch/test_frameworks.py",
    "tests/torch/test_guard_ranks.py",
    "tests/torch/test_monitor_ranks.py",
    "tests/session/test_checkpoint.py",
    "tests/session/test_numpy_door.py",
    "tests/casync/test_distributed.py",
    "tests/casync/test_fork.py",
    "tests/docs/test_tutorial.py",
)
"""Files that start several ranks, which fill all cores: one after the other, as group `jobs`."""
BY_CASE = "tests/gpu/test_on_gpu.py"
"""Where the tests of one case are a group, and other tests are alone: they are many, and short but
for the kernels that each case compiles."""
BY_PROGRAM = ("tests/codecs/", "tests/casync/test_loopback.py", "tests/gpu/test_compiled.py")
"""Where the tests of one program are a group."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files of rendered kernels anew instead of comparing with them",
    )


def pytest_configure() -> None:
    # A shell starts what it runs in the background with SIGINT ignored, which children inherit.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    kernels.compile_once()


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker and xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the cells of the grid of codecs that are `full`, and groups tests for pytest-xdist."""
    for item in items:
        params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
        case = params.get("case")
        if isinstance(case, cases.Case) and not cases.quick(case, params):
            item.add_marker(grid.full)
        if params.get("backend") == "cpu" and params.get("expr") in cases.NOT_QUICK:
            item.add_marker(grid.full)
        if item.nodeid.startswith(RANKS) and "told" in getattr(item, "fixturenames", ()):
            item.add_marker(grid.full)
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(_group(item, params)))
    if getattr(config.option, "loadgroup", False):
        if items and not hasattr(items[0], "_nodeid"):
            raise pytest.UsageError(
                "this version of pytest-xdist cannot group tests with this version of pytest; "
                "install both from constraints.txt."
            )
        first = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: first.get(_name(item), len(first)))


def pytest_collection_finish() -> None:
    """Spares the garbage collector to look through all tests again and again."""
    gc.collect()
    gc.freeze()


def _group(item: pytest.Item, params: dict[str, Any]) -> str:
    """Tests of one group run in one process: those of a file, or of one program in some files.

    So a fixture of a module is made once, and no process waits for a kernel that another compiles.
    """
    codec = params.get("case", params.get("codec", params.get("expr")))
    if item.nodeid.startswith(BY_CASE):
        return item.nodeid if codec is None else str(getattr(codec, "expr", codec))
    text = codec.expr if isinstance(codec, cases.Case) else str(codec)
    if item.nodeid.startswith(JOBS):
        return "jobs"
    if item.nodeid.startswith(BY_PROGRAM):
        for name in cases.NAMES:
            if name in text:
                return name
    return item.nodeid.partition("::")[0]


def _name(item: pytest.Item) -> str:
    marker = item.get_closest_marker("xdist_group")
    return str(marker.args[0]) if marker else ""


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What a test draws from torch's own generator does not depend on which tests ran before it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    """A process group that one test leaves is found by the next one that needs its own.

    Which one that is depends on how tests are dealt to processes, so the culprit must fail itself.
    """
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("it left torch's default process group behind", pytrace=False)


@pytest.fixture(autouse=True)
def no_variables_left() -> Iterator[None]:
    """A variable such as WORLD_SIZE that one test leaves decides what ranks of the next one do."""
    before = _variables()
    yield
    after = _variables()
    if after != before:
        for name in after.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        changed = sorted({name for name, _ in after.items() ^ before.items()})
        pytest.fail(f"it left other environment variables behind: {changed}", pytrace=False)


def _variables() -> dict[str, str]:
    """What tells a process which rank it is, and what HiPress reads."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "SLURM_", "OMPI_", "HIPRESS_")
    return {name: value for name, value in os.environ.items() if name.startswith(names)}
