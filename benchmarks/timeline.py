"""Record two steps of a model on four emulated hosts and draw them: one row per rank and queue.

    python benchmarks/timeline.py trace.json timeline.png [CODEC] [RATE] [MODEL]

The JSON is what `sync.timeline` writes, for https://ui.perfetto.dev; the picture shows its first
rank. The script runs itself on each host.
"""

import json
import os
import sys
from pathlib import Path

STEPS = 2


def rank_main(path: str, codec: str, name: str) -> None:
    """Train on one host and record two steps."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import hipress
    from hipress.train import models
    from hipress.train.tasks import TASKS

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    line = models.model(name)
    loss = TASKS[line.task].loss
    ddp = DistributedDataParallel(line.make(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    sync = hipress.attach(ddp, codec=codec)
    batch = line.data(dist.get_rank())
    for step in range(4 + STEPS):
        if step == 4:
            sync.timeline(path, steps=STEPS)
        optimizer.zero_grad()
        loss(ddp, batch).backward()
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def draw(path: str, picture: str, title: str) -> None:
    """Draw the rows of rank 0."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    trace = json.loads(Path(path).read_text())
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    first = min(e["pid"] for e in events)
    rows = {
        e["tid"]: e["args"]["name"]
        for e in trace["traceEvents"]
        if e["ph"] == "M" and e["name"] == "thread_name" and e["pid"] == first
    }
    events = [e for e in events if e["pid"] == first]
    shown = [tid for tid, name in rows.items() if not name.startswith("bucket")]
    colours = {
        "forward": "#8da0cb", "backward": "#66c2a5", "wait": "#d9d9d9", "encode": "#fc8d62",
        "merge": "#e78ac3", "decode": "#a6d854", "send": "#ffd92f",
        "recv": "#bfd3e6",
    }  # fmt: skip
    figure, axes = plt.subplots(figsize=(11, 2.2), layout="constrained")
    for event in events:
        if event["tid"] not in shown:
            continue
        y = len(shown) - shown.index(event["tid"])
        axes.barh(
            y, event["dur"] / 1e3, left=event["ts"] / 1e3, height=0.8,
            color=colours.get(event["name"], "#999999"),
        )  # fmt: skip
    axes.set_yticks(range(len(shown), 0, -1), [rows[tid] for tid in shown])
    axes.set_xlabel("ms")
    axes.set_title(title, fontsize=10)
    patches = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    axes.legend(
        patches, list(colours), ncols=1, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5)
    )
    figure.savefig(picture, dpi=110)


def main() -> None:
    path, picture = sys.argv[1:3]
    codec, rate, name = (*sys.argv[3:], *("onebit", "1gbit", "gpt")[len(sys.argv) - 3 :])
    if "RANK" in os.environ:
        rank_main(path, codec, name)
        return
    from hipress.lab import Lab

    with Lab(4, rate=rate) as lab:
        lab.run([sys.executable, __file__, *sys.argv[1:]], timeout=300, check=True)
    draw(path, picture, f"{name}, {codec}, rank 0 of 4 hosts at {rate}")


if __name__ == "__main__":
    main()
