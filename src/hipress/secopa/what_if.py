"""Variants of a profile, such as another rate, and one choice for all gradients."""

from __future__ import annotations

from hipress.errors import UsageError
from hipress.plan import Decision, exempt_reason
from hipress.profile import Curve, Profile
from hipress.secopa.simulate import FREE

EFFICIENCY = 0.94
"""The share of a link's rate that TCP reaches, as measured in a lab of four hosts at 1 Gbit."""


def with_rate(profile: Profile, rate_bits: int) -> Profile:
    """Returns the profile with links of another rate.

    The links keep the share of their rate that was measured. The share is 0.94 if the profile does
    not know its rate, and at least 0.94 at a lower rate, which hosts keep up with. Ranks of a host
    share its link. An all-reduce keeps the time that does not depend on the link.

    Args:
        profile: A profile that was measured at one rate.
        rate_bits: Bits per second of a host, each way.

    Raises:
        UsageError: All ranks are on one host.
    """
    network = profile.network
    num_local = max(network.hosts.count(host) for host in network.hosts)
    if 1 < num_local == network.num_ranks:
        raise UsageError(
            f"the {num_local} ranks of this profile share one host, so that a rate between hosts "
            "changes nothing; add --own-machines, or profile hosts of their own."
        )
    share = EFFICIENCY
    if network.rate_bits is not None:
        share = min(network.bytes_per_s * num_local * 8 / network.rate_bits, 1.0)
        if rate_bits < network.rate_bits:
            share = max(share, EFFICIENCY)
    bytes_per_s = share * rate_bits / 8 / num_local
    num = network.num_ranks
    sent = 2 * (num - 1) / num
    gather = network.all_gather
    changed = network.model_copy(
        update={
            "bytes_per_s": bytes_per_s,
            "rate_bits": rate_bits,
            "all_reduce": _at_rate(network.all_reduce, sent, network.bytes_per_s, bytes_per_s),
            "all_gather": gather and _at_rate(gather, num - 1, network.bytes_per_s, bytes_per_s),
            "pairs": (),  # measured at the other rate
        }
    )
    return profile.model_copy(update={"network": changed})


def _at_rate(curve: Curve, sent: float, before: float, after: float) -> Curve:
    """Returns a curve at another rate; for each byte, `sent` bytes go over the link."""
    host = max(curve.slope - sent / before, 0.0)
    return curve.model_copy(update={"slope": sent / after + host})


def on_own_machines(profile: Profile) -> Profile:
    """Returns the profile with every rank on a machine of its own, as large as the one they shared:
    it turns the numbers of a lab into those of real hosts."""
    network = profile.network.model_copy(
        update={"hosts": tuple(range(profile.network.num_ranks)), "local_bytes_per_s": None}
    )
    machine = profile.machine.model_copy(update={"num_ranks": 1, "num_device_ranks": 1})
    return profile.model_copy(update={"network": network, "machine": machine})


def with_plain(profile: Profile) -> Profile:
    """Returns the profile with costs of `none`; if they were not measured, adding up is free."""
    if any(costs.codec == "none" for costs in profile.codecs):
        return profile
    return profile.model_copy(update={"codecs": (FREE, *profile.codecs)})


def uniform(profile: Profile, codec: str, strategy: str) -> dict[str, Decision]:
    """Returns decisions with one codec and strategy for all gradients that are not exempt."""
    assert profile.model is not None
    found = {}
    for gradient in profile.model.gradients:
        numel = gradient.numel
        if why := exempt_reason(gradient.dims, numel):  # by the parameter server, as attach does
            found[gradient.name] = Decision(strategy="ps", numel=numel, reason=why)
        else:
            found[gradient.name] = Decision(codec=codec, strategy=strategy, numel=numel)
    return found
