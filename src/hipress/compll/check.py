"""The checked meaning of a function: names, types, widths and sizes, before any code is made.

A function is *played* once with symbolic arguments: each expression becomes a value of `ir`, each
array one of `arrays`. What does not fit is a `ProgramError` at the place where it is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from hipress.compll import ast, operators
from hipress.compll.arrays import (
    BOOL,
    FLOAT,
    INT,
    ArrayValue,
    Computed,
    Draft,
    ElemType,
    InBlocks,
    Kept,
    PerBlock,
    Sliced,
    Stored,
    convert,
)
from hipress.compll.ir import Array, Expr, Graph, Require
from hipress.compll.parse import fail

WIDTHS = (1, 2, 4, 8, 16, 32)
MAX_DEPTH = 100
MAX_WORK = 100_000
"""Expressions played for one function: the largest of our programs needs under 500."""
ParamValue = int | float


@dataclass(frozen=True, slots=True)
class Scalar:
    """A number and the type it was declared with."""

    value: Expr
    elem: ElemType


@dataclass(frozen=True, slots=True)
class Func:
    """A lambda and the names it captures."""

    code: ast.Lambda
    env: Env


@dataclass(frozen=True, slots=True)
class Struct:
    """A param block passed as an argument."""

    fields: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Unset:
    """Declared, without a value yet."""

    elem: ElemType
    array: bool
    length: Expr | None


Binding = Scalar | ArrayValue | Func | Struct | Unset


@dataclass
class Env:
    """Names in scope; inner scopes see outer ones."""

    names: dict[str, Binding] = field(default_factory=dict)
    outer: Env | None = None
    block: int | None = None
    """The block size, inside a `per` scope."""

    def home(self, name: str) -> Env | None:
        """The scope that defines `name`."""
        env: Env | None = self
        while env is not None and name not in env.names:
            env = env.outer
        return env

    def visible(self) -> list[str]:
        env: Env | None = self
        names: set[str] = set()
        while env is not None:
            names |= env.names.keys()
            env = env.outer
        return sorted(names)


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter of a program, as its signature or a param block declares it."""

    name: str
    elem: ElemType
    default: ParamValue | None

    @property
    def runtime(self) -> bool:
        """Floats are passed at run time; integers are known when kernels are made."""
        return self.elem.kind == "float"


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of a function, by role."""

    gradient: ast.Arg
    payload: ast.Arg
    states: tuple[ast.Arg, ...]
    params: tuple[Param, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a payload, in the order of `concat`."""

    elem: ElemType
    value: Expr | ArrayValue
    pos: ast.Pos


@dataclass(frozen=True, slots=True)
class Played:
    """What a function did: the payload it made, or the gradient; and its states."""

    parts: tuple[Part, ...]
    gradient: ArrayValue | None
    states: tuple[ArrayValue, ...]


def signature(source: ast.Source, function: ast.Function) -> Signature:
    """Sorts the arguments of an encode or decode function by role."""
    check = _Player(source, Draft(Graph()), {})
    arrays = [a for a in function.args if a.type.array]
    states = tuple(a for a in arrays if a.inout)
    gradients = [a for a in arrays if not a.inout and a.type.base == "float"]
    payloads = [a for a in arrays if not a.inout and a.type.base == "uint8"]
    for a in arrays:
        if a.type.base not in ("float", "uint8") or (a.inout and a.type.base != "float"):
            check.fail(
                a,
                f"argument {a.name!r}: arrays are float* (gradient), uint8* (payload) or "
                "inout float* (state)",
            )
    if len(gradients) != 1 or len(payloads) != 1:
        check.fail(
            function,
            f"{function.name} takes {len(gradients)} float* and {len(payloads)} uint8* arguments; "
            "exactly one of each is needed: the gradient and the payload",
        )
    if states and function.name.endswith("Decode"):
        check.fail(states[0], "a decode function keeps no state; remove the inout argument")
    params: list[Param] = []
    blocks = {b.name: b for b in source.params}
    for a in function.args:
        if a.type.array:
            continue
        if a.type.base in blocks:
            params.extend(_fields(check, blocks[a.type.base]))
        elif a.type.base[0].isupper() or a.type.base not in _SCALARS:
            known = ", ".join(sorted(blocks)) or "none"
            check.fail(a, f"{a.type.base!r} is not a type; param blocks in this file: {known}")
        else:
            params.append(Param(a.name, check.elem(a.type, Env()), None))
    names = [p.name for p in params]
    for name in names:
        if names.count(name) > 1:
            check.fail(function, f"two parameters are called {name!r}; rename one")
    return Signature(gradients[0], payloads[0], states, tuple(params))


