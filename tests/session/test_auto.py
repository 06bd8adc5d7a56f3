"""`attach(model)` without a codec, with real processes over gloo on 127.0.0.1.

Starting a rank takes seconds, so one job runs all scenarios (see `scripts/auto.py`); tests look at
what each has told. Plans and step times are made up there; what a policy does with times is in
`test_policy.py`. The docstring of a test says what would make it fail.
"""

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from hipress.casync.engine.transport import LinkError
from hipress.casync.ranks import agreement
from hipress.casync.ranks.agreement import KEPT_POSTS, Agreement
from hipress.errors import PeerError, UsageError
from hipress.lab import Lab
from hipress.plan import Decision, Plan
from hipress.probe.codec_costs import GPU_SIZES, SLOT_BYTES, Extent
from hipress.profile import GradientProfile, Machine, ModelProfile
from hipress.session import checkpoint, planner
from hipress.session.adapter import GradientSpec
from hipress.session.auto import KEPT_PLANS, Auto
from hipress.session.buckets import Bucket, Gradient, grouped
from hipress.session.mode import Mode, StepMode
from hipress.session.monitor import Monitor
from hipress.session.policy import Directive, first_directive
from hipress.session.selection import NONE, Choice
from hipress.session.session import Session, Settings
from hipress.session.timing import StepClock
from hipress.torch import ddp
from hipress.train.config import TrainConfig
from tests import scenarios
from tests.grid import full
from tests.scenarios import Told

SCRIPT = Path(__file__).parents[1] / "torch" / "scripts" / "auto.py"
ROUNDING = 1e-6
"""Of sums of some gradients in float32, against their largest element; it was 1e-7."""
TIMEOUT_S = 30
TOPK = "topk(ratio=0.05)"
LATER = 32
"""The step at which something changes."""
FOLLOWED = {
    "chosen": {"lists": [[["onebit"]]], "paces": {"plain": 0.1, "onebit": 0.05}, "steps": 45},
    "two": {
        "lists": [[["onebit"], [TOPK, "ring"]]],
        "paces": {"plain": 0.1, "onebit": 0.08, TOPK: 0.07},
        "steps": 45,
    },
    "slower": {"lists": [[["onebit"]]], "paces": {"plain": 0.1, "onebit": 0.12}, "steps": 30},
    "nothing": {"lists": [[]], "paces": {"plain": 0.1}, "steps": 14},
    "fails": {"lists": ["fails"], "paces": {"plain": 0.1}, "steps": 14},
    "turns slow": {
        "lists": [[["onebit"]], []],
        "paces": {"plain": 0.1, "onebit": 0.05},
        "changes": [LATER, {"plain": 0.1, "onebit": 0.3}],
        "steps": 72,
    },
    "overtaken": {
        "lists": [[["onebit"]]],
        "paces": {"plain": 0.1, "onebit": 0.05},
        "changes": [LATER, {"plain": 0.04, "onebit": 0.05}],
        "steps": 80,
    },
    "slow link": {
        "lists": [[], [["onebit"], [TOPK, "ring", 0.06]]],
        "paces": {"plain": 0.05},
        "changes": [LATER, {"plain": 0.5, "onebit": 0.06, TOPK: 0.2}],
        "steps": 72,
    },
    "another plan": {
        "lists": [[["onebit"]], [[TOPK, "ring"]]],
        "paces": {"plain": 0.1, "onebit": 0.05},
        "changes": [LATER, {"plain": 0.1, "onebit": 0.09, TOPK: 0.02}],
        "steps": 72,
    },
    "micro": {
        "lists": [[["onebit"]]],
        "paces": {"plain": 0.1, "onebit": 0.05},
        "steps": 30,
        "micro": 2,
    },
    "exempt": {
        "lists": [[["onebit"]]],
        "paces": {"plain": 0.1, "onebit": 0.05},
        "steps": 30,
        "exclude": ["3"],
        "min_size": 8000,
    },
    "warm": {
        "lists": [[["onebit"]]],
        "paces": {"plain": 0.1, "onebit": 0.05},
        "steps": 30,
        "warmup_steps": 12,
    },
}
ALONE = {"lists": [[]], "paces": {}, "steps": 3}
SAVED_AT = [2, 7, 12, 40]


