"""What docs/codecs.md says of each codec, checked: bytes, bounds on the error, the way back."""

import struct

import pytest
import torch
import torch.distributed as dist

import hipress


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_none() -> None:
    c = hipress.codec("none")
    x = torch.tensor([1.0, -2.0, 0.5])
    payload = c.encode(x)
    assert payload[80:].numpy().tobytes() == struct.pack("<3f4x", 1.0, -2.0, 0.5)
    assert torch.equal(c.decode(payload), x)
    assert c.aggregator(4) is c


def test_fp16() -> None:
    c = hipress.codec("fp16")
    payload = c.encode(torch.tensor([1.0, -2.0, 0.1]))
    assert payload[80:].numpy().tobytes() == struct.pack("<3e10x", 1.0, -2.0, 0.1)

    x = torch.cat([torch.randn(100_000) * 10.0**k for k in range(-9, 4)])
    y = c.decode(c.encode(x))
    bound = torch.maximum(x.abs() * 2.0**-11, torch.tensor(2.0**-25))
    assert ((y - x).abs() <= bound).all()
    assert c.decode(c.encode(torch.tensor([65519.0, 65520.0]))).tolist() == [65504.0, float("inf")]
    half = torch.randn(1000).half()
    assert torch.equal(c.decode(c.encode(half)), half.float())  # a float16 gradient is exact
    assert c.aggregator(4) is c


def test_bf16() -> None:
    c = hipress.codec("bf16")
    payload = c.encode(torch.tensor([1.0, -2.0, 3.14159]))
    assert payload[80:].numpy().tobytes() == struct.pack("<3H10x", 0x3F80, 0xC000, 0x4049)

    x = torch.cat([torch.randn(100_000) * 10.0**k for k in range(-30, 31, 5)])
    y = c.decode(c.encode(x))
    assert ((y - x).abs() <= x.abs() * 2.0**-8).all()
    narrow = torch.randn(1000).bfloat16()
    assert torch.equal(c.decode(c.encode(narrow)), narrow.float())  # a bfloat16 gradient is exact
    assert c.aggregator(4) is c


def test_int8() -> None:
    c = hipress.codec("int8(ef=false)")
    x = torch.cat([torch.linspace(-127, 127, 256), torch.zeros(44)])
    body = c.encode(x)[80:].numpy().tobytes()
    assert len(body) == 320 and c.wire_bytes(300) == 400
    assert body[:16] == struct.pack("<2f8x", 1.0, 0.0)
    assert body[16] == 1 and body[16 + 255] == 255 and set(body[272:316]) == {128}

    x = torch.randn(100_096)
    largest = x.view(-1, 256).abs().amax(dim=1, keepdim=True)
    e = (c.decode(c.encode(x)) - x).view(-1, 256).abs()
    assert (e <= largest / 254 * 1.0001).all()  # half a step
    assert hipress.codec("int8").aggregator(4).name == "int8"


def test_int4() -> None:
    c = hipress.codec("int4(ef=false)")
    x = torch.cat([torch.linspace(-7, 7, 128), torch.zeros(12)])
    body = c.encode(x)[80:].numpy().tobytes()
    assert len(body) == 16 + 80 and c.wire_bytes(140) == 176
    assert body[:16] == struct.pack("<2f8x", 1.0, 0.0)
    assert body[16] == 0x11 and body[16 + 63] == 0xFF and set(body[80:86]) == {0x88}

    x = torch.randn(100_096)
    largest = x.view(-1, 128).abs().amax(dim=1, keepdim=True)
    e = (c.decode(c.encode(x)) - x).view(-1, 128).abs()
    assert (e <= largest / 14 * 1.0001).all()  # half a step
    shares = []
    for block in (64, 128, 256):
        c = hipress.codec(f"int4(block={block}, ef=false)")
        shares.append(((c.decode(c.encode(x)) - x).square().sum() / x.square().sum()).item())
    assert [round(100 * share, 1) for share in shares] == [1.2, 1.4, 1.6]
    assert hipress.codec("int4").aggregator(4).name == "int4"


