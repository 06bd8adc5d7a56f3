"""Several models under `auto` in one process: rank 0 of two, with a clock and costs made up.

Real are `Auto`, its policy, its clock and the turns of all models of a process; there is no
exchange, and the other rank only has to read what is posted.
"""

import functools
from types import SimpleNamespace

import pytest

from hipress.plan import Decision, Plan
from hipress.session import auto, policy
from hipress.session.adapter import Adapter
from hipress.session.auto import Auto, note_step_end
from hipress.session.monitor import Monitor
from hipress.session.policy import Limits, Outcome, Policy, Turn, Turns
from hipress.session.timing import StepClock

MEASURING_S = 3.0


class Engine(SimpleNamespace):
    """Stands for an engine; unlike its base it can be referred to weakly."""


class Time:
    now = 0.0


@pytest.fixture
def time(monkeypatch):
    found = Time()
    monkeypatch.setattr("time.perf_counter", lambda: found.now)
    monkeypatch.setattr(auto, "Policy", functools.partial(policy.Policy, clock=lambda: found.now))
    monkeypatch.setattr(auto, "TURNS", Turns())
    monkeypatch.setattr(auto, "_running", set())
    return found


class Model:
    """A model whose exchange takes so long without and with its one plan."""

    def __init__(self, time, plain_s, plan_s):
        self.time, self.times = time, {None: plain_s, 1: plan_s}
        self.num_measured = 0
        self.is_closed = False
        plan = Plan(gradients={"w": Decision(codec="onebit")})
        candidate = SimpleNamespace(plan=plan, label="onebit", step_s=plan_s)
        self.engine = Engine(
            transport=SimpleNamespace(rank=0, num_ranks=2),
            device=SimpleNamespace(type="cpu"),
            agree=lambda what, facts, share=None: [share],
            post=lambda number, text: None,
            is_closed=False,
        )
        self.adapter = Adapter()
        self.session = SimpleNamespace(
            engine=self.engine,
            adapter=self.adapter,
            settings=SimpleNamespace(warmup_steps=0),
            monitor=Monitor(),
            schedule=None,
            step=0,
        )
        self.auto = Auto(
            SimpleNamespace(
                codecs=("onebit",),
                about="plans with onebit",
                begin=lambda session: "",
                resume=lambda: None,
                end=lambda: None,
                measure=self.measure,
                shortlist=lambda profile: [candidate],
            ),
            Limits(),
        )
        self.auto.start(self.session)

    def measure(self, session):
        self.num_measured += 1
        self.time.now += MEASURING_S

    def forward(self):
        for observer in self.adapter.observers:
            observer.forward_begin()

    def exchange(self):
        _, plan = self.auto.begin(self.session)
        self.time.now += self.times[plan and plan.epoch]

    def end(self):
        note_step_end(self.auto)
        self.auto.end(self.engine)
        self.session.step += 1

    def step(self):
        self.forward()
        self.exchange()
        self.end()

    @property
    def mode(self):
        return self.auto.stats().mode


def in_turn(a, b):
    """One after the other, as a teacher and a student."""
    a.step()
    b.step()


def nested(a, b):
    """What `a` computes is what `b` is trained with, before `a` is: a GAN with one forward."""
    a.forward()
    b.step()
    a.exchange()
    a.end()


def joint(a, b):
    """One backward pass goes through both."""
    a.forward()
    b.forward()
    a.exchange()
    b.exchange()
    a.end()
    b.end()


