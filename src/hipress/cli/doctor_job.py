"""`hipress doctor --model`: what compression would give a job, from this machine and a simulator.

The model's step and the codecs are measured here, briefly; the network is made up from what the
user says of it. Every host is a machine like this one.
"""

from __future__ import annotations

import contextlib
import math
import re
import shlex
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hipress import recommendations
from hipress.cli.options import MOST_HOSTS, check_memory, expressions, refuse, timed_model
from hipress.cli.sweep import PLAN, STEP_COLUMNS, Sweep
from hipress.cli.ui import print_table
from hipress.errors import UsageError
from hipress.profile import CodecCosts, Curve, Machine, ModelProfile, Network, Profile
from hipress.recommendations import ADAM, SAFE, SGD, SGD_MOMENTUM, UNKNOWN, recommended
from hipress.secopa.simulate import FREE, Simulator
from hipress.secopa.what_if import EFFICIENCY, uniform, with_rate
from hipress.units import parse_rate, rate_text

PREDICTION_ERROR = 0.20
"""How far a simulated step may lie from the measured one: of 84 settings of `hipress bench
prediction`, on 2 and 4 emulated hosts, nine of ten were within it (median 9.2 %, worst 27.4 %)."""
STRATEGIES = ("ps", "ring")
OPTIMIZERS = {"sgd": SGD, "sgd-momentum": SGD_MOMENTUM, "adam": ADAM, "adamw": ADAM}
"""The kind in `hipress.recommendations` of each optimizer of `--optimizer`."""
HOSTS, RATE = 4, "1gbit"

LATENCY_S = 1e-4
MESSAGE_WORK_S, BYTE_WORK_S = 2e-4, 5e-10
"""Costs of a made-up network: TCP between two hosts of a rack. A lab's hosts took 360 us for a
message and 0.54 ns for a byte, on two cores that they shared."""

WORTH = 0.03
"""The share of a step that compression must save to count as worth it."""
LEAST_RATE, MOST_RATE = 10**6, 10**12
"""The limits of the search for the rate at which compression breaks even."""
RATE_STEPS = 7
"""Halvings: the rate is found to 6 %, better than what it is made from."""
MESSAGES = "latency and messages"
"""What limits a step that neither a faster wire nor a faster codec would shorten."""
MOST_CHOICES = 2
"""Choices that the search tries: the fastest at the rate of the job."""
PATIENCE_S = 1.0


OnPart = Callable[[float], None]


@dataclass(frozen=True, kw_only=True)
class PlannedJob:
    """The job that the user asks about."""

    model: str
    data: str | None = None
    hosts: int
    rate: str
    codecs: tuple[str, ...]
    batch: int | None
    optimizer: str | None = None


@dataclass(frozen=True, kw_only=True)
class JobReport:
    """What was found out about a job."""

    job: PlannedJob
    profile: Profile
    rows: list[dict[str, Any]]
    """Plain all-reduce, each codec and strategy, and the planner's choice."""
    break_even_bits: float | None
    """The rate below which compression pays; infinite where it always does, None where never."""
    limit: str
    timed_batch: int

    @property
    def model(self) -> ModelProfile:
        assert self.profile.model is not None
        return self.profile.model

    @property
    def best(self) -> dict[str, Any]:
        return min(self.rows, key=lambda row: float(row["step_s"]))

    @property
    def error(self) -> float:
        """The relative error of a speed-up: the simulator's error and those of its input, taken as
        independent."""
        used = [c for c in self.profile.codecs if c.codec == self.best["codec"]]
        used = used or [c for c in self.profile.codecs if c.codec != "none"]
        fits = [curve.error for c in used for curve in (c.encode, c.decode, c.add, c.back)]
        return math.hypot(PREDICTION_ERROR, self.model.error, max(fits, default=0.0))

    @property
    def pays(self) -> str:
        """yes, maybe or no."""
        speedup = float(self.best["speedup"])
        if speedup > 1 + self.error:
            return "yes"
        return "maybe" if speedup > 1 / (1 - WORTH) else "no"


def read_job(
    model: str | None,
    data: str | None,
    hosts: int | None,
    rate: str | None,
    codec: str | None,
    batch: int | None,
    optimizer: str | None,
) -> PlannedJob | None:
    """Returns the job of the options; None where no model is named. Refuses wrong options."""
    if model is None:
        given: dict[str, Any] = {"--data": data, "--hosts": hosts, "--rate": rate}
        given |= {"--codec": codec, "--batch": batch}
        given |= {"--optimizer": optimizer}
        refuse(given, "is for a job; name its model too, e.g. --model resnet50.")
        return None
    from hipress.codecs import table
    from hipress.train.models import timed

    timed(model, data)
    if optimizer not in (None, *OPTIMIZERS):
        raise UsageError(
            f"--optimizer {optimizer!r} is none of {', '.join(OPTIMIZERS)}; choose one."
        )
    usual = (SAFE, recommended(OPTIMIZERS.get(optimizer or "", SGD)).codec)
    asked = usual if codec is None else expressions(codec)
    codecs = tuple(name for name in asked if name != "none")
    for name in codecs:
        table.codec(name)
    if not codecs:
        raise UsageError("--codec names nothing but none, which is always there; name a codec.")
    parse_rate(rate or RATE)
    return PlannedJob(
        model=model,
        data=data,
        hosts=hosts or HOSTS,
        rate=rate or RATE,
        codecs=codecs,
        batch=batch,
        optimizer=optimizer,
    )


