"""What is in `.grad` when a backward pass begins, and what DDP does with it: one rank."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import hipress
import hipress.torch
from hipress.errors import UsageError
from tests.torch.scripts.models import Ledger

STEPS = 25
EXACT = "momentum(none, nesterov=false)"
"""Sends momentum whole, so that SGD's own is the reference."""


@pytest.fixture(autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def module():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 96, bias=False), nn.Tanh(), nn.Linear(96, 64, bias=False))


def loss_of(model, number):
    generator = torch.Generator().manual_seed(number)
    return (model(torch.randn(8, 64, generator=generator)) - 1).pow(2).mean()


def exchanged(model, codec, door, **options):
    ddp = DDP(model, **options)
    if door == "attach":
        return ddp, hipress.attach(ddp, codec)
    sync, hook = hipress.torch.comm_hook(codec)
    ddp.register_comm_hook(sync, hook)
    return ddp, sync


# --- several backwards of one step ----------------------------------------------------------------


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("door", ["attach", "hook"])
@pytest.mark.parametrize("codec", ["momentum(ef(onebit))", "dgc(ratio=0.05)"])
def test_momentum_of_momentum_is_refused(codec, door, view):
    """Catches: gradients that grow from step to step, since the mean in .grad is sent again."""
    ddp, sync = exchanged(module(), codec, door, gradient_as_bucket_view=view)
    for number in range(3):
        ddp.zero_grad()
        loss_of(ddp, number).backward()
    with pytest.raises(UsageError) as caught:
        loss_of(ddp, 3).backward()
    text = str(caught.value)
    assert "added to the means of step 3" in text and "\n" not in text
    assert all(way in text for way in ("zero_grad()", "no_sync()", "without momentum"))
    assert sync.step == 3


def test_other_codecs_may_add_to_the_mean():
    """Catches: a refusal where DDP's own arithmetic is right."""
    ddp, sync = exchanged(module(), "onebit", "attach")
    ledger = Ledger(ddp.module)
    for number in range(3):
        ledger.expect(lambda model, number=number: loss_of(model, number))
        loss_of(ddp, number).backward()
    ledger.note()
    assert max(ledger.gaps(sync.state_dict()).values()) < 1e-6


def clear_to_none(ddp, optimizer, parts):
    optimizer.zero_grad()
    accumulate(ddp, [lambda part=part: loss_of(ddp, part) for part in parts])


def clear_to_zero(ddp, optimizer, parts):
    optimizer.zero_grad(set_to_none=False)
    accumulate(ddp, [lambda part=part: loss_of(ddp, part) for part in parts])


def clear_late(ddp, optimizer, parts):
    loss = loss_of(ddp, parts[0]) if len(parts) == 1 else None
    optimizer.zero_grad()
    made = [lambda part=part: loss_of(ddp, part) for part in parts]
    accumulate(ddp, made if loss is None else [lambda: loss])


def accumulate(ddp, losses):
    for number, make in enumerate(losses, 1):
        is_last = number == len(losses) or not isinstance(ddp, DDP)
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            make().backward()


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("clear", [clear_to_none, clear_to_zero, clear_late])
@pytest.mark.parametrize("door", ["attach", "hook"])
def test_momentum_of_a_codec_is_that_of_the_optimizer(door, clear, micro, view):
    """Catches: a false alarm for a way to clear gradients; momentum that is lost or doubled."""
    made = module()
    twin = copy.deepcopy(made)
    ddp, sync = exchanged(made, EXACT, door, gradient_as_bucket_view=view)
    own = torch.optim.SGD(ddp.parameters(), lr=0.05)
    reference = torch.optim.SGD(twin.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        parts = range(micro * step, micro * step + micro)
        clear(ddp, own, parts)
        own.step()
        clear(twin, reference, parts)
        reference.step()
    assert sync.step == STEPS and sync.stats().num_compressed == 2
    for one, other in zip(made.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_gradient_that_was_not_used_is_looked_at_too():
    """Catches: a second backward that does not reach the parameter which stands for all."""
    model = Parts()
    ddp, _ = exchanged(model, "momentum(onebit)", "attach", find_unused_parameters=True)
    x = torch.randn(8, 64)
    for use in ((0,), (0, 1)):
        ddp.zero_grad()
        ddp(x, use).sum().backward()
    for use in ((0,), (1,)):
        twin = copy.deepcopy(model)
        other, _ = exchanged(twin, "momentum(onebit)", "attach", find_unused_parameters=True)
        other(x, (0, 1)).sum().backward()
        with pytest.raises(UsageError, match="added to the means"):
            other(x, use).sum().backward()


def test_cleared_gradients_cost_no_look_at_their_values(monkeypatch):
    """Catches: a host that waits for the device in every step to see whether gradients are zero."""
    looks = []
    real = torch.Tensor.any
    monkeypatch.setattr(torch.Tensor, "any", lambda self: looks.append(1) or real(self))
    ddp, sync = exchanged(module(), EXACT, "attach")
    for number in range(4):
        ddp.zero_grad()
        loss_of(ddp, number).backward()
    assert sync.step == 4 and not looks
    for number in range(4):
        for parameter in ddp.parameters():
            parameter.grad.zero_()
        for part in range(3):
            with ddp.no_sync():
                loss_of(ddp, number + part).backward()
        loss_of(ddp, number).backward()
    assert sync.step == 8 and len(looks) == 4


def test_the_model_is_freed_with_its_exchange():
    """Catches: a parameter that keeps the exchange alive, or the other way round."""
    import gc
    import time
    import weakref

    ddp, sync = exchanged(module(), EXACT, "attach")
    loss_of(ddp, 0).backward()
    adapter = weakref.ref(sync.adapter)
    parameter = next(ddp.parameters())
    del ddp, sync
    end = time.monotonic() + 10  # a thread of the engine may hold its last exchange for a moment
    while adapter() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.05)
    assert adapter() is None
    parameter.sum().backward()


# --- parameters that no rank used -----------------------------------------------------------------


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.parts = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

    def forward(self, x, use):
        for number in use:
            x = self.parts[number](x)
        return x


USES = [(0, 1, 2, 3), (0,), (0, 2), (0, 1, 2, 3), (0, 3), (0,)]


@pytest.mark.filterwarnings("ignore:find_unused")
@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("door", ["attach", "hook"])
def test_what_ddp_throws_away_comes_again(door, to_none, view):
    """Catches: gradients of unused layers that a bare hook loses, since .grad is not None."""
    model = Parts()
    ddp, sync = exchanged(
        model, "onebit", door, find_unused_parameters=True, gradient_as_bucket_view=view
    )
    ledger = Ledger(model)
    for step, use in enumerate(USES):

        def loss(one, step=step, use=use):
            generator = torch.Generator().manual_seed(step)
            return (one(torch.randn(8, 64, generator=generator), use) - 1).pow(2).mean()

        ledger.expect(loss)
        ddp.zero_grad(set_to_none=to_none)
        loss(ddp).backward()
        ledger.note()
    state = sync.state_dict()
    names = {sync.adapter._names[id(p)]: name for name, p in model.named_parameters()}
    for part in ("mean", "owed"):
        state[part] = {names[name]: value for name, value in state[part].items()}
    assert max(ledger.gaps(state).values()) < 1e-6


@pytest.mark.filterwarnings("ignore:find_unused")
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("door", ["attach", "hook"])
def test_unused_parameters_make_the_host_wait_once(door, to_none, monkeypatch):
    """Catches: a comparison of values on the host for each gradient, which waits for a GPU."""
    ddp, sync = exchanged(Parts(), "onebit", door, find_unused_parameters=True)
    waits = []

    def count(name):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *args: waits.append(name) or real(self, *args)
        )

    for name in ("tolist", "item", "__bool__", "__int__", "__float__"):
        count(name)
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda *pair: waits.append("equal") or equal(*pair))
    found = []
    for use in USES:
        ddp.zero_grad(set_to_none=to_none)
        loss = ddp(torch.ones(8, 64), use).sum()
        end = sync.end_step

        def timed(end=end):
            waits.clear()
            end()
            found.append(len(waits))

        with monkeypatch.context() as patch:
            patch.setattr(sync, "end_step", timed)
            loss.backward()
    assert found == [0, 1, 1, 0, 1, 1]


