"""The contract of the gpu backend on a CPU: Triton's interpreter runs the generated kernels.

In processes of their own. Triton decides when it is imported whether its functions are compiled or
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

ROOT = Path(__file__).parents[2]
CONTRACT = Path(__file__).parent / "contract.py"
PARTS = {
    "frames": "test_frames_states",
    "numbers": "test_gradients or test_16_bits or test_any or test_the_ratio or test_bad or empty",
    "damage": "test_counts or test_damage or header or fields or program_asks or lengths or random",
}
"""Tests of the contract by their names, so that several processes may share them."""

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: no interpreter"
)


def contract(*args: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CONTRACT), *args]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=900
    )


@needs_triton
@pytest.mark.parametrize("part", PARTS)
def test_contract(part: str) -> None:
    done = contract("-k", PARTS[part])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout and "skipped" not in done.stdout


@needs_triton
def test_every_test_of_the_contract_is_in_one_part() -> None:
    assert outside(PARTS.values()) == 0
    assert outside(list(PARTS.values())[1:]) > 0  # so this can fail


def outside(parts: object) -> int:
    """How many tests no part selects, or how many times too often tests are selected."""
    whole = contract("--collect-only").stdout.count("::")
    return whole - sum(contract("--collect-only", "-k", p).stdout.count("::") for p in parts)


@needs_triton
def test_the_contract_can_fail() -> None:
    """A backend that flips one bit is found out."""
    plugin = "tests.gpu.spoilt"
    done = contract("-p", plugin, "-k", "test_frames_states and fp16")
    assert done.returncode == 1 and "4 failed" in done.stdout, done.stdout
