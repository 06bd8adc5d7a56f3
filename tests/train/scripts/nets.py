"""Models of a user's own, for `package.module:callable`."""

import torch
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


class Unused(nn.Module):
    """Has a layer that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = plain(10), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class FailsLater(nn.Module):
    """Fails on its third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.num_calls = plain(10), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 3:
            raise ValueError("third call.")
        return self.inner(x)