def test_onebit() -> None:
    x = torch.tensor([1.0, -2.0, 0.5, 0.0, -0.25, 3.0, -1.5, 4.0, 0.75, -3.0])
    signs = bytes([0b01010010, 0b10])
    one, two = hipress.codec("onebit(ef=false)"), hipress.codec("onebit(means=2, ef=false)")
    assert one.encode(x)[80:].numpy().tobytes() == struct.pack("<f12x", 1.6) + signs + bytes(14)
    low, high = -6.75 / 4, 9.25 / 6
    assert two.encode(x)[80:].numpy().tobytes() == struct.pack(
        "<f12xf12x", low, high
    ) + signs + bytes(14)

    x = torch.randn(10 * 1024)
    blocks = x.double().view(10, 1024)
    s = blocks.abs().mean(dim=1)
    left = blocks.square().sum(dim=1) - 1024 * s.square()  # ||x||^2 - m s^2
    e = [
        (c.decode(c.encode(x)) - x).double().view(10, 1024).square().sum(dim=1) for c in (one, two)
    ]
    assert torch.allclose(e[0], left, rtol=1e-4)
    assert (e[1] <= e[0] * (1 + 1e-6)).all()  # two means are never worse
    assert hipress.codec("onebit").aggregator(4).name == "onebit"


def test_tbq() -> None:
    x = torch.tensor([1.0, -2.0, 0.5, 0.0, -0.25, 3.0, -1.5, 4.0, 0.75, -3.0])
    plain = hipress.codec("tbq(tau=0.5, ef=false)")
    payload = plain.encode(x)
    codes = [2, 0, 2, 1, 1, 2, 0, 2, 2, 0]
    packed = sum(code << 2 * i for i, code in enumerate(codes)).to_bytes(16, "little")
    assert payload[80:].numpy().tobytes() == packed
    assert plain.decode(payload).tolist() == [0.5, -0.5, 0.5, 0, 0, 0.5, -0.5, 0.5, 0.5, -0.5]

    c = hipress.codec("tbq(tau=0.5)")
    state = c.init(torch.empty(10_000))
    for _ in range(50):
        c.encode(torch.empty(10_000).uniform_(-0.5, 0.5), state)
        assert state["residual"].abs().max() < 0.5

    a = c.aggregator(4)  # all workers agree: 0.4 at every step
    assert a.name == "tbq(tau=0.5, levels=4)" and a.wire_bytes(10) == 80 + 16
    nearest = hipress.codec("tbq(tau=0.5, levels=4, ef=false)")  # multiples of 0.125, up to 0.5
    payload = nearest.encode(x)
    assert payload[80:85].numpy().tobytes() == bytes([0x08, 0x48, 0x82, 0x80, 0x08])
    assert nearest.decode(payload).tolist() == [0.5, -0.5, 0.5, 0, -0.25, 0.5, -0.5, 0.5, 0.5, -0.5]
    states, back, arrived = [c.init(x) for _ in range(4)], a.init(x), torch.zeros(10)
    for _ in range(100):
        mean = torch.zeros(10)
        for state in states:
            c.decode(c.encode(torch.full((10,), 0.4), state), out=mean, add=True, alpha=1 / 4)
        arrived += a.decode(a.encode(mean, back))
        assert not back["residual"].any()  # the mean came back whole
    assert (arrived - 40).abs().max() < 0.5  # less than tau behind, at the workers


def test_terngrad() -> None:
    c = hipress.codec("terngrad(clip=0)")
    x = torch.tensor([4.0, -4.0, 0.0, 0.0, 4.0, -4.0])  # nothing is left to chance here
    body = c.encode(x, c.init(x))[80:].numpy().tobytes()
    assert body == struct.pack("<f12x", 4.0) + bytes([0b00001001, 0b1001]) + bytes(14)

    x = torch.linspace(-1, 1, 1000)
    state, mean, noise = c.init(x, seed=1), torch.zeros(1000), 0.0
    for _ in range(2000):
        y = c.decode(c.encode(x, state))
        mean += y / 2000
        noise += ((y - x).square().sum() / 2000).item()
    assert (mean - x).abs().max() < 5 * 0.5 / 2000**0.5  # unbiased: five standard errors
    expected = (x.abs() * (1 - x.abs())).sum().item()  # the variance, with s = 1
    assert abs(noise / expected - 1) < 0.01
    assert hipress.codec("terngrad").aggregator(4).name == "dithering(levels=4, ef=false)"


def test_minmax() -> None:
    c = hipress.codec("minmax(bits=2)")
    x = torch.tensor([-3.0, 3.0, 3.0, -3.0, 3.0, -3.0])  # nothing is left to chance here
    body = c.encode(x, c.init(x))[80:].numpy().tobytes()
    assert body == struct.pack("<BB2xff4x", 2, 6 % 4, -3.0, 3.0) + bytes(
        [0b00111100, 0b0011]
    ) + bytes(14)

    x = torch.linspace(-1, 2, 1000)
    state, mean, gap = c.init(x, seed=1), torch.zeros(1000), 3 / 3
    for _ in range(2000):
        y = c.decode(c.encode(x, state))
        assert (y - x).abs().max() < gap * 1.00001
        mean += y / 2000
    assert (mean - x).abs().max() < 5 * gap / 2 / 2000**0.5  # unbiased: five standard errors
    assert c.aggregator(4) is c


