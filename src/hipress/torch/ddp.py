"""DistributedDataParallel as a framework of the session: buckets, futures, hooks.

first bucket    begin_step; the watchdog notes that the training loop is inside DDP
every bucket    exchange: DDP gets a future of the bucket's mean
last bucket     DDP waits for all futures and hands the means out; then end_step
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hipress import settings as hipress_settings
from hipress.errors import UsageError
from hipress.session import Mode, Session, StepObserver
from hipress.session.groups import has_other_ranks, meet
from hipress.session.selection import takes
from hipress.session.timing import GradientTimer
from hipress.session.watchdog import PATIENCE_S, Watchdog
from hipress.torch.adapter import TorchAdapter, spec_of, watch_steps

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

_log = logging.getLogger("hipress")

Future = torch.futures.Future[torch.Tensor]

BUCKET_NUMEL = 25 * 2**18
"""Elements of DDP's default bucket."""


NOTHING_TRAINED = "the model has no parameter that is trained; there is nothing to attach."


class DDPAdapter(TorchAdapter):
    """Answers the session's questions about a DDP model, and receives DDP's buckets.

    Args:
        optimizer: Learning rates, momentum and weight decay are read from it.
        scaler: The GradScaler, if there is one.
    """

    bucket_numel: int | None = BUCKET_NUMEL

    def __init__(self, optimizer: torch.optim.Optimizer | None = None, scaler: Any = None) -> None:
        super().__init__(optimizer, scaler)
        if self._exchange is not None:
            watch_steps(self)
        self._buckets: dict[int, tuple[tuple[int, ...], tuple[str, ...]]] = {}
        self._module: weakref.ref[DistributedDataParallel] | None = None
        self._model: Callable[[], nn.Module | None] = lambda: None
        self._facts: dict[str, Any] = {}
        self._may_drop = True
        """Whether DDP may keep the mean of a parameter to itself; a bare hook cannot know."""
        self._announces = False
        """Whether a bare hook has yet to log what is compressed, after its first step."""
        self._versions: dict[str, int | None] = {}
        """How often the `.grad` of each parameter had been written when its bucket was ready."""
        self._watchdog = Watchdog(hipress_settings.timeout_s() or PATIENCE_S)

    # --- setting up -------------------------------------------------------------------------------

    def use_model(self, model: nn.Module) -> DistributedDataParallel | None:
        """Takes the model that `attach` was given; returns its DDP, None on one process."""
        ddp = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
        if not isinstance(ddp, DistributedDataParallel):
            check_module(model)
            if not has_other_ranks():
                self._model = lambda: model
                return None
            trains = any(parameter.requires_grad for parameter in model.parameters())
            meet("attach", None if trains else NOTHING_TRAINED)
            model = ddp = wrapped(model)
        # The caller may keep nothing but the session.
        self._model = lambda: model
        self._module = weakref.ref(ddp)
        # What torch.compile returns has the model inside.
        self.model_name = type(getattr(ddp.module, "_orig_mod", ddp.module)).__name__
        self._may_drop = ddp.find_unused_parameters or ddp.static_graph
        self._facts = {
            "bytes of a bucket": int(ddp.bucket_bytes_cap),
            "find_unused_parameters": ddp.find_unused_parameters,
            "static_graph": ddp.static_graph,
        }
        cap_bytes = int(ddp.bucket_bytes_cap)
        is_default = getattr(ddp, "bucket_bytes_cap_default", cap_bytes == 25 * 2**20)
        self.bucket_mb = None if is_default else cap_bytes / 2**20
        return ddp

    def register_hook(self, session: Session) -> None:
        """Registers DDP's hook, and ends the engine together with the model."""
        ddp = self._ddp()
        assert ddp is not None
        try:
            # The session holds the model. Where C++ held the session, no collector would see the
            # cycle.
            ddp.register_comm_hook(weakref.ref(session), hook)
        except RuntimeError as error:
            if "only be called once" in str(error):
                raise UsageError(
                    "the model has a communication hook already, by an earlier attach or by "
                    "others, and DDP takes one, once: wrap the module in a new "
                    "DistributedDataParallel."
                ) from error
            raise
        ddp.__dict__["hipress_session"] = session
        self._watch_engine(session)
        weakref.finalize(ddp, session.engine.close)
        weakref.finalize(ddp, session.monitor.close)
        self._watchdog.watch_forward(ddp)

    def _watch_engine(self, session: Session) -> None:
        # The threads of the engine hold this function. The session ends the engine when it is
        # dropped, so they must not keep it alive.
        found, watchdog = weakref.ref(session), self._watchdog

        def is_over() -> bool:
            session = found()
            if session is None or session.engine.is_closed:
                return True
            return session.mode.current is Mode.DETACHED

        def on_lost(error: BaseException) -> None:
            if is_over() or not torch.distributed.is_initialized():
                return  # the job has ended here, and may have ended there
            watchdog.start(error, is_over)

        session.engine.on_lost = on_lost

    # --- a step -----------------------------------------------------------------------------------

    def on_bucket(self, session: Session, bucket: GradBucket) -> Future:
        """Exchanges a bucket whose gradients are ready."""
        try:
            return self._on_bucket(session, bucket)
        except BaseException:
            self._watchdog.error_was_raised()
            raise

    def _on_bucket(self, session: Session, bucket: GradBucket) -> Future:
        buffer, index, is_last = bucket.buffer(), bucket.index(), bucket.is_last()
        if session.mode.current is Mode.DETACHED:
            future = session.exchange(index, (), buffer)
            if is_last:
                session.end_step()
            return future
        if not session.is_open:  # a bare hook
            session.open(buffer.device)
            self._watch_engine(session)
            self._announces = True
        if index == 0:
            self._watchdog.enter()
        names = self._names_of(session, bucket)
        if self._may_drop:
            for name in names:
                given = self._parameters[name].grad
                self._versions[name] = None if given is None else given._version
        if index == 0:
            session.begin_step()
        future = session.exchange(index, names, buffer)
        if is_last:
            self._awaits_step = bool(session.layout.senders)
            self._is_first_rank = session.engine.transport.rank == 0
            self._queue_end(session)
        return future

    def _names_of(self, session: Session, bucket: GradBucket) -> tuple[str, ...]:
        parameters = bucket.parameters()
        known = tuple(map(id, parameters))
        found = self._buckets.get(bucket.index())
        if found is not None and found[0] == known:
            return found[1]
        buffer = bucket.buffer()
        if not takes(buffer):
            return ()  # no codec takes it: torch sums it, and it is not registered
        missing = [p for p in parameters if id(p) not in self._names]
        if missing:  # a bare hook learns of parameters in the order in which they come
            first = len(self._names)
            named = [(f"gradient{first + k}", p) for k, p in enumerate(missing)]
            session.register(self.specs(named))
        names = tuple(self._names[one] for one in known)
        self._buckets[bucket.index()] = (known, names)
        return names

    def _queue_end(self, session: Session) -> None:
        """Calls `end_step` after DDP has handed the means out."""

        def end() -> None:
            self._watchdog.leave()
            try:
                session.end_step()
            except BaseException:
                self._watchdog.error_was_raised()
                raise
            if self._announces:
                self._announces = False
                session.announce()

        queue = torch.autograd.Variable._execution_engine.queue_callback
        # DDP queues its own callback, which hands the means out, after this hook returns; one that
        # is queued from within ours comes behind it.
        try:
            queue(lambda: queue(end))
        except RuntimeError as error:
            raise UsageError(
                "DDP called for gradients outside backward, as its join() for uneven inputs does; "
                "that is not supported: give all ranks the same number of batches."
            ) from error

    # --- what the session asks --------------------------------------------------------------------

    @property
    def model(self) -> nn.Module | None:
        """The model to train with; None for a bare hook."""
        return self._model()

    @property
    def can_observe(self) -> bool:
        """Whether the model is known and still there."""
        return self._ddp() is not None

    def observe(self, observer: StepObserver) -> Callable[[], None]:
        """Registers hooks at the model for the methods that the observer overrides."""
        ddp = self._ddp()
        return observe(ddp, observer, self._parameters) if ddp is not None else lambda: None

    def facts(self) -> dict[str, Any]:
        """Returns what must be the same on all ranks."""
        return {
            "whether there is a scaler": self._scaler is not None,
            "whether there is an optimizer": self._optimizer is not None,
            **self._facts,
        }

    def parameters(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Returns all parameters that DDP does not ignore, also those without a gradient."""
        ddp = self._ddp()
        if ddp is None:
            return self._parameters.items()
        return [
            (clean(name), parameter)
            for name, parameter in ddp.module.named_parameters()
            if name not in ddp.parameters_to_ignore
        ]

    def was_dropped(self, name: str, sent: torch.Tensor) -> bool:
        """Returns whether DDP kept the mean of a parameter that no rank used to itself."""
        given = self._parameters[name].grad
        if given is None or not self._may_drop:
            return given is None
        if given.untyped_storage().data_ptr() == sent.untyped_storage().data_ptr():
            return False  # a view of the bucket, which holds the mean
        # DDP writes the mean into a `.grad` that is there; comparing values would make the host
        # wait for a GPU.
        return given._version == self._versions[name]

    def _ddp(self) -> DistributedDataParallel | None:
        return None if self._module is None else self._module()


def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations as objects
    """Exchanges a bucket; DDP calls it with the session, or a reference to it, and each bucket."""
    session: Any = state() if isinstance(state, weakref.ref) else state
    return session.adapter.on_bucket(session, bucket)


def check_module(model: nn.Module) -> None:
    """Refuses what DDP cannot wrap."""
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        raise UsageError(f"attach was given a {kind}; give a torch.nn.Module, in DDP or not.")
    for part in model.modules():
        name = type(part).__name__
        for refused in ("FSDP", "FullySharded", "DeepSpeed", "DataParallel"):
            if refused in name:
                raise UsageError(
                    f"attach was given a {kind}, which is or holds a {name}; {refused} is not "
                    "supported: give the module itself, or a DistributedDataParallel."
                )


def wrapped(module: nn.Module) -> DistributedDataParallel:
    """Returns a module in DDP, on the GPU on which its parameters are."""
    devices = {parameter.device for parameter in module.parameters()}
    on_one_gpu = len(devices) == 1 and next(iter(devices)).type == "cuda"
    ddp = DistributedDataParallel(module, device_ids=list(devices) if on_one_gpu else None)
    handle = module.register_forward_pre_hook(_OnlyInDDP(module))
    weakref.finalize(ddp, handle.remove)
    return ddp


class _OnlyInDDP:
    """Refuses to train a module past the DDP that `attach` has put it in.

    A copy of the module, which DDP knows nothing of, has a copy of this hook that refuses nothing.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._id = id(module)

    def __reduce__(self) -> Any:
        return type(self), ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        # Any DDP will do: the module may have been put in another one since.
        if self._id != id(module) or DistributedDataParallel._active_ddp_module is not None:
            return
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise UsageError(
                f"the {type(module).__name__} that attach was given is trained without its "
                "DistributedDataParallel, so ranks would not exchange gradients: train with "
                "sync.model, e.g. model = sync.model after attach (model.eval() or "
                "torch.no_grad() is enough to evaluate the module itself)."
            )


def time_gradients(module: nn.Module) -> GradientTimer:
    """Starts to time the gradients of a model or of its DDP; call `close` at the end.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> timer = time_gradients(model)
        >>> for _ in range(3):
        ...     model(torch.ones(1, 4)).sum().backward()
        ...     timer.end_step()
        >>> sorted(gradient.name for gradient in timer.profile().gradients)
        ['bias', 'weight']
    """
    named = {name: p for name, p in named_gradients(module).items() if p.requires_grad}
    timer = GradientTimer(spec_of(name, parameter) for name, parameter in named.items())
    timer.on_close(observe(module, timer, named))
    return timer


def observe(
    module: nn.Module, observer: StepObserver, parameters: Mapping[str, torch.Tensor]
) -> Callable[[], None]:
    """Calls an observer from hooks at a model; the result removes them."""

    def overrides(name: str) -> bool:
        return getattr(type(observer), name) is not getattr(StepObserver, name)

    def before(*_: object) -> None:
        observer.forward_begin(torch.is_grad_enabled())

    def after(_module: object, _args: object, output: Any) -> None:
        observer.forward_end()
        if overrides("backward_begin"):
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: observer.backward_begin())  # type: ignore[no-untyped-call]

    def ready(name: str) -> Callable[[torch.Tensor], None]:
        return lambda _: observer.gradient_ready(name)

    def needed(names: Sequence[str]) -> Callable[..., None]:
        def call(*_: object) -> None:
            # Inside of what torch.compile makes there is no such moment, and to keep it from
            # tracing this, as `_untraced` does, would break the graph at every module.
            if not torch.compiler.is_compiling():
                for name in names:
                    observer.parameter_needed(name)

        return call

    handles: list[Any] = [module.register_forward_pre_hook(_untraced(before))]
    if overrides("forward_end") or overrides("backward_begin"):
        handles.append(module.register_forward_hook(_untraced(after)))
    if overrides("parameter_needed"):
        owners = _owners(module, parameters)
        handles += [one.register_forward_pre_hook(needed(names)) for one, names in owners]
    if overrides("gradient_ready"):
        for name, parameter in parameters.items():
            if parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                handles.append(register(_untraced(ready(name))))

    def remove() -> None:
        for handle in handles:
            handle.remove()
        handles.clear()

    return remove


