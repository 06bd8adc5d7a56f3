"""Ready times of gradients against work that was put in on purpose."""

from __future__ import annotations

import hashlib
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from hipress.errors import UsageError
from hipress.profile import GradientProfile, ModelProfile
from hipress.session.timing import GradientTimer, measure_errors, merged
from hipress.torch.ddp import time_gradients

BURN_S = 0.1


def burn(seconds: float = BURN_S) -> None:
    """Works on this thread for so much CPU time."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class _Burn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        burn()
        return grad


class Net(nn.Module):
    """Two layers, with work between their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(_Burn.apply(self.first(x)))


def train(model: nn.Module, seen: GradientTimer, steps: int = 3) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        seen.end_step()


def test_gradients_come_in_the_order_of_backward_with_the_work_before_them():
    """Catches: clocks of the wall, the order of parameters, a gradient that never came."""
    model = Net()
    with time_gradients(model) as seen:
        train(model, seen)
    found = seen.profile(name="net", batch=2)
    names = [gradient.name for gradient in found.gradients]
    assert set(names[:2]) == {"second.weight", "second.bias"}
    assert set(names[2:]) == {"first.weight", "first.bias"}
    late, early = found.gradients[2].ready_s, found.gradients[1].ready_s
    assert BURN_S <= late - early < 2 * BURN_S
    assert found.backward_s >= found.gradients[-1].ready_s > BURN_S
    assert found.forward_s < BURN_S and found.rest_s < BURN_S
    assert (found.name, found.batch, found.element_bytes) == ("net", 2, 4)
    assert [gradient.dims for gradient in found.gradients].count(2) == 2


def test_gradients_of_many_layers_are_listed_last_layer_first():
    """Catches: the order of a set."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(8)))
    with time_gradients(model) as seen:
        train(model, seen)
    found = [gradient.name for gradient in seen.profile().gradients]
    assert found == [f"{layer}.weight" for layer in reversed(range(8))]


class _Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        burn()
        return x


def test_parameters_are_needed_in_the_order_of_forward_after_the_work_before_them():
    """Catches: the last use of a parameter in place of the first; uses during an evaluation."""
    first, second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
    model = nn.Sequential(first, _Slow(), second, _Slow(), first)
    with time_gradients(model) as seen:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            seen.end_step()
            with torch.no_grad():
                model(torch.ones(2, 4))
    found = {one.name: one.needed_s for one in seen.profile().gradients}
    assert max(found["0.weight"], found["0.bias"]) < BURN_S
    assert BURN_S <= found["2.weight"] < 2 * BURN_S
    assert not any(one._forward_pre_hooks for one in model.modules())


def test_a_parameter_whose_module_is_never_called_has_no_moment():
    """Catches: a moment that is made up, or that of another parameter."""

    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)
            self.own = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.inner.weight) * self.own

    model = Direct()
    with time_gradients(model) as seen:
        train(model, seen)
    found = {one.name: one.needed_s for one in seen.profile().gradients}
    assert found["inner.weight"] is None and found["own"] is not None


def test_moments_of_forward_do_not_break_the_graph_of_torch_compile():
    """Catches: hooks inside of a compiled model, at which its graph breaks."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with time_gradients(model) as seen:
        compiled = torch.compile(model[1], backend="eager", fullgraph=True)
        for _ in range(3):
            seen.forward_begin()
            loss = (model[0](torch.ones(2, 4)) + compiled(torch.ones(2, 4))).sum()
            seen.forward_end()
            loss.backward()
            seen.end_step()
    found = {one.name: one.needed_s for one in seen.profile().gradients}
    assert found["1.weight"] is None and found["0.weight"] is not None


def test_time_that_passes_without_work_does_not_count():
    model = nn.Linear(4, 4)
    with time_gradients(model) as seen:
        for _ in range(3):
            out = model(torch.ones(2, 4)).sum()
            time.sleep(0.3)
            out.backward()
            seen.end_step()
    assert seen.profile().backward_s < 0.2


def test_work_behind_backward_is_the_rest_up_to_the_next_forward():
    model = nn.Linear(4, 4)
    with time_gradients(model) as seen:
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            burn()
    found = seen.profile(skip=0)
    assert len(seen.steps) == 2  # the last has no end
    assert BURN_S <= found.rest_s < 2 * BURN_S and found.backward_s < BURN_S


