"""The accuracy guard: limits, windows and switches; one rank, and virtual workers."""

import logging
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import hipress
from hipress import session
from hipress.errors import UsageError
from hipress.session import Adapter, guard, milder
from hipress.session.guard import Numbers, Tally, Verdict, judge, num_places, numbers, places, sums
from tests import guarded
from tests.grid import thinned
from tests.session.test_nothing_is_lost import warned

SHAPE = (64, 80)
NUMEL = 64 * 80


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# --- numbers in, decisions out --------------------------------------------------------------------

GOOD = Numbers(steps=40, cosine=0.9, share=0.8, error=0.5, size=0.9)
ONEBIT, TERNGRAD, NOT_A_NUMBER = "onebit", "terngrad", math.nan
VERDICTS = [
    (GOOD, ONEBIT, Verdict.GOOD),
    (replace(GOOD, steps=10), ONEBIT, Verdict.GOOD),
    (replace(GOOD, steps=2), ONEBIT, Verdict.OPEN),
    (replace(GOOD, steps=10, cosine=0.3), ONEBIT, Verdict.OPEN),
    (replace(GOOD, steps=10, share=0.1), ONEBIT, Verdict.OPEN),
    (replace(GOOD, cosine=0.15), ONEBIT, Verdict.GOOD),
    (replace(GOOD, cosine=0.15), TERNGRAD, Verdict.INACCURATE),
    (replace(GOOD, cosine=0.05), ONEBIT, Verdict.INACCURATE),
    (replace(GOOD, cosine=0.05, cancels=True), ONEBIT, Verdict.GOOD),
    (replace(GOOD, share=0.01), ONEBIT, Verdict.GOOD),
    (replace(GOOD, share=0.01), TERNGRAD, Verdict.INACCURATE),
    (replace(GOOD, steps=2, error=2.0), ONEBIT, Verdict.WRONG),
    (replace(GOOD, steps=2, error=2.0), TERNGRAD, Verdict.OPEN),
    (replace(GOOD, steps=2, size=50.0), TERNGRAD, Verdict.WRONG),
    (replace(GOOD, steps=10, cosine=-0.9), TERNGRAD, Verdict.WRONG),
    (replace(GOOD, steps=2, is_broken=True, is_finite=False), ONEBIT, Verdict.WRONG),
    (replace(GOOD, is_finite=False), ONEBIT, Verdict.AGAIN),
]


@pytest.mark.parametrize(("found", "codec", "wanted"), VERDICTS)
def test_the_verdict(found, codec, wanted):
    """Catches: a limit on the wrong side, or one for a codec that it does not suit."""
    assert judge(found, hipress.codec(codec)) is wanted


@pytest.mark.parametrize("numel", [1, 255, 2048, 2049, 5000, 64 * 768, 10**7 + 3])
def test_the_sample_is_spread_over_the_whole_gradient(numel):
    """Catches: a sample that sees few columns or rows of a matrix, or more than it should."""
    found = range(numel)[places("layer", numel, 2048)]
    assert len(found) == num_places(places("layer", numel, 2048)) <= 2048
    assert len(found) >= min(numel, 1000)
    assert found[0] < found.step and found[-1] >= numel - found.step
    if found.step > 8:
        assert len({place % 768 for place in found}) >= 600


def test_the_numbers_of_a_window():
    """Catches: a wrong norm, product or sign."""
    generator = torch.Generator().manual_seed(3)
    true, decoded = torch.randn(2, 4, 300, generator=generator)  # steps by elements
    tally = Tally([300])
    tally.begin(0, None, None)
    for one, other in zip(true, decoded, strict=True):
        tally.add_true(0, one)
        tally.decoded[0].add_(other)
        tally.end_step()
    found = numbers(sums(tally.told, tally.decoded)[0].tolist(), 4, num_ranks=1)
    t, d = true.sum(0), decoded.sum(0)
    scale = max(t.norm(), true.norm())
    assert found.cosine == pytest.approx(float(t @ d / t.norm() / d.norm()), rel=1e-5)
    assert found.share == pytest.approx(float(t @ d / (t @ t)), rel=1e-5)
    assert found.error == pytest.approx(float((t - d).norm() / scale), rel=1e-5)
    assert found.size == pytest.approx(float(d.norm() / scale), rel=1e-5)
    assert found.is_finite and not found.is_broken and not found.cancels
    tally.scale(8.0)
    again = numbers(sums(tally.told, tally.decoded)[0].tolist(), 4, num_ranks=1)
    assert again == found  # all numbers are free of the loss scale


