"""Every `HIPRESS_*` environment variable, in one table.

Nothing is read at import and nothing is cached: a value is parsed each time it is asked for. An
empty variable counts as unset. To add a variable, write its row, list it in `SETTINGS`, and bind
its `read` to a name below the table.
"""

import difflib
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hipress.errors import UsageError, did_you_mean

T = TypeVar("T")
Environ = Mapping[str, str]

PREFIX = "HIPRESS_"


@dataclass(frozen=True, kw_only=True)
class Setting(Generic[T]):
    """One environment variable: its name, its default, what it means, and how it is read."""

    name: str
    default: Callable[[Environ], str]
    """Returns the text that is used if the variable is unset, which may depend on others."""
    meaning: str
    """One line for the manual and for `hipress doctor`."""
    rule: str
    """What a value must be, to complete the sentence "it must be ..."."""
    parse: Callable[[str], T]
    """Turns the text into a value; raises ValueError if the text breaks the rule."""
    choices: tuple[str, ...] = ()
    """The allowed texts if there are few; the error message suggests the nearest one."""

    def text(self, environ: Environ | None = None) -> str:
        """Return the text of the variable, or its default."""
        environ = os.environ if environ is None else environ
        return environ.get(self.name, "").strip() or self.default(environ)

    def read(self, environ: Environ | None = None) -> T:
        """Return the current value, from the environment of this process if `environ` is None.

        Raises:
            UsageError: The variable is set to a text that breaks the rule.
        """
        environ = os.environ if environ is None else environ
        value = self.text(environ)
        try:
            return self.parse(value)
        except ValueError:
            raise UsageError(_refusal(self, value, self.default(environ))) from None


@dataclass(frozen=True, kw_only=True)
class UnknownVariable:
    """A `HIPRESS_*` variable that is set and unknown, and the known name closest to it."""

    name: str
    suggestion: str | None


