"""The examples of Lightning and Accelerate: two ranks train, compress, stop and go on."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.grid import full

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 35  # an epoch of 1400 digits, 20 to a batch, on two ranks
LINE = re.compile(r"step (\d+): ([\d.]+) % right; (\d+) bytes sent, ([\d.]+) x less than plain")


@full
def test_lightning(tmp_path: Path) -> None:
    _needs("lightning")
    command = [sys.executable, "lightning_train.py", "--folder", str(tmp_path)]
    steps, right, sent = _run([*command, "--epochs", "1"])
    assert steps == STEPS
    callbacks = torch.load(tmp_path / "last.ckpt", weights_only=False)["callbacks"]
    _check_memory(callbacks["Compress"])

    # The steps are counted by what was in the checkpoint, the bytes are not.
    steps, right_later, sent_later = _run([*command, "--epochs", "2", "--resume"])
    assert (steps, sent_later) == (2 * STEPS, sent)
    assert right_later > max(right, 70)


@full
def test_accelerate(tmp_path: Path) -> None:
    _needs("accelerate")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node", "2", "accelerate_train.py", "--epochs", "1"]
    steps, right, sent = _run([*command, "--folder", str(tmp_path)])
    assert steps == STEPS
    _check_memory(torch.load(tmp_path / "custom_checkpoint_0.pkl", weights_only=True))

    steps, right_later, sent_later = _run([*command, "--folder", str(tmp_path), "--resume"])
    assert (steps, sent_later) == (2 * STEPS, sent)
    assert right_later > max(right, 70)


def _needs(package: str) -> None:
    # Not importorskip: that takes seconds, and their warnings are not ours.
    for name in (package, "sklearn"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


def _run(command: list[str]) -> tuple[int, float, int]:
    """Runs an example: steps, percent right, bytes sent; both layers are compressed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=EXAMPLES, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = LINE.findall(done.stdout)
    assert len(found) == 1, done.stdout  # rank 0 alone reports
    steps, right, sent, ratio = found[0]
    assert float(ratio) > 15
    return int(steps), float(right), int(sent)


def _check_memory(state: dict[str, Any]) -> None:
    """A checkpoint has what both ranks did not send of both layers, by name."""
    assert state["step"] == STEPS
    assert sorted(state["ranks"]) == ["0", "1"]
    for held in state["ranks"].values():
        assert len(held) == 2 and all(name.endswith("weight") for name in held)
        for memory in held.values():
            assert any(values.abs().max() > 0 for values in memory.values())
    first, second = state["ranks"].values()
    for name in first:
        assert any(not torch.equal(first[name][key], second[name][key]) for key in first[name])
