"""`hipress.torch.AdamW` on one rank: torch's where gradients are exchanged, and with momentum."""

import copy
import gc
import math
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_post_hook

import hipress
import hipress.torch
from hipress.errors import UsageError
from hipress.session.momentum import REFRESH
from hipress.torch.optim import LEAST_SHARE, flat

EXACT = "topk(ratio=1.0, exact=true)"
"""Sends everything, but does not promise to keep sizes: momentum is exchanged, and nothing lost."""
SCHEDULE = {"refresh_warmup": 4, "refresh_every": 5}


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def module(dtype=torch.float32):
    torch.manual_seed(3)
    layers = nn.Linear(64, 96, bias=False), nn.Tanh(), nn.Linear(96, 64)
    return nn.Sequential(*layers).to(dtype)


def loss_of(model, number):
    generator = torch.Generator().manual_seed(number)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(8, 64, generator=generator).to(dtype)
    return (model(inputs) - 1).pow(2).mean()


def attached(codec=EXACT, *, dtype=torch.float32, optimizer=hipress.torch.AdamW, **options):
    ddp = DDP(module(dtype))
    made = optimizer(ddp.parameters(), lr=0.01, **{**SCHEDULE, **options})
    return ddp, made, hipress.attach(ddp, codec, optimizer=made)


def train(ddp, optimizer, numbers, clip=None):
    for number in numbers:
        optimizer.zero_grad()
        loss_of(ddp, number).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(ddp.parameters(), clip)
        optimizer.step()


def same(one, other):
    return all(map(torch.equal, one.parameters(), other.parameters()))


# --- without an exchange --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"foreach": True}, {"fused": True}, {"amsgrad": True}, {"capturable": False},
        {"maximize": True, "weight_decay": 0.1}, {"betas": (0.5, 0.9), "eps": 1e-3},
    ],
)  # fmt: skip
def test_without_an_exchange_every_bit_is_torchs(name, options):
    """Catches: a step of our own where torch's would do."""
    ours, theirs = module(), module()
    one = getattr(hipress.torch, name)(ours.parameters(), lr=0.01, **options)
    other = getattr(torch.optim, name)(theirs.parameters(), lr=0.01, **options)
    train(ours, one, range(6))
    train(theirs, other, range(6))
    assert same(ours, theirs)
    assert isinstance(one, getattr(torch.optim, name))


def test_hooks_of_a_step_run_once():
    """Catches: hooks that torch's step runs a second time."""
    torch.optim.AdamW(module().parameters())  # patches the step of its class
    model, calls = module(), []
    optimizer = hipress.torch.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    train(model, optimizer, [0])
    assert calls == ["pre", "post"]


def test_a_closure_is_called_once(alone):
    ddp, optimizer, _ = attached()

    def closure():
        optimizer.zero_grad()
        loss = loss_of(ddp, 0)
        loss.backward()
        return loss

    for _ in range(7):
        assert optimizer.step(closure).item() > 0
    assert optimizer.state[ddp.module[0].weight]["step"] == 7


# --- the exchange of momentum ---------------------------------------------------------------------


class Reference:
    """The scheme for one parameter, in float64: what travels, both moments, the update."""

    def __init__(self, parameter, *, lr=0.01, betas=(0.9, 0.999), eps=1e-8, decay=0.01, l2=False):
        self.value = parameter.detach().double().clone()
        self.m = torch.zeros_like(self.value)
        self.v = torch.zeros_like(self.value)
        self.lr, self.betas, self.eps, self.decay, self.l2 = lr, betas, eps, decay, l2
        self.step = self.updates = self.last = 0
        self.weight = 0.0  # of all gradients in v

    @property
    def refreshes(self):
        since = self.step + 1 - self.last if self.updates else 0
        return self.updates < SCHEDULE["refresh_warmup"] or since >= SCHEDULE["refresh_every"]

    def update(self, gradient, *, compressed=True):
        b1, b2 = self.betas
        gradient = gradient.double()
        refreshes = not compressed or self.refreshes
        if compressed and refreshes:
            gradient = through_refresh(gradient.float()).double()
        if self.l2:
            gradient = gradient + self.decay * self.value
        self.step += 1
        self.m = b1 * self.m + (1 - b1) * gradient
        if refreshes:
            kept = b2 ** math.sqrt(self.step - self.last)
            self.v = kept * self.v + (1 - kept) * gradient**2
            self.weight = kept * self.weight + 1 - kept
            self.updates, self.last = self.updates + 1, self.step
        if not self.l2:
            self.value *= 1 - self.lr * self.decay
        v = self.v
        if self.updates < self.step:  # momentum has been exchanged
            v = v.clamp(min=LEAST_SHARE * v.mean())
        root = (v / self.weight).sqrt() + self.eps
        self.value -= self.lr * self.m / (1 - b1**self.step) / root


def through_refresh(gradient):
    """What a refresh gives back on one rank, coded by the worker and by the aggregator."""
    back = REFRESH.aggregator(1)
    sent = REFRESH.decode(REFRESH.encode(gradient.reshape(-1)))
    return back.decode(back.encode(sent)).view(gradient.shape)


@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_both_moments_follow_the_scheme(alone, name):
    """Catches: a moment that is updated in the wrong step or twice, a wrong correction of bias."""
    l2 = name == "Adam"
    ddp, optimizer, sync = attached(
        optimizer=getattr(hipress.torch, name), weight_decay=0.01, betas=(0.8, 0.95)
    )
    weights = ddp.module[0].weight, ddp.module[2].weight, ddp.module[2].bias
    known = [Reference(p, betas=(0.8, 0.95), l2=l2) for p in weights]
    for number in range(18):
        plain = copy.deepcopy(ddp.module)
        loss_of(plain, number).backward()
        gradients = [plain[0].weight.grad, plain[2].weight.grad, plain[2].bias.grad]
        for one, gradient, compressed in zip(known, gradients, (True, True, False), strict=True):
            one.update(gradient, compressed=compressed)
        train(ddp, optimizer, [number])
        for parameter, one in zip(weights, known, strict=True):
            moved = (one.value - parameter.detach().double()).abs().max()
            assert moved < 2e-5, (number, moved)
            # The next gradient is that of our parameters, which differ from these by rounding.
            one.value = parameter.detach().double().clone()
    assert known[0].updates == 4 + 2 and known[2].updates == 18
    assert sync.stats().skipped == {"2.bias": "one dimension (norm or bias)"}