@pytest.mark.parametrize("order", [in_turn, nested, joint])
@pytest.mark.parametrize("good", [0, 1])
def test_each_model_decides_from_its_own_steps(time, order, good):
    """Catches: a plan that is refused, or kept, for what a trial of another model costs; a model
    that measures again because another one has."""
    costs = [(0.1, 0.3), (0.1, 0.3)]
    costs[good] = (0.1, 0.07)
    models = [Model(time, *cost) for cost in costs]
    for _ in range(150):
        order(*models)
    assert models[good].mode == "compressed", models[good].auto.reason
    assert models[1 - good].mode == "plain", models[1 - good].auto.reason
    assert [model.num_measured for model in models] == [1, 1]
    if order is not joint:  # there a step of one contains that of the other
        assert models[good].auto.reason == "onebit: 70 ms a step against 100 ms plain"
        told = [event.text for event in models[good].session.monitor.events]
        assert told[-1] == "onebit: 70 ms a step against 100 ms plain."
        trials = models[good].auto.trials()
        assert [(one.label, one.is_chosen) for one in trials] == [
            ("onebit", True), ("plain all-reduce", False),
        ]  # fmt: skip
        assert [one.step_s for one in trials] == pytest.approx([0.07, 0.1])
        assert models[1 - good].auto.reason.startswith("plain all-reduce: 100 ms a step")


def test_a_change_of_the_network_is_noticed_by_both(time):
    """Catches: a model that stays as it was because the other was measured at that moment."""
    models = [Model(time, 0.05, 0.06) for _ in range(2)]
    for _ in range(80):
        joint(*models)
    assert [model.mode for model in models] == ["plain", "plain"]
    for model in models:
        model.times.update({None: 0.5, 1: 0.06})
    for _ in range(150):
        joint(*models)
    assert [model.mode for model in models] == ["compressed", "compressed"]


@pytest.mark.parametrize("how", ["detached", "closed", "forgotten"])
def test_a_model_that_is_no_longer_trained_holds_nobody_up(time, how):
    """Catches: a turn that is never given back."""
    first, second = Model(time, 0.1, 0.07), Model(time, 0.1, 0.07)
    while first.mode != "trial":
        in_turn(first, second)
    assert second.mode == "measure"
    if how == "detached":
        first.auto.stop()
    elif how == "closed":
        first.engine.is_closed = True
    for _ in range(60 if how != "forgotten" else 4 * Turns.PATIENCE + 60):
        second.step()
    assert second.mode == "compressed"


def test_a_step_of_another_model_is_no_part_of_a_step(time):
    """Catches: times of a model that contain those of another."""
    clock = StepClock(SimpleNamespace(type="cpu"))
    clock.forward_begin()
    time.now = 5.0
    clock.resume()  # the other's step has ended
    time.now = 6.0
    clock.end()
    time.now = 9.0
    clock.resume()
    time.now = 9.5
    clock.end()  # a framework that reports no forward pass
    assert clock.read(wait=False) == [1.0, 0.5]


def test_an_exchange_that_is_under_way_is_timed_to_its_end(time):
    """Catches: a step of no length, where two models end in one backward pass."""
    a, b = Model(time, 0.1, 0.1), Model(time, 0.1, 0.1)
    joint(a, b)
    assert a.auto._clock.read(wait=False) == pytest.approx([0.2])
    assert b.auto._clock.read(wait=False) == pytest.approx([0.2])


def test_one_model_alone_has_its_turn_at_once():
    """Catches: a turn that one model must wait for."""
    turns = Turns()
    first, second = Turn(turns), Turn(turns)
    assert first.take() and first.take() and not second.take()
    assert second.others()[1] and not first.others()[1]
    second.end()
    assert not second.take()
    first.end()
    assert second.take()


def test_planning_that_failed_is_said_and_not_repeated():
    """Catches: a false reason, and measurements that repeat for ever without a plan."""
    now, lines = [0.0], []
    made = Policy(Limits(), lines.append, lambda: now[0])
    directive, num_measured, steps = made.first(), 0, 0
    while steps < 3000:
        if directive.measures:
            num_measured += 1
            outcome = Outcome(problem="no plan could be made (KeyError: 'w')")
        else:
            times = [0.1 if (steps + k) // 40 % 2 else 0.2 for k in range(directive.steps)]
            now[0] += sum(times)
            steps += directive.steps
            outcome = Outcome(times)
        directive = made.next(outcome)
    assert num_measured == 1
    assert directive.reason == "no plan could be made (KeyError: 'w')"
    assert lines == []
