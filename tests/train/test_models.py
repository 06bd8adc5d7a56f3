"""Models: their sizes, what they compute, that they train, and those of the user's own."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hipress.errors import UsageError
from hipress.train.data import synthetic
from hipress.train.models import MODELS, Model, model, names, timed
from hipress.train.models.inception import inception_v3
from hipress.train.models.lstm import Lstm
from hipress.train.models.resnet import resnet
from hipress.train.models.transformers import Attention, Bert, Gpt, Transformer, positions
from hipress.train.models.ugatit import Ugatit, _MixedNorm
from hipress.train.models.vgg import cnn, small_vgg, vgg
from hipress.train.tasks import TASKS, UNLABELLED, Batch, Draw
from tests.grid import full, thinned

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text("utf-8")

# Name: parameters, gradients, largest gradient, MiB as float32.
PUBLISHED = {
    "vgg11": (132_863_336, 22, 102_760_448, "506.83"),
    "vgg16": (138_357_544, 32, 102_760_448, "527.79"),
    "vgg19": (143_667_240, 38, 102_760_448, "548.05"),
    "resnet18": (11_689_512, 62, 2_359_296, "44.59"),
    "resnet50": (25_557_032, 161, 2_359_296, "97.49"),
    "resnet18-v2": (11_687_848, 58, 2_359_296, "44.59"),
    "resnet50-v2": (25_549_480, 155, 2_359_296, "97.46"),
    "inception-v3": (23_834_568, 284, 2_048_000, "90.92"),
    "lstm": (85_974_278, 10, 49_917_000, "327.97"),
    "transformer": (61_362_176, 185, 17_258_496, "234.08"),
    "bert-base": (110_106_428, 206, 23_440_896, "420.02"),
    "bert-large": (336_226_108, 398, 31_254_528, "1282.60"),
    "gpt2": (124_439_808, 148, 38_597_376, "474.70"),
    "gpt2-medium": (354_823_168, 292, 51_463_168, "1353.54"),
    "gpt2-large": (774_030_080, 436, 64_328_960, "2952.69"),
    "gpt2-xl": (1_557_611_200, 580, 80_411_200, "5941.82"),
    "ugatit": (670_761_088, 148, 268_435_456, "2558.75"),
    "ugatit-light": (134_021_248, 148, 33_554_432, "511.25"),
}
MAX_BUILD_S = 30.0
"""The slowest took 2 s; to fill the weights of the largest takes minutes."""
WHOLE = ("vgg", "gpt", "cnn", "mlp")
"""Those that a test can afford as they are."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors: where others use the cores, two threads wait for each other all the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.device("meta"):
        model("cnn").build()  # what torch loads for its first tensor without memory: 2 s
    yield
    torch.set_num_threads(before)


@lru_cache
def on_meta(name: str) -> tuple[nn.Module, float]:
    """A model without memory, and the seconds of CPU that it took: others may use the clock."""
    began = time.process_time()
    with torch.device("meta"):
        built = model(name).build()
    return built, time.process_time() - began


# --- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_models_are_as_large_as_they_say(name: str) -> None:
    net, build_s = on_meta(name)
    assert sum(p.numel() for p in net.parameters()) == model(name).num_parameters
    assert build_s < MAX_BUILD_S


@pytest.mark.parametrize("name", PUBLISHED)
def test_gradients_are_those_of_the_publication(name: str) -> None:
    sizes = [p.numel() for p in on_meta(name)[0].parameters()]
    mib = f"{sum(sizes) * 4 / 2**20:.2f}"
    assert (sum(sizes), len(sizes), max(sizes), mib) == PUBLISHED[name]


def test_every_listed_model_is_held_to_numbers() -> None:
    assert set(names()) == {*PUBLISHED, "vgg", "gpt", "cnn"}
    assert all(MODELS[name].published for name in names())


@pytest.mark.parametrize(
    ("name", "millions"), [("vgg", 25), ("gpt", 25), ("gpt-124m", 124), ("cnn", 1.2), ("mlp", 0.1)]
)
def test_sizes_that_others_count_on(name: str, millions: float) -> None:
    assert model(name).num_parameters == pytest.approx(millions * 1e6, rel=0.07)


def test_most_bytes_of_vgg_and_cnn_are_in_one_tensor_and_few_of_gpt() -> None:
    shares = {
        name: max(p.numel() for p in on_meta(name)[0].parameters()) / model(name).num_parameters
        for name in ("vgg", "cnn", "gpt")
    }
    assert shares["vgg"] > 0.7 and shares["cnn"] > 0.9 and shares["gpt"] < 0.25


