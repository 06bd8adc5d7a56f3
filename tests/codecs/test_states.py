"""What `encode` and `decode` refuse: states of another codec, tensors elsewhere, wrong kinds.

The device `meta` stands for another device: it is on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hipress.codecs import codec
from hipress.errors import FrameError, HipressError, UsageError
from tests.codecs.generic import Feedback, Momentum

X = torch.ones(10)


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HIPRESS_BACKEND", "reference")
    monkeypatch.setenv("HIPRESS_THREADS", "1")


def refused(kind: type[HipressError], call: Callable[[], Any]) -> str:
    with pytest.raises(kind) as error:
        call()
    return str(error.value)


# --- states --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expr, other, key",
    [
        ("onebit(ef=false)", "onebit", "residual"),
        ("none", "ef(none)", "residual"),
        ("onebit", "momentum(onebit)", "momentum"),
        ("terngrad", "ef(terngrad)", "residual"),
        ("bf16", "dgc", "residual"),
    ],
)
def test_a_state_that_would_be_lost(expr: str, other: str, key: str) -> None:
    c = codec(expr)
    assert refused(UsageError, lambda: c.encode(X, codec(other).init(X))) == (
        f"the state has {key!r}, which {c.name} does not keep, so it would be lost: it is the "
        f"state of another codec; make it with {c.name}.init(x)."
    )


@pytest.mark.parametrize(
    "expr, other, key",
    [
        ("onebit", "none", "residual"),
        ("momentum(onebit)", "onebit", "momentum"),
        ("dgc", "topk", "velocity"),
        ("topk", "onebit", "seed"),
    ],
)
def test_a_state_that_lacks_something(expr: str, other: str, key: str) -> None:
    c = codec(expr)
    assert refused(UsageError, lambda: c.encode(X, codec(other).init(X))) == (
        f"the state has no {key!r}; make it with {c.name}.init(x)."
    )


def test_what_a_caller_keeps_in_a_state_is_left_alone() -> None:
    for expr in ("none", "onebit", "momentum(topk)"):
        c = codec(expr)
        state = {**c.init(X), "name": torch.zeros(3), "lr_ratio": torch.tensor(1.0)}
        c.encode(X, state)
        assert torch.equal(state["name"], torch.zeros(3))


@pytest.mark.parametrize("state", [[], torch.zeros(10), "residual"])
def test_a_state_that_is_no_dict(state: Any) -> None:
    assert refused(UsageError, lambda: codec("onebit").encode(X, state)) == (
        f"the state is a {type(state).__name__}, not a dict; make it with onebit.init(x)."
    )


ELSEWHERE = {
    "another device": (
        torch.zeros(10, device="meta"),
        "has 10 elements of torch.float32 on meta; the gradient needs 10 of torch.float32 on cpu",
    ),
    "another dtype": (
        torch.zeros(10, dtype=torch.float16),
        "has 10 elements of torch.float16; the gradient needs 10 of torch.float32",
    ),
    "another length": (
        torch.zeros(11),
        "has 11 elements of torch.float32; the gradient needs 10 of torch.float32",
    ),
    "gaps": (
        torch.zeros(20)[::2],
        "has 10 elements of torch.float32 with gaps; the gradient needs 10 of torch.float32 "
        "without gaps",
    ),
    "NumPy": (
        np.zeros(10, np.float32),
        "is a ndarray, not a tensor; the gradient needs 10 of torch.float32",
    ),
}


@pytest.mark.parametrize("what", ELSEWHERE)
@pytest.mark.parametrize("wrap", ["fused", "generic"])
def test_a_state_that_does_not_fit(wrap: str, what: str) -> None:
    held, found = ELSEWHERE[what]
    plain = codec("bf16")
    cases = {
        "residual": codec("ef(bf16)") if wrap == "fused" else Feedback(plain),
        "momentum": codec("momentum(bf16)") if wrap == "fused" else Momentum(plain),
    }
    for key, c in cases.items():
        state: Any = {key: held}
        message = refused(UsageError, lambda c=c, state=state: c.encode(X, state))  # type: ignore[misc]
        assert message == f"state {key!r} {found}: make a new state with init(x)."


@pytest.mark.parametrize("key", ["seed", "stream", "step"])
def test_a_step_that_is_no_number(key: str) -> None:
    c = codec("terngrad")
    state = {**c.init(X), key: torch.zeros(2)}
    assert refused(UsageError, lambda: c.encode(X, state)) == (
        f"state {key!r} is tensor([0., 0.]); it must be one whole number, as init(x) makes it."
    )


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_ratio_of_learning_rates_scales_the_residual(is_fused: bool) -> None:
    """Below tau nothing is sent, so all of it waits."""
    plain = codec("tbq(tau=100.0, ef=false)")
    c = codec("tbq(tau=100.0)") if is_fused else Feedback(plain)
    state = c.init(X)
    c.encode(X, state)
    state["lr_ratio"] = torch.tensor(0.25)
    c.encode(X, state)
    assert torch.equal(state["residual"], X.float() * 0.25 + X.float())


def test_a_ratio_that_is_no_number() -> None:
    c = codec("onebit")
    state = {**c.init(X), "lr_ratio": torch.zeros(2)}
    assert refused(UsageError, lambda: c.encode(X, state)) == (
        "state 'lr_ratio' is tensor([0., 0.]); it must be one number, e.g. "
        "torch.tensor(lr_before / lr_now)."
    )


# --- payloads and where to write -----------------------------------------------------------------


def test_tensors_on_different_devices() -> None:
    c = codec("bf16")
    payload, size = c.encode(X), c.wire_bytes(10)
    away = torch.device("meta")
    for call, what in (
        (lambda: c.decode(payload, out=torch.zeros(10, device=away)), "out"),
        (lambda: c.decode(payload.to(away)), "the payload"),
        (lambda: c.decode(payload.to(away), out=torch.zeros(10)), "the payload"),
        (lambda: c.encode(X, out=torch.zeros(size, dtype=torch.uint8, device=away)), "out"),
    ):
        message = refused(HipressError, call)
        assert message.startswith(f"{what} is on meta") and message.endswith(".")


@pytest.mark.parametrize("wrong", [b"HiPF", np.zeros(96, np.uint8), [1, 2], None])
def test_a_payload_that_is_no_tensor(wrong: Any) -> None:
    assert refused(FrameError, lambda: codec("bf16").decode(wrong)) == (
        f"a payload is a 1-D uint8 tensor, as encode returns it; this is a {type(wrong).__name__}."
    )


@pytest.mark.parametrize("wrong", [bytearray(96), np.zeros(96, np.uint8)])
def test_out_that_is_no_tensor(wrong: Any) -> None:
    c, kind = codec("bf16"), type(wrong).__name__
    assert refused(UsageError, lambda: c.encode(X, out=wrong)) == (
        f"out is a {kind}; encode writes into a uint8 tensor."
    )
    assert refused(UsageError, lambda: c.decode(c.encode(X), out=wrong)) == (
        f"out is a {kind}; a codec takes a torch.Tensor: use torch.as_tensor(x)."
    )
