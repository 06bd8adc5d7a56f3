"""Codec expressions: the short text that names a codec, read into a tree of calls.

    expression := name [ "(" [ item { "," item } ] ")" ]
    item       := expression | key "=" value      inner codecs first, then options
    name       := a word such as onebit, or the path of a .pse program
    value      := true | false | integer | float | word

A path may hold spaces; one that holds any of `( ) , =` goes in quotes: `ef("runs (2)/my.pse")`.
The codec table decides which names and options exist.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from hipress.errors import UsageError

Value: TypeAlias = bool | int | float | str

MAX_CHARS = 1000
MAX_DEPTH = 16
"""Most codecs inside one another."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INT = re.compile(r"[+-]?[0-9]+")
_FLOAT = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
# Everything up to the next mark, so that a path keeps its spaces, dots and slashes.
_PLAIN = re.compile(r"[^(),=]*")
_QUOTED = re.compile(r"(?P<quote>['\"])(?P<path>.*?)(?P=quote)\s*", re.DOTALL)
# Python's spelling is taken too, since exact=False is easily written.
_BOOLS = {"true": True, "True": True, "false": False, "False": False}
_CODEC = "a codec name or the path of a .pse program"
_VALUE = "a value (true, false, a number or a word)"


@dataclass(frozen=True, slots=True)
class Call:
    """A codec name, or program path, with its inner codecs and its options.

    `str()` is the canonical text and parses back to an equal call; a call for which it would not
    cannot be made. Key tables by that text: in Python 1, 1.0 and True are one key.

    >>> str(parse("ef( topk(ratio=1e-2,exact=False) )"))
    'ef(topk(ratio=0.01, exact=false))'
    """

    name: str
    """A word, or a path that ends in .pse."""
    args: tuple[Call, ...] = ()
    """Inner codecs."""
    options: tuple[tuple[str, Value], ...] = ()
    """Keys and values in the order written."""

    def __post_init__(self) -> None:
        if not (is_name(self.name) or _is_path(self.name)):
            raise UsageError(f"codec name {self.name!r} is not {_CODEC}; write e.g. 'onebit'.")
        for key, value in self.options:
            if not _KEY.fullmatch(key) or not _is_value(value):
                raise UsageError(
                    f"codec option {key!r}={value!r} is not a word with {_VALUE}; "
                    f"{_advice(key, value)}."
                )
        if len({key for key, _ in self.options}) < len(self.options):
            raise UsageError(f"codec expression {str(self)!r} gives an option twice; give it once.")
        if self.depth() > MAX_DEPTH:
            raise UsageError(f"codec {self.name!r} nests more than {MAX_DEPTH} codecs; use fewer.")
        # The canonical text may be longer than what was read: 1e15 becomes 1000000000000000.0.
        _check_length(str(self))

    def __str__(self) -> str:
        items = [str(arg) for arg in self.args]
        items += [f"{key}={_value_text(value)}" for key, value in self.options]
        name = _name_text(self.name)
        return f"{name}({', '.join(items)})" if items else name

    @property
    def is_path(self) -> bool:
        """Whether the name is the path of a program file."""
        return _is_path(self.name)

    def depth(self) -> int:
        """Returns the number of codecs inside one another, this one included."""
        return 1 + max((arg.depth() for arg in self.args), default=0)


def parse(text: str) -> Call:
    """Returns the call that a codec expression means.

    Raises:
        UsageError: with the expression, the column and what was expected there.
    """
    if not isinstance(text, str):
        raise UsageError(
            f"codec expression is {text!r}, of type {type(text).__name__}, not text; "
            "write e.g. 'ef(onebit)'."
        )
    _check_length(text)
    return _Parser(text).whole()


def is_name(text: str) -> bool:
    """Returns whether an expression can use this name for a codec.

    >>> is_name("one-bit"), is_name("1bit")
    (True, False)
    """
    return _NAME.fullmatch(text) is not None


