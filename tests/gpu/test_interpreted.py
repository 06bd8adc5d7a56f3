"""The contract of the gpu backend on a CPU: Triton's interpreter runs the generated kernels.

In a process of its own. Triton decides when it is imported whether its functions are compiled or
interpreted, and other tests of this process need it as it is. To run one of them by hand:

    TRITON_INTERPRET=1 pytest tests/gpu/contract.py -k onebit
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.grid import full, thinned

ROOT = Path(__file__).parents[2]
CONTRACT = Path(__file__).parent / "contract.py"
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: no interpreter"
)


def contract(*args: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CONTRACT), *args]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=3000
    )


QUICK = "onebit or topk or program or bulk or header"
"""What `make test` interprets: a codec with blocks and one with counts, and what is not a codec."""


CELLS = {
    "quick": ("-m", "not full", "-k", QUICK),
    "other codecs": ("-m", "not full", "-k", f"not ({QUICK})"),
    "full": ("-m", "full"),
}


@needs_triton
@pytest.mark.parametrize("cells", thinned(CELLS, keep=("quick",)))
def test_contract(cells: str) -> None:
    done = contract(*CELLS[cells])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout


@full
@needs_triton
def test_the_contract_can_fail() -> None:
    """A backend that flips one bit is found out."""
    done = contract("-p", "tests.gpu.spoilt", "-k", "test_frames_states and fp16")
    assert done.returncode == 1 and "passed" not in done.stdout, done.stdout
