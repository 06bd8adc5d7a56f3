"""VGG (Simonyan and Zisserman, ICLR 2015), without BatchNorm, and a small network for the demo.

In all of them most bytes are in one tensor, that of a linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

WIDTHS = {
    11: (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0),
    16: (64, 64, 0, 128, 128, 0, *(256,) * 3, 0, *(512,) * 3, 0, *(512,) * 3, 0),
    19: (64, 64, 0, 128, 128, 0, *(256,) * 4, 0, *(512,) * 4, 0, *(512,) * 4, 0),
}
"""Channels of each 3x3 convolution, by the number of layers with weights; 0 halves the image."""


def vgg(
    widths: Sequence[int], hidden: int = 4096, num_classes: int = 1000, dropout: float = 0.5
) -> nn.Module:
    """Return a VGG for images of side 32 and more; published with 224.

    `widths` is one of `WIDTHS`, or another of the same form; `hidden` is the width of the two fully
    connected layers, each of which is followed by a dropout.
    """
    layers, channels = _convolutions(widths)
    layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    layers += _linears(channels * 7 * 7, hidden, num_classes, dropout)
    _init(layers)
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def small_vgg(widths: Sequence[int], hidden: int, num_classes: int = 10) -> nn.Module:
    """Return a VGG without dropout for images of side 32 and more; made for 32.

    `widths` has the form of `WIDTHS`; `hidden` is the width of the two linear layers, which
    hold most of the bytes.
    """
    layers, channels = _convolutions(widths)
    side = 32 >> widths.count(0)
    # The pooling does not change images of side 32. It is one layer with the Flatten, so that later
    # layers keep their numbers, and their weights the names that older checkpoints use.
    layers.append(nn.Sequential(nn.AdaptiveAvgPool2d(side), nn.Flatten()))
    layers += _linears(channels * side**2, hidden, num_classes)
    _init(layers)
    return nn.Sequential(*layers)


def cnn(num_classes: int = 10, width: int = 32, hidden: int = 512) -> nn.Module:
    """Return three convolutions and a fully connected layer, for images of side 8 to 64.

    The convolutions have `width`, 2 * `width` and 4 * `width` channels.
    """
    layers, channels = _convolutions((width, 0, 2 * width, 4 * width))
    layers += [
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(channels * 4 * 4, hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_classes),
    ]
    _init(layers[:-5])
    return nn.Sequential(*layers)


def _convolutions(widths: Sequence[int]) -> tuple[list[nn.Module], int]:
    layers: list[nn.Module] = []
    channels = 3
    for width in widths:
        if width == 0:
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
    return layers, channels


def _linears(
    size: int, hidden: int, num_classes: int, dropout: float | None = None
) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in (hidden, hidden):
        layers += [nn.Linear(size, width), nn.ReLU()]
        layers += [] if dropout is None else [nn.Dropout(dropout)]
        size = width
    return [*layers, nn.Linear(size, num_classes)]


def _init(layers: list[nn.Module]) -> None:
    for layer in layers:
        # With torch's default the signal fades in a deep stack without BatchNorm.
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)  # as in the paper; larger values diverge
