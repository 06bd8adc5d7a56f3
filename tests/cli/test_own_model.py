"""A model and data of the user's own in the commands: a small transformer, and a perceptron."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hipress.cli.main import main
from hipress.plan import Plan
from hipress.profile import Profile
from tests.grid import full
from tests.scenarios import no_launcher, refusal

MINE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Decoder(nn.Module):
    "Returns its loss beside the logits, as many GPTs do."
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.head = nn.Linear(64, 100)

    def forward(self, ids, labels):
        logits = self.head(self.layer(self.embed(ids)))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

def texts():
    drawn = torch.randint(100, (64, 17))
    return [{"ids": row[:-1], "labels": row[1:]} for row in drawn]

def perceptron():
    return nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 3))

def noise(batch):
    return torch.randn(batch, 16), torch.randint(3, (batch,))

def points():
    x = torch.randn(256, 16)
    y = x[:, :3].argmax(1)
    return TensorDataset(x[:192], y[:192]), TensorDataset(x[192:], y[192:])

def line():
    return nn.Linear(16, 1)

def sums():
    x = torch.randn(64, 16)
    return TensorDataset(x, x.sum(1))

class Picky(nn.Linear):
    "Looks at its weights when it is made, which a model without memory cannot."
    def __init__(self):
        super().__init__(16, 3)
        self.largest = float(self.weight.max())
"""


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`hipress train` tells torch in variables that it is the only rank."""
    no_launcher(monkeypatch)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: where others use the cores, two threads wait for each other all the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return tmp_path


@pytest.fixture
def not_in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):  # a training in this process sets them
        monkeypatch.delenv(name, raising=False)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


@pytest.mark.parametrize(
    ("model", "data", "num_elements"),
    [("mine:Decoder", "mine:texts", 46_372), ("mine:perceptron", "mine:noise", 5_123)],
)
def test_doctor(model: str, data: str, num_elements: int, capsys: pytest.CaptureFixture) -> None:
    """Catches: a prediction for another model, or advice that leaves the data out."""
    named = ("--model", model, "--data", data, "--batch", "4")
    assert run("doctor", *named, "--rate", "1mbit", "--codec", "int8", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == model and found["batch"] == 4
    plain = found["rows"][0]
    assert plain["bytes_per_rank"] == pytest.approx(1.5 * 4 * num_elements, rel=0.01)
    if found["pays"] != "no":
        assert f"hipress bench train --model {model} --hosts 4" in found["advice"]
        assert f" --data {data} --batch 4 " in found["advice"]


@pytest.mark.parametrize(
    "command",
    [
        ("doctor",),
        ("profile", "--loopback"),
        ("bench", "train", "--loopback"),
        ("bench", "prediction"),
        ("simulate", "--preset", "aws-v100"),
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("not_in_a_job")
def test_every_command_refuses_alike(
    command: tuple[str, ...], capsys: pytest.CaptureFixture
) -> None:
    assert run(*command, "--model", "mine:line") == 2
    assert capsys.readouterr().err.strip() == (
        "hipress: model 'mine:line' is your own, which has no made-up data to time it with; name "
        "yours with --data package.module:callable (https://hipress.readthedocs.io/en/latest/models/)."
    )
    assert run(*command, "--model", "mine:gone", "--data", "mine:noise") == 2
    said = capsys.readouterr().err
    assert "model 'mine:gone': module 'mine' has no 'gone'" in said and "Traceback" not in said
    assert run(*command, "--model", "mine:line", "--data", "mine:texts") == 2
    said = capsys.readouterr().err
    assert "TypeError: " in said and "unexpected keyword argument 'ids'" in said
    assert "Traceback" not in said


@pytest.mark.usefixtures("not_in_a_job")
def test_data_without_a_model(capsys: pytest.CaptureFixture) -> None:
    for command in ("doctor", "profile"):
        assert run(command, "--data", "mine:noise") == 2
        assert "--data mine:noise " in capsys.readouterr().err
    assert run("simulate", "--profile", "p.json", "--data", "mine:noise") == 2
    assert "--data mine:noise acts on --preset" in capsys.readouterr().err


def test_simulate_counts_the_operations_of_an_own_model(capsys: pytest.CaptureFixture) -> None:
    given = ("simulate", "--preset", "aws-v100", "--nodes", "2", "--codec", "onebit")
    assert run(*given, "--model", "mine:Decoder", "--data", "mine:texts", "--json", "-") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["bytes_per_rank"] == pytest.approx(4 * 46_372, rel=0.01)
    assert run(*given, "--model", "mine:Picky", "--data", "mine:noise") == 2
    said = capsys.readouterr().err
    assert "the operations of mine:Picky cannot be counted on torch's device meta" in said
    assert "hipress profile --model mine:Picky --data mine:noise, and give --profile" in said


def test_train_with_classes_and_a_test_set(folder: Path, capsys: pytest.CaptureFixture) -> None:
    """Catches: a test set that is not used, or an accuracy of something else."""
    given = ("train", "--model", "mine:perceptron", "--data", "mine:points", "--device", "cpu")
    assert run(*given, "--epochs", "40", "--lr", "0.05", "--json", "r.json") == 0
    (found,) = json.loads((folder / "r.json").read_text())["rows"]
    assert (found["data"], found["num_train"], found["num_test"]) == ("mine:points", 192, 64)
    assert found["accuracy"] > 75 and found["test_loss"] < 0.8 and found["unit"] == "examples"
    assert "on the test data accuracy" in capsys.readouterr().err


def test_train_with_numbers_and_no_test_set(folder: Path, capsys: pytest.CaptureFixture) -> None:
    given = ("train", "--model", "mine:line", "--data", "mine:sums", "--device", "cpu")
    assert run(*given, "--epochs", "20", "--batch", "16", "--json", "r.json") == 0
    (found,) = json.loads((folder / "r.json").read_text())["rows"]
    assert found["loss"] < 1 and found["accuracy"] is None and found["test_loss"] is None
    captured = capsys.readouterr()
    assert "test data" not in captured.err and "accuracy" not in captured.out


def test_train_is_resumed_with_the_same_examples(folder: Path) -> None:
    given = ("train", "--model", "mine:Decoder", "--data", "mine:texts", "--device", "cpu")
    given += ("--batch", "16", "--no-eval", "--log-every", "1")
    assert run(*given, "--epochs", "2", "--json", "whole.json") == 0
    assert run(*given, "--steps", "5", "--checkpoint", "c") == 0
    assert run(*given, "--epochs", "2", "--checkpoint", "c", "--resume", "--json", "r.json") == 0
    whole, resumed = (json.loads((folder / n).read_text()) for n in ("whole.json", "r.json"))
    assert resumed["rows"][0]["num_steps"] == 3
    assert resumed["rows"][0]["loss"] == whole["rows"][0]["loss"]


def test_train_says_what_does_not_fit(capsys: pytest.CaptureFixture) -> None:
    given = ("train", "--data", "mine:points", "--device", "cpu", "--steps", "2")
    assert run(*given, "--model", "mine:line") == 2
    assert "returned a tensor of shape (32, 1) for integer targets" in capsys.readouterr().err
    assert run(*given, "--model", "cnn") == 2
    said = capsys.readouterr().err
    assert (
        "cnn failed on its first batch of mine:points, of shapes (32, 16), (32,): RuntimeError: "
        in said
    )
    assert "Traceback" not in said


@full
@pytest.mark.alone
@pytest.mark.usefixtures("not_in_a_job")
def test_profile_in_the_lab_then_plan_and_simulate(capsys: pytest.CaptureFixture) -> None:
    """Catches: a rank that does not find the user's module, or a profile that nothing can read."""
    if (why := refusal()) is not None:
        pytest.skip(why)
    named = ("--model", "mine:Decoder", "--data", "mine:texts", "--hosts", "2", "--rate", "50mbit")
    assert run("profile", *named, "--codecs", "none,int8", "-o", "p.json") == 0
    model = Profile.load("p.json").model
    assert model is not None and model.name == "mine:Decoder" and model.num_elements == 46_372
    assert {one.name for one in model.gradients} >= {"embed.weight", "head.weight"}
    assert run("plan", "--profile", "p.json", "-o", "plan.json") == 0
    assert set(Plan.load("plan.json").gradients) == {one.name for one in model.gradients}
    capsys.readouterr()
    assert run("simulate", "--profile", "p.json", "--plan", "plan.json", "--json", "-") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows[0]["bytes_per_rank"] == pytest.approx(4 * 46_372, rel=0.01)
    assert run("bench", "train", *named, "--codec", "int8", "--hooks", "ddp", "--repeats", "1") == 0
    assert "mine:Decoder" in capsys.readouterr().out
