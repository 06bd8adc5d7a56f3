"""U-GAT-IT (Kim et al., ICLR 2020): images of one domain in the style of another, without pairs.

Two generators and four discriminators train against each other. The original alternates: a step of
the discriminators, then one of the generators. Here both take the same step, from one backward
pass in which each network gets the gradient of its own loss only.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from hipress.errors import UsageError

CYCLE, IDENTITY, CAM = 10, 10, 1000
"""Weights in the generators' loss, as published; the adversarial part has weight 1."""


class Ugatit(nn.Module):
    """All six networks; the output is the loss.

    A generator that is not light takes no other side; a light one makes the style from the mean of
    a feature map, not from all of it. There are `num_blocks` residual blocks before the attention,
    and after it; `depths` are the layers of the global and of the local discriminators.
    """

    def __init__(
        self,
        *,
        side: int = 256,
        channels: int = 64,
        num_blocks: int = 4,
        is_light: bool = False,
        depths: tuple[int, int] = (7, 5),
    ) -> None:
        super().__init__()
        self.to_b = _Generator(side, channels, num_blocks, is_light)
        self.to_a = _Generator(side, channels, num_blocks, is_light)
        self.judges_a = nn.ModuleList(_Discriminator(channels, depth) for depth in depths)
        self.judges_b = nn.ModuleList(_Discriminator(channels, depth) for depth in depths)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the discriminators' loss plus the generators', whose gradients do not mix."""
        self._clip()
        fakes = self.to_b(a), self.to_a(b)
        (fake_b, _), (fake_a, _) = fakes
        judged = self.discriminators_loss(a, b, fake_a.detach(), fake_b.detach())
        return judged + self.generators_loss(a, b, fakes)

    def discriminators_loss(self, a: Tensor, b: Tensor, fake_a: Tensor, fake_b: Tensor) -> Tensor:
        """Return how far their outputs are from 1 for real images and 0 for generated ones."""
        loss = a.new_zeros(())
        for judges, real, fake in ((self.judges_a, a, fake_a), (self.judges_b, b, fake_b)):
            for judge in judges:
                for found in judge(real):
                    loss = loss + (found - 1).square().mean()
                for found in judge(fake):
                    loss = loss + found.square().mean()
        return loss

    def generators_loss(
        self, a: Tensor, b: Tensor, fakes: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]
    ) -> Tensor:
        """Return the sum of the adversarial, cycle, identity and attention losses; `fakes` are the
        outputs of `to_b` for a, and of `to_a` for b.
        """
        (fake_b, cam_b), (fake_a, cam_a) = fakes
        same_b, cam_same_b = self.to_b(b)
        same_a, cam_same_a = self.to_a(a)
        fooled = _fooled(self.judges_a, fake_a) + _fooled(self.judges_b, fake_b)
        cycle = _distance(self.to_a(fake_b)[0], a) + _distance(self.to_b(fake_a)[0], b)
        identity = _distance(same_a, a) + _distance(same_b, b)
        # The attention must tell images to be translated from those of the target domain.
        cam = a.new_zeros(())
        for found, is_foreign in ((cam_b, 1), (cam_a, 1), (cam_same_b, 0), (cam_same_a, 0)):
            wanted = torch.full_like(found, is_foreign)
            cam = cam + functional.binary_cross_entropy_with_logits(found, wanted)
        return fooled + CYCLE * cycle + IDENTITY * identity + CAM * cam

    def _clip(self) -> None:
        """Clamp each rho to 0 to 1, which the last step may have left."""
        if not self.training:
            return
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, _MixedNorm):
                    module.rho.clamp_(0, 1)


def _distance(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).abs().mean()


def _fooled(judges: nn.ModuleList, fake: Tensor) -> Tensor:
    """Return how far the discriminators' outputs are from 1, without gradients for them."""
    loss = fake.new_zeros(())
    for judge in judges:
        fixed = {name: parameter.detach() for name, parameter in judge.named_parameters()}
        for found in functional_call(judge, fixed, (fake,)):
            loss = loss + (found - 1).square().mean()
    return loss


