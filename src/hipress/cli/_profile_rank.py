"""A rank of `hipress profile`: `python -m hipress.cli._profile_rank CONFIG`.

Here the probes of `casync` meet the models of `train`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hipress.bench._cluster import ClusterConfig
from hipress.bench._ranks import run_rank, tell
from hipress.casync.engine.engine import Engine
from hipress.probe import codec_costs, links
from hipress.profile import ModelProfile, Profile
from hipress.session.world import engine_of
from hipress.torch.gradient_timer import GradientTimer, measure_errors, merged, named_gradients
from hipress.train.models import model
from hipress.train.tasks import TASKS
from hipress.version import __version__

WARM_UP_STEPS = 2
MIN_STEPS, MAX_STEPS, STEPS_S = 4, 24, 4.0
"""Steps of the model that count: as many as fit into so many seconds."""
LEARNING_RATE, MOMENTUM = 0.01, 0.9
MOST_ERROR = 1e9
"""Of a message that overflowed, as one of fp16 may: a profile holds finite numbers."""
OnPart = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True)
class Config(ClusterConfig):
    """What all ranks are told."""

    model: str | None
    num_parameters: int
    batch: int | None
    """Examples per rank and step; None is the model's own."""
    codecs: tuple[str, ...]
    fresh: bool

    @property
    def size_bytes(self) -> int:
        """Of the whole gradient as float32."""
        return 4 * max(self.num_parameters, 10**6)

    @property
    def where(self) -> str:
        """For people."""
        if self.num_hosts == 0:
            return "a running job"
        if not self.is_shaped:
            return f"{self.num_hosts} ranks on loopback"
        delay = "" if self.delay == "none" else f", delay {self.delay}"
        return f"{self.num_hosts} emulated hosts, rate {self.rate}{delay}"


def measure(config: Config, device: torch.device, on_part: OnPart) -> Profile | None:
    """Measure all of it; collective.

    Args:
        config: The same on all ranks.
        device: Of this rank.
        on_part: Told how far it is, from 0 to 1, and with what.

    Returns:
        The profile on rank 0, nothing on the others.
    """
    engine = engine_of(None, device)
    meet = links.barrier(engine)
    end = 0.7 if config.model else 1.0
    machine = links.machine(engine)
    network = links.measure(engine, on_part=_stretch(on_part, 0.0, 0.3))
    network = network.model_copy(update={"rate_bits": config.rate_bits})
    codecs = codec_costs.costs(
        engine,
        config.codecs,
        num_machine_ranks=machine.num_ranks,
        fresh=config.fresh,
        barrier=meet,
        on_part=_stretch(on_part, 0.3, end),
    )
    found = None
    if config.model is not None:
        on_part(end, config.model)
        found = _model(config, engine, meet)
    on_part(1.0, "done")
    if engine.transport.rank != 0:
        return None
    date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return Profile(
        made=f"{date}, {config.where}, hipress {__version__}, torch {torch.__version__}",
        machine=machine,
        network=network,
        codecs=codecs,
        model=found,
    )


def main(text: str) -> None:
    """Measure, as the config says, and write the profile on rank 0."""
    torch.set_num_threads(1)
    config = Config.load(text)
    device = torch.device("cuda:0" if config.device == "cuda" else config.device)
    dist.init_process_group("gloo")
    profile = measure(config, device, lambda done, label: tell(int(1000 * done), 1000, label))
    if profile is not None:
        profile.save(Path(config.result))
    dist.barrier()
    engine_of(None, device).close()
    dist.destroy_process_group()


def _stretch(on_part: OnPart, start: float, stop: float) -> OnPart:
    return lambda fraction, label: on_part(start + fraction * (stop - start), label)


def _model(config: Config, engine: Engine, meet: Callable[[], None]) -> ModelProfile | None:
    """Steps of the model in a DDP that exchanges nothing, on all ranks at once.

    DDP's own work belongs to a step; and it tells how it puts gradients together.
    """
    line = model(config.model or "")
    batch = tuple(part.to(engine.device) for part in line.data(engine.transport.rank, config.batch))
    loss = TASKS[line.task or ""].loss
    bare = line.make().to(engine.device)
    names = {id(parameter): name for name, parameter in bare.named_parameters()}
    # All ranks make the same model: sending it would take a slow line long.
    net = DistributedDataParallel(bare, gradient_as_bucket_view=True, init_sync=False)
    buckets: dict[int, tuple[str, ...]] = {}
    net.register_comm_hook((names, buckets), _note_bucket)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    seen = GradientTimer(net)

    def step() -> float:
        meet()
        start = time.perf_counter()
        torch.autograd.backward(loss(net, batch))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen.end_step()
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)
        return time.perf_counter() - start

    step_s = [step() for _ in range(WARM_UP_STEPS)][-1]
    slowest_s = max(engine.agree("steps of the model", {}, share=step_s))
    num_steps = max(MIN_STEPS, min(MAX_STEPS, int(STEPS_S / max(slowest_s, 1e-6))))
    seen.steps.clear()
    buckets.clear()  # those of the first step are made anew
    for _ in range(num_steps):
        step()
    # All ranks, though one looks at it: DDP sends buffers, those of BatchNorm, in every forward.
    torch.autograd.backward(loss(net, batch))
    errors: dict[str, dict[str, float]] = {}
    if engine.transport.rank == 0:
        found = measure_errors(_usable(named_gradients(net)), config.codecs)
        errors = {name: _finite(of_codec) for name, of_codec in found.items()}
    seen.close()
    own = seen.profile(
        name=config.model or "", batch=config.batch or line.batch, skip=0, errors=errors
    )
    known = {gradient.name for gradient in own.gradients}
    held = [tuple(one for one in buckets[k] if one in known) for k in sorted(buckets)]
    own = own.model_copy(update={"buckets": tuple(filter(None, held))})
    told = engine.gather(own.model_dump_json().encode())
    return merged([ModelProfile.model_validate_json(one) for one in told]) if told else None


def _usable(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of which an error can be told: not zero all over, and finite."""
    found = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            norm = float(torch.linalg.vector_norm(parameter.grad.float()))
            if 0.0 < norm < math.inf:
                found[name] = parameter.grad
    return found


def _finite(of_codec: Mapping[str, float]) -> dict[str, float]:
    return {codec: error if error < MOST_ERROR else MOST_ERROR for codec, error in of_codec.items()}


def _note_bucket(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
    """A hook of DDP that exchanges nothing."""
    names, buckets = state
    buckets[bucket.index()] = tuple(names[id(parameter)] for parameter in bucket.parameters())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


if __name__ == "__main__":
    run_rank(main)