def examine_job(job: PlannedJob, on_part: OnPart = lambda fraction: None) -> JobReport:
    """Measures what can be measured here, and simulates the rest."""
    import torch

    from hipress.bench.profile import time_model
    from hipress.probe import codec_costs
    from hipress.probe.cache import processor
    from hipress.probe.links import cores

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    line = timed_model(job.model, job.data, device.type)
    # Parameters, gradients and momentum, and what a step of few examples needs.
    needed_bytes = 4 * 4 * line.num_parameters
    check_memory(f"model {job.model!r}", needed_bytes, "name a smaller one", device.type)
    model, timed_batch = time_model(line, job.model, job.batch or line.batch, device)
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
    sweep = Sweep(
        profile=profile,
        num_ranks=job.hosts,
        codecs=job.codecs,
        strategies=STRATEGIES,
        rate=job.rate,
        auto=True,
        auto_codecs=job.codecs,
        patience_s=PATIENCE_S,
    )
    rows = sweep.rows(lambda fraction: on_part(0.7 + 0.15 * fraction))
    choices = fixed_choices(rows)
    on_part(0.9)
    return JobReport(
        job=job,
        profile=profile,
        rows=rows,
        break_even_bits=break_even(profile, job.hosts, choices[:MOST_CHOICES]),
        limit=limit(profile, job.hosts, *choices[0]) if choices else "compute",
        timed_batch=timed_batch,
    )


