"""The tree of a function in, its checked meaning out: payload, gradient and states as values.

A function is evaluated once with symbolic arguments: each expression becomes a value of `ir`, each
array one of `arrays`. Wrong names, types, widths and sizes are a `ProgramError` at the place where
they are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hipress.compll.front import ast
from hipress.compll.front.arrays import (
    ArrayValue,
    Computed,
    InBlocks,
    InRows,
    InUse,
    PerBlock,
    Stored,
)
from hipress.compll.front.draft import Draft
from hipress.compll.front.expressions import LEAVES, Expressions
from hipress.compll.front.graph import BOOL, FLOAT, INT, ElemType, TooDeep, convert
from hipress.compll.front.parse import fail
from hipress.compll.front.scope import Binding, Env, Func, Scalar, Struct, Unset
from hipress.compll.front.signature import Param, ParamValue, Signature, signature
from hipress.compll.ir import Array, Blocks, Expr, Require

MAX_BLOCK = 2**24
"""Most elements of a block; each thread holds arrays of a block."""
MAX_TURNS = 64
"""Most turns of a `repeat`: each is compiled."""


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a payload, in the order of `concat`."""

    elem: ElemType
    value: Expr | ArrayValue


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The result of a function: the payload or the gradient, and the states."""

    parts: tuple[Part, ...]
    gradient: ArrayValue | None
    states: tuple[tuple[Array, Scalar | ArrayValue], ...] = ()
    """Each state, and what it is after the step."""


def evaluate(
    source: ast.Source,
    function: ast.Function,
    draft: Draft,
    *,
    params: Mapping[str, ParamValue],
    gradient: ArrayValue | None = None,
    payload: Sequence[Part] | None = None,
) -> Evaluated:
    """Evaluates `function` with symbolic arguments; `draft` collects barriers and requirements.

    `params` gives every integer parameter a value (float ones stay symbolic). Encode reads
    `gradient`, decode `payload` (None while its encode function is not known).
    """
    checker = _Checker(source, draft, dict(params))
    roles = signature(source, function)
    env = checker.arguments(function, roles)
    if gradient is not None:
        env.names[roles.gradient.name] = gradient
        env.names[roles.payload.name] = Unset(ElemType("uint", 8), True, None)
        states = [checker.state(k, arg, env) for k, arg in enumerate(roles.states)]
    else:
        checker.payload_name, checker.payload = roles.payload.name, payload
        checker.decoding = True
        env.names[roles.gradient.name] = Unset(FLOAT, True, draft.graph.n)
    with limited(source, function):
        checker.statements(function.body, env)
    if gradient is None:
        made = env.names[roles.gradient.name]
        if isinstance(made, Unset):
            checker.fail(function, f"{function.name} never assigns {roles.gradient.name!r}")
        assert not isinstance(made, Scalar | Func | Struct)
        return Evaluated((), made)
    if checker.parts is None:
        checker.fail(
            function, f"{function.name} never assigns {roles.payload.name!r} = concat(...)"
        )
    finals = [(state, env.names[a.name]) for state, a in zip(states, roles.states, strict=True)]
    return Evaluated(checker.parts, None, tuple(finals))  # type: ignore[arg-type]


@contextmanager
def limited(source: ast.Source, function: ast.Function) -> Iterator[None]:
    """Points at `function` where a value made inside turns out too large."""
    try:
        yield
    except TooDeep as error:
        fail(source.file, source.text, function.pos, str(error))


class _Checker(Expressions):
    def __init__(self, source: ast.Source, draft: Draft, params: dict[str, ParamValue]) -> None:
        super().__init__(source, draft)
        self.params = params
        self.parts: tuple[Part, ...] | None = None
        self.payload: Sequence[Part] | None = None
        self.payload_name: str | None = None

    def arguments(self, function: ast.Function, roles: Signature) -> Env:
        """Returns the scope of the parameters; the caller binds the arrays."""
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
            elif arg.type.array or arg.inout:
                env.names[arg.name] = Unset(FLOAT, True, None)
            else:
                env.names[arg.name] = values[arg.name]
        return env

    def state(self, k: int, arg: ast.Arg, env: Env) -> Array:
        """Returns the memory of a state, and gives its name the value of the step before."""
        elem, length = self.elem(arg.type, env), self.graph.n
        if arg.size is not None:
            length = self.size(arg.size, env)
        elif not arg.type.array:
            length = self.graph.const(1)
        array = Array(f"state{k}", elem.storage, length, arg.name)
        env.names[arg.name] = Stored(self.draft, array, elem)
        if not (arg.type.array or arg.size is not None):
            env.names[arg.name] = Scalar(self.graph.load(array, self.graph.const(0)), elem)
        return array

    def _param(self, function: ast.Function, param: Param) -> Scalar:
        if param.runtime:
            return Scalar(self.graph.param(param.name), param.elem)
        value = self.params.get(param.name, param.default)
        if value is None:
            self.fail(function, f"parameter {param.name!r} has no value and no default")
        return Scalar(self.graph.const(int(value)), param.elem)

    def statements(self, body: Sequence[ast.Statement], env: Env) -> None:
        with self.nested(body):
            for statement in body:
                self.count_work(statement)
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
        elif isinstance(s, ast.Repeat):
            self._repeat(s, env)
        elif isinstance(s, ast.Do):
            call = s.value
            if not (isinstance(call, ast.Call) and call.name == "extract"):
                self.fail(s, "this value is not used; only extract(...) may stand on its own")
            self._extract(call, env)
        elif s.value is not None:
            self.fail(s, "a function returns nothing; assign its output array instead")
        else:
            self.fail(s, "return is allowed in lambdas only; use if/else")

    def _assign(self, s: ast.Assign, env: Env) -> None:
        home = env.home(s.name)
        if home is None:
            self.unknown(s, s.name, env)
        old = home.names[s.name]
        if isinstance(s.value, ast.Call) and s.value.name == "concat":
            if not (isinstance(old, Unset) and old.array and old.length is None):
                self.fail(s, f"concat(...) is assigned to the payload, once; {s.name!r} is not it")
            if env.per() is not None:
                self.fail(s, "concat(...) belongs after the per scope, not inside it")
            if not s.value.args:
                self.fail(s.value, "concat() sends nothing; give it a number or an array")
            self.parts = tuple(self._part(a, env) for a in s.value.args)
            home.names[s.name] = Computed(self.graph.const(0), BOOL, lambda ix: ix)
            return
        scope = env.per()
        if isinstance(old, Func | Struct):
            self.fail(s, f"{s.name!r} is not a variable")
        if isinstance(old, Scalar):
            if scope is not None and scope is not home and not home.within(scope):
                self.fail(
                    s,
                    f"{s.name!r} has one value for all blocks; declare a new name inside the per "
                    "scope",
                )
            home.names[s.name] = self.typed(s.value, old.elem, False, s.name, env)
            return
        array = old.array if isinstance(old, Unset) else True
        made = self.typed(s.value, old.elem, array, s.name, env)
        want = old.length
        if scope is not None and home is not scope and not home.within(scope):
            left = self._left(made, scope)
            if left is None:
                self.fail(s, f"{s.name!r} is declared outside the per scope: {LEAVES}")
            made = left
        if want is not None and not isinstance(made, Scalar) and made.length is not want:
            self.fail(
                s,
                f"{s.name!r} has {self.show(want)}, but the value assigned to it has "
                f"{self.show(made.length)}",
            )
        home.names[s.name] = made

    def _if(self, s: ast.If, env: Env) -> None:
        cond = self.graph.to_bool(self.scalar(s.cond, env))
        if cond.op == "const":
            self.statements(s.yes if cond.attr else s.no, Env(outer=env))
            return
        before = env.snapshot()
        self.statements(s.yes, Env(outer=env))
        yes = env.snapshot()
        env.restore(before)
        self.statements(s.no, Env(outer=env))
        self.merge(s, cond, yes, env)

    def _repeat(self, s: ast.Repeat, env: Env) -> None:
        count = self.scalar(s.count, env)
        if count.op != "const" or count.type != "int" or not 0 <= count.attr <= MAX_TURNS:
            self.fail(
                s.count,
                "the number of turns is made of integer parameters and literals, from 0 to "
                f"{MAX_TURNS}",
            )
        around = self.turns
        for turn in range(count.attr):
            self.count_work(s)
            self.turns = (*around, turn)
            number = Scalar(self.graph.const(turn), INT)
            self.statements(s.body, Env({s.name: number}, env))
        self.turns = around

    def _per(self, s: ast.Per, env: Env) -> None:
        if env.per() is not None:
            self.fail(s, "a per scope cannot stand inside another")
        size = self.scalar(s.size, env)
        if size.op != "const" or size.type != "int":
            self.fail(s.size, "a block size is made of integer parameters and literals")
        if size.attr < 8 or size.attr % 8:
            self.fail(
                s.size,
                f"a block has {size.attr} elements; that must be a positive multiple of 8, so "
                "that packed blocks start on a whole byte",
            )
        if size.attr > MAX_BLOCK:
            self.fail(
                s.size,
                f"a block has {size.attr} elements, of which arrays are held in memory at once; "
                f"at most {MAX_BLOCK} are allowed",
            )
        length = self._cut(s, env)
        block = Blocks(size.attr, self.draft.limits.get(length, length))
        scope = Env(outer=env, block=block, count=None if length.host else length)
        self.draft.scope = block
        self.statements(s.body, scope)
        for name, made in scope.names.items():
            left = self._left(made, scope)
            if left is None:
                env.ended.add(name)
                continue
            old = env.names.get(name)
            if old is not None and not isinstance(old, PerBlock | InBlocks | InRows | InUse):
                self.fail(s, f"{name!r} is declared twice")
            env.names[name] = left
        self.draft.scope = None

    def _cut(self, s: ast.Per, env: Env) -> Expr:
        """Returns the length of the array that a per scope cuts into blocks."""
        if s.over is None:
            return self.graph.n
        array = self.value(s.over, env)
        if isinstance(array, Scalar | Func | Struct):
            self.fail(s.over, f"per cuts an array into blocks; this is {self.what(array)}")
        if array.length is None:
            self.fail(s.over, "per cuts an array into blocks; this one has no length yet")
        return array.length

    def _left(self, made: Binding, scope: Env) -> ArrayValue | None:
        """Returns what a name of a per scope is outside of it: all blocks side by side.

        None for what is known inside the scope alone.
        """
        block = scope.block
        assert block is not None
        if isinstance(made, Scalar):
            return PerBlock(self.draft, made.value, block, made.elem)
        if isinstance(made, Func | Struct | Unset):
            return None
        g = self.graph
        if made.length is g.block("blen", block):
            return InBlocks(self.draft, made.at(g.block("lidx", block)), block, made.elem)
        most = self.draft.capacity(made)
        if most.op != "const" or most.attr <= 0:
            return None
        index = g.ridx(block, most.attr)
        value = made.at(index)
        if made.length is not most:  # places that are not used are zero
            in_use = g.binary("lt", index, made.length)
            value = g.select(in_use, value, convert(g, g.const(0), made.elem))
        rows = InRows(self.draft, value, block, made.elem, most.attr)
        if scope.count is not None and made.length is self.used(scope):
            return InUse(scope.count, made.elem, rows.at)  # rows without gaps between them
        return rows

    def _part(self, node: ast.Expr, env: Env) -> Part:
        value = self.value(node, env)
        if isinstance(value, Scalar):
            sent = self.graph.sent(convert(self.graph, value.value, value.elem))
            return Part(value.elem, sent)
        if isinstance(value, Func | Struct | Unset):
            self.fail(node, "concat takes numbers and arrays that have a value")
        return Part(value.elem, value)

    def _extract(self, call: ast.Call, env: Env) -> None:
        if env.per() is not None:
            self.fail(call, "extract(...) belongs before the per scope, not inside it")
        names = []
        for arg in call.args:
            if not isinstance(arg, ast.Name):
                self.fail(arg, "extract takes names: the payload, then what to read from it")
            names.append(arg)
        if not names or names[0].id != self.payload_name:
            self.fail(call, f"extract reads the payload {self.payload_name!r}: put it first")
        targets = names[1:]
        if not targets:
            self.fail(call, f"extract reads nothing; name what follows {self.payload_name!r}")
        parts = self._given(call, targets, env) if self.payload is None else self.payload
        if len(parts) != len(targets):
            self.fail(call, f"extract reads {len(targets)} parts; encode wrote {len(parts)}")
        for target, part in zip(targets, parts, strict=True):
            self._bind(target, part, env)

    def _given(self, call: ast.Call, targets: list[ast.Name], env: Env) -> list[Part]:
        """Returns the parts as declared, for a decode function without its encode function."""
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
                parts.append(Part(slot.elem, Stored(self.draft, array, slot.elem)))
            elif isinstance(slot, Unset | Scalar):
                array = Array(f"section{i}", slot.elem.storage, self.graph.const(1), target.id)
                value = self.graph.load(array, self.graph.const(0))
                parts.append(Part(slot.elem, value))
            else:
                self.unknown(target, target.id, env)
        return parts

    def _bind(self, target: ast.Name, part: Part, env: Env) -> None:
        home = env.home(target.id)
        if home is None:
            self.unknown(target, target.id, env)
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
        limit = self.draft.capacity(value)
        if want is not None and want is not limit:
            self.fail(
                target, f"{target.id!r} has {self.show(want)}; encode wrote {self.show(limit)}"
            )
        home.names[target.id] = value


def _is_array(slot: Binding) -> bool:
    return slot.array if isinstance(slot, Unset) else not isinstance(slot, Scalar)
