"""Codecs that are wrong on purpose, and virtual training runs that the accuracy guard looks at.

`python -m tests.guarded` prints the table in docs/design-choices.md from which the guard's limits
were taken.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import hipress
from hipress.session import guard
from hipress.session.buckets import MOMENTUM
from hipress.session.checkpoint import UNSENT
from hipress.train import data as data_sets
from hipress.train.virtual import VirtualSync, _Compressed, _Exempt, is_exempt

# --- codecs ---------------------------------------------------------------------------------------

PROGRAM = """
param Bad {
    int block = 256;
}

void BadEncode(float* gradient, uint8* compressed, Bad p) {
    per (p.block) {
        float scale = reduce(map(gradient, abs), 0.0, max) / 127.0;
        uint8* code = map(gradient, [&](float g) -> uint8 {
            return scale > 0.0 ? g / scale + 128.5 : 128.0;
        });
    }
    compressed = concat(scale, code);
}

void BadDecode(uint8* compressed, float* gradient, Bad p) {
    float scale[blocks(gradient.size, p.block)];
    uint8 code[gradient.size];
    extract(compressed, scale, code);
    per (p.block) {
        gradient = map(code, [&](uint8 c) -> float { return VALUE; });
    }
}
"""
VALUES = {
    "right": "(c - 128) * scale",
    "zeros": "0.0 * c * scale",
    "sign": "(128 - c) * scale",
    "large": "(c - 128) * scale * 100.0",
    "small": "(c - 128) * scale * 0.01",
    "noise": "(random<float>(0.0, 2.0, 7) - 1.0) * scale * 60.0 + 0.0 * c",
}


def program(folder, kind):
    """Writes a program whose decoder is wrong in some way; returns its path."""
    path = Path(folder) / f"{kind}.pse"
    if not path.exists():  # several ranks may ask
        path.write_text(PROGRAM.replace("VALUE", VALUES[kind]))
    return str(path)


def bad(folder, kind, *, feedback=False):
    """Returns a codec with such a decoder; its way back is right, or two wrong signs make none."""
    codec = hipress.codec(program(folder, kind), ef=feedback)
    back = hipress.codec("int8")
    return codec.with_variant(
        codec.variant, codec.name, family=replace(codec.family, back=lambda n, ef: back)
    )


# --- runs -----------------------------------------------------------------------------------------

NUM_WORKERS = 4


class Task:
    """A model, batches of each worker, and the optimizer."""

    rate = 0.05

    def batch(self, step, worker):
        generator = torch.Generator().manual_seed(7919 * step + worker)
        return torch.randint(len(self.labels), (16,), generator=generator)

    def gradients(self, step, worker):
        loss = self.loss(self.batch(step, worker))
        return [g.contiguous() for g in torch.autograd.grad(loss, self.parameters)]

    def optimizer(self, flags):
        moved = zip(self.parameters, flags, strict=True)
        groups = [{"params": [p], "momentum": 0.0 if flag else 0.9} for p, flag in moved]
        return torch.optim.SGD(groups, lr=self.rate)


class Mlp(Task):
    def __init__(self):
        torch.manual_seed(3)
        data = data_sets.load("digits", None)
        self.inputs, self.labels = data.pixels(data.train_images), data.train_labels
        layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU()]
        self.model = nn.Sequential(*layers, nn.Linear(128, 10))
        self.parameters = list(self.model.parameters())

    def loss(self, batch):
        return functional.cross_entropy(self.model(self.inputs[batch]), self.labels[batch])


class Cnn(Mlp):
    rate = 0.02

    def __init__(self):
        super().__init__()
        self.inputs = self.inputs.view(-1, 1, 8, 8)
        self.model = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(),
            nn.Linear(1024, 10),
        )  # fmt: skip
        self.parameters = list(self.model.parameters())


class Gpt(Task):
    """Two blocks over the letters of this repository's own texts."""

    rate = 1e-3
    width, context = 64, 32

    def __init__(self):
        torch.manual_seed(3)
        texts = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
        letters = "".join(path.read_text() for path in texts[:6]).encode()[:200_000]
        self.letters = torch.tensor(list(letters))
        self.labels = self.letters[: -self.context - 1]
        width = self.width
        self.embed = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.randn(self.context, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(width, 256)
        modules = (self.embed, self.blocks, self.head)
        self.parameters = [self.place, *(p for one in modules for p in one.parameters())]
        self.mask = nn.Transformer.generate_square_subsequent_mask(self.context)

    def loss(self, batch):
        places = batch[:, None] + torch.arange(self.context)
        value = self.embed(self.letters[places]) + self.place
        for block in self.blocks:
            value = block(value, self.mask, is_causal=True)
        return functional.cross_entropy(
            self.head(value).view(-1, 256), self.letters[places + 1].reshape(-1)
        )


TASKS = {"mlp": Mlp, "cnn": Cnn, "gpt": Gpt}


class AdamMomentum:
    """AdamW whose momentum is exchanged, for virtual workers; as `hipress.torch.AdamW` does."""

    def __init__(self, parameters, rate, warmup):
        self.parameters, self.rate, self.warmup = parameters, rate, warmup
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]
        self.count = 0

    def is_refresh(self, step):
        return step < self.warmup or step % 50 == 0

    def step(self, means, known):
        self.count += 1
        with torch.no_grad():
            for k, (p, mean) in enumerate(zip(self.parameters, means, strict=True)):
                if k in known:
                    self.first[k].copy_(mean)
                else:
                    self.first[k].lerp_(mean, 0.1)
                    self.second[k].lerp_(mean * mean, 0.001)
                root = (self.second[k] / (1 - 0.999**self.count)).sqrt()
                p.sub_(self.rate / (1 - 0.9**self.count) * self.first[k] / (root + 1e-8))


