"""Training with a compressed exchange on one kind of device (see `tests/scenarios.py`)."""

import sys
from pathlib import Path

import torch

import hipress
import hipress.torch

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.scenarios import main
from tests.torch.scripts.models import batch, digest, mlp, warm_up, wrap

OPTIMIZERS = {
    "hipress AdamW": lambda p: hipress.torch.AdamW(p, 0.003, refresh_warmup=3, refresh_every=10),
    "torch AdamW": lambda p: torch.optim.AdamW(p, 0.003),
    "SGD": lambda p: torch.optim.SGD(p, 0.01),
}


def trains(rank, num_ranks, *, device, codec, optimizer, steps):
    """Train; return the losses, the bits, and how far compressed weights moved after 5 steps."""
    ddp = wrap(mlp().to(device))
    made = OPTIMIZERS[optimizer](ddp.parameters())
    hipress.attach(ddp, codec, optimizer=made)
    weights = [p for p in ddp.parameters() if p.dim() > 1]
    losses = []
    for step in range(steps):
        if step == 5:
            before = [p.detach().clone() for p in weights]
        made.zero_grad()
        loss = (ddp(batch(rank, step).to(device)) - 1).pow(2).mean()
        loss.backward()
        made.step()
        losses.append(loss.item())
    return {
        "bits": digest(*(p.cpu() for p in ddp.parameters())),
        "losses": losses,
        "moved": [float((p - q).abs().mean()) for p, q in zip(weights, before, strict=True)],
    }


if __name__ == "__main__":
    warm_up("onebit", "topk", "int8", "int8(ef=false)", "momentum(ef(onebit))")
    main(globals())
