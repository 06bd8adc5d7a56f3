"""`hipress simulate`: predicted step times for other clusters, rates, codecs and strategies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hipress.cli._expressions import split_expressions
from hipress.errors import UsageError

if TYPE_CHECKING:
    from hipress.cli._sweep import Setting
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


@app.command(epilog=EXAMPLE)
def simulate(
    profile: Annotated[
        Path | None, typer.Option(help="What was measured, from hipress profile; with a model.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="A published cluster: aws-v100 or local-1080ti.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A built-in model, for a preset (docs/models.md); vgg19 if not given."),
    ] = None,
    nodes: Annotated[
        str | None,
        typer.Option(help="Numbers of ranks, with commas between; those of the profile if not."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(help="Rates of the links, with commas between; as measured if not given."),
    ] = None,
    codec: Annotated[
        str | None,
        typer.Option(help="Codecs, with commas between; all of the profile if not given."),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help=f"ps, ring, hierarchical, with commas between; {STRATEGIES} if not given."
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan to play besides, from hipress plan.")
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Look for the best plan too, for every setting.")
    ] = False,
    own_machines: Annotated[
        bool,
        typer.Option(
            "--own-machines", help="Each rank on a machine of its own, not on one they share."
        ),
    ] = False,
    published: Annotated[
        bool,
        typer.Option("--published", help="Hold the presets against published scaling curves."),
    ] = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the step as a timeline, for ui.perfetto.dev.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a picture (PNG).")] = None,
    json: Annotated[
        Path | None, typer.Option(help="Write the rows to this file; - for stdout.")
    ] = None,
) -> None:
    """Predicted step times on a cluster that was measured, or on a published one.

    The graphs that the engine runs are played on a simulated clock: backward,
    codecs, messages and the network share what the profile says there is. The
    first row of each setting is plain all-reduce, as DDP does it; "x plain"
    is its time divided by the row's. "exposed" is what backward does not
    hide, "scaling" the step without any exchange divided by the step.
    """
    from hipress.bench.table import check_json, is_stdout, write_json

    for path in (json, plot, timeline):
        check_json(path)
    if published:
        given = {
            "--profile": profile, "--preset": preset, "--model": model, "--nodes": nodes,
            "--rate": rate, "--codec": codec, "--plan": plan, "--timeline": timeline,
            "--strategy": strategy, "--auto": auto or None, "--own-machines": own_machines or None,
        }  # fmt: skip
        _refuse(given, "does not go with --published, which plays fixed settings")
        _published(plot, json)
        return
    made = _profile(profile, preset, model)
    if own_machines:
        from hipress.secopa.what_if import on_own_machines

        made = on_own_machines(made)
    if preset is not None:
        nodes = nodes or PRESET_NODES
    settings = _settings(
        made,
        nodes,
        rate,
        codec,
        strategy or STRATEGIES,
        plan,
        auto=auto,
        codecs=_codecs(made, codec or (None if preset is None else PRESET_CODECS)),
    )
    rows = _rows(settings, timeline)
    _print_rows(made, rows, to_stderr=is_stdout(json))
    if plot is not None:
        from hipress.bench.scaling_plot import draw_sweep

        draw_sweep(plot, _title(made), rows)
    if json is not None:
        write_json(json, "simulate", rows)


def _refuse(given: Mapping[str, object], why: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise UsageError(f"{name} {why}; leave one of them out.")


def _profile(path: Path | None, preset: str | None, model: str | None) -> Profile:
    """What to play."""
    from hipress.profile import Profile
    from hipress.secopa.sosp21 import presets

    if (path is None) == (preset is None):
        raise UsageError(
            "give either --profile, a file of hipress profile, or --preset, one of "
            f"{', '.join(presets.PRESETS)}."
        )
    if path is not None:
        _refuse({"--model": model}, "acts on --preset; --profile brings its model")
        from hipress.secopa.what_if import with_plain

        return with_plain(Profile.load(path))
    cluster = presets.preset(str(preset))
    from hipress.cli._layers import layers

    found, batch = layers(model or PRESET_MODEL)
    return presets.profile(cluster, model or PRESET_MODEL, found, batch)


def _settings(
    made: Profile,
    nodes: str | None,
    rate: str | None,
    codec: str | None,
    strategy: str,
    plan: Path | None,
    *,
    auto: bool,
    codecs: tuple[str, ...],
) -> list[Setting]:
    """All that is to be played; what can be refused is refused here."""
    from hipress.casync.graphs import strategies
    from hipress.cli._sweep import Setting, check_ranks, read_plan
    from hipress.secopa.what_if import parse_rate, with_rate

    numbers = [made.network.num_ranks] if nodes is None else [_number(n) for n in nodes.split(",")]
    names = tuple(dict.fromkeys(split_expressions(strategy)))
    for name in names:
        strategies.check(name)
    if rate is None:
        check_ranks(made, numbers, "give --rate, or ")
    read = None
    if plan is not None:
        read = read_plan(made, plan, codecs if codec else (), names[0], numbers)
    rates = [None] if rate is None else list(dict.fromkeys(rate.split(",")))
    profiles = [made if text is None else with_rate(made, parse_rate(text)) for text in rates]
    return [
        Setting(
            profile=at_rate,
            rate=None if text is None else text.strip(),
            num_ranks=number,
            codecs=codecs,
            strategies=names,
            plan=read,
            plan_name="" if plan is None else plan.name,
            auto=auto,
            auto_codecs=codecs if codec else None,
        )
        for text, at_rate in zip(rates, profiles, strict=True)
        for number in dict.fromkeys(numbers)
    ]


def _number(text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_NODES):
        raise UsageError(
            f"--nodes {text!r} is not a whole number from 1 to {MOST_NODES}; write 4, or 2,4,8."
        )
    return int(text)


def _codecs(made: Profile, asked: str | None) -> tuple[str, ...]:
    """Names of the profile; a name without its options stands for the only one with options."""
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


def _rows(settings: Sequence[Setting], timeline: Path | None) -> list[dict[str, Any]]:
    """The rows of all settings, with a progress bar on stderr."""
    from hipress.bench.table import progress_bar

    rows: list[dict[str, Any]] = []
    with progress_bar(len(settings)) as begin:
        for setting in settings:
            rows += setting.rows(begin(f"{setting.num_ranks} ranks"))
    if timeline is not None:
        shown = settings[0].write_timeline(timeline)
        import sys

        more = " (the first of several settings)" if _num_shown(rows) > 1 else ""
        print(f"{timeline}: {shown}{more}; open it at ui.perfetto.dev", file=sys.stderr)
    return rows


def _num_shown(rows: Sequence[dict[str, Any]]) -> int:
    return max(len([row for row in rows if row["codec"] != "none"]), 1)


def _title(made: Profile) -> str:
    model = made.model
    assert model is not None
    return f"{model.name or 'model'}, {made.made or 'a profile'}"


def _print_rows(made: Profile, rows: list[dict[str, Any]], to_stderr: bool) -> None:
    from hipress.bench.table import Column, fixed, print_table
    from hipress.secopa.simulate import MOST_WHOLE

    columns = [
        Column(header="nodes", show=lambda row: str(row["nodes"])),
        Column(header="rate", show=lambda row: row["rate"] or "as given"),
        Column(header="codec", show=lambda row: row["codec"], is_text=True),
        Column(header="strategy", show=lambda row: row["strategy"], is_text=True),
        Column(header="ms per\nstep", show=fixed("step_s", 1, scale=1e3)),
        Column(header="x\nplain", show=fixed("speedup", 2)),
        Column(header="exposed\nms", show=fixed("exposed_s", 1, scale=1e3)),
        Column(header="MB\nper rank", show=fixed("bytes_per_rank", 3, scale=1e-6)),
        Column(header="scaling\n%", show=fixed("efficiency", 1, scale=100)),
    ]
    print_table(f"Simulated steps: {_title(made)}", columns, rows, to_stderr=to_stderr)
    if any(row["nodes"] > MOST_WHOLE for row in rows):
        typer.echo(
            f"Above {MOST_WHOLE} nodes one rank stands for all, one that aggregates: its MB are "
            "the most that a rank sends. With fewer slices than ranks, as small models have, its "
            "times are rough (docs/simulate.md).",
            err=True,
        )


# --- published curves -----------------------------------------------------------------------------


def _published(plot: Path | None, json: Path | None) -> None:
    from hipress.bench.table import is_stdout, progress_bar, write_json
    from hipress.cli._layers import layers
    from hipress.secopa.sosp21 import scaling

    with progress_bar(1) as begin:
        on_part = begin("playing published clusters")
        models = {figure.model for figure in scaling.FIGURES}
        rows = scaling.compare({name: layers(name)[0] for name in sorted(models)}, on_part)
    _print_published(rows, to_stderr=is_stdout(json))
    if plot is not None:
        from hipress.bench.scaling_plot import draw_published

        draw_published(plot, rows)
    if json is not None:
        write_json(json, "simulate --published", rows)


def _print_published(rows: list[dict[str, Any]], to_stderr: bool) -> None:
    import sys

    from hipress.bench.table import Column, Row, fixed, print_table
    from hipress.secopa.sosp21.scaling import errors

    def pair(kind: str) -> Column:
        def show(row: Row) -> str:
            return " / ".join(
                f"{row[f'{which}_{kind}']:.2f}" for which in ("published", "simulated")
            )

        header = {"ring_efficiency": "scaling of Ring", "efficiency": "of HiPress"}[kind]
        return Column(header=f"{header}\npubl. / sim.", show=show)

    columns = [
        Column(header="cluster", show=lambda row: row["cluster"], is_text=True),
        Column(header="model", show=lambda row: row["model"], is_text=True),
        Column(
            header="HiPress", show=lambda row: f"{row['codec']}, {row['strategy']}", is_text=True
        ),
        Column(header="nodes", show=lambda row: str(row["nodes"])),
        Column(header="GPUs", show=lambda row: str(row["gpus"])),
        Column(header="x Ring\npubl.", show=fixed("published_speedup", 2)),
        Column(header="x Ring\nsim.", show=fixed("simulated_speedup", 2)),
        Column(header="error\n%", show=lambda row: f"{row['error'] * 100:+.1f}"),
        Column(header="sim. at\nline rate", show=fixed("line_rate_speedup", 2)),
        pair("ring_efficiency"),
        pair("efficiency"),
    ]
    print_table("Published speed-ups over Ring, and simulated", columns, rows, to_stderr=to_stderr)
    median, worst = errors(rows)
    print(
        f"error of the speed-up: median {median:.1%}, worst {worst:.1%}; one node is given; "
        "what was chosen and what it rests on: docs/simulate.md",
        file=sys.stderr if to_stderr else sys.stdout,
    )
