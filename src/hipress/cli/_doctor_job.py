"""`hipress doctor --model`: what compression would give a job, from this machine and a simulator.

The model's step and the codecs are measured here, briefly; the network is made up from what the
user says of it. Every host is a machine like this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hipress.casync.graphs.strategies import candidates
from hipress.cli._sweep import PLAN, Setting
from hipress.errors import UsageError
from hipress.profile import CodecCosts, Curve, Machine, ModelProfile, Network, Profile
from hipress.secopa.simulate import FREE, Simulator
from hipress.secopa.what_if import EFFICIENCY, parse_rate, rate_text, uniform, with_rate

PREDICTION_ERROR = 0.20
"""How far a simulated step may lie from the measured one: of 84 settings of `hipress bench
prediction`, on 2 and 4 emulated hosts, nine of ten were within it (median 9.2 %, worst 27.4 %)."""
CODECS = "int8,onebit"
STRATEGIES = candidates()
HOSTS, RATE = 4, "1gbit"

LATENCY_S = 1e-4
MESSAGE_WORK_S, BYTE_WORK_S = 2e-4, 5e-10
"""Of a made-up network: TCP between two hosts of a rack. A lab's hosts had 360 us for a message and
0.54 ns for a byte, on two cores that they shared."""

WORTH = 0.03
"""The share of a step that compression must save to be said to pay."""
LEAST_RATE, MOST_RATE = 10**6, 10**12
"""Between which the rate is looked for at which compression breaks even."""
RATE_STEPS = 7
"""Halvings: the rate is found to 6 %, better than what it is made from."""
MESSAGES = "latency and messages"
"""What limits a step that neither a faster wire nor a faster codec would shorten."""
MOST_CHOICES = 2
"""With which it is looked for: the fastest at the rate of the job."""
PATIENCE_S = 1.0
"""To look for a plan."""

OnPart = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the user asks about."""

    model: str
    hosts: int
    rate: str
    codecs: tuple[str, ...]
    batch: int | None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found out."""

    job: Job
    profile: Profile
    rows: list[dict[str, Any]]
    """Plain all-reduce, each codec and strategy, and the planner's choice."""
    break_even_bits: float | None
    """The rate below which compression pays; infinite where it always does, None where never."""
    limit: str
    """What keeps the best choice from being faster."""
    timed_batch: int

    @property
    def best(self) -> dict[str, Any]:
        """The row that is fastest."""
        return min(self.rows, key=lambda row: float(row["step_s"]))

    @property
    def error(self) -> float:
        """How far a speed-up may be off, as a share: the simulator's error, and those of what it
        was given, as if they had nothing to do with each other."""
        model = self.profile.model
        assert model is not None
        used = [c for c in self.profile.codecs if c.codec == self.best["codec"]]
        used = used or [c for c in self.profile.codecs if c.codec != "none"]
        fits = [curve.error for c in used for curve in (c.encode, c.decode, c.add, c.back)]
        return math.hypot(PREDICTION_ERROR, model.error, max(fits, default=0.0))

    @property
    def pays(self) -> str:
        """yes, maybe or no."""
        speedup = float(self.best["speedup"])
        if speedup > 1 + self.error:
            return "yes"
        return "maybe" if speedup > 1 / (1 - WORTH) else "no"


def read_job(
    model: str | None, hosts: int | None, rate: str | None, codec: str | None, batch: int | None
) -> Job | None:
    """The job of the options; None where no model is named.

    Raises:
        UsageError: An option is wrong, or acts on a model that is not named.
    """
    if model is None:
        given = {"--hosts": hosts, "--rate": rate, "--codec": codec, "--batch": batch}
        for name, value in given.items():
            if value is not None:
                raise UsageError(f"{name} is for a job; name its model too, e.g. --model resnet50.")
        return None
    from hipress.cli._expressions import split_expressions
    from hipress.codecs import table
    from hipress.train.models import model as line_of

    if line_of(model).draw is None:
        raise UsageError(f"--model {model!r} brings no data to time it with; name a built-in one.")
    codecs = [name for name in split_expressions(codec or CODECS) if name != "none"]
    for name in codecs:
        table.codec(name)
    if not codecs:
        raise UsageError("--codec names nothing but none, which is always there; name a codec.")
    parse_rate(rate or RATE)
    return Job(
        model=model,
        hosts=hosts or HOSTS,
        rate=rate or RATE,
        codecs=tuple(dict.fromkeys(codecs)),
        batch=batch,
    )


