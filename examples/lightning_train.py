"""Lightning with compressed gradients, on two CPU ranks: python examples/lightning_train.py.

`DDPStrategy(ddp_comm_state=state, ddp_comm_hook=hook)` takes `hipress.torch.comm_hook(...)` too,
but Lightning registers that hook on GPUs only, without a warning on CPUs. A callback that calls
`hipress.attach` works on both, knows the names of gradients, and saves the state of the codec in
Lightning's checkpoints. Run again with --resume to continue from the last one.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hipress


class Compress(lightning.Callback):
    """Attaches HiPress once Lightning has wrapped the model."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.loaded: dict[str, Any] | None = None

    def on_fit_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.sync = hipress.attach(trainer.strategy.model, **self.settings)
        if self.loaded is not None:
            self.sync.load_state_dict(self.loaded)

    # Lightning calls these two on all ranks, the second before the model is wrapped.
    def state_dict(self) -> dict[str, Any]:
        return self.sync.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = state_dict


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5, help="in all, those before among them")
    parser.add_argument("--folder", default="lightning-digits", help="for checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint there")
    args = parser.parse_args()

    lightning.seed_everything(0)
    pixels, numbers = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(numbers)
    training = TensorDataset(images[:1400], labels[:1400])
    compress = Compress(codec="onebit")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=args.epochs,
        callbacks=[compress, ModelCheckpoint(args.folder, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    last = f"{args.folder}/last.ckpt" if args.resume else None
    trainer.fit(model, DataLoader(training, batch_size=20, shuffle=True), ckpt_path=last)

    if trainer.is_global_zero:
        right = (model(images[1400:]).argmax(1) == labels[1400:]).float().mean()
        stats = compress.sync.stats()
        print(
            f"step {compress.sync.step}: {100 * right:.1f} % right; {stats.sent_bytes} bytes sent, "
            f"{stats.ratio:.1f} x less than plain",
            flush=True,
        )


if __name__ == "__main__":
    main()
