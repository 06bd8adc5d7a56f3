"""The two functions of a program in, its kernels out: encode, decode, decode_add and merge.

Error feedback and momentum are added here, for any program. Error feedback evaluates `decode` on
the values that `encode` is about to send: the result is the residual as an expression of the same
elements, and `schedule` finds the pass it belongs to. Tests compare that with plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hipress.compll import ir
from hipress.compll.front import ast, check
from hipress.compll.front.arrays import (
    ArrayValue,
    Computed,
    InBytes,
    InRows,
    Kept,
    Padded,
    PerBlock,
    Spread,
    Stored,
    byte_of,
)
from hipress.compll.front.check import Part
from hipress.compll.front.draft import Draft, Write, block_write, row_write
from hipress.compll.front.graph import FLOAT, Graph, TooDeep, convert
from hipress.compll.front.signature import ParamValue, Signature, signature
from hipress.compll.ir import Array, Expr, Kernel, loads
from hipress.compll.passes.schedule import NotFusable, schedule, validate
from hipress.compll.passes.states import flag_of, kept_if_finite, new_states, write_state


@dataclass(frozen=True, slots=True)
class Variant:
    """What to add to a program's encode."""

    feedback: bool = False
    momentum: bool = False
    nesterov: bool = False
    decays: bool = False
    """Whether the residual is multiplied by a factor, `DECAY`, beside that of the learning rate."""


PLAIN = Variant()

ALPHA = "@alpha"
MU = "@mu"
RHO = "@rho"
DECAY = "@decay"
"""Float parameters that are added to a program's own; no program can use '@' in a name."""


@dataclass(frozen=True, slots=True)
class Pair:
    encode: tuple[ast.Source, ast.Function]
    decode: tuple[ast.Source, ast.Function]


def encode_kernel(
    pair: Pair, params: Mapping[str, ParamValue], *, dtype: str = "f32", variant: Variant = PLAIN
) -> Kernel:
    """Returns the kernel that turns a gradient of `f32`, `f16` or `bf16` into a payload body.

    `params` gives every integer parameter a value; the wrappers of `variant` are fused in.
    """
    with check.limited(*pair.encode):
        try:
            return _encode_kernel(pair, params, dtype, variant, fuse=True)
        except NotFusable:
            return _encode_kernel(pair, params, dtype, variant, fuse=False)


@dataclass(frozen=True, slots=True)
class Frames:
    """The frames of some workers, which are averaged and encoded again."""

    pair: Pair
    """The workers' program."""
    params: Mapping[str, ParamValue]
    count: int


def merge_kernel(
    frames: Frames, pair: Pair, params: Mapping[str, ParamValue], *, variant: Variant = PLAIN
) -> Kernel | None:
    """Returns the kernel that decodes frames, adds them in order, times alpha, and encodes the sum.

    None where decoding does not go element by element: the sum must lie in memory then.
    """
    try:
        return _encode_kernel(pair, params, "f32", variant, fuse=True, frames=frames)
    except (NotFusable, TooDeep):
        return None


def _merged(draft: Draft, frames: Frames) -> tuple[ArrayValue, tuple[tuple[ir.Section, ...], ...]]:
    """Returns the sum of what the frames hold, and the memory they are in."""
    g = draft.graph
    alpha = g.param(ALPHA)
    decoded: list[ArrayValue] = []
    sections = []
    flagged: Expr = g.const(False)
    for k in range(frames.count):
        parts = _received(draft, frames.pair, frames.params, prefix=f"frame{k}_")
        before = len(draft.requires)
        decoded.append(_decoded(draft, frames.pair, frames.params, parts))
        if isinstance(decoded[-1], Spread) or len(draft.requires) > before:
            raise NotFusable("frames that are not decoded element by element")
        sections.append(_sections(parts))
        flagged = g.logic("lor", flagged, g.make("flagged", type="bool", attr=k))

    def mean(i: Expr) -> Expr:
        total: Expr | None = None
        for value in decoded:
            part = g.binary("mul", alpha, g.to_float(draft.element(value, i)))
            total = part if total is None else g.binary("add", total, part)
        assert total is not None
        return g.select(flagged, g.const(math.nan), total)

    return Computed(g.n, FLOAT, mean), tuple(sections)