@pytest.fixture(scope="module")
def told():
    stages = [
        [
            {"id": "followed", "do": "follow", "ranks": 2,
             "cases": {name: case for name, case in FOLLOWED.items() if name != "two"}},
            {"id": "two", "do": "follow", "ranks": 3, "cases": {"two": FOLLOWED["two"]}},
            {"id": "alone", "do": "follow", "ranks": 1, "cases": {"alone": ALONE}},
        ],
        [
            *({"id": name, "do": name, "ranks": 2}
              for name in ("unused", "amp", "taken_over", "detached", "refused", "clocks",
                           "mixed", "bounded")),
            {"id": "saved", "do": "saved", "ranks": 3, "at": SAVED_AT},
        ],
        [{"id": "pair", "do": "pair", "ranks": 2}],  # its clocks are real: nothing beside it
        [
            {"id": f"dies in {where}", "do": "dies", "ranks": 3, "where": where,
             "env": {"HIPRESS_TIMEOUT": str(TIMEOUT_S)}} for where in ("plain", "measure", "trial")
        ] + [
            {"id": "breaks", "do": "breaks", "ranks": 3, "env": {"HIPRESS_TIMEOUT": "30"}},
        ],
    ]  # fmt: skip
    return scenarios.play(SCRIPT, *stages)


def one(values):
    """What all ranks have told alike."""
    assert all(value == values[0] for value in values), values
    return values[0]


def run(told, id):
    """What rank 0 has told of a run, all others the same but for lines and sizes."""
    num_ranks = {"two": 3, "alone": 1}.get(id, 2)
    told_by = id if num_ranks != 2 else "followed"
    results = [result[id] for result in told.results(told_by, range(num_ranks))]
    for key in ("seen", "modes", "bits", "gaps", "skipped", "auto"):
        one([result[key] for result in results])
    assert all(result["lines"] == [] for result in results[1:])
    return results[0]


def codecs(found):
    return [codec for _, codec, _ in found["seen"]]


def in_use(found):
    """The codec of each step, where controls of a plan count as the plan."""
    used = []
    for (_, codec, _), mode in zip(found["seen"], found["modes"], strict=True):
        used.append(used[-1] if mode == "compressed" and codec is None else codec)
    return used


# --- one plan, at the same step, on all ranks -----------------------------------------------------


@pytest.mark.parametrize("id", FOLLOWED)
def test_ranks_are_on_one_plan_and_hold_the_same_bits(told, id):
    """Catches: a rank that switches a step before another, or to something else."""
    found = run(told, id)
    assert len(found["bits"]) == len(set(found["bits"])) == FOLLOWED[id]["steps"]


@pytest.mark.parametrize("id", FOLLOWED)
def test_nothing_is_lost_on_the_way(told, id):
    """Catches: a residual that a switch forgets, sends twice, or leaves behind."""
    assert max(run(told, id)["gaps"].values()) < ROUNDING


def test_plain_then_a_trial_then_the_plan(told):
    """Catches: compression before anything was measured, a trial without plain control."""
    found = run(told, "chosen")
    modes = list(dict.fromkeys(found["modes"]))
    assert modes == ["measure", "trial", "compressed"]
    assert codecs(found)[:5] == [None] * 5 and codecs(found)[5] == "onebit"
    assert found["modes"].index("compressed") < 25
    trial = [c for c, mode in zip(codecs(found), found["modes"], strict=True) if mode == "trial"]
    assert set(trial) == {None, "onebit"}
    assert codecs(found).count("onebit") > 30
    assert found["state_bytes"] > 0 and found["ratio"] > 2


def test_plain_steps_of_a_plan_keep_its_residuals(told):
    """Catches: controls that send residuals, or that never come."""
    found = run(told, "chosen")
    late = found["seen"][found["modes"].index("compressed") :]
    assert [None, None, False] in late
    assert not any(flushed for _, _, flushed in found["seen"])


def test_the_faster_of_two_plans(told):
    """Catches: residuals of the first that are not sent before the second begins."""
    found = run(told, "two")
    assert set(in_use(found)[-5:]) == {TOPK}
    assert max(epoch or 0 for epoch, _, _ in found["seen"]) == 2
    tried = list(dict.fromkeys(codecs(found)))
    assert tried == [None, "onebit", TOPK]
    flushes = [k for k, (_, _, flushed) in enumerate(found["seen"]) if flushed]
    assert flushes and all(found["seen"][k][:2] == [None, None] for k in flushes)


