"""`hipress bench sync`, `train` and `prediction`: measurements on an emulated cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from hipress.cli import ui
from hipress.cli.options import (
    MOST_HOSTS,
    PROCESS_BYTES,
    Batch,
    ClusterOptions,
    Codecs,
    Data,
    Delay,
    Device,
    JsonFile,
    Models,
    Repeats,
    Schedules,
    Size,
    StepsPerRound,
    Strategies,
    check_memory,
    expressions,
    takes_options,
    timed_model,
    whole_numbers,
)
from hipress.errors import UsageError
from hipress.units import parse_size

if TYPE_CHECKING:
    from hipress.bench.sync import SyncBenchmark
    from hipress.bench.train import TrainBenchmark

SYNC_EXAMPLE = (
    "Example: hipress bench sync --hosts 4 --rate 1gbit --size 100MB "
    "--codec 'onebit,dgc(ratio=0.001)' --strategy ps,ring --json f.json"
)
TRAIN_EXAMPLE = (
    "Example: hipress bench train --hosts 4 --rate 1gbit --model vgg,gpt "
    "--codec 'onebit,dgc(ratio=0.001)' --strategy ps --json f.json"
)
PREDICTION_EXAMPLE = (
    "Example: hipress bench prediction --hosts 2,4 --rate 100mbit,1gbit --model vgg "
    "--codec onebit,int8 --json f.json"
)


def check_codecs(codecs: tuple[str, ...], strategies: tuple[str, ...]) -> None:
    """Refuses names that are no codec or no strategy."""
    import hipress
    from hipress.casync.graphs.strategies import check

    for expression in codecs:
        hipress.codec(expression)
    for strategy in strategies:
        check(strategy)


# --- sync -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SyncOptions:
    """What `bench sync` measures on the cluster."""

    size: Size = "100MB"
    tensors: Annotated[
        int, Option(min=1, help="Tensors to cut it into, from 1 KB to a fifth of the whole.")
    ] = 1
    codec: Codecs = "onebit,dgc(ratio=0.001),int8,none"
    strategy: Strategies = "ps"
    repeats: Repeats = 5
    pipelining: Annotated[
        bool, Option("--pipelining/--no-pipelining", help="Cut gradients into partitions.")
    ] = True
    bulk: Annotated[
        bool, Option("--bulk/--no-bulk", help="Put small gradients into one frame.")
    ] = True
    compress_on_cpu: Annotated[
        bool, Option("--compress-on-cpu", help="Run codecs on the host, with --device cuda.")
    ] = False

    def benchmarks(self, cluster: ClusterOptions) -> list[SyncBenchmark]:
        """Returns what to measure, one for each rate; refuses all that can be refused."""
        import hipress
        from hipress.bench.sync import SyncBenchmark, tensor_numels

        codecs, strategies = expressions(self.codec), expressions(self.strategy)
        size_bytes = parse_size(self.size)
        # Gradient, tensors, baselines, and about one more for each plan.
        check_memory(
            f"size {self.size!r}",
            cluster.hosts * size_bytes * (4 + len(codecs) * len(strategies)),
            "give a smaller --size, or fewer --hosts, codecs or strategies",
        )
        numels = tensor_numels(size_bytes, self.tensors)
        check_codecs(codecs, strategies)
        for expression in codecs:
            hipress.codec(expression).wire_bytes(max(numels))
        return [
            SyncBenchmark(
                **shared,
                num_elements=sum(numels),
                numels=numels,
                codecs=codecs,
                strategies=strategies,
                repeats=self.repeats,
                pipelined=self.pipelining,
                bulk=self.bulk,
                compress_on_cpu=self.compress_on_cpu,
            )
            for shared in cluster.benchmarks()
        ]


@takes_options
def sync(
    cluster: ClusterOptions,
    options: SyncOptions,
    overhead: Annotated[
        bool, Option("--overhead", help="Measure what the executor costs per task instead.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """Time one sync with each codec and strategy, beside gloo's all-reduce.

    Each host is a rank on an emulated cluster (see hipress lab). A sync
    takes as long as its slowest rank. "x gloo" is the time of gloo's
    all-reduce of the same float32 in the same run, divided by ours;
    "x bf16" is the same for an all-reduce in bfloat16, with the casts to
    and fro. "ideal" is what the bytes on the wire take at the line's rate.
    Exit code 1: a result is wrong, or the bytes do not add up.
    """
    from hipress.bench import sync
    from hipress.bench.cluster import run

    output = ui.JsonOutput(json, "bench sync --overhead" if overhead else "bench sync")
    if overhead:
        names = expressions(options.codec)
        check_codecs(names, ())
        rows = [sync.overhead_row(name, repeats=3 * options.repeats) for name in names]
        title = "The executor, without a network"
        ui.print_table(title, OVERHEAD_COLUMNS, rows, to_stderr=output.is_stdout)
        output.write(rows)
        return
    benchmarks = options.benchmarks(cluster)
    rows = []
    with ui.progress_bar(len(benchmarks)) as begin:
        for one in benchmarks:
            rows += sync.rows(one, run("hipress.bench.sync", one, cluster.timeout, begin(one.rate)))
    first = rows[0]
    title = (
        f"{first['size_bytes'] / 1e6:g} MB of float32 in {first['tensors']} tensor(s), "
        f"{first['hosts']} hosts, {first['device']}, medians of {first['repeats']}"
    )
    ui.print_table(title, SYNC_COLUMNS, rows, to_stderr=output.is_stdout)
    output.write(rows)
    ui.report_problems(rows)


SYNC_COLUMNS = [
    ui.text("codec"),
    ui.text("strategy"),
    ui.number("rate"),
    ui.number("ms", "seconds_median", 1, 1e3),
    ui.number("ideal\nms", "ideal_seconds", 1, 1e3),
    ui.number("codec\nms", "codec_seconds", 1, 1e3),
    ui.number("MB\nper rank", "wire_bytes_per_rank", 3, 1e-6),
    ui.number("gloo\nms", "baseline_seconds_median", 1, 1e3),
    ui.number("x\ngloo", "speedup", 2),
    ui.number("x\nbf16", "speedup_over_bf16", 2),
]
OVERHEAD_COLUMNS = [
    ui.text("codec"),
    ui.number("tasks"),
    ui.number("sync\nms", "seconds_median", 2, 1e3),
    ui.number("codec\nms", "codec_seconds_median", 2, 1e3),
    ui.number("us per\ntask", "overhead_seconds_per_task", 1, 1e6),
    ui.number("ms per\n500 tasks", "overhead_seconds_500_tasks", 2, 1e3),
]


# --- train ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TrainCluster(ClusterOptions):
    """A cluster that may have one host."""

    hosts: Annotated[int, Option(min=1, max=MOST_HOSTS, help="Hosts, one rank each.")] = 4


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `bench train` measures on the cluster."""

    model: Models = "vgg,gpt"
    data: Data = None
    batch: Batch = None
    codec: Annotated[
        str, Option(help="Codec expressions, separated by commas; auto decides among the others.")
    ] = "onebit,dgc(ratio=0.001)"
    strategy: Strategies = "ps"
    hooks: Annotated[
        str, Option(help="Torch's own hooks to compare with; ddp is always among them.")
    ] = "ddp,fp16,powersgd-1,powersgd-2,powersgd-4"
    bucket_mb: Annotated[
        int | None,
        Option(min=1, help="Bucket of DDP in MiB; if not given, its default: 25, the first 1."),
    ] = None
    optimizer: Annotated[
        str,
        Option(help="sgd or adamw; with adamw, codecs such as onebit are given its momentum."),
    ] = "sgd"
    schedule: Schedules = None
    slice: Annotated[str | None, Option(help="Bytes of a message of a schedule.")] = None
    credit: Annotated[str | None, Option(help="Bytes under way at once, of a schedule.")] = None
    emulate: Annotated[
        bool, Option("--emulate", help="Replace the model's work by pauses, on few cores.")
    ] = False
    repeats: Repeats = 5
    steps: StepsPerRound = 2

    def benchmarks(self, cluster: ClusterOptions) -> list[TrainBenchmark]:
        """Returns what to measure, one for each model and rate; refuses all that can be refused."""
        from hipress.bench.train import AUTO, BASELINE, OPTIMIZERS, TrainBenchmark, check_hook
        from hipress.casync.graphs import schedules

        orders = expressions(self.schedule) if self.schedule else ()
        for order in orders:
            schedules.check(order)
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(
                f"--optimizer {self.optimizer!r} is none of {', '.join(OPTIMIZERS)}; choose one."
            )

        names = expressions(self.model)
        lines = {name: timed_model(name, self.data, cluster.device) for name in names}
        hooks = tuple(dict.fromkeys([BASELINE, *expressions(self.hooks)]))
        for hook in hooks:
            check_hook(hook)
        codecs, strategies = expressions(self.codec), expressions(self.strategy)
        check_codecs(tuple(name for name in codecs if name != AUTO), strategies)
        found = [
            TrainBenchmark(
                **shared,
                num_elements=line.num_parameters,
                model=name,
                data=self.data,
                batch=self.batch or line.batch,
                steps=self.steps,
                hooks=hooks,
                codecs=codecs,
                strategies=strategies,
                bucket_mb=self.bucket_mb,
                optimizer=self.optimizer,
                schedules=orders,
                slice_bytes=None if self.slice is None else parse_size(self.slice),
                credit_bytes=None if self.credit is None else parse_size(self.credit),
                emulated=self.emulate,
                repeats=self.repeats,
            )
            for name, line in lines.items()
            for shared in cluster.benchmarks()
        ]
        for one in found:
            check_memory(
                f"model {one.model!r}",
                cluster.hosts * (PROCESS_BYTES + one.num_copies * one.size_bytes),
                "give fewer --hosts, --hooks, codecs or strategies",
                cluster.device,
            )
        return found


