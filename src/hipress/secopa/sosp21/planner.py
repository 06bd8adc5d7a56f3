"""The planner of SOSP'21, which decides for each gradient alone, by its published cost model.

N nodes exchange a gradient of m elements in K partitions. With T(x) the time for x elements, and
r(x) the number of elements that x are compressed to, the exchange takes

    sent as it is:  a T_send(m/K)
    compressed:     a T_send(r(m/K)) + b T_encode(m/K) + c T_decode(m/K)

    ring         a = 2(N-1)                          b = N            c = N
    ps           one gather and one broadcast        b = min(K+1, N)  c = min(N-1+K, 2(N-1))

Merging costs nothing, K goes from 1 to N, and a gradient is compressed if its best K with
compression takes less time than its best K without. The model does not see what backward hides, nor
that gradients share one network; `hipress.secopa.search` does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hipress.casync.graphs.partitions import Partitioner
from hipress.errors import UsageError
from hipress.plan import ANY, Decision, Plan, plain_strategy
from hipress.profile import Curve, Machine, Profile
from hipress.secopa.simulate import bucket_numel

TOPOLOGIES = ("ps", "ring")
PRESET = "sosp21"
RATIO = 1 / 16
"""The default ratio of the preset, that of an algorithm of two bits."""
ELEMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class ExchangeCosts:
    """The curves of the model; x is a number of float32, times are in seconds."""

    num_nodes: int
    """N."""
    codec: str
    """`any` if the curves belong to no codec in particular."""
    size: Curve
    """The number of float32 that x elements are compressed to."""
    encode: Curve
    """The time to encode x elements."""
    decode: Curve
    """The time to decode what x elements were compressed to."""
    step: Curve
    """The time of a step of a ring, in which each node sends x to the next."""
    gather: Curve
    """The time in which one node gets x from each of the others."""
    broadcast: Curve
    """The time in which one node sends x to all others."""
    broadcast_floor_s: float = 0.0
    """The least time of a broadcast."""
    made_from: str
    """Where the curves come from, for the plan's own note."""

    def send_s(self, topology: str, x: float) -> float:
        """Returns the time of all messages of a partition, of x float32 each."""
        if topology == "ring":
            return 2 * (self.num_nodes - 1) * self.step.at(x)
        return self.gather.at(x) + max(self.broadcast.at(x), self.broadcast_floor_s)

    def plain_s(self, topology: str, numel: int, partitions: int) -> float:
        """Returns the time of the exchange of a gradient that is sent as it is."""
        return self.send_s(topology, numel / partitions)

    def compressed_s(self, topology: str, numel: int, partitions: int) -> float:
        """Returns the time of the exchange of a gradient that is compressed."""
        num, x = self.num_nodes, numel / partitions
        if topology == "ring":
            encodes = decodes = num
        else:
            encodes = min(partitions + 1, num)
            decodes = min(num - 1 + partitions, 2 * (num - 1))
        sent_s = self.send_s(topology, self.size.at(x))
        return sent_s + encodes * self.encode.at(x) + decodes * self.decode.at(x)


# As published, fitted by least squares on 16 nodes with two 1080Ti each and 56 Gbit InfiniBand:
# milliseconds, and milliseconds for each float32. Other floors than those of broadcasts are never
# reached.
ENCODE_MS = (0.058938, 1.4133e-8)
DECODE_MS = (0.13956, 6.2041e-9)  # for each *compressed* float32
STEP_MS = (0.20337, 8.5005e-7)
_GATHER_MS = {4: (0.4193, 2.7156e-6), 8: (0.80768, 6.1167e-6), 16: (1.4406, 1.2937e-5)}
_BROADCAST_MS = {
    4: (0.22156, 2.7157e-6, 0.0),
    8: (0.27285, 6.1172e-6, 0.29666),
    16: (0.45538, 1.2915e-5, 0.58353),
}  # the third is the floor


