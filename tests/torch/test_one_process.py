"""`hipress.attach` where there is nobody to exchange gradients with: scripts run unchanged."""

import copy
import gc
import logging
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import hipress
import hipress.torch
from hipress import snapshots
from hipress.errors import UsageError
from hipress.torch.ddp import wrapped

ALONE = "there is one process, which has no other to send to"


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def module():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))


def picture():
    """A model whose first weight is not contiguous."""
    torch.manual_seed(3)
    made = nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), nn.Flatten(), nn.Linear(24, 3))
    return made.to(memory_format=torch.channels_last)


def batch(step, shape=(16, 32)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


def gradients(model, x, scale=1.0):
    model.zero_grad()
    (scale * model(x).square().mean()).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def said(caplog, level="INFO"):
    return [r.getMessage() for r in caplog.records if r.name == "hipress" and r.levelname == level]


@pytest.mark.parametrize("options", [{}, {"codec": "onebit"}, {"enabled": False}])
def test_a_script_runs_unchanged(tmp_path, caplog, options):
    """Catches: an `if` that the rest of a script would need, another training, many lines."""
    plain, model = module(), module()
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    caplog.set_level(logging.INFO, "hipress")
    sync = hipress.attach(model, optimizer=optimizers[1], log_every=1, check_every=1, **options)
    assert said(caplog) == [f"{ALONE}: hipress does nothing."]
    assert sync.model is model and not sync.enabled and not dist.is_initialized()
    for step in range(3):
        for one, optimizer in zip((plain, sync.model), optimizers, strict=True):
            gradients(one, batch(step))
            optimizer.step()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert str(sync.stats()) == f"hipress does nothing: {ALONE}."
    assert sync.stats().sent_bytes == 0 and sync.stats().num_gradients == 4
    assert sync.skipped == dict.fromkeys(["2.bias", "2.weight", "0.bias", "0.weight"], ALONE)
    assert sync.plan is None and ALONE in repr(sync)
    state = sync.state_dict()
    torch.save(state, tmp_path / "state.pt")
    sync.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    sync.save(tmp_path / "sync")
    sync.load(tmp_path / "sync")
    assert list(sync.shards()) == ["facts"]
    sync.check_replicas()
    sync.timeline(str(tmp_path / "trace.json"))
    sync.profile(str(tmp_path / "profile.json"))
    sync.report(str(tmp_path / "report.html"))
    assert said(caplog)[1:] == [
        f"no timeline is recorded: {ALONE}.",
        f"no profile is written: {ALONE}.",
        f"no report is written: {ALONE}.",
    ]
    sync.detach()
    sync.detach()
    assert not said(caplog, "WARNING")
    with pytest.raises(UsageError, match=f"this session does nothing: {ALONE}."):
        _ = sync.engine


def test_one_rank_of_a_launcher_is_one_process(monkeypatch, group):
    """Catches: a DDP, or a store that is opened, for a job of one rank."""
    assert isinstance(hipress.attach(module(), "onebit").model, nn.Sequential)
    dist.destroy_process_group()
    try:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": "29500"}.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        assert isinstance(hipress.attach(module(), "onebit").model, nn.Sequential)
        assert not dist.is_initialized()
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_a_ddp_of_one_rank_keeps_its_hook_and_says_so(group, caplog):
    """Catches: a line that speaks of bytes which nobody sends."""
    model = DDP(nn.Sequential(nn.Linear(64, 128)))
    caplog.set_level(logging.INFO, "hipress")
    sync = hipress.attach(model, "onebit", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert sync.model is model
    assert said(caplog) == [
        "1 of 2 gradients (98.5 % of the elements) are compressed with onebit, although one rank "
        "has no other rank to send to; optimizer SGD was checked."
    ]


def test_the_session_keeps_the_ddp(group):
    """Catches: `sync.model` that is None where the caller keeps the session alone."""
    sync = hipress.attach(DDP(module()), "onebit")
    gc.collect()
    gradients(sync.model, batch(0))
    assert sync.step == 1


def test_a_refused_attach_is_not_shown_by_top(group, monkeypatch, tmp_path):
    """Catches: ranks in `hipress top` that do not exist."""
    monkeypatch.setattr(snapshots, "folder", lambda *_: tmp_path)
    model = DDP(module())
    sync = hipress.attach(model, "onebit")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UsageError, match="a communication hook already") as kept:
        hipress.attach(model, "onebit")
    assert sorted(tmp_path.iterdir()) == before and len(before) == 1
    assert sync.enabled and kept


def test_a_module_that_attach_has_wrapped_is_trained_in_ddp(group):
    """Catches: ranks that train the plain module apart, in silence."""
    model = module()
    ddp = wrapped(model)
    with pytest.raises(UsageError, match="is trained without its DistributedDataParallel, so .*"
                       "train with sync.model"):  # fmt: skip
        model(batch(0))
    for one in (ddp, DDP(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        gradients(one, batch(0))
    with torch.no_grad():
        model(batch(0))
    model.eval()(batch(0))
    model.train().requires_grad_(False)
    model(batch(0))
    model.requires_grad_(True)
    del ddp, one
    gc.collect()
    gradients(model, batch(0))


def test_momentum_that_only_the_codec_has_is_missed(caplog):
    """Catches: a run on a laptop that trains without momentum, without a word."""
    model = module()
    hipress.attach(model, "momentum(ef(onebit))", min_size=0)
    (text,) = said(caplog, "WARNING")
    assert "applies momentum, and on one process nothing does: set the momentum" in text
    caplog.clear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hipress.attach(model, "momentum(ef(onebit))", min_size=0, optimizer=optimizer)
    assert not said(caplog, "WARNING")


# --- checkpoints ----------------------------------------------------------------------------------


def trained(make, shape, folder=None, codec="onebit"):
    """The checkpoint of a compressed run, what came of its gradients, and the gradients."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        alone, model = make(), DDP(make())
        sync = hipress.attach(model, codec, min_size=0, include="*")
        given = [gradients(alone, batch(step, shape)) for step in range(3)]
        came = [gradients(model, batch(step, shape)) for step in range(3)]
        if folder is not None:
            sync.save(folder)
        return copy.deepcopy(sync.state_dict()), came, given
    finally:
        dist.destroy_process_group()


def total(rows):
    return [sum(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("make", [module, picture])
@pytest.mark.parametrize("how", ["state", "folder"])
def test_what_other_ranks_have_not_sent_comes_with_the_next_gradient(make, how, tmp_path):
    """Catches: residuals that one process drops, adds twice, or in the wrong order of memory."""
    shape = (16, 32) if make is module else (2, 4, 4, 4)
    state, came, given = trained(make, shape, tmp_path / "sync")
    state["world_size"] = 4  # of which only the mean counts
    model = make()
    sync = hipress.attach(model, "onebit", min_size=0, include="*")
    if how == "state":
        sync.load_state_dict(state)
    else:
        sync.load(tmp_path / "sync")
    assert sync.step == 3
    again = make()
    other = hipress.attach(again, "onebit", min_size=0, include="*")
    other.load_state_dict(sync.state_dict())  # before it is paid
    for one, session in ((model, sync), (again, other)):
        now = [gradients(one, batch(step, shape)) for step in (3, 4)]
        assert not session.owed
        plain = [gradients(make(), batch(step, shape)) for step in (3, 4)]
        for a, b in zip(total([*came, *now]), total([*given, *plain]), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        # Paid once: the second gradient is the model's own.
        for a, b in zip(now[1], plain[1], strict=True):
            assert torch.equal(a, b)
        assert any(not torch.equal(a, b) for a, b in zip(now[0], plain[0], strict=True))
    # And back to a compressed run.
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = DDP(make())
        back = hipress.attach(ddp, "onebit", min_size=0, include="*")
        back.load_state_dict(sync.state_dict())
        assert back.step == 3 and not back.owed
    finally:
        dist.destroy_process_group()


def test_what_is_owed_has_the_scale_of_the_gradient_it_is_added_to():
    """Catches: residuals of a scaled run that are added to unscaled gradients as they are."""
    state, came, given = trained(module, (16, 32))
    for mean in state["mean"].values():
        mean["residual"] *= 8
    state["scale"] = 8.0
    model = module()
    sync = hipress.attach(
        model, "onebit", scaler=torch.amp.GradScaler("cpu", init_scale=2.0), min_size=0
    )
    sync.load_state_dict(state)
    now = [one / 2 for one in gradients(model, batch(3), scale=2.0)]
    plain = gradients(module(), batch(3))
    for a, b in zip(total([*came, now]), total([*given, plain]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_does_not_lose_residuals_in_silence(tmp_path):
    """Catches: dcp.load, which reads only what the session of one process would save."""
    state, *_ = trained(module, (16, 32))
    state["world_size"] = 2
    dcp.save({"sync": state}, checkpoint_id=tmp_path)
    sync = hipress.attach(module(), "onebit", min_size=0)
    sync.load_state_dict(sync.state_dict())
    with pytest.raises(Exception, match="would lose the residuals of 2 ranks, because there is "
                       "one process, .*: save sync.shards()"):  # fmt: skip
        dcp.load({"sync": sync}, checkpoint_id=tmp_path)
    assert sync.step == 0


def test_momentum_of_a_checkpoint_is_dropped_with_a_word(caplog):
    """Catches: the momentum of a codec that vanishes in silence."""
    state, *_ = trained(module, (16, 32), codec="momentum(ef(onebit))")
    sync = hipress.attach(module(), "onebit", min_size=0)
    caplog.clear()
    sync.load_state_dict(state)
    assert said(caplog, "WARNING") == [
        f"momentum of the checkpoint's codecs is dropped: {ALONE}, so nothing exchanges it."
    ]


def test_the_checkpoint_of_another_model_is_refused():
    """Catches: residuals of another model that are ignored, or added to what has their name."""
    state, *_ = trained(module, (16, 32))
    sync = hipress.attach(nn.Sequential(nn.Linear(32, 32)), "onebit")
    with pytest.raises(UsageError, match="'2.bias', which this model does not have; load the"):
        sync.load_state_dict(state)
    assert not sync.owed


# --- what is refused ------------------------------------------------------------------------------


class FSDPLinear(nn.Linear):
    """Named as torch's fully_shard names what it has sharded."""


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (FSDPLinear(2, 2), "attach was given a FSDPLinear, which is or holds a FSDPLinear; FSDP"),
        (nn.Sequential(FSDPLinear(2, 2)), "a Sequential, which is or holds a FSDPLinear; FSDP is"),
        (nn.DataParallel(nn.Linear(2, 2)), "a DataParallel; DataParallel is not supported: give"),
        (torch.ones(3), "attach was given a Tensor; give a torch.nn.Module, in DDP or not."),
    ],
    ids=["fsdp", "inside", "data parallel", "tensor"],
)
def test_what_cannot_be_wrapped_is_refused(model, text):
    """Catches: sharded parameters that are taken for whole ones."""
    with pytest.raises(UsageError, match=text):
        hipress.attach(model)


def test_mistakes_are_found_on_one_process_too():
    """Catches: a typo that only the cluster finds."""
    with pytest.raises(UsageError, match="did you mean 'onebit'"):
        hipress.attach(module(), "onebti")
    with pytest.raises(UsageError, match="exclude pattern 'head' matches no parameter"):
        hipress.attach(module(), exclude="head")
