"""Kernels are started as Triton would start them, without its work in each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hipress
from hipress.codecs import tensors
from hipress.compll.backends.gpu import runtime
from tests.codecs.cases import gaussian
from tests.gpu.contract import on
from tests.gpu.fake_driver import FakeDriver, fake_driver
from tests.gpu.test_compiled import needs_compiler


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tensors, "gpu_takes", lambda x: True)
    with fake_driver() as made:
        yield made


def started(driver: FakeDriver, job: Callable[[], None]) -> list[tuple[Any, ...]]:
    """What a job starts: name, programs and arguments, but for scratch memory of its own."""
    driver.launches.clear()
    job()
    return [(*launch[:4], *launch[6:]) for launch in driver.launches]


@needs_compiler
@pytest.mark.parametrize("expr", ["onebit", "topk", "terngrad"])
def test_a_start_by_address_is_that_of_triton(
    expr: str, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: other arguments, programs or kernels than those that Triton would take."""
    from triton.runtime.jit import JITFunction

    asked, run = [], JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda *a, **k: asked.append(1) or run(*a, **k))
    monkeypatch.setattr(runtime, "MIN_SPLIT", 1)
    c, n = on(hipress.codec(expr), "gpu"), 5003
    x, out = gaussian(n), gaussian(n)
    state = c.init(x)
    frame = torch.zeros(c.wire_bytes(n), dtype=torch.uint8)
    bulk = c.bulk([300, 70])
    flat = gaussian(bulk.numel)
    held, many = bulk.init(flat), torch.zeros(bulk.wire_bytes, dtype=torch.uint8)

    def job() -> None:
        c.encode(x, state, out=frame)
        c.decode(frame, out=out, add=True, alpha=0.5)
        bulk.encode(flat, held, out=many)

    by_triton = started(driver, job)
    assert len(asked) == len(by_triton) > 5
    assert started(driver, job) == by_triton and len(asked) == len(by_triton)
    monkeypatch.setattr(runtime, "no_hooks", lambda triton: False)  # a profiler listens
    assert started(driver, job) == by_triton and len(asked) == 2 * len(by_triton)


@needs_compiler
def test_memory_that_is_not_aligned_is_left_to_triton(driver: FakeDriver) -> None:
    """Catches: a kernel with wide loads on memory that does not take them."""
    c, n = on(hipress.codec("onebit"), "gpu"), 5003
    x, offset = gaussian(n), gaussian(n + 1)[1:]
    state, handles = c.init(x), []
    for gradient in (x, x, offset, x):
        driver.functions.clear()
        c.encode(gradient, state)
        handles.append(list(driver.functions))
    assert handles[0] == handles[1] == handles[3]
    assert handles[2] != handles[0]