def sosp21(num_nodes: int, ratio: float = RATIO) -> ExchangeCosts:
    """Returns the published curves.

    Args:
        num_nodes: 4, 8 or 16; others were not measured.
        ratio: Compressed size divided by size.

    Raises:
        UsageError: Another number of nodes, or a ratio outside (0, 1].
    """
    if num_nodes not in _GATHER_MS:
        raise UsageError(
            f"preset {PRESET} was measured on 4, 8 and 16 nodes, not on {num_nodes}; give "
            "--nnodes 4, 8 or 16, or a profile of your own cluster with --profile profile.json."
        )
    if not 0 < ratio <= 1:
        raise UsageError(
            f"ratio is {ratio:g}; the compressed size divided by the size must be above 0 and at "
            "most 1, e.g. 0.03125 for onebit."
        )
    decode_fixed, decode_slope = DECODE_MS
    return ExchangeCosts(
        num_nodes=num_nodes,
        codec=ANY,
        size=Curve(fixed=0.0, slope=ratio),
        encode=_from_ms(*ENCODE_MS),
        decode=_from_ms(decode_fixed, decode_slope * ratio),
        step=_from_ms(*STEP_MS),
        gather=_from_ms(*_GATHER_MS[num_nodes]),
        broadcast=_from_ms(*_BROADCAST_MS[num_nodes][:2]),
        broadcast_floor_s=_BROADCAST_MS[num_nodes][2] / 1e3,
        made_from=f"preset {PRESET}, {num_nodes} nodes, ratio {ratio:g}",
    )


def _from_ms(fixed: float, slope: float) -> Curve:
    return Curve(fixed=fixed / 1e3, slope=slope / 1e3)


PRESETS = {PRESET: sosp21}
"""By name, the function from nodes and ratio to curves."""


def costs_of(profile: Profile, codec: str, num_nodes: int) -> ExchangeCosts:
    """Returns such curves from a profile, for any number of nodes.

    A step of a ring takes the latency, the work of a message and the bytes through a rank's link;
    a gather and a broadcast take the latency, the work of N-1 messages and N-1 times the bytes
    through the link of one node. All ranks encode and decode at once, so where a host has fewer
    cores than ranks, or ranks share a GPU, they wait for each other.

    Raises:
        UsageError: The codec is not in the profile, or there are fewer than 2 nodes.
    """
    _check_nodes(num_nodes)
    found, network = profile.codec(codec), profile.network
    many = num_nodes - 1
    float_s = ELEMENT_BYTES / network.bytes_per_s
    message_s = network.message_work_s
    fan = Curve(fixed=network.latency_s + many * message_s, slope=many * float_s)
    return ExchangeCosts(
        num_nodes=num_nodes,
        codec=codec,
        size=Curve(fixed=found.wire.fixed / ELEMENT_BYTES, slope=found.wire.slope / ELEMENT_BYTES),
        encode=_busy(found.encode, profile.machine),
        decode=_busy(found.decode, profile.machine),
        step=Curve(fixed=network.latency_s + message_s, slope=float_s),
        gather=fan,
        broadcast=fan,
        made_from=f"a profile of {network.num_ranks} ranks, {num_nodes} nodes, {codec}",
    )


def _busy(work: Curve, machine: Machine) -> Curve:
    """Returns the time of work that all ranks of a machine do at once."""
    if machine.device == "cpu":
        wait = max(machine.num_ranks / machine.cores, 1.0)
    else:
        wait = float(machine.num_device_ranks)
    return Curve(fixed=work.fixed * wait, slope=work.slope * wait)


