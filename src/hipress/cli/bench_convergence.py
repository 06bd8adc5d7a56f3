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
    check_device,
    check_memory,
    refuse,
    split_expressions,
    takes_options,
)
from hipress.errors import UsageError

if TYPE_CHECKING:
    from hipress.bench.convergence import ConvergenceBenchmark
    from hipress.train.workloads import ConvergenceTask

EXAMPLE = (
    "Example: hipress bench convergence --data digits --codecs onebit,topk --plot curves.png; with "
    "a GPU: hipress bench convergence --model gpt --device cuda --codecs onebit --runs runs.jsonl"
)
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
            "where its folder is known. cnn and resnet have fashion-mnist, cnn digits too."
        ),
    ] = None
    model: Annotated[
        str,
        Option(
            help="mlp; cnn or resnet; or gpt on tiny-shakespeare, whose validation loss counts."
        ),
    ] = "mlp"
    optimizer: Annotated[
        str | None,
        Option(
            help="sgd (with momentum) or adamw, or both, separated by a comma; if not given, the "
            "model's usual one. mlp has sgd, or plain-sgd without momentum; gpt adamw only."
        ),
    ] = None
    form: Annotated[
        str | None,
        Option(
            help="recommended: SGD's momentum goes into onebit, and with adamw a codec that does "
            "not keep the sizes of elements gets the momentum of hipress.torch.AdamW. gradient: "
            "what travels is always the gradient. If not given, gradient for mlp and recommended "
            "for others. One codec may have another form: gradient:onebit."
        ),
    ] = None
    device: Annotated[str, Option(help="cpu, or cuda: all virtual workers on one GPU.")] = "cpu"
    runs: Annotated[
        Path | None,
        Option(
            help="File to which each finished run is added as a line; a run that is there is not "
            "made again."
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
        Path | None,
        Option(
            help="Folder of Fashion-MNIST, or that of input.txt for gpt; if not given, "
            "HIPRESS_FASHION_MNIST or HIPRESS_TINY_SHAKESPEARE."
        ),
    ] = None

    @property
    def folder(self) -> Path | None:
        """The folder of Fashion-MNIST, if it is known."""
        from hipress import settings

        return self.data_dir or settings.fashion_mnist()

    @property
    def form_of_codecs(self) -> str:
        """What travels with a codec that does not say so itself."""
        from hipress.train.forms import FORMS, GRADIENT, RECOMMENDED

        if self.form is not None and self.form not in FORMS:
            raise UsageError(f"--form {self.form!r} is none of {', '.join(FORMS)}; choose one.")
        return self.form or (GRADIENT if self.model == "mlp" else RECOMMENDED)

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
    the same seed and number of steps, the mean of all seeds; for --model
    gpt the validation loss in percent, where + is worse.
    Exit code 1: ranks of a run ended with different parameters.
    """
    output = ui.JsonOutput(json, "bench convergence")
    check_outputs(markdown, plot, options.model)
    check_device(options.device)
    if options.hosts is None:
        network = {name: getattr(options, name) for name in ("strategy", "loopback", "timeout")}
        refuse(network, "is for a network; give --hosts too, or leave it out.")
        rows = _rows(options)
    else:
        virtual: dict[str, Any] = {"workers": options.workers, "jobs": options.jobs}
        virtual |= {"runs": options.runs, "form": options.form, "optimizer": options.optimizer}
        virtual |= {"model": None if options.model == "mlp" else options.model}
        virtual |= {"device": None if options.device == "cpu" else options.device}
        refuse(virtual, "is for virtual workers; leave it out with --hosts.")
        rows = _cluster_rows(options, options.hosts)
    print_rows(rows, to_stderr=output.is_stdout)
    output.write(rows)
    if markdown is not None:
        write_markdown(markdown, rows, options.model)
    if plot is not None:
        from hipress.bench.plots import draw_scores

        panels = {_title(group[0]): [_labelled(row) for row in group] for group in by_task(rows)}
        draw_scores(plot, panels)
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
    from hipress.train.workloads import DATA_OF, TASKS, optimizers_of, task

    rate = _learning_rate(options)
    if options.model != "mlp":
        usual, given = optimizers_of(options.model)[0], options.optimizer
        optimizers = [usual] if given is None else [name.strip() for name in given.split(",")]
        data = options.data or DATA_OF[options.model][0]
        tasks = [task(data, options.model, name) for name in dict.fromkeys(optimizers)]
        return [_changed(one, options.steps, rate) for one in tasks]
    names = list(TASKS) if options.data in (None, "all") else split_expressions(str(options.data))
    if options.data is None and options.folder is None:
        names.remove("fashion-mnist")
        typer.echo(
            "fashion-mnist is left out: set HIPRESS_FASHION_MNIST or --data-dir to its folder.",
            err=True,
        )
    tasks = [task(name, "mlp", options.optimizer or "sgd") for name in dict.fromkeys(names)]
    return [_changed(one, options.steps, rate) for one in tasks]


def _changed(task: ConvergenceTask, steps: int | None, rate: float | None) -> ConvergenceTask:
    return replace(task, num_steps=steps or task.num_steps, rate=rate or task.rate)


def _rows(options: ConvergenceOptions) -> list[dict[str, Any]]:
    from hipress.train.convergence import RunFile, cells_of, check, compare

    tasks, expressions = _tasks(options), options.expressions
    shared: dict[str, Any] = {
        "num_workers": options.workers or 4,
        "folder": options.data_dir,
        "form": options.form_of_codecs,
    }
    if options.runs is not None:
        ui.check_writable(options.runs, "--runs")
        RunFile(options.runs)  # refuses another file
    for task in tasks:  # a missing second data set must not cost the minutes of the first
        check(task, expressions, **shared)
    rows = []
    cells = [cell for task in tasks for cell in cells_of(task, expressions, options.form_of_codecs)]
    with ui.progress_bar(options.seeds * len(cells)) as begin:
        for task in tasks:
            rows += compare(
                task,
                expressions,
                num_seeds=options.seeds,
                jobs=options.jobs or 1,
                device=options.device,
                runs_file=options.runs,
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
    from hipress.train.convergence import check, names_of
    from hipress.train.data import load
    from hipress.train.workloads import make_model

    strategy, folder, expressions = options.strategy or "ps", options.folder, options.expressions
    tasks = _tasks(options)
    check_strategy(strategy)
    cluster = ClusterOptions(hosts=hosts, rate=options.rate, loopback=options.loopback)
    shared = cluster.one_benchmark()
    found = []
    for task in tasks:
        check(task, expressions, num_workers=hosts, folder=folder)
        data = load(task.data, folder)
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
    """Prints one table for each task."""
    for group in by_task(rows):
        ui.print_table(_title(group[0]), _columns(group[0]), group, to_stderr=to_stderr)


def _columns(row: ui.Row) -> list[ui.Column]:
    ways = [ui.number("times smaller\nout", "ratio_out", 1), ui.number("\nback", "ratio_back", 1)]
    if "hosts" in row:  # there bytes are counted on both ways together
        ways = [
            ui.number("times\nsmaller", "ratio", 1),
            ui.number("MB per step\nand rank", "wire_bytes_per_rank", 4, 1e-6),
        ]
    elif row["model"] != "mlp":
        ways[:1] = [
            ui.number("MB out\nper step", "mb_per_step", 3),
            ui.number("times smaller\nout", "ratio_out", 1),
            ui.number("after\nwarm-up", "ratio_out_later", 1),
        ]
    unit, measured = _unit(row), row["metric"]
    score = ui.number(f"{measured}\n%" if unit == "points" else measured, measured, _digits(row))
    return [
        ui.Column(header="codec", show=lambda row: row["codec"] + _suffix(row), is_text=True),
        *ways,
        score,
        ui.Column(header=f"difference\n{unit}", show=lambda row: _signed(row["difference"])),
        ui.Column(header="over seeds\nfrom .. to", show=_spread),
        ui.Column(header=f"within\n1 {unit.removesuffix('s')}", show=_verdict),
    ]


def markdown(rows: Sequence[ui.Row]) -> str:
    """Returns the rows as one Markdown table: a line per codec and form, the tasks side by side."""
    groups = by_task(rows)
    header = ["codec", *(cell for group in groups for cell in _header(group[0]))]
    lines = []
    for codec, suffix in dict.fromkeys((row["codec"], _suffix(row)) for row in rows):
        cells = [f"`{codec}`{suffix}" if codec != rows[0]["codec"] else codec]
        for group in groups:
            found = [row for row in group if (row["codec"], _suffix(row)) == (codec, suffix)]
            cells += _cells(found[0]) if found else ["-"] * len(_header(group[0]))
        lines.append(cells)
    head, *body = (f"| {' | '.join(cells)} |\n" for cells in [header, *lines])
    return f"{head}|{'---|' * len(header)}\n{''.join(body)}"


def write_markdown(path: Path, rows: Sequence[ui.Row], model: str = "mlp") -> None:
    """Puts the table between the two marker lines of a page."""
    head, tail = _around_table(path, model)
    begin, end = _markers(model)
    with ui.writing(path, "--markdown"):
        path.write_text(f"{head}{begin}\n\n{markdown(rows)}\n{end}{tail}", "utf-8")


def check_outputs(page: Path | None, picture: Path | None, model: str = "mlp") -> None:
    """Refuses a page or a picture that cannot be made, before the runs cost minutes."""
    if page is not None:
        _around_table(page, model)
        ui.check_writable(page, "--markdown")
    if picture is None:
        return
    from hipress.bench.plots import figure

    formats = figure(1, 1).canvas.get_supported_filetypes()
    if picture.suffix.removeprefix(".") not in formats:
        raise UsageError(f"cannot draw {str(picture)!r}; give --plot a file such as curves.png.")
    ui.check_writable(picture, "--plot")


def by_task(rows: Sequence[ui.Row]) -> list[list[ui.Row]]:
    groups: dict[str, list[ui.Row]] = {}
    for row in rows:
        groups.setdefault(_task_name(row), []).append(row)
    return list(groups.values())


def _markers(model: str) -> tuple[str, str]:
    """Returns the two marker lines; a model other than mlp has its own: `<!-- gpt table: ...`."""
    if model == "mlp":
        return BEGIN, END
    return BEGIN.replace("table", f"{model} table"), END.replace("table", f"{model} table")


def _around_table(page: Path, model: str) -> tuple[str, str]:
    first, last = _markers(model)
    try:
        text = page.read_text("utf-8")
    except OSError as error:
        raise UsageError(
            f"cannot read {str(page)!r}: {error.strerror}; give --markdown a page that exists."
        ) from error
    head, begin, rest = text.partition(first + "\n")
    _, end, tail = rest.partition(last)
    if not begin or not end or first in rest or last in tail:
        raise UsageError(
            f"{str(page)!r} must have the line {first!r} and after it {last!r}, once each; "
            "add them where the table is to stand."
        )
    return head, tail


def _title(row: ui.Row) -> str:
    who, rate = f"{row['num_workers']} worker(s)", row["rate"]
    if "hosts" in row:
        link = "" if row["rate"] == "none" else f" at {row['rate']}"
        who, rate = f"{row['hosts']} hosts{link}", row["learning_rate"]
    return (
        f"{_task_name(row)}: {who}, {row['num_steps']} step(s) from rate {rate:g}, "
        f"{len(row['curves'])} seed(s)"
    )


def _task_name(row: ui.Row) -> str:
    if (row["model"], row["optimizer"]) == ("mlp", "sgd"):
        return str(row["data"])
    return f"{row['model']} on {row['data']}, {row['optimizer']}"


def _header(row: ui.Row) -> list[str]:
    if row["model"] == "mlp":
        return [f"{_task_name(row)}, times smaller", "accuracy", "difference", "within"]
    name = f"{row['model']}, {row['optimizer']}: MB per step"
    difference = f"difference, {_unit(row)}"
    return [name, "times smaller", "after warm-up", row["metric"], difference, "within"]


def _cells(row: ui.Row) -> list[str]:
    difference = f"{_signed(row['difference'])} ({_spread(row)})"
    ends = [f"{row[row['metric']]:.{_digits(row)}f}", difference, _verdict(row)]
    if "hosts" in row:
        return [f"{row['ratio']:.1f}", *ends]
    if row["model"] == "mlp":
        return [f"{row['ratio_out']:.1f} / {row['ratio_back']:.1f}", *ends]
    later = row["ratio_out_later"]
    ratios = [f"{row['ratio_out']:.1f}", "-" if later is None else f"{later:.1f}"]
    return [f"{row['mb_per_step']:.3f}", *ratios, *ends]


def _suffix(row: ui.Row) -> str:
    """Returns what tells a row from that of the recommended form."""
    is_other = row["form"] == "gradient" and row["sent"].endswith("of gradients")
    return ", gradients" if is_other and row["model"] != "mlp" else ""


def _labelled(row: ui.Row) -> ui.Row:
    return {**row, "codec": row["codec"] + _suffix(row)}


def _unit(row: ui.Row) -> str:
    return "%" if row["metric"] == "loss" else "points"


def _digits(row: ui.Row) -> int:
    return 4 if row["metric"] == "loss" else 2


def _signed(value: float) -> str:
    return f"{value:+.2f}"


def _spread(row: ui.Row) -> str:
    return f"{_signed(row['difference_min'])} .. {_signed(row['difference_max'])}"


def _verdict(row: ui.Row) -> str:
    return "yes" if row["within"] else "**no**"
