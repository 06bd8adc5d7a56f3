"""A driver for Triton that compiles for an H200 and notes launches, where there is no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class FakeDriver:
    """What Triton asks of a driver; tensors are on the CPU."""

    launches: list[tuple[Any, ...]] = field(default_factory=list)
    """Name, programs and arguments (addresses of tensors) of each kernel that was started."""
    names: list[str] = field(default_factory=list)
    """The loaded kernels; its handle is the place of a kernel here."""
    functions: list[int] = field(default_factory=list)
    """The handle of each of them."""
    notes: bool = True

    def __post_init__(self) -> None:
        self.utils = SimpleNamespace(
            load_binary=self.load_binary,
            get_device_properties=lambda device: {"max_shared_mem": 232_448},
        )

    def load_binary(self, name: str, *rest: Any) -> tuple[int, int, int, int, int]:
        self.names.append(name)
        return 1, len(self.names) - 1, 32, 0, 1024

    def get_current_device(self) -> int:
        return 99  # Triton keeps kernels by device: what is loaded here is for no real one

    def get_current_stream(self, device: int) -> int:
        return 7

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Returns what stands for a `CudaLauncher`."""

        def run(x: int, y: int, z: int, stream: int, function: int, *args: Any) -> None:
            if self.notes:
                given = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args[4:]]
                assert (y, z, stream) == (1, 1, 7)
                self.launches.append((self.names[function], x, *given))
                self.functions.append(function)

        return run


@contextmanager
def fake_driver() -> Iterator[FakeDriver]:
    """Makes Triton compile for an H200 and start nothing, for tensors on the CPU."""
    from triton.runtime import driver

    made, before = FakeDriver(), driver._active
    driver.set_active(made)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        driver._active = before