def test_dithering() -> None:
    c = hipress.codec("dithering")
    x = torch.tensor([4.0, -4.0, 2.0, -2.0, 0.0, 4.0])  # all on a level: nothing is left to chance
    body = c.encode(x, c.init(x))[80:].numpy().tobytes()
    assert body == struct.pack("<f12x", 4.0) + bytes([0x54, 0x32, 0x40]) + bytes(13)

    def run(expression, x, times=2000):
        """The mean of what is decoded, the largest error, and the mean of ||e||^2."""
        c = hipress.codec(expression)
        state, mean, largest, square = (
            c.init(x, seed=1),
            torch.zeros_like(x),
            torch.zeros_like(x),
            0.0,
        )
        for _ in range(times):
            y = c.decode(c.encode(x, state))
            mean += y / times
            largest = torch.maximum(largest, (y - x).abs())
            square += (y - x).double().square().sum().item() / times
        return mean, largest, square

    x = torch.linspace(-1, 1, 1000)
    mean, largest, square = run("dithering(levels=4)", x)
    assert (mean - x).abs().max() < 5 * 0.125 / 2000**0.5  # unbiased: five standard errors
    assert largest.max() <= 0.25 * 1.0001 and square <= 1000 * 0.25**2 / 4

    mean, largest, square = run("dithering(levels=4, partition=natural)", x)
    assert (mean - x).abs().max() < 5 * 0.25 / 2000**0.5
    assert (largest <= torch.clamp(x.abs(), min=0.125) * 1.0001).all()

    x = torch.randn(1000)
    _, _, square = run("dithering(levels=4, norm=l2)", x, times=200)
    assert square <= min(1000 / 16, 1000**0.5 / 4) * x.square().sum().item()
    assert c.aggregator(4) is c


def test_dgc() -> None:
    c = hipress.codec("dgc(ratio=0.01)")
    state, u, v = c.init(torch.empty(1000)), torch.zeros(1000), torch.zeros(1000)
    assert {"velocity", "residual"} <= set(state)
    for _ in range(20):  # the recipe, in plain torch
        g = torch.randn(1000)
        payload = c.encode(g, state)
        u = 0.9 * u + g
        v = v + u
        sent = v.abs().topk(10).indices.sort().values
        assert payload[80:84].view(torch.int32).item() == 10
        assert payload[96:136].view(torch.int32).tolist() == sent.tolist()
        assert torch.equal(payload[144:184].view(torch.float32), v[sent])
        u[sent], v[sent] = 0, 0
        assert torch.equal(state["velocity"], u) and torch.equal(state["residual"], v)
    assert c.aggregator(4).name == "topk(ratio=0.01, workers=4)"

    warm = hipress.codec("dgc(warmup=400)")  # a quarter at first, 0.1 % from step 400 on
    assert [start for start, _ in warm.phases] == [0, 100, 200, 300, 400]
    assert [warm.phase(s).wire_bytes(10**6) for s in (0, 399, 400)] == [2_000_096, 32_096, 8_096]
    assert warm.max_wire_bytes(10**6) == 2_000_096

    warm = hipress.codec("dgc(ratio=0.01, warmup=30)")
    state = warm.init(torch.empty(10_000))  # one state for all phases
    for step in range(40):
        now = warm.phase(step)
        payload = now.encode(torch.randn(10_000), state)
        assert now.decode(payload).count_nonzero() <= (
            2500 if step < 10 else 625 if step < 20 else 160
        )
    assert payload.numel() == warm.wire_bytes(10_000)  # from step 30 on it is the codec itself


def test_graddrop() -> None:
    c = hipress.codec("graddrop")
    x = torch.arange(1000.0)
    state = c.init(x)
    body = c.encode(x, state)[80:].numpy()
    assert body.nbytes == 112
    assert body[:4].view("<u4").tolist() == [10]
    assert (
        body[16:56].view("<u4").tolist()
        == body[64:104].view("<f4").tolist()
        == list(range(990, 1000))
    )
    assert torch.equal(state["residual"], torch.where(x >= 990, 0.0, x))  # nothing is lost
    assert c.aggregator(4).name == "topk(ratio=0.01, workers=4)"


