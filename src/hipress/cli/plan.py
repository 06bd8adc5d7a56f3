"""`hipress plan`: from what was measured to what happens to each gradient."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from hipress import recommendations
from hipress.cli import ui
from hipress.cli.options import expressions, refuse, takes_options
from hipress.cli.simulate import MOST_NODES
from hipress.errors import UsageError

if TYPE_CHECKING:
    from hipress.plan import Plan
    from hipress.profile import Profile
    from hipress.secopa.search import ScheduleTry

app = typer.Typer()

_searched = partial(Option, rich_help_panel="From a profile of cluster and model")
_published = partial(Option, rich_help_panel="As SOSP'21 did, each gradient alone")
DEFAULT_NODES = 16


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan, and what is printed about it."""

    plan: Plan
    everything: dict[str, float] = field(default_factory=dict)
    """Seconds of a step with everything compressed, by codec and strategy."""
    ready_s: dict[str, float] = field(default_factory=dict)
    """Work of backward before a gradient is there."""
    schedules: tuple[ScheduleTry, ...] = ()
    """Schedules for a loop without DDP, the best first."""
    times: str
    """What the two times of a gradient are."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What a plan of the whole step may use."""

    nodes: Annotated[
        int | None,
        _searched(min=1, max=MOST_NODES, help="Ranks to plan for; those of the profile."),
    ] = None
    strategy: Annotated[
        str | None,
        _searched(help="auto, or ps, ring, hierarchical, allreduce, separated by commas."),
    ] = None
    codecs: Annotated[
        str | None,
        _searched(help="Codecs to choose from, separated by commas; those the budget allows."),
    ] = None
    budget: Annotated[
        str | None,
        _searched(help="careful, table, or a bound on the error of a layer's message, e.g. 0.1."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PublishedOptions:
    """What the planner of SOSP'21 gets in addition to its input."""

    topology: Annotated[str | None, _published(help="PS or RING; PS if not given.")] = None
    nnodes: Annotated[
        int | None, _published(max=MOST_NODES, help=f"Nodes; {DEFAULT_NODES} if not given.")
    ] = None
    preset: Annotated[
        str | None, _published(help="Published curves, sosp21, in place of --profile.")
    ] = None
    ratio: Annotated[
        float | None,
        _published(help="Compressed size by size, of the preset; 0.0625 if not given."),
    ] = None
    codec: Annotated[str | None, _published(help="Codec of the profile to plan with.")] = None


@app.command(
    epilog="Example: hipress plan --profile profile.json --explain; as the original: hipress plan "
    "--secopa-input input.txt --topology PS --nnodes 16 --preset sosp21 -o SeCoPaPlan.txt"
)
@takes_options
def plan(
    whole_step: SearchOptions,
    published: PublishedOptions,
    profile: Annotated[
        Path | None, Option(help="What hipress profile measured.", metavar="FILE")
    ] = None,
    secopa_input: Annotated[
        Path | None, _published(help="Gradients, in lines name,number_of_float32.", metavar="FILE")
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            "-o",
            "--output",
            help="Where to write it: .txt as name,size,y|n,partitions, else as JSON; plan.json if "
            "not given, SeCoPaPlan.txt with --secopa-input.",
            metavar="FILE",
        ),
    ] = None,
    explain: Annotated[
        bool, Option("--explain", help="Print both times of every gradient, why, and schedules.")
    ] = False,
    json: Annotated[bool, Option("--json", help="Print JSON only.")] = False,
) -> None:
    """Decide what happens to each gradient.

    From a profile, the whole step is simulated, with what backward hides:
    codec, strategy, partitions and order of each gradient are those with which
    the step is shortest. With --secopa-input each gradient is judged alone,
    by the cost model and in the files of the SOSP'21 planner. Train with the
    plan by hipress train --plan, or hipress.attach(model, plan=...).
    """
    ui.check_writable(output, "--output (-o)")
    if secopa_input is not None:
        refuse(whole_step, "acts on a plan of the whole step; leave it out, or --secopa-input.")
        path = output or Path("SeCoPaPlan.txt")
        made = _plan_alone(secopa_input, profile, published)
    elif profile is not None:
        refuse(published, "acts on --secopa-input FILE; give that too, or leave it out.")
        path = output or Path("plan.json")
        made = _plan_step(profile, whole_step, path)
    else:
        raise UsageError(
            "there is nothing to plan from; give --profile profile.json (hipress profile makes "
            "one), or --secopa-input input.txt with --preset sosp21."
        )
    made.plan.save(path)
    if json:
        _print_json(made, path)
        return
    if explain:
        _print_table(made)
        _print_schedules(made)
    print(f"{path}: {_summary(made)}")
    _warn(made)


def _warn(made: PlanReport) -> None:
    from hipress.plan import ANY
    from hipress.secopa.budget import CAREFUL

    used = {made_for.codec for made_for in made.plan.gradients.values()}
    unsure = used - {*CAREFUL, "none", ANY}
    if not unsure:
        return
    from hipress.codecs.table import codec  # loads torch

    if depend := sorted(name for name in unsure if not codec(name).keeps_sizes):
        print(
            f"It uses {', '.join(depend)}, with which not every optimizer trains well "
            f"({recommendations.url()}): hipress.attach(model, plan=..., optimizer=optimizer) "
            "checks yours, and --budget careful leaves such codecs out.",
            file=sys.stderr,
        )


def _plan_alone(path: Path, profile: Path | None, options: PublishedOptions) -> PlanReport:
    from hipress.cli.sweep import check_ranks
    from hipress.profile import Profile
    from hipress.secopa.sosp21 import planner

    num_nodes = DEFAULT_NODES if options.nnodes is None else options.nnodes
    if (options.preset is None) == (profile is None):
        raise UsageError(
            "--secopa-input needs curves, from one place: give --preset sosp21 (4, 8 or 16 nodes), "
            "or --profile profile.json and --codec (any number of nodes)."
        )
    if profile is not None:
        refuse(
            {"--ratio": options.ratio}, "acts on --preset; the profile knows the codec's frames."
        )
        found = Profile.load(profile)
        check_ranks(found, [num_nodes])
        costs = planner.costs_of(found, options.codec or _only_codec(found), num_nodes)
    else:
        why = "acts on --profile; a preset has no codecs: give --ratio."
        refuse({"--codec": options.codec}, why)
        if options.preset not in planner.PRESETS:
            raise UsageError(
                f"preset {options.preset!r} is none of {', '.join(planner.PRESETS)}; choose one."
            )
        ratio = planner.RATIO if options.ratio is None else options.ratio
        costs = planner.PRESETS[options.preset](num_nodes, ratio)
    plan = planner.plan(planner.read_input(path), options.topology or "PS", num_nodes, costs)
    return PlanReport(plan=plan, times="exchange of the gradient alone")


def _only_codec(profile: Profile) -> str:
    names = [costs.codec for costs in profile.codecs if costs.codec != "none"]
    if len(names) != 1:
        known = ", ".join(names) or "none; measure some with hipress profile --codecs"
        raise UsageError(f"--codec is not given; the profile has {known}: choose one.")
    return names[0]


def _plan_step(path: Path, options: SearchOptions, output: Path) -> PlanReport:
    from hipress.casync.graphs import strategies
    from hipress.cli.sweep import check_ranks
    from hipress.profile import Profile
    from hipress.secopa.budget import Budget
    from hipress.secopa.search import search
    from hipress.secopa.sosp21.planner import in_lines

    profile = Profile.load(path)
    if profile.model is None:
        raise UsageError(
            f"profile {str(path)!r} has no model, so there are no gradients to plan for; measure "
            "one with hipress profile --model."
        )
    nodes = options.nodes
    names = strategies.candidates(profile.network.hosts)
    if options.strategy not in (None, "auto"):
        names = expressions(str(options.strategy))
    for name in names:
        strategies.check(name)
    allowed = Budget.read(options.budget)
    check_ranks(profile, [nodes or 1])
    with ui.progress_bar(1) as begin:
        begin("searching for the shortest step")
        found = search(
            profile,
            num_ranks=nodes,
            strategies=names,
            codecs=None if options.codecs is None else expressions(options.codecs),
            budget=allowed,
        )
    plan = found.plan
    if output.suffix == ".txt":
        plan = in_lines(plan, profile, nodes or profile.network.num_ranks)
    return PlanReport(
        plan=plan,
        everything=dict(found.everything),
        schedules=found.schedules,
        ready_s={gradient.name: gradient.ready_s for gradient in profile.model.gradients},
        times="step with the gradient, all else as planned",
    )


def _rows(made: PlanReport) -> list[dict[str, Any]]:
    rows = []
    for name in dict.fromkeys([*made.ready_s, *made.plan.gradients]):
        decision = made.plan.decision(name)
        reason = decision.reason
        if not reason and not decision.is_compressed:
            reason = "compressing it would not shorten the step"
        rows.append(
            {
                "gradient": name,
                "elements": decision.numel,
                "ready_s": made.ready_s.get(name),
                "codec": decision.codec,
                "strategy": decision.strategy,
                "partitions": decision.partitions,
                "bulk": decision.bulk,
                "order": decision.order,
                "compressed_s": decision.compressed_s,
                "plain_s": decision.plain_s,
                "reason": reason,
            }
        )
    return rows


def _print_json(made: PlanReport, path: Path) -> None:
    import json

    plan = made.plan
    document = {
        "command": "plan",
        "plan": str(path),
        "made_from": plan.made_from,
        "num_ranks": plan.num_ranks,
        "num_compressed": plan.num_compressed,
        "step_s": plan.step_s,
        "plain_step_s": plan.plain_step_s,
        "everything_step_s": made.everything,
        "schedule": plan.schedule,
        "slice_bytes": plan.slice_bytes,
        "credit_bytes": plan.credit_bytes,
        "schedules": _schedule_rows(made),
        "rows": _rows(made),
    }
    print(json.dumps(document, indent=2))


def _print_table(made: PlanReport) -> None:
    columns = [
        ui.text("gradient"),
        ui.number("elements"),
        *([ui.number("ready\nat ms", "ready_s", 1, 1e3)] if made.ready_s else []),
        ui.text("codec"),
        ui.text("strategy"),
        ui.number("partitions"),
        ui.number("compressed\nms", "compressed_s", 3, 1e3),
        ui.number("plain\nms", "plain_s", 3, 1e3),
        ui.text("why", "reason"),
    ]
    source = f" of {made.plan.made_from}" if made.plan.made_from else ""
    ui.print_table(f"Plan{source}; times: {made.times}", columns, _rows(made))


def _schedule_rows(made: PlanReport) -> list[dict[str, Any]]:
    return [
        {
            "schedule": one.schedule.name,
            "compressed": one.is_compressed,
            "slice_bytes": one.schedule.slice_bytes,
            "credit_bytes": one.schedule.credit_bytes,
            "step_s": one.step_s,
        }
        for one in made.schedules
    ]


def _print_schedules(made: PlanReport) -> None:
    """Prints the best sizes of each schedule, beside DDP."""
    if not made.schedules:
        return
    plan = made.plan
    best: dict[tuple[str, bool], dict[str, Any]] = {}
    for row in _schedule_rows(made):  # the best comes first
        best.setdefault((row["schedule"], row["compressed"]), row)
    ddp = [{"schedule": "DDP", "compressed": False, "step_s": plan.plain_step_s}]
    if plan.num_compressed:
        ddp.insert(0, {"schedule": "DDP", "compressed": True, "step_s": plan.step_s})
    columns = [
        ui.text("schedule"),
        ui.Column(
            header="gradients",
            show=lambda row: "as planned" if row["compressed"] else "nothing compressed",
            is_text=True,
        ),
        ui.number("slice\nMB", "slice_bytes", 2, 1e-6),
        ui.number("credit\nMB", "credit_bytes", 2, 1e-6),
        ui.number("expected\nms", "step_s", 1, 1e3),
    ]
    title = f"Without DDP, by schedule; the best of {len(made.schedules)} settings"
    ui.print_table(title, columns, [*ddp, *best.values()])
    print(
        "A slice is about what one message carries; the credit is what a rank may have under way "
        f"at once. The plan names {plan.schedule}, for loops without DDP: DDP decides the order of "
        "its buckets itself."
    )


def _summary(made: PlanReport) -> str:
    plan = made.plan
    text = f"{plan.num_compressed} of {len(plan.gradients)} gradients compressed"
    if plan.step_s is None or plan.plain_step_s is None:
        return f"{text}; {plan.made_from}"
    text += (
        f"; predicted step {plan.step_s * 1e3:.1f} ms, nothing compressed "
        f"{plan.plain_step_s * 1e3:.1f} ms"
    )
    if made.everything:
        label, step_s = min(made.everything.items(), key=lambda item: item[1])
        text += f", everything compressed {step_s * 1e3:.1f} ms ({label})"
    return text