@pytest.mark.parametrize("id", ["slower", "nothing", "fails"])
def test_plain_stays_where_nothing_is_faster(told, id):
    """Catches: a plan that is kept though it is slower, and memory that stays with plain."""
    found = run(told, id)
    assert set(codecs(found)[-5:]) == {None}
    assert found["modes"][-1] == "plain"
    assert found["state_bytes"] == 0
    assert found["skipped"]["3.weight"] == f"auto: {found['auto'][0]}"
    assert found["skipped"]["3.bias"] == "one dimension (norm or bias)"


def test_a_plan_that_becomes_slow_is_dropped(told):
    """Catches: trust in what once was fast."""
    found = run(told, "turns slow")
    assert codecs(found)[LATER - 1] == "onebit"
    assert set(codecs(found)[LATER + 30 :]) == {None}
    assert sum(flushed for _, _, flushed in found["seen"]) == 1


def test_a_plan_that_plain_overtakes_is_dropped(told):
    """Catches: a control whose result changes nothing."""
    found = run(told, "overtaken")
    assert codecs(found)[LATER - 1] == "onebit"
    assert codecs(found)[-1] is None and found["modes"][-1] == "plain"
    assert any("has stopped paying" in line for line in found["lines"])


def test_a_slow_link_is_adapted_to_within_30_steps(told):
    """Catches: agreement that takes longer than the judge."""
    found = run(told, "slow link")
    assert set(codecs(found)[:LATER]) == {None}
    assert None not in in_use(found)[LATER + 30 :]


def test_one_plan_follows_another(told):
    """Catches: a new plan whose gradients are still cut for the old one."""
    found = run(told, "another plan")
    assert codecs(found)[LATER - 1] == "onebit"
    assert set(in_use(found)[-10:]) == {TOPK}


def test_what_a_user_exempts_stays_exempt(told):
    """Catches: a plan that compresses what was excluded, or is too small."""
    found = run(told, "exempt")
    assert set(in_use(found)[-5:]) == {"onebit"}
    assert found["skipped"]["3.weight"] == "excluded by '3'"
    assert found["skipped"]["5.weight"] == "6400 elements, fewer than min_size=8000"
    assert "0.weight" not in found["skipped"]


def test_warm_up_is_waited_for(told):
    """Catches: a trial in steps in which nothing shall be compressed."""
    found = run(told, "warm")
    assert codecs(found)[:12] == [None] * 12
    assert codecs(found)[12] == "onebit"


# --- what is said ---------------------------------------------------------------------------------


def test_every_change_is_a_line(told):
    """Catches: silence, or a line for every step."""
    lines = run(told, "chosen")["lines"]
    assert lines == [
        "auto, step 0: the first 5 steps run uncompressed so that they can be timed; then plans "
        "with bf16, int8 are tried; no optimizer was given to check.",
        lines[1],
        lines[2],
    ]
    assert lines[1].endswith(": onebit by ps: 50 ms a step against 100 ms plain.")
    assert "gradients (98.4 % of the elements) are compressed with onebit: " in lines[2]
    assert lines[2].endswith(" times fewer bytes than float32.")
    lines = run(told, "slow link")["lines"]
    assert "gradients (98.4 % of the elements) are compressed with onebit: " in lines.pop()
    assert [line.split(": ", 1)[1] for line in lines[1:]] == [
        "no plan is expected to be faster than plain all-reduce.",
        "a step takes 500 ms instead of 50 ms: it measures and plans again.",
        "a step takes 500 ms instead of 50 ms, and onebit by ps: 60 ms a step against 500 ms "
        "plain.",
    ]


def test_a_planner_that_fails_is_reported(told):
    """Catches: a job that ends, or hangs, since no plan could be made."""
    lines = run(told, "fails")["lines"]
    assert "auto: no plan could be made (ValueError: no idea)." in lines


def test_figures_tell_where_it_stands(told):
    """Catches: a reason of an earlier decision."""
    found = run(told, "chosen")
    assert found["auto"][0] == "onebit by ps: 50 ms a step against 100 ms plain"
    assert found["auto"][1] >= 3


def test_one_rank_is_plain_and_says_so(told):
    """Catches: measurements with nobody."""
    found = run(told, "alone")
    assert codecs(found) == [None] * 3
    assert found["lines"] == [
        "auto, step 0: one rank has no other rank to send to: nothing is compressed."
    ]
    assert max(found["gaps"].values()) == 0


