"""Imports point down only and `import hipress` stays light; each check is shown to be able to fail.

The table below is the house from the ground up.
"""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hipress
from tests.grid import full

SRC = Path(hipress.__file__).parent

# Modules that make one room; every other room is the folder (or file) of its own name.
MEMBERS = {
    "ground": {
        "environment",
        "errors",
        "machine",
        "plan",
        "profile",
        "recommendations",
        "settings",
        "snapshots",
        "timeline",
        "units",
        "version",
    },
    "doors": {
        "accelerate",
        "jax",
        "keras",
        "lightning",
        "mxnet",
        "tensorflow",
        "torch",
        "transformers",
    },
    "cli": {"__main__"},
    "front": {"compll.front"},
    "passes": {"compll.passes"},
    "backends": {"compll.backends"},
    "tools": {"compll.tools"},
    # The part of casync that is pure data, so that the simulator executes what the engine runs.
    "graphs": {"casync.graphs"},
}

GROUND = {"ground"}
# compll itself is the intermediate representation and the build, which the stages share.
FRONT = GROUND | {"compll", "front"}
PASSES = FRONT | {"passes"}
BACKENDS = PASSES | {"backends"}
COMPLL = BACKENDS | {"tools"}
CODECS = COMPLL | {"codecs"}
CASYNC = CODECS | {"graphs", "casync"}
SESSION = CASYNC | {"probe", "secopa", "session"}
# A framework adapter talks to the session; it needs no engine, probe or planner. The orders of a
# schedule are pure data.
DOORS = GROUND | {"codecs", "graphs", "session", "doors"}
# "public" is hipress/__init__.py: what a user would call. Rooms below the doors never use it.
UPPER = SESSION | DOORS | {"public", "processes"}

# Room: the rooms it may import, itself among them.
MAY_IMPORT = {
    "ground": GROUND,
    "processes": GROUND | {"processes"},
    "front": FRONT,
    "passes": PASSES,
    "backends": BACKENDS,
    "compll": BACKENDS,
    "tools": COMPLL,
    "codecs": CODECS,
    "graphs": GROUND | {"graphs"},
    "casync": CASYNC,
    "probe": CASYNC | {"probe"},
    "secopa": GROUND | {"graphs", "secopa"},
    "session": SESSION,
    "doors": DOORS,
    "train": UPPER | {"train"},
    "bench": UPPER | {"bench", "train", "lab", "launch"},
    "launch": UPPER | {"launch"},
    "lab": UPPER | {"lab"},
    "cli": UPPER | {"train", "bench", "launch", "lab", "cli"},
    "public": UPPER,
}

# Room: outside packages that it must do without.
MAY_NOT_USE = {"ground": {"torch"}, "graphs": {"torch"}, "secopa": {"torch"}}

# Methods of named tuples, which are public in spite of their underscore, and of torch tensors: the
# values of a sparse one that is not coalesced, and the count of writes, which have no public name.
NOT_OURS = {"_asdict", "_fields", "_make", "_replace", "_values", "_version"}

# What `import hipress` must not load.
LAZY = {
    "accelerate",
    "jax",
    "lark",
    "lightning",
    "matplotlib",
    "numba",
    "plotly",
    "rich",
    "sklearn",
    "tensorflow",
    "transformers",
    "triton",
    "typer",
}
MAX_IMPORT_S = 0.3


def room_of(module: str) -> str:
    """Return the room of a dotted module name that starts with "hipress"."""
    parts = module.split(".")[1:]
    for depth in range(len(parts), 0, -1):
        name = ".".join(parts[:depth])
        for room, members in MEMBERS.items():
            if name in members:
                return room
    return parts[0] if parts else "public"


