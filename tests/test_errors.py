"""The exception tree, and what each message looks like."""

import pickle

import pytest

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
        "package 'pyroute2' is needed here and is not installed; "
        'add it with: pip install "hipress[lab]"'
    )


@pytest.mark.parametrize(
    "error",
    [make_program_error(), MissingDependencyError("jax", "jax"), FrameError("cut short")],
    ids=lambda error: type(error).__name__,
)
def test_errors_survive_pickle(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