class _Parser:
    """One walk from left to right; `at` is the index of the next character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def whole(self) -> Call:
        name, start = self.word()
        call = self.call(name, start, 1)
        if self.at < len(self.text):
            self.fail("the end", self.at)
        return call

    def call(self, name: str, start: int, depth: int) -> Call:
        """Reads the arguments of a codec whose name was read, if it has any."""
        if not (is_name(name) or _is_path(name)):
            if _INT.fullmatch(name) or _FLOAT.fullmatch(name):
                raise UsageError(
                    f"codec expression {self.text!r} has {name!r} without a name (column "
                    f"{start + 1}); options are named: write e.g. 'topk(ratio=0.01)'."
                )
            self.fail(_CODEC, start, name)
        if depth > MAX_DEPTH:
            raise UsageError(
                f"codec expression {self.text!r} nests more than {MAX_DEPTH} codecs "
                f"(column {start + 1}); use fewer."
            )
        if not self.take("("):
            return Call(name)
        args, options = self.arguments(depth)
        if not self.take(")"):
            self.fail("',' or ')'" if self.at < len(self.text) else "')'", self.at)
        self.skip_spaces()
        return Call(name, args, options)

    def arguments(self, depth: int) -> tuple[tuple[Call, ...], tuple[tuple[str, Value], ...]]:
        args: list[Call] = []
        options: dict[str, Value] = {}
        self.skip_spaces()
        if self.text.startswith(")", self.at):
            return (), ()
        while True:
            word, start = self.word()
            if self.take("="):
                self.option(word, start, options)
            elif options:
                self.fail("an option (inner codecs come first)", start, word)
            else:
                args.append(self.call(word, start, depth + 1))
            if not self.take(","):
                return tuple(args), tuple(options.items())

    def option(self, key: str, start: int, options: dict[str, Value]) -> None:
        if not _KEY.fullmatch(key):
            self.fail("an option name", start, key)
        if key in options:
            raise UsageError(
                f"codec expression {self.text!r} gives option {key!r} twice "
                f"(column {start + 1}); give it once."
            )
        self.skip_spaces()
        quoted = _QUOTED.match(self.text, self.at)
        if quoted is not None and _is_value(quoted["path"]):  # as Python would have it
            options[key], self.at = quoted["path"], quoted.end()
            return
        word, start = self.word()
        value = _value(word)
        if value is None:
            self.fail(_VALUE, start, word)
        options[key] = value

    def word(self) -> tuple[str, int]:
        """Reads a name, path, key or value; returns it with the index where it starts."""
        self.skip_spaces()
        start = self.at
        if self.text.startswith(("'", '"'), start):
            return self.quoted(), start
        found = _PLAIN.match(self.text, start)
        assert found is not None
        self.at = found.end()
        return found.group().rstrip(), start

    def quoted(self) -> str:
        found = _QUOTED.match(self.text, self.at)
        if found is None:
            self.fail(f"a closing {self.text[self.at]}", len(self.text))
        if not _is_path(found["path"]):
            self.fail("the path of a .pse program in the quotes", self.at, found["path"])
        self.at = found.end()
        return found["path"]

    def take(self, mark: str) -> bool:
        found = self.text.startswith(mark, self.at)
        self.at += found
        return found

    def skip_spaces(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1

    def fail(self, expected: str, start: int, found: str = "") -> NoReturn:
        """Refuses the expression at `start`, where `found` (or one character) stands."""
        found = found or self.text[start : start + 1]
        problem = f"has {found!r}" if found else "ends"
        raise UsageError(
            f"codec expression {self.text!r} {problem} where {expected} was expected "
            f"(column {start + 1}); write e.g. 'ef(onebit)'."
        )


def _check_length(text: str) -> None:
    if len(text) > MAX_CHARS:
        raise UsageError(
            f"codec expression {text[:40] + '...'!r} has {len(text):,} characters, more than "
            f"{MAX_CHARS:,}; shorten it, e.g. with a relative path."
        )


def _is_path(name: str) -> bool:
    # Text with both kinds of quotes could not be quoted again by str().
    quotable = "'" not in name or '"' not in name
    return len(name) > 4 and name.endswith(".pse") and name.isprintable() and quotable


def _is_value(value: Value) -> bool:
    if isinstance(value, str):
        return _NAME.fullmatch(value) is not None and value not in _BOOLS
    if isinstance(value, float):
        return math.isfinite(value)
    # Integers are kept to what a kernel's parameter holds.
    return isinstance(value, int) and -(2**63) <= value < 2**63


def _value(word: str) -> Value | None:
    """Returns the value that a word stands for, None if there is none."""
    value: Value = word
    if word in _BOOLS:
        return _BOOLS[word]
    if _INT.fullmatch(word):
        value = int(word)
    elif _FLOAT.fullmatch(word):
        value = float(word)
    return value if _is_value(value) else None


def _advice(key: str, value: Value) -> str:
    """Returns how to give an option that was refused."""
    if isinstance(value, float):
        return "a number must be finite"
    if isinstance(value, str) and _value(value) not in (None, value):
        return f"write {key}={value} without quotes"
    return "write e.g. 'ratio=0.01'"


def _value_text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _name_text(name: str) -> str:
    plain = _PLAIN.fullmatch(name) and name == name.strip() and name[0] not in "'\""
    quote = "" if plain else '"' if "'" in name else "'"
    return f"{quote}{name}{quote}"
