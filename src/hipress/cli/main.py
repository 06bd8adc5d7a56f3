"""The `hipress` command: a table of commands, each loaded only when it is called.

**How to add a command.** Write `hipress/cli/NAME.py` and add one line to `COMMANDS`. The module
exposes `app`, a `typer.Typer`:

    app = typer.Typer()

    @app.command(epilog="Example: hipress NAME data.bin --json")
    def name(
        file: Annotated[Path, typer.Argument(help="The file to read.")],
        json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    ) -> None:
        \"\"\"One sentence that says what the command does.\"\"\"

- One `@app.command` and nothing else makes `hipress NAME` itself the command. For sub-commands
  (`hipress NAME SUB`) add `@app.callback()` with a docstring: without it a lone sub-command
  would lose its name.
- Every command and sub-command has an epilog that starts with "Example: hipress".
- Imports of torch, numba and other slow packages go inside the function, so that `--help` is quick.
- To fail, raise a `HipressError`: it becomes `hipress: MESSAGE` on stderr and exit code 2.
  `raise typer.Exit(1)` is for a job that ran and whose answer is no. Anything else is a bug and
  shows its traceback.
- With `--json`, stdout holds one JSON document; tables, progress bars and notes go to stderr.
- `ui.py` has tables, progress bars and the JSON document; `options.py` has the options that several
  commands share, and `takes_options`, which makes options of the fields of a dataclass.
"""

import importlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import hipress
from hipress import settings
from hipress.errors import HipressError


@dataclass(frozen=True)
class Command:
    module: str
    help: str


COMMANDS: dict[str, Command] = {
    "demo": Command(
        "hipress.cli.demo", "Train on an emulated cluster, with compression and without."
    ),
    "train": Command("hipress.cli.train", "Train a named model on named data, with any codec."),
    "bench": Command("hipress.cli.bench", "Measure speed and accuracy, beside a baseline."),
    "compll": Command("hipress.cli.compll", "Compile, show and check a compression program."),
    "run": Command("hipress.cli.run", "Start a script on this machine or on many."),
    "lab": Command("hipress.cli.lab", "Run a command on an emulated cluster."),
    "profile": Command("hipress.cli.profile", "Measure links, codecs and a model's backward."),
    "plan": Command("hipress.cli.plan", "Decide what happens to each gradient, from a profile."),
    "simulate": Command(
        "hipress.cli.simulate", "Predict step times for other clusters, rates and codecs."
    ),
    "top": Command("hipress.cli.top", "Show running jobs: step times, bytes, slow ranks."),
    "doctor": Command("hipress.cli.doctor", "Say what this machine has and what will be used."),
}
"""Name on the command line: the module that holds it, and its line in `hipress --help`."""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, with the arguments of this process if none are given, and exit."""
    try:
        typer.main.get_command(app)(args=argv, prog_name="hipress")
    except HipressError as error:
        print(f"hipress: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def load(name: str) -> Any:
    """Import the module of a command and return the command, ready to be invoked."""
    module = importlib.import_module(COMMANDS[name].module)
    command = typer.main.get_command(module.app)
    command.name = name
    # Each app brings these options of typer's, which belong to a program and not to a command.
    extra = ("install_completion", "show_completion")
    command.params = [param for param in command.params if param.name not in extra]
    _keep_brackets(command)
    return command


def _keep_brackets(command: Any) -> None:
    """Escapes square brackets in the help of a command and what it holds: rich's markup has them.

    Without it "[host0]" would be taken for the name of a style, and would not be shown.
    """
    for part in (command, *command.params):
        for field in ("help", "epilog"):
            text = getattr(part, field, None)
            if text and "[" in text:
                from rich.markup import escape

                setattr(part, field, escape(text))
    for child in getattr(command, "commands", {}).values():
        _keep_brackets(child)


class _LazyGroup(TyperGroup):
    """A group whose members are placeholders (a name and a line of help) until one is called."""

    # `Any`: typer's own click classes have moved between releases and have no public name.
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, placeholder, rest = super().resolve_command(ctx, args)
        return name, placeholder and load(str(name)), rest


app = typer.Typer(cls=_LazyGroup, no_args_is_help=True, add_completion=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hipress {hipress.__version__}")
        raise typer.Exit()


@app.callback(epilog="Example: hipress demo")
def _root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Compressed gradient exchange for data-parallel training."""
    # The doctor reports a bad setting among its findings; every other command stops here.
    if ctx.invoked_subcommand != "doctor":
        _set_up_log()


def _set_up_log() -> None:
    """Send the logger `hipress` to stderr; as a library, HiPress leaves handlers to the program."""
    logger = logging.getLogger("hipress")
    logger.setLevel(settings.log_level())
    if not logger.handlers:
        handler = _Stderr()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)


class _Stderr(logging.Handler):
    """Writes to what is stderr at the moment."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


def _placeholder() -> None:
    raise AssertionError("a placeholder was called in place of its command")


for _name, _row in COMMANDS.items():
    app.command(_name, help=_row.help)(_placeholder)
