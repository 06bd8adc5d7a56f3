"""The models of the training jobs: a table of builders, each with a batch of made-up data.

To add one, write its module and add a line to `MODELS`. A model maps inputs to logits and its loss
is the cross entropy with the targets, so that every entry trains the same way. No BatchNorm and no
Dropout: ranks that hold the same parameters stay alike.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hipress.errors import UsageError

Batch = tuple[Tensor, Tensor]
"""Inputs and targets."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """One line of the table."""

    about: str
    """One line for the manual."""
    num_parameters: int
    """What `build` makes, to know the memory beforehand."""
    batch: int
    """Examples per rank and step, unless the user says otherwise."""
    build: Callable[[], nn.Module]
    """The model, with first weights from torch's random numbers."""
    draw: Callable[[int, torch.Generator], Batch]
    """So many examples of made-up data."""
    is_hidden: bool = False
    """For tests: works, and is not listed."""

    def make(self, seed: int = 0) -> nn.Module:
        """The model, its first weights decided by the seed."""
        with _seeded(seed):
            return self.build()

    def data(self, rank: int, batch: int | None = None) -> Batch:
        """One batch, the rank's own."""
        return self.draw(batch or self.batch, torch.Generator().manual_seed(rank))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The cross entropy of a batch, the mean over examples (or tokens).

    Example:
        >>> one = model("mlp")
        >>> 2 < loss(one.make(), one.data(rank=0)).item() < 4
        True
    """
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def model(name: str) -> Model:
    """The table's line of a name.

    Raises:
        UsageError: There is no such model.
    """
    if name in MODELS:
        return MODELS[name]
    near = difflib.get_close_matches(name.lower(), names(), n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise UsageError(f"model {name!r}{hint} is none of {', '.join(names())}; choose one.")


def names() -> list[str]:
    """The models that a user is told of."""
    return [name for name, line in MODELS.items() if not line.is_hidden]


def vgg(widths: Sequence[int], hidden: int, num_classes: int = 10) -> nn.Module:
    """VGG for 32x32 images (Simonyan and Zisserman, ICLR 2015).

    Args:
        widths: Channels of each 3x3 convolution; 0 halves the image.
        hidden: Width of the two fully connected layers, which hold most of the bytes.
        num_classes: Width of the last layer.
    """
    layers: list[nn.Module] = []
    channels, side = 3, 32
    for width in widths:
        if width == 0:
            layers.append(nn.MaxPool2d(2))
            side //= 2
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
    layers.append(nn.Flatten())
    size = channels * side * side
    for width in (hidden, hidden):
        layers += [nn.Linear(size, width), nn.ReLU()]
        size = width
    layers.append(nn.Linear(size, num_classes))
    for layer in layers:
        # torch's default would let the signal fade in a deep stack without BatchNorm.
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)  # as the paper; with more, steps diverge
    return nn.Sequential(*layers)


class Gpt(nn.Module):
    """A decoder of GPT-2's shape (Radford et al., 2019), its token embeddings tied to the output.

    Args:
        vocabulary: Number of tokens.
        context: The longest sequence.
        width: Of an embedding.
        num_layers: Blocks.
        num_heads: Of the attention in each block.
    """

    def __init__(
        self, *, vocabulary: int, context: int, width: int, num_layers: int, num_heads: int
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.apply(_init_like_gpt2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token, for each token."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.norm(self.blocks(self.tokens(tokens) + self.positions(places)))
        return functional.linear(hidden, self.tokens.weight)


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(self.norm(x)).view(batch, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return torch.add(x, self.mlp(x))


def _init_like_gpt2(layer: nn.Module) -> None:
    if isinstance(layer, nn.Linear | nn.Embedding):
        nn.init.normal_(layer.weight, std=0.02)
    if isinstance(layer, nn.Linear):
        nn.init.zeros_(layer.bias)


def _images(shape: tuple[int, ...]) -> Callable[[int, torch.Generator], Batch]:
    """Noise in ten classes."""

    def draw(batch: int, generator: torch.Generator) -> Batch:
        inputs = torch.randn(batch, *shape, generator=generator)
        return inputs, torch.randint(10, (batch,), generator=generator)

    return draw


def _tokens(vocabulary: int, length: int) -> Callable[[int, torch.Generator], Batch]:
    """Sequences of random tokens; the target of each is the one after it."""

    def draw(batch: int, generator: torch.Generator) -> Batch:
        drawn = torch.randint(vocabulary, (batch, length + 1), generator=generator)
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    return draw


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


MODELS: dict[str, Model] = {
    "vgg": Model(
        about="VGG for 32x32 images, 6 convolutions; 72 % of it is one fully connected layer",
        num_parameters=23_424_394,
        batch=8,
        build=lambda: vgg((64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 0), hidden=4096),
        draw=_images((3, 32, 32)),
    ),
    "gpt": Model(
        about="GPT of 6 layers, width 512, 12,000 tokens, sequences of 64",
        num_parameters=25_092_096,
        batch=1,
        build=lambda: Gpt(vocabulary=12_000, context=64, width=512, num_layers=6, num_heads=8),
        draw=_tokens(12_000, 64),
    ),
    "gpt-124m": Model(
        about="the shape of GPT-2 small: 12 layers, width 768, sequences of 1,024; for a GPU",
        num_parameters=124_439_808,
        batch=4,
        build=lambda: Gpt(vocabulary=50_257, context=1024, width=768, num_layers=12, num_heads=12),
        draw=_tokens(50_257, 1024),
    ),
    "mlp": Model(
        about="a perceptron that a test can afford",
        num_parameters=102_090,
        batch=8,
        build=lambda: nn.Sequential(
            nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 320), nn.ReLU(), nn.Linear(320, 10)
        ),
        draw=_images((64,)),
        is_hidden=True,
    ),
}
"""Name: model.

Batches of vgg and gpt were chosen so that a step without any exchange takes 0.2 to 0.6 s where
four ranks, a thread each, share two cores.
"""