LAYOUTS = {
    "contiguous": lambda: torch.randn(64, 8, 3, 3),
    "channels_last": lambda: torch.randn(64, 8, 3, 3).to(memory_format=torch.channels_last),
    "with gaps": lambda: torch.randn(64, 8, 3, 6)[..., ::2],
}
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=no_gpu)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "maximize"), [("AdamW", False), ("AdamW", True), ("Adam", True)])
@pytest.mark.parametrize("device", DEVICES)
def test_own_steps_do_what_is_meant(name, maximize, layout, device):
    """Catches: a kernel that reads other elements, moves what has no second moment, or drifts."""
    torch.manual_seed(0)
    weight = nn.Parameter(LAYOUTS[layout]().to(device))
    options = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1, "maximize": maximize}
    optimizer = getattr(hipress.torch, name)([weight], **options, **SCHEDULE)
    value, m, v = (f(weight.detach().double()) for f in (torch.clone,) + (torch.zeros_like,) * 2)
    step = last = kept_weight = 0
    for number in range(15):
        gradient = torch.randn(64, 8, 3, 3, device=device)
        gradient[:5] = 0  # a block of signs gives them a momentum nevertheless
        if number == 11:
            gradient[3] = 1  # and a second moment comes later, in a refresh
        weight.grad = torch.empty_like(weight).copy_(gradient)
        refreshes = optimizer.wants_gradients([weight])
        optimizer.note_incoming([weight], is_momentum=not refreshes)
        if not refreshes:
            optimizer.make_outgoing(weight, flat(weight.grad), 1.0)
            weight.grad[:5] += 0.01
        optimizer.step()

        step += 1
        true = (-gradient if maximize else gradient).double()
        true += 0.1 * value if name == "Adam" else 0
        m = 0.8 * m + 0.2 * true
        if refreshes:
            kept = 0.95 ** math.sqrt(step - last)
            v = kept * v + (1 - kept) * true**2
            kept_weight, last = kept * kept_weight + 1 - kept, step
        else:
            m[:5] += 0.01
        value *= 0.999 if name == "AdamW" else 1
        least = LEAST_SHARE * v.mean() if step > SCHEDULE["refresh_warmup"] else 0
        moved = 0.01 * m / (1 - 0.8**step) / ((v.clamp(min=least) / kept_weight).sqrt() + 1e-8)
        value -= torch.where(v == 0, 0, moved)
        torch.testing.assert_close(weight.detach().double(), value, rtol=1e-4, atol=1e-6)
        state = optimizer.state[weight]
        torch.testing.assert_close(state["exp_avg"].double(), m, rtol=1e-4, atol=1e-6)
        stored = v / kept_weight * (1 - 0.95**last)
        torch.testing.assert_close(state["exp_avg_sq"].double(), stored, rtol=1e-4, atol=1e-9)
    assert (step, last) == (15, 14)
    assert torch.equal(v == 0, state["exp_avg_sq"] == 0)


def test_small_second_moments_do_not_blow_up():
    """Catches: signs with the size of their block that are divided by a moment near zero. A
    perceptron on digits diverged as soon as momentum was exchanged."""
    weight = nn.Parameter(torch.zeros(4096))
    optimizer = hipress.torch.AdamW([weight], lr=0.01, weight_decay=0.0, **SCHEDULE)
    gradient = torch.ones(4096)
    gradient[:100] = 1e-6
    for number in range(SCHEDULE["refresh_warmup"] + SCHEDULE["refresh_every"] + 1):
        before = weight.detach().clone()
        refreshes = optimizer.wants_gradients([weight])
        weight.grad = gradient.clone() if refreshes else torch.ones(4096)  # as onebit decodes it
        optimizer.note_incoming([weight], is_momentum=not refreshes)
        optimizer.step()
        assert (weight.detach() - before).abs().max() < 3 * 0.01 / math.sqrt(LEAST_SHARE), number


def test_a_codec_without_error_feedback_gets_gradients(alone):
    """Catches: noise of a codec in the second moment, or in the momentum that is sent."""
    ddp, optimizer, sync = attached("terngrad")
    weight = ddp.module[0].weight
    train(ddp, optimizer, range(SCHEDULE["refresh_warmup"]))
    state = optimizer.state[weight]
    assert sync.layout.senders
    first, second = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    optimizer.zero_grad()
    loss_of(ddp, 99).backward()
    assert not optimizer._holds_momentum and weight in optimizer._holds_noise
    sent = weight.grad.abs()
    assert len(sent.unique()) <= 3 * 8, "what travelled is not of terngrad"
    want = first.lerp(weight.grad, 1 - optimizer.param_groups[0]["betas"][0])
    optimizer.step()
    torch.testing.assert_close(state["exp_avg"], want)
    assert torch.equal(state["exp_avg_sq"], second)
    optimizer.zero_grad()
    assert not optimizer._holds_noise
    train(ddp, optimizer, range(200, 200 + SCHEDULE["refresh_every"]))
    assert not torch.equal(state["exp_avg_sq"], second), "no refresh has come"


