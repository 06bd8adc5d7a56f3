"""Accelerate with compressed gradients: torchrun --nproc-per-node 2 examples/accelerate_train.py.

`hipress.accelerate.attach` goes after `prepare`, which wraps the model in DDP. `save_state` and
`load_state` then include the state of the codec: call them on all ranks. Run again with --resume to
continue from the last checkpoint, also with another number of ranks.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hipress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", default="accelerate-digits", help="for checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the checkpoint there")
    args = parser.parse_args()

    set_seed(0)
    pixels, numbers = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(numbers)
    training = TensorDataset(images[:1400], labels[:1400])
    layers = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))

    accelerator = Accelerator(cpu=True)
    model, optimizer, batches = accelerator.prepare(
        layers,
        torch.optim.SGD(layers.parameters(), lr=0.1),
        DataLoader(training, batch_size=20, shuffle=True),
    )
    sync = hipress.accelerate.attach(accelerator, model, optimizer, codec="onebit", check_every=10)
    if args.resume:
        accelerator.load_state(args.folder)

    for _ in range(args.epochs):
        for inputs, targets in batches:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
    accelerator.save_state(args.folder)

    if accelerator.is_main_process:
        loss = nn.functional.cross_entropy(layers(images[1400:]), labels[1400:])
        stats = sync.stats()
        print(
            f"step {sync.step}: loss {loss:.3f}; {stats.num_compressed} gradients compressed, "
            f"{stats.ratio:.1f} times fewer bytes",
            flush=True,
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
