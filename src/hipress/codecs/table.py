"""The table of codecs, and the way from an expression to a codec."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata, resources
from typing import Any

import numpy as np

from hipress.codecs import expression
from hipress.codecs.base import Codec
from hipress.codecs.expression import Call, Value
from hipress.codecs.program import Family, ProgramCodec
from hipress.codecs.residual import FLOAT32, KINDS
from hipress.codecs.spec import FRACTION_RULE, RATIO_RULE, Option, Spec, fraction, share
from hipress.compll.build import Program, parse_program, read_program
from hipress.compll.passes.derive import Variant
from hipress.errors import HipressError, UsageError, did_you_mean, public

TABLE = {
    "none": "hipress.codecs.none",
    "fp16": "hipress.codecs.fp16",
    "bf16": "hipress.codecs.bf16",
    "int8": "hipress.codecs.int8",
    "int4": "hipress.codecs.int4",
    "onebit": "hipress.codecs.onebit",
    "tbq": "hipress.codecs.tbq",
    "terngrad": "hipress.codecs.terngrad",
    "minmax": "hipress.codecs.minmax",
    "dithering": "hipress.codecs.dithering",
    "dgc": "hipress.codecs.dgc",
    "graddrop": "hipress.codecs.graddrop",
    "topk": "hipress.codecs.topk",
    "blocktopk": "hipress.codecs.blocktopk",
    "randomk": "hipress.codecs.randomk",
}
"""The module whose `SPEC` describes each built-in codec."""

ENTRY_POINTS = "hipress.codecs"
"""The group of entry points in which other packages name their `Spec`."""

WRAPPERS = ("ef", "momentum")


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What `describe` returns for a codec."""

    name: str
    summary: str
    paper: str
    options: Mapping[str, str]
    """The default, the meaning and the rule of each option."""
    feedback: bool
    """Whether error feedback is on unless `ef=false`."""
    program: str
    """The text of its CompLL program."""


def names() -> list[str]:
    """Returns the names of all codecs: the built-in ones, then those of other packages.

    Example:
        >>> "onebit" in names()
        True
    """
    return [*TABLE, *sorted(_others())]


def broken() -> dict[str, str]:
    """Returns codecs of other packages that cannot be made with their defaults, with the reasons.

    A loop over `names()` should leave these out, so that one package does not stop the rest.
    """
    reasons = {}
    for name in _others():
        try:
            codec(name)
        except Exception as error:  # their functions run here: anything may be raised
            known = isinstance(error, HipressError)
            reasons[name] = str(error) if known else f"{name}: {error!r}"
    return reasons


@public
def describe(name: str) -> Description:
    """Returns what a codec does, its options and their defaults, its paper and its program.

    Example:
        >>> describe("topk").feedback
        True
    """
    if not isinstance(name, str):
        raise UsageError(f"describe was given {name!r}; give the name of a codec, e.g. 'topk'.")
    if name in WRAPPERS:
        raise UsageError(f"{name!r} wraps a codec, e.g. '{name}(onebit)'; describe the one inside.")
    if not expression.is_name(name):
        raise UsageError(
            f"describe({name!r}): that is not the name of a codec, e.g. 'topk'; for a program in a "
            "file, and its options, use `hipress compll check FILE`."
        )
    spec = _spec(name)
    return Description(
        name=name,
        summary=spec.summary,
        paper=spec.paper,
        options={o.name: f"{_shown(o.default)}: {o.about} ({o.rule})" for o in spec.options},
        feedback=spec.feedback,
        program=_text(spec),
    )


@public
def codec(expr: str, **options: Value) -> Codec:
    """Returns the codec that an expression names.

    Args:
        expr: E.g. `onebit`, `ef(topk(ratio=0.01))`, `momentum(ef(onebit), mu=0.9)`, or the path
            of a `.pse` program.
        options: Further options of the outermost codec: `codec("my.pse", bitwidth=4)`.

    Raises:
        UsageError: The expression names no codec, or an option does not fit.
        ProgramError: The program at that path is wrong.

    Example:
        >>> codec("onebit", ef=False).name
        'onebit(ef=false)'
    """
    if not isinstance(expr, str):
        raise UsageError(f"codec is {expr!r}; give an expression such as 'ef(onebit)'.")
    call = expression.parse(expr)
    if options:
        plain = [(k, v.item() if isinstance(v, np.generic) else v) for k, v in options.items()]
        call = Call(call.name, call.args, (*call.options, *plain))
        expression.parse(str(call))  # an option given twice is found here
    return _build(call) if _has_path(call) else _cached(str(call))


