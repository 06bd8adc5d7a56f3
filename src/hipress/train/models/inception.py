"""Inception v3 (Szegedy et al., 2015), without the auxiliary head: many gradients of every size."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

_Shape = int | tuple[int, int]
_Width = Callable[[int], int]


def inception_v3(num_classes: int = 1000, divide: int = 1, dropout: float = 0.5) -> nn.Module:
    """Return an Inception v3 for images of side 75 and more; published with 299.

    `divide` divides all widths (by at most 16), to make a small model for tests.
    """

    def c(width: int) -> int:
        return width // divide

    def conv(before: int, after: int, side: _Shape, stride: int = 1) -> nn.Module:
        return _conv(before, after, side, stride=stride, padding=0)

    net = nn.Sequential(
        conv(3, c(32), 3, stride=2),
        conv(c(32), c(32), 3),
        _conv(c(32), c(64), 3),
        nn.MaxPool2d(3, stride=2),
        conv(c(64), c(80), 1),
        conv(c(80), c(192), 3),
        nn.MaxPool2d(3, stride=2),
        _wide(c, c(192), c(32)),
        _wide(c, c(256), c(64)),
        _wide(c, c(288), c(64)),
        _Join(  # halves the image
            conv(c(288), c(384), 3, stride=2),
            nn.Sequential(
                _conv(c(288), c(64), 1), _conv(c(64), c(96), 3), conv(c(96), c(96), 3, stride=2)
            ),
            nn.MaxPool2d(3, stride=2),
        ),
        *(_factored(c, width) for width in (128, 160, 160, 192)),
        _Join(  # halves the image
            nn.Sequential(_conv(c(768), c(192), 1), conv(c(192), c(320), 3, stride=2)),
            nn.Sequential(
                _chain((c(768), c(192), c(192), c(192)), (1, (1, 7), (7, 1))),
                conv(c(192), c(192), 3, stride=2),
            ),
            nn.MaxPool2d(3, stride=2),
        ),
        _forked(c, c(1280)),
        _forked(c, c(2048)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(dropout),
        nn.Linear(c(2048), num_classes),
    )
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return net


class _Join(nn.Module):
    """Branches over the same input, whose channels are concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _conv(
    before: int, after: int, side: _Shape, stride: int = 1, padding: int | None = None
) -> nn.Module:
    """Return convolution, BatchNorm and ReLU; by default they keep the image's side."""
    height, width = (side, side) if isinstance(side, int) else side
    room = (height // 2, width // 2) if padding is None else padding
    return nn.Sequential(
        nn.Conv2d(before, after, (height, width), stride=stride, padding=room, bias=False),
        nn.BatchNorm2d(after, eps=1e-3),
        nn.ReLU(),
    )


def _chain(widths: Iterable[int], sides: Iterable[_Shape]) -> nn.Module:
    """Return a sequence of convolutions; `widths` begins with that of the input."""
    before, *after = widths
    layers = []
    for width, side in zip(after, sides, strict=True):
        layers.append(_conv(before, width, side))
        before = width
    return nn.Sequential(*layers)


def _pooled(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), _conv(before, after, 1))


def _wide(c: _Width, before: int, pooled: int) -> nn.Module:
    return _Join(
        _conv(before, c(64), 1),
        _chain((before, c(48), c(64)), (1, 5)),
        _chain((before, c(64), c(96), c(96)), (1, 3, 3)),
        _pooled(before, pooled),
    )


def _factored(c: _Width, width: int) -> nn.Module:
    """Return a block with 7x7 convolutions factored into 1x7 and 7x1."""
    before, inner, after = c(768), c(width), c(192)
    return _Join(
        _conv(before, after, 1),
        _chain((before, inner, inner, after), (1, (1, 7), (7, 1))),
        _chain((before, inner, inner, inner, inner, after), (1, (7, 1), (1, 7), (7, 1), (1, 7))),
        _pooled(before, after),
    )


def _forked(c: _Width, before: int) -> nn.Module:
    def fork() -> nn.Module:
        return _Join(_conv(c(384), c(384), (1, 3)), _conv(c(384), c(384), (3, 1)))

    return _Join(
        _conv(before, c(320), 1),
        nn.Sequential(_conv(before, c(384), 1), fork()),
        nn.Sequential(_chain((before, c(448), c(384)), (1, 3)), fork()),
        _pooled(before, c(192)),
    )
