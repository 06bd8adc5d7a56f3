"""A checkpoint is complete or not there; what is no checkpoint of this job is refused."""

import os

import pytest
import torch

from hipress.errors import UsageError
from hipress.train import checkpoints


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
