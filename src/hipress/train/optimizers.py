"""The optimizer of a training job: momentum is left out where a codec brings its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hipress.codecs.base import Codec
from hipress.session.buckets import applies_decay, has_momentum
from hipress.session.selection import Rules
from hipress.torch.ddp import clean, sparse_names, spec_of
from hipress.train.config import Config


def make(config: Config, model: nn.Module, rules: Rules | None) -> torch.optim.Optimizer:
    """The optimizer that the config names.

    Args:
        config: The job's.
        model: Whose parameters it moves.
        rules: What is compressed, and how; None: nothing is.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decay = config.weight_decay
    if config.optimizer != "sgd":
        kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
        return kind([p for _, p in named], lr=config.base_rate, weight_decay=decay)
    sent = {} if rules is None else sent_as_momentum(rules, model)
    # Where the codec decays weights, the optimizer must not.
    decayed = {name for name, codec in sent.items() if applies_decay(codec)}
    momentless = {"momentum": 0.0, "nesterov": False}
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named if name not in sent]},
        {"params": [p for name, p in named if name in sent and name not in decayed], **momentless},
        {"params": [p for name, p in named if name in decayed], "weight_decay": 0.0, **momentless},
    ]
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=config.base_rate,
        momentum=config.sgd_momentum,
        nesterov=config.nesterov,
        weight_decay=decay,
    )


def sent_as_momentum(rules: Rules, model: nn.Module) -> dict[str, Codec]:
    """Parameters whose codec sends momentum, so that a second one would count twice."""
    sparse = sparse_names(model)
    brings: dict[str, bool] = {}
    sent = {}
    for name, parameter in model.named_parameters():
        spec = spec_of(clean(name), parameter, is_sparse=clean(name) in sparse)
        codec = rules.choice(spec).codec
        if codec.name not in brings:
            brings[codec.name] = has_momentum(codec)
        if brings[codec.name]:
            sent[name] = codec
    return sent