def feedback(inner: ProgramCodec, *, decay: float = 1.0, residual: str = FLOAT32) -> ProgramCodec:
    """Returns `ef(inner)`: adds what compression lost to the next gradient, times `decay`.

    `residual` says how that is kept until then: as `float32`, `bf16` or `int8`.
    """
    if not share(decay):
        raise UsageError(f"ef: decay={_shown(decay)} must be {RATIO_RULE}, e.g. 0.95.")
    if residual not in KINDS:
        choices = " or ".join(KINDS)
        raise UsageError(f"ef: residual={_shown(residual)} must be {choices}, e.g. int8.")
    if decay < 1 or residual != FLOAT32:
        return _kept(feedback(inner), decay, residual)
    if inner.variant.momentum:
        raise UsageError(
            f"ef({inner.name}) would feed back what momentum made; write momentum(ef(...)) instead."
        )
    if inner.variant.feedback:
        return inner

    def phases() -> list[tuple[int, ProgramCodec]]:
        return [(start, feedback(phase)) for start, phase in inner.family.phases()]

    family = _wrapped(inner, feedback, inner.family.back, phases)
    return inner.with_variant(Variant(feedback=True), f"ef({inner.name})", family=family)


def _kept(inner: ProgramCodec, decay: float, residual: str) -> ProgramCodec:
    """Returns a codec with error feedback whose residual decays, or is kept in fewer bits."""
    if inner.variant.decays or inner.stored:
        found = "a decay" if inner.variant.decays else f"residual={inner.stored}"
        raise UsageError(f"{inner.name} has {found} already; give the options of ef once.")

    def wrap(codec: ProgramCodec) -> ProgramCodec:
        return _kept(codec, decay, residual)

    def back(num_workers: int, is_fed: bool) -> Codec | None:
        made = inner.family.back(num_workers, is_fed)
        if not isinstance(made, ProgramCodec) or not made.variant.feedback:
            return made
        return wrap(made)

    def phases() -> list[tuple[int, ProgramCodec]]:
        return [(start, wrap(phase)) for start, phase in inner.family.phases()]

    call = expression.parse(inner.name)
    plain = call.args[0] if call.name == "ef" else call
    family = _wrapped(inner, wrap, back, phases)
    given = [("decay", decay)] * (decay < 1) + [("residual", residual)] * (residual != FLOAT32)
    stored = "" if residual == FLOAT32 else residual
    return inner.with_residual(decay, stored, str(Call("ef", (plain,), tuple(given))), family)


def momentum(inner: ProgramCodec, *, mu: float = 0.9, nesterov: bool = True) -> ProgramCodec:
    """Returns `momentum(inner, mu=..., nesterov=...)`, which sends the gradients' momentum."""
    if not fraction(mu):
        raise UsageError(f"momentum: mu={mu} must be {FRACTION_RULE}, e.g. 0.9.")
    if inner.variant.momentum:
        raise UsageError(f"{inner.name} has momentum already; write momentum(...) once.")

    def wrap(codec: ProgramCodec) -> ProgramCodec:
        return momentum(codec, mu=mu, nesterov=nesterov)

    def phases() -> list[tuple[int, ProgramCodec]]:
        return [(start, wrap(phase)) for start, phase in inner.family.phases()]

    # Momentum is for the workers: on the way back it would be applied a second time.
    family = replace(
        _wrapped(inner, wrap, lambda workers, _: inner.aggregator(workers), phases),
        for_momentum=lambda: inner.family.for_momentum() or inner,
    )
    variant = replace(inner.variant, momentum=True, nesterov=nesterov)
    name = f"momentum({inner.name}, mu={mu!r}, nesterov={_shown(nesterov)})"
    return inner.with_variant(variant, name, mu, family)


def _wrapped(
    inner: ProgramCodec,
    wrap: Callable[[ProgramCodec], ProgramCodec],
    back: Callable[[int, bool], Codec | None],
    phases: Callable[[], list[tuple[int, ProgramCodec]]],
) -> Family:
    """Returns the family of a wrapper: what the codec inside becomes is wrapped again."""

    def rewrapped(made: ProgramCodec | None) -> ProgramCodec | None:
        return None if made is None else wrap(made)

    return Family(
        back,
        phases,
        scaled=lambda loss_scale: rewrapped(inner.family.scaled(loss_scale)),
        clip=inner.family.clip,
        unclipped=lambda: rewrapped(inner.family.unclipped()),
        for_momentum=lambda: rewrapped(inner.family.for_momentum()),
    )


