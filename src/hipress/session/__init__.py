"""The core that every framework shares: which gradients are compressed, and their exchange.

start(arrays, codec=...)    a session for a hand-written loop; `average` is one step of it
Session, Settings           the exchange of one model's gradients
Adapter, StepObserver       what a session asks of a framework, and tells about a step
GradientSpec                one gradient as the framework describes it
Options                     switches of the engine, for a session that orders its messages
Mode                        what happens to the gradients of a step
init, allreduce             process groups, and single tensors
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hipress.casync.engine.recipe import Options
from hipress.codecs.base import Codec
from hipress.errors import public
from hipress.plan import MIN_SIZE, Plan
from hipress.session.adapter import Adapter, GradientSpec, StepObserver
from hipress.session.groups import allreduce, as_tensor, init
from hipress.session.mode import Mode
from hipress.session.session import Session, Settings
from hipress.session.setup import begin, decide
from hipress.session.stats import Stats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "Adapter",
    "GradientSpec",
    "Mode",
    "Options",
    "Session",
    "Settings",
    "Stats",
    "StepObserver",
    "allreduce",
    "init",
    "start",
]


@public
def start(
    arrays: Mapping[str, Any],
    codec: str | Codec | None = None,
    strategy: str | None = None,
    plan: str | Plan | dict[str, Any] | None = None,
    exclude: str | Iterable[str] = (),
    include: str | Iterable[str] = (),
    min_size: int = MIN_SIZE,
    *,
    codecs: Iterable[str] | None = None,
    budget: float | str | None = None,
    group: ProcessGroup | None = None,
    adapter: Adapter | None = None,
    enabled: bool = True,
    **settings: Any,
) -> Session:
    """Starts a session for a training loop without a framework hook; collective.

    Args:
        arrays: One array for each gradient by name, in the order in which backward computes them;
            only sizes, dtypes and devices are read. Parameters serve as well.
        codec: As for `hipress.attach`; None, without strategy and plan, lets `auto` decide.
        strategy: As for `hipress.attach`.
        plan: As for `hipress.attach`.
        exclude: As for `hipress.attach`.
        include: As for `hipress.attach`.
        min_size: As for `hipress.attach`.
        codecs: As for `hipress.attach`.
        budget: As for `hipress.attach`.
        group: Process group of torch.distributed; all ranks if None.
        adapter: Answers questions about the framework; the defaults if None.
        enabled: False leaves every gradient uncompressed.
        settings: Fields of `Settings`.

    Returns:
        The session; call `average` in every step.
    """
    specs = [_spec(name, as_tensor(array, name)) for name, array in arrays.items()]
    decision = decide(
        codec=codec, strategy=strategy, plan=plan, exclude=exclude, include=include,
        min_size=min_size, codecs=codecs, budget=budget,
    )  # fmt: skip
    session = Session(decision.rules, Settings(**settings), adapter, group, enabled=enabled)
    return begin(session, decision, specs, [spec.name for spec in specs])


def _spec(name: str, value: Any) -> GradientSpec:
    return GradientSpec(
        name=name,
        numel=value.numel(),
        dims=value.dim(),
        dtype=value.dtype,
        device=value.device,
    )
