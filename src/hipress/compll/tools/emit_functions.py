"""The functions of an emitted package: their names, their arguments and what they call.

Names in a program are chosen by whoever wrote it. Those of parameters and states become names of
arguments, each through `_Names`; the bodies of functions that take them use nothing but arguments
and names with a leading underscore, which no argument has.
"""

from __future__ import annotations

import keyword
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from hipress.compll.build import Bound
from hipress.compll.passes.derive import Variant

_OURS = ("x", "payload", "numel", "out", "alpha", "mu", "lr_ratio", "step", "seed", "stream")


@dataclass
class _Names:
    """Names of the program as names of arguments that Python accepts."""

    taken: set[str] = field(default_factory=lambda: set(_OURS))

    def __call__(self, name: str) -> str:
        while name.startswith("_") or name in self.taken or keyword.iskeyword(name):
            name = f"p_{name}"
        self.taken.add(name)
        return name


@dataclass(frozen=True)
class Arg:
    """An argument of an emitted function."""

    name: str
    type: str
    default: str = ""
    keyword: bool = True
    prefix: str = ""
    """What an operator puts before the name. Its arguments travel through torch by name, beside
    those of torch's own functions, so a program's `mode` or `match` would break torch.compile."""

    @property
    def op_name(self) -> str:
        """Its name in the operator."""
        return self.prefix + self.name

    def text(self, name: str, *, typed: bool) -> str:
        """The argument in a signature."""
        if not typed:
            return f"{name}={self.default}" if self.default else name
        return f"{name}: {self.type}" + (f" = {self.default}" if self.default else "")


def signature(args: Iterable[Arg], *, op: bool = False, typed: bool = True) -> str:
    """Arguments, each on its own line; keyword-only ones after a star."""
    texts: dict[bool, list[str]] = {False: [], True: []}
    for a in args:
        texts[a.keyword].append(a.text(a.op_name if op else a.name, typed=typed))
    lines = [*texts[False], *(["*", *texts[True]] if texts[True] else [])]
    return "".join(f"    {line},\n" for line in lines)


def call_args(args: Iterable[Arg], *, op: bool) -> str:
    """The arguments of a call: of an operator by the plain function, or the other way round."""
    texts = []
    for a in args:
        to, given = (a.op_name, a.name) if op else (a.name, a.op_name)
        texts.append(f"{to}={given}" if a.keyword else given)
    return ", ".join(texts)


@dataclass(frozen=True, kw_only=True)
class Function:
    """A function of the wrapper and, unless `fake` is empty, an operator."""

    name: str
    args: tuple[Arg, ...]
    returns: str
    about: str
    body: str
    fake: str
    """What tells torch.compile the shape of the result, in terms of the operator's names."""

    @property
    def mutates(self) -> tuple[str, ...]:
        """The operator's arguments that it writes to."""
        tensors = [a for a in self.args if a.prefix == _STATE or a.name == "out"]
        return tuple(a.op_name for a in tensors)


_STATE, _PARAM = "state_", "param_"


def functions(
    bound: Bound, variant: Variant, mu: float, required: Collection[str]
) -> tuple[Function, ...]:
    """encode, decode, decode_add and wire_bytes of a program; see `emit.Package`."""
    kernel = bound.kernels(variant=variant)[0]
    names = _Names()
    values = dict(bound.values)
    options = {p.name: names(p.name) for p in bound.program.params if p.runtime}
    params = tuple(
        Arg(new, "float", "" if old in required else repr(float(values[old])), prefix=_PARAM)
        for old, new in options.items()
    )
    states = tuple(
        Arg(names(array.label), _TENSOR, keyword=False, prefix=_STATE) for array in kernel.states
    )
    rng = (Arg("step", "int"), Arg("seed", "int", "0"), Arg("stream", "int", "0"))
    ours = (Arg("mu", "float", repr(float(mu))),) if variant.momentum else ()
    if variant.feedback:
        ours = (*ours, Arg("lr_ratio", "float", "1.0"))
    payload = Arg("payload", _TENSOR, keyword=False)
    alpha = Arg("alpha", "float", "1.0")
    floats = tuple_text(options.values())
    held = tuple_text(f'("{state.name}", {state.name})' for state in states)
    drawn = "(seed, stream, step)" if kernel.random else "(0, 0, 0)"
    extra = tuple_text(a.name for a in ours)
    told = _told(options, bound.static)
    return (
        Function(
            name="encode",
            args=(
                Arg("x", _TENSOR, keyword=False),
                *states,
                *(rng if kernel.random else ()),
                *params,
                *ours,
            ),
            returns=_TENSOR,
            about="The frame of `x` (float32, float16 or bfloat16, on CPU or GPU, any shape)."
            + _about_states([state.name for state in states])
            + (_ABOUT_RANDOM if kernel.random else "")
            + told,
            body=f"return _encode(x, {held}, {drawn}, {floats}, {extra})",
            fake=f"return _wrapper._empty_frame(x, {tuple_text(a.op_name for a in params)})",
        ),
        Function(
            name="decode",
            args=(payload, Arg("numel", "int", keyword=False), alpha, *params),
            returns=_TENSOR,
            about="`alpha` times the `numel` elements of a frame, as a 1-D float32 tensor." + told,
            body=f"return _decode(payload, numel, alpha, {floats})",
            fake="return _wrapper._empty_gradient(payload, numel)",
        ),
        Function(
            name="decode_add",
            args=(payload, Arg("out", _TENSOR, keyword=False), alpha, *params),
            returns="None",
            about="Adds `alpha` times what a frame holds to `out` (float32, contiguous)." + told,
            body=f'_decode_into("decode_add", payload, out, alpha, {floats})',
            fake="return None",
        ),
        Function(
            name="wire_bytes",
            args=(Arg("numel", "int", keyword=False), *params),
            returns="int",
            about="Bytes of the frame of a tensor with `numel` elements." + told,
            body=f"return _wire_bytes(numel, {floats})",
            fake="",
        ),
    )


_TENSOR = "_torch.Tensor"
_ABOUT_RANDOM = """

    Random numbers follow from `seed`, `stream` and `step`: count `step` up at every call, and let
    ranks that must draw different numbers differ in `stream`."""


def _about_states(states: list[str]) -> str:
    if not states:
        return ""
    names = ", ".join(f"`{state}`" for state in states)
    verb = "is" if len(states) == 1 else "are"
    return f"""

    {names} {verb} updated in place: float32, contiguous, as many elements as `x`; zeros at
    first."""


def _told(options: Mapping[str, str], static: Mapping[str, int | float]) -> str:
    """What a reader of the docstring has to know about parameters."""
    lines = [f"    `{new}` is the program's `{old}`." for old, new in options.items() if new != old]
    lines += [
        f"    `{name}` was fixed at {value} when this was built." for name, value in static.items()
    ]
    return "\n\n" + "\n".join(lines) if lines else ""


def tuple_text(items: Iterable[str]) -> str:
    """A tuple of some texts, as Python writes it."""
    texts = list(items)
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"