class _Attention(nn.Module):
    """A class activation map: which channels tell the domains apart, and how much."""

    def __init__(self, channels: int, slope: float, *, is_normed: bool) -> None:
        super().__init__()
        self.slope = slope
        self.mean = nn.Linear(channels, 1, bias=False)
        self.most = nn.Linear(channels, 1, bias=False)
        if is_normed:
            spectral_norm(self.mean)
            spectral_norm(self.most)
        self.mix = nn.Conv2d(2 * channels, channels, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted features and two logits."""
        mean, most = self.mean.weight, self.most.weight
        pooled = functional.linear(x.mean((2, 3)), mean), functional.linear(x.amax((2, 3)), most)
        logits = torch.cat(pooled, dim=1)
        weighed = torch.cat([x * mean[:, :, None, None], x * most[:, :, None, None]], dim=1)
        return functional.leaky_relu(self.mix(weighed), self.slope), logits


class _MixedNorm(nn.Module):
    """rho times instance norm plus (1 - rho) times layer norm."""

    def __init__(self, channels: int, rho: float) -> None:
        super().__init__()
        self.rho = nn.Parameter(torch.full((1, channels, 1, 1), rho))

    def forward(self, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        by_channel = functional.instance_norm(x)
        by_image = functional.group_norm(x, 1)
        # lerp would fail under autocast, which gives the two norms different types.
        return (by_image + self.rho * (by_channel - by_image)) * gamma + beta


class _Rescaled(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _MixedNorm(channels, rho=0.0)
        self.gamma = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x, self.gamma, self.beta)  # type: ignore[no-any-return]


def _conv(before: int, after: int, side: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.ReflectionPad2d(side // 2), nn.Conv2d(before, after, side, stride=stride, bias=False)
    )


class _Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _conv(channels, channels, 3),
            nn.InstanceNorm2d(channels),
            nn.ReLU(),
            _conv(channels, channels, 3),
            nn.InstanceNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x, self.layers(x))


class _StyledBlock(nn.Module):
    """A residual block whose norms are scaled and shifted by the image's style."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = _conv(channels, channels, 3), _conv(channels, channels, 3)
        self.norms = nn.ModuleList(_MixedNorm(channels, rho=0.9) for _ in range(2))

    def forward(self, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
        inner = self.norms[0](self.first(x), gamma, beta).relu()
        return torch.add(x, self.norms[1](self.second(inner), gamma, beta))


class _Generator(nn.Module):
    def __init__(self, side: int, channels: int, num_blocks: int, is_light: bool) -> None:
        super().__init__()
        self.side = side
        self.is_light = is_light
        width = 4 * channels
        layers: list[nn.Module] = []
        for before, after, kernel, stride in (
            (3, channels, 7, 1),
            (channels, 2 * channels, 3, 2),
            (2 * channels, width, 3, 2),
        ):
            conv = _conv(before, after, kernel, stride)
            layers += [conv, nn.InstanceNorm2d(after), nn.ReLU()]
        self.down = nn.Sequential(*layers, *(_Block(width) for _ in range(num_blocks)))
        self.attention = _Attention(width, 0.0, is_normed=False)
        self.style = nn.Sequential(
            nn.Linear(width if is_light else width * (side // 4) ** 2, width, bias=False),
            nn.ReLU(),
            nn.Linear(width, width, bias=False),
            nn.ReLU(),
        )
        self.gamma = nn.Linear(width, width, bias=False)
        self.beta = nn.Linear(width, width, bias=False)
        self.blocks = nn.ModuleList(_StyledBlock(width) for _ in range(num_blocks))
        layers = []
        for before in (width, width // 2):
            layers += [
                nn.Upsample(scale_factor=2),
                _conv(before, before // 2, 3),
                _Rescaled(before // 2),
                nn.ReLU(),
            ]
        self.up = nn.Sequential(*layers, _conv(channels, 3, 7), nn.Tanh())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the image in the other style, and the attention's logits."""
        self._check(x)
        x, logits = self.attention(self.down(x))
        style = self.style(x.mean((2, 3)) if self.is_light else x.flatten(1))
        gamma, beta = self.gamma(style)[:, :, None, None], self.beta(style)[:, :, None, None]
        for block in self.blocks:
            x = block(x, gamma, beta)
        return self.up(x), logits

    def _check(self, x: Tensor) -> None:
        height, width = x.shape[2:]
        if self.is_light and height % 4 == width % 4 == 0:
            return
        if (height, width) != (self.side, self.side):
            rule = "sides that 4 divides" if self.is_light else f"a side of {self.side}"
            raise UsageError(
                f"images of {height} x {width} do not fit U-GAT-IT, which takes {rule}; "
                f"choose a side of {self.side}."
            )


class _Discriminator(nn.Module):
    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        # Four convolutions reduce the image 8 times, six reduce it 32 times.
        widths = [3, *(channels << index for index in range(depth - 1))]
        layers: list[nn.Module] = []
        for index, (before, after) in enumerate(itertools.pairwise(widths)):
            stride = 1 if index == depth - 2 else 2
            conv = spectral_norm(nn.Conv2d(before, after, 4, stride=stride))
            layers += [nn.ReflectionPad2d(1), conv, nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers)
        self.attention = _Attention(widths[-1], 0.2, is_normed=True)
        self.last = nn.Sequential(
            nn.ReflectionPad2d(1), spectral_norm(nn.Conv2d(widths[-1], 1, 4, bias=False))
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return how real each patch is, and the attention's logits."""
        x, logits = self.attention(self.layers(x))
        return self.last(x), logits
