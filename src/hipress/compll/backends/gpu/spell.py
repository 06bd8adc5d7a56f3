"""How one operation reads in generated GPU code.

Triton follows NumPy's rules for mixed types, so every operand has the type of its operation.
Values of a block have one dimension (its rows), values of an element two.
"""

from __future__ import annotations

from hipress.compll.ir import Array, Expr

PACKED = ("u1", "u2", "u4")
"""Storages of less than a byte."""

RANDOM = ("uniform", "bits32")
"""Ops that draw random numbers."""

POINTEES = {
    "f32": "tl.float32",
    "f16": "tl.float16",
    "bf16": "tl.uint16",
    "i64": "tl.int64",
    "u8": "tl.uint8",
    "u16": "tl.uint16",
    "u32": "tl.uint32",
}
"""What a pointer to a storage points at."""

TYPES = {"i32": "tl.int32", "i64": "tl.int64", "f32": "tl.float32", "bool": "tl.int1"}


def rep(e: Expr) -> str:
    """The machine type of a value."""
    if e.type == "int":
        return "i32" if e.narrow else "i64"
    return "f32" if e.type == "float" else "bool"


def wide(e_type: str) -> str:
    """The machine type in which reductions of a type are kept."""
    return "f32" if e_type == "float" else "i64"


def cast(text: str, machine: str) -> str:
    """A value as another machine type."""
    return f"{text}.to({TYPES[machine]})"


def spread(text: str, e: Expr, variance: int) -> str:
    """A block's value where values of elements are at hand."""
    return f"{text}[:, None]" if e.variance == 1 and variance == 2 else text


_COMPARE = {"lt": "<", "le": "<=", "eq": "==", "ne": "!="}


def spell(e: Expr, args: list[str]) -> str:
    """`e` as an expression of its arguments' texts."""
    args = [spread(text, a, e.variance) for text, a in zip(args, e.args, strict=True)]
    mine, theirs = rep(e), [rep(a) for a in e.args]
    if e.op == "const":
        return f"_{mine}({constant(e)})"
    if e.op in _COMPARE:
        if theirs[0] != theirs[1]:
            args = [cast(a, "i64") for a in args]
        return f"({args[0]} {_COMPARE[e.op]} {args[1]})"
    if e.op == "not":
        return f"({args[0]} == 0)"
    if e.op in ("land", "lor"):
        return f"({args[0]} {'&' if e.op == 'land' else '|'} {args[1]})"
    if e.op == "select":
        yes, no = (
            a if r == mine else cast(a, mine) for a, r in zip(args[1:], theirs[1:], strict=True)
        )
        return f"tl.where({args[0]}, {yes}, {no})"
    if e.op in ("float", "sent"):
        return args[0] if theirs[0] == "f32" else cast(args[0], "f32")
    if e.op == "int":
        if e.args[0].type == "bool":
            return cast(args[0], "i32")
        return f"_to_small_int({args[0]})" if e.narrow else f"_to_int({args[0]})"
    if e.op == "uint":
        return _spell_uint(e, args[0])
    if e.op == "finite":
        return f"_finite({args[0]})"
    return _FLOAT[e.op].format(*args) if e.type == "float" else _spell_int(e, args)


def constant(e: Expr) -> str:
    """The literal of a constant."""
    text = repr(e.attr)
    return f'float("{text}")' if text in ("inf", "-inf", "nan") else text


_FLOAT = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "div": "tl.div_rn({}, {})",
    "neg": "(-{})",
    "abs": "tl.abs({})",
    "floor": "tl.floor({})",
    "sqrt": "tl.sqrt_rn({})",
    # In double precision, so that all backends round to the same bits.
    "exp2": "tl.exp2({}.to(tl.float64)).to(tl.float32)",
    "log2": "tl.log2({}.to(tl.float64)).to(tl.float32)",
    "sign": "_sign_f({})",
    "power": "_power({})",
    "min": "_min({}, {})",
    "max": "_max({}, {})",
    "round_f16": "_round_f16({})",
    "round_bf16": "_from_bf16(_to_bf16({}))",
}

_INT = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "and": "({} & {})",
    "or": "({} | {})",
    "xor": "({} ^ {})",
    "idiv": "_idiv({}, {})",
    "imod": "_imod({}, {})",
    "shl": "_shl({}, {})",
    "shr": "_shr({}, {})",
    "min": "_min({}, {})",
    "max": "_max({}, {})",
    "neg": "(-{})",
    "inv": "(~{})",
    "abs": "tl.abs({})",
    "sign": "_sign_i({})",
}


def _spell_int(e: Expr, args: list[str]) -> str:
    mine = rep(e)
    if e.op == "exponent":
        return f"_exponent({args[0]})"
    common = "i64" if "i64" in (mine, *(rep(a) for a in e.args)) else "i32"
    args = [a if rep(x) == common else cast(a, common) for a, x in zip(args, e.args, strict=True)]
    form = _INT[e.op]
    if e.op in ("idiv", "imod") and e.args[0].lo >= 0 and e.args[1].lo > 0:
        form = "({} // {})" if e.op == "idiv" else "({} % {})"
    elif e.op in ("shl", "shr") and 0 <= e.args[1].lo and e.args[1].hi < int(common[1:]) - 1:
        form = "({} << {})" if e.op == "shl" else "({} >> {})"
    text = form.format(*args)
    if e.op == "sign":
        return text if mine == "i32" else cast(text, mine)
    return text if mine == common else cast(text, mine)


def _spell_uint(e: Expr, arg: str) -> str:
    top = 2**e.attr - 1
    if e.args[0].type == "float":
        return f"_sat_f32({arg})" if e.attr == 32 else cast(f"_sat_f({arg}, {top})", rep(e))
    source = arg if rep(e.args[0]) == "i64" or top < 2**31 else cast(arg, "i64")
    if rep(e.args[0]) == "bool":
        return cast(arg, rep(e))
    return cast(f"_sat_i({source}, {top})", rep(e))


def stored(array: Array, text: str) -> str:
    """A value as it lies in an array."""
    if array.storage == "bf16":
        return f"_to_bf16({text})"
    return f"{text}.to({POINTEES[array.storage]})"


def loaded(array: Array, text: str) -> str:
    """An array's element as a value."""
    if array.storage == "bf16":
        return f"_from_bf16({text})"
    if array.storage == "f16":
        return f"{text}.to(tl.float32)"
    if array.storage in ("u8", "u16"):
        return f"{text}.to(tl.int32)"
    return f"{text}.to(tl.int64)" if array.storage == "u32" else text
