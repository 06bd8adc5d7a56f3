"""`hipress simulate`: predicted step times for other clusters, rates, codecs and strategies."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from hipress import recommendations
from hipress.cli import ui
from hipress.cli.options import (
    OWN,
    Data,
    JsonFile,
    expressions,
    refuse,
    split_expressions,
    takes_options,
    whole_numbers,
)
from hipress.errors import UsageError
from hipress.version import docs_url

if TYPE_CHECKING:
    from hipress.cli.sweep import Sweep
    from hipress.profile import Profile

EXAMPLE = (
    "Example: hipress simulate --preset aws-v100 --model bert-base --nodes 16,128 --codec onebit "
    "--plot scaling.png"
)
PRESET_NODES = "2,4,8,16"
PRESET_CODECS = "onebit,dgc(ratio=0.001)"
PRESET_MODEL = "vgg19"
STRATEGIES = "ps,ring"
MOST_NODES = 2**16

app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """What is simulated, and on which clusters."""

    profile: Annotated[
        Path | None, Option(help="What was measured, from hipress profile; with a model.")
    ] = None
    preset: Annotated[str | None, Option(help="A published cluster: aws-v100 or local-1080ti.")] = (
        None
    )
    model: Annotated[
        str | None,
        Option(help=f"A model, for a preset ({docs_url('models')}), {OWN}; vgg19 if not given."),
    ] = None
    data: Data = None
    nodes: Annotated[
        str | None,
        Option(help="Numbers of ranks, separated by commas; those of the profile if not."),
    ] = None
    rate: Annotated[
        str | None,
        Option(help="Rates of the links, separated by commas; as measured if not given."),
    ] = None
    codec: Annotated[
        str | None, Option(help="Codecs, separated by commas; all of the profile if not given.")
    ] = None
    strategy: Annotated[
        str | None,
        Option(help=f"ps, ring, hierarchical, separated by commas; {STRATEGIES} if not given."),
    ] = None
    schedule: Annotated[
        str | None,
        Option(help="fifo, priority, overlap, separated by commas: without DDP, each choice too."),
    ] = None
    plan: Annotated[Path | None, Option(help="A plan to simulate too, from hipress plan.")] = None
    auto: Annotated[
        bool, Option("--auto", help="Search for the best plan too, for every setting.")
    ] = False
    own_machines: Annotated[
        bool,
        Option("--own-machines", help="Each rank on a machine of its own, not on one they share."),
    ] = False
    timeline: Annotated[
        Path | None, Option(help="Write the step as a timeline, for ui.perfetto.dev.")
    ] = None


@app.command(epilog=EXAMPLE)
@takes_options
def simulate(
    options: SweepOptions,
    published: Annotated[
        bool, Option("--published", help="Compare the presets with published scaling curves.")
    ] = False,
    plot: Annotated[Path | None, Option(help="Write a picture (PNG).")] = None,
    json: JsonFile = None,
) -> None:
    """Predict step times on a cluster that was measured, or on a published one.

    The graphs that the engine runs are executed on a simulated clock: backward,
    codecs, messages and the network share what the profile says there is. The
    first row of each setting is plain all-reduce, as DDP does it; "x plain"
    is its time divided by the row's. "exposed" is what backward does not
    hide, "scaling" the step without any exchange divided by the step. The
    shortest step of each setting is marked.
    """
    output = ui.JsonOutput(json, "simulate --published" if published else "simulate")
    ui.check_writable(plot, "--plot")
    ui.check_writable(options.timeline, "--timeline")
    if published:
        why = "does not go with --published, which simulates fixed settings; leave one of them out."
        refuse(options, why)
        _published(plot, output)
        return
    made = _profile(options)
    rows = _rows(_sweeps(made, options), options.timeline)
    _print_rows(made, rows, to_stderr=output.is_stdout)
    if plot is not None:
        from hipress.bench.plots import draw_sweep

        draw_sweep(plot, _title(made), rows)
    output.write(rows)


def _profile(options: SweepOptions) -> Profile:
    from hipress.profile import Profile
    from hipress.secopa.sosp21 import presets
    from hipress.secopa.what_if import on_own_machines, with_plain

    if (options.profile is None) == (options.preset is None):
        raise UsageError(
            "there are no costs to simulate with, or two sources of them: give either --profile, a "
            "file of hipress profile, or --preset, one of "
            f"{', '.join(presets.PRESETS)}."
        )
    if options.profile is not None:
        why = "acts on --preset, and --profile brings its model; leave one of them out."
        refuse({"--model": options.model, "--data": options.data}, why)
        made = with_plain(Profile.load(options.profile))
    else:
        from hipress.cli.sweep import layers

        cluster, name = presets.preset(str(options.preset)), options.model or PRESET_MODEL
        made = presets.profile(cluster, name, *layers(name, options.data))
    return on_own_machines(made) if options.own_machines else made


def _sweeps(made: Profile, options: SweepOptions) -> list[Sweep]:
    from hipress.casync.graphs import schedules, strategies
    from hipress.cli.sweep import Sweep, check_ranks, read_plan
    from hipress.secopa.what_if import with_rate
    from hipress.units import parse_rate

    is_preset = options.preset is not None
    codecs = _codecs(made, options.codec or (PRESET_CODECS if is_preset else None))
    asked = codecs if options.codec else ()
    numbers = [made.network.num_ranks]
    if nodes := options.nodes or (PRESET_NODES if is_preset else None):
        numbers = whole_numbers("--nodes", nodes, 1, MOST_NODES)
    if options.strategy and asked == () and options.codec:
        typer.echo(
            "Codec none is simulated as DDP's all-reduce alone; --strategy acts on codecs that "
            "compress: name one with --codec to see it.",
            err=True,
        )
    names = expressions(options.strategy or STRATEGIES)
    for name in names:
        strategies.check(name)
    orders = expressions(options.schedule) if options.schedule else ()
    for name in orders:
        schedules.check(name)
    profiles: dict[str | None, Profile] = {None: made}
    if options.rate is None:
        check_ranks(made, numbers, "give --rate, or ")
    else:
        profiles = {text: with_rate(made, parse_rate(text)) for text in expressions(options.rate)}
    plan = None
    if options.plan is not None:
        plan = read_plan(made, options.plan, asked, names[0], numbers)
    return [
        Sweep(
            profile=at_rate,
            rate=text,
            num_ranks=number,
            codecs=codecs,
            strategies=names,
            schedules=tuple(name for name in schedules.SCHEDULES if name in orders),
            plan=plan,
            plan_name=options.plan.name if options.plan else "",
            auto=options.auto,
            auto_codecs=asked or None,
        )
        for text, at_rate in profiles.items()
        for number in numbers
    ]


def _codecs(made: Profile, asked: str | None) -> tuple[str, ...]:
    """Returns codecs of the profile; a name alone stands for the only one with options."""
    known = [costs.codec for costs in made.codecs if costs.codec != "none"]
    if asked is None:
        return tuple(known)
    found = []
    for name in split_expressions(asked):
        near = [one for one in known if one.startswith(f"{name}(")]
        if name == "none":
            continue  # the plain row, which is always there
        if name not in known and len(near) != 1:
            raise UsageError(
                f"--codec {name!r} is none of {', '.join(['none', *known])}, whose costs are "
                f"known of {made.made or 'the profile'}; choose some, or measure it with "
                f"hipress profile --codecs {name!r}."
            )
        found.append(name if name in known else near[0])
    return tuple(dict.fromkeys(found))


def _rows(sweeps: Sequence[Sweep], timeline: Path | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with ui.progress_bar(len(sweeps)) as begin:
        for sweep in sweeps:
            rows += sweep.rows(begin(f"{sweep.num_ranks} ranks"))
    if timeline is not None:
        shown = sweeps[0].write_timeline(timeline)
        num_others = len([row for row in rows if row["codec"] != "none" or row["schedule"]])
        more = " (the first of several settings)" if num_others > 1 else ""
        print(f"{timeline}: {shown}{more}; open it at ui.perfetto.dev", file=sys.stderr)
    return rows


def _title(made: Profile) -> str:
    model = made.model
    assert model is not None
    return f"{model.name or 'model'}, {made.made or 'a profile'}"


def _print_rows(made: Profile, rows: list[dict[str, Any]], to_stderr: bool) -> None:
    from hipress.cli.sweep import STEP_COLUMNS
    from hipress.secopa.simulate import MOST_WHOLE

    columns = [
        ui.number("nodes"),
        ui.Column(header="rate", show=lambda row: row["rate"] or "as given"),
        *STEP_COLUMNS[:2],
        *([ui.text("schedule")] if any(row["schedule"] for row in rows) else []),
        *STEP_COLUMNS[2:],
        ui.Column(header="", show=lambda row: "best" if row["is_best"] else " ", is_text=True),
    ]
    ui.print_table(f"Simulated steps: {_title(made)}", columns, rows, to_stderr=to_stderr)
    for row in rows:
        if row["is_best"]:
            typer.echo(_best(row), err=to_stderr)
    if depend := _dependent(rows):
        typer.echo(
            f"Not every optimizer trains well with {', '.join(depend)} ({recommendations.url()}).",
            err=to_stderr,
        )
    if any(row["nodes"] > MOST_WHOLE for row in rows):
        typer.echo(
            f"Above {MOST_WHOLE} nodes one rank stands for all, one that aggregates: its MB are "
            "the most that a rank sends. With fewer partitions than ranks, as small models have, "
            f"its times are rough ({docs_url('simulate')}).",
            err=True,
        )


def _best(row: ui.Row) -> str:
    """Returns the sentence about the shortest step of a setting."""
    what = "plain all-reduce, so nothing would be compressed"
    if row["speedup"] > 1:
        how = f" with {row['strategy']}" if row["strategy"] else ""
        how += f" and schedule {row['schedule']}" if row["schedule"] else ""
        what = f"{row['codec']}{how}, {row['speedup']:.2f} times as fast as plain all-reduce"
    return f"Best on {row['nodes']} rank(s), rate {row['rate'] or 'as given'}: {what}."


def _dependent(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the codecs of the best rows with which not every optimizer trains well."""
    from hipress.cli.sweep import PLAN
    from hipress.codecs.table import codec

    best = {row["codec"] for row in rows if row["is_best"] and row["speedup"] > 1}
    if PLAN in best:  # it may use any of them
        best |= {row["codec"] for row in rows}
    known = (row["codec"] for row in rows if row["strategy"] and row["codec"] != PLAN)
    return sorted(name for name in best & set(known) if not codec(name).keeps_sizes)