@takes_options
def train(cluster: TrainCluster, options: TrainOptions, json: JsonFile = None) -> None:
    """Time a training step with each codec and strategy, beside DDP and its hooks.

    Each host is a rank on an emulated cluster (see hipress lab). A step
    takes as long as its slowest rank. "compute" is the step without any
    exchange: what lies between it and ddp is the communication that ddp
    does not hide, and "removed" is the part of that which is gone: 0 % is
    ddp, 100 % the bound. "x ddp" is ddp's time divided by the row's.
    "extra MB" is memory beyond ddp's. PowerSGD gets all gradients in one
    bucket, because with several its all-reduces meet on gloo. "auto" is
    timed when it has decided; the note is its reason.
    Exit code 1: ranks hold different parameters, a loss is not finite, or
    the bytes do not add up.
    """
    from hipress.bench.cluster import run
    from hipress.bench.train import rows

    output = ui.JsonOutput(json, "bench train")
    benchmarks = options.benchmarks(cluster)
    found = []
    with ui.progress_bar(len(benchmarks)) as begin:
        for one in benchmarks:
            on_part = begin(f"{one.model}, {one.rate}")
            found += rows(one, run("hipress.bench.train", one, cluster.timeout, on_part))
    first = found[0]
    title = (
        f"Training steps, {first['hosts']} hosts, {first['device']}, medians of "
        f"{first['repeats']} rounds of {first['steps']} step(s)"
    )
    ui.print_table(title, TRAIN_COLUMNS, found, to_stderr=output.is_stdout)
    output.write(found)
    ui.report_problems(found)