def test_posts_are_heard_in_order_and_dropped_later(monkeypatch):
    """Catches: a store that grows with every directive, and a directive that is gone too soon."""
    store = torch.distributed.HashStore()
    first, other = (Agreement(store, rank, 2, timeout_s=0.2) for rank in (0, 1))
    last = KEPT_POSTS + 2
    for number in range(1, last + 1):
        first.post(number, f"directive {number}")
    for number in range(3, last + 1):
        assert other.read_post(number, "what is next") == f"directive {number}"
    assert not any(store.check([f"post/{number}"]) for number in (0, 1, 2))
    monkeypatch.setattr(agreement, "GRACE_S", 0.1)
    with pytest.raises(PeerError, match=r"rank 0 did not say what is next within 0\.2 s") as caught:
        other.read_post(last + 1, "what is next")
    assert caught.value.ranks == (0,)


def test_who_waits_hears_of_a_rank_that_has_failed(monkeypatch):
    """Catches: a minute in the store for a rank that has said it cannot go on."""
    monkeypatch.setattr(agreement, "LOOK_S", 0.05)

    def check():
        raise PeerError("rank 1 failed", ranks=(1,))

    began = time.monotonic()
    with pytest.raises(PeerError, match="rank 1 failed"):
        Agreement(torch.distributed.HashStore(), 0, 2, 20.0, check).agree("tea", {})
    assert time.monotonic() - began < 15


# --- plans that come and go -----------------------------------------------------------------------


def auto_of(offered=(), **engine):
    """Rank 0's, without an exchange; what it posts."""
    posted = []
    engine = SimpleNamespace(post=lambda n, text: posted.append((n, json.loads(text))), **engine)
    advice = SimpleNamespace(
        shortlist=lambda profile: [
            SimpleNamespace(
                plan=Plan(gradients={"w": Decision(codec="onebit", partitions=k)}),
                label=f"{k}",
                step_s=0.1,
            )
            for k in offered
        ]
    )
    made = Auto(advice)
    made._directive, made._policy = first_directive(5), SimpleNamespace()
    return made, posted, SimpleNamespace(engine=engine, step=0, monitor=Monitor())


def test_a_plan_that_is_a_candidate_again_outlives_those_since():
    """Catches: a candidate that is dropped before it is tried, and a rank that lacks its plan."""
    offered = []
    made, posted, session = auto_of(offered)
    for k in range(1, KEPT_PLANS + 1):
        offered[:] = [k]
        made._candidates(None)
    offered[:] = [1, 101, 102]
    epochs = [candidate.epoch for candidate in made._candidates(None)]
    assert epochs == [1, KEPT_PLANS + 1, KEPT_PLANS + 2]
    for epoch in (*epochs, 1):
        made._post(session.engine, Directive(number=1, steps=3, epoch=epoch))
        assert Plan.model_validate(posted[-1][1]["plan"]) == made._plans[epoch]
    assert len(made._plans) == KEPT_PLANS
    made._post(session.engine, Directive(number=1, steps=3, epoch=1))
    assert "plan" not in posted[-1][1]


def test_a_directive_is_taken_once_and_an_unfinished_one_is_given_again():
    """Catches: rank 0 alone on an old directive after a backward that failed."""
    made, posted, session = auto_of()
    made._post(session.engine, Directive(number=1, steps=3, epoch=None))
    made._take(made._receive(session))
    assert (made._directive.number, made._upcoming) == (1, None)
    made._take(made._receive(session))
    assert [number for number, _ in posted] == [1, 2]
    assert (made._directive.number, made._left) == (2, 3)


def test_another_plan_is_used_after_the_state_of_the_last_was_sent():
    """Catches: codecs of one plan that work on the residuals of another, or drop them."""
    made, _, session = auto_of()
    made._plans = {epoch: Plan(epoch=epoch) for epoch in (1, 2)}
    made.phase = "compressed"
    used = []
    for epoch, keeps_state in ((1, False), (2, False), (2, False), (None, True), (2, False),
                               (None, False), (None, False), (1, False)):  # fmt: skip
        made._directive = Directive(number=1, steps=1, epoch=epoch, keeps_state=keeps_state)
        made._left = 1
        mode, plan = made.begin(session)
        used.append((mode.value, plan and plan.epoch, made.holds_state))
    assert used == [
        ("compressed", 1, True), ("flushing", None, False), ("compressed", 2, True),
        ("plain", None, True), ("compressed", 2, True), ("flushing", None, False),
        ("plain", None, False), ("compressed", 1, True),
    ]  # fmt: skip
    assert made.num_switches == 7