_SCALARS = ("float", "int", "uint", "uint1", "uint2", "uint4", "uint8", "uint16", "uint32")


def _fields(check: _Player, block: ast.ParamBlock) -> list[Param]:
    params = []
    for f in block.fields:
        elem = check.elem(f.type, Env())
        default: ParamValue | None = None
        if f.value is not None:
            value = check.scalar(f.value, Env())
            if value.op != "const":
                check.fail(f.value, "the default of a parameter must be a literal")
            default = float(value.attr) if elem.kind == "float" else int(value.attr)
        params.append(Param(f.name, elem, default))
    return params


def play(
    source: ast.Source,
    function: ast.Function,
    draft: Draft,
    *,
    params: Mapping[str, ParamValue],
    gradient: ArrayValue | None = None,
    states: Sequence[ArrayValue] = (),
    payload: Sequence[Part] | None = None,
) -> Played:
    """Plays `function` into `draft`.

    Args:
        source: The file it stands in, for messages and param blocks.
        function: An encode or a decode function.
        draft: Where barriers and requirements are collected.
        params: Value of every integer parameter (float ones stay symbolic).
        gradient: For encode: what it reads.
        states: For encode: its `inout` arrays.
        payload: For decode: what `extract` gives; None while only encode is known.
    """
    player = _Player(source, draft, dict(params))
    roles = signature(source, function)
    env = player.arguments(function, roles)
    if gradient is not None:
        env.names[roles.gradient.name] = gradient
        env.names[roles.payload.name] = Unset(ElemType("uint", 8), True, None)
        for arg, state in zip(roles.states, states, strict=True):
            env.names[arg.name] = state
    else:
        player.payload_name, player.payload = roles.payload.name, payload
        env.names[roles.gradient.name] = Unset(FLOAT, True, draft.graph.n)
    player.statements(function.body, env)
    if gradient is None:
        made = env.names[roles.gradient.name]
        if isinstance(made, Unset):
            player.fail(function, f"{function.name} never assigns {roles.gradient.name!r}")
        assert not isinstance(made, Scalar | Func | Struct)
        return Played((), made, ())
    if player.parts is None:
        player.fail(function, f"{function.name} never assigns {roles.payload.name!r} = concat(...)")
    finals = tuple(env.names[a.name] for a in roles.states)
    return Played(player.parts, None, finals)  # type: ignore[arg-type]


