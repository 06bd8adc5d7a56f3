"""What kernels keep on a device has a limit, and what a CUDA graph reads again stays."""

from __future__ import annotations

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

    module = SimpleNamespace(encode_refusals=(), encode_sizes=sizes_of, encode_launches=())
    kernels = Kernels(module, "encode")  # type: ignore[arg-type]
    for numel in range(1, 20):
        sizes = kernels.sizes([Gradient(numel, (1 / numel,), 0)], CPU)
        assert sizes.rows == ((numel,),)
        assert kernels.sizes([Gradient(numel, (1 / numel,), 0)], CPU) is sizes
    assert len(kernels._kept) == LIMIT


def test_what_a_graph_has_captured_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: memory that a replay reads after it was given to others; and memory that is given
    to others while a kernel on another stream still reads it."""
    noted = []

    class Noting(torch.Tensor):
        def record_stream(self, stream: object) -> None:
            noted.append((int(self), stream))

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "side")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    cache, gpu = DeviceCache(), torch.device("cuda", 0)
    made: list[int] = []

    def look(key: int) -> None:
        cache.get(key, gpu, lambda: made.append(key) or torch.tensor(key).as_subclass(Noting))

    capturing = False
    look(0)
    capturing = True
    look(0)
    capturing = False
    for key in range(1, 9):
        look(key)
    look(0)
    assert made == list(range(9))
    assert len(cache) == LIMIT
    assert noted == [(key, "side") for key in range(1, 7)]