def exchange_threads(num_local_ranks: int, environ: Environ | None = None) -> int:
    """Return how many threads encode and decode during a gradient exchange on a CPU.

    Unless HIPRESS_THREADS is set, the ranks of a host share half of its cores, and each uses at
    most 4: the other cores are for training itself, and 4 threads keep up with 10 Gbit.
    """
    environ = os.environ if environ is None else environ
    if environ.get(THREADS.name, "").strip():
        return num_threads(environ)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return max(1, min(4, cores // (2 * num_local_ranks)))


def unknown_variables(environ: Environ | None = None) -> list[UnknownVariable]:
    """Return the `HIPRESS_*` variables that are set and are not in the table, sorted by name."""
    environ = os.environ if environ is None else environ
    # Names are compared without the prefix, which would make any two of them look similar.
    known = [setting.name.removeprefix(PREFIX) for setting in SETTINGS]
    found = sorted(name.removeprefix(PREFIX) for name in environ if name.startswith(PREFIX))
    unknown = []
    for name in (name for name in found if name not in known):
        nearest = difflib.get_close_matches(name, known, n=1)
        suggestion = PREFIX + nearest[0] if nearest else None
        unknown.append(UnknownVariable(name=PREFIX + name, suggestion=suggestion))
    return unknown


def _refusal(setting: Setting[Any], value: str, default: str) -> str:
    if value == default:
        return (
            f"the default of {setting.name}, {default!r}, does not work on this system; it must be "
            f"{setting.rule}; set {setting.name} to one that does."
        )
    hint = did_you_mean(value.lower(), setting.choices)
    return (
        f"{setting.name} is {value!r}{hint}; it must be {setting.rule}; "
        f"correct it, or unset it to use the default, {default!r}."
    )


def _fixed(value: str) -> Callable[[Environ], str]:
    return lambda environ: value


def _default_cache_dir(environ: Environ) -> str:
    # The XDG specification says that a relative XDG_CACHE_HOME is ignored.
    base = environ.get("XDG_CACHE_HOME", "")
    return os.path.join(base if os.path.isabs(base) else "~/.cache", "hipress")


def _absolute_path(raw: str) -> Path:
    path = Path(os.path.expanduser(raw))
    if not path.is_absolute():
        raise ValueError(raw)
    return path


def _path_or_none(raw: str) -> Path | None:
    return None if raw == "none" else _absolute_path(raw)


def _positive(raw: str) -> int:
    value = int(raw)
    if value < 1:
        raise ValueError(raw)
    return value


def _seconds_or_none(raw: str) -> float | None:
    if raw == "none":
        return None
    value = float(raw)
    if not 1 <= value <= 10**6:
        raise ValueError(raw)
    return value


def _port_or_none(raw: str) -> int | None:
    if raw == "none":
        return None
    value = int(raw)
    if not 1 <= value <= 65535:
        raise ValueError(raw)
    return value


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(raw: str) -> str:
        if raw.lower() not in choices:
            raise ValueError(raw)
        return raw.lower()

    return parse


def _log_level(raw: str) -> int:
    level: int = getattr(logging, _one_of(_LOG_LEVELS)(raw).upper())
    return level


_BACKENDS = ("auto", "reference", "cpu", "gpu")
_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")

CACHE_DIR = Setting(
    name="HIPRESS_CACHE_DIR",
    default=_default_cache_dir,
    meaning="where compiled kernels live",
    rule="an absolute path (a leading ~ is allowed)",
    parse=_absolute_path,
)

THREADS = Setting(
    name="HIPRESS_THREADS",
    default=_fixed("1"),
    meaning="threads per codec call on a CPU; of a gradient exchange, up to 4 unless set",
    rule="a whole number of at least 1",
    parse=_positive,
)

BACKEND = Setting(
    name="HIPRESS_BACKEND",
    default=_fixed("auto"),
    meaning="which CompLL backend codecs use",
    rule=f"one of {', '.join(_BACKENDS)}",
    parse=_one_of(_BACKENDS),
    choices=_BACKENDS,
)

LOG = Setting(
    name="HIPRESS_LOG",
    default=_fixed("info"),
    meaning="log level of the logger `hipress`, unless the program has set one",
    rule=f"one of {', '.join(_LOG_LEVELS)}",
    parse=_log_level,
    choices=_LOG_LEVELS,
)

FASHION_MNIST = Setting(
    name="HIPRESS_FASHION_MNIST",
    default=_fixed("none"),
    meaning="folder of the Fashion-MNIST files, if a command is not given one",
    rule="an absolute path (a leading ~ is allowed), or none",
    parse=_path_or_none,
)

TINY_SHAKESPEARE = Setting(
    name="HIPRESS_TINY_SHAKESPEARE",
    default=_fixed("none"),
    meaning="folder of tiny-shakespeare's input.txt, if a command is not given one",
    rule="an absolute path (a leading ~ is allowed), or none",
    parse=_path_or_none,
)

TIMEOUT = Setting(
    name="HIPRESS_TIMEOUT",
    default=_fixed("none"),
    meaning="seconds that a rank may be late before the others give up; none: as many as torch",
    rule="a number of seconds from 1 to 1000000, or none",
    parse=_seconds_or_none,
)

MONITOR = Setting(
    name="HIPRESS_MONITOR",
    default=_fixed("none"),
    meaning="port at which hipress top reaches the ranks of a host; none: nothing listens",
    rule="a port from 1 to 65535, or none",
    parse=_port_or_none,
)

SETTINGS: tuple[Setting[Any], ...] = (
    CACHE_DIR,
    THREADS,
    BACKEND,
    LOG,
    FASHION_MNIST,
    TINY_SHAKESPEARE,
    TIMEOUT,
    MONITOR,
)
"""The table: every variable that HiPress reads."""

# The values by name, such as `settings.timeout_s()`; each takes an optional environment.
cache_dir = CACHE_DIR.read
num_threads = THREADS.read
backend = BACKEND.read
log_level = LOG.read
fashion_mnist = FASHION_MNIST.read
tiny_shakespeare = TINY_SHAKESPEARE.read
timeout_s = TIMEOUT.read
monitor_port = MONITOR.read
