"""Codec expressions: what they mean, that their text round-trips, and how each is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hipress.codecs.expression import MAX_CHARS, MAX_DEPTH, Call, Value, parse
from hipress.errors import HipressError, UsageError

ONEBIT = Call("onebit")
E_G = "; write e.g. 'ef(onebit)'."
CODEC = "where a codec name or the path of a .pse program was expected"
VALUE = "where a value (true, false, a number or a word) was expected"


@pytest.mark.parametrize(
    "text, call",
    [
        ("onebit", ONEBIT),
        (" onebit ( ) ", ONEBIT),
        ("tbq(tau=0.5)", Call("tbq", options=(("tau", 0.5),))),
        (
            "ef(topk(ratio=0.01, exact=false))",
            Call("ef", (Call("topk", options=(("ratio", 0.01), ("exact", False))),)),
        ),
        (
            "momentum(ef(onebit), mu=0.9, nesterov=true)",
            Call("momentum", (Call("ef", (ONEBIT,)),), (("mu", 0.9), ("nesterov", True))),
        ),
        (
            "dithering(levels=2,partition=natural , norm = l2)",
            Call("dithering", options=(("levels", 2), ("partition", "natural"), ("norm", "l2"))),
        ),
        ("both(onebit, fp16)", Call("both", (ONEBIT, Call("fp16")))),
        ("my.pse", Call("my.pse")),
        ("dir/my prog.pse", Call("dir/my prog.pse")),
        ("./x.pse(bitwidth=4)", Call("./x.pse", options=(("bitwidth", 4),))),
        ("../a-b/x.y.pse", Call("../a-b/x.y.pse")),
        ("/abs/dir/my.pse", Call("/abs/dir/my.pse")),
        ("C:\\dir\\my.pse", Call("C:\\dir\\my.pse")),
        ("ef(my.pse)", Call("ef", (Call("my.pse"),))),
        ("ef( dir/my prog.pse , a=1)", Call("ef", (Call("dir/my prog.pse"),), (("a", 1),))),
        ('ef("runs (2)/n=4, my.pse"(a=1) )',
         Call("ef", (Call("runs (2)/n=4, my.pse", options=(("a", 1),)),))),
        ("it's/my.pse", Call("it's/my.pse")),
        ("third-party_codec2", Call("third-party_codec2")),
    ],
)  # fmt: skip
def test_meaning(text: str, call: Call) -> None:
    assert parse(text) == call
    assert parse(str(call)) == call


@pytest.mark.parametrize(
    "text, value",
    [
        ("true", True), ("false", False), ("True", True), ("False", False),
        ("0", 0), ("-3", -3), ("+7", 7), ("007", 7), ("9223372036854775807", 2**63 - 1),
        ("1e-3", 0.001), ("1E+2", 100.0), (".5", 0.5), ("2.", 2.0), ("-0.25", -0.25),
        ("1e15", 1e15), ("linear", "linear"), ("l2", "l2"), ("_x-y", "_x-y"), ("nan", "nan"),
    ],
)  # fmt: skip
def test_values(text: str, value: Value) -> None:
    ((key, found),) = parse(f"c(k={text})").options
    assert key == "k"
    assert found == value and type(found) is type(value)
    assert type(parse(str(parse(f"c(k={text})"))).options[0][1]) is type(value)


@pytest.mark.parametrize(
    "text, canonical",
    [
        ("ef( topk(ratio=1e-2,exact=False) )", "ef(topk(ratio=0.01, exact=false))"),
        ("onebit()", "onebit"),
        ("c(a=+1,b=.1e1)", "c(a=1, b=1.0)"),
        ("'my.pse'", "my.pse"),
        ('"a(1).pse"', "'a(1).pse'"),
        ('"it\'s (1).pse"', '"it\'s (1).pse"'),
        ('"\' .pse"', '"\' .pse"'),
        ("' lead.pse'", "' lead.pse'"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert str(parse(text)) == canonical
    assert str(parse(canonical)) == canonical


def test_is_path() -> None:
    assert parse("my.pse").is_path
    assert not parse("onebit").is_path


# --- what is refused -----------------------------------------------------------------------------


def test_error_is_both() -> None:
    assert issubclass(UsageError, HipressError) and issubclass(UsageError, ValueError)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("ef(onebit", "ends where ')' was expected (column 10)"),
        ("", f"ends {CODEC} (column 1)"),
        ("  ", f"ends {CODEC} (column 3)"),
        ("ef(", f"ends {CODEC} (column 4)"),
        ("ef(onebit))", "has ')' where the end was expected (column 11)"),
        ("onebit, fp16", "has ',' where the end was expected (column 7)"),
        ("tau=0.5", "has '=' where the end was expected (column 4)"),
        ("onebit() x", "has 'x' where the end was expected (column 10)"),
        ("(onebit)", f"has '(' {CODEC} (column 1)"),
        ("ef((onebit))", f"has '(' {CODEC} (column 4)"),
        ("ef(onebit,)", f"has ')' {CODEC} (column 11)"),
        ("ef(,onebit)", f"has ',' {CODEC} (column 4)"),
        ("ef(onebit]", f"has 'onebit]' {CODEC} (column 4)"),
        ("one bit", f"has 'one bit' {CODEC} (column 1)"),
        ("1bit", f"has '1bit' {CODEC} (column 1)"),
        ("my.py", f"has 'my.py' {CODEC} (column 1)"),
        (".pse", f"has '.pse' {CODEC} (column 1)"),
        ("a\nb.pse", f"has 'a\\nb.pse' {CODEC} (column 1)"),
        ("topk(ratio=)", f"has ')' {VALUE} (column 12)"),
        ("topk(ratio=", f"ends {VALUE} (column 12)"),
        ("topk(ratio=1%)", f"has '1%' {VALUE} (column 12)"),
        ("topk(ratio=1 k=2)", f"has '1 k' {VALUE} (column 12)"),
        ("topk(ratio=1e999)", f"has '1e999' {VALUE} (column 12)"),
        ("topk(k=9223372036854775808)", f"has '9223372036854775808' {VALUE} (column 8)"),
        ("topk(k='my.pse')", f"has 'my.pse' {VALUE} (column 8)"),
        ("topk(k=a|b)", f"has 'a|b' {VALUE} (column 8)"),
        ("topk(ratio=1(", "has '(' where ',' or ')' was expected (column 13)"),
        ("topk(ratio=1", "ends where ')' was expected (column 13)"),
        ("topk(=1)", "has '=' where an option name was expected (column 6)"),
        ("topk(my-key=1)", "has 'my-key' where an option name was expected (column 6)"),
        ("ef(k=1, onebit)",
         "has 'onebit' where an option (inner codecs come first) was expected (column 9)"),
        ("ef(k=1,)", "has ')' where an option (inner codecs come first) was expected (column 8)"),
        ("ef('my.pse", "ends where a closing ' was expected (column 11)"),
        ("ef('onebit')",
         "has 'onebit' where the path of a .pse program in the quotes was expected (column 4)"),
        ("'my.pse'x", "has 'x' where the end was expected (column 9)"),
    ],
)  # fmt: skip
def test_refusals(text: str, problem: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(text)
    assert str(error.value) == f"codec expression {text!r} {problem}{E_G}"


@pytest.mark.parametrize("value", ["0.01", "2", "-1", "1e-3"])
def test_option_without_a_name(value: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(f"ef(topk({value}))")
    assert str(error.value) == (
        f"codec expression 'ef(topk({value}))' has {value!r} without a name (column 9); options "
        "are named: write e.g. 'topk(ratio=0.01)'."
    )


def test_duplicate_option() -> None:
    with pytest.raises(UsageError) as error:
        parse("topk(k=1, k=2)")
    assert str(error.value) == (
        "codec expression 'topk(k=1, k=2)' gives option 'k' twice (column 11); give it once."
    )


def nested(depth: int) -> str:
    return "ef(" * (depth - 1) + "onebit" + ")" * (depth - 1)


def test_depth() -> None:
    assert parse(nested(MAX_DEPTH)).depth() == MAX_DEPTH
    with pytest.raises(UsageError) as error:
        parse(nested(MAX_DEPTH + 1))
    assert str(error.value) == (
        f"codec expression {nested(17)!r} nests more than 16 codecs (column 49); use fewer."
    )


def test_length() -> None:
    assert parse("x" * MAX_CHARS).name == "x" * 1000
    with pytest.raises(UsageError) as error:
        parse("x" * (MAX_CHARS + 1))
    assert str(error.value) == (
        f"codec expression {'x' * 40 + '...'!r} has 1,001 characters, more than 1,000; "
        "shorten it, e.g. with a relative path."
    )


def test_canonical_length() -> None:
    text = "c(" + ",".join(f"a{i}=1e15" for i in range(100)) + ")"
    assert len(text) < MAX_CHARS
    with pytest.raises(UsageError, match="characters, more than 1,000; shorten it"):
        parse(text)


def test_not_text() -> None:
    with pytest.raises(UsageError) as error:
        parse(3)  # type: ignore[arg-type]
    assert str(error.value) == (
        "codec expression is 3, of type int, not text; write e.g. 'ef(onebit)'."
    )


@pytest.mark.parametrize("name", ["", "a b", "x(1)", "x.py", "'\".pse", "a\n.pse"])
def test_call_name(name: str) -> None:
    with pytest.raises(UsageError) as error:
        Call(name)
    assert str(error.value) == (
        f"codec name {name!r} is not a codec name or the path of a .pse program; "
        "write e.g. 'onebit'."
    )


@pytest.mark.parametrize(
    "key, value",
    [("a b", 1), ("", 1), ("a", "x y"), ("a", "true"), ("a", "1"), ("a", ""), ("a", None),
     ("a", math.inf), ("a", math.nan), ("a", 2**63), ("a", -(2**63) - 1), ("a", (1,))],
)  # fmt: skip
def test_call_option(key: str, value: Any) -> None:
    with pytest.raises(UsageError) as error:
        Call("c", options=((key, value),))
    advice = "write e.g. 'ratio=0.01'"
    if isinstance(value, float):
        advice = "a number must be finite"
    elif value in ("true", "1"):
        advice = f"write a={value} without quotes"
    assert str(error.value) == (
        f"codec option {key!r}={value!r} is not a word with a value (true, false, a number or "
        f"a word); {advice}."
    )


def test_call_limits() -> None:
    with pytest.raises(UsageError) as error:
        Call("c", options=(("a", 1), ("a", 2)))
    assert str(error.value) == (
        "codec expression 'c(a=1, a=2)' gives an option twice; give it once."
    )
    with pytest.raises(UsageError) as error:
        Call("ef", (parse(nested(MAX_DEPTH)),))
    assert str(error.value) == "codec 'ef' nests more than 16 codecs; use fewer."


# --- properties ----------------------------------------------------------------------------------

WORDS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,7}", fullmatch=True)
KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True)
BOOLS = ("true", "false", "True", "False")
PATHS = st.text(
    st.characters(categories=["L", "N", "P", "S", "Zs"], include_characters="()=,'\"/ "),
    min_size=1, max_size=12,
).map(lambda stem: stem + ".pse").filter(
    lambda path: path.isprintable() and not {"'", '"'} <= set(path)
)  # fmt: skip
VALUES: st.SearchStrategy[Value] = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False, allow_infinity=False),
    WORDS.filter(lambda word: word not in BOOLS),
)
OPTIONS = st.dictionaries(KEYS, VALUES, max_size=3).map(lambda options: tuple(options.items()))
CALLS = st.recursive(
    st.builds(Call, st.one_of(WORDS, PATHS), st.just(()), OPTIONS),
    lambda inner: st.builds(
        Call, st.one_of(WORDS, PATHS), st.lists(inner, max_size=2).map(tuple), OPTIONS
    ),
    max_leaves=4,
)


@given(CALLS)
@settings(deadline=None, max_examples=300)
def test_round_trip(call: Call) -> None:
    again = parse(str(call))
    assert again == call
    # Equality takes 1 for True; the text does not.
    assert str(again) == str(call)


@given(st.text(st.sampled_from("ef(topk, =1.5e-true'\"./pse)\n"), max_size=40))
@settings(deadline=None, max_examples=500)
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        call = parse(text)
    except UsageError as error:
        assert str(error).endswith(".") and "\n" not in str(error)
    else:
        assert parse(str(call)) == call