def imported_modules(tree: ast.AST, modules: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and module of every import, in functions too, and of every lazily named module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                # "from hipress import errors" imports a module, "... import codec" a public name.
                name = f"{base}.{alias.name}"
                yield node.lineno, name if is_module(name, modules) else base
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # Tables of lazily imported modules hold their names as text.
            if re.fullmatch(r"hipress(\.\w+)+", node.value) and is_module(node.value, modules):
                yield node.lineno, node.value


def is_module(name: str, modules: set[str]) -> bool:
    """Say whether a dotted name is a module of ours, written already or only in the table."""
    return name in modules or room_of(name) in MEMBERS and name.startswith("hipress.")


def violations(sources: dict[str, str]) -> list[str]:
    """Check the import table.

    Args:
        sources: Source text by dotted module name.

    Returns:
        One line per import that the table forbids.
    """
    found = []
    for module, source in sources.items():
        room = room_of(module)
        if room not in MAY_IMPORT:
            found.append(f"{module}: room {room!r} is not in the table")
            continue
        for line, target in imported_modules(ast.parse(source), set(sources)):
            place = f"{module}:{line} ({room}) imports {target}"
            if target.startswith("."):
                found.append(f"{place}: imports inside the package are absolute")
            elif target.split(".")[0] == "hipress":
                if room_of(target) not in MAY_IMPORT[room]:
                    found.append(f"{place} ({room_of(target)})")
            elif target.split(".")[0] in MAY_NOT_USE.get(room, ()):
                found.append(f"{place}: this room does without that package")
    return found


def private_uses(sources: dict[str, str]) -> list[str]:
    """Check that no module uses a private name of another room.

    Args:
        sources: Source text by dotted module name.

    Returns:
        One line per use. Private names of other packages, such as torch, are not our business.
    """
    defined: dict[str, set[str]] = {}
    trees = {module: ast.parse(source) for module, source in sources.items()}
    for module, tree in trees.items():
        names = defined.setdefault(room_of(module), set())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    names.add(node.attr)
    found = []
    for module, tree in trees.items():
        room = room_of(module)
        others = set().union(*(names for other, names in defined.items() if other != room))
        for node in ast.walk(tree):
            used = []
            if isinstance(node, ast.Attribute):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                used = [] if own else [node.attr]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hipress"):
                used = [alias.name for alias in node.names]
            for name in used:
                if name in NOT_OURS or not re.match(r"_[a-z]", name, re.I):
                    continue
                if name in others - defined[room]:
                    found.append(f"{module}:{node.lineno} ({room}) uses the private name {name}")
    return found


def package_sources() -> dict[str, str]:
    """Return the source of every module in src/hipress by its dotted name."""
    sources = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = ["hipress", *path.relative_to(SRC).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        sources[".".join(parts)] = path.read_text(encoding="utf-8")
    return sources


def test_imports_point_down_only():
    sources = package_sources()
    assert {"hipress", "hipress.errors", "hipress.cli.main"} <= set(sources)
    assert violations(sources) == []


def test_no_room_uses_a_private_name_of_another():
    assert private_uses(package_sources()) == []


@pytest.mark.parametrize(
    "use", ["session._engine", "from hipress.session.session import _digest", "x = s.a._engine.b"]
)
def test_the_check_of_private_names_can_fail(use):
    owner = "class S:\n    def __init__(self):\n        self._engine = 1\ndef _digest(): pass"
    found = private_uses({"hipress.session.session": owner, "hipress.torch.ddp": use})
    assert len(found) == 1 and "(doors) uses the private name" in found[0]


@pytest.mark.parametrize("use", ["self._engine", "model._orig_mod", "torch._C", "a.__dict__"])
def test_the_check_of_private_names_lets_the_allowed_pass(use):
    owner = "class S:\n    def __init__(self):\n        self._engine = 1"
    assert private_uses({"hipress.session.session": owner, "hipress.torch.ddp": use}) == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("hipress.errors", "import torch", "does without"),
        ("hipress.settings", "def f():\n    from hipress import codecs", "(codecs)"),
        ("hipress.compll.front.parse", "from hipress.codecs.table import x", "(codecs)"),
        ("hipress.compll.front.parse", "import hipress", "(public)"),
        ("hipress.compll.front.parse", "from hipress import codec", "(public)"),
        ("hipress.codecs.topk", "if True:\n    import hipress.casync.engine.engine", "(casync)"),
        ("hipress.codecs.topk", "from ..compll import build", "absolute"),
        ("hipress.codecs.topk", "import_module('hipress.torch')", "(doors)"),
        ("hipress.casync.engine.engine", "from hipress import secopa", "(public)"),
        ("hipress.casync.engine.engine", "from hipress.secopa import cost", "(secopa)"),
        ("hipress.casync.graphs.graph", "from hipress.casync import executor", "(casync)"),
        ("hipress.secopa.cost", "from hipress.casync.engine.executors import Executor", "(casync)"),
        ("hipress.secopa.cost", "from hipress import codecs", "(codecs)"),
        ("hipress.secopa.cost", "import torch.distributed", "does without"),
        ("hipress.torch", "from hipress.train import job", "(train)"),
        ("hipress.torch.ddp", "from hipress.casync.engine.engine import Engine", "(casync)"),
        ("hipress.torch.ddp", "from hipress.probe import links", "(probe)"),
        ("hipress.session.auto", "from hipress.torch import ddp", "(doors)"),
        ("hipress.probe.links", "from hipress.session import groups", "(session)"),
        ("hipress.compll.front.parse", "from hipress.compll.passes import derive", "(passes)"),
        ("hipress.compll.passes.derive", "from hipress.compll.backends import cpu", "(backends)"),
        ("hipress.compll.build", "from hipress.compll.tools import show", "(tools)"),
        ("hipress.compll.ir", "from hipress.codecs import table", "(codecs)"),
        ("hipress.lab.net", "from hipress.cli import main", "(cli)"),
        ("hipress.attic.old", "", "not in the table"),
    ],
)
def test_the_import_check_can_fail(module, source, complaint):
    sources = {"hipress.codecs": "", "hipress.casync.engine.executors": "", module: source}
    found = violations(sources)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("hipress.settings", "from hipress.errors import UsageError"),
        ("hipress.codecs.topk", "from hipress.compll import build"),
        ("hipress.casync.engine.engine", "from hipress.casync.graphs import graph\nimport torch"),
        (
            "hipress.secopa.cost",
            "from hipress.casync.graphs import graph, strategies\nimport hipress.plan",
        ),
        ("hipress.torch", "from hipress.session import Session\nimport torch"),
        ("hipress.cli.main", "import hipress\nTABLE = 'hipress.cli.demo'"),
        ("hipress.compll.tools.emit", "TEXT = 'see hipress.torch for more'"),
    ],
)
def test_the_import_check_lets_the_allowed_pass(module, source):
    assert violations({module: source}) == []