def _encode_kernel(
    pair: Pair,
    params: Mapping[str, ParamValue],
    dtype: str,
    variant: Variant,
    *,
    fuse: bool,
    frames: Frames | None = None,
) -> Kernel:
    """With `fuse`, states may depend on what a filter took; raises `NotFusable` if they cannot."""
    g = Graph()
    draft = Draft(g)
    source, function = pair.encode
    roles = signature(source, function)
    x = Array("x", dtype, g.n, roles.gradient.name)
    extra: list[Array] = []
    value: ArrayValue = Stored(draft, x, FLOAT)
    received: tuple[tuple[ir.Section, ...], ...] = ()
    if frames is not None:
        value, received = _merged(draft, frames)
    if variant.momentum:
        value = _momentum(draft, value, variant.nesterov, _label("momentum", roles), extra)
    residual = Array("residual", "f32", g.n, _label("residual", roles))
    if variant.feedback:
        inner = value
        rho = g.param(RHO)
        if variant.decays:
            rho = g.binary("mul", rho, g.param(DECAY))

        def corrected(i: Expr) -> Expr:
            return g.binary("add", inner.at(i), g.binary("mul", rho, g.load(residual, i)))

        value = Computed(g.n, FLOAT, corrected)
        extra.append(residual)
    result = check.evaluate(source, function, draft, params=params, gradient=value)
    states = [array for array, _ in result.states]
    i = g.idx(g.n)
    finals = new_states(draft, result.states, value.at(i), fuse)
    flag = flag_of(g, value.at(i), finals)
    for final in finals:
        write_state(draft, final, finals, flag)
    if variant.feedback:
        left = _feedback(draft, pair, params, result.parts, value, fuse)
        write_state(draft, Write(residual, left, g.n, True), finals, flag)
    sections = [_section(draft, k, part) for k, part in enumerate(result.parts)]
    all_states = (*states, *extra)
    written = [w.array for w in draft.writes if w.array in all_states]
    passes = schedule(draft, flag, written)
    used = _used(passes)
    all_states = tuple(s for s in all_states if s in used)  # an option may leave one idle
    validate(passes, {x, *all_states, *(s.array for frame in received for s in frame)})
    added = [MU] * variant.momentum + [RHO] * variant.feedback + [DECAY] * variant.decays
    names = dict.fromkeys(_params(roles, *added))
    if frames is not None:
        their = signature(*frames.pair.decode)
        names |= dict.fromkeys(_params(their, ALPHA))
    return Kernel(
        name="encode" if frames is None else "merge",
        passes=passes,
        sections=tuple(sections),
        states=all_states,
        temps=tuple(t for t in draft.temps if t in _used(passes)),
        limits=draft.limits,
        input=x if frames is None else None,
        params=tuple(names),
        nonfinite=flag,
        frames=received,
    )


def decode_kernel(
    pair: Pair, params: Mapping[str, ParamValue], *, dtype: str = "f32", add: bool = False
) -> Kernel:
    """Returns the kernel that turns a payload body into alpha times a gradient, or adds that."""
    with check.limited(*pair.decode):
        return _decode_kernel(pair, params, dtype, add)


