"""Codecs with momentum beside learning rates, warm-up, `auto` and `detach`: one rank, no DDP."""

import logging
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

import hipress.torch
from hipress import session
from hipress.errors import UsageError
from hipress.plan import Decision, Plan
from hipress.session import Adapter, planner

SHAPE = (64, 80)
BLOCK = 1024
MU = 0.9


@pytest.fixture(autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Loop(Adapter):
    """A framework whose learning rates a test sets."""

    def __init__(self, rates=(), groups=()):
        super().__init__()
        self.rates, self.groups, self.holds = dict(rates), dict(groups), False

    def learning_rates(self):
        return self.rates

    def rate_groups(self):
        return self.groups

    def holds_means(self):
        return self.holds


class Reference:
    """`momentum(ef(onebit))` of one rank in NumPy: momentum, residual, and the way back."""

    def __init__(self, nesterov):
        self.nesterov = nesterov
        self.momentum, self.residual, self.back = (np.zeros(math.prod(SHAPE)) for _ in range(3))

    def mean(self, gradient, ratio):
        self.momentum = MU * self.momentum + gradient
        value = gradient + MU * self.momentum if self.nesterov else self.momentum
        value = value + ratio * self.residual
        sent = self.onebit(value)
        self.residual = value - sent
        value = sent + ratio * self.back
        mean = self.onebit(value)
        self.back = value - mean
        return mean

    @staticmethod
    def onebit(value):
        blocks = value.reshape(-1, BLOCK)
        scale = np.abs(blocks).mean(1, keepdims=True)
        return np.where(blocks < 0, -scale, scale).reshape(-1)


def gradient(step, weight):
    noise = np.random.default_rng(step).standard_normal(weight.size)
    return weight - 1 + noise


FALLING = [0.1] * 8 + [0.05] * 5 + [0.025]
ENDS = {
    "zero": [*FALLING, *[0.0] * 11],
    "zero and back": [*FALLING, *[0.0] * 5, *[0.02] * 6],
    "zero first": [*[0.0] * 3, *FALLING, *[0.08] * 8],
    "too small": [*FALLING, *[1e-42] * 5, *[0.02] * 6],
}


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("rates", ENDS.values(), ids=ENDS)
def test_a_rate_of_zero_rescales_nothing(rates, nesterov):
    """Catches: a residual that grows while the rate is 0, or has the wrong unit afterwards."""
    adapter = Loop()
    kind = str(nesterov).lower()
    run = session.start(
        {"a": torch.zeros(SHAPE)}, f"momentum(ef(onebit), mu={MU}, nesterov={kind})",
        adapter=adapter,
    )  # fmt: skip
    reference, last = Reference(nesterov), None
    weight, wanted = np.zeros(math.prod(SHAPE)), np.zeros(math.prod(SHAPE))
    for step, rate in enumerate(rates):
        adapter.rates = {"a": rate}
        given = torch.from_numpy(gradient(step, weight)).float().view(SHAPE)
        run.average({"a": given})
        weight = weight - rate * given.view(-1).double().numpy()
        moves = rate > 1e-20
        mean = reference.mean(gradient(step, wanted), last / rate if moves and last else 1.0)
        wanted = wanted - rate * mean
        last = rate if moves else last
    held = run.state_dict()["ranks"]["0"]["a"]
    assert np.linalg.norm(weight - wanted) < 1e-2 * np.linalg.norm(wanted)
    for name in ("momentum", "residual"):
        one = getattr(reference, name)
        assert np.linalg.norm(held[name].numpy() - one) < 5e-2 * np.linalg.norm(one), name


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_rate_that_is_no_number_is_not_remembered(bad):
    """Catches: a residual that is NaN in every later step."""
    adapter = Loop({"a": 0.1})
    run = session.start({"a": torch.zeros(SHAPE)}, "momentum(onebit)", adapter=adapter)
    for rate in (0.1, bad, 0.05):
        adapter.rates = {"a": rate}
        value = torch.ones(SHAPE)
        run.average({"a": value})
        assert value.isfinite().all()
    assert run.rates == {"a": 0.05} and run._rate_ratios == {"a": 2.0}


def test_a_negative_rate_turns_the_residual():
    """Catches: the residual of a step forwards that is applied backwards."""
    adapter = Loop({"a": 0.1})
    run = session.start({"a": torch.zeros(SHAPE)}, "momentum(onebit)", adapter=adapter)
    run.begin_step()
    adapter.rates = {"a": -0.2}
    run.begin_step()
    assert run._rate_ratios == {"a": -0.5}


def ratios(run, monkeypatch):
    """The ratio of each gradient in one step, as the engine was told."""
    told = {}
    start = run.engine.allreduce

    def note(values, *, names, lr_ratio, **more):
        told.update(dict.fromkeys(names, lr_ratio))
        return start(values, names=names, lr_ratio=lr_ratio, **more)

    with monkeypatch.context() as patch:
        patch.setattr(run.engine, "allreduce", note)
        run.average({name: torch.ones(SHAPE) for name in run.gradients})
    return told


def test_groups_that_the_optimizer_gets_later_have_their_own_rates(monkeypatch):
    """Catches: one gradient's change of rate applied to another that joined the optimizer later."""
    adapter = Loop()
    arrays = {"a": torch.zeros(SHAPE), "b": torch.zeros(SHAPE)}
    run = session.start(arrays, "momentum(onebit)", adapter=adapter)
    assert ratios(run, monkeypatch) == {"a": None, "b": None}
    before = run.state_dict()["ranks"]["0"]
    adapter.rates, adapter.groups = {"a": 1.0, "b": 1.0}, {"a": 0, "b": 1}
    run.begin_step()
    adapter.rates = {"a": 0.5, "b": 0.25}
    assert before["a"]["momentum"].any()
    assert ratios(run, monkeypatch) == {"a": 2.0, "b": 4.0}
    adapter.rates = {"b": 0.25}
    assert ratios(run, monkeypatch) == {"a": 1.0, "b": 1.0}
    held = run.state_dict()["ranks"]["0"]["a"]["momentum"]
    momentum = 0.0
    for _ in range(3):
        momentum = MU * momentum + 1.0
    np.testing.assert_allclose(held, momentum, rtol=1e-5)


def test_a_checkpoint_with_a_rate_of_zero_rescales_nothing():
    """Catches: a residual that is multiplied by 0, since the run was saved at a rate of 0."""
    adapter = Loop({"a": 0.0})
    run = session.start({"a": torch.zeros(SHAPE)}, "momentum(onebit)", adapter=adapter)
    value = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))
    run.average({"a": value.clone()})
    state = run.state_dict()
    other = session.start({"a": torch.zeros(SHAPE)}, "momentum(onebit)", adapter=adapter)
    other.load_state_dict(state)
    adapter.rates = {"a": 0.1}
    one, two = value.clone(), value.clone()
    run.average({"a": one})
    other.average({"a": two})
    assert torch.equal(one, two)
    assert run.state_dict()["ranks"]["0"]["a"]["residual"].any()


