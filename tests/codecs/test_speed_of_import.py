"""The first use of a built-in codec, once its kernels are on disk, feels immediate."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import pytest

pytestmark = pytest.mark.alone

LIMIT_S = 1.0
# In seconds of this process: on an idle machine what a clock on the wall shows (0.72 and 0.73 s
# were measured), on a busy one still about that.
FIRST_USE = """
import time
import torch
start = time.process_time()
import hipress
c = hipress.codec("onebit")
x = torch.linspace(-1, 1, 10_000)
state = c.init(x)
decoded = c.decode(c.encode(x, state))
seconds = time.process_time() - start
assert torch.allclose(decoded + state["residual"], x, atol=1e-6)
import sys
assert "numba" in sys.modules  # its import is part of the bill
print(seconds)
"""


def first_use_s() -> float:
    env = {**os.environ, "HIPRESS_BACKEND": "cpu", "HIPRESS_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-c", FIRST_USE], env=env, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return float(run.stdout)


def test_first_use_of_a_codec() -> None:
    first_use_s()  # compiles, where the cache is cold
    for _ in range(3):  # a machine that was busy for one median gets another try
        times_s = [first_use_s() for _ in range(3)]
        if statistics.median(times_s) < LIMIT_S:
            return
    raise AssertionError(f"{times_s} s to first use, not below {LIMIT_S} s")
