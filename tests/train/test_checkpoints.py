"""A checkpoint is complete or not there; what is no checkpoint of this job is refused."""

import os
from types import SimpleNamespace

import pytest
import torch

from hipress.errors import UsageError
from hipress.train import checkpoints
from hipress.train.batches import Sampler


def test_there_and_back(tmp_path):
    assert checkpoints.read(tmp_path) is None
    checkpoints.write(tmp_path, {"examples": 3, "model": {"w": torch.arange(3)}})
    found = checkpoints.read(tmp_path)
    assert found["examples"] == 3 and found["model"]["w"].tolist() == [0, 1, 2]
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_a_write_that_fails_leaves_the_last_one(tmp_path, monkeypatch):
    checkpoints.write(tmp_path, {"examples": 3})

    def half(state, out):
        out.write(b"PK half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(UsageError, match="No space left on device; make room and continue with"):
        checkpoints.write(tmp_path, {"examples": 4})
    assert os.listdir(tmp_path) == ["checkpoint.pt"]
    assert checkpoints.read(tmp_path)["examples"] == 3


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 cut short"])
def test_files_that_are_none(tmp_path, content):
    (tmp_path / checkpoints.NAME).write_bytes(content)
    with pytest.raises(UsageError, match="is no checkpoint that can be read .*; move it away"):
        checkpoints.read(tmp_path)


def test_a_later_version(tmp_path):
    torch.save({"version": 2}, tmp_path / checkpoints.NAME)
    with pytest.raises(UsageError, match="of version 2 and this HiPress reads 1; use the release"):
        checkpoints.read(tmp_path)


def test_another_job(tmp_path):
    with pytest.raises(UsageError, match="has model 'cnn' and this job 'vgg'; give the same"):
        checkpoints.compare(tmp_path, {"data": "d", "model": "cnn"}, {"data": "d", "model": "vgg"})


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written: .*; give a folder that may be"):
        checkpoints.check_folder(tmp_path / "file", resumes=False)
    checkpoints.check_folder(tmp_path / "new" / "deep", resumes=False)
    assert os.listdir(tmp_path / "new" / "deep") == []


def job(folder, num_ranks, step=0, rate=0.1):
    """As much of a job as a checkpoint needs; its ranks are one process."""
    model = torch.nn.Linear(2, 1)
    config = SimpleNamespace(
        checkpoint=folder, steps=None, **dict.fromkeys(checkpoints.IDENTITY, "same")
    )
    return SimpleNamespace(
        config=config,
        data=SimpleNamespace(sizes={}),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9),
        scaler=None,
        sync=SimpleNamespace(enabled=False),
        sampler=Sampler(num_examples=103, batch=5, rank=0, num_ranks=num_ranks, seed=0),
        ranks=SimpleNamespace(
            by_first=lambda write: write(),
            jointly=lambda what, load: load(),
            gather=lambda mine: [tuple(mine.tolist())],
        ),
        rank=0,
        num_ranks=num_ranks,
        num_steps=100,
        step=step,
    )


@pytest.mark.parametrize(("num_ranks", "step"), [(4, 7), (2, 14), (1, 28)])
def test_a_run_goes_on_at_the_same_example(tmp_path, num_ranks, step):
    """Catches: examples that another number of ranks trains on twice, or not at all."""
    checkpoints.save(job(tmp_path, 4, step=7))
    resumed = job(tmp_path, num_ranks)
    assert checkpoints.resume(resumed) == step
    first = resumed.sampler.indices(step)[0]
    assert first == job(tmp_path, 4).sampler.indices(7)[0]


def test_the_options_are_those_of_the_job_and_the_state_that_of_the_checkpoint(tmp_path):
    """Catches: a resumed run that ignores a new --lr, or begins without momentum."""
    saved = job(tmp_path, 2, step=3)
    saved.model(torch.ones(1, 2)).sum().backward()
    saved.optimizer.step()
    checkpoints.save(saved)
    resumed = job(tmp_path, 2, rate=0.01)
    checkpoints.resume(resumed)
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [0.01]
    assert torch.equal(resumed.model.weight, saved.model.weight)
    held = [state["momentum_buffer"] for state in resumed.optimizer.state.values()]
    assert len(held) == 2 and all(bool(one.any()) for one in held)


def test_parameters_that_are_no_numbers_are_not_saved(tmp_path):
    """Catches: a good checkpoint that is replaced by one from which nothing can go on."""
    broken = job(tmp_path, 2)
    seen = []
    broken.check_finite = lambda what, value: seen.append(what) or 1 / 0
    with torch.no_grad():
        broken.model.weight.fill_(torch.nan)
    with pytest.raises(ZeroDivisionError):
        checkpoints.save(broken)
    assert seen == ["norm of the parameters"] and os.listdir(tmp_path) == []