def test_topk() -> None:
    x = torch.tensor([1.0, -2.0, 0.5, 0.0, -0.25, 3.0, -1.5, 4.0, 0.75, -3.0])
    exact = hipress.codec("topk(ratio=0.2, exact=true, ef=false)")
    body = exact.encode(x)[80:].numpy().tobytes()
    assert body == struct.pack("<I12x2I8x2f8x", 2, 5, 7, 3.0, 4.0)  # of 3.0 and -3.0 the first

    x, k = torch.randn(100_000), 20_000
    e = (exact.decode(exact.encode(x)) - x).double()
    assert e.square().sum() <= (1 - k / 100_000) * x.double().square().sum()

    c = hipress.codec("topk(ratio=0.2, ef=false)")
    sent = [c.decode(c.encode(x, c.init(x, seed=s))).count_nonzero().item() / k for s in range(20)]
    assert max(sent) <= 1 and sum(sent) / 20 > 0.97  # how full the message is
    worker = hipress.codec("topk(ratio=0.01)")
    back = worker.aggregator(4)
    assert back.name == "topk(ratio=0.01, exact=false, sample=0.01, workers=4)"
    assert worker.wire_bytes(50) == 80 + 16 + 2 * 16  # room for 1 element,
    assert back.wire_bytes(50) == 80 + 16 + 2 * 16  # for 4,
    assert worker.aggregator(5).wire_bytes(50) == 80 + 16 + 2 * 32  # and for 5


def test_randomk() -> None:
    c = hipress.codec("randomk(ratio=0.2)")
    x = torch.arange(1.0, 11.0)
    body = c.encode(x, c.init(x, seed=1))[80:].numpy()
    first, second = body[16:24].view("<f4").tolist()
    assert body.nbytes == 32 and 1 <= first <= 5 and 6 <= second <= 10  # one from each half

    assert c.shares_stream
    gradients = [torch.randn(1000) for _ in range(4)]
    states = [c.init(x, seed=7, stream=0) for x in gradients]  # one stream for all
    a, mean = c.aggregator(4), torch.zeros(1000)
    its_state = a.init(mean, seed=7, stream=0)
    for _ in range(3):
        mean.zero_()
        for x, state in zip(gradients, states, strict=True):
            c.decode(c.encode(x, state), out=mean, add=True, alpha=0.25)
        assert mean.count_nonzero() == 200
        assert torch.equal(
            a.decode(a.encode(mean, its_state)), mean
        )  # nothing is lost on the way back

    x, plain = torch.randn(1000), hipress.codec("randomk(ratio=0.2, ef=false)")
    state = plain.init(x)
    e = [(plain.decode(plain.encode(x, state)) - x).square().sum().item() for _ in range(2000)]
    assert abs(sum(e) / 2000 / x.square().sum().item() - (1 - 0.2)) < 0.01


def test_ef() -> None:
    c = hipress.codec("ef(topk(ratio=0.1, exact=true))")
    state = c.init(torch.empty(1000))
    total, arrived = torch.zeros(1000), torch.zeros(1000)
    for _ in range(100):
        g = torch.randn(1000)
        before = state["residual"].clone()
        y = c.decode(c.encode(g, state))
        assert torch.allclose(y + state["residual"], g + before, atol=1e-6)
        total, arrived = total + g, arrived + y
    assert torch.allclose(arrived + state["residual"], total, atol=1e-4)  # nothing is lost
    delta = 0.1  # k / n: see Error
    assert state["residual"].norm() ** 2 < 4 * (1 - delta) / delta**2 * 1000