def run_fresh(code: str) -> str:
    """Run code in a fresh interpreter and return the last line that it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def import_cycle(sources: dict[str, str]) -> list[str]:
    """Return the modules of a cycle of imports that happen when modules are loaded; empty if none.

    Imports inside functions and for type checkers only are not among them.
    """
    edges = {
        module: {
            target
            for node in ast.parse(source).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for _, target in imported_modules(node, set(sources))
            if target in sources
        }
        for module, source in sources.items()
    }
    done: set[str] = set()

    def search(path: list[str]) -> list[str]:
        for target in sorted(edges[path[-1]] - done):
            if target in path:
                return [*path[path.index(target) :], target]
            if found := search([*path, target]):
                return found
        done.add(path[-1])
        return []

    return next(filter(None, (search([module]) for module in sorted(sources))), [])


def test_imports_have_no_cycle():
    """Catches: a module that can only be imported after another one."""
    assert import_cycle(package_sources()) == []


def test_the_check_of_cycles_can_fail():
    sources = {
        "hipress.a": "from hipress.b import x",
        "hipress.b": "from hipress import c",
        "hipress.c": "import hipress.a",
        "hipress.d": "def f():\n    import hipress.d",
    }
    assert import_cycle(sources) == ["hipress.a", "hipress.b", "hipress.c", "hipress.a"]


def lazy_packages_loaded_by(statement: str) -> set[str]:
    """Return which of the packages that should wait a statement loads."""
    return set(run_fresh(f"{statement}\nimport sys\nprint(*sys.modules)").split()) & LAZY


def seconds_after_torch(statement: str) -> float:
    """Return how long a statement takes in a fresh process once torch is imported."""
    code = (
        "import torch, time\n"
        "start = time.perf_counter()\n"
        f"{statement}\n"
        "print(time.perf_counter() - start)"
    )
    return float(run_fresh(code))


def test_import_hipress_loads_nothing_that_can_wait():
    assert lazy_packages_loaded_by("import hipress") == set()


def test_the_check_of_loaded_packages_can_fail():
    assert lazy_packages_loaded_by("import hipress, lark, rich.text") == {"lark", "rich"}


@pytest.mark.alone
def test_import_hipress_is_quick():
    # A slow import is slow every time; a machine that is busy for a moment is not.
    assert any(seconds_after_torch("import hipress") < MAX_IMPORT_S for _ in range(3))


@full
@pytest.mark.alone
def test_the_check_of_import_time_can_fail():
    slow = f"import hipress; time.sleep({MAX_IMPORT_S})"
    assert seconds_after_torch(slow) >= MAX_IMPORT_S


def undocumented(namespace: object, names: list[str]) -> list[str]:
    """Return the names whose value has no docstring; plain texts such as a version need none."""
    values = {name: getattr(namespace, name) for name in names}
    return [
        name
        for name, value in values.items()
        if not isinstance(value, str) and not inspect.getdoc(value)
    ]


def test_every_public_name_has_a_docstring():
    assert undocumented(hipress, hipress.__all__) == []


def test_the_check_of_docstrings_can_fail():
    class Planted:
        documented = staticmethod(len)

        def bare():  # no docstring, on purpose
            return None

    assert undocumented(Planted, ["documented", "bare"]) == ["bare"]
