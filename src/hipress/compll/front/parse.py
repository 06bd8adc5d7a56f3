"""Program text in, tree of `ast` out.

Text that does not fit the grammar (`grammar.lark`) is a `ProgramError` that points at it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any, NoReturn

import lark

from hipress.compll.front import ast
from hipress.errors import ProgramError

TYPES = (
    "float, int, uint1, uint2, uint3, uint4, uint5, uint6, uint8, uint12, uint16, uint32, "
    "uint<...>, float16, bfloat16"
)
_TOO_NESTED = "the program is nested too deeply; name the inner parts"

MAX_CHARS = 65_536
"""A longer program is refused: the largest built-in program has under 3,000 characters."""


def parse(text: str, *, file: str = "<program>") -> ast.Source:
    """Parses one program file.

    Raises:
        ProgramError: The text is not a program; the message points at line and column.

    Example:
        >>> parse("void XDecode(uint8* c, float* g) { extract(c, g); }").functions[0].name
        'XDecode'
    """
    if len(text) > MAX_CHARS:
        fail(file, text, ast.Pos(1, 1), f"the file has {len(text)} characters; at most {MAX_CHARS}")
    try:
        tree = _parser().parse(text)
        functions, params = _ToAst().transform(tree)
    except lark.exceptions.UnexpectedCharacters as error:
        fail(file, text, ast.Pos(error.line, error.column), f"{error.char!r} has no meaning here")
    except lark.exceptions.UnexpectedEOF:
        fail(file, text, _end_of(text), "the file ends too early")
    except lark.exceptions.UnexpectedToken as error:
        hint = _hint(error, text)
        if hint is not None:
            at, message = hint
            fail(file, text, _pos_at(text, at), message)
        fail(file, text, _place(error, text), _expected(error))
    except _TooLarge as error:
        pos, digits = error.args
        fail(file, text, pos, f"{digits} is too large: a float ends at 3.4e38, an int at 2**62")
    except RecursionError:
        fail(file, text, ast.Pos(1, 1), _TOO_NESTED)
    return ast.Source(file=file, text=text, functions=functions, params=params)


def fail(file: str, text: str, pos: ast.Pos, message: str) -> NoReturn:
    """Raises a `ProgramError` that shows the source line."""
    lines = text.splitlines()
    line = lines[pos.line - 1] if 0 < pos.line <= len(lines) else ""
    raise ProgramError(
        file=file, line=pos.line, column=pos.column, source_line=line, message=message
    )


class _TooLarge(Exception):
    """A literal that no type holds: its place and its digits."""


@cache
def _parser() -> lark.Lark:
    grammar = resources.files("hipress.compll.front").joinpath("grammar.lark").read_text("utf-8")
    return lark.Lark(grammar, parser="lalr", propagate_positions=True, maybe_placeholders=True)


def _end_of(text: str) -> ast.Pos:
    lines = text.splitlines() or [""]
    return ast.Pos(len(lines), len(lines[-1]) + 1)


def _place(error: lark.exceptions.UnexpectedToken, text: str) -> ast.Pos:
    return _end_of(text) if error.token.type == "$END" else ast.Pos(error.line, error.column)


# What a reader calls the grammar's terminals; the rest are shown as they are written.
_TERMINALS = {
    "NAME": "a name",
    "NUMBER": "a number",
    "BASE": "a type",
    "SIGN": "'+' or '-'",
    "BANG": "'!' or '~'",
    "FACTOR": "'/' or '%'",
    "SHIFT": "'<<' or '>>'",
    "RELATION": "'<=' or '>='",
    "EQUALITY": "'==' or '!='",
    "INOUT": "'inout'",
    "STAR": "'*'",
    "LAMBDA_FUNC": "'lambda_func'",
    "$END": "the end of the file",
}


def _expected(error: lark.exceptions.UnexpectedToken) -> str:
    token = error.token
    found = "the end of the file" if token.type == "$END" else f"{str(token)!r}"
    written = {t.name: t.pattern.value for t in _parser().terminals}
    names = sorted(
        (_TERMINALS.get(name) or f"'{written.get(name, name.lower())}'" for name in error.expected),
        key=lambda shown: (shown != "';'", shown != "')'", shown),  # what is most often forgotten
    )
    if len(names) > 8:  # at an expression's start: the list would hide the message
        names = ["an expression"] if "a number" in names else [*names[:8], "..."]
    return f"found {found}; expected {', '.join(names)}"


_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_TYPE = rf"(?:{'|'.join(TYPES.replace('<...>', '').split(', '))}|void)\b"
_NO_TYPE = rf"(?!(?:return|else|if|per|repeat|param|inout|lambda_func)\b|{_TYPE})([A-Za-z_]\w*)"
_LIKE_A_TYPE = (
    rf"(?!{_TYPE})((?:u?int|float)\d+(?:_t)?|double|half|bool|char|short|long|unsigned|size_t)"
)
# How far a lambda without its [&] is read: (float x, [], [=, (), (x) ->, lambda x.
_BARE_LAMBDA = rf"\(\s*{_TYPE}[\s*]+\w+|\[\s*[\]=]|\(\s*\)|\([\w\s,*]+\)\s*->|lambda\s+\w+"
_CAPTURE = "a lambda begins with [&]; write [&](float x) -> float {{ ... }}"

# What other languages have: how a statement looks up to the place of the error, and what to say.
# Group 1 is what the message names and where it points.
_HABITS = (
    (r"(for|while|do|switch|goto)\b.*",
     "the language has no {0!r}; map, reduce, filter and scan go over arrays, if and ?: choose, "
     "repeat (i, count) {{ ... }} repeats statements"),
    (r"([A-Za-z_]\w*)\s*\[.*\]\s*(?:[-+*/%&|^]|<<|>>)?=",
     "an element cannot be set; make the whole array: {0} = map(range(n), ...), or scatter"),
    (r"([A-Za-z_]\w*)\s*([-+*/%&|^]|<<|>>)=",
     "the language has no '{1}='; write {0} = {0} {1} ..."),
    (r"([A-Za-z_]\w*)\s*([-+])\2[;)]", "the language has no '{1}{1}'; write {0} = {0} {1} 1"),
    (rf".*[(,=]\s*({_BARE_LAMBDA})", _CAPTURE),
    (r"lambda_func\s+\w+\s*=\s*(\()", _CAPTURE),
    (rf"{_NO_TYPE}\s+[A-Za-z_]\w*", f"{{0!r}} is not a type; types: {TYPES}"),
    (rf"{_LIKE_A_TYPE}\s*\*.*", f"{{0!r}} is not a type; types: {TYPES}"),
    (rf".*[(,]\s*{_NO_TYPE}\s*\*", f"{{0!r}} is not a type; types: {TYPES}"),
    (rf"{_LIKE_A_TYPE}", f"{{0!r}} is not a type; types: {TYPES}"),
)  # fmt: skip


def _hint(error: lark.exceptions.UnexpectedToken, text: str) -> tuple[int, str] | None:
    """Returns where a construct of another language begins and what to write instead, if any."""
    if error.token.type == "$END" or error.token.start_pos is None:
        return None
    before = _COMMENT.sub(lambda found: " " * len(found[0]), text[: error.token.start_pos])
    start = max(before.rfind(mark) for mark in ";{}") + 1
    statement = before[start:] + str(error.token)
    if len(statement) > 1000:  # the patterns look back and forth
        return None
    for pattern, message in _HABITS:
        found = re.compile(rf"\s*{pattern}", re.DOTALL).fullmatch(statement)
        if found is not None:
            return start + found.start(1), message.format(*found.groups())
    return None


def _pos_at(text: str, at: int) -> ast.Pos:
    line = text.count("\n", 0, at) + 1
    return ast.Pos(line, at - text.rfind("\n", 0, at))


def _pos(meta: Any) -> ast.Pos:
    return ast.Pos(meta.line, meta.column) if not meta.empty else ast.Pos(1, 1)


def _some(children: list[Any]) -> tuple[Any, ...]:
    return tuple(c for c in children if c is not None)


def _start(m: Any, c: list[Any]) -> Any:
    functions = tuple(x for x in c if isinstance(x, ast.Function))
    return functions, tuple(x for x in c if isinstance(x, ast.ParamBlock))


def _function(m: Any, c: list[Any]) -> ast.Function:
    returns, name, *args, body = c
    return ast.Function(_pos(m), returns, str(name), _some(args), body)


def _type(m: Any, c: list[Any]) -> ast.TypeName:
    array = isinstance(c[-1], lark.Token) and c[-1].type == "STAR"
    return ast.TypeName(_pos(m), str(c[0]), c[1], array)


def _declare_lambda(m: Any, c: list[Any]) -> ast.Declare:
    type_ = ast.TypeName(_pos(m), "lambda_func", None, False)
    return ast.Declare(_pos(m), type_, str(c[0]), c[1], None)


def _declare(m: Any, c: list[Any]) -> ast.Declare:
    return ast.Declare(_pos(m), c[0], str(c[1]), c[2], None)


def _if(m: Any, c: list[Any]) -> ast.If:
    no = c[2]
    return ast.If(_pos(m), c[0], c[1], (no,) if isinstance(no, ast.If) else no or ())


def _number(m: Any, c: list[Any]) -> ast.Number:
    digits = str(c[0]).rstrip("f")
    # Python makes no int of 5,000 digits; digits after the first 40 change nothing here.
    value = int(digits.lstrip("0")[:40] or "0") if digits.isdigit() else float(digits)
    if abs(value) > (2**62 if isinstance(value, int) else 3.4028235e38):
        raise _TooLarge(_pos(m), digits if len(digits) <= 40 else f"{digits[:40]}...")
    return ast.Number(_pos(m), value)


def _lambda(m: Any, c: list[Any]) -> ast.Lambda:
    *args, returns, body = c
    return ast.Lambda(_pos(m), _some(args), returns, body)


_Rule = Callable[[Any, list[Any]], Any]
_INFIX = {"or_": "||", "and_": "&&", "bor": "|", "bxor": "^", "band": "&", "lt": "<", "gt": ">"}
_PLAIN = (ast.Assign, ast.Per, ast.Repeat, ast.Do, ast.Unary, ast.Member, ast.Index, ast.Name)


def _infix(op: str) -> _Rule:
    return lambda m, c: ast.Binary(_pos(m), op, *c)


def _plain(node: Any) -> _Rule:
    """For a rule whose children are the fields of the node."""
    return lambda m, c: node(_pos(m), *(str(x) if isinstance(x, lark.Token) else x for x in c))


_RULES: dict[str, _Rule] = {
    "start": _start,
    "param_block": lambda m, c: ast.ParamBlock(_pos(m), str(c[0]), tuple(c[1:])),
    "field": _declare,
    "function": _function,
    "arg": lambda m, c: ast.Arg(_pos(m), c[-3], str(c[-2]), isinstance(c[0], lark.Token), c[-1]),
    "struct": lambda m, c: ast.TypeName(_pos(m), str(c[0]), None, False),
    "type": _type,
    "block": lambda m, c: tuple(c),
    "declare_lambda": _declare_lambda,
    "declare": _declare,
    "declare_sized": lambda m, c: ast.Declare(_pos(m), c[0], str(c[1]), None, c[2]),
    **{node.__name__.lower(): _plain(node) for node in _PLAIN},
    "if_else": _if,
    "else_if": _if,
    "return_": _plain(ast.Return),
    "ternary": lambda m, c: c[0] if c[1] is None else ast.Ternary(_pos(m), *c),
    "binary": lambda m, c: ast.Binary(_pos(m), str(c[1]), c[0], c[2]),
    **{rule: _infix(op) for rule, op in _INFIX.items()},
    "number": _number,
    "call": lambda m, c: ast.Call(_pos(m), str(c[0]), _some(c[1:])),
    "random": lambda m, c: ast.Call(_pos(m), "random", tuple(c[1:]), c[0]),
    "lambda": _lambda,
}
"""For each rule of the grammar, what makes a node of its place `m` and its children `c`."""


class _ToAst(lark.Transformer[lark.Token, Any]):
    def __default__(self, data: Any, children: list[Any], meta: Any) -> Any:
        return _RULES[str(data)](meta, children)