def test_momentum() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(100) for _ in range(10)]

    def train(optimizer, weight, make_gradient):
        for g in gradients:
            weight.grad = make_gradient(g)
            optimizer.step()
        return weight.detach()

    for nesterov in (True, False):
        a, b = (torch.nn.Parameter(torch.zeros(100)) for _ in range(2))
        usual = torch.optim.SGD([a], lr=0.1, momentum=0.9, nesterov=nesterov)
        c = hipress.codec("momentum(none)", nesterov=nesterov)
        state = c.init(a)
        plain = torch.optim.SGD([b], lr=0.1)  # no momentum here: the codec has it
        expected = train(usual, a, lambda g: g.clone())
        assert torch.allclose(
            train(plain, b, lambda g, c=c, state=state: c.decode(c.encode(g, state))),
            expected,
            atol=1e-5,
        )

    c = hipress.codec("momentum(ef(onebit), mu=0.9)")
    assert set(c.init(torch.empty(8))) == {"momentum", "residual"}
    assert c.aggregator(4).name == "onebit"  # momentum is not applied twice

    worker = hipress.codec("momentum(ef(onebit), nesterov=true)")
    aggregator = worker.aggregator(num_workers=2)
    gradients = [torch.randn(5000) for _ in range(2)]
    states = [worker.init(g, stream=rank) for rank, g in enumerate(gradients)]
    its_state = aggregator.init(gradients[0])
    rates = [0.1, 0.1, 0.05]  # the learning rate of each step
    for before, now in zip([rates[0], *rates], rates, strict=False):
        for state in (*states, its_state):
            state["lr_ratio"] = torch.tensor(before / now)
        mean = torch.zeros(5000)
        for g, state in zip(gradients, states, strict=True):
            worker.decode(worker.encode(g, state), out=mean, add=True, alpha=1 / 2)
        update = aggregator.decode(aggregator.encode(mean, its_state))
        assert update.isfinite().all()


def test_the_frame() -> None:
    frame = hipress.codec("bf16").encode(torch.ones(3)).numpy().tobytes()
    assert len(frame) == hipress.codec("bf16").wire_bytes(3) == 64 + 16 + 16
    assert frame[:4] == b"HiPF" and frame[4:8] == bytes([1, 0, 0, 0])
    assert int.from_bytes(frame[32:40], "little") == 96
    assert (
        int.from_bytes(frame[64:72], "little") == 3 and int.from_bytes(frame[72:80], "little") == 16
    )
    assert frame[80:] == bytes([0x80, 0x3F] * 3 + [0] * 10)  # 1.0 is 0x3F80 in bfloat16


def test_an_exchange() -> None:
    def exchange(gradients, worker, states, aggregator, its_state):
        """The mean as every rank gets it, through both codecs."""
        mean = torch.zeros(gradients[0].numel())
        for gradient, state in zip(gradients, states, strict=True):
            worker.decode(
                worker.encode(gradient, state), out=mean, add=True, alpha=1 / len(gradients)
            )
        return aggregator.decode(aggregator.encode(mean, its_state))

    worker = hipress.codec("topk(ratio=0.1, exact=true)")
    aggregator = worker.aggregator(4)
    gradients = [torch.randn(1000) for _ in range(4)]
    states = [worker.init(g, stream=rank) for rank, g in enumerate(gradients)]
    mean = exchange(gradients, worker, states, aggregator, aggregator.init(gradients[0]))
    assert mean.count_nonzero() > 300  # the union: each worker sent 100 places


def test_an_exchange_by_hand() -> None:
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1
    )  # under torchrun: "gloo" alone
    rank, num_workers = dist.get_rank(), dist.get_world_size()
    parameters = list(torch.nn.Linear(64, 10).parameters())

    worker = hipress.codec("onebit")
    aggregator = worker.aggregator(num_workers)
    stream = 0 if worker.shares_stream else rank
    states = [worker.init(p, stream=stream) for p in parameters]  # one state per tensor
    back_states = [aggregator.init(p) for p in parameters]

    def exchange_gradients():
        """Between backward() and the optimizer's step: each p.grad becomes the mean."""
        for k, p in enumerate(parameters):
            owner, payload = k % num_workers, worker.encode(p.grad, states[k])
            frames = (
                [torch.empty_like(payload) for _ in range(num_workers)] if rank == owner else None
            )
            dist.gather(payload, frames, dst=owner)
            back = torch.empty(aggregator.wire_bytes(p.numel()), dtype=torch.uint8)
            if rank == owner:  # decode, average and encode in one call
                aggregator.merge(frames, worker, p.numel(), back_states[k], out=back)
            dist.broadcast(back, src=owner)
            aggregator.decode(back, out=p.grad)

    for p in parameters:
        p.grad = torch.randn_like(p)
    exchange_gradients()
    assert all(p.grad.abs().sum() > 0 for p in parameters)

    bulk = worker.bulk([p.numel() for p in parameters])
    flat = torch.zeros(bulk.numel)
    state = bulk.init(flat, stream=stream)
    for p, view in zip(parameters, bulk.views(flat), strict=True):
        view.copy_(p.grad.view(-1))
    payload = bulk.encode(flat, state)
    assert payload.numel() == bulk.wire_bytes < sum(worker.wire_bytes(n) for n in bulk.numels)
    bulk.decode(payload, out=flat)  # add=True and alpha as in decode
    dist.destroy_process_group()
