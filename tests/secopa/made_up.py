"""Profiles with costs chosen by hand, so that times can be worked out on paper."""

from collections.abc import Sequence

from hipress.profile import (
    CodecCosts,
    Curve,
    GradientProfile,
    Machine,
    ModelProfile,
    Network,
    Profile,
)


def curve(fixed: float, slope: float) -> Curve:
    """fixed + slope * x."""
    return Curve(fixed=fixed, slope=slope)


def codec(
    name: str,
    ratio: float,
    element_s: float = 0.0,
    task_s: float = 0.0,
    error: float = 0.0,
) -> CodecCosts:
    """A codec that sends `ratio` of the bytes and works `element_s` on each element."""
    work = curve(task_s, element_s)
    wire = curve(0.0, 4 * ratio)
    return CodecCosts(
        codec=name,
        encode=work,
        decode=work,
        add=work,
        back=work,
        wire=wire,
        back_wire={2: wire},
        chunk_numel=2**21,
        bulk=True,
        codes_local=False,
        error=error,
    )


def profile(
    *,
    numels: Sequence[int] = (2**20,) * 4,
    num_ranks: int = 4,
    bytes_per_s: float = 1e8,
    latency_s: float = 0.0,
    cores: float = 64.0,
    num_local_ranks: int = 1,
    forward_s: float = 0.0,
    backward_s: float = 0.0,
    rest_s: float = 0.0,
    message_work_s: float = 0.0,
    byte_work_s: float = 0.0,
    codecs: Sequence[CodecCosts] = (codec("none", 1.0), codec("onebit", 1 / 32)),
    dims: int = 2,
    bucket_mb: float | None = None,
) -> Profile:
    """A model whose gradients g0, g1, ... come evenly through backward."""
    share = 2 * (num_ranks - 1) / num_ranks
    return Profile(
        machine=Machine(cores=cores, num_ranks=num_local_ranks),
        network=Network(
            hosts=tuple(range(num_ranks)),
            latency_s=latency_s,
            bytes_per_s=bytes_per_s,
            message_work_s=message_work_s,
            byte_work_s=byte_work_s,
            all_reduce=curve(0.0, share / bytes_per_s),
        ),
        codecs=tuple(codecs),
        model=ModelProfile(
            forward_s=forward_s,
            backward_s=backward_s,
            rest_s=rest_s,
            bucket_mb=bucket_mb,
            gradients=tuple(
                GradientProfile(
                    name=f"g{k}",
                    numel=numel,
                    dims=dims,
                    ready_s=backward_s * (k + 1) / len(numels),
                )
                for k, numel in enumerate(numels)
            ),
        ),
    )