def _decode_kernel(pair: Pair, params: Mapping[str, ParamValue], dtype: str, add: bool) -> Kernel:
    g = Graph()
    draft = Draft(g, enforces=True)
    parts = _received(draft, pair, params)
    made = _decoded(draft, pair, params, parts)
    roles = signature(*pair.decode)
    out = Array("out", dtype, g.n, roles.gradient.name)
    alpha, i = g.param(ALPHA), g.idx(g.n)
    if isinstance(made, Spread):
        value = made.value
        scaled = Computed(value.length, FLOAT, lambda j: g.binary("mul", alpha, value.at(j)))
        draft.scatter_into(
            out, Spread(draft, made.index, scaled, made.length, FLOAT), clear=not add
        )
    else:
        total = g.binary("mul", alpha, g.to_float(draft.element(made, i)))
        if add:
            total = g.binary("add", g.load(out, i), total)
        draft.writes.append(Write(out, total, g.n, True))
    sections = _sections(parts)
    passes = schedule(draft, None, [out] if add else [])
    validate(passes, {out, *(s.array for s in sections)})
    demands = {r.cond: r for r in draft.requires}  # one check for equal conditions
    requires = tuple(r for r in demands.values() if r.cond.op != "const" or not r.cond.attr)
    return Kernel(
        name="decode_add" if add else "decode",
        passes=passes,
        sections=sections,
        temps=tuple(t for t in draft.temps if t in _used(passes)),
        limits=draft.limits,
        output=out,
        requires=requires,
        params=_params(roles, ALPHA),
    )


def _label(name: str, roles: Signature) -> str:
    """Returns the label of an added state; a program may have one of the same name."""
    return f"added_{name}" if name in {a.name for a in roles.states} else name


def _momentum(
    draft: Draft, value: ArrayValue, nesterov: bool, label: str, extra: list[Array]
) -> ArrayValue:
    g = draft.graph
    momentum = Array("momentum", "f32", g.n, label)
    extra.append(momentum)
    mu = g.param(MU)

    def next_momentum(i: Expr) -> Expr:
        return g.binary("add", g.binary("mul", mu, g.load(momentum, i)), value.at(i))

    def ahead(i: Expr) -> Expr:
        return g.binary("add", value.at(i), g.binary("mul", mu, next_momentum(i)))

    i = g.idx(g.n)
    kept = kept_if_finite(g, next_momentum(i), g.load(momentum, i))
    draft.writes.append(Write(momentum, kept, g.n, True))
    return Computed(g.n, FLOAT, ahead if nesterov else next_momentum)


def _feedback(
    draft: Draft,
    pair: Pair,
    params: Mapping[str, ParamValue],
    parts: tuple[Part, ...],
    value: ArrayValue,
    fuse: bool,
) -> Expr:
    """Returns what an element leaves when the decoded one is taken away."""
    g = draft.graph
    requires = list(draft.requires)  # decode's demands on a payload mean nothing here
    decoded = _decoded(draft, pair, params, [_as_sent(draft, part) for part in parts])
    draft.requires[:] = requires
    i = g.idx(g.n)
    with draft.fused(fuse):
        beside = [value.at(i), *(w.value for w in draft.writes if w.final and w.length is g.n)]
        return g.binary("sub", value.at(i), g.to_float(draft.element(decoded, i, *beside)))


def _as_sent(draft: Draft, part: Part) -> Part:
    """Returns a part as decode reads it: zeros fill the room that a filter leaves."""
    g, value = draft.graph, part.value
    if isinstance(value, Expr) or value.length.host:
        return part

    def at(ix: Expr) -> Expr:
        zero = convert(g, g.const(0), part.elem)
        return g.select(g.binary("lt", ix, value.length), value.at(ix), zero)

    return Part(part.elem, Padded(value, draft.capacity(value), draft.remembered(at), True))


