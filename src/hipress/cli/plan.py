"""`hipress plan`: from what was measured to what happens to each gradient."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipress.cli.simulate import MOST_NODES
from hipress.errors import UsageError

if TYPE_CHECKING:
    from hipress.plan import Decision, Plan
    from hipress.profile import Profile

app = typer.Typer()

MEASURED = "From a profile of cluster and model"
PUBLISHED = "As SOSP'21 did, each gradient alone"
AUTO = "auto"
DEFAULT_NODES = 16
"""Of the original planner."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """A plan, and what is told about it."""

    plan: Plan
    everything: dict[str, float] = field(default_factory=dict)
    """Seconds of a step with everything compressed, by how."""
    ready_s: dict[str, float] = field(default_factory=dict)
    """Work of backward before a gradient is there."""
    times: str
    """What the two times of a gradient are."""


@app.command(
    epilog="Example: hipress plan --profile profile.json --explain; as the original: hipress plan "
    "--secopa-input input.txt --topology PS --nnodes 16 --preset sosp21 -o SeCoPaPlan.txt"
)
def plan(
    profile: Annotated[
        Path | None, typer.Option(help="What hipress profile measured.", metavar="FILE")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Where to write it: .txt as name,size,y|n,partitions, else as JSON; plan.json if "
            "not given, SeCoPaPlan.txt with --secopa-input.",
            metavar="FILE",
        ),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print both times of every gradient, and why.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_NODES,
            help="Ranks to plan for; those of the profile.",
            rich_help_panel=MEASURED,
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="auto, or ps, ring, hierarchical, allreduce, with commas between.",
            rich_help_panel=MEASURED,
        ),
    ] = None,
    codecs: Annotated[
        str | None,
        typer.Option(
            help="Codecs to choose from, with commas between; those that the budget allows.",
            rich_help_panel=MEASURED,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="careful, table, or a bound on the error of a layer's message, e.g. 0.1.",
            rich_help_panel=MEASURED,
        ),
    ] = None,
    secopa_input: Annotated[
        Path | None,
        typer.Option(
            help="Gradients, in lines name,number_of_float32.",
            metavar="FILE",
            rich_help_panel=PUBLISHED,
        ),
    ] = None,
    topology: Annotated[
        str | None, typer.Option(help="PS or RING; PS if not given.", rich_help_panel=PUBLISHED)
    ] = None,
    nnodes: Annotated[
        int | None,
        typer.Option(
            max=MOST_NODES,
            help=f"Nodes; {DEFAULT_NODES} if not given.",
            rich_help_panel=PUBLISHED,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="Published curves, sosp21, in place of --profile.", rich_help_panel=PUBLISHED
        ),
    ] = None,
    ratio: Annotated[
        float | None,
        typer.Option(
            help="Compressed size by size, of the preset; 0.0625 if not given.",
            rich_help_panel=PUBLISHED,
        ),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(help="Codec of the profile to plan with.", rich_help_panel=PUBLISHED),
    ] = None,
) -> None:
    """Decide what happens to each gradient.

    From a profile, the whole step is simulated, with what backward hides:
    codec, strategy, slices and order of each gradient are those with which
    the step is shortest. With --secopa-input each gradient is judged alone,
    by the cost model and in the files of the SOSP'21 planner. Train with the
    plan by hipress train --plan, or hipress.attach(model, plan=...).
    """
    of_measured = {
        "--nodes": nodes, "--strategy": strategy, "--codecs": codecs, "--budget": budget,
    }  # fmt: skip
    of_published = {
        "--topology": topology, "--nnodes": nnodes, "--preset": preset, "--ratio": ratio,
        "--codec": codec,
    }  # fmt: skip
    if secopa_input is not None:
        _refuse(of_measured, "acts on a plan of the whole step; leave it out, or --secopa-input")
        path = output or Path("SeCoPaPlan.txt")
        made = _published(secopa_input, profile, preset, ratio, topology, nnodes, codec)
    elif profile is not None:
        _refuse(of_published, "acts on --secopa-input FILE; give that too, or leave it out")
        path = output or Path("plan.json")
        made = _searched(profile, nodes, strategy or AUTO, codecs, budget, path)
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
    print(f"{path}: {_summary(made)}")
    _warn(made)


def _warn(made: Made) -> None:
    """Says of codecs that some optimizers mind."""
    from hipress.plan import ANY
    from hipress.secopa.budget import CAREFUL

    used = {made_for.codec for made_for in made.plan.gradients.values()}
    if bold := used - {*CAREFUL, "none", ANY}:
        print(
            f"It uses {', '.join(sorted(bold))}, which may fall behind with "
            "momentum or Adam (docs/convergence.md); --budget careful leaves such codecs out.",
            file=sys.stderr,
        )


def _refuse(options: dict[str, Any], why: str) -> None:
    """Refuses an option that would do nothing."""
    for option, value in options.items():
        if value is not None:
            raise UsageError(f"{option} {value} {why}.")


def _published(
    path: Path,
    profile: Path | None,
    preset: str | None,
    ratio: float | None,
    topology: str | None,
    nnodes: int | None,
    codec: str | None,
) -> Made:
    """The plan of the published model."""
    from hipress.cli._sweep import check_ranks
    from hipress.profile import Profile
    from hipress.secopa.sosp21 import planner

    num_nodes = DEFAULT_NODES if nnodes is None else nnodes
    if (preset is None) == (profile is None):
        raise UsageError(
            "--secopa-input needs curves, from one place: give --preset sosp21 (4, 8 or 16 nodes), "
            "or --profile profile.json and --codec (any number of nodes)."
        )
    if profile is not None:
        _refuse({"--ratio": ratio}, "acts on --preset; the profile knows the codec's frames")
        found = Profile.load(profile)
        check_ranks(found, [num_nodes])
        costs = planner.costs_of(found, codec or _only_codec(found), num_nodes)
    else:
        _refuse({"--codec": codec}, "acts on --profile; a preset has no codecs: give --ratio")
        if preset not in planner.PRESETS:
            raise UsageError(
                f"preset {preset!r} is none of {', '.join(planner.PRESETS)}; choose one."
            )
        costs = planner.PRESETS[preset](num_nodes, planner.RATIO if ratio is None else ratio)
    gradients = planner.read_input(path)
    plan = planner.plan(gradients, topology or "PS", num_nodes, costs)
    return Made(plan=plan, times="exchange of the gradient alone")


def _only_codec(profile: Profile) -> str:
    """The codec of a profile that has one, besides `none`."""
    names = [costs.codec for costs in profile.codecs if costs.codec != "none"]
    if len(names) != 1:
        known = ", ".join(names) or "none; measure some with hipress profile --codecs"
        raise UsageError(f"--codec is not given; the profile has {known}: choose one.")
    return names[0]


def _searched(
    path: Path,
    nodes: int | None,
    strategy: str,
    codecs: str | None,
    budget: str | None,
    output: Path,
) -> Made:
    """The plan with the shortest step."""
    from hipress.bench.table import progress_bar
    from hipress.casync.graphs import strategies
    from hipress.cli._expressions import split_expressions
    from hipress.cli._sweep import check_ranks
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
    candidates = strategies.candidates(profile.network.hosts)
    names = candidates if strategy == AUTO else tuple(split_expressions(strategy))
    for name in names:
        strategies.check(name)
    allowed = Budget.read(budget)
    check_ranks(profile, [nodes or 1])
    with progress_bar(1) as begin:
        begin("looking for the shortest step")
        found = search(
            profile,
            num_ranks=nodes,
            strategies=names,
            codecs=None if codecs is None else tuple(split_expressions(codecs)),
            budget=allowed,
        )
    plan = found.plan
    if output.suffix == ".txt":
        plan = in_lines(plan, profile, nodes or profile.network.num_ranks)
    return Made(
        plan=plan,
        everything=dict(found.everything),
        ready_s={gradient.name: gradient.ready_s for gradient in profile.model.gradients},
        times="step with the gradient, all else as planned",
    )


def _why(decision: Decision) -> str:
    """The reason of a decision; one that left a gradient alone always has one."""
    if decision.reason or decision.is_compressed:
        return decision.reason
    return "compressing it would not shorten the step"


def _rows(made: Made) -> list[dict[str, Any]]:
    """A row for each gradient of the plan and of the profile."""
    rows = []
    for name in dict.fromkeys([*made.ready_s, *made.plan.gradients]):
        decision = made.plan.decision(name)
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
                "reason": _why(decision),
            }
        )
    return rows


def _print_json(made: Made, path: Path) -> None:
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
        "rows": _rows(made),
    }
    print(json.dumps(document, indent=2))


def _print_table(made: Made) -> None:
    from hipress.bench.table import Column, fixed, print_table

    def text(name: str) -> Column:
        return Column(header=name, show=lambda row: row[name], is_text=True)

    def number(name: str) -> Column:
        return Column(header=name, show=lambda row: None if row[name] is None else str(row[name]))

    ready = [Column(header="ready\nat ms", show=fixed("ready_s", 1, scale=1e3))]
    columns = [
        text("gradient"),
        number("elements"),
        *(ready if made.ready_s else []),
        text("codec"),
        text("strategy"),
        number("partitions"),
        Column(header="compressed\nms", show=fixed("compressed_s", 3, scale=1e3)),
        Column(header="plain\nms", show=fixed("plain_s", 3, scale=1e3)),
        Column(header="why", show=lambda row: row["reason"], is_text=True),
    ]
    source = f" of {made.plan.made_from}" if made.plan.made_from else ""
    print_table(f"Plan{source}; times: {made.times}", columns, _rows(made))


def _summary(made: Made) -> str:
    """What the plan does, in a line."""
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
