"""The Hugging Face Trainer with compressed gradients, on two CPU ranks:

    torchrun --nproc-per-node 2 examples/transformers_train.py

A small GPT-2 learns bytes of this file, from scratch; nothing is downloaded. With AdamW `onebit`
needs `hipress.torch.AdamW`, which the Trainer makes when it is given `optimizer_cls_and_kwargs`.
Run again with --resume to continue from the last checkpoint, also with another number of ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import hipress

LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="in all, those before among them")
    parser.add_argument("--folder", default="transformers-bytes", help="for checkpoints")
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint there")
    args = parser.parse_args()

    set_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    windows = text.unfold(0, LENGTH, 1)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    compress = hipress.transformers.CompressCallback(codec="onebit", check_every=10)
    trainer = Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(
            output_dir=args.folder,
            use_cpu=True,
            ddp_find_unused_parameters=False,
            per_device_train_batch_size=8,
            max_steps=args.steps,
            lr_scheduler_type="constant",
            logging_steps=10,
            save_steps=20,
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": window, "labels": window} for window in windows],
        optimizer_cls_and_kwargs=(hipress.torch.AdamW, {"lr": 3e-3, "refresh_warmup": 10}),
        callbacks=[compress],
    )
    trainer.train(resume_from_checkpoint=args.resume)

    if trainer.is_world_process_zero():
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        stats = compress.sync.stats()
        print(
            f"step {compress.sync.step}: loss {losses[-1]:.3f}; {stats.num_compressed} gradients "
            f"compressed, {stats.ratio:.1f} times fewer bytes",
            flush=True,
        )


if __name__ == "__main__":
    main()
