"""What a session holds back and sends later: one rank, whose mean is what it gave."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import hipress
from hipress import session
from hipress.errors import AgreementError, UsageError
from hipress.session import Adapter, Mode, checkpoint, guard, replicas

SHAPE = (64, 80)


@pytest.fixture(autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Loop(Adapter):
    """A framework whose answers a test sets."""

    def __init__(self, scale=None, rates=()):
        super().__init__()
        self.scale, self.rates, self.dropped = scale, dict(rates), set()

    def loss_scale(self):
        return self.scale

    def learning_rates(self):
        return self.rates

    def was_dropped(self, name, sent):
        return name in self.dropped


def gradient(step):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step))


def start(codec="onebit", adapter=None, **settings):
    return session.start({"a": torch.zeros(SHAPE)}, codec=codec, adapter=adapter, **settings)


def averaged(run, value):
    value = value.clone()
    run.average({"a": value})
    return value


def all_of_it(run):
    """What is still to come: the last step sends it all."""
    run.detach()
    last = averaged(run, torch.zeros(SHAPE))
    assert run.mode.current is Mode.DETACHED
    return last


def test_what_was_given_arrives():
    """Catches: a residual that no step sends."""
    run = start()
    given = [gradient(step) for step in range(4)]
    came = [averaged(run, value) for value in given]
    assert (sum(came) - sum(given)).abs().max() > 0.1
    torch.testing.assert_close(sum(came) + all_of_it(run), sum(given), rtol=0, atol=1e-4)
    torch.testing.assert_close(averaged(run, given[0]), given[0], rtol=0, atol=0)


def test_it_arrives_in_the_scale_of_its_step():
    """Catches: a residual that is added in the unit of another loss scale."""
    adapter = Loop(scale=4.0)
    run = start(adapter=adapter)
    came = averaged(run, 4 * gradient(0)) / 4
    adapter.scale = 32.0
    came += all_of_it(run) / 32
    torch.testing.assert_close(came, gradient(0), rtol=0, atol=1e-4)


def test_what_was_thrown_away_comes_again_in_the_scale_of_that_step():
    """Catches: what the framework threw away that is lost, or kept in another unit."""
    adapter = Loop(scale=1.0)
    run = start(adapter=adapter)
    adapter.dropped = {"a"}
    averaged(run, gradient(0))
    assert list(run.owed) == ["a"]
    adapter.dropped, adapter.scale = set(), 2.0
    came = averaged(run, 2 * gradient(1)) / 2
    assert not run.owed
    came += all_of_it(run) / 2
    torch.testing.assert_close(came, gradient(0) + gradient(1), rtol=0, atol=1e-4)


def test_what_is_thrown_away_while_it_is_sent_for_the_last_time_comes_again():
    """Catches: a session that detaches though the framework threw away what it sent last."""
    adapter = Loop()
    run = start(adapter=adapter)
    came = averaged(run, gradient(0))
    adapter.dropped = {"a"}
    run.detach()
    averaged(run, torch.zeros(SHAPE))
    assert run.mode.current is Mode.FLUSHING
    adapter.dropped = set()
    came += averaged(run, torch.zeros(SHAPE))
    assert run.mode.current is Mode.DETACHED
    torch.testing.assert_close(came, gradient(0), rtol=0, atol=1e-4)


def saved_after(num_steps, codec="onebit"):
    run = start(codec)
    came = sum(averaged(run, gradient(step)) for step in range(num_steps))
    return came, copy.deepcopy(run.state_dict())


def test_a_checkpoint_of_the_same_ranks_goes_on_bit_for_bit():
    """Catches: state that a checkpoint lacks, or that is given to another role."""
    run = start()
    for step in range(3):
        averaged(run, gradient(step))
    _, state = saved_after(3)
    other = start()
    other.load_state_dict(state)
    for step in (3, 4):
        assert torch.equal(averaged(other, gradient(step)), averaged(run, gradient(step)))


def test_a_checkpoint_of_other_ranks_is_owed_once():
    """Catches: the residuals of another number of ranks that are dropped, or added in each step."""
    came, state = saved_after(3)
    state["world_size"] = 2
    run = start()
    run.load_state_dict(state)
    came += averaged(run, gradient(3))
    assert not run.owed
    came += averaged(run, gradient(4))
    came += all_of_it(run)
    torch.testing.assert_close(came, sum(map(gradient, range(5))), rtol=0, atol=1e-4)


def test_a_checkpoint_of_another_codec_is_owed():
    """Catches: a residual that is given to a codec which keeps none, and so is dropped."""
    came, state = saved_after(3)
    run = start("bf16")
    run.load_state_dict(state)
    came += averaged(run, torch.zeros(SHAPE)) + all_of_it(run)
    assert (came - sum(map(gradient, range(3)))).abs().max() < 0.05


def test_a_refused_checkpoint_leaves_the_run_as_it_was():
    """Catches: half a checkpoint of another model."""
    came, state = saved_after(2)
    state["gradients"]["a"]["numel"] -= 1
    run = start()
    came = averaged(run, gradient(0))
    with pytest.raises(UsageError, match="'a' has 5119 elements and this model's has 5120; load"):
        run.load_state_dict(state)
    assert run.step == 1 and run.loaded is None
    torch.testing.assert_close(came + all_of_it(run), gradient(0), rtol=0, atol=1e-4)


def test_a_warm_up_goes_on_where_it_was():
    """Catches: a resumed run that warms up twice, or not to the end."""
    run = start(warmup_steps=3)
    averaged(run, gradient(0))
    _, state = saved_after(2)
    run.load_state_dict(state)
    assert (run.step, run.mode.current) == (2, Mode.WARMUP)
    assert torch.equal(averaged(run, torch.zeros(SHAPE)), torch.zeros(SHAPE))
    averaged(run, torch.zeros(SHAPE))
    assert run.mode.current is Mode.COMPRESSED
    _, state = saved_after(4)
    run.load_state_dict(state)
    assert run.mode.current is Mode.COMPRESSED


def test_residuals_follow_the_learning_rate():
    """Catches: a residual that is applied with another rate than the gradient it is a part of."""
    adapter = Loop(rates={"a": 1.0})
    run = start("momentum(ef(onebit), mu=0.5, nesterov=false)", adapter)
    averaged(run, gradient(0))
    before = run.state_dict()["ranks"]["0"]["a"]["residual"]
    adapter.rates = {"a": 0.25}
    run.begin_step()
    assert run._rate_ratios == {"a": 4.0}
    run.end_step()
    adapter.rates = {"a": 0.0}
    run.begin_step()
    assert run.rates == {"a": 0.25} and run.state_dict()["rates"] == {"a": 0.25}
    assert before.any()


def test_a_bad_number_is_seen_and_nothing_of_it_stays():
    """Catches: NaN in a residual, which every later step would send."""
    run = start("topk(ratio=0.01)")
    bad = gradient(0)
    bad[3, 5] = torch.inf
    assert averaged(run, bad).isnan().any()
    came = averaged(run, gradient(1)) + all_of_it(run)
    assert came.isfinite().all()
    torch.testing.assert_close(came[3, 5], gradient(1)[3, 5], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "size"), [("int8", 0.3), ("bf16", 0.51)])
def test_residuals_in_fewer_bits_lose_roundings_only(kind, size):
    """Catches: a reader of residuals that takes their bytes for numbers, or loses them."""
    codec = f"ef(topk(ratio=0.01), residual={kind})"
    adapter = Loop(scale=4.0)
    run, other = (start(codec, one, min_size=0) for one in (adapter, None))
    came = sum(averaged(run, 4 * gradient(step)) for step in range(3)) / 4
    assert 0 < run.engine.states.num_bytes <= 2 * size * 4 * gradient(0).numel() + 32  # both ways
    adapter.scale = 32.0
    came += averaged(run, 32 * gradient(3)) / 32
    seen = SimpleNamespace(name="a", which=slice(3, 5120, 7), gradient=run.gradients["a"])
    unsent = checkpoint.unsent(run.engine, seen.gradient)[seen.which]
    assert torch.equal(guard._held(run, seen)[0], unsent) and unsent.any()
    state = copy.deepcopy(run.state_dict())
    other.load_state_dict(copy.deepcopy(state))  # a scale of 32 was saved, and there is none now
    state["world_size"] = 2
    third = start(codec, Loop(scale=32.0))
    third.load_state_dict(state)
    given = sum(map(gradient, range(4)))
    ends = [all_of_it(run) / 32, all_of_it(other), all_of_it(third) / 32]
    for end in ends:
        assert (came + end - given).abs().max() < 0.3  # four roundings of at most 1/64 of 9, twice
        torch.testing.assert_close(end, ends[0], rtol=0, atol=1e-5)
    assert (came - given).abs().max() > 3


@pytest.mark.parametrize("kind", ["int8", "bf16"])
def test_a_checkpoint_of_residuals_in_fewer_bits_goes_on_bit_for_bit(kind, tmp_path):
    """Catches: residuals that are rounded once more, or draws that a restart repeats."""
    codec = f"ef(onebit, residual={kind})"
    run = start(codec)
    for step in range(3):
        averaged(run, gradient(step))
    run.save(tmp_path / "sync")
    whole, shards = start(codec), start(codec)
    whole.load_state_dict(copy.deepcopy(run.state_dict()))
    shards.load(tmp_path / "sync")
    for step in (3, 4):
        came = averaged(run, gradient(step))
        assert torch.equal(averaged(whole, gradient(step)), came)
        assert torch.equal(averaged(shards, gradient(step)), came)
    plain = start("topk(ratio=0.1)")
    plain.load(tmp_path / "sync")
    again = start(codec)
    again.load(tmp_path / "sync")
    torch.testing.assert_close(all_of_it(plain), all_of_it(again), rtol=0, atol=1e-6)


def test_a_failed_exchange_is_raised_and_its_mean_is_no_number():
    """Catches: a gradient of one rank that is taken for the mean."""
    run = start()
    buffer = torch.ones(3)
    run._note_failure(buffer, RuntimeError("rank 1 is gone"))
    assert buffer.isnan().all()
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        run.end_step()


def test_ranks_compare_what_decides_about_bytes():
    """Catches: ranks that differ in a choice and exchange all the same."""
    one, other = start("onebit"), start("int8")
    assert {name for name, fact in one.facts().items() if other.facts()[name] != fact} == {"codecs"}
    assert one.facts()["elements of parameters"] == [5120]
    assert {"parameters", "dtypes of parameters", "strategies", "epoch of the plan"} < set(
        one.facts()
    )


def test_replicas_are_checked_when_asked_for(monkeypatch):
    """Catches: a check that is never made, or that compares nothing."""
    seen = []
    monkeypatch.setattr(replicas, "compare", lambda told, step: seen.append((told, step)))
    adapter = Loop()
    adapter.parameters = lambda: [("w", torch.ones(3))]
    run = start(adapter=adapter, check_every=2)
    for step in range(4):
        averaged(run, gradient(step))
    assert [step for _, step in seen] == [0, 2]
    assert seen[0][0] == [replicas.digests(adapter.parameters())]


def test_every_rank_that_differs_is_named():
    """Catches: a rank that holds other parameters and is not among those named."""
    told = [{"w": "1", "b": "1"}, {"w": "1", "b": "2"}, {"w": "1", "b": "1"}, {"w": "1", "b": "3"}]
    replicas.compare(told[:1], 7)
    with pytest.raises(AgreementError, match="of step 7 failed: parameter 'b' differs on ranks 1"):
        replicas.compare(told, 7)


def test_figures_count_what_was_sent(caplog):
    """Catches: statistics of a session that begin with another step, or count gradients twice."""
    with caplog.at_level(logging.INFO, "hipress"):
        run = start(log_every=2)
        for step in range(4):
            averaged(run, gradient(step))
    found = run.stats()
    assert (found.num_steps, found.num_gradients, found.num_compressed) == (4, 1, 1)
    assert found.gradient_bytes == 4 * 4 * 5120
    assert found.state_bytes >= 4 * 5120
    lines = [record.message for record in caplog.records if record.message.startswith("step ")]
    assert [line.split(":")[0] for line in lines] == ["step 2", "step 4"]


# --- codecs that compare gradients with numbers ---------------------------------------------------

SCALES = (2.0**16, 2.0**16, 2.0**15, 2.0**17)
RANGED = {"fp16"}
"""Codecs whose range is that of a 16-bit float: under a loss scale they overflow, visibly."""
CODECS = [name for name in hipress.codecs.table.TABLE if name not in RANGED] + [
    "tbq(tau=0.05, levels=3)",
    "tbq(tau=0.05, ef=false)",
    "momentum(ef(tbq(tau=0.05)))",
    "dgc(ratio=0.1, clip=1.0)",
    "dgc(ratio=0.1, clip=1.0, warmup=2)",
]


@pytest.mark.parametrize("codec", CODECS)
def test_a_loss_scale_changes_the_unit_and_nothing_else(codec):
    """Catches: a threshold in the gradient's unit that stays where it is as the scale changes."""
    adapter = Loop()
    alone, scaled = start(codec), start(codec, adapter=adapter)
    for step, scale in enumerate(SCALES):
        adapter.scale = scale
        wanted = averaged(alone, 0.1 * gradient(step))
        assert wanted.any() or codec.startswith("tbq")
        assert torch.equal(averaged(scaled, scale * (0.1 * gradient(step))) / scale, wanted)
    assert torch.equal(all_of_it(scaled) / SCALES[-1], all_of_it(alone))