def test_the_old_name_of_gpt2() -> None:
    one, two = model("gpt-124m"), model("gpt2")
    assert (one.num_parameters, one.batch, one.length) == (124_439_808, 4, 1024)
    assert one.build is two.build and one.draw is two.draw and "gpt-124m" not in names()


# --- the shapes of data --------------------------------------------------------------------------


def meta_outputs(net: nn.Module, batch: Batch) -> list[tuple[int, ...]]:
    inputs = {2: 1, 4: 2, 3: 2}[len(batch)]
    if isinstance(net, Ugatit):
        inputs = 2
    with torch.no_grad():
        found = net(*(part.to("meta") for part in batch[:inputs]))
    return [tuple(one.shape) for one in (found if isinstance(found, tuple) else (found,))]


SHAPES = {
    "classify": [(2, 1000)],
    "language": [(2, 0, 0)],
    "masked": [(2, 128, 30_522), (2, 2)],
    "translate": [(2, 64, 33_708)],
    "style": [()],
}
"""By task; a language model has its own length and vocabulary."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_synthetic_data_fits_the_whole_model(name: str) -> None:
    line = model(name)
    assert line.task is not None
    expected = SHAPES[line.task]
    if line.task == "language":
        expected = [(2, line.length or 0, {"lstm": 33_278}.get(name, 50_257))]
    assert meta_outputs(on_meta(name)[0], line.data(0, batch=2)) == expected


@pytest.mark.parametrize("name", [name for name in names() if MODELS[name].task == "classify"])
def test_the_smallest_images(name: str) -> None:
    side = model(name).least_side
    assert side is not None
    net, _ = on_meta(name)
    assert meta_outputs(net, (torch.zeros(2, 3, side, side), torch.zeros(2)))[0][0] == 2
    if name.startswith(("vgg1", "inception")):
        with pytest.raises(RuntimeError):
            meta_outputs(net, (torch.zeros(2, 3, side - 1, side - 1), torch.zeros(2)))


@pytest.mark.parametrize("side", [8, 9, 28, 32, 64])
def test_cnn_takes_images_of_any_side(side: int) -> None:
    net = cnn(num_classes=7, width=2, hidden=3)
    assert net(torch.ones(2, 3, side, side)).shape == (2, 7)


@pytest.mark.parametrize("name", thinned(names(), keep=names()[::3]))
def test_models_take_the_sizes_of_their_task(name: str) -> None:
    line = model(name)
    sizes = {"classify": {"num_classes": 7}, "style": {}}.get(line.task or "", {"vocabulary": 300})
    with torch.device("meta"):
        net = line.build(**sizes)
    length = line.length or 0
    if line.task == "style":
        return
    side = line.side or 0
    ones = torch.ones(1, length).long()
    batch = {
        "classify": (torch.zeros(1, 3, side, side), ones),
        "language": (ones, ones),
        "masked": (ones, ones, ones, ones),
        "translate": (ones, ones, ones),
    }[line.task or ""]
    assert meta_outputs(net, batch)[0][-1] == (sizes.get("num_classes") or sizes["vocabulary"])


def test_masked_tokens_are_hidden_where_they_are_to_be_guessed() -> None:
    tokens, segments, labels, is_next = model("bert-base").data(0, batch=6)
    is_hidden = labels != UNLABELLED
    assert is_hidden.sum(1).tolist() == [20] * 6  # 15 % of 128, rounded up
    assert bool((tokens[is_hidden] == synthetic.MASK).all())
    assert not torch.equal(is_hidden[0], is_hidden[1])
    assert segments.tolist() == [[0] * 64 + [1] * 64] * 6
    assert is_next.shape == (6,) and set(is_next.tolist()) <= {0, 1}


def test_targets_are_one_token_behind() -> None:
    tokens, targets = model("gpt").data(rank=0)
    assert tokens.shape == targets.shape == (1, 64)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    source, target_in, target_out = model("transformer").data(rank=0, batch=3)
    assert torch.equal(target_in[:, 1:], target_out[:, :-1])
    assert target_in[:, 0].tolist() == [1, 1, 1]
    assert min(source.min(), target_out.min()) >= 3 and not torch.equal(source, target_out)


def test_images_of_two_domains_lie_between_minus_one_and_one() -> None:
    a, b = model("ugatit").data(rank=0, batch=1)
    assert a.shape == b.shape == (1, 3, 256, 256) and not torch.equal(a, b)
    for one in (a, b):
        assert -1 <= one.min() < -0.99 and 0.99 < one.max() <= 1


# --- training ------------------------------------------------------------------------------------

SMALL_UGATIT = {"side": 32, "channels": 4, "num_blocks": 1, "depths": (5, 4)}
SMALL: dict[str, tuple[Callable[[], nn.Module], str, Draw, float]] = {
    # Name: build, task, made-up data, learning rate.
    "vgg": (
        partial(vgg, (8, 0, 16, 16, 0), 32, 10, dropout=0.0),
        "classify",
        partial(synthetic.images, (3, 32, 32), 10),
        0.05,
    ),
    "resnet": (
        partial(resnet, (1, 1), is_bottleneck=False, num_classes=10, width=8),
        "classify",
        partial(synthetic.images, (3, 32, 32), 10),
        0.02,
    ),
    "resnet-v2": (
        partial(resnet, (1, 1), is_bottleneck=True, is_v2=True, num_classes=10, width=8),
        "classify",
        partial(synthetic.images, (3, 32, 32), 10),
        0.02,
    ),
    "inception": (
        partial(inception_v3, 10, divide=16, dropout=0.0),
        "classify",
        partial(synthetic.images, (3, 96, 96), 10),
        0.005,
    ),
    "lstm": (
        partial(Lstm, vocabulary=50, width=16, dropout=0.0),
        "language",
        partial(synthetic.tokens, 50, 7),
        1.0,
    ),
    "gpt": (
        partial(Gpt, vocabulary=50, context=7, width=16, num_layers=2, num_heads=2),
        "language",
        partial(synthetic.tokens, 50, 7),
        0.2,
    ),
    "transformer": (
        partial(
            Transformer,
            vocabulary=50, width=16, inner=32, num_layers=2, num_heads=2, dropout=0.0,
        ),
        "translate",
        partial(synthetic.translations, 50, 7),
        0.02,
    ),
    "bert": (
        partial(
            Bert, vocabulary=200, context=9, width=16, num_layers=2, num_heads=2, dropout=0.0
        ),
        "masked",
        partial(synthetic.masked, 200, 9),
        0.1,
    ),
    "ugatit": (partial(Ugatit, **SMALL_UGATIT), "style", partial(synthetic.pairs, 32), 3e-6),
    "ugatit-light": (
        partial(Ugatit, is_light=True, **SMALL_UGATIT),
        "style",
        partial(synthetic.pairs, 32),
        3e-6,
    ),
}  # fmt: skip


def small(name: str) -> tuple[nn.Module, str, Batch, float]:
    build, task, draw, rate = SMALL[name]
    torch.manual_seed(0)
    return build(), task, draw(4, torch.Generator().manual_seed(0)), rate


def check_that_it_trains(net: nn.Module, task: str, batch: Batch, rate: float) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        found = TASKS[task].loss(net, batch)
        found.backward()
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all() and parameter.grad.any(), name
        optimizer.step()
        losses.append(found.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.97 * losses[0], losses


@pytest.mark.parametrize("name", SMALL)
def test_small_forms_train_and_every_parameter_has_a_gradient(name: str) -> None:
    check_that_it_trains(*small(name))


@pytest.mark.parametrize("name", WHOLE)
@full
def test_whole_models_train(name: str) -> None:
    line = model(name)
    assert line.task is not None
    check_that_it_trains(line.make(), line.task, line.data(rank=0), 0.02 if name == "gpt" else 0.01)


@pytest.mark.parametrize("name", SMALL)
def test_models_run_with_narrow_numbers(name: str) -> None:
    net, task, batch, _ = small(name)
    wide = TASKS[task].loss(net, batch).item()
    with torch.autocast("cpu", torch.bfloat16):
        narrow = TASKS[task].loss(net, batch)
    narrow.backward()
    assert narrow.item() == pytest.approx(wide, rel=0.05)


@pytest.mark.parametrize("name", SMALL)
def test_random_numbers_decide_all_weights_and_buffers(name: str) -> None:
    first, again = small(name)[0], small(name)[0]
    torch.manual_seed(1)
    other = SMALL[name][0]()
    states = [net.state_dict() for net in (first, again, other)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert any(not torch.equal(states[0][key], states[2][key]) for key in states[0])


@pytest.mark.parametrize("name", WHOLE)
def test_weights_follow_the_seed_and_batches_the_rank(name: str) -> None:
    line = model(name)
    if name in ("mlp", "cnn"):
        first, again, other = (line.make(seed) for seed in (0, 0, 1))
        for one, two, three in zip(
            *(net.parameters() for net in (first, again, other)), strict=True
        ):
            assert torch.equal(one, two) and not torch.equal(one, three)
    (x, target), (x_again, target_again), (x_other, _) = (line.data(rank) for rank in (0, 0, 1))
    assert torch.equal(x, x_again) and torch.equal(target, target_again)
    assert not torch.equal(x, x_other)
    assert len(x) == line.batch and len(line.data(0, batch=3)[0]) == 3


def test_making_a_model_leaves_the_random_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model("mlp").make()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", [*WHOLE, "gpt2"])
def test_no_layer_lets_ranks_or_runs_differ(name: str) -> None:
    """The models of benchmarks: what they compute follows from their parameters alone."""
    net, _ = on_meta(name)
    barred = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    assert not any(isinstance(layer, barred) for layer in net.modules())
    assert not list(net.buffers())


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("vgg19", {0.5}),
        ("inception-v3", {0.5}),
        ("lstm", {0.65}),
        ("transformer", {0.1}),
        ("bert-large", {0.1}),
    ],
)
def test_dropout_is_as_published(name: str, rate: set[float]) -> None:
    net, _ = on_meta(name)
    found = {layer.p for layer in net.modules() if isinstance(layer, nn.Dropout)}
    found |= {layer.dropout for layer in net.modules() if isinstance(layer, Attention)}
    assert found == rate


def test_dropout_of_lstm_follows_from_torchs_random_numbers() -> None:
    """On a GPU that of nn.LSTM does not, so there must be none inside of it."""
    net = Lstm(vocabulary=20, width=6, num_layers=3, dropout=0.5)
    assert [layer.dropout for layer in net.layers] == [0, 0, 0]
    tokens = torch.randint(20, (4, 5), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(3)
    found = net(tokens)
    torch.manual_seed(3)
    hidden = functional.dropout(net.tokens(tokens), 0.5)
    for layer in net.layers:  # before each layer, and after the last
        hidden = functional.dropout(layer(hidden)[0], 0.5)
    torch.testing.assert_close(found, hidden @ net.tokens.weight.T + net.bias)


def test_cnn_learns_digits() -> None:
    data = pytest.importorskip("sklearn.datasets").load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None].repeat(1, 3, 1, 1) / 8 - 1
    labels = torch.tensor(data.target)
    net = model("cnn").make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(80):
        chosen = torch.randint(1200, (32,), generator=generator)
        optimizer.zero_grad()
        TASKS["classify"].loss(net, (images[chosen], labels[chosen])).backward()
        optimizer.step()
    score = TASKS["classify"].evaluate(net, (images[1200:], labels[1200:]))
    assert score.num_right / score.num_scored > 0.9


# --- what the families compute -------------------------------------------------------------------


def test_attention_is_a_mean_weighed_by_likeness() -> None:
    torch.manual_seed(0)
    net = Attention(6, 2, bias=True, dropout=0.0)
    x, memory = torch.randn(2, 3, 6), torch.randn(2, 5, 6)
    is_seen = torch.tensor([True, True, False, True, False])
    found = net(x, memory, mask=is_seen[None, None, None, :])
    query, key, value = net.query(x), net.key(memory), net.value(memory)
    mixed = torch.zeros(2, 3, 6)
    for head in (slice(0, 3), slice(3, 6)):
        likeness = query[..., head] @ key[..., head].transpose(1, 2) / 3**0.5
        weights = likeness.masked_fill(~is_seen, -torch.inf).softmax(-1)
        mixed[..., head] = weights @ value[..., head]
    torch.testing.assert_close(found, net.out(mixed))


def assert_blind_to_later_tokens(net: nn.Module, *before: Tensor) -> None:
    """Change the token at place 3: nothing before it may notice."""
    tokens = torch.tensor([[1, 2, 3, 4, 5]])
    changed = tokens.clone()
    changed[0, 3] = 9
    net.eval()
    with torch.no_grad():
        one, two = net(*before, tokens), net(*before, changed)
    assert one.shape[:2] == (1, 5)
    torch.testing.assert_close(one[:, :3], two[:, :3])
    assert not torch.allclose(one[:, 3:], two[:, 3:])


@pytest.mark.parametrize("name", ["gpt", "lstm", "transformer"])
def test_no_model_looks_ahead(name: str) -> None:
    net = small(name)[0]
    assert_blind_to_later_tokens(net, *([torch.tensor([[4, 5]])] if name == "transformer" else []))


def test_the_transformer_does_not_see_padding() -> None:
    net = small("transformer")[0].eval()
    target = torch.tensor([[1, 5, 6]])
    with torch.no_grad():
        short = net(torch.tensor([[7, 8, 9]]), target)
        padded = net(torch.tensor([[7, 8, 9, 0, 0]]), target)
        other = net(torch.tensor([[7, 8, 9, 3, 3]]), target)
        empty = net(torch.tensor([[0, 0]]), target)
    torch.testing.assert_close(short, padded)
    assert not torch.allclose(short, other)
    assert empty.isfinite().all()


def test_positions_are_sines_and_cosines() -> None:
    found = positions(4, 6, torch.device("cpu"))
    places = torch.arange(4.0)
    for wave, length in enumerate((1.0, 100.0, 10_000.0)):
        torch.testing.assert_close(found[:, wave], (places / length).sin())
        torch.testing.assert_close(found[:, 3 + wave], (places / length).cos())


def test_bert_sees_both_ways_and_tells_segments_apart() -> None:
    net = small("bert")[0].eval()
    tokens, segments = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1]])
    changed = torch.tensor([[1, 2, 3, 9]])
    with torch.no_grad():
        logits, order = net(tokens, segments)
        later, _ = net(changed, segments)
        joined, joined_order = net(tokens, torch.zeros_like(segments))
    assert logits.shape == (1, 4, 200) and order.shape == (1, 2)
    assert not torch.allclose(logits[:, 0], later[:, 0])
    assert not torch.allclose(logits, joined) and not torch.allclose(order, joined_order)


@pytest.mark.parametrize("name", ["gpt", "lstm", "transformer", "bert"])
def test_the_embedding_is_also_the_output(name: str) -> None:
    """Twice the matrix of tokens, with inputs left out: twice the logits."""
    net, _, batch, _ = small(name)
    net.eval()
    inputs = batch[: 2 if name in ("bert", "transformer") else 1]
    hidden: list[Tensor] = []
    original = functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight is net.tokens.weight:
            hidden.append(x)
        return original(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(functional, "linear", linear)
        found = net(*inputs)
    (last,) = hidden
    logits = found[0] if isinstance(found, tuple) else found
    bias = net.bias if hasattr(net, "bias") else 0
    torch.testing.assert_close(logits, last @ net.tokens.weight.T + bias)


@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_a_sequence_may_not_be_longer_than_the_positions(name: str) -> None:
    net, _, batch, _ = small(name)
    long = [torch.ones(1, 10).long()] * (2 if name == "bert" else 1)
    context = {"gpt": 7, "bert": 9}[name]
    with pytest.raises(UsageError) as caught:
        net(*long)
    assert str(caught.value) == (
        f"sequences of 10 tokens are longer than the {context} that this model has positions for; "
        f"choose a length of {context} or less."
    )


def test_lstm_is_the_two_layers_of_torch() -> None:
    torch.manual_seed(0)
    net = Lstm(vocabulary=20, width=6).eval()
    torch.manual_seed(0)
    tokens, bias = nn.Embedding(20, 6), torch.zeros(20)
    whole = nn.LSTM(6, 6, 2, dropout=0.65, batch_first=True).eval()
    nn.init.uniform_(tokens.weight, -0.1, 0.1)
    # Also the first weights are the same, in the same order.
    expected = [bias, tokens.weight, *whole.parameters()]
    for one, two in zip(net.parameters(), expected, strict=True):
        assert torch.equal(one, two)
    read = torch.tensor([[1, 2, 3, 19, 0], [4, 4, 5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(net(read), whole(tokens(read))[0] @ tokens.weight.T)


def test_the_small_vgg_takes_other_sides_and_does_what_it_did_at_32() -> None:
    torch.manual_seed(0)
    net = small_vgg((4, 0, 4, 0, 4, 0, 4, 0, 6, 0), hidden=8, num_classes=3)
    bare = nn.Sequential(*(nn.Flatten() if k == 15 else layer for k, layer in enumerate(net)))
    # Pooling does not change the names, which checkpoints and --exclude go by.
    assert [name for name, _ in net.named_parameters()] == [
        f"{k}.{kind}" for k in (0, 3, 6, 9, 12, 16, 18, 20) for kind in ("weight", "bias")
    ]
    images = torch.randn(2, 3, 96, 96)
    found = {}
    for one in (net, bare):
        net.zero_grad()
        logits = one(images[:, :, :32, :32])
        logits.square().sum().backward()
        found[one] = [logits, *(p.grad.clone() for p in net.parameters())]
    for here, there in zip(found[net], found[bare], strict=True):
        assert torch.equal(here, there)
    for side in (33, 64, 96):
        pixels = images[:, :, :side, :side]
        convolved = net[:15](pixels)
        assert convolved.shape[2:] == (side // 32,) * 2
        torch.testing.assert_close(net(pixels), net[16:](convolved.mean((2, 3))))


def test_only_resnet_v2_brings_images_to_one_scale() -> None:
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    same = {name: small(name)[0] for name in ("resnet", "resnet-v2")}
    close = {name: torch.allclose(net(x), net(30 * x + 5), atol=1e-3) for name, net in same.items()}
    assert close == {"resnet": False, "resnet-v2": True}


@pytest.mark.parametrize(("name", "num_around"), [("resnet50", 4), ("resnet50-v2", 4)])
def test_a_bottleneck_halves_the_image_in_its_3x3_convolution(name: str, num_around: int) -> None:
    convs = [m for m in on_meta(name)[0].modules() if isinstance(m, nn.Conv2d)]
    halving = [conv for conv in convs if conv.stride == (2, 2)]
    assert [conv.kernel_size[0] for conv in halving] == [7] + [3, 1] * 3
    wide = [c for c in convs if c.kernel_size == (1, 1) and c.out_channels == 4 * c.in_channels]
    assert len(wide) == 16 + 1  # the first block's way around does not halve
    assert sum(c.kernel_size == (1, 1) for c in convs) == 2 * 16 + num_around


# --- U-GAT-IT ------------------------------------------------------------------------------------


def gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("is_light", [False, True])
@pytest.mark.parametrize("is_training", [False, True])
def test_one_backward_gives_each_network_the_gradient_of_its_own_loss(
    is_light: bool, is_training: bool
) -> None:
    """The original's two backward passes, each with its own loss, are the reference."""
    torch.manual_seed(0)
    net = Ugatit(is_light=is_light, **SMALL_UGATIT)
    net.train(is_training)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    a, b = partial(synthetic.pairs, 32)(2, torch.Generator().manual_seed(1))
    together = net(a, b)
    together.backward()
    found = gradients(net)
    assert len(found) == len(list(net.parameters()))

    net.load_state_dict(state)  # in training a pass changes the vectors of the spectral norm
    net.zero_grad()
    fakes = net.to_b(a), net.to_a(b)
    judged = net.discriminators_loss(a, b, fakes[1][0].detach(), fakes[0][0].detach())
    judged.backward()
    expected = {k: g for k, g in gradients(net).items() if k.startswith("judges")}
    assert len(gradients(net)) == len(expected)
    net.zero_grad()
    made = net.generators_loss(a, b, fakes)
    made.backward()
    mine = {k: g for k, g in gradients(net).items() if k.startswith("to_")}
    assert len(gradients(net)) == len(mine)  # the discriminators got nothing
    assert found.keys() == (expected | mine).keys()
    for key, gradient in (expected | mine).items():
        torch.testing.assert_close(found[key], gradient, msg=lambda text, key=key: f"{key}: {text}")
    assert together.item() == pytest.approx(judged.item() + made.item(), rel=1e-5)