def test_a_link_that_fails_while_all_measure_is_explained():
    """Catches: an error of the transport's, which names an address."""
    made, _, session = auto_of(explain=lambda error: PeerError("rank 1 is gone", ranks=(1,)))

    def measure(sync):
        raise LinkError("connection reset")

    made._planner.measure = measure
    with pytest.raises(PeerError, match="rank 1 is gone"):
        planner.together(session.engine, lambda: made._planner.measure(session))


def test_a_bound_is_on_errors_of_the_gradients_of_the_job(told):
    """Catches: errors on noise, 0.6 and more here, that stand for those of the gradients."""
    ranks = told.results("bounded", range(2))
    for kind in ("sgd", "adamw"):
        errors = one([result[kind]["errors"] for result in ranks])
        assert [result[kind]["kept"] for result in ranks] == [0, 0]
        # A rank measures some of them; of a gradient of zeros no error can be told.
        assert set(errors) == {"signs", "few", "normal"}
        assert errors["few"][TOPK] < 0.3 and errors["few"]["onebit"] > 0.8
        assert errors["normal"]["onebit"] > 0.5 and errors["normal"][TOPK] > 0.5
        plan = ranks[0][kind]["plan"]
        assert plan["few"][0] == TOPK
        assert plan["normal"][0] == "none" and "off, more than 0.3" in plan["normal"][1]
        assert plan["unused"] == [
            "none", f"the error of onebit was not measured; the error of {TOPK} was not measured"
        ]  # fmt: skip
        # Signs are all that the gradient has. The momentum of AdamW, which is sent in its place,
        # is a sum over several steps.
        if kind == "sgd":
            assert errors["signs"]["onebit"] < 1e-3 and plan["signs"][0] == "onebit"
        else:
            assert errors["signs"]["onebit"] > 0.3 and plan["signs"][0] == "none"


def test_what_makes_no_sense_costs_advice_and_not_the_job(monkeypatch):
    """Catches: one rank that ends after all have measured."""
    machine = Machine(cores=2, num_ranks=2)
    monkeypatch.setattr(planner.links, "machine", lambda engine: machine)
    monkeypatch.setattr(planner.links, "measure", lambda engine, budget_s: None)
    monkeypatch.setattr(planner.links, "barrier", lambda engine: None)
    monkeypatch.setattr(planner.codec_costs, "points", lambda *_, **__: [{}])
    engine = SimpleNamespace(
        timeout_s=4.0,
        transport=SimpleNamespace(rank=0, num_ranks=2),
        options=SimpleNamespace(compress_on_cpu=True),
        gather=lambda payload: [payload],
    )
    small = SimpleNamespace(reason="too small")
    spec = GradientSpec(name="w", numel=3, dims=1)
    gradient = SimpleNamespace(numel=3, spec=spec, choice=small)
    exchange = SimpleNamespace(
        engine=engine,
        gradients={"w": gradient},
        rules=SimpleNamespace(choice=lambda spec: small),
        adapter=SimpleNamespace(),
    )
    made = planner.Planner(("int8",))
    assert made.measure(exchange) is None
    assert made._search_s == 1.0
    with pytest.raises(UsageError, match="the measurements make no profile: KeyError: 'none'"):
        made.shortlist(None)


def model(ready, work=1.0):
    gradients = tuple(
        GradientProfile(name=name, numel=10, ready_s=seconds) for name, seconds in ready.items()
    )
    return ModelProfile(forward_s=work, backward_s=2 * work, gradients=gradients)


def test_what_ranks_tell_of_a_model_is_small():
    """Catches: a store that refuses what a thousand ranks tell: it takes 8 MiB."""
    names = [f"layers.{k}.attention.weight" for k in range(400)]
    own = model({name: 0.0123456789 / (k + 1) for k, name in enumerate(names)}, work=1 / 3)
    assert 1024 * len(planner.encode_times(own, names)) < 8 * 2**20
    assert planner.encode_times(None, names) == b"null"


def test_a_model_is_the_median_of_what_ranks_tell():
    """Catches: times of the wrong gradient, and one that some rank did not have."""
    ranks = [model({"b": 1, "a": 2}, 1), model({"a": 5, "b": 3}, 3), model({"a": 4}, 2)]
    told = [json.loads(planner.encode_times(one, ["a", "b"])) for one in ranks]
    found = planner.combined(ranks[0], ["a", "b"], told)
    assert (found.forward_s, found.backward_s) == (2, 4)
    assert [(g.name, g.ready_s) for g in found.gradients] == [("b", 2), ("a", 4)]