def test_gradients_that_cancel_say_nothing():
    """Catches: a good codec that is left because true gradients alternate."""
    tally = Tally([300])
    tally.begin(0, None, None)
    value = torch.randn(300)
    for step in range(40):
        tally.add_true(0, value if step % 2 else -0.999 * value)
        tally.decoded[0].add_(0.01 * torch.randn(300))
        tally.end_step()
    found = numbers(sums(tally.told, tally.decoded)[0].tolist(), 40, num_ranks=1)
    assert (
        found.cancels and found.error < 1 and judge(found, hipress.codec("onebit")) is Verdict.GOOD
    )


@pytest.mark.parametrize("whose", ["codec", "gradient", "gradient of one rank", "first codec"])
def test_whose_fault_is_a_value_that_is_not_finite(whose):
    """Catches: a codec blamed for an overflow of the loss scale, or not blamed for its own."""
    tallies = [Tally([100]) for _ in range(2)]
    for rank, tally in enumerate(tallies):
        tally.begin(0, None, None)
        for step in range(4):
            value, mean = torch.ones(100), torch.ones(100)
            if step == 2 and whose != "gradient":
                mean[3] = NOT_A_NUMBER
            if step == 2 and (whose == "gradient" or (whose == "gradient of one rank" and rank)):
                value[5] = mean[5] = math.inf
            if step == 3 and whose == "first codec":
                value[:] = NOT_A_NUMBER  # the parameters are ruined by now
            tally.add_true(0, value)
            tally.decoded[0].add_(mean)
            tally.end_step()
    told = sum(tally.told for tally in tallies) / 2
    found = numbers(sums(told, tallies[0].decoded)[0].tolist(), 4, num_ranks=2)
    assert not found.is_finite
    assert found.is_broken == ("codec" in whose)


LADDERS = [
    ("onebit", "int8"), ("ef(onebit)", "int8"), ("int8", "none"), ("bf16", "none"),
    ("none", None), ("momentum(ef(onebit), mu=0.8)", "momentum(int8, mu=0.8, nesterov=true)"),
    ("dgc(ratio=0.01, momentum=0.7)", "momentum(int8, mu=0.7, nesterov=false)"),
    ("momentum(int8, nesterov=false)", "momentum(none, mu=0.9, nesterov=false)"),
    ("momentum(none)", None),
]  # fmt: skip


@pytest.mark.parametrize(("codec", "wanted"), LADDERS)
def test_what_is_milder(codec, wanted):
    """Catches: a rung that does not exist, or momentum that nothing applies any more."""
    if "int4" in milder.TABLE and wanted and milder.rung(hipress.codec(codec)) == 0:
        wanted = wanted.replace("int8", "int4")
    assert milder.milder(hipress.codec(codec)) == wanted
    assert wanted is None or hipress.codec(wanted)


# --- virtual workers: limits between healthy and wrong codecs -------------------------------------

HEALTHY = [
    ("mlp", "onebit"), ("mlp", "momentum(ef(onebit))"), ("mlp", "topk(ratio=0.01)"),
    ("mlp", "dgc"), ("mlp", "dgc(ratio=0.01)"), ("mlp", "terngrad"), ("mlp", "int8"),
    ("mlp", "bf16"),
    ("cnn", "onebit"), ("cnn", "topk(ratio=0.01)"), ("cnn", "terngrad"), ("gpt", "onebit"),
    ("gpt", "int8"), ("gpt", "topk(ratio=0.01)"),
]  # fmt: skip
WRONG = [(kind, ef) for kind in ("zeros", "noise", "sign", "large") for ef in (False, True)]


KEPT = [HEALTHY[0], HEALTHY[3], HEALTHY[11]]


@pytest.mark.parametrize(("task", "codec"), thinned(HEALTHY, keep=KEPT))
def test_healthy_codecs_are_left_alone(task, codec):
    """Catches: a limit that a codec with which training reaches its accuracy does not meet."""
    found = []

    def look(step, layer, numbers, made):
        found.append((step, layer, judge(numbers, made), numbers))

    guarded.run(task, codec, 250 if task == "gpt" else 360, [0, 100, 300], look)
    assert found and not [one for one in found if one[2].falls_out]


@pytest.mark.parametrize("task", ["mlp", "gpt"])
@pytest.mark.parametrize(("kind", "feedback"), thinned(WRONG, keep=WRONG[:1]))
def test_wrong_codecs_fall_out_within_50_steps(tmp_path, task, kind, feedback):
    """Catches: a limit that a codec without any use meets.

    No layer leaves the codec here, so a model may diverge before the last look, which is after 40
    steps. By then most layers have fallen out, and the others would, by that look.
    """
    fallen, last = {}, {}

    def look(step, layer, numbers, made):
        last[layer] = judge(replace(numbers, steps=guard.LOOKS[-1]), made)
        if judge(numbers, made).falls_out:
            fallen.setdefault(layer, numbers.steps)

    guarded.run(task, guarded.bad(tmp_path, kind, feedback=feedback), 70, [0], look)
    assert len(last) == {"mlp": 2, "gpt": 10}[task]
    assert len(fallen) > len(last) / 2 and max(fallen.values()) <= 46
    assert all(layer in fallen or verdict.falls_out for layer, verdict in last.items())