def test_the_losses_are_those_of_the_paper() -> None:
    """Written out once more, without loops, from what the networks say."""
    torch.manual_seed(0)
    net = Ugatit(is_light=True, **SMALL_UGATIT).eval()
    a, b = partial(synthetic.pairs, 32)(2, torch.Generator().manual_seed(1))
    with torch.no_grad():
        fake_b, cam_b = net.to_b(a)
        fake_a, cam_a = net.to_a(b)
        same_b, cam_same_b = net.to_b(b)
        same_a, cam_same_a = net.to_a(a)
        said = {
            (domain, kind): [
                part for judge in judges for part in judge({"real": real, "fake": fake}[kind])
            ]
            for domain, judges, real, fake in (
                ("a", net.judges_a, a, fake_a),
                ("b", net.judges_b, b, fake_b),
            )
            for kind in ("real", "fake")
        }
        assert all(len(parts) == 4 for parts in said.values())  # global, local; patches, attention
        judged = sum(
            functional.mse_loss(part, torch.full_like(part, float(kind == "real")))
            for (_, kind), parts in said.items()
            for part in parts
        )
        fooled = sum(
            functional.mse_loss(part, torch.ones_like(part))
            for domain in "ab"
            for part in said[domain, "fake"]
        )
        cycle = functional.l1_loss(net.to_a(fake_b)[0], a)
        cycle += functional.l1_loss(net.to_b(fake_a)[0], b)
        identity = functional.l1_loss(same_a, a) + functional.l1_loss(same_b, b)
        cam = sum(
            -functional.logsigmoid(sign * logits).mean()
            for sign, logits in ((1, cam_b), (1, cam_a), (-1, cam_same_b), (-1, cam_same_a))
        )
        expected = judged + fooled + 10 * cycle + 10 * identity + 1000 * cam
        assert net(a, b).item() == pytest.approx(float(expected), rel=1e-5)