def test_the_size_of_buckets_is_told_unless_it_is_the_default():
    """Catches: a step that is simulated with other buckets than it has."""
    for cap_bytes, is_default, told in ((25 * 2**20, True, None), (2**21, False, 2.0)):
        model = DistributedDataParallel.__new__(DistributedDataParallel)
        torch.nn.Module.__init__(model)
        model.module = torch.nn.Linear(1, 1)
        model.find_unused_parameters = model.static_graph = False
        model.bucket_bytes_cap, model.bucket_bytes_cap_default = cap_bytes, is_default
        adapter = ddp.DDPAdapter()
        adapter.use_model(model)
        assert adapter.bucket_mb == told


def test_parameters_on_several_devices_are_not_planned_for():
    """Catches: events of one GPU against those of another."""
    gradients = {
        device: SimpleNamespace(
            spec=GradientSpec(name=device, numel=2, dims=1, device=torch.device(device))
        )
        for device in ("cpu", "meta")
    }
    made = planner.Planner(("int8",))
    adapter = SimpleNamespace(can_observe=True)
    rules = SimpleNamespace(choice=lambda spec: SimpleNamespace(reason=""))
    problem = made.begin(SimpleNamespace(adapter=adapter, gradients=gradients, rules=rules))
    assert made._timer is None
    assert problem.startswith("parameters are on cpu and meta")


def test_on_a_gpu_no_more_is_measured_than_a_model_needs_and_memory_has():
    """Catches: a gigabyte in the middle of backward."""
    assert Extent.of(GPU_SIZES).sizes == GPU_SIZES
    assert Extent.of(GPU_SIZES, 2**21).sizes == GPU_SIZES[:3]
    for room in (2**30, 2**24, 2**20):
        extent = Extent.of(GPU_SIZES, 2**26, room)
        assert max(extent.num_slots(size) * size for size in extent.sizes) <= room
    least = Extent.of(GPU_SIZES, 10, 10)
    assert least.sizes == GPU_SIZES[:2]
    assert max(least.num_slots(n) * n for n in least.sizes) * SLOT_BYTES < 2**25
    points = {"encode": [(size, 1.0) for size in GPU_SIZES[:2]]}
    assert least.is_within(points) and not Extent.of(GPU_SIZES, 2**21).is_within(points)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_bucket_without_codec_is_left_to_torch_where_order_does_not_matter(ordered):
    """Catches: two NCCL communicators whose calls ranks make in different orders."""
    made = Session(None, Settings())
    made.auto = SimpleNamespace()
    made.mode = StepMode(Mode.COMPRESSED)
    made._engine = SimpleNamespace(transport=SimpleNamespace(ordered=ordered))
    choice = Choice(codec=NONE, strategy="allreduce")
    spec = GradientSpec(name="w", numel=4, dims=1)
    gradient = Gradient(spec=spec, choice=choice, placements=())
    bucket = Bucket(names=("w",), groups=grouped([gradient]))
    assert made._uses_engine(bucket) == ordered
    made.auto = None  # what a user asks for goes the way it was asked to
    assert made._uses_engine(bucket)


class Event:
    """Of a GPU that has come as far as `done`."""

    now = done = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        Event.now += 1
        self.at = Event.now

    def query(self):
        return self.at <= Event.done

    def synchronize(self):
        Event.done = max(Event.done, self.at)

    def elapsed_time(self, other):
        assert self.query() and other.query()
        return 1e3 * (other.at - self.at)