def test_a_codec_of_signs_trains_as_well(alone):
    """Catches: residuals that are not fed back, or a momentum that is applied twice."""
    losses = {}
    for codec in ("none", "onebit", EXACT):
        ddp, optimizer, _ = attached(codec)
        train(ddp, optimizer, range(120))
        with torch.no_grad():
            losses[codec] = sum(loss_of(ddp, 1000 + k).item() for k in range(5)) / 5
    assert losses["onebit"] < 1.1 * losses[EXACT], losses
    assert losses[EXACT] < 1.5 * losses["none"], losses  # so few refreshes cost something


def test_int8_sends_gradients(alone):
    """Catches: momentum in place of a gradient that keeps its sizes."""
    ddp, optimizer, sync = attached("int8")
    train(ddp, optimizer, range(8))
    assert not sync.layout.senders
    assert "sq_updates" not in optimizer.state[ddp.module[0].weight]
    ddp, optimizer, _ = attached("int8", fused=True)
    assert optimizer._step_supports_amp_scaling  # as torch's: a scaler divides in the kernel


def test_momentum_inside_the_codec_is_taken_out(alone):
    """Catches: momentum of momentum."""
    _, _, sync = attached("momentum(ef(onebit))")
    assert {g.choice.codec.name for g in sync.layout.compressed} == {"onebit"}
    ddp = DDP(module())
    optimizer = hipress.torch.AdamW(ddp.parameters())
    sync = hipress.attach(ddp, "dgc(ratio=0.1)", optimizer=optimizer)
    assert {g.choice.codec.name.split("(")[0] for g in sync.layout.compressed} == {"topk"}


def test_elements_without_a_second_moment_stay(alone):
    """Catches: a sign that is divided by eps, for a row that no gradient has touched yet."""
    torch.manual_seed(0)
    ddp = DDP(nn.Embedding(64, 64))
    optimizer = hipress.torch.AdamW(ddp.parameters(), lr=0.01, weight_decay=0.0, **SCHEDULE)
    hipress.attach(ddp, "onebit", optimizer=optimizer)
    before = ddp.module.weight.detach().clone()
    for _ in range(9):
        optimizer.zero_grad()
        ddp(torch.arange(40)).pow(2).sum().backward()
        optimizer.step()
    moved = (ddp.module.weight.detach() - before).abs().amax(1)
    assert moved[:40].min() > 0 and moved[40:].max() == 0


# --- what people do around a step -----------------------------------------------------------------


def test_a_loss_scale_changes_no_bit(alone):
    """Catches: momentum that is added to a scaled gradient as it is."""
    trained = []
    for scale in (None, 2.0**12):
        ddp = DDP(module())
        optimizer = hipress.torch.AdamW(ddp.parameters(), lr=0.01, **SCHEDULE)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        hipress.attach(ddp, "onebit", optimizer=optimizer, scaler=scaler)
        for number in range(12):
            optimizer.zero_grad()
            scaler.scale(loss_of(ddp, number)).backward()
            scaler.step(optimizer)
            scaler.update()
        trained.append(ddp)
    close = [
        torch.allclose(p, q, rtol=0, atol=1e-6)
        for p, q in zip(trained[0].parameters(), trained[1].parameters(), strict=True)
    ]
    assert all(close)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_changes_nothing(alone, fused):
    """Catches: moments that take an infinite gradient, counts that go on, a forgotten notice."""
    ddp = DDP(module())
    optimizer = hipress.torch.AdamW(ddp.parameters(), lr=0.01, fused=fused, **SCHEDULE)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    sync = hipress.attach(ddp, "onebit", optimizer=optimizer, scaler=scaler)

    def step(number, factor=1.0):
        optimizer.zero_grad()
        (scaler.scale(loss_of(ddp, number)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()

    for number in range(6):
        step(number)
    before = [p.detach().clone() for p in ddp.parameters()]
    step(6, factor=math.inf)
    assert all(map(torch.equal, before, ddp.parameters()))
    assert optimizer.state[ddp.module[0].weight]["step"] == 6
    sync.detach()
    for number in range(7, 10):
        step(number)
    assert all(p.isfinite().all() for p in ddp.parameters())


def test_a_skipped_step_is_forgotten(alone):
    """Catches: a gradient that is taken for momentum, since the step before it was skipped."""
    ddp, optimizer, sync = attached("onebit")
    train(ddp, optimizer, range(6))
    optimizer.zero_grad()
    loss_of(ddp, 6).backward()  # momentum, and no step
    assert optimizer._holds_momentum
    optimizer.refresh_warmup = 100  # the next step is a refresh
    optimizer.zero_grad()
    loss_of(ddp, 7).backward()
    assert not optimizer._holds_momentum


def test_accumulated_gradients_count_as_one(alone):
    """Catches: momentum of each backward pass in place of that of their sum."""
    trained = []
    for parts in (1, 2):
        ddp, optimizer, _ = attached()
        for number in range(10):
            optimizer.zero_grad()
            if parts == 2:
                with ddp.no_sync():
                    (loss_of(ddp, number) / 2).backward()
            (loss_of(ddp, number) / parts).backward()
            optimizer.step()
        trained.append(ddp)
    assert all(
        torch.allclose(p, q, atol=1e-6)
        for p, q in zip(trained[0].parameters(), trained[1].parameters(), strict=True)
    )


def test_momentum_of_momentum_is_refused(alone):
    """Catches: a second backward pass whose gradient is added to the momentum in `.grad`."""
    ddp, optimizer, _ = attached("onebit")
    train(ddp, optimizer, range(6))
    with pytest.raises(UsageError, match="the optimizer would take momentum a second time"):
        loss_of(ddp, 6).backward()


def test_a_second_step_takes_the_same_momentum(alone):
    """Catches: momentum in `.grad` that a second step without a backward takes for a gradient."""
    ddp, optimizer, _ = attached("onebit")
    train(ddp, optimizer, range(6))
    weight = ddp.module[0].weight
    second = optimizer.state[weight]["exp_avg_sq"].clone()
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["exp_avg"], weight.grad)
    assert torch.equal(optimizer.state[weight]["exp_avg_sq"], second)
    assert optimizer._count(weight).sq_step == SCHEDULE["refresh_warmup"]


def test_a_second_step_keeps_noise_out_of_the_second_moment(alone):
    """Catches: noise of a codec that a second step without a backward learns sizes from."""
    ddp, optimizer, _ = attached("terngrad")
    train(ddp, optimizer, range(5))
    second = optimizer.state[ddp.module[0].weight]["exp_avg_sq"].clone()
    optimizer.step()
    assert torch.equal(optimizer.state[ddp.module[0].weight]["exp_avg_sq"], second)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_gradient_that_no_exchange_made_is_a_gradient(alone, to_none):
    """Catches: the momentum of the last step, remembered for a `.grad` that was made anew."""
    ddp, optimizer, _ = attached("onebit")
    train(ddp, optimizer, range(6))
    weight = ddp.module[0].weight
    ddp.zero_grad(set_to_none=to_none)
    with ddp.no_sync():
        loss_of(ddp, 6).backward()
    want = optimizer.state[weight]["exp_avg"].lerp(weight.grad, 0.1)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], want)
    assert optimizer._count(weight).sq_step == 7


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("codec", ["onebit", "terngrad"])
def test_a_gradient_after_a_step_that_was_left_out_is_a_gradient(alone, codec, to_none):
    """Catches: momentum that no step used, remembered for a `.grad` that was made anew."""
    ddp, optimizer, _ = attached(codec)
    train(ddp, optimizer, range(6))
    weight = ddp.module[0].weight
    ddp.zero_grad()
    loss_of(ddp, 6).backward()  # exchanged, and no step
    ddp.zero_grad(set_to_none=to_none)
    with ddp.no_sync():
        loss_of(ddp, 7).backward()
    want = optimizer.state[weight]["exp_avg"].lerp(weight.grad, 0.1)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], want)
    assert optimizer._count(weight).sq_step == 7


