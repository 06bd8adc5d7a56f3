"""`hipress bench convergence`: what each codec does to the accuracy that training reaches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from hipress.cli import ui
from hipress.cli.options import (
    MOST_HOSTS,
    PROCESS_BYTES,
    ClusterOptions,
    JsonFile,
    Loopback,
    check_memory,
    refuse,
    split_expressions,
    takes_options,
)
from hipress.errors import UsageError

if TYPE_CHECKING:
    from hipress.bench.convergence import ConvergenceBenchmark
    from hipress.train.convergence import ConvergenceTask

EXAMPLE = "Example: hipress bench convergence --data digits --codecs onebit,topk --plot curves.png"
LEAST_RATE = 1e-6
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
"""What stands between these two lines of a page is made by the command."""


@dataclass(frozen=True, kw_only=True)
class ConvergenceOptions:
    """What is trained, with which codecs, and by whom."""

    data: Annotated[
        str | None,
        Option(
            help="digits, fashion-mnist, or all of them; if not given, both, the second only "
            "where its folder is known."
        ),
    ] = None
    codecs: Annotated[
        str | None, Option(help="Codec expressions, separated by commas; all if not given.")
    ] = None
    seeds: Annotated[int, Option(min=1, help="Runs per codec; their mean counts.")] = 3
    workers: Annotated[
        int | None, Option(min=1, help="Virtual workers of a run; 4 if not given.")
    ] = None
    steps: Annotated[
        int | None, Option(min=1, help="Steps of a run; if not given, the task's own.")
    ] = None
    learning_rate: Annotated[
        float | None, Option(min=LEAST_RATE, help="At the start; if not given, the task's own.")
    ] = None
    jobs: Annotated[
        int | None,
        Option(min=1, help="Runs at a time, 1 if not given; the results do not depend on it."),
    ] = None
    hosts: Annotated[
        int | None,
        Option(min=2, max=MOST_HOSTS, help="Train over a network instead: hosts, one rank each."),
    ] = None
    rate: Annotated[
        str | None,
        Option(
            help="With --hosts the rate of each host's link, each way; 1gbit if not given, none "
            "as fast as this machine can. Without --hosts the learning rate."
        ),
    ] = None
    strategy: Annotated[
        str | None,
        Option(help="With --hosts: ps, ring, hierarchical or allreduce; ps if not given."),
    ] = None
    loopback: Loopback = False
    timeout: Annotated[
        float | None,
        Option(
            min=0, help="With --hosts: seconds after which the runs of a data set are given up."
        ),
    ] = None
    data_dir: Annotated[
        Path | None, Option(help="Folder of Fashion-MNIST; if not given, HIPRESS_FASHION_MNIST.")
    ] = None

    @property
    def folder(self) -> Path | None:
        """The folder of Fashion-MNIST, if it is known."""
        from hipress import settings

        return self.data_dir or settings.fashion_mnist()

    @property
    def expressions(self) -> list[str]:
        from hipress.train.convergence import default_codecs

        return default_codecs() if self.codecs is None else split_expressions(self.codecs)


@takes_options
def convergence(
    options: ConvergenceOptions,
    json: JsonFile = None,
    markdown: Annotated[
        Path | None, Option(help="Put the table between the markers of this page.")
    ] = None,
    plot: Annotated[Path | None, Option(help="Draw the curves to this file.")] = None,
) -> None:
    """Train with every codec and with none, and compare test accuracies.

    Several virtual workers share one process; gradients go through the
    worker's codec and the aggregator's, as in a real sync. With --hosts
    every worker is a rank on an emulated cluster (see hipress lab): DDP
    with hipress.attach, and uncompressed is DDP alone. "Difference" is
    the accuracy in points above (+) or below (-) the uncompressed run of
    the same seed and number of steps, the mean of all seeds.
    Exit code 1: ranks of a run ended with different parameters.
    """
    output = ui.JsonOutput(json, "bench convergence")
    check_outputs(markdown, plot)
    if options.hosts is None:
        network = {name: getattr(options, name) for name in ("strategy", "loopback", "timeout")}
        refuse(network, "is for a network; give --hosts too, or leave it out.")
        rows = _rows(options)
    else:
        virtual = {"workers": options.workers, "jobs": options.jobs}
        refuse(virtual, "is for virtual workers; leave it out with --hosts.")
        rows = _cluster_rows(options, options.hosts)
    print_rows(rows, to_stderr=output.is_stdout)
    output.write(rows)
    if markdown is not None:
        write_markdown(markdown, rows)
    if plot is not None:
        from hipress.bench.plots import draw_accuracies

        draw_accuracies(plot, {_title(group[0]): group for group in by_data(rows)})
    if options.hosts is not None:
        ui.report_problems(rows)


def _learning_rate(options: ConvergenceOptions) -> float | None:
    """Returns the learning rate, which `--rate` means too where there is no network."""
    rate = options.rate
    if options.hosts is not None or rate is None:
        return options.learning_rate
    if options.learning_rate is not None:
        raise UsageError("--rate is the learning rate too where --hosts is not given; give one.")
    try:
        value = float(rate)
    except ValueError:
        value = math.nan
    if not LEAST_RATE <= value < math.inf:
        raise UsageError(
            f"--rate {rate!r} is no learning rate of at least {LEAST_RATE:g}; the rate of a "
            "network needs --hosts."
        )
    return value


def _tasks(options: ConvergenceOptions) -> list[ConvergenceTask]:
    """Returns what is to be trained; all data sets that are there if none is named."""
    from hipress.train.convergence import TASKS, task

    names = list(TASKS) if options.data in (None, "all") else split_expressions(str(options.data))
    if options.data is None and options.folder is None:
        names.remove("fashion-mnist")
        typer.echo(
            "fashion-mnist is left out: set HIPRESS_FASHION_MNIST or --data-dir to its folder.",
            err=True,
        )
    rate = _learning_rate(options)
    tasks = [task(name) for name in dict.fromkeys(names)]
    return [replace(t, num_steps=options.steps or t.num_steps, rate=rate or t.rate) for t in tasks]


def _rows(options: ConvergenceOptions) -> list[dict[str, Any]]:
    from hipress.train.convergence import check, compare, names_of

    tasks, expressions = _tasks(options), options.expressions
    shared: dict[str, Any] = {"num_workers": options.workers or 4, "folder": options.data_dir}
    for task in tasks:  # a missing second data set must not cost the minutes of the first
        check(task, expressions, **shared)
    rows = []
    with ui.progress_bar(len(tasks) * options.seeds * len(names_of(expressions))) as begin:
        for task in tasks:
            rows += compare(
                task,
                expressions,
                num_seeds=options.seeds,
                jobs=options.jobs or 1,
                on_run=lambda label: begin(label)(1.0),
                **shared,
            )
    return rows


def _cluster_rows(options: ConvergenceOptions, hosts: int) -> list[dict[str, Any]]:
    from hipress.bench import cluster, convergence

    benchmarks = _benchmarks(options, hosts)
    rows = []
    with ui.progress_bar(len(benchmarks)) as begin:
        for one in benchmarks:
            on_part = begin(f"{one.data}, {hosts} hosts")
            found = cluster.run("hipress.bench.convergence", one, options.timeout, on_part)
            rows += convergence.rows(one, found["runs"])
    return rows


def _benchmarks(options: ConvergenceOptions, hosts: int) -> list[ConvergenceBenchmark]:
    """Returns what the ranks train, for each data set; refuses all that can be refused."""
    from hipress.bench.convergence import ConvergenceBenchmark
    from hipress.casync.graphs.strategies import check as check_strategy
    from hipress.train.convergence import check, loaded, make_model, names_of

    strategy, folder, expressions = options.strategy or "ps", options.folder, options.expressions
    tasks = _tasks(options)
    check_strategy(strategy)
    cluster = ClusterOptions(hosts=hosts, rate=options.rate, loopback=options.loopback)
    shared = cluster.one_benchmark()
    found = []
    for task in tasks:
        check(task, expressions, num_workers=hosts, folder=folder)
        data = loaded(task.data, folder)
        # As bytes, and once as float32 to find their mean.
        data_bytes = 5 * (data.train_images.nbytes + data.test_images.nbytes)
        needed_bytes = hosts * (PROCESS_BYTES + data_bytes)
        check_memory(f"{task.data} on {hosts} hosts", needed_bytes, "give fewer --hosts")
        found.append(
            ConvergenceBenchmark(
                **shared,
                num_elements=sum(p.numel() for p in make_model(task, data, 0).parameters()),
                repeats=options.seeds,
                data=task.data,
                folder=None if folder is None else str(folder.absolute()),
                num_steps=task.num_steps,
                learning_rate=task.rate,
                names=tuple(names_of(expressions)),
                strategy=strategy,
            )
        )
    return found


# --- table and page -------------------------------------------------------------------------------


def print_rows(rows: Sequence[ui.Row], *, to_stderr: bool = False) -> None:
    """Prints one table for each data set."""
    ways = [ui.number("times smaller\nout", "ratio_out", 1), ui.number("\nback", "ratio_back", 1)]
    if "hosts" in rows[0]:  # there bytes are counted on both ways together
        ways = [
            ui.number("times\nsmaller", "ratio", 1),
            ui.number("MB per step\nand rank", "wire_bytes_per_rank", 4, 1e-6),
        ]
    columns = [
        ui.text("codec"),
        *ways,
        ui.number("accuracy\n%", "accuracy", 2),
        ui.Column(header="difference\npoints", show=lambda row: _signed(row["difference"])),
        ui.Column(header="over seeds\nfrom .. to", show=_spread),
        ui.Column(header="within\n1 point", show=_verdict),
    ]
    for group in by_data(rows):
        ui.print_table(_title(group[0]), columns, group, to_stderr=to_stderr)


def markdown(rows: Sequence[ui.Row]) -> str:
    """Returns the rows as one Markdown table: a line per codec, the data sets side by side."""
    groups = by_data(rows)
    header = ["codec"]
    for group in groups:
        header += [f"{group[0]['data']}, times smaller", "accuracy", "difference", "within"]
    lines = [header, ["---"] * len(header)]
    for name in dict.fromkeys(row["codec"] for row in rows):
        cells = [f"`{name}`" if name != rows[0]["codec"] else name]
        for group in groups:
            row = next((row for row in group if row["codec"] == name), None)
            cells += ["-"] * 4 if row is None else _cells(row)
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def write_markdown(path: Path, rows: Sequence[ui.Row]) -> None:
    """Puts the table between the two marker lines of a page."""
    head, tail = _around_table(path)
    with ui.writing(path, "--markdown"):
        path.write_text(f"{head}{BEGIN}\n\n{markdown(rows)}\n{END}{tail}", "utf-8")


def check_outputs(page: Path | None, picture: Path | None) -> None:
    """Refuses a page or a picture that cannot be made, before the runs cost minutes."""
    if page is not None:
        _around_table(page)
        ui.check_writable(page, "--markdown")
    if picture is None:
        return
    from hipress.bench.plots import figure

    formats = figure(1, 1).canvas.get_supported_filetypes()
    if not picture.parent.is_dir() or picture.suffix.removeprefix(".") not in formats:
        raise UsageError(
            f"cannot draw {str(picture)!r}; give --plot a file such as curves.png in a folder "
            "that exists."
        )


def by_data(rows: Sequence[ui.Row]) -> list[list[ui.Row]]:
    names = dict.fromkeys(row["data"] for row in rows)
    return [[row for row in rows if row["data"] == name] for name in names]


def _around_table(page: Path) -> tuple[str, str]:
    try:
        text = page.read_text("utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read {str(page)!r}: {error.strerror}; give --markdown a page that exists."
        ) from error
    head, begin, rest = text.partition(BEGIN + "\n")
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in tail:
        raise UsageError(
            f"{str(page)!r} must have the line {BEGIN!r} and after it {END!r}, once each; "
            "add them where the table is to stand."
        )
    return head, tail


def _title(row: ui.Row) -> str:
    who, rate = f"{row['num_workers']} worker(s)", row["rate"]
    if "hosts" in row:
        link = "" if row["rate"] == "none" else f" at {row['rate']}"
        who, rate = f"{row['hosts']} hosts{link}", row["learning_rate"]
    return (
        f"{row['data']}: {who}, {row['num_steps']} step(s) from rate {rate:g}, "
        f"{len(row['curves'])} seed(s)"
    )


def _cells(row: ui.Row) -> list[str]:
    difference = f"{_signed(row['difference'])} ({_spread(row)})"
    ratios = (
        f"{row['ratio']:.1f}"
        if "hosts" in row
        else f"{row['ratio_out']:.1f} / {row['ratio_back']:.1f}"
    )
    return [ratios, f"{row['accuracy']:.2f}", difference, _verdict(row)]


def _signed(value: float) -> str:
    return f"{value:+.2f}"


def _spread(row: ui.Row) -> str:
    return f"{_signed(row['difference_min'])} .. {_signed(row['difference_max'])}"


def _verdict(row: ui.Row) -> str:
    return "yes" if row["within"] else "**no**"
