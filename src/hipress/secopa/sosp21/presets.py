"""Published clusters as profiles, for `hipress simulate` without measurements.

Every constant is a published one of HiPress (SOSP'21) or of a data sheet; none is fitted to a curve
that is to be reproduced. A rank is a node:

    network     the authors' own curve of one step of a ring, on both clusters
    codecs      their curves of a quantiser, for every codec; bytes are those of the codec
    compute     their "linear" throughput, 32 images per GPU; 0.42 of it is forward
    in a node   the GPUs add up each gradient first, one after the other, at the data sheet's rate,
                so a gradient is ready for the network that much later
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hipress.errors import UsageError
from hipress.profile import (
    CodecCosts,
    Curve,
    GradientProfile,
    Machine,
    ModelProfile,
    Network,
    Profile,
)
from hipress.secopa.simulate import FREE
from hipress.secopa.sosp21.planner import DECODE_MS, ENCODE_MS, STEP_MS

CURVE_RATE_BITS = 56 * 10**9
"""The rate of the link on which the step was measured, which reached 38 Gbit, 0.67 of it."""
FORWARD_SHARE = 114 / 273
"""The share of a step's compute before the first gradient is ready, of VGG19 (Fig 11)."""
BATCH = 32
"""Images per GPU: at the published 117 images per second of VGG19 on a 1080Ti a step takes 273 ms,
which is the published time of a step."""
NUM_NODES = 16
RESNET50_WORK = 3 * 2 * 4.089e9
"""Floating-point operations for one image of 224x224, forward and backward."""
CHUNK_NUMEL = 2**24
"""The same as on any GPU."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One parameter of a model."""

    name: str
    numel: int
    dims: int
    work: float
    """Floating-point operations of forward and backward in a step of one GPU."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published cluster."""

    name: str
    about: str
    gpus: int
    """GPUs in a node."""
    rate_bits: int
    """The rate of a node's link."""
    local_bytes_per_s: float
    """The rate between two GPUs of a node, each way, by the data sheet."""
    images_per_s: Mapping[str, float]
    """The throughput of one GPU that trains alone, the published "linear", by model."""

    def compute_s(self, model: str, work: float) -> float:
        """Returns the seconds of a step without any exchange.

        Args:
            model: The model's name. For a model without a published figure the operations per
                second are those of ResNet50.
            work: Floating-point operations of the model's step.
        """
        if model in self.images_per_s:
            return BATCH / self.images_per_s[model]
        return work / (RESNET50_WORK * self.images_per_s["resnet50"])


PRESETS = {
    "aws-v100": Preset(
        name="aws-v100",
        about="16 nodes with 8 V100 each and 100 Gbit",
        gpus=8,
        rate_bits=100 * 10**9,
        local_bytes_per_s=150e9,  # NVLink 2: six links of 25 GB/s
        images_per_s={"vgg19": 26438 / 128, "resnet50": 41946 / 128},
    ),
    "local-1080ti": Preset(
        name="local-1080ti",
        about="16 nodes with two 1080Ti each and 56 Gbit InfiniBand",
        gpus=2,
        rate_bits=56 * 10**9,
        local_bytes_per_s=15.75e9,  # PCIe 3.0 x16
        images_per_s={"vgg19": 3754 / 32, "resnet50": 6221 / 32},
    ),
}
"""The clusters by name."""

RATIOS: dict[str, tuple[float, bool]] = {
    "fp16": (1 / 2, False),
    "int8": (1 / 4, False),
    "tbq": (1 / 16, False),
    "terngrad": (1 / 16, False),
    "onebit": (1 / 32, False),
    "dgc(ratio=0.001)": (2 * 0.001, True),
    "graddrop": (2 * 0.001, True),
}
"""By codec, the compressed size divided by the size, and whether the codec is sparse: the sum of N
gradients then has N times as much."""

WORKERS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def preset(name: str) -> Preset:
    """Returns a published cluster.

    Raises:
        UsageError: There is none of that name.
    """
    if name not in PRESETS:
        raise UsageError(f"preset {name!r} is none of {', '.join(PRESETS)}; choose one.")
    return PRESETS[name]


