"""The table of HIPRESS_* variables: values, defaults, and the wording of refusals."""

import ast
import logging
import re
from pathlib import Path

import pytest

from hipress import settings
from hipress.errors import UsageError

SRC = Path(settings.__file__).parent


def test_defaults():
    environ = {}
    assert settings.cache_dir(environ) == Path("~/.cache/hipress").expanduser()
    assert settings.num_threads(environ) == 1
    assert settings.backend(environ) == "auto"
    assert settings.log_level(environ) == logging.INFO
    assert settings.fashion_mnist(environ) is None


@pytest.mark.parametrize(
    ("function", "name", "text", "value"),
    [
        (settings.cache_dir, "HIPRESS_CACHE_DIR", "/some/where", Path("/some/where")),
        (settings.cache_dir, "HIPRESS_CACHE_DIR", "~/kernels", Path("~/kernels").expanduser()),
        (settings.num_threads, "HIPRESS_THREADS", "8", 8),
        (settings.num_threads, "HIPRESS_THREADS", " 2 ", 2),
        (settings.num_threads, "HIPRESS_THREADS", "", 1),
        (settings.backend, "HIPRESS_BACKEND", "reference", "reference"),
        (settings.backend, "HIPRESS_BACKEND", "CPU", "cpu"),
        (settings.log_level, "HIPRESS_LOG", "debug", logging.DEBUG),
        (settings.log_level, "HIPRESS_LOG", "INFO", logging.INFO),
        (settings.fashion_mnist, "HIPRESS_FASHION_MNIST", "/some/where", Path("/some/where")),
        (settings.fashion_mnist, "HIPRESS_FASHION_MNIST", "~/data", Path("~/data").expanduser()),
        (settings.fashion_mnist, "HIPRESS_FASHION_MNIST", "none", None),
    ],
)
def test_values(function, name, text, value):
    assert function({name: text}) == value


@pytest.mark.parametrize(
    ("base", "expected"),
    [("/big/disk", Path("/big/disk/hipress")), ("relative", Path("~/.cache/hipress").expanduser())],
)
def test_cache_dir_follows_xdg(base, expected):
    assert settings.cache_dir({"XDG_CACHE_HOME": base}) == expected


@pytest.mark.parametrize(
    ("function", "name", "text", "message"),
    [
        (
            settings.num_threads,
            "HIPRESS_THREADS",
            "0",
            "HIPRESS_THREADS is '0'; it must be a whole number of at least 1; "
            "correct it, or unset it to use the default, '1'.",
        ),
        (
            settings.num_threads,
            "HIPRESS_THREADS",
            "two",
            "HIPRESS_THREADS is 'two'; it must be a whole number of at least 1; "
            "correct it, or unset it to use the default, '1'.",
        ),
        (
            settings.backend,
            "HIPRESS_BACKEND",
            "referense",
            "HIPRESS_BACKEND is 'referense' (did you mean 'reference'?); "
            "it must be one of auto, reference, cpu, gpu; "
            "correct it, or unset it to use the default, 'auto'.",
        ),
        (
            settings.log_level,
            "HIPRESS_LOG",
            "10",
            "HIPRESS_LOG is '10'; it must be one of debug, info, warning, error, critical; "
            "correct it, or unset it to use the default, 'info'.",
        ),
        (
            settings.cache_dir,
            "HIPRESS_CACHE_DIR",
            "kernels",
            "HIPRESS_CACHE_DIR is 'kernels'; "
            "it must be an absolute path (a leading ~ is allowed); "
            "correct it, or unset it to use the default, '~/.cache/hipress'.",
        ),
        (
            settings.fashion_mnist,
            "HIPRESS_FASHION_MNIST",
            "data",
            "HIPRESS_FASHION_MNIST is 'data'; "
            "it must be an absolute path (a leading ~ is allowed), or none; "
            "correct it, or unset it to use the default, 'none'.",
        ),
    ],
)
def test_a_bad_value_is_refused_with_value_rule_choices_and_next_step(
    function, name, text, message
):
    with pytest.raises(UsageError) as caught:
        function({name: text})
    assert str(caught.value) == message


def test_a_default_that_cannot_work_says_what_to_set(monkeypatch):
    # A user without a home: "~" stays as it is.
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(UsageError, match="the default of HIPRESS_CACHE_DIR.*set HIPRESS_CACHE_DIR"):
        settings.cache_dir({})


def test_values_are_read_when_asked_for(monkeypatch):
    monkeypatch.setenv("HIPRESS_THREADS", "3")
    assert settings.num_threads() == 3
    assert settings.THREADS.text() == "3"
    monkeypatch.setenv("HIPRESS_THREADS", "4")
    assert settings.num_threads() == 4
    monkeypatch.delenv("HIPRESS_THREADS")
    assert settings.num_threads() == 1
    assert settings.THREADS.text() == "1"


def test_unknown_variables_are_listed_with_the_nearest_name():
    environ = {
        "HIPRESS_TREADS": "2",
        "HIPRESS_ZZZ": "",
        "HIPRESS_THREADS": "2",
        "HIPRES_THREADS": "not ours",
    }
    assert settings.unknown_variables(environ) == [
        settings.UnknownVariable(name="HIPRESS_TREADS", suggestion="HIPRESS_THREADS"),
        settings.UnknownVariable(name="HIPRESS_ZZZ", suggestion=None),
    ]


def test_every_row_is_complete_and_its_default_is_valid():
    names = [setting.name for setting in settings.SETTINGS]
    assert len(set(names)) == len(names)
    for setting in settings.SETTINGS:
        assert setting.name.startswith(settings.PREFIX)
        assert setting.meaning and setting.rule
        setting.read({})


def test_no_variable_is_read_outside_the_table():
    known = {setting.name for setting in settings.SETTINGS}
    strays = {
        (path.name, node.value)
        for path in SRC.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"HIPRESS_[A-Z0-9_]+", node.value)
        and node.value not in known
    }
    assert strays == set()