def test_momentum_that_was_replaced_is_momentum(alone):
    """Catches: one that is taken for a gradient, since it was clipped into a new tensor."""
    ddp, optimizer, _ = attached("onebit")
    train(ddp, optimizer, range(6))
    weight = ddp.module[0].weight
    ddp.zero_grad()
    loss_of(ddp, 6).backward()
    for parameter in ddp.parameters():
        parameter.grad = parameter.grad.clamp(-1e-3, 1e-3)
    optimizer.step()
    assert torch.equal(optimizer.state[weight]["exp_avg"], weight.grad)


def test_what_a_flush_sends_is_momentum(alone):
    """Catches: momentum that is forgotten during the backward pass that exchanges it."""
    torch.manual_seed(3)
    ddp = DDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 96)), bucket_cap_mb=0.02)
    optimizer = hipress.torch.AdamW(ddp.parameters(), lr=0.01, **SCHEDULE)
    sync = hipress.attach(ddp, "onebit", optimizer=optimizer)
    train(ddp, optimizer, range(6))
    sync.detach()
    train(ddp, optimizer, [6])
    for layer in ddp.module:
        weight = layer.weight
        assert torch.equal(optimizer.state[weight]["exp_avg"], weight.grad)


def test_clipping_limits_the_norm_of_momentum(alone):
    """Catches: another meaning of `clip_grad_norm_` than the one that is documented."""
    ddp, optimizer, _ = attached("onebit")
    train(ddp, optimizer, range(6), clip=1e-3)
    momenta = [optimizer.state[p]["exp_avg"] for p in ddp.parameters() if p.dim() > 1]
    assert torch.stack([m.norm() for m in momenta]).norm() <= 1.001e-3
    assert all(m.any() for m in momenta)


def test_groups_may_have_betas_of_their_own(alone):
    """Catches: the first group's beta for all."""
    ddp = DDP(module())
    first, second = ddp.module[0].weight, ddp.module[2].weight
    groups = [
        {"params": [first], "betas": (0.5, 0.9)},
        {"params": [second, ddp.module[2].bias], "betas": (0.9, 0.99), "lr": 0.02},
    ]
    optimizer = hipress.torch.AdamW(groups, lr=0.01, weight_decay=0.0, **SCHEDULE)
    hipress.attach(ddp, EXACT, optimizer=optimizer)
    known = [
        Reference(first, betas=(0.5, 0.9), decay=0.0),
        Reference(second, betas=(0.9, 0.99), lr=0.02, decay=0.0),
    ]
    for number in range(8):
        plain = copy.deepcopy(ddp.module)
        loss_of(plain, number).backward()
        for one, layer in zip(known, (plain[0], plain[2]), strict=True):
            one.update(layer.weight.grad)
        train(ddp, optimizer, [number])
        for parameter, one in zip((first, second), known, strict=True):
            assert (one.value - parameter.detach().double()).abs().max() < 2e-5
            one.value = parameter.detach().double().clone()


def test_bfloat16_parameters_train(alone):
    """Catches: dtypes that do not go together."""
    ddp, optimizer, _ = attached("onebit", dtype=torch.bfloat16)
    before = loss_of(ddp, 0).item()
    train(ddp, optimizer, [0] * 20)
    assert loss_of(ddp, 0).item() < 0.5 * before


def test_a_parameter_may_be_unfrozen_later(alone):
    """Catches: a parameter without a second moment that keeps standing still, or jumps."""
    ddp = DDP(module(), find_unused_parameters=True)
    optimizer = hipress.torch.AdamW(ddp.parameters(), lr=0.01, **SCHEDULE)
    hipress.attach(ddp, "onebit", optimizer=optimizer)
    weight = ddp.module[2].weight

    ddp.module.forward = lambda x: ddp.module[1](ddp.module[0](x))
    for _ in range(8):
        optimizer.zero_grad()
        ddp(torch.randn(8, 64)).pow(2).mean().backward()
        optimizer.step()
    before = weight.detach().clone()
    ddp.module.forward = lambda x: nn.Sequential.forward(ddp.module, x)
    train(ddp, optimizer, range(3))
    moved = (weight.detach() - before).abs().max()
    assert 0 < moved < 0.1