def _section(draft: Draft, k: int, part: Part) -> ir.Section:
    g = draft.graph
    name, storage, value = f"section{k}", part.elem.storage, part.value
    if isinstance(value, Expr):
        array = Array(name, storage, g.const(1))
        draft.writes.append(Write(array, value, g.const(1), True, "scalar"))
        return ir.Section(array, True)
    length = draft.capacity(value)
    if part.elem.in_bytes:
        array = Array(name, "u8", _num_bytes(g, length, part.elem.bits))
        sent = byte_of(g, draft.stored(value), value.length, part.elem.bits, g.idx(array.length))
        draft.writes.append(Write(array, sent, array.length, True))
        return ir.Section(array, False)
    array = Array(name, storage, length)
    packed = part.elem.bits in (1, 2, 4)
    if isinstance(value, Kept) and not packed:
        draft.emits.append((value.filter, array, value.element))
    elif isinstance(value, PerBlock) and not packed:
        draft.writes.append(block_write(array, value, final=True))
    elif isinstance(value, InRows) and not ir.splits_bytes(array, value.count):
        draft.writes.append(row_write(array, value, final=True))
    elif isinstance(value, Spread) and value.elem.kind == "float":
        draft.scatter_into(array, value, clear=True)
    else:
        if isinstance(
            value, PerBlock | InRows
        ):  # collected as bytes first, packed by a pass of its own
            value = Stored(draft, draft.stored(value), part.elem)
        i = g.idx(array.length)
        sent = draft.element(value, i)
        if value.length is not array.length:  # room that is not used is zero
            used = g.binary("lt", i, value.length)
            sent = g.select(used, sent, convert(g, g.const(0), part.elem))
        draft.writes.append(Write(array, sent, array.length, True))
    return ir.Section(array, False)


def _received(
    draft: Draft, pair: Pair, params: Mapping[str, ParamValue], prefix: str = ""
) -> list[Part]:
    """Returns the parts of a payload in memory; evaluates encode for their types and lengths."""
    g = draft.graph
    source, function = pair.encode
    aside = Draft(g)
    x = Stored(aside, Array("x", "f32", g.n), FLOAT)
    result = check.evaluate(source, function, aside, params=params, gradient=x)
    parts = []
    for k, part in enumerate(result.parts):
        value, name, storage = part.value, f"{prefix}section{k}", part.elem.storage
        if isinstance(value, Expr):
            array = Array(name, storage, g.const(1))
            parts.append(Part(part.elem, g.load(array, g.const(0))))
            continue
        distinct = isinstance(value, Computed) and value.distinct
        # Behind the places that a filter let through there may be zeros, see `first`.
        is_places = isinstance(value, Kept) and value.element is g.idx(value.filter.length)
        length = aside.capacity(value)
        if part.elem.in_bytes:
            array = Array(name, "u8", _num_bytes(g, length, part.elem.bits))
            parts.append(Part(part.elem, InBytes(draft, array, part.elem, length)))
            continue
        array = Array(name, storage, length)
        if distinct or is_places:
            draft.ascending.add(array)
        stored = Stored(draft, array, part.elem, distinct)
        parts.append(Part(part.elem, stored))
    return parts


def _num_bytes(g: Graph, length: Expr, bits: int) -> Expr:
    whole = g.binary("add", g.binary("mul", length, g.const(bits)), g.const(7))
    return g.binary("idiv", g.binary("max", whole, g.const(0)), g.const(8))


def _sections(parts: Iterable[Part]) -> tuple[ir.Section, ...]:
    sections = []
    for part in parts:
        if isinstance(part.value, Expr):
            sections.append(ir.Section(part.value.attr, True))
        else:
            assert isinstance(part.value, Stored | InBytes)
            sections.append(ir.Section(part.value.array, False))
    return tuple(sections)


def _decoded(
    draft: Draft, pair: Pair, params: Mapping[str, ParamValue], parts: Sequence[Part]
) -> ArrayValue:
    result = check.evaluate(*pair.decode, draft, params=params, payload=parts)
    assert result.gradient is not None
    return result.gradient


def _used(passes: tuple[ir.Pass, ...]) -> set[Array]:
    sorts = [p.sort for p in passes if isinstance(p, ir.Select | ir.Sorting)]
    used = {a for s in sorts for a in (s.values, s.keys) if a is not None}
    for p in passes:
        used.update(loads(ir.pass_exprs(p)), (s.array for s in ir.pass_stores(p)))
        if isinstance(p, ir.Scan | ir.Scatter):
            used.add(p.array)
    return used


def _params(roles: Signature, *added: str) -> tuple[str, ...]:
    return (*(p.name for p in roles.params if p.runtime), *added)