def test_on_a_gpu_nobody_waits_for_times_unless_asked(monkeypatch):
    """Catches: a host that waits for the GPU in every step, or reads times that are not there."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = StepClock(torch.device("cuda"))
    for _ in range(3):
        clock.forward_begin()
        clock.end()
    assert clock.read(wait=False) == []
    Event.done = 2
    assert clock.read(wait=False) == [1.0]
    assert clock.read(wait=True) == [1.0, 1.0]
    clock.forward_begin()
    clock.end()
    clock.restart()
    assert clock.read(wait=True) == []


def test_what_a_program_does_between_steps_is_no_part_of_them(monkeypatch):
    """Catches: an evaluation or a checkpoint that looks like a slow network."""
    now = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    model = torch.nn.Linear(2, 2)
    clock = StepClock(torch.device("cpu"))
    ddp.observe(model, clock, {})
    model(torch.ones(1, 2))  # at 0
    clock.end()  # at 1
    for _ in range(5):
        next(now)
    with torch.no_grad():
        model(torch.ones(1, 2))
    model(torch.ones(1, 2))
    model(torch.ones(1, 2))  # accumulated: the first counts
    clock.end()
    assert clock.read(wait=False) == [1.0, 1.0]


# --- models, scales, checkpoints ------------------------------------------------------------------


def test_unused_parameters_lose_nothing(told):
    """Catches: what was sent of a parameter in a plain step in which nobody used it."""
    found = one([{**r, "lines": [], "ratio": 0, "state_bytes": 0}
                 for r in told.results("unused", range(2))])  # fmt: skip
    assert max(found["gaps"].values()) < ROUNDING
    assert "onebit" in codecs(found) and codecs(found)[-1] is None


def test_a_loss_scale_loses_nothing(told):
    """Catches: residuals in the unit of a scale that a plain step has not followed."""
    found = one(told.results("amp", range(2)))
    assert found["scale"] > 1e4
    assert max(found["gaps"].values()) < ROUNDING
    assert "onebit" in codecs(found) and codecs(found)[-1] is None


@pytest.mark.parametrize("at", SAVED_AT)
def test_a_checkpoint_of_any_phase_loses_nothing(told, at):
    """Catches: residuals that are saved for a plan which the next run does not begin with, or that
    it never sends."""
    found = one([result[str(at)] for result in told.results("saved", range(3))])
    modes = {2: "measure", 7: "trial", 12: "trial", 40: "compressed"}
    assert found["mode"] == modes[at]
    assert (found["held"] > 1e-6) == (at > 4)
    assert max(found["whole"].values()) < ROUNDING
    assert max(found["gaps"].values()) < ROUNDING
    assert found["step"] == at + 1
    assert found["unpaid"] == []


def test_checkpoints_of_all_phases_hold_the_same_names(told):
    """Catches: a fresh run whose checkpoint has no place for what DCP is to load."""
    found = told.results("saved", range(1))[0]
    for at in SAVED_AT:
        assert found[str(at)]["names"] == ["0.weight", "3.weight", "5.weight"]
        assert found[str(at)]["keys"] == [[], [], []]


def test_residuals_of_a_codec_are_taken_over(told):
    """Catches: a checkpoint of `attach(model, codec=...)` whose residuals auto drops."""
    found = one(told.results("taken_over", range(2)))
    assert found["held"] > 1e-6
    for gaps, codec in found["found"]:
        assert codec == "onebit"
        assert max(gaps.values()) < ROUNDING


def test_what_is_owed_must_fit_the_model(caplog):
    """Catches: a checkpoint of another model that is found out in the middle of a step, or never;
    what is owed to a frozen parameter, which nobody ever pays."""
    gradients = {"w": SimpleNamespace(numel=4)}
    exchange = SimpleNamespace(
        gradients=gradients, numels={"w": 4}, untrained=frozenset({"frozen"})
    )

    def owed(**values):
        return checkpoint._owed(exchange, {"gradients": {}, "owed": values}, "owed")

    assert list(owed(w=torch.ones(4), frozen=torch.ones(9))) == ["w"]
    assert "the unsent state of 'frozen' is ignored" in caplog.text
    assert owed(w=torch.zeros(4)) == {}
    with pytest.raises(UsageError, match="'w' has 5 elements and this model's has 4"):
        owed(w=torch.ones(5))
    with pytest.raises(UsageError, match="'v', which this model does not have"):
        owed(v=torch.ones(4))


def test_ranks_that_read_no_clock_keep_no_times(told):
    """Catches: memory that grows with every step on all ranks but rank 0."""
    found = told.results("clocks", range(2))
    assert [result["kept"] for result in found] == [found[0]["kept"], 0]
    assert found[0]["kept"] < 20
    one([result["bits"] for result in found])


def test_two_models_decide_for_themselves(told):
    """Catches: a plan that is refused for what the trial of another model costs."""
    found = one(told.results("pair", range(2)))
    # The second may be at another trial by then: on a busy machine steps change their pace.
    assert found["modes"][0] == "compressed" != found["modes"][1], found["reasons"]


def test_a_model_with_gradients_that_no_codec_takes_is_planned_for(told):
    """Catches: a search that fails for the whole model, and a reason that is not true."""
    results = told.results("mixed", range(2))
    one([result["bits"] for result in results])
    for found in results:
        assert not any("no plan could be made" in line for line in found["lines"])
        assert "sparse" in found["skipped"]["table.weight"]
        assert found["skipped"]["last.weight"] == "codecs do not take float64"
        assert set(found["compressed"]) <= {"rest.0.weight", "rest.3.weight", "rest.5.weight"}


def test_detach_takes_all_hooks_off(told):
    """Catches: clocks that go on in a run that is detached before anything was measured."""
    assert [result["hooks"] for result in told.results("clocks", range(2))] == [0, 0]


def test_detach_ends_it(told):
    """Catches: residuals that detach leaves behind, and orders that come after it."""
    found = one(told.results("detached", range(2)))
    assert found["codec"] == "onebit"
    assert max(found["gaps"].values()) < ROUNDING


# --- errors ---------------------------------------------------------------------------------------

REFUSED = {
    "codecs": "codecs is 'int8'; give a list of them, e.g. ['int8', 'onebit'].",
    "empty": "codecs is empty; name at least one",
    "unknown": "int9",
    "beside": "codecs is for auto, and a codec or plan was given; give one of them.",
    "budget": "budget is for auto, and a codec or plan was given; give one of them.",
    "strategy": "codec 'auto' makes plans itself, and a strategy was given; give one.",
    "plan": "codec 'auto' makes plans itself, and a plan was given; give one.",
    "hook": "a bare hook has no model to measure; use attach, or name a codec.",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_and_how(told, case):
    """Catches: an argument that does nothing, without a word."""
    kind, text, _ = one([result[case] for result in told.results("refused", range(2))])
    assert kind == "UsageError"
    assert REFUSED[case] in text and "\n" not in text


def test_ranks_that_may_use_different_codecs_are_told(told):
    """Catches: a rank whose user thinks that something else is used."""
    kind, text, ranks = one([result["differ"] for result in told.results("refused", range(2))])
    assert (kind, ranks) == ("AgreementError", [1])
    assert "ranks differ in codecs for auto, at place 0 ('bf16' on rank 0, 'int8' on" in text


@pytest.mark.parametrize("where", ["plain", "measure", "trial"])
def test_a_dead_rank_is_named(told, where):
    """Catches: a hang, or an error of torch's with an address, in any phase."""
    id = f"dies in {where}"
    (died,) = told.find("died", id=id)
    assert told.find("exit", id=id, rank=2) == [3]
    for rank in (0, 1):
        kind, text, ranks, at = told.error(id, rank)
        assert (kind, ranks) == ("PeerError", [2]), text
        assert "rank 2" in text
        assert at - died < 45


