"""How one operation reads in generated CPU code.

numba widens `int32 + int32` to 64 bits and `float32 * int64` to a double, so every operand has
the machine type of its operation and every narrow result is cast back.
"""

from __future__ import annotations

from hipress.compll.ir import Array, Expr

PACKED = ("u1", "u2", "u4")
"""Storages of less than a byte: loops see them as bytes, packed before and after."""

RANDOM = {"uniform": "f32", "bits32": "u32"}
"""Ops that draw random numbers: for whole tiles at once, into a buffer of this type."""

DTYPES = {"f32": "f32", "f16": "u16", "bf16": "u16", "i64": "i64", "u16": "u16", "u32": "u32"}
"""NumPy type of a storage; the others are bytes."""


def rep(e: Expr) -> str:
    """The machine type of a value."""
    if e.type == "int":
        return "i32" if e.narrow else "i64"
    return "f32" if e.type == "float" else "bool"


def wide(e_type: str) -> str:
    """The machine type in which reductions of a type are kept."""
    return "f32" if e_type == "float" else "i64"


_COMPARE = {"lt": "<", "le": "<=", "eq": "==", "ne": "!="}


def spell(e: Expr, args: list[str]) -> str:
    """`e` as an expression of its arguments' texts."""
    mine, theirs = rep(e), [rep(a) for a in e.args]
    if e.op == "const":
        return str(e.attr) if e.type == "bool" else f"{mine}({e.attr!r})"
    if e.op in _COMPARE:
        if theirs[0] != theirs[1]:
            args = [f"i64({a})" for a in args]
        return f"({args[0]} {_COMPARE[e.op]} {args[1]})"
    if e.op == "not":
        return f"(not {args[0]})"
    if e.op in ("land", "lor"):
        return f"({args[0]} {'&' if e.op == 'land' else '|'} {args[1]})"
    if e.op == "select":
        yes, no = (
            a if r == mine else f"{mine}({a})" for a, r in zip(args[1:], theirs[1:], strict=True)
        )
        return f"({yes} if {args[0]} else {no})"
    if e.op in ("float", "sent"):
        return f"f32({args[0]})"
    if e.op == "int":
        if e.args[0].type == "bool":
            return f"i32({args[0]})"
        return f"_to_small_int({args[0]})" if e.narrow else f"_to_int({args[0]})"
    if e.op == "uint":
        return _spell_uint(e, args[0])
    if e.op == "finite":
        return f"_finite({args[0]})"
    return _spell_float(e, args) if e.type == "float" else _spell_int(e, args)


_FLOAT = {
    "add": "({} + {})",
    "sub": "({} - {})",
    "mul": "({} * {})",
    "div": "({} / {})",
    "neg": "(-{})",
    "abs": "abs({})",
    "floor": "np.floor({})",
    "sqrt": "np.sqrt({})",
    # In double precision, so that all backends round to the same bits.
    "exp2": "f32(np.exp2(f64({})))",
    "log2": "f32(np.log2(f64({})))",
    "sign": "_sign_f({})",
    "power": "_power({})",
    "min": "_min({}, {})",
    "max": "_max({}, {})",
    "round_f16": "_from_f16(_to_f16({}))",
    "round_bf16": "_from_bf16(_to_bf16({}))",
}

_INT = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "and": "{} & {}",
    "or": "{} | {}",
    "xor": "{} ^ {}",
    "idiv": "_idiv({}, {})",
    "imod": "_imod({}, {})",
    "shl": "_shl({}, {})",
    "shr": "_shr({}, {})",
    "min": "_min({}, {})",
    "max": "_max({}, {})",
    "neg": "-{}",
    "inv": "~{}",
    "abs": "abs({})",
    "sign": "_sign_i({})",
}


def _spell_float(e: Expr, args: list[str]) -> str:
    return _FLOAT[e.op].format(*args)


def _spell_int(e: Expr, args: list[str]) -> str:
    mine = rep(e)
    if e.op == "exponent":
        return f"_exponent({args[0]})"
    common = "i64" if "i64" in (mine, *(rep(a) for a in e.args)) else "i32"
    args = [a if rep(x) == common else f"{common}({a})" for a, x in zip(args, e.args, strict=True)]
    form = _INT[e.op]
    if e.op in ("idiv", "imod") and e.args[0].lo >= 0 and e.args[1].lo > 0:
        form = "{} // {}" if e.op == "idiv" else "{} % {}"
    elif e.op in ("shl", "shr") and 0 <= e.args[1].lo and e.args[1].hi < int(common[1:]) - 1:
        form = "{} << {}" if e.op == "shl" else "{} >> {}"
    return f"{mine}({form.format(*args)})"


def _spell_uint(e: Expr, arg: str) -> str:
    top = 2**e.attr - 1
    if e.args[0].type == "float":
        return f"_sat_f32({arg})" if e.attr == 32 else f"_sat_f({arg}, {top})"
    return f"{rep(e)}(_sat_i({arg}, {top}))"


def stored(array: Array, text: str) -> str:
    """A value as it lies in an array."""
    casts = {"f32": "f32", "f16": "_to_f16", "bf16": "_to_bf16", "i64": "i64"}
    cast = casts.get(array.storage) or ("u8" if array.storage in PACKED else array.storage)
    return f"{cast}({text})"


def loaded(array: Array, text: str) -> str:
    """An array's element as a value."""
    if array.storage in ("f16", "bf16"):
        return f"_from_{array.storage}({text})"
    if array.storage in ("u1", "u2", "u4", "u8", "u16"):
        return f"i32({text})"
    return f"i64({text})" if array.storage == "u32" else text