def unsent(tensor):
    """What virtual workers and their aggregator have not sent, on average."""
    states = [*((1 / NUM_WORKERS, s) for s in tensor.states), (1.0, tensor.state_back)]
    held = [a * s[key].view(-1) for a, s in states for key in UNSENT if key in s]
    return sum(held) if held else None


class Window:
    """The window of a virtual layer; a tally for each worker, as each rank has one."""

    def __init__(self, tensor, name, numel, momentum):
        self.places = guard.places(name, numel)
        self.tallies = [guard.Tally([guard.num_places(self.places)]) for _ in tensor.states]
        self.steps = 0
        held = unsent(tensor)
        held = None if held is None else held[self.places]
        for tally, state in zip(self.tallies, tensor.states, strict=True):
            own = [state[key] for key in MOMENTUM if key in state]
            own = own[0] if own else momentum
            tally.begin(0, held, None if own is None else own.view(-1)[self.places])

    def add(self, gradients, mean, decay):
        for tally, own in zip(self.tallies, gradients, strict=True):
            tally.add_true(0, own.reshape(-1)[self.places], decay)
            tally.decoded[0].add_(mean.view(-1)[self.places])
            tally.end_step()
        self.steps += 1

    def numbers(self):
        told = sum(tally.told for tally in self.tallies) / len(self.tallies)
        row = guard.sums(told, self.tallies[0].decoded)[0].tolist()
        return guard.numbers(row, self.steps, len(self.tallies))


