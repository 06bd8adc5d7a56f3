"""`hipress profile`: a small run on loopback and inside a job, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hipress.bench import profile as profile_bench
from hipress.cli import profile as profile_command
from hipress.cli.main import main
from hipress.cli.options import ClusterOptions
from hipress.cli.profile import benchmark, in_a_job
from hipress.profile import Profile
from hipress.session import timing
from hipress.train.models import MODELS
from tests.grid import full
from tests.scenarios import free_ports


@pytest.fixture(autouse=True)
def not_in_a_job(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


def profile(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["profile", *arguments])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


@full
@pytest.mark.alone
def test_measures_links_codecs_and_a_model_on_loopback(tmp_path, capsys):
    path = tmp_path / "p.json"
    arguments = ("--loopback", "--hosts", "2", "--model", "mlp", "--codecs", "none,onebit")
    assert profile(*arguments, "-o", str(path), "--json", "--timeout", "250") == 0
    captured = capsys.readouterr()
    found = Profile.load(path)
    assert json.loads(captured.out) == json.loads(path.read_text())
    assert found.machine.num_ranks == 2 and found.network.hosts == (0, 0)
    assert [costs.codec for costs in found.codecs] == ["none", "onebit"]
    assert found.network.bytes_per_s > 1e7 and found.network.all_reduce.at(10**6) > 0
    assert found.network.message_work_s > 0 and found.network.byte_work_s > 0
    model = found.model
    assert model is not None and model.name == "mlp" and model.num_elements == 102_090
    assert model.forward_s > 0 and model.backward_s >= model.gradients[-1].ready_s > 0
    assert model.gradients[0].errors.keys() == {"none", "onebit"}
    assert "onebit" in captured.err and "Model mlp" in captured.err and "loopback" in found.made


@full
def test_measures_between_the_ranks_of_a_job(tmp_path):
    (port,) = free_ports(1)
    path = tmp_path / "p.json"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "hipress", "profile", "--codecs", "none", "-o", str(path)],
            env=os.environ
            | {
                "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=250) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert Profile.load(path).network.num_ranks == 2
    assert "Wrote" in outputs[0][0] and outputs[1][0] == ""


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--codecs", "onebot"), "onebot"),
        (("--loopback", "--rate", "1gbit"), "leave them out with --loopback"),
        (("--batch", "2"), "give --model too"),
        (("--model", "vgg99"), "vgg99"),
        (("--rate", "fast"), "fast"),
        (("--device", "tpu"), "neither cpu nor cuda"),
        (
            ("-o", "no/p.json"),
            "No such file or directory; give --output (-o) a file in",
        ),
    ],
)
def test_refuses(arguments, complaint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert profile(*arguments) == 2
    assert complaint in capsys.readouterr().err
    assert list(Path(tmp_path).iterdir()) == []


def test_inside_a_job_there_is_no_lab(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert profile("--hosts", "4") == 2
    assert "leave out --hosts" in capsys.readouterr().err


def test_inside_a_job_there_is_no_timeout(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert profile("--timeout", "9") == 2
    assert "--timeout acts on the lab; leave it out inside a job" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "num_checks"), [("0", 1), ("1", 0)])
def test_only_rank_0_of_a_job_tries_the_file(rank, num_checks, monkeypatch, tmp_path):
    """Catches: a rank that takes away what another has just made."""
    tried = []
    started = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(profile_command.ui, "check_writable", lambda path, _: tried.append(path))
    monkeypatch.setattr(profile_command, "_in_job", lambda config: None)
    assert profile("--codecs", "none", "-o", str(tmp_path / "p.json")) == 0
    assert len(tried) == num_checks


def test_all_ranks_run_the_same_number_of_forwards(monkeypatch):
    """Catches: one more forward on rank 0, which hangs where DDP sends buffers of BatchNorm."""
    forwards = []

    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
            self.net[0].weight.register_hook(lambda grad: grad * 0)

        def forward(self, x):
            forwards[-1] += 1
            return self.net(x)

    line = dataclasses.replace(MODELS["mlp"], build=lambda **sizes: Counted())
    monkeypatch.setitem(MODELS, "mlp", line)
    monkeypatch.setattr(profile_bench, "MAX_STEPS", 4)
    cluster = ClusterOptions(hosts=2, loopback=True)
    told = benchmark(cluster, model="mlp", batch=4, codecs="none")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = []
        for rank in range(2):
            forwards.append(0)
            engine = SimpleNamespace(
                transport=SimpleNamespace(rank=rank),
                device=torch.device("cpu"),
                agree=lambda what, facts, share: [share],
                gather=lambda text: [text],
            )
            found.append(profile_bench._model(told, engine, lambda: None))
    finally:
        dist.destroy_process_group()
    assert forwards[0] == forwards[1]
    # Of a gradient that is zero all over no error can be told.
    errors = {gradient.name: set(gradient.errors) for gradient in found[0].gradients}
    assert errors["net.2.weight"] == {"none"} and errors["net.0.weight"] == set()


def test_a_message_that_overflows_has_a_large_error():
    """Catches: an error that a profile refuses, on rank 0 alone, while others wait for it."""
    given = [float("inf"), 0.1, float("nan")]
    assert [timing._finite(error) for error in given] == [timing.MOST_ERROR, 0.1, timing.MOST_ERROR]


def test_a_batch_script_of_slurm_is_no_rank():
    assert not in_a_job({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"})
    assert not in_a_job({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"})
    assert in_a_job({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"})