# --- one rank -------------------------------------------------------------------------------------


def gradient(step):
    generator = torch.Generator().manual_seed(step)
    slow = torch.randn(SHAPE, generator=torch.Generator().manual_seed(10**6))
    return slow + torch.randn(SHAPE, generator=generator)


def steps_of(run, num_steps, names="ab"):
    """Sums of gradients and of means."""
    given, got = ({name: torch.zeros(SHAPE, dtype=torch.float64) for name in names} for _ in "12")
    for step in range(run.step, run.step + num_steps):
        values = {name: gradient(step) for name in names}
        for name, value in values.items():
            given[name] += value
        run.average(values)
        for name, value in values.items():
            got[name] += value
    return given, got


def started(codec, **more):
    arrays = {name: torch.zeros(SHAPE) for name in "ab"}
    return session.start(arrays, codec, **{"guard": True, **more})


def unsent(run, name):
    state = run.state_dict()
    left = state["mean"].get(name, {}).get("residual", 0.0)
    return left + state["owed"].get(name, 0.0)


@pytest.mark.parametrize("kind", ["zeros", "large"])
@pytest.mark.parametrize("feedback", [False, True])
def test_a_wrong_codec_is_left_and_nothing_is_lost(alone, tmp_path, caplog, kind, feedback):
    """Catches: a codec that stays, a switch that is not said, a residual that is not sent on."""
    codec = guarded.bad(tmp_path, kind, feedback=feedback)
    run = started(codec)
    with caplog.at_level(logging.WARNING, "hipress"):
        given, got = steps_of(run, 50)
    names = {run.gradients[name].choice.codec.name for name in "ab"}
    assert len(names) == 1 and names <= set(milder.LADDER)
    (text,) = warned(caplog)
    (event,) = run.monitor.events  # for hipress top
    assert text == f"guard, step {event.step}: {event.text}." and event.kind == "guard"
    assert f"from {codec.name} to {names.pop()}: a (cosine" in text and ", b (cosine" in text
    found = run.stats().guard
    assert set(found.overrides) == {"a", "b"} and found.codecs["a"] in milder.LADDER
    if feedback:
        for name in "ab":
            gap = got[name].view(-1) + unsent(run, name).double() - given[name].view(-1)
            # Values of 100^3 came and went, of which float32 keeps seven digits.
            assert gap.abs().max() < (1.0 if kind == "large" else 1e-4 * given[name].abs().max())


@pytest.mark.parametrize("codec", ["onebit", "topk(ratio=0.01)", "int8", "momentum(ef(onebit))"])
def test_a_healthy_codec_stays_and_is_looked_at_ever_more_rarely(alone, codec, caplog):
    """Catches: a false alarm, a window that never ends, samples in every step."""
    run = started(codec)
    with caplog.at_level(logging.WARNING, "hipress"):
        steps_of(run, 50)
        sampled = []
        for _ in range(600):
            steps_of(run, 1)
            sampled.append(run.guard.is_active)
    assert not run.stats().guard.overrides and not warned(caplog)
    assert 10 <= sum(sampled) <= 90
    assert set(run.stats().guard.measured) == {"a", "b"}


def test_a_guard_changes_no_bit(alone):
    """Catches: samples that write into gradients or codec state."""
    with_guard, without = (steps_of(started("onebit", guard=on), 60) for on in (True, False))
    assert all(torch.equal(with_guard[1][name], without[1][name]) for name in "ab")


def test_only_the_layer_that_falls_out_changes(alone, tmp_path):
    """Catches: a switch of a whole bucket; other layers that lose their residuals."""
    plan = {"gradients": {"a": {"codec": guarded.program(tmp_path, "zeros")},
                          "b": {"codec": "onebit"}}}  # fmt: skip
    run = session.start({n: torch.zeros(SHAPE) for n in "ab"}, plan=plan, guard=True)
    given, got = steps_of(run, 60)
    assert set(run.stats().guard.overrides) == {"a"}
    assert run.gradients["b"].choice.codec.name == "onebit"
    gap = got["b"].view(-1) + unsent(run, "b").double() - given["b"].view(-1)
    assert gap.abs().max() < 1e-4 * given["b"].abs().max()


def test_a_wrong_momentum_codec_gives_its_momentum_on(alone, tmp_path):
    """Catches: momentum that ends with the codec, though nothing else applies it."""
    codec = hipress.codec(f"momentum({guarded.program(tmp_path, 'zeros')}, mu=0.9, nesterov=false)")
    run = started(codec)
    for _ in range(60):
        value = {name: torch.ones(SHAPE) for name in "ab"}
        run.average(value)
    assert run.gradients["a"].choice.codec.name.startswith("momentum(int")
    torch.testing.assert_close(value["a"], torch.full(SHAPE, 10.0), rtol=0.02, atol=0.0)