# --- leaving and coming back ----------------------------------------------------------------------


def test_after_detach_it_is_torchs_update(alone):
    """Catches: a notice of momentum that stays, and unsent momentum that is lost."""
    ddp, optimizer, sync = attached("onebit")
    train(ddp, optimizer, range(6))
    weight = ddp.module[0].weight
    held = sync.state_dict()
    left = held["mean"]["0.weight"]["residual"].view(weight.shape)
    known = optimizer.state[weight]["exp_avg"].clone()
    sync.detach()
    optimizer.zero_grad()
    loss_of(ddp, 6).backward()
    want = 0.9 * known + 0.1 * _gradient(ddp, 6) + left
    torch.testing.assert_close(weight.grad, want, rtol=1e-5, atol=1e-7)
    optimizer.step()
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], want, rtol=1e-5, atol=1e-7)
    want = _gradient(ddp, 7)
    train(ddp, optimizer, [7])
    torch.testing.assert_close(weight.grad, want)
    assert optimizer._counts[weight].sq_step == 8


def _gradient(ddp, number):
    plain = copy.deepcopy(ddp.module)
    plain.zero_grad()
    loss_of(plain, number).backward()
    return plain[0].weight.grad


def test_a_resumed_run_goes_on_bit_for_bit(alone):
    """Catches: counts, residuals or moments that a checkpoint does not hold."""
    ddp, optimizer, sync = attached("onebit")
    train(ddp, optimizer, range(7))
    saved = pickle.dumps([ddp.module.state_dict(), optimizer.state_dict(), sync.state_dict()])
    train(ddp, optimizer, range(7, 13))
    again, second, other = attached("onebit")
    weights, moments, residuals = pickle.loads(saved)
    again.module.load_state_dict(weights)
    second.load_state_dict(moments)
    other.load_state_dict(residuals)
    train(again, second, range(7, 13))
    assert same(ddp, again)


def test_state_moves_to_torch_and_back(alone):
    """Catches: a state dictionary that the other class refuses or misreads."""
    ddp, ours, _ = attached("onebit", betas=(0.9, 0.95))
    train(ddp, ours, range(40))
    model = copy.deepcopy(ddp.module)
    theirs = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    theirs.load_state_dict(ours.state_dict())
    before = [p.detach().clone() for p in model.parameters()]
    train(model, theirs, [40])
    moved = max((p - q).abs().max() for p, q in zip(model.parameters(), before, strict=True))
    assert moved < 0.05  # the second moment has the scale that torch expects
    again = hipress.torch.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), **SCHEDULE)
    again.load_state_dict(theirs.state_dict())
    fresh = hipress.torch.AdamW(model.parameters(), lr=0.01, **SCHEDULE)
    fresh.load_state_dict(torch.optim.AdamW(model.parameters()).state_dict())
    train(model, again, [41])


def test_dcp_restores_the_counts(alone, tmp_path):
    """Catches: a resumed run that refreshes in other steps, since a fresh state has no counts."""
    ddp, optimizer, sync = attached("onebit")
    train(ddp, optimizer, range(7))
    saved = {"optimizer": get_optimizer_state_dict(ddp, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path)
    weights, residuals = copy.deepcopy([ddp.module.state_dict(), sync.state_dict()])
    train(ddp, optimizer, range(7, 13))
    again, second, other = attached("onebit")
    loaded = {"optimizer": get_optimizer_state_dict(again, second)}
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_optimizer_state_dict(again, second, loaded["optimizer"])
    again.module.load_state_dict(weights)
    other.load_state_dict(residuals)
    train(again, second, range(7, 13))
    assert same(ddp, again)


def test_copies_keep_the_schedule():
    optimizer = hipress.torch.AdamW(module().parameters(), refresh_every=7)
    for made in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert (made.refresh_warmup, made.refresh_every) == (100, 7)


# --- what goes wrong around it -------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, 6], ids=["refresh", "ordinary"])
def test_what_is_not_finite_shows(alone, number):
    """Catches: a NaN that freezes a layer, whose loss stays finite."""
    ddp, optimizer, _ = attached("onebit")
    train(ddp, optimizer, range(number))
    optimizer.zero_grad()
    (loss_of(ddp, number) * math.nan).backward()
    optimizer.step()
    assert not any(p.isfinite().any() for p in ddp.parameters())


def test_momentum_in_another_memory_format_is_read_right(alone):
    """Catches: elements of a loaded momentum that are taken in the order of their memory."""
    torch.manual_seed(0)
    ddp = DDP(nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last))
    optimizer = hipress.torch.AdamW(ddp.parameters(), **SCHEDULE)
    weight = ddp.module.weight
    given = torch.randn_like(weight).contiguous()
    optimizer.state[weight] = {"step": torch.tensor(4.0), "exp_avg": given.clone()}
    optimizer.state[weight]["exp_avg_sq"] = torch.ones_like(given)
    assert given.stride() != weight.stride()
    sent = torch.zeros(weight.numel())
    optimizer.make_outgoing(weight, sent, 1.0)
    want = torch.empty_like(weight).copy_(0.9 * given)
    torch.testing.assert_close(sent, flat(want))