def examine_job(job: Job, on_part: OnPart = lambda fraction: None) -> Finding:
    """Measures what can be measured here, and simulates the rest."""
    import torch

    from hipress.cli._doctor_timing import time_model
    from hipress.probe import codec_costs
    from hipress.probe.cache import processor
    from hipress.probe.links import cores

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, timed_batch = time_model(job.model, job.batch, device)
    on_part(0.3)
    costs = codec_costs.measure(
        ["none", *job.codecs],
        device,
        job.hosts,
        on_part=lambda fraction, label: on_part(0.3 + 0.4 * fraction),
    )
    machine = Machine(
        name=processor(device), device=device.type, cores=cores(), num_ranks=1, exchange_threads=1
    )
    bits = parse_rate(job.rate)
    profile = made_up(job.hosts, bits, machine, costs, model)
    on_part(0.7)
    setting = Setting(
        profile=profile,
        num_ranks=job.hosts,
        codecs=job.codecs,
        strategies=STRATEGIES,
        rate=job.rate,
        auto=True,
        auto_codecs=job.codecs,
        patience_s=PATIENCE_S,
    )
    rows = setting.rows(lambda fraction: on_part(0.7 + 0.15 * fraction))
    choices = fixed_choices(rows)
    on_part(0.9)
    return Finding(
        job=job,
        profile=profile,
        rows=rows,
        break_even_bits=break_even(profile, job.hosts, choices[:MOST_CHOICES]),
        limit=limit(profile, job.hosts, *choices[0]) if choices else "compute",
        timed_batch=timed_batch,
    )


def fixed_choices(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Codecs with their strategies, the fastest first."""
    found = [row for row in rows if row["codec"] not in ("none", PLAN)]
    found.sort(key=lambda row: float(row["step_s"]))
    return [(row["codec"], row["strategy"]) for row in found]


def made_up(
    num_hosts: int,
    rate_bits: int,
    machine: Machine,
    costs: Sequence[CodecCosts],
    model: ModelProfile,
) -> Profile:
    """A profile of hosts like this one, on a network of which only the rate is known."""
    bytes_per_s = EFFICIENCY * rate_bits / 8
    plain = next((one for one in costs if one.codec == "none"), FREE)
    on_host = machine.device == "cpu"
    # While it passes on bytes, a host adds up what came in.
    add_s = (num_hosts - 1) / num_hosts * plain.add.slope / model.element_bytes if on_host else 0.0
    return Profile(
        made=f"{num_hosts} hosts like this one at {rate_text(rate_bits)}",
        machine=machine,
        network=Network(
            hosts=tuple(range(num_hosts)),
            latency_s=LATENCY_S,
            bytes_per_s=bytes_per_s,
            rate_bits=rate_bits,
            message_work_s=MESSAGE_WORK_S,
            byte_work_s=BYTE_WORK_S,
            all_reduce=Curve(
                fixed=2 * (num_hosts - 1) * LATENCY_S,
                slope=2 * (num_hosts - 1) / num_hosts / bytes_per_s + add_s,
            ),
        ),
        codecs=tuple(costs),
        model=model,
    )


def break_even(
    profile: Profile, num_ranks: int, choices: Sequence[tuple[str, str]]
) -> float | None:
    """Bits per second below which the best of some codecs and strategies saves a worthy share of
    the plain step; infinite where it always does, None where it never does."""

    def pays(bits: float) -> bool:
        at_rate = with_rate(profile, round(bits))
        simulator = Simulator(at_rate, num_ranks)
        enough_s = simulator.step_s(None) * (1 - WORTH)
        return any(
            simulator.step_s(uniform(at_rate, codec, strategy)) < enough_s
            for codec, strategy in choices
        )

    low, high = math.log(LEAST_RATE), math.log(MOST_RATE)
    if not pays(math.exp(low)):
        return None
    if pays(math.exp(high)):
        return math.inf
    for _ in range(RATE_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if pays(math.exp(middle)) else (low, middle)
    return math.exp((low + high) / 2)


def limit(profile: Profile, num_ranks: int, codec: str, strategy: str) -> str:
    """What keeps a step with this codec from being faster: what it takes without the wire's part,
    and without the codec's, says which counts more; where neither does, messages are left."""
    decisions = uniform(profile, codec, strategy)
    step_s = Simulator(profile, num_ranks).step_s(decisions)
    alone_s = Simulator(profile, 1).step_s(None)
    if alone_s > 0.9 * step_s:
        return "compute"
    fast = with_rate(profile, 1000 * (profile.network.rate_bits or MOST_RATE))
    nothing = Curve(fixed=0.0, slope=0.0)
    free = {verb: nothing for verb in ("encode", "decode", "add", "back")}
    cheap = profile.model_copy(
        update={"codecs": tuple(one.model_copy(update=free) for one in profile.codecs)}
    )
    saved = {
        "the wire": step_s - Simulator(fast, num_ranks).step_s(decisions),
        "codec work": step_s - Simulator(cheap, num_ranks).step_s(decisions),
    }
    most = max(saved, key=lambda what: saved[what])
    return most if saved[most] > WORTH * step_s else MESSAGES
