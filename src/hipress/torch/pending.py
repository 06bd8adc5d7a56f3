"""Tensors whose values are still on their way: the first read of one makes its owner wait.

Python reaches a tensor through torch functions, which ask the tensor's class first
(`__torch_function__`). A parameter that has yet to be updated has another class until then, so it
does not matter where it is read: in the module that owns it, in another one, in an evaluation, a
checkpoint or a running average of weights. C++ that reads a parameter without Python (TorchScript,
compiled graphs, extensions) passes this by; `DistributedOptimizer` handles these otherwise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

# What these return does not depend on the values.
_PROPERTIES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "is_sparse",
    "is_cuda", "is_cpu", "is_meta", "is_quantized", "is_nested", "grad_fn", "grad", "_version",
    "itemsize", "nbytes", "retains_grad",
)  # fmt: skip
_METHODS = (
    "size", "stride", "dim", "numel", "nelement", "element_size", "is_contiguous", "get_device",
    "is_floating_point", "is_complex", "type", "register_hook",
    "register_post_accumulate_grad_hook", "__len__", "__hash__",
)  # fmt: skip
_HARMLESS: frozenset[Any] = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _PROPERTIES]
    + [getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")]
    + [vars(torch._C.TensorBase)["grad"].__delete__]
    + [getattr(torch.Tensor, name) for name in _METHODS]
)


class Owner(Protocol):
    """Knows when values arrive."""

    def need_parameter(self, parameter: torch.Tensor) -> None:
        """Returns when the parameter has been updated, and has its own class again."""

    def need_gradients(self) -> None:
        """Returns when all gradients hold their means."""


class PendingParameter(nn.Parameter):
    """A parameter that has yet to be updated."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for value in _tensors((*args, *kwargs.values())):
            if isinstance(value, PendingParameter):
                _wait_for(value)
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _wait_for(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _wait_for(self)
        return self.__reduce_ex__(protocol)


class PendingGradient(torch.Tensor):
    """A gradient of this rank that is about to be replaced by the mean of all ranks, in place."""

    _hipress_owner: Owner

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _HARMLESS:
            for value in _tensors((*args, *kwargs.values())):
                if isinstance(value, PendingGradient):
                    value._hipress_owner.need_gradients()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _wait_for(parameter: PendingParameter) -> None:
    owner: Owner | None = vars(parameter).get("_hipress_owner")
    if owner is not None:  # else another thread has updated it just now
        owner.need_parameter(parameter)


def mark_parameter(parameter: torch.Tensor, owner: Owner) -> None:
    """Makes the first read of a parameter wait until `unmark_parameter`."""
    # In this order, as other threads may read it meanwhile.
    vars(parameter)["_hipress_owner"] = owner
    parameter.__class__ = PendingParameter


def unmark_parameter(parameter: torch.Tensor) -> None:
    """Gives a parameter its own class again."""
    assert isinstance(parameter, PendingParameter)
    parameter.__class__ = nn.Parameter  # type: ignore[assignment]
    vars(parameter).pop("_hipress_owner", None)


def pending_gradient(values: torch.Tensor, owner: Owner) -> torch.Tensor:
    """Returns a tensor with the memory of another one, whose first read waits."""
    found = torch.Tensor._make_subclass(PendingGradient, values)
    found._hipress_owner = owner
    return found


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