def test_rho_mixes_two_norms() -> None:
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    norm = _MixedNorm(3, rho=0.25)
    by_channel = (x - x.mean((2, 3), keepdim=True)) / (
        x.var((2, 3), correction=0, keepdim=True) + 1e-5
    ).sqrt()
    by_image = (x - x.mean((1, 2, 3), keepdim=True)) / (
        x.var((1, 2, 3), correction=0, keepdim=True) + 1e-5
    ).sqrt()
    expected = (0.25 * by_channel + 0.75 * by_image) * 2 + 3
    torch.testing.assert_close(norm(x, torch.tensor(2.0), torch.tensor(3.0)), expected)


def test_rho_is_brought_back_between_zero_and_one() -> None:
    net, _, batch, _ = small("ugatit-light")
    norms = [module for module in net.modules() if isinstance(module, _MixedNorm)]
    assert len(norms) == 2 * (2 + 2)
    with torch.no_grad():
        norms[0].rho.fill_(1.5)
        norms[1].rho.fill_(-0.5)
    kept = norms[2].rho.clone()
    net(*batch).backward()
    assert norms[0].rho.unique().tolist() == [1.0] and norms[1].rho.unique().tolist() == [0.0]
    assert torch.equal(norms[2].rho, kept)


def test_weights_of_discriminators_have_norm_one() -> None:
    net = small("ugatit")[0].eval()
    weights = [
        module.weight.flatten(1)
        for judge in (*net.judges_a, *net.judges_b)
        for module in judge.modules()
        if hasattr(module, "parametrizations") and hasattr(module, "weight")
    ]
    assert len(weights) == 2 * (4 + 3 + 2 * 3)
    for weight in weights:
        # 15 turns of power iteration have not quite arrived: they find a little too little.
        assert 0.99 < torch.linalg.matrix_norm(weight, 2).item() < 1.2


