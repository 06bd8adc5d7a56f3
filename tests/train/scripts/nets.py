"""Models of a user's own, for `package.module:callable`."""

from torch import nn


def plain(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(3 * 64, 256), nn.ReLU(), nn.Linear(256, num_classes)
    )


def with_dropout(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(3 * 64, 128),
        nn.Dropout(0.5),
        nn.ReLU(),
        nn.Linear(128, num_classes),
    )


def with_norm(num_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, num_classes),
    )


def wrong_size(num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
