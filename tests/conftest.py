"""Options of the whole test run, and what no test may leave behind."""

import os
import sys
from collections.abc import Iterator

import pytest

# Some virtual machines report AMX and forbid it: bfloat16 in torch then ends the process (SIGILL).
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files of rendered kernels anew instead of comparing with them",
    )


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