@pytest.mark.parametrize(
    ("is_light", "side", "rule"), [(False, 36, "a side of 32"), (True, 34, "sides that 4 divides")]
)
def test_images_that_do_not_fit_are_named(is_light: bool, side: int, rule: str) -> None:
    net = Ugatit(is_light=is_light, **SMALL_UGATIT)
    image = torch.zeros(1, 3, side, side)
    with pytest.raises(UsageError) as caught:
        net(image, image)
    assert str(caught.value) == (
        f"images of {side} x {side} do not fit U-GAT-IT, which takes {rule}; choose a side of 32."
    )


def test_light_takes_other_sides() -> None:
    net = Ugatit(is_light=True, **SMALL_UGATIT)
    image = torch.zeros(1, 3, 40, 40)
    assert net(image, image).isfinite()


# --- names ---------------------------------------------------------------------------------------


def test_an_unknown_model_names_the_nearest() -> None:
    with pytest.raises(UsageError) as caught:
        model("vggg")
    assert str(caught.value) == (
        f"model 'vggg' (did you mean 'vgg'?) is none of {', '.join(names())}; choose one, or name "
        "your own as package.module:callable."
    )
    assert names()[:3] == ["vgg", "gpt", "cnn"] and "mlp" not in names()


OWN = """
import torch

number = 3

class Net(torch.nn.Linear):
    def __init__(self, num_classes=10, bias=False):
        super().__init__(4, num_classes, bias)

def any_size(**sizes):
    return torch.nn.Linear(4, sum(sizes.values()))

def no_size():
    return torch.nn.Linear(4, 2)

def needs_more(num_classes, width):
    return torch.nn.Linear(width, num_classes)

def no_module(vocabulary=5):
    return [vocabulary]

def fails():
    return torch.zeros(2) + torch.zeros(3)

def frozen():
    return torch.nn.Linear(4, 2).requires_grad_(False)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module in the working folder, which is not on Python's path."""
    name = "own_models_of_a_test"
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / f"{name}_2.py").write_text("import no_such_package_of_mine\n")
    (tmp_path / f"{name}_3.py").write_text("\nnumber = 1 / 0\n")
    (tmp_path / f"{name}_4.py").write_text("raise SystemExit(2)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


@pytest.mark.parametrize(
    ("maker", "sizes", "expected"),
    [
        ("Net", {"num_classes": 7}, 7),
        ("Net", {"vocabulary": 7}, 10),
        ("Net", {}, 10),
        ("any_size", {"num_classes": 3, "vocabulary": 5}, 8),
        ("no_size", {"num_classes": 7}, 2),
    ],
    ids=["taken", "not-taken", "default", "all", "none"],
)
def test_a_model_of_the_users_own(
    own: str, maker: str, sizes: dict[str, int], expected: int
) -> None:
    line = model(f"{own}:{maker}")
    net = line.make(0, **sizes)
    assert isinstance(net, nn.Linear) and net.out_features == expected
    assert line.task is None and line.draw is None and line.num_parameters == 0
    again = line.make(0, **sizes)
    assert torch.equal(net.weight, again.weight)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "{own}:",
            "is not of the form package.module:callable; name a callable that returns a "
            "torch.nn.Module, or a model of the table.",
        ),
        (
            "no.such:Net",
            ": module 'no' is neither installed nor in this folder; correct the name, or run from "
            "the folder that holds it.",
        ),
        (
            "{own}_2:Net",
            ": module '{own}_2' imports 'no_such_package_of_mine', which is not installed; install "
            "it first.",
        ),
        ("{own}:Nett", ": module '{own}' has no 'Nett'; name a callable that it has."),
        (
            "{own}:number",
            "is of type int and cannot be called; name a function or class that returns a "
            "torch.nn.Module.",
        ),
        (
            "{own}:needs_more",
            "cannot be called with what this data gives (num_classes): missing a required "
            "argument: 'width'; give its other arguments defaults.",
        ),
        (
            "{own}:no_module",
            "returned list and not a torch.nn.Module; name a callable that does.",
        ),
        (
            "{own}_3:Net",
            ": module '{own}_3' cannot be imported: ZeroDivisionError: division by zero "
            "({own}_3.py, line 2); correct it.",
        ),
        (
            "{own}_4:Net",
            ": module '{own}_4' ends the program when it is imported; put its main part under if "
            "__name__ == '__main__'.",
        ),
        (
            "{own}:fails",
            "failed: RuntimeError: The size of tensor a (2) must match the size of tensor b (3) at "
            "non-singleton dimension 0 ({own}.py, line 23); correct it.",
        ),
        (
            "{own}:frozen",
            "has no parameter that is trained, so it has no gradients to exchange; set "
            "requires_grad of some parameters to True.",
        ),
    ],
    ids=[
        "form",
        "module",
        "import",
        "attribute",
        "call",
        "arguments",
        "result",
        "import-fails",
        "import-ends",
        "fails",
        "frozen",
    ],
)
def test_a_wrong_model_of_the_users_own(own: str, name: str, message: str) -> None:
    name, message = name.format(own=own), message.format(own=own)
    with pytest.raises(UsageError) as caught:
        model(name).make(0, num_classes=10)
    start = f"model {name!r}"
    assert str(caught.value) == start + (message if message.startswith(":") else f" {message}")