# --- learning rates -------------------------------------------------------------------------------


def test_groups_added_later_and_rates_of_every_kind():
    """Catches: rates read at attach only, a tensor as rate, an optimizer without a rate."""
    model = Parts()
    optimizer = torch.optim.SGD(model.parts[0].parameters(), lr=torch.tensor(0.5))
    ddp = DDP(model)
    sync = hipress.attach(ddp, "momentum(onebit)", optimizer=optimizer)
    x = torch.randn(8, 64)
    for part, rate in ((None, 0.5), (1, 0.5), (2, 0.25), (3, 0.125)):
        if part is not None:
            optimizer.add_param_group({"params": model.parts[part].parameters(), "lr": rate})
        ddp.zero_grad()
        ddp(x, range(4)).sum().backward()
        optimizer.step()
    assert sync.rates == {
        "parts.0.weight": 0.5, "parts.1.weight": 0.5, "parts.2.weight": 0.25,
        "parts.3.weight": 0.125,
    }  # fmt: skip
    for group in optimizer.param_groups:
        group["lr"] = 0.0625
    ddp.zero_grad()
    ddp(x, range(4)).sum().backward()
    (bucket,) = sync.layout._buckets.values()
    found = {group.names: sync._rate_ratio(group) for group in bucket.groups}
    assert found == {
        ("parts.3.weight",): 2.0, ("parts.2.weight",): 4.0, ("parts.1.weight",): 8.0,
        ("parts.0.weight",): 8.0,
    }  # fmt: skip
    for group in optimizer.param_groups:
        group["lr"] = None
    assert sync.adapter.learning_rates() == {}


@pytest.mark.parametrize(("momentum", "count"), [(0.0, 1), (0.9, 0)])
def test_an_optimizer_with_momentum_needs_none_of_a_codec(momentum, count, caplog):
    """Catches: a warning about momentum that the optimizer has; none about that of others."""
    model = nn.Linear(64, 64)
    groups = [{"params": [model.weight], "momentum": momentum}, {"params": [model.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    sync = hipress.attach(DDP(model), "momentum(onebit)", optimizer=optimizer, enabled=False)
    assert sum(record.levelname == "WARNING" for record in caplog.records) == count
    assert not sync.enabled


def test_a_bare_hook_warns_of_momentum_that_counts_twice(caplog):
    """Catches: an optimizer that is given to a bare hook and never looked at."""
    ddp = DDP(module())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    ddp.register_comm_hook(*hipress.torch.comm_hook("momentum(onebit)", optimizer=optimizer))
    for number in range(2):
        ddp.zero_grad()
        loss_of(ddp, number).backward()
    (text,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "so it counts twice" in text


def test_options_that_are_loaded_are_checked(caplog):
    """Catches: the momentum of a checkpoint of plain DDP, which counts twice from then on."""
    ddp = DDP(module())
    plain = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    hipress.attach(ddp, "momentum(onebit)", optimizer=optimizer)
    for number in range(3):
        optimizer.zero_grad()
        loss_of(ddp, number).backward()
        assert caplog.text.count("so it counts twice") == (number > 0)
        optimizer.load_state_dict(plain.state_dict())