def _megabytes(row: ui.Row) -> str | None:
    """Shows bytes on the wire; without an interface to count them, what the engine counted."""
    field = "interface_bytes_per_rank"
    if row[field] is None:
        field = "wire_bytes_per_rank"
    return ui.fixed(field, 3, scale=1e-6)(row)


TRAIN_COLUMNS = [
    ui.text("model"),
    ui.Column(header="variant", show=lambda row: row["codec"] or row["variant"], is_text=True),
    ui.text("strategy"),
    ui.text("schedule"),
    ui.number("rate"),
    ui.number("ms per\nstep", "seconds_median", 1, 1e3),
    ui.number("x\nddp", "speedup", 2),
    ui.number("removed\n%", "exposed_removed", 1, 100),
    ui.Column(header="MB\nper rank", show=_megabytes),
    ui.number("extra\nMB", "extra_memory_bytes", 1, 1e-6),
    ui.text("note"),
]


# --- prediction -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PredictionCluster:
    """Clusters of several sizes, always with links."""

    hosts: Annotated[str, Option(help="Hosts, one rank each, separated by commas.")] = "2,4"
    rate: Annotated[str, Option(help="Rates of each host's link, separated by commas.")] = (
        "100mbit,300mbit,1gbit"
    )
    delay: Delay = "none"
    device: Device = "cpu"
    timeout: Annotated[
        float | None, Option(min=1, help="Seconds after which a run is given up.")
    ] = None

    def clusters(self) -> list[ClusterOptions]:
        """Returns a cluster for each rate and number of hosts."""
        numbers = whole_numbers("--hosts", self.hosts, 2, MOST_HOSTS)
        common: dict[str, Any] = {
            "delay": self.delay,
            "device": self.device,
            "timeout": self.timeout,
        }
        return [
            ClusterOptions(hosts=number, rate=rate, **common)
            for rate in ClusterOptions(rate=self.rate).rates()
            for number in numbers
        ]


