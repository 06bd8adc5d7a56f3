"""When auto compresses: the policy with made-up step times. No torch, no other rank."""

import random

import pytest

from hipress.session.policy import Candidate, Limits, Outcome, Policy

PLAIN = None


class World:
    """A cluster in which step times are what a function of epoch and step says.

    Args:
        step_s: (epoch, step) -> seconds.
        candidates: Labels and predicted times; called for every probe.
        probe_s: What measuring takes.
    """

    def __init__(self, step_s, candidates=lambda step: [], limits=None, probe_s=3.0):
        self.step_s, self.candidates, self.probe_s = step_s, candidates, probe_s
        self.now = 0.0
        self.lines, self.epochs, self.measures = [], [], []
        self.policy = Policy(limits or Limits(), self.lines.append, lambda: self.now)

    def run(self, num_steps):
        directive = self.policy.first()
        while len(self.epochs) < num_steps:
            if directive.measures:
                self.now += self.probe_s
                self.measures.append(len(self.epochs))
                reply = Outcome(candidates=self.candidates(len(self.epochs)))
            else:
                times = [
                    self.step_s(directive.epoch, len(self.epochs) + k)
                    for k in range(directive.steps)
                ]
                self.now += sum(times)
                self.epochs += [directive.epoch] * directive.steps
                reply = Outcome(times=times)
            self.directive = directive = self.policy.next(reply)
        return self


def candidate(epoch, step_s, label=None):
    return Candidate(epoch=epoch, label=label or f"plan {epoch}", step_s=step_s)


def steady(plain, **plans):
    """The same times in every step, of plain ones and of plans p1, p2, ..."""
    return lambda epoch, step: plain if epoch is None else plans[f"p{epoch}"]


def noisy(step_s, share, seed=1):
    rng = random.Random(seed)
    return lambda epoch, step: step_s(epoch, step) * max(rng.gauss(1, share), 0.5)


# --- the choice -----------------------------------------------------------------------------------


def test_a_faster_plan_is_chosen_and_kept():
    """Catches: a trial that ends nowhere, or with the slower one."""
    world = World(steady(0.1, p1=0.05), lambda step: [candidate(1, 0.05)]).run(150)
    assert world.epochs[:5] == [PLAIN] * 5
    assert 1 in world.epochs[5:30]
    assert set(world.epochs[30:]) == {1}
    assert world.lines == ["plan 1: 50 ms a step against 100 ms plain."]
    assert len(world.measures) == 1


def test_the_fastest_of_three_is_chosen_whatever_was_predicted():
    """Catches: trust in the directive of the list."""
    candidates = [candidate(1, 0.05), candidate(2, 0.055), candidate(3, 0.057)]
    world = World(steady(0.1, p1=0.08, p2=0.07, p3=0.075), lambda step: candidates).run(150)
    assert set(world.epochs[60:]) == {2}


@pytest.mark.parametrize("own", [0.098, 0.1, 0.13, 5.0])
def test_plain_stays_unless_a_plan_is_clearly_faster(own):
    """Catches: a plan that gains nothing, and a trial of a bad one that takes long."""
    world = World(steady(0.1, p1=own), lambda step: [candidate(1, 0.05)]).run(200)
    assert set(world.epochs[60:]) == {PLAIN}
    assert world.epochs.count(1) <= (40 if own < 0.15 else 4)
    (line,) = world.lines
    assert line.startswith("plain all-reduce: 100 ms a step against ") and "plan 1" in line


def test_steps_in_which_ranks_switch_do_not_count():
    """Catches: plain steps that look slow because ranks have just left the plan, so that all plan
    again; a plan that is refused because its first steps allocate buffers."""
    seen = []

    def step_s(epoch, step):
        seen.append(epoch)
        switches = len(seen) > 1 and seen[-2] != epoch
        begins = epoch is not None and seen.count(epoch) <= 2
        return 3.0 if switches or begins else (0.1 if epoch is None else 0.05)

    world = World(step_s, lambda step: [candidate(1, 0.05)]).run(1000)
    assert world.epochs[-1] == 1 and "50 ms a step against 100 ms plain" in world.lines[0]
    assert None in world.epochs[100:] and len(world.measures) == 1


def test_without_a_candidate_nothing_is_tried():
    """Catches: trials of nothing, and silence."""
    world = World(steady(0.1)).run(300)
    assert set(world.epochs) == {PLAIN}
    assert world.lines == ["no plan is expected to be faster than plain all-reduce."]
    assert len(world.measures) == 1


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("own", [0.08, 0.13])
def test_noise_does_not_change_the_choice(own, seed):
    """Catches: a choice from too few steps."""
    step_s = noisy(steady(0.1, p1=own), 0.1, seed)
    world = World(step_s, lambda step: [candidate(1, 0.08)]).run(150)
    assert set(world.epochs[80:130]) == {1 if own < 0.1 else PLAIN}


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_start_does_not_make_plain_look_slow(seed):
    """Catches: a comparison with the first steps, which warm caches."""
    step_s = noisy(lambda epoch, step: 0.3 if step < 6 else (0.1 if epoch is None else 0.12), 0.03)
    world = World(step_s, lambda step: [candidate(1, 0.08)]).run(150)
    assert set(world.epochs[60:]) == {PLAIN}
    assert len(world.measures) == 1


def test_hopeless_candidates_are_not_tried_beside_a_good_one():
    """Catches: a slow network in which every trial costs seconds."""
    candidates = [candidate(1, 0.1), candidate(2, 0.4), candidate(3, 0.5)]
    world = World(steady(1.0, p1=0.1, p2=0.4, p3=0.5), lambda step: candidates).run(100)
    assert set(world.epochs) == {PLAIN, 1}


