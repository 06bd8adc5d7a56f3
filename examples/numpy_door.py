"""Train a softmax regression in plain NumPy, with compressed gradients.

    hipress lab run --hosts 4 --rate 100mbit -- python examples/numpy_door.py --codec onebit
    hipress lab run --hosts 4 --rate 100mbit -- python examples/numpy_door.py --codec auto
    hipress lab run --hosts 3 -- python examples/numpy_door.py --codec onebit --resume state.pt

A loop without a framework hook needs three calls: `hipress.init()` joins the ranks,
`session.start` decides what is compressed, and `average` replaces gradients by their mean.
"""

import argparse
import json

import numpy as np
import torch
from sklearn.datasets import load_digits

import hipress
from hipress import session

CLASSES = 10


def examples(rank: int, num_ranks: int) -> tuple[np.ndarray, ...]:
    """Return this rank's part of the training digits, and all test digits."""
    digits = load_digits()
    pixels = (digits.data / 16).astype(np.float32)
    labels = digits.target
    train, test = slice(0, 1500), slice(1500, None)
    mine = slice(rank, None, num_ranks)
    return pixels[train][mine], labels[train][mine], pixels[test], labels[test]


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return probabilities, row by row."""
    shifted = np.exp(scores - scores.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def main() -> None:
    """Train, and print one JSON line on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", default="onebit", help="a codec expression, or auto")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rate", type=float, default=0.5, help="learning rate")
    parser.add_argument("--save", help="write a checkpoint here after the last step")
    parser.add_argument("--resume", help="continue from this checkpoint, with any number of ranks")
    options = parser.parse_args()

    hipress.init()
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    pixels, labels, test_pixels, test_labels = examples(rank, num_ranks)
    parameters = {
        "weight": np.zeros((pixels.shape[1], CLASSES), dtype=np.float32),
        "bias": np.zeros(CLASSES, dtype=np.float32),
    }
    # The weight has 640 elements, fewer than the default min_size; the bias stays uncompressed.
    run = session.start(parameters, codec=options.codec, min_size=0)
    if options.resume:
        saved = torch.load(options.resume, weights_only=True)
        for name, value in saved["parameters"].items():
            parameters[name][...] = value.numpy()
        run.load_state_dict(saved["session"])

    truth = np.eye(CLASSES, dtype=np.float32)[labels]
    for _ in range(options.steps):
        errors = softmax(pixels @ parameters["weight"] + parameters["bias"]) - truth
        gradients = {
            "weight": np.ascontiguousarray(pixels.T @ errors) / len(pixels),
            "bias": errors.mean(axis=0),
        }
        run.average(gradients)
        for name, gradient in gradients.items():
            parameters[name] -= options.rate * gradient

    right = (test_pixels @ parameters["weight"] + parameters["bias"]).argmax(axis=1) == test_labels
    state = run.state_dict()  # collective: every rank has the state of all ranks
    stats = run.stats()
    if rank == 0:
        if options.save:
            kept = {name: torch.from_numpy(value) for name, value in parameters.items()}
            torch.save({"parameters": kept, "session": state}, options.save)
        found = {
            "accuracy": float(right.mean()),
            "ranks": num_ranks,
            "steps": run.step,
            "compressed": stats.num_compressed,
            "times_less": round(stats.ratio, 2),
        }
        print(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