def remade(name: str, codec_hash: int, backend: str | None) -> Codec:
    """Returns the codec that was pickled, made again by its name.

    Raises:
        UsageError: Its program is gone, or is no longer the one that was pickled.
    """
    made = codec(name)
    if made.codec_hash != codec_hash:
        raise UsageError(
            f"the program of {name} is not the one it was when the codec was pickled; give both "
            "processes the same file."
        )
    if backend is not None and isinstance(made, ProgramCodec):
        made = made.on_backend(backend)
    return made


@lru_cache(maxsize=256)
def _cached(expr: str) -> ProgramCodec:
    return _build(expression.parse(expr))


def _has_path(call: Call) -> bool:
    return call.is_path or any(_has_path(a) for a in call.args)


def _build(call: Call) -> ProgramCodec:
    if call.name in WRAPPERS:
        return _wrap(call)
    if call.args:
        _spec(call.name)  # a misspelt wrapper is an unknown name
        raise UsageError(
            f"{call.name} takes no codec inside; wrappers are {' and '.join(WRAPPERS)}, "
            f"e.g. 'ef({call.name})'."
        )
    options = dict(call.options)
    asked = options.pop("ef", None)
    if asked is not None and not isinstance(asked, bool):
        raise UsageError(f"{call.name}: ef={_shown(asked)} must be true or false.")
    if call.is_path:
        plain = ProgramCodec(read_program(call.name).bind(options), name=str(call))
        return plain.with_variant(Variant(feedback=True), str(call)) if asked else plain
    spec = _spec(call.name)
    if asked and spec.own_memory:
        raise _has_own_memory(call.name, "ef=true")
    values = {o.name: _option(call.name, o, options) for o in spec.options}
    if options:
        raise _no_option(call.name, next(iter(options)), [*(o.name for o in spec.options), "ef"])
    bound = _program(call.name).bind(spec.params(values))
    plain = ProgramCodec(
        bound,
        name=str(call),
        family=_family(call, spec, values),
        shares_stream=spec.shares_stream,
        keeps_sizes=spec.keeps_sizes,
        chooses_largest=spec.chooses_largest,
    )
    wanted = spec.feedback if asked is None else asked
    return plain.with_variant(Variant(feedback=True), str(call)) if wanted else plain


def _family(call: Call, spec: Spec, values: dict[str, Any]) -> Family:
    """Returns the codecs for the way back and for other phases of training."""

    def back(num_workers: int, feedback: bool) -> Codec | None:
        if spec.back is None:
            return None
        return codec(spec.back({**values, "ef": feedback}, num_workers))

    def changed(options: dict[str, Any]) -> ProgramCodec:
        asked = [(name, value) for name, value in call.options if name == "ef"]
        return _cached(str(Call(call.name, (), (*{**values, **options}.items(), *asked))))

    def phases() -> list[tuple[int, ProgramCodec]]:
        rows = [] if spec.phases is None else spec.phases(values)
        return [(start, changed(options)) for start, options in rows]

    in_units = [o.name for o in spec.options if o.is_in_gradient_units and values[o.name]]
    clip = values[spec.clip] if spec.clip is not None else 0.0

    def scaled(loss_scale: float) -> ProgramCodec | None:
        options = {name: values[name] * loss_scale for name in in_units}
        return changed(options) if options else None

    def unclipped() -> ProgramCodec | None:
        return changed({spec.clip: 0.0}) if clip and spec.clip is not None else None

    def for_momentum() -> ProgramCodec | None:
        return None if spec.for_momentum is None else _cached(spec.for_momentum(values))

    return Family(
        back,
        phases,
        scaled=scaled,
        clip=float(clip),
        unclipped=unclipped,
        for_momentum=for_momentum,
    )


