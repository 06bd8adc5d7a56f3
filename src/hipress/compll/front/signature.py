"""The arguments of a function by role: gradient, payload, states and parameters."""

from __future__ import annotations

from dataclasses import dataclass

from hipress.compll.front import ast
from hipress.compll.front.draft import Draft
from hipress.compll.front.expressions import WIDTHS, Expressions
from hipress.compll.front.graph import ElemType, Graph
from hipress.compll.front.parse import TYPES
from hipress.compll.front.scope import Env

ParamValue = int | float


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a program, as its signature or a param block declares it."""

    name: str
    elem: ElemType
    default: ParamValue | None

    @property
    def runtime(self) -> bool:
        """Floats are passed at run time; integers are known when kernels are made."""
        return self.elem.kind == "float"


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of a function, by role."""

    gradient: ast.Arg
    payload: ast.Arg
    states: tuple[ast.Arg, ...]
    params: tuple[Param, ...]


def signature(source: ast.Source, function: ast.Function) -> Signature:
    """Sorts the arguments of an encode or decode function by role."""
    check = Expressions(source, Draft(Graph()))
    states = tuple(a for a in function.args if a.inout)
    arrays = [a for a in function.args if a.type.array and not a.inout]
    gradients = [a for a in arrays if a.type.base == "float"]
    payloads = [a for a in arrays if a.type.base == "uint8"]
    for a in function.args:
        if a.inout and (a.type.base not in STATES or (a.type.array and a.size is not None)):
            check.fail(
                a,
                f"state {a.name!r}: write inout T* {a.name} (as long as the gradient), inout T "
                f"{a.name}[size] or inout T {a.name} (one number); T is {', '.join(STATES)}",
            )
        if not a.inout and a.size is not None:
            check.fail(a, f"argument {a.name!r}: only an inout array has a size of its own")
    for a in arrays:
        if a.type.base not in ("float", "uint8"):
            check.fail(
                a,
                f"argument {a.name!r}: arrays are float* (gradient), uint8* (payload) or "
                "inout float* (state)",
            )
    if len(gradients) != 1 or len(payloads) != 1:
        check.fail(
            function,
            f"{function.name} takes {len(gradients)} float* and {len(payloads)} uint8* arguments; "
            "exactly one of each is needed: the gradient and the payload",
        )
    if states and function.name.endswith("Decode"):
        check.fail(states[0], "a decode function keeps no state; remove the inout argument")
    params: list[Param] = []
    blocks = {b.name: b for b in source.params}
    for a in function.args:
        if a.type.array or a.inout:
            continue
        if a.type.base in blocks:
            params.extend(_fields(check, blocks[a.type.base]))
        elif a.type.base[0].isupper() or a.type.base not in _SCALARS:
            known = ", ".join(sorted(blocks)) or "none"
            message = f"{a.type.base!r} is not a type; param blocks in this file: {known}"
            check.fail(a, f"{message}; types: {TYPES}")
        else:
            params.append(Param(a.name, check.elem(a.type, Env()), None))
    names = [p.name for p in params]
    for name in names:
        if names.count(name) > 1:
            check.fail(function, f"two parameters are called {name!r}; rename one")
    return Signature(gradients[0], payloads[0], states, tuple(params))


STATES = ("float", "float16", "bfloat16", "uint8", "int")
"""What a state may hold: each is a dtype of tensors."""
_SCALARS = ("float", "int", "uint", *(f"uint{bits}" for bits in WIDTHS))


def _fields(check: Expressions, block: ast.ParamBlock) -> list[Param]:
    params = []
    for f in block.fields:
        elem = check.elem(f.type, Env())
        default: ParamValue | None = None
        if f.value is not None:
            value = check.scalar(f.value, Env())
            if value.op != "const":
                check.fail(f.value, "the default of a parameter must be a literal")
            default = float(value.attr) if elem.kind == "float" else int(value.attr)
        params.append(Param(f.name, elem, default))
    return params