def fixed_choices(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """Returns codecs with their strategies, the fastest first."""
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
    """Returns a profile of hosts like this one, on a network of which only the rate is known."""
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
    """Returns the bits per second below which the best of some codecs and strategies saves the
    share `WORTH` of the plain step; infinite where it always does, None where it never does."""

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
    """Returns what keeps a step with this codec from being faster: the one of wire and codec
    without which the step would be shorter; where neither counts, messages are left."""
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


# --- the report -----------------------------------------------------------------------------------


def as_json(found: JobReport) -> dict[str, Any]:
    """Returns plain values for `--json`."""
    model, best = found.model, found.best
    rate = found.break_even_bits
    return {
        "command": "doctor",
        "model": found.job.model,
        "hosts": found.job.hosts,
        "rate": found.job.rate,
        "batch": model.batch,
        "timed_batch": found.timed_batch,
        "pays": found.pays,
        "speedup": best["speedup"],
        "error": found.error,
        "best": {key: best[key] for key in ("codec", "strategy", "step_s")},
        "limit": found.limit,
        "break_even_bits": None if rate is None or math.isinf(rate) else rate,
        "always_pays": rate is not None and math.isinf(rate),
        "advice": advice(found),
        "paragraph": paragraph(found),
        "rows": found.rows,
    }


def paragraph(found: JobReport) -> str:
    """Returns what compression would give this job, how sure that is, and what limits it."""
    job, best, model = found.job, found.best, found.model
    plain = found.rows[0]
    low, high = best["speedup"] / (1 + found.error), best["speedup"] * (1 + found.error)
    what = _choice(found)
    text = (
        f"{job.model} (batch {model.batch}, {4e-6 * model.num_elements:.0f} MB of gradients) on "
        f"{job.hosts} hosts like this one at {job.rate}: plain all-reduce would take "
        f"{plain['step_s'] * 1e3:.0f} ms a step, of which {plain['exposed_s'] * 1e3:.0f} ms wait "
        f"for the network. "
    )
    if found.pays == "no":
        text += f"Compression would not shorten that (best: {what}, {best['speedup']:.2f} times)."
    else:
        sure = "" if found.pays == "yes" else ", which is within the error: try it"
        text += (
            f"With {what} it would take {best['step_s'] * 1e3:.0f} ms: {best['speedup']:.2f} times "
            f"as fast (between {low:.2f} and {high:.2f}, {found.error:.0%} either way: nine of ten "
            f"predictions of hipress bench prediction, on links that were measured, were within "
            f"{PREDICTION_ERROR:.0%} of the measured step, and timings here vary){sure}."
        )
        text += f" What then limits the step is {found.limit}."
    text += f" {_break_even_text(found)}"
    if found.timed_batch != model.batch:
        text += f" The model was timed with {found.timed_batch} of {model.batch} examples."
    return text


def _break_even_text(found: JobReport) -> str:
    rate = found.break_even_bits
    if found.job.hosts == 1:
        return "One host exchanges no gradients."
    if rate is None:
        return "With these codecs compression pays at no rate."
    if math.isinf(rate):
        return f"Compression pays at any rate up to {rate_text(MOST_RATE)}."
    return f"Compression pays below about {rate_text(rate)}."


def _choice(found: JobReport) -> str:
    best = found.best
    if best["codec"] == PLAN:
        return "the planner's mix"
    return (
        "nothing compressed" if best["codec"] == "none" else f"{best['codec']} {best['strategy']}"
    )


def advice(found: JobReport) -> str:
    """Returns what to run next."""
    job = found.job
    if found.pays == "no":
        return (
            "leave it uncompressed; hipress.attach(model) finds the same and stays out of the way"
        )
    codec, strategy = fixed_choices(found.rows)[0]
    hosts, rate = min(job.hosts, MOST_HOSTS), _lab_rate(job.rate)
    options = "" if job.data is None else f" --data {job.data}"
    options += "" if job.batch is None else f" --batch {job.batch}"
    options += " --optimizer adamw" if OPTIMIZERS.get(job.optimizer or "") == ADAM else ""
    limits = []
    if hosts < job.hosts:
        limits.append(f"of at most {hosts} hosts")
    if rate == "none":
        limits.append(f"with links that are not shaped, since none can be to {job.rate}")
    lab = " ".join(["a lab", " and ".join(limits)]).strip()
    return (
        f"hipress bench train --model {job.model} --hosts {hosts} --rate {rate}{options} --codec "
        f"'{codec}' --strategy {strategy} measures it in {lab}; in a script of yours, "
        "sync = hipress.attach(model, optimizer=optimizer) decides on the job itself, among codecs "
        f"that suit the optimizer. {what_to_write(job.optimizer, codec, strategy)}"
    )


def what_to_write(optimizer: str | None, codec: str, strategy: str) -> str:
    """Returns what to write for a codec, which depends on the optimizer unless it keeps sizes.

    Args:
        optimizer: One of `OPTIMIZERS`; None if it is not known.
        codec: An expression.
        strategy: How gradients travel.
    """
    from hipress.codecs import table
    from hipress.session.buckets import has_momentum, keeps_residual

    made = table.codec(codec)
    if made.keeps_sizes:
        (line,) = recommended(UNKNOWN).lines(codec, strategy)
        return f"For this codec, with any optimizer, write: {line}"
    if optimizer is None:
        return (
            f"Not every optimizer trains well with {codec}: name yours with --optimizer "
            f"{', '.join(OPTIMIZERS)} to read what to write ({recommendations.url()})"
        )
    kind = OPTIMIZERS[optimizer]
    best = recommended(kind)
    instead, lines = "", best.lines(codec, strategy)
    if kind == SGD and has_momentum(made):
        instead = f" in place of {codec}, which adds momentum"
        codec, lines = best.codec, best.lines(strategy=strategy)
    elif kind == ADAM:
        own = "Adam" if optimizer == "adam" else "AdamW"
        lines = (lines[0].replace("AdamW", own), *lines[1:])
    elif kind == SGD_MOMENTUM and not has_momentum(made):
        if made.chooses_largest:
            ratio = re.search(r"ratio=[^,)]+", made.name)
            dgc = f"dgc({ratio.group()})" if ratio else "dgc"
            instead = f" in place of {codec}, which sends most elements late"
            codec, lines = dgc, best.lines(dgc, strategy)
        elif keeps_residual(made):
            instead = f" in place of {codec}"
            if codec == recommendations.warned(kind).codec:
                instead += f" ({recommendations.warning(kind)})"
            codec, lines = best.codec, best.lines(strategy=strategy)
        else:  # momentum stays in the optimizer
            lines = recommended(SGD).lines(codec, strategy)
    shown = f" ({best.measured[0].result}; {best.measured[0].task})" if codec == best.codec else ""
    return (
        f"For {best.title}, write{instead}: {'; '.join(lines)}{shown}, see {recommendations.url()}"
    )


def _lab_rate(text: str) -> str:
    """Returns a rate as the lab takes it; none where it cannot shape links to it."""
    from hipress.lab import links

    for spelt in (text, rate_text(parse_rate(text))):
        with contextlib.suppress(UsageError):
            links.parse_link_rate(spelt)
            return shlex.quote(spelt)
    return "none"


def show(found: JobReport) -> None:
    """Prints the paragraph and the table."""
    print(textwrap.fill(paragraph(found), 96))
    print(f"Next: {advice(found)}.")
    print_table(f"Predicted steps, {found.profile.made}", STEP_COLUMNS, found.rows)
