"""ResNet (He et al., 2015) and its pre-activation form v2 (He et al., 2016), 18 and 50 layers.

v1 halves the image in the 3x3 convolution of a bottleneck, as torchvision does. v2 is that of
Gluon's model zoo: BatchNorm without scale and shift on the data, none in a block's shortcut.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

DEPTHS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
"""Blocks of each stage, by the number of layers with weights."""


def resnet(
    depths: Sequence[int],
    *,
    is_bottleneck: bool,
    is_v2: bool = False,
    num_classes: int = 1000,
    width: int = 64,
) -> nn.Module:
    """Return a ResNet for images of side 32 and more; published with 224.

    A bottleneck has three convolutions (50 layers) and not two (18 layers). In v2 BatchNorm and
    ReLU come before each convolution and not after it.
    """
    layers: list[nn.Module] = [nn.BatchNorm2d(3, affine=False)] if is_v2 else []
    layers += [
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    make = _BlockV2 if is_v2 else _Block
    channels = width
    for stage, depth in enumerate(depths):
        inner = width << stage
        outer = 4 * inner if is_bottleneck else inner
        for index in range(depth):
            stride = 2 if stage > 0 and index == 0 else 1
            convolutions = _convolutions(channels, inner, outer, stride, is_bottleneck)
            layers.append(make(convolutions, _shortcut(channels, outer, stride)))
            channels = outer
    if is_v2:
        layers += [nn.BatchNorm2d(channels), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
    net = nn.Sequential(*layers)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return net


def _convolutions(
    channels: int, inner: int, outer: int, stride: int, is_bottleneck: bool
) -> list[nn.Conv2d]:
    """Return the convolutions of a block; the first 3x3 one has the stride."""

    def conv(before: int, after: int, side: int, stride: int = 1) -> nn.Conv2d:
        return nn.Conv2d(before, after, side, stride=stride, padding=side // 2, bias=False)

    if is_bottleneck:
        return [conv(channels, inner, 1), conv(inner, inner, 3, stride), conv(inner, outer, 1)]
    return [conv(channels, inner, 3, stride), conv(inner, outer, 3)]


def _shortcut(channels: int, outer: int, stride: int) -> nn.Conv2d | None:
    """Return the convolution that fits a block's input to its output; None if it fits already."""
    if stride == 1 and channels == outer:
        return None
    return nn.Conv2d(channels, outer, 1, stride=stride, bias=False)


class _Block(nn.Module):
    def __init__(self, convolutions: list[nn.Conv2d], shortcut: nn.Conv2d | None) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for conv in convolutions:
            layers += [conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])  # the last ReLU comes after the sum
        self.around: nn.Module = nn.Identity()
        if shortcut is not None:
            self.around = nn.Sequential(shortcut, nn.BatchNorm2d(shortcut.out_channels))

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.layers(x), self.around(x)).relu()


class _BlockV2(nn.Module):
    def __init__(self, convolutions: list[nn.Conv2d], shortcut: nn.Conv2d | None) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm2d(convolutions[0].in_channels), nn.ReLU())
        layers: list[nn.Module] = []
        for conv in convolutions:
            layers += [nn.BatchNorm2d(conv.in_channels), nn.ReLU(), conv]
        self.layers = nn.Sequential(*layers[2:])
        self.around = shortcut

    def forward(self, x: Tensor) -> Tensor:
        active = self.first(x)
        around = x if self.around is None else self.around(active)
        return torch.add(self.layers(active), around)
