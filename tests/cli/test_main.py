"""The command line as a user meets it: help, errors, exit codes, and what it does not load."""

import os
import re
import subprocess
import sys
import types
from typing import Annotated

import pytest
import typer

import hipress
from hipress.cli import main as cli
from hipress.errors import HipressError, ProgramError, UsageError


def run(*args):
    """Run the command line in this process; return its exit code."""
    with pytest.raises(SystemExit) as caught:
        cli.main(list(args))
    return caught.value.code


@pytest.fixture
def add_command(monkeypatch):
    """Return a function that makes a function the command `doctor`."""

    def add(function):
        module = types.ModuleType("stand_in")
        module.app = typer.Typer()
        module.app.command()(function)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(cli.COMMANDS, "doctor", cli.Command(module.__name__, "A stand-in."))

    return add


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"hipress {hipress.__version__}\n"


def test_help_lists_every_command_and_an_example(capsys):
    assert run("--help") == 0
    out = capsys.readouterr().out
    for name, row in cli.COMMANDS.items():
        assert name in out
        assert row.help in out
    assert "Example: hipress" in out


def commands(command, path):
    """Yield a command and all its sub-commands, each with its words on the command line."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, [*path, name])


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_an_example(name, capsys):
    for path, _ in commands(cli.load(name), [name]):
        assert run(*path, "--help") == 0
        out = capsys.readouterr().out
        assert f"Usage: hipress {' '.join(path)}" in out
        assert f"Example: hipress {' '.join(path)}" in out
        assert "completion" not in out


def bracketed(command):
    """Return each text in square brackets of a command's help, as it was written."""
    texts = [command.help, command.epilog, *(getattr(p, "help", None) for p in command.params)]
    return re.findall(r"\[[^\]]+\]", " ".join(text or "" for text in texts).replace("\\[", "["))


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_no_help_loses_text_in_brackets(name, capsys, monkeypatch):
    """Catches: text that rich takes for markup."""
    monkeypatch.setenv("COLUMNS", "200")
    for path, command in commands(cli.load(name), [name]):
        assert run(*path, "--help") == 0
        out = capsys.readouterr().out
        assert [text for text in bracketed(command) if text not in out] == []


def test_brackets_are_kept_everywhere(add_command, capsys, monkeypatch):
    def command(
        file: Annotated[str, typer.Argument(help="A file [a].")] = "",
        number: Annotated[int, typer.Option(help="A number [/b].")] = 0,
    ) -> None:
        """Prints [bold] and [c0.1]."""

    monkeypatch.setenv("COLUMNS", "200")
    add_command(command)
    assert run("doctor", "--help") == 0
    out = capsys.readouterr().out
    assert all(text in out for text in ("[a]", "[/b]", "[bold]", "[c0.1]"))
    assert bracketed(cli.load("lab").commands["run"]) == ["[host0]", "[host0.1]"]


def test_an_unknown_command_names_the_nearest(capsys):
    assert run("doctr") == 2
    assert "No such command 'doctr'. Did you mean 'doctor'?" in capsys.readouterr().err


def test_an_unknown_option_is_refused(capsys):
    assert run("doctor", "--jsn") == 2
    assert "--jsn" in capsys.readouterr().err


def test_a_command_gets_its_arguments_untouched(add_command, capsys):
    def command(words: list[str]) -> None:
        print(words)

    add_command(command)
    assert run("doctor", "a", "--", "-b", "--help") == 0
    assert capsys.readouterr().out == "['a', '-b', '--help']\n"


def test_an_error_is_one_line_on_stderr_and_exit_code_2(add_command, capsys):
    def command() -> None:
        raise UsageError("codec 'onebti' is not known; did you mean 'onebit'?")

    add_command(command)
    assert run("doctor") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "hipress: codec 'onebti' is not known; did you mean 'onebit'?\n"


def test_a_program_error_keeps_its_caret(add_command, capsys):
    def command() -> None:
        raise ProgramError(
            file="my.pse", line=1, column=5, source_line="x = y;", message="'y' is not defined"
        )

    add_command(command)
    assert run("doctor") == 2
    assert capsys.readouterr().err == (
        "hipress: my.pse:1:5: 'y' is not defined\n    x = y;\n        ^\n"
    )


def test_every_hipress_error_is_caught(add_command, capsys):
    def command() -> None:
        raise HipressError("no")

    add_command(command)
    assert run("doctor") == 2
    assert capsys.readouterr().err == "hipress: no\n"


def test_a_bug_is_not_hidden(add_command):
    def command() -> None:
        raise ZeroDivisionError

    add_command(command)
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_ctrl_c_is_quiet(add_command, capsys):
    def command() -> None:
        raise KeyboardInterrupt

    add_command(command)
    assert run("doctor") == 130
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_command_chooses_its_exit_code(add_command):
    def command() -> None:
        raise typer.Exit(1)

    add_command(command)
    assert run("doctor") == 1


def test_a_bad_log_level_stops_a_command(monkeypatch, capsys):
    monkeypatch.setenv("HIPRESS_LOG", "loud")
    assert run("demo") == 2
    assert capsys.readouterr().err.startswith("hipress: HIPRESS_LOG is 'loud'; it must be one of")


@pytest.mark.parametrize("args", [["--help"], *([name, "--help"] for name in cli.COMMANDS)])
def test_help_loads_neither_torch_nor_numba(args):
    code = (
        "import sys\n"
        "from hipress.cli.main import main\n"
        "try:\n"
        f"    main({args!r})\n"
        "finally:\n"
        "    heavy = {'torch', 'numba', 'numpy', 'triton', 'sklearn'} & set(sys.modules)\n"
        "    print('LOADED', sorted(heavy))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED []"
