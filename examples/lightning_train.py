"""Lightning with compressed gradients, on two CPU ranks: python examples/lightning_train.py.

One callback attaches HiPress, puts the state of the codec into Lightning's checkpoints and logs.
Run again with --resume to continue from the last checkpoint, also with another number of --ranks.
"""

from __future__ import annotations

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hipress


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5, help="in all, those before among them")
    parser.add_argument("--folder", default="lightning-digits", help="for checkpoints and logs")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint there")
    args = parser.parse_args()

    lightning.seed_everything(0)
    pixels, numbers = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(numbers)
    training = TensorDataset(images[:1400], labels[:1400])
    compress = hipress.lightning.Compress(codec="onebit", check_every=10)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=args.ranks,
        max_epochs=args.epochs,
        callbacks=[compress, ModelCheckpoint(args.folder, save_last=True)],
        logger=CSVLogger(args.folder),
        log_every_n_steps=10,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Digits()
    last = f"{args.folder}/last.ckpt" if args.resume else None
    trainer.fit(model, DataLoader(training, batch_size=20, shuffle=True), ckpt_path=last)

    if trainer.is_global_zero:
        outputs = model.layers(images[1400:])
        loss = nn.functional.cross_entropy(outputs, labels[1400:])
        stats = compress.sync.stats()
        print(
            f"step {compress.sync.step}: loss {loss:.3f}; {stats.num_compressed} gradients "
            f"compressed, {stats.ratio:.1f} times fewer bytes",
            flush=True,
        )


if __name__ == "__main__":
    main()