# --- where nothing would apply momentum -----------------------------------------------------------


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


WITH_MOMENTUM = ["momentum(onebit)", "momentum(none, nesterov=false)", "dgc(ratio=0.01)"]


@pytest.mark.parametrize("codec", WITH_MOMENTUM)
def test_a_warm_up_without_momentum_is_refused(codec):
    """Catches: first steps that train without the momentum that the user has moved to the codec."""
    text = r"^warmup_steps is 5 and .* applies momentum, which nothing would apply in uncompressed"
    with pytest.raises(UsageError, match=text):
        session.start({"a": torch.zeros(SHAPE)}, codec, warmup_steps=5)
    with pytest.raises(UsageError, match=text):
        hipress.torch.comm_hook(codec, warmup_steps=5)
    plan = Plan(gradients={"a": Decision(codec="int8"), "b": Decision(codec=codec)})
    with pytest.raises(UsageError, match=text):
        session.start({n: torch.zeros(SHAPE) for n in "ab"}, plan=plan, warmup_steps=5)
    session.start({"a": torch.zeros(SHAPE)}, codec, warmup_steps=5, enabled=False)


@pytest.mark.parametrize("codec", WITH_MOMENTUM)
def test_auto_refuses_codecs_with_momentum(codec):
    """Catches: plain steps of `auto` without the momentum that the user has moved to the codec."""
    with pytest.raises(UsageError, match=r"^codecs holds .*, which applies momentum, and auto"):
        session.start({"a": torch.zeros(SHAPE)}, codecs=["int8", codec])