# --- changes --------------------------------------------------------------------------------------


def slowed(at, plain=(0.05, 0.5), own=(0.06, 0.1)):
    """A link that becomes slow at some step."""
    return lambda epoch, step: (plain if epoch is None else own)[step >= at]


def offers_if_slow(at):
    return lambda step: [candidate(1, 0.1), candidate(2, 0.11)] if step >= at else []


@pytest.mark.parametrize("at", range(60, 76))
def test_a_slower_link_is_adapted_to_within_30_steps(at):
    """Catches: a change that is seen late, and trials that take too long."""
    world = World(slowed(at), offers_if_slow(at)).run(at + 60)
    assert set(world.epochs[:at]) == {PLAIN}
    assert set(world.epochs[at + 30 : at + 60]) <= {1, 2}
    assert len(world.measures) == 2
    assert "a step takes 500 ms instead of 50 ms" in world.lines[1]


def test_a_plan_that_becomes_slow_is_dropped():
    """Catches: a plan that is kept since it once was fast."""
    step_s = slowed(60, plain=(0.1, 0.1), own=(0.05, 0.3))
    world = World(step_s, lambda step: [candidate(1, 0.05)] if step < 60 else []).run(200)
    assert set(world.epochs[40:60]) == {1}
    assert set(world.epochs[90:]) == {PLAIN}


def test_a_plan_that_plain_overtakes_is_dropped_by_its_control():
    """Catches: a link that has become fast, where a plan's own steps stay as they are."""
    step_s = slowed(60, plain=(0.1, 0.04), own=(0.05, 0.05))
    world = World(step_s, lambda step: [candidate(1, 0.05)]).run(600)
    assert set(world.epochs[40:200]) == {1}
    assert set(world.epochs[420:]) == {PLAIN}
    assert any("has stopped paying" in line for line in world.lines)


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_that_was_chosen_by_chance_is_dropped(seed):
    """Catches: a plan that stays since it is only a little slower than plain."""
    own = lambda step: 0.085 if step < 60 else 0.105  # noqa: E731
    step_s = noisy(lambda epoch, step: 0.1 if epoch is None else own(step), 0.05, seed)
    world = World(step_s, lambda step: [candidate(1, 0.08)]).run(600)
    assert world.epochs[59] == 1
    assert set(world.epochs[450:]) == {PLAIN}


@pytest.mark.parametrize("seed", range(5))
def test_much_noise_does_not_keep_a_slow_plan(seed):
    """Catches: a choice that chance has made, and nothing undoes."""
    step_s = noisy(steady(0.1, p1=0.11), 0.3, seed)
    world = World(step_s, lambda step: [candidate(1, 0.08)]).run(3000)
    assert world.epochs[-1000:].count(1) < 100


def test_controls_cost_less_than_a_hundredth():
    """Catches: plain steps that cost more than they tell."""
    for own in (0.02, 0.05, 0.09):
        step_s = steady(0.1, p1=own)
        world = World(step_s, lambda step, own=own: [candidate(1, own)]).run(8000)
        late = world.epochs[60:]
        extra = late.count(PLAIN) * (0.1 - own)
        assert 0 < extra < 0.0101 * own * len(late)


def test_a_moment_of_noise_is_no_change():
    """Catches: a probe for every hiccup."""
    world = World(lambda epoch, step: 2.0 if step % 50 in (0, 1) else 0.1).run(1000)
    assert len(world.measures) == 1


def test_planning_in_vain_becomes_rare():
    """Catches: a machine that is now fast, now slow, and measures all the time."""
    step_s = lambda epoch, step: 0.1 if step // 40 % 2 else 0.2  # noqa: E731
    world = World(step_s).run(20_000)
    assert 2 <= len(world.measures) <= 12
    assert world.probe_s * len(world.measures) < 0.02 * world.now


@pytest.mark.parametrize("share", [0.05, 0.15, 0.3])
def test_a_noisy_machine_is_left_alone(share):
    """Catches: drift that is seen where there is none."""
    world = World(noisy(steady(0.1), share)).run(5000)
    assert len(world.measures) <= 3


def test_a_link_that_recovers_gives_plain_back():
    """Catches: a plan that stays when it no longer pays."""

    def step_s(epoch, step):
        slow = 60 <= step < 300
        return (0.5 if slow else 0.05) if epoch is None else (0.1 if slow else 0.07)

    world = World(step_s, lambda step: [candidate(1, 0.1)]).run(2500)
    assert set(world.epochs[100:300]) == {1}
    assert set(world.epochs[-200:]) == {PLAIN}


# --- directives ---------------------------------------------------------------------------------


def test_directives_are_numbered_and_keep_what_is_needed():
    """Catches: residuals of a plan in use that a control would send, and those of one that is
    dropped, which would stay."""
    seen = []
    world = World(steady(0.1, p1=0.05), lambda step: [candidate(1, 0.05)])
    give = world.policy.next
    world.policy.next = lambda reply: (seen.append(give(reply)), seen[-1])[1]
    world.run(1000)
    assert [directive.number for directive in seen] == list(range(1, len(seen) + 1))
    first = next(k for k, directive in enumerate(seen) if directive.epoch == 1)
    assert all(directive.keeps_state for directive in seen[first:] if directive.epoch is None)
    assert any(directive.epoch is None for directive in seen[first + 10 :])


@pytest.mark.parametrize(("step_s", "steps"), [(1.0, 4), (0.02, 6), (0.001, 16)])
def test_looks_are_rarer_where_steps_are_short(step_s, steps):
    """Catches: a read of the store that shows in short steps."""
    assert World(steady(step_s)).run(100).directive.steps == steps