def plan(
    gradients: Sequence[tuple[str, int]], topology: str, num_nodes: int, costs: ExchangeCosts
) -> Plan:
    """Makes a plan that decides for each gradient alone.

    Args:
        gradients: Names and numbers of float32.
        topology: `ps` or `ring`, in upper or lower case.
        num_nodes: N.
        costs: Curves for this number of nodes.

    Raises:
        UsageError: The topology or the number of nodes is not supported.

    Example:
        >>> made = plan([("fc.weight", 4_096_000), ("fc.bias", 1000)], "PS", 4, sosp21(4))
        >>> print(made.as_text(), end="")
        fc.weight,4096000,y,4
        fc.bias,1000,n,4
    """
    kind = topology.lower()
    if kind not in TOPOLOGIES:
        raise UsageError(f"topology {topology!r} is none of PS, RING; choose one.")
    _check_nodes(num_nodes)
    assert costs.num_nodes == num_nodes, f"curves for {costs.num_nodes} nodes, not {num_nodes}"
    return Plan(
        num_ranks=num_nodes,
        made_from=f"the published model, each gradient alone: {costs.made_from}, {kind}",
        gradients={name: _decision(numel, kind, costs) for name, numel in gradients},
    )


def _decision(numel: int, topology: str, costs: ExchangeCosts) -> Decision:
    # min() keeps the first of equals: the smallest K.
    choices = range(1, costs.num_nodes + 1)
    plain_s, plain = min((costs.plain_s(topology, numel, k), k) for k in choices)
    compressed_s, compressed = min((costs.compressed_s(topology, numel, k), k) for k in choices)
    pays = compressed_s < plain_s
    verdict = "takes less" if pays else "would take as long or longer"
    return Decision(
        codec=costs.codec if pays else "none",
        strategy=topology if pays else plain_strategy(numel),
        partitions=compressed if pays else plain,
        numel=numel,
        compressed_s=compressed_s,
        plain_s=plain_s,
        reason=f"compressed, its exchange {verdict}: {compressed_s * 1e3:.3f} ms against "
        f"{plain_s * 1e3:.3f} ms",
    )


def in_lines(made: Plan, profile: Profile, num_ranks: int) -> Plan:
    """Returns a plan with every number that the lines of a text plan need: where the engine chooses
    the number of partitions, it is filled in.

    Args:
        made: A plan for the model of the profile.
        profile: The profile that it was made from.
        num_ranks: N.
    """
    model = profile.model
    assert model is not None
    full = bucket_numel(model)
    on_gpu = profile.machine.device != "cpu"
    numels = {gradient.name: gradient.numel for gradient in model.gradients}
    filled = {}
    for name, decision in made.gradients.items():
        numel = numels.get(name) if decision.numel is None else decision.numel
        partitions = decision.partitions
        if decision.is_compressed and partitions is None and numel is not None:
            chunk = profile.codec(decision.codec).chunk_numel
            partitioner = Partitioner(num_ranks, bucket_numel=full, on_gpu=on_gpu)
            partitions = max(len(partitioner.place(numel, chunk)), 1)
        filled[name] = decision.model_copy(update={"numel": numel, "partitions": partitions})
    return made.model_copy(update={"gradients": filled})


def read_input(path: str | Path) -> list[tuple[str, int]]:
    """Reads gradients from the lines `name,number_of_float32` of a file, in its order.

    Raises:
        UsageError: There is no such file, or a line has another form.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise UsageError(
            f"input {str(path)!r} cannot be read ({why}); give a file of lines "
            "name,number_of_float32."
        ) from error
    found: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        name, _, size = (part.strip() for part in line.rpartition(","))
        if not name or "," in name or not re.fullmatch("[0-9]{1,18}", size):
            raise _wrong_line(path, number, f"is {line.strip()!r}")
        if name in found:
            raise _wrong_line(path, number, f"names {name!r} a second time")
        found[name] = int(size)
    if not found:
        raise _wrong_line(path, 1, "is not there: the file is empty")
    return list(found.items())


def _wrong_line(path: str | Path, number: int, what: str) -> UsageError:
    return UsageError(
        f"input {str(path)!r}: line {number} {what}; write one line for each gradient, "
        "name,number_of_float32, e.g. fc.weight,4096000."
    )


def _check_nodes(num_nodes: int) -> None:
    if num_nodes < 2:
        raise UsageError(
            f"a plan for {num_nodes} node(s) has nobody to send to; give --nnodes 2 or more."
        )
