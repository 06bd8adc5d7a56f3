"""The optimizer of a training job, without momentum for parameters whose codec applies it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hipress.codecs.base import Codec
from hipress.session.buckets import applies_decay, has_momentum
from hipress.session.selection import Rules
from hipress.torch.ddp import clean, sparse_names, spec_of
from hipress.train.config import TrainConfig


def make(config: TrainConfig, model: nn.Module, rules: Rules | None) -> torch.optim.Optimizer:
    """Return the optimizer that the config names; without rules nothing is compressed."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decay = config.weight_decay
    if config.optimizer != "sgd":
        kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
        return kind([p for _, p in named], lr=config.base_rate, weight_decay=decay)
    sent = {} if rules is None else sent_as_momentum(rules, model)
    # If the codec applies weight decay, the optimizer must not.
    decayed = {name for name, codec in sent.items() if applies_decay(codec)}
    no_momentum = {"momentum": 0.0, "nesterov": False}
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if name not in sent]},
        {"params": [p for name, p in named if name in sent and name not in decayed], **no_momentum},
        {"params": [p for name, p in named if name in decayed], "weight_decay": 0.0, **no_momentum},
    ]
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=config.base_rate,
        momentum=config.sgd_momentum,
        nesterov=config.nesterov,
        weight_decay=decay,
    )


def sent_as_momentum(rules: Rules, model: nn.Module) -> dict[str, Codec]:
    """Return the codecs that send momentum, by parameter; a second momentum would count twice."""
    sparse = sparse_names(model)
    sent = {}
    for name, parameter in model.named_parameters():
        spec = spec_of(clean(name), parameter, is_sparse=clean(name) in sparse)
        codec = rules.choice(spec).codec
        if has_momentum(codec):
            sent[name] = codec
    return sent
