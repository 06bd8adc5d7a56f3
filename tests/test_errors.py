"""The exception tree, and what each message looks like."""

import ast
import inspect
import pickle
from pathlib import Path

import pytest

import hipress
import hipress.session
from hipress import errors
from hipress.errors import (
    BackendError,
    FrameError,
    HipressError,
    LabError,
    MissingDependencyError,
    ProgramError,
    UsageError,
)


def make_program_error(**changes):
    fields = {
        "file": "my.pse",
        "line": 4,
        "column": 17,
        "source_line": "      float x = scael * 2;",
        "message": "'scael' is not defined; names in scope: gradient, scale",
    }
    return ProgramError(**{**fields, **changes})


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (UsageError, ValueError),
        (FrameError, ValueError),
        (MissingDependencyError, ImportError),
        (BackendError, RuntimeError),
        (LabError, RuntimeError),
        (ProgramError, Exception),
    ],
)
def test_each_error_is_a_hipress_error_and_its_builtin(error, builtin):
    assert issubclass(error, HipressError)
    assert issubclass(error, builtin)


def test_the_tree_in_the_docstring_names_every_error():
    for name in errors.__all__:
        assert name in errors.__doc__
        assert getattr(errors, name).__doc__


def test_program_error_shows_place_line_and_caret():
    assert str(make_program_error()) == (
        "my.pse:4:17: 'scael' is not defined; names in scope: gradient, scale\n"
        "    float x = scael * 2;\n"
        "              ^"
    )


@pytest.mark.parametrize(
    ("source_line", "column", "caret_line"),
    [
        ("x = 1", 1, "    ^"),
        ("x = 1", 6, "         ^"),  # just past the end: something is missing there
        ("\tx =\ty", 6, "       \t^"),  # tabs stay tabs, so the caret lines up on any terminal
        ("   x", 2, "    ^"),  # inside the indent, which is not shown
        ("x   ", 1, "    ^"),
    ],
)
def test_the_caret_stands_under_its_column(source_line, column, caret_line):
    lines = str(make_program_error(source_line=source_line, column=column)).split("\n")
    assert lines[1] == f"    {source_line.strip()}"
    assert lines[2] == caret_line


def test_program_error_without_a_source_line_is_one_line():
    error = make_program_error(source_line="", message="the program is empty")
    assert str(error) == "my.pse:4:17: the program is empty"


def test_program_error_lets_no_escape_sequence_through():
    error = make_program_error(source_line="x\x1b[31m = \x07y", column=1)
    assert str(error).split("\n")[1] == "    x?[31m = ?y"


def test_program_error_takes_keywords_only():
    with pytest.raises(TypeError):
        ProgramError("my.pse", 4, 17, "x", "message")


def test_missing_dependency_names_package_and_command():
    error = MissingDependencyError("pyroute2", "lab")
    assert (error.package, error.extra) == ("pyroute2", "lab")
    assert str(error) == (
        "package 'pyroute2' is needed here and is not installed; add it with: pip install pyroute2"
    )


@pytest.mark.parametrize(
    "error",
    [make_program_error(), MissingDependencyError("pillow", "data"), FrameError("cut short")],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickle(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)


SOURCE = Path(errors.__file__).parent

# Texts that another sentence contains, or that are made of one.
PARTS = {
    "--{}{} {}",
    "--timeline: {}",
    "rank {}: {}",
    "a rank has timed no whole step",
    "no gradient is computed in every step",
}


def usage_texts(source):
    """Yield line and text of each UsageError in a source; what is filled in is shown as {}."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "UsageError"):
            continue
        [text] = node.args
        if isinstance(text, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in text.values]
            yield node.lineno, "".join(parts)
        elif isinstance(text, ast.Constant):
            yield node.lineno, text.value


def problems(text):
    """Return what a text lacks: a full stop, what to do next, or the usual spelling."""
    found = [] if text.endswith(".") else ["no full stop"]
    if not any(mark in text for mark in (";", ": ", " must be ")):
        found.append("no next step")
    return found + [word for word in ("can not", "can't", "don't") if word in text]


def test_each_usage_error_is_a_sentence_with_a_next_step():
    """Catches: a refusal that leaves the user without an idea of what to write instead."""
    texts = [
        (f"{path.relative_to(SOURCE)}:{line}", text)
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in usage_texts(path.read_text("utf-8"))
    ]
    assert len(texts) > 300
    wrong = {place: (text, problems(text)) for place, text in texts if text not in PARTS}
    assert {place: found for place, found in wrong.items() if found[1]} == {}


@pytest.mark.parametrize(
    "text, lacks",
    [
        ("hosts is 0; give 1 or more", ["no full stop"]),
        ("hosts is 0.", ["no next step"]),
        ("hosts can not be 0; give 1 or more.", ["can not"]),
        ("hosts is 0; give 1 or more.", []),
    ],
)
def test_that_check_can_fail(text, lacks):
    [(_, found)] = usage_texts(f"raise UsageError({text!r})")
    assert problems(found) == lacks


# --- errors of public functions -------------------------------------------------------------------

CALLS = {
    "attach": "hipress.attach(None, codec='onbit')",
    "comm_hook": "hipress.torch.comm_hook('onbit')",
    "allreduce": "hipress.allreduce([], codec='onbit')",
    "codec": "hipress.codec('onbit')",
    "describe": "hipress.codecs.describe('onbit')",
    "start": "hipress.session.start({}, codec='onbit')",
    "AdamW": "hipress.torch.AdamW([], refresh_every=0)",
}


def our_frames(call):
    """Return the functions of ours in the traceback of a call that is refused."""
    with pytest.raises(UsageError) as caught:
        eval(call, {"hipress": hipress})
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    return [entry.name for entry in caught.traceback if Path(entry.path).is_relative_to(SOURCE)]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_public_function_shows_the_sentence_under_one_frame(call, monkeypatch):
    """Catches: a good sentence under twenty lines of our own frames."""
    monkeypatch.delenv("HIPRESS_LOG", raising=False)
    assert our_frames(call) == ["call"]


def test_debug_keeps_all_frames(monkeypatch):
    monkeypatch.setenv("HIPRESS_LOG", "debug")
    with pytest.raises(UsageError) as caught:
        hipress.codec("onbit")
    assert caught.traceback[-1].name == "_spec"  # which has the table


def test_a_public_function_keeps_its_signature_and_returns():
    @errors.public
    def double(number: int, *, by: int = 2) -> int:
        """Doubles."""
        if by < 0:
            raise ZeroDivisionError
        return number * by

    assert double(3, by=3) == 9
    assert (double.__name__, double.__doc__) == ("double", "Doubles.")
    assert str(inspect.signature(double)) == "(number: int, *, by: int = 2) -> int"
    with pytest.raises(ZeroDivisionError) as caught:  # a bug keeps its frames
        double(1, by=-1)
    assert caught.traceback[-1].name == "double"