def test_the_current_folder_is_searched_first(own: str, tmp_path: Path) -> None:
    """Catches: an installed package that hides a user's file of the same name."""
    before = [entry for entry in sys.path if entry]
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / f"{own}.py").write_text("number = 4")
    sys.path[:] = [str(other), *before]
    assert isinstance(model(f"{own}:Net").make(), nn.Linear)


def test_a_model_of_the_users_own_has_no_made_up_data(own: str) -> None:
    with pytest.raises(UsageError) as caught:
        timed(f"{own}:Net")
    assert str(caught.value) == (
        f"model '{own}:Net' is your own, which has no made-up data to time it with; name yours "
        "with --data package.module:callable (https://hipress.readthedocs.io/en/latest/models/)."
    )


# --- docs/models.md -----------------------------------------------------------------------------

HEADER = ("name", "parameters", "gradients", "largest", "MiB", "data shape", "source")


def shape_of(line: Model) -> str:
    image = f"3 x {line.side} x {line.side}"
    return {
        "classify": image,
        "style": f"2 of {image}",
        "translate": f"{line.length} + {line.length} tokens",
    }.get(line.task or "", f"{line.length} tokens")


def expected_row(name: str) -> tuple[str, ...]:
    sizes = [p.numel() for p in on_meta(name)[0].parameters()]
    return (
        f"`{name}`",
        f"{sum(sizes):,}",
        str(len(sizes)),
        f"{max(sizes):,}",
        f"{sum(sizes) * 4 / 2**20:.2f}",
        shape_of(MODELS[name]),
        MODELS[name].published,
    )


def rows(text: str) -> list[tuple[str, ...]]:
    head = r"\| " + r" \| ".join(HEADER) + r" \|\n\|[-:| ]+\|\n"
    ((body),) = re.findall(head + r"((?:\|.*\|\n)+)", text)
    return [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in body.splitlines()]


def test_the_page_lists_every_model_as_it_is() -> None:
    assert rows(PAGE) == [expected_row(name) for name in names()]


def test_the_check_of_the_page_can_fail() -> None:
    wrong = PAGE.replace("143,667,240", "143,667,241")
    assert wrong != PAGE and rows(wrong) != [expected_row(name) for name in names()]
