"""`Session.profile` on one rank: a loop without hooks, what ends it early, and a disk that is full.

Two ranks under DDP are in `tests/torch/test_attach.py`.
"""

import numpy
import pytest
import torch.distributed as dist

import hipress.session
from hipress.errors import UsageError
from hipress.profile import Profile
from hipress.session.planner import Planner


@pytest.fixture(autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def start(**options):
    arrays = {"weight": numpy.ones((64, 64), numpy.float32), "bias": numpy.ones(64, numpy.float32)}
    return hipress.session.start(arrays, codec="int8", **options), arrays


def test_a_loop_without_hooks_is_profiled_in_steps_that_run_as_before(tmp_path, caplog):
    """Catches: a file before the last step, or a second one."""
    session, arrays = start()
    session.profile(tmp_path / "p.json", steps=4, codecs=["int8"])
    with caplog.at_level("INFO", "hipress"):
        for step in range(6):
            assert (tmp_path / "p.json").exists() == (step >= 4)
            session.average(arrays)
            if step == 3:
                (line,) = [text for text in caplog.messages if "holds links" in text]
                assert "2 codecs and 2 gradients of this job; next: hipress plan" in line
    found = Profile.load(tmp_path / "p.json")
    assert {one.name for one in found.model.gradients} == {"weight", "bias"}
    assert found.network.num_ranks == 1 and session.step == 6


def test_the_codecs_of_the_session_are_measured_too(tmp_path):
    session, _ = start()
    names = session._profiler._checked(session, 4, None)
    assert names == ("fp16", "bf16", "int8", "onebit", "dgc(ratio=0.001)", "topk(ratio=0.01)")


def test_detach_ends_it_with_a_warning(tmp_path, caplog):
    session, arrays = start()
    session.profile(tmp_path / "p.json", steps=5, codecs=["int8"])
    session.average(arrays)
    session.detach()
    with pytest.raises(UsageError, match="^this exchange is detached and has nothing to measure"):
        session.profile(tmp_path / "p.json")  # the last residuals are still to be sent
    with pytest.raises(UsageError, match="^this exchange is detached and has nothing to record"):
        session.timeline(str(tmp_path / "t.json"))
    for _ in range(6):
        session.average(arrays)
    assert "the session was detached" in caplog.text and not (tmp_path / "p.json").exists()
    with pytest.raises(UsageError, match="^this exchange is detached and has nothing to measure"):
        session.profile(tmp_path / "p.json")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), None])
def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog, error):
    """Catches: a training that ends because a disk is full, or because no step was timed."""

    def save(profile, path):
        raise error

    if error is None:
        monkeypatch.setattr(Planner, "_model_of", lambda planner, session: None)
    else:
        monkeypatch.setattr(Profile, "save", save)
    session, arrays = start()
    session.profile(tmp_path / "p.json", steps=4, codecs=["int8"])
    for _ in range(5):
        session.average(arrays)
    why = "a rank has timed no whole step" if error is None else "No space left on device"
    assert f"no profile is written to {tmp_path / 'p.json'}" in caplog.text and why in caplog.text


def test_without_an_exchange_there_is_no_profile(tmp_path, caplog):
    """Catches: a script with `profile` that does not run on one process."""
    session, _ = start(enabled=False)
    with caplog.at_level("INFO", logger="hipress"):
        session.profile(tmp_path / "p.json")
    assert "no profile is written: " in caplog.text and not (tmp_path / "p.json").exists()