@pytest.mark.parametrize("shards", [False, True])
def test_a_resumed_run_keeps_the_milder_codec(alone, tmp_path, shards):
    """Catches: a resumed run that starts with the bad codec again, or loses its state."""
    path = guarded.program(tmp_path, "zeros")
    run = started(path)
    steps_of(run, 60)
    others = [started(path), started(path, guard=False)]
    for other in others:
        if shards:
            run.save(tmp_path / "saved")
            other.load(tmp_path / "saved")
        else:
            other.load_state_dict(run.state_dict())
    assert others[0].gradients["a"].choice.codec.name == run.gradients["a"].choice.codec.name
    assert others[1].gradients["a"].choice.codec.name == path
    given, got = steps_of(run, 5)
    again = steps_of(others[0], 5)[1]
    assert all(torch.equal(got[name], again[name]) for name in "ab")


def test_a_codec_that_was_inaccurate_is_tried_once_more(alone, tmp_path, monkeypatch):
    """Catches: a layer that never comes back, or comes back again and again."""
    monkeypatch.setattr(guard, "RETRY_AFTER", 30)
    run = started(guarded.program(tmp_path, "zeros"))
    codecs = []
    for _ in range(250):
        steps_of(run, 1)
        codecs.append(run.gradients["a"].choice.codec.name)
    changes = [k for k in range(1, 250) if codecs[k] != codecs[k - 1]]
    assert len(changes) == 3 and 25 <= changes[1] - changes[0] <= 35
    assert changes[2] - changes[1] <= 46


def test_an_overflow_is_not_the_codecs_fault(alone):
    """Catches: a codec that is left since a loss scale was too large, or NaN in a sample."""
    run = started("onebit")
    for step in range(70):
        value = {name: gradient(step) for name in "ab"}
        if step in (0, 1, 5, 20):
            value["a"][3, 7] = math.inf
        run.average(value)
    assert not run.stats().guard.overrides
    assert run.stats().guard.measured["a"].is_finite


class Scaled(Adapter):
    scale = 1024.0

    def loss_scale(self):
        return self.scale


def test_a_change_of_the_loss_scale_changes_no_number(alone):
    """Catches: sums in two units."""
    adapter = Scaled()
    run = started("onebit", adapter=adapter)
    plain = started("onebit")
    for step in range(20):
        adapter.scale = 1024.0 if step < 4 else 65536.0
        run.average({name: gradient(step) * adapter.scale for name in "ab"})
        plain.average({name: gradient(step) for name in "ab"})
    assert str(run.guard.measured["a"]) == str(plain.guard.measured["a"])


def test_the_argument(alone):
    """Catches: a guard that is on or off by mistake."""
    assert started("onebit", guard=None).guard is None
    assert started("onebit", guard=False).stats().guard is None
    assert started(None, guard=None).guard is not None
    assert started(None, guard=False).guard is None
    with pytest.raises(UsageError, match="^guard is 'yes'; give True, False, or None"):
        started("onebit", guard="yes")


def test_detach_ends_it(alone):
    """Catches: a guard that goes on sampling, or stops a flush."""
    run = started("onebit")
    given, got = steps_of(run, 5)
    run.detach()
    more, last = steps_of(run, 3)
    for name in "ab":
        gap = got[name] + last[name] - given[name] - more[name]
        assert gap.abs().max() < 1e-4 * given[name].abs().max()


def test_a_step_that_is_broken_off_counts_for_nothing(alone):
    """Catches: what was sent in a step whose means never came, taken for something lost."""
    run = started("int8")
    for step in range(15):
        if step % 3 == 1:  # an error somewhere in backward
            run.begin_step()
            value = torch.cat([gradient(step).view(-1), gradient(step).view(-1)])
            run.exchange(0, ("a", "b"), value).wait()
        steps_of(run, 1)
    assert not run.stats().guard.overrides
    steps_of(run, 15)
    assert run.stats().guard.measured["a"].share > 0.97


def test_steps_between_windows_do_nothing(alone, monkeypatch):
    """Catches: samples, copies or exchanges in steps in which nothing is looked at."""
    run = started("onebit")
    steps_of(run, 30)
    assert not run.guard.is_active and run.guard.num_looks == 2
    for name in ("_take", "_read", "_start_look", "_follow"):
        inner = getattr(guard.Guard, name)

        def refuse(self, *args, name=name, inner=inner):
            assert name == "_follow", name
            version = self._version
            inner(self, *args)
            assert version == self._version

        monkeypatch.setattr(guard.Guard, name, refuse)
    num_syncs = run.engine.stats.num_syncs
    steps_of(run, 20)
    assert run.engine.stats.num_syncs == num_syncs + 20
