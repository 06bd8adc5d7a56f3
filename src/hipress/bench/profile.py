"""`hipress profile`: what links, codecs and a model's backward cost, with all ranks busy at once.

Each rank of an emulated cluster runs `python -m hipress.bench.profile BENCHMARK`; inside a job the
ranks call `measure` themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hipress.bench.cluster import ClusterBenchmark, print_progress, run_rank
from hipress.casync.engine.engine import Engine
from hipress.probe import codec_costs, links
from hipress.profile import ModelProfile, Profile
from hipress.session.groups import engine_of
from hipress.session.profiler import made_on
from hipress.session.timing import measure_errors, merged
from hipress.torch.ddp import named_gradients, time_gradients
from hipress.train.models import Model, timed

WARM_UP_STEPS = 2
MIN_STEPS, MAX_STEPS, STEPS_S = 4, 24, 4.0
"""Steps of the model that count: as many as fit into 4 seconds, within limits."""
LEARNING_RATE, MOMENTUM = 0.01, 0.9
FEW_EXAMPLES, NUM_FEW_STEPS = 2, 2
FEW_STEPS_S = 1.5
"""A step of `time_model` takes about this long; longer ones are timed with fewer examples."""
LEAST_ELEMENTS = 10**6
"""Elements of the gradient that the timeout of ranks allows for, at the least."""
OnPart = Callable[[float, str], None]


@dataclass(frozen=True, kw_only=True)
class ProfileBenchmark(ClusterBenchmark):
    """What all ranks measure; `num_hosts` is 0 inside a job."""

    model: str | None
    data: str | None = None
    """The user's own data, package.module:callable; None is the model's."""
    batch: int | None
    """Examples per rank and step; None is the model's own."""
    codecs: tuple[str, ...]
    fresh: bool

    @property
    def where(self) -> str:
        """Describes where the benchmark measures, for people."""
        if self.num_hosts == 0:
            return "a running job"
        if not self.is_shaped:
            return f"{self.num_hosts} ranks on loopback"
        delay = "" if self.delay == "none" else f", delay {self.delay}"
        return f"{self.num_hosts} emulated hosts, rate {self.rate}{delay}"


def measure(benchmark: ProfileBenchmark, device: torch.device, on_part: OnPart) -> Profile | None:
    """Measures all of it and returns the profile on rank 0, None on the others; collective.

    `on_part` is called with how far it is, from 0 to 1, and with what is measured.
    """
    engine = engine_of(None, device)
    meet = links.barrier(engine)
    end = 0.7 if benchmark.model else 1.0
    machine = links.machine(engine)
    network = links.measure(engine, on_part=_part_of(on_part, 0.0, 0.3))
    network = network.model_copy(update={"rate_bits": benchmark.rate_bits})
    codecs = codec_costs.costs(
        engine,
        benchmark.codecs,
        num_machine_ranks=machine.num_ranks,
        fresh=benchmark.fresh,
        barrier=meet,
        on_part=_part_of(on_part, 0.3, end),
    )
    found = None
    if benchmark.model is not None:
        on_part(end, benchmark.model)
        found = _model(benchmark, engine, meet)
    on_part(1.0, "done")
    if engine.transport.rank != 0:
        return None
    return Profile(
        made=made_on(benchmark.where),
        machine=machine,
        network=network,
        codecs=codecs,
        model=found,
    )


def _part_of(on_part: OnPart, start: float, stop: float) -> OnPart:
    return lambda fraction, label: on_part(start + fraction * (stop - start), label)


def _model(
    benchmark: ProfileBenchmark, engine: Engine, meet: Callable[[], None]
) -> ModelProfile | None:
    """Times steps of the model in a DDP that exchanges nothing, on all ranks at once.

    DDP's own work belongs to a step, and DDP shows how it groups gradients into buckets.
    """
    line = timed(benchmark.model or "", benchmark.data)
    batch = tuple(
        part.to(engine.device) for part in line.data(engine.transport.rank, benchmark.batch)
    )
    bare = line.make().to(engine.device)
    names = {id(parameter): name for name, parameter in bare.named_parameters()}
    # All ranks make the same model: sending it would take a slow line long.
    net = DistributedDataParallel(bare, gradient_as_bucket_view=True, init_sync=False)
    buckets: dict[int, tuple[str, ...]] = {}
    net.register_comm_hook((names, buckets), _note_bucket)
    made = _ModelSteps(line, net, engine.device)

    def step() -> float:
        meet()
        return made.step(batch)

    step_s = [step() for _ in range(WARM_UP_STEPS)][-1]
    slowest_s = max(engine.agree("steps of the model", {}, share=step_s))
    num_steps = max(MIN_STEPS, min(MAX_STEPS, int(STEPS_S / max(slowest_s, 1e-6))))
    made.timer.steps.clear()
    buckets.clear()  # those of the first step are made anew
    for _ in range(num_steps):
        step()
    # All ranks, though one uses it: DDP sends buffers, those of BatchNorm, in every forward.
    made.backward(batch)
    errors: dict[str, dict[str, float]] = {}
    if engine.transport.rank == 0:
        gradients = {name: p.grad for name, p in named_gradients(net).items() if p.grad is not None}
        errors = measure_errors(gradients, benchmark.codecs)
    made.timer.close()
    own = made.timer.profile(
        name=benchmark.model or "", batch=benchmark.batch or line.batch, skip=0, errors=errors
    )
    known = {gradient.name for gradient in own.gradients}
    held = [tuple(one for one in buckets[k] if one in known) for k in sorted(buckets)]
    own = own.model_copy(update={"buckets": tuple(filter(None, held))})
    texts = engine.gather(own.model_dump_json().encode())
    return merged([ModelProfile.model_validate_json(one) for one in texts]) if texts else None


