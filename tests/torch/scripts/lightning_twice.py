"""Lightning on two ranks: a checkpoint after fit, and a second fit that continues from it.

With `hipress.torch.AdamW`, accumulated gradients and a loss scale: all that the callback finds.
"""

import logging
import sys
import warnings
from pathlib import Path

import lightning
import torch
from torch import nn

import hipress


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(128, 64)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return (self.layer(batch) - batch[:, :64]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return hipress.torch.AdamW(self.parameters(), lr=1e-2, refresh_warmup=2)


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    compress = hipress.lightning.Compress("onebit", min_size=0, check_every=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        accumulate_grad_batches=2,
        callbacks=[compress],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, data = Model(), torch.randn(32, 128)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
    first = compress.sync
    # 16 elements for each rank are 4 batches, which are 2 steps, in each of 2 epochs.
    assert first.step == 4, first.step
    assert first.layout.senders, "AdamW's momentum is not exchanged"
    trainer.save_checkpoint(folder / "after.ckpt")
    saved = torch.load(folder / "after.ckpt", weights_only=False)["callbacks"]["Compress"]
    assert saved["step"] == 4 and saved["ranks"]["1"]["layer.weight"]["residual"].any()

    trainer.fit_loop.max_epochs = 3
    trainer.fit(
        model,
        torch.utils.data.DataLoader(data, batch_size=4),
        ckpt_path=folder / "after.ckpt",
        weights_only=False,
    )
    assert compress.sync is not first
    assert compress.sync.step == 6, compress.sync.step
    print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
