"""What kernels keep on a device has a limit, and what a CUDA graph reads again stays."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from hipress.compll.backends.gpu import runtime
from hipress.compll.backends.gpu.runtime import DeviceCache, Gradient, Kernels

CPU = torch.device("cpu")
LIMIT = 3


@pytest.fixture(autouse=True)
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "MAX_KEPT", LIMIT)


def test_the_least_recently_used_are_dropped() -> None:
    """Catches: a cache that grows for good, or that drops what every step needs."""
    cache, made = DeviceCache(), []

    def look(key: int) -> torch.Tensor:
        def make() -> torch.Tensor:
            made.append(key)
            return torch.tensor(key)

        found: torch.Tensor = cache.get(key, CPU, make)
        return found

    for key in range(10):
        assert look(0) == 0
        assert look(key) == key
        assert len(cache) <= LIMIT
    assert made == list(range(10))


def test_sizes_of_many_factors_are_dropped() -> None:
    """Catches: device memory for every number of elements and every factor that ever came."""

    def sizes_of(numel: int, *rest: object) -> tuple[object, ...]:
        return (numel,), (1.0,), 0, 0, (1,), (numel,)

    module = SimpleNamespace(
        encode_refusals=(),
        encode_clears=False,
        encode_sizes=sizes_of,
        encode_launches=((None, 4, 0),),
    )
    kernels = Kernels(module, "encode")  # type: ignore[arg-type]
    for numel in range(1, 20):
        made = [
            kernels.sizes((n, 1 / n), CPU, lambda n=n: ([Gradient(n, (1 / n,), 0)], [bytes(16)]))
            for n in (numel, numel)
        ]
        assert made[0].rows == ((numel,),)
        assert made[0] is made[1]
    assert len(kernels._kept) == LIMIT


class Device:
    """What a cache asks of torch about a GPU, noted in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notes: list[object] = []
        self.stream = "main"
        self.is_capturing = False
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(self, self.stream))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(runtime, "current_stream_id", lambda device: hash(self.stream))

    def value(self, key: int) -> SimpleNamespace:
        self.notes.append(f"made {key}")
        memory = SimpleNamespace(record_stream=lambda stream: self.notes.append((key, stream.name)))
        return SimpleNamespace(key=key, memory=memory)


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def record_event(self) -> str:
        return f"written on {self.name}"

    def wait_event(self, event: str) -> None:
        self.device.notes.append(f"{self.name} waits until {event}")


def looks(device: Device) -> Callable[[int], None]:
    cache, gpu = DeviceCache(), torch.device("cuda", 0)

    def look(key: int) -> None:
        assert cache.get(key, gpu, lambda: device.value(key)).key == key
        assert len(cache) <= LIMIT

    return look


def test_what_a_graph_has_captured_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: memory that a replay reads after it was given to others; and memory that is given
    to others while a kernel on another stream still reads it."""
    device = Device(monkeypatch)
    look = looks(device)
    look(0)
    device.is_capturing = True
    look(0)
    device.is_capturing = False
    for key in range(1, 9):
        look(key)
    look(0)
    dropped = [note for note in device.notes if isinstance(note, tuple)]
    assert [note for note in device.notes if str(note).startswith("made")] == [
        f"made {key}" for key in range(9)
    ]
    assert dropped == [(key, "main") for key in range(1, 7)]


def test_a_stream_waits_once_for_what_another_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: kernels that read numbers which are still on their way to the device."""
    device = Device(monkeypatch)
    look = looks(device)
    for stream in ("main", "side", "side", "main"):
        device.stream = stream
        look(0)
    waits = [f"{stream} waits until written on main" for stream in ("main", "side")]
    assert device.notes == ["made 0", *waits]


def test_a_first_call_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a copy that each replay would do again, from memory that is gone."""
    device = Device(monkeypatch)
    device.is_capturing = True
    with pytest.raises(RuntimeError, match="make the same call once before the capture"):
        looks(device)(0)
    assert not device.notes
