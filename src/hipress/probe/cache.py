"""The costs of codecs that were measured on this machine before, in a file of the cache folder."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hipress import settings
from hipress.codecs.base import Codec
from hipress.codecs.table import codec as named_codec
from hipress.compll.build import make_folder
from hipress.version import __version__

Points = dict[str, list[tuple[int, float]]]
"""For each verb: numbers of elements, and the seconds of one call."""
VERBS = ("encode", "decode", "add", "back")
ERROR = "error"
"""A key beside the verbs: elements of a message of normal noise, and its error."""


def last_phase(name: str) -> Codec:
    """Returns the codec that most of training uses, for one whose rate changes over time.

    Example:
        >>> last_phase("dgc(ratio=0.001, warmup=400)").wire_bytes(10**6)
        8096
    """
    return named_codec(name).phases[-1][1]


class Cache:
    """What was measured on this machine before.

    A file that is damaged, or cannot be written, counts as empty: everything is measured again.

    Args:
        device: The device of the gradients.
        num_ranks: The number of workers whose mean is sent back.
        num_machine_ranks: Ranks that measure at once on a machine.
    """

    def __init__(self, device: torch.device, num_ranks: int, num_machine_ranks: int) -> None:
        self.path = settings.cache_dir() / "codecs.json"
        self._machine = "|".join(
            str(fact)
            for fact in (
                __version__, torch.__version__, processor(device), device.type,
                f"{num_ranks} ranks", f"{num_machine_ranks} here",
                f"{settings.num_threads()} threads", settings.backend(),
            )
        )  # fmt: skip

    def load(self, names: Sequence[str]) -> dict[str, Points]:
        """Returns what is known about some codecs."""
        held = self._read()
        found: dict[str, Points] = {}
        for name in names:
            points = held.get(self._key(name))
            if isinstance(points, dict) and _is_valid(points):
                found[name] = points
        return found

    def save(self, measured: Mapping[str, Points]) -> None:
        """Writes measurements, replacing those of the same codecs."""
        held = self._read()
        held.update({self._key(name): points for name, points in measured.items()})
        try:
            make_folder(self.path.parent)
            fresh = Path(f"{self.path}.{os.getpid()}")
            fresh.write_text(json.dumps(held))
            fresh.replace(self.path)  # atomic: another job may read it
        except OSError:
            pass  # it is measured again next time

    def _key(self, name: str) -> str:
        codec = last_phase(name)
        return f"{self._machine}|{codec.name}|{codec.codec_hash:016x}"

    def _read(self) -> dict[str, Any]:
        try:
            held = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return held if isinstance(held, dict) else {}


def _is_valid(points: Mapping[str, Any]) -> bool:
    try:
        for verb in (*VERBS, ERROR):
            for numel, seconds in points[verb]:
                if not (int(numel) > 0 and 0 <= float(seconds) < math.inf):
                    return False
            if len(points[verb]) < (1 if verb == ERROR else 2):
                return False
    except (KeyError, TypeError, ValueError):
        return False
    return True


def processor(device: torch.device) -> str:
    """Returns the name of the GPU, or of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
