"""A small network for small images, used by the demo; most bytes are in one Linear layer."""

from __future__ import annotations

from torch import nn


def cnn(num_classes: int = 10, width: int = 32, hidden: int = 512) -> nn.Module:
    """Return three convolutions and a fully connected layer, for images of side 8 to 64.

    The convolutions have `width`, 2 * `width` and 4 * `width` channels.
    """
    layers = [
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(2 * width, 4 * width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(4 * width * 4 * 4, hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_classes),
    ]
    for layer in layers:
        # torch's default shrinks the signal in every convolution, and there is no BatchNorm.
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(*layers)