def test_no_scaler_changes_no_codec():
    """Catches: bindings that are made anew, or codecs that change, without a scaler."""
    run = start("tbq(tau=0.05)")
    averaged(run, gradient(0))
    exchange = run.engine._recipes[run.engine._names["a"]].exchange
    bound = exchange.bound
    averaged(run, gradient(1))
    assert exchange.bound is bound and list(exchange._bounds) == ["tbq(tau=0.05)"]


def test_bindings_of_other_scales_are_dropped():
    """Catches: memory that grows with every change of the loss scale."""
    adapter = Loop()
    run = start("tbq(tau=0.05)", adapter=adapter)
    for step in range(6):
        adapter.scale = 2.0 ** (10 + step // 2)
        averaged(run, gradient(step))
    exchange = run.engine._recipes[run.engine._names["a"]].exchange
    assert list(exchange._bounds) == ["tbq(tau=204.8, levels=1)"]


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


class Full:
    """A writer on a full disk."""

    def __init__(self):
        self.num_calls = 0

    def add_scalar(self, tag, value, step):
        self.num_calls += 1
        raise OSError(28, "No space left on device")


def test_a_writer_that_fails_ends_no_training(caplog):
    """Catches: a job that ends, with all ranks waiting for rank 0, since its disk is full."""
    writer = Full()
    run = start(log_every=1, writer=writer)
    with caplog.at_level(logging.WARNING, "hipress"):
        for step in range(3):
            averaged(run, gradient(step))
    assert run.step == 3 and writer.num_calls == 1
    (text,) = warned(caplog)
    assert text.startswith("the writer failed in step 1 and gets no more scalars (OSError: ")


@pytest.mark.parametrize(
    ("codec", "min_size", "count"), [("none", 0, 0), ("none", 10**6, 0), ("onebit", 10**6, 1)]
)
def test_a_run_without_compression_is_warned_of_unless_asked_for(codec, min_size, count, caplog):
    """Catches: a warning about what the user asked for; none where a codec has nothing to do."""
    with caplog.at_level(logging.WARNING, "hipress"):
        start(codec, min_size=min_size)
    found = [text.startswith("no gradient is compressed") for text in warned(caplog)]
    assert found == [True] * count