def profile(cluster: Preset, model: str, layers: Sequence[Layer], batch: int = BATCH) -> Profile:
    """Returns the profile of a model on 16 nodes of a published cluster.

    Args:
        cluster: The cluster.
        model: The model's name.
        layers: The model's layers, in the order of backward.
        batch: Examples per GPU and step.

    Example:
        >>> fc = Layer(name="fc.weight", numel=10**8, dims=2, work=1e12)
        >>> made = profile(preset("aws-v100"), "vgg19", [fc])
        >>> round(made.model.forward_s + made.model.backward_s, 3)
        0.155
    """
    latency_ms, ms_per_float = STEP_MS
    bytes_per_s = 4e3 / ms_per_float
    hops = 2 * (NUM_NODES - 1)
    return Profile(
        made=f"preset {cluster.name}: {cluster.about}, from published constants",
        machine=Machine(name=cluster.name, device="cuda", cores=float(cluster.gpus), num_ranks=1),
        network=Network(
            hosts=tuple(range(NUM_NODES)),
            latency_s=latency_ms * 1e-3,
            bytes_per_s=bytes_per_s,
            rate_bits=CURVE_RATE_BITS,
            all_reduce=Curve(fixed=hops * latency_ms * 1e-3, slope=hops / NUM_NODES / bytes_per_s),
        ),
        # As in the published planner, adding up costs nothing.
        codecs=(FREE, *(_costs(name, *row) for name, row in RATIOS.items())),
        model=_model(cluster, model, layers, batch),
    )


def _costs(name: str, ratio: float, is_sparse: bool) -> CodecCosts:
    """Returns the costs of a codec by the published curves of a quantiser."""
    encode = Curve(fixed=ENCODE_MS[0] * 1e-3, slope=ENCODE_MS[1] * 1e-3)
    decode = Curve(fixed=DECODE_MS[0] * 1e-3, slope=DECODE_MS[1] * 1e-3 * ratio)
    sizes = {n: min(ratio * (n if is_sparse else 1), 1.0) for n in WORKERS}
    return CodecCosts(
        codec=name,
        encode=encode,
        decode=decode,
        add=decode,
        back=encode,
        wire=Curve(fixed=0.0, slope=4 * ratio),
        back_wire={n: Curve(fixed=0.0, slope=4 * size) for n, size in sizes.items()},
        chunk_numel=CHUNK_NUMEL,
        bulk=True,
        codes_local=False,
    )


def _model(cluster: Preset, name: str, layers: Sequence[Layer], batch: int) -> ModelProfile:
    total = sum(layer.work for layer in layers) or 1.0
    compute_s = cluster.compute_s(name, total)
    forward_s = FORWARD_SHARE * compute_s
    backward_s = compute_s - forward_s
    made, done = [], 0.0
    for layer in layers:
        done += layer.work
        made.append(
            GradientProfile(
                name=layer.name,
                numel=layer.numel,
                dims=layer.dims,
                ready_s=backward_s * done / total,
            )
        )
    model = ModelProfile(
        name=name, batch=batch, forward_s=forward_s, backward_s=backward_s, gradients=tuple(made)
    )
    return added_up_first(model, cluster)


def added_up_first(model: ModelProfile, cluster: Preset) -> ModelProfile:
    """Returns the model with gradients that the GPUs of a node add up, one after the other, before
    the network gets them."""
    # A ring among g GPUs sends each byte 2 (g - 1) / g times.
    byte_s = 2 * (cluster.gpus - 1) / cluster.gpus / cluster.local_bytes_per_s
    end_s, later = 0.0, []
    for gradient in model.gradients:
        end_s = max(end_s, gradient.ready_s) + model.element_bytes * gradient.numel * byte_s
        later.append(gradient.model_copy(update={"ready_s": end_s}))
    return model.model_copy(update={"gradients": tuple(later)})


def spread_work(layers: Sequence[Layer], total: float) -> list[Layer]:
    """Returns the layers with a given total of work: work of no single layer (attention, a head
    with shared weights) is divided among all in proportion to their size.

    Example:
        >>> a = Layer(name="a", numel=3, dims=2, work=5.0)
        >>> b = Layer(name="b", numel=1, dims=2, work=1.0)
        >>> [layer.work for layer in spread_work([a, b], 10.0)]
        [8.0, 2.0]
    """
    known = sum(layer.work for layer in layers)
    if known > total:  # two modules share a layer, which then counts twice
        return [replace(layer, work=layer.work * total / known) for layer in layers]
    numel = sum(layer.numel for layer in layers)
    left = total - known
    return [replace(layer, work=layer.work + left * layer.numel / numel) for layer in layers]