def named_gradients(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of a model by name; those of a DDP without its `module.`.

    Example:
        >>> list(named_gradients(nn.Linear(2, 2)))
        ['weight', 'bias']
    """
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    return dict(inner.named_parameters())


def clean(name: str) -> str:
    """Returns a parameter's name without the prefix that torch.compile adds."""
    return name.replace("_orig_mod.", "")


def sparse_names(model: nn.Module) -> frozenset[str]:
    """Returns the parameters whose gradients are sparse."""
    found = set()
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            found.add(clean(f"{prefix}.weight" if prefix else "weight"))
    return frozenset(found)


def _owners(
    module: nn.Module, parameters: Mapping[str, torch.Tensor]
) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yields the modules that own some of the parameters, with the names of these."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for one in module.modules():
        if own := [names[id(p)] for p in one.parameters(recurse=False) if id(p) in names]:
            yield one, own


def _untraced(function: Callable[..., None]) -> Any:
    """Keeps torch.compile from tracing a hook, which would break the graph."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in what a model returns: alone, in lists, dictionaries, dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    inside: Any = ()
    if isinstance(output, Mapping):
        inside = output.values()
    elif isinstance(output, list | tuple | set):
        inside = output
    elif is_dataclass(output) and not isinstance(output, type):
        inside = [getattr(output, field.name) for field in fields(output)]
    for value in inside:
        yield from _tensors(value)
