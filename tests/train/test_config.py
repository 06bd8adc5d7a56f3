"""Learning rates, point by point, and the sentences for those that cannot be."""

import math

import pytest

from hipress.errors import UsageError
from hipress.train.config import Schedule, TrainConfig


def rates(schedule, *epochs):
    return [schedule.rate_at(epoch) for epoch in epochs]


def test_constant():
    assert rates(Schedule(base=0.1, num_epochs=10), 0, 5, 9.99) == [0.1, 0.1, 0.1]


def test_steps_as_vgg16_of_byteps():
    # --lr 0.01 --warmup-lr 0.01 --warmup-epochs 5 --lr-decay-epoch 50,80, 100 epochs
    plan = Schedule(
        base=0.01,
        mode="step",
        num_epochs=100,
        warmup_epochs=5,
        warmup_rate=0.01,
        decay_epochs=(50.0, 80.0),
    )
    assert rates(plan, 0, 4, 49.99, 50, 79.99, 80, 99) == pytest.approx(
        [0.01, 0.01, 0.01, 1e-3, 1e-3, 1e-4, 1e-4]
    )


def test_cosine_begins_after_the_rise_and_ends_at_zero():
    plan = Schedule(base=0.2, mode="cosine", num_epochs=120, warmup_epochs=20)
    assert rates(plan, 20, 70, 120) == pytest.approx([0.2, 0.1, 0.0])
    assert plan.rate_at(45) == pytest.approx(0.1 * (1 + math.cos(math.pi * 0.25)))


def test_the_rise_is_straight_and_its_first_step_is_not_lost():
    plan = Schedule(base=1.0, num_epochs=10, warmup_epochs=2, warmup_rate=0.2, step_epochs=0.5)
    assert rates(plan, 0, 0.5, 1, 1.5, 2) == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.0])


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"mode": "poly"}, "--lr-mode 'poly' is none of constant, step, cosine; choose one."),
        ({"base": 0.0}, "--lr is 0; it must be above 0."),
        ({"base": math.nan}, "--lr is nan; it must be above 0."),
        ({"decay": -1.0}, "--lr-decay is -1; it must be above 0."),
        ({"warmup_rate": -0.1}, "--warmup-lr is -0.1; it must be 0 or more."),
        ({"warmup_epochs": 3.0}, "--warmup-epochs is 3 and the run has 2"),
        ({"mode": "step"}, "--lr-mode step needs epochs; give --lr-decay-epochs, e.g. 50,80."),
        ({"decay_epochs": (1.0,)}, "--lr-decay-epochs needs --lr-mode step; it is 'constant'."),
        ({"mode": "step", "decay_epochs": (2.0, 1.0)}, "2,1 is not above 0 and rising; give e.g."),
        ({"mode": "step", "decay_epochs": (0.0,)}, "0 is not above 0 and rising"),
    ],
)
def test_refusals(options, sentence):
    with pytest.raises(UsageError) as refused:
        Schedule(**{"base": 0.1, "num_epochs": 2.0, **options}).check()
    assert sentence in str(refused.value)


def test_length_of_a_run():
    assert TrainConfig().num_steps(7) == 7
    assert TrainConfig(epochs=2.5).num_steps(10) == 25
    assert TrainConfig(epochs=0.01).num_steps(10) == 1
    assert TrainConfig(steps=3).num_steps(10) == 3


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"optimizer": "lamb"}, "--optimizer 'lamb' is none of sgd, adam, adamw"),
        ({"amp": "fp8"}, "--amp 'fp8' is none of off, bf16, fp16"),
        ({"device": "tpu"}, "--device 'tpu' is none of auto, cpu, cuda"),
        ({"backend": "mpi"}, "--backend 'mpi' is none of auto, gloo, nccl"),
        ({"epochs": 1.0, "steps": 1}, "--epochs and --steps both"),
        ({"epochs": 0.0}, "--epochs is 0; it must be above 0."),
        ({"weight_decay": math.inf}, "--weight-decay is inf"),
        ({"momentum": 1.0}, "--momentum is 1; it must be from 0 to below 1."),
        ({"clip_norm": 0.0}, "--clip-norm is 0; it must be above 0."),
        ({"nesterov": True, "momentum": 0.0}, "--nesterov needs"),
        ({"nesterov": True, "optimizer": "adam"}, "--nesterov needs"),
        ({"resume": True}, "--resume needs a checkpoint; give --checkpoint DIR"),
        (
            {"checkpoint_every": 5},
            "--checkpoint-every needs a folder to write to; give --checkpoint DIR",
        ),
        ({"plan": "p.json", "codec": "onebit"}, "--plan decides codec and strategy"),
        ({"codec": "uncompressed", "strategy": "ps"}, "so --strategy has nothing to act on"),
        ({"codec": "uncompressed", "timeline": "t.json"}, "so --timeline has nothing to act on"),
        ({"codec": "uncompressed", "check_every": 5}, "so --check-every has nothing to act on"),
        ({"codec": "uncompressed", "plain_steps": 5}, "so --plain-steps has nothing to act on"),
        ({"codec": "uncompressed", "min_size": 0}, "so --min-size has nothing to act on"),
        ({"codec": "uncompressed", "exclude": ("a",)}, "so --exclude has nothing to act on"),
        ({"momentum": 0.5, "optimizer": "adam"}, "--momentum has an effect only with --opt"),
        ({"rate_decay": 0.5}, "--lr-decay has an effect only with --lr-mode step"),
        ({"warmup_rate": 0.5}, "--warmup-lr has an effect only with --warmup-epochs"),
        ({"side": 64}, "--side has an effect only with --data imagefolder; leave it out."),
        ({"length": 64}, "--length has an effect only with text; leave it out."),
        ({"tokens": "words"}, "--tokens has an effect only with text; leave it out."),
    ],
)
def test_options_that_cannot_be(options, sentence):
    with pytest.raises(UsageError) as refused:
        TrainConfig(**options).check()
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