@pytest.mark.parametrize("to_none", [True, False])
def test_a_layer_that_no_rank_uses_keeps_its_momentum(alone, to_none):
    """Catches: zeros that DDP left in `.grad`, taken for the new momentum."""
    ddp = DDP(module(), find_unused_parameters=True)
    optimizer = hipress.torch.AdamW(ddp.parameters(), lr=0.01, **SCHEDULE)
    hipress.attach(ddp, EXACT, optimizer=optimizer)
    train(ddp, optimizer, range(6))
    moment = optimizer.state[ddp.module[2].weight]["exp_avg"]
    before = moment.clone()
    ddp.module.forward = lambda x: ddp.module[1](ddp.module[0](x))
    optimizer.zero_grad(set_to_none=to_none)
    loss = ddp(torch.randn(8, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
    share = float(moment.norm() / before.norm())
    # Torch takes a gradient of zero for one, and skips a parameter without any.
    assert share == pytest.approx(1.0 if to_none else 0.9, rel=1e-3)


def test_unsent_momentum_of_a_checkpoint_is_flushed_as_momentum(alone):
    """Catches: a residual of momentum that a flush adds to a gradient."""
    ddp, optimizer, sync = attached("onebit")
    train(ddp, optimizer, range(6))
    saved = copy.deepcopy([ddp.module.state_dict(), optimizer.state_dict(), sync.state_dict()])
    again, second, other = attached("onebit")
    for one, state in zip((again.module, second, other), saved, strict=True):
        one.load_state_dict(state)
    for one in (sync, other):
        one.detach()
    train(ddp, optimizer, [6])
    train(again, second, [6])
    assert same(ddp, again)
    torch.testing.assert_close(
        second.state[again.module[0].weight]["exp_avg"],
        optimizer.state[ddp.module[0].weight]["exp_avg"],
    )


def test_a_bare_hook_asks_the_optimizer_too(alone):
    """Catches: options that cannot work, and a fused step that ignores the scaler."""
    ddp = DDP(module())
    optimizer = hipress.torch.AdamW(ddp.parameters(), fused=True)
    ddp.register_comm_hook(*hipress.torch.comm_hook("onebit", optimizer=optimizer))
    loss_of(ddp, 0).backward()
    assert not optimizer._step_supports_amp_scaling
    ddp = DDP(module())
    optimizer = hipress.torch.AdamW(ddp.parameters(), amsgrad=True)
    ddp.register_comm_hook(*hipress.torch.comm_hook("onebit", optimizer=optimizer))
    with pytest.raises(UsageError, match="amsgrad=True"):
        loss_of(ddp, 0).backward()


def test_the_second_moment_after_steps_of_torch(alone):
    """Catches: weights of a second moment that torch has updated since."""
    ddp, ours, _ = attached("onebit")
    train(ddp, ours, range(8))
    model = copy.deepcopy(ddp.module)
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-4)
    theirs.load_state_dict(ours.state_dict())
    train(model, theirs, range(8, 30))
    again = hipress.torch.AdamW(model.parameters(), lr=1e-4, **SCHEDULE)
    again.load_state_dict(theirs.state_dict())
    count = again._count(model[0].weight)
    assert (count.step, count.sq_step, count.is_behind) == (30, 30, True)
    assert count.sq_weight == pytest.approx(1 - 0.999**30)


def test_a_new_exchange_forgets_the_last_one(alone):
    """Catches: a gradient that is taken for momentum, since another exchange was broken off."""
    ddp, optimizer, _ = attached("onebit")
    train(ddp, optimizer, range(6))
    optimizer.zero_grad()
    loss_of(ddp, 6).backward()
    assert optimizer._holds_momentum
    optimizer.zero_grad()
    assert not optimizer._holds_momentum


def test_autograd_notices_the_update(alone):
    """Catches: a step between a forward and its backward that nobody notices."""
    ddp, optimizer, _ = attached("onebit")
    train(ddp, optimizer, range(6))
    before = ddp.module[0].weight._version
    train(ddp, optimizer, [6])
    assert ddp.module[0].weight._version > before


def test_a_cleared_state_begins_anew(alone):
    """Catches: counts of steps whose moments are gone."""
    ddp, optimizer, _ = attached("onebit")
    train(ddp, optimizer, range(6))
    optimizer.state.clear()
    train(ddp, optimizer, range(6, 9))
    assert optimizer._counts[ddp.module[0].weight].step == 3


def test_momentum_that_nobody_can_send_is_said_to_be_dropped(alone, caplog):
    """Catches: momentum that stays owed for ever, after a resume with another codec."""
    ddp, optimizer, sync = attached("onebit")
    train(ddp, optimizer, range(6))
    state = sync.state_dict()
    held, _, other = attached("int8")  # the model keeps the engine open
    other.load_state_dict(state)
    assert "the unsent momentum of '0.weight' is dropped" in caplog.text
    assert held is not None and not other.owed.momentum


# --- what is refused, and what is said ------------------------------------------------------------


@pytest.mark.parametrize("option", ["amsgrad", "capturable", "differentiable"])
def test_options_that_cannot_work_are_refused(alone, option):
    ddp = DDP(module())
    optimizer = hipress.torch.AdamW(ddp.parameters(), **{option: True})
    with pytest.raises(UsageError, match=f"AdamW has {option}=True"):
        hipress.attach(ddp, "onebit", optimizer=optimizer)
    ddp = DDP(module())
    optimizer = hipress.torch.AdamW(ddp.parameters(), **{option: True})
    hipress.attach(ddp, "int8", optimizer=optimizer)


def test_parameters_that_come_after_attach_are_refused(alone):
    """Catches: a gradient that goes through a codec of signs to an optimizer of the momentum."""
    ddp = DDP(module())
    first, *rest = ddp.parameters()
    optimizer = hipress.torch.AdamW([first], **SCHEDULE)
    hipress.attach(ddp, "onebit", optimizer=optimizer)
    train(ddp, optimizer, range(2))
    optimizer.add_param_group({"params": rest})
    with pytest.raises(UsageError, match=r"'2\.weight' was added to the optimizer after attach"):
        train(ddp, optimizer, [2])


def test_parameters_that_send_gradients_may_come_after_attach(alone):
    ddp = DDP(module())
    first, second, bias = ddp.parameters()
    optimizer = hipress.torch.AdamW([first, second], **SCHEDULE)
    hipress.attach(ddp, "onebit", optimizer=optimizer)
    train(ddp, optimizer, range(2))
    before = bias.detach().clone()
    optimizer.add_param_group({"params": [bias]})
    train(ddp, optimizer, range(2, 7))
    assert not torch.equal(bias, before)


@pytest.mark.parametrize("make", [hipress.torch.AdamW, torch.optim.AdamW, torch.optim.SGD])
def test_another_optimizer_does_not_take_momentum_for_gradients(alone, make):
    """Catches: an optimizer made anew after attach, which trains on the momentum of the old one."""
    ddp, optimizer, _ = attached("onebit")
    train(ddp, optimizer, range(6))
    other = make(ddp.parameters(), lr=0.01)
    match = (
        rf"{make.__name__} has twice taken momentum for gradients: \.grad of '0\.weight' holds the "
        r"momentum of the AdamW that attach was given\. Train with that one alone, or wrap"
    )
    train(ddp, other, [6])
    with pytest.raises(UsageError, match=match):
        train(ddp, other, [7])
    again = DDP(ddp.module)
    hipress.attach(again, "onebit", optimizer=other)
    for number in range(8, 12):
        again.zero_grad(set_to_none=False)
        loss_of(again, number).backward()
        other.step()


def test_optimizers_that_take_turns_are_refused(alone):
    """Catches: momentum taken for gradients at every other step, in silence."""
    ddp, optimizer, _ = attached("onebit")
    train(ddp, optimizer, range(6))
    other = torch.optim.SGD(ddp.parameters(), lr=0.01)
    train(ddp, other, [6])
    train(ddp, optimizer, [7])
    with pytest.raises(UsageError, match="SGD has twice taken momentum for gradients"):
        train(ddp, other, [8])


@pytest.mark.parametrize("num_between", [9, 10])
def test_a_step_of_another_is_forgotten_in_the_end(alone, num_between):
    """Catches: an accident that is held against training for ever, or forgotten at once."""
    ddp, optimizer, _ = attached("onebit", refresh_every=1000)
    train(ddp, optimizer, range(6))
    other = torch.optim.SGD(ddp.parameters(), lr=0.01)
    train(ddp, other, [6])
    train(ddp, optimizer, range(num_between))
    if num_between == 10:
        train(ddp, other, [7])
        return
    with pytest.raises(UsageError, match="SGD has twice taken"):
        train(ddp, other, [7])


def test_a_step_with_momentum_that_was_used_is_warned_of(alone, caplog):
    """Catches: another optimizer that trains on momentum too, after the attached one."""
    ddp, optimizer, _ = attached("onebit")
    inner, scheduled = Wrapper(optimizer), torch.optim.swa_utils.AveragedModel(ddp.module)
    bias = torch.optim.SGD([ddp.module[2].bias], lr=0.01)  # gets gradients
    for number in range(8):
        ddp.zero_grad(set_to_none=False)
        loss_of(ddp, number).backward()
        inner.step()
        bias.step()
        scheduled.update_parameters(ddp.module)
    assert "makes a step after" not in caplog.text
    other = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for number in range(8, 12):
        ddp.zero_grad()
        loss_of(ddp, number).backward()
        optimizer.step()
        other.step()
    assert caplog.text.count("SGD makes a step after that of the AdamW") == 1


def test_an_optimizer_that_makes_no_steps_is_warned_of(alone, caplog):
    """Catches: one made anew right after attach, with which int8 would be sent for ever."""
    ddp, _, _ = attached("onebit")
    other = hipress.torch.AdamW(ddp.parameters(), lr=0.01)
    train(ddp, other, range(9))
    assert "that attach was given none of them" not in caplog.text
    train(ddp, other, range(9, 15))
    assert caplog.text.count("that attach was given none of them") == 1


@pytest.mark.parametrize("case", ["detached", "attached anew", "int8", "no backward"])
def test_steps_that_use_nothing_sent_are_not_warned_of(alone, caplog, case):
    """Catches: a warning where all is well, or where the advice was followed."""
    ddp, optimizer, sync = attached("int8" if case == "int8" else "onebit")
    train(ddp, optimizer, range(6))
    other = hipress.torch.AdamW(ddp.parameters(), lr=0.01)
    trained = ddp
    if case == "detached":
        sync.detach()
        train(ddp, optimizer, [6])
    elif case == "attached anew":
        trained = DDP(ddp.module)
        hipress.attach(trained, "onebit", optimizer=other)
    elif case == "no backward":
        for _ in range(12):
            other.step()
    if case != "no backward":
        train(trained, other, range(12))
    assert "that attach was given none of them" not in caplog.text
    assert ddp is not None


def test_a_dropped_model_does_not_disturb_a_step(alone):
    """Catches: hooks that are removed in a collection while torch goes through them."""

    def collects(*_):
        gc.collect()

    gc.collect()
    gc.disable()
    handle = register_optimizer_step_post_hook(collects)
    try:
        dropped = attached("onebit")
        live = attached("onebit")
        del dropped
        train(*live[:2], [0])
    finally:
        gc.enable()
        handle.remove()


class Wrapper(torch.optim.Optimizer):
    """Calls the step of another optimizer inside its own."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self):
        self.base.step()


def test_other_optimizers_may_step_beside_it(alone):
    """Catches: an error for optimizers that get gradients, or that call the one attached."""
    ddp, optimizer, _ = attached("onebit")
    bias = torch.optim.SGD([ddp.module[2].bias], lr=0.01)
    every = torch.optim.SGD(ddp.parameters(), lr=0.01)
    train(ddp, every, range(2))  # refreshes, which are gradients
    wrapper = Wrapper(optimizer)
    for number in range(8):
        ddp.zero_grad()
        loss_of(ddp, number).backward()
        if number != 5:  # one that is skipped
            bias.step()
            wrapper.step()
    ddp.zero_grad()
    every.step()


def test_a_scaler_that_attach_does_not_know_is_refused(alone):
    """Catches: momentum that is mixed with scaled gradients, without a word."""
    ddp, optimizer, _ = attached("onebit")
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # wraps its step
    train(ddp, optimizer, range(SCHEDULE["refresh_warmup"]))
    optimizer.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(loss_of(ddp, 0)).backward()
    before = [p.detach().clone() for p in ddp.parameters()]
    match = r"was given no scaler: .* scaler=scaler\) and start again \(this step was not made\)"
    with pytest.raises(UsageError, match=match):
        scaler.step(optimizer)
    assert all(map(torch.equal, before, ddp.parameters()))


def test_a_scaler_is_refused_where_the_step_makes_the_exchange(alone):
    """Catches: a closure, of whose momentum nothing is known before the step."""
    ddp, optimizer, _ = attached("onebit")
    train(ddp, optimizer, range(SCHEDULE["refresh_warmup"]))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))

    def closure():
        optimizer.zero_grad()
        scaler.scale(loss_of(ddp, 0)).backward()

    optimizer.zero_grad()
    with ddp.no_sync():
        scaler.scale(loss_of(ddp, 0)).backward()
    with pytest.raises(UsageError, match=r"start again \(load the last checkpoint"):
        scaler.step(optimizer, closure)


def test_a_scaler_is_not_needed_where_no_momentum_is_sent(alone):
    """Catches: an error for codecs whose gradients follow any scale."""
    ddp, optimizer, _ = attached("terngrad")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(SCHEDULE["refresh_warmup"] + 3):
        optimizer.zero_grad()
        scaler.scale(loss_of(ddp, number)).backward()
        scaler.step(optimizer)
        scaler.update()


def test_an_optimizer_may_step_first_and_inside(alone):
    """Catches: an error for one that uses no `.grad`, or that does the work of the attached one."""
    ddp, optimizer, _ = attached("onebit")
    shrinks = torch.optim.SGD(ddp.parameters(), lr=0.0)
    for number in range(10):
        ddp.zero_grad()
        loss_of(ddp, number).backward()
        shrinks.step()
        optimizer.step()


def test_steps_without_a_scale_need_no_scaler(alone):
    """Catches: an error for bfloat16, a scaler that is off, or a codec that sends gradients."""
    ddp, optimizer, sync = attached("onebit")
    off = torch.amp.GradScaler("cpu", enabled=False)
    for number in range(7):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(ddp, number)
        off.scale(loss).backward()
        off.step(optimizer)
        off.update()
    sync.detach()
    train(ddp, optimizer, [7])
    gradients, other, _ = attached("int8")
    for model, one in ((ddp, optimizer), (gradients, other)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number in range(2):
            one.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            scaler.step(one)
            scaler.update()


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_a_schedule_is_a_number_of_steps(value):
    with pytest.raises(UsageError, match="refresh_every is .*at least 1"):
        hipress.torch.AdamW(module().parameters(), refresh_every=value)


def test_torchs_adam_with_signs_is_warned_of(alone, caplog):
    """Catches: a default that trains badly without a word."""
    ddp = DDP(module())
    hipress.attach(ddp, "onebit", optimizer=torch.optim.AdamW(ddp.parameters()))
    assert "use hipress.torch.AdamW in place of AdamW" in caplog.text
    assert "loss 2.039 with onebit on gradients" in caplog.text
    caplog.clear()
    attached("onebit")
    ddp = DDP(module())
    hipress.attach(ddp, "int8", optimizer=torch.optim.AdamW(ddp.parameters()))
    assert "WARNING" not in caplog.text


# --- any optimizer --------------------------------------------------------------------------------


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023: the update is the sign of what is exchanged."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})
        self.received = set()

    def exchange_facts(self):
        return {"optimizer": "Lion"}

    def num_refreshes_left(self):
        return 0

    def wants_gradients(self, parameters):
        return False

    def make_outgoing(self, parameter, gradient, loss_scale):
        beta = self.param_groups[0]["betas"][1]
        state = self.state[parameter]
        known = state.get("exp_avg", torch.zeros_like(parameter)).view(-1)
        gradient.mul_(1 - beta).add_(known, alpha=beta * loss_scale)

    def known_part(self, parameter, loss_scale):
        known = torch.zeros(parameter.numel())
        self.make_outgoing(parameter, known, loss_scale)
        return known

    def note_incoming(self, parameters, *, is_momentum):
        (self.received.update if is_momentum else self.received.difference_update)(parameters)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state, beta = self.state[p], group["betas"][1]
                before = state.get("exp_avg", torch.zeros_like(p))
                now = p.grad if p in self.received else beta * before + (1 - beta) * p.grad
                p.sub_(now.sign(), alpha=group["lr"])
                state["exp_avg"] = now.clone()
        self.received.clear()


def test_any_optimizer_can_have_its_momentum_exchanged(alone):
    """Catches: a seam that knows of Adam."""
    ddp = DDP(module())
    optimizer = Lion(ddp.parameters(), lr=1e-3)
    sync = hipress.attach(ddp, "onebit", optimizer=optimizer)
    assert sync.layout.senders == ["2.weight", "0.weight"]
    before = loss_of(ddp, 0).item()
    train(ddp, optimizer, [0] * 60)
    assert loss_of(ddp, 0).item() < 0.3 * before


def test_a_group_may_be_removed_between_steps():
    """Catches: the place of a parameter's group, kept from an earlier step."""
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = hipress.torch.AdamW([{"params": [p]} for p in parameters], lr=0.1)
    for is_momentum in (False, True):
        for parameter in parameters:
            parameter.grad = torch.ones(4)
        optimizer.note_incoming(parameters, is_momentum=is_momentum)
        optimizer.step()
    del optimizer.param_groups[1]
    removed = parameters[1].detach().clone()
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    optimizer.step()
    assert torch.equal(parameters[1], removed)
    assert torch.equal(parameters[0], parameters[2])