class _Player:
    """Walks statements and expressions; one per function played."""

    def __init__(self, source: ast.Source, draft: Draft, params: dict[str, ParamValue]) -> None:
        self.source = source
        self.draft = draft
        self.graph = draft.graph
        self.params = params
        self.parts: tuple[Part, ...] | None = None
        self.payload: Sequence[Part] | None = None
        self.payload_name: str | None = None
        self.position: Expr | None = None
        """Index that `random` draws for: set while a lambda runs over an array."""
        self.depth = 0
        self.work = 0
        self._sites: dict[ast.Pos, int] = {}

    def fail(self, node: ast.Node, message: str) -> NoReturn:
        fail(self.source.file, self.source.text, node.pos, message)

    def site(self, pos: ast.Pos) -> int:
        """Each `random` in the text draws its own numbers."""
        return self._sites.setdefault(pos, len(self._sites))

    # Types.

    def elem(self, type_: ast.TypeName, env: Env) -> ElemType:
        """The element type that `type_` names."""
        if type_.width is not None and type_.base != "uint":
            self.fail(type_, f"{type_.base!r} takes no width; write uint<...>")
        if type_.base == "uint":
            if type_.width is None:
                return ElemType("uint", 32)
            width = self.scalar(type_.width, env)
            if width.op != "const" or width.type != "int":
                self.fail(type_.width, "a width is made of integer parameters and literals")
            if width.attr not in WIDTHS:
                choices = ", ".join(map(str, WIDTHS))
                self.fail(type_.width, f"a uint of {width.attr} bits; allowed: {choices}")
            return ElemType("uint", width.attr)
        if type_.base.startswith("uint"):
            return ElemType("uint", int(type_.base[4:]))
        if type_.base in ("float", "int", "float16", "bfloat16"):
            return ElemType(type_.base)
        self.fail(type_, f"{type_.base!r} is no type of a value; allowed: float, int, uint<...>")

    # Arguments.

    def arguments(self, function: ast.Function, roles: Signature) -> Env:
        """The parameters by name; arrays are bound by the caller."""
        if function.returns.base != "void" or function.returns.array:
            self.fail(function.returns, f"{function.name} must return void")
        env = Env()
        blocks = {b.name: b for b in self.source.params}
        values = {p.name: self._param(function, p) for p in roles.params}
        for arg in function.args:
            if arg.name in env.names:
                self.fail(arg, f"two arguments are called {arg.name!r}")
            if arg.type.base in blocks:
                names = [f.name for f in blocks[arg.type.base].fields]
                env.names[arg.name] = Struct({name: values[name] for name in names})
            elif not arg.type.array:
                env.names[arg.name] = values[arg.name]
            else:
                env.names[arg.name] = Unset(FLOAT, True, None)
        return env

    def _param(self, function: ast.Function, param: Param) -> Scalar:
        if param.runtime:
            return Scalar(self.graph.param(param.name), param.elem)
        value = self.params.get(param.name, param.default)
        if value is None:
            self.fail(function, f"parameter {param.name!r} has no value and no default")
        return Scalar(self.graph.const(int(value)), param.elem)

    # Statements of a function.

    def statements(self, body: Sequence[ast.Statement], env: Env) -> None:
        for statement in body:
            self._statement(statement, env)

    def _statement(self, s: ast.Statement, env: Env) -> None:
        if isinstance(s, ast.Declare):
            self.declare(s, env)
        elif isinstance(s, ast.Assign):
            self._assign(s, env)
        elif isinstance(s, ast.If):
            self._if(s, env)
        elif isinstance(s, ast.Per):
            self._per(s, env)
        elif isinstance(s, ast.Do):
            call = s.value
            if not (isinstance(call, ast.Call) and call.name == "extract"):
                self.fail(s, "a value nobody uses; only extract(...) stands on its own")
            self._extract(call, env)
        elif s.value is not None:
            self.fail(s, "a function returns nothing; assign its output array instead")
        else:
            self.fail(s, "return is allowed in lambdas only; use if/else")

    def declare(self, s: ast.Declare, env: Env) -> None:
        """Binds a new name."""
        if s.name in env.names:
            self.fail(s, f"{s.name!r} is declared twice")
        if s.type.base == "lambda_func":
            assert isinstance(s.value, ast.Lambda)
            env.names[s.name] = Func(s.value, env)
            return
        if isinstance(s.value, ast.Lambda):
            self.fail(s, "a lambda is declared with lambda_func")
        elem = self.elem(s.type, env)
        if s.value is None:
            length = None if s.size is None else self.size(s.size, env)
            env.names[s.name] = Unset(elem, s.type.array or s.size is not None, length)
        else:
            env.names[s.name] = self._typed(s.value, elem, s.type.array, s.name, env)

    def _assign(self, s: ast.Assign, env: Env) -> None:
        home = env.home(s.name)
        if home is None:
            self._unknown(s, s.name, env)
        old = home.names[s.name]
        if isinstance(s.value, ast.Call) and s.value.name == "concat":
            if not (isinstance(old, Unset) and old.array and old.length is None):
                self.fail(s, f"concat(...) is assigned to the payload, once; {s.name!r} is not it")
            if self._scope(env) is not None:
                self.fail(s, "concat(...) belongs after the per scope, not inside it")
            self.parts = tuple(self._part(a, env) for a in s.value.args)
            home.names[s.name] = Computed(self.graph.const(0), BOOL, lambda ix: ix)
            return
        scope = self._scope(env)
        if isinstance(old, Func | Struct):
            self.fail(s, f"{s.name!r} is not a variable")
        if isinstance(old, Scalar):
            if scope is not None and scope is not home and not self._inside(home, scope):
                self.fail(
                    s,
                    f"{s.name!r} has one value for the whole gradient; "
                    "declare a new name inside the per scope",
                )
            home.names[s.name] = self._typed(s.value, old.elem, False, s.name, env)
            return
        array = old.array if isinstance(old, Unset) else True
        made = self._typed(s.value, old.elem, array, s.name, env)
        want = old.length
        if scope is not None and home is not scope and not self._inside(home, scope):
            made = self._leave(s.name, made, s, scope)
        if want is not None and not isinstance(made, Scalar) and made.length is not want:
            self.fail(
                s,
                f"{s.name!r} has {self.show(want)} elements, the value assigned to it has "
                f"{self.show(made.length)}",
            )
        home.names[s.name] = made

    def _if(self, s: ast.If, env: Env) -> None:
        cond = self.graph.to_bool(self.scalar(s.cond, env))
        if cond.op == "const":
            self.statements(s.yes if cond.attr else s.no, Env(outer=env))
            return
        before = self._snapshot(env)
        self.statements(s.yes, Env(outer=env))
        yes = self._snapshot(env)
        self._restore(env, before)
        self.statements(s.no, Env(outer=env))
        self._merge(s, cond, yes, env)

    def _snapshot(self, env: Env | None) -> list[dict[str, Binding]]:
        frames = []
        while env is not None:
            frames.append(dict(env.names))
            env = env.outer
        return frames

    def _restore(self, env: Env | None, frames: list[dict[str, Binding]]) -> None:
        for frame in frames:
            assert env is not None
            env.names = dict(frame)
            env = env.outer

    def _merge(
        self, node: ast.Node, cond: Expr, yes: list[dict[str, Binding]], env: Env | None
    ) -> None:
        for frame in yes:
            assert env is not None
            for name, a in frame.items():
                b = env.names[name]
                if a is b or a == b:
                    continue
                if not (isinstance(a, Scalar) and isinstance(b, Scalar)):
                    self.fail(
                        node,
                        f"{name!r} would be an array that depends on the gradient; "
                        "choose between arrays by parameters only, or inside a lambda",
                    )
                env.names[name] = Scalar(self.graph.select(cond, a.value, b.value), a.elem)
            env = env.outer

    # The per-block scope.

    def _per(self, s: ast.Per, env: Env) -> None:
        if self._scope(env) is not None:
            self.fail(s, "a per scope cannot stand inside another")
        size = self.scalar(s.size, env)
        if size.op != "const" or size.type != "int":
            self.fail(s.size, "a block size is made of integer parameters and literals")
        if size.attr < 8 or size.attr % 8:
            self.fail(
                s.size,
                f"a block of {size.attr} elements; it must be a multiple of 8, so "
                "that packed blocks start on a whole byte",
            )
        scope = Env(outer=env, block=size.attr)
        self.statements(s.body, scope)
        for name, made in scope.names.items():
            if isinstance(made, Scalar | Computed | Sliced):
                old = env.names.get(name)
                if old is not None and not isinstance(old, PerBlock | InBlocks):
                    self.fail(s, f"{name!r} is declared twice")
                env.names[name] = self._leave(name, made, s, scope)

    def _leave(self, name: str, made: Binding, node: ast.Node, scope: Env) -> ArrayValue:
        """What a name of a per scope is outside: all blocks side by side."""
        size = scope.block
        assert size is not None
        if isinstance(made, Scalar):
            return PerBlock(self.draft, made.value, size, made.elem)
        assert not isinstance(made, Func | Struct | Unset)
        if made.length is not self.graph.block("blen", size):
            self.fail(
                node,
                f"{name!r} leaves the per scope with {self.show(made.length)} elements "
                "in each block; only arrays as long as the block can",
            )
        return InBlocks(self.draft, made.at(self.graph.block("lidx", size)), made.elem)

    @staticmethod
    def _scope(env: Env | None) -> Env | None:
        """The per scope around `env`."""
        while env is not None and env.block is None:
            env = env.outer
        return env

    @staticmethod
    def _inside(env: Env | None, scope: Env) -> bool:
        while env is not None and env is not scope:
            env = env.outer
        return env is scope

    # Payloads.

    def _part(self, node: ast.Expr, env: Env) -> Part:
        value = self.value(node, env)
        if isinstance(value, Scalar):
            return Part(value.elem, convert(self.graph, value.value, value.elem), node.pos)
        if isinstance(value, Func | Struct | Unset):
            self.fail(node, "concat takes numbers and arrays that have a value")
        if not isinstance(value, Kept) and not value.length.host:
            self.fail(
                node,
                "the length of this array depends on the gradient; send what a filter "
                "let through, or an array whose length sizes and parameters tell",
            )
        return Part(value.elem, value, node.pos)

    def _extract(self, call: ast.Call, env: Env) -> None:
        if self._scope(env) is not None:
            self.fail(call, "extract(...) belongs before the per scope, not inside it")
        names = []
        for arg in call.args:
            if not isinstance(arg, ast.Name):
                self.fail(arg, "extract takes names: the payload, then what to read from it")
            names.append(arg)
        if not names or names[0].id != self.payload_name:
            self.fail(call, f"extract reads the payload {self.payload_name!r}: put it first")
        targets = names[1:]
        parts = self._given(call, targets, env) if self.payload is None else self.payload
        if len(parts) != len(targets):
            self.fail(call, f"extract reads {len(targets)} parts; encode wrote {len(parts)}")
        for target, part in zip(targets, parts, strict=True):
            self._bind(target, part, env)

    def _given(self, call: ast.Call, targets: list[ast.Name], env: Env) -> list[Part]:
        """Parts as declared, where no encode function is at hand to tell them."""
        parts = []
        for i, target in enumerate(targets):
            home = env.home(target.id)
            slot = home.names[target.id] if home is not None else None
            if isinstance(slot, Unset) and slot.array:
                length = slot.length
                if length is None:
                    self.fail(
                        target,
                        f"the length of {target.id!r} is not known without the encode"
                        f" function; write {slot.elem} {target.id}[size];",
                    )
                array = Array(f"section{i}", slot.elem.storage, length, target.id)
                parts.append(Part(slot.elem, Stored(self.draft, array, slot.elem), target.pos))
            elif isinstance(slot, Unset | Scalar):
                array = Array(f"section{i}", slot.elem.storage, self.graph.const(1), target.id)
                value = self.graph.load(array, self.graph.const(0))
                parts.append(Part(slot.elem, value, target.pos))
            else:
                self._unknown(target, target.id, env)
        return parts

    def _bind(self, target: ast.Name, part: Part, env: Env) -> None:
        home = env.home(target.id)
        if home is None:
            self._unknown(target, target.id, env)
        slot = home.names[target.id]
        wrote = f"{part.elem}{'' if isinstance(part.value, Expr) else '*'}"
        if isinstance(slot, Func | Struct):
            self.fail(target, f"{target.id!r} cannot be read from a payload")
        reads = f"{slot.elem}{'' if isinstance(slot, Scalar) or not _is_array(slot) else '*'}"
        if reads != wrote:
            self.fail(target, f"{target.id!r} reads {reads}; encode wrote {wrote} here")
        if isinstance(slot, Scalar):
            # A parameter is not overwritten: what was sent must equal it.
            assert isinstance(part.value, Expr)
            self.draft.requires.append(
                Require(
                    self.graph.binary("eq", part.value, slot.value),
                    f"the payload was made with another {target.id!r}",
                )
            )
            return
        if isinstance(part.value, Expr):
            home.names[target.id] = Scalar(part.value, part.elem)
            return
        value = part.value
        want = slot.length
        limit = value.filter.capacity if isinstance(value, Kept) else value.length
        if want is not None and want is not limit:
            self.fail(
                target,
                f"{target.id!r} has {self.show(want)} elements; encode wrote {self.show(limit)}",
            )
        home.names[target.id] = value

    # Expressions.

    def value(self, node: ast.Expr, env: Env) -> Binding:
        """Any value: a number, an array or a function."""
        self.depth += 1
        self.work += 1
        if self.depth > MAX_DEPTH:
            self.fail(node, "expressions or lambdas are nested too deeply; name the inner ones")
        if self.work > MAX_WORK:
            self.fail(node, "the program is too large: its lambdas call each other too often")
        try:
            return self._value(node, env)
        finally:
            self.depth -= 1

    def _value(self, node: ast.Expr, env: Env) -> Binding:
        if isinstance(node, ast.Number):
            return self.number(self.graph.const(node.value))
        if isinstance(node, ast.Name):
            return self._name(node, env)
        if isinstance(node, ast.Lambda):
            return Func(node, env)
        if isinstance(node, ast.Call):
            return self._call(node, env)
        if isinstance(node, ast.Member):
            return self._member(node, env)
        if isinstance(node, ast.Index):
            array = self.array(node.value, env)
            index = self.scalar(node.index, env)
            if index.type != "int":
                self.fail(node.index, "an index is an int; this is a float")
            return Scalar(array.at(index), array.elem)
        if isinstance(node, ast.Ternary):
            cond = self.graph.to_bool(self.scalar(node.cond, env))
            if cond.op == "const":
                return self.value(node.yes if cond.attr else node.no, env)
            yes, no = self.same(self.scalar(node.yes, env), self.scalar(node.no, env))
            return self.number(self.graph.select(cond, yes, no))
        if isinstance(node, ast.Unary):
            return self.number(self._unary(node, self.scalar(node.value, env)))
        return self.number(self._binary(node, env))

    def number(self, value: Expr) -> Scalar:
        """A scalar with the type that its value has by itself."""
        elem = {"float": FLOAT, "int": INT, "bool": BOOL}[value.type]
        return Scalar(value, elem)

    def _name(self, node: ast.Name, env: Env) -> Binding:
        home = env.home(node.id)
        if home is None:
            self._unknown(node, node.id, env)
        found = home.names[node.id]
        scope = self._scope(env)
        if scope is None or self._inside(home, scope):
            return found
        if isinstance(found, Scalar | Func | Struct | Unset):
            return found
        assert scope.block is not None
        if found.length is self.graph.n:
            return Sliced(self.graph, found, scope.block)
        if found.length is self.draft.blocks(scope.block):
            return Scalar(found.at(self.graph.block("bnum", scope.block)), found.elem)
        return found

    def _member(self, node: ast.Member, env: Env) -> Binding:
        value = self.value(node.value, env)
        if isinstance(value, Struct):
            if node.field not in value.fields:
                known = ", ".join(value.fields)
                self.fail(node, f"no parameter {node.field!r}; the block has: {known}")
            return value.fields[node.field]
        if isinstance(value, Unset) and value.array and value.length is not None:
            length = value.length
            scope = self._scope(env)
            if scope is not None and length is self.graph.n:
                assert scope.block is not None
                length = self.graph.block("blen", scope.block)
        elif isinstance(value, Scalar | Func | Unset):
            self.fail(node, f"only arrays have members, and only .size; this has no {node.field!r}")
        else:
            length = value.length
        if node.field != "size":
            self.fail(node, f"an array has no {node.field!r}, only .size")
        return Scalar(length, INT)

    def _unary(self, node: ast.Unary, value: Expr) -> Expr:
        if node.op == "!":
            return self.graph.unary("not", self.graph.to_bool(value))
        if node.op == "~":
            return self.graph.unary("inv", self._whole(node.value, value))
        if value.type == "bool":
            value = self.graph.to_int(value)
        return value if node.op == "+" else self.graph.unary("neg", value)

    def _whole(self, node: ast.Node, value: Expr) -> Expr:
        if value.type == "float":
            self.fail(node, "an int is needed here; this is a float")
        return self.graph.to_int(value)

    def _binary(self, node: ast.Binary, env: Env) -> Expr:
        g = self.graph
        a, b = self.scalar(node.left, env), self.scalar(node.right, env)
        if node.op in ("&&", "||"):
            return g.logic("land" if node.op == "&&" else "lor", g.to_bool(a), g.to_bool(b))
        if node.op in ("%", "<<", ">>", "&", "|", "^"):
            op = {"%": "imod", "<<": "shl", ">>": "shr", "&": "and", "|": "or", "^": "xor"}[node.op]
            return g.binary(op, self._whole(node.left, a), self._whole(node.right, b))
        a, b = self.same(a, b)
        if node.op in ("<", "<=", "==", "!="):
            return g.binary({"<": "lt", "<=": "le", "==": "eq", "!=": "ne"}[node.op], a, b)
        if node.op in (">", ">="):
            return g.binary("lt" if node.op == ">" else "le", b, a)
        if node.op == "/":
            return g.binary("div" if a.type == "float" else "idiv", a, b)
        return g.binary({"+": "add", "-": "sub", "*": "mul"}[node.op], a, b)

    def same(self, a: Expr, b: Expr) -> tuple[Expr, Expr]:
        """Two numbers in their common type: float if one is, else int."""
        g = self.graph
        if "float" in (a.type, b.type):
            return g.to_float(a), g.to_float(b)
        return g.to_int(a), g.to_int(b)

    def scalar(self, node: ast.Expr, env: Env) -> Expr:
        """A number, or an error at `node`."""
        value = self.value(node, env)
        if isinstance(value, Scalar):
            return value.value
        what = self._what(value)
        self.fail(node, f"a number is needed here, this is {what}; index it or reduce it")

    def array(self, node: ast.Expr, env: Env) -> ArrayValue:
        """An array, or an error at `node`."""
        value = self.value(node, env)
        if isinstance(value, Scalar | Func | Struct | Unset):
            self.fail(node, f"an array is needed here, this is {self._what(value)}")
        return value

    @staticmethod
    def _what(value: Binding) -> str:
        if isinstance(value, Func):
            return "a lambda"
        if isinstance(value, Struct):
            return "a param block"
        if isinstance(value, Unset):
            return "a name without a value yet"
        return str(value.elem) if isinstance(value, Scalar) else f"an array ({value.elem}*)"

    def size(self, node: ast.Expr, env: Env) -> Expr:
        """The length of an array: known from sizes and parameters alone."""
        value = self.scalar(node, env)
        if value.type != "int":
            self.fail(node, "a size is an int; this is a float (use floor and an int variable)")
        if not (value.host or value.op in ("count", "blen")):
            self.fail(node, "a size is made of sizes and parameters; this depends on the gradient")
        return value

    def show(self, length: Expr) -> str:
        """A length in words a reader knows."""
        if length.op == "n":
            return "as many as the gradient"
        if length.op == "const":
            return str(length.attr)
        if length.op == "count":
            return "as many as a filter let through"
        return "another number of" if length.op != "blen" else "as many as the block"

    def _typed(
        self, node: ast.Expr, elem: ElemType, array: bool, name: str, env: Env
    ) -> Scalar | ArrayValue:
        value = self.value(node, env)
        if isinstance(value, Scalar):
            if array:
                self.fail(node, f"{name!r} is an array ({elem}*); this is a number")
            return Scalar(convert(self.graph, value.value, elem), elem)
        if isinstance(value, Func | Struct | Unset):
            self.fail(node, f"{name!r} cannot hold {self._what(value)}")
        if not array:
            self.fail(node, f"{name!r} is a number; this is an array ({value.elem}*)")
        return operators.retyped(self, value, elem)

    # Calls.

    def _call(self, node: ast.Call, env: Env) -> Binding:
        home = env.home(node.name)
        if home is not None:
            func = home.names[node.name]
            if not isinstance(func, Func):
                self.fail(node, f"{node.name!r} is {self._what(func)} here, not a function")
            return self.apply(node, func, [self.scalar(a, env) for a in node.args], None)
        operator = operators.OPERATORS.get(node.name)
        if operator is None:
            known = ", ".join(sorted(operators.OPERATORS))
            self.fail(node, f"{node.name!r} is not a function; operators: {known}")
        return operator(self, node, env)

    def apply(
        self, node: ast.Node, func: Func, args: Sequence[Expr], position: Expr | None
    ) -> Scalar:
        """Calls a lambda; `position` is the index it runs at, if it runs over an array."""
        code = func.code
        if len(args) != len(code.args):
            self.fail(node, f"the lambda takes {len(code.args)} arguments; {len(args)} were given")
        env = Env(outer=func.env)
        for arg, value in zip(code.args, args, strict=True):
            if arg.type.array or arg.inout:
                self.fail(arg, "a lambda takes numbers; capture arrays by name instead")
            elem = self.elem(arg.type, func.env)
            env.names[arg.name] = Scalar(convert(self.graph, value, elem), elem)
        saved = self.position
        self.position = position if position is not None else saved
        try:
            done, result = self._outcome(code.body, env, env)
        finally:
            self.position = saved
        if done is not self.graph.const(True):
            self.fail(code, "the lambda may end without a return")
        returns = self.elem(code.returns, func.env)
        if code.returns.array:
            self.fail(code.returns, "a lambda returns a number")
        return Scalar(convert(self.graph, result, returns), returns)

    def _outcome(self, body: Sequence[ast.Statement], env: Env, top: Env) -> tuple[Expr, Expr]:
        """Whether a lambda's statements return, and what; both may depend on the element.

        Every statement is played once, also after an `if` that returns: work grows with the
        length of the text, not with the number of ways through it.
        """
        g = self.graph
        done, result = g.const(False), g.const(0)
        for s in body:
            if isinstance(s, ast.Return):
                if s.value is None:
                    self.fail(s, "a lambda returns a value")
                returns, value = g.const(True), self.scalar(s.value, env)
            elif isinstance(s, ast.If):
                returns, value = self._branch(s, env, top)
            else:
                self._inner_statement(s, env, top)
                continue
            if done is g.const(False):
                result = value
            else:
                result = g.select(done, *self.same(result, value))
            done = g.logic("lor", done, returns)
            if done is g.const(True):
                break
        return done, result

    def _branch(self, s: ast.If, env: Env, top: Env) -> tuple[Expr, Expr]:
        g = self.graph
        cond = g.to_bool(self.scalar(s.cond, env))
        before = self._snapshot(env)
        yes_done, yes = self._outcome(s.yes, Env(outer=env), top)
        after = self._snapshot(env)
        self._restore(env, before)
        no_done, no = self._outcome(s.no, Env(outer=env), top)
        self._merge(s, cond, after, env)
        if no_done is g.const(False):
            return g.logic("land", cond, yes_done), yes
        if yes_done is g.const(False):
            return g.logic("land", g.unary("not", cond), no_done), no
        return g.select(cond, yes_done, no_done), g.select(cond, *self.same(yes, no))

    def _inner_statement(self, s: ast.Statement, env: Env, top: Env) -> None:
        if isinstance(s, ast.Declare):
            if s.type.array or s.size is not None or s.type.base == "lambda_func":
                self.fail(s, "inside a lambda only numbers can be declared")
            self.declare(s, env)
        elif isinstance(s, ast.Assign):
            home = env.home(s.name)
            if home is not None and not self._inside(home, top):
                self.fail(s, f"a lambda can only assign its own names; {s.name!r} is captured")
            self._assign(s, env)
        else:
            self.fail(s, "inside a lambda: declarations, assignments, if and return")

    def _unknown(self, node: ast.Node, name: str, env: Env) -> NoReturn:
        names = ", ".join(env.visible()) or "none"
        self.fail(node, f"{name!r} is not defined; names in scope: {names}")


def _is_array(slot: Binding) -> bool:
    return slot.array if isinstance(slot, Unset) else not isinstance(slot, Scalar)