def test_a_rank_that_fails_while_it_measures_is_named_soon(told):
    """Catches: ranks that wait out their patience for one that has given up."""
    (failed,) = told.find("failed", id="breaks")
    assert told.error("breaks", 2)[0] == "ValueError"
    for rank in (0, 1):
        kind, text, ranks, at = told.error("breaks", rank)
        assert (kind, ranks) == ("PeerError", [2]), text
        assert "rank 2 failed: no such kernel" in text
        assert at - failed < 25


@pytest.mark.parametrize("given", ["strategy", "plan"])
def test_train_refuses_auto_beside_a_choice(given):
    """Catches: an option of `hipress train` that does nothing, without a word."""
    config = TrainConfig(
        codec="auto", **{given: {"strategy": "ring", "plan": Path("p.txt")}[given]}
    )
    with pytest.raises(UsageError, match=f"makes plans itself; leave --{given} out"):
        config.check()


# --- all of it, in the lab ------------------------------------------------------------------------


@pytest.mark.alone
@full
def test_a_link_that_becomes_slow_is_adapted_to_within_30_steps():
    """Catches: what made-up plans and times hide: probes that hang or take long, real noise."""
    if (why := scenarios.refusal()) is not None:
        pytest.skip(why)
    found = Told()
    with Lab(4) as lab:
        stage = [{"id": "adapts", "do": "adapts", "ranks": 4}]
        job = scenarios.start(lab, SCRIPT, found, stage)
        deadline = time.monotonic() + 60
        while found.find("mode", id="adapts", rank=0).count("plain") < 8:
            assert time.monotonic() < deadline, found.lines[-4:]
            time.sleep(0.01)
        for host in range(4):
            lab.set_rate(host, "100mbit")
        changed = len(found.find("mode", id="adapts", rank=0))
        finished = job.wait(60)
    results = found.results("adapts", range(4))
    epochs = one([result["epochs"] for result in results])
    one([result["bits"] for result in results])
    assert set(epochs[changed - 2 : changed]) == {None}
    assert None not in epochs[changed + 30 :] and len(epochs) > changed + 30
    assert "measures and plans again" in finished.stderr[0]