def _wrap(call: Call) -> ProgramCodec:
    if len(call.args) != 1:
        raise UsageError(f"{call.name} takes one codec; write e.g. '{call.name}(onebit)'.")
    arg = call.args[0]
    inner = _build(arg)
    if arg.name not in WRAPPERS and not arg.is_path and _spec(arg.name).own_memory:
        raise _has_own_memory(arg.name, call.name)
    options = dict(call.options)
    if call.name == "ef":
        decay, residual = options.pop("decay", 1.0), str(options.pop("residual", FLOAT32))
        if options:
            raise _misplaced(call, next(iter(options)), ["decay", "residual"])
        if isinstance(decay, bool | str):
            raise UsageError(f"ef: decay={_shown(decay)} must be {RATIO_RULE}, e.g. 0.95.")
        return feedback(inner, decay=float(decay), residual=residual)
    mu, nesterov = options.pop("mu", 0.9), options.pop("nesterov", True)
    if options:
        raise _misplaced(call, next(iter(options)), ["mu", "nesterov"])
    if isinstance(mu, bool | str) or not isinstance(nesterov, bool):
        raise UsageError(
            f"momentum: mu={_shown(mu)} must be a number and nesterov={_shown(nesterov)} "
            "true or false."
        )
    return momentum(inner, mu=float(mu), nesterov=nesterov)


def _no_option(name: str, option: str, known: list[str]) -> UsageError:
    return UsageError(
        f"{name} has no option {option!r}{did_you_mean(option, known)}; it takes: "
        f"{', '.join(known) or 'none'}."
    )


def _misplaced(call: Call, option: str, known: list[str]) -> UsageError:
    """Returns the error for an option that a wrapper does not have; the codec inside may."""
    inner = call.args[0]
    while inner.args:
        inner = inner.args[0]
    if not inner.is_path and option in {*(o.name for o in _spec(inner.name).options), "ef"}:
        return UsageError(
            f"{call.name} has no option {option!r}, {inner.name} has: write it inside, e.g. "
            f"'{call.name}({inner.name}({option}=...))'."
        )
    return _no_option(call.name, option, known)


def _has_own_memory(name: str, asked: str) -> UsageError:
    return UsageError(
        f"{name} keeps momentum and a residual itself, {asked} would do that a second time; "
        f"write {name} alone (describe({name!r}) lists its options)."
    )


def _option(codec_name: str, option: Option, options: dict[str, Value]) -> Any:
    value = options.pop(option.name, option.default)
    whole = isinstance(option.default, int) and isinstance(value, float)
    if whole or not option.allowed(value):
        raise UsageError(f"{codec_name}: {option.name}={_shown(value)} must be {option.rule}.")
    return value


def _shown(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _spec(name: str) -> Spec:
    if name in TABLE:
        spec = importlib.import_module(TABLE[name]).SPEC
    elif name in (others := _others()):
        spec = _load(others[name])
    else:
        known = names()
        raise UsageError(
            f"no codec {name!r}{did_you_mean(name, [*known, *WRAPPERS])}; there are: "
            f"{', '.join(known)}, wrapped by {' and '.join(WRAPPERS)}, or the path of a .pse "
            "program."
        )
    assert isinstance(spec, Spec)
    return spec


def _others() -> dict[str, metadata.EntryPoint]:
    """Returns the codecs of other packages; warns about one that no expression could name."""
    others = {}
    for point in metadata.entry_points(group=ENTRY_POINTS):
        if point.name in TABLE or point.name in WRAPPERS:
            _ignore(point, "that name is built in")
        elif not expression.is_name(point.name):
            _ignore(point, "a name is letters, digits, _ and -, and does not start with a digit")
        else:
            others[point.name] = point
    return others


@lru_cache(maxsize=256)  # so that it warns once
def _ignore(point: metadata.EntryPoint, reason: str) -> None:
    logging.getLogger("hipress").warning(
        "the codec %r of %r is ignored: %s; rename its entry point.",
        point.name, point.value, reason,
    )  # fmt: skip


def _load(point: metadata.EntryPoint) -> Spec:
    try:
        spec = point.load()
    except Exception as error:  # the import of another package may raise anything
        raise UsageError(
            f"the codec {point.name!r} of {point.value!r} cannot be loaded ({error}); "
            "mend or remove the package that brings it."
        ) from error
    if not isinstance(spec, Spec):
        raise UsageError(
            f"the entry point {point.name!r} gives {type(spec).__name__}; it must name a "
            "hipress.codecs.spec.Spec."
        )
    return spec


def _text(spec: Spec) -> str:
    try:
        return resources.files(spec.package).joinpath(spec.program).read_text("utf-8")
    except (OSError, ModuleNotFoundError) as error:
        raise UsageError(
            f"the program {spec.program!r} is not in the package {spec.package!r} ({error}); list "
            "it under the package's data files."
        ) from error


@lru_cache(maxsize=64)
def _program(name: str) -> Program:
    spec = _spec(name)
    return parse_program(_text(spec), file=spec.program)
