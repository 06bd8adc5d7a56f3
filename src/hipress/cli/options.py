"""The options that several commands share: how they are declared, read and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Option

from hipress.bench import machine
from hipress.errors import UsageError
from hipress.version import docs_url

if TYPE_CHECKING:
    from hipress.train.models import Model

JsonFile = Annotated[Path | None, Option(help="Write the rows to this file; - for stdout.")]
Codecs = Annotated[str, Option(help="Codec expressions, separated by commas.")]
Strategies = Annotated[
    str, Option(help="ps, ring, hierarchical or allreduce, separated by commas.")
]
OWN = "or your own as package.module:callable with --data"
Models = Annotated[str, Option(help=f"Models ({docs_url('models')}), {OWN}; separated by commas.")]
Data = Annotated[
    str | None,
    Option(
        help="Your own data, package.module:callable: returns a Dataset, or takes a batch size "
        f"and returns a batch ({docs_url('models')})."
    ),
]
Batch = Annotated[
    int | None, Option(min=1, help="Examples per rank and step; the model's own if not given.")
]
Schedules = Annotated[
    str | None,
    Option(
        help="Schedules of DistributedOptimizer to time with each codec: fifo, priority, "
        "overlap, separated by commas."
    ),
]
Repeats = Annotated[int, Option(min=1, help="Rounds; the table shows their medians.")]
StepsPerRound = Annotated[int, Option(min=1, help="Steps in each round.")]
Size = Annotated[str, Option(help="Gradient size: 100MB, 4MiB, 25e6 (bytes).")]
Rate = Annotated[
    str | None,
    Option(
        help="Rate of each host's link, each way; 1gbit if not given. 100mbit,1gbit measures "
        "with both, none as fast as this machine can."
    ),
]
Delay = Annotated[str, Option(help="Time from host to host: 5ms, 100us.")]
Loopback = Annotated[
    bool, Option("--loopback", help="Run all ranks on 127.0.0.1 and shape nothing.")
]
Device = Annotated[str, Option(help="cpu or cuda; with cuda all ranks share the first GPU.")]
Timeout = Annotated[float | None, Option(min=0, help="Seconds after which a run is given up.")]

DEFAULT_RATE = "1gbit"
MOST_HOSTS = 64
PROCESS_BYTES = 300 * 10**6
"""The memory of a rank before it has a model."""

Command = Callable[..., None]


def takes_options(command: Command) -> Command:
    """Gives a command the fields of its options objects as options of its own.

    A parameter whose type is a dataclass is replaced by one option for each field of the class;
    the command receives the object that is made from them. Field types carry a `typer.Option`.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, type] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind = parameter.annotation
        if not is_dataclass(kind):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(kind, type)
        groups[parameter.name] = kind
        field_hints = get_type_hints(kind, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=field_hints[field.name],
            )
            for field in fields(kind)
        ]

    def call(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        command(**made, **given)

    call.__name__, call.__doc__ = command.__name__, command.__doc__
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The emulated cluster that a command measures on."""

    hosts: Annotated[int, Option(min=2, max=MOST_HOSTS, help="Hosts, one rank each.")] = 4
    rate: Rate = None
    delay: Delay = "none"
    loopback: Loopback = False
    device: Device = "cpu"
    timeout: Timeout = None

    def rates(self) -> list[str]:
        """Returns the rates to measure with, each once."""
        text = self.rate or ("none" if self.loopback else DEFAULT_RATE)
        return unique(part.strip() for part in text.split(","))

    def benchmarks(self) -> list[dict[str, Any]]:
        """Returns the fields of a `ClusterBenchmark` for each rate; refuses wrong options."""
        from hipress.lab.links import parse_delay, parse_link_rate

        check_device(self.device)
        parse_delay(self.delay)
        rate_bits = {rate: parse_link_rate(rate) for rate in self.rates()}
        if self.loopback and (self.delay, *rate_bits) != ("none", "none"):
            raise UsageError("--rate and --delay need a network; leave them out with --loopback.")
        return [
            {
                "num_hosts": self.hosts,
                "rate": rate,
                "rate_bits": bits,
                "delay": self.delay,
                "is_shaped": not self.loopback,
                "device": self.device,
            }
            for rate, bits in rate_bits.items()
        ]

    def one_benchmark(self) -> dict[str, Any]:
        """Returns the fields of a `ClusterBenchmark` where there can be one rate only."""
        found = self.benchmarks()
        if len(found) > 1:
            raise UsageError(f"--rate {self.rate!r} names several rates; give one.")
        return found[0]


def timed_model(name: str, data: str | None = None, device: str = "cpu") -> Model:
    """Returns a model with data to time it with; the user's own is built and tried once."""
    import torch

    from hipress.train.models import timed, tried
    from hipress.train.user_code import is_own

    found = timed(name, data)
    if not is_own(name) and data is None:
        return found
    check_device(device)
    found = tried(found, name, torch.device(device))
    if device == "cuda":
        torch.cuda.empty_cache()  # ranks share this GPU
    return found


def check_device(device: str) -> None:
    """Refuses a device that is unknown or that is not there."""
    import torch

    if device not in ("cpu", "cuda"):
        raise UsageError(f"--device {device!r} is neither cpu nor cuda; choose one.")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device 'cuda' needs a GPU and torch sees none here; choose cpu.")


def check_memory(what: str, needed_bytes: int, advice: str, device: str = "cpu") -> None:
    """Refuses what the memory of this machine, or of its first GPU, cannot hold."""
    available = machine.available_memory_bytes()
    if device == "cuda":
        import torch

        available = torch.cuda.get_device_properties(0).total_memory
    if available is not None and needed_bytes > available:
        raise UsageError(
            f"{what} needs {needed_bytes / 1e6:,.0f} MB with all ranks on this machine and "
            f"{available / 1e6:,.0f} MB are available; {advice}."
        )


def refuse(options: object, why: str) -> None:
    """Refuses options that would do nothing: those whose value is neither None nor False.

    `options` is an options object, or the values of options by name; `why` is the rest of the
    sentence after the option's name.
    """
    given = options if isinstance(options, Mapping) else vars(options)
    for name, value in given.items():
        if value is not None and value is not False:
            said = "" if value is True else f" {value}"
            raise UsageError(f"--{name.removeprefix('--').replace('_', '-')}{said} {why}")


def split_expressions(text: str) -> list[str]:
    """Splits a list at its commas, except inside brackets.

    >>> split_expressions("none, topk(ratio=0.01,exact=true)")
    ['none', 'topk(ratio=0.01,exact=true)']
    """
    pieces, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    return [piece.strip() for piece in pieces]


def expressions(text: str) -> tuple[str, ...]:
    """Returns the entries of a list, each once."""
    return tuple(unique(split_expressions(text)))


def unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def whole_numbers(option: str, text: str, least: int, most: int) -> list[int]:
    """Returns the whole numbers of a list, each once.

    >>> whole_numbers("--hosts", "2, 4", 2, 64)
    [2, 4]
    """
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and least <= int(part) <= most):
            raise UsageError(
                f"{option} {part!r} is not a whole number from {least} to {most}; write 4, or "
                "2,4,8."
            )
    return list(dict.fromkeys(int(part) for part in parts))
