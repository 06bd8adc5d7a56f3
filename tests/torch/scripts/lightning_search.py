"""Lightning on two ranks: searches for a learning rate, and a second model with the same callback.

Gradients in a search are a thousand times larger, and so are the residuals that it leaves.
"""

import logging
import os
import sys
import warnings
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import nn

import hipress


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 1e-3
        self.layer = nn.Linear(128, 64)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(32, 128), batch_size=4)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        searching = not any(isinstance(one, Watch) for one in self.trainer.callbacks)
        loss = (self.layer(batch) - batch[:, :64]).square().mean()
        return loss * (1000 if searching else 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Watch(Callback):
    """Notes the norm of each gradient that the optimizer is given; a search runs without it."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.norms.append(float(pl_module.layer.weight.grad.norm()))


class EachEpoch(LearningRateFinder):
    """Searches in the middle of training, as Lightning's documentation shows it."""

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.lr_find(trainer, pl_module)


def trained(kind: str, folder: str) -> None:
    compress, watch = hipress.lightning.Compress("onebit", min_size=0, check_every=1), Watch()
    searches = {"none": [], "start": [LearningRateFinder], "epoch": [EachEpoch], "other": []}[kind]
    finders = [one(num_training_steps=6, early_stop_threshold=None, update_attr=False)
               for one in searches]  # fmt: skip
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, max_epochs=1, callbacks=[compress, watch, *finders],
        default_root_dir=folder, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model())
    assert compress.sync.step == 4, compress.sync.step
    assert max(watch.norms) < 5, watch.norms
    if kind != "other":
        return
    trainer.fit_loop.max_epochs = 2
    second = Model()
    Tuner(trainer).lr_find(second, num_training=6, early_stop_threshold=None, update_attr=False)
    trainer.fit(second)
    assert compress.sync.step == 4, compress.sync.step


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    for kind in ("none", "start", "epoch", "other"):
        trained(kind, folder)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("right:", kind, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