def test_auto_refuses_codecs_with_other_state(monkeypatch):
    """Catches: state of a user's codec that is dropped with the plan, unsaid."""
    kept = SimpleNamespace(state_names=("residual", "average"))
    monkeypatch.setattr(planner, "named_codec", lambda name: kept)
    with pytest.raises(UsageError, match=r"^codecs holds 'mine', which keeps average, and auto"):
        planner.allowed(["mine"], None)


@pytest.mark.parametrize(("codec", "count"), [("momentum(onebit)", 1), ("onebit", 0)])
def test_momentum_that_ends_with_detach_is_warned_of(codec, count, caplog):
    """Catches: training that goes on without momentum, unsaid."""
    run = session.start({"a": torch.zeros(SHAPE)}, codec)
    run.average({"a": torch.ones(SHAPE)})
    with caplog.at_level(logging.WARNING, "hipress"):
        run.detach()
    found = warned(caplog)
    assert len(found) == count
    assert all("applies momentum, and after detach nothing does" in text for text in found)


@pytest.mark.parametrize(("codec", "count"), [("momentum(onebit)", 1), ("onebit", 0)])
def test_momentum_that_is_not_enabled_is_warned_of(codec, count, caplog):
    """Catches: a comparison run without compression that is also one without momentum, unsaid."""
    with caplog.at_level(logging.WARNING, "hipress"):
        session.start({"a": torch.zeros(SHAPE)}, codec, enabled=False)
    found = warned(caplog)
    assert len(found) == count
    assert all("and with enabled=False nothing does" in text for text in found)


def test_a_framework_that_still_holds_the_means_is_refused():
    """Catches: momentum of momentum, through the seam that every framework uses."""
    for codec, is_refused in (("momentum(onebit)", True), ("onebit", False)):
        adapter = Loop()
        run = session.start({"a": torch.zeros(SHAPE)}, codec, adapter=adapter)
        run.average({"a": torch.ones(SHAPE)})
        adapter.holds = True
        if is_refused:
            with pytest.raises(UsageError, match="added to the means of step 1, of which mo"):
                run.average({"a": torch.ones(SHAPE)})
            run.detach()  # from here on nothing takes momentum
        run.average({"a": torch.ones(SHAPE)})


@pytest.mark.parametrize("codec", ["momentum(ef(onebit))", "dgc(ratio=0.1, clip=0.01)"])
def test_what_is_owed_passes_no_momentum_and_no_clipping(codec):
    """Catches: residuals of other ranks that arrive ten times, or cut off by the clipping."""
    run = session.start({"a": torch.zeros(SHAPE)}, codec)
    owed = torch.randn(SHAPE)
    run.owed["a"] = owed.clone().view(-1)
    first, second = torch.zeros(SHAPE), torch.zeros(SHAPE)
    run.average({"a": first})
    run.average({"a": second})
    assert torch.equal(first, owed) and not second.any()


@pytest.mark.parametrize("nesterov", ["true", "false"])
def test_means_that_were_thrown_away_do_not_grow(nesterov):
    """Catches: momentum of momentum for a layer that no rank uses for some steps."""

    class Unused(Loop):
        def was_dropped(self, name, sent):
            return self.is_unused

    adapter = Unused()
    codec = f"momentum(ef(onebit), mu={MU}, nesterov={nesterov})"
    run = session.start({"a": torch.zeros(SHAPE)}, codec, adapter=adapter)
    for step in range(30):
        adapter.is_unused = 0 < step < 29
        value = torch.ones(SHAPE) if step == 0 else torch.zeros(SHAPE)
        run.average({"a": value})
    # All that momentum makes of a gradient of 1 is 1 + 0.9 + 0.81 + ..., 10 at most.
    assert 5 < value.mean() < 10