@pytest.mark.alone
def test_the_clock_of_the_thread_leaves_out_what_others_do():
    """Catches: an exchange in the same process counted as backward."""
    model = Net()

    def other() -> None:
        """Works for about four times as long as backward, without Python's lock."""
        begun.set()
        until = time.thread_time() + 4 * BURN_S
        while time.thread_time() < until:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 50_000)

    with time_gradients(model) as seen:
        for _ in range(3):
            out = model(torch.ones(2, 4)).sum()
            begun = threading.Event()
            thread = threading.Thread(target=other)
            thread.start()
            assert begun.wait(60)
            out.backward()
            thread.join()
            seen.end_step()
    assert seen.profile(clock="thread").backward_s < seen.profile(clock="process").backward_s
    assert seen.profile(clock="thread").gradients[-1].ready_s >= BURN_S


def test_several_forwards_before_one_backward_are_one_step():
    model = nn.Linear(4, 4)
    with time_gradients(model) as seen:
        for _ in range(2):
            first = model(torch.ones(2, 4))
            burn()
            (first + model(torch.ones(2, 4))).sum().backward()
            seen.end_step()
    assert len(seen.steps) == 2 and seen.profile(skip=0).forward_s >= BURN_S


def test_evaluation_is_no_step():
    model = nn.Linear(4, 4)
    with time_gradients(model) as seen, torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 4))
            seen.end_step()
    with pytest.raises(UsageError, match="no training step has ended"):
        seen.profile()


def test_nothing_is_noted_after_close():
    model = nn.Linear(4, 4)
    seen = time_gradients(model)
    train(model, seen, 2)
    seen.close()
    train(model, seen, 2)
    assert len(seen.steps) == 2
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_names_of_a_ddp_are_those_of_its_model():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DDP(nn.Linear(4, 4))
        with time_gradients(model) as seen:
            train(model, seen)
        assert {one.name for one in seen.profile().gradients} == {"weight", "bias"}
    finally:
        dist.destroy_process_group()


def test_refuses_a_clock_that_is_none_and_a_model_without_gradients():
    model = nn.Linear(4, 4)
    with time_gradients(model) as seen:
        train(model, seen)
    with pytest.raises(UsageError, match="clock is 'wall'; choose one of process, thread"):
        seen.profile(clock="wall")
    with pytest.raises(UsageError, match="no parameter that is trained"):
        time_gradients(nn.ReLU())
    with pytest.raises(UsageError, match="parameters are on cpu and meta"):
        time_gradients(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def test_errors_are_of_one_message_and_leave_gradients_as_they_are():
    x = torch.tensor([1.0, -3.0, 2.0, -2.0])
    found = measure_errors({"w": x}, ["none", "ef(onebit)"])
    assert found["w"]["none"] == 0.0
    # One scale for each sign or for all: half of the spread is lost at most.
    assert 0.1 < found["w"]["ef(onebit)"] < 0.5
    assert x.tolist() == [1.0, -3.0, 2.0, -2.0]
    model = nn.Linear(4, 4)
    with time_gradients(model) as seen:
        train(model, seen)
    known = seen.profile(errors={"bias": {"onebit": 0.25}}).gradients
    assert {one.name: one.errors for one in known} == {"bias": {"onebit": 0.25}, "weight": {}}


def test_ranks_are_put_together_by_medians():
    def one(work: float, a: float, b: float) -> ModelProfile:
        gradients = (
            GradientProfile(name="a", numel=1, ready_s=a, needed_s=b),
            GradientProfile(name="b", numel=1, ready_s=b),
        )
        return ModelProfile(forward_s=work, backward_s=2 * work, gradients=gradients)

    found = merged([one(1, 1, 2), one(3, 5, 3), one(2, 4, 1)])
    assert (found.forward_s, found.backward_s) == (2, 4)
    assert [(g.name, g.ready_s) for g in found.gradients] == [("b", 2), ("a", 4)]
    assert [g.needed_s for g in found.gradients] == [None, 2]


@pytest.mark.parametrize("again", [False, True])
def test_a_step_of_another_model_counts_for_nothing(again):
    """Catches: ready times of a model that contain the work of another one."""
    model = Net()
    with time_gradients(model) as seen:
        for _ in range(3):
            loss = model(torch.ones(2, 4)).sum()
            burn(4 * BURN_S)
            seen.resume()
            if again:
                loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            seen.end_step()
    found = seen.profile()
    assert BURN_S <= found.backward_s < 3 * BURN_S
    assert found.gradients[0].ready_s < BURN_S
    assert found.forward_s < BURN_S
