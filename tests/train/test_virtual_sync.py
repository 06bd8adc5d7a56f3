"""The exchange in one process: exact without a codec, alike for all, momentum in one place only."""

from __future__ import annotations

import pytest
import torch

import hipress
from hipress.plan import MIN_SIZE
from hipress.torch.optim import AdamW
from hipress.train.config import PLAIN
from hipress.train.forms import SGD_MOMENTUM, Sent, sent
from hipress.train.virtual import REFRESH, VirtualSync, is_exempt
from hipress.train.workers import make_sgd

SHAPES = [(65, 67), (65,), (10, 7), (2, 33, 80)]  # odd sizes; the 2nd and 3rd are exempt
NUM_WORKERS = 3
EXEMPT_BYTES = 4 * (65 + 70)


def gradients(step: int = 0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [
        [torch.randn(shape, generator=generator) for shape in SHAPES] for _ in range(NUM_WORKERS)
    ]


def sync_of(expression: str, seed: int = 0) -> VirtualSync:
    parameters = [torch.zeros(shape) for shape in SHAPES]
    return VirtualSync(expression, parameters, num_workers=NUM_WORKERS, seed=seed)


@pytest.mark.parametrize("expression", [PLAIN, "none"])
def test_without_loss_it_is_the_exact_mean(expression: str) -> None:
    sync = sync_of(expression)
    for step in range(3):
        by_parameter = zip(*gradients(step), strict=True)
        means = sync.average(gradients(step), step)
        for mean, group, shape in zip(means, by_parameter, SHAPES, strict=True):
            assert mean.shape == shape
            torch.testing.assert_close(mean, torch.stack(group).mean(0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("expression", ["onebit", "topk", "terngrad", "dgc"])
def test_small_parameters_are_exempt(expression: str) -> None:
    means = sync_of(expression).average(gradients(), step=0)
    for mean, group in zip(means[1:3], list(zip(*gradients(), strict=True))[1:3], strict=True):
        torch.testing.assert_close(mean, torch.stack(group).mean(0), rtol=1e-6, atol=1e-7)
    assert not torch.allclose(means[0], torch.stack([g[0] for g in gradients()]).mean(0))


def test_what_is_exempt() -> None:
    assert is_exempt(torch.zeros(MIN_SIZE))
    assert is_exempt(torch.zeros(1, MIN_SIZE - 1))
    assert not is_exempt(torch.zeros(2, MIN_SIZE // 2))


@pytest.mark.parametrize("expression", [*hipress.codecs.names(), "momentum(onebit)"])
def test_every_replica_decodes_the_same_bits_and_a_second_run_too(expression: str) -> None:
    sync, again = sync_of(expression), sync_of(expression)
    for step in range(3):
        means = sync.average(gradients(step), step, lr_ratio=1.1)
        for mean, twin in zip(means, again.average(gradients(step), step, 1.1), strict=True):
            assert torch.equal(mean, twin)
        # Another worker has the frame and the expression, and nothing else.
        for at in (0, 3):
            replica = hipress.codec(expression).phase(step).aggregator(NUM_WORKERS)
            assert torch.equal(replica.decode(sync.tensors[at].frame_back), means[at].flatten())


def test_the_seed_decides_random_codecs() -> None:
    first, other = (sync_of("terngrad", seed).average(gradients(), 0)[0] for seed in (0, 1))
    assert not torch.equal(first, other)


def test_ranks_round_with_numbers_of_their_own() -> None:
    """Unbiased errors cancel: of one gradient for all, 16 workers leave a quarter of the error."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    errors = []
    for num_workers in (1, 16):
        sync = VirtualSync("dithering", [x], num_workers=num_workers)
        tensor, mean = sync.tensors[0], torch.zeros_like(x)
        for state in tensor.states:
            frame = tensor.codec.encode(x, state)
            tensor.codec.decode(frame, out=mean, add=True, alpha=1 / num_workers)
        errors.append(float((mean - x).norm()))
    assert errors[1] == pytest.approx(errors[0] / 4, rel=0.1)


def test_randomk_shares_its_places() -> None:
    sync = VirtualSync("randomk(ratio=0.1)", [torch.zeros(64, 64)], num_workers=3)
    mean = sync.average([[torch.ones(64, 64)]] * 3, step=0)[0]
    assert mean.count_nonzero() <= 410


def test_nothing_is_lost_on_either_way() -> None:
    """What went in is what came out plus what workers and aggregator still hold."""
    sync = sync_of("topk(ratio=0.05)")
    total_in, total_out = torch.zeros(65 * 67), torch.zeros(65 * 67)
    for step in range(20):
        batch = gradients(step)
        total_in += sum(g[0].flatten() for g in batch) / NUM_WORKERS
        total_out += sync.average(batch, step)[0].flatten()
    tensor = sync.tensors[0]
    held = sum(state["residual"] for state in tensor.states) / NUM_WORKERS
    held = held + tensor.state_back["residual"]
    torch.testing.assert_close(total_out + held, total_in, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("expression", "own"),
    [("onebit", False), ("topk", False), ("dgc", True), ("momentum(onebit)", True), (PLAIN, False)],
)
def test_momentum_is_applied_once(expression: str, own: bool) -> None:
    sync = sync_of(expression)
    assert sync.has_momentum == [own, False, False, own]
    parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    optimizer = make_sgd(parameters, sync.has_momentum)
    by_parameter = {id(p): g["momentum"] for g in optimizer.param_groups for p in g["params"]}
    found = [by_parameter[id(p)] for p in parameters]
    assert found == [
        0.0 if own else SGD_MOMENTUM,
        SGD_MOMENTUM,
        SGD_MOMENTUM,
        0.0 if own else SGD_MOMENTUM,
    ]


def test_momentum_in_the_codec_is_the_optimizer_s() -> None:
    """Where the codec loses nothing, the same rate makes the same weights."""
    weights = []
    for expression in (PLAIN, "momentum(none, nesterov=false)"):
        parameter = torch.nn.Parameter(torch.zeros(65, 67))
        sync = VirtualSync(expression, [parameter], num_workers=NUM_WORKERS)
        optimizer = make_sgd([parameter], sync.has_momentum)
        optimizer.param_groups[0]["lr"] = 0.1
        for step in range(5):
            (parameter.grad,) = sync.average([g[:1] for g in gradients(step)], step)
            optimizer.step()
        weights.append(parameter.detach())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)


def test_dgc_moves_a_weight_as_far_as_momentum_would() -> None:
    """An element alone in its gradient is sent in the end, with all that momentum made of it."""
    ratio, mu, num_steps = 1 / (65 * 67), 0.9, 12
    gradient = torch.zeros(65, 67)
    sync = VirtualSync(f"dgc(ratio={ratio})", [gradient], num_workers=1)
    gradient[0, 0], gradient[0, 1] = 1.0, 0.01
    moved = sum(sync.average([[gradient]], step)[0] for step in range(num_steps))
    state = sync.tensors[0].states[0]
    # The small one never was the largest: it waits, accelerated as by the optimizer.
    waiting = sum(0.01 * (1 - mu ** (t + 1)) / (1 - mu) for t in range(num_steps))
    assert float(state["residual"][1] + moved[0, 1]) == pytest.approx(waiting, rel=1e-5)


def test_bytes_are_what_the_codecs_say() -> None:
    sync = sync_of("dgc(ratio=0.01, warmup=2)")
    worker = hipress.codec("dgc(ratio=0.01, warmup=2)")
    out = back = 0
    for step in range(4):
        sync.average(gradients(step), step)
        out += EXEMPT_BYTES
        back += EXEMPT_BYTES
        for numel in (65 * 67, 2 * 33 * 80):
            out += worker.phase(step).wire_bytes(numel)
            back += worker.phase(step).aggregator(NUM_WORKERS).wire_bytes(numel)
    assert (sync.bytes_out, sync.bytes_back) == (out, back)


def test_the_rate_reaches_residuals_of_dist_ef_sgdm_only() -> None:
    for expression, follows in (("momentum(onebit)", True), ("onebit", False), ("dgc", False)):
        sync = sync_of(expression)
        sync.average(gradients(), step=0, lr_ratio=2.0)
        states = [*sync.tensors[0].states, sync.tensors[0].state_back]
        assert all(("lr_ratio" in state) == follows for state in states)


# --- momentum instead of gradients ----------------------------------------------------------------

BETAS = (0.8, 0.9)


def exchange_of(expression: str, **options: int) -> tuple[VirtualSync, AdamW]:
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = AdamW(parameters, lr=0.01, betas=BETAS, **options)
    what = Sent(codec=hipress.codec(expression), refreshes=True)
    sync = VirtualSync(what, parameters, num_workers=NUM_WORKERS, optimizer=optimizer)
    return sync, optimizer


def play(sync: VirtualSync, optimizer: AdamW, step: int) -> list[torch.Tensor]:
    """Make one step; return what `.grad` was."""
    means = sync.average(gradients(step), step)
    for parameter, mean in zip(optimizer.param_groups[0]["params"], means, strict=True):
        parameter.grad = mean
    found = [mean.clone() for mean in means]
    optimizer.step()
    return found


def test_ordinary_steps_send_momentum_and_refreshes_gradients() -> None:
    """Without loss: b1 * M + (1 - b1) * g, which becomes M; exempt parameters get gradients."""
    sync, optimizer = exchange_of("topk(ratio=1.0, exact=true)", refresh_warmup=2, refresh_every=3)
    parameters = optimizer.param_groups[0]["params"]
    is_refresh = [True, True, False, False, True, False]
    for step, refreshes in enumerate(is_refresh):
        before = [optimizer.state[p]["exp_avg"].clone() if step else 0 * p for p in parameters]
        given = play(sync, optimizer, step)
        for k, group in enumerate(zip(*gradients(step), strict=True)):
            exact = torch.stack(group).mean(0)
            if k in (1, 2):  # exempt
                torch.testing.assert_close(given[k], exact, rtol=1e-6, atol=1e-7)
            elif refreshes:  # an int8 step is the largest element of a block over 127
                assert 0 < float((given[k] - exact).abs().max()) < 2 * 4.5 / 127
            else:
                expected = BETAS[0] * before[k] + (1 - BETAS[0]) * exact
                torch.testing.assert_close(given[k], expected, rtol=1e-5, atol=1e-6)
                assert torch.equal(optimizer.state[parameters[k]]["exp_avg"], given[k])


def test_a_refresh_leaves_the_codec_s_memory_alone_and_costs_its_own_bytes() -> None:
    sync, optimizer = exchange_of("onebit", refresh_warmup=1, refresh_every=2)
    worker, refresh, numels = hipress.codec("onebit"), hipress.codec(REFRESH), (4355, 5280)
    for step, refreshes in enumerate([True, False, True, False]):
        tensor, before = sync.tensors[0], sync.bytes_out
        states = [*tensor.states, tensor.state_back]
        held = [state["residual"].clone() for state in states]
        play(sync, optimizer, step)
        codec = refresh if refreshes else worker
        assert sync.bytes_out - before == EXEMPT_BYTES + sum(map(codec.wire_bytes, numels))
        for state, old in zip(states, held, strict=True):
            assert torch.equal(state["residual"], old) == refreshes


def test_without_momentum_the_optimizer_is_not_asked() -> None:
    """Gradients, for a codec that keeps sizes, travel through it in every step."""
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = AdamW(parameters, lr=0.01)
    sync = VirtualSync(
        sent("int8", "adamw", "recommended"),
        parameters,
        num_workers=NUM_WORKERS,
        optimizer=optimizer,
    )
    play(sync, optimizer, 0)
    assert sync.optimizer is None and float(sync.tensors[0].states[0]["residual"].norm()) > 0