class _ModelSteps:
    def __init__(self, line: Model, net: nn.Module, device: torch.device) -> None:
        self._loss = line.learning_task.loss
        self._net = net
        self._device = device
        self._optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self.timer = time_gradients(net)

    def backward(self, batch: tuple[torch.Tensor, ...]) -> None:
        torch.autograd.backward(self._loss(self._net, batch))

    def step(self, batch: tuple[torch.Tensor, ...]) -> float:
        """Makes a step and returns its seconds."""
        start = time.perf_counter()
        self.backward(batch)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.timer.end_step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - start


def time_model(
    line: Model, name: str, batch: int, device: torch.device
) -> tuple[ModelProfile, int]:
    """Times a few steps of a model in this process, without ranks.

    Returns the model with the work of all examples, and how many examples the steps had.
    """
    made = _ModelSteps(line, line.make().to(device), device)

    def step(num_examples: int) -> float:
        return made.step(tuple(part.to(device) for part in line.data(0, num_examples)))

    def steps(num_examples: int, skip: int) -> ModelProfile:
        made.timer.steps.clear()
        for _ in range(NUM_FEW_STEPS):
            step(num_examples)
        return made.timer.profile(name=name, batch=batch, skip=skip)

    all_threads = torch.get_num_threads()
    # Threads that wait for each other count as work, so that others on this machine would make
    # the model look slower: one thread works.
    torch.set_num_threads(1)
    try:
        few = steps(min(FEW_EXAMPLES, batch), skip=1)
        timed = int(FEW_EXAMPLES * FEW_STEPS_S / max(_work_s(few), 1e-6))
        timed = min(batch, max(2 * FEW_EXAMPLES, timed))
        found = steps(timed, skip=0)
        torch.set_num_threads(all_threads)
        if device.type == "cpu" and all_threads > 1:
            wall_s = min(step(timed) for _ in range(NUM_FEW_STEPS))
            threads = min(max(_work_s(found) / wall_s, 1.0), float(all_threads))
            found = found.model_copy(update={"threads": threads})
    finally:
        torch.set_num_threads(all_threads)
        made.timer.close()
    if timed == batch:
        return found, timed
    # A part of the work is the same for any number of examples.
    example_s = (_work_s(found) - _work_s(few)) / (timed - min(FEW_EXAMPLES, batch))
    most = batch / timed
    times = 1 + example_s * (batch - timed) / max(_work_s(found), 1e-9)
    return scaled(found, min(max(times, 1.0), most)), timed


def _work_s(model: ModelProfile) -> float:
    return model.forward_s + model.backward_s


def scaled(model: ModelProfile, times: float) -> ModelProfile:
    """Returns a model with the work of so many times the examples; the optimizer's work stays."""
    return model.model_copy(
        update={
            "forward_s": model.forward_s * times,
            "backward_s": model.backward_s * times,
            "gradients": tuple(
                one.model_copy(
                    update={
                        "ready_s": one.ready_s * times,
                        "needed_s": None if one.needed_s is None else one.needed_s * times,
                    }
                )
                for one in model.gradients
            ),
        }
    )


def _note_bucket(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations
    """A hook of DDP that notes its buckets and exchanges nothing."""
    names, buckets = state
    buckets[bucket.index()] = tuple(names[id(parameter)] for parameter in bucket.parameters())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _main(text: str) -> Any:
    benchmark = ProfileBenchmark.load(text)
    device = benchmark.torch_device
    profile = measure(
        benchmark, device, lambda done, label: print_progress(int(1000 * done), 1000, label)
    )
    dist.barrier()
    engine_of(None, device).close()
    return None if profile is None else profile.model_dump(mode="json")


if __name__ == "__main__":
    run_rank(_main)