# --- published curves -----------------------------------------------------------------------------


def _published(plot: Path | None, output: ui.JsonOutput) -> None:
    from hipress.cli.sweep import layers
    from hipress.secopa.sosp21 import scaling

    with ui.progress_bar(1) as begin:
        on_part = begin("simulating published clusters")
        models = {figure.model for figure in scaling.FIGURES}
        rows = scaling.compare({name: layers(name)[0] for name in sorted(models)}, on_part)
    _print_published(rows, to_stderr=output.is_stdout)
    if plot is not None:
        from hipress.bench.plots import draw_published

        draw_published(plot, rows)
    output.write(rows)


def _print_published(rows: list[dict[str, Any]], to_stderr: bool) -> None:
    from hipress.secopa.sosp21.scaling import errors

    def pair(header: str, kind: str) -> ui.Column:
        def show(row: ui.Row) -> str:
            return " / ".join(
                f"{row[f'{which}_{kind}']:.2f}" for which in ("published", "simulated")
            )

        return ui.Column(header=f"{header}\npubl. / sim.", show=show)

    columns = [
        ui.text("cluster"),
        ui.text("model"),
        ui.Column(
            header="HiPress", show=lambda row: f"{row['codec']}, {row['strategy']}", is_text=True
        ),
        ui.number("nodes"),
        ui.number("GPUs", "gpus"),
        ui.number("x Ring\npubl.", "published_speedup", 2),
        ui.number("x Ring\nsim.", "simulated_speedup", 2),
        ui.Column(header="error\n%", show=lambda row: f"{row['error'] * 100:+.1f}"),
        ui.number("sim. at\nline rate", "line_rate_speedup", 2),
        pair("scaling of Ring", "ring_efficiency"),
        pair("of HiPress", "efficiency"),
    ]
    ui.print_table(
        "Published speed-ups over Ring, and simulated", columns, rows, to_stderr=to_stderr
    )
    median, worst = errors(rows)
    print(
        f"error of the speed-up: median {median:.1%}, worst {worst:.1%}; one node is given; "
        f"{docs_url('simulate')} says what was chosen and why",
        file=sys.stderr if to_stderr else sys.stdout,
    )