def run(task, codec, num_steps, starts, on_look, warmup=20):
    """Trains virtual workers, and measures each compressed layer in windows that start there.

    Calls `on_look(step, layer, numbers, codec)` at each look of a window; stops if that is true.
    """
    torch.set_num_threads(1)
    model = TASKS[task]()
    parameters = model.parameters
    made = hipress.codec(codec) if isinstance(codec, str) else codec
    is_adam = task == "gpt"
    sends_momentum = is_adam and not made.keeps_sizes
    made = made.for_momentum() if sends_momentum else made
    sync = VirtualSync("int8", parameters, num_workers=NUM_WORKERS)
    sync.tensors = [
        _Exempt(sync, p) if is_exempt(p) else _Compressed(sync, made, p, 0, k)
        for k, p in enumerate(parameters)
    ]
    adam = AdamMomentum(parameters, model.rate, warmup) if is_adam else None
    optimizer = None if is_adam else model.optimizer(sync.has_momentum)
    layers = [k for k, p in enumerate(parameters) if not is_exempt(p)]
    windows, due = {}, sorted(starts)
    decay = 0.9 if sends_momentum else guard.decay(made)
    for step in range(num_steps):
        gradients = [model.gradients(step, w) for w in range(NUM_WORKERS)]
        refreshes = sends_momentum and adam.is_refresh(step)
        known = {}
        if sends_momentum and not refreshes:
            known = {k: 0.9 * adam.first[k] for k in layers}
            for own in gradients:
                for k in layers:
                    own[k].mul_(0.1).add_(known[k])
        if due and step >= due[0] and not refreshes:
            due.pop(0)
            windows = {
                k: Window(
                    sync.tensors[k], str(k), parameters[k].numel(),
                    adam.first[k] if sends_momentum else None,
                )
                for k in layers
            }  # fmt: skip
        if refreshes:
            means = [sum(g[k] for g in gradients) / NUM_WORKERS for k in range(len(parameters))]
        else:
            means = sync.average(gradients, step)
            for k, window in windows.items():
                new = [own[k] - known.get(k, 0.0) for own in gradients]
                window.add(new, means[k], decay)
                if window.steps in guard.LOOKS and on_look(step, k, window.numbers(), made):
                    return model
            if windows and next(iter(windows.values())).steps == guard.LOOKS[-1]:
                windows = {}
        if not all(mean.isfinite().all() for mean in means):
            return model
        if adam is not None:
            adam.step(means, known)
        else:
            for p, mean in zip(parameters, means, strict=True):
                p.grad = mean
            optimizer.step()
    return model


# --- the table ------------------------------------------------------------------------------------

HEALTHY = {
    "mlp": ["onebit", "momentum(ef(onebit))", "topk(ratio=0.01)", "dgc(ratio=0.01)",
            "dgc(ratio=0.001)", "terngrad", "dithering", "int8", "bf16"],
    "cnn": ["onebit", "momentum(ef(onebit))", "topk(ratio=0.01)", "dgc(ratio=0.01)", "terngrad",
            "int8"],
    "gpt": ["onebit", "topk(ratio=0.01)", "int8"],
}  # fmt: skip
DOUBTFUL = {"mlp": ["minmax", "tbq", "randomk"], "gpt": ["terngrad", "topk(ratio=0.001)"]}
WRONG = ("zeros", "noise", "sign", "large")


def table(folder):
    """Prints the range of each number over all layers and windows, by look."""

    def show(task, label, codec, num_steps):
        found = {}

        def look(step, layer, numbers, made):
            found.setdefault(numbers.steps, []).append((numbers, guard.judge(numbers, made)))

        run(task, codec, num_steps, [0, 100, 300], look)
        cells = []
        for steps, seen in sorted(found.items()):
            for key in ("cosine", "share", "error"):
                values = [getattr(one, key) for one, _ in seen if one.is_finite]
                ends = f"{min(values):.2g} .. {max(values):.2g}" if values else "-"
                cells.append(f"{steps} {key} {ends}")
        fallen = sum(verdict.falls_out for seen in found.values() for _, verdict in seen)
        print(f"| {task} | {label} | {' | '.join(cells)} | {fallen} |", flush=True)

    for task in TASKS:
        for kind, codecs in (("healthy", HEALTHY), ("doubtful", DOUBTFUL)):
            for codec in codecs.get(task, ()):
                show(task, f"{kind} {codec}", codec, 350)
        for kind in WRONG:
            for feedback in (False, True):
                label = f"wrong {'ef ' * feedback}{kind}"
                show(task, label, bad(folder, kind, feedback=feedback), 70)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        table(folder)
