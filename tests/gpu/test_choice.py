"""Which tensors the gpu backend takes, and what is said where it cannot run."""

from __future__ import annotations

import sys

import pytest
import torch

import hipress
from hipress.errors import BackendError, MissingDependencyError


def test_a_cpu_tensor_on_the_gpu_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPRESS_BACKEND", "gpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError) as error:
        hipress.codec("none").encode(torch.ones(3))
    assert str(error.value) == (
        "the gradient is on cpu and the backend is gpu; move it to a CUDA device, or set "
        "HIPRESS_BACKEND=auto."
    )


def test_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPRESS_BACKEND", "gpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that it takes the tensors there are
    monkeypatch.setitem(sys.modules, "triton", None)
    c = hipress.codec("int8(block=88)")  # a program that no other test has loaded
    x = torch.ones(3)
    with pytest.raises(MissingDependencyError) as error:
        c.encode(x, c.init(x))
    assert str(error.value) == (
        "package 'triton' is needed here and is not installed; add it with: pip install triton"
    )