@takes_options
def prediction(
    cluster: PredictionCluster,
    model: Models = "vgg,gpt",
    data: Data = None,
    codec: Codecs = "onebit,int8,dgc(ratio=0.001)",
    strategy: Strategies = "ps,ring",
    schedule: Schedules = None,
    batch: Batch = None,
    repeats: Repeats = 5,
    steps: StepsPerRound = 2,
    json: JsonFile = None,
) -> None:
    """Measure how far simulated steps are from measured ones.

    For each number of hosts, rate and model the cluster is profiled, as
    hipress profile does, and then, in a run of its own, training steps are
    timed as hipress bench train does. The simulator sees the profile only.
    Exit code 1: the median error is above 12 %, the largest above 30 %, or
    a measured run has a problem.
    """
    from hipress.bench.cluster import run
    from hipress.bench.prediction import rows
    from hipress.bench.train import BASELINE
    from hipress.bench.train import rows as train_rows
    from hipress.cli import profile

    output = ui.JsonOutput(json, "bench prediction")
    timed = TrainOptions(
        data=data,
        codec=codec,
        strategy=strategy,
        schedule=schedule,
        batch=batch,
        hooks=BASELINE,
        repeats=repeats,
        steps=steps,
    )
    pairs = [  # all that can be refused is refused before the first run
        (
            profile.benchmark(one, model=name, data=data, batch=batch, codecs=f"none,{codec}"),
            replace(timed, model=name).benchmarks(one)[0],
        )
        for name in expressions(model)
        for one in cluster.clusters()
    ]
    found: list[dict[str, Any]] = []
    with ui.progress_bar(len(pairs)) as begin:
        for profiled, benchmark in pairs:
            where = f"{benchmark.num_hosts} hosts, {benchmark.rate}"
            on_part = begin(f"{benchmark.model}, {where}")
            measured = profile.run(profiled, cluster.timeout, _part(on_part, 0.0, 0.25))
            on_rest = _part(on_part, 0.25, 1.0)
            result = run("hipress.bench.train", benchmark, cluster.timeout, on_rest)
            found += rows(measured, train_rows(benchmark, result), BASELINE)
    columns = [
        ui.text("model"),
        ui.number("hosts"),
        ui.number("rate"),
        ui.Column(header="codec", show=lambda row: row["codec"] or "ddp", is_text=True),
        ui.text("strategy"),
        *([ui.text("schedule")] if schedule else []),
        ui.number("measured\nms", "measured_seconds", 1, 1e3),
        ui.number("simulated\nms", "simulated_seconds", 1, 1e3),
        ui.number("error\n%", "error", 1, 100),
    ]
    title = "Simulated and measured training steps"
    ui.print_table(title, columns, found, to_stderr=output.is_stdout)
    output.write(found)
    ui.report_problems(found)
    _check_errors(found)


def _part(on_part: Callable[[float], None], start: float, stop: float) -> Callable[[float], None]:
    return lambda done: on_part(start + done * (stop - start))


def _check_errors(found: list[dict[str, Any]]) -> None:
    from hipress.bench.prediction import MEDIAN_BAR, WORST_BAR, summary

    middle, worst = summary(found)
    typer.echo(
        f"{len(found)} settings: median error {middle:.1%} (limit {MEDIAN_BAR:.0%}), worst "
        f"{worst:.1%} (limit {WORST_BAR:.0%}).",
        err=True,
    )
    if middle > MEDIAN_BAR or worst > WORST_BAR:
        raise typer.Exit(1)
