"""Checkpoints in shards, also loaded by `auto`: one rank, whose mean is what it gave."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from hipress import session
from hipress.casync.graphs.graph import Kind
from hipress.errors import UsageError
from hipress.session import Mode, Settings, selection, setup, shards
from hipress.session.session import Session
from tests.session.test_nothing_is_lost import Loop, all_of_it, averaged, gradient, start

SHAPE = (64, 80)


@pytest.fixture(autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stepped(codec="onebit", steps=range(3), **options):
    run = start(codec, **options)
    came = sum(averaged(run, gradient(step)) for step in steps)
    return run, came


# --- shards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["onebit", "dgc(ratio=0.05, warmup=6)", "momentum(ef(onebit))"])
def test_a_run_goes_on_bit_for_bit(tmp_path, codec):
    """Catches: state that is not written, or is given to another role, and a wrong step."""
    run, _ = stepped(codec)
    run.save(tmp_path / "sync")
    other = start(codec)
    other.load(tmp_path / "sync")
    assert other.step == 3
    for step in (3, 4):
        assert torch.equal(averaged(other, gradient(step)), averaged(run, gradient(step)))


def test_another_codec_owes_what_was_left(tmp_path):
    """Catches: residuals that a run with another codec drops, or adds in each step."""
    run, came = stepped()
    run.save(tmp_path / "sync")
    other = start("topk(ratio=0.1)")
    other.load(tmp_path / "sync")
    assert list(other.owed) == ["a"]
    came = came + averaged(other, gradient(3)) + averaged(other, gradient(4))
    came += all_of_it(other)
    torch.testing.assert_close(came, sum(map(gradient, range(5))), rtol=0, atol=1e-4)


def test_a_checkpoint_that_was_loaded_is_saved_as_it_was(tmp_path):
    """Catches: state that waits for its first step and is not written."""
    run, _ = stepped()
    other, third = start(), start()
    other.load_state_dict(run.state_dict())
    other.save(tmp_path / "sync")
    third.load(tmp_path / "sync")
    assert torch.equal(averaged(third, gradient(3)), averaged(run, gradient(3)))


def test_a_running_session_goes_back(tmp_path):
    """Catches: the state of later steps that stays beside the one that is loaded."""
    run, _ = stepped()
    run.save(tmp_path / "sync")
    wanted = [averaged(run, gradient(step)) for step in (3, 4)]
    run.load(tmp_path / "sync")
    assert run.step == 3
    assert torch.equal(averaged(run, gradient(3)), wanted[0])
    assert torch.equal(averaged(run, gradient(4)), wanted[1])


def test_scale_rates_and_what_is_owed_are_saved(tmp_path):
    """Catches: residuals in another unit, a forgotten learning rate, and what was thrown away."""
    adapter = Loop(scale=4.0, rates={"a": 0.25})
    run, _ = stepped(adapter=adapter)
    adapter.dropped = {"a"}
    averaged(run, gradient(9))
    run.save(tmp_path / "sync")
    other = start(adapter=Loop(scale=4.0))
    other.load(tmp_path / "sync")
    assert (other.scale, other.rates) == (4.0, {"a": 0.25})
    assert torch.equal(other.owed["a"], run.owed["a"])


def test_shards_lie_beside_others_in_one_checkpoint(tmp_path):
    """Catches: keys that DCP changes when they are an entry of something larger."""
    run, _ = stepped()
    model = {"weight": torch.ones(3)}
    dcp.save({"model": model, "sync": run.shards()}, checkpoint_id=tmp_path / "all")
    other = start()
    other.load(tmp_path / "all", entry="sync")
    assert torch.equal(averaged(other, gradient(3)), averaged(run, gradient(3)))
    with pytest.raises(UsageError, match="holds no codec state under 'exchange'; give entry="):
        other.load(tmp_path / "all", entry="exchange")


def test_shards_are_views_of_the_state():
    """Catches: a copy of all that a rank holds."""
    run, _ = stepped()
    held = {v.data_ptr() for _, state in run.engine.states for v in state.values()}
    found = {key: value for key, value in run.shards().items() if key.startswith("rank")}
    assert {value.data_ptr() for value in found.values()} == held


def test_an_interrupted_save_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    """Catches: a folder that is opened for writing before the new checkpoint is complete."""
    run, _ = stepped()
    run.save(tmp_path / "sync")
    wanted = averaged(run, gradient(3))

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        text = "cannot be written to .* rank 0: No space left on device; mend that and save again"
        with pytest.raises(UsageError, match=text):
            run.save(tmp_path / "sync")
    assert [path.name for path in tmp_path.iterdir()] == ["sync"]
    other = start()
    other.load(tmp_path / "sync")
    assert torch.equal(averaged(other, gradient(3)), wanted)


def test_a_save_that_ends_between_two_renames_is_found(tmp_path):
    """Catches: a checkpoint that is only there under its other name."""
    run, _ = stepped()
    run.save(tmp_path / "sync")
    (tmp_path / "sync").rename(tmp_path / "sync.old")
    start().load(tmp_path / "sync")
    run.save(tmp_path / "sync")
    run.save(tmp_path / "sync")
    assert [path.name for path in tmp_path.iterdir()] == ["sync"]


def test_what_is_no_checkpoint_changes_nothing(tmp_path):
    """Catches: half a checkpoint, and an error without the next step."""
    run, came = stepped()
    with pytest.raises(UsageError, match="holds no checkpoint; give the folder that sync.save"):
        run.load(tmp_path / "nothing")
    wider = session.start({"a": torch.zeros(65, 80)}, codec="onebit")
    wider.save(tmp_path / "wider")
    with pytest.raises(UsageError, match="'a' has 5200 elements and this model's has 5120; load"):
        run.load(tmp_path / "wider")
    run.save(tmp_path / "sync")
    for path in (tmp_path / "sync").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match="cannot be read: .*; load another one."):
        run.load(tmp_path / "sync")
    assert run.step == 3
    torch.testing.assert_close(
        came + all_of_it(run), sum(map(gradient, range(3))), rtol=0, atol=1e-4
    )


def test_a_session_that_does_nothing_pays_and_saves_what_is_owed(tmp_path):
    """Catches: a comparison run that ends at its first checkpoint, or loses the residuals."""
    run, came = stepped()
    run.save(tmp_path / "sync")
    idle = start(enabled=False)
    idle.load(tmp_path / "sync")
    assert idle.step == 3 and list(idle.owed) == ["a"]
    idle.save(tmp_path / "again")
    back = start()
    back.load(tmp_path / "again")
    for other in (idle, back):
        found = came + averaged(other, gradient(3)) + averaged(other, gradient(4))
        assert not other.owed
        found += torch.zeros(SHAPE) if other is idle else all_of_it(other)
        torch.testing.assert_close(found, sum(map(gradient, range(5))), rtol=0, atol=1e-4)


def foreign_file(folder):
    folder.mkdir()
    (folder / "model.pt").write_text("mine")
    return folder / "model.pt"


def foreign_old(folder):
    return foreign_file(folder.with_name("sync.old"))


def foreign_partial(folder):
    return foreign_file(folder.with_name("sync.partial"))


def file_in_the_way(folder):
    folder.write_text("mine")
    return folder


def other_checkpoint(folder):
    dcp.save({"model": torch.ones(3)}, checkpoint_id=folder)
    return folder / ".metadata"


FOREIGN = {
    foreign_file: "'model.pt', which sync.save has not written and would delete; give a folder of",
    foreign_old: "sync.old' holds 'model.pt', which sync.save has not written",
    foreign_partial: "sync.partial' holds 'model.pt', which sync.save has not written",
    file_in_the_way: "sync' is a file and would be replaced; give a folder of its own",
    other_checkpoint: "holds a checkpoint with 'model', which sync.save has not written",
}


@pytest.mark.parametrize("make", FOREIGN, ids=lambda make: make.__name__)
def test_nothing_that_belongs_to_others_is_deleted(tmp_path, make):
    """Catches: a model that was saved in the same folder, gone with the next `sync.save`."""
    run, _ = stepped()
    mine = make(tmp_path / "sync")
    with pytest.raises(UsageError, match=re.escape(FOREIGN[make])):
        run.save(tmp_path / "sync")
    assert mine.exists()
    run.save(tmp_path / "other")
    run.save(tmp_path / "other")  # its own is replaced


def test_statistics_count_the_steps_of_this_run(tmp_path):
    """Catches: bytes of a few steps over the steps of the whole training."""
    run, _ = stepped()
    run.save(tmp_path / "sync")
    other = start("onebit")
    other.load(tmp_path / "sync")
    averaged(other, gradient(3))
    assert (other.step, other.stats().num_steps) == (4, 1)


def test_keys_are_read_as_they_were_written():
    """Catches: names of parameters with slashes, dots or colons."""
    part = shards.Shard(3, Kind.BACK, 4, "residual", 0, 4096, "blocks/0.weight:x")
    assert shards.Shard.read(str(part)) == part


# --- auto -----------------------------------------------------------------------------------------


def uncompressed_auto():
    """Returns a session of `auto` whose steps are all uncompressed."""
    asked = selection.rules(
        codec=None, strategy=None, plan=None, exclude=(), include=(), min_size=0,
        default_codec="int8",
    )  # fmt: skip
    decision = setup.Decision(rules=asked, is_auto=True, codecs=("int8",))
    run = Session(asked, Settings())
    setup.begin(run, decision, [session._spec("a", torch.zeros(SHAPE))], ["a"])
    run.auto.begin = lambda run: (Mode.PLAIN, None)
    return run


@pytest.mark.parametrize("form", ["state_dict", "shards"])
@pytest.mark.parametrize("codec", ["onebit", "dgc(ratio=0.05)"])
def test_auto_owes_the_residual_and_says_what_it_drops(tmp_path, caplog, form, codec):
    """Catches: momentum that a run of `auto` drops without a word, or a residual that it loses."""
    run = start(codec)
    for step in range(3):
        averaged(run, gradient(step))
    held = run.engine.states.assemble("a", 64 * 80, torch.device("cpu"))
    left = sum(v for (_, _, key), v in held.items() if key == "residual")
    other = uncompressed_auto()
    if form == "state_dict":
        other.load_state_dict(run.state_dict())
    else:
        run.save(tmp_path / "sync")
        other.load(tmp_path / "sync")
    lost = [text for text in caplog.messages if "the momentum in the checkpoint is dropped" in text]
    assert len(lost) == codec.startswith("dgc")
    torch.testing.assert_close(averaged(other, torch.zeros(SHAPE)).reshape(-1), left)
