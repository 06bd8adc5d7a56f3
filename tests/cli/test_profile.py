"""`hipress profile`: a small run on loopback and inside a job, and what it refuses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hipress.cli.main import main
from hipress.cli.profile import in_a_job
from hipress.profile import Profile

pytestmark = pytest.mark.alone


@pytest.fixture(autouse=True)
def not_in_a_job(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


def profile(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["profile", *arguments])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


def test_measures_links_codecs_and_a_model_on_loopback(tmp_path, capsys):
    path = tmp_path / "p.json"
    arguments = ("--loopback", "--hosts", "2", "--model", "mlp", "--codecs", "none,onebit")
    assert profile(*arguments, "-o", str(path), "--json", "--timeout", "90") == 0
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


def test_measures_between_the_ranks_of_a_job(tmp_path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
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
    outputs = [rank.communicate(timeout=90) for rank in ranks]
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
        (("-o", "no/such/folder/p.json"), "cannot write"),
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


def test_a_batch_script_of_slurm_is_no_rank():
    assert not in_a_job({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"})
    assert not in_a_job({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"})
    assert in_a_job({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"})
