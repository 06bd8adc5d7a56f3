"""`hipress.torch.AdamW` under Lightning and Accelerate: two ranks of torchrun train with each.

Arguments are the frameworks. Each rank writes what it has seen as a line of JSON.
"""

import hashlib
import json
import logging
import sys
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hipress

OPTIONS = {"codec": "onebit", "check_every": 2}
NUM_STEPS = 8


def layers():
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(64, 160), nn.ReLU(), nn.Linear(160, 40))


def data():
    """Batches of 16 for two ranks."""
    torch.manual_seed(8)
    x = torch.randn(2 * 16 * NUM_STEPS, 64)
    return DataLoader(TensorDataset(x, x[:, :40].abs()), batch_size=16)


def adamw(module):
    return hipress.torch.AdamW(module.parameters(), lr=3e-3, refresh_warmup=2, refresh_every=5)


class Seen:
    """What is noted before each step of the optimizer."""

    def __init__(self, module):
        self.names = {p: name for name, p in module.named_parameters()}
        self.momentum, self.sent, self.losses = [], [], []

    def note(self, optimizer, sync, loss):
        self.momentum.append(sorted(self.names[p] for p in optimizer._holds_momentum))
        self.sent.append(sync.stats().sent_bytes - sum(self.sent))
        self.losses.append(float(loss))

    def tell(self, framework):
        found = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in self.names))
        line = {"framework": framework, "bits": found.hexdigest()[:16], "momentum": self.momentum,
                "sent": self.sent, "losses": self.losses}  # fmt: skip
        sys.stdout.write(f"{json.dumps(line)}\n")  # at once: ranks share the pipe
        sys.stdout.flush()


def use_accelerate():
    from accelerate import Accelerator

    module = layers()
    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = accelerator.prepare(module, adamw(module), data())
    sync = hipress.accelerate.attach(accelerator, model, optimizer, **OPTIONS)
    seen = Seen(module)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        accelerator.backward(loss)
        seen.note(optimizer.optimizer, sync, loss)
        optimizer.step()
    seen.tell("accelerate")


def use_lightning():
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = layers()
            self.seen = Seen(self.layers)

        def training_step(self, batch, _):
            inputs, targets = batch
            self.loss = (self.layers(inputs) - targets).square().mean()
            return self.loss

        def on_before_optimizer_step(self, optimizer):
            self.seen.note(optimizer, compress.sync, self.loss)

        def configure_optimizers(self):
            return adamw(self)

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    compress = hipress.lightning.Compress(**OPTIONS)
    model = Model()
    lightning.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        callbacks=[compress],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, data())
    model.seen.tell("lightning")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in sys.argv[1:]:
        {"accelerate": use_accelerate, "lightning": use_lightning}[name]()
