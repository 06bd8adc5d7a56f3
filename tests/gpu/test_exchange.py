"""Ranks that share a GPU train as ranks on a CPU do (see `scripts/exchange.py`)."""

from pathlib import Path

import pytest
import torch

from tests import scenarios

SCRIPT = Path(__file__).parent / "scripts" / "exchange.py"
NUM_STEPS = 40
PAIRS = [
    ("onebit", "hipress AdamW"),
    ("topk(ratio=0.05)", "hipress AdamW"),
    ("int8", "torch AdamW"),
    ("momentum(ef(onebit))", "SGD"),
]
LEAST_MOVE = {"hipress AdamW": 0.004, "torch AdamW": 0.008, "SGD": 0.001}
"""Of a compressed weight, in the mean, in the steps after the fifth."""
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(scope="module")
def told():
    stages = [
        [
            {"id": f"{device} {codec} {optimizer}", "do": "trains", "ranks": 2, "device": device,
             "codec": codec, "optimizer": optimizer, "steps": NUM_STEPS}
            for codec, optimizer in PAIRS
        ]
        for device in DEVICES
    ]  # fmt: skip
    return scenarios.play(SCRIPT, *stages)


@pytest.mark.parametrize(("codec", "optimizer"), PAIRS)
@pytest.mark.parametrize("device", DEVICES)
def test_training_goes_on_and_ranks_agree(told, device, codec, optimizer):
    """Catches: steps that leave parameters where they are, and ranks that decode differently."""
    found = told.results(f"{device} {codec} {optimizer}", range(2))
    assert len({rank["bits"] for rank in found}) == 1
    for rank, on_cpu in zip(found, told.results(f"cpu {codec} {optimizer}", range(2)), strict=True):
        assert rank["losses"][-1] < rank["losses"][0]
        assert min(rank["moved"]) > LEAST_MOVE[optimizer]
        assert rank["moved"] == pytest.approx(on_cpu["moved"], rel=0.2)
